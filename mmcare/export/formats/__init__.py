"""Formats that networks are exported to: a file each."""

from mmcare.export.formats.base import Format
from mmcare.export.formats.coreml import CoreML
from mmcare.export.formats.executorch import ExecuTorch
from mmcare.export.formats.litert import LiteRT
from mmcare.export.formats.ncnn import Ncnn
from mmcare.export.formats.onnx import Onnx

# In the order of reports.
FORMATS: dict[str, Format] = {
    form.name: form for form in (CoreML(), Onnx(), ExecuTorch(), Ncnn(), LiteRT())
}
