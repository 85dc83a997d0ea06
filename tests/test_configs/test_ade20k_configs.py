"""The shipped configs for ADE20K: sizes, runs at toy size, exact resume, odd sizes, bfloat16."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, RUNNERS, DefaultScope, init_default_scope
from mmengine.structures import PixelData

from mmcare.checkpoint import read_checkpoint
from mmcare.sample_data import make_ade20k

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / 'configs'
BACKBONES = {'s0': 5_285_904, 's1': 7_548_328, 's2': 16_401_144}
# Without the backbone: lateral convolutions and heads take its outputs. UperNet's count holds the
# auxiliary head (333,974; 481,430 for S2), which is there in training only.
HEADS = {
    'fpn': {'s0': 4_323_990, 's1': 4_323_990, 's2': 4_471_446},
    'upernet': {'s0': 33_305_900, 's1': 33_305_900, 's2': 36_893_996},
}
AUXILIARY = {'s0': 333_974, 's1': 333_974, 's2': 481_430}
CHANNELS = {
    's0': [32, 64, 128, 1024],
    's1': [32, 64, 128, 1024],
    's2': [32, 64, 192, 1536],
}
MODES = ('train', 'val', 'test')


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp('ade20k') / 'data'
    make_ade20k(folder, train=8, val=4, size=96)
    return folder


def overrides(data, size=64, iterations=4):
    """What a toy run changes in a shipped config, as --cfg-options take it."""
    return {
        **{f'{mode}_dataloader.dataset.data_root': str(data) for mode in MODES},
        **{
            f'{mode}_dataloader.num_workers': workers
            for mode, workers in (('train', 2), ('val', 0), ('test', 0))
        },
        **{f'{mode}_dataloader.persistent_workers': False for mode in ('val', 'test')},
        **{
            f'{mode}_dataloader.dataset.pipeline.{index}.scale': (4 * size, size)
            for mode, index in (('train', 3), ('val', 1), ('test', 1))
        },
        'train_dataloader.dataset.pipeline.4.crop_size': (size, size),
        'train_dataloader.batch_size': 2,
        'train_cfg.max_iters': iterations,
        'train_cfg.val_interval': iterations,
        'default_hooks.checkpoint.interval': 2,
        'model.data_preprocessor.size': (size, size),
        'model.backbone.init_cfg': None,
    }


def load_config(name, data=None, **changes):
    config = Config.fromfile(CONFIGS / f'{name}.py')
    if data is not None:
        config.merge_from_dict({**overrides(data), **changes})
    return config


def build_runner(name, data, work_dir, **changes):
    """A runner at toy size; layer scales of 1, else blocks would hardly matter untrained."""
    changes = {
        'work_dir': str(work_dir),
        'experiment_name': f'{work_dir.name}_{len(changes)}',
        'model.backbone.layer_scale_init_value': 1.0,
        **changes,
    }
    return RUNNERS.build(load_config(name, data, **changes))


def training_batch(runner, **changes):
    """The first batch of the training data, ready for the model."""
    loader = {**runner.cfg.train_dataloader, 'num_workers': 0, **changes}
    batch = next(iter(runner.build_dataloader(loader, seed=0)))
    return runner.model.data_preprocessor(batch, training=True)


@pytest.fixture(scope='module')
def fpn(data, tmp_path_factory):
    """Semantic FPN CARE-S0 after four iterations, in the folder of its checkpoints."""
    runner = build_runner('fpn/care_s0_ade20k', data, tmp_path_factory.mktemp('fpn'))
    runner.train()
    return runner


@pytest.mark.parametrize('head', HEADS)
@pytest.mark.parametrize('variant', BACKBONES)
def test_parameters(head, variant):
    config = load_config(f'{head}/care_{variant}_ade20k')
    assert config.model.backbone.init_cfg == dict(
        type='Pretrained', checkpoint=f'checkpoints/care_{variant}_in1k.pth'
    )
    init_default_scope('mmseg')
    model = MODELS.build(config.model)
    assert list(model.backbone.out_channels) == CHANNELS[variant]

    def count(prefix):
        return sum(p.numel() for name, p in model.named_parameters() if name.startswith(prefix))

    assert count('backbone.') == BACKBONES[variant]
    assert count('') - count('backbone.') == HEADS[head][variant]
    assert count('auxiliary_head.') == (AUXILIARY[variant] if head == 'upernet' else 0)
    # SyncBN is what sync_bn makes of these when a run is distributed.
    assert config.sync_bn == 'torch'
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    assert norms and all(type(module) is torch.nn.BatchNorm2d for module in norms)


@pytest.mark.parametrize(
    ('head', 'batch', 'iterations', 'rate', 'decay', 'power', 'warm_up'),
    [
        ('fpn', 48, 40_000, 2e-4, 1e-4, 0.9, 0),
        ('upernet', 16, 160_000, 6e-5, 0.01, 1.0, 1500),
    ],
)
@pytest.mark.parametrize('variant', BACKBONES)
def test_recipe(head, variant, batch, iterations, rate, decay, power, warm_up):
    config = load_config(f'{head}/care_{variant}_ade20k')
    optimizer = config.optim_wrapper.optimizer
    assert optimizer == dict(type='AdamW', lr=rate, weight_decay=decay)
    assert config.train_cfg.max_iters == iterations
    *before, poly = config.param_scheduler
    assert poly == dict(
        type='PolyLR', power=power, eta_min=0.0, begin=warm_up, end=iterations, by_epoch=False
    )
    assert [(s.type, s.begin, s.end) for s in before] == [('LinearLR', 0, 1500)] * bool(warm_up)
    assert config.auto_scale_lr == dict(enable=False, base_batch_size=batch)
    assert 8 * config.train_dataloader.batch_size == batch
    assert config.train_dataloader.num_workers > 0  # for exact resume
    assert config.randomness == dict(seed=0)
    crop = next(t for t in config.train_dataloader.dataset.pipeline if t.type == 'RandomCrop')
    assert crop.crop_size == config.model.data_preprocessor.size == (512, 512)


@pytest.mark.parametrize('head', HEADS)
def test_no_weight_decay_on_norms_and_layer_scales(head):
    config = load_config(f'{head}/care_s0_ade20k')
    init_default_scope('mmseg')
    model = MODELS.build(config.model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    free = {
        names[id(parameter)]
        for group in build_optim_wrapper(model, config.optim_wrapper).param_groups
        if group['weight_decay'] == 0
        for parameter in group['params']
    }
    norms = {
        f'{name}.{part}'
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.BatchNorm2d)
        for part in ('weight', 'bias')
    }
    scales = {name for name in names.values() if name.endswith('.gamma')}
    assert len(scales) == 17 and norms and free == norms | scales


def test_train_save_and_resume_exactly(fpn, data, tmp_path):
    """Drop path, random scale, crop, flip and colours, drawn in two worker processes."""
    whole = Path(fpn.work_dir)
    begun, ended = (read_checkpoint(whole / f'iter_{n}.pth')['state_dict'] for n in (2, 4))
    stem = 'backbone.stem.conv.weight'
    assert not torch.equal(begun[stem], ended[stem])
    shutil.copy(whole / 'iter_2.pth', tmp_path)
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'iter_2.pth'))
    resumed = build_runner('fpn/care_s0_ade20k', data, tmp_path, resume=True)
    resumed.train()
    again = read_checkpoint(tmp_path / 'iter_4.pth')['state_dict']
    assert again.keys() == ended.keys()
    for key, value in ended.items():
        assert torch.equal(value, again[key]), key


def test_evaluation(fpn, data, tmp_path):
    weights = str(Path(fpn.work_dir) / 'iter_4.pth')
    runner = build_runner('fpn/care_s0_ade20k', data, tmp_path, load_from=weights)
    assert 0 <= runner.test()['mIoU'] <= 100


def test_augmentation_at_test_time(data, tmp_path):
    """Prepared as ``mim test mmseg ... --tta`` does it."""
    config = load_config('fpn/care_s0_ade20k', data, work_dir=str(tmp_path))
    config.test_dataloader.dataset.pipeline = config.tta_pipeline
    config.tta_model.module = config.model
    config.model = config.tta_model
    runner = RUNNERS.build(config)
    batch = next(iter(runner.build_dataloader(config.test_dataloader)))
    assert len(batch['inputs']) == 12  # six scales, as it is and flipped
    (sample,) = runner.model.eval().test_step(batch)
    assert sample.pred_sem_seg.shape[-2:] == sample.gt_sem_seg.shape == (96, 96)


def test_upernet_trains_with_its_auxiliary_head(data, tmp_path):
    runner = build_runner('upernet/care_s0_ade20k', data, tmp_path)
    optim_wrapper = runner.build_optim_wrapper(runner.cfg.optim_wrapper)
    runner.model.train()
    losses = runner.model(**training_batch(runner), mode='loss')
    assert set(losses) >= {'decode.loss_ce', 'aux.loss_ce'}
    total, values = runner.model.parse_losses(losses)
    assert total == values['decode.loss_ce'] + values['aux.loss_ce']
    # Of two heads at chance, the auxiliary one weighs 0.4.
    assert 0.35 < values['aux.loss_ce'] / values['decode.loss_ce'] < 0.45
    before = {name: p.detach().clone() for name, p in runner.model.named_parameters()}
    optim_wrapper.update_params(total)
    for name, parameter in runner.model.named_parameters():
        assert torch.isfinite(parameter).all(), name
        if not name.endswith('bias'):  # a bias before a norm has no gradient but rounding
            assert not torch.equal(parameter, before[name]), name


@pytest.mark.parametrize('head', HEADS)
def test_odd_size_is_that_image_padded_by_hand(head, data, tmp_path):
    """Maps of all strides line up with the image, and the prediction has its size."""
    from mmseg.structures import SegDataSample

    model = build_runner(f'{head}/care_s0_ade20k', data, tmp_path).model.eval()
    model.backbone.init_weights()
    height, width = 75, 101
    image = torch.randint(0, 256, (3, height, width), dtype=torch.uint8)
    sample = SegDataSample(metainfo=dict(ori_shape=(height, width), img_shape=(height, width)))
    with torch.no_grad():
        (predicted,) = model.test_step(dict(inputs=[image], data_samples=[sample]))
        preprocessor = model.data_preprocessor
        normalised = (image[[2, 1, 0]] - preprocessor.mean) / preprocessor.std
        padded = F.pad(normalised, (0, 128 - width, 0, 96 - height))[None]
        metainfo = dict(ori_shape=(96, 128), img_shape=(96, 128))
        logits = model.encode_decode(padded, [metainfo])[0, :, :height, :width]
        maps = model.backbone(normalised[None])
        padded_maps = model.backbone(padded)
    assert predicted.pred_sem_seg.shape == (height, width)
    torch.testing.assert_close(predicted.seg_logits.data, logits, rtol=1e-4, atol=1e-5)
    assert logits.std() > 1e-3  # else anything would be close
    for stride, odd, even in zip((4, 8, 16, 32), maps, padded_maps, strict=True):
        assert odd.shape[-2:] == (-(-height // stride), -(-width // stride))
        torch.testing.assert_close(
            odd, even[..., : odd.shape[-2], : odd.shape[-1]], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize('head', HEADS)
def test_ignored_labels_do_not_contribute_to_the_loss(head, data, tmp_path):
    model = build_runner(f'{head}/care_s0_ade20k', data, tmp_path).model
    heads = [model.decode_head]
    if head == 'upernet':
        heads.append(model.auxiliary_head)
    size = 32
    labels = torch.randint(0, 150, (1, size, size))
    ignored = torch.rand(1, size, size) < 0.4
    labels[ignored] = 255
    sample = training_sample(labels)
    for part in heads:
        logits = torch.randn(1, 150, size, size, requires_grad=True)
        loss = part.loss_by_feat(logits, [sample])['loss_ce']
        loss.backward()
        assert (logits.grad[0, :, ignored[0]] == 0).all()
        assert (logits.grad[0, :, ~ignored[0]] != 0).all()
        # Not even in the number of pixels over which the mean is taken.
        kept = F.cross_entropy(logits.detach()[0, :, ~ignored[0]].T, labels[~ignored])
        weight = part.loss_decode.loss_weight
        torch.testing.assert_close(loss.detach(), weight * kept, rtol=1e-5, atol=0)
        nothing = training_sample(torch.full_like(labels, 255))
        assert part.loss_by_feat(logits, [nothing])['loss_ce'] == 0


def training_sample(labels):
    from mmseg.structures import SegDataSample

    sample = SegDataSample(metainfo=dict(img_shape=labels.shape[1:]))
    sample.gt_sem_seg = PixelData(data=labels)
    return sample


@pytest.mark.parametrize('head', HEADS)
def test_a_step_in_bfloat16(head, data, tmp_path):
    runner = build_runner(f'{head}/care_s0_ade20k', data, tmp_path)
    batch = training_batch(runner)
    with torch.autocast('cpu', torch.bfloat16):
        losses = runner.model(**batch, mode='loss')
    total, values = runner.model.parse_losses(losses)
    total.backward()
    assert all(torch.isfinite(value).all() for value in values.values())
    gradients = [p.grad for p in runner.model.parameters() if p.grad is not None]
    assert len(gradients) > 300
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_inferencer_leaves_an_overlay(fpn, data, tmp_path):
    from mmseg.apis import MMSegInferencer

    photo = data / 'images' / 'validation' / 'ADE_val_00000004.jpg'
    picture = cv2.imread(str(photo))
    assert picture.shape[0] % 2 and picture.shape[1] % 2
    inferencer = MMSegInferencer(
        model=load_config('fpn/care_s0_ade20k', data),
        weights=str(Path(fpn.work_dir) / 'iter_4.pth'),
        device='cpu',
    )
    predicted = inferencer(str(photo), out_dir=str(tmp_path))['predictions']
    assert predicted.shape == picture.shape[:2] and predicted.max() < 150
    overlay = cv2.imread(str(tmp_path / 'vis' / photo.name))
    assert overlay.shape == picture.shape and not np.array_equal(overlay, picture)


@pytest.mark.slow
@pytest.mark.parametrize('package', ['mmseg', 'mmsegmentation'])
def test_the_documented_commands(package, data, tmp_path):
    """mim train, resume and test; mim takes the module's name and the package's."""

    def mim(*arguments, **changes):
        changes = {**overrides(data), 'work_dir': str(tmp_path), **changes}
        options = [f'{key}={value}'.replace(' ', '') for key, value in changes.items()]
        command = ['mim', *arguments, '--work-dir', str(tmp_path), '--cfg-options', *options]
        environment = {**os.environ, 'PATH': f'{Path(sys.executable).parent}:{os.environ["PATH"]}'}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout + done.stderr

    config = 'configs/fpn/care_s1_ade20k.py'
    assert 'Iter(val) [4/4]' in mim('train', package, config)
    output = mim('train', package, config, '--resume', **{'train_cfg.max_iters': 6})
    assert 'resumed epoch: 0, iter: 4' in output
    for flags in ([], ['--tta']):
        output = mim('test', package, config, '--checkpoint', str(tmp_path / 'iter_6.pth'), *flags)
        assert 'mIoU: ' in output


def teardown_module():
    """Leave no default scope behind for other modules."""
    DefaultScope._instance_dict.clear()
