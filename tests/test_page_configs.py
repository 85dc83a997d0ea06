"""The configs of README and docs/use_in_your_project.md, as other projects would have them.

They import mmcare and nothing else of ours, on stock mmengine, in a folder outside of the
repository. Each toolbox gets a process of its own, which runs this file with the names of its
configs.
"""

import importlib.util
import json
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

PAGES = ('README.md', 'docs/use_in_your_project.md')
TEXT = '\n'.join((Path(__file__).parents[1] / page).read_text() for page in PAGES)
FILES = dict(re.findall(r'^```python\n# (\w+\.py)\n(.*?)^```$', TEXT, re.M | re.S))
CONFIGS = {name: text for name, text in FILES.items() if '_base_' in text}
BASES = {name: re.search(r"_base_ = '(\w+)::", text) for name, text in CONFIGS.items()}
TOOLBOXES = {name: base[1] if base else 'mmdet' for name, base in BASES.items()}
HEIGHT, WIDTH = 64, 96


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    from helpers import published_weights, run

    from mmcare.weights.names import from_published

    project = tmp_path_factory.mktemp('project')
    for name, text in FILES.items():
        (project / name).write_text(text)
    checkpoint = dict(state_dict=published_weights('s0'), args=Namespace(model='CARE'), epoch=1)
    torch.save(checkpoint, project / 'CARETrans_S0.pth.tar')
    torch.save(from_published(checkpoint['state_dict']), project / 'renamed.pth')
    found = {}

    def give(toolbox):
        if toolbox not in found:
            names = [name for name in CONFIGS if TOOLBOXES[name] == toolbox]
            done = run(sys.executable, __file__, toolbox, *names, cwd=project)
            found[toolbox] = json.loads(done.stdout.splitlines()[-1])
        return found[toolbox]

    return give


@pytest.mark.parametrize(
    'name',
    [
        pytest.param(name, marks=[pytest.mark.slow] * (TOOLBOXES[name] == 'mmdet'))
        for name in CONFIGS
    ],
)
def test_trains_by_custom_imports_alone(name, results):
    from helpers import FORKS

    toolbox = TOOLBOXES[name]
    if importlib.util.find_spec(toolbox) is None:
        pytest.skip(f'{toolbox} is not installed; the page says how')
    if FORKS and toolbox == 'mmseg':
        pytest.xfail('onedl-mmengine looks for mmseg:: in a package mmsegmentation')
    hooks = 4 if 'resumable' in name else 0
    wanted = dict(loaded=True, trained=True, predictions=2, hooks=hooks, safely=False)
    assert results(toolbox)[name] == wanted


def test_your_own_mixer():
    """It is registered and trains a step, in place of the attention alone."""
    from helpers import THIN
    from mmengine.registry import MODELS

    exec(FILES['my_mixer.py'], {'__name__': 'my_mixer'})  # the page skips it: it registers once
    model = MODELS.build(dict(type='PoolingCARE', arch=THIN, layer_scale_init_value=0.1))
    model.init_weights()
    kinds = [type(stage.blocks[0].mixer.global_learner).__name__ for stage in model.stages]
    assert kinds == ['StripConv', 'StripConv', 'AvgPool2d', 'AvgPool2d']
    before = model.stem.conv.weight.clone()
    sum(each.square().mean() for each in model(torch.rand(2, 3, 64, 64))).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not torch.equal(before, model.stem.conv.weight)


def make_batch(toolbox):
    images = [torch.randint(0, 256, (3, HEIGHT, WIDTH), dtype=torch.uint8) for _ in range(2)]
    if toolbox == 'mmdet':
        from mmdet.testing import demo_mm_inputs

        shape = (3, HEIGHT, WIDTH)
        return demo_mm_inputs(2, shape, num_items=[2, 3], num_classes=80, with_mask=True)
    if toolbox == 'mmpose':
        from mmpose.testing import get_packed_inputs

        return get_packed_inputs(2)
    if toolbox == 'mmpretrain':
        from mmpretrain.structures import DataSample

        samples = [DataSample().set_gt_label(label) for label in (3, 5)]
        return dict(inputs=torch.stack(images), data_samples=samples)
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    shape = dict(img_shape=(HEIGHT, WIDTH), ori_shape=(HEIGHT, WIDTH))
    samples = [SegDataSample(metainfo=shape) for _ in images]
    for sample, image in zip(samples, images, strict=True):
        sample.gt_sem_seg = PixelData(data=image[:1].long() % 150)
    return dict(inputs=images, data_samples=samples)


def train_briefly(toolbox, name):
    """Load the published file, train for a step and predict; return what the test wants to know."""
    from mmengine.config import Config
    from mmengine.model import revert_sync_batchnorm
    from mmengine.optim import build_optim_wrapper
    from mmengine.registry import HOOKS, MODELS

    config = Config.fromfile(name)
    hooks = [hook for hook in config.default_hooks.values() if hook.type.startswith('mmcare.')]
    # As mmengine's runner does.
    config.model.setdefault('data_preprocessor', config.get('data_preprocessor'))
    if 'size' in config.model.data_preprocessor:  # images are padded to the crop
        config.model.data_preprocessor.size = (HEIGHT, WIDTH)
    model = revert_sync_batchnorm(MODELS.build(config.model))
    model.init_weights()
    weights = torch.load('renamed.pth')
    state = {key: value.clone() for key, value in model.backbone.state_dict().items()}
    optim_wrapper = build_optim_wrapper(model, config.optim_wrapper)
    model.train().train_step(make_batch(toolbox), optim_wrapper)
    with torch.no_grad():
        predictions = model.eval().test_step(make_batch(toolbox))
    parameters = dict(model.backbone.named_parameters())
    return dict(
        loaded=all(torch.equal(value, weights[key]) for key, value in state.items()),
        trained=not any(torch.equal(state[key], value) for key, value in parameters.items()),
        predictions=len(predictions),
        hooks=len([HOOKS.build(hook) for hook in hooks]),
        safely='mmcare.engine.safe_loading' in sys.modules,
    )


if __name__ == '__main__':
    from mmengine.registry import init_default_scope

    toolbox, *names = sys.argv[1:]
    init_default_scope(toolbox)
    torch.manual_seed(0)
    print(json.dumps({name: train_briefly(toolbox, name) for name in names}))
