"""Backends that networks are exported to, one module for each."""

from mmcare.export.backends.base import Backend
from mmcare.export.backends.coreml import CoreML
from mmcare.export.backends.executorch import ExecuTorch
from mmcare.export.backends.executorch_coreml import ExecuTorchCoreML
from mmcare.export.backends.litert import LiteRT
from mmcare.export.backends.ncnn import Ncnn
from mmcare.export.backends.onnx import Onnx

# In the order of reports; a file is opened by the first that reads it.
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (CoreML(), Onnx(), ExecuTorchCoreML(), ExecuTorch(), Ncnn(), LiteRT())
}
