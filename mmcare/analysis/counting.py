"""Count parameters and multiply-adds by stage and part, and compare them with the paper.

mmengine.analysis counts as fvcore does: each multiply-add of convolutions, linear layers and matrix
products is 1, each element of a batch norm 2 and of a layer norm 5. Activations, shortcuts and
layer scale are not counted.
"""

import re
from collections import Counter, OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pandas as pd
import torch
from mmengine.analysis import FlopAnalyzer
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from torch import Tensor, nn

from mmcare.models import CARE
from mmcare.shipped import shipped_config

# The first of these words in the name of a module or parameter decides its part.
PARTS = {
    'stem': 'stem',
    'downsample': 'downsampling',
    'local_learner': 'local',
    'global_learner': 'global',
    'inter1': 'Inter1',
    'inter2': 'Inter2',
    'gamma': 'layer scale',
    'out_norms': 'output norms',
    'neck': 'head',
    'head': 'head',
}


def build_network(source: str | Path, head: bool = True) -> nn.Module:
    """Build the backbone of a config with random weights; for classifiers also neck and head.

    Args:
        source: Path of a config, or an arch, which stands for its config in ``configs/imagenet``.
        head: Whether to add neck and head, which need mmpretrain.

    Returns:
        A module that takes images (B, C, H, W) and has the submodule ``backbone``.

    Raises:
        ValueError: If the config's backbone is not a CARE.
    """
    if source in CARE.arch_zoo:
        if not head:
            return nn.Sequential(OrderedDict(backbone=CARE(str(source))))
        source = shipped_config(f'imagenet/care_{source}_in1k')
    config = Config.fromfile(source)
    scope, model = config.get('default_scope'), config.get('model', {})
    # Only classifiers have a `head`; pure-Python configs have no scope that says what they are.
    names = ('backbone', 'neck', 'head') if head and model.get('head') else ('backbone',)
    with DefaultScope.overwrite_default_scope(scope):
        parts = OrderedDict((name, MODELS.build(model[name])) for name in names if model.get(name))
    if not isinstance(parts.get('backbone'), CARE):
        raise ValueError(f'{source} has no CARE backbone: set model.backbone.type to mmcare.CARE')
    return nn.Sequential(parts)


def count_complexity(network: nn.Module, shape: Sequence[int] = (224, 224)) -> pd.DataFrame:
    """Count parameters and multiply-adds by stage and part.

    Args:
        network: Has a CARE as ``backbone``, see :func:`build_network`, and takes images.
        shape: Height and width of the image. CARE pads to multiples of 32, and padding counts.

    Returns:
        Columns ``parameters`` and ``macs`` (for one image), index (stage, part).
    """
    in_channels = network.get_parameter('backbone.stem.conv.weight').shape[1]
    macs = count_macs(network, torch.zeros(1, in_channels, *shape))
    rows: list[tuple[str, str, int, int]] = []
    for path, module in network.named_modules():
        inside = (macs[f'{path}.{name}'.lstrip('.')] for name, _ in module.named_children())
        rows.append((*_place(path), 0, macs[path] - sum(inside)))
    rows += [(*_place(path), p.numel(), 0) for path, p in network.named_parameters()]
    table = pd.DataFrame(rows, columns=['stage', 'part', 'parameters', 'macs'])
    table = table.groupby(['stage', 'part'], sort=False).sum()
    return table[table.any(axis=1)]


def count_macs(module: nn.Module, *inputs: Tensor) -> Counter[str]:
    """Count multiply-adds in evaluation mode by submodule; ``''`` is the module itself."""
    module = deepcopy(module)
    module.eval()  # not chained: `eval` of some toolboxes' backbones returns None
    analyzer = FlopAnalyzer(module, inputs)
    # mmengine counts this mean but no other. A handle of None would keep mmengine's own.
    analyzer.set_op_handle('aten::adaptive_avg_pool2d', lambda inputs, outputs: 0)
    analyzer.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    analyzer.tracer_warnings('none')
    with torch.no_grad():
        return analyzer.by_module()


def compare_with_paper() -> pd.DataFrame:
    """Count the networks of the paper's Tables 2 to 5, both heads included.

    Returns:
        A row for each network: ``table``, ``config``, ``size``, the paper's ``GMACs`` and ``M``
        (million parameters), the counted ``macs`` and ``parameters``, and ``agree``: whether the
        counts round to the paper's figures.
    """
    printed = dict(GMACs=str, M=str)  # as text, which keeps the number of digits
    table = pd.read_csv(Path(__file__).with_name('paper.csv'), dtype=printed, na_filter=False)
    rows = []
    for _, config, side, gmacs, millions in table.itertuples(index=False):
        total = count_complexity(build_network(shipped_config(config)), (side, side)).sum()
        agree = _rounds_to(total.macs / 1e9, gmacs) and _rounds_to(total.parameters / 1e6, millions)
        rows.append((total.macs, total.parameters, agree))
    return table.join(pd.DataFrame(rows, columns=['macs', 'parameters', 'agree']))


def _rounds_to(value: float, printed: str) -> bool:
    return not printed or f'{value:.{len(printed.partition(".")[2])}f}' == printed


def _place(path: str) -> tuple[str, str]:
    """Find stage and part of a module or parameter."""
    part = re.search('|'.join(PARTS), path)
    stage = re.search(r'(?:stages|out_norms)\.(\d)', path)
    number = int(stage[1]) + 1 if stage else 1 if 'stem' in path else None
    return f'stage {number}' if number else 'head', PARTS[part[0]] if part else 'other'
