"""Measure which operators of an ONNX file pay in int8: time in two engines, and what it costs.

The file is a float32 ``.onnx`` with raw outputs. It is quantized several times, as
``--precision int8`` does: the convolutions alone, then with each operator of feature maps beside
them, and with all. Files run in turn in ONNX Runtime and, if it is installed, in OpenVINO, on one
thread. A row has the milliseconds, the time as a share of float32's in the same engine (median and
quartiles of the rounds' ratios), the signal-to-noise ratio of each output, and the convolutions
that ONNX Runtime computes in float32. One row is what ``--int8-for tensorrt`` writes.
"""

import argparse
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import torch
from recording import describe_machine, save

from mmcare.analysis.timing import measure_in_turn
from mmcare.export import load_model
from mmcare.export.backends import onnx_int8
from mmcare.export.check import sqnr_db
from mmcare.export.images import read_images
from mmcare.files import check_writable
from mmcare_runtime import open_exported

# What is quantized beside convolutions, by the name of the row.
SETS = {
    'convolutions': (),
    '+ Add': ('Add',),
    '+ Concat': ('Concat',),
    '+ Split, Slice': ('Split', 'Slice'),
    '+ Add, Concat': ('Add', 'Concat'),
    '+ Concat, Split, Slice': ('Concat', 'Split', 'Slice'),
    '+ Add, Concat, Split, Slice': ('Add', 'Concat', 'Split', 'Slice'),
    '+ these and Gelu': ('Add', 'Concat', 'Split', 'Slice', 'Gelu'),
}
TENSORRT = 'for TensorRT'


def count_operators(path: Path) -> Counter[str]:
    """Count the operators of a file after ONNX Runtime's fusions, by type.

    ``Conv`` and ``FusedConv`` compute in float32, ``QLinearConv`` in int8.
    """
    with TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        # Layouts for one CPU come after this level.
        level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.graph_optimization_level = level
        options.optimized_model_filepath = f'{folder}/optimized.onnx'
        onnxruntime.InferenceSession(path.read_bytes(), options, ['CPUExecutionProvider'])
        nodes = onnx.load(options.optimized_model_filepath).graph.node
    return Counter(node.op_type for node in nodes)


def write_files(
    source: Path, images: Sequence[np.ndarray], folder: Path
) -> dict[str, tuple[Path, Sequence[str]]]:
    """Quantize a file in each way; return files and engines by the name of the row."""
    others = ['openvino'] if find_spec('openvino') else []
    files: dict[str, tuple[Path, Sequence[str]]] = {
        'float32': (source, ['onnxruntime', *others]),
    }
    for number, (name, operators) in enumerate(SETS.items()):
        path = Path(shutil.copy(source, folder / f'{number}.onnx'))
        onnx_int8.quantize(path, images, operators)
        files[name] = path, ['onnxruntime', *others]
    path = Path(shutil.copy(source, folder / 'tensorrt.onnx'))
    onnx_int8.quantize_for_tensorrt(path, images)
    files[TENSORRT] = path, ['onnxruntime']  # OpenVINO's values are wrong
    return files


def measure(source: Path, pictures: Sequence[np.ndarray], held_out: int, rounds: int) -> list[Any]:
    """Return the rows of the table; the last pictures are those that files are compared on."""
    calibration, test = pictures[:-held_out], pictures[-held_out:]
    with TemporaryDirectory() as folder:
        files = write_files(source, calibration, Path(folder))
        models = {
            (engine, name): open_exported(path, engine=engine, verify=False)
            for name, (path, engines) in files.items()
            for engine in engines
        }
        expected = [
            [torch.from_numpy(x) for x in models['onnxruntime', 'float32'].run(image)]
            for image in test
        ]
        runs: dict[Any, Callable[[], object]] = {
            key: (lambda model=model: model.run(test[0])) for key, model in models.items()
        }
        times = measure_in_turn(runs, rounds)
        times.columns = pd.MultiIndex.from_tuples(runs)
        rows = []
        for (engine, name), model in models.items():
            shares = (times[engine, name] / times[engine, 'float32']).quantile([0.5, 0.25, 0.75])
            row: dict[str, Any] = dict(engine=engine, quantized=name)
            row['ms'] = round(float(times[engine, name].median()), 1)
            row['x float32'], row['q1'], row['q3'] = shares.round(3).tolist()
            if name != 'float32':
                ratios = sqnr_db(expected, [model.run(image) for image in test])
                row['dB'] = [round(ratio, 1) for ratio in ratios]
            if engine == 'onnxruntime':
                counts = count_operators(files[name][0])
                row['float32 convolutions'] = counts['Conv'] + counts['FusedConv']
                row['int8 convolutions'], row['GELU'] = counts['QLinearConv'], counts['Gelu']
            rows.append(row)
    return rows


def main() -> None:
    """Quantize, measure, write and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add('file', type=Path, metavar='FILE', help='.onnx in float32 that takes normalized images')
    add('--images', required=True, metavar='FOLDER', help='photographs')
    add('--calibration', type=int, default=16, help='pictures; default: %(default)s')
    add('--held-out', type=int, default=4, help='pictures to compare on; default: %(default)s')
    add('--rounds', type=int, default=9, help='default: %(default)s')
    add('--out', type=Path, metavar='JSON', help='also write the figures here')
    arguments = parser.parse_args()
    if arguments.out:
        check_writable(arguments.out.parent)
    torch.set_num_threads(1)
    description = open_exported(arguments.file).description
    (height, width), model = description['shape'], load_model('s0')
    number = arguments.calibration + arguments.held_out
    pictures = read_images(model, (height, width), number, arguments.images)
    assert model.normalization is not None, "ImageNet's"
    arrays = [model.normalization.normalize(pixels).numpy() for pixels in pictures]
    rows = measure(arguments.file, arrays, arguments.held_out, arguments.rounds)
    print(pd.DataFrame(rows).to_markdown(index=False))
    if arguments.out:
        packages = ['onnxruntime'] + ['openvino'] * bool(find_spec('openvino'))
        record = dict(file=arguments.file.name, versions=describe_machine(*packages))
        record |= dict(threads='one thread', rounds=arguments.rounds, rows=rows)
        save(arguments.out, json.dumps(record, indent=1) + '\n')


if __name__ == '__main__':
    main()
