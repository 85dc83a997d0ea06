"""What the report next to an exported file says of it, and what it should compute."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmcare.export.load import Source
from mmcare.export.runtime import open_exported
from mmcare.export.verify import trial_images


@dataclass(frozen=True)
class Described:
    """An exported file.

    Attributes:
        report: Next to it; empty if none names it.
        shape: Height and width of the images.
        input: Its name, shape, layout and normalisation.
        outputs: Name, shape and layout of each.
        values: An image, then the outputs that the file should have for it, in its layouts; none if
            neither the network nor a runtime is at hand.
        int8: Whether the file is quantized.
        expected_from: ``'PyTorch'``, ``'this computer'`` (the file, run here), or empty.
        remark: Why nothing is expected, or there is no report; otherwise empty.
    """

    report: dict[str, Any]
    shape: tuple[int, int]
    input: dict[str, Any]
    outputs: list[dict[str, Any]]
    values: list[np.ndarray]
    int8: bool
    expected_from: str
    remark: str


def find_report(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Find the report next to an exported file that names it.

    Returns:
        The report, and the file's entry in it; both are empty if there is none.
    """
    for file in sorted(path.parent.glob('*.json')):
        try:
            report = json.loads(file.read_text(encoding='utf-8'))
        except ValueError:  # of something else
            continue
        for entry in report.values() if isinstance(report, dict) else ():
            if isinstance(entry, dict) and entry.get('file') == path.name and 'inputs' in entry:
                return report, entry
    return {}, {}


def describe_exported(path: Path, source: Source | None = None) -> Described:
    """Describe an exported file by its report, or by opening it.

    Args:
        path: Of a file.
        source: A network in PyTorch. Files whose reports have its name and part, and are not
            quantized, are expected to compute what it computes, others what they compute here.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it is damaged, or has no report and cannot be opened here.
    """
    report, entry = find_report(path)
    program, remark, origin, expected = None, '', '', []
    try:
        program = open_exported(path)
    except ImportError as error:
        remark = f'It is not compared. {error}'
    if report:
        [image], shape = entry['inputs'], report['shape']
    elif program and isinstance(program.input_shape[-1], int):
        remark = 'No report (.json) next to it names it: it is measured, but nothing can be shown.'
        layout = 'NHWC' if path.suffix == '.tflite' else 'NCHW'
        kind = 'image' if program.pixels else 'tensor'
        image, shape = dict(layout=layout, kind=kind), program.input_shape[2:]
    else:
        raise ValueError(f'{path} needs the report that the export writes next to it. {remark}')
    channels = program.input_shape[1] if program else 3
    pixels = picture = trial_images(channels, tuple(shape))['random']
    if image['kind'] == 'image':
        pixels = picture * 50 + 120
    named = report.get('name'), report.get('part'), 'quantization' in entry
    if source and named == (source.name, source.network.part, False):
        if image['kind'] == 'image' and source.normalization:
            norm = torch.tensor([source.normalization.mean, source.normalization.std])
            picture = (pixels - norm[0, :, None, None]) / norm[1, :, None, None]
        with torch.no_grad():
            expected, origin = [one.numpy() for one in source.network(picture)], 'PyTorch'
    elif program:
        try:
            expected, origin = program.run(pixels), 'this computer'
        except Exception as error:  # the runtimes have classes of their own
            raise ValueError(f'{path} takes not what its report says: {error}') from error
    unnamed = [dict(name=f'output{number}') for number in range(len(expected))]
    tensors, values = [image, *entry.get('outputs', unnamed)], [pixels.numpy(), *expected]
    for number, array in enumerate(values):
        last = image['layout'] == 'NHWC' and array.ndim == 4
        values[number] = np.moveaxis(array, 1, -1) if last else array
        tensors[number] = {**tensors[number], 'shape': list(values[number].shape)}
    image, *outputs = tensors
    int8 = 'quantization' in entry
    return Described(report, tuple(shape), image, outputs, values, int8, origin, remark)
