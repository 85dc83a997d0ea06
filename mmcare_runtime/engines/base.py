"""What an engine returns for a file that it has opened."""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np


class OpenedFile(NamedTuple):
    """A file that an engine has opened."""

    run: Callable[[np.ndarray], list[np.ndarray]]  # images (B, C, H, W) to outputs, maps as NCHW
    input_shape: tuple[Any, ...]  # (B, C, H, W)
    description: Mapping[str, Any]  # checked; empty if the file has none
    output_shapes: Sequence[Any]  # NCHW, in the file's order; None where it is unknown
    names: Sequence[str] = ()  # of the input and the outputs, if the format has names


def to_input(image: np.ndarray, uint8_input: bool) -> np.ndarray:
    """Return an image as float32; or as uint8, for which values from 0 to 255 are rounded."""
    if not uint8_input:
        return image.astype(np.float32, copy=False)
    return image if image.dtype == np.uint8 else image.round().clip(0, 255).astype(np.uint8)
