"""What a file finds in a picture is what the toolbox finds, without the toolbox."""

import json
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
from export_helpers import smooth
from helpers import ROOT
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import MODELS, TRANSFORMS, DefaultScope
from torch import nn
from toy_configs import sure_source

from mmcare.export.backends import BACKENDS
from mmcare.export.backends.base import Exported
from mmcare.export.decoding import describe_scores
from mmcare.export.evaluation import pad_images
from mmcare.export.export import OUTPUTS
from mmcare.export.prediction import prepare
from mmcare.export.preprocessing import LETTERBOXES, choose_shape, describe_resizing, fit_config
from mmcare.export.spec import build_spec

SHAPE = (64, 96)
TASKS = ('classification', 'segmentation', 'retinanet', 'rtmdet')
CASES = [(task, outputs, 'top-left') for task in TASKS for outputs in OUTPUTS]
CASES += [('segmentation', 'raw', 'center'), ('segmentation', 'decoded', 'center')]
CASES += [('retinanet', 'raw', 'center'), ('rtmdet', 'raw', 'center')]


@pytest.fixture(params=CASES, ids='-'.join)
def exported(request, tmp_path):
    """A thin model that is sure of what it sees, described as a file, and a picture."""
    (task, outputs, letterbox), changes = request.param, {}
    if task == 'rtmdet':  # whose test pipeline has a Pad
        changes['test_dataloader.dataset.pipeline.2.pad_val.img'] = 10, 114, 200
    if (task, letterbox) == ('segmentation', 'center'):
        changes['model.decode_head'] = dict(num_classes=2, out_channels=1, threshold=0.45)
    source = sure_source(task, tmp_path, **changes)
    if 'bbox_head' in source.config.model:  # so that few boxes pass
        least = dict(retinanet=0.9, rtmdet=0.6)[task]
        for model in source.config.model, source.network.model.bbox_head:
            model.test_cfg.score_thr = least
    decoded = outputs == 'decoded'
    spec = build_spec(source, SHAPE, ['tensor'], None, None, decoded, {}, letterbox)
    resize = describe_resizing(source.config, SHAPE)
    spec = replace(spec, resize=resize)
    spec = spec.with_decoder(BACKENDS['onnx'].style)
    description = json.loads(json.dumps(BACKENDS['onnx'].describe(spec)))
    network = source.network if outputs == 'raw' else nn.Sequential(source.network, spec.decoder)
    run = torch.no_grad()(lambda images: [one.numpy() for one in network(images)])
    pixels = (smooth(0, (75, 140))[0].permute(1, 2, 0) * 50 + 120).clamp(0, 255).byte().numpy()
    cv2.imwrite(str(tmp_path / 'picture.png'), pixels)
    return source, Exported(run, spec.input_shape, description), tmp_path / 'picture.png'


@torch.no_grad()
def by_the_toolbox(source, picture, letterbox):
    config = source.config.copy()
    fit_config(config, SHAPE)
    with DefaultScope.overwrite_default_scope(config.default_scope):
        steps = config.test_dataloader.dataset.pipeline
        steps = [TRANSFORMS.build(one) for one in steps if one.type != 'LoadAnnotations']
        model = MODELS.build(config.model).eval()
        model.load_state_dict(source.network.model.state_dict())
        pad_images(model, SHAPE, source.normalization, letterbox)
        return model.test_step(pseudo_collate([Compose(steps)(dict(img_path=str(picture)))]))[0]


def test_as_the_toolbox(exported):
    source, program, picture = exported
    sample = by_the_toolbox(source, picture, program.letterbox)
    found = program.predict(picture)
    if 'boxes' in found:
        wanted = sample.pred_instances
        assert len(found['boxes']) == len(wanted) > 0
        np.testing.assert_allclose(found['scores'], wanted.scores, atol=1e-4)
        best = found['scores'] > found['scores'][-1] + 1e-3  # equal ones may change places
        np.testing.assert_allclose(found['boxes'][best], wanted.bboxes[best], atol=0.5)
        assert (found['labels'] == wanted.labels.numpy())[best].mean() > 0.99
    elif 'scores' in found:
        np.testing.assert_allclose(found['scores'], sample.pred_score[found['labels']], atol=1e-4)
        assert found['labels'][0] == sample.pred_label
    else:
        # A map of labels is enlarged without logits.
        least = 0.999 if program.description['activation'] else 0.9
        assert (found['labels'] == sample.pred_sem_seg.data[0].numpy()).mean() > least


@pytest.mark.parametrize('letterbox', LETTERBOXES)
@pytest.mark.parametrize('size', [(150, 280), (320, 200)])
def test_results_are_in_pixels_of_the_picture(size, letterbox):
    """The program finds what is white."""
    picture = np.zeros((*size, 3), np.uint8)
    picture[30:130, 60:180] = 255

    def find_box(image):
        rows, columns = (image[0, 0] > 127).nonzero(as_tuple=True)
        box = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
        return [np.array(x, np.float32) for x in ([[box]], [[1]], [[0]])]

    def find_labels(image):
        return [(image[:, 0] > 127).byte().numpy()]

    taken = dict(kind='image', channels='RGB', padding=[124] * 3, letterbox=letterbox)
    taken['resize'] = dict(interpolation='bilinear', backend='cv2')
    boxes = dict(name='boxes', kind='boxes', scale=[1] * 4, box_format='xyxy')
    outputs = [boxes, dict(name='scores'), dict(name='labels')]
    test_cfg = dict(nms=dict(iou_threshold=0.5), max_per_img=9)
    about = dict(part='model', shape=SHAPE, inputs=[taken], outputs=outputs, test_cfg=test_cfg)
    found = Exported(find_box, (1, 3, *SHAPE), about).predict(picture)['boxes']
    pixel = max(np.divide(size, SHAPE))  # of the file, in those of the picture
    np.testing.assert_allclose(found, [[60, 30, 180, 130]], atol=pixel)
    about['outputs'] = [dict(name='labels', kind='labels')]
    labels = Exported(find_labels, (1, 3, *SHAPE), about).predict(picture)['labels']
    assert (labels == picture[..., 0] // 255).mean() > 0.97


def test_pictures_of_another_size():
    """A ``ResizeEdge`` without a crop; the file would see a corner. Small ones are padded."""
    taken = dict(kind='image', channels='RGB', padding=[0] * 3, resize=dict(shorter=80))
    with pytest.raises(ValueError, match='80x160, the file takes 64x96: give the pipeline'):
        prepare(np.zeros((40, 80, 3), np.uint8), taken, SHAPE)
    taken['resize'] = dict(shorter=32, crop=SHAPE)
    assert prepare(np.zeros((40, 80, 3), np.uint8), taken, SHAPE)[1] == (0, 0, 32, 64)


@pytest.mark.parametrize(
    ('name', 'shape'),
    [
        ('your_data/detector', (640, 640)),
        ('your_data/segmentor', (480, 640)),
        ('your_data/classifier', (224, 224)),
        ('mask_rcnn/care_s0_coco', (800, 1344)),
        ('mask_rcnn/care_s0_nuclei', (512, 512)),  # whose pictures keep their sizes
    ],
)
def test_default_shape(name, shape):
    assert choose_shape(Config.fromfile(ROOT / f'configs/{name}.py')) == shape


def test_classes_of_a_file_of_names(tmp_path):
    (tmp_path / 'classes.txt').write_text('ant\nbee')
    config = Config.fromfile(ROOT / 'configs/your_data/classifier.py')
    dataset = config.test_dataloader.dataset
    dataset.classes = str(tmp_path / 'classes.txt')
    dataset.pop('metainfo')
    model = nn.Module()
    model.head = nn.Module()
    model.head.num_classes = 2
    assert describe_scores(model, config, 2)['classes'] == ['ant', 'bee']
