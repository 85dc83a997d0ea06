"""Say what was found in a picture, and draw it."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import cv2
import numpy as np

from mmcare_runtime.masks import encode_mask
from mmcare_runtime.text import escape

BEST = 5  # classes of a picture that are named
FONTS = (  # with many scripts, of Linux, macOS and Windows
    *('DejaVuSans.ttf', 'NotoSansCJK-Regular.ttc', 'NotoSans-Regular.ttf', 'wqy-microhei.ttc'),
    *('Arial Unicode.ttf', 'PingFang.ttc', 'arial.ttf', 'msyh.ttc', 'malgun.ttf', 'msgothic.ttc'),
)


def name_of(names: Sequence[str] | None, label: int) -> str:
    """Return the name of a class; its number if it has none."""
    return names[label] if names and label < len(names) else str(label)


def list_objects(results: Mapping[str, Any], masks: bool = False) -> list[dict[str, Any]]:
    """List what was found: all boxes, the best classes, or the classes' shares of a label map.

    With ``masks``, objects that have masks have them as COCO's run lengths.
    """
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
    objects = [dict(about, box=box) for about, box in zip(objects, boxes)]
    if masks and 'masks' in results:
        return [
            dict(about, mask=encode_mask(mask)) for about, mask in zip(objects, results['masks'])
        ]
    return objects


def list_coco_results(
    results: Mapping[str, Any], image: int | str, categories: Sequence[Any] | None = None
) -> list[dict[str, Any]]:
    """List boxes and masks in the format of COCO's results.

    Args:
        results: Of :meth:`mmcare_runtime.Model.predict`.
        image: The picture's id.
        categories: Ids of the classes; None: they are counted from 1.
    """
    boxes = results['boxes'].astype(float)
    boxes = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1).tolist()
    listed: list[dict[str, Any]] = [
        dict(
            image_id=image,
            category_id=categories[label] if categories else label + 1,
            bbox=box,
            score=score,
        )
        for box, label, score in zip(
            boxes, results['labels'].tolist(), results['scores'].astype(float).tolist()
        )
    ]
    for about, mask in zip(listed, results.get('masks', ())):
        about['segmentation'] = encode_mask(mask)
    return listed


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
    pixels = np.ascontiguousarray(pixels.copy())
    # Two pixels and letters of 12 pixels in a picture of 640x480; both grow with the picture.
    thickness = max(round(sum(pixels.shape[:2]) / 560), 1)
    if 'boxes' not in results:
        text = f'{name_of(names, labels[0])} {results["scores"][0]:.2f}'
        write(pixels, text, (thickness, thickness), 2 * thickness, (0, 255, 0))
        return pixels
    for mask, label in zip(results.get('masks', ()), labels):
        pixels[mask] = pixels[mask] // 2 + colors[label % len(colors)] // 2
    boxes = results['boxes'].round().astype(int).tolist()
    for index in reversed(range(len(boxes))):  # the best on top
        color = colors[labels[index] % len(colors)].tolist()
        left, top, right, bottom = boxes[index]
        cv2.rectangle(pixels, (left, top), (right, bottom), color, thickness)
        text = f'{name_of(names, labels[index])} {results["scores"][index]:.2f}'
        write(pixels, text, (left, top), thickness, color, above=True)
    return pixels


def _some_colors() -> list[list[int]]:
    return np.random.default_rng(0).integers(0, 256, (256, 3)).tolist()


def write(
    pixels: np.ndarray,
    text: str,
    place: tuple[int, int],
    size: int,
    color: Sequence[int],
    above: bool = False,
) -> None:
    """Write text onto a background, inside of a picture (H, W, 3), in place.

    Args:
        pixels: The picture.
        text: What OpenCV's font cannot draw is drawn by Pillow if it is installed and has a font
            for it, and otherwise escaped.
        place: Left and top side of the text, or, with ``above``, left and bottom side.
        size: Letters are about six times as high, in pixels.
        color: Of the background, in BGR.
        above: See ``place``.
    """
    label = _draw_text(escape(text), size)
    height, width = (min(sides) for sides in zip(label.shape, pixels.shape))
    left = max(min(place[0], pixels.shape[1] - width), 0)
    top = max(min(place[1] - height * above, pixels.shape[0] - height), 0)
    shares = label[:height, :width, None]
    ink = 0 if np.dot(color, (0.114, 0.587, 0.299)) > 128 else 255
    drawn = shares * ink + (1 - shares) * np.array(color)
    pixels[top : top + height, left : left + width] = drawn.round()


def _draw_text(text: str, size: int) -> np.ndarray:
    """Draw text, and return the share of each pixel (h, w) that it covers."""
    if not text.isascii():
        drawn = _draw_with_pillow(text, 8 * size)
        if drawn is not None:
            return np.pad(drawn / 255, size)
        text = text.encode('ascii', 'backslashreplace').decode()
    font, scale, line = cv2.FONT_HERSHEY_SIMPLEX, 0.26 * size, max(size // 2, 1)
    (width, height), below = cv2.getTextSize(text, font, scale, line)
    canvas = np.zeros((height + below + 2 * size, width + 2 * size), np.uint8)
    cv2.putText(canvas, text, (size, size + height), font, scale, 255, line, cv2.LINE_AA)
    return canvas / 255


def _draw_with_pillow(text: str, height: int) -> np.ndarray | None:
    """Draw text with the first font that has all its letters; None if there is none."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        return None
    for name in FONTS:
        try:
            font = ImageFont.truetype(name, height)
        except OSError:  # not on this system
            continue
        missing = bytes(font.getmask('\U0010fffe'))  # what the font draws for letters that it lacks
        if all(bytes(font.getmask(letter)) != missing for letter in {*text} - {' '}):
            left, top, right, bottom = map(int, font.getbbox(text))
            canvas = Image.new('L', (right - left, bottom - top))
            ImageDraw.Draw(canvas).text((-left, -top), text, 255, font)
            return np.asarray(canvas)
    return None
