"""Checkpoints: published weights, ours and those of MM toolboxes, read safely and loaded whole.

MM toolboxes load with ``strict=False`` and hand each child module only the keys under its own
prefix, so that a file with other names loads nothing and says so in a log line at most. Importing
mmcare closes that trap in two places. Local files and downloads go through
:func:`load_from_local_checked`, which reads them without running code, verifies their checksums and
renames published keys to those of an MM classifier (``backbone.*``, ``head.*``). The backbone then
insists on a complete set of finite weights, see :func:`prepare_backbone_state`.
"""

import hashlib
import logging
import os
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlparse

import torch
from mmengine.dist import barrier, is_main_process
from mmengine.logging import print_log
from mmengine.registry import WEIGHT_INITIALIZERS
from mmengine.runner import CheckpointLoader
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mmcare.weights.unpickling import unpickle
from mmcare.version import __version__

if TYPE_CHECKING:  # which needs this module
    from mmcare.models import CARE

StateDict = dict[str, Tensor]

ZIP_MAGIC = b'PK\x03\x04'
# In the metadata of .safetensors: over tensors and metadata; over tensors alone (mmcare 0.1).
CHECKSUM, TENSORS_CHECKSUM = 'mmcare_checksum', 'mmcare_sha256'

TRUST_CONFIGS = 'MMCARE_TRUST_CONFIGS'  # environment variable

# Parts of a key in the published files, and ours. Each key holds at most two of them.
PUBLISHED_NAMES = (
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
PUBLISHED_HEADS = (('head.', 'head.cls_head.'), ('dist_head.', 'head.distill_head.'))
BACKBONE = 'backbone.'
NUM_STAGES = 4
# Arguments of the backbone that leave a part out or change it, and the published networks' values.
ABLATION_DEFAULTS = dict(
    decoupling='asymmetric',
    inter1=True,
    inter2=True,
    memory=True,
    early_conv=True,
    multi_scale=True,
)
BACKBONE_PARTS = ('stem.', 'stages.', 'out_norms.')
# The stem's convolution: as it is trained; folded with its batch norm; folded beside another norm.
STEM_CONVS = ('stem.conv.weight', 'stem.folded_conv.weight', 'stem.folded_conv.0.weight')

WHERE_TO_GET_WEIGHTS = """\
The ImageNet weights (CARETrans_S0.pth.tar, _S1, _S2; MIT licence) are linked from the authors'
repository zhouyuan888888/CARE-Transformer on GitHub and from the model page
YuanZ1995/CARE-Transformer. Either convert one,
    python tools/convert_checkpoint.py CARETrans_S1.pth.tar checkpoints/care_s1_in1k.pth
(`mim run mmcare convert_checkpoint ...` where mmcare is installed without its repository), or name
the downloaded file itself as the checkpoint, or train from scratch:
    --cfg-options model.backbone.init_cfg=None model.backbone.norm_eval=False"""


class CheckpointError(RuntimeError):
    """A checkpoint file that is damaged, refused, or does not fit."""


# ---------------------------------------------------------------- reading


def read_checkpoint(filename: str | os.PathLike, map_location: Any = 'cpu') -> dict[str, Any]:
    """Read a local checkpoint file without running code from it.

    Files of ``torch.save`` are read with ``weights_only=True``; beyond PyTorch's own list only
    what MM and timm training checkpoints hold is allowed: numpy arrays and scalars,
    ``argparse.Namespace`` and mmengine's log buffers. Checksums of the zip container, which
    ``torch.load`` ignores, are verified; files from before PyTorch 1.6 have none, which is said in
    a warning. Configs in training checkpoints are left out, unless the environment variable
    ``MMCARE_TRUST_CONFIGS`` is 1: mmengine would build whatever they name.

    Args:
        filename: ``.safetensors``, or any other ending for a file of ``torch.save``.
        map_location: As in ``torch.load``.

    Returns:
        The object in the file; for ``.safetensors`` a dict with ``state_dict`` and ``meta``.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If it is damaged, or holds what is not allowed.
    """
    path = Path(filename)
    if not path.is_file():
        raise FileNotFoundError(f'{path} is not a file')
    if path.suffix == '.safetensors':
        return _read_safetensors(path, map_location)
    with path.open('rb') as file:
        is_archive = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC  # as torch.load decides
    if is_archive:
        _verify_checksums(path)
    try:
        checkpoint = unpickle(path, map_location)
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(
            f'{path} cannot be read as a checkpoint: it is damaged, not a checkpoint, or holds '
            'objects other than tensors, plain values and what MM and timm training files hold. '
            f'({type(error).__name__}: {error})'
        ) from error
    if not is_archive:
        _warn_unverified(path)
    _drop_configs(path, checkpoint)
    return checkpoint


def _warn_unverified(path: Path) -> None:
    print_log(
        f'{path} has no checksums: if it was damaged, its weights are wrong and nothing tells. '
        'Saved anew by torch.save or tools/convert_checkpoint.py it has.',
        logger='current',
        level=logging.WARNING,
    )


def _verify_checksums(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if len(set(names)) != len(names):
                raise CheckpointError(f'{path} is refused: two entries of it have one name')
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise CheckpointError(
                        f'{path}: {entry.filename} is compressed; torch.save '
                        'never does that, so the file is refused'
                    )
            damaged = archive.testzip()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged directory can raise anything
        raise CheckpointError(f'{path} is damaged or incomplete: {error}') from error
    if damaged is not None:
        raise CheckpointError(f'{path} is damaged: the checksum of {damaged} is wrong')


def _read_safetensors(path: Path, map_location: Any) -> dict[str, Any]:
    if not isinstance(map_location, str | torch.device):
        map_location = 'cpu'
    try:
        with safe_open(path, framework='pt', device=str(map_location)) as file:
            meta = dict(file.metadata() or {})
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except Exception as error:  # not SafetensorError alone: types that PyTorch does not have, too
        raise CheckpointError(f'{path} is damaged or not a safetensors file: {error}') from error
    # The format has no checksums; write_checkpoint adds one, other writers may not.
    if CHECKSUM in meta:
        if meta[CHECKSUM] != _digest(state, meta):
            raise CheckpointError(f'{path} is damaged: the checksum of its content is wrong')
    elif TENSORS_CHECKSUM not in meta:
        _warn_unverified(path)
    elif meta[TENSORS_CHECKSUM] != _digest(state, {}):
        raise CheckpointError(f'{path} is damaged: the checksum of its tensors is wrong')
    checkpoint = dict(meta=meta, state_dict=state)
    _drop_configs(path, checkpoint)
    return checkpoint


@contextmanager
def trusting_configs() -> Iterator[None]:
    """Keep the configs in checkpoints of one's own that are read in the block."""
    before = os.environ.get(TRUST_CONFIGS)
    os.environ[TRUST_CONFIGS] = '1'
    try:
        yield
    finally:
        if before is None:
            del os.environ[TRUST_CONFIGS]
        else:
            os.environ[TRUST_CONFIGS] = before


def _drop_configs(path: Path, checkpoint: Any) -> None:
    """Drop configs from training metadata, which say what is built, and with which arguments.

    mmengine runs ``meta.config`` (which it does not write itself) as a program when a run is
    resumed, and the other two when an inferencer is made of a checkpoint alone. A config of plain
    values reaches as far: any function of Python goes by ``type='os.system'``, and classes of the
    toolboxes evaluate text that they are given.
    """
    if not isinstance(checkpoint, dict):
        return
    meta, hub = checkpoint.get('meta'), checkpoint.get('message_hub')
    runtime = hub.get('runtime_info') if isinstance(hub, dict) else None
    if isinstance(meta, dict):
        meta.pop('config', None)
    trusted = os.environ.get(TRUST_CONFIGS) == '1'
    found = [part for part in (meta, runtime) if isinstance(part, dict) and 'cfg' in part]
    if trusted or not found:
        return
    for part in found:
        del part['cfg']
    print_log(
        f'{path}: the config in it is left out, since an inferencer would build whatever it names; '
        f'give the inferencer a config file, or set {TRUST_CONFIGS}=1 if the checkpoint is yours',
        logger='current',
    )


def _digest(state: Mapping[str, Tensor], meta: Mapping[str, str]) -> str:
    """SHA-256 over metadata, and over names, types, shapes and bytes of all tensors."""
    digest = hashlib.sha256()
    for key in sorted(meta.keys() - {CHECKSUM}):
        digest.update(f'{key!r} {meta[key]!r}\n'.encode())
    for key in sorted(state):
        tensor = state[key].detach().cpu().contiguous()
        digest.update(f'{key} {tensor.dtype} {tuple(tensor.shape)}\n'.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# ---------------------------------------------------------------- names


def from_published(state: Mapping[str, Tensor]) -> StateDict:
    """Rename published keys to those of the backbone (``stem.*``, ``stages.*``, ``head.*``)."""
    renamed = {}
    for key, value in state.items():
        for theirs, ours in PUBLISHED_HEADS:
            if key.startswith(theirs):
                key = ours + key[len(theirs) :]
                break
        else:
            for theirs, ours in PUBLISHED_NAMES:
                key = key.replace(theirs, ours)
        renamed[key] = value
    return renamed


def to_published(state: Mapping[str, Tensor]) -> StateDict:
    """The inverse of :func:`from_published`."""
    renamed = {}
    for key, value in state.items():
        for theirs, ours in PUBLISHED_HEADS:
            if key.startswith(ours):
                key = theirs + key[len(ours) :]
                break
        else:
            for theirs, ours in PUBLISHED_NAMES:
                key = key.replace(ours, theirs)
        renamed[key] = value
    return renamed


def is_published(keys: Iterable[str]) -> bool:
    """Whether keys are those of a published CARE file."""
    keys = set(keys)
    return 'stem.0.weight' in keys and any(
        key.startswith(('stages.0.blocks.0.inter_layer.', 'stages.0.blocks.0.token_mixer.'))
        for key in keys
    )


def is_folded(keys: Iterable[str]) -> bool:
    """Whether a backbone's keys are those of a folded one (``CARE.switch_to_deploy``)."""
    return any(key.startswith('stem.folded_conv.') for key in keys)


def as_classifier(state: Mapping[str, Tensor]) -> StateDict:
    """Put the backbone's keys under ``backbone.``, where MM models have it."""
    return {
        (BACKBONE + key if key.startswith(BACKBONE_PARTS) else key): value
        for key, value in state.items()
    }


def find_published_state(checkpoint: Any, use_ema: bool = False) -> tuple[StateDict | None, str]:
    """Find the weights in a published file.

    Args:
        checkpoint: What the file holds: a timm training checkpoint, or a state dict by itself.
        use_ema: Take ``state_dict_ema`` instead of ``state_dict``.

    Returns:
        The weights under their published names, or None if this is no published file; and a
        sentence that says which were taken.

    Raises:
        CheckpointError: If ``use_ema`` is given and there are no such weights.
    """
    if not isinstance(checkpoint, Mapping):
        return None, ''
    states = {
        name: _without_wrapper(checkpoint[name])
        for name in ('state_dict', 'state_dict_ema')
        if isinstance(checkpoint.get(name), Mapping)
    }
    if not states:
        states = {'state_dict': _without_wrapper(checkpoint)}
    found = {name: state for name, state in states.items() if is_published(state)}
    if use_ema and found and 'state_dict_ema' not in found:
        raise CheckpointError('there is no state_dict_ema in the file; leave --ema out')
    if not found:
        return None, ''
    taken = 'state_dict_ema' if use_ema or 'state_dict' not in found else 'state_dict'
    left = [name for name in found if name != taken]
    return found[taken], f'took {taken}' + (f', left {left[0]} aside' if left else '')


def _without_wrapper(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Names without the ``module.`` that distributed wrappers put in front."""
    return {str(key).removeprefix('module.'): value for key, value in state.items()}


# ---------------------------------------------------------------- the loader of MM toolboxes


@CheckpointLoader.register_scheme(prefixes='', force=True)
def load_from_local_checked(filename: str, map_location: Any = None) -> dict[str, Any]:
    """Load a local checkpoint for mmengine, whatever the toolbox.

    Reads as :func:`read_checkpoint` does. A published CARE file gets the names of an MM
    classifier; every other file is passed on as it is. Weights that are not finite, and what is no
    weight, are named in a warning.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If it is damaged, holds what is not allowed, or no weights.
    """
    filename = os.path.expanduser(filename)
    checkpoint = read_checkpoint(filename, map_location)
    if isinstance(checkpoint, Tensor):  # not weights of a model; MM toolboxes load embeddings so
        return checkpoint
    _check_state(filename, checkpoint)
    published, taken = find_published_state(checkpoint)
    if published is not None:
        print_log(f'{filename} is a published CARE checkpoint: {taken}', logger='current')
        checkpoint = dict(meta={}, state_dict=OrderedDict(as_classifier(from_published(published))))
    if 'state_dict' in checkpoint:
        checkpoint['state_dict'] = _with_metadata(checkpoint['state_dict'], filename)
        return checkpoint
    return _with_metadata(checkpoint, filename)


@CheckpointLoader.register_scheme(prefixes=('http://', 'https://'), force=True)
def load_from_http_checked(filename: str, map_location: Any = None) -> dict[str, Any]:
    """Download a checkpoint for mmengine, unless it was before, and load it as a local one.

    mmengine's own loader runs what code the file brings. Rank 0 downloads, the others wait, and
    download only if they do not see its file, as on another machine. ``torch.hub`` says where the
    file is kept.

    Args:
        filename: The address.
        map_location: As in ``torch.load``.

    Raises:
        OSError: If it cannot be downloaded.
        CheckpointError: As by :func:`load_from_local_checked`.
    """
    file = Path(torch.hub.get_dir(), 'checkpoints', Path(urlparse(filename).path).name)
    if is_main_process():
        _download(filename, file)
    barrier()
    _download(filename, file)
    return load_from_local_checked(str(file), map_location)


def _download(address: str, file: Path) -> None:
    """Download a file, whole or not at all, unless it is there."""
    if file.is_file():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    print_log(f'Downloading {address} to {file}', logger='current')
    torch.hub.download_url_to_file(address, str(file), progress=sys.stderr.isatty())


def load_weights(filename: str | os.PathLike) -> dict[str, Any]:
    """Load a local checkpoint as :func:`load_from_local_checked` does, for the CPU.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If it is damaged, holds what is not allowed, or no weights.
    """
    checkpoint = load_from_local_checked(os.fspath(filename), 'cpu')
    if isinstance(checkpoint, Tensor):
        raise CheckpointError(f'{filename} holds a tensor, not the weights of a model')
    return checkpoint


def _check_state(filename: str, checkpoint: Any) -> None:
    """Check what a model would be given; warn of what only the model can judge."""
    if not isinstance(checkpoint, dict):
        raise CheckpointError(
            f'{filename} holds a {type(checkpoint).__name__}, not the weights of a model'
        )
    state = checkpoint.get('state_dict', checkpoint)
    if not isinstance(state, dict):
        raise CheckpointError(
            f'{filename}: state_dict is a {type(state).__name__}, not a dict of weights'
        )
    if 'state_dict' not in checkpoint:
        state = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    wrong = [key for key in state if not isinstance(key, str)]
    if wrong:
        raise CheckpointError(f'{filename}: {wrong[0]!r} is no name of a weight')
    faults = find_faults(state)
    if faults:
        print_log(
            f'{filename}: {_some(faults)}',
            logger='current',
            level=logging.WARNING,
        )


def find_faults(state: Mapping[str, Any], of_network: bool = False) -> list[str]:
    """Find values that cannot be, or should not be, the weights of a network.

    Args:
        state: Weights by name.
        of_network: Whether they are those of mmcare's networks, which are of floating point, but
            for counters of batches. Other networks may hold indices and masks.

    Returns:
        A line for each: the key and what is wrong with its value.
    """
    faults = []
    for key, value in state.items():
        fault = None if key.endswith('_extra_state') else _find_fault(value)
        counts = key.endswith('num_batches_tracked')
        if of_network and not fault and not counts and not value.is_floating_point():
            fault = f'has values of {value.dtype}'
        if fault:
            faults.append(f'{key} {fault}')
    return faults


def _find_fault(value: Any) -> str | None:
    if not isinstance(value, Tensor):
        return f'is a {type(value).__name__}, not a tensor'
    if value.is_meta:
        return 'has a shape only, no values'
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        return 'is a sparse, quantized or nested tensor'
    if not (value.is_floating_point() or value.is_complex()):
        return None
    stored = value.untyped_storage()
    if value.numel() * value.itemsize > stored.nbytes():
        # Repeats its values, which may be more than fit into memory.
        value = torch.empty(0, dtype=value.dtype, device=value.device).set_(stored)
    if value.itemsize == 1:  # PyTorch does not compute in 8 bits
        value = value.float()
    return None if value.isfinite().all() else 'has values that are not finite (NaN or infinite)'


def _some(lines: list[str]) -> str:
    """The first three of some lines, and the number of the others."""
    return ', '.join(lines[:3]) + (f' and {len(lines) - 3} more' if len(lines) > 3 else '')


def _with_metadata(state: Mapping[str, Tensor], filename: str) -> OrderedDict[str, Tensor]:
    """Copy a state dict, with metadata that lets backbone and head name the file.

    Of the metadata in the file only versions are kept: other entries, and attributes of a pickled
    OrderedDict, can change how PyTorch loads.
    """
    given = getattr(state, '_metadata', None)
    metadata = {part: _Metadata() for part in ('', 'backbone', 'head')}
    for part, values in given.items() if isinstance(given, dict) else ():
        if isinstance(values, dict) and isinstance(values.get('version'), int):
            metadata.setdefault(part, _Metadata())['version'] = values['version']
    classifier_only = _holds_classifier_only(state)
    for part in ('', 'backbone', 'head'):
        metadata[part]['file'] = filename
        if part and classifier_only:
            metadata[part]['classifier_file'] = filename
    copy: OrderedDict[str, Tensor] = OrderedDict(dict.items(cast(dict[str, Tensor], state)))
    vars(copy)['_metadata'] = OrderedDict(metadata)
    return copy


class _Metadata(dict[str, Any]):
    """Metadata of a module; the file that it came from is not saved with it."""

    def __reduce__(self) -> tuple:
        items = ((key, value) for key, value in self.items() if key == 'version')
        return OrderedDict, (), None, None, items


def _holds_classifier_only(state: Mapping[str, Tensor]) -> bool:
    heads = tuple(ours for _, ours in PUBLISHED_HEADS)
    keys = [key for key in state if isinstance(key, str)]
    return any(key.startswith(heads) for key in keys) and all(
        key.startswith((BACKBONE, *heads)) for key in keys
    )


def check_init_cfg(init_cfg: Any) -> None:
    """Check the form of the ``init_cfg`` of a module.

    Raises:
        TypeError: If it is not a dict, a list of them or None.
        ValueError: If a type is unknown, or a file is not named by text.
    """
    for cfg in init_cfg if isinstance(init_cfg, list) else [init_cfg]:
        if cfg is None:
            continue
        if not isinstance(cfg, dict):
            raise TypeError(f'init_cfg must be a dict or a list of dicts, got {cfg!r}')
        kind = cfg.get('type')
        if not kind or (isinstance(kind, str) and WEIGHT_INITIALIZERS.get(kind) is None):
            raise ValueError(f'init_cfg has the unknown type {kind!r}: {cfg!r}')
        if kind == 'Pretrained' and 'checkpoint' in cfg and not isinstance(cfg['checkpoint'], str):
            raise ValueError(f'init_cfg.checkpoint must be the name of a file, got {cfg!r}')


def check_pretrained_file(init_cfg: dict | list | None) -> None:
    """Say where the weights are if ``init_cfg`` names a local file that does not exist.

    Raises:
        FileNotFoundError: In that case.
        ValueError: If it names none.
    """
    for cfg in init_cfg if isinstance(init_cfg, list) else [init_cfg]:
        if not cfg or cfg.get('type') != 'Pretrained':
            continue
        if 'checkpoint' not in cfg:
            raise ValueError(
                "init_cfg of CARE has type='Pretrained' but names no file; set init_cfg.checkpoint"
            )
        filename = cfg['checkpoint']
        is_local = CheckpointLoader._get_checkpoint_loader(filename) is load_from_local_checked
        if is_local and not Path(filename).expanduser().is_file():
            raise FileNotFoundError(
                f'init_cfg of CARE names the checkpoint {filename!r}, and there is no such file '
                f'in {Path.cwd()}.\n{WHERE_TO_GET_WEIGHTS}'
            )


@contextmanager
def naming(filename: str | os.PathLike | None) -> Iterator[None]:
    """Add the name of the file to errors of loading, which may come from where it is not known.

    Raises:
        CheckpointError: In place of an error of loading that does not name the file.
    """
    try:
        yield
    except (AssertionError, CheckpointError) as error:  # mmengine asserts that a prefix occurs
        if filename is None or os.fspath(filename) in str(error):
            raise
        raise CheckpointError(f'{os.fspath(filename)}: {error}') from error


def name_of_pretrained_file(init_cfg: dict | list | None) -> str | None:
    """The file that ``init_cfg`` names, if it names one."""
    for cfg in init_cfg if isinstance(init_cfg, list) else [init_cfg]:
        if cfg and cfg.get('type') == 'Pretrained':
            return cfg.get('checkpoint')
    return None


# ---------------------------------------------------------------- the backbone's side


def prepare_backbone_state(
    backbone: 'CARE', state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any]
) -> None:
    """Make a state dict fit the backbone, in place, or raise.

    A backbone by itself takes its part of a whole model's state dict. Published names are
    renamed. Weights of stages that are not built are dropped. Norms of ``out_norm_cfg`` may be
    missing or left over; the counters ``num_batches_tracked`` may be missing.

    Args:
        backbone: A :class:`mmcare.models.CARE`.
        state_dict: Keys begin with ``prefix``; others are left alone.
        prefix: Name of the backbone in the model, with a dot; empty for the backbone by itself.
        local_metadata: Metadata of the state dict for this module.

    Raises:
        CheckpointError: If a weight is missing, left over, of another shape, not a number of
            floating point or not finite. It names the first few keys, what the file looks like,
            and the arguments that disagree.
    """
    given = {key[len(prefix) :]: key for key in state_dict if key.startswith(prefix)}
    if not any(key.startswith(BACKBONE_PARTS) for key in given) and any(
        key.startswith(BACKBONE) for key in given
    ):
        given = _replace(
            state_dict,
            prefix,
            given,
            {
                key[len(BACKBONE) :]: state_dict[full]
                for key, full in given.items()
                if key.startswith(BACKBONE)
            },
        )
    if is_published(given):
        given = _replace(
            state_dict,
            prefix,
            given,
            {
                key: value
                for key, value in from_published(
                    {k: state_dict[f] for k, f in given.items()}
                ).items()
                if key.startswith(BACKBONE_PARTS)
            },
        )

    expected = _expected_shapes(backbone)
    for key in [key for key in given if _is_exempt(key, backbone) and key not in expected]:
        del state_dict[given.pop(key)]
    missing = [
        key
        for key in expected
        if key not in given
        and not key.startswith('out_norms.')
        and not key.endswith('num_batches_tracked')
    ]
    unexpected = [key for key in given if key not in expected]
    tensors = {
        key: state_dict[full] for key, full in given.items() if isinstance(state_dict[full], Tensor)
    }
    misshapen = [
        key for key in expected if key in tensors and expected[key] != tuple(tensors[key].shape)
    ]
    faults = find_faults({key: state_dict[full] for key, full in given.items()}, of_network=True)
    if missing or unexpected or misshapen or faults:
        raise CheckpointError(
            _explain(
                backbone,
                prefix,
                tensors,
                missing,
                unexpected,
                [
                    f'{key} {tuple(tensors[key].shape)} instead of {expected[key]}'
                    for key in misshapen
                ],
                faults,
                local_metadata.get('file'),
            )
        )
    if prefix and local_metadata.get('classifier_file'):
        print_log(
            f'{local_metadata["classifier_file"]} holds a backbone and ImageNet classification '
            'heads, which a CAREClsHead loads too: the backbone is loaded. Necks and heads of '
            'detectors and segmentors are not in it and keep their initial values.',
            logger='current',
            level=logging.WARNING,
        )


def _replace(
    state_dict: dict[str, Any], prefix: str, given: dict[str, str], values: Mapping[str, Any]
) -> dict[str, str]:
    """Put values in place of those given so far; return the new names by their short names."""
    for full in given.values():
        del state_dict[full]
    renamed = {key: prefix + key for key in values}
    state_dict.update({renamed[key]: value for key, value in values.items()})
    return renamed


def _expected_shapes(backbone: nn.Module) -> dict[str, tuple[int, ...]]:
    # Not state_dict(): wrappers such as FSDP communicate there. Names without those of wrappers.
    named = [*backbone.named_parameters(), *backbone.named_buffers()]
    return {
        key.replace('_checkpoint_wrapped_module.', '').replace('_orig_mod.', ''): tuple(value.shape)
        for key, value in named
    }


def _is_exempt(key: str, backbone: 'CARE') -> bool:
    """Whether a key is of an output norm, or of a stage that is not built."""
    part, *rest = key.split('.')
    if part == 'out_norms':
        return True
    if part != 'stages' or not rest:
        return False
    index = _number(rest[0])
    return index is not None and index >= len(backbone.stages)


def _number(text: str) -> int | None:
    """The number in a key; None if it is none, or longer than any that a network has."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else None


def _explain(
    backbone: 'CARE',
    prefix: str,
    state: Mapping[str, Tensor],
    missing: list[str],
    unexpected: list[str],
    misshapen: list[str],
    faults: list[str],
    file: str | None,
) -> str:
    given = f'in {file}' if file else 'given'
    lines = [f'The weights {given} do not fit the CARE backbone (prefix {prefix!r}).']
    for title, keys in (
        ('missing', missing),
        ('not in the model', unexpected),
        ('of another shape', misshapen),
        ('no usable weights', faults),
    ):
        if keys:
            lines.append(f'  {title}: {_some(keys)}')
    if not state:
        lines.append(
            f'None of the weights has the prefix {prefix!r}. A file with the weights of a backbone '
            "alone goes in through model.backbone.init_cfg; a whole model's has keys that begin "
            f'with {prefix!r}.'
        )
        return '\n'.join(lines)
    looks = describe_backbone(state, backbone.arch_zoo)
    if not looks:
        lines.append('The file does not look like a CARE checkpoint at all.')
        return '\n'.join(lines)
    lines.append(
        f'The file looks like {"folded weights of " * is_folded(state)}{_format_looks(looks)}.'
    )
    if is_folded(state) and not backbone.deploy:
        lines.append(
            '  The weights are folded (tools/reparameterize_model.py), the model is not: build it '
            'with deploy=True (--cfg-options model.backbone.deploy=True) to evaluate, or give the '
            'weights from before folding to train'
        )
    elif backbone.deploy and not is_folded(state):
        lines.append(
            '  The model is folded (deploy=True), the weights are not: fold them first (python '
            'tools/reparameterize_model.py CONFIG CHECKPOINT OUT), or leave deploy out'
        )
    model = describe_backbone(_meta_state(backbone), backbone.arch_zoo)
    for name in looks:
        if name in model and looks[name] != model[name]:
            lines.append(f'  {name}: the file has {looks[name]!r}, the model {model[name]!r}')
    return '\n'.join(lines)


def _meta_state(backbone: 'CARE') -> dict[str, Tensor]:
    return {
        key: torch.empty(shape, device='meta') for key, shape in _expected_shapes(backbone).items()
    }


def describe_backbone(
    state: Mapping[str, Tensor], arch_zoo: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Read the arguments of a CARE backbone off its weights.

    Args:
        state: Weights under the backbone's own names, folded or not; stages behind the last one
            may be missing.
        arch_zoo: Known archs by name.

    Returns:
        ``arch`` (a name, or depths, widths, memory widths and expansions as far as they can be
        told, None for an expansion that cannot), ``in_channels``, ``num_stages``, ``expand_last``
        (with all four stages) and the arguments of :data:`ABLATION_DEFAULTS`; empty if these are
        not a CARE's weights.
    """
    stem = next((state[key] for key in STEM_CONVS if key in state), None)
    if stem is None or stem.dim() != 4:
        return {}
    stages: list[dict[str, Any]] = []
    while (stage := _describe_stage(state, len(stages))) is not None:
        stages.append(stage)
    arch = {
        key: tuple(stage[key] for stage in stages)
        for key in ('depths', 'widths', 'memory_widths', 'expansions')
    }
    looks = dict(arch=arch, in_channels=stem.shape[1], num_stages=len(stages))
    if not stages:
        return looks
    for name, known in arch_zoo.items():
        if all(_agrees(values, known[key]) for key, values in arch.items()):
            looks['arch'] = name
            break
    if len(stages) == NUM_STAGES:
        looks['expand_last'] = stages[-1]['bare_end']
    return looks | {name: stages[0][name] for name in ABLATION_DEFAULTS}


def _describe_stage(state: Mapping[str, Tensor], index: int) -> dict[str, Any] | None:
    """Read one stage's share of :func:`describe_backbone` off the weights; None if it is none."""
    prefix = f'stages.{index}.blocks.'
    numbers = (_number(key.split('.')[3]) for key in state if key.startswith(prefix))
    blocks = {number for number in numbers if number is not None}
    entries = STEM_CONVS if index == 0 else (f'stages.{index}.downsample.conv.weight',)
    entry = next((key for key in entries if key in state), None)
    if not blocks or entry is None or state[entry].dim() != 4:
        return None
    # Channels of every weight of the first block by its name, such as 'inter1.expand'.
    first = {
        key.removeprefix(f'{prefix}0.').removesuffix('.weight'): value.shape
        for key, value in state.items()
        if key.startswith(f'{prefix}0.') and key.endswith('.weight') and value.dim() == 4
    }
    mixer = {key.removeprefix('mixer.'): shape for key, shape in first.items()}
    attends = 'global_learner.query_key' in mixer
    if attends:
        global_channels = mixer['global_learner.query_key'][1]
    elif 'global_learner.vertical' in mixer:
        global_channels = mixer['global_learner.vertical'][0]
    else:
        return None
    local_channels = sum(
        shape[0] for key, shape in mixer.items() if key.startswith('local_learner.')
    )
    if 'local_learner1.conv3x3' in mixer:
        decoupling, width = 'stacked', global_channels
    elif local_channels == 0:
        decoupling, width = 'global_only', global_channels
    else:
        decoupling = 'symmetric' if local_channels == global_channels else 'asymmetric'
        width = global_channels + local_channels
    state_width = state[entry].shape[0]
    memory_width = state_width - width

    def expansion(name: str, channels: int) -> int | None:
        latent = first.get(f'{name}.expand')
        return None if latent is None or not channels else latent[0] // channels

    return dict(
        depths=len(blocks),
        widths=width,
        memory_widths=memory_width,
        expansions=(expansion('inter1', width), expansion('inter2', state_width)),
        bare_end=f'{prefix}{max(blocks)}.gamma' not in state,
        decoupling=decoupling,
        inter1='inter1.expand' in first,
        inter2='inter2.expand' in first,
        memory=memory_width > 0,
        early_conv=not attends,
        multi_scale=decoupling == 'global_only' or any(key.endswith('.conv7x7') for key in mixer),
    )


def _agrees(found: tuple, known: tuple) -> bool:
    """Whether values per stage are those of a known arch, as far as an ablation leaves them."""
    for value, expected in zip(found, known, strict=False):
        if isinstance(value, tuple):
            if not _agrees(value, expected):
                return False
        elif value not in (None, 0, expected):
            return False
    return True


def _format_looks(looks: Mapping[str, Any]) -> str:
    """Write a backbone's arguments as a call; ablations only where they are not the default."""
    shown = {
        name: value
        for name, value in looks.items()
        if name not in ABLATION_DEFAULTS or value != ABLATION_DEFAULTS[name]
    }
    return f'CARE({", ".join(f"{name}={value!r}" for name, value in shown.items())})'


# ---------------------------------------------------------------- writing


def write_checkpoint(checkpoint: dict[str, Any], filename: str | os.PathLike) -> None:
    """Write a checkpoint to a temporary name and move it into place.

    Args:
        checkpoint: With ``state_dict`` and ``meta`` (plain values).
        filename: ``.safetensors`` stores the tensors, a checksum of them and ``meta`` as
            strings; any other ending is written by ``torch.save``.
    """
    path = Path(filename)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    try:
        if path.suffix == '.safetensors':
            state = {key: value.contiguous() for key, value in checkpoint['state_dict'].items()}
            meta = {key: str(value) for key, value in checkpoint['meta'].items()}
            meta = {key: value for key, value in meta.items() if key != TENSORS_CHECKSUM}
            save_file(state, temporary, metadata={**meta, CHECKSUM: _digest(state, meta)})
        else:
            torch.save(checkpoint, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def convert_checkpoint(
    source: str | os.PathLike, destination: str | os.PathLike, use_ema: bool = False
) -> str:
    """Convert between published files and those of MM toolboxes, in the direction that fits.

    Args:
        source: A published file, or a checkpoint with a CARE backbone under ``backbone.`` or by
            itself.
        destination: File to write; see :func:`write_checkpoint` for endings.
        use_ema: Take ``state_dict_ema`` of a published file.

    Returns:
        A sentence that says what was taken and what was written.

    Raises:
        FileNotFoundError: If there is no source.
        CheckpointError: If the source cannot be read or holds no whole CARE backbone.
    """
    from mmcare.models import CARE  # which needs this module

    source = os.fspath(source)
    checkpoint = read_checkpoint(source)
    if isinstance(checkpoint, Tensor):
        raise CheckpointError(f'{source} holds a tensor, not the weights of a model')
    _check_state(source, checkpoint)
    with naming(source):
        published, taken = find_published_state(checkpoint, use_ema)
    if published is not None:
        state = from_published(published)
        converted = as_classifier(state)
        direction = 'as the checkpoint of an MM classifier'
    else:
        if use_ema:
            raise CheckpointError(f'{source} is no published file: --ema does not apply')
        state = _without_wrapper(checkpoint.get('state_dict', checkpoint))
        heads = tuple(ours for _, ours in PUBLISHED_HEADS)
        state = {
            key.removeprefix(BACKBONE): value
            for key, value in state.items()
            if key.startswith((BACKBONE, *BACKBONE_PARTS, *heads))
        }
        converted = to_published(
            {key: value for key, value in state.items() if not key.startswith('out_norms.')}
        )
        taken = 'took the backbone' + (
            ' and the ImageNet heads' if any(key.startswith(heads) for key in state) else ''
        )
        direction = 'in the published format'
    faults = find_faults(state, of_network=True) + [
        f'{key} holds more values than the file'
        for key, value in state.items()
        if isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.numel() * value.itemsize > value.untyped_storage().nbytes()
    ]
    if faults:
        raise CheckpointError(f'{source}: {_some(faults)}')
    looks = describe_backbone(state, CARE.arch_zoo)
    if not looks or not looks['num_stages']:
        raise CheckpointError(f'{source} holds no CARE backbone')
    if is_folded(state):
        raise CheckpointError(
            f'{source} holds folded weights, which have no published form; convert the checkpoint '
            'from before folding'
        )
    _check_whole(CARE, looks, state, source)
    described = _format_looks(looks)
    write_checkpoint(
        dict(
            meta=dict(mmcare_version=__version__, source=Path(source).name, backbone=described),
            state_dict=OrderedDict(converted),
        ),
        destination,
    )
    return f'{source}: {taken}. Wrote {destination} {direction}: {described}.'


def _check_whole(
    backbone_class: type['CARE'],
    looks: Mapping[str, Any],
    state: Mapping[str, Tensor],
    source: str | os.PathLike,
) -> None:
    """Raise unless the weights fill the backbone that they look like."""
    arch, num_stages = looks['arch'], looks['num_stages']
    if not isinstance(arch, str):
        # Values for stages that are not there, and for what shows in no weight: the width of
        # heads, and what an ablation leaves out.
        arch = {
            key: values + values[-1:] * (NUM_STAGES - num_stages) for key, values in arch.items()
        }
        arch['memory_widths'] = tuple(width or 1 for width in arch['memory_widths'])
        arch['expansions'] = tuple((r1 or 1, r2 or 1) for r1, r2 in arch['expansions'])
        arch['head_channels'] = tuple(max(width // 3, 1) for width in arch['widths'])
    weights = {key: value for key, value in state.items() if key.startswith(BACKBONE_PARTS)}
    try:
        with torch.device('meta'):  # shapes only: those in a file may be larger than memory
            backbone = backbone_class(
                arch,
                in_channels=looks['in_channels'],
                out_indices=(num_stages - 1,),
                expand_last=looks.get('expand_last', True),
                **{name: looks[name] for name in ABLATION_DEFAULTS},
            )
        prepare_backbone_state(backbone, weights, '', {})
    except (RuntimeError, TypeError, ValueError) as error:  # CheckpointError is a RuntimeError
        raise CheckpointError(f'{source} holds no whole CARE backbone. {error}') from error
