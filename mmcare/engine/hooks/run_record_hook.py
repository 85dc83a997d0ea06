from __future__ import annotations

from typing import Any

from mmengine.dist import get_world_size

from mmcare.engine import run_record
from mmcare.engine.hooks import SwitchableHook, built_loops, log, warn
from mmcare.registry import HOOKS
from mmcare.weights.reading import RUNS, runs_of

WINDOW = 10  # iterations whose times are averaged
WORK_DIR = 'work_dir, whose checkpoints a resume needs'
INTENDED = 'version of', 'commit of', WORK_DIR
DIFFER = 'The ranks of this run are not alike:'
ADVICE = 'All machines need the same code, config, data, weights and folders: see docs/multi_gpu.md'


@HOOKS.register_module()
class RunRecordHook(SwitchableHook):
    """Record what a run consists of, and stop it if its ranks differ.

    Before the first iteration, the log gets the versions of packages, the commits of checkouts, the
    command, the number of processes, and SHA-256 of the files of annotations and weights. In
    checkpoints, ``meta['mmcare_runs']`` is the list of these records: of the first run, and of each
    that has resumed with other ones.

    With several processes, all ranks compare, before training and before a test: the checkpoint
    with its epoch and iteration, the weights, the datasets' lengths, classes and annotation files,
    and the config without its paths. They also look whether they see the same current folder, if
    metrics are collected there. Other versions or commits, and a ``work_dir`` that is not shared,
    are warnings.

    The log also gets ``images_per_second``, of all processes, from the times of
    ``IterTimerHook``.

    Raises:
        RuntimeError: On all ranks, if they differ. The message names the ranks.
    """

    priority = 55  # after IterTimerHook, before LoggerHook

    def __init__(self, enabled: bool = True) -> None:
        super().__init__(enabled)
        self._runs: list[run_record.Record] = []

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Take over the records of the run that is resumed."""
        if runner._resume:
            self._runs = runs_of(checkpoint)

    def before_train(self, runner: Any) -> None:
        """Log what the run consists of, and compare the ranks."""
        record = run_record.describe(runner)
        if self._runs:  # of the run that is resumed
            record['weights'] = self._runs[-1].get('weights')
        before = {**self._runs[-1], 'iteration': runner.iter} if self._runs else None
        if record != before:
            self._runs.append(record)
        log('\n'.join(['This run:', *(f'  {key}: {value}' for key, value in record.items())]))
        self._compare(runner, record)

    def before_test(self, runner: Any) -> None:
        """Compare the ranks."""
        self._compare(runner, dict(data=run_record.describe_data(runner)))

    def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        """Log how many images all processes train on in a second."""
        if 'train/time' in runner.message_hub.log_scalars:
            seconds = runner.message_hub.get_scalar('train/time').mean(WINDOW)
            world = self._runs[-1]['world']
            images = world['processes'] * world['batch_size']
            runner.message_hub.update_scalar('train/images_per_second', images / max(seconds, 1e-9))

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Add the records."""
        if self._runs:
            checkpoint['meta'][RUNS] = self._runs

    def _compare(self, runner: Any, record: run_record.Record) -> None:
        """Raise an error if ranks differ, or warn of what may be intended."""
        if get_world_size() == 1:
            return
        differing = run_record.find_differences(run_record.describe_rank(runner, record))
        if differing.pop('config', None):  # name what differs in it
            settings = dict(run_record.flatten(runner.cfg._cfg_dict))
            differing.update(run_record.find_differences(settings))
        folders = {f'the folder {path!r} of metrics': path for path in _collecting(runner)}
        differing.update(run_record.find_unshared({**folders, WORK_DIR: runner.work_dir}))
        intended = [name for name in differing if name.startswith(INTENDED)]
        for name in intended:
            warn(f'{DIFFER}\n- {name}: {differing.pop(name)}')
        if differing:
            lines = [f'- {name}: {ranks}' for name, ranks in differing.items()]
            raise RuntimeError('\n'.join([DIFFER, *lines, ADVICE]))


def _collecting(runner: Any) -> list[str]:
    """Return the folders in which the metrics of a run are collected."""
    evaluators = [getattr(loop, 'evaluator', None) for loop in built_loops(runner).values()]
    metrics = [metric for part in evaluators for metric in getattr(part, 'metrics', ())]
    on_disk = [metric for metric in metrics if getattr(metric, 'collect_device', '') == 'cpu']
    return sorted({getattr(metric, 'collect_dir', None) or '.' for metric in on_disk})
