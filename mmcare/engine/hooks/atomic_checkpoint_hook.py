from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from types import FunctionType
from typing import IO, Any

import numpy as np
from mmengine.dist import broadcast_object_list, is_main_process
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook, EarlyStoppingHook
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from torch import Tensor

from mmcare.engine.hooks import unwrap, warn
from mmcare.engine.run_record import find_differences
from mmcare.files import lock_directory, moved_into_place
from mmcare.registry import HOOKS
from mmcare.weights.names import without_wrapper
from mmcare.weights.reading import CheckpointError, load_from_mmcare, loader, readable_types
from mmcare.weights.strict import find_not_finite
from mmcare_runtime.saving import host, is_alive
from mmcare_runtime.text import escape

ATOMIC = 'mmcare.atomic'  # name of the backend below
WAIT = 100  # seconds for another run to end: NFS keeps the lock of a lost machine for 90
KEPT, OUTDATED = 'keep_ckpt_ids', 'outdated_ckpts'  # in the message hub; the first is MMEngine's
_DROPPED = object()


@HOOKS.register_module()
class AtomicCheckpointHook(CheckpointHook):
    """Write checkpoints that survive a kill or a power cut at any moment.

    Arguments and file names are those of MMEngine's ``CheckpointHook``. On local disks a checkpoint
    is written under another name, synced and renamed; only then are old ones deleted. Other
    backends and ``FlexibleRunner`` write, find and delete checkpoints as MMEngine does.

    With ``resume=True`` and without ``load_from``, the run resumes from the checkpoint that
    MMEngine's file ``last_checkpoint`` names. If that checkpoint is damaged or missing, or has
    weights that are not finite, a warning is logged and the newest good one is used. A run without
    checkpoints starts from its beginning. A resumed run repeats the validation that follows its
    checkpoint if something depends on the metrics: ``save_best``, early stopping, or a scheduler
    such as ``ReduceOnPlateauLR``. If the folder of a run that does not resume has checkpoints, a
    warning says so.

    If weights are no longer finite, a warning says so, and checkpoints that are written then
    replace no others.

    A run locks the file ``.lock`` in its folder, since two runs in one folder would replace and
    delete each other's checkpoints. A second run waits for 100 seconds, since a killed run may
    still be ending, and then raises an error. Windows and some network disks have no such locks.

    Checkpoints contain tensors and plain values only, so ``torch.load(file, weights_only=True)``
    reads them, except sets before PyTorch 2.6. Other values, such as a hook's deque, are left out,
    and a warning names them. The log's smoothed values start over after a resume.

    Raises:
        CheckpointError: If a run resumes, and none of its checkpoints is good.
        IsADirectoryError: If there is a directory in place of a checkpoint, or of the file
            ``last_checkpoint``.
        RuntimeError: If another run writes to the folder.
    """

    priority = 'LOWEST'  # and then the last, see _come_last
    backend_args: Any  # CheckpointHook's
    _folder: Path | None = None  # of the checkpoints, if it is on a local disk
    _lock: IO | None = None  # the folder's .lock, while this process trains

    def before_run(self, runner: Any) -> None:
        """Choose the backend and, before the runner looks for it, the checkpoint to resume from."""
        self._come_last(runner)
        backend = (self.backend_args or {}).get('backend', 'local')
        if backend not in ('local', ATOMIC) or self.file_client_args or '://' in str(self.out_dir):
            return
        if not isinstance(runner, Runner):  # strategies of FlexibleRunner write without a backend
            return
        register_backend(ATOMIC, _AtomicBackend, force=True)
        files: dict[str, list[str]] = dict(outdated=[], broken_weights=[], broken=[])
        self.backend_args = dict(backend=ATOMIC, files=files)
        if self._folder is None:  # MMEngine changes out_dir in before_train
            self._folder = Path(runner.work_dir)
            if self.out_dir not in (None, runner.work_dir):
                self._folder = Path(self.out_dir, self._folder.name)  # as MMEngine does
        if isinstance(runner._train_loop, BaseLoop) and is_main_process():  # not for a test alone
            self._check_folder(runner)
        # Private attributes: MMEngine's runner keeps --resume nowhere else.
        if not runner._resume or runner._load_from is not None or runner._has_loaded:
            return
        path, content = self._choose(runner)
        runner._load_from = path
        if path is None:
            runner._resume = False  # otherwise MMEngine would search again, on each rank
            runner.logger.warning(f'Nothing to resume in {self._folder}: starting from scratch.')
        if content is not None:
            _hand_over(runner, content)

    def _choose(self, runner: Any) -> tuple[str | None, Any]:
        """Let the main process choose the checkpoint to resume from, for all.

        Returns:
            Its path; None if the run starts from its beginning. And its content, if it was read.

        Raises:
            CheckpointError: On all ranks, if none of the main process's checkpoints is good.
            RuntimeError: On all ranks, if one has other checkpoints: the folder may be on the disks
                of several machines.
        """
        path, content, fault = None, None, ''
        if is_main_process():
            try:
                path, content = self._find_good(runner)
            except CheckpointError as error:
                fault = str(error)
        choice: list[Any] = [(path, fault, _identify(path))]
        broadcast_object_list(choice)
        path, fault, identity = choice[0]
        if fault:
            raise CheckpointError(fault)
        if path is None:
            seen = [file.name for file in self._saved()[:1]]
        else:
            seen = [Path(path).name] if Path(path).is_file() else []
        for ranks in find_differences(dict(seen=seen[0] if seen else 'no checkpoint')).values():
            raise RuntimeError(
                f'cannot resume, since the ranks do not see the same files in {self._folder}: '
                f'{ranks}. Let all machines share the folder, or copy the checkpoint to all of them'
            )
        if path is not None and content is None and _identify(path) == identity:
            content = load_from_mmcare(path, 'cpu', verify=False)  # the main process did that
        return path, content

    def _come_last(self, runner: Any) -> None:
        """Come after all hooks that add values to a checkpoint, to make these plain as well."""
        # A new list, since MMEngine is in a loop over the old one.
        runner._hooks = [*(hook for hook in runner.hooks if hook is not self), self]

    def before_train(self, runner: Any) -> None:
        """Prepare as MMEngine does, and remove what a killed run has left."""
        self._come_last(runner)
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
            self._remove_left()
        # The backend's list itself, so that a checkpoint names the files to delete after it.
        runner.message_hub.update_info(OUTDATED, self.backend_args['files']['outdated'])
        if runner.iter == 0:  # not resumed
            return
        self.last_ckpt = info.get('last_ckpt')  # MMEngine forgets it
        if self.last_ckpt and is_main_process():  # a kill may have left this file empty
            Path(runner.work_dir, 'last_checkpoint').write_text(self.last_ckpt)
        repeats = self.save_best or repeats_validation(runner)
        if repeats and runner.val_loop and self._validates_now(runner.train_loop):
            runner.val_loop.run()

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Take the data set's metadata in place of equal ones with lists for arrays.

        MMEngine compares them bit by bit, and would warn of another data set at each resume.
        """
        loop, meta = runner._train_loop, checkpoint.get('meta')
        if not isinstance(loop, BaseLoop) or not isinstance(meta, dict):
            return
        current = getattr(loop.dataloader.dataset, 'metainfo', None)
        saved, given = (
            _plain(part, '', readable_types(), []) for part in (meta.get('dataset_meta'), current)
        )
        if repr(saved) == repr(given):  # tensors have no single answer
            meta['dataset_meta'] = current

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Convert everything to tensors and plain values; look for weights that are not finite."""
        if self._folder:
            names = find_not_finite(checkpoint['state_dict'], unwrap(runner.model))
            self.backend_args['files']['broken_weights'] = names
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
            warn(escape(text))

    def after_run(self, runner: Any) -> None:
        """Let other runs write to the folder."""
        if self._lock:
            self._lock.close()

    def _check_folder(self, runner: Any) -> None:
        """Lock the folder, and raise an error if checkpoints could not be written there.

        Warn if a run that does not resume would mix its checkpoints with those of another run.
        """
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._lock is None or self._lock.closed:  # an interrupted training still has its lock
            self._lock = self._wait_for_lock(runner, self._folder)
        pointer = Path(runner.work_dir, 'last_checkpoint')
        for path in (pointer, *self._folder.iterdir()):
            is_ours = path == pointer or re.fullmatch(self._pattern(), path.name)
            if is_ours and path.is_dir():
                raise IsADirectoryError(f'{path} is a directory, where the run writes a file')
        saved = self._saved()
        if saved and not runner._resume and runner.iter == 0:
            runner.logger.warning(
                f'{self._folder} has checkpoints of another run, such as {saved[0].name}. This run '
                'starts from its beginning, and replaces those of the same names. To continue '
                'that run, add --resume; to keep it apart, choose another --work-dir.'
            )

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

    def _saved(self) -> list[Path]:
        """Return the checkpoints in the folder, the newest first.

        Best checkpoints do not count, since they lack the state of the optimizer.
        """
        assert self._folder is not None
        pattern = self._pattern()
        saved = [path for path in self._folder.glob('*') if re.fullmatch(pattern, path.name)]
        # Sort by time, not by number: an earlier, longer run may have left its files.
        return sorted(saved, key=lambda path: path.stat().st_mtime_ns, reverse=True)

    def _find_good(self, runner: Any) -> tuple[str | None, Any]:
        """Find the checkpoint that ``last_checkpoint`` names, or else the newest good one.

        Return its path and content; None if there are no checkpoints.
        """
        saved, folder = self._saved(), Path(self._folder or '')
        pointer = Path(runner.work_dir, 'last_checkpoint')
        if pointer.is_file():
            named = folder / Path(pointer.read_text(errors='replace').strip()).name
            saved = [named, *(path for path in saved if path != named)]
        for path in saved:
            try:
                content = load_from_mmcare(path, 'cpu')
            except (CheckpointError, OSError) as error:
                fault = str(error)
            else:
                state = content.get('state_dict') if isinstance(content, dict) else None
                weights = without_wrapper(state) if isinstance(state, dict) else {}
                not_finite = find_not_finite(weights, unwrap(runner.model))
                if not not_finite:
                    return str(path), content
                fault = f'{len(not_finite)} weights are not finite, such as {not_finite[0]}'
            warn(escape(f'Not resuming from {path}: {fault}'))
        if saved:
            names = ', '.join(path.name for path in saved)
            raise CheckpointError(
                f'all of {names} in {folder} are damaged, missing or have weights that are not '
                'finite: train without resume'
            )
        return None, None

    def _remove_left(self) -> None:
        """Remove the folders in which killed runs wrote, see :func:`temporary_beside`.

        Without a lock, only those of processes that ran on this machine and are gone.
        """
        assert self._folder is not None
        owner = r'((?P<host>[^.~]+)~(?P<process>[0-9]+)\.)?'  # mmcare 1.0.0 wrote none
        pattern = rf'\.(best_.+_)?{self._pattern()}\.{owner}[^.]+\.tmp'
        for left in self._folder.glob('.*.tmp'):
            name = re.fullmatch(pattern, left.name)
            if name is None:
                continue
            is_ours = name['host'] == host()
            if is_ours and is_alive(int(name['process'])):
                continue
            if is_ours or self._lock:
                shutil.rmtree(left, ignore_errors=True)

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


def _identify(path: str | None) -> tuple[int, int, int] | None:
    """Return what tells a file from its copies on the disks of other machines."""
    if path is None or not os.path.isfile(path):
        return None
    state = os.stat(path)
    return state.st_ino, state.st_size, state.st_mtime_ns


def _hand_over(runner: Any, content: Any) -> None:
    """Let the runner resume from a checkpoint that has been read: reading takes time and memory."""
    load_or_resume = runner.load_or_resume

    def load() -> None:
        nonlocal content
        runner.load_or_resume = load_or_resume
        given, content = content, None
        with loader(re.escape(runner._load_from), lambda *_, **__: given):
            load_or_resume()

    runner.load_or_resume = load


class _AtomicBackend(LocalBackend):
    """Write to local disks atomically; remove outdated files only after the next write.

    Args:
        files: What all backends of a hook share: ``outdated``, files to delete then;
            ``broken_weights``, the names of weights that are written next and are not finite; and
            ``broken``, files that have such weights. Writing one of these deletes no others.
    """

    def __init__(self, files: dict[str, list[str]]) -> None:
        self.files = files

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Write a file, then delete the outdated ones."""
        with moved_into_place(Path(filepath)) as temporary:
            temporary.write_bytes(obj)
        outdated, kept, weights = self.files['outdated'], [], self.files['broken_weights']
        if weights:
            warn(
                f'{len(weights)} weights in {filepath} are not finite, such as {weights[0]}. No '
                'other checkpoint is deleted for it. Stop the run: with --resume, it goes on from '
                'the last checkpoint whose weights are finite. A lower learning rate or '
                'optim_wrapper.clip_grad may prevent it.'
            )
            kept = [path for path in outdated if path not in self.files['broken']]
            self.files['broken'].append(str(filepath))
        for path in outdated:
            if path not in (*kept, str(filepath)):
                Path(path).unlink(missing_ok=True)
        outdated[:] = kept  # in place, since the message hub has the list

    def remove(self, filepath: str | Path) -> None:
        self.files['outdated'].append(str(filepath))


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
