"""What one of two gloo processes does for test_distributed.py: ``distributed_worker.py FOLDER``.

The folder holds ``detection`` and ``segmentation`` data. Results go to ``FOLDER/rank{0,1}.json``.
"""

import json
import os
import random
import shutil
import sys
import warnings
from argparse import Namespace
from copy import deepcopy
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from helpers import THIN, thin_backbone
from mmengine.dataset import BaseDataset, pseudo_collate
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS
from mmengine.runner import Runner
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import Subset
from toy_configs import toy_config
from toy_training import Model, Numbers, StopAt, names, saved, train

from mmcare.engine import ChannelsLastHook
from mmcare.models import CARE

# mmengine's own start selects a GPU first, and PyTorch's SyncBN needs one.
torch.distributed.init_process_group('gloo')
RANK = torch.distributed.get_rank()
WARN = 'mmcare.engine.hooks.run_record_hook.warn'
ON_CPU = dict(
    launcher='pytorch',
    sync_bn=None,
    model_wrapper_cfg=dict(type='MMDistributedDataParallel', device_ids=None),
)


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def step_gradients(model, batch, seed):
    """The gradients of a training step from seeded generators; the weights stay as they are."""
    found = {}

    def take(optimizer, args, kwargs):
        parameters = getattr(model, 'module', model).named_parameters()
        found.update({name: p.grad.clone() for name, p in parameters if p.requires_grad})

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(take)
    seed_all(seed)
    model.train_step(deepcopy(batch), OptimWrapper(optimizer))
    return found


def deviation(found, expected):
    assert found.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    return max(((found[k] - expected[k]).abs().max() / largest).item() for k in expected)


def gradients(task, folder, **changes):
    """Compare two processes, with two images each, with one process on each half."""
    data = folder / task
    config = toy_config(task, data, folder / f'{task}_{RANK}', **ON_CPU, **changes)
    runner = Runner.from_cfg(config)
    runner._init_model_weights()
    dataset = runner.build_dataloader(config.train_dataloader).dataset
    seed_all(0)
    samples = [dataset[index] for index in range(4)]
    halves = [pseudo_collate(samples[:2]), pseudo_collate(samples[2:])]
    alone = MODELS.build(config.model)
    alone.load_state_dict(runner.model.module.state_dict())
    for model in (runner.model, alone):
        model.train()
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()  # plain norms use the statistics of a process's own images
    found = step_gradients(runner.model, halves[RANK], RANK)
    first, second = (step_gradients(alone, half, seed) for seed, half in enumerate(halves))
    return dict(
        mean=deviation(found, {name: (first[name] + second[name]) / 2 for name in first}),
        one_half=deviation(found, first if RANK else second),
    )


def unused_parameters():
    """Two steps each: the second raises if the first left a parameter without gradient."""
    image = torch.rand(2, 3, 32, 32)
    subsets = (0,), (1,), (2,), (3,), (0, 1, 2, 3)
    again = dict(with_cp='activations'), dict(with_cp=True, out_norm_cfg=dict(type='BN'))
    for out_indices, options in product(subsets, ({}, *again)):
        model = MMDistributedDataParallel(CARE(THIN, out_indices=out_indices, **options))
        for _ in range(2):
            sum(output.square().mean() for output in model(image)).backward()


def channels_last():
    """Gradients with ChannelsLastHook and without, and whether buckets have another layout."""
    network, gradients = thin_backbone(), []
    torch.set_warn_always(True)
    with warnings.catch_warnings(record=True) as warned:
        for hook in (None, ChannelsLastHook()):
            model = MMDistributedDataParallel(deepcopy(network))
            if hook:
                hook.before_train(Namespace(model=model))
            for _ in range(2):
                model.zero_grad()
                sum(
                    each.mean() for each in model(torch.full((2, 3, 32, 32), RANK + 1.0))
                ).backward()
            gradients.append({name: one.grad for name, one in model.module.named_parameters()})
    texts = [str(each.message) for each in warned]
    return dict(
        deviation=deviation(*gradients),
        warned=any('do not match bucket view strides' in text for text in texts),
    )


def resume(folder, by_epoch):
    name = 'epochs' if by_epoch else 'iterations'
    whole, parts = folder / f'whole_{name}_0', folder / f'parts_{name}'
    options = dict(by_epoch=by_epoch, launcher='pytorch', cfg=dict(ON_CPU))
    train(folder / f'whole_{name}_{RANK}', **options)
    train(parts, hooks=[StopAt(6)], **options)
    torch.distributed.barrier()
    runner = train(parts, resume=True, **options)
    torch.distributed.barrier()  # rank 0 has written the last file
    last = torch.load((whole / 'last_checkpoint').read_text())['state_dict']
    weights = runner.model.module.state_dict()
    return dict(
        written=names(folder / f'whole_{name}_{RANK}'),
        draws=torch.rand(3).tolist(),
        same_files=saved(parts) == saved(whole),
        different=[
            key
            for key, value in weights.items()
            # Buffers of plain norms are those of the process's own images; rank 0 saves its own.
            if not torch.equal(value, last[key]) and (RANK == 0 or 'running' not in key)
        ],
    )


def data_check(folder):
    """What each process raises where the annotations lack a key, and where all are crowds."""
    data = folder / 'detection'
    config = toy_config('detection', data, folder / f'check_{RANK}', **ON_CPU)
    file = data / 'annotations/instances_train2017.json'
    content = json.loads(file.read_text())
    errors = []
    for number, (key, value) in enumerate([('area', None), ('iscrowd', 1)]):
        broken = data / f'annotations/{key}.json'
        if RANK == 0:
            items = [{**item, key: value} for item in content['annotations']]
            broken.write_text(json.dumps(dict(content, annotations=items)))
        torch.distributed.barrier()
        config.experiment_name = f'check_{RANK}_{number}'
        config.train_dataloader.dataset.ann_file = f'annotations/{broken.name}'
        try:
            Runner.from_cfg(config).train()
        except ValueError as error:
            errors.append(str(error))
    return errors


class Files(BaseDataset):
    """A dataset with an annotation file, for as long as no sample is needed."""

    def load_data_list(self):
        return [{}] * 4


class OnDisk(BaseMetric):
    """A metric that collects results in the current folder."""

    def process(self, data_batch, data_samples):
        pass

    def compute_metrics(self, results):
        return {}


def differences(folder):
    """What each process raises, and rank 0 logs, where something is different on rank 1."""
    own, home = folder / 'own' / str(RANK), os.getcwd()
    own.mkdir(parents=True)
    (own / 'list.json').write_text(str(RANK))
    torch.manual_seed(RANK)
    torch.save(dict(state_dict=Model().state_dict()), own / 'weights.pth')
    if RANK == 1:
        shutil.copytree(folder / 'parts_epochs', own / 'parts')
    other = Numbers()
    other.metainfo = dict(classes=('a', 'c') if RANK else ('a', 'b'))
    disk = dict(work_dir=own / 'parts', resume=True)
    changes = dict(
        samples=dict(loader=dict(dataset=Subset(Numbers(), range(8 - 2 * RANK)))),
        classes=dict(loader=dict(dataset=other)),
        annotations=dict(loader=dict(dataset=Files(ann_file=str(own / 'list.json')))),
        config=dict(cfg=dict(ON_CPU, optim_wrapper=dict(accumulative_counts=1 + RANK))),
        weights=dict(load_from=str(own / 'weights.pth')),
        folder=dict(val_evaluator=Evaluator(OnDisk())),
        checkpoint=disk,
        checkpoint_of_mmengine=dict(disk, checkpoint=dict(type='CheckpointHook')),
        versions={},
    )
    raised, warned = {}, {}
    for name, options in changes.items():
        hooks = [dict(type='mmcare.RunRecordHook'), StopAt(0)]
        given = dict(work_dir=folder / name, launcher='pytorch', cfg=dict(ON_CPU), hooks=hooks)
        os.chdir(own if name == 'folder' else home)
        version = f'1.{RANK}' if name == 'versions' else np.__version__
        with patch.object(np, '__version__', version), patch(WARN) as warn:
            try:
                train(**{**given, **options})
            except RuntimeError as error:
                raised[name] = str(error)
        warned[name] = [call.args[0] for call in warn.call_args_list]
    return dict(raised=raised, warned=warned)


def healthy(folder):
    """Train on shards of four and three samples."""
    runner = train(
        folder / 'healthy',
        launcher='pytorch',
        cfg=dict(ON_CPU),
        hooks=[dict(type='mmcare.RunRecordHook')],
        loader=dict(
            batch_size=4,
            dataset=Subset(Numbers(), range(7)),
            sampler=dict(type='DefaultSampler', round_up=False),
        ),
    )
    speed = runner.message_hub.get_scalar('train/images_per_second').current()
    return dict(iterations=runner.iter, images_per_second=speed)


def main(folder):
    fixed = {'model.backbone.drop_path_rate': 0.0, 'model.decode_head.dropout_ratio': 0.0}
    recomputed = {'model.backbone.drop_path_rate': 0.5, 'model.backbone.with_cp': 'activations'}
    unused_parameters()
    results = dict(
        channels_last=channels_last(),
        detection=gradients('detection', folder, **recomputed),
        segmentation=gradients('segmentation', folder, **fixed),
        data_check=data_check(folder),
        resume=dict(epochs=resume(folder, True), iterations=resume(folder, False)),
        healthy=healthy(folder),
    )
    results['differences'] = differences(folder)  # of a resumed run
    (folder / f'rank{RANK}.json').write_text(json.dumps(results))


if __name__ == '__main__':
    main(Path(sys.argv[1]))
