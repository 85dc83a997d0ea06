from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from types import FunctionType
from typing import IO, Any

import numpy as np
from mmengine.dist import broadcast_object_list, is_main_process
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook, EarlyStoppingHook
from mmengine.logging import print_log
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from torch import Tensor

from mmcare.files import lock_directory, moved_into_place
from mmcare.registry import HOOKS
from mmcare.weights.reading import CheckpointError, read_checkpoint, readable_types
from mmcare_runtime.text import escape

ATOMIC = 'mmcare.atomic'  # name of the backend below
WAIT = 30  # seconds for another run to end; a killed run's dataloaders end after 5
KEPT, OUTDATED = 'keep_ckpt_ids', 'outdated_ckpts'  # in the message hub; the first is MMEngine's
_DROPPED = object()


@HOOKS.register_module()
class AtomicCheckpointHook(CheckpointHook):
    """Write checkpoints that survive a kill or a power cut at any moment.

    Arguments and file names are those of MMEngine's ``CheckpointHook``. On local disks a checkpoint
    is written under another name, synced and renamed; only then are old ones deleted. Other
    backends and ``FlexibleRunner`` write, find and delete checkpoints as MMEngine does.

    With ``resume=True`` and without ``load_from``, the run resumes from the checkpoint that
    MMEngine's file ``last_checkpoint`` names. If that checkpoint is damaged or missing, a warning
    is logged and the newest undamaged one is used. A run without checkpoints starts from its
    beginning. A resumed run repeats the validation that follows its checkpoint if something depends
    on the metrics: ``save_best``, early stopping, or a scheduler such as ``ReduceOnPlateauLR``.

    A run locks the file ``.lock`` in its folder, since two runs in one folder would replace and
    delete each other's checkpoints. A second run waits for half a minute, since a killed run may
    still be ending, and then raises an error. Windows and some network disks have no such locks.

    Checkpoints contain tensors and plain values only, so ``torch.load(file, weights_only=True)``
    reads them, except sets before PyTorch 2.6. Other values, such as a hook's deque, are left out,
    and a warning names them. The log's smoothed values start over after a resume.

    Raises:
        CheckpointError: If a run resumes, and all of its checkpoints are damaged, or the one that
            ``last_checkpoint`` names is missing, and there is no other.
        IsADirectoryError: If there is a directory in place of a checkpoint, or of the file
            ``last_checkpoint``.
        RuntimeError: If another run writes to the folder.
    """

    priority = 'LOWEST'  # after hooks that add values to a checkpoint, to make these plain as well
    backend_args: Any  # CheckpointHook's
    _folder: Path | None = None  # of the checkpoints, if it is on a local disk
    _lock: IO | None = None  # the folder's .lock, while this process trains

    def before_run(self, runner: Any) -> None:
        """Choose the backend and, before the runner looks for it, the checkpoint to resume from."""
        backend = (self.backend_args or {}).get('backend', 'local')
        if backend not in ('local', ATOMIC) or self.file_client_args or '://' in str(self.out_dir):
            return
        if not isinstance(runner, Runner):  # strategies of FlexibleRunner write without a backend
            return
        register_backend(ATOMIC, _AtomicBackend, force=True)
        self.backend_args = dict(backend=ATOMIC, outdated=[])
        if self._folder is None:  # MMEngine changes out_dir in before_train
            self._folder = Path(runner.work_dir)
            if self.out_dir not in (None, runner.work_dir):
                self._folder = Path(self.out_dir, self._folder.name)  # as MMEngine does
        if isinstance(runner._train_loop, BaseLoop) and is_main_process():  # not for a test alone
            self._check_folder(runner)
        # Private attributes: MMEngine's runner keeps --resume nowhere else.
        if not runner._resume or runner._load_from is not None or runner._has_loaded:
            return
        pointer = Path(runner.work_dir, 'last_checkpoint')
        checkpoint = [self._find_undamaged(self._folder, pointer) if is_main_process() else None]
        broadcast_object_list(checkpoint)
        runner._load_from = checkpoint[0]
        if checkpoint[0] is None:
            runner.logger.warning(f'Nothing to resume in {self._folder}: starting from scratch.')

    def before_train(self, runner: Any) -> None:
        """Prepare as MMEngine does, and remove what a killed run has left."""
        info = runner.message_hub.runtime_info
        # MMEngine deletes the files that these entries name; a checkpoint could name any file.
        info[KEPT] = [step for step in info.get(KEPT, []) if type(step) is int]
        for key in info if self._folder else ():
            if key.startswith(('best_ckpt', 'last_ckpt')):
                info[key] = self._find(info[key])
        super().before_train(runner)
        if not self._folder:
            return
        if is_main_process():
            for path in filter(None, map(self._find, info.get(OUTDATED, []))):
                Path(path).unlink(missing_ok=True)
            for left in self._folder.glob('.*.tmp') if self._lock else ():
                if re.fullmatch(rf'\.(best_.+_)?{self._pattern()}\.[^.]+\.tmp', left.name):
                    shutil.rmtree(left, ignore_errors=True)  # see moved_into_place
        # The backend's list itself, so that a checkpoint names the files to delete after it.
        runner.message_hub.update_info(OUTDATED, self.backend_args['outdated'])
        if runner.iter == 0:  # not resumed
            return
        self.last_ckpt = info.get('last_ckpt')  # MMEngine forgets it
        if self.last_ckpt and is_main_process():  # a kill may have left this file empty
            Path(runner.work_dir, 'last_checkpoint').write_text(self.last_ckpt)
        repeats = self.save_best or repeats_validation(runner)
        if repeats and runner.val_loop and self._validates_now(runner.train_loop):
            runner.val_loop.run()

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Convert everything to tensors and plain values."""
        hub = checkpoint['message_hub']
        hub['log_scalars'] = {}  # buffers of MMEngine's own type
        hub['resumed_keys'] = dict.fromkeys(hub['runtime_info'], True)
        # PyTorch needs this attribute of state dicts.
        states = {key: part for key, part in checkpoint.items() if hasattr(part, '_metadata')}
        others = {key: part for key, part in checkpoint.items() if key not in states}
        dropped: list[str] = []
        plain = _plain(others, '', readable_types(), dropped)
        checkpoint.clear()
        checkpoint.update({**states, **plain})
        if dropped:
            text = 'Not in the checkpoint, since only tensors, numbers, text and containers of '
            text += f'them can be read again: {", ".join(dict.fromkeys(dropped))}'
            print_log(escape(text), 'current', logging.WARNING)

    def after_run(self, runner: Any) -> None:
        """Let other runs write to the folder."""
        if self._lock:
            self._lock.close()

    def _check_folder(self, runner: Any) -> None:
        """Lock the folder, and raise an error if checkpoints could not be written there."""
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._lock is None or self._lock.closed:  # an interrupted training still has its lock
            self._lock = self._wait_for_lock(runner, self._folder)
        pointer = Path(runner.work_dir, 'last_checkpoint')
        for path in (pointer, *self._folder.iterdir()):
            is_ours = path == pointer or re.fullmatch(self._pattern(), path.name)
            if is_ours and path.is_dir():
                raise IsADirectoryError(f'{path} is a directory, where the run writes a file')

    def _wait_for_lock(self, runner: Any, folder: Path) -> IO | None:
        try:
            return lock_directory(folder)
        except BlockingIOError:
            runner.logger.warning(f'Another run writes to {folder}: waiting for its end.')
        try:
            return lock_directory(folder, WAIT)
        except BlockingIOError:
            advice = 'end it, or choose another work_dir'
            raise RuntimeError(f'another run writes to {folder}: {advice}') from None

    def _pattern(self) -> str:
        """Return the regular expression of this run's checkpoints."""
        return '[0-9]+'.join(map(re.escape, re.split(r'\{[^}]*\}', self.filename_tmpl)))

    def _find(self, path: str | None) -> str | None:
        """Find a checkpoint of this run by its file name, since its folder may have been moved."""
        file = Path(self._folder or '', Path(path or '').name)
        is_checkpoint = re.fullmatch(f'(best_.+_)?{self._pattern()}', file.name)
        return str(file) if is_checkpoint and file.is_file() else None

    def _find_undamaged(self, folder: Path, pointer: Path) -> str | None:
        """Find the checkpoint that a pointer names, or else the newest undamaged one.

        Return None if there are no checkpoints. Best checkpoints do not count, since they lack the
        state of the optimizer.
        """
        saved = [path for path in folder.glob('*') if re.fullmatch(self._pattern(), path.name)]
        # Sort by time, not by number: an earlier, longer run may have left its files.
        saved.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        if pointer.is_file():
            named = folder / Path(pointer.read_text(errors='replace').strip()).name
            saved = [named, *(path for path in saved if path != named)]
        for path in saved:
            try:
                read_checkpoint(path)
                return str(path)
            except (CheckpointError, OSError) as error:
                text = escape(f'Not resuming from {path}: {error}')
                print_log(text, 'current', logging.WARNING)
        if saved:
            names = ', '.join(path.name for path in saved)
            raise CheckpointError(
                f'all of {names} in {folder} are damaged or missing: train without resume'
            )
        return None

    def _validates_now(self, loop: Any) -> bool:
        """Return whether a loop validates at the step that it has reached."""
        if not isinstance(loop, EpochBasedTrainLoop if self.by_epoch else IterBasedTrainLoop):
            return False
        loop._decide_current_val_interval()
        step, end = (loop.epoch, loop.max_epochs) if self.by_epoch else (loop.iter, loop.max_iters)
        return step >= loop.val_begin and (step % loop.val_interval == 0 or step == end)


def repeats_validation(runner: Any) -> bool:
    """Return whether training depends on metrics of the validation that follows a checkpoint."""
    schedulers = runner.param_schedulers or []
    parts = schedulers.values() if isinstance(schedulers, dict) else [schedulers]
    return any(
        [getattr(scheduler, 'need_val_args', False) for part in parts for scheduler in part]
        + [isinstance(hook, EarlyStoppingHook) for hook in runner.hooks]
    )


class _AtomicBackend(LocalBackend):
    """Write to local disks atomically; remove outdated files only after the next write."""

    def __init__(self, outdated: list[str]) -> None:
        self.outdated = outdated

    def put(self, obj: bytes, filepath: str | Path) -> None:
        with moved_into_place(Path(filepath)) as temporary:
            temporary.write_bytes(obj)
        for path in self.outdated:
            if path != str(filepath):
                Path(path).unlink(missing_ok=True)
        self.outdated.clear()

    def remove(self, filepath: str | Path) -> None:
        self.outdated.append(str(filepath))


def _plain(value: Any, name: str, readable: set[type], dropped: list[str]) -> Any:
    """Replace NumPy's values and subclasses of dict with plain ones; leave out other objects.

    Args:
        value: Part of a checkpoint.
        name: Where it is in the checkpoint.
        readable: Types that are kept, besides tensors and containers.
        dropped: Gets the names and types of what is left out, except functions in dicts.

    Returns:
        The plain value; ``_DROPPED`` if it, or something in a list, tuple or set, is left out.
    """
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if isinstance(value, dict):
        plain = {}
        for key, entry in value.items():
            if isinstance(entry, FunctionType):
                continue
            where = f'{name}.{key}' if name else str(key)
            kept = [_plain(part, where, readable, dropped) for part in (key, entry)]
            if not any(part is _DROPPED for part in kept):
                plain[kept[0]] = kept[1]
        return plain
    for container in (list, tuple, set):
        if isinstance(value, container):
            parts = [_plain(part, name, readable, dropped) for part in value]
            return _DROPPED if any(part is _DROPPED for part in parts) else container(parts)
    if isinstance(value, Tensor) or type(value) in readable:
        return value
    dropped.append(f'{name} ({type(value).__name__})')
    return _DROPPED
