"""What a run draws and says of itself; test_your_data.py looks at those of the toolboxes."""

from argparse import Namespace
from unittest.mock import Mock

import cv2
import numpy as np
import pytest
import torch
from mmengine.structures import BaseDataElement, InstanceData
from toy_training import EPOCHS, ITERATIONS, StopAt, train

from mmcare.engine.hooks.plot_hook import PlotHook, draw_predictions
from mmcare.engine.hooks.run_summary_hook import RunSummaryHook

PLOTS = dict(type='mmcare.PlotHook', metrics=['acc'])


def curves(work_dir, hooks=(), **arguments):
    return train(work_dir, hooks=[PLOTS, *hooks], **arguments).message_hub.runtime_info['curves']


def test_a_resumed_run_draws_the_whole_run(tmp_path):
    whole = curves(tmp_path / 'whole')
    assert [*whole['losses']['loss']] == [*range(1, EPOCHS * ITERATIONS + 1)]
    curves(tmp_path / 'parts', [StopAt(9)])
    (tmp_path / 'parts/curves.png').unlink()
    assert curves(tmp_path / 'parts', resume=True) == whole
    images = [cv2.imread(str(tmp_path / part / 'curves.png')) for part in ('whole', 'parts')]
    assert np.array_equal(*images) and images[0].std() > 10


def test_a_second_run_starts_its_own_curves(tmp_path):
    whole = curves(tmp_path)
    assert curves(tmp_path) == whole


def test_it_can_be_switched_off(tmp_path):
    train(tmp_path, hooks=[dict(PLOTS, enabled=False)])
    assert not [*tmp_path.glob('*.png')]


def test_a_folder_on_another_drive_does_not_end_the_run(tmp_path, logged, monkeypatch):
    """For two drives of Windows, os.path.relpath raises an error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('os.path.relpath', Mock(side_effect=ValueError))
    for work_dir, named in ((tmp_path / 'run', 'run'), (tmp_path.parent, str(tmp_path.parent))):
        runner = Namespace(model=torch.nn.ReLU(), max_iters=1, train_dataloader=None, cfg={})
        runner.work_dir = str(work_dir)
        RunSummaryHook().before_train(runner)
        assert logged[-1][1] == f'Results go to {named}'


def sample(path, **parts):
    return BaseDataElement(metainfo=dict(img_path=str(path)), **parts)


def draw(work_dir, metainfo, outputs):
    """Let the hook draw predictions of a data set, as after a validation."""
    loader = Namespace(dataset=Namespace(metainfo=metainfo), __len__=lambda: 1)
    hub = Namespace(runtime_info={}, update_info=lambda *_: None)
    runner = Namespace(iter=0, work_dir=work_dir, val_dataloader=loader, message_hub=hub)
    hook = PlotHook()
    hook.before_train(runner)
    hook.before_val_epoch(runner)
    for output in outputs:
        hook.after_val_iter(runner, 0, None, output)
    hook.after_val_epoch(runner, {})


def test_a_picture_that_cannot_be_drawn_does_not_end_the_run(tmp_path, logged):
    outputs = None, dict(loss=1), [torch.zeros(2)], [sample(tmp_path / 'gone.png')]
    draw(tmp_path, dict(classes=['a']), outputs)
    ((level, text),) = logged
    assert level == 'WARNING' and text.startswith('predictions.png was not drawn: FileNotFound')
    assert (tmp_path / 'curves.png').is_file()


def test_a_data_set_of_several_parts(tmp_path, logged):
    """As mmdet's ConcatDataset, whose metainfo is a list."""
    cv2.imwrite(str(tmp_path / 'picture.png'), np.zeros((30, 40, 3), np.uint8))
    label = torch.tensor([1])
    output = sample(tmp_path / 'picture.png', gt_label=label, pred_label=label)
    draw(tmp_path, [dict(classes=['a', 'b'])] * 2, [[output]])
    assert not logged and (tmp_path / 'predictions.png').is_file()


def test_curves_that_cannot_be_written_do_not_end_the_run(tmp_path, logged):
    (tmp_path / 'curves.png').mkdir()
    train(tmp_path, hooks=[PLOTS])
    assert any('curves.png was not drawn: IsADirectoryError' in text for _, text in logged)


@pytest.mark.parametrize('number', [2, 300])
@pytest.mark.parametrize('palette', [[(255, 0, 0)] * 2, None, np.zeros((2, 3))])
def test_objects_are_drawn_where_they_are(palette, number, tmp_path):
    """A tall picture and a wide one; the class's colour, and nothing where nothing was found."""
    labels = torch.tensor([number - 1])
    objects = InstanceData(bboxes=torch.tensor([[2.0, 3.0, 20.0, 30.0]]), labels=labels)
    nothing = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long))
    samples = []
    for name, shape in dict(tall=(60, 30), wide=(30, 60)).items():
        cv2.imwrite(str(tmp_path / f'{name}.png'), np.full((*shape, 3), 255, np.uint8))
        path = tmp_path / f'{name}.png'
        samples.append(sample(path, gt_instances=objects, pred_instances=nothing))
    metainfo = dict(classes=[f'class {n}' for n in range(number)], palette=palette)
    draw_predictions(samples, metainfo, tmp_path / 'drawn.png', score_thr=0.3)
    drawn = cv2.imread(str(tmp_path / 'drawn.png'))
    below = drawn[100:]  # the legend
    left, right = np.split(below, [below.shape[1] // 2], axis=1)
    assert (left < 200).any() and (right > 200).all()
