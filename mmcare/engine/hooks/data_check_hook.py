from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, wraps
from socket import gethostname
from time import monotonic
from typing import Any, Callable

from mmengine.dist import all_gather_object, get_world_size, is_main_process
from mmengine.registry import DATASETS
from mmengine.runner import BaseLoop, Runner

from mmcare.engine.data_checks import CHECKS, OTHERS, classes, coco, masks, weights
from mmcare.engine.data_checks.coco_file import read_coco
from mmcare.engine.data_checks.findings import Run, Split, Stop, Warn
from mmcare.engine.data_checks.summary import describe
from mmcare.engine.hooks import SwitchableHook, built_loops, log, unwrap, warn
from mmcare.registry import HOOKS, built_type, type_name


@HOOKS.register_module()
class DataCheckHook(SwitchableHook):
    """Check that the data are as the toolboxes assume, by :mod:`mmcare.engine.data_checks`.

    The main process checks COCO files and class folders before datasets are built from them, and
    everything else once before the run. On other machines, one process looks whether files are
    missing. Faults stop all processes; suspicious findings only warn.
    After weights are loaded, random layer scales are compared with the number of pictures, and
    random weights in frozen stages are named. Before each iteration, the labels of mmseg's maps are
    compared with the classes. The hook reads the headers of at most 10,000 pictures and masks of a
    dataset, checksums of these masks and the values of those in JPEG or of more than 8 bits, the
    palettes of 200 masks, and the labels of masks until it has seen two classes. Of a COCO file
    above 32 MiB, it reads at most 20,000 objects, evenly spread. Remote data (``backend_args``,
    ``://``) are not checked. The log says of which datasets pictures, labels or everything is not
    checked, since they do not give it in MMEngine's form.

    MMEngine builds datasets before it calls the first hook. So the first hook of this kind wraps
    the methods of ``Runner`` that build loops; they do the same as before for runners without the
    hook. ``FlexibleRunner`` has its own methods: checks run only before the run.

    Args:
        enabled: False leaves out all checks.
        skip: Names of checks to leave out, or one name. Messages end with the name of their check.

    Raises:
        ValueError: If something is wrong, or ``skip`` has an unknown name. The message names the
            files and what to do.
    """

    def __init__(self, enabled: bool = True, skip: str | Sequence[str] = ()) -> None:
        super().__init__(enabled)
        skip = [skip] if isinstance(skip, str) else skip
        unknown = sorted({*skip} - {*CHECKS, *OTHERS})
        if unknown:
            raise ValueError(f'there are no checks {unknown} to skip, but {[*CHECKS, *OTHERS]}')
        self.skip = {*skip}
        self._checked: set[str] = set()
        self._noted: set[str] = set()  # modes without datasets that can be checked
        self._read = lru_cache(maxsize=None)(read_coco)
        for mode in ('train', 'val', 'test') if enabled else ():
            build = getattr(Runner, f'build_{mode}_loop')
            if not hasattr(build, 'is_checked'):
                setattr(Runner, f'build_{mode}_loop', _check_before(build, mode))

    def before_build(self, dataloader: Any) -> None:
        """Check the files from which a config's datasets are about to be built."""
        if not self.enabled:
            return
        findings: list[tuple[str, Stop | Warn]] = []
        for config in _datasets(dataloader) if is_main_process() else ():
            root, file = config.get('data_root') or '', config.get('ann_file') or ''
            path = os.path.join(root, file)
            listed = config.get('classes') or (config.get('metainfo') or {}).get('classes') or ()
            names = [] if isinstance(listed, str) else [*listed]  # a string names a file
            if _is_remote(config.get('backend_args')) or '://' in path:
                continue
            if file and os.path.isfile(path) and hasattr(built_type(DATASETS, config), 'COCOAPI'):
                findings += self._run('required_keys', coco.check_required_keys, path, self._read)
            prefix = config.get('data_prefix') or ''
            prefix = prefix.get('img_path', '') if isinstance(prefix, dict) else prefix
            folder = os.path.join(root, prefix)
            of_folders = not file and config.get('with_label', True) and os.path.isdir(folder)
            if of_folders and type_name(config['type']) == 'CustomDataset':
                folders = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
                arguments = folders, names, folder
                findings += self._run('folder_names', classes.check_folder_names, *arguments)
        self._report_to_all(findings)

    def before_run(self, runner: Runner) -> None:
        """Check the datasets that were built for this run, once for each mode."""
        start, is_main = monotonic(), is_main_process()
        # The first process of each other machine looks for the files: disks may differ.
        is_first = is_main or os.environ.get('LOCAL_RANK') == '0'
        splits = self._find_splits(runner) if is_first else []
        fresh = [split for split in splits if split.mode not in self._checked]
        if fresh and get_world_size() > 1:
            log(
                'Checking the data (mmcare.DataCheckHook). The other processes wait for it, no '
                'longer than env_cfg.dist_cfg.timeout'
            )
        self._checked.update(split.mode for split in splits)
        first = splits[0] if splits else None
        run = Run(unwrap(runner.model), fresh, first, runner.cfg)
        findings: list[tuple[str, Stop | Warn]] = []
        for name, check in CHECKS.items() if fresh else ():
            if is_main or name == 'files':
                findings += self._run(name, check, run)
        if is_main and run.of_mode('train'):
            findings += self._run('test_split', classes.check_test_split, runner._test_dataloader)
        notes = [note for split in fresh if (note := _note(split))] if is_main else []
        if is_main:
            for split in fresh:
                log(describe(split))
            if fresh and not findings:
                number = len(CHECKS.keys() - self.skip)
                log(f'Data check: nothing found, by {number} checks')
            checked = {split.mode for split in splits} | self._noted
            unknown = [mode for mode in built_loops(runner) if mode not in checked]
            notes += [f'anything of {mode}_dataloader.dataset' for mode in unknown]
            self._noted.update(unknown)
        if notes:
            log(f'mmcare.DataCheckHook does not check {"; ".join(notes)}')
        self._read.cache_clear()  # the objects of a file take more memory than the file
        seconds = monotonic() - start
        if seconds > 10:
            log(f'The data were checked in {seconds:.0f} seconds, see mmcare.DataCheckHook')
        self._report_to_all(findings)

    def before_train(self, runner: Any) -> None:
        """Check the weights, which have been loaded by now, for the number of pictures."""
        dataset, model = runner.train_dataloader.dataset, unwrap(runner.model)
        if not getattr(runner, '_has_loaded', True):  # of FlexibleRunner, nobody knows
            self._report(self._run('frozen', weights.check_frozen, model))
        if hasattr(dataset, '__len__'):
            self._report(self._run('layer_scale', weights.check_layer_scale, model, dataset))

    def _before_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, mode: str = 'train'
    ) -> None:
        """Check the label maps (1, H, W) in an mmseg batch."""
        dataset = getattr(runner, f'{mode}_dataloader').dataset
        metainfo = getattr(dataset, 'metainfo', {})  # a list for mmdet's ConcatDataset
        if 'reduce_zero_label' not in metainfo or not metainfo.get('classes'):
            return
        samples = data_batch['data_samples']
        views = isinstance(samples[0], (list, tuple))
        arguments = unwrap(runner.model), dataset, samples[0] if views else samples
        findings = self._run('label_values', masks.check_label_values, *arguments)
        if mode == 'train':
            findings += self._run('class_weights', masks.check_class_weights, *arguments)
        self._report(findings)

    def _run(
        self, name: str, check: Callable[..., Iterable[Stop | Warn]], *arguments: Any
    ) -> list[tuple[str, Stop | Warn]]:
        return [] if name in self.skip else [(name, finding) for finding in check(*arguments)]

    def _report_to_all(self, findings: list[tuple[str, Stop | Warn]]) -> None:
        """Report the findings of all processes on each; the others would wait or fail."""
        for rank, (host, shared) in enumerate(all_gather_object((gethostname(), findings))):
            place = f'rank {rank} on {host}: ' if rank else ''
            self._report([(name, type(each)(f'{place}{each}')) for name, each in shared])

    def _report(self, findings: list[tuple[str, Stop | Warn]]) -> None:
        """Log warnings, and raise one error that lists all faults."""
        for name, finding in findings:
            if isinstance(finding, Warn):
                warn(f'{finding} [{name}]')
        faults = [f'{finding} [{name}]' for name, finding in findings if isinstance(finding, Stop)]
        if faults:
            raise ValueError('\n'.join(faults))

    def _find_splits(self, runner: Runner) -> list[Split]:
        splits = []
        for mode, loop in built_loops(runner).items():
            configs = getattr(runner, f'_{mode}_evaluator', None)  # training has none
            for dataset in masks.unwrap(loop.dataloader.dataset):
                # mmpretrain's have none themselves, only their loaders.
                parts = (dataset, *getattr(dataset.pipeline, 'transforms', ()))
                if not any(_is_remote(getattr(part, 'backend_args', None)) for part in parts):
                    splits.append(
                        Split(
                            mode,
                            dataset,
                            metrics=getattr(getattr(loop, 'evaluator', None), 'metrics', []),
                            configs=[*configs] if isinstance(configs, (list, tuple)) else [configs],
                            read=self._read,
                        )
                    )
        return splits


def _check_before(build_loop: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Wrap a method of Runner that builds a loop, and with it the datasets."""

    @wraps(build_loop)
    def check_and_build(runner: Runner, loop: Any) -> Any:
        for hook in runner.hooks:
            if isinstance(hook, DataCheckHook) and not isinstance(loop, BaseLoop):
                hook.before_build(getattr(runner, f'_{mode}_dataloader'))
        return build_loop(runner, loop)

    check_and_build.is_checked = True  # type: ignore[attr-defined]
    return check_and_build


def _note(split: Split) -> str:
    """Say what is not checked of a dataset: ``'pictures and labels of Videos (train)'``."""
    lacking = ' and '.join(split.unchecked)
    return f'{lacking} of {type(split.dataset).__name__} ({split.mode})' if lacking else ''


def _is_remote(backend_args: dict[str, Any] | None) -> bool:
    return bool(backend_args) and backend_args != dict(backend='local')


def _datasets(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the configs of datasets, without their wrappers."""
    if isinstance(config, (list, tuple)):
        for part in config:
            yield from _datasets(part)
    elif isinstance(config, dict):
        inner = [config[key] for key in ('dataset', 'datasets') if key in config]
        if inner:
            yield from _datasets(inner)
        elif 'type' in config:
            yield config
