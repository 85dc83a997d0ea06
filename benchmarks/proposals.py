"""Measure accuracy and time of a two-stage detector for several numbers of proposals and boxes.

For each number, the model is exported to each format with decoded outputs. tools/eval_exported.py
then tests and times the files next to PyTorch, which keeps as many proposals and boxes. The results
are proposals.json (every metric and time, and the versions) and a table on the terminal.
"""

import argparse
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
from recording import describe_machine, save

from mmcare.export import export_model, load_model
from mmcare.export.tasks.one_stage_detector import MAX_DETECTIONS
from mmcare.export.tasks.two_stage_detector import PROPOSALS

EVALUATE = Path(__file__).parents[1] / 'tools' / 'eval_exported.py'


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', metavar='CONFIG')
    parser.add_argument('checkpoint', metavar='CHECKPOINT')
    parser.add_argument('--format', nargs='+', default=['onnx', 'litert'], metavar='NAME')
    parser.add_argument('--shape', type=int, nargs=2, metavar=('H', 'W'))
    parser.add_argument('--proposals', type=int, nargs='*', default=[20, 50, 100, 200, 1000])
    parser.add_argument('--max-detections', type=int, nargs='*', default=[10, 50, 100])
    parser.add_argument('--out-dir', type=Path, default=Path('work_dirs/proposals'), metavar='DIR')
    return parser.parse_args()


def measure(
    arguments: argparse.Namespace, proposals: int, max_detections: int
) -> list[dict[str, Any]]:
    """Export with these numbers, test, and return a row for PyTorch and each file."""
    folder = arguments.out_dir / f'{proposals}_{max_detections}'
    table = folder / 'table.json'
    if not table.exists():  # an earlier run with the same arguments may have left it
        model = load_model(arguments.config, arguments.checkpoint, part='model')
        options: dict[str, Any] = dict(proposals=proposals, max_detections=max_detections)
        options |= dict(formats=arguments.format, outputs='decoded', shape=arguments.shape)
        reports = export_model(model, folder, **options)
        files = [str(folder / report['file']) for report in reports.values()]
        kept = f'model.test_cfg.rpn.max_per_img={proposals}'
        kept_boxes = f'model.test_cfg.rcnn.max_per_img={max_detections}'
        command = [sys.executable, str(EVALUATE), arguments.config, *files]
        command += ['--checkpoint', arguments.checkpoint, '--out', str(table)]
        command += ['--work-dir', str(folder / 'logs'), '--cfg-options', kept, kept_boxes]
        subprocess.run(command, check=True, stdout=sys.stderr)
    numbers = dict(proposals=proposals, max_detections=max_detections)
    rows = json.loads(table.read_text(encoding='utf-8'))
    return [dict(file=Path(name).suffix or name, **numbers, **row) for name, row in rows.items()]


def main() -> None:
    """Measure each number of proposals, then each number of boxes."""
    arguments = parse_args()
    settings = {k: str(vars(arguments)[k]) for k in ('config', 'checkpoint', 'format', 'shape')}
    kept_settings = arguments.out_dir / 'settings.json'
    known = json.loads(kept_settings.read_text()) if kept_settings.exists() else None
    if known != settings and any(arguments.out_dir.glob('*/table.json')):
        sys.exit(f'{arguments.out_dir} has results for other arguments: choose another --out-dir')
    save(kept_settings, json.dumps(settings))
    pairs = [(number, MAX_DETECTIONS) for number in arguments.proposals]
    pairs += [(PROPOSALS, number) for number in arguments.max_detections]
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        rows = [row for pair in dict.fromkeys(pairs) for row in measure(arguments, *pair)]
    record = dict(
        config=arguments.config,
        versions=describe_machine('mmdet', 'onnxruntime', 'ai-edge-litert'),
        rows=rows,
    )
    save(arguments.out_dir / 'proposals.json', json.dumps(record, indent=2) + '\n')
    kept = ['file', 'proposals', 'max_detections', 'MB', 'ms', 'coco/bbox_mAP', 'coco/segm_mAP']
    print(pd.DataFrame(rows)[kept].round(3).to_markdown(index=False))


if __name__ == '__main__':
    main()
