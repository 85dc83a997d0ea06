"""Names of weights: those of the published files, and ours."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

Value = TypeVar('Value')

# Parts of a key in the published files, and ours. Each key holds at most two of them.
NAMES = (
    ('stem.0.', 'stem.conv.'),
    ('stem.1.', 'stem.norm.'),
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
        for theirs, ours in (
            ('norm', 'norm'),
            ('fc1', 'expand'),
            ('conv', 'depthwise'),
            ('fc2', 'project'),
        )
    ),
)
HEADS = (('head.', 'head.cls_head.'), ('dist_head.', 'head.distill_head.'))
OUR_HEADS = tuple(ours for _, ours in HEADS)
BACKBONE = 'backbone.'
BACKBONE_PARTS = ('stem.', 'stages.', 'out_norms.', 'folded')  # first parts of a backbone's keys

ADDRESSES = """\
The ImageNet weights (CARETrans_S0.pth.tar, _S1, _S2; MIT licence) are linked from the authors'
repository zhouyuan888888/CARE-Transformer on GitHub and from the model page
YuanZ1995/CARE-Transformer."""
WHERE_TO_GET_WEIGHTS = f"""\
{ADDRESSES} Either convert one,
    python tools/convert_checkpoint.py CARETrans_S1.pth.tar checkpoints/care_s1_in1k.pth
(`mim run mmcare convert_checkpoint ...` where mmcare is installed without its repository), or name
the downloaded file itself as the checkpoint, or train from scratch:
    --cfg-options model.backbone.init_cfg=None model.backbone.norm_eval=False"""


def is_published(keys: Iterable[str]) -> bool:
    """Whether keys are those of a published CARE file."""
    keys = set(keys)
    blocks = ('stages.0.blocks.0.inter_layer.', 'stages.0.blocks.0.token_mixer.')
    return 'stem.0.weight' in keys and any(key.startswith(blocks) for key in keys)


def from_published(state: Mapping[str, Value]) -> dict[str, Value]:
    """Rename published keys to those of the backbone (``stem.*``, ``stages.*``) and ``head.*``."""
    return _rename(state, NAMES, HEADS)


def to_published(state: Mapping[str, Value]) -> dict[str, Value]:
    """Undo :func:`from_published`."""
    swapped = [tuple((ours, theirs) for theirs, ours in pairs) for pairs in (NAMES, HEADS)]
    return _rename(state, *swapped)


def _rename(
    state: Mapping[str, Value],
    names: Iterable[tuple[str, str]],
    heads: Iterable[tuple[str, str]],
) -> dict[str, Value]:
    renamed = {}
    for key, value in state.items():
        head = next((pair for pair in heads if key.startswith(pair[0])), None)
        if head is not None:
            key = head[1] + key.removeprefix(head[0])
        else:
            for before, after in names:
                key = key.replace(before, after)
        renamed[key] = value
    return renamed


def as_classifier(state: Mapping[str, Value]) -> dict[str, Value]:
    """Put the backbone's keys under ``backbone.``, as MM models name them."""
    return {
        (BACKBONE + key if key.startswith(BACKBONE_PARTS) else key): value
        for key, value in state.items()
    }


def whole_classifier(state: Mapping[str, Value]) -> dict[str, Value]:
    """Rename published weights, or those of a backbone alone, to ``backbone.*`` and ``head.*``."""
    return as_classifier(from_published(state) if is_published(state) else state)


def without_wrapper(state: Mapping[Any, Value]) -> dict[str, Value]:
    """Remove the ``module.`` that distributed wrappers put in front of keys."""
    return {str(key).removeprefix('module.'): value for key, value in state.items()}
