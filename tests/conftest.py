"""Everything runs on the CPU, seeded, and leaves no trace in the working directory."""

import logging
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `from helpers import ...` in subfolders

import mmengine.device.utils
from helpers import IS_NEW, seeded  # noqa: F401 (every test uses this fixture)
from mmengine.logging import MMLogger

mmengine.device.utils.DEVICE = 'cpu'  # MMEngine would choose Apple's GPUs

if not IS_NEW:  # exports, and what is measured with them
    collect_ignore_glob = ['test_export/*', 'test_benchmarks.py', 'test_third_party.py']


@pytest.fixture
def logged(monkeypatch):
    """What MMEngine's loggers write: levels and texts."""
    records = []
    write = lambda _, record: records.append((record.levelname, record.getMessage()))  # noqa: E731
    monkeypatch.setattr(MMLogger, 'callHandlers', write)
    return records


@pytest.fixture
def warned(monkeypatch):
    """The warnings in MMEngine's log, as texts."""
    texts, handle = [], MMLogger.callHandlers

    def collect(logger, record):
        if record.levelno >= logging.WARNING:
            texts.append(record.getMessage())
        handle(logger, record)

    monkeypatch.setattr(MMLogger, 'callHandlers', collect)
    return texts


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A folder and the address at which a server on this machine has its files."""
    folder = tmp_path / 'served'
    folder.mkdir()
    monkeypatch.setattr(SimpleHTTPRequestHandler, 'log_message', lambda *_: None)
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f'http://127.0.0.1:{server.server_port}/'
        server.shutdown()
