"""Parameters and multiply-adds of CARE networks, by stage and by part, with mmengine.analysis.

mmengine.analysis counts in evaluation mode. A multiply-add of a convolution, a linear layer or a
matrix product is one; batch norm is 2 an element, layer norm 5. Sums and products of single
elements (shortcuts, layer scale), activations and means are not counted. mmengine does count
``adaptive_avg_pool2d``, which is a mean: here it is left out, so that the figure of a network does
not depend on how its pooling is written.

The network runs once, on an image of zeros and on the CPU, while mmengine.analysis traces it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mmengine.analysis import FlopAnalyzer, parameter_count
from mmengine.registry import MODELS as MMENGINE_MODELS
from torch import Tensor, nn

from mmcare.config import building_from, builds, read_config
from mmcare.models import CARE
from mmcare.models.backbones.care import NUM_STAGES, TOTAL_STRIDE

NUM_CLASSES = 1000  # of the published classifiers
STAGES = tuple(str(number) for number in range(1, NUM_STAGES + 1))
HEAD_STAGE = 'head'  # what stands in place of a stage for what is behind all of them
# Parts by the first of these names in the path of a module or parameter.
PART_BY_NAME = {
    'stem': 'stem',
    'downsample': 'downsampling',
    'local_learner': 'local',
    'local_learner1': 'local',
    'local_learner2': 'local',
    'global_learner': 'global',
    'inter1': 'Inter1',
    'inter2': 'Inter2',
    'gamma': 'layer scale',
    'out_norms': 'output norms',
    'neck': 'head',
    'head': 'head',
}
PARTS = (*dict.fromkeys(PART_BY_NAME.values()), 'other')


@dataclass(frozen=True)
class Share:
    """What one part of one stage has of a network's parameters and multiply-adds.

    Attributes:
        stage: ``'1'`` to ``'4'``, or ``'head'`` for what is behind them; the stem is of stage 1.
        part: One of :data:`PARTS`. Norms belong to the part that they stand before.
        params: Number of parameters.
        macs: Multiply-adds for one image.
    """

    stage: str
    part: str
    params: int
    macs: int


@dataclass(frozen=True)
class Complexity:
    """Parameters and multiply-adds of a network.

    Attributes:
        name: Of the network.
        shape: Height and width of the image.
        shares: One for each part of each stage that has parameters or multiply-adds.
    """

    name: str
    shape: tuple[int, int]
    shares: tuple[Share, ...]

    @property
    def params(self) -> int:
        """All parameters."""
        return sum(share.params for share in self.shares)

    @property
    def macs(self) -> int:
        """All multiply-adds for one image."""
        return sum(share.macs for share in self.shares)

    def total(self, quantity: str, stage: str | None = None, part: str | None = None) -> int:
        """Sum ``'params'`` or ``'macs'`` over what is of a stage, of a part, or of both."""
        return sum(
            getattr(share, quantity)
            for share in self.shares
            if stage in (None, share.stage) and part in (None, share.part)
        )


class PooledHeads(nn.Module):
    """The two heads of the published classifiers, of plain PyTorch modules.

    Global average pooling, GELU, layer norm and a linear layer, for classes and for distillation;
    in evaluation mode the logits are averaged. Here for their cost; to train or to load weights,
    take ``mmcare.CAREClsHead`` in mmpretrain.

    Args:
        channels: Channels of the last map.
        num_classes: Classes of each head.
    """

    def __init__(self, channels: int, num_classes: int = NUM_CLASSES) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(
                nn.GELU(), nn.LayerNorm(channels, eps=1e-6), nn.Linear(channels, num_classes)
            )
            for _ in range(2)
        )

    def forward(self, maps: tuple[Tensor, ...]) -> Tensor:
        """Map the backbone's maps, the last of which is (B, C, H, W), to logits (B, classes)."""
        pooled = maps[-1].mean(dim=(2, 3))
        return sum(head(pooled) for head in self.heads) / len(self.heads)


class _Network(nn.Module):
    """A backbone with what is behind it, called one after the other.

    For the classifiers of a config this leaves out what takes no part in a prediction, such as a
    teacher.
    """

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        """Map images (B, C, H, W) to maps, or to logits where there is a head."""
        for module in self.children():
            x = module(x)
        return x


def check_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Check the height and width of an image.

    Raises:
        TypeError: If these are not two integers.
        ValueError: If one is smaller than the stride of the last map.
    """
    if not isinstance(shape, Sequence) or len(shape) != 2:
        raise TypeError(f'shape must be height and width, got {shape!r}')
    for side in shape:
        if not isinstance(side, int) or isinstance(side, bool):
            raise TypeError(f'shape must be two integers, height and width, got {shape!r}')
        if side < TOTAL_STRIDE:
            raise ValueError(
                f'height and width must be at least {TOTAL_STRIDE}, the stride of the last map, '
                f'got {tuple(shape)}'
            )
    height, width = shape
    return height, width


def build_network(
    arch: str | Mapping[str, Sequence], head: bool = True, **arguments: Any
) -> nn.Module:
    """Build the classifier of an arch, or its backbone alone, without mmpretrain.

    Args:
        arch: As for :class:`mmcare.models.CARE`.
        head: Whether to add the two heads of 1000 classes.
        **arguments: Of the backbone, such as ``inter1=False``.

    Raises:
        TypeError: If an argument of the backbone has the wrong type.
        ValueError: If the arch is unknown, or an argument is outside of what is allowed.
    """
    backbone = CARE(arch, **arguments)
    if not head:
        return _Network(backbone=backbone)
    return _Network(backbone=backbone, head=PooledHeads(backbone.out_channels[-1]))


def build_from_config(path: str | Path, head: bool = True) -> nn.Module:
    """Build the CARE backbone of a config, and its neck and head if it is of a classifier.

    Weights that the config names are not read. What stands behind the backbone of a detector or a
    segmentor is left out.

    Args:
        path: A config of mmdet, mmseg, mmpretrain or another project on MMEngine.
        head: Whether to add the head of a classifier (of ``default_scope='mmpretrain'``).

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the config cannot be read, or has no CARE backbone.
    """
    config = read_config(path)
    model = config.get('model') or {}
    backbone = model.get('backbone') if isinstance(model, Mapping) else None
    if not builds(backbone, CARE):
        found = backbone.get('type') if isinstance(backbone, Mapping) else None
        raise ValueError(
            f'{path} has no CARE backbone: model.backbone.type must be mmcare.CARE, '
            + (f'and is {found}' if found else 'and there is none')
        )
    scope = config.get('default_scope')
    parts = {'backbone': backbone}
    if head and scope == 'mmpretrain':
        parts |= {name: model[name] for name in ('neck', 'head') if model.get(name)}
    with building_from(path):
        return _Network(
            **{
                name: MMENGINE_MODELS.build({**part, '_scope_': scope})
                for name, part in parts.items()
            }
        )


def build_model(source: str, head: bool = True) -> tuple[str, nn.Module]:
    """Build a network by the name of its arch or by its config.

    Args:
        source: An arch of :class:`mmcare.models.CARE`, or the path of a config (``.py``).
        head: Whether to add the heads of a classifier.

    Returns:
        What to call it, and the network.

    Raises:
        FileNotFoundError: If there is no such config.
        ValueError: If the arch is unknown, the config cannot be read, or it has no CARE backbone.
    """
    if source in CARE.arch_zoo:
        return f'care_{source}', build_network(source, head)
    if Path(source).suffix != '.py':
        raise ValueError(
            f'{source!r} is neither an arch ({", ".join(CARE.arch_zoo)}) nor the path of a '
            'config (.py)'
        )
    return Path(source).stem, build_from_config(source, head)


def count_complexity(
    network: nn.Module, shape: Sequence[int] = (224, 224), name: str = 'CARE'
) -> Complexity:
    """Count the parameters and multiply-adds of a network, by stage and by part.

    Args:
        network: Of :func:`build_network` or :func:`build_from_config`, or any other that holds a
            CARE as ``backbone`` and maps images to something. It is left as it was.
        shape: Height and width of the image. CARE pads to multiples of 32, and the padding counts.
        name: What to call it.

    Returns:
        Shares whose sums are exactly what mmengine.analysis counts for the whole network.

    Raises:
        TypeError: If ``shape`` is not two integers, or the network's backbone no CARE.
        ValueError: If the image is smaller than 32 x 32.
    """
    height, width = check_shape(shape)
    backbone = getattr(network, 'backbone', None)
    if not isinstance(backbone, CARE):
        raise TypeError(
            f'the network must have a CARE as its attribute backbone, got {type(backbone).__name__}'
        )
    macs = macs_by_module(network, torch.zeros(1, backbone.in_channels, height, width))
    params = parameter_count(network)
    sums: dict[tuple[str, str], list[int]] = {}
    for path, module in network.named_modules():
        prefix = f'{path}.' if path else ''
        # What a module has beside its children. Parameters are counted one by one, since gamma is
        # a part of its own inside a block.
        own_macs = macs[path] - sum(macs[prefix + child] for child, _ in module.named_children())
        sums.setdefault(_place(path), [0, 0])[1] += own_macs
        for parameter, _ in module.named_parameters(recurse=False):
            sums.setdefault(_place(prefix + parameter), [0, 0])[0] += params[prefix + parameter]
    order = (*STAGES, HEAD_STAGE)
    shares = sorted(
        (Share(*place, *counts) for place, counts in sums.items() if any(counts)),
        key=lambda share: (order.index(share.stage), PARTS.index(share.part)),
    )
    return Complexity(name, (height, width), tuple(shares))


def _place(path: str) -> tuple[str, str]:
    """Stage and part of a module or parameter."""
    names = path.split('.')
    part = next((PART_BY_NAME[name] for name in names if name in PART_BY_NAME), 'other')
    for container in ('stages', 'out_norms'):
        if container in names[:-1]:
            return STAGES[int(names[names.index(container) + 1])], part
    return (STAGES[0] if part == 'stem' else HEAD_STAGE), part


def macs_by_module(module: nn.Module, x: Tensor) -> Counter[str]:
    """Count multiply-adds of ``module(x)`` by the names of its modules; ``''`` has all of them."""
    analyzer = FlopAnalyzer(module, (x,))
    # A handle of None would leave mmengine's own in place.
    analyzer.set_op_handle('aten::adaptive_avg_pool2d', lambda inputs, outputs: 0)
    # What is not counted is known: see the top of this file.
    analyzer.unsupported_ops_warnings(False)
    analyzer.uncalled_modules_warnings(False)
    analyzer.tracer_warnings('none')
    with torch.no_grad(), _evaluating(module):
        return analyzer.by_module()


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and each of its modules back into its own mode."""
    modes = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for one, training in modes:
            one.training = training
