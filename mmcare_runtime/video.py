"""Read frames of videos, cameras and streams, and write videos; OpenCV reports few faults."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Callable, Iterator

import cv2
import numpy as np

from mmcare_runtime.prepare import resize
from mmcare_runtime.text import print_aside

FRAMES_PER_SECOND = 30.0  # of cameras and videos that do not say how many
LIVE = ('rtmp', 'rtsp', 'rtsps', 'srt', 'udp')  # schemes of streams that do not end by themselves
ATTEMPTS, PAUSE = 3, 1.0  # to open a camera or a stream again, and seconds before each


class Frames:
    """The frames of a video, a camera or a stream.

    Args:
        source: A file, the number of a camera, or an address, which OpenCV gets as it is.
        name: Of the source in messages.
        is_stopped: Tells whether to wait for a camera no longer.
    """

    def __init__(
        self, source: str | int, name: str, is_stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self.source, self.name, self.is_stopped = source, name, is_stopped
        self.is_live = isinstance(source, int) or source.partition('://')[0].lower() in LIVE
        self.capture: Any = cv2.VideoCapture(source)
        rate = self.capture.get(cv2.CAP_PROP_FPS)
        self.rate = rate if 0 < rate <= 1000 else FRAMES_PER_SECOND

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield frames, in BGR; open a camera again if it fails.

        Raises:
            ValueError: If there are no frames, if a camera gives no more, or if a video ends early.
        """
        number, total = 0, self.capture.get(cv2.CAP_PROP_FRAME_COUNT)
        try:
            while not self.is_stopped():
                read, frame = self.capture.read()
                if not read and self.is_live and number:
                    read, frame = self._open_again(number)
                if not read:
                    break
                number += 1
                yield frame
        finally:
            self.capture.release()
        if self.is_stopped():
            return
        if not number:
            raise ValueError(f'{self.name} has no frames')
        if self.is_live:
            raise ValueError(f'{self.name} gives no more frames, after {number}')
        if total - number > max(2, total / 100):  # some files state an estimate
            raise ValueError(f'{self.name} ends after {number} of {total:.0f} frames')

    def _open_again(self, number: int) -> tuple[bool, Any]:
        for _ in range(ATTEMPTS):
            time.sleep(PAUSE)
            if self.is_stopped():
                break
            self.capture.release()
            self.capture.open(self.source)
            read, frame = self.capture.read()
            if read:
                text = f'{self.name} failed after {number} frames, and was opened again'
                print_aside(f'warning: {text}')
                return read, frame
        return False, None


class VideoFile:
    """An MP4 file that is written frame by frame, and checked when it is complete.

    The first frame gives the size, padded to even sides; frames of another size are fitted into it.
    """

    def __init__(self, path: Path, rate: float) -> None:
        # Above 65,535 units in a second, which is 65.535 here, MPEG-4 has no thousandths.
        self.path, self.rate = path, rate if rate < 65 else round(rate, 1)
        self.writer: Any = None
        self.shape, self.count = (0, 0), 0

    def write(self, frame: np.ndarray) -> None:
        """Add a frame (H, W, 3) of uint8; raise an OSError if the file cannot be opened."""
        height, width = frame.shape[:2]
        if self.writer is None:
            self.shape = height + height % 2, width + width % 2  # mp4v cuts off odd rows
            code = cv2.VideoWriter_fourcc(*'mp4v')  # type: ignore[attr-defined]
            self.writer = cv2.VideoWriter(str(self.path), code, self.rate, self.shape[::-1])
            if not self.writer.isOpened():
                raise OSError(
                    'the video cannot be written: the disk is full, or OpenCV does not write MP4'
                )
        if not all(0 <= side - old <= 1 for side, old in zip(self.shape, (height, width))):
            frame = resize(frame, {}, self.shape)
            height, width = frame.shape[:2]
        down, across = self.shape[0] - height, self.shape[1] - width
        edge = cv2.BORDER_REPLICATE if max(down, across) <= 1 else cv2.BORDER_CONSTANT
        self.writer.write(cv2.copyMakeBorder(frame, 0, down, 0, across, edge))
        self.count += 1

    def close(self) -> None:
        """Complete the file; raise an OSError if it does not hold all frames."""
        if self.writer is None:
            return
        self.writer.release()
        written: Any = cv2.VideoCapture(str(self.path))
        number = written.get(cv2.CAP_PROP_FRAME_COUNT) if written.isOpened() else 0
        written.release()
        if number != self.count:
            raise OSError(f'the video holds {number:.0f} of {self.count} frames: is the disk full?')
