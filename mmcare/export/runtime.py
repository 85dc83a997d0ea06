"""Exported files, run on the CPU by one thread."""

from pathlib import Path

from mmcare.export.backends import FORMATS
from mmcare.export.backends.base import Exported


def open_exported(path: Path) -> Exported:
    """Open a file, which says itself what it takes.

    Raises:
        FileNotFoundError: If it does not exist.
        ImportError: If the package is missing that runs it.
        ValueError: If it is damaged, or of another format.
    """
    formats = {form.ending: form for form in FORMATS.values()}
    if path.suffix not in formats:
        raise ValueError(f'{path} is not {", ".join(formats)}')
    if not path.exists():
        raise FileNotFoundError(f'{path} does not exist')
    try:
        return formats[path.suffix].open(path)
    except ImportError:
        raise
    except Exception as error:  # the runtimes have classes of their own
        reason = ' '.join(str(error).split())
        raise ValueError(f'{path} cannot be opened: {reason}') from error
