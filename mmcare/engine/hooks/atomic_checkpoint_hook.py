"""Checkpoints that a killed run leaves whole, and a resume that finds them."""

import logging
import os
import re
from pathlib import Path
from typing import Any

from mmengine.dist import broadcast_object_list, is_main_process
from mmengine.hooks import CheckpointHook
from mmengine.logging import print_log
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner

from mmcare.checkpoint import CheckpointError, trusting_configs
from mmcare.engine.atomic_files import AtomicLocalBackend, atomic_local_files, remove_unfinished
from mmcare.engine.resume_search import find_whole_checkpoint, name_pattern
from mmcare.registry import HOOKS

LAST_CHECKPOINT = 'last_checkpoint'  # mmengine's name
# Of mmengine's message hub, which is saved in checkpoints.
KEPT_KEY = 'keep_ckpt_ids'  # mmengine's
OUTDATED_KEY = 'outdated_ckpts'
AWAITS_KEY = 'awaits_validation'


@HOOKS.register_module()
@MMENGINE_HOOKS.register_module()
class AtomicCheckpointHook(CheckpointHook):
    """mmengine's ``CheckpointHook``, safe against a kill or a power cut at any moment.

    mmengine deletes the oldest checkpoint, writes the new one in place and then the file
    ``last_checkpoint``. A run killed in between leaves a truncated file, and with
    ``max_keep_ckpts=1`` no other. Here each file is written to a temporary name, brought to the
    disk and renamed; ``last_checkpoint`` follows in the same way, and only then are checkpoints
    deleted. The same goes for ``save_best`` and ``published_keys``. Arguments and file names are
    those of ``CheckpointHook``.

    With ``resume=True`` and no ``load_from``, the newest checkpoint is verified before training.
    If it is damaged or gone, a warning names it and the one before it is used; if there is no
    whole one, the run stops with an error. A run that has saved nothing yet starts from its
    beginning, so that a command with ``--resume`` can be repeated until it is done.

    A checkpoint is written before the validation of its epoch (iteration). With ``save_best`` a
    run that resumes from one makes up for that validation first, so that no best is missed.

    This holds for local disks. Through other backends (petrel, http) and ``file_client_args``
    files are written as mmengine does, and checkpoints that lie there are not verified. mmengine's
    ``FlexibleRunner`` looks for its checkpoint before any hook is called: there a damaged one is
    an error that names it, and a lost ``last_checkpoint`` an error after which the command can be
    repeated. DeepSpeed and sharded FSDP checkpoints are folders, and not atomic.
    """

    file_backend: Any  # these three are CheckpointHook's
    last_ckpt: Any
    best_ckpt_path: Any

    def before_run(self, runner: Any) -> None:
        """Let ``last_checkpoint`` name a whole checkpoint before the runner looks for it.

        Raises:
            CheckpointError: If checkpoints were saved and none of them is whole, or cannot be
                read; if the runner has looked already.
        """
        # Not public in mmengine's runners, and the only place that --resume goes to.
        if not runner._resume or runner._load_from is not None or runner._has_loaded:
            return
        errors: list[str | None] = [None]
        if is_main_process():
            try:
                self._check_last_checkpoint(runner)
            except (CheckpointError, OSError) as error:
                errors = [str(error)]
        broadcast_object_list(errors)  # other ranks read the file after this, or stop as well
        if errors[0] is not None:
            raise CheckpointError(errors[0])

    def before_train(self, runner: Any) -> None:
        """Get ready as mmengine does; remove what a killed run has left undone."""
        hub = runner.message_hub
        if KEPT_KEY in hub.runtime_info:
            # mmengine puts what a file says here into the names of files that it deletes.
            kept = hub.get_info(KEPT_KEY)
            kept = kept if isinstance(kept, list) else []
            hub.update_info(KEPT_KEY, [step for step in kept if type(step) is int])
        super().before_train(runner)
        self.file_backend = _RemovesLater(self.file_backend)
        if runner.iter > 0:  # resumed
            self._take_up(hub)
            if self._awaits_validation(runner):
                runner.logger.info(f'Validating {self.last_ckpt}, which was saved before.')
                runner.val_loop.run()
        if is_main_process():
            for folder in {str(runner.work_dir), str(self.out_dir)}:
                for name in remove_unfinished(folder):
                    runner.logger.info(f'Removed {name}, which a killed run has left in {folder}.')

    def _take_up(self, hub: Any) -> None:
        """Go on where the saved run was.

        mmengine forgets the last checkpoint's name, and so neither publishes it nor saves it again
        with a new best. And it deletes the best checkpoint at whatever path the file says: here
        only checkpoints in this run's folder are touched.
        """
        if hasattr(self, 'best_ckpt_path_dict'):
            for metric, path in self.best_ckpt_path_dict.items():
                self.best_ckpt_path_dict[metric] = self._find(path)
        elif self.save_best is not None:
            self.best_ckpt_path = self._find(self.best_ckpt_path)
        self.last_ckpt = self._find(hub.get_info('last_ckpt'))
        for path in hub.get_info(OUTDATED_KEY, []):
            if (found := self._find(path)) is not None:
                self.file_backend.remove(found)
        self._remove_outdated()

    def _find(self, path: str | None) -> str | None:
        """Find a checkpoint's file, which may have been moved with its folder."""
        name = os.path.basename(path or '')
        found = self.file_backend.join_path(self.out_dir, name)
        is_checkpoint = re.fullmatch(f'(best_.+_)?{name_pattern(self.filename_tmpl)}', name)
        return found if is_checkpoint and self.file_backend.exists(found) else None

    def _check_last_checkpoint(self, runner: Any) -> None:
        last_checkpoint = Path(runner.work_dir, LAST_CHECKPOINT)
        named = last_checkpoint.read_text(errors='replace') if last_checkpoint.is_file() else ''
        if '://' in named or '://' in str(self.out_dir):  # not on a local disk
            return
        folder = Path(runner.work_dir)
        if self.out_dir not in (None, runner.work_dir):
            folder = Path(self.out_dir, folder.name)  # as mmengine has it

        def warn(text: str) -> None:
            print_log(text, logger='current', level=logging.WARNING)

        found = find_whole_checkpoint(last_checkpoint, folder, self.filename_tmpl, warn)
        if found is None:
            warn(f'Nothing to resume in {folder}: the run starts from its beginning.')
        elif str(found) != named.strip():
            AtomicLocalBackend().put_text(str(found), last_checkpoint)
            if not isinstance(runner, Runner):  # a FlexibleRunner has looked already
                raise CheckpointError(
                    f'{last_checkpoint} did not name the newest whole checkpoint. It does now '
                    f'({found}): start the run again'
                )

    def _awaits_validation(self, runner: Any) -> bool:
        """Whether validation is due, and the checkpoint was written before its outcome."""
        loop = runner.train_loop
        kind = EpochBasedTrainLoop if self.by_epoch else IterBasedTrainLoop
        if (
            self.save_best is None
            or runner.val_loop is None
            or not isinstance(loop, kind)
            or not runner.message_hub.get_info(AWAITS_KEY, False)
        ):
            return False
        loop._decide_current_val_interval()
        step, end = (loop.epoch, loop.max_epochs) if self.by_epoch else (loop.iter, loop.max_iters)
        return step >= loop.val_begin and (step % loop.val_interval == 0 or step == end)

    def _save_checkpoint(self, runner: Any) -> None:
        """Save as mmengine does, and with it that the step has not been validated."""
        runner.message_hub.update_info(AWAITS_KEY, True)
        super()._save_checkpoint(runner)

    def _save_checkpoint_with_step(self, runner: Any, step: int, meta: dict) -> None:
        """Write, then point ``last_checkpoint`` to it, then delete: mmengine's steps in this order.

        Names of what is to be deleted are saved too: a run killed before it deletes them does so
        when it resumes.
        """
        hub = runner.message_hub
        if self.max_keep_ckpts > 0 and (not self.keep_ckpt_ids or self.keep_ckpt_ids[-1] != step):
            if len(self.keep_ckpt_ids) == self.max_keep_ckpts:
                oldest = self.filename_tmpl.format(self.keep_ckpt_ids.popleft())
                self.file_backend.remove(self.file_backend.join_path(self.out_dir, oldest))
            self.keep_ckpt_ids.append(step)
            hub.update_info(KEPT_KEY, list(self.keep_ckpt_ids))
        name = self.filename_tmpl.format(step)
        self.last_ckpt = self.file_backend.join_path(self.out_dir, name)
        hub.update_info('last_ckpt', self.last_ckpt)
        hub.update_info(OUTDATED_KEY, list(self.file_backend.outdated))
        with atomic_local_files():
            runner.save_checkpoint(
                self.out_dir,
                name,
                self.file_client_args,
                save_optimizer=self.save_optimizer,
                save_param_scheduler=self.save_param_scheduler,
                meta=meta,
                by_epoch=self.by_epoch,
                backend_args=self.backend_args,
                **self.args,
            )
        if is_main_process():
            AtomicLocalBackend().put_text(self.last_ckpt, Path(runner.work_dir, LAST_CHECKPOINT))
        self._remove_outdated()

    def _save_best_checkpoint(self, runner: Any, metrics: dict) -> None:
        """Save as mmengine does; the best before it is deleted last."""
        runner.message_hub.update_info(AWAITS_KEY, False)
        if not self.save_best:  # `runner.val()` comes here without any training before
            return
        with atomic_local_files():
            super()._save_best_checkpoint(runner, metrics)
        self._remove_outdated()

    def _publish_model(self, runner: Any, ckpt_path: str) -> None:
        """Publish as mmengine does."""
        with atomic_local_files(), trusting_configs():
            super()._publish_model(runner, ckpt_path)

    def _remove_outdated(self) -> None:
        current = {self.last_ckpt, getattr(self, 'best_ckpt_path', None)}
        current.update(getattr(self, 'best_ckpt_path_dict', {}).values())
        if is_main_process():
            self.file_backend.remove_now(keep=current)
        self.file_backend.outdated.clear()


class _RemovesLater:
    """A backend as ``CheckpointHook`` uses it, which first only notes what is to be removed."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.outdated: list[str] = []
        self.exists = backend.exists
        self.join_path = backend.join_path
        self.isfile = backend.isfile
        self.isdir = backend.isdir

    def remove(self, path: str) -> None:
        """Note a file or folder, which may or may not be there."""
        self.outdated.append(path)

    rmtree = remove

    def remove_now(self, keep: set[str | None]) -> None:
        """Remove what was noted, but for files that have been written again since."""
        for path in self.outdated:
            if path in keep:
                continue
            if self.backend.isfile(path):
                self.backend.remove(path)
            elif self.backend.isdir(path):  # of DeepSpeed
                self.backend.rmtree(path)
