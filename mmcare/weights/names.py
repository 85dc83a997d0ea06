"""Names of weights: in published files, and in MM models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Parts of keys in published files, and ours; keys are compared with a dot in front.
NAMES = (
    ('.head.', '.head.cls_head.'),
    ('.dist_head.', '.head.distill_head.'),
    ('.stem.0.', '.stem.conv.'),
    ('.stem.1.', '.stem.norm.'),
    ('.downsample.0.', '.downsample.norm.'),
    ('.downsample.1.', '.downsample.conv.'),
    ('.token_mixer.dwconv1.', '.mixer.local_learner.conv3x3.'),
    ('.token_mixer.dwconv2.', '.mixer.local_learner.conv7x7.'),
    ('.token_mixer.dwconvatt_1.', '.mixer.global_learner.vertical.'),
    ('.token_mixer.dwconvatt_2.', '.mixer.global_learner.horizontal.'),
    ('.token_mixer.qk.', '.mixer.global_learner.query_key.'),
    *(
        (f'.inter_layer.inter{i}_{theirs}.', f'.inter{i}.{ours}.')
        for i in (1, 2)
        for theirs, ours in dict(norm='norm', fc1='expand', conv='depthwise', fc2='project').items()
    ),
)
HEADS = ('head.cls_head.', 'head.distill_head.')
BACKBONE = 'backbone.'
BACKBONE_PARTS = ('stem.', 'stages.', 'out_norms.', 'folded')  # first parts of a backbone's keys


def is_published(keys: Iterable[str]) -> bool:
    """Whether keys are those of a published CARE file."""
    keys = set(keys)
    blocks = ('stages.0.blocks.0.inter_layer.', 'stages.0.blocks.0.token_mixer.')
    return 'stem.0.weight' in keys and any(key.startswith(blocks) for key in keys)


def from_published(state: Mapping[str, Any]) -> dict[str, Any]:
    """Rename published keys to those of the backbone (``stem.*``, ``stages.*``) and ``head.*``."""
    return _rename(state, NAMES)


def to_published(state: Mapping[str, Any]) -> dict[str, Any]:
    """Undo :func:`from_published`."""
    return _rename(state, [(ours, theirs) for theirs, ours in NAMES])


def _rename(state: Mapping[str, Any], names: Iterable[tuple[str, str]]) -> dict[str, Any]:
    renamed = {}
    for key, value in state.items():
        key = f'.{key}'
        for before, after in names:
            key = key.replace(before, after)
        renamed[key[1:]] = value
    return renamed


def to_classifier_keys(state: Mapping[str, Any]) -> dict[str, Any]:
    """Rename published weights, or those of a backbone alone, to ``backbone.*`` and ``head.*``."""
    state = from_published(state) if is_published(state) else state
    return {
        (BACKBONE + key if key.startswith(BACKBONE_PARTS) else key): value
        for key, value in state.items()
    }


def without_wrapper(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Remove the ``module.`` that distributed wrappers put in front of keys."""
    return {_without_module(str(key)): value for key, value in state.items()}


def _without_module(name: str) -> str:
    return re.sub(r'^module(\.|$)', '', name)


def of_backbone(state: Mapping[str, Any], prefix: str | None = None) -> dict[str, Any]:
    """Select the weights of a backbone, and remove its prefix, see :func:`find_prefix`."""
    return select(state, find_prefix(state, prefix))


def select(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the weights whose names begin with a prefix, by the rest of their names."""
    return {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}


def is_fused(state: Iterable[str]) -> bool:
    """Whether weights are those of a fused CARE."""
    return any(key.split('.')[-1] == 'folded' for key in state)


def find_prefix(state: Mapping[str, Any], prefix: str | None = None) -> str:
    """Return what the names of a backbone's weights begin with, such as ``'backbone.'``.

    ``prefix`` is the backbone's name in the model, with or without the final dot, and with or
    without the ``module.`` of a distributed wrapper. None: ``'backbone.'``, or empty if no weight
    has this prefix, as in a file of a backbone alone.
    """
    if prefix is None:
        return BACKBONE if any(key.startswith(BACKBONE) for key in state) else ''
    forms = [form and form.rstrip('.') + '.' for form in (prefix, _without_module(prefix))]
    return next((f for f in forms if any(key.startswith(f) for key in state)), forms[0])


def find_published(checkpoint: Mapping[Any, Any]) -> dict[str, Any] | None:
    """Find published weights in a checkpoint of timm or in a state dict; None if it has none."""
    state = checkpoint.get('state_dict', checkpoint)
    state = without_wrapper(state) if isinstance(state, Mapping) else {}
    return state if is_published(state) else None
