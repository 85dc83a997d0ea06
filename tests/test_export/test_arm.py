"""Exported files on ARM's instructions, by an emulator that `make test-arm` fetches. No times."""

import json
import os
import sys
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import open_runtime
from helpers import ROOT, craft_heads, run
from PIL import Image
from toy_configs import sure_model

from mmcare.export import export_model, load_model, open_exported
from mmcare.export.images import draw_images
from mmcare.models.backbones.care import LinearAttention

pytestmark = pytest.mark.slow
ARM, SHAPE = ROOT / '.venv/arm', (256, 256)
# What a processor says of itself. The second has neither dot products nor arithmetic in float16.
PARTS = {'cortex-a76': '0xd0b', 'cortex-a57': '0xd07'}


@pytest.fixture(scope='module')
@torch.no_grad()
def folder(tmp_path_factory):
    """Write files, images, and the outputs that the files should give; for good in ARM_FILES."""
    for package in ('litert_torch', 'ncnn', 'pnnx'):
        pytest.importorskip(package)
    folder = Path(os.environ.get('ARM_FILES') or tmp_path_factory.mktemp('files'))
    jobs, drawn = [], {name: image.pixels for name, image in draw_images(3, SHAPE).items()}
    padded = torch.nn.functional.pad(drawn['smooth'][..., :160, :200], (0, 56, 0, 96))
    images = dict(picture=drawn['smooth'], padded=padded, zeros=drawn['zeros'])
    np.savez(folder / 'images.npz', **images)
    crafted = replace(load_model('s0'), name='crafted')
    attentions = [one for one in crafted.task.modules() if isinstance(one, LinearAttention)]
    for attention, bias in zip(attentions, cycle([-6, -9, -15, 300])):
        craft_heads(attention, bias)

    def export(source, engines, wanted, **options):
        formats = {engine.split(',')[0] for engine in engines}
        reports = export_model(source, folder, SHAPE, (*formats,), **options)
        for engine, limit in engines.items():
            file = reports[engine.split(',')[0]]['file']
            outputs = {key: wanted(file, image) for key, image in images.items()}
            each = {f'{key}{i}': one for key, all in outputs.items() for i, one in enumerate(all)}
            np.savez(folder / f'{file}.npz', **each)
            jobs.append(dict(file=file, engine=engine, limit=limit))

    limits = {'ncnn': 1e-2, 'onnx': 1e-5, 'litert': 1e-5, 'litert, float16': 1e-2}
    for source in (load_model('s0'), crafted):
        export(source, limits, lambda _, image, source=source: source.task(image))
    here = lambda file, image: open_exported(folder / file).run(image.numpy())  # noqa: E731
    pictures = tmp_path_factory.mktemp('pictures')
    for seed in range(4):
        noise = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(noise).resize(SHAPE, Image.BICUBIC).save(pictures / f'{seed}.png')
    # Between int8 layers, depth-wise convolutions are in float32: values at the middle between two
    # integers are rounded differently on each CPU.
    export(load_model('s0'), dict(litert=3e-2), here, precision='int8', images=pictures)

    def boxes(file, image):
        found = open_runtime(folder / file)(image.numpy())
        assert len(found[0])
        return map(torch.from_numpy, found)

    detector = sure_model('retinanet', tmp_path_factory.mktemp('detector'))
    for name, weight in detector.task.named_parameters():
        if 'head' in name and weight.dim() > 1:
            weight.mul_(0.6)  # many scores would be 1
    export(detector, {'onnx, predict': 1e-4}, boxes, outputs='decoded')
    (folder / 'jobs.json').write_text(json.dumps(jobs))
    return folder


@pytest.mark.parametrize('cpu', ['here', *PARTS])
def test_files(folder, cpu):
    """In float16 within 1e-2, on pictures, padded ones and zeros, also with crafted heads; no NaN.

    ncnn has its default options. mmcare_runtime finds the same boxes. int8 gives what it gives
    here within 3e-2, with dot products and without.
    """
    script = Path(__file__).with_name('engines.py')
    if cpu == 'here':
        return print(run(sys.executable, script, folder).stdout)
    if not (ARM / '.ready').exists():
        pytest.skip('no emulator, or no packages for ARM: `make test-arm` fetches them')
    about = f'CPU implementer: 0x41\nCPU architecture: 8\nCPU part: {PARTS[cpu]}\n'
    (ARM / 'proc').mkdir(exist_ok=True)
    (ARM / 'proc/cpuinfo').write_text(f'processor: 0\n{about}\n')
    engines = ['litert'] * (cpu != 'cortex-a76')
    emulator = ARM / 'usr/bin/qemu-aarch64-static', '-L', ARM, '-cpu', cpu
    paths = dict(
        PYTHONHOME=str(ARM / 'usr'), PYTHONPATH=f'{ARM / "site"}:{ROOT}', OMP_NUM_THREADS='1'
    )
    print(run(*emulator, ARM / 'usr/bin/python3.11', script, folder, *engines, **paths).stdout)
