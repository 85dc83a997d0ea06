"""What works with a ResNet of torchvision works with a CARE: a line for each everyday flow."""

import copy

import pytest
import torch
from helpers import THIN, newer, thin_backbone
from torch import nn
from torch.ao import quantization
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils import weight_norm as old_weight_norm

from mmcare.models import CARE

weight_norm = getattr(parametrizations, 'weight_norm', old_weight_norm)  # new in PyTorch 2.1
IMAGE = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def compile_stage(model):
    model.stages[1] = torch.compile(model.stages[1], backend='eager')


def wrap_blocks(model):
    model.stages[2].blocks[0] = checkpoint_wrapper(model.stages[2].blocks[0])


def add_buffer(model):
    model.stem.register_buffer('scratch', torch.zeros(3), persistent=False)


class WithExtraState(CARE):
    """Part of a program that keeps state of its own in checkpoints."""

    def get_extra_state(self):
        return dict(epoch=3)

    def set_extra_state(self, state):
        assert state == dict(epoch=3)


def keep_extra_state(model):
    model.__class__ = WithExtraState


def quantize(model):
    model.stem.qconfig = quantization.get_default_qconfig('x86')
    quantization.convert(quantization.prepare(model, inplace=True), inplace=True)


def prepare_qat(model):
    model.train().qconfig = quantization.get_default_qat_qconfig('x86')
    quantization.prepare_qat(model, inplace=True)


@pytest.mark.parametrize(
    'change',
    [
        pytest.param(compile_stage, marks=newer),
        wrap_blocks,
        add_buffer,
        keep_extra_state,
        quantize,
        prepare_qat,
    ],
)
def test_a_model_loads_its_own_state_dict(change):
    model = thin_backbone()
    change(model)
    saved = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not any(model.load_state_dict(saved))
    torch.testing.assert_close(dict(model.state_dict()), dict(saved), rtol=0, atol=0)


@newer
def test_fully_sharded(tmp_path):
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.fsdp import fully_shard

    init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        model = thin_backbone()
        saved = copy.deepcopy(model.state_dict())
        mesh = torch.distributed.init_device_mesh('cpu', (1,))
        for stage in model.stages:
            for block in stage.blocks:
                fully_shard(block, mesh=mesh)
        assert not any(model.load_state_dict(model.state_dict()))
        gamma = model.state_dict()['stages.0.blocks.0.gamma'].full_tensor()
        assert torch.equal(gamma, saved['stages.0.blocks.0.gamma'])
    finally:
        destroy_process_group()


class LowRank(nn.Module):
    """LoRA as a parametrization of a 1x1 convolution."""

    def __init__(self, weight):
        super().__init__()
        self.down = nn.Parameter(torch.ones(1, weight.shape[1]))
        self.up = nn.Parameter(torch.ones(weight.shape[0], 1))

    def forward(self, weight):
        return weight + (self.up @ self.down)[..., None, None]


def low_rank(conv):
    parametrize.register_parametrization(conv, 'weight', LowRank(conv.weight))


@pytest.mark.parametrize('part', ['gamma', 'parametrizations.weight.0', 'stem.'])
def test_parts_of_a_state_dict(part):
    """As PyTorch does: what is given is loaded, and the other names are returned."""
    model, source = thin_backbone(), thin_backbone(drop_path_rate=0.1)
    for each in (model, source):
        low_rank(each.stages[0].blocks[0].inter1.expand)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1)
    given = {key: value for key, value in source.state_dict().items() if part in key}
    keys = model.load_state_dict({**given, 'other': torch.ones(1)}, strict=False)
    expected = {k for k in model.state_dict().keys() - given if 'num_batches' not in k}
    assert given and set(keys.missing_keys) == expected
    assert keys.unexpected_keys == ['other']
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in given.items())
    with pytest.raises(RuntimeError, match='Missing key'):
        model.load_state_dict(given)


def test_float_weights_go_into_a_model_prepared_for_qat():
    model, source = CARE(THIN), thin_backbone()
    prepare_qat(model)
    missing, unexpected = model.load_state_dict(source.state_dict(), strict=False)
    assert missing and all('fake_quant' in k or 'post_process' in k for k in missing)
    assert not unexpected and torch.equal(model.stem.conv.weight, source.stem.conv.weight)


def test_every_module_is_called():
    model, called = thin_backbone(out_norm_cfg=dict(type='LN')), set()
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: called.add(m))
    try:
        model(IMAGE)
    finally:
        handle.remove()
    lists = (nn.ModuleList, nn.ModuleDict)
    assert {type(m) for m in set(model.modules()) - called} <= {*lists}


@pytest.mark.parametrize('name', ['stem.norm', 'stages.0.blocks.0.inter1.norm'])
def test_the_forward_of_an_instance_is_used(name):
    """As accelerate's offloading replaces it."""
    model, norm = thin_backbone(), thin_backbone().get_submodule(name)
    expected = model(IMAGE)
    model.get_submodule(name).weight.data.zero_()
    model.get_submodule(name).forward = norm.forward
    torch.testing.assert_close(model(IMAGE), expected)


def hook(conv):
    conv.register_forward_hook(lambda module, inputs, output: 2 * output)


def replace_forward(conv):
    conv.forward = lambda x: 2 * type(conv).forward(conv, x)


def prune_half(conv):
    prune.random_unstructured(conv, 'weight', 0.5)


CONVS = [
    (name, change)
    for name in ('stem.conv', 'stages.1.blocks.0.inter2.expand')
    for change in (hook, replace_forward, prune_half, low_rank, weight_norm, old_weight_norm)
]
NORMS = [('stages.2.downsample.norm', change) for change in (hook, replace_forward)]


@pytest.mark.parametrize(('name', 'change'), [*CONVS, *NORMS])
def test_folding_refuses_what_it_would_lose(name, change):
    model = thin_backbone()
    change(model.get_submodule(name))
    expected = model(IMAGE)
    with pytest.raises(RuntimeError, match=rf'{name} .* cannot be folded'):
        model.switch_to_deploy()
    assert not model.deploy
    torch.testing.assert_close(model(IMAGE), expected, rtol=0, atol=0)


def test_folding_refuses_fake_quantization():
    model = thin_backbone()
    prepare_qat(model)
    model.apply(lambda module: module._forward_hooks.clear())  # of observers
    with pytest.raises(RuntimeError, match='cannot be folded'):
        model.switch_to_deploy()


@pytest.mark.parametrize(
    ('given', 'expected'), [(2, (2,)), (-1, (3,)), ((-3, -1), (1, 3)), ([0, 3], (0, 3))]
)
def test_out_indices(given, expected):
    model = CARE(THIN, out_indices=given)
    assert model.out_indices == expected and len(model(IMAGE)) == len(expected)


def test_what_is_next_to_a_file_in_init_cfg_is_applied(tmp_path):
    """MMEngine applies all entries of a list, a file last; output norms are not in the file."""
    torch.save(thin_backbone().state_dict(), tmp_path / 'file.pth')
    model = CARE(
        THIN,
        out_norm_cfg=dict(type='LN'),
        init_cfg=[
            dict(type='Constant', layer=['LayerNorm'], val=0.25),
            dict(type='Pretrained', checkpoint=str(tmp_path / 'file.pth')),
        ],
    )
    model.init_weights()
    assert (model.out_norms['3'].weight == 0.25).all()
    assert torch.equal(model.stem.conv.weight, thin_backbone().stem.conv.weight)
