"""What the commands ``mmcare_runtime`` and ``mmcare_runtime.evaluate`` share."""

from __future__ import annotations

import argparse

from mmcare_runtime.engines import ENGINES
from mmcare_runtime.model import Model, open_exported
from mmcare_runtime.tiles import TILES


def make_parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options of :func:`open_file`, and ``--tile``."""
    parser = argparse.ArgumentParser(
        prog=f'python -m {name}',
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('file', metavar='FILE', help=f'{", ".join(ENGINES)}')
    parser.add_argument(
        '--tile',
        choices=TILES,
        help='slide: on windows of the size that the file takes; default: as the config tests',
    )
    parser.add_argument('--threads', type=int, default=1, help='default: %(default)s')
    parser.add_argument('--engine', help='openvino: for .onnx')
    parser.add_argument('--bfloat16', action='store_true', help='compute in bfloat16 in OpenVINO')
    parser.add_argument('--providers', nargs='+', metavar='NAME', help='providers of ONNX Runtime')
    parser.add_argument(
        '--no-verify', action='store_true', help='open files that other tools have rewritten, too'
    )
    return parser


def open_file(arguments: argparse.Namespace) -> Model:
    """Open the file that a command names; raise a ValueError if it is not of a whole model."""
    model = open_exported(
        arguments.file,
        arguments.threads,
        arguments.providers,
        arguments.engine,
        bfloat16=arguments.bfloat16,
        verify=not arguments.no_verify,
    )
    if not model.description:
        raise ValueError(
            f'{arguments.file} does not say what it is: another program has written it, or removed '
            'its description'
        )
    if model.description.get('part') != 'model':
        raise ValueError(f'{arguments.file} is not of a whole model: export --part model')
    return model
