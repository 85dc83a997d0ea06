"""Backends that networks are exported to, one module for each."""

from mmcare.export.backends.base import Backend
from mmcare.export.backends.coreml import CoreML
from mmcare.export.backends.executorch import ExecuTorch
from mmcare.export.backends.litert import LiteRT
from mmcare.export.backends.ncnn import Ncnn
from mmcare.export.backends.onnx import Onnx

# In the order of reports.
BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (CoreML(), Onnx(), ExecuTorch(), Ncnn(), LiteRT())
}
