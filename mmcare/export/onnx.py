"""Export to ONNX, compared with PyTorch in ONNX Runtime."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmcare.compatibility import require
from mmcare.export.source import Network
from mmcare.export.verify import TOLERANCE, ExportError, compare, trial_images
from mmcare.files import moved_into_place
from mmcare.models.backbones.care import TOTAL_STRIDE

OPSET = 20  # the first with an operator for GELU
LARGEST_SIDE = 4096


def check_onnx() -> None:
    """Raise an ImportError unless everything for the export to ONNX is installed."""
    for module in ('onnx', 'onnxscript', 'onnxruntime'):
        require(module, 'export to ONNX')


def write_onnx(
    network: Network,
    names: Sequence[str],
    path: Path,
    shape: tuple[int, int],
    dynamic: bool = False,
    reference: torch.nn.Module | None = None,
) -> dict[str, Any]:
    """Write an ONNX file, once ONNX Runtime has agreed with PyTorch.

    Args:
        network: Takes normalised images (1, C, H, W), the input ``image``.
        names: Of its outputs.
        path: File to write, replaced if it exists.
        shape: Height and width.
        dynamic: Height and width are free, in multiples of 32 up to 4096; images of ``shape`` and
            of another size are tried.
        reference: What the file should compute; by default ``network``.

    Returns:
        Entries of the report: size in bytes, opset, operators by type and deviations.

    Raises:
        ExportError: If ONNX Runtime's outputs differ from PyTorch's; no file is written then.
    """
    import onnx

    reference = reference or network
    traced, dynamic_shapes = shape, None
    if dynamic:
        # A side of one block would be taken for a fixed one: torch.export specialises sizes of 1.
        traced = max(shape[0], 2 * TOTAL_STRIDE), max(shape[1], 2 * TOTAL_STRIDE)
        height, width = (
            TOTAL_STRIDE * torch.export.Dim(name, min=1, max=LARGEST_SIDE // TOTAL_STRIDE)
            for name in ('height_in_blocks', 'width_in_blocks')
        )
        dynamic_shapes = ({2: height, 3: width},)
    with torch.no_grad():
        program = torch.onnx.export(
            network,
            (torch.zeros(1, network.in_channels, *traced),),
            input_names=['image'],
            output_names=list(names),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
            dynamic_shapes=dynamic_shapes,
        )
    assert program is not None, 'dynamo=True returns a program'
    with moved_into_place(path) as temporary:
        program.save(temporary, external_data=False)
        model = onnx.load(temporary)
        onnx.checker.check_model(model)
        images = trial_images(network.in_channels, shape)
        if dynamic:
            other = shape[0] + TOTAL_STRIDE, max(shape[1] - TOTAL_STRIDE, TOTAL_STRIDE)
            another = trial_images(network.in_channels, other)['random']
            images['random, another size'] = another
        deviations = compare(reference, onnx_runner(temporary), images)
        for name, deviation in deviations.items():
            if name.startswith('random') and not deviation <= TOLERANCE:
                raise ExportError(
                    f"ONNX Runtime's outputs differ from PyTorch's by {deviation:.1e} of the "
                    f'largest magnitude ({name}), more than {TOLERANCE}; nothing is written'
                )
        size = temporary.stat().st_size
    operators = Counter(node.op_type for node in model.graph.node if node.op_type != 'Constant')
    return dict(
        file=path.name,
        bytes=size,
        opset=OPSET,
        height_and_width='multiples of 32' if dynamic else list(shape),
        operators=dict(operators.most_common()),
        deviations=deviations,
    )


def onnx_runner(path: Path) -> Callable[[Tensor], list[np.ndarray]]:
    """Return a function that runs a file on images with ONNX Runtime, on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=['CPUExecutionProvider'])
    return lambda image: session.run(None, {'image': image.numpy()})
