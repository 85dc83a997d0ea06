"""Run exported files with NumPy, OpenCV, fastjsonschema and one engine, without PyTorch.

>>> from mmcare_runtime import open_exported
>>> model = open_exported('mine_model_640x640_decoded.onnx', threads=4)  # doctest: +SKIP
>>> results = model.predict('picture.jpg', score=0.3)  # doctest: +SKIP
"""

from mmcare_runtime.model import Model, open_exported

__all__ = ['Model', 'open_exported']
