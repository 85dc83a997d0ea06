"""Read checkpoint files without running code from them, find damage, and write checkpoints."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import signature
from io import BytesIO
from pathlib import Path
from typing import Any, Callable, ContextManager
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import torch
from mmengine.dist import all_gather_object
from mmengine.logging import print_log
from mmengine.runner import CheckpointLoader
from rich.progress import wrap_file
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mmcare.files import moved_into_place
from mmcare.weights import unpickling
from mmcare.weights.names import find_published, to_classifier_keys, without_wrapper
from mmcare_runtime.text import escape, join_first

CHECKSUM = 'mmcare_checksum'  # in the metadata of .safetensors
RUNS = 'mmcare_runs'  # in the meta of checkpoints: see mmcare.engine.RunRecordHook
PREFIXES = ('', 'http://', 'https://')  # of names that load_from_mmcare takes


class CheckpointError(RuntimeError):
    """A checkpoint file that is damaged, refused, or does not fit.

    The lines of its text are printable: names in a file could contain codes that terminals obey.
    """

    def __init__(self, text: str) -> None:
        super().__init__('\n'.join(map(escape, text.split('\n'))))


def read_checkpoint(
    filename: str | os.PathLike, map_location: Any = 'cpu', verify: bool = True
) -> Any:
    """Read a local checkpoint file without running code from it.

    - Checksums of the zip container, which ``torch.load`` ignores, are verified, and PyTorch gets a
      copy of the verified bytes in memory. A warning names a file without checksums.
    - NumPy arrays of numbers are kept; NumPy numbers become Python's. Other arrays, namespaces and
      log buffers are removed with their keys. A warning names what is removed, except log buffers.
    - Other classes are allowed if the program has added them to PyTorch's safe globals, except
      classes for distributed tensors, some of which open connections.
    - EMA weights of timm replace the others.
    - A file of safetensors, under any name, becomes a dict with ``state_dict`` and ``meta``.

    Args:
        filename: The file.
        map_location: As for ``torch.load``.
        verify: With False, checksums are not compared, and PyTorch reads the file itself, mapped
            into memory where it can: for a file that another process has verified.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file is damaged or contains something that is not allowed.
    """
    path = Path(filename)
    if not path.is_file():
        raise FileNotFoundError(f'{path} is not a file')
    removed: list[str] = []
    checkpoint, verified = _read(path, map_location, removed, verify)
    if removed:
        text = f'Left out while reading {path}, since they are not plain values: '
        print_log(escape(text + join_first(removed, 5)), 'current', logging.WARNING)
    if not verified:
        text = f'{path} has no checksums: damage would go unnoticed. torch.save writes some.'
        print_log(text, logger='current', level=logging.WARNING)
    if isinstance(checkpoint, dict) and checkpoint.get('state_dict_ema') is not None:
        checkpoint['state_dict'] = checkpoint.pop('state_dict_ema')  # as timm does
    return checkpoint


def local_file(filename: str | os.PathLike) -> Path:
    """Return the path of a local file, which may start with ``~``, or of a download."""
    name = os.path.expanduser(os.fspath(filename))
    return _download(name) if name.startswith(PREFIXES[1:]) else Path(name)


def check_exists(filename: str | os.PathLike) -> None:
    """Raise a FileNotFoundError if a checkpoint is missing; addresses are not looked at."""
    name = os.path.expanduser(os.fspath(filename))
    if not name.startswith(PREFIXES[1:]) and not Path(name).is_file():
        raise FileNotFoundError(f'{name} is not a file')


def load_from_mmcare(
    filename: str | os.PathLike, map_location: Any = None, verify: bool = True
) -> Any:
    """Read a local or downloaded checkpoint; MMEngine logs this loader as ``mmcare``.

    The weights of a published CARE file get the names of an MM classifier (``backbone.*``,
    ``head.*``). ``meta.config`` is removed, since MMEngine would run it as a program on resume.

    Raises:
        OSError: If the file cannot be downloaded. For other errors see :func:`read_checkpoint`.
    """
    checkpoint = read_checkpoint(local_file(filename), map_location, verify)
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
    return weights_of(load_from_mmcare(filename, 'cpu'), filename)


def weights_of(checkpoint: Any, filename: str | os.PathLike) -> dict[str, Any]:
    """Return the weights of a checkpoint that was read, without the prefixes of wrappers."""
    state = checkpoint.get('state_dict', checkpoint) if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise CheckpointError(f'{filename} does not contain a state dict')
    return without_wrapper(state)


def runs_of(checkpoint: Any) -> list[dict[str, Any]]:
    """Return the records of the runs that trained a checkpoint, see ``RunRecordHook``."""
    meta = checkpoint.get('meta') if isinstance(checkpoint, dict) else None
    runs = meta.get(RUNS) if isinstance(meta, dict) else None
    return [run for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []


def safe_loader() -> ContextManager[None]:
    """Make MMEngine read local files and downloads by :func:`load_from_mmcare`."""
    return loader(PREFIXES, load_from_mmcare)


@contextmanager
def loader(prefixes: str | tuple[str, ...], load: Callable[..., Any]) -> Iterator[None]:
    """Make MMEngine read files whose names begin with one of some patterns by a function."""
    schemes = CheckpointLoader._schemes
    try:
        CheckpointLoader._schemes = dict(schemes)
        CheckpointLoader.register_scheme(prefixes, load, force=True)
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

    A damaged file in the cache is downloaded again. All processes of a distributed run must call
    this. If a download fails, all raise an OSError.
    """
    name = urlsplit(address).path.rpartition('/')[2]
    if name in ('', '.', '..'):
        raise OSError(f'{address} does not name a file')
    # Files at other addresses may have the same name.
    digest = hashlib.sha256(address.encode()).hexdigest()[:16]
    file = Path(torch.hub.get_dir(), 'checkpoints', f'{digest}-{name[-100:]}')
    fault = ''
    if os.environ.get('LOCAL_RANK', '0') == '0' and not _is_whole(file):
        try:
            _fetch(address, file)
        except Exception as error:  # of urllib, http or the disk
            fault = escape(f'{address} cannot be downloaded: {error}')
    faults = [text for text in all_gather_object(fault) if text]  # other processes wait here
    if faults:
        raise OSError(faults[0])
    return file


def _is_whole(file: Path) -> bool:
    """Whether a file is in the cache, and can be read."""
    if not file.is_file():
        return False
    try:
        _read(file, 'cpu', [], verify=True)
    except CheckpointError as error:
        print_log(f'Downloading again: {error}', logger='current', level=logging.WARNING)
        return False
    return True


class _Redirects(HTTPRedirectHandler):
    """Follow redirects to the same scheme or to HTTPS; urllib would also follow them to FTP."""

    def redirect_request(self, request: Request, *answer: Any) -> Request | None:
        redirected = super().redirect_request(request, *answer)
        if redirected is not None and redirected.type not in (request.type, 'https'):
            raise URLError(f'it is redirected to {redirected.full_url}')
        return redirected


def _fetch(address: str, file: Path) -> None:
    """Download a file under another name, compare its size, and move it into place."""
    request = Request(address, headers={'User-Agent': 'mmcare'})
    with build_opener(_Redirects).open(request, timeout=60) as answer:
        size = answer.headers['Content-Length']
        total = None if size is None else int(size)
        bar: Any = dict(description=escape(file.name), disable=not sys.stdout.isatty())
        with moved_into_place(file) as temporary:
            with wrap_file(answer, total or 0, **bar) as content, temporary.open('wb') as copy:
                shutil.copyfileobj(content, copy)
            received = temporary.stat().st_size
            if total not in (None, received):
                raise OSError(f'the connection ended after {received} of {total} bytes')


def _read(path: Path, map_location: Any, removed: list[str], verify: bool) -> tuple[Any, bool]:
    """Read a file; return its content, and whether checksums were verified or need not be.

    ``removed`` gets the names and types of what is left out.
    """
    try:
        if _is_safetensors(path):
            return _read_safetensors(path, map_location)
        return _read_pickle(path, map_location, removed, verify)
    except Exception as error:  # damage can raise anything
        reason = str(error).strip().partition('\n')[0]
        text = 'it is damaged or contains more than tensors, plain values and training states'
        raise CheckpointError(
            f'{path} cannot be read as a checkpoint: {text} ({type(error).__name__}: {reason})'
        ) from None  # a traceback would print names of the file as they are


def _is_safetensors(path: Path) -> bool:
    """Whether a file is in the format of safetensors, by its name or by how it begins."""
    if path.suffix == '.safetensors':
        return True
    with path.open('rb') as file:
        start = file.read(9)
    # The length of the header, which is JSON; a zip archive or a pickle would be far too long.
    return start[8:] == b'{' and int.from_bytes(start[:8], 'little') < path.stat().st_size


def _read_pickle(
    path: Path, map_location: Any, removed: list[str], verify: bool
) -> tuple[Any, bool]:
    """Read a file of ``torch.save``; return its object, and whether checksums were verified."""
    with path.open('rb') as file:
        is_archive = torch.serialization._is_zipfile(file)  # as torch.load decides
    source: Any = str(path)  # PyTorch 2.1 maps no other type
    verified, sizes = False, None
    if is_archive and verify:
        source, sizes, verified = _copy_archive(path)
    elif is_archive:
        with zipfile.ZipFile(path) as archive:
            records = _find_records(archive, path)
        sizes, verified = {name: entry.file_size for name, entry in records.items()}, True
    elif tarfile.is_tarfile(path):  # torch.load would unpack it
        raise CheckpointError('it is a tar archive, of PyTorch 0.1')
    if os.environ.get('TORCH_FORCE_WEIGHTS_ONLY_LOAD', '0').lower() in ('1', 'y', 'yes', 'true'):
        raise CheckpointError('unset TORCH_FORCE_WEIGHTS_ONLY_LOAD: mmcare reads more strictly')
    reader = unpickling.pickle_module(sizes)
    # PyTorch 2.1 and later may be configured to map files by default, but not those in memory.
    options: dict[str, Any] = {}
    if 'mmap' in signature(torch.load).parameters:
        options['mmap'] = is_archive and not verify
    content = torch.load(source, map_location, reader, weights_only=False, **options)
    content = _without_foreign(content, '', readable_types(), {}, removed)
    if content is _REMOVED:
        raise CheckpointError('it contains no usable data')
    return content, verified


def readable_types() -> set[type]:
    """Return the types of values, besides containers, that are kept when a file is read."""
    return {*_PLAIN, *(known for known in unpickling.allowed().values() if isinstance(known, type))}


def _copy_archive(path: Path) -> tuple[BytesIO, dict[str, int], bool]:
    """Copy the records of a zip archive to a new archive, with Python's zipfile alone.

    PyTorch's reader ignores checksums, and misreads damaged archives: if a record is marked as a
    directory, it reads nothing and leaves the memory uninitialized. A crafted archive can have two
    directories, of which Python's zipfile reads one, and PyTorch the other. So it is not enough to
    check the archive here (``ZipFile.testzip``) and to let PyTorch read it.

    Returns:
        The copy, the size of each record in bytes, and whether checksums were verified.
    """
    with zipfile.ZipFile(path) as archive:
        records = _find_records(archive, path)
        # All checksums are 0 after torch.serialization.set_crc32_options(False).
        verified = any(entry.CRC for entry in records.values())
        sizes, copy = {}, BytesIO()
        with zipfile.ZipFile(copy, 'w') as copied:
            for name, entry in records.items():
                if not verified:
                    del entry.CRC  # so that zipfile does not compare it
                content = archive.read(entry)
                sizes[name] = len(content)
                copied.writestr(zipfile.ZipInfo(f'archive/{name}'), content)
    copy.seek(0)
    return copy, sizes, verified


def _find_records(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    """Return the records of an archive of ``torch.save`` by name; refuse other archives."""
    entries = archive.infolist()
    records = {entry.filename.partition('/')[2]: entry for entry in entries}
    if 'constants.pkl' in records:  # torch.load would give it to torch.jit
        raise CheckpointError('it is a TorchScript archive')
    # torch.save neither compresses nor repeats records: both could make a small file huge in
    # memory. PyTorch does not tell upper case from lower case.
    if (
        len({name.lower() for name in records}) < len(entries)
        or any(entry.compress_type != zipfile.ZIP_STORED or entry.is_dir() for entry in entries)
        or sum(entry.file_size for entry in entries) > path.stat().st_size
    ):
        raise CheckpointError('it has records as torch.save does not write them')
    return records


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
    *(type(None), bool, int, float, complex, str, bytes, set, Tensor, nn.Parameter),
    *(torch.dtype, torch.device, torch.layout, torch.qscheme, torch.Size),
}
_REMOVED = object()


def _without_foreign(
    value: Any, name: str, allowed: set[type], known: dict[Any, tuple], removed: list[str]
) -> Any:
    """Remove the dict entries whose types are not allowed, in place.

    A value of another type becomes ``_REMOVED``, and so does a list or tuple that contains one.
    Tensors lose their hooks. Arrays of numbers are built from what the file says of them.

    Args:
        value: Part of a checkpoint.
        name: Where it is in the checkpoint.
        allowed: Types that are kept, besides containers and arrays.
        known: Maps the ids of containers and arrays to these and their results: shared containers
            are visited once.
        removed: Gets the names and types of what is removed, except log buffers, which no run
            needs.
    """
    if id(value) in known:
        return known[id(value)][1]
    if isinstance(value, dict):
        known[id(value)] = value, value
        for key in [*value]:
            where = f'{name}.{key}' if name else str(key)
            value[key] = _without_foreign(value[key], where, allowed, known, removed)
            if value[key] is _REMOVED:
                del value[key]
        return value
    if type(value) in (list, tuple):
        copies = [_without_foreign(entry, name, allowed, known, removed) for entry in value]
        is_removed = any(copy is _REMOVED for copy in copies)
        known[id(value)] = value, _REMOVED if is_removed else type(value)(copies)
        return known[id(value)][1]
    if isinstance(value, unpickling.Array):
        array = value.to_numpy(partial(_share, known))
        if array is not None:
            known[id(value)] = value, array
            return array
    if isinstance(value, Tensor):
        value._backward_hooks = None
    if type(value) in allowed:
        return value
    if not isinstance(value, unpickling.STAND_INS[unpickling.LOG_BUFFER]):
        kind = 'ndarray' if isinstance(value, unpickling.Array) else type(value).__name__
        removed.append(f'{name} ({kind})')
    return _REMOVED


def _share(known: dict[Any, tuple], data: bytes) -> bytearray:
    """Return writable memory with the content of bytes, and the same for the same object."""
    key = (id(data),)  # the bytes may also be a value themselves
    if key not in known:
        known[key] = data, bytearray(data)
    return known[key][1]
