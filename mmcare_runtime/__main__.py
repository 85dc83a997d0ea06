"""Show what an exported file of a whole model finds in pictures, videos or camera frames.

Boxes, the shares of classes, or their probabilities are printed, and drawn into DIR; masks are
drawn. Neither the config nor PyTorch's checkpoint is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, Iterator

import cv2
import numpy as np

from mmcare_runtime.command import make_parser, open_file
from mmcare_runtime.drawing import describe, draw, list_objects
from mmcare_runtime.model import Model
from mmcare_runtime.suffixes import PICTURES, VIDEOS, list_files
from mmcare_runtime.text import escape

FRAMES_PER_SECOND = 30.0  # of cameras and videos that do not say how many


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser('mmcare_runtime', __doc__)
    parser.add_argument(
        'sources',
        nargs='+',
        metavar='SOURCE',
        help='a picture, a folder of them, a video, or the number of a camera, such as 0',
    )
    parser.add_argument(
        '--score', type=float, default=0.3, help='least score of boxes; default: %(default)s'
    )
    parser.add_argument('--json', action='store_true', help='print a line of JSON for each picture')
    parser.add_argument(
        '--out-dir',
        type=Path,
        default=Path('predictions'),
        metavar='DIR',
        help='default: %(default)s',
    )
    return parser.parse_args()


def plan(sources: list[str], out_dir: Path) -> list[tuple[str, Path]]:
    """List pictures, videos and cameras, each with the file to draw it into.

    Raises:
        ValueError: If one of these files exists, or would get two pictures.
    """
    jobs: list[tuple[str, Path]] = []
    for source in sources:
        if source.isdecimal() and not Path(source).exists():
            jobs.append((source, out_dir / f'camera{source}.mp4'))
            continue
        root = Path(source)
        paths = [root]
        if root.is_dir():
            paths = list_files(root, (*PICTURES, *VIDEOS))
            if not paths:
                raise ValueError(f'{source} has neither pictures nor videos')
        for path in paths:
            target = out_dir / (path.relative_to(root) if root.is_dir() else path.name)
            if path.suffix.lower() in VIDEOS:
                target = target.with_suffix('.mp4')
            elif path.suffix.lower() not in PICTURES or path.suffix.lower() == '.npy':
                target = target.with_name(f'{target.name}.png')
            jobs.append((str(path), target))
    targets = {target.resolve() for _, target in jobs}
    existing = [target for target in targets if target.exists()]
    if existing or len(targets) < len(jobs):
        name = existing[0] if existing else 'a picture'
        raise ValueError(f'{name} would be overwritten: give other sources, or another --out-dir')
    return jobs


def frames_of(capture: Any) -> Iterator[np.ndarray]:
    """Yield the frames of a video or a camera."""
    while True:
        read, frame = capture.read()
        if not read:
            return
        yield frame


class Predictor:
    """A model that counts its pictures and how long they took, and prints what it finds."""

    def __init__(self, model: Model, score: float, tile: str | None, as_json: bool) -> None:
        self.model, self.score, self.tile, self.as_json = model, score, tile, as_json
        self.count, self.seconds = 0, 0.0

    def show(self, source: str, pixels: np.ndarray, **where: Any) -> np.ndarray:
        """Print what is found in a picture, and return it drawn."""
        begin = perf_counter()
        results = self.model.predict(pixels, self.score, self.tile)
        self.seconds += perf_counter() - begin
        self.count += 1
        objects = list_objects(results)
        if self.as_json:
            print(json.dumps(dict(source=source, **where, objects=objects)), flush=True)
        else:
            words = ''.join(f', {key} {value}' for key, value in where.items())
            print(f'{escape(source)}{words}: {describe(objects)}', flush=True)
        return draw(pixels, results, self.model.description.get('palette'))

    def show_picture(self, source: str, target: Path) -> None:
        """Draw a picture into a file, which is moved into place."""
        drawn = self.show(source, self.model.read_picture(source))
        written, data = cv2.imencode(target.suffix, drawn)
        if not written:
            raise ValueError(f'{target} cannot be written')
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f'.{target.name}.tmp')
        try:
            temporary.write_bytes(data.tobytes())
            os.replace(str(temporary), str(target))
        finally:
            temporary.unlink(missing_ok=True)

    def show_video(self, source: str, target: Path) -> None:
        """Draw the frames of a video or a camera into a video, until it ends or Ctrl-C."""
        capture: Any = cv2.VideoCapture(int(source) if source.isdecimal() else source)
        rate = capture.get(cv2.CAP_PROP_FPS)
        rate = rate if 0 < rate <= 1000 else FRAMES_PER_SECOND
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary, writer = target.with_name(f'.{target.stem}.tmp.mp4'), None
        try:
            for number, frame in enumerate(frames_of(capture)):
                drawn = self.show(source, frame, frame=number)
                if writer is None:
                    code = cv2.VideoWriter_fourcc(*'mp4v')  # type: ignore[attr-defined]
                    writer = cv2.VideoWriter(str(temporary), code, rate, drawn.shape[1::-1])
                writer.write(drawn)
        except KeyboardInterrupt:
            print('stopped', file=sys.stderr)
        finally:
            capture.release()
            if writer is not None:
                writer.release()
                os.replace(str(temporary), str(target))
        if writer is None:
            raise ValueError(f'{source} has no frames')


def main() -> int:
    """Open the file once, go through the sources, and return the status."""
    arguments, failed = parse_arguments(), False
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors='backslashreplace')  # type: ignore[union-attr]
    try:
        jobs = plan(arguments.sources, arguments.out_dir)
        model = open_file(arguments)
    except (ImportError, OSError, ValueError) as error:
        print(f'error: {escape(" ".join(str(error).split()))}', file=sys.stderr)
        return 2
    predictor = Predictor(model, arguments.score, arguments.tile, arguments.json)
    for source, target in jobs:
        try:
            is_video = target.suffix == '.mp4'
            (predictor.show_video if is_video else predictor.show_picture)(source, target)
        except (ImportError, OSError, ValueError, cv2.error) as error:
            print(f'error: {escape(" ".join(str(error).split()))}', file=sys.stderr)
            failed = True
    if predictor.count:
        rate = predictor.count / max(predictor.seconds, 1e-9)
        text = f'Drawn into {arguments.out_dir}; {rate:.1f} frames per second without drawing'
        print(escape(text), file=sys.stderr if arguments.json else sys.stdout)
    return 2 if failed else 0


if __name__ == '__main__':
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print('stopped', file=sys.stderr)
        sys.exit(130)
