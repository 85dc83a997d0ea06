"""Convert checkpoints between published files and those of MM toolboxes, and fuse them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from mmcare.models import CARE
from mmcare.models.heads import TwoHeads
from mmcare.models.loading import name_arch
from mmcare.version import __version__
from mmcare.weights import names
from mmcare.weights.reading import (
    RUNS,
    CheckpointError,
    load_from_mmcare,
    local_file,
    read_checkpoint,
    runs_of,
    weights_of,
    write_checkpoint,
)
from mmcare.weights.strict import check_weights, load_strictly


def convert_checkpoint(source: str | os.PathLike, destination: str | os.PathLike) -> str:
    """Convert a published file to a checkpoint of MM toolboxes, or the reverse.

    Args:
        source: A published file, or a checkpoint of a CARE ``s0``, ``s1`` or ``s2`` or of a model
            with one as its ``backbone``.
        destination: File to write, ``.safetensors`` or any other ending for ``torch.save``.

    Returns:
        A sentence that says what was written.

    Raises:
        CheckpointError: If the source cannot be read or does not contain a complete CARE.
        OSError: If the source does not exist or the destination cannot be written.
        ValueError: If the destination is the source.
    """
    _check_kept(source, destination)
    file = local_file(source)
    content = read_checkpoint(file)
    weights = weights_of(content, file)
    is_published = names.is_published(weights)
    converted = names.to_classifier_keys(weights) if is_published else weights
    state = names.of_backbone(converted)
    state = {k: v for k, v in state.items() if k.startswith(names.BACKBONE_PARTS)}
    direction = 'as the checkpoint of an MM classifier'
    if not is_published:
        if any(name.startswith('out_norms.') for name in state):
            raise CheckpointError(
                f'{source} has norms on output maps (from_scratch or out_norm_cfg), which the '
                'published format lacks'
            )
        heads = {k: v for k, v in converted.items() if k.startswith(names.HEADS)}
        converted, direction = names.to_published({**state, **heads}), 'in the published format'
    arch = name_arch(state, CARE.arch_zoo)
    if arch is None:
        raise CheckpointError(f'{source} does not contain the backbone of an s0, s1 or s2')
    check_weights(CARE(arch), state, '', source)
    meta: dict[str, Any] = dict(mmcare_version=__version__, source=Path(source).name, arch=arch)
    if runs := runs_of(content):
        meta[RUNS] = runs
    write_checkpoint(dict(meta=meta, state_dict=converted), destination)
    return f'Wrote {destination} {direction}: CARE({arch!r}) of {source}.'


@torch.no_grad()
def fuse_checkpoint(
    config: str | os.PathLike, checkpoint: str | os.PathLike, destination: str | os.PathLike
) -> str:
    """Fuse the checkpoint of a whole model: a detector, a segmentor or a classifier.

    Every CARE and every pair of its classification heads is fused. Outputs for noise are
    compared before and after fusing; for a CARE, the noise has 224 x 224 pixels.

    Args:
        config: Config of the unfused model; the model's toolbox must be installed.
        checkpoint: The weights of the whole model.
        destination: File to write, with the fused weights and the metadata of ``checkpoint``;
            ``.safetensors`` or any other ending.

    Returns:
        A sentence that says what was fused and how to use it.

    Raises:
        CheckpointError: If the checkpoint cannot be read, is fused already or does not fill the
            model.
        RuntimeError: If fusing changes outputs.
        ValueError: If there is nothing to fuse, or the destination is the checkpoint.
        OSError: If a file does not exist, or the destination cannot be written.
    """
    _check_kept(checkpoint, destination)
    cfg = Config.fromfile(config)
    content = load_from_mmcare(checkpoint, 'cpu')
    weights = weights_of(content, checkpoint)
    init_default_scope(cfg.get('default_scope') or 'mmengine')
    if cfg.get('data_preprocessor'):
        cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
    model = MODELS.build(cfg.model).eval()
    load_strictly(model, weights, checkpoint)
    fused = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (CARE, TwoHeads)) and not module.deploy
    ]
    noise = torch.Generator().manual_seed(0)
    for name in fused:
        part: Any = model.get_submodule(name)
        if isinstance(part, CARE):
            shape = 1, part.stem.conv.in_channels, 224, 224
            inputs: Any = torch.randn(shape, generator=noise)
        else:
            inputs = (torch.randn(1, part.cls_head.fc.in_features, generator=noise),)
        before = part(inputs)
        part.switch_to_deploy()
        # Up to 1e-4 of each output's largest value; NaN is never equal.
        same = map(lambda x, y: (x - y).abs().max() <= 1e-4 * x.abs().max(), before, part(inputs))
        if not all(same):
            raise RuntimeError(f'fusing changes outputs of {name}; {destination} is not written')
    if not fused:
        raise ValueError(f'nothing in the model of {config} can be fused')
    meta = dict(content.get('meta') or {})
    meta.update(mmcare_version=__version__, fused_from=Path(checkpoint).name)
    write_checkpoint(dict(meta=meta, state_dict=model.state_dict()), destination)
    keys = fused
    if 'detector' in cfg.model:  # mmdet's semi-supervised models build both from it
        keys = [re.sub('^(student|teacher)[.]', 'detector.', name) for name in fused]
    options = ' '.join(f'model.{key}.deploy=True' for key in dict.fromkeys(keys))
    return (
        f'Fused {", ".join(fused)} of {checkpoint}. Wrote {destination}. Use it with\n'
        f'    --cfg-options {options}'
    )


def _check_kept(source: str | os.PathLike, destination: str | os.PathLike) -> None:
    """Raise a ValueError if a file would be written over its source, and its optimizer lost."""
    if os.path.realpath(source) == os.path.realpath(destination):
        raise ValueError(f'{destination} would replace its own source: give another name')
