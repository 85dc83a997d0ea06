"""Load weights whole or raise, whatever ``strict`` says: MM toolboxes pass False."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmcare.weights.published import BACKBONE, BACKBONE_PARTS, from_published, is_published
from mmcare.weights.reading import CheckpointError

Shapes = dict[str, tuple[int, ...]]


def shapes_of(module: nn.Module) -> Shapes:
    """Return names and shapes of parameters and buffers, without the names of wrappers inside."""
    # Not state_dict(): wrappers such as FSDP communicate there.
    return {
        key.replace('_checkpoint_wrapped_module.', '').replace('_orig_mod.', ''): tuple(value.shape)
        for key, value in (*module.named_parameters(), *module.named_buffers())
    }


def fit_backbone(
    state_dict: dict[str, Any],
    prefix: str,
    expected: Shapes,
    archs: Callable[[], Mapping[str, Shapes]],
    file: str | None = None,
) -> None:
    """Make a state dict fit a backbone, in place, or raise.

    Of a whole model's weights a backbone by itself takes those under ``backbone.``. Published names
    are renamed. Weights of stages that are not built are dropped; norms of ``out_norm_cfg`` may be
    missing or left over, and the counters ``num_batches_tracked`` missing.

    Args:
        state_dict: Keys that do not begin with ``prefix`` are left alone.
        prefix: Name of the backbone in the model, such as ``'backbone.'``; empty by itself.
        expected: Names and shapes of the backbone.
        archs: Called if the weights do not fit: names and shapes of known archs.
        file: Where the weights come from, if that is known.

    Raises:
        CheckpointError: If a weight is missing, left over, of another shape, or not finite.
    """
    given = {k[len(prefix) :]: state_dict.pop(k) for k in list(state_dict) if k.startswith(prefix)}
    if not any(key.startswith(BACKBONE_PARTS) for key in given):
        inner = {k.removeprefix(BACKBONE): v for k, v in given.items() if k.startswith(BACKBONE)}
        given = inner or given
    if is_published(given):
        given = {k: v for k, v in from_published(given).items() if k.startswith(BACKBONE_PARTS)}
    needed = {k: v for k, v in given.items() if k in expected or not _is_spare(k, expected)}
    origin = f' in {file}' if file else ''
    check_fit(
        needed,
        expected,
        f'The weights{origin} do not fit the CARE backbone (prefix {prefix!r}).',
        lambda: _advise(prefix, given, expected, archs()),
    )
    state_dict.update({prefix + key: value for key, value in needed.items()})


def check_fit(
    given: Mapping[str, Any],
    expected: Shapes,
    title: str,
    advise: Callable[[], Iterable[str]] = tuple,
) -> None:
    """Raise unless weights are complete, of the right shapes, of floating point and finite.

    Args:
        given: Weights by name.
        expected: Shapes by name. Counters of batches and output norms may be missing.
        title: The first line of the message.
        advise: Gives the lines after the lists of keys.

    Raises:
        CheckpointError: If something is wrong; the message names the first keys.
    """
    shapes = {key: tuple(v.shape) for key, v in given.items() if isinstance(v, Tensor)}
    faults = {
        'missing': [key for key in expected if key not in given and not _may_lack(key)],
        'not in the model': [key for key in given if key not in expected],
        'of another shape': [
            f'{key} {shapes[key]} instead of {expected[key]}'
            for key in given
            if key in expected and key in shapes and shapes[key] != expected[key]
        ],
        'not usable': [
            f'{key} {fault}'
            for key, value in given.items()
            if key in expected and (fault := _find_fault(key, value, expected[key]))
        ],
    }
    if not any(faults.values()):
        return
    lines = [title]
    for name, keys in faults.items():
        if keys:
            more = f' and {len(keys) - 3} more' if len(keys) > 3 else ''
            lines.append(f'  {name}: {", ".join(keys[:3])}{more}')
    raise CheckpointError('\n'.join([*lines, *advise()]))


def _find_fault(key: str, value: Any, shape: tuple[int, ...]) -> str:
    """Say why a value cannot be the weight; empty if it can, or if its shape is wrong anyway."""
    if not isinstance(value, Tensor):
        return f'is a {type(value).__name__}, not a tensor'
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        return 'is a sparse, quantized or nested tensor'
    if value.is_meta:
        return 'has a shape only, no values'
    if tuple(value.shape) != shape or key.endswith('num_batches_tracked'):
        return ''
    if not value.is_floating_point():
        return f'has values of {value.dtype}'
    # 8-bit floats have no isfinite.
    finite = (value.float() if value.itemsize == 1 else value).isfinite().all()
    return '' if finite else 'has values that are not finite (NaN or infinite)'


def _advise(
    prefix: str, given: Mapping[str, Any], expected: Shapes, archs: Mapping[str, Shapes]
) -> Iterator[str]:
    """Say what the weights look like, and what to do."""
    if not given:
        yield (
            f'  No key begins with {prefix!r}. In MM toolboxes published files, and weights of a '
            'backbone alone, go in through init_cfg=dict(type="Pretrained", checkpoint=FILE) of '
            "the backbone; a classifier takes published files with 'mmcare.engine.safe_loading' in "
            'custom_imports. In timm, features_only takes a file through pretrained=True, '
            'pretrained_cfg_overlay=dict(file=FILE), not through checkpoint_path.'
        )
    if any(key.startswith('stem.folded_conv') for key in given):
        yield (
            '  The weights were folded by mmcare 1.0.0rc1, whose folded form differs: fold again '
            'the checkpoint from before folding (tools/reparameterize_model.py).'
        )
    elif ('folded' in given) != ('folded' in expected):
        yield (
            '  The weights are folded (tools/reparameterize_model.py), the model is not: build it '
            'with deploy=True to evaluate, or load the weights from before folding to train.'
            if 'folded' in given
            else '  The model is folded (deploy=True), the weights are not: fold them first '
            '(tools/reparameterize_model.py), or leave deploy out.'
        )
    found = {k: tuple(v.shape) for k, v in given.items() if isinstance(v, Tensor)}
    for name, shapes in archs.items():
        # Norms aside, so that folded weights are known, too.
        known = {k: shape for k, shape in shapes.items() if '.norm.' not in k}
        if known.items() <= found.items():
            yield f'  The weights are those of arch={name!r}.'


def _may_lack(key: str) -> bool:
    return key.startswith('out_norms.') or key.endswith('num_batches_tracked')


def _is_spare(key: str, expected: Shapes) -> bool:
    """Whether a key belongs to an output norm, or to a stage that is not built."""
    part, _, rest = key.partition('.')
    if part == 'stages' and rest:
        number = rest.partition('.')[0]
        known = number in ('0', '1', '2', '3')
        return known and not any(k.startswith(f'stages.{number}.') for k in expected)
    return part == 'out_norms'
