"""Read checkpoint files without running code from them, find damage, and write checkpoints."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from mmengine.dist import all_gather_object
from mmengine.logging import print_log
from mmengine.runner import CheckpointLoader
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mmcare.files import moved_into_place
from mmcare.weights import unpickling
from mmcare.weights.names import find_published, to_classifier_keys, without_wrapper

CHECKSUM = 'mmcare_checksum'  # in the metadata of .safetensors
PREFIXES = ('', 'http://', 'https://')  # of names that load_from_mmcare takes


class CheckpointError(RuntimeError):
    """A checkpoint file that is damaged, refused, or does not fit."""


def read_checkpoint(filename: str | os.PathLike, map_location: Any = 'cpu') -> Any:
    """Read a local checkpoint file without running code from it.

    - Checksums of the zip container, which ``torch.load`` ignores, are verified. A warning names a
      file without checksums.
    - NumPy arrays, namespaces and log buffers are removed with their keys. NumPy numbers become
      Python's.
    - Other classes are allowed if the program has added them to PyTorch's safe globals, except
      classes for distributed tensors, some of which open connections.
    - EMA weights of timm replace the others.
    - A ``.safetensors`` file becomes a dict with ``state_dict`` and ``meta``.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file is damaged or contains something that is not allowed.
    """
    path = Path(filename)
    if not path.is_file():
        raise FileNotFoundError(f'{path} is not a file')
    read = _read_safetensors if path.suffix == '.safetensors' else _read_archive
    try:
        checkpoint, verified = read(path, map_location)
    except Exception as error:  # damage can raise anything
        reason = str(error).strip().partition('\n')[0]
        text = 'it is damaged or contains more than tensors, plain values and training states'
        raise CheckpointError(
            f'{path} cannot be read as a checkpoint: {text} ({type(error).__name__}: {reason})'
        ) from error
    if not verified:
        text = f'{path} has no checksums: damage would go unnoticed. torch.save writes some.'
        print_log(text, logger='current', level=logging.WARNING)
    if isinstance(checkpoint, dict) and 'state_dict_ema' in checkpoint:  # as timm does
        checkpoint['state_dict'] = checkpoint.pop('state_dict_ema')
    return checkpoint


def load_from_mmcare(filename: str | os.PathLike, map_location: Any = None) -> Any:
    """Read a local or downloaded checkpoint; MMEngine logs this loader as ``mmcare``.

    The weights of a published CARE file get the names of an MM classifier (``backbone.*``,
    ``head.*``). ``meta.config`` is removed, since MMEngine would run it as a program on resume.

    Raises:
        OSError: If the file cannot be downloaded. For other errors see :func:`read_checkpoint`.
    """
    name = os.path.expanduser(os.fspath(filename))
    is_remote = name.startswith(PREFIXES[1:])
    checkpoint = read_checkpoint(_download(name) if is_remote else name, map_location)
    if not isinstance(checkpoint, dict):
        return checkpoint
    published = find_published(checkpoint)
    if published is not None:
        checkpoint = dict(meta={}, state_dict=to_classifier_keys(published))
    if isinstance(checkpoint.get('meta'), dict):
        checkpoint['meta'].pop('config', None)
    return checkpoint


def load_weights(filename: str | os.PathLike) -> dict[str, Any]:
    """Read the weights of a checkpoint onto the CPU, without the prefixes of wrappers."""
    checkpoint = load_from_mmcare(filename, 'cpu')
    state = checkpoint.get('state_dict', checkpoint) if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise CheckpointError(f'{filename} does not contain a state dict')
    return without_wrapper(state)


@contextmanager
def safe_loader() -> Iterator[None]:
    """Make MMEngine read local files and downloads by :func:`load_from_mmcare`."""
    schemes = CheckpointLoader._schemes
    try:
        CheckpointLoader._schemes = dict(schemes)
        CheckpointLoader.register_scheme(PREFIXES, load_from_mmcare, force=True)
        yield
    finally:
        CheckpointLoader._schemes = schemes


def write_checkpoint(checkpoint: dict[str, Any], filename: str | os.PathLike) -> None:
    """Write a checkpoint under a temporary name and move it into place.

    Args:
        checkpoint: A dict with ``state_dict`` and ``meta``, which has plain values.
        filename: ``.safetensors`` stores the tensors, a checksum, and text and numbers of
            ``meta``; any other ending is written by ``torch.save``.
    """
    with moved_into_place(Path(filename)) as temporary:
        if temporary.suffix == '.safetensors':
            # Copies: the format refuses tensors that share memory, as tied layers do.
            state = {k: v.clone().contiguous() for k, v in checkpoint['state_dict'].items()}
            plain = (str, int, float)  # the format has text only
            meta = {k: str(v) for k, v in checkpoint['meta'].items() if isinstance(v, plain)}
            save_file(state, temporary, metadata={**meta, CHECKSUM: digest_weights(state, meta)})
        else:
            torch.save(checkpoint, temporary)


def _download(address: str) -> Path:
    """Download a file to PyTorch's cache, once on each machine, and return its path.

    All processes of a distributed run must call this. If a download fails, all raise an OSError.
    """
    file = Path(torch.hub.get_dir(), 'checkpoints', Path(urlparse(address).path).name)
    fault = ''
    if not file.is_file() and os.environ.get('LOCAL_RANK', '0') == '0':
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(address, str(file), progress=sys.stderr.isatty())
        except Exception as error:  # of urllib, http or the disk
            fault = f'{address} cannot be downloaded: {error}'
    faults = [text for text in all_gather_object(fault) if text]  # other processes wait here
    if faults:
        raise OSError(faults[0])
    return file


def _read_archive(path: Path, map_location: Any) -> tuple[Any, bool]:
    """Read a file of ``torch.save``; return its object, and whether checksums were verified."""
    verified, records = False, None
    with path.open('rb') as file:
        is_archive = torch.serialization._is_zipfile(file)  # as torch.load decides
    if is_archive:
        with zipfile.ZipFile(path) as archive:
            # All are 0 after torch.serialization.set_crc32_options(False).
            verified = any(entry.CRC for entry in archive.infolist())
            damaged = archive.testzip() if verified else None
        if damaged:
            raise CheckpointError(f'the checksum of {damaged} is wrong')
        records = torch._C.PyTorchFileReader(str(path))
        if 'constants.pkl' in records.get_all_records():  # torch.load would give it to torch.jit
            raise CheckpointError('it is a TorchScript archive')
    elif tarfile.is_tarfile(path):  # torch.load would unpack it
        raise CheckpointError('it is a tar archive, of PyTorch 0.1')
    if os.environ.get('TORCH_FORCE_WEIGHTS_ONLY_LOAD', '0').lower() in ('1', 'y', 'yes', 'true'):
        raise CheckpointError('unset TORCH_FORCE_WEIGHTS_ONLY_LOAD: mmcare reads more strictly')
    reader = unpickling.pickle_module(records)
    content = torch.load(path, map_location, reader, weights_only=False)
    allowed = {known for known in unpickling.allowed().values() if isinstance(known, type)}
    content = _without_foreign(content, {*_PLAIN, *allowed})
    if content is _REMOVED:
        raise CheckpointError('it contains no usable data')
    return content, verified


def _read_safetensors(path: Path, map_location: Any) -> tuple[dict[str, Any], bool]:
    """Read metadata and tensors; return them, and whether their checksum was verified."""
    device = str(map_location) if isinstance(map_location, (str, torch.device)) else 'cpu'
    with safe_open(path, framework='pt', device=device) as file:
        meta = dict(file.metadata() or {})
        state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    # The format has no checksums; write_checkpoint adds one, other writers may not.
    if CHECKSUM in meta and meta[CHECKSUM] != digest_weights(state, meta):
        raise CheckpointError('the checksum of its content is wrong')
    return dict(meta=meta, state_dict=state), CHECKSUM in meta


def digest_weights(state: Mapping[str, Tensor], meta: Mapping[str, str]) -> str:
    """Compute the SHA-256 of metadata, and of names, types, shapes and bytes of all tensors."""
    digest = hashlib.sha256()
    for key in sorted(meta.keys() - {CHECKSUM}):
        digest.update(f'{key!r} {meta[key]!r}\n'.encode())
    for key in sorted(state):
        tensor = state[key].detach().cpu().contiguous()
        digest.update(f'{key} {tensor.dtype} {tuple(tensor.shape)}\n'.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


_PLAIN = {
    *(type(None), bool, int, float, complex, str, bytes, bytearray, set, Tensor, nn.Parameter),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme, torch.Size),
}
_REMOVED = object()


def _without_foreign(value: Any, allowed: set[type]) -> Any:
    """Remove the dict entries whose types are not allowed, in place.

    A value of another type becomes ``_REMOVED``, and so does a list or tuple that contains one.
    Tensors lose their hooks.
    """
    if isinstance(value, dict):
        for key in [*value]:
            value[key] = _without_foreign(value[key], allowed)
            if value[key] is _REMOVED:
                del value[key]
        return value
    if type(value) in (list, tuple):
        copies = [_without_foreign(entry, allowed) for entry in value]
        return _REMOVED if any(copy is _REMOVED for copy in copies) else type(value)(copies)
    if isinstance(value, Tensor):
        value._backward_hooks = None
    return value if type(value) in allowed else _REMOVED
