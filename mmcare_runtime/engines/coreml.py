"""Core ML, on a Mac, through coremltools. This module has not been run: no Mac was at hand."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np

from mmcare_runtime.engines.base import OpenedFile, to_input
from mmcare_runtime.engines.executorch import INTERPRETER
from mmcare_runtime.schema import parse
from mmcare_runtime.text import tell_apart
from mmcare_runtime.verify import check_package

NAME, PACKAGE, INSTALL, OPTIONS = 'coremltools', 'coremltools', 'coremltools', ()


def open_file(path: Path, threads: int) -> OpenedFile:
    """Open a package; Core ML chooses threads and devices itself."""
    check_package(path)
    if platform.system() != 'Darwin':
        raise ValueError(INTERPRETER)
    import coremltools

    model = coremltools.models.MLModel(str(path))
    spec = model.get_spec()
    description = parse(spec.description.metadata.userDefined.get('mmcare'), path)
    if not description:
        raise ValueError('it does not say what it is: export it with mmcare')
    (image,), outputs = description['inputs'], description['outputs']
    is_image = spec.description.input[0].type.WhichOneof('Type') == 'imageType'
    classes = spec.description.predictedProbabilitiesName

    def run(pixels: np.ndarray) -> list[np.ndarray]:
        value: Any = np.asarray(pixels, np.float32)
        if is_image:
            from PIL import Image

            value = to_input(pixels, True)[0].transpose(1, 2, 0)
            value = value[..., ::-1] if image['channels'] == 'BGR' else value
            value = Image.fromarray(np.ascontiguousarray(value.squeeze()))
        predicted = model.predict({image['name']: value})
        if classes:  # probabilities by name
            values = [[predicted[classes][name] for name in tell_apart(description['classes'])]]
            return [np.array(values, np.float32)]
        arrays = [np.asarray(predicted[output['name']]) for output in outputs]
        if description.get('nms') == 'pipeline':  # Core ML returns only the rows that it keeps
            rows = outputs[0]['shape'][0]
            arrays = [np.pad(array, ((0, rows - len(array)), (0, 0))) for array in arrays]
        return arrays

    return OpenedFile(run, tuple(image['shape']), description, [None] * len(outputs))
