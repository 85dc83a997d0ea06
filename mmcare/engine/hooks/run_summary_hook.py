from __future__ import annotations

import logging
import os
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmengine.hooks import CheckpointHook
from mmengine.logging import MMLogger

from mmcare.engine.hooks import SwitchableHook, log, unwrap
from mmcare.engine.hooks.plot_hook import CURVES, PREDICTIONS
from mmcare.registry import HOOKS
from mmcare.shipped import CONFIGS

TOOLBOXES = ('mmdet', 'mmseg', 'mmpretrain')
# Iterations from scratch on the four sets of docs/results.md.
USUAL = (500, 1040)
# How texts begin that are not shown on the screen.
FOR_THE_FILE = (
    'Hooks will be executed in',
    '"FileClient" will be deprecated',  # these two: by MMEngine's own CheckpointHook
    '"HardDiskBackend" is the alias',
    'This run:',
)


@HOOKS.register_module()
class RunSummaryHook(SwitchableHook):
    """Say how long a training takes and where it goes; at its end, what came of it.

    The end names the best epoch, the pictures of :class:`PlotHook`, the smallest file to keep, and
    the commands to test, export and draw with, if the config is for a toolbox that has them.
    Texts that no user acts on go only to the log file: MMEngine's list of hooks, of more than a
    hundred lines, and its advice to itself, and the record of :class:`RunRecordHook`.
    """

    priority = 'LOWEST'  # after the last checkpoint

    def __init__(self, enabled: bool = True) -> None:
        super().__init__(enabled)
        if not enabled:
            return
        warnings.filterwarnings('ignore', 'torch.meshgrid')  # by mmdet's anchor-free heads
        for handler in MMLogger.get_current_instance().handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.addFilter(_is_for_users)

    def before_train(self, runner: Any) -> None:
        """Log the size of the model, the length of the run and its folder."""
        model = unwrap(runner.model)
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        text = f'{type(model).__name__}: {millions:.1f} M parameters; {runner.max_iters} iterations'
        length = getattr(runner.train_dataloader, '__len__', lambda: 0)()
        if length:
            text += f', {length} in an epoch'
        log(text)
        if ((runner.cfg.get('model') or {}).get('backbone') or {}).get('from_scratch'):
            text = 'From scratch, {} to {} iterations were run on the sets of docs/results.md'
            if runner.max_iters < USUAL[0]:
                text += ': after fewer, predictions may have low scores only'
            log(text.format(*USUAL))
        log(f'Results go to {_shorten(runner.work_dir)}')

    def after_train(self, runner: Any) -> None:
        """Log what came of the run, and the next commands."""
        log('\n'.join(('The training has ended.', *_summarize(runner))))


def _summarize(runner: Any) -> Iterator[str]:
    """Yield the lines of the end."""
    info = runner.message_hub.runtime_info
    hook = next((hook for hook in runner.hooks if isinstance(hook, CheckpointHook)), None)
    metrics = getattr(hook, 'key_indicators', None) or ['']
    suffix = f'_{metrics[0]}' if len(metrics) > 1 else ''  # MMEngine's names
    best, last = (Path(info.get(key) or '') for key in (f'best_ckpt{suffix}', 'last_ckpt'))
    if best.is_file():
        unit, number = best.stem.split('_')[-2:]  # epoch or iter
        yield f'Best {metrics[0]}: {info[f"best_score{suffix}"]:.4g}, after {unit} {number}'
    pictures = [Path(runner.work_dir, name) for name in (CURVES, PREDICTIONS)]
    if shown := ', '.join(_shorten(path) for path in pictures if path.is_file()):
        yield f'Look at: {shown}'
    checkpoint = best if best.is_file() else last
    if not checkpoint.is_file():
        return
    text = f'Keep: {_shorten(checkpoint)} ({_megabytes(checkpoint)})'
    if checkpoint == best and last.is_file():
        text += f'; only --resume needs {last.name} ({_megabytes(last)})'
    yield text
    scope, config = runner.cfg.get('default_scope'), runner.cfg.filename
    if scope in TOOLBOXES and config:
        yield 'Next, to test, export and draw:'
        yield from _commands(scope, Path(config), checkpoint, _first_picture(runner))


def _commands(scope: str, config: Path, checkpoint: Path, picture: str) -> Iterator[str]:
    weights, name = (shlex.quote(_shorten(path)) for path in (checkpoint, config))
    tool = _shorten((CONFIGS.parent / 'tools' / 'export.py').resolve())
    tool = 'mim run mmcare export' if os.path.isabs(tool) else f'python {tool}'
    yield f'    mim test {scope} {name} --checkpoint {weights}'
    yield (
        f'    {tool} {name} {weights} --part model --outputs decoded --format onnx '
        '--out-dir exports'
    )
    file = f'exports/{shlex.quote(config.stem)}_model_*_decoded.onnx'
    yield f'    python -m mmcare_runtime {file} {shlex.quote(picture)} --overwrite'


def _first_picture(runner: Any) -> str:
    """Return the path of the first validation picture, or a word in its place."""
    dataset: Any = runner.val_dataloader.dataset if runner.val_loop else None
    has_info = hasattr(dataset, 'get_data_info') and len(dataset)
    info = dataset.get_data_info(0) if has_info else {}
    return _shorten(info.get('img_path') or 'PICTURE')


def _shorten(path: str | Path) -> str:
    """Return a path relative to the current folder, if it is in there."""
    try:
        return str(Path(os.path.abspath(path)).relative_to(os.getcwd()))
    except ValueError:  # not in there, or on another drive
        return str(path)


def _is_for_users(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(FOR_THE_FILE)


def _megabytes(path: Path) -> str:
    return f'{path.stat().st_size / 1e6:.0f} MB'
