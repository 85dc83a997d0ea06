"""What a file finds in a picture is what the toolbox finds, without the toolbox."""

import json
import warnings

import cv2
import numpy as np
import pytest
import torch
from helpers import newer
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import MODELS, TRANSFORMS, DefaultScope
from toy_configs import sure_model

from mmcare_runtime import Model
from mmcare_runtime.prepare import resize

pytestmark = newer
SHAPE, SIZE = (64, 96), (75, 140)
TASKS = ('classification', 'segmentation', 'retinanet', 'rtmdet')
CASES = [(task, outputs, 'top-left') for task in TASKS for outputs in ('raw', 'decoded')]
CASES += [('segmentation', 'raw', 'center'), ('segmentation', 'decoded', 'center')]
CASES += [('retinanet', 'raw', 'center'), ('rtmdet', 'raw', 'center')]


def describe(model, outputs, letterbox, folder):
    """Describe a file of this model, and return what computes its outputs."""
    from mmcare.export.backends.base import WriteResult
    from mmcare.export.backends.onnx import Onnx
    from mmcare.export.export import write_file
    from mmcare.export.plan import plan_export
    from mmcare.export.request import ExportRequest

    class Unwritten(Onnx):
        def write(self, graph, path, description, *_):
            path.write_text(json.dumps(description))
            return WriteResult({})

    request = ExportRequest(SHAPE, ('onnx',), outputs=outputs, letterbox=letterbox)
    export, backend = plan_export(model, request), Unwritten()
    file = write_file(export, backend, export.choose_output_format(backend), folder)
    return json.loads(json.dumps(file.description)), file.graph.network


def open_on_picture(source, outputs, letterbox, tmp_path):
    """Return a model that PyTorch computes, and draw picture.png for it."""
    description, network = describe(source, outputs, letterbox, tmp_path)

    @torch.no_grad()
    def run(image):
        return [output.numpy() for output in network(torch.from_numpy(image))]

    coarse = np.random.default_rng(0).normal(120, 50, (4, 4, 3)).astype(np.float32)
    pixels = cv2.resize(coarse, SIZE[::-1], interpolation=cv2.INTER_CUBIC).clip(0, 255)
    cv2.imwrite(str(tmp_path / 'picture.png'), pixels.astype(np.uint8))
    return Model(run, (1, 3, *SHAPE), description)


@pytest.fixture(params=CASES, ids='-'.join)
def case(request, tmp_path):
    """A thin model that is sure of what it sees, as a file, and a picture."""
    (task, outputs, letterbox), changes = request.param, {}
    if task == 'rtmdet':  # whose test pipeline has a Pad
        changes['test_dataloader.dataset.pipeline.2.pad_val.img'] = 10, 114, 200
    if (task, letterbox) == ('segmentation', 'center'):
        changes['model.decode_head'] = dict(num_classes=2, out_channels=1, threshold=0.45)
    source = sure_model(task, tmp_path, **changes)
    if 'bbox_head' in source.config.model:  # so that few boxes pass
        least = dict(retinanet=0.9, rtmdet=0.6)[task]
        for model in source.config.model, source.task.head:
            model.test_cfg.score_thr = least
    model = open_on_picture(source, outputs, letterbox, tmp_path)
    return source, model, tmp_path / 'picture.png'


@torch.no_grad()
def by_mim_test(source, picture):
    """Predict as ``mim test`` does, with the config as it is."""
    config = source.config
    with DefaultScope.overwrite_default_scope(config.default_scope):
        steps = config.test_dataloader.dataset.pipeline
        steps = [TRANSFORMS.build(one) for one in steps if one.type != 'LoadAnnotations']
        model = MODELS.build(config.model).eval()
        model.load_state_dict(source.task.model.state_dict())
        return model.test_step(pseudo_collate([Compose(steps)(dict(img_path=str(picture)))]))[0]


@torch.no_grad()
def by_the_toolbox(source, picture, letterbox):
    from mmcare.export.in_toolbox import pad_images
    from mmcare.export.pipelines import fit_config

    config = source.config.copy()
    fit_config(config, SHAPE)
    with DefaultScope.overwrite_default_scope(config.default_scope):
        steps = config.test_dataloader.dataset.pipeline
        steps = [TRANSFORMS.build(one) for one in steps if one.type != 'LoadAnnotations']
        model = MODELS.build(config.model).eval()
        model.load_state_dict(source.task.model.state_dict())
        pad_images(model, SHAPE, source.normalization, letterbox)
        return model.test_step(pseudo_collate([Compose(steps)(dict(img_path=str(picture)))]))[0]


def test_as_the_toolbox(case):
    """Boxes to 1e-5 of the picture's sides, scores to 1e-5, and labels of all pixels but 0.01 %.

    Decoded label maps are enlarged without logits, and boxes by another order of roundings.
    """
    source, model, picture = case
    sample, found = by_the_toolbox(source, picture, model.letterbox), model.predict(picture)
    raw = not any('kind' in output for output in model.description['outputs'])
    if 'boxes' in found:
        wanted = sample.pred_instances
        assert len(found['boxes']) == len(wanted) > 0
        np.testing.assert_allclose(found['scores'], wanted.scores, atol=1e-5)
        best = found['scores'] > found['scores'][-1] + 1e-3  # equal ones may change places
        difference = np.abs(found['boxes'] - wanted.bboxes.numpy())[best].max()
        assert difference < 1e-5 * max(SIZE) if raw else difference < 0.5
        assert (found['labels'] == wanted.labels.numpy())[best].mean() > 0.99
    elif 'scores' in found:
        np.testing.assert_allclose(found['scores'], sample.pred_score[found['labels']], atol=1e-5)
        assert found['labels'][0] == sample.pred_label
    else:
        least = 0.9999 if raw else 0.9
        assert (found['labels'] == sample.pred_sem_seg.data[0].numpy()).mean() >= least


def test_how_masks_are_read(tmp_path):
    """mmseg's data sets have defaults of their own, which the description keeps."""
    source = sure_model('segmentation', tmp_path)
    for dataset, expected in (
        (dict(type='ADE20KDataset'), True),
        (dict(type='mmseg.ADE20KDataset', reduce_zero_label=False), False),
        (dict(type='BaseSegDataset'), False),
        (dict(type='BaseSegDataset', reduce_zero_label=True), True),
    ):
        source.config.test_dataloader.dataset = dataset
        described = source.task.describe(source.config, [torch.zeros(1, 3, 8, 8)])
        assert described['reduce_zero_label'] is expected


SLIDE = {'model.test_cfg': dict(mode='slide', crop_size=SHAPE, stride=(40, 60))}
SCALE = 'test_dataloader.dataset.pipeline.1.scale'
PADDED = {'model.data_preprocessor.test_cfg': dict(size_divisor=32)}
ONE = dict(num_classes=2, out_channels=1, threshold=0.45)


@pytest.mark.parametrize(
    ('outputs', 'head', 'changes'),
    [
        ('raw', {}, {SCALE: (150, 120)}),
        ('decoded', dict(align_corners=True), {SCALE: (2048, 90)}),
        ('probabilities', ONE, {SCALE: (200, 200), **PADDED}),
    ],
)
def test_windows_as_mmseg(outputs, head, changes, tmp_path):
    """Of pictures of any size, upright and wide, at least 99.9 % of the labels are mmseg's."""
    changes = {**SLIDE, **changes, 'model.decode_head': head}
    source = sure_model('segmentation', tmp_path, **changes)
    description, network = describe(source, outputs, 'top-left', tmp_path)
    kinds = dict(raw=None).get(outputs, 'probabilities')
    assert description['outputs'][0].get('kind') == kinds

    @torch.no_grad()
    def run(image):
        return [output.numpy() for output in network(torch.from_numpy(image))]

    model, picture = Model(run, (1, 3, *SHAPE), description), tmp_path / 'picture.png'
    assert model.tile == 'slide'
    for size in ((140, 300), (171, 90), (133, 131)):
        coarse = np.random.default_rng(0).normal(120, 50, (6, 6, 3)).astype(np.float32)
        pixels = cv2.resize(coarse, size[::-1], interpolation=cv2.INTER_CUBIC).clip(0, 255)
        cv2.imwrite(str(picture), pixels.astype(np.uint8))
        wanted = by_mim_test(source, picture).pred_sem_seg.data[0].numpy()
        labels, whole = (model.predict(picture, tile=x)['labels'] for x in (None, 'whole'))
        assert (labels == wanted).mean() >= 0.999 > (whole == wanted).mean()


@pytest.mark.parametrize('padding', [None, dict(size=SHAPE), dict(size_divisor=96)])
def test_pictures_smaller_than_a_window(padding, tmp_path):
    """mmseg computes them as they are, which is said; or pads them, as the preprocessor says."""
    padded = padding is not None
    size = {'model.data_preprocessor.test_cfg': padding} if padded else {}
    source = sure_model('segmentation', tmp_path, **SLIDE, **{SCALE: (50, 40)}, **size)
    model = open_on_picture(source, 'raw', 'top-left', tmp_path)
    wanted = by_mim_test(source, tmp_path / 'picture.png').pred_sem_seg.data[0].numpy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        labels = model.predict(tmp_path / 'picture.png')['labels']
    texts = [str(one.message) for one in caught if 'smaller than windows' in str(one.message)]
    assert ((labels == wanted).mean() >= 0.999, len(texts)) == (padded, int(not padded)), texts


@pytest.mark.parametrize('padding', [None, dict(size=SHAPE), dict(size_divisor=128)])
@pytest.mark.parametrize('stretched', [True, False])
def test_pictures_of_another_ratio(padding, stretched, tmp_path):
    """mmseg computes them as they are, which is said, unless the remedy is taken."""
    changes = {'model.data_preprocessor.test_cfg': padding} if padding else {}
    source = sure_model('segmentation', tmp_path, **{SCALE: SHAPE[::-1]}, **changes)
    if not stretched:
        assert source.config.test_dataloader.dataset.pipeline.pop(2).type == 'ResizeToMultiple'
    model = open_on_picture(source, 'raw', 'top-left', tmp_path)
    wanted = by_mim_test(source, tmp_path / 'picture.png').pred_sem_seg.data[0].numpy()
    labels = model.predict(tmp_path / 'picture.png')['labels']
    remedy, padded = source.task.explain_padding(source.config, SHAPE), padding == dict(size=SHAPE)
    assert ('ResizeToMultiple' in remedy, 'size=(64, 96)' in remedy) == (stretched, not padded)
    assert ((labels == wanted).mean() >= 0.999) == (not remedy)


def test_corners_that_are_aligned(tmp_path):
    """Raw outputs are enlarged as the head does."""
    head = dict(align_corners=True)
    source = sure_model('segmentation', tmp_path, **{'model.decode_head': head})
    model = open_on_picture(source, 'raw', 'top-left', tmp_path)
    wanted = by_the_toolbox(source, tmp_path / 'picture.png', 'top-left').pred_sem_seg.data[0]
    agreements = []
    for aligned in (True, False):
        model.description = dict(model.description, align_corners=aligned)
        labels = model.predict(tmp_path / 'picture.png')['labels']
        agreements.append((labels == wanted.numpy()).mean())
    assert agreements[0] >= 0.9999 > agreements[1]


def test_a_side_has_a_pixel_at_least():
    """Of a thin picture, in the toolbox's test as in the runtime."""
    from mmcare.export.pipelines import ResizeToFit

    picture = np.zeros((1, 800, 3), np.uint8)
    fitted = ResizeToFit(scale=(96, 64), keep_ratio=False)(dict(img=picture))['img']
    assert fitted.shape == resize(picture, {}, (64, 96)).shape == (1, 96, 3)
