"""Say what was found in a picture, and draw it."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import cv2
import numpy as np

from mmcare_runtime.text import escape

BEST = 5  # classes of a picture that are named


def name_of(names: Sequence[str] | None, label: int) -> str:
    """Return the name of a class; its number if it has none."""
    return names[label] if names and label < len(names) else str(label)


def list_objects(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List what was found: all boxes, the best classes, or the classes' shares of a label map."""
    names, labels = results['names'], results['labels']
    if 'scores' not in results:
        labels, numbers = np.unique(labels, return_counts=True)
        shares = (numbers / numbers.sum()).tolist()
        return [
            dict(name=name_of(names, label), label=label, share=share)
            for label, share in zip(labels.tolist(), shares)
        ]
    objects = [
        dict(name=name_of(names, label), label=label, score=score)
        for label, score in zip(labels.tolist(), results['scores'].astype(float).tolist())
    ]
    if 'boxes' not in results:
        return objects[:BEST]
    boxes = results['boxes'].astype(float).round(1).tolist()
    return [dict(about, box=box) for about, box in zip(objects, boxes)]


def describe(objects: Sequence[Mapping[str, Any]]) -> str:
    """Say in words what was found."""
    words = []
    for about in objects:
        number = f'{about["share"]:.1%}' if 'share' in about else f'{about["score"]:.3f}'
        box = f' {about["box"]}' if 'box' in about else ''
        words.append(f'{escape(about["name"])} {number}{box}')
    return '; '.join(words) or 'nothing'


def draw(
    pixels: np.ndarray, results: Mapping[str, Any], palette: Sequence[Any] | None = None
) -> np.ndarray:
    """Draw objects, the colours of classes, or the name of the best class onto a copy of a picture.

    An object is its box and, if the file computes masks, its pixels.

    Args:
        pixels: (H, W, 3) in BGR, (H, W), or (H, W, C), whose first channel is drawn onto. Values of
            more than 8 bits are scaled to 0 to 255.
        results: Of :meth:`mmcare_runtime.Model.predict`.
        palette: RGB of the classes; None: some colours.
    """
    pixels = np.atleast_3d(pixels)
    if pixels.dtype != np.uint8:
        low, high = float(pixels.min()), float(pixels.max())
        pixels = ((pixels - low) * (255 / max(high - low, 1e-9))).astype(np.uint8)
    if pixels.shape[2] != 3:
        pixels = np.repeat(pixels[..., :1], 3, 2)
    names, labels = results['names'], results['labels']
    colors = np.array(palette or _some_colors(), np.uint8)[:, ::-1]
    if 'scores' not in results:
        return pixels // 2 + colors[labels % len(colors)] // 2
    pixels = pixels.copy()
    if 'boxes' not in results:
        text = f'{name_of(names, labels[0])} {results["scores"][0]:.2f}'
        return _write(pixels, text, (5, 25), 0.8, (0, 255, 0))
    for mask, label in zip(results.get('masks', ()), labels):
        pixels[mask] = pixels[mask] // 2 + colors[label % len(colors)] // 2
    for box, label, score in zip(results['boxes'], labels, results['scores']):
        color = colors[label % len(colors)].tolist()
        left, top, right, bottom = box.round().astype(int).tolist()
        cv2.rectangle(pixels, (left, top), (right, bottom), color, 2)
        _write(pixels, f'{name_of(names, label)} {score:.2f}', (left, max(top - 4, 12)), 0.5, color)
    return pixels


def _some_colors() -> list[list[int]]:
    return np.random.default_rng(0).integers(0, 256, (256, 3)).tolist()


def _write(
    pixels: np.ndarray, text: str, position: tuple[int, int], scale: float, color: Sequence[int]
) -> np.ndarray:
    return cv2.putText(pixels, escape(text), position, cv2.FONT_HERSHEY_SIMPLEX, scale, color, 2)
