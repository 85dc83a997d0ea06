"""Formats that networks are exported to: a file each."""

from mmcare.export.backends.base import Format
from mmcare.export.backends.coreml import CoreML
from mmcare.export.backends.executorch import ExecuTorch
from mmcare.export.backends.litert import LiteRT
from mmcare.export.backends.ncnn import Ncnn
from mmcare.export.backends.onnx import Onnx

# In the order of reports.
FORMATS: dict[str, Format] = {
    form.name: form for form in (CoreML(), Onnx(), ExecuTorch(), Ncnn(), LiteRT())
}
