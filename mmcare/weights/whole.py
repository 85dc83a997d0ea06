"""Load weights that come from a file whole, or raise."""

from collections import OrderedDict
from typing import Any, ClassVar, Self

from torch import Tensor, nn


class CheckpointError(RuntimeError):
    """A checkpoint file that is damaged, refused, or does not fit."""


class _Marks(OrderedDict[str, dict[str, Any]]):
    """Metadata of a state dict that names its file to every module.

    Of the metadata in the file only versions are kept: other entries can change how PyTorch loads.
    """

    def __init__(self, file: str, metadata: Any) -> None:
        super().__init__()
        self.file = file
        for part, values in metadata.items() if isinstance(metadata, dict) else ():
            if isinstance(values, dict) and isinstance(values.get('version'), int):
                self[part] = dict(version=values['version'])

    def get(self, part: str, default: Any = None) -> dict[str, Any]:
        """Return the metadata of a module, as PyTorch and MMEngine ask for it."""
        return {**super().get(part, {}), 'file': self.file}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> Any:  # so that no file ever holds this class
        return OrderedDict, (list(self.items()),)


def mark(state: Any, file: str) -> Any:
    """Copy a state dict and mark it with its file; return anything else as it is."""
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        return state
    copy: OrderedDict[str, Any] = OrderedDict(state)
    vars(copy)['_metadata'] = _Marks(file, getattr(state, '_metadata', None))
    return copy


class WholeFromFiles(nn.Module):
    """Load weights that come from a file whole or raise, whatever ``strict`` says.

    MM toolboxes load with ``strict=False``. A state dict that a program passes follows PyTorch's
    rules. One that was marked with a file, or that is loaded while ``file`` is set, must be whole:
    nothing missing, left over, of another shape, or not finite.

    Attributes:
        file: The file that is being read, if its state dict cannot be marked.
        OPTIONAL: Beginnings of names that may be missing.
        SHAPES_MAY_DIFFER: Skip weights of other shapes; MMEngine warns of them.
    """

    OPTIONAL: ClassVar[tuple[str, ...]] = ()
    SHAPES_MAY_DIFFER: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.file: str | None = None
        self._reading: dict[str, Any] | None = None
        self.register_load_state_dict_post_hook(_raise_unless_whole)

    def prepare_file(self, state_dict: dict[str, Any], prefix: str) -> str:
        """Adapt a file's weights in place; return advice in case they do not fit."""
        return ''

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict, *args: Any
    ) -> None:
        file = self.file or local_metadata.get('file')
        self._reading = None
        if file:
            advice = self.prepare_file(state_dict, prefix)
            unusable = [
                key
                for key, value in state_dict.items()
                if key.startswith(prefix)
                and not key.endswith(('num_batches_tracked', '_extra_state'))
                and isinstance(value, Tensor)
                and not value.is_floating_point()
            ]
            for key in unusable:  # PyTorch would convert them
                del state_dict[key]
            errors = args[-1]  # shared by all modules that are loaded
            self._reading = dict(
                title=f'{file} does not fit the {type(self).__name__} (prefix {prefix!r}).',
                prefix=prefix,
                unusable=unusable,
                errors=errors,
                start=len(errors),
                advice=advice,
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def _raise_unless_whole(module: WholeFromFiles, keys: Any) -> None:
    """Raise a CheckpointError if a file's weights have not filled a module and its children."""
    reading, module._reading = module._reading, None
    if reading is None:
        return
    prefix = reading['prefix']
    optional = tuple(prefix + name for name in module.OPTIONAL)
    faults = {
        'missing': [
            key
            for key in keys.missing_keys
            if key.startswith(prefix)
            and not key.startswith(optional)
            and not key.endswith('num_batches_tracked')
        ],
        'not in the model': [key for key in keys.unexpected_keys if key.startswith(prefix)],
        'not loaded': reading['errors'][reading['start'] :],
        'not tensors of floating point': reading['unusable'],
        'not finite': [
            prefix + name
            for name, value in (*module.named_parameters(), *module.named_buffers())
            if not value.is_meta and not value.isfinite().all()
        ],
    }
    if module.SHAPES_MAY_DIFFER:
        faults['not loaded'] = []
    lines = [reading['title']]
    for fault, found in faults.items():
        if found:
            more = f' and {len(found) - 3} more' if len(found) > 3 else ''
            lines.append(f'  {fault}: {", ".join(found[:3])}{more}')
    if len(lines) > 1:
        raise CheckpointError('\n'.join(lines) + reading['advice'])
