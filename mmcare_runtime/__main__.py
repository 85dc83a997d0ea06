"""Show what an exported file of a whole model finds in pictures, videos or camera frames.

Boxes, the shares of classes, or their probabilities are printed, and drawn into DIR; masks are
drawn. Neither the config nor PyTorch's checkpoint is needed. Ctrl-C and SIGTERM end a video and
the command; the video so far is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, Callable, NamedTuple, Sequence
from urllib.parse import urlsplit

import cv2
import numpy as np

from mmcare_runtime.command import make_parser, open_file
from mmcare_runtime.drawing import describe, draw, list_coco_results, list_objects
from mmcare_runtime.model import Model
from mmcare_runtime.saving import move, temporary_beside
from mmcare_runtime.suffixes import PICTURES, VIDEOS, list_files
from mmcare_runtime.text import escape, print_aside, print_error, set_up_streams
from mmcare_runtime.video import Frames, VideoFile

DRAWN = ('.bmp', '.jpeg', '.jpg', '.png', '.ppm', '.tif', '.tiff', '.webp')  # others become .png


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser('mmcare_runtime', __doc__)
    parser.add_argument(
        'sources',
        nargs='+',
        metavar='SOURCE',
        help='a picture, a folder of them, a video, the number of a camera, such as 0, or the '
        'address of a stream, such as rtsp://...',
    )
    parser.add_argument(
        '--score',
        type=read_score,
        default=0.3,
        help='least score of boxes, from 0 to 1; default: %(default)s',
    )
    parser.add_argument(
        '--json',
        nargs='?',
        const='lines',
        choices=('lines', 'coco'),
        help="print a line of JSON for each picture; coco: one list in the format of COCO's "
        'results, for detectors and pictures: image_id is the number that is the name of the file, '
        'or its name, category_id counts classes from 1',
    )
    parser.add_argument(
        '--out-dir',
        type=Path,
        default=Path('predictions'),
        metavar='DIR',
        help='default: %(default)s',
    )
    parser.add_argument(
        '--overwrite', action='store_true', help='older drawings in DIR are replaced'
    )
    return parser.parse_args()


def read_score(text: str) -> float:
    """Read a number from 0 to 1."""
    try:
        score = float(text)
    except ValueError:
        score = -1
    if 0 <= score <= 1:
        return score
    hint = f': {score:g} per cent are {score / 100:g}' if 1 < score <= 100 else ''
    raise argparse.ArgumentTypeError(f'{text} is not a number from 0 to 1{hint}')


class Job(NamedTuple):
    """A source, its name in messages, and the file to draw it into."""

    source: str | int
    name: str
    target: Path
    is_video: bool


def plan(sources: list[str], out_dir: Path, overwrite: bool = False) -> list[Job]:
    """List pictures, videos, cameras and streams, each with the file to draw it into.

    Raises:
        ValueError: If one of these files exists, unless it may be overwritten; if it is a source,
            or would get two pictures.
    """
    jobs: list[Job] = []
    for source in sources:
        if '://' in source:
            parts = urlsplit(source)
            place = f'{parts.hostname}{parts.path}'  # without a password
            target = out_dir / f'{re.sub(r"[^A-Za-z0-9.-]+", "_", place).strip("_")}.mp4'
            jobs.append(Job(source, f'{parts.scheme}://{place}', target, True))
            continue
        if source.isdecimal() and not Path(source).exists():
            jobs.append(Job(int(source), source, out_dir / f'camera{source}.mp4', True))
            continue
        root = Path(source)
        paths = [root]
        if root.is_dir():
            paths = list_files(root, (*PICTURES, *VIDEOS))
            if not paths:
                raise ValueError(f'{source} has neither pictures nor videos')
        for path in paths:
            target = out_dir / (path.relative_to(root) if root.is_dir() else path.name)
            is_video = path.suffix.lower() in VIDEOS
            if is_video:
                target = target.with_suffix('.mp4')
            elif path.suffix.lower() not in DRAWN:
                target = target.with_name(f'{target.name}.png')
            # FFmpeg takes what is before a colon in a relative path for a protocol.
            source = str(path.absolute()) if is_video else str(path)
            jobs.append(Job(source, str(path), target, is_video))
    targets = {job.target.resolve() for job in jobs}
    inputs = {Path(job.source).resolve() for job in jobs if isinstance(job.source, str)}
    existing = [job.target for job in jobs if job.target.exists()]
    shared = find_shared(jobs, lambda job: job.target.resolve())
    if shared:
        raise ValueError(f'{shared} would be drawn into one file: give them to two commands')
    if targets & inputs:
        name = min(targets & inputs)
        raise ValueError(f'{name} would be overwritten: give other sources, or another --out-dir')
    if existing and not overwrite:
        raise ValueError(
            f'{existing[0]} would be overwritten: add --overwrite, or give another --out-dir'
        )
    return jobs


def image_id(job: Job) -> int | str:
    """Return a picture's id in COCO's format: its name without the ending, or that number."""
    stem = Path(job.name).stem
    return int(stem) if stem.isdecimal() else stem


def find_shared(jobs: Sequence[Job], key: Callable[[Job], Any]) -> str:
    """Name the first two sources that have the same key; empty: there are none."""
    first: dict[Any, Job] = {}
    for job in jobs:
        other = first.setdefault(key(job), job)
        if other is not job:
            return f'{other.name} and {job.name}'
    return ''


class Stop:
    """Notes the first signal that ends a process, so that a video can be completed.

    A second signal acts as usual. Signals that are ignored, as by nohup, stay ignored.
    """

    number = 0

    def __enter__(self) -> Stop:
        self.usual: dict[int, Any] = {}
        for name in ('SIGINT', 'SIGTERM', 'SIGHUP'):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                self.usual[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, _: Any) -> None:
        self.number = number
        self.__exit__()

    def __exit__(self, *_: Any) -> None:
        for number, usual in self.usual.items():
            signal.signal(number, usual)


class Predictor:
    """A model that counts its pictures and how long they took, and prints what it finds."""

    def __init__(self, model: Model, arguments: argparse.Namespace, stop: Stop) -> None:
        self.model, self.arguments, self.stop = model, arguments, stop
        self.count, self.drawn, self.entries, self.seconds = 0, 0, 0, 0.0

    def show(self, job: Job, pixels: np.ndarray, **where: Any) -> np.ndarray:
        """Print what is found in a picture, and return it drawn."""
        begin = perf_counter()
        results = self.model.predict(pixels, self.arguments.score, self.arguments.tile)
        self.seconds += perf_counter() - begin
        if self.arguments.json == 'coco':
            for about in list_coco_results(results, image_id(job)):
                self.print_entry(json.dumps(about))
        elif self.arguments.json:
            about = dict(source=job.name, **where, objects=list_objects(results, True))
            print(json.dumps(about), flush=True)
        else:
            words = ''.join(f', {key} {value}' for key, value in where.items())
            print(f'{escape(job.name)}{words}: {describe(list_objects(results))}', flush=True)
        self.count += 1
        return draw(pixels, results, self.model.description.get('palette'))

    def print_entry(self, text: str) -> None:
        """Print an entry of a list of JSON."""
        print(f'{"," if self.entries else "["}\n{text}', end='')
        self.entries += 1

    def show_picture(self, job: Job) -> None:
        """Draw a picture into a file, which is moved into place."""
        drawn = self.show(job, self.model.read_picture(str(job.source)))
        written, data = cv2.imencode(job.target.suffix, drawn)
        if not written:
            raise ValueError(f'{job.target} cannot be written')
        with temporary_beside(job.target) as temporary:
            temporary.write_bytes(data.tobytes())
            self.move(temporary, job.target)

    def show_video(self, job: Job) -> None:
        """Draw the frames of a video or a camera into a video, until it ends or a signal comes."""
        frames = Frames(job.source, job.name, lambda: bool(self.stop.number))
        with temporary_beside(job.target) as temporary:
            video = VideoFile(temporary, frames.rate)
            try:
                for number, frame in enumerate(frames):
                    video.write(self.show(job, frame, frame=number))
            finally:
                video.close()
                if video.count:
                    self.move(temporary, job.target)

    def move(self, temporary: Path, target: Path) -> None:
        """Move a complete file into place."""
        path = move(temporary, target, self.arguments.overwrite)
        self.drawn += 1
        if path != target:
            text = f'{target} was written by another process meanwhile: drawn into {path}'
            print_aside(f'warning: {text}')


def show_all(predictor: Predictor, jobs: list[Job]) -> bool:
    """Go through the sources until a signal comes; tell whether all could be shown."""
    good, arguments = True, predictor.arguments
    for job in jobs:
        try:
            (predictor.show_video if job.is_video else predictor.show_picture)(job)
        except BrokenPipeError:  # the reader of the output wants no more
            raise
        except (ImportError, OSError, ValueError, cv2.error) as error:
            print_error(error)
            good = False
        if predictor.stop.number:
            print_aside('stopped')
            break
    if arguments.json == 'coco':
        print('\n]' if predictor.entries else '[]')
    if predictor.count:
        rate = predictor.count / max(predictor.seconds, 1e-9)
        text = f'{rate:.1f} frames per second without drawing'
        text = f'Drawn into {arguments.out_dir}; {text}' if predictor.drawn else text
        print_aside(text) if arguments.json else print(escape(text))
    sys.stdout.flush()
    return good


def main() -> int:
    """Open the file once, go through the sources, and return the status."""
    arguments = parse_arguments()
    set_up_streams()
    try:
        jobs = plan(arguments.sources, arguments.out_dir, arguments.overwrite)
        model = open_file(arguments)
        if arguments.json == 'coco' and (any(job.is_video for job in jobs) or not model.has_boxes):
            raise ValueError("--json coco is for detectors and pictures, as COCO's results are")
        shared = find_shared(jobs, image_id) if arguments.json == 'coco' else ''
        if shared:
            raise ValueError(f'{shared} would have the same image_id: give them to two commands')
    except (ImportError, OSError, ValueError) as error:
        print_error(error)
        return 2
    with Stop() as stop:
        try:
            status = 0 if show_all(Predictor(model, arguments, stop), jobs) else 2
        except OSError:  # nobody reads the output any more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the last flush
            status = 128 + 13  # SIGPIPE's number
    return 128 + stop.number if stop.number else status


if __name__ == '__main__':
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print('stopped', file=sys.stderr)
        sys.exit(130)
