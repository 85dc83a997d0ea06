from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.dist import is_main_process
from mmengine.structures import BaseDataElement

from mmcare.engine.hooks import SwitchableHook, warn
from mmcare.files import moved_into_place
from mmcare.registry import HOOKS

CURVES, PREDICTIONS = 'curves.png', 'predictions.png'
METRICS = (
    *('coco/bbox_mAP', 'coco/bbox_mAP_50', 'coco/segm_mAP', 'coco/segm_mAP_50'),  # mmdet's
    *('pascal_voc/mAP', 'mIoU', 'aAcc'),  # mmdet's and mmseg's
    *('accuracy/top1', 'accuracy/top5', 'single-label/f1-score'),  # mmpretrain's
)
SHARES = ('coco/', 'pascal_voc/')  # metrics from 0 to 1; others are per cent
POINTS = 200  # of each loss
COLOURS = ((220, 20, 60), (0, 130, 200), (60, 180, 75), (255, 165, 0), (145, 30, 180))
KEPT = 'curves'  # in the message hub, so that a checkpoint has them


@HOOKS.register_module()
class PlotHook(SwitchableHook):
    """Draw ``curves.png`` and ``predictions.png`` into the run's folder, after each validation.

    The curves are the losses, each point a mean over a 200th of the run, and the metrics below. A
    checkpoint keeps them, so that a resumed run draws all of them. The predictions are those of
    the validation for a few pictures, evenly spread over the data set, next to the annotations. If
    a picture cannot be drawn, a warning says why, and the run goes on.

    Args:
        metrics: Names of the metrics to plot; those that the evaluator does not report are left
            out.
        pictures: Number of pictures.
        score_thr: The least score of the objects that are drawn.
    """

    priority = 'VERY_LOW'  # after RuntimeInfoHook, which keeps the losses

    def __init__(
        self,
        enabled: bool = True,
        metrics: Sequence[str] = METRICS,
        pictures: int = 4,
        score_thr: float = 0.3,
    ) -> None:
        super().__init__(enabled and is_main_process())
        self.metrics, self.pictures, self.score_thr = metrics, pictures, score_thr
        self._curves: dict[str, dict[str, dict[int, float]]] = {}
        self._samples: list[Any] = []
        self._is_training = False

    def before_train(self, runner: Any) -> None:
        """Take the curves of the checkpoint that the run resumes from."""
        info = runner.message_hub.runtime_info
        resumed = info.get(KEPT) if runner.iter else None
        self._curves = resumed or dict(losses={}, metrics={})
        runner.message_hub.update_info(KEPT, self._curves)
        self._is_training = True

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Keep the mean of the last losses."""
        number, step = runner.iter + 1, -(-runner.max_iters // POINTS)
        if number % step:
            return
        for name, history in runner.message_hub.log_scalars.items():
            if name.startswith('train/') and 'loss' in name:
                losses = self._curves['losses'].setdefault(name[len('train/') :], {})
                losses[number] = float(history.mean(step))

    def before_val_epoch(self, runner: Any) -> None:
        """Forget the samples of the last validation."""
        self._samples = []

    def after_val_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Keep a few samples, without objects of low scores."""
        if not self._is_training or not isinstance(outputs, Sequence):
            return
        batches = getattr(runner.val_dataloader, '__len__', lambda: self.pictures)()
        number = min(self.pictures, batches)
        if batch_idx in {place * batches // number for place in range(number)}:
            for sample in outputs[: -(-self.pictures // number)]:
                if isinstance(sample, BaseDataElement):  # other projects have other results
                    self._samples.append(keep(sample, self.score_thr))

    def after_val_epoch(self, runner: Any, metrics: Mapping[str, Any] | None = None) -> None:
        """Draw both pictures."""
        if not self._is_training:
            return
        for name, value in (metrics or {}).items():
            if name in self.metrics:
                points = self._curves['metrics'].setdefault(name, {})
                points[runner.iter] = float(value) * (100 if name.startswith(SHARES) else 1)
        self._draw_curves(runner)
        if self._samples:
            metainfo = getattr(runner.val_dataloader.dataset, 'metainfo', {})
            if isinstance(metainfo, list):  # of mmdet's ConcatDataset
                metainfo = metainfo[0]
            path = Path(runner.work_dir, PREDICTIONS)
            with _warning(PREDICTIONS):
                draw_predictions(self._samples, metainfo, path, self.score_thr)
        self._samples = []

    def after_train(self, runner: Any) -> None:
        """Draw the curves to the end."""
        self._draw_curves(runner)
        self._is_training = False

    def _draw_curves(self, runner: Any) -> None:
        with _warning(CURVES):
            draw_curves(**self._curves, path=Path(runner.work_dir, CURVES))


@contextmanager
def _warning(name: str) -> Iterator[None]:
    """Turn errors into a warning: no fault of a picture is worth the run."""
    try:
        yield
    except Exception as error:
        warn(f'{name} was not drawn: {type(error).__name__}: {error}')


def draw_curves(
    losses: Mapping[str, Mapping[int, float]],
    metrics: Mapping[str, Mapping[int, float]],
    path: Path,
) -> None:
    """Plot losses, and metrics in per cent below, by iteration."""
    from matplotlib.figure import Figure  # not pyplot, which would choose a backend

    figure = Figure(figsize=(8, 8), layout='constrained')
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axis, curves in ((upper, losses), (lower, metrics)):
        for name, points in sorted(curves.items(), key=lambda curve: curve[0] != 'loss'):
            axis.plot([*points], [*points.values()], marker='.', label=name)
        if curves:
            axis.legend()
    upper.set(ylabel='loss', ylim=(0, None))
    lower.set(ylabel='metrics on the validation pictures, %', ylim=(0, None), xlabel='iteration')
    with moved_into_place(path) as temporary:
        figure.savefig(temporary)


def draw_predictions(
    samples: Sequence[Any], metainfo: Mapping[str, Any], path: Path, score_thr: float
) -> None:
    """Draw annotations next to predictions; a legend names the colours.

    Args:
        samples: The toolboxes' data samples, with ``img_path``.
        metainfo: Those of the data set: ``classes``, and the ``palette``.
        path: The file to write.
        score_thr: The least score of the objects in the samples, which the title names.
    """
    import mmcv
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    classes = metainfo.get('classes') or ()
    colours = np.zeros((max(256, len(classes)), 3))  # labels without a class are black
    palette = metainfo.get('palette')
    if not isinstance(palette, (list, tuple)) or len(palette) != len(classes):
        palette = COLOURS * len(classes)
    colours[: len(classes)] = np.array(palette[: len(classes)]).reshape(-1, 3) / 255
    images = [mmcv.imread(sample.img_path, channel_order='rgb') for sample in samples]
    ratios = [image.shape[0] / image.shape[1] for image in images]
    figure = Figure(figsize=(10, 5 * sum(ratios) + 1), layout='constrained')
    axes = figure.subplots(len(images), 2, squeeze=False, gridspec_kw=dict(height_ratios=ratios))
    shown: set[int] = set()
    for row, image, sample in zip(axes, images, samples):
        for axis, part in zip(row, ('gt', 'pred')):
            axis.imshow(image)
            axis.set_axis_off()
            axis.autoscale(False)  # boxes may reach over the border
            shown.update(_show(axis, sample, part, colours, classes))
    scored = any('pred_instances' in sample for sample in samples)
    prediction = f'prediction, scores from {score_thr:g}' if scored else 'prediction'
    for axis, title in zip(axes[0], ('truth', prediction)):
        axis.set_title('\n'.join(filter(None, (title, axis.get_title()))), fontsize=16)
    handles = [Patch(color=colours[label], label=classes[label]) for label in sorted(shown)]
    if handles:
        figure.legend(handles=handles, loc='outside upper center', ncols=4, fontsize=14)
    with moved_into_place(path) as temporary:
        figure.savefig(temporary)


def keep(sample: Any, score_thr: float) -> Any:
    """Copy a sample to the CPU, without objects of low scores: their masks take much memory."""
    sample = sample.to('cpu')
    predicted = sample.get('pred_instances')
    if predicted is not None and 'scores' in predicted:
        sample.pred_instances = predicted[predicted.scores >= score_thr]
    return sample


def _show(
    axis: Any, sample: Any, part: str, colours: np.ndarray, classes: Sequence[str]
) -> Iterable[int]:
    """Show classes of pixels as colours, outlines of objects, or the class; return the labels."""
    from matplotlib.patches import Rectangle

    if f'{part}_sem_seg' in sample:
        labels = sample.get(f'{part}_sem_seg').data[0].numpy()
        axis.imshow(colours[labels], alpha=0.5)
        return [int(label) for label in np.unique(labels) if label < len(classes)]
    if f'{part}_label' in sample:
        names = [classes[label] for label in sample.get(f'{part}_label').tolist()]
        axis.set_title(', '.join(names), fontsize=14)
        return []
    if f'{part}_instances' not in sample:
        return []
    objects = sample.get(f'{part}_instances').numpy()
    boxes = objects.bboxes if isinstance(objects.bboxes, np.ndarray) else objects.bboxes.numpy()
    for index, (box, label) in enumerate(zip(boxes, objects.labels)):
        left, top, right, bottom = box
        size = right - left, bottom - top
        axis.add_patch(Rectangle((left, top), *size, fill=False, color=colours[label], lw=1.5))
        if 'masks' in objects:
            mask = objects.masks[index : index + 1]
            mask = mask if isinstance(mask, np.ndarray) else mask.to_ndarray()
            axis.contour(mask[0], [0.5], colors=[colours[label]], linewidths=2)
    return [int(label) for label in objects.labels]
