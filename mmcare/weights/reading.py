"""Read and write checkpoint files: no code of theirs runs, and damage is found.

PyTorch's ``weights_only=True`` reads tensors and plain values. Training files of MM and timm also
hold NumPy values, ``argparse.Namespace`` and MMEngine's log buffers. Nothing of them is needed, so
inert stand-ins take their place while a file is read, and are removed afterwards.
"""

import hashlib
import logging
import os
import re
import sys
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import torch
from mmengine.logging import print_log
from mmengine.runner import CheckpointLoader
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.serialization import add_safe_globals, get_safe_globals, safe_globals

from mmcare.files import moved_into_place
from mmcare.weights.published import as_classifier, find_published, from_published, without_wrapper
from mmcare.weights.whole import CheckpointError, mark

ZIP_MAGIC = b'PK\x03\x04'
CHECKSUM = 'mmcare_checksum'  # in the metadata of .safetensors
PREFIXES = ('', 'http://', 'https://')  # of what MMEngine loads by load_from_mmcare


def read_checkpoint(filename: str | os.PathLike, map_location: Any = 'cpu') -> Any:
    """Read a local checkpoint file without running code from it.

    Files of ``torch.save`` are read with ``weights_only=True``. NumPy arrays, namespaces and log
    buffers are removed with their key; NumPy numbers become Python's. EMA weights of timm replace
    the others. Checksums of the zip container, which ``torch.load`` ignores, are verified; a file
    without checksums is named in a warning. Classes that the program has allowed stay allowed,
    except those that are removed, and those for distributed tensors (some open connections).

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
    read = _read_safetensors if path.suffix == '.safetensors' else _read_archive
    try:
        checkpoint, verified = read(path, map_location)
    except Exception as error:  # damage can raise anything
        # Without PyTorch's advice to read the file unsafely, which comes before and after.
        reason = str(error).rpartition('WeightsUnpickler error: ')[2].strip().partition('\n')[0]
        raise CheckpointError(
            f'{path} cannot be read as a checkpoint: it is damaged, not a checkpoint, or holds '
            'objects other than tensors, plain values and what MM and timm training files hold. '
            f'({type(error).__name__}: {reason})'
        ) from error
    if not verified:
        print_log(
            f'{path} has no checksums: damage would go unnoticed. torch.save and '
            'tools/convert_checkpoint.py write files with checksums.',
            logger='current',
            level=logging.WARNING,
        )
    if isinstance(checkpoint, dict) and 'state_dict_ema' in checkpoint:  # as timm does
        checkpoint['state_dict'] = checkpoint.pop('state_dict_ema')
    return checkpoint


def load_from_mmcare(filename: str | os.PathLike, map_location: Any = None) -> Any:
    """Read a local or downloaded checkpoint for MMEngine, which logs this name from ``mmcare`` on.

    A published CARE file gets the names of an MM classifier (``backbone.*``, ``head.*``). Weights
    are marked with the file's name, see :mod:`mmcare.weights.whole`. Everything else is passed on
    as it is, except ``meta.config``, which MMEngine would run as a program on resume.

    Args:
        filename: A path, or an address with ``http://`` or ``https://``.
        map_location: As in ``torch.load``.

    Raises:
        FileNotFoundError: If there is no such file.
        OSError: If it cannot be downloaded.
        CheckpointError: As by :func:`read_checkpoint`.
    """
    name = os.path.expanduser(os.fspath(filename))
    is_remote = name.startswith(PREFIXES[1:])
    checkpoint = read_checkpoint(_download(name) if is_remote else name, map_location)
    if not isinstance(checkpoint, dict):
        return checkpoint
    published = find_published(checkpoint)
    if published is not None:
        checkpoint = dict(meta={}, state_dict=as_classifier(from_published(published)))
    if isinstance(checkpoint.get('meta'), dict):
        checkpoint['meta'].pop('config', None)
    if 'state_dict' not in checkpoint:
        return mark(checkpoint, name)
    checkpoint['state_dict'] = mark(checkpoint['state_dict'], name)
    return checkpoint


def load_weights(filename: str | os.PathLike) -> dict[str, Any]:
    """Return the state dict of :func:`load_from_mmcare`, on the CPU, without prefixes of wrappers.

    Raises:
        FileNotFoundError, OSError, CheckpointError: As by :func:`load_from_mmcare`.
    """
    checkpoint = load_from_mmcare(filename, 'cpu')
    state = checkpoint.get('state_dict', checkpoint) if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise CheckpointError(f'{filename} does not hold the weights of a model by name')
    return mark(without_wrapper(state), os.fspath(filename))


@contextmanager
def safe_loader(weights_only: bool = False) -> Iterator[None]:
    """Let MMEngine read local files and downloads by :func:`load_from_mmcare`.

    Args:
        weights_only: By :func:`load_weights`, which refuses files without weights.
    """

    def load_from_mmcare_weights(filename: str, map_location: Any = None) -> Any:
        return load_weights(filename)

    loader = load_from_mmcare_weights if weights_only else load_from_mmcare
    schemes = CheckpointLoader._schemes
    try:
        CheckpointLoader._schemes = dict(schemes)
        CheckpointLoader.register_scheme(PREFIXES, loader, force=True)
        yield
    finally:
        CheckpointLoader._schemes = schemes


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
            save_file(state, temporary, metadata={**meta, CHECKSUM: _digest(state, meta)})
        else:
            torch.save(checkpoint, temporary)


def _download(address: str) -> Path:
    """Download a file unless it is there already; return where ``torch.hub`` keeps it."""
    file = Path(torch.hub.get_dir(), 'checkpoints', Path(urlparse(address).path).name)
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(address, str(file), progress=sys.stderr.isatty())
    return file


def _read_archive(path: Path, map_location: Any) -> tuple[Any, bool]:
    """Return the object in a file of ``torch.save``, and whether its checksums were verified."""
    verified = False
    with path.open('rb') as file:
        is_archive = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC  # as torch.load decides
    if is_archive:
        with zipfile.ZipFile(path) as archive:
            # All are 0 after torch.serialization.set_crc32_options(False).
            verified = any(entry.CRC for entry in archive.infolist())
            if verified and (damaged := archive.testzip()):
                raise CheckpointError(f'the checksum of {damaged} is wrong')
    return _unpickle(path, map_location), verified


def _read_safetensors(path: Path, map_location: Any) -> tuple[dict[str, Any], bool]:
    """Return metadata and tensors, and whether the checksum of :func:`_digest` was verified."""
    device = str(map_location) if isinstance(map_location, str | torch.device) else 'cpu'
    with safe_open(path, framework='pt', device=device) as file:
        meta = dict(file.metadata() or {})
        state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    # The format has no checksums; write_checkpoint adds one, other writers may not.
    if CHECKSUM in meta and meta[CHECKSUM] != _digest(state, meta):
        raise CheckpointError('the checksum of its content is wrong')
    return dict(meta=meta, state_dict=state), CHECKSUM in meta


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


class _Foreign:
    """Take the place of a class or function that a file names, and do nothing."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _scalar(dtype: Any, data: bytes) -> Any:
    """Take the place of NumPy's ``scalar``: numbers become Python's."""
    code = dtype.args[0]
    if not re.fullmatch('[biufc][1-9][0-9]?', code):
        return _Foreign()
    return np.frombuffer(data, np.dtype(code).newbyteorder(dtype.state[1]), 1)[0].item()


_LOCK = threading.RLock()  # what torch.load allows, it allows in all threads
_STAND_INS: dict[str, Any] = {
    'builtins.getattr': _Foreign,
    'builtins.bytes': lambda: b'',  # torch.save writes empty bytes as a call of it
    'argparse.Namespace': _Foreign,
    'mmengine.logging.history_buffer.HistoryBuffer': _Foreign,
    'numpy.ndarray': _Foreign,
    'numpy.dtype': _Foreign,
    **{f'numpy.{core}.multiarray._reconstruct': _Foreign for core in ('core', '_core')},
    **{f'numpy.{core}.multiarray.scalar': _scalar for core in ('core', '_core')},
}
_PLAIN = {
    *(type(None), bool, int, float, complex, str, bytes, bytearray, set),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme, torch.Size),
}
_REMOVED = object()


def _unpickle(path: Path, map_location: Any) -> Any:
    with _LOCK:
        names = {
            each: each[1] if isinstance(each, tuple) else f'{each.__module__}.{each.__qualname__}'
            for each in get_safe_globals()
        }
        hidden = [
            each
            for each, name in names.items()
            if name in _STAND_INS or name.startswith('torch.distributed.')
        ]
        with safe_globals(hidden):  # leaving the block removes them; nothing else is touched
            pass
        try:
            with safe_globals([(stand_in, name) for name, stand_in in _STAND_INS.items()]):
                content = torch.load(path, map_location=map_location, weights_only=True)
        finally:
            add_safe_globals(hidden)
    allowed = {each for each in names.keys() - set(hidden) if isinstance(each, type)}
    content = _without_foreign(content, allowed)
    if content is _REMOVED:
        raise CheckpointError('a checkpoint cannot hold this alone')
    return content


def _without_foreign(value: Any, allowed: set[type]) -> Any:
    """Copy dicts and lists without entries that are neither plain, nor tensors, nor allowed.

    Attributes of an ``OrderedDict`` or a tensor, which could hide its methods, are dropped.

    Args:
        value: What was unpickled; tensors are changed in place.
        allowed: Classes whose instances stay.

    Returns:
        The copy; ``_REMOVED`` for a foreign object, and for a list or tuple with one in it.
    """
    if isinstance(value, dict):
        copy: dict = OrderedDict() if isinstance(value, OrderedDict) else {}
        for key, entry in dict.items(value):
            entry = _without_foreign(entry, allowed)
            if entry is not _REMOVED:
                copy[key] = entry
        metadata = getattr(value, '__dict__', {}).get('_metadata')
        if isinstance(metadata, dict):
            vars(copy)['_metadata'] = _without_foreign(metadata, allowed)
        return copy
    if type(value) in (list, tuple):
        copies = [_without_foreign(entry, allowed) for entry in value]
        return _REMOVED if any(one is _REMOVED for one in copies) else type(value)(copies)
    if type(value) in (Tensor, nn.Parameter):
        vars(value).clear()
        value.grad = value._backward_hooks = None
        return value
    return value if type(value) in _PLAIN or type(value) in allowed else _REMOVED
