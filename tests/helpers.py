"""What several test modules share: a small network, reference weights, commands, the MM stack."""

import gzip
import json
import os
import runpy
import subprocess
import sys
import zlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mmengine.config.config
import mmengine.runner.runner
import numpy as np
import pytest
import torch
from mmengine.model import BaseModel
from mmengine.registry import DefaultScope

from mmcare.models import CARE
from mmcare.models.backbones.care import LinearAttention
from mmcare.weights.names import from_published, to_published

os.environ.setdefault('CUDA_VISIBLE_DEVICES', '-1')  # as in `make test`; `make test-cuda` has a GPU
# Both take seconds of each runner, for its log: line breaks in configs, versions of compilers.
mmengine.config.config.FormatCode = lambda text, **_: (text, True)
mmengine.runner.runner.collect_env = dict
IS_NEW = tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 6)  # as exports need it
newer = pytest.mark.skipif(not IS_NEW, reason='for PyTorch 2.6 and later')
ROOT = Path(__file__).resolve().parents[1]
DATA = Path(__file__).parent / 'data'

try:
    version('onedl-mmengine')
    FORKS = True  # the maintained forks of the MM family (onedl-*) differ in a few places
except PackageNotFoundError:
    FORKS = False

# One narrow block a stage: builds, trains and exports within a second.
THIN = dict(
    depths=(1, 1, 1, 1),
    widths=(12, 12, 24, 24),
    memory_widths=(4, 4, 8, 8),
    expansions=((2, 2), (2, 3), (3, 2), (2, 4)),
    head_channels=(4, 4, 8, 8),
)


@pytest.fixture(autouse=True)
def seeded():
    """Start every test from the same generator state, and leave no toolbox selected."""
    torch.manual_seed(0)
    yield
    DefaultScope._instance_dict.clear()


def thin_backbone(kind=CARE, **arguments):
    """A thin CARE whose running statistics and layer scales show in the results."""
    torch.manual_seed(3)
    backbone = kind(**dict(dict(arch=THIN, layer_scale_init_value=0.3), **arguments))
    for module in backbone.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.bias)
    return backbone.eval()


@torch.no_grad()
def craft_heads(model, bias, parts=('queries', 'keys'), heads=1):
    """Set biases of queries and keys of each attention's first heads, in place; None: of all.

    Training switches heads off so, by strongly negative values.
    """
    for attention in model.modules():
        if isinstance(attention, LinearAttention):
            end = None if heads is None else heads * attention.head_channels
            for part, each in zip(('queries', 'keys'), attention.query_key.bias.chunk(2)):
                if part in parts:
                    each[:end] = bias
    return model


class Images(BaseModel):
    """A model around a thin CARE, on images made of the samples of toy_training.py, (B, 4)."""

    def __init__(self, **arguments):
        super().__init__()
        self.backbone = thin_backbone(**arguments)
        self.neck = torch.nn.Linear(128, 1)

    def forward(self, inputs, mode='tensor'):
        rows = torch.linspace(-1, 1, 64, device=inputs.device)[:, None].expand(64, 32)
        self.maps = self.backbone(inputs.sin()[:, :3, None, None] * rows)
        return dict(loss=self.neck(self.maps[-1].mean((2, 3))).square().mean())


def randomise(model):
    """Give every tensor of a model a value that no initialisation has."""
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.5)
    return model


def random_backbone(kind=CARE, **arguments):
    return randomise(kind(**{'arch': THIN, **arguments}))


def published_state(backbone):
    shapes = {'norm.weight': 128, 'norm.bias': 128, 'fc.weight': (10, 128), 'fc.bias': 10}
    heads = {f'{h}.{n}': torch.rand(s) for h in ('head', 'dist_head') for n, s in shapes.items()}
    return {**to_published(backbone.state_dict()), **heads}


def deviation(expected, found):
    """Largest difference of outputs, as a share of each one's largest magnitude."""
    assert [(a.shape, a.dtype) for a in expected] == [(o.shape, o.dtype) for o in found]
    shares = [(a - b).abs().max() / a.abs().max() for a, b in zip(expected, found)]
    return torch.stack(shares).max().item()


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def warned(logged, words):
    """The warnings that say some words, of those that the fixture ``logged`` has."""
    return [text for level, text in logged if level == 'WARNING' and words in text]


def run_tool(monkeypatch, name, *arguments):
    """Run a tool in this process, as if it were typed."""
    path = str(ROOT / f'tools/{name}.py')
    monkeypatch.setattr(sys, 'argv', [path, *map(str, arguments)])
    runpy.run_path(path, run_name='__main__')


def run(*command, cwd=None, check=True, **environment):
    """Run a command with the interpreter's folder first on PATH; show its output if it fails."""
    path = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
    env = {**os.environ, 'PATH': path, **environment}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert not check or done.returncode == 0, f'{done.stdout}\n{done.stderr}'
    return done


KEYS = json.loads(gzip.decompress((DATA / 'published_keys.json.gz').read_bytes()))


def published_weights(variant):
    """Draw a state dict under the published keys, each tensor from its key's CRC-32."""
    return {
        key: torch.from_numpy(np.asarray(_draw(key, tuple(shape))))
        for key, shape in KEYS[variant].items()
    }


def load_published(backbone, variant):
    state = from_published(published_weights(variant))
    backbone.load_state_dict({k: v for k, v in state.items() if not k.startswith('head.')})
    return backbone.eval()


def reference_image(height, width):
    """Draw the (1, 3, height, width) image that belongs to the weights."""
    rng = np.random.default_rng(height * 10007 + width)
    return torch.from_numpy(rng.standard_normal((1, 3, height, width)).astype(np.float32))


def _draw(key, shape):
    rng = np.random.default_rng(zlib.crc32(key.encode()))
    if key.endswith('num_batches_tracked'):
        return np.zeros(shape, np.int64)
    if key.endswith('running_var'):
        drawn = rng.uniform(0.5, 1.5, shape)
    elif key.endswith('gamma'):
        drawn = rng.uniform(0.1, 0.4, shape)
    elif len(shape) >= 2:
        drawn = rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
    elif key.endswith('weight'):
        drawn = rng.uniform(0.7, 1.3, shape)
    else:
        drawn = 0.1 * rng.standard_normal(shape)
    return drawn.astype(np.float32)
