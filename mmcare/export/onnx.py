"""Export to ONNX, compared with PyTorch in ONNX Runtime."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from mmcare.export.program import count_convolutions
from mmcare.export.verify import trial_images, verify
from mmcare.files import moved_into_place
from mmcare.models.backbones.care import TOTAL_STRIDE

OPSET = 20  # the first with an operator for GELU


def write_onnx(
    program: ExportedProgram,
    path: Path,
    names: Sequence[str],
    reference: nn.Module,
    images: Mapping[str, Tensor],
    step: int = 0,
) -> dict[str, Any]:
    """Write an ONNX file, once ONNX Runtime has agreed with PyTorch.

    Args:
        program: Of :func:`mmcare.export.program.export_program`; it takes normalised images
            (1, C, H, W), the input ``image``.
        path: File to write, replaced if it exists.
        names: Of the outputs.
        reference: What the file should compute.
        images: To compare both with; see :func:`mmcare.export.verify.verify`.
        step: Height and width are free, in multiples of this; another size is also tried.

    Returns:
        Entries of the report: opset, operators by type, convolutions by stage, deviations.

    Raises:
        ExportError: If ONNX Runtime's outputs differ from PyTorch's; no file is written then.
    """
    import onnx

    converted = torch.onnx.export(
        program,
        input_names=['image'],
        output_names=list(names),
        opset_version=OPSET,
        verbose=False,
    )
    assert converted is not None, 'an ONNXProgram, since no file is named'
    _, channels, height, width = images['random'].shape
    with moved_into_place(path) as temporary:
        converted.save(temporary, external_data=False)
        model = onnx.load(temporary)
        onnx.checker.check_model(model)
        if step:
            other = height + step, max(width - step, TOTAL_STRIDE)
            another = trial_images(channels, other)['random']
            images = {**images, 'random, another size': another}
        deviations = verify(temporary, reference, images, 'ONNX Runtime')
    operators = Counter(node.op_type for node in model.graph.node if node.op_type != 'Constant')
    return dict(
        opset=OPSET,
        height_and_width=('any' if step == 1 else f'multiples of {step}')
        if step
        else [height, width],
        operators=dict(operators.most_common()),
        convolutions=count_convolutions(program),
        deviations=deviations,
    )
