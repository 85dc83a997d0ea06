"""Measure what exported files cost where PyTorch is missing, each in an environment of its own.

For each engine that opens a file, the script makes an environment with NumPy, OpenCV, the engine
and this package. A new process in this environment opens the file and predicts on a drawn picture
of 480 x 640. The table lists the megabytes installed, the seconds and resident megabytes until the
first result, the median milliseconds for a frame and for its parts, and the megabytes that 500
frames add. On a device, ``python benchmarks/device.py --here FILE`` measures in the environment
that runs it.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

START = time.perf_counter()
FRAMES = 500
WARM_UP = 20  # frames in which engines allocate memory, which they then keep
# Packages by engine; ExecuTorch is left out, since it needs PyTorch.
PACKAGES = dict(
    onnxruntime='onnxruntime', openvino='openvino', litert='ai-edge-litert', ncnn='ncnn'
)
ROOT = Path(__file__).parents[1]


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('files', nargs='+', metavar='FILE', help='whole models')
    parser.add_argument('--threads', type=int, default=1, help='default: %(default)s')
    parser.add_argument('--out', type=Path, metavar='JSON', help='also write the figures here')
    parser.add_argument('--here', action='store_true', help='measure here, and print JSON')
    parser.add_argument('--engine', help="with --here; default: the format's own")
    return parser.parse_args()


def measure(file: str, engine: str | None, threads: int) -> dict[str, float]:
    """Measure a file in this process, which has imported nothing yet."""
    import numpy as np

    from mmcare_runtime import open_exported
    from mmcare_runtime.prepare import prepare
    from mmcare_runtime.results import read_results

    model = open_exported(file, threads, engine=engine)
    description = model.description
    coarse = np.random.default_rng(0).integers(0, 256, (15, 20, 3), np.uint8)
    frame = coarse.repeat(32, 0).repeat(32, 1)
    model.predict(frame, score=0.3)
    figures = dict(first_s=time.perf_counter() - START, first_MB=resident_megabytes())
    times: dict[str, list[float]] = dict(frame=[], prepare=[], run=[], read=[])
    for number in range(WARM_UP + FRAMES):
        if number == WARM_UP:
            before = resident_megabytes()
        begin = time.perf_counter()
        image, place = prepare(frame, description['inputs'][0], description['shape'])
        prepared = time.perf_counter()
        outputs = model.run(image)
        computed = time.perf_counter()
        read_results(description, outputs, place, frame.shape[:2], 0.3)
        end = time.perf_counter()
        for name, span in dict(
            frame=end - begin,
            prepare=prepared - begin,
            run=computed - prepared,
            read=end - computed,
        ).items():
            times[name].append(1e3 * span)
    figures |= {f'{name}_ms': median(values[WARM_UP:]) for name, values in times.items()}
    return figures | dict(added_MB=resident_megabytes() - before)


def resident_megabytes() -> float:
    """Return the resident memory of this process, on Linux."""
    pages = int(Path('/proc/self/statm').read_text().split()[1])
    return pages * os.sysconf('SC_PAGE_SIZE') / 1e6


def measure_fresh(file: str, engine: str, threads: int, wheel: Path) -> dict[str, Any]:
    """Measure a file in a new environment."""
    with TemporaryDirectory() as folder:
        python = f'{folder}/bin/python'
        subprocess.run([sys.executable, '-m', 'venv', '--without-pip', folder], check=True)
        pip = [sys.executable, '-m', 'pip', '--python', python, 'install', '--quiet']
        subprocess.run([*pip, f'{wheel}[runtime]', PACKAGES[engine]], check=True)
        installed = sum(x.stat().st_size for x in Path(folder, 'lib').rglob('*') if x.is_file())
        command = [python, __file__, '--here', '--engine', engine, f'--threads={threads}', file]
        environment = {key: value for key, value in os.environ.items() if key != 'PYTHONPATH'}
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout
    return dict(file=Path(file).name, engine=engine, installed_MB=installed / 1e6) | json.loads(
        text
    )


def main() -> None:
    """Measure here, or in environments, one after the other."""
    arguments = parse_args()
    if arguments.here:
        (file,) = arguments.files
        print(json.dumps(measure(file, arguments.engine, arguments.threads)))
        return
    import pandas as pd
    from recording import describe_machine, save

    from mmcare_runtime.engines import ENGINES

    rows = []
    with TemporaryDirectory() as folder:
        build = [sys.executable, '-m', 'pip', 'wheel', '--quiet', '--no-deps']
        subprocess.run([*build, '--no-build-isolation', '-w', folder, str(ROOT)], check=True)
        (wheel,) = Path(folder).glob('*.whl')
        for file in map(os.path.abspath, arguments.files):
            for engine in sorted(PACKAGES.keys() & {*ENGINES[Path(file).suffix]}):
                rows.append(measure_fresh(file, engine, arguments.threads, wheel))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(pd.DataFrame(rows).round(1).to_markdown(index=False))
    if arguments.out:
        record = dict(versions=describe_machine('numpy'), threads=arguments.threads, rows=rows)
        save(arguments.out, json.dumps(record, indent=2) + '\n')


if __name__ == '__main__':
    main()
