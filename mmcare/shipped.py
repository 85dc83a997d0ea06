"""Find the configs that are installed with mmcare.

``mim train mmdet`` finds only mmdet's own configs by name, so give it a path::

    mim train mmdet "$(python -m mmcare.shipped mask_rcnn/care_s1_coco)"

Without a name, ``python -m mmcare.shipped`` lists all names.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

CONFIGS = Path(__file__).resolve().parent / '.mim' / 'configs'


def shipped_configs() -> list[str]:
    """List the names of all shipped configs, such as ``'mask_rcnn/care_s1_coco'``."""
    if not CONFIGS.is_dir():
        raise FileNotFoundError(
            f'{CONFIGS} does not exist: installing mmcare puts the configs there '
            '(`pip install -e .` in the checkout)'
        )
    paths = (path.relative_to(CONFIGS).with_suffix('') for path in CONFIGS.glob('*/*.py'))
    return sorted(path.as_posix() for path in paths if path.parts[0] != '_base_')


def shipped_config(name: str) -> Path:
    """Find a shipped config, in editable, wheel and sdist installs alike.

    Args:
        name: ``'mask_rcnn/care_s1_coco'``, or ``'configs/mask_rcnn/care_s1_coco.py'``.

    Returns:
        The absolute path; in an editable install that of the checkout's file.

    Raises:
        ValueError: If no shipped config has this name.
        FileNotFoundError: If mmcare runs from a folder that was never installed.
    """
    wanted = re.sub(r'^configs/|\.py$', '', name)
    if wanted not in shipped_configs():
        raise ValueError(
            f'no shipped config is named {name!r}; `python -m mmcare.shipped` lists all'
        )
    return (CONFIGS / f'{wanted}.py').resolve()


def main() -> None:
    """Print the path of one config, or the names of all."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog='python -m mmcare.shipped', description=__doc__, formatter_class=raw
    )
    parser.add_argument('name', nargs='?', help='name of a config; default: list all')
    name = parser.parse_args().name
    try:
        print('\n'.join(shipped_configs()) if name is None else shipped_config(name))
    except (FileNotFoundError, ValueError) as error:
        parser.exit(2, f'error: {error}\n')


if __name__ == '__main__':
    main()
