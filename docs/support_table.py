"""Write the table of docs/deploy.md: what can be exported to which format, at 512x512."""

import sys
import tempfile
import warnings
from pathlib import Path

import pandas as pd
from mmengine.utils import track_iter_progress

from mmcare.export import export_model, load_model
from mmcare.export.backends import BACKENDS

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
NAMES = dict(coreml='Core ML', onnx='ONNX', executorch='ExecuTorch', ncnn='ncnn', litert='LiteRT')


def describe(source: str, part: str, kind: str) -> str:
    """Export to one format; say what came of it, or why nothing did."""
    config = source if part == 'backbone' else CONFIGS / source
    with tempfile.TemporaryDirectory() as directory:
        try:
            model = load_model(config, part=part)
            report = export_model(model, directory, (512, 512), (kind,))[kind]
        except Exception as error:  # whatever a converter raises
            return f'not converted: {type(error).__name__}: {error}'.splitlines()[0]
    error = max(report['max_rel_error'][name] for name in ('random', 'smooth'))
    return f'{error:.0e}, {report["bytes"] / 1e6:.1f}'


def main() -> None:
    """Print the table."""
    warnings.simplefilter('ignore')
    cells = [(name, kind) for name in PARTS for kind in BACKENDS]
    table = pd.DataFrame(index=list(PARTS), columns=list(BACKENDS))
    for name, kind in track_iter_progress(cells, file=sys.stderr):
        table.loc[name, kind] = describe(*PARTS[name], kind)
    print(table.rename(columns=NAMES).to_markdown())


if __name__ == '__main__':
    main()
