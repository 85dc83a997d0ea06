"""Label maps that do not fit their image or the classes are named as they are read."""

import os
from typing import Any

import numpy as np
from mmcv.transforms import BaseTransform
from mmengine.registry import TRANSFORMS as MMENGINE_TRANSFORMS
from PIL import Image

from mmcare.registry import TRANSFORMS

MAX_LABEL = 255  # mmseg keeps labels in 8 bits


@TRANSFORMS.register_module()
@MMENGINE_TRANSFORMS.register_module()
class CheckLabels(BaseTransform):
    """Check a semantic label map: as large as its image, and no label beyond the classes.

    mmseg checks neither. A map of another size is stretched with the image or fails where images
    are stacked, a label beyond the classes ends in an error that names no file (on a GPU in one
    of CUDA's asserts), and labels above 255 of a 16-bit file are taken modulo 256.

    It has its place right behind ``LoadAnnotations``. Images without annotation, as in inference,
    pass unchecked.

    Args:
        num_classes: Labels, as read, are below this number: after ``reduce_zero_label`` and after
            classes are mapped, if they are.
        ignore_index: The label that is no class.
        enabled: False switches the check off: ``--cfg-options
            train_dataloader.dataset.pipeline.2.enabled=False`` where the check is third.

    Raises:
        ValueError: If a label map does not fit; the message names its file. Also if the check
            comes before the annotation is loaded.
    """

    def __init__(self, num_classes: int, ignore_index: int = 255, enabled: bool = True) -> None:
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.enabled = enabled

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Check ``gt_seg_map`` (H, W), and return the results unchanged."""
        if not self.enabled or 'seg_map_path' not in results:
            return results
        if 'gt_seg_map' not in results:
            raise ValueError(
                'CheckLabels found no label map: it belongs right behind LoadAnnotations; in a '
                'pipeline without annotations leave it out'
            )
        path, labels = results['seg_map_path'], results['gt_seg_map']
        if labels.shape != tuple(results['ori_shape']):
            raise ValueError(
                f'the annotation {path!r} is {_describe(labels.shape)}, its image '
                f'{results["img_path"]!r} is {_describe(results["ori_shape"])}; they must have '
                'equal sizes, and an annotation has one channel'
            )
        if labels.dtype == np.uint8:
            _check_depth(path)
        largest = labels.max(initial=0, where=labels != self.ignore_index)
        if largest >= self.num_classes:
            shift = int(bool(results.get('reduce_zero_label')))
            raise ValueError(
                f'the annotation {path!r} has the label {largest}'
                + (f' ({largest + shift} in the file, before reduce_zero_label)' if shift else '')
                + f'; allowed are 0 to {self.num_classes - 1}, and {self.ignore_index} for '
                'pixels to ignore'
            )
        return results

    def __repr__(self) -> str:
        return (
            f'{type(self).__name__}(num_classes={self.num_classes}, '
            f'ignore_index={self.ignore_index}, enabled={self.enabled})'
        )


def _describe(shape: tuple[int, ...]) -> str:
    """Width and height as people write them, with further axes behind."""
    if len(shape) < 2:  # mmseg drops axes of size 1
        return f'a line of {shape[0]}' if shape else 'a single pixel'
    height, width, *rest = shape
    return ' x '.join(map(str, (width, height, *rest)))


def _check_depth(path: str) -> None:
    """The labels that were read are 8 bits wide; those in the file must be, too."""
    if not os.path.isfile(path):
        return  # in remote storage: fetching it a second time would be too dear
    with Image.open(path) as file:
        largest = int(np.asarray(file).max()) if file.mode.startswith('I') else 0
    if largest > MAX_LABEL:
        raise ValueError(
            f'the annotation {path!r} has the label {largest}; mmseg reads labels up to '
            f'{MAX_LABEL}, and takes the rest of greater ones'
        )
