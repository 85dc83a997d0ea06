"""Open exported files with the runtime; PyTorch computes files for Core ML."""

from os import PathLike
from pathlib import Path
from typing import Any

import mmcare_runtime
from mmcare.export.backends import BACKENDS
from mmcare_runtime.text import escape
from mmcare_runtime.verify import check_file, check_hash


def open_exported(
    path: str | PathLike, verify: bool = True, **options: Any
) -> mmcare_runtime.Model:
    """Open a file as :func:`mmcare_runtime.open_exported` does, with the same options.

    PyTorch computes the files that Core ML computes on iPhones and Macs.

    Raises:
        FileNotFoundError: If the file does not exist.
        ImportError: If the package that runs the file is missing.
        ValueError: If the file is damaged or of another format, or if nothing computes it with
            these options.
    """
    path = Path(path)
    suffixes = {backend.suffix for backend in BACKENDS.values()}
    if path.suffix not in suffixes:
        return mmcare_runtime.open_exported(path, verify=verify, **options)
    try:
        check_file(path)
        if verify:
            check_hash(path)
        backend = next(backend for backend in BACKENDS.values() if backend.reads(path))
        return backend.open(path, verify=False, **options)
    except (FileNotFoundError, ImportError):
        raise
    except Exception as error:  # the interpreter of ML Programs reads files with others' code
        reason = escape(' '.join(str(error).split()))
        if reason.startswith(escape(str(path))):
            raise ValueError(reason) from error
        raise ValueError(f'{escape(str(path))} cannot be opened: {reason}') from error
