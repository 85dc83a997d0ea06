"""Draw time per megapixel over the side of images, from recordings of latency.py at several sizes.

A flat line means linear cost in the number of pixels. The results are sweep.md (a table) and
sweep.png.
"""

import argparse
import json
from pathlib import Path

import pandas as pd
from latency import PEERS
from matplotlib.figure import Figure
from recording import save

from mmcare.files import check_writable


def read(paths: list[Path], engine: str) -> tuple[pd.DataFrame, list[str]]:
    """Return milliseconds per megapixel, a row for each side and a column for each network.

    The second value says with how many threads, and which versions, they were measured.
    """
    rows, conditions = {}, set()
    for path in paths:
        recording = json.loads(path.read_text(encoding='utf-8'))
        (height, width), times = recording['settings']['shape'], recording['milliseconds'][engine]
        if height != width or height in rows:
            raise ValueError(f'{path} is of {height}x{width}: give one recording for each square')
        rows[height] = pd.DataFrame(times).median() / (height * width / 1e6)
        threads = recording['settings'].get('threads', 'one thread')
        conditions.add(', '.join([threads, *recording['versions']]))
    table = pd.DataFrame(rows).T.sort_index().rename_axis('side of the image, pixels')
    return table.rename(columns=PEERS['label']), sorted(conditions)


def main() -> None:
    """Read recordings, write and print the table, draw a line for each network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('recordings', type=Path, nargs='+', metavar='JSON')
    parser.add_argument('--engine', default='xnnpack', help='default: %(default)s')
    parser.add_argument('--out-dir', type=Path, default=Path('work_dirs/sweep'), metavar='DIR')
    arguments = parser.parse_args()
    check_writable(arguments.out_dir)
    table, conditions = read(arguments.recordings, arguments.engine)
    title = f'{arguments.engine}, batch 1; {"; ".join(conditions)}'
    text = f'Milliseconds per megapixel. {title}.\n\n{table.to_markdown(floatfmt=".0f")}\n'
    save(arguments.out_dir / 'sweep.md', text)
    figure = Figure(figsize=(8, 5), layout='constrained')
    axes = table.plot(style='o-', logy=True, xticks=table.index, ax=figure.subplots())
    axes.set_ylabel('ms per megapixel')
    axes.set_title(title, fontsize=7, wrap=True)
    axes.grid(alpha=0.3, which='both')
    save(arguments.out_dir / 'sweep.png', figure)
    print(text)


if __name__ == '__main__':
    main()
