"""Checkpoints of folded models."""

import os
from collections import OrderedDict
from copy import deepcopy
from pathlib import Path

import torch
from mmengine.registry import MODELS as MMENGINE_MODELS
from mmengine.registry import init_default_scope
from mmengine.runner import load_state_dict
from torch import nn

from mmcare.checkpoint import CheckpointError, load_weights, write_checkpoint
from mmcare.config import building_from, read_config
from mmcare.models import CARE
from mmcare.models.layers import Foldable
from mmcare.output import check_writable_file
from mmcare.version import __version__

TOLERANCE = 1e-4  # of each map's largest magnitude
TRIAL_SIZE = 96


def fold_networks(model: nn.Module) -> dict[str, Foldable]:
    """Fold the backbones and classification heads of mmcare in a model, in place.

    Args:
        model: In evaluation mode. Wrappers around it do not matter.

    Returns:
        What is folded, by its name in the model.

    Raises:
        RuntimeError: If the model is in training mode.
        ValueError: If there is nothing to fold.
    """
    networks = {name: m for name, m in model.named_modules() if isinstance(m, Foldable)}
    if not networks:
        raise ValueError(
            f'the {type(model).__name__} has neither a CARE backbone nor a CAREClsHead: there is '
            'nothing to fold'
        )
    for network in networks.values():
        network.switch_to_deploy()
    return networks


def reparameterize_checkpoint(
    config: str | os.PathLike, checkpoint: str | os.PathLike, destination: str | os.PathLike
) -> str:
    """Fold the checkpoint of a whole model: a detector, a segmentor or a classifier.

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
            model, or folding changes what it computes.
        ValueError: If the config has no model, or the model nothing to fold.
        IsADirectoryError, NotADirectoryError, PermissionError: If nothing can be written there.
    """
    check_writable_file(Path(destination))
    cfg = read_config(config)
    source = load_weights(checkpoint)
    state = source.get('state_dict', source)
    if not isinstance(cfg.get('model'), dict):
        raise ValueError(f'{config} has no model')
    if cfg.get('default_scope'):
        init_default_scope(cfg.default_scope)
    if cfg.get('data_preprocessor') and 'data_preprocessor' not in cfg.model:
        cfg.model.data_preprocessor = cfg.data_preprocessor
    with building_from(config):
        model = MMENGINE_MODELS.build(deepcopy(cfg.model)).eval()
    try:
        load_state_dict(model, state, strict=True)
    except RuntimeError as error:
        raise CheckpointError(
            f'{checkpoint} does not fill the model of {config}. {error}'
        ) from error
    named = [name for name, m in model.named_modules() if isinstance(m, Foldable) and m.deploy]
    if named:
        raise CheckpointError(f'{config} says deploy=True: {", ".join(named)} is folded already')
    unfolded = {name: deepcopy(m) for name, m in model.named_modules() if isinstance(m, CARE)}
    networks = fold_networks(model)
    for name, before in unfolded.items():
        _check_equal(name, before, networks[name])
    meta = dict(source.get('meta') or {}) if 'state_dict' in source else {}
    meta.update(mmcare_version=__version__, folded_from=Path(checkpoint).name)
    write_checkpoint(
        dict(meta=meta, state_dict=OrderedDict(model.state_dict())),
        destination,
    )
    options = ' '.join(f'model.{name}.deploy=True' for name in networks)
    folded = ', '.join(f'{name} ({type(m).__name__})' for name, m in networks.items())
    return (
        f'Folded {folded} of {checkpoint}. Wrote {destination}; a config takes it with\n'
        f'    --cfg-options {options}'
    )


def _check_equal(name: str, before: CARE, after: nn.Module) -> None:
    """Compare what two backbones put out; weights may hold what folding makes of numbers' range."""
    generator = torch.Generator().manual_seed(0)
    shape = 1, before.in_channels, TRIAL_SIZE, TRIAL_SIZE
    image = torch.randn(shape, generator=generator)
    with torch.no_grad():
        for index, (expected, found) in enumerate(zip(before(image), after(image), strict=True)):
            deviation = (expected - found).abs().max() / expected.abs().max()
            if not deviation <= TOLERANCE:
                raise CheckpointError(
                    f'folding changes output {index} of {name} by {deviation:.1e} of its largest '
                    f'magnitude, more than {TOLERANCE}: weights or batch norm statistics are '
                    'extreme or not finite'
                )
