"""What files of ``torch.save`` may hold besides tensors and plain values.

PyTorch's ``weights_only=True`` reads tensors and plain values only. Training files of MM and timm
also hold numpy values, ``argparse.Namespace`` and mmengine's log buffers; :func:`allowed_globals`
lets these in, and nothing that runs code. Where the real class could be made to do harm by what a
file says, a stand-in takes its place: numpy trusts the memory layout in a pickled ``numpy.dtype``,
so that a forged one makes it follow pointers from the file.
"""

import argparse
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, SupportsIndex

import numpy as np
import torch
from mmengine.logging import HistoryBuffer

# Kind and size in bytes (characters for text) of numbers, truth values and text.
PLAIN_DTYPE = re.compile(r'[biufc][1-9][0-9]?|[SU][0-9]{1,6}')
BYTE_ORDERS = ('<', '>', '|', '=')


@contextmanager
def allowed_globals() -> Iterator[None]:
    """Let ``torch.load(..., weights_only=True)`` read what MM and timm training files hold."""
    numpy_functions = [
        (function, f'{package}.multiarray.{name}')
        for function, name in ((_reconstruct, '_reconstruct'), (_scalar, 'scalar'))
        for package in ('numpy.core', 'numpy._core')
    ]
    with torch.serialization.safe_globals(
        [
            (_history_buffer_method, 'builtins.getattr'),
            (_no_bytes, 'builtins.bytes'),
            HistoryBuffer,
            argparse.Namespace,
            (_Array, 'numpy.ndarray'),
            (_Dtype, 'numpy.dtype'),
            *numpy_functions,
        ]
    ):
        yield


def _history_buffer_method(owner: Any, name: str) -> Any:
    """Stand in for ``builtins.getattr`` in a checkpoint: HistoryBuffer's own methods only.

    mmengine's log buffers hold their statistics methods, which pickle as
    ``getattr(HistoryBuffer, 'mean')``. getattr itself would let a crafted file reach anything.
    """
    if owner is HistoryBuffer and isinstance(name, str) and not name.startswith('_'):
        method = vars(HistoryBuffer).get(name)
        if callable(method):
            return method
    raise pickle.UnpicklingError(f'attribute {name!r} of {owner!r} is not allowed in a checkpoint')


def _no_bytes() -> bytes:
    """Stand in for ``builtins.bytes``, which an empty array's data pickle as a call of."""
    return b''


class _Dtype:
    """Stand in for ``numpy.dtype``: numbers and text; layout is numpy's own, not the file's."""

    def __init__(self, code: str, align: bool = False, copy: bool = False) -> None:
        if not isinstance(code, str) or not PLAIN_DTYPE.fullmatch(code):
            raise pickle.UnpicklingError(f'numpy values of type {code!r} are not allowed')
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

    def __setstate__(self, state: Any, /) -> None:
        _, shape, dtype, is_fortran, data = state
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
            raise pickle.UnpicklingError('numpy arrays of objects are not allowed')
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise pickle.UnpicklingError(f'a numpy array cannot have the shape {shape!r}')
        plain: Any = (1, tuple(shape), dtype.plain, bool(is_fortran), data)
        super().__setstate__(plain)

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> Any:
        return self.view(np.ndarray).__reduce_ex__(protocol)


def _reconstruct(subtype: type, shape: Any, code: Any) -> np.ndarray:
    """Stand in for numpy's function: an empty array, which its state fills."""
    if subtype is not _Array:
        raise pickle.UnpicklingError(f'{subtype!r} is no numpy array')
    return np.empty(0, np.uint8).view(_Array)


def _scalar(dtype: _Dtype, data: bytes = b'') -> Any:
    """Stand in for numpy's function: a number or text from its bytes."""
    if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
        raise pickle.UnpicklingError('numpy scalars of objects are not allowed')
    if len(data) != dtype.plain.itemsize:
        raise pickle.UnpicklingError(f'{len(data)} bytes are no {dtype.plain}')
    return np.frombuffer(data, dtype.plain)[0] if data else dtype.plain.type()
