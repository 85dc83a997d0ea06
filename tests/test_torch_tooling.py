"""What works with a ResNet of torchvision works with a CARE: hooks, changed layers, arguments."""

import pytest
import torch
from helpers import THIN, thin_backbone
from torch import nn
from torch.ao import quantization
from torch.nn.utils import parametrizations, prune, weight_norm

from mmcare.models import CARE

IMAGE = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def test_every_module_is_called():
    """So that hooks, and a forward of the instance (as of accelerate's offloading), take part."""
    model, called = thin_backbone(out_norm_cfg=dict(type='LN')), set()
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: called.add(m))
    try:
        model(IMAGE)
    finally:
        handle.remove()
    lists = (nn.ModuleList, nn.ModuleDict)
    assert {type(m) for m in set(model.modules()) - called} <= {*lists}


def test_vmap_and_a_wrapped_stem():
    model, images = thin_backbone(), torch.randn(2, 1, 3, 50, 70)
    expected = torch.stack([model(image)[3] for image in images])
    model.stem = nn.Sequential(model.stem)
    torch.testing.assert_close(torch.vmap(lambda image: model(image)[3])(images), expected)


def hook(conv):
    conv.register_forward_hook(lambda module, inputs, output: 2 * output)


def replace_forward(conv):
    conv.forward = lambda x: 2 * type(conv).forward(conv, x)


def prune_half(conv):
    prune.random_unstructured(conv, 'weight', 0.5)


CONVS = [
    (name, change)
    for name in ('stem.conv', 'stages.1.blocks.0.inter2.expand')
    for change in (hook, replace_forward, prune_half, weight_norm, parametrizations.spectral_norm)
]
NORMS = [('stages.2.downsample.norm', change) for change in (hook, replace_forward)]


@pytest.mark.parametrize(('name', 'change'), [*CONVS, *NORMS])
def test_fusing_refuses_what_it_would_lose(name, change):
    model = thin_backbone()
    change(model.get_submodule(name))
    expected = model(IMAGE)
    with pytest.raises(RuntimeError, match=rf'{name} .* cannot be fused'):
        model.switch_to_deploy()
    assert not model.deploy
    torch.testing.assert_close(model(IMAGE), expected, rtol=0, atol=0)


def test_fusing_refuses_fake_quantization():
    model = thin_backbone().train()
    model.qconfig = quantization.get_default_qat_qconfig('x86')
    quantization.prepare_qat(model, inplace=True)
    model.apply(lambda module: module._forward_hooks.clear())  # of observers
    with pytest.raises(RuntimeError, match='cannot be fused'):
        model.switch_to_deploy()


@pytest.mark.parametrize(
    ('given', 'expected'), [(2, (2,)), (-1, (3,)), ((-3, -1), (1, 3)), ([0, 3], (0, 3))]
)
def test_out_indices(given, expected):
    model = CARE(THIN, out_indices=given)
    assert model.out_indices == expected and len(model(IMAGE)) == len(expected)


def test_other_entries_of_init_cfg_apply(tmp_path):
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
