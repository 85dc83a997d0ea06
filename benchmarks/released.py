"""Compare S0, S1 and S2 with the code of CARE's authors, in a clone that you give.

Both compute the same drawn image with the same drawn weights, in float32 and evaluation mode: four
maps, and the mean of the logits. The result, released.json, has for each network and output the
largest deviation, as a share of the output's largest magnitude.
"""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import timm
import timm.layers.helpers
import torch
from recording import describe_machine, save
from torch import Tensor, nn

import mmcare.timm
from mmcare.files import check_writable
from mmcare.models import CARE

SOURCE = 'https://github.com/zhouyuan888888/CARE-Transformer'
LIMIT = 1e-4


def import_released(clone: Path) -> object:
    """Import the authors' package ``models``, written for timm 0.6, with today's timm."""
    sys.modules.setdefault('timm.models.layers.helpers', timm.layers.helpers)
    sys.path.insert(0, str(clone))
    return importlib.import_module('models')


def draw_weights(network: nn.Module) -> None:
    """Draw all weights, so that each has an effect; layer scales are 0.1 to 0.4."""
    for name, tensor in network.state_dict().items():
        if name.endswith('gamma'):
            tensor.uniform_(0.1, 0.4)
        elif name.endswith('running_var'):
            tensor.uniform_(0.5, 1.5)
        elif tensor.dim() > 1:
            tensor.normal_(std=tensor[0].numel() ** -0.5)
        elif name.endswith('weight'):
            tensor.uniform_(0.7, 1.3)
        elif tensor.is_floating_point():
            tensor.normal_(std=0.1)


def released_outputs(network: nn.Module, image: Tensor) -> list[Tensor]:
    """Compute the outputs of the authors' stages, and the logits."""
    maps: list[Tensor] = []
    for stage in network.stages:  # type: ignore[union-attr]
        stage.register_forward_hook(lambda module, inputs, output: maps.append(output))
    logits = network(image)
    return [*maps, logits]


@torch.no_grad()
def compare(released: object, arch: str, shape: tuple[int, int]) -> dict[str, float]:
    """Return the deviation of each output of a network."""
    torch.manual_seed(0)
    theirs = getattr(released, f'CARETrans_{arch.upper()}')().eval()
    draw_weights(theirs)
    ours = mmcare.timm.CAREClassifier(arch).eval()
    ours.load_state_dict(theirs.state_dict())
    image = torch.randn(1, 3, *shape)
    expected = released_outputs(theirs, image)
    outputs = [*ours.backbone(image), ours(image)]
    names = [*(f'stage {number}' for number in range(1, 5)), 'logits']
    return {
        name: ((output - wanted).abs().max() / wanted.abs().max()).item()
        for name, output, wanted in zip(names, outputs, expected, strict=True)
    }


def main() -> None:
    """Compare each network, write and print the result; exit with 1 above 1e-4."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('clone', type=Path, help=f'a clone of {SOURCE}')
    parser.add_argument('--shape', type=int, nargs=2, default=(224, 224), metavar=('H', 'W'))
    parser.add_argument('--out-dir', type=Path, default=Path('work_dirs/released'), metavar='DIR')
    arguments = parser.parse_args()
    if not (arguments.clone / 'models' / 'CARETrans.py').exists():
        parser.error(f'{arguments.clone} is not a clone of {SOURCE}')
    check_writable(arguments.out_dir)
    released = import_released(arguments.clone)
    shape = tuple(arguments.shape)
    deviations = {arch: compare(released, arch, shape) for arch in CARE.arch_zoo}
    git = 'git', '-C', str(arguments.clone), 'rev-parse', 'HEAD'
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    record = dict(
        source=SOURCE,
        commit=commit,
        shape=shape,
        versions=describe_machine('timm'),
        deviations=deviations,
    )
    text = json.dumps(record, indent=1)
    save(arguments.out_dir / 'released.json', f'{text}\n')
    print(text)
    if max(max(each.values()) for each in deviations.values()) > LIMIT:
        sys.exit(f'error: an output deviates by more than {LIMIT}')


if __name__ == '__main__':
    main()
