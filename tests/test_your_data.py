"""The configs for a user's pictures: a copy with five lines edited trains, and its file works."""

import json
import random
import re
import runpy
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path

import cv2
import pytest
import torch
from helpers import ROOT, newer, run_tool
from mmengine.config import Config
from mmengine.registry import VISUALIZERS
from mmengine.runner import Runner

from mmcare.models import CARE
from mmcare.sample_data import IMAGENET_CLASSES, make_ade20k, make_coco, make_imagenet
from mmcare.weights.reading import load_from_mmcare

pytest.importorskip('mmdet')
PAGE = (ROOT / 'docs/train_on_your_data.md').read_text()
KINDS = ['airplane', 'sports ball', 'kite']
TASKS = dict(
    detector=(KINDS, {'coco/bbox_mAP'}),
    instances=(KINDS, {'coco/bbox_mAP', 'coco/segm_mAP'}),
    segmentor=(['background', 'object'], {'mIoU'}),
    classifier=(sorted(IMAGENET_CLASSES), {'accuracy/top1', 'single-label/f1-score'}),
)


def run_block(words):
    (block,) = (one for one in re.findall('```python\n(.*?)```', PAGE, re.DOTALL) if words in one)
    exec(block, {})


@pytest.fixture(params=TASKS)
def mine(request, tmp_path, monkeypatch):
    """Pictures as people have them: of all categories few have objects, objects are 255."""
    monkeypatch.chdir(tmp_path)
    task, classes = request.param, TASKS[request.param][0]
    make = dict(segmentor=make_ade20k, classifier=make_imagenet).get(task, make_coco)
    make('drawn', train=40 if task == 'classifier' else 8, val=1, size=64)
    random.seed(0)
    if task == 'classifier':
        shutil.move('drawn/train', 'data/mine/all')
        for folder in Path('data/mine/all').iterdir():  # skipped silently without a config's word
            shutil.move(min(folder.iterdir()), folder / 'a.webp')
        for _ in range(2):  # it can be run again
            run_block("Path('data/mine/all')")
        assert {len([*Path('data/mine/val').glob(f'{name}/*')]) for name in IMAGENET_CLASSES} == {2}
    elif task == 'segmentor':
        shutil.move('drawn/images/training', 'data/mine/images')
        shutil.move('drawn/annotations/training', 'data/mine/masks')
        for file in Path('data/mine/masks').iterdir():
            labels = cv2.imread(str(file), cv2.IMREAD_GRAYSCALE)
            cv2.imwrite(str(file), (labels[::2, ::2] > 0).astype('uint8') * 255)
        for words in ('INTER_NEAREST', 'INTER_NEAREST', 'train.txt', "Path('look')"):
            run_block(words)
    else:
        shutil.move('drawn/train2017', 'data/mine/images')
        shutil.move('drawn/annotations/instances_train2017.json', 'data/mine/all.json')
        run_block('data/mine/all.json')
    lines = (ROOT / f'configs/your_data/{task}.py').read_text().splitlines()
    first = lines.index("data_root = 'data/mine'")
    lines[first + 1 : first + 4] = f'classes = {classes}', 'size = (64, 64)', 'epochs = 1'
    shallow = dict(CARE.arch_zoo['s0'], depths=(1, 1, 1, 1))  # to save time
    lines.append(f"model['backbone']['arch'] = {shallow}")
    (tmp_path / 'mine.py').write_text('\n'.join(lines))
    return task


def train():
    config = Config.fromfile('mine.py')
    config.work_dir = 'run'
    runner = Runner.from_cfg(config)
    runner.train()
    return runner


def test_five_lines_are_enough(mine, capsys):
    runner = train()
    screen = capsys.readouterr().out
    for name in ('curves.png', 'predictions.png'):
        assert cv2.imread(f'run/{name}').std() > 10, f'{name} is empty'
    if runner.cfg.default_scope != 'mmpretrain':  # whose browse_dataset builds its own
        VISUALIZERS.build(runner.cfg.visualizer)
    assert runner.epoch == 1
    (best,) = Path('run').glob('best_*_epoch_1.pth')
    saved, state = load_from_mmcare(best, 'cpu')['state_dict'], runner.model.state_dict()
    assert [*saved] == [*state]
    assert all(map(torch.equal, saved.values(), state.values()))
    weights = sum(value.numel() * value.element_size() for value in state.values())
    assert best.stat().st_size < 1.1 * weights + 1e5  # nothing of the optimizer
    (log,) = (path.read_text() for path in Path('run').glob('*/*.log'))
    assert re.search(f'train: [0-9]+ pictures.*{TASKS[mine][0][0]}', log)
    assert 'Data check: nothing found' in log or ' - WARNING - ' in log
    assert 'This run:' in log and 'This run:' not in screen  # versions and checksums
    end = screen[screen.index('The training has ended.') :]
    assert f'Keep: {best}' in end
    test, export, draw = (shlex.split(x) for x in end.splitlines() if x.startswith('    '))
    assert test[:2] == ['mim', 'test'] and test[-1] == str(best)
    assert {'mine.py', str(best)} < {*export}
    assert Path(draw[4]).is_file()
    measured = runner.test()
    assert all(-1 <= measured[name] <= 100 for name in TASKS[mine][1])


@newer
@pytest.mark.conversion
def test_the_file_has_the_metrics(mine, monkeypatch, capsys):
    measured, names = train().test(), TASKS[mine][1]
    monkeypatch.setattr('mmcare.analysis.timing.SECONDS', 1e-9)
    run = partial(run_tool, monkeypatch)
    part = 'neck' if mine == 'instances' else 'model'
    (weights,) = Path('run').glob('best_*.pth')
    file = f'exports/mine_{part}_64x64.onnx'
    export = '--part', part, '--format', 'onnx', '--out-dir', 'exports'
    run('export', 'mine.py', weights, *export)
    run('eval_exported', 'mine.py', file, '--checkpoint', weights, '--out', 'table.json')
    table = json.loads(Path('table.json').read_text())
    for name in names:
        assert table[file][name] == pytest.approx(measured[name], abs=1e-3)
    if part == 'model':
        capsys.readouterr()
        picture = next(Path('data').rglob('*.[jJ][pP]*'))
        monkeypatch.setattr(sys, 'argv', ['', file, str(picture), '--score', '0'])
        with pytest.raises(SystemExit, match='0'):
            runpy.run_module('mmcare_runtime', run_name='__main__')
        printed = capsys.readouterr().out
        classes = TASKS[mine][0]
        assert any(f'{name} ' in printed for name in classes)
        assert Path('predictions', picture.name).exists()
