"""Which checkpoint a run is to go on from: the newest that is whole."""

import re
from collections.abc import Callable
from pathlib import Path

from mmcare.checkpoint import CheckpointError, read_checkpoint

TRAINING_STATE = ('meta', 'state_dict', 'message_hub')  # what mmengine cannot resume without


def find_whole_checkpoint(
    last_checkpoint: Path, folder: Path, template: str, warn: Callable[[str], None]
) -> Path | None:
    """Find the checkpoint that ``last_checkpoint`` names, or else the newest whole one before.

    Each candidate is read, and its checksums are verified. Without ``last_checkpoint``, or if
    it names nothing, all of the folder's checkpoints are candidates. Best checkpoints are none:
    they hold no state of the optimizer.

    Args:
        last_checkpoint: mmengine's text file with the path of the newest checkpoint.
        folder: Where the checkpoints are.
        template: Their names, with ``{}`` for the epoch or iteration.
        warn: Called with a sentence for each candidate that is left aside.

    Returns:
        None if the run has not saved anything yet.

    Raises:
        CheckpointError: If something has been saved, and nothing of it is whole.
    """
    text = last_checkpoint.read_text(errors='replace').strip() if last_checkpoint.is_file() else ''
    named = Path(text) if text and '\0' not in text else None
    steps = {path: _step(path, template) for path in folder.iterdir()} if folder.is_dir() else {}
    saved = {path: step for path, step in steps.items() if step is not None}
    # Checkpoints of later steps than the named one are an earlier run's.
    latest = _step(named, template) if named else None
    candidates = sorted(
        (path for path, step in saved.items() if latest is None or step <= latest),
        key=saved.__getitem__,
        reverse=True,
    )
    if named:
        candidates = [named, *(path for path in candidates if path != named)]
    if not candidates:
        if last_checkpoint.is_file():
            raise CheckpointError(
                f'{last_checkpoint} names no file, and {folder} holds no checkpoint {template}; '
                'restore one, or train anew without resume'
            )
        return None
    reasons = []
    for path in candidates:
        reason = _why_not(path)
        if reason is None:
            return path
        warn(f'{reason}. This checkpoint is left aside.')
        reasons.append(reason)
    raise CheckpointError(
        f'nothing to resume from in {folder}: no checkpoint there is whole. Restore one, or train '
        'anew without resume.\n' + '\n'.join(reasons)
    )


def name_pattern(template: str) -> str:
    """The regular expression for checkpoints' names; its group is the epoch or iteration."""
    return '([0-9]+)'.join(map(re.escape, re.split(r'\{[^}]*\}', template)))


def _step(path: Path, template: str) -> int | None:
    """The epoch or iteration in a checkpoint's name; None if it is no such name."""
    match = re.fullmatch(name_pattern(template), path.name)
    if match is None:
        return None
    return int(match[1]) if match.groups() else 0  # a template may have one name for all


def _why_not(path: Path) -> str | None:
    """Why a run cannot go on from a file; None if it can."""
    try:
        checkpoint = read_checkpoint(path)
    except (OSError, CheckpointError) as error:
        return str(error).rstrip('.')
    if not isinstance(checkpoint, dict):
        return f'{path} holds a {type(checkpoint).__name__} and no training state'
    missing = [key for key in TRAINING_STATE if key not in checkpoint]
    return f'{path} holds no {", ".join(missing)}' if missing else None
