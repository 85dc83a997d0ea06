"""Latency of CARE beside its peers, measured in turn in one process."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mmcare.analysis.plots import check_matplotlib
from mmcare.analysis.report import write_csv
from mmcare.deploy.latency_models import STRIDES, build_four_maps, check_timm
from mmcare.deploy.latency_peers import Contender, arch_keys, choose_contenders
from mmcare.deploy.latency_plots import plot_accuracy, plot_growth
from mmcare.deploy.latency_recording import (
    Measurement,
    Recording,
    describe_machine,
    installed_versions,
    write_recording,
)
from mmcare.deploy.latency_report import growth_rows, latency_rows, markdown_report
from mmcare.deploy.latency_runners import (
    LatencyError,
    Run,
    Timer,
    check_cuda,
    check_onnxruntime,
    cpu_timer,
    cuda_timer,
    onnx_run,
    torch_run,
    torch_threads,
)
from mmcare.deploy.to_onnx import LARGEST_SIDE
from mmcare.output import check_writable, moved_into_place
from mmcare.sample_data.output import count_with_progress

BACKENDS = ('onnxruntime', 'torch')
DEVICES = ('cpu', 'cuda')
SMALLEST_SIDE = 64  # windows and strides of the peers want no less
SIZES = (224, 384, 512, 1024)
# Of each kind one: convolutions, windowed attention, attention to pooled keys.
SIZE_PEERS = ('resnet50', 'swin_tiny', 'pvtv2_b1')
BATCH = dict(cpu=1, cuda=64)
LARGEST_BATCH = 1024
FEWEST_RUNS = 3
WARM_UP = dict(cpu=1, cuda=3)


@dataclass(frozen=True)
class Settings:
    """What is measured, and how.

    Attributes:
        archs, peers: Keys of ``peers.csv``.
        shape: Height and width of the images.
        sizes: Sides of square images for the growth with the size; none: it is left out.
        size_peers: Peers that are measured at these sizes, of ``peers``; CARE always is.
        backends: Of :data:`BACKENDS`; the growth is measured with the first.
        device: One of :data:`DEVICES`.
        threads: That a network computes with, on the CPU.
        batch: Images at once.
        runs: Rounds that are measured at ``shape``.
        size_runs: The same at each other size.
        half: In float16, on a GPU.
        channels_last: PyTorch's memory layout.
    """

    archs: tuple[str, ...] = ('s0', 's1', 's2')
    peers: tuple[str, ...] = ()
    shape: tuple[int, int] = (512, 512)
    sizes: tuple[int, ...] = SIZES
    size_peers: tuple[str, ...] = SIZE_PEERS
    backends: tuple[str, ...] = BACKENDS
    device: str = 'cpu'
    threads: int = 1
    batch: int = 1
    runs: int = 9
    size_runs: int = 3
    half: bool = False
    channels_last: bool = False


def benchmark(settings: Settings, out_dir: str | os.PathLike) -> Recording:
    """Measure, and write recording, tables and pictures.

    The recording is written after each measurement: what an interruption leaves can be reported.

    Args:
        settings: What is measured, and how.
        out_dir: Where ``recording.json`` and the files of :func:`write_report` go.

    Returns:
        The recording.

    Raises:
        ValueError: If a setting is outside of what is allowed.
        ImportError: If a package is missing.
        NotADirectoryError, PermissionError: If ``out_dir`` cannot be written.
        LatencyError: If a network cannot be built, exported or run.
    """
    out_dir = Path(out_dir)
    check_settings(settings)
    check_writable(out_dir)
    contenders = choose_contenders(settings.archs, settings.peers)
    recording = Recording(
        settings=asdict(settings),
        machine=describe_machine(settings.device),
        versions=installed_versions(),
    )
    for backend in settings.backends:
        _add_measurement(recording, settings, backend, contenders, settings.shape, settings.runs)
        write_recording(recording, out_dir / 'recording.json')
    growing = [one for one in contenders if one.key in (*settings.archs, *settings.size_peers)]
    for side in sorted(set(settings.sizes)):
        shape = side, side
        if growing and shape != settings.shape:
            backend = settings.backends[0]
            _add_measurement(recording, settings, backend, growing, shape, settings.size_runs)
            write_recording(recording, out_dir / 'recording.json')
    write_report(recording, out_dir)
    return recording


def write_report(recording: Recording, out_dir: str | os.PathLike) -> str:
    """Write tables and pictures of a recording, replacing older ones.

    Args:
        recording: Of a run, or read from its file.
        out_dir: Where ``latency.csv``, ``sizes.csv``, ``latency.md``, ``accuracy_<backend>.png``
            and ``sizes.png`` go.

    Returns:
        What ``latency.md`` says.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    rows = latency_rows(recording)
    write_csv(rows, out_dir / 'latency.csv')
    for backend in dict.fromkeys(row['backend'] for row in rows):
        plot_accuracy(recording, backend, out_dir / f'accuracy_{backend}.png')
    growth = growth_rows(recording)
    if growth:
        write_csv(growth, out_dir / 'sizes.csv')
        plot_growth(recording, out_dir / 'sizes.png')
    text = markdown_report(recording)
    with moved_into_place(out_dir / 'latency.md') as temporary:
        temporary.write_text(text + '\n', encoding='utf-8')
    return text


def measure_in_turn(
    runs_by_key: Mapping[str, Run],
    rounds: int,
    timer: Timer = cpu_timer,
    warm_up: int = 1,
    label: str = 'measure',
) -> dict[str, list[float]]:
    """Measure runs A, B, C, A, B, C, ..., so that what slows the machine down meets all.

    Args:
        runs_by_key: What to run.
        rounds: How often each is measured.
        timer: Runs and returns milliseconds.
        warm_up: Rounds in front that are not counted.
        label: For the progress line.

    Returns:
        Milliseconds of each, a round each.
    """
    times: dict[str, list[float]] = {key: [] for key in runs_by_key}
    for index in count_with_progress(warm_up + rounds, label):
        for key, run in runs_by_key.items():
            milliseconds = timer(run)
            if index >= warm_up:
                times[key].append(milliseconds)
    return times


def _add_measurement(
    recording: Recording,
    settings: Settings,
    backend: str,
    contenders: Sequence[Contender],
    shape: tuple[int, int],
    rounds: int,
) -> None:
    """Build networks for one size, measure them in turn, and forget them."""
    place = f'{backend}, {shape[0]}x{shape[1]}'
    with torch_threads(settings.threads):
        runs = {}
        for index in count_with_progress(len(contenders), f'{place}: prepare networks'):
            one = contenders[index]
            runs[one.key], parameters = _prepare(one, settings, backend, shape)
            recording.parameters[one.key] = parameters
        on_gpu = settings.device == 'cuda'
        start = time.perf_counter(), time.process_time()
        times = measure_in_turn(
            runs,
            rounds,
            cuda_timer if on_gpu else cpu_timer,
            WARM_UP[settings.device],
            f'{place}: measure rounds',
        )
        wall, processor = time.perf_counter() - start[0], time.process_time() - start[1]
    share = round(processor / wall, 3) if settings.threads == 1 and not on_gpu else None
    rounded = {key: [round(value, 3) for value in values] for key, values in times.items()}
    recording.measurements.append(Measurement(backend, shape, rounded, share))


def _prepare(
    contender: Contender, settings: Settings, backend: str, shape: tuple[int, int]
) -> tuple[Run, int]:
    """A run of a network that has run once, and its number of parameters."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(settings.batch, 3, *shape, generator=generator)
    try:
        network = build_four_maps(contender, shape)
        parameters = sum(parameter.numel() for parameter in network.parameters())
        if backend == 'onnxruntime':
            run = onnx_run(network, image, settings.threads)
        else:
            run = torch_run(network, image, settings.device, settings.half, settings.channels_last)
            run()
    except (AssertionError, LatencyError, RuntimeError, TypeError, ValueError) as error:
        first_line = str(error).strip().splitlines()[:1]
        raise LatencyError(
            f'{contender.label} cannot be measured with {backend} at {shape[0]}x{shape[1]}, batch '
            f'{settings.batch}: {type(error).__name__}: {"".join(first_line)}'
        ) from error
    return run, parameters


def check_settings(settings: Settings) -> None:
    """Check settings, and that what they need is installed, before any work.

    Raises:
        ValueError: If one is outside of what is allowed.
        ImportError: If a package is missing.
    """
    contenders = choose_contenders(settings.archs, settings.peers)
    choose_contenders(arch_keys(), settings.size_peers)
    sides = [('shape', side) for side in settings.shape] + [
        ('sizes', one) for one in settings.sizes
    ]
    for name, value, lowest, highest in (
        *((name, side, SMALLEST_SIDE, LARGEST_SIDE) for name, side in sides),
        ('threads', settings.threads, 1, os.cpu_count() or 1),
        ('batch', settings.batch, 1, LARGEST_BATCH),
        ('runs', settings.runs, FEWEST_RUNS, 10_000),
        ('size-runs', settings.size_runs, FEWEST_RUNS, 10_000),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            raise ValueError(f'{name} must be of {lowest} to {highest}, got {value!r}')
    for name, side in sides:
        if side % STRIDES[-1]:
            raise ValueError(
                f'{name} must be multiples of {STRIDES[-1]}, since peers round others up or down, '
                f'got {side}'
            )
    if len(settings.shape) != 2:
        raise ValueError(f'shape must be height and width, got {settings.shape}')
    for name, values, allowed in (
        ('backend', settings.backends, BACKENDS),
        ('device', (settings.device,), DEVICES),
    ):
        if not values or not set(values) <= set(allowed) or len(set(values)) != len(values):
            raise ValueError(f'{name} must be of {", ".join(allowed)}, each once, got {values}')
    if settings.device == 'cuda':
        if 'onnxruntime' in settings.backends:
            raise ValueError('on a GPU only PyTorch is measured: give --backend torch')
        check_cuda()
    elif settings.half:
        raise ValueError('float16 is measured on a GPU only: give --device cuda')
    if settings.channels_last and settings.backends != ('torch',):
        raise ValueError("channels-last is a layout of PyTorch's: give --backend torch")
    check_timm(contenders)
    if 'onnxruntime' in settings.backends:
        check_onnxruntime()
    check_matplotlib()
