"""Checkpoints that survive a kill at any moment, and that ``torch.load`` reads anywhere."""

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.dist import broadcast_object_list, is_main_process
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook
from mmengine.logging import HistoryBuffer, print_log
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from mmengine.utils import apply_to

from mmcare.files import moved_into_place
from mmcare.registry import HOOKS
from mmcare.weights.reading import CheckpointError, read_checkpoint

ATOMIC = 'mmcare.atomic'  # name of the backend below
TRAINING_STATE = {'meta', 'state_dict', 'message_hub'}  # what mmengine cannot resume without
KEPT, OUTDATED = 'keep_ckpt_ids', 'outdated_ckpts'  # of the message hub; the first is mmengine's


@HOOKS.register_module()
class AtomicCheckpointHook(CheckpointHook):
    """mmengine's ``CheckpointHook``, safe against a kill or a power cut at any moment.

    Arguments and file names are those of ``CheckpointHook``. A checkpoint is written under another
    name, brought to the disk and renamed; only then are old ones deleted. This holds for local
    disks. Other backends write as mmengine does.

    With ``resume=True`` and no ``load_from`` the run goes on from the checkpoint that mmengine's
    file ``last_checkpoint`` names or, with a warning, from the newest whole one if that one is
    damaged or gone. A run that has not saved anything starts from its beginning. With
    ``save_best`` a resumed run makes up for the validation that a kill may have prevented.

    Checkpoints hold tensors and plain values only: ``torch.load(file, weights_only=True)`` reads
    them in a process without mmcare.

    Raises:
        CheckpointError: If a run has saved something to resume from, and none of it is whole.
    """

    priority = 'LOWEST'  # so that what other hooks put into a checkpoint becomes plain, too
    backend_args: Any  # these are CheckpointHook's
    file_backend: Any
    last_ckpt: Any
    best_ckpt_path: Any
    best_ckpt_path_dict: Any

    def before_run(self, runner: Any) -> None:
        """Choose the backend, and the checkpoint to resume from before the runner looks for it."""
        if self.backend_args or self.file_client_args or '://' in str(self.out_dir):
            return
        register_backend(ATOMIC, _AtomicBackend, force=True)
        self.backend_args = dict(backend=ATOMIC)
        # Not public in mmengine's runner, and the only place that --resume goes to.
        if not runner._resume or runner._load_from is not None or runner._has_loaded:
            return
        folder = Path(runner.work_dir)
        if self.out_dir not in (None, runner.work_dir):
            folder = Path(self.out_dir, folder.name)  # as mmengine does
        found: list[Any] = [None]
        if is_main_process():
            try:
                found = [self._find_whole(Path(runner.work_dir, 'last_checkpoint'), folder)]
            except (CheckpointError, OSError) as error:
                found = [error]
        broadcast_object_list(found)
        if isinstance(found[0], Exception):
            raise found[0]
        runner._load_from = found[0]
        if found[0] is None:
            runner.logger.warning(f'Nothing to resume in {folder}: starting from the beginning.')

    def before_train(self, runner: Any) -> None:
        """Prepare as mmengine does; finish what a killed run has left undone."""
        info = runner.message_hub.runtime_info
        # mmengine deletes files by these numbers: a checkpoint must not name other files.
        info[KEPT] = [step for step in info.get(KEPT, []) if type(step) is int]
        super().before_train(runner)
        if not isinstance(self.file_backend, _AtomicBackend):
            return
        outdated = map(self._find, info.get(OUTDATED, []))
        self.file_backend.outdated += [path for path in outdated if path]
        # The same list as in the backend, so that checkpoints name the files to delete.
        runner.message_hub.update_info(OUTDATED, self.file_backend.outdated)
        if is_main_process():
            written = rf'((best_.+_)?{self._pattern()}|last_checkpoint)'
            for path in Path(self.out_dir).glob('.*.tmp'):
                if re.fullmatch(rf'\.{written}\..+\.tmp', path.name):  # see moved_into_place
                    shutil.rmtree(path)
        if runner.iter == 0:  # not resumed
            return
        # mmengine forgets the last checkpoint, and takes the path of the best from the file.
        self.last_ckpt = self._find(info.get('last_ckpt'))
        if hasattr(self, 'best_ckpt_path_dict'):
            paths = self.best_ckpt_path_dict
            self.best_ckpt_path_dict = {key: self._find(path) for key, path in paths.items()}
        elif self.save_best:
            self.best_ckpt_path = self._find(self.best_ckpt_path)
        self._remove_outdated()
        if self.save_best and runner.val_loop and self._validates_now(runner.train_loop):
            runner.logger.info(f'Validating {self.last_ckpt}, as the run may have been killed.')
            runner.val_loop.run()

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Leave tensors and plain values only."""
        for key, value in checkpoint.items():
            if not hasattr(value, '_metadata'):  # state dicts have it, and PyTorch needs it
                checkpoint[key] = _plain(value)

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Make NumPy's arrays and the buffers of the message hub again."""
        if isinstance(checkpoint.get('meta'), dict):
            meta = apply_to(checkpoint['meta'], torch.is_tensor, lambda x: x.cpu().numpy())
            checkpoint['meta'] = meta  # mmengine compares it with that of the data set
        scalars = checkpoint.get('message_hub', {}).get('log_scalars', {})
        for key, value in scalars.items():
            if isinstance(value, dict):
                log, count = value['log'].cpu().numpy(), value['count'].cpu().numpy()
                scalars[key] = HistoryBuffer(log, count, value['max_length'])

    def after_val_epoch(self, runner: Any, metrics: dict) -> None:
        """Save the best checkpoint; delete the one before it."""
        super().after_val_epoch(runner, metrics)
        if self.save_best:
            self._remove_outdated()

    def _save_checkpoint_with_step(self, runner: Any, step: int, meta: dict) -> None:
        super()._save_checkpoint_with_step(runner, step, meta)
        self._remove_outdated()

    def _remove_outdated(self) -> None:
        """Delete what is outdated, except files that have been written again since."""
        current = [self.last_ckpt, getattr(self, 'best_ckpt_path', None)]
        current += getattr(self, 'best_ckpt_path_dict', {}).values()
        if isinstance(self.file_backend, _AtomicBackend):
            for path in self.file_backend.outdated:
                if is_main_process() and path not in current:
                    Path(path).unlink(missing_ok=True)
            self.file_backend.outdated.clear()

    def _pattern(self) -> str:
        """The regular expression of the names of checkpoints."""
        return '[0-9]+'.join(map(re.escape, re.split(r'\{[^}]*\}', self.filename_tmpl)))

    def _find(self, path: str | None) -> str | None:
        """Find a checkpoint of this run, which may have been moved with its folder."""
        file = Path(self.out_dir, Path(path or '').name)
        is_checkpoint = re.fullmatch(f'(best_.+_)?{self._pattern()}', file.name)
        return str(file) if is_checkpoint and file.is_file() else None

    def _find_whole(self, pointer: Path, folder: Path) -> str | None:
        """Find the checkpoint that a pointer names, or the newest whole one; None without any.

        Best checkpoints do not count: they do not hold the state of the optimizer.
        """
        files = folder.iterdir() if folder.is_dir() else ()
        saved = [path for path in files if re.fullmatch(self._pattern(), path.name)]
        # By time, not by number: an earlier, longer run may have left its files.
        saved.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        if pointer.is_file():
            named = folder / Path(pointer.read_text(errors='replace').strip()).name
            saved = [named, *(path for path in saved if path != named)]
        faults = []
        for path in saved:
            try:
                checkpoint = read_checkpoint(path)
                if isinstance(checkpoint, dict) and checkpoint.keys() >= TRAINING_STATE:
                    return str(path)
                faults.append(f'{path} does not hold {", ".join(sorted(TRAINING_STATE))}')
            except (CheckpointError, OSError) as error:
                faults.append(str(error))
            print_log(f'Not resuming from {path}: {faults[-1]}', 'current', logging.WARNING)
        if faults:
            reasons = '\n'.join(faults)
            raise CheckpointError(
                f'nothing to resume from in {folder}: no checkpoint there is whole. Restore one, '
                f'or train without resume.\n{reasons}'
            )
        return None

    def _validates_now(self, loop: Any) -> bool:
        """Whether a loop validates at the step that it has reached."""
        if not isinstance(loop, EpochBasedTrainLoop if self.by_epoch else IterBasedTrainLoop):
            return False
        loop._decide_current_val_interval()
        step, end = (loop.epoch, loop.max_epochs) if self.by_epoch else (loop.iter, loop.max_iters)
        return step >= loop.val_begin and (step % loop.val_interval == 0 or step == end)


class _AtomicBackend(LocalBackend):
    """mmengine's backend for local disks: atomic writes; removals are noted for later."""

    def __init__(self) -> None:
        self.outdated: list[str] = []

    def put(self, obj: bytes, filepath: str | Path) -> None:
        with moved_into_place(Path(filepath)) as temporary:
            temporary.write_bytes(obj)

    def remove(self, filepath: str | Path) -> None:
        self.outdated.append(str(filepath))


def _plain(value: Any) -> Any:
    """Replace NumPy's values, buffers and subclasses of dict with tensors and plain values."""
    if isinstance(value, HistoryBuffer):
        log, count = value.data
        value = dict(log=log, count=count, max_length=value.max_length)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value) if value.dtype.kind in 'biufc' else value.tolist()
    if isinstance(value, dict):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(_plain, value))
    return value
