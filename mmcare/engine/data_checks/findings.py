"""Arguments and results of the data checks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, Callable, NamedTuple

from mmengine.dataset import BaseDataset
from torch import nn

from mmcare.engine.data_checks.coco_file import read_coco
from mmcare.engine.data_checks.headers import Header, read_headers
from mmcare_runtime.coco import CocoFile
from mmcare_runtime.text import join_first

NUMBER = 10_000  # pictures and masks that are read from a dataset, evenly spread


class Stop(str):
    """A fault that stops the run."""


class Warn(str):
    """A finding that may be intended; the run goes on."""


class Picture(NamedTuple):
    """What a dataset says about a picture, with local paths; None where it says nothing."""

    path: str | None
    mask: str | None
    size: tuple[Any, Any]  # width, height
    labels: list[Any]  # of its objects
    ignored: int  # how many of these are ignored, as crowds and difficult ones are
    label: Any  # of the whole picture
    xml: str | None


@dataclass(eq=False)
class Split:
    """A dataset of a run, without its wrappers.

    Attributes:
        mode: ``'train'``, ``'val'`` or ``'test'``.
        dataset: The dataset.
        metrics: The metrics that evaluate it.
        configs: The configs of the metrics.
        read: Reads a COCO file, once for all splits that have it.
    """

    mode: str
    dataset: BaseDataset
    metrics: list[Any] = field(default_factory=list)
    configs: list[Any] = field(default_factory=list)
    read: Callable[[str], CocoFile] = field(default_factory=lambda: lru_cache(None)(read_coco))

    @property
    def name(self) -> str:
        """The name of the split in messages: its file or folder."""
        return repr(getattr(self.dataset, 'ann_file', None) or self.folder)

    @property
    def folder(self) -> str:
        """The folder of the pictures."""
        prefix = self.dataset.data_prefix
        return str(prefix.get('img') or prefix.get('img_path') or prefix.get('sub_data_root') or '')

    @cached_property
    def classes(self) -> list[str]:
        """The names of the classes."""
        return list(self.dataset.metainfo.get('classes') or ())

    @cached_property
    def steps(self) -> dict[str, Any]:
        """The steps of the pipeline by their names."""
        return {type(step).__name__: step for step in self.dataset.pipeline.transforms}

    @property
    def coco(self) -> CocoFile | None:
        """The COCO file that mmdet's dataset was made from."""
        is_coco = hasattr(self.dataset, 'COCOAPI') and os.path.isfile(self.dataset.ann_file)
        return self.read(self.dataset.ann_file) if is_coco else None

    @cached_property
    def pictures(self) -> list[Picture]:
        """All pictures of the dataset; a loop over a large one takes seconds."""
        return [_describe(self.dataset.get_data_info(i)) for i in range(len(self.dataset))]

    @cached_property
    def unchecked(self) -> list[str]:
        """What the dataset does not give, so that no check of it finds anything."""
        pictures = self.pictures
        labeled = self.of_pixels or any(
            isinstance(picture.label, int) or any(isinstance(x, int) for x in picture.labels)
            for picture in pictures
        )
        lacking = dict(pictures=any(picture.path for picture in pictures), labels=labeled)
        return [name for name, is_there in lacking.items() if not is_there]

    @cached_property
    def headers(self) -> dict[str, Header | str | None]:
        """What the headers of pictures say, see :func:`read_headers`."""
        if 'LoadImageFromFile' not in self.steps:
            return {}
        paths = [picture.path for picture in sample(self.pictures, NUMBER)]
        return read_headers([path for path in paths if path], self.load)

    @cached_property
    def obeys_exif(self) -> bool:
        """Whether the loader turns pictures by their EXIF data."""
        step = self.steps.get('LoadImageFromFile')
        turns = getattr(step, 'color_type', '') in ('color', 'grayscale')
        return turns and getattr(step, 'imdecode_backend', '') in ('cv2', 'pillow')

    def loaded_size(self, header: Header) -> tuple[int, int]:
        """Return the width and height that training gets."""
        return header.size[::-1] if self.obeys_exif and header.turn > 4 else header.size

    def load(self, path: str) -> Any:
        """Load a picture, (H, W, C) or (H, W), as the pipeline does; None if that fails."""
        try:
            return self.steps['LoadImageFromFile']({'img_path': path})['img']
        except Exception:  # each decoder raises its own
            return None

    @cached_property
    def of_pixels(self) -> bool:
        """Whether the dataset is one of mmseg's, with a class for each pixel."""
        loads = getattr(self.steps.get('LoadAnnotations'), 'with_seg', False)
        return loads and 'reduce_zero_label' in self.dataset.metainfo


class Run(NamedTuple):
    """The model and datasets to check.

    Attributes:
        model: The model, without wrappers.
        splits: The datasets.
        first: The run's first dataset, checked or not.
        config: The config of the run.
    """

    model: nn.Module
    splits: list[Split]
    first: Split | None = None
    config: Mapping[str, Any] = MappingProxyType({})

    def of_mode(self, *modes: str) -> list[Split]:
        """Return the splits of these modes."""
        return [split for split in self.splits if split.mode in modes]

    def line_of_classes(self, mode: str) -> str:
        """Say where the config names the classes: in a line of its own, or in a dataset."""
        if isinstance(self.config.get('classes'), (list, tuple)):
            return 'the line `classes` of the config'
        return f'{mode}_dataloader.dataset.metainfo.classes'


def sample(items: list[Any], number: int) -> list[Any]:
    """Return at most ``number`` items, evenly spread."""
    return items[:: -(-len(items) // number) or 1]


def examples(names: Iterable[Any], number: int = 3) -> str:
    """Join the first names, each in quotes, and say how many more there are."""
    return join_first(map(repr, names), number)


def _describe(info: dict[str, Any]) -> Picture:
    instances = info.get('instances', ())
    return Picture(
        path=_local(info.get('img_path')),
        mask=_local(info.get('seg_map_path')),
        size=(info.get('width'), info.get('height')),
        labels=[instance.get('bbox_label') for instance in instances],
        ignored=sum(bool(instance.get('ignore_flag')) for instance in instances),
        label=info.get('gt_label', info.get('label')),  # the latter in mmaction2
        xml=info.get('xml_path'),
    )


def _local(path: Any) -> str | None:
    return path if isinstance(path, str) and '://' not in path else None
