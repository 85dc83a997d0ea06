"""What a run of the benchmark leaves, as JSON, for tables and pictures to be made from."""

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mmcare.deploy.latency_peers import read_contenders
from mmcare.output import moved_into_place
from mmcare.version import __version__

FORMAT = 1
VERSIONED = ('torch', 'onnxruntime', 'timm')
# Settings that the report reads.
NEEDED = {'shape', 'backends', 'device', 'threads', 'batch', 'runs', 'half', 'channels_last'}


@dataclass
class Measurement:
    """Times of networks that ran in turn.

    Attributes:
        backend: ``'onnxruntime'`` or ``'torch'``.
        shape: Height and width of the images.
        milliseconds: Times by the key of the network, a round each.
        processor_share: Share of one core that the process had meanwhile; below 1 something else
            was running. None with several threads or a GPU, where it says nothing.
    """

    backend: str
    shape: tuple[int, int]
    milliseconds: dict[str, list[float]]
    processor_share: float | None = None


@dataclass
class Recording:
    """A run of the benchmark.

    Attributes:
        settings: What it was started with.
        machine: Class of the machine: nothing that names it.
        versions: Of the packages that computed.
        parameters: Of each backbone, folded, by its key.
        measurements: In the order they were made.
    """

    settings: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    parameters: dict[str, int] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)


def describe_machine(device: str) -> dict[str, Any]:
    """Describe the class of this machine, and of its GPU if that is measured."""
    machine: dict[str, Any] = dict(
        cores=os.cpu_count(),
        architecture=platform.machine(),
        vector_instructions=torch.backends.cpu.get_cpu_capability(),
        system=platform.system(),
    )
    if device == 'cuda':
        machine['gpu'] = torch.cuda.get_device_name()
    return machine


def installed_versions(names: Sequence[str] = VERSIONED) -> dict[str, str]:
    """Versions of mmcare, of Python, and of those packages that are installed."""
    versions = dict(mmcare=__version__, python=platform.python_version())
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def write_recording(recording: Recording, path: Path) -> None:
    """Write a recording, replacing an older one in one step."""
    text = json.dumps(dict(format=FORMAT, **asdict(recording)), indent=1)
    # Times of a network on one line.
    text = re.sub(r'\[[^\[\]{}]*\]', lambda match: f'[{" ".join(match[0][1:-1].split())}]', text)
    with moved_into_place(path) as temporary:
        temporary.write_text(text + '\n', encoding='utf-8')


def read_recording(path: str | os.PathLike) -> Recording:
    """Read what :func:`write_recording` wrote.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no recording, or has networks that are not known.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f'{path} is not a file: give the recording of a run')
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
        if content.pop('format') != FORMAT:
            raise ValueError('of another version')
        measurements = [
            Measurement(**{**one, 'shape': tuple(one['shape'])})
            for one in content.pop('measurements')
        ]
        recording = Recording(measurements=measurements, **content)
        _check(recording)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f'{path} is not a recording of a run: {error!r}') from error
    return recording


def _check(recording: Recording) -> None:
    """Check what tables and pictures are made from."""
    missing = NEEDED - recording.settings.keys()
    if missing:
        raise ValueError(f'the setting {min(missing)!r} is missing')
    if tuple(recording.settings['shape']) not in {one.shape for one in recording.measurements}:
        raise ValueError(f'nothing was measured at {recording.settings["shape"]}')
    for measurement in recording.measurements:
        times = measurement.milliseconds
        unknown = times.keys() - (read_contenders().keys() & recording.parameters.keys())
        if unknown:
            raise ValueError(f'{min(unknown)!r} is not known')
        if len({len(values) for values in times.values()}) != 1:
            raise ValueError('networks have different numbers of rounds')
        if not all(value > 0 for values in times.values() for value in values):
            raise ValueError('a time is not positive')
