"""The main jobs, shown on sample data that the package makes itself."""

import shutil
from pathlib import Path

from mmcare.output import check_writable

# An initialisation that keeps the scale of signals, for training from scratch within minutes.
QUICK_START = [
    dict(type='Kaiming', layer=['Conv2d'], mode='fan_in', distribution='normal'),
    dict(type='Constant', layer=['_BatchNorm'], val=1.0, bias=0.0),
]


def empty_data_dir(work_dir: Path) -> Path:
    """Name the folder for a demo's data, and remove what an earlier run has left there.

    Raises:
        FileExistsError: If there is a folder of that name which no demo has made.
        NotADirectoryError, PermissionError: If ``work_dir`` cannot be written.
    """
    check_writable(work_dir)
    data_dir = work_dir / 'sample_data'
    if data_dir.exists():
        if not (data_dir / 'preview.png').is_file():
            raise FileExistsError(
                f'{data_dir} was not made by a demo, which would replace it; name another '
                '--work-dir'
            )
        shutil.rmtree(data_dir)
    return data_dir
