"""Export networks to all formats at 512x512, and write deviations and sizes as a CSV file."""

import argparse
import sys
import tempfile
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
from mmengine.utils import track_iter_progress

from mmcare.export import export_model, load_model
from mmcare.export.backends import BACKENDS
from mmcare.files import check_writable, moved_into_place

CONFIGS = Path(__file__).resolve().parents[1] / 'configs'
PARTS = {
    'backbone': ('s0', 'backbone'),
    'Mask R-CNN, backbone and neck': ('mask_rcnn/care_s0_coco.py', 'neck'),
    'RetinaNet': ('retinanet/care_s0_retinanet_coco.py', 'model'),
    'RTMDet': ('rtmdet/care_s0_rtmdet_coco.py', 'model'),
    'Semantic FPN': ('fpn/care_s0_ade20k.py', 'model'),
    'UperNet': ('upernet/care_s0_upernet_ade20k.py', 'model'),
    'classifier': ('imagenet/care_s0_in1k.py', 'model'),
}


def measure(source: str, part: str, kind: str) -> dict[str, Any]:
    """Export to one format; return deviation and MB, or why nothing was written."""
    config = source if part == 'backbone' else CONFIGS / source
    with tempfile.TemporaryDirectory() as directory:
        try:
            model = load_model(config, part=part)
            report = export_model(model, directory, (512, 512), (kind,))[kind]
        except Exception as error:  # whatever a converter raises
            return dict(failure=f'{type(error).__name__}: {error}'.splitlines()[0])
    errors = report['max_rel_error']
    return dict(deviation=max(errors['random'], errors['smooth']), MB=report['bytes'] / 1e6)


def main() -> None:
    """Write the CSV file after each export, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', type=Path, default='work_dirs/support.csv', metavar='CSV')
    out = parser.parse_args().out
    check_writable(out.parent)
    warnings.simplefilter('ignore')
    rows = []
    for name, kind in track_iter_progress(list(product(PARTS, BACKENDS)), file=sys.stderr):
        rows.append(dict(network=name, format=kind, **measure(*PARTS[name], kind)))
        table = pd.DataFrame(rows)
        with moved_into_place(out) as path:
            table.to_csv(path, index=False)
    print(table.to_markdown(index=False, floatfmt=('', '', '.0e', '.1f')))


if __name__ == '__main__':
    main()
