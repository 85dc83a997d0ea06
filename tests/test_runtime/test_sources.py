"""Videos, cameras and streams, where OpenCV says little; most of them are stand-ins."""

import os
import signal
from pathlib import Path

import cv2
import numpy as np
import pytest

from mmcare_runtime import video

FRAMES = [np.full((48, 64, 3), 8 * index, np.uint8) for index in range(30)]
SIGNALS = [signal.SIGINT, signal.SIGTERM, getattr(signal, 'SIGHUP', signal.SIGTERM)]
START = cv2.VideoCapture


def write_video(path, number=30):
    writer = cv2.VideoWriter(path, cv2.VideoWriter_fourcc(*'mp4v'), 12.0, (64, 48))
    for frame in FRAMES[:number]:
        writer.write(frame)
    writer.release()


def count_frames(path):
    return START(path).get(cv2.CAP_PROP_FRAME_COUNT)


class Camera:
    """Gives frames; None in place of a frame: it fails until it is opened again."""

    frames, count = FRAMES, 0
    sources = ()

    def __init__(self, source):
        self.rest, self.broken = iter(self.frames), False
        type(self).sources = [*self.sources, source]

    def get(self, key):
        return self.count if key == cv2.CAP_PROP_FRAME_COUNT else 12.0

    def read(self):
        frame = None if self.broken else next(self.rest, None)
        self.broken = frame is None
        return not self.broken, frame() if callable(frame) else frame

    def open(self, source):
        type(self).sources = [*self.sources, source]
        self.broken = False

    def release(self):
        pass


@pytest.fixture
def camera(monkeypatch):
    """A stand-in for all sources; what was written is read by OpenCV."""

    class Mine(Camera):
        pass

    def start(source):
        return (
            START(source) if str(source).endswith('.mp4') and 'tmp' in str(source) else Mine(source)
        )

    monkeypatch.setattr(cv2, 'VideoCapture', start)
    monkeypatch.setattr(video, 'PAUSE', 0)
    return Mine


def test_video(run):
    write_video('a.mp4')
    status, out, _ = run('boxes', 'a.mp4', 'a.png', '--score', '0')
    assert status == 0 and out.count('a.mp4, frame ') == 30 and 'frames per second' in out
    assert count_frames('predictions/a.mp4') == 30
    assert START('predictions/a.mp4').get(cv2.CAP_PROP_FPS) == 12


def test_names_that_ffmpeg_takes_for_protocols(run):
    write_video('a.mp4', 3)
    os.rename('a.mp4', '12:30.mp4')
    assert run('boxes', '12:30.mp4')[0] == 0 and count_frames('predictions/12:30.mp4') == 3


@pytest.mark.parametrize('rate', [119.9213, 239.7604, 65.5359, 29.97003, 1000.0])
def test_rates(rate, tmp_path):
    """Those of slow motion are uneven, which MPEG-4 does not write."""
    file = video.VideoFile(tmp_path / 'a.mp4', rate)
    for frame in FRAMES:
        file.write(frame)
    file.close()
    assert START(str(tmp_path / 'a.mp4')).get(cv2.CAP_PROP_FPS) == pytest.approx(rate, 1e-3)


def test_video_without_frames(run, tmp_path):
    (tmp_path / 'a.mp4').write_text('text')
    status, _, err = run('boxes', 'a.mp4')
    assert status == 2 and 'a.mp4 has no frames' in err
    assert not [*(tmp_path / 'predictions').iterdir()]


def test_streams_reach_opencv_as_they_are(run, camera):
    """Passwords are neither printed nor parts of names."""
    camera.frames = FRAMES[:3]
    address = 'https://user:secret@host:81/live/a?key=secret'
    status, out, err = run('boxes', address)
    assert status == 0 and camera.sources == [address] and 'secret' not in out + err
    assert 'https://host/live/a, frame 2: ' in out and Path('predictions/host_live_a.mp4').exists()


@pytest.mark.parametrize('source', ['0', 'rtsp://host/live'])
def test_cameras_that_fail_are_opened_again(source, run, camera):
    camera.frames = [*FRAMES[:5], None, None, *FRAMES[5:8], None, None, None, None, *FRAMES]
    status, out, err = run('boxes', source)
    assert out.count('frame ') == 8 and status == 2 and len(camera.sources) == 6
    assert 'failed after 5 frames, and was opened again' in err
    assert 'gives no more frames, after 8' in err
    (path,) = Path('predictions').iterdir()
    assert count_frames(str(path)) == 8


def test_videos_that_end_early(run, camera):
    """A file that states an estimate may have a frame less."""
    camera.count = 31
    assert run('boxes', 'b.avi')[0] == 0
    camera.count = 60
    status, _, err = run('boxes', 'b.avi', '--overwrite')
    assert status == 2 and 'error: b.avi ends after 30 of 60 frames' in err
    assert count_frames('predictions/b.mp4') == 30


@pytest.mark.parametrize('sizes', [[(48, 64), (96, 128)], [(48, 64), (30, 90)], [(47, 63)]])
def test_sizes_of_frames(sizes, run, camera):
    """VideoWriter drops frames of another size, and mp4v the last row and column of odd sizes."""
    draw = np.random.default_rng(0)
    camera.frames = [draw.integers(0, 99, (*size, 3), np.uint8) for size in sizes * 3]
    assert run('boxes', 'b.avi', '--score', '1')[0] == 0
    frames = [frame for _, frame in iter(START('predictions/b.mp4').read, (False, None))]
    assert {frame.shape for frame in frames} == {(48, 64, 3)}
    assert len(frames) == 3 * len(sizes) and min(frame.mean() for frame in frames) > 20


@pytest.mark.parametrize('fault', ['disk', 'encoder'])
def test_videos_that_cannot_be_written(fault, run, camera, monkeypatch, tmp_path):
    """VideoWriter reports neither a full disk nor a folder where it may not write."""
    start = cv2.VideoWriter

    class Writer:
        def __init__(self, path, *options):
            self.path, self.writer = path, start(path, *options)

        def isOpened(self):
            return fault != 'encoder'

        def write(self, frame):
            self.writer.write(frame)

        def release(self):
            self.writer.release()
            os.truncate(self.path, os.path.getsize(self.path) // 2)

    monkeypatch.setattr(cv2, 'VideoWriter', Writer)
    status, out, err = run('boxes', 'b.avi')
    words = dict(disk='holds 0 of 30 frames: is the disk full', encoder='cannot be written')
    assert status == 2 and words[fault] in err and 'Drawn' not in out
    assert not [*(tmp_path / 'predictions').iterdir()]


@pytest.mark.parametrize('number', SIGNALS)
def test_signals_complete_a_video(number, run, camera):
    """No further source is begun, and the status says which signal it was."""

    def frame():
        os.kill(os.getpid(), number)
        return FRAMES[3]

    camera.frames, usual = [*FRAMES[:3], frame, *FRAMES], signal.getsignal(number)
    signal.signal(number, signal.default_int_handler)
    try:
        status, out, err = run('boxes', 'b.avi', 'a.png')
    finally:
        signal.signal(number, usual)
    assert status == 128 + number and err.startswith('stopped') and 'a.png' not in out
    assert [path.name for path in Path('predictions').iterdir()] == ['b.mp4']
    assert count_frames('predictions/b.mp4') == 4


def test_signals_that_are_ignored(run, camera):
    """As under nohup."""
    number = SIGNALS[-1]
    camera.frames = [lambda: os.kill(os.getpid(), number) or FRAMES[0], *FRAMES]
    usual = signal.signal(number, signal.SIG_IGN)
    try:
        assert run('boxes', 'b.avi')[0] == 0
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, usual)
    assert count_frames('predictions/b.mp4') == 31


def test_two_processes_and_one_name(run, camera):
    """Neither's temporary file is the other's, and no result is lost."""

    def frame():
        Path('predictions/b.mp4').write_text('of another process')
        return FRAMES[0]

    camera.frames = [frame, *FRAMES]
    status, _, err = run('boxes', 'b.avi')
    assert status == 0 and 'meanwhile: drawn into predictions/b_2.mp4' in err
    assert Path('predictions/b.mp4').read_text() == 'of another process'
    assert count_frames('predictions/b_2.mp4') == 31
    assert len([*Path('predictions').iterdir()]) == 2
