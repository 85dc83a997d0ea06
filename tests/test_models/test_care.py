"""The backbone: agreement with the released network, arguments, sizes, precision, training."""

import doctest
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmengine.analysis import get_model_complexity_info
from mmengine.registry import MODELS as ROOT_MODELS
from published_reference import (
    DATA,
    DEPTHS,
    published_forward,
    published_weights,
    reference_image,
)
from torch.nn.modules.batchnorm import _BatchNorm

from mmcare.models import CARE
from mmcare.models.backbones import care as care_module

PARAMETERS = {'s0': 5_285_904, 's1': 7_548_328, 's2': 16_401_144}
# GMACs of the whole classifiers in evaluation mode, and what their two heads (linear layers of
# 1000 classes) take of them.
GMACS = {
    ('s0', 224): 0.7206,
    ('s1', 224): 1.0324,
    ('s2', 224): 1.9275,
    ('s0', 512): 3.7563,
    ('s1', 512): 5.3852,
    ('s2', 512): 10.0573,
}
HEAD_GMACS = {'s0': 2.048e-3, 's1': 2.048e-3, 's2': 3.072e-3}
TINY = dict(
    depths=(1, 1, 2, 2),
    widths=(12, 12, 24, 24),
    memory_widths=(4, 4, 8, 8),
    expansions=((2, 2),) * 4,
    head_channels=(1, 1, 4, 8),
)


def published_model(variant, **arguments):
    """A backbone in evaluation mode with the reference weights."""
    model = CARE(variant, **arguments)
    model.load_state_dict(published_weights(variant))
    return model.eval()


def largest_deviation(actual, expected):
    """Largest deviation as a share of the largest magnitude of what is expected."""
    return ((actual.float() - expected.float()).abs().max() / expected.abs().max()).item()


@pytest.fixture(scope='module')
def s0():
    return published_model('s0')


# ------------------------------------------------------------ agreement


def test_reference_outputs(s0):
    reference = np.load(DATA / 'reference_s0_224x224.npz')
    with torch.no_grad():
        outputs = s0(reference_image(224, 224))
    for number, output in enumerate(outputs, 1):
        values = output.flatten()[reference[f'stage{number}_at'].astype(np.int64)].numpy()
        largest = reference[f'stage{number}_largest']
        assert np.abs(values - reference[f'stage{number}']).max() <= 1e-4 * largest
        assert output.abs().max() == pytest.approx(largest, rel=1e-4)


@pytest.mark.parametrize('variant', ['s0', 's1', 's2'])
@pytest.mark.parametrize('kernel', ['elu', 'identity'])
def test_agrees_with_published_functions(variant, kernel):
    weights = published_weights(variant)
    if kernel == 'identity':  # without a normaliser these weights grow out of all range
        weights = {
            key: value * 0.01 if key.endswith(('gamma', 'qk.weight')) else value
            for key, value in weights.items()
        }
    model = CARE(variant, feature_map=kernel).eval()
    model.load_state_dict(weights)
    image = reference_image(96, 160)
    with torch.no_grad():
        outputs = model(image)
        expected = published_forward(weights, variant, image, kernel == 'identity')
    for output, other in zip(outputs, expected, strict=True):
        assert output.shape == other.shape
        assert largest_deviation(output, other) <= 1e-4


@pytest.mark.parametrize('variant', ['s0', 's1', 's2'])
def test_parameters_and_channels(variant):
    model = CARE(variant)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[variant]
    wide, last = (192, 1536) if variant == 's2' else (128, 1024)
    assert model.out_channels == (32, 64, wide, last)
    assert CARE(variant, expand_last=False).out_channels == (32, 64, wide, wide * 2)


@pytest.mark.parametrize(
    ('variant', 'size'),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if case[1] == 512 and case[0] != 's0' else [])
        for case in GMACS
    ],
)
def test_macs(variant, size):
    counted = (
        get_model_complexity_info(
            CARE(variant).eval(), (3, size, size), show_table=False, show_arch=False
        )['flops']
        / 1e9
    )
    assert counted == pytest.approx(GMACS[variant, size] - HEAD_GMACS[variant], rel=5e-3)


# ------------------------------------------------------------ sizes


@pytest.mark.parametrize('size', [(1, 1), (31, 33), (100, 224), (97, 65), (64, 96)])
def test_any_size_equals_padding_by_hand(size):
    model = CARE(TINY, layer_scale_init_value=0.5).eval()
    height, width = size
    image = torch.randn(2, 3, height, width)
    padded = F.pad(
        image, (0, math.ceil(width / 32) * 32 - width, 0, math.ceil(height / 32) * 32 - height)
    )
    with torch.no_grad():
        outputs, expected = model(image), model(padded)
    for index, (output, other) in enumerate(zip(outputs, expected, strict=True)):
        stride = 4 * 2**index
        shape = math.ceil(height / stride), math.ceil(width / stride)
        assert output.shape[2:] == shape
        assert torch.equal(output, other[..., : shape[0], : shape[1]])


@pytest.mark.parametrize(
    ('image', 'error', 'words'),
    [
        (torch.zeros(1, 3, 0, 32), ValueError, 'empty'),
        (torch.zeros(0, 3, 32, 32), ValueError, 'empty'),
        (torch.zeros(1, 4, 32, 32), ValueError, 'in_channels'),
        (torch.zeros(3, 32, 32), ValueError, r'\(B, 3, H, W\)'),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), TypeError, 'uint8'),
    ],
)
def test_bad_images(image, error, words):
    with pytest.raises(error, match=words):
        CARE(TINY)(image)


# ------------------------------------------------------------ precision


@pytest.mark.parametrize(('dtype', 'share'), [(torch.float16, 0.01), (torch.bfloat16, 0.03)])
def test_low_precision_stays_in_range(s0, dtype, share):
    image = reference_image(800, 1344)
    with torch.no_grad():
        exact = s0(image)
        with torch.autocast('cpu', dtype):
            mixed = s0(image)
        low = published_model('s0').to(dtype)(image.to(dtype))
    for expected, *outputs in zip(exact, mixed, low, strict=True):
        for output in outputs:
            assert torch.isfinite(output).all()
            assert largest_deviation(output, expected) <= share


def test_released_order_leaves_float16():
    """The reason for float32 inside the attention: sums before the division are not finite."""
    with torch.no_grad():
        outputs = published_forward(
            published_weights('s0'), 's0', reference_image(800, 1344).half()
        )
    finite = [bool(torch.isfinite(output).all()) for output in outputs]
    assert finite == [True, True, False, False]


# ------------------------------------------------------------ gradients and training


def gradients(model, image):
    """Gradients of a random projection of all outputs, by parameter name."""
    model.zero_grad()
    outputs = model(image)
    generator = torch.Generator().manual_seed(1)
    sum(
        (output * torch.randn(output.shape, generator=generator)).sum() for output in outputs
    ).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize('expand_last', [True, False])
def test_gradients(expand_last):
    model = CARE(TINY, layer_scale_init_value=0.5, expand_last=expand_last)
    image = torch.randn(4, 3, 96, 96)
    for name, gradient in gradients(model.eval(), image).items():
        assert gradient is not None and gradient.abs().max() > 1e-4, name

    # In training a batch norm takes out what a bias before it adds to all positions alike.
    cancelled = {'stem.conv.bias'}
    if expand_last:  # the last block has no way around the norm of Inter2
        cancelled |= {
            f'stages.3.blocks.1.{name}.bias'
            for name in (
                'mixer.local_learner.conv3x3',
                'mixer.local_learner.conv7x7',
                'inter1.depthwise',
                'inter1.project',
            )
        }
    found = gradients(model.train(), image)
    largest = max(gradient.abs().max() for gradient in found.values())
    vanishing = {name for name, gradient in found.items() if gradient.abs().max() < 1e-6 * largest}
    assert vanishing == cancelled


def test_layer_scale_and_drop_path():
    model = CARE(TINY, layer_scale_init_value=0.25, drop_path_rate=0.5)
    blocks = [block for stage in model.stages for block in stage.blocks]
    assert [block.drop_path.drop_prob for block in blocks[:-1]] == pytest.approx(
        [0, 0.1, 0.2, 0.3, 0.4]
    )
    assert all((block.gamma == 0.25).all() for block in blocks[:-1])
    assert not hasattr(blocks[-1], 'gamma')
    assert (
        CARE(TINY, drop_path_rate=0.5, expand_last=False).stages[3].blocks[-1].drop_path.drop_prob
        == 0.5
    )


def test_initialisation():
    model = CARE('s0')
    model.init_weights()
    weight = model.stages[3].blocks[0].inter2.expand.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert weight.abs().max() < 0.15
    for name, parameter in model.named_parameters():
        if name.endswith('bias'):
            assert not parameter.any(), name
        elif 'norm' in name:
            assert (parameter == 1).all(), name
        elif name.endswith('gamma'):
            assert (parameter == 1e-6).all(), name


def test_checkpointing_keeps_gradients_and_statistics():
    image = torch.randn(2, 3, 64, 64)
    found = []
    for with_cp in (False, True):
        torch.manual_seed(3)
        model = CARE(TINY, with_cp=with_cp, drop_path_rate=0.5, layer_scale_init_value=0.5)
        saved = 0

        def count(tensor):
            nonlocal saved
            saved += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            outputs = model(image)
        sum(output.square().sum() for output in outputs).backward()
        found.append(
            (
                saved,
                {name: p.grad for name, p in model.named_parameters()},
                dict(model.named_buffers()),
            )
        )
    (plain_saved, plain, statistics), (saved, recomputed, other_statistics) = found
    assert saved < plain_saved / 3
    for name, gradient in plain.items():
        assert torch.equal(gradient, recomputed[name]), name
    for name, buffer in statistics.items():
        assert torch.equal(buffer, other_statistics[name]), name


def test_compiled():
    """Checkpointed training and evaluation, as MMEngine's ``compile`` has them."""
    image = torch.randn(2, 3, 64, 64)
    found = []
    for compiled in (False, True):
        torch.manual_seed(3)
        model = CARE(
            TINY,
            out_indices=(0, 2),
            with_cp=True,
            drop_path_rate=0.5,
            layer_scale_init_value=0.5,
        )
        run = torch.compile(model, backend='aot_eager') if compiled else model
        outputs = run(image)
        sum(output.square().sum() for output in outputs).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        buffers = dict(model.named_buffers())
        with torch.no_grad():
            model.eval()
            predicted = run(image)
        found.append((outputs, gradients, buffers, predicted))
    torch._dynamo.reset()
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize('frozen_stages', [-1, 0, 1, 3, 4])
def test_freezing(frozen_stages):
    model = CARE(TINY, frozen_stages=frozen_stages)
    # Before train() is called, too: distributed wrappers ask once which parameters train.
    assert model.stem.conv.weight.requires_grad is (frozen_stages < 0)
    assert model.train() is model
    parts = [model.stem, *model.stages]
    for index, part in enumerate(parts):
        frozen = index <= frozen_stages
        assert part.training is not frozen
        assert all(parameter.requires_grad is not frozen for parameter in part.parameters())
    assert all(not module.training for module in model.eval().modules())


@pytest.mark.parametrize('norm_eval', [True, False])
def test_norm_eval(norm_eval):
    model = CARE(TINY, norm_eval=norm_eval).train()
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    assert norms and all(norm.training is not norm_eval for norm in norms)
    assert model.stages[0].training and all(norm.weight.requires_grad for norm in norms)


def test_stages_behind_the_last_output_are_not_built():
    model = CARE('s0', out_indices=(0, 2))
    assert model.out_channels == (32, 128)
    outputs = model(torch.randn(2, 3, 64, 64))
    assert [output.shape[1] for output in outputs] == [32, 128]
    assert len(model.stages) == 3
    sum(output.sum() for output in outputs).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ('norm_cfg', 'kind'),
    [
        (dict(type='BN'), torch.nn.BatchNorm2d),
        (dict(type='LN', eps=1e-6), torch.nn.LayerNorm),
        (dict(type='GN', num_groups=4), torch.nn.GroupNorm),
    ],
)
def test_output_norms(norm_cfg, kind):
    model = CARE(TINY, out_indices=(1, 3), out_norm_cfg=norm_cfg).eval()
    assert set(model.out_norms) == {'1', '3'}
    assert all(isinstance(norm, kind) for norm in model.out_norms.values())
    raw = CARE(TINY, out_indices=(1, 3)).eval()
    raw.load_state_dict(model.state_dict())
    image = torch.randn(1, 3, 50, 50)
    with torch.no_grad():
        outputs, states = model(image), raw(image)
    if kind is torch.nn.LayerNorm:
        expected = F.layer_norm(states[0].movedim(1, -1), (16,), eps=1e-6).movedim(-1, 1)
        assert torch.allclose(outputs[0], expected, atol=1e-6)
    assert not torch.equal(outputs[1], states[1]) or kind is torch.nn.BatchNorm2d


def test_layer_depth():
    model = CARE(TINY)
    depths = {
        name: model.get_layer_depth(f'backbone.{name}', 'backbone.')
        for name, _ in model.named_parameters()
    }
    assert depths['stem.conv.weight'] == (0, 8)
    assert depths['stages.0.blocks.0.gamma'] == (1, 8)
    assert depths['stages.2.downsample.conv.weight'] == (3, 8)
    assert depths['stages.2.blocks.1.gamma'] == (4, 8)
    assert depths['stages.3.blocks.1.inter2.expand.bias'] == (6, 8)
    assert model.get_layer_depth('head.fc.weight', 'backbone.') == (7, 8)
    assert {depth for depth, _ in depths.values()} == set(range(7))


# ------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ('arguments', 'error', 'words'),
    [
        (dict(arch='s3'), ValueError, r"arch='s3'.*'s0', 's1', 's2'"),
        (dict(arch=3), TypeError, 'arch must be'),
        (
            dict(arch={key: TINY[key] for key in TINY if key != 'depths'}),
            ValueError,
            r"missing: \['depths'\]",
        ),
        (dict(arch={**TINY, 'heads': 1}), ValueError, r"unknown: \['heads'\]"),
        (dict(arch={**TINY, 'depths': (1, 1, 1)}), ValueError, r"arch\['depths'\].*4 stages"),
        (dict(arch={**TINY, 'depths': (1, 1, 0, 1)}), ValueError, r"arch\['depths'\].*at least 1"),
        (dict(arch={**TINY, 'depths': (1, 1, 1.5, 1)}), TypeError, r"arch\['depths'\].*integers"),
        (dict(arch={**TINY, 'widths': (12, 12, 25, 24)}), ValueError, r"arch\['widths'\].*by 3"),
        (
            dict(arch={**TINY, 'expansions': (4, 4, 4, 4)}),
            ValueError,
            r"arch\['expansions'\].*pair",
        ),
        (
            dict(arch={**TINY, 'head_channels': (1, 1, 3, 8)}),
            ValueError,
            r"arch\['head_channels'\].*3 does not divide 8",
        ),
        (dict(in_channels=0), ValueError, 'in_channels'),
        (dict(out_indices=()), ValueError, 'out_indices'),
        (dict(out_indices=(0, 4)), ValueError, r'out_indices.*0 to 3'),
        (dict(out_indices=(2, 1)), ValueError, 'out_indices.*ascending'),
        (dict(out_indices=3), TypeError, 'out_indices'),
        (dict(drop_path_rate=-0.1), ValueError, r'drop_path_rate.*\[0, 1\).*-0.1'),
        (dict(drop_path_rate=1.0), ValueError, 'drop_path_rate'),
        (dict(layer_scale_init_value=-1.0), ValueError, 'layer_scale_init_value'),
        (dict(frozen_stages=5), ValueError, 'frozen_stages.*-1.*4'),
        (dict(frozen_stages=1.0), ValueError, 'frozen_stages.*-1.*4'),
        (dict(feature_map='relu'), ValueError, "feature_map.*'elu', 'identity'"),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        CARE(**arguments)


def test_arch_by_dict_and_depths():
    by_name, by_dict = (
        CARE('s2'),
        CARE({key: list(value) for key, value in CARE.arch_zoo['s2'].items()}),
    )
    assert by_name.arch == by_dict.arch
    assert [len(stage.blocks) for stage in by_dict.stages] == list(DEPTHS['s2'])


# ------------------------------------------------------------ registries


@pytest.mark.parametrize('codebase', ['mmdet', 'mmseg', 'mmpretrain'])
def test_builds_in_every_codebase(codebase, tmp_path):
    """In a process of its own: custom_imports in a config, then the codebase's registry."""
    config = tmp_path / 'config.py'
    config.write_text("custom_imports = dict(imports=['mmcare'])")
    program = f"""
from mmengine.config import Config
Config.fromfile({str(config)!r})
import sys
assert not {{'mmdet', 'mmseg', 'mmpretrain'}} & set(sys.modules), 'mmcare imported a codebase'
from {codebase}.registry import MODELS
from mmengine.registry import init_default_scope
init_default_scope('{codebase}')
for type_name in ('CARE', 'mmcare.CARE'):
    print('built', MODELS.build(dict(type=type_name, arch='s0')).__module__)
"""
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True)
    assert done.stdout.count('built mmcare.models.backbones.care') == 2, done.stderr


def test_builds_in_mmengine():
    for type_name in ('CARE', 'mmcare.CARE'):
        assert isinstance(ROOT_MODELS.build(dict(type=type_name, arch=TINY)), CARE)


def test_meta_device():
    """Shapes without memory or arithmetic, as tools that count parameters ask for them."""
    with torch.device('meta'):
        model = CARE('s1')
        outputs = model(torch.empty(1, 3, 64, 96))
    assert [output.shape[1] for output in outputs] == list(model.out_channels)


def test_docstring_example():
    results = doctest.testmod(care_module)
    assert results.attempted > 4 and results.failed == 0
