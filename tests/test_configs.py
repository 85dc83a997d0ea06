"""All shipped configs: they build, have the recipe of their folder, and are listed truly."""

import re
import shutil
from functools import cache

import numpy as np
import pytest
import torch
import yaml
from helpers import ROOT
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.optim import build_optim_wrapper
from mmengine.registry import HOOKS, MODELS, TRANSFORMS, DefaultScope
from mmengine.runner import Runner
from modelindex.load_model_index import load as load_index
from PIL import Image
from torch.nn.modules.batchnorm import _BatchNorm
from toy_configs import make_data, toy_config

from mmcare.analysis.counting import count_macs
from mmcare.export import export_backbone, load_source

NAMES = sorted(
    str(path.relative_to(ROOT / 'configs').with_suffix(''))
    for path in (ROOT / 'configs').glob('[!_]*/*.py')
)
LISTED = {
    model['Config'].removeprefix('configs/').removesuffix('.py'): model
    for metafile in yaml.safe_load((ROOT / 'model-index.yml').read_text())['Import']
    for model in yaml.safe_load((ROOT / metafile).read_text())['Models']
}
# The backbone alone, and its last map's width.
BACKBONES = {'s0': (5_285_904, 1024), 's1': (7_548_328, 1024), 's2': (16_401_144, 1536)}
# With both heads, and GMACs at 224: as the paper has them, and the distilled ones alike.
CLASSIFIERS = {
    'care_s0': (7_340_000, 0.7206),
    'care_s1': (9_602_424, 1.0324),
    'care_s2': (19_481_288, 1.9275),
    'care_s2_symmetric': (19_661_984, 1.9494),
    'care_s2_stacked': (20_885_768, 2.0913),
    'care_s2_global_only': (20_674_088, 2.0438),
    'care_s0_no_inter1': (5_450_864, 0.4907),
    'care_s0_no_inter2': (2_668_448, 0.2740),
    'care_s0_no_memory': (5_400_648, 0.5196),
    'care_s0_no_early_conv': (7_340_544, 0.7211),
    'care_s1_no_early_conv': (9_603_240, 1.0332),
    'care_s2_no_early_conv': (19_482_104, 1.9283),
    'care_s0_no_multi_scale': (7_316_320, 0.7141),
    'care_s1_no_multi_scale': (9_569_464, 1.0231),
    'care_s2_no_multi_scale': (19_434_248, 1.9166),
}
# Without the backbone, for S0 and S1, and for S2. UperNet's hold the auxiliary head.
HEADS = {
    'mask_rcnn': (20_224_752, 20_372_208),
    'retinanet': (11_495_156, 12_822_260),
    'rtmdet': (6_496_092, 12_632_348),
    'fpn': (4_323_990, 4_471_446),
    'upernet': (33_305_900, 36_893_996),
}
# What the paper reports, which README.md repeats: box AP, mask AP; mIoU; top-1.
PAPER = {
    'mask_rcnn/care_s0_coco': ('40.3', '36.8'),
    'mask_rcnn/care_s1_coco': ('41.5', '37.8'),
    'mask_rcnn/care_s2_coco': ('43.1', '39.0'),
    'fpn/care_s0_ade20k': ('38.5',),
    'fpn/care_s1_ade20k': ('41.0',),
    'fpn/care_s2_ade20k': ('43.5',),
    'imagenet/care_s0_in1k': ('78.4',),
    'imagenet/care_s1_in1k': ('80.1',),
    'imagenet/care_s2_in1k': ('82.1',),
    'ablation/care_s2_symmetric_in1k': ('2.0', '82.1'),
    'ablation/care_s2_stacked_in1k': ('2.1', '81.4'),
    'ablation/care_s2_global_only_in1k': ('2.0', '77.3'),
    'ablation/care_s0_no_inter1_in1k': ('0.5', '76.2'),
    'ablation/care_s0_no_inter2_in1k': ('0.3', '70.9'),
    'ablation/care_s0_no_memory_in1k': ('0.5', '76.5'),
    'ablation/care_s0_no_early_conv_in1k': ('0.72', '78.3'),
    'ablation/care_s1_no_early_conv_in1k': ('1.03', '79.9'),
    'ablation/care_s2_no_early_conv_in1k': ('1.93', '82.0'),
    'ablation/care_s0_no_multi_scale_in1k': ('0.71', '78.1'),
    'ablation/care_s1_no_multi_scale_in1k': ('1.02', '79.8'),
    'ablation/care_s2_no_multi_scale_in1k': ('1.92', '81.8'),
}


def warm_up(**changes):
    return dict(dict(type='LinearLR', by_epoch=False, begin=0), **changes)


def poly(power, begin, end):
    return dict(type='PolyLR', power=power, eta_min=0.0, begin=begin, end=end, by_epoch=False)


IMAGENET = dict(
    optimizer=dict(type='AdamW', lr=2e-3, weight_decay=0.05),
    batch=1536,
    length=dict(max_epochs=300),
    schedule=[
        warm_up(start_factor=5e-4, by_epoch=True, end=20, convert_to_iter_based=True),
        dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=20, end=300),
    ],
)
COCO_12E = dict(
    optimizer=dict(type='AdamW', lr=2e-4, weight_decay=0.05),
    batch=24,
    length=dict(max_epochs=12),
    schedule=[
        warm_up(start_factor=0.001, end=500),
        dict(type='MultiStepLR', by_epoch=True, begin=0, end=12, milestones=[8, 11], gamma=0.1),
    ],
)
# One recipe a folder; those of configs/demo (tests/test_demo.py) and of the public sets of pictures
# (tests/test_pictures.py) are their own.
PICTURES = ('_nuclei', '_cells', '_streets')
RECIPES = {
    'mask_rcnn': COCO_12E,
    'retinanet': COCO_12E,
    'rtmdet': dict(
        optimizer=dict(type='AdamW', lr=2e-3, weight_decay=0.05),
        batch=256,
        length=dict(max_epochs=300, val_interval=10),
        schedule=[
            warm_up(start_factor=1e-5, end=1000),
            dict(
                type='CosineAnnealingLR',
                eta_min=1e-4,
                begin=150,
                end=300,
                T_max=150,
                by_epoch=True,
                convert_to_iter_based=True,
            ),
        ],
    ),
    'fpn': dict(
        optimizer=dict(type='AdamW', lr=2e-4, weight_decay=1e-4),
        batch=48,
        length=dict(max_iters=40_000),
        schedule=[poly(0.9, 0, 40_000)],
    ),
    'upernet': dict(
        optimizer=dict(type='AdamW', lr=6e-5, weight_decay=0.01),
        batch=16,
        length=dict(max_iters=160_000),
        schedule=[warm_up(start_factor=1e-6, end=1500), poly(1.0, 1500, 160_000)],
    ),
    'imagenet': IMAGENET,
    'ablation': IMAGENET,
}
WITH_RECIPE = [
    name for name in NAMES if name.split('/')[0] in RECIPES and not name.endswith(PICTURES)
]


@cache
def load(name):
    return Config.fromfile(ROOT / f'configs/{name}.py')


@cache
def build(name):
    """Build the model of a config, without values."""
    config = load(name)
    with DefaultScope.overwrite_default_scope(config.default_scope), torch.device('meta'):
        return MODELS.build(config.model)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize('name', NAMES)
def test_builds(name):
    """Backbone, neck and heads fit together; hooks and other types are found."""
    config, model = load(name), build(name)
    folder, _, stem = name.partition('/')
    out_channels = list(model.backbone.out_channels)
    if folder in ('imagenet', 'ablation'):
        assert count(model) == CLASSIFIERS[re.sub('(_distill)?_in1k', '', stem)][0]
        assert model.head.in_channels == out_channels[-1]
    else:
        arch = config.model.backbone.arch
        assert (count(model.backbone), out_channels[-1]) == BACKBONES[arch]
        if name in WITH_RECIPE:
            assert count(model) - count(model.backbone) == HEADS[folder][arch == 's2']
        takes = config.model.get('neck') or config.model.decode_head
        assert takes.in_channels == out_channels
        if 'auxiliary_head' in config.model:
            assert config.model.auxiliary_head.in_channels == out_channels[2]
    loaders = [config[f'{mode}_dataloader'] for mode in ('train', 'val', 'test')]
    for registry, types in (
        (HOOKS, [*config.default_hooks.values(), *config.get('custom_hooks', [])]),
        (TRANSFORMS, [step for loader in loaders for step in loader.dataset.pipeline]),
    ):
        with registry.switch_scope_and_registry(config.default_scope) as toolbox:
            assert [kind.type for kind in types if toolbox.get(kind.type) is None] == []


@pytest.mark.parametrize('name', WITH_RECIPE)
def test_recipe(name):
    """What the paper says, or for what it leaves open the protocol of its peers or mmdet's."""
    config = load(name)
    folder, _, stem = name.partition('/')
    recipe, backbone = RECIPES[folder], config.model.backbone
    assert config.optim_wrapper.optimizer == recipe['optimizer']
    assert config.param_scheduler == recipe['schedule']
    assert recipe['length'].items() <= dict(config.train_cfg).items()
    assert config.auto_scale_lr == dict(enable=False, base_batch_size=recipe['batch'])
    assert 8 * config.train_dataloader.batch_size == recipe['batch']
    assert backbone.drop_path_rate == 0.1 and config.sync_bn == 'torch'
    assert backbone.get('norm_eval', False) is (folder in ('mask_rcnn', 'retinanet'))
    # Exact resume needs a seed, and worker processes that do not outlive an epoch.
    assert config.randomness == dict(seed=0) and config.train_dataloader.num_workers > 0
    assert not config.train_dataloader.get('persistent_workers', False)
    hooks = {hook.type for hook in config.default_hooks.values()}
    assert hooks >= {f'mmcare.{n}Hook' for n in ('AtomicCheckpoint', 'ExactResume', 'DataCheck')}
    assert {'mmcare', 'mmcare.engine.safe_loading'} <= set(config.custom_imports.imports)
    preprocessor = config.model.get('data_preprocessor')
    assert preprocessor.mean == [123.675, 116.28, 103.53]  # RGB, as the published weights have it
    assert preprocessor.get('bgr_to_rgb', preprocessor.get('to_rgb'))
    if folder in ('imagenet', 'ablation'):
        assert 'init_cfg' not in backbone
    else:
        file = f'checkpoints/{"_".join(stem.split("_")[:2])}_in1k.pth'
        assert backbone.init_cfg == dict(type='Pretrained', checkpoint=file)


@pytest.mark.parametrize('name', ['fpn/care_s0_ade20k', 'upernet/care_s0_ade20k'])
def test_segmentation_recipe(name):
    config = load(name)
    crop = next(t for t in config.train_dataloader.dataset.pipeline if t.type == 'RandomCrop')
    preprocessor = config.model.data_preprocessor
    assert crop.crop_size == preprocessor.size == (512, 512)
    # Without it maps of different strides are stretched differently; ignored pixels do not count.
    assert preprocessor.test_cfg == dict(size_divisor=32)
    heads = [config.model[k] for k in ('decode_head', 'auxiliary_head') if k in config.model]
    assert all(head.num_classes == 150 and head.loss_decode.avg_non_ignore for head in heads)


@pytest.mark.parametrize('kind', ['in1k', 'distill_in1k'])
def test_imagenet_recipe(kind):
    config = load(f'imagenet/care_s0_{kind}')
    model = config.model
    mixes = [dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]
    assert model.train_cfg.augments == mixes
    assert model.head.loss == dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original')
    steps = {step.type: step for step in config.train_dataloader.dataset.pipeline}
    augment, erase = steps['RandAugment'], steps['RandomErasing']
    assert (augment.magnitude_level, augment.magnitude_std, augment.num_policies) == (9, 0.5, 2)
    assert erase.erase_prob == 0.25 and 'ColorJitter' not in steps
    if kind == 'distill_in1k':
        assert (model.alpha, model.teacher.model_name) == (0.5, 'regnety_160')
        assert 'distillation' not in model  # hard


@pytest.mark.parametrize('folder', RECIPES)
def test_no_weight_decay_on_norms_and_layer_scales(folder):
    name = next(name for name in WITH_RECIPE if name.startswith(f'{folder}/'))
    config, model = load(name), build(name)
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
        if isinstance(module, _BatchNorm)
        for part in ('weight', 'bias')
    }
    scales = {name for name in names.values() if name.endswith('.gamma')}
    assert norms and scales and norms | scales <= free
    matrices = {name for name, value in model.named_parameters() if value.dim() > 1}
    assert not matrices & free


def test_evaluation_is_that_of_timm(tmp_path):
    """Short side 256, bicubic, centre crop 224, mean and deviation of ImageNet, by Pillow alone."""
    noise = np.random.default_rng(0).integers(0, 256, (30, 45, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees, which timm does not
    Image.fromarray(noise).resize((450, 301)).save(tmp_path / 'image.jpg', exif=exif)
    with Image.open(tmp_path / 'image.jpg') as image:
        resized = image.convert('RGB').resize((int(256 * 450 / 301), 256), Image.Resampling.BICUBIC)
    left, top = round((resized.width - 224) / 2), 16
    cropped = np.asarray(resized.crop((left, top, left + 224, top + 224)), np.float32) / 255
    expected = (cropped - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]

    config = load('imagenet/care_s0_in1k')
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        steps = map(TRANSFORMS.build, config.test_dataloader.dataset.pipeline)
        packed = Compose(list(steps))(dict(img_path=str(tmp_path / 'image.jpg')))
        preprocessor = MODELS.build(config.model.data_preprocessor)
    batch = dict(inputs=packed['inputs'][None], data_samples=[packed['data_samples']])
    images = preprocessor(batch)['inputs']
    assert np.abs(images[0].permute(1, 2, 0).numpy() - expected).max() < 1e-4


# ------------------------------------------------------------ one-stage detectors, small


@pytest.fixture(params=[pytest.param('retinanet', marks=pytest.mark.slow), 'rtmdet'])
def task(request):
    """The runs of a test reset their default scope."""
    yield request.param
    DefaultScope._instance_dict.clear()


def test_one_stage_step(task, tmp_path):
    """A batch from the pipeline, mosaics included, gives every weight a gradient."""
    make_data(task, tmp_path / 'data')
    runner = Runner.from_cfg(toy_config(task, tmp_path / 'data', tmp_path / 'run'))
    batch = next(iter(runner.build_dataloader(runner.cfg.train_dataloader)))
    losses = runner.model.train()(**runner.model.data_preprocessor(batch, True), mode='loss')
    runner.model.parse_losses(losses)[0].backward()
    parameters = list(runner.model.parameters())
    assert all(value.grad is not None and value.grad.isfinite().all() for value in parameters)
    assert sum(bool(value.grad.any()) for value in parameters) > 0.9 * len(parameters)


@pytest.mark.slow
def test_one_stage_training(task, tmp_path):
    """Two epochs; the second alone, resumed, across a switch of pipelines; test; export."""
    data, whole, parts = (tmp_path / name for name in ('data', 'whole', 'parts'))
    make_data(task, data)
    config = toy_config(task, data, whole)
    Runner.from_cfg(config).train()
    parts.mkdir()
    shutil.copy2(whole / 'epoch_1.pth', parts)
    Runner.from_cfg(toy_config(task, data, parts, resume=True)).train()
    first, last, resumed = (
        torch.load(file, weights_only=True)
        for file in (whole / 'epoch_1.pth', whole / 'epoch_2.pth', parts / 'epoch_2.pth')
    )
    for kind in ('state_dict', 'ema_state_dict')[: 1 + (task == 'rtmdet')]:
        key = next(key for key in first[kind] if key.endswith('backbone.stem.conv.weight'))
        assert not torch.equal(first[kind][key], last[kind][key])
        assert [k for k, v in last[kind].items() if not torch.equal(v, resumed[kind][k])] == []
    last = whole / 'epoch_2.pth'
    metrics = Runner.from_cfg(toy_config(task, data, tmp_path / 'test', load_from=str(last))).test()
    assert 'coco/bbox_mAP' in metrics
    config.dump(tmp_path / 'small.py')
    report = export_backbone(
        load_source(tmp_path / 'small.py', last, 'model'), tmp_path, (64, 64), ('onnx',)
    )
    assert report['decode']['strides'][:3] == [8, 16, 32]


# ------------------------------------------------------------ what is listed


def test_index_lists_every_config_once():
    index = load_index(str(ROOT / 'model-index.yml'))
    assert index.check(silent=True) == []
    assert [model.name for model in index.models] == [model['Name'] for model in LISTED.values()]
    assert sorted(LISTED) == WITH_RECIPE
    assert all(model['Name'] == name.replace('/', '_') for name, model in LISTED.items())


def cells_of(name):
    """The row of a config in the README.md of its folder."""
    folder, _, stem = name.partition('/')
    readme = (ROOT / 'configs' / folder / 'README.md').read_text()
    (row,) = (line for line in readme.splitlines() if line.startswith(f'| [{stem}]({stem}.py)'))
    return [cell.strip() for cell in row.removesuffix('|').split('|')][1:]


@pytest.mark.parametrize('name', WITH_RECIPE)
def test_metafile_and_readme(name):
    """Their figures; mim cannot tell the paper's results from ours, so that it lists none."""
    model, metadata, cells = build(name), LISTED[name]['Metadata'], cells_of(name)
    assert 'Results' not in LISTED[name]
    assert cells[-1] == ''  # not trained by us
    assert metadata['Parameters'] == count(model)
    assert metadata['Backbone Parameters'] == count(model.backbone)
    classifier = CLASSIFIERS.get(re.sub('.*/|(_distill)?_in1k', '', name))
    assert metadata.get('GMACs at 224') == (classifier and classifier[1])
    for title, form in (
        ('Parameters', '{:,}'),
        ('Backbone Parameters', '{:,}'),
        ('Backbone GMACs', '{:.2f}'),
        ('GMACs at 224', '{:.4f}'),
    ):
        assert title not in metadata or form.format(metadata[title]) in cells
    assert set(PAPER.get(name, ())) <= set(cells)


def gmacs_at_512(network):
    """Count on two small images: the cost is a constant and a share a pixel."""
    small, large = (count_macs(network, torch.zeros(1, 3, size, size))[''] for size in (64, 128))
    return (small + (large - small) * (512**2 - 64**2) / (128**2 - 64**2)) / 1e9


@pytest.mark.slow
@pytest.mark.parametrize(
    'name', [k for k, v in LISTED.items() if 'Backbone GMACs' in v['Metadata']]
)
def test_gmacs(name):
    with DefaultScope.overwrite_default_scope(load(name).default_scope):
        model = MODELS.build(load(name).model)
    counted = LISTED[name]['Metadata']['Backbone GMACs']
    assert gmacs_at_512(model.backbone) == pytest.approx(counted, abs=0.006)
    if not name.startswith('mask_rcnn'):  # there the cost of heads depends on the proposals
        model.forward = model._forward  # without what turns maps into predictions
        assert gmacs_at_512(model) == pytest.approx(float(cells_of(name)[2]), abs=0.02)
