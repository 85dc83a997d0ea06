"""Batch norms of a network that is not ours, folded into the convolutions in front of them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.overrides import TorchFunctionMode


@torch.no_grad()
def fold_batch_norms(network: nn.Module, image: Tensor) -> nn.Module:
    """Fold, in place, each batch norm that alone takes the output of a convolution.

    Which does is seen in a run of the network. Left alone are convolutions whose output something
    else takes, too (a shortcut, say), and modules that run more than once.

    Args:
        network: In evaluation mode; it puts out a tuple of maps.
        image: Images (B, C, H, W) for the run.

    Returns:
        The network.

    Raises:
        ValueError: In training mode, in which norms depend on the batch.
    """
    if network.training:
        raise ValueError('batch norms cannot be folded in training mode; call eval() first')
    names = {module: name for name, module in network.named_modules()}
    for conv, norm in _find_pairs(network, image):
        _replace(network, names[conv], fuse_conv_bn_eval(conv, norm))
        # What timm's norms do behind normalising stays.
        _replace(network, names[norm], getattr(norm, 'act', nn.Identity()))
    return network


class _CountUses(TorchFunctionMode):
    """Counts the functions that make tensors from certain others.

    Attributes:
        uses: How many there were, by the id of the tensor they took; only those tensors are
            counted whose ids are there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[int, int] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(_tensors(result)):  # not the likes of Tensor.shape
            for tensor in _tensors((args, tuple(kwargs.values()))):
                if tensor in self.uses:
                    self.uses[tensor] += 1
        return result


def _tensors(value: Any) -> Iterator[int]:
    """Ids of the tensors in a value, which may be a tuple or a list, or of such."""
    if isinstance(value, Tensor):
        yield id(value)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


def _find_pairs(network: nn.Module, image: Tensor) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """Convolutions and the norms behind them, of modules that run once."""
    runs: Counter[nn.Module] = Counter()
    made: dict[int, tuple[nn.Conv2d, Tensor]] = {}  # by id: outputs are kept, so ids stay theirs
    pairs: dict[int, tuple[nn.Conv2d, nn.BatchNorm2d]] = {}
    counter = _CountUses()

    def after_conv(conv: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        runs[conv] += 1
        made[id(output)] = conv, output
        counter.uses[id(output)] = 0

    def before_norm(norm: Any, inputs: tuple[Tensor, ...]) -> None:
        runs[norm] += 1
        if id(inputs[0]) in made:
            pairs[id(inputs[0])] = made[id(inputs[0])][0], norm

    handles = []
    for module in network.modules():
        if type(module) is nn.Conv2d:
            handles.append(module.register_forward_hook(after_conv))
        elif _can_fold(module):
            handles.append(module.register_forward_pre_hook(before_norm))
    try:
        with counter:
            outputs = network(image)
    finally:
        for handle in handles:
            handle.remove()
    put_out = set(_tensors(outputs))
    return [
        (conv, norm)
        for key, (conv, norm) in pairs.items()
        if runs[conv] == 1 and runs[norm] == 1 and counter.uses[key] == 1 and key not in put_out
    ]


def _can_fold(module: nn.Module) -> bool:
    known = type(module) is nn.BatchNorm2d or type(module).__name__ == 'BatchNormAct2d'
    return known and getattr(module, 'running_mean', None) is not None


def _replace(network: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition('.')
    setattr(network.get_submodule(parent), child, module)
