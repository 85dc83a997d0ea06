"""Backends that networks are exported to, a file each."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from mmcare.export.backends.base import Backend, Exported
from mmcare.export.backends.coreml import CoreML
from mmcare.export.backends.executorch import ExecuTorch
from mmcare.export.backends.litert import LiteRT
from mmcare.export.backends.ncnn import Ncnn
from mmcare.export.backends.onnx import Onnx

# In the order of reports.
BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (CoreML(), Onnx(), ExecuTorch(), Ncnn(), LiteRT())
}


def validate_formats(
    formats: Sequence[str],
    precision: str | None,
    calibration: int | None,
    options: Mapping[str, Any],
) -> list[Backend]:
    """Return the backends of formats; raise a ValueError if these do not suit the other arguments.

    If a package is missing that a format needs, raise an ImportError.
    """
    unknown = {*formats} - {*BACKENDS}
    if unknown:
        raise ValueError(f'unknown formats: {", ".join(sorted(unknown))}')
    chosen = [backend for name, backend in BACKENDS.items() if name in formats]
    for option in options:
        able = [name for name, backend in BACKENDS.items() if option in backend.options]
        if not {*able} & {*formats}:
            flag = option.replace('_', '-')
            raise ValueError(f'--{flag} is for --format {", ".join(able) or "none"}')
    if precision and not all(precision in backend.precisions for backend in chosen):
        able = [name for name, backend in BACKENDS.items() if precision in backend.precisions]
        raise ValueError(f'--precision {precision} is only for --format {", ".join(able)}')
    if calibration is not None and (precision != 'int8' or calibration < 1):
        raise ValueError('--calibration is for --precision int8, and at least 1')
    for backend in chosen:
        backend.require()
    return chosen


def open_exported(path: str | PathLike, float16: bool = False) -> Exported:
    """Open a file, which says itself what it takes, to compute it in float32 or in float16.

    Raises:
        FileNotFoundError: If it does not exist.
        ImportError: If the package is missing that runs it.
        ValueError: If it is damaged or of another format, or if nothing computes it in float16.
    """
    path = Path(path)
    backends = {backend.ending: backend for backend in BACKENDS.values()}
    if path.suffix not in backends:
        raise ValueError(f'{path} is not {", ".join(backends)}')
    if not path.exists():
        raise FileNotFoundError(f'{path} does not exist')
    backend = backends[path.suffix]
    try:
        opened = backend.open_float16(path) if float16 else backend.open(path)
    except ImportError:
        raise
    except Exception as error:  # the runtimes have classes of their own
        reason = ' '.join(str(error).split())
        raise ValueError(f'{path} cannot be opened: {reason}') from error
    if opened is None:
        raise ValueError(f'nothing here computes {path} in float16')
    return opened
