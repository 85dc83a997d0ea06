"""Export to ONNX, checked with ONNX Runtime."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmcare.deploy.parts import Graph
from mmcare.deploy.requirements import require
from mmcare.deploy.stage_maps import StageMaps
from mmcare.models.backbones.care import TOTAL_STRIDE
from mmcare.output import moved_into_place

OPSET = 20  # the first with an operator for GELU
TOLERANCE = 1e-4  # of each map's largest magnitude, on random images
LARGEST_SIDE = 4096
MODULES = ('onnx', 'onnxscript', 'onnxruntime')


class ExportError(RuntimeError):
    """An export that does not compute what the network computes."""


def check_onnx() -> None:
    """Raise an ImportError unless everything for the export to ONNX is installed."""
    for module in MODULES:
        require(module, 'export to ONNX')


def export_onnx(
    maps: StageMaps | Graph,
    shape: tuple[int, int],
    path: Path,
    dynamic: bool = False,
    reference: torch.nn.Module | None = None,
) -> dict[str, Any]:
    """Write an ONNX file, once ONNX Runtime has agreed with PyTorch.

    Args:
        maps: What to export; it takes normalised images (1, C, H, W) as ``image``.
        shape: Height and width.
        path: File to write, replaced if it exists.
        dynamic: Height and width are free, in multiples of 32 up to 4096. ``maps`` must be made
            without a shape then, and images of ``shape`` are what is tried.
        reference: What the file should compute; by default ``maps``.

    Returns:
        Figures for the report: size in bytes, operators by type, opset and deviations.

    Raises:
        ExportError: If ONNX Runtime's outputs differ from PyTorch's; no file is written then.
    """
    check_onnx()
    import onnx

    reference = maps if reference is None else reference
    channels = maps.backbone.in_channels
    traced, dynamic_shapes = shape, None
    if dynamic:
        # A side of one block would be taken for a fixed one: torch.export sees a size of 1.
        traced = max(shape[0], 2 * TOTAL_STRIDE), max(shape[1], 2 * TOTAL_STRIDE)
        blocks = [
            torch.export.Dim(name, min=1, max=LARGEST_SIDE // TOTAL_STRIDE)
            for name in ('height_in_blocks', 'width_in_blocks')
        ]
        dynamic_shapes = ({2: TOTAL_STRIDE * blocks[0], 3: TOTAL_STRIDE * blocks[1]},)
    program = torch.onnx.export(
        maps,
        (torch.zeros(1, channels, *traced),),
        input_names=['image'],
        output_names=list(maps.names),
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
        run = onnx_runner(temporary)
        deviations = compare(reference, run, extreme_images(channels, shape))
        if dynamic:
            other = (shape[0] + TOTAL_STRIDE, max(shape[1] - TOTAL_STRIDE, TOTAL_STRIDE))
            deviations['random, another size'] = compare(
                reference, run, dict(random=extreme_images(channels, other)['random'])
            )['random']
        for name in ('random', 'random, another size'):
            if not deviations.get(name, 0) <= TOLERANCE:
                raise ExportError(
                    f"ONNX Runtime's outputs differ from PyTorch's by {deviations[name]:.1e} of "
                    f'the largest magnitude ({name} images), more than {TOLERANCE}; nothing is '
                    'written'
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


def extreme_images(channels: int, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Draw normalised images (1, C, H, W): random ones, and what lies at the ends of the range."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, channels, *shape, generator=generator)
    return dict(
        random=noise,
        zeros=torch.zeros_like(noise),
        black_and_white=2.5 * noise.sign(),
        hundredfold=100 * noise,
    )


@torch.no_grad()
def compare(
    network: torch.nn.Module,
    run: Callable[[Tensor], list[np.ndarray]],
    images: dict[str, Tensor],
) -> dict[str, float]:
    """Compute the largest deviation by kind of image, as a share of a map's maximum."""
    deviations = {}
    for name, image in images.items():
        shares = []
        for expected, found in zip(network(image), run(image), strict=True):
            difference = np.abs(expected.numpy() - found).max()
            shares.append(float(difference / max(expected.abs().max().item(), 1e-30)))
        deviations[name] = float(np.max(shares))
    return deviations
