"""Train, test and draw on sample data that mmcare makes itself; no download, two CPU cores.

Exit status: 0 if the goal is reached, 1 if not, 2 for bad input.
"""

import argparse
import sys
from pathlib import Path

from mmcare.demo import detection, segmentation

KINDS = {'coco': detection, 'ade20k': segmentation}
WORK_DIRS = {'coco': Path('work_dirs/demo'), 'ade20k': Path('work_dirs/demo_seg')}


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        'kind',
        choices=KINDS,
        help="coco: Mask R-CNN CARE-S0 on scenes in COCO's layout; "
        "ade20k: Semantic FPN CARE-S0 on scenes in ADE20K's layout",
    )
    parser.add_argument(
        '--work-dir',
        type=Path,
        help='where everything goes; default: '
        + ', '.join(f'{work_dir} for {kind}' for kind, work_dir in WORK_DIRS.items()),
    )
    return parser.parse_args()


def main() -> None:
    """Run one demo and say what was reached; exit with 1 if the goal was missed."""
    arguments = parse_args()
    work_dir = arguments.work_dir or WORK_DIRS[arguments.kind]
    demo = KINDS[arguments.kind]
    try:
        results = demo.run(work_dir)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        print(f'error: {error}', file=sys.stderr)
        sys.exit(2)
    metric, goal = results['goal']['metric'], results['goal']['above']
    print(f'{"":24}untrained   trained')
    for name, label in demo.METRICS.items():
        print(f'{label:24}{results["untrained"][name]:9.3f} {results["trained"][name]:9.3f}')
    reached = results['trained'][metric]
    print(
        f'{demo.METRICS[metric]} on held-out scenes: {reached:.3f} after '
        f'{results["training_minutes"]} minutes of training (goal: above {goal}); '
        f'see {work_dir}/curves.png and {work_dir}/predictions.png'
    )
    sys.exit(0 if reached > goal else 1)


if __name__ == '__main__':
    main()
