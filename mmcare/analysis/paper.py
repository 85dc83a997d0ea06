"""Compare costs in the paper's Tables 2 to 5 with those counted for the shipped configs."""

import pandas as pd

from mmcare.analysis.counting import build_network, count_complexity
from mmcare.shipped import shipped_config

# Table, shipped config, side of the image; the paper's GMACs and millions of parameters as printed.
PAPER_ROWS = (
    (2, 'imagenet/care_s0_in1k', 512, '3.8', ''),
    (2, 'imagenet/care_s1_in1k', 512, '5.4', ''),
    (2, 'imagenet/care_s2_in1k', 512, '10.1', ''),
    (3, 'ablation/care_s2_symmetric_in1k', 224, '2.0', '19.7'),
    (3, 'ablation/care_s2_stacked_in1k', 224, '2.1', '20.9'),
    (3, 'ablation/care_s2_global_only_in1k', 224, '2.0', '20.7'),
    (3, 'imagenet/care_s2_in1k', 224, '1.9', '19.5'),
    (4, 'ablation/care_s0_no_inter1_in1k', 224, '0.5', '5.5'),
    (4, 'ablation/care_s0_no_inter2_in1k', 224, '0.3', '2.7'),
    (4, 'ablation/care_s0_no_memory_in1k', 224, '0.5', '5.4'),
    (4, 'imagenet/care_s0_in1k', 224, '0.7', '7.3'),
    (5, 'imagenet/care_s0_in1k', 224, '0.72', '7.34'),
    (5, 'ablation/care_s0_no_early_conv_in1k', 224, '0.72', '7.34'),
    (5, 'ablation/care_s0_no_multi_scale_in1k', 224, '0.71', '7.32'),
    (5, 'imagenet/care_s1_in1k', 224, '1.03', '9.60'),
    (5, 'ablation/care_s1_no_early_conv_in1k', 224, '1.03', '9.60'),
    (5, 'ablation/care_s1_no_multi_scale_in1k', 224, '1.02', '9.57'),
    (5, 'imagenet/care_s2_in1k', 224, '1.93', '19.48'),
    (5, 'ablation/care_s2_no_early_conv_in1k', 224, '1.93', '19.48'),
    (5, 'ablation/care_s2_no_multi_scale_in1k', 224, '1.92', '19.43'),
)


def compare_with_paper() -> pd.DataFrame:
    """Count the networks of the paper's tables, both heads included.

    Returns:
        A row each: ``table``, ``config``, ``size``, the paper's ``GMACs`` and ``M``, what is
        counted (``macs``, ``parameters``), and ``agree``: whether that rounds to the paper's.
    """
    table = pd.DataFrame(PAPER_ROWS, columns=['table', 'config', 'size', 'GMACs', 'M'])
    counts = {
        (config, size): count_complexity(build_network(shipped_config(config)), (size, size)).sum()
        for config, size in {row[1:3] for row in PAPER_ROWS}
    }
    found = [counts[row[1:3]] for row in PAPER_ROWS]
    table['macs'] = [one['macs'] for one in found]
    table['parameters'] = [one['parameters'] for one in found]
    table['agree'] = [
        _rounds_to(one['macs'] / 1e9, gmacs) and _rounds_to(one['parameters'] / 1e6, params)
        for one, (*_, gmacs, params) in zip(found, PAPER_ROWS, strict=True)
    ]
    return table


def _rounds_to(value: float, printed: str) -> bool:
    return not printed or f'{value:.{len(printed.partition(".")[2])}f}' == printed
