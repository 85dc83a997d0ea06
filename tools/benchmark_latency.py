"""Measure CARE's latency beside its peers', as backbones with four maps, in turn in one process.

Every network is folded where it can be and has random weights; nothing is downloaded. Written are
recording.json (all times), latency.csv, latency.md, accuracy_<backend>.png (published accuracy over
latency, with the Pareto line), and sizes.csv and sizes.png (growth with the size of the images).
"""

import argparse
import sys
from pathlib import Path

from mmcare.analysis.plots import check_matplotlib
from mmcare.deploy.latency import (
    BACKENDS,
    BATCH,
    DEVICES,
    SIZE_PEERS,
    SIZES,
    Settings,
    benchmark,
    write_report,
)
from mmcare.deploy.latency_peers import arch_keys, peer_keys
from mmcare.deploy.latency_recording import read_recording
from mmcare.deploy.latency_report import markdown_report
from mmcare.deploy.latency_runners import LatencyError
from mmcare.output import check_writable


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        '--archs',
        nargs='*',
        default=arch_keys(),
        metavar='ARCH',
        help=f'CARE networks, of {", ".join(arch_keys())}; default: all',
    )
    parser.add_argument(
        '--peers',
        nargs='*',
        default=peer_keys(),
        metavar='PEER',
        help='peers, from timm (the extra `bench`), none if no name follows; default: all of '
        + ', '.join(peer_keys()),
    )
    parser.add_argument(
        '--shape',
        type=int,
        nargs=2,
        default=(512, 512),
        metavar=('H', 'W'),
        help='height and width of the images; default: 512 512',
    )
    parser.add_argument(
        '--sizes',
        type=int,
        nargs='*',
        default=SIZES,
        metavar='SIDE',
        help='sides of the square images for the growth with the size, none to leave that out; '
        f'default: {" ".join(map(str, SIZES))}',
    )
    parser.add_argument(
        '--size-peers',
        nargs='*',
        default=SIZE_PEERS,
        metavar='PEER',
        help='which of the peers are measured at all sizes, besides the archs; default: '
        + ' '.join(SIZE_PEERS),
    )
    parser.add_argument(
        '--backend',
        nargs='+',
        metavar='BACKEND',
        help=f'of {", ".join(BACKENDS)}; the growth is measured with the first; default: both, '
        'on a GPU torch',
    )
    parser.add_argument(
        '--device',
        choices=DEVICES,
        default='cpu',
        help='default: %(default)s; cuda is timed with events',
    )
    parser.add_argument('--threads', type=int, default=1, help='on the CPU; default: 1')
    parser.add_argument(
        '--batch',
        type=int,
        help=f'images at once; default: {BATCH["cpu"]}, on a GPU {BATCH["cuda"]}',
    )
    parser.add_argument('--float16', action='store_true', help='on a GPU: weights and images')
    parser.add_argument(
        '--channels-last', action='store_true', help="PyTorch's memory layout; with --backend torch"
    )
    parser.add_argument(
        '--runs', type=int, default=9, help='rounds measured at --shape; default: %(default)s'
    )
    parser.add_argument(
        '--size-runs', type=int, default=3, help='the same at each other size; default: %(default)s'
    )
    parser.add_argument(
        '--out-dir',
        type=Path,
        default=Path('work_dirs/latency'),
        metavar='DIR',
        help='where the files go, replacing older ones; default: %(default)s',
    )
    parser.add_argument(
        '--from-recording',
        type=Path,
        metavar='JSON',
        help='measure nothing: write tables and pictures of this recording.json',
    )
    return parser.parse_args()


def main() -> None:
    """Measure or read a recording; write and print the tables."""
    arguments = parse_args()
    try:
        if arguments.from_recording is None:
            recording = benchmark(read_settings(arguments), arguments.out_dir)
        else:
            check_matplotlib()
            recording = read_recording(arguments.from_recording)
            check_writable(arguments.out_dir)
            write_report(recording, arguments.out_dir)
    except (ImportError, LatencyError, OSError, ValueError) as error:
        print(f'error: {error}', file=sys.stderr)
        sys.exit(2)
    print(markdown_report(recording))
    print(f'\nWritten to {arguments.out_dir}')


def read_settings(arguments: argparse.Namespace) -> Settings:
    """Settings of the command line, with the defaults of the device."""
    on_gpu = arguments.device == 'cuda'
    return Settings(
        archs=tuple(arguments.archs),
        peers=tuple(arguments.peers),
        shape=tuple(arguments.shape),
        sizes=tuple(arguments.sizes),
        size_peers=tuple(arguments.size_peers),
        backends=tuple(arguments.backend or (BACKENDS[1:] if on_gpu else BACKENDS)),
        device=arguments.device,
        threads=arguments.threads,
        batch=BATCH[arguments.device] if arguments.batch is None else arguments.batch,
        runs=arguments.runs,
        size_runs=arguments.size_runs,
        half=arguments.float16,
        channels_last=arguments.channels_last,
    )


if __name__ == '__main__':
    main()
