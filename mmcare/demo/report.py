"""What a demo leaves for a person to look at: curves, pictures and a table."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from mmcare.analysis.plots import new_figure, write_png
from mmcare.output import moved_into_place
from mmcare.sample_data.output import write_image


def read_scalars(log_dir: Path) -> list[dict[str, Any]]:
    """Read what mmengine's LocalVisBackend logged: a dict a line."""
    lines = (log_dir / 'vis_data' / 'scalars.json').read_text().splitlines()
    return [json.loads(line) for line in lines]


def plot_curves(
    scalars: Sequence[dict[str, Any]],
    losses: Sequence[str],
    metrics: dict[str, str],
    filename: Path,
) -> None:
    """Plot losses by iteration and, below, metrics of the validations during training.

    Args:
        scalars: Of :func:`read_scalars`.
        losses: Names of the losses to plot; the first one is drawn strongest.
        metrics: Label of each metric by the name it is logged under.
        filename: PNG to write.
    """
    figure = new_figure(8, 8)
    upper, lower = figure.subplots(2, 1)
    training = [row for row in scalars if losses[0] in row]
    for index, name in enumerate(losses):
        upper.plot(
            [row['step'] for row in training],
            [row.get(name) for row in training],
            label=name,
            linewidth=1 if index else 2,
        )
    upper.set(xlabel='iteration', ylabel='loss', ylim=(0, None))
    upper.legend()
    for name, label in metrics.items():
        validations = [row for row in scalars if name in row]
        lower.plot(
            [row['step'] for row in validations],
            [row[name] for row in validations],
            marker='o',
            label=label,
        )
    lower.set(xlabel='validation after epoch or iteration', ylim=(0, 1))
    lower.legend()
    write_png(figure, filename, dpi=100)


def write_grid(pictures: Sequence[np.ndarray], columns: int, filename: Path) -> None:
    """Write BGR pictures of any sizes side by side, ``columns`` in a row, as one PNG."""
    height = max(picture.shape[0] for picture in pictures)
    width = max(picture.shape[1] for picture in pictures)
    padded = [
        cv2.copyMakeBorder(
            picture,
            4,
            4 + height - picture.shape[0],
            4,
            4 + width - picture.shape[1],
            cv2.BORDER_CONSTANT,
            value=(255,) * 3,
        )
        for picture in pictures
    ]
    padded += [np.full_like(padded[0], 255)] * (-len(padded) % columns)
    rows = [np.hstack(padded[start : start + columns]) for start in range(0, len(padded), columns)]
    with moved_into_place(filename) as temporary:
        write_image(temporary, np.vstack(rows))


def write_results(results: dict[str, Any], filename: Path) -> None:
    """Write figures as JSON."""
    with moved_into_place(filename) as temporary:
        temporary.write_text(json.dumps(results, indent=2) + '\n', encoding='utf-8')
