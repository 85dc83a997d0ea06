"""Unpickle for ``torch.load``, with a list of the classes and functions that are allowed.

``torch.load(weights_only=True)`` can be misled before PyTorch 2.6 (CVE-2025-32434), and refuses
training files of MM and timm, which also hold NumPy values, namespaces and log buffers.
"""

from __future__ import annotations

import pickle
from _compat_pickle import IMPORT_MAPPING
from collections import Counter, OrderedDict
from math import prod
from types import SimpleNamespace
from typing import Any, Callable, ClassVar

import numpy as np
import torch
from torch import _utils

LOG_BUFFER = 'mmengine.logging.history_buffer.HistoryBuffer'


class Foreign:
    """Stand in for a class or function that a file names; do nothing."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.state: Any = None


def _foreign(name: str) -> type[Foreign]:
    """Make a stand-in whose name says what it stands for."""
    return type(name.rpartition('.')[2], (Foreign,), {})


class Array(Foreign):
    """Stand in for NumPy's ``_reconstruct``, whose state is an array."""

    def to_numpy(self, share: Callable[[bytes], bytearray]) -> np.ndarray | None:
        """Build a plain array of numbers; return None if the state is not of one.

        Args:
            share: Makes writable memory of bytes, and the same of the same object: a small file
                could let many arrays have the same bytes.
        """
        if type(self.state) is not tuple or len(self.state) != 5:
            return None
        _, shape, kind, is_fortran, data = self.state
        dtype = _numeric_dtype(kind)
        if dtype is None or type(data) is not bytes or type(shape) is not tuple or len(shape) > 32:
            return None
        if not all(type(size) is int and 0 <= size < 2**31 for size in shape):
            return None
        if prod(shape) * dtype.itemsize != len(data) or prod(size or 1 for size in shape) > 2**48:
            return None
        if dtype.kind == 'b' and data.strip(b'\0\1'):  # NumPy would compute with other bytes
            return None
        order: Any = 'F' if is_fortran is True else 'C'
        return np.frombuffer(share(data), dtype).reshape(shape, order=order)


def _numeric_dtype(kind: Any) -> np.dtype | None:
    """Return the type of numbers that a stand-in for a dtype describes."""
    if not isinstance(kind, Foreign) or not kind.args or type(kind.state) is not tuple:
        return None
    code, order = kind.args[0], kind.state[1:2]
    if code not in DTYPES or order not in (('<',), ('>',), ('|',), ('=',)):
        return None
    return np.dtype(code).newbyteorder(order[0])


def _scalar(kind: Any, data: bytes) -> Any:
    """Stand in for NumPy's ``scalar``, and return a number of Python."""
    dtype = _numeric_dtype(kind)
    return _foreign('numpy.scalar')() if dtype is None else np.frombuffer(data, dtype, 1)[0].item()


DTYPES = ('b1', 'i1', 'i2', 'i4', 'i8', 'u1', 'u2', 'u4', 'u8', 'f2', 'f4', 'f8', 'c8', 'c16')


# These take precedence over classes of the same name that the program has allowed.
FOREIGN = (
    'builtins.getattr',
    'argparse.Namespace',
    LOG_BUFFER,
    'mmengine.optim.scheduler.param_scheduler.OneCycleParamScheduler',
    'numpy.ndarray',
    'numpy.dtype',
)
STAND_INS: dict[str, Any] = {
    **{name: _foreign(name) for name in FOREIGN},
    'mmengine.config.config.ConfigDict': dict,  # nested metainfo of data sets
    **{f'numpy.{core}.multiarray._reconstruct': Array for core in ('core', '_core')},
    **{f'numpy.{core}.multiarray.scalar': _scalar for core in ('core', '_core')},
}
REBUILT = ('meta_tensor_no_storage', 'parameter', 'qtensor', 'sparse_tensor', 'tensor', 'tensor_v2')
KNOWN: dict[str, Any] = {
    '_codecs.encode': lambda text, _: text.encode('latin1'),  # bytes
    'builtins.bytes': lambda: b'',
    'builtins.complex': complex,
    'builtins.set': set,
    'collections.Counter': Counter,
    'collections.OrderedDict': OrderedDict,
    'torch.Size': torch.Size,
    'torch.device': torch.device,
    'torch.serialization._get_layout': torch.serialization._get_layout,
    **{f'torch._utils._rebuild_{kind}': getattr(_utils, f'_rebuild_{kind}') for kind in REBUILT},
    # Attributes of tensors are dropped: they could hide methods.
    'torch._utils._rebuild_parameter_with_state': lambda *of: _utils._rebuild_parameter(*of[:3]),
    'torch._tensor._rebuild_from_type_v2': lambda function, kind, args, state: function(*args),
    **dict.fromkeys(('torch.Tensor', 'torch.nn.parameter.Parameter'), Foreign),  # as `kind`
}
CONSTANTS = torch.dtype, torch.layout, torch.memory_format, torch.qscheme


Base: Any = pickle._Unpickler  # the implementation in Python, which can be extended


class Unpickler(Base):
    """Resolve the names above, and the classes that the program has allowed."""

    sizes: dict[str, int] | None = None  # of the archive's records, in bytes

    def load_binpersid(self) -> None:
        """Compare the size of a storage with its record, as PyTorch does from 2.10 on."""
        if self.sizes is not None:
            _, kind, key, _, numel = self.stack[-1]
            if self.sizes[f'data/{key}'] != numel * _utils._element_size(kind.dtype):
                raise pickle.UnpicklingError(f'storage {key} has another size than its record')
        super().load_binpersid()

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function, or its stand-in; raise an error for unknown names."""
        full = f'{IMPORT_MAPPING.get(module, module)}.{name}'  # torch.save writes Python 2's names
        for known in (STAND_INS, allowed(), KNOWN):
            if full in known:
                return known[full]
        if module == 'torch' and isinstance(getattr(torch, name, None), CONSTANTS):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f'{full} is not allowed')

    def load_build(self) -> None:
        """Set the state of an object of a few types; raise an error for others."""
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Foreign):
            target.state = state
        elif type(target) is OrderedDict:  # attributes other than _metadata could hide methods
            metadata = state.get('_metadata')
            if isinstance(metadata, dict):  # entries other than version could change loading
                vars(target)['_metadata'] = OrderedDict(
                    (part, dict(version=values['version']))
                    for part, values in metadata.items()
                    if isinstance(values, dict) and type(values.get('version')) is int
                )
        elif type(target) in allowed().values():
            self.stack.append(state)
            super().load_build()
        else:
            raise pickle.UnpicklingError(f'a state of {type(target).__name__} is not allowed')

    changed: ClassVar = {pickle.BINPERSID[0]: load_binpersid, pickle.BUILD[0]: load_build}
    dispatch: ClassVar = {**Base.dispatch, **changed}


def pickle_module(sizes: dict[str, int] | None) -> Any:
    """Build the ``pickle_module`` of ``torch.load``.

    Args:
        sizes: Bytes of each record of an archive; None for a file of the old format.
    """
    kind = type('Unpickler', (Unpickler,), dict(sizes=sizes))
    load = lambda file, **options: kind(file, **options).load()  # noqa: E731
    return SimpleNamespace(__name__=__name__, Unpickler=kind, load=load)


def allowed() -> dict[str, Any]:
    """Return PyTorch's safe globals by name, without those of ``torch.distributed``."""
    listed: Any = getattr(torch.serialization, 'get_safe_globals', list)()  # from PyTorch 2.4 on
    pairs = (
        (known[1], known[0])
        if isinstance(known, tuple)
        else (f'{known.__module__}.{known.__qualname__}', known)
        for known in listed
    )
    return {name: known for name, known in pairs if not name.startswith('torch.distributed.')}
