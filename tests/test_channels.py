"""Gray and many-band pictures: from RGB weights through training to a file for phones."""

import numpy as np
import pytest
import torch
from helpers import newer, published_state, thin_backbone
from mmengine.config import Config
from mmengine.runner import Runner
from PIL import Image
from test_configs import FILES_ON_PAGES
from toy_training import StopAt

from mmcare.models.loading import FIRST
from mmcare.weights.reading import load_weights

toy_configs = pytest.importorskip('toy_configs')
SIZE = toy_configs.SIZE


exec(FILES_ON_PAGES['load_bands'], {})  # the page skips it: it registers once


def change_pictures(config, bands):
    """Let a config read gray or many-band pictures, as docs/use_in_your_project.md says."""
    load = dict(type='LoadBands') if bands > 1 else dict(type='LoadImageFromFile')
    load.update(dict(color_type='grayscale') if bands == 1 else {})
    for mode in toy_configs.MODES:
        dataset = config[f'{mode}_dataloader'].dataset
        steps = [step for step in dataset.pipeline if step.type != 'PhotoMetricDistortion']
        dataset.pipeline = [load, *steps[1:]]
        dataset.img_suffix = '.jpg' if bands == 1 else '.npy'
    config.model.backbone.in_channels = bands
    config.model.data_preprocessor.update(mean=[100.0] * bands, std=[50.0] * bands)
    config.model.data_preprocessor.bgr_to_rgb = False


@pytest.mark.conversion
@newer
@pytest.mark.parametrize(
    ('bands', 'kind'),
    [
        (5, 'onnx'),
        *(pytest.param(bands, 'litert', marks=pytest.mark.slow) for bands in (1, 5)),
    ],
)
def test_gray_and_five_bands(bands, kind, tmp_path):
    from mmcare.export import export_model, load_model

    toy_configs.make_data('segmentation', tmp_path / 'data')
    for path in (tmp_path / 'data').rglob('images/*/*.jpg') if bands > 1 else ():
        pixels = np.asarray(Image.open(path))
        np.save(path.with_suffix('.npy'), pixels[..., np.arange(bands) % 3])
        path.unlink()
    source = thin_backbone()
    torch.save(published_state(source), tmp_path / 'CARE.pth.tar')
    config = toy_configs.toy_config('segmentation', tmp_path / 'data', tmp_path / 'run')
    change_pictures(config, bands)
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'CARE.pth.tar'))
    config.model.backbone.init_cfg = init_cfg
    config.dump(tmp_path / 'config.py')
    config.train_cfg.val_interval = 9
    config = Config(config.to_dict(), format_python_code=False)  # which takes long
    seen = []
    runner = Runner.from_cfg(config)
    hook = StopAt(2)
    hook.before_train = lambda runner: seen.append(runner.model.backbone.stem.conv.weight.clone())
    runner.register_hook(hook)
    runner.train()
    rgb = source.state_dict()[FIRST]
    expected = sum(rgb[:, [i]] for i in range(3))
    if bands > 1:
        expected = rgb[:, [0, 1, 2, 0, 1]] * 3 / bands
    torch.testing.assert_close(seen, [expected])
    checkpoint = tmp_path / 'run' / 'iter_2.pth'
    assert not torch.equal(load_weights(checkpoint)[f'backbone.{FIRST}'], expected)
    exported = load_model(tmp_path / 'config.py', checkpoint, part='model')
    (image,) = export_model(exported, tmp_path, (SIZE, SIZE), (kind,))[kind]['inputs']
    assert image['shape'][image['layout'].index('C')] == bands
