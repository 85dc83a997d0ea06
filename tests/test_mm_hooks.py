"""Ordinary work with MMEngine goes through our hooks: TTA, teachers, EMA, other runners."""

import re
from argparse import Namespace
from contextlib import nullcontext
from inspect import signature
from pathlib import Path

import pytest
import torch
from helpers import Images, assert_equal, published_state, random_backbone, thin_backbone, warned
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.model import PretrainedInit
from mmengine.registry import MODELS
from mmengine.runner import Runner
from toy_training import EPOCHS, Model, StopAt, build, names, train

from mmcare.convert import fuse_checkpoint
from mmcare.engine.hooks import SwitchableHook
from mmcare.models import CARE
from mmcare.weights.reading import CheckpointError, read_checkpoint

FLIPS = dict(
    type='TestTimeAug',
    transforms=[
        [dict(type='RandomFlip', prob=prob) for prob in (1.0, 0.0)],
        [dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape',
                                               'scale_factor', 'flip', 'flip_direction'))],
    ],
)  # fmt: skip


@pytest.fixture
def toy(tmp_path):
    """Make data and the config of a task, and write the weights of its model."""
    toy_configs = pytest.importorskip('toy_configs')
    pytest.importorskip('mmdet')

    def make(task, **changes):
        if not (tmp_path / 'data').exists():
            toy_configs.make_data(task, tmp_path / 'data')
        config = toy_configs.toy_config(task, tmp_path / 'data', tmp_path / task, **changes)
        runner = Runner.from_cfg(config)
        config.load_from = str(tmp_path / 'weights.pth')
        torch.save(dict(state_dict=runner.model.state_dict()), config.load_from)
        return config, runner.model.state_dict()

    return make


def test_test_time_augmentation_of_segmentors(toy):
    """As mmseg's tools/test.py builds it."""
    config, _ = toy('segmentation')
    config.test_dataloader.dataset.pipeline = config.tta_pipeline
    config.model = dict(config.tta_model, module=config.model)
    assert 'mIoU' in Runner.from_cfg(config).test()


def test_test_time_augmentation_of_detectors(toy):
    """As mmdet's tools/test.py builds it."""
    config, _ = toy('retinanet')
    config.test_dataloader.dataset.pipeline[-1] = FLIPS
    tta = dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100)
    config.model = dict(type='DetTTAModel', tta_cfg=tta, module=config.model)
    assert 'coco/bbox_mAP' in Runner.from_cfg(config).test()


def test_semi_supervised_detector(toy):
    """mmdet renames the keys while it loads them; without a CARE's keys it raises."""
    config, state = toy('detection')
    plain = config.model.pop('data_preprocessor')
    config.model = dict(
        type='SoftTeacher',
        detector=dict(config.model, data_preprocessor=plain),
        data_preprocessor=dict(type='MultiBranchDataPreprocessor', data_preprocessor=plain),
        semi_train_cfg=dict(freeze_teacher=True),
        semi_test_cfg=dict(predict_on='teacher'),
    )
    runner = Runner.from_cfg(config)
    assert 'coco/bbox_mAP' in runner.test()
    for name in ('student', 'teacher'):
        assert_equal(runner.model.get_submodule(name).state_dict(), state)
    folder = Path(config.work_dir)
    config.dump(folder / 'teacher.py')
    said = fuse_checkpoint(folder / 'teacher.py', config.load_from, folder / 'fused.pth')
    (option,) = re.findall(r'model\S+(?==True)', said)
    fused = Config.fromfile(folder / 'teacher.py')
    fused.merge_from_dict({option: True})
    MODELS.build(fused.model).load_state_dict(read_checkpoint(folder / 'fused.pth')['state_dict'])
    del state['backbone.stem.conv.bias']
    torch.save(state, config.load_from)
    with pytest.raises(CheckpointError, match=r'missing: student\.backbone\.stem\.conv\.bias'):
        Runner.from_cfg(config).test()


@pytest.mark.parametrize('averaged', [False, True], ids=['plain', 'ema'])
@pytest.mark.parametrize('mode', ['train', 'val', 'test'])
@pytest.mark.parametrize('given', ['all', 'no backbone', 'another backbone', 'part of it'])
def test_load_from(tmp_path, logged, given, mode, averaged):
    """What init_cfg has filled in this process may be missing; EMA's copy is judged alike."""
    torch.save(thin_backbone().state_dict(), tmp_path / 'backbone.pth')
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'backbone.pth'))
    model = Images(init_cfg=init_cfg)
    state = dict(model.state_dict())
    left_out = {'all': 'nothing', 'part of it': 'backbone.stem.'}.get(given, 'backbone.')
    state = {name: v for name, v in state.items() if not name.startswith(left_out)}
    if given == 'another backbone':  # names of RTMDet's and Swin's
        others = 'stem.0.conv.weight', 'stages.0.blocks.0.norm1.weight'
        state.update({f'backbone.{name}': torch.ones(1) for name in others})
    torch.save(dict(state_dict=state), tmp_path / 'file.pth')
    hooks = [dict(type='mmcare.SafeLoadingHook'), *[dict(type='EMAHook')] * averaged]
    runner = build(
        tmp_path / mode,
        exact=False,
        model=model,
        hooks=[*hooks, StopAt(0)],
        checkpoint=dict(save_best=None),
        load_from=str(tmp_path / 'file.pth'),
    )
    if given == 'all' or ('backbone' in given and mode == 'train'):
        if mode == 'train':
            with pytest.raises(KeyboardInterrupt):
                runner.train()
        else:
            getattr(runner, mode)()
        assert len(warned(logged, 'has no weights of')) == (given != 'all') * (1 + averaged)
        return
    with pytest.raises(CheckpointError, match=r'file\.pth does not fit the CARE'):
        getattr(runner, mode)()
    model.load_state_dict({}, strict=False)  # nothing of the check is left


@pytest.mark.parametrize(
    'kind', ['Pretrained', 'mmengine.model.PretrainedInit', PretrainedInit], ids=str
)
def test_init_cfg_of_a_whole_model(tmp_path, kind):
    """Its file is read as that of load_from is: under published names, and completely."""
    source, model = random_backbone(), Images()
    state = published_state(source)
    for missing in (None, 'stem.0.bias'):
        state.pop(missing, None)
        file = str(tmp_path / 'CARE.pth.tar')
        torch.save(dict(state_dict=state, args=Namespace(model='CARE')), file)
        model.init_cfg, model._is_init = dict(type=kind, checkpoint=file), False
        options = dict(model=model, hooks=[dict(type='mmcare.SafeLoadingHook'), StopAt(0)])
        refused = pytest.raises(CheckpointError, match=r'CARE\.pth\.tar does not fit the CARE')
        with refused if missing else nullcontext():
            train(tmp_path / 'run', checkpoint=dict(save_best=None), **options)
        assert_equal(model.backbone.state_dict(), source.state_dict())


def test_resumed_averages_are_checked(tmp_path):
    """They are in an entry of their own, under MMEngine's names."""
    hooks = [dict(type='mmcare.SafeLoadingHook'), dict(type='EMAHook')]
    train(tmp_path, model=Images(), hooks=hooks)
    file = tmp_path / f'epoch_{EPOCHS}.pth'
    checkpoint = torch.load(file, weights_only=True)
    del checkpoint['ema_state_dict']['module.backbone.stem.conv.bias']
    torch.save(checkpoint, file)
    with pytest.raises(CheckpointError, match=r'backbone\.stem\.conv\.bias'):
        train(tmp_path, model=Images(), hooks=hooks, resume=True)


@pytest.mark.parametrize('kind', SwitchableHook.__subclasses__())
def test_a_hook_that_is_switched_off(kind):
    """None of its methods does anything: not even with a runner that has nothing."""
    hook = kind(enabled=False)
    stages = [name for name in dir(Hook) if name.startswith(('before_', 'after_'))]
    assert any(getattr(kind, stage) is not getattr(Hook, stage) for stage in stages)
    for stage in stages:
        method = getattr(hook, stage)
        method(*[None] * len(signature(method).parameters))


def test_a_run_with_all_hooks_switched_off(toy):
    off = {'safe_loading', 'exact_resume', 'data_check', 'run_record', 'optimizer_check'}
    off |= {'bfloat16_ops', 'plots', 'summary'}
    config, _ = toy('detection', **{f'default_hooks.{name}.enabled': False for name in off},
                    **{'default_hooks.checkpoint.type': 'CheckpointHook'})  # fmt: skip
    runner = Runner.from_cfg(config)
    runner.train()
    assert runner.epoch == 2


def test_flexible_runner(tmp_path):
    """It writes without a file backend, and loads before hooks know that a run begins."""
    FlexibleRunner = pytest.importorskip('mmengine.runner').FlexibleRunner

    def flexible(model, folder='run', **options):
        ours = ['SafeLoadingHook', 'DataCheckHook', 'ChannelsLastHook', 'OptimizerCheckHook']
        ours += ['RunRecordHook', 'PlotHook', 'RunSummaryHook']
        options['hooks'] = [dict(type=f'mmcare.{name}') for name in ours]
        options['checkpoint'] = dict(max_keep_ckpts=1, save_best=None)
        return train(tmp_path / folder, kind=FlexibleRunner, model=model, **options)

    flexible(Model())
    assert names(tmp_path / 'run') == [f'epoch_{EPOCHS}.pth']
    model = Images()
    torch.save(dict(state_dict=model.neck.state_dict(prefix='neck.')), tmp_path / 'part.pth')
    with pytest.raises(CheckpointError, match='missing: backbone'):
        flexible(Images(), 'part', load_from=str(tmp_path / 'part.pth'))
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'whole.pth')
    flexible(model, 'whole', load_from=str(tmp_path / 'whole.pth'))
    model.load_state_dict({}, strict=False)  # the check ended when training began


def test_init_cfg_without_a_file():
    with pytest.raises(ValueError, match='init_cfg must be a Pretrained with checkpoint=FILE'):
        CARE(init_cfg=dict(type='Pretrained')).init_weights()
