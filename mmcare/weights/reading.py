"""Read and write checkpoint files: no code of theirs runs, and damage is found."""

import hashlib
import logging
import os
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from mmengine.dist import barrier, is_main_process
from mmengine.logging import print_log
from mmengine.model.weight_init import PretrainedInit
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mmcare.files import moved_into_place
from mmcare.weights.published import (
    WHERE_TO_GET_WEIGHTS,
    as_classifier,
    from_published,
    is_published,
    without_wrapper,
)
from mmcare.weights.unpickling import unpickle

ZIP_MAGIC = b'PK\x03\x04'
# In the metadata of .safetensors: over tensors and metadata; over tensors alone (mmcare 0.1).
CHECKSUM, TENSORS_CHECKSUM = 'mmcare_checksum', 'mmcare_sha256'


class CheckpointError(RuntimeError):
    """A checkpoint file that is damaged, refused, or does not fit."""


def read_checkpoint(filename: str | os.PathLike, map_location: Any = 'cpu') -> Any:
    """Read a local checkpoint file without running code from it.

    Files of ``torch.save`` are read with ``weights_only=True``; beyond PyTorch's own list only
    what MM and timm training checkpoints hold is allowed: NumPy arrays and scalars,
    ``argparse.Namespace`` and mmengine's log buffers. Checksums of the zip container, which
    ``torch.load`` ignores, are verified. A file without checksums is named in a warning.

    Args:
        filename: ``.safetensors``, or any other ending for a file of ``torch.save``.
        map_location: As in ``torch.load``.

    Returns:
        The object in the file; for ``.safetensors`` a dict with ``state_dict`` and ``meta``.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If it is damaged, or holds something that is not allowed.
    """
    path = Path(filename)
    if not path.is_file():
        raise FileNotFoundError(f'{path} is not a file')
    if path.suffix == '.safetensors':
        return _read_safetensors(path, map_location)
    with path.open('rb') as file:
        is_archive = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC  # as torch.load decides
    if is_archive:
        _verify_archive(path)
    try:
        checkpoint = unpickle(path, map_location)
    except Exception as error:  # a damaged pickle can raise anything
        # Without PyTorch's advice to read the file unsafely, which comes before and after.
        reason = str(error).rpartition('WeightsUnpickler error: ')[2].strip().partition('\n')[0]
        raise CheckpointError(
            f'{path} cannot be read as a checkpoint: it is damaged, not a checkpoint, or holds '
            'objects other than tensors, plain values and what MM and timm training files hold. '
            f'({type(error).__name__}: {reason})'
        ) from error
    if not is_archive:
        _warn_unverified(path)
    return checkpoint


def load_checkpoint(filename: str | os.PathLike, map_location: Any = None) -> Any:
    """Read a local or downloaded checkpoint as mmengine wants it.

    A published CARE file gets the names of an MM classifier (``backbone.*``, ``head.*``), and
    errors of loading name the file. Everything else is passed on as it is, except ``meta.config``,
    which mmengine would run as a program on resume.

    Args:
        filename: A path, or an address with ``http://`` or ``https://``. Rank 0 downloads.
        map_location: As in ``torch.load``.

    Raises:
        FileNotFoundError: If there is no such file.
        OSError: If it cannot be downloaded.
        CheckpointError: As by :func:`read_checkpoint`, or if the file does not hold weights.
    """
    name = os.path.expanduser(os.fspath(filename))
    checkpoint = read_checkpoint(_download(name) if _is_remote(name) else name, map_location)
    if isinstance(checkpoint, Tensor):  # an embedding: MM toolboxes load these in the same way
        return checkpoint
    published, taken = find_published_state(checkpoint)
    if published is not None:
        print_log(f'{name} is a published CARE checkpoint: {taken}', logger='current')
        checkpoint = dict(meta={}, state_dict=as_classifier(from_published(published)))
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f'{name} holds a {type(checkpoint).__name__}, not weights')
    if isinstance(checkpoint.get('meta'), dict):
        checkpoint['meta'].pop('config', None)
    if 'state_dict' in checkpoint:
        checkpoint['state_dict'] = _named_after(name, checkpoint['state_dict'])
        return checkpoint
    return _named_after(name, checkpoint)


def load_weights(filename: str | os.PathLike) -> dict[str, Any]:
    """Return the state dict of :func:`load_checkpoint`, on the CPU, without prefixes of wrappers.

    Raises:
        FileNotFoundError, OSError, CheckpointError: As by :func:`load_checkpoint`.
    """
    checkpoint = load_checkpoint(filename, 'cpu')
    if isinstance(checkpoint, Tensor):
        raise CheckpointError(f'{filename} holds a tensor, not the weights of a model')
    state = checkpoint.get('state_dict', checkpoint)
    return _named_after(os.fspath(filename), without_wrapper(state))


def load_pretrained(module: nn.Module, init_cfg: dict | list[dict] | None) -> bool:
    """Load the file that ``init_cfg=dict(type='Pretrained', ...)`` names.

    Args:
        module: Raises unless it gets all its weights.
        init_cfg: As mmengine's; ``prefix`` selects a part of a whole model's weights.

    Returns:
        Whether a file was loaded. Addresses such as ``s3://`` are left to mmengine.

    Raises:
        FileNotFoundError: If there is no such file; the message says where to get the weights.
        CheckpointError: If it cannot be read, or does not fit.
    """
    for cfg in init_cfg if isinstance(init_cfg, list) else [init_cfg or {}]:
        if cfg.get('type') not in ('Pretrained', PretrainedInit):
            continue
        file = str(cfg.get('checkpoint', ''))
        if '://' in file and not _is_remote(file):
            return False
        if not _is_remote(file) and not Path(file).expanduser().is_file():
            raise FileNotFoundError(
                f'init_cfg names the checkpoint {file!r}, and there is no such file in '
                f'{Path.cwd()}.\n{WHERE_TO_GET_WEIGHTS}'
            )
        state = load_weights(file)
        prefix = (cfg.get('prefix') or '').rstrip('.')
        if prefix:
            part = {k: v for k, v in state.items() if k.startswith(f'{prefix}.')}
            if not part:
                raise CheckpointError(f'{file} has no weights under the prefix {prefix!r}')
            part = {k.removeprefix(f'{prefix}.'): v for k, v in part.items()}
            state = _named_after(file, part)
        print_log(f'Loading the weights in {file}', logger='current')
        module.load_state_dict(state, strict=False)
        return True
    return False


def find_published_state(
    checkpoint: Any, use_ema: bool = False
) -> tuple[dict[str, Any] | None, str]:
    """Find the weights in a published file.

    Args:
        checkpoint: What the file holds: a timm training checkpoint, or a state dict by itself.
        use_ema: Take ``state_dict_ema`` instead of ``state_dict``.

    Returns:
        The weights under their published names, or None if the file is not a published one; and a
        sentence that says which were taken.

    Raises:
        CheckpointError: If ``use_ema`` is given and there are no such weights.
    """
    if not isinstance(checkpoint, Mapping):
        return None, ''
    states = {
        name: without_wrapper(checkpoint[name])
        for name in ('state_dict', 'state_dict_ema')
        if isinstance(checkpoint.get(name), Mapping)
    }
    states = states or {'state_dict': without_wrapper(checkpoint)}
    found = {name: state for name, state in states.items() if is_published(state)}
    if use_ema and found and 'state_dict_ema' not in found:
        raise CheckpointError('there is no state_dict_ema in the file; leave --ema out')
    if not found:
        return None, ''
    taken = 'state_dict_ema' if use_ema or 'state_dict' not in found else 'state_dict'
    left = [name for name in found if name != taken]
    return found[taken], f'took {taken}' + (f', left {left[0]} aside' if left else '')


def write_checkpoint(checkpoint: dict[str, Any], filename: str | os.PathLike) -> None:
    """Write a checkpoint under a temporary name and move it into place.

    Args:
        checkpoint: With ``state_dict`` and ``meta`` (plain values).
        filename: ``.safetensors`` stores the tensors, a checksum, and text and numbers of
            ``meta``; any other ending is written by ``torch.save``.
    """
    with moved_into_place(Path(filename)) as temporary:
        if temporary.suffix == '.safetensors':
            # Copies: the format refuses tensors that share memory, as tied layers do.
            state = {k: v.clone().contiguous() for k, v in checkpoint['state_dict'].items()}
            plain = (str, int, float)  # the format has text only
            meta = {k: str(v) for k, v in checkpoint['meta'].items() if isinstance(v, plain)}
            meta.pop(TENSORS_CHECKSUM, None)
            save_file(state, temporary, metadata={**meta, CHECKSUM: _digest(state, meta)})
        else:
            torch.save(checkpoint, temporary)


def _is_remote(filename: str) -> bool:
    return filename.startswith(('http://', 'https://'))


def _download(address: str) -> Path:
    """Download a file unless it is there already; return where ``torch.hub`` keeps it."""
    file = Path(torch.hub.get_dir(), 'checkpoints', Path(urlparse(address).path).name)

    def fetch() -> None:
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(address, str(file), progress=sys.stderr.isatty())

    if is_main_process():
        fetch()
    barrier()
    fetch()  # on another machine, which does not see the file of rank 0
    return file


def _warn_unverified(path: Path) -> None:
    print_log(
        f'{path} has no checksums: damage would go unnoticed. torch.save and '
        'tools/convert_checkpoint.py write files with checksums.',
        logger='current',
        level=logging.WARNING,
    )


def _verify_archive(path: Path) -> None:
    """Check what ``torch.load`` does not: checksums, and that no entry hides another."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if len({entry.filename for entry in entries}) != len(entries):
                raise CheckpointError('two of its entries have the same name')
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise CheckpointError('it is compressed, as torch.save never does')
            damaged = archive.testzip()
    except Exception as error:  # a damaged directory can raise anything
        raise CheckpointError(f'{path} is damaged, incomplete or refused: {error}') from error
    if damaged is not None:
        raise CheckpointError(f'{path} is damaged: the checksum of {damaged} is wrong')


def _read_safetensors(path: Path, map_location: Any) -> dict[str, Any]:
    device = str(map_location) if isinstance(map_location, str | torch.device) else 'cpu'
    try:
        with safe_open(path, framework='pt', device=device) as file:
            meta = dict(file.metadata() or {})
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except Exception as error:  # not SafetensorError alone: types that PyTorch does not have, too
        raise CheckpointError(f'{path} is damaged or not a safetensors file: {error}') from error
    # The format has no checksums; write_checkpoint adds one, other writers may not.
    if CHECKSUM in meta:
        intact = meta[CHECKSUM] == _digest(state, meta)
    elif TENSORS_CHECKSUM in meta:
        intact = meta[TENSORS_CHECKSUM] == _digest(state, {})
    else:
        intact = True
        _warn_unverified(path)
    if not intact:
        raise CheckpointError(f'{path} is damaged: the checksum of its content is wrong')
    return dict(meta=meta, state_dict=state)


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


def _named_after(file: str, state: Any) -> OrderedDict[str, Any]:
    """Copy a state dict, with the name of its file in the metadata of backbone and head.

    Of the metadata in the file only versions are kept: other entries, and attributes of a pickled
    OrderedDict, can change how PyTorch loads.

    Raises:
        CheckpointError: If it is not a dict of names.
    """
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise CheckpointError(f'{file} does not hold the weights of a model by name')
    given = getattr(state, '_metadata', None)
    metadata: dict[str, dict[str, Any]] = {}
    for part, values in given.items() if isinstance(given, dict) else ():
        if isinstance(values, dict) and isinstance(values.get('version'), int):
            metadata[part] = dict(version=values['version'])
    for part in ('', 'backbone', 'head'):
        metadata.setdefault(part, {})['file'] = file
    copy: OrderedDict[str, Any] = OrderedDict(dict.items(state))
    vars(copy)['_metadata'] = OrderedDict(metadata)
    return copy
