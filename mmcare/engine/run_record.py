"""What a run consists of, and whether all of its ranks have the same."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Dict

from mmengine.dist import (
    all_gather_object,
    broadcast_object_list,
    is_main_process,
)
from torch.nn.parallel import DistributedDataParallel

from mmcare.engine.data_checks.masks import unwrap as unwrap_dataset
from mmcare.engine.hooks import built_loops, unwrap
from mmcare.engine.training_state import TOOLBOXES
from mmcare.engine.world import world
from mmcare.models.loading import pretrained_cfgs
from mmcare.weights.reading import digest_weights
from mmcare_runtime.text import join_first

PACKAGES = 'mmcv', 'numpy', 'timm', 'torch', 'torchvision'
Record = Dict[str, Any]


def describe(runner: Any) -> Record:
    """Return what a training consists of, in plain values: enough to repeat it.

    Returns:
        ``versions`` of the packages that are imported, ``commits`` of checkouts, the ``command``,
        the :func:`~.world.world`, ``data`` by mode and ``weights``, with SHA-256 of local files.
    """
    return dict(
        iteration=runner.iter,
        versions=_versions(),
        commits=_commits(),
        command=shlex.join(sys.argv),
        world=world(runner),
        data=describe_data(runner),
        weights=_weights(runner) if is_main_process() else {},
    )


def describe_data(runner: Any) -> dict[str, dict[str, Any]]:
    """Return length, classes and annotation files of the datasets that are built, by mode."""
    data: dict[str, dict[str, Any]] = {}
    for mode, loop in built_loops(runner).items():
        dataset = loop.dataloader.dataset
        parts: list[Any] = unwrap_dataset(dataset) or [dataset]
        files = [path for part in parts if (path := getattr(part, 'ann_file', None))]
        classes = [getattr(part, 'metainfo', {}).get('classes') for part in parts]
        data[mode] = dict(
            type=type(dataset).__name__,
            length=len(dataset) if hasattr(dataset, '__len__') else None,
            classes=hashlib.sha256(repr(classes).encode()).hexdigest()[:12],
            annotations=_digest_files(files),
        )
    return data


def describe_rank(runner: Any, record: Record) -> dict[str, Any]:
    """Return what must be the same on all ranks, by name."""
    file = os.path.basename(runner._load_from or 'none')
    fields = dict(checkpoint=f'{file}, epoch {runner.epoch}, iteration {runner.iter}')
    model = runner.model
    if isinstance(model, DistributedDataParallel):  # other wrappers have parts of them
        parameters = dict(unwrap(model).named_parameters())
        fields['weights'] = digest_weights(parameters, {})[:12]
    for kind, key in (('version', 'versions'), ('commit', 'commits')):
        fields.update({f'{kind} of {name}': value for name, value in record.get(key, {}).items()})
    for mode, data in record['data'].items():
        fields.update({f'{mode} data, {key}': value for key, value in data.items()})
    settings = repr([*flatten(runner.cfg._cfg_dict)])
    fields['config'] = hashlib.sha256(settings.encode()).hexdigest()
    return fields


def flatten(config: Any, name: str = '') -> Iterator[tuple[str, str]]:
    """Yield the numbers and names in a config: ``'optim_wrapper.optimizer.lr', '0.1'``.

    Paths are left out: machines may keep the same files in different places.
    """
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from flatten(value, f'{name}.{key}' if name else str(key))
    elif isinstance(config, (list, tuple)):
        for index, value in enumerate(config):
            yield from flatten(value, f'{name}.{index}')
    elif isinstance(config, str):
        if '/' not in config and os.sep not in config:
            yield name, repr(config)
    elif config is None or isinstance(config, (bool, int, float)):
        yield name, repr(config)


def find_differences(values: Mapping[str, Any]) -> dict[str, str]:
    """Compare values of all ranks; all must call this.

    Returns:
        By name, for each value that differs, which ranks have which.
    """
    everyone = all_gather_object((socket.gethostname(), dict(values)))
    differing = {}
    for name in dict.fromkeys(key for _, given in everyone for key in given):
        groups: dict[str, list[str]] = {}
        for rank, (host, given) in enumerate(everyone):
            groups.setdefault(str(given.get(name)), []).append(f'{rank} on {host}')
        if len(groups) > 1:
            differing[name] = '; '.join(map(_name_group, groups.items()))
    return differing


def find_unshared(folders: Mapping[str, str]) -> dict[str, str]:
    """Look whether all ranks see the main process's folders; all must call this.

    Folders of the same name may be on the disks of several machines, so a folder is made in each.

    Returns:
        By key, for each folder that differs, which ranks see another.
    """
    marks: list[Any] = [{}]
    if is_main_process():
        for folder in folders.values():
            os.makedirs(folder, exist_ok=True)  # as MMEngine does for collect_dir
        marks = [{key: mkdtemp('', '.mmcare_', folder) for key, folder in folders.items()}]
    broadcast_object_list(marks)
    seen = {}
    for key, mark in marks[0].items():
        folder = folders.get(key, '')
        # In the current folder, MMEngine also calls mkdtemp and tells the others the result: from
        # Python 3.12 on, the whole path, so that their current folder may be another one.
        path = mark if folder == '.' else os.path.join(folder, os.path.basename(mark))
        is_shared = os.path.isdir(path)
        seen[key] = 'shared' if is_shared else f'another, {os.path.abspath(folder)}'
    differing = find_differences(seen)
    for mark in marks[0].values() if is_main_process() else ():
        os.rmdir(mark)
    return differing


def _name_group(group: tuple[str, list[str]]) -> str:
    value, ranks = group
    return f'rank{"s" * (len(ranks) > 1)} {join_first(ranks)}: {value}'


def _versions() -> dict[str, str]:
    modules = {name: sys.modules.get(name) for name in sorted({*TOOLBOXES, *PACKAGES})}
    versions = {name: getattr(module, '__version__', None) for name, module in modules.items()}
    known = {name: str(version) for name, version in versions.items() if version}
    return dict(python=platform.python_version(), **known)


def _commits() -> dict[str, str]:
    """Return the commits of mmcare's checkout and of the current folder, if these are some."""
    root, tracked = Path(__file__).parents[2], 'mmcare/engine/run_record.py'
    is_checkout = _git(root, 'ls-files', tracked) == tracked  # not an environment in a checkout
    folders = {'current folder': Path(), **({'mmcare': root} if is_checkout else {})}
    arguments = 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*'
    commits = {name: _git(folder, *arguments) for name, folder in folders.items()}
    return {name: commit for name, commit in commits.items() if commit}


def _git(folder: Path, *arguments: str) -> str:
    command = ['git', '-C', str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ''


def _weights(runner: Any) -> dict[str, str]:
    """Return the files that the model's weights are from."""
    modules = unwrap(runner.model).modules()
    files = [cfg.get('checkpoint') for module in modules for cfg in pretrained_cfgs(module)]
    return _digest_files([*files, runner._load_from])


def _digest_files(paths: Iterable[Any]) -> dict[str, str]:
    digests: dict[str, str] = {}
    for path in dict.fromkeys(path for path in paths if isinstance(path, (str, os.PathLike))):
        name, number = os.path.basename(path), 2
        while name in digests:  # of another folder; machines may differ in those
            name, number = f'{os.path.basename(path)} ({number})', number + 1
        digests[name] = _digest(os.path.abspath(path))
    return digests


def _digest(path: str) -> str:
    """Compute the SHA-256 of a local file."""
    if not os.path.isfile(path):
        return 'not a local file'
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while part := file.read(1 << 22):
            digest.update(part)
    return digest.hexdigest()
