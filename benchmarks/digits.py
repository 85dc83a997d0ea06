"""Train timm's models from scratch on few pictures: what the start and the learning rates give.

The data are scikit-learn's handwritten digits, enlarged to 64x64: 320 for training, the other 1477
for the test. Each model gets 200 steps of AdamW.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import timm
import torch
import torch.nn.functional as F
from mmengine.utils import track_iter_progress
from recording import describe_machine, save
from sklearn.datasets import load_digits
from torch import Tensor, nn

import mmcare.timm  # noqa: F401 (registers care_s0)
from mmcare.files import check_writable

STEPS, BATCH_SIZE, TRAINING_IMAGES = 200, 32, 320
# Name of a row: model, its options, learning rate, factor of the layer scales' learning rate.
ROWS = {
    'CARE-S0, as published': ('care_s0', {}, 1e-3, 1.0),
    'CARE-S0, from_scratch=True': ('care_s0', dict(from_scratch=True), 1e-3, 3.0),
    'CARE-S0, from_scratch=True, 3e-3': ('care_s0', dict(from_scratch=True), 3e-3, 3.0),
    'ResNet18': ('resnet18', {}, 1e-3, 1.0),
    'ResNet18, 3e-3': ('resnet18', {}, 3e-3, 1.0),
}


def load_data(seed: int) -> tuple[Tensor, Tensor]:
    """Return all images (1797, 3, 64, 64), normalized, and their classes, in a seeded order."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None]
    images = F.interpolate((images - images.mean()) / images.std(), (64, 64), mode='bilinear')
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return images[order].expand(-1, 3, -1, -1), torch.from_numpy(digits.target)[order]


def build_optimizer(model: nn.Module, lr: float, factor: float) -> torch.optim.Optimizer:
    """Give layer scales (gamma) another learning rate, and no weight decay."""
    named = [*model.named_parameters()]
    scales = [value for name, value in named if name.endswith('gamma')]
    groups = [dict(params=[value for name, value in named if not name.endswith('gamma')])]
    groups += [dict(params=scales, lr=factor * lr, weight_decay=0.0)] if scales else []
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), weight_decay=0.05)


def measure(row: str, seed: int) -> float:
    """Train one model; return the accuracy on the test images, in per cent."""
    name, options, lr, factor = ROWS[row]
    images, classes = load_data(seed)
    torch.manual_seed(seed)
    model = timm.create_model(name, num_classes=10, **options).train()
    optimizer = build_optimizer(model, lr, factor)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        [group['lr'] for group in optimizer.param_groups],
        STEPS,
        pct_start=0.1,
        cycle_momentum=False,
    )
    for _ in range(STEPS):
        batch = torch.randint(TRAINING_IMAGES, (BATCH_SIZE,))
        loss = F.cross_entropy(model(images[batch]), classes[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        predicted = [model(part).argmax(1) for part in images[TRAINING_IMAGES:].split(128)]
    right = torch.cat(predicted) == classes[TRAINING_IMAGES:]
    return round(100 * right.double().mean().item(), 1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all rows and seeds, and write a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--out', type=Path, default='work_dirs/digits.csv')
    args = parser.parse_args(arguments)
    check_writable(args.out.parent)
    jobs = [(row, seed) for seed in range(args.seeds) for row in ROWS]
    results = [(*job, measure(*job)) for job in track_iter_progress(jobs)]
    table = pd.DataFrame(results, columns=['model', 'seed', 'accuracy'])
    save(args.out, table)
    print('', *describe_machine('timm', 'scikit-learn'), sep='\n')
    print(table.groupby('model', sort=False)['accuracy'].agg(['mean', 'min', 'max']).round(1))


if __name__ == '__main__':
    main()
