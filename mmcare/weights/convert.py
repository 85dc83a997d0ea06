"""Rewrite checkpoints: between published files and those of MM toolboxes, and folded.

Only tools/convert_checkpoint.py and tools/reparameterize_model.py import this module.
"""

import os
from collections import OrderedDict
from copy import deepcopy
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import load_state_dict
from torch import nn

from mmcare.files import check_writable_file
from mmcare.models import CARE
from mmcare.version import __version__
from mmcare.weights.published import (
    BACKBONE,
    BACKBONE_PARTS,
    HEADS,
    as_classifier,
    find_published,
    from_published,
    name_arch,
    to_published,
)
from mmcare.weights.reading import load_checkpoint, load_weights, read_checkpoint, write_checkpoint
from mmcare.weights.whole import CheckpointError, mark

TOLERANCE = 1e-4  # of each map's largest magnitude
TRIAL_SIZE = 96


def convert_checkpoint(source: str | os.PathLike, destination: str | os.PathLike) -> str:
    """Convert between published files and those of MM toolboxes, in the direction that fits.

    Args:
        source: A published file, or a checkpoint with an ``s0``, ``s1`` or ``s2`` under
            ``backbone.`` or by itself.
        destination: File to write, ``.safetensors`` or any other ending for ``torch.save``.

    Returns:
        A sentence that says what was written.

    Raises:
        FileNotFoundError: If there is no source.
        CheckpointError: If the source cannot be read or does not hold a whole CARE backbone.
        IsADirectoryError, NotADirectoryError, PermissionError: If nothing can be written there.
    """
    check_writable_file(Path(destination))
    checkpoint = read_checkpoint(source)
    published = find_published(checkpoint) if isinstance(checkpoint, dict) else None
    if published is not None:
        state = from_published(published)
        converted, direction = as_classifier(state), 'as the checkpoint of an MM classifier'
    else:
        state = {k.removeprefix(BACKBONE): v for k, v in load_weights(source).items()}
        kept = (*BACKBONE_PARTS, *(ours for _, ours in HEADS))
        state = {key: value for key, value in state.items() if key.startswith(kept)}
        converted = to_published({k: v for k, v in state.items() if not k.startswith('out_norms.')})
        direction = 'in the published format'
    arch = name_arch(state, CARE.arch_zoo)
    if arch is None:
        raise CheckpointError(f'{source} does not hold the backbone of an s0, s1 or s2')
    CARE(arch).load_state_dict(mark(state, str(source)), strict=False)  # whole, or it raises
    meta = dict(mmcare_version=__version__, source=Path(source).name, arch=arch)
    write_checkpoint(dict(meta=meta, state_dict=OrderedDict(converted)), destination)
    return f'Wrote {destination} {direction}: CARE({arch!r}) of {source}.'


def fold_checkpoint(
    config: str | os.PathLike, checkpoint: str | os.PathLike, destination: str | os.PathLike
) -> str:
    """Fold the checkpoint of a whole model: a detector, a segmentor or a classifier.

    Every outermost module with a ``switch_to_deploy`` is folded.

    Args:
        config: Config of the model, not folded; its toolbox must be installed.
        checkpoint: Its weights, which must fill it.
        destination: File to write, with the model's folded weights and the metadata of
            ``checkpoint``; ``.safetensors`` or any other ending.

    Returns:
        A sentence that says what was folded and how to use it.

    Raises:
        FileNotFoundError: If config or checkpoint does not exist.
        CheckpointError: If the checkpoint cannot be read, is folded already, does not fill the
            model, or folding changes what the backbone computes.
        ValueError: If there is nothing to fold.
        IsADirectoryError, NotADirectoryError, PermissionError: If nothing can be written there.
    """
    check_writable_file(Path(destination))
    cfg = Config.fromfile(config)
    source = load_checkpoint(checkpoint, 'cpu')
    init_default_scope(cfg.get('default_scope') or 'mmengine')
    if cfg.get('data_preprocessor'):
        cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
    model = MODELS.build(cfg.model).eval()
    try:
        load_state_dict(model, source.get('state_dict', source), strict=True)
    except RuntimeError as error:
        raise CheckpointError(
            f'{checkpoint} does not fill the model of {config}. {error}'
        ) from error
    folded: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        inside = any(name.startswith(f'{outer}.') for outer in folded)
        if hasattr(module, 'switch_to_deploy') and not inside:
            before = deepcopy(module)
            module.switch_to_deploy()
            folded[name] = type(module).__name__
            if isinstance(module, CARE):
                _check_equal(name, before, module)
    if not folded:
        raise ValueError(f'nothing in the model of {config} can be folded')
    meta = dict(source.get('meta') or {}) if 'state_dict' in source else {}
    meta.update(mmcare_version=__version__, folded_from=Path(checkpoint).name)
    write_checkpoint(dict(meta=meta, state_dict=OrderedDict(model.state_dict())), destination)
    options = ' '.join(f'model.{name}.deploy=True' for name in folded)
    parts = ', '.join(f'{name} ({kind})' for name, kind in folded.items())
    return (
        f'Folded {parts} of {checkpoint}. Wrote {destination}; a config takes it with\n'
        f'    --cfg-options {options}'
    )


@torch.no_grad()
def _check_equal(name: str, before: CARE, after: nn.Module) -> None:
    """Compare the outputs of two backbones: extreme statistics can leave the range of numbers."""
    channels = before.stem.conv.in_channels
    image = torch.randn(1, channels, TRIAL_SIZE, TRIAL_SIZE, generator=torch.Generator())
    for index, (expected, found) in enumerate(zip(before(image), after(image), strict=True)):
        deviation = (expected - found).abs().max() / expected.abs().max()
        if not deviation <= TOLERANCE:
            raise CheckpointError(
                f'folding changes output {index} of {name} by {deviation:.1e} of its largest '
                f'magnitude, more than {TOLERANCE}: weights or batch norm statistics are extreme '
                'or not finite'
            )
