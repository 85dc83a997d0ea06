"""What files of ``torch.save`` may hold besides tensors and plain values.

PyTorch's ``weights_only=True`` reads tensors and plain values only. Training files of MM and timm
also hold numpy values, ``argparse.Namespace`` and mmengine's log buffers; :func:`unpickle` lets
these in, and nothing that runs code. A file says what is called with what, so that no real class or
function but PyTorch's own may be within its reach: numpy trusts the memory layout in a pickled
``numpy.dtype`` and follows pointers from the file, and methods of a log buffer can be put together
to change PyTorch itself. Stand-ins take their places. They only keep what the file says;
objects are made of it when the whole file has been read.
"""

import argparse
import math
import pickle
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from torch import Tensor, nn

# Kind and size in bytes (characters for text) of numbers, truth values and text.
PLAIN_DTYPE = re.compile(r'[biufc][1-9][0-9]?|[SU][0-9]{1,6}')
MOST_EMPTY = 1 << 20  # texts without characters in an array, which take no memory
BYTE_ORDERS = ('<', '>', '|', '=')


def unpickle(path: Path, map_location: Any) -> Any:
    """Read a file of ``torch.save`` without running code from it.

    Args:
        path: The file.
        map_location: As in ``torch.load``.

    Raises:
        UnpicklingError: If it holds what is not allowed; a damaged file can raise anything.
    """
    with _LOCK, _allowed_globals() as others:
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    _settle(checkpoint, others)
    return checkpoint


@contextmanager
def _allowed_globals() -> Iterator[bool]:
    """Let ``torch.load(..., weights_only=True)`` read what MM and timm training files hold.

    Yields:
        Whether something else is allowed too, by the program that reads.
    """
    stand_ins: list[Any] = [
        (_method_name, 'builtins.getattr'),
        (_no_bytes, 'builtins.bytes'),
        (_HistoryBuffer, 'mmengine.logging.history_buffer.HistoryBuffer'),
        (_Namespace, 'argparse.Namespace'),
        (_Array, 'numpy.ndarray'),
        (_Dtype, 'numpy.dtype'),
        *(
            (function, f'{package}.multiarray.{name}')
            for function, name in ((_reconstruct, '_reconstruct'), (_scalar, 'scalar'))
            for package in ('numpy.core', 'numpy._core')
        ),
    ]
    # What the program itself has allowed stays so, but for what has a stand-in. PyTorch adds its
    # classes for distributed tensors by itself, of which some open connections.
    allowed = torch.serialization.get_safe_globals()
    names = {name for _, name in stand_ins}
    others = [
        each
        for each in allowed
        if _full_name(each) not in names and not _full_name(each).startswith('torch.')
    ]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*stand_ins, *others])
    try:
        yield bool(others)
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(allowed)


def _full_name(allowed: Any) -> str:
    """The name under which a file may mention what was allowed."""
    if isinstance(allowed, tuple):
        return allowed[1]
    return f'{allowed.__module__}.{allowed.__qualname__}'


def _settle(checkpoint: Any, others: bool) -> None:
    """Make what stand-ins have kept, and drop attributes, which could hide methods of their owner.

    Args:
        checkpoint: As it was read.
        others: Whether there may be objects of other classes than those known here.

    Raises:
        UnpicklingError: If there are others and there must not be.
    """
    todo, seen = [checkpoint], set()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _Kept):
            value.settle()
        if isinstance(value, dict):
            attributes = getattr(value, '__dict__', {})  # of an OrderedDict or a Counter
            for name in attributes.keys() - {'_metadata'}:
                del attributes[name]
            todo += [*dict.keys(value), *dict.values(value), *attributes.values()]
        elif isinstance(value, list | tuple | set):
            todo += value
        elif isinstance(value, argparse.Namespace):
            todo += vars(value).values()
        elif type(value) in (Tensor, nn.Parameter):
            _bare(value)
        elif type(value) in _LEAVES or isinstance(value, np.generic | HistoryBuffer):
            pass
        elif not others or isinstance(value, _Dtype) or any(value is each for each in _STAND_INS):
            raise pickle.UnpicklingError(f'{type(value).__name__} is no value of a checkpoint')


def _bare(tensor: Tensor) -> None:
    """Leave of a tensor its values, not what would be called when it is used."""
    vars(tensor).clear()
    tensor.grad = None
    if tensor._backward_hooks:
        tensor._backward_hooks = None


class _Kept:
    """What a file says of an object, until it is made."""

    __hash__ = None  # type: ignore[assignment]

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def take(self) -> dict[str, Any]:
        """Hand out what was kept, and forget it; an object without attributes has no state."""
        state = vars(self).pop('state', {})
        if not isinstance(state, dict):
            raise pickle.UnpicklingError(f'a {type(state).__name__} is no state of an object')
        attributes = dict(dict.items(state))
        if not all(isinstance(name, str) for name in attributes):
            raise pickle.UnpicklingError('an object has an attribute without a name')
        return attributes

    def settle(self) -> None:
        """Become the object."""
        raise NotImplementedError


class _Namespace(_Kept):
    """Stand in for ``argparse.Namespace``."""

    def settle(self) -> None:
        """Become a Namespace."""
        attributes = self.take()
        self.__class__ = argparse.Namespace  # type: ignore[assignment]
        vars(self).update(attributes)


class _HistoryBuffer(_Kept):
    """Stand in for mmengine's ``HistoryBuffer``, whose own state changes the class."""

    def settle(self) -> None:
        """Become a HistoryBuffer of the numbers that were kept."""
        state: Any = self.take()
        log, counts = state.get('_log_history'), state.get('_count_history')
        length = state.get('max_length')
        if type(length) is not int or not all(
            isinstance(history, _Array) and history.ndim == 1 and history.dtype.kind in 'biuf'
            for history in (log, counts)
        ):
            raise pickle.UnpicklingError('a HistoryBuffer without its two series of numbers')
        self.__class__ = HistoryBuffer
        made: Any = self
        made.__init__(log.view(np.ndarray), counts.view(np.ndarray), length)


def _method_name(owner: Any, name: Any) -> str:
    """Stand in for ``builtins.getattr``: a name, which nobody calls.

    mmengine's log buffers hold their statistics methods, which pickle as
    ``getattr(HistoryBuffer, 'mean')``; a buffer that is read has those of its class.
    """
    if owner is not _HistoryBuffer or name not in ('min', 'max', 'current', 'mean'):
        raise pickle.UnpicklingError(f'an attribute of a {type(owner).__name__} is not allowed')
    return name


def _no_bytes() -> bytes:
    """Stand in for ``builtins.bytes``, which an empty array's data pickle as a call of."""
    return b''


class _Dtype:
    """Stand in for ``numpy.dtype``: numbers and text; layout is numpy's own, not the file's."""

    def __init__(self, code: str, align: bool = False, copy: bool = False) -> None:
        if not isinstance(code, str) or not PLAIN_DTYPE.fullmatch(code):
            raise pickle.UnpicklingError('numpy values other than numbers and text are not allowed')
        self.plain = np.dtype(code)

    def __setstate__(self, state: tuple) -> None:
        """Take the byte order; size, alignment and flags of plain types follow from the code.

        Raises:
            UnpicklingError: If the state has parts of a structured type.
        """
        _, order, subarray, names, fields, *_ = state
        if order not in BYTE_ORDERS or not subarray is names is fields is None:
            raise pickle.UnpicklingError('structured numpy values are not allowed')
        self.plain = self.plain.newbyteorder(order)


class _Array(np.ndarray):
    """Stand in for ``numpy.ndarray`` while reading; pickles as a plain array again."""

    def __new__(cls, *_: Any, **__: Any) -> '_Array':
        """Refuse to be called, as ``numpy.ndarray`` could be with memory of the file's choice."""
        raise pickle.UnpicklingError('numpy.ndarray is not called in a checkpoint')

    def __setstate__(self, state: Any, /) -> None:
        if self.size:
            raise pickle.UnpicklingError('a numpy array is filled once')  # a tensor may share it
        _, shape, dtype, is_fortran, data = state
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
            raise pickle.UnpicklingError('numpy arrays of objects are not allowed')
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise pickle.UnpicklingError('a numpy array has a shape of integers')
        if not dtype.plain.itemsize and math.prod(shape) > MOST_EMPTY:
            raise pickle.UnpicklingError(f'more than {MOST_EMPTY} empty texts in a numpy array')
        plain: Any = (1, tuple(shape), dtype.plain, bool(is_fortran), data)
        super().__setstate__(plain)

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> Any:
        return self.view(np.ndarray).__reduce_ex__(protocol)


def _reconstruct(subtype: type, shape: Any, code: Any) -> np.ndarray:
    """Stand in for numpy's function: an empty array, which its state fills."""
    if subtype is not _Array:
        raise pickle.UnpicklingError('only numpy.ndarray is a numpy array')
    return np.empty(0, np.uint8).view(_Array)


def _scalar(dtype: _Dtype, data: bytes = b'') -> Any:
    """Stand in for numpy's function: a number or text from its bytes."""
    if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
        raise pickle.UnpicklingError('numpy scalars of objects are not allowed')
    if len(data) != dtype.plain.itemsize:
        raise pickle.UnpicklingError(f'{len(data)} bytes are no {dtype.plain}')
    return np.frombuffer(data, dtype.plain)[0] if data else dtype.plain.type()


_LOCK = threading.RLock()  # what torch.load allows holds for all threads
_STAND_INS = (
    _method_name,
    _no_bytes,
    _Namespace,
    _HistoryBuffer,
    _Dtype,
    _Array,
    _reconstruct,
    _scalar,
)
_LEAVES = {
    *(type(None), bool, int, float, complex, str, bytes, bytearray, _Array),
    *(torch.dtype, torch.device, torch.layout, torch.qscheme),
}
