"""Read files of ``torch.save`` without running code from them.

PyTorch's ``weights_only=True`` reads tensors and plain values. Training files of MM and timm also
hold NumPy values, ``argparse.Namespace`` and mmengine's log buffers. A pickle may call any allowed
function with any argument, so only inert stand-ins are allowed; real objects are built after
reading. NumPy's own functions would trust the memory layout in the file and follow pointers from
it; the methods of a log buffer could be combined to change PyTorch itself.
"""

import argparse
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from torch import Tensor, nn

# Kind and size in bytes (characters for text) of numbers, truth values and text.
PLAIN_DTYPE = re.compile(r'[biufc][1-9][0-9]?|[SU][0-9]{1,6}')


def unpickle(path: Path, map_location: Any) -> Any:
    """Read a file of ``torch.save`` without running code from it.

    Args:
        path: The file.
        map_location: As in ``torch.load``.

    Raises:
        UnpicklingError: If it holds something that is not allowed; a damaged file can raise
            anything.
    """
    with _LOCK, _allowed_globals() as others:
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    return _Builder(others).build(checkpoint)


@contextmanager
def _allowed_globals() -> Iterator[bool]:
    """Let ``torch.load(..., weights_only=True)`` read what MM and timm training files hold.

    What the program has allowed stays allowed, except where there is a stand-in for it, and
    except PyTorch's classes for distributed tensors: some of them open connections.

    Yields:
        Whether the program has allowed anything else.
    """
    allowed = torch.serialization.get_safe_globals()
    names = {
        each: each[1] if isinstance(each, tuple) else f'{each.__module__}.{each.__qualname__}'
        for each in allowed
    }
    ours = {name for _, name in _STAND_INS}
    others = [
        each for each, name in names.items() if name not in ours and not name.startswith('torch.')
    ]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*_STAND_INS, *others])
    try:
        yield bool(others)
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(allowed)


class _StandIn:
    """Take the place of a class or function: keep what the file passes to it, and do nothing."""

    args: tuple = ()
    state: Any = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def real(self, build: Callable[[Any], Any]) -> Any:
        """Return the real object; ``build`` does the same for everything in a part of the state.

        Raises:
            UnpicklingError: If a checkpoint cannot hold it.
        """
        raise pickle.UnpicklingError('a checkpoint cannot hold methods, dtypes or calls of ndarray')


class _Namespace(_StandIn):
    """``argparse.Namespace``."""

    def real(self, build: Callable[[Any], Any]) -> argparse.Namespace:
        return argparse.Namespace(**build(self.state or {}))


class _HistoryBuffer(_StandIn):
    """mmengine's ``HistoryBuffer``. Methods in the state are ignored: the class has its own."""

    def real(self, build: Callable[[Any], Any]) -> HistoryBuffer:
        series = [build(self.state[name]) for name in ('_log_history', '_count_history')]
        length = self.state['max_length']
        if type(length) is not int or not all(
            isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in 'biuf'
            for array in series
        ):
            raise pickle.UnpicklingError('a HistoryBuffer needs two series of numbers')
        return HistoryBuffer(*series, max_length=length)


class _Dtype(_StandIn):
    """``numpy.dtype``: numbers and text. The memory layout is NumPy's own, not the file's."""

    def plain(self) -> np.dtype:
        """Return the dtype; of its state only the byte order counts."""
        code = self.args[0]
        if not isinstance(code, str) or not PLAIN_DTYPE.fullmatch(code):
            raise pickle.UnpicklingError('NumPy values other than numbers and text are not allowed')
        return np.dtype(code).newbyteorder(self.state[1])


class _Array(_StandIn):
    """NumPy's ``_reconstruct``, which makes an array whose values are in its state."""

    def real(self, build: Callable[[Any], Any]) -> np.ndarray:
        _, shape, dtype, is_fortran, data = self.state
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
            raise pickle.UnpicklingError('NumPy arrays of objects are not allowed')
        # Raises if the shape is negative, or larger than the data.
        array = np.ndarray(shape, dtype.plain(), data, order='F' if is_fortran else 'C')
        if not array.itemsize or array.nbytes != len(data):
            raise pickle.UnpicklingError(f'{len(data)} bytes do not fill a NumPy array of {shape}')
        return array.copy(order='K')


def _scalar(dtype: Any, data: Any) -> Any:
    """Take the place of NumPy's ``scalar``. Numbers and text can be keys: they are built now."""
    if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
        raise pickle.UnpicklingError('NumPy scalars of objects are not allowed')
    plain = dtype.plain()
    if len(data) != plain.itemsize:
        raise pickle.UnpicklingError(f'{len(data)} bytes are not a {plain}')
    return np.frombuffer(data, plain)[0] if data else plain.type()


def _no_bytes() -> bytes:
    """Take the place of ``bytes``: torch.save writes empty bytes as a call of it."""
    return b''


class _Builder:
    """Put real objects in the place of stand-ins, and refuse what a checkpoint cannot hold."""

    def __init__(self, others: bool) -> None:
        self.others = others  # whether the program has allowed classes that are not known here
        self.built: dict[int, tuple[Any, Any]] = {}  # by id: a value, kept alive, and its successor

    def build(self, value: Any) -> Any:
        """Return a value with everything in it built; dicts and lists are changed in place."""
        if id(value) not in self.built:
            self.built[id(value)] = value, value  # a list may hold itself
            self.built[id(value)] = value, self._build(value)
        return self.built[id(value)][1]

    def _build(self, value: Any) -> Any:
        if isinstance(value, _StandIn):
            return value.real(self.build)
        if type(value) is tuple:
            return tuple(map(self.build, value))
        if isinstance(value, dict):
            # Methods of dict: attributes of an OrderedDict could hide its own, and are dropped.
            attributes = getattr(value, '__dict__', {})
            for name in attributes.keys() - {'_metadata'}:
                del attributes[name]
            if attributes:
                self.build(attributes)
            for key, entry in list(dict.items(value)):
                self.build(key)
                dict.__setitem__(value, key, self.build(entry))
        elif isinstance(value, list):
            value[:] = map(self.build, value)
        elif type(value) is set:
            for entry in value:
                self.build(entry)
        elif type(value) in (Tensor, nn.Parameter):
            vars(value).clear()  # they could hide its methods
            value.grad = value._backward_hooks = None
        elif type(value) not in _LEAVES and not isinstance(value, np.generic):
            if not self.others or any(value is stand_in for stand_in, _ in _STAND_INS):
                raise pickle.UnpicklingError(f'a checkpoint cannot hold a {type(value).__name__}')
            attributes = getattr(value, '__dict__', None)
            if type(attributes) is dict:
                self.build(attributes)
        return value


_LOCK = threading.RLock()  # what torch.load allows, it allows in all threads
_STAND_INS: list[Any] = [
    (_StandIn, 'builtins.getattr'),
    (_StandIn, 'numpy.ndarray'),
    (_no_bytes, 'builtins.bytes'),
    (_HistoryBuffer, 'mmengine.logging.history_buffer.HistoryBuffer'),
    (_Namespace, 'argparse.Namespace'),
    (_Dtype, 'numpy.dtype'),
    *((_Array, f'numpy.{name}.multiarray._reconstruct') for name in ('core', '_core')),
    *((_scalar, f'numpy.{name}.multiarray.scalar') for name in ('core', '_core')),
]
_LEAVES = {
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(torch.dtype, torch.device, torch.layout, torch.qscheme, torch.Size),
}
