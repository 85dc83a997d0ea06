"""A tiny classifier, the config of it, and a runner: what files are loaded into."""

from pathlib import Path
from typing import Any

import mmengine.hooks.runtime_info_hook
import mmengine.runner.runner
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import nn
from torch.utils.data import Dataset

import mmcare.classification  # noqa: F401 (registers the head)
from mmcare.engine import CheckingRunner

TINY = dict(
    depths=(1, 1, 1, 2),
    widths=(12, 12, 24, 24),
    memory_widths=(4, 4, 8, 8),
    expansions=((2, 2),) * 4,
    head_channels=(1, 1, 4, 8),
)
NUM_CLASSES, IN_CHANNELS = 10, 64
CONFIG = f"""\
default_scope = 'mmpretrain'
custom_imports = dict(imports=['mmcare', 'mmcare.classification'])
model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        type='ClsDataPreprocessor',
        num_classes={NUM_CLASSES},
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        to_rgb=True,
    ),
    backbone=dict(type='mmcare.CARE', arch={TINY!r}, out_indices=(3,)),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='mmcare.CAREClsHead', num_classes={NUM_CLASSES}, in_channels={IN_CHANNELS}),
)
"""


def build_classifier() -> nn.Module:
    """Build the tiny classifier, from one seed."""
    init_default_scope('mmpretrain')
    torch.manual_seed(0)
    return MODELS.build(Config.fromstring(CONFIG, '.py').model)


class Images(Dataset):
    """Two images with labels."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        from mmpretrain.structures import DataSample

        image = torch.full((3, 32, 32), 10 * index, dtype=torch.uint8)
        return dict(inputs=image, data_samples=DataSample().set_gt_label(index))


# Starts git, which is no sign of code in a file here.
mmengine.runner.runner.get_git_hash = str
mmengine.hooks.runtime_info_hook.get_git_hash = str


class QuietRunner(CheckingRunner):
    """A runner that does not look at compilers and devices, which starts processes."""

    def _log_env(self, env_cfg: dict) -> None:
        pass


def build_runner(work_dir: Path, epochs: int, **arguments: Any) -> QuietRunner:
    """Build a runner that trains the classifier for some epochs of one iteration."""
    return QuietRunner(
        model=build_classifier(),
        work_dir=str(work_dir),
        experiment_name=work_dir.name,
        train_dataloader=dict(
            dataset=Images(),
            batch_size=2,
            sampler=dict(type='DefaultSampler', shuffle=True),
            collate_fn=dict(type='default_collate'),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=1e-3)),
        param_scheduler=dict(type='MultiStepLR', milestones=[1], by_epoch=True),
        default_hooks=dict(
            exact_resume=dict(type='mmcare.ExactResumeHook'),
            data_check=dict(type='mmcare.DataCheckHook'),
        ),
        default_scope='mmpretrain',
        log_level='WARNING',
        **arguments,
    )
