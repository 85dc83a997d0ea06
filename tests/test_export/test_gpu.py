"""LiteRT's GPU accelerator, in float32 and float16; a driver of Vulkan in software will do."""

import numpy as np
import pytest
import torch
from engines import open_litert
from helpers import craft_heads
from toy_configs import toy_config

from mmcare.export import export_model, load_model
from mmcare.export.images import draw_images

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module', autouse=True)
def driver(tmp_path_factory):
    """Skip where not even a rectifier runs: that says more than looking for drivers."""
    converter, file = (
        pytest.importorskip('litert_torch'),
        tmp_path_factory.mktemp('gpu') / 'a.tflite',
    )
    converter.convert(torch.nn.ReLU(), (torch.zeros(1, 4, 4, 3),)).export(str(file))
    try:
        open_litert(file, gpu=True)
    except RuntimeError:
        pytest.skip('LiteRT finds no GPU; Debian has one in software: mesa-vulkan-drivers 25')


@torch.no_grad()
@pytest.mark.parametrize('task', ['backbone', 'classification', 'segmentation', 'retinanet'])
def test_whole_file_on_the_gpu(tmp_path, task):
    alone = task == 'backbone'
    toy_config('retinanet' if alone else task, tmp_path, tmp_path).dump(tmp_path / 'toy.py')
    source = load_model(tmp_path / 'toy.py', part='backbone' if alone else 'model')
    image = draw_images(3, (64, 96))['smooth'].pixels
    expected = craft_heads(source.task, -9)(image)
    report = export_model(source, tmp_path, (64, 96), ('litert',))['litert']
    for exact, limit in ((True, 1e-5), (False, 1e-2)):
        run = open_litert(tmp_path / report['file'], gpu=True, enforce_f32=exact)
        for one, found in zip(expected, run(image.numpy()), strict=True):
            assert np.abs(one.numpy() - found).max() <= limit * one.abs().max()
