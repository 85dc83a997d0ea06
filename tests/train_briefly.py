"""Train the models of configs for a few steps: ``train_briefly.py SCOPE RESULTS CONFIG...``

To be run in the folder of the configs, in a process of its own: what registers the backbone is
custom_imports in the configs, and nothing else. What a test wants to know goes to a JSON file.
"""

import json
import sys

import numpy as np
import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import PixelData

NUM_STEPS = 3
HEIGHT, WIDTH = 64, 96


def detection_batch():
    from mmdet.testing import demo_mm_inputs

    shape = (3, HEIGHT, WIDTH)
    return demo_mm_inputs(2, shape, num_items=[2, 3], num_classes=80, with_mask=True)


def random_images():
    rng = np.random.default_rng(0)
    return [
        torch.from_numpy(rng.integers(0, 256, (3, HEIGHT, WIDTH), dtype=np.uint8)) for _ in range(2)
    ]


def segmentation_batch():
    from mmseg.structures import SegDataSample

    samples = []
    for image in random_images():
        shape = dict(img_shape=(HEIGHT, WIDTH), ori_shape=(HEIGHT, WIDTH))
        sample = SegDataSample(metainfo=shape)
        sample.gt_sem_seg = PixelData(data=image[:1].long() % 150)
        samples.append(sample)
    return dict(inputs=random_images(), data_samples=samples)


def classification_batch():
    from mmpretrain.structures import DataSample

    samples = [DataSample().set_gt_label(label) for label in (3, 5)]
    return dict(inputs=torch.stack(random_images()), data_samples=samples)


def pose_batch():
    from mmpose.testing import get_packed_inputs

    return get_packed_inputs(2)


BATCHES = {
    'mmdet': detection_batch,
    'mmseg': segmentation_batch,
    'mmpretrain': classification_batch,
    'mmpose': pose_batch,
}


def make_smaller(model):
    """Change what costs time, in a model's config."""
    if 'size' in model.data_preprocessor:  # training images are padded to the crop
        model.data_preprocessor.size = (HEIGHT, WIDTH)
    if 'rpn_proposal' in model.get('train_cfg', {}):
        model.train_cfg.rpn_proposal.max_per_img = model.test_cfg.rpn.max_per_img = 20
        for stage in model.train_cfg.rcnn:
            stage.sampler.num = 16


def train_briefly(scope, filename):
    """Train on one batch; return what a test wants to know."""
    config = Config.fromfile(filename)
    # Where mmengine's runner takes it from, too.
    config.model.setdefault('data_preprocessor', config.get('data_preprocessor'))
    make_smaller(config.model)
    torch.manual_seed(0)
    model = revert_sync_batchnorm(MODELS.build(config.model))  # as mmengine's runner does
    model.init_weights()
    initial = {key: value.clone() for key, value in model.backbone.state_dict().items()}
    optim_wrapper = build_optim_wrapper(model, config.optim_wrapper)
    make_batch = BATCHES[scope]
    model.train()
    losses = [
        model.train_step(make_batch(), optim_wrapper)['loss'].item() for _ in range(NUM_STEPS)
    ]
    trained = model.backbone.state_dict()
    model.eval()
    with torch.no_grad():
        predictions = model.test_step(make_batch())
    weights = torch.load(config.checkpoint)['state_dict']
    groups = {
        parameter: group['lr']
        for group in optim_wrapper.optimizer.param_groups
        for parameter in group['params']
    }
    return dict(
        backbone=f'{type(model.backbone).__module__}.{type(model.backbone).__name__}',
        pretrained=all(
            torch.equal(value, weights[f'backbone.{key}']) for key, value in initial.items()
        ),
        losses=losses,
        untrained=[
            key
            for key, parameter in model.backbone.named_parameters()
            if torch.equal(initial[key], trained[key])
        ],
        stem_rate=groups[model.backbone.stem.conv.weight],
        head_rate=max(groups.values()),
        predictions=len(predictions),
    )


def main():
    scope, results, *filenames = sys.argv[1:]
    init_default_scope(scope)
    found = {filename: train_briefly(scope, filename) for filename in filenames}
    with open(results, 'w', encoding='utf-8') as file:
        json.dump(found, file)


if __name__ == '__main__':
    main()
