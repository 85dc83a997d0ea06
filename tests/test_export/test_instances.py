"""Two-stage detectors in plain operators: RoIAlign, NMS, and results as mmdet's own."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from export_helpers import graph_of, odd_model, smooth, to_coreml
from helpers import THIN
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from torch import nn
from torchvision.ops import batched_nms, roi_align
from toy_configs import sure_model

from mmcare.export import export_model, open_exported
from mmcare.export.backends import BACKENDS
from mmcare.export.backends.mil import open_package
from mmcare.export.loading import IMAGENET, LoadedModel
from mmcare.export.plain_operators import RoIAlign, nms_mask, nms_mask_operator
from mmcare.export.plan import plan_export
from mmcare.export.request import ExportRequest
from mmcare.export.tasks import OutputFormat, make_task
from mmcare.export.tasks.two_stage_detector import explain_refusal
from mmcare.export.tasks.two_stage_results import RoIAlignOperator
from mmcare_runtime.masks import paste_masks
from mmcare_runtime.results import nms

SHAPE = (128, 160)
SIDES = torch.tensor([SHAPE[1], SHAPE[0]] * 2).float()
STRIDES = [4, 8, 16, 32]
ODD = [
    *([9.0, 9.0, 9.3, 9.2], [5.0, 5.0, 5.0, 5.0]),  # tiny, empty
    *([-50.0, -60.0, -20.0, -30.0], [170.0, 3.0, 199.0, 60.0]),  # outside
    *([0.0, 0.0, 160.0, 128.0], [-33.0, -44.0, 222.0, 199.0], [150.0, 120.0, 190.0, 170.0]),
    *([20.0, 3.0, 28.0, 127.0], [3.0, 20.0, 155.0, 29.5]),  # 1:16
]


def rois(number=60):
    """Random boxes of all sizes, and odd ones."""
    center = torch.rand(number, 2) * SIDES[:2]
    size = SIDES[:2] * torch.rand(number, 2) ** 3
    return torch.cat([center - size / 2, center + size / 2], 1), torch.tensor(ODD)


@pytest.mark.parametrize('aligned', [True, False])
@pytest.mark.parametrize('sampling_ratio', [0, 1, 2])
@pytest.mark.parametrize('stride', STRIDES)
def test_roi_align_is_that_of_torchvision(stride, sampling_ratio, aligned):
    boxes = torch.cat(rois())
    x = torch.randn(1, 5, SHAPE[0] // stride, SHAPE[1] // stride)
    image_size = (SHAPE[0] / stride, SHAPE[1] / stride)
    for bins in (7, 7), (14, 14), (3, 5):
        expected = roi_align(x, [boxes], bins, 1 / stride, sampling_ratio, aligned)
        align = RoIAlign(x.shape[2:], image_size, bins, sampling_ratio, aligned)
        averages = align(x, boxes / SIDES).permute(0, 3, 1, 2)
        torch.testing.assert_close(averages, expected, atol=1e-4 * expected.abs().max(), rtol=0)


@pytest.mark.parametrize('aligned', [True, False])
def test_the_operator_gets_boxes_with_samples(aligned, monkeypatch):
    """OpenVINO divides by the number of samples, also for boxes that are not used."""

    def strict(x, rois, *options):
        averages = roi_align(x, rois, *options)
        empty = (rois[:, 3:] <= rois[:, 1:3]).any(1)
        return averages.masked_fill(empty[:, None, None, None] & aligned, torch.nan)

    boxes = torch.cat(rois())
    x, weights = torch.randn(1, 5, 32, 40), (torch.rand(len(boxes)) > 0.3).float()
    expected = roi_align(x, [boxes], 7, 0.25, 0, aligned) * weights[:, None, None, None]
    layer = SimpleNamespace(
        output_size=(7, 7), spatial_scale=0.25, sampling_ratio=0, aligned=aligned
    )
    monkeypatch.setattr(torchvision.ops, 'roi_align', strict)
    averages = RoIAlignOperator(layer, SHAPE)(x, boxes / SIDES, weights).permute(0, 3, 1, 2)
    torch.testing.assert_close(averages, expected, atol=1e-4, rtol=0)


def test_roi_align_in_float16():
    """Rounding moves the sides of a box by up to 0.04 pixels here, which a smooth map forgives."""
    boxes, _ = rois(200)
    boxes = boxes[(boxes[:, 2:] - boxes[:, :2] > 2).all(1)]
    x = F.interpolate(torch.randn(1, 5, 4, 5), (32, 40), mode='bicubic')
    expected = roi_align(x, [boxes], 7, 0.25, 0, True)
    align = RoIAlign((32, 40), (32, 40), (7, 7), 0, True).half()
    averages = align(x.half(), (boxes / SIDES).half()).permute(0, 3, 1, 2).float()
    assert (averages - expected).abs().max() < 2e-2 * expected.abs().max()


def test_nms_is_that_of_torchvision():
    boxes, labels = rois(300)[0].clamp(min=0).minimum(SIDES), torch.randint(0, 3, (300,))
    boxes = boxes / SIDES
    scores = torch.linspace(1, 0.1, 300)
    for valid in torch.ones(300), (torch.rand(300) > 0.3).float():
        used = valid.nonzero()[:, 0]
        kept = batched_nms(boxes[used], scores[used], labels[used], 0.4)
        expected = torch.zeros(300).index_fill(0, used[kept], 1)
        assert torch.equal(nms_mask(boxes, 0.4, labels, valid), expected)
        assert torch.equal(nms_mask_operator(boxes, 0.4, labels, 3, valid), expected)
        arrays = (x[used].numpy() for x in (boxes, scores, labels))
        assert used[nms(*arrays, 0.4, 300)].tolist() == used[kept].tolist()
        small = boxes * 0.02  # boxes of 1 to 20 pixels in images of 1000
        in_float16 = nms_mask(small.half(), 0.4, labels, valid.half()).float()
        assert (in_float16 != nms_mask(small, 0.4, labels, valid)).float().mean() < 0.02


def test_nms_of_long_chains():
    """Each box overlaps the next alone: every other one stays."""
    starts = torch.arange(14.0)[:, None] / 28
    boxes = torch.cat([starts, 0 * starts, starts + 0.1, 0 * starts + 1], 1)
    assert nms_mask(boxes, 0.4).tolist() == [1.0, 0.0] * 7


class Operators(nn.Module):
    """Operators of two-stage detectors and of mmseg's heads that our other networks lack."""

    def __init__(self):
        super().__init__()
        self.align = RoIAlign((8, 12), (8.0, 12.0), (2, 3), 0, True)
        self.enlarge = nn.ConvTranspose2d(3, 4, 2, 2)
        self.register_buffer('boxes', rois(96)[0].clamp(min=0).minimum(SIDES) / SIDES)
        self.register_buffer('labels', torch.arange(96) % 3)
        self.requires_grad_(False)

    def forward(self, images):
        _, best = images[0, 0].flatten().topk(20)
        boxes, labels = self.boxes.index_select(0, best), self.labels.index_select(0, best)
        moved = self.boxes.index_select(0, labels + 90)
        kept, averages = nms_mask(boxes, 0.3, labels), self.align(images, boxes)
        unit = images.pow(3.0) / images.norm(dim=1, keepdim=True)
        return kept[None], moved, averages, self.enlarge(images), unit


@pytest.mark.conversion
def test_operators_in_core_ml(tmp_path):
    pytest.importorskip('coremltools')
    network, image = Operators(), torch.randn(1, 3, 8, 12)
    names = ['kept', 'moved', 'averages', 'enlarged', 'unit']
    path = tmp_path / 'operators.mlpackage'
    to_coreml(graph_of(odd_model(network, names), (8, 12)), 'float32').save(str(path))
    outputs = open_package(path, names).run(image.numpy())
    for output, expected in zip(outputs, network(image), strict=True):
        torch.testing.assert_close(torch.from_numpy(output), expected, atol=1e-5, rtol=0)


def config(classes=3, agnostic=False, with_mask=True):
    def extract(size):
        layer = dict(type='RoIAlign', output_size=size, sampling_ratio=0)
        return dict(
            type='SingleRoIExtractor', roi_layer=layer, out_channels=8, featmap_strides=STRIDES
        )

    coder = dict(type='DeltaXYWHBBoxCoder')
    anchors = dict(
        type='AnchorGenerator', scales=[4], ratios=[0.5, 1.0, 2.0], strides=[*STRIDES, 64]
    )
    masks = dict(
        mask_roi_extractor=extract(7),
        mask_head=dict(
            type='FCNMaskHead',
            num_convs=1,
            in_channels=8,
            conv_out_channels=8,
            num_classes=classes,
            class_agnostic=agnostic,
        ),
    )
    return dict(
        type='MaskRCNN' if with_mask else 'FasterRCNN',
        backbone=dict(type='mmcare.CARE', arch=THIN),
        neck=dict(type='FPN', in_channels=[16, 16, 32, 128], out_channels=8, num_outs=5),
        rpn_head=dict(
            type='RPNHead',
            in_channels=8,
            feat_channels=8,
            anchor_generator=anchors,
            bbox_coder=coder,
        ),
        roi_head=dict(
            type='StandardRoIHead',
            bbox_roi_extractor=extract(7),
            bbox_head=dict(
                type='Shared2FCBBoxHead',
                in_channels=8,
                fc_out_channels=16,
                num_classes=classes,
                reg_class_agnostic=agnostic,
                bbox_coder=dict(coder, target_stds=[0.1, 0.1, 0.2, 0.2]),
            ),
            **(masks if with_mask else {}),
        ),
        train_cfg=None,
        test_cfg=dict(
            rpn=dict(
                nms_pre=300,
                max_per_img=50,
                min_bbox_size=0,
                nms=dict(type='nms', iou_threshold=0.7),
            ),
            rcnn=dict(
                score_thr=0.05,
                max_per_img=30,
                mask_thr_binary=0.5,
                nms=dict(type='nms', iou_threshold=0.5),
            ),
        ),
    )


def build(**arguments):
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = MODELS.build(Config(config(**arguments))).eval().requires_grad_(False)
    for name, value in model.named_parameters():  # so that scores and boxes differ
        if value.dim() > 1 and 'backbone' not in name:
            value.normal_(0, (2 / value[0].numel()) ** 0.5)
        if name.endswith('gamma'):
            value.fill_(0.1)
    model.rpn_head.rpn_reg.weight.mul_(0.2)
    if arguments.get('with_mask', True):  # masks with both sides of the threshold
        weight = model.roi_head.mask_head.conv_logits.weight
        weight.sub_(weight.mean(1, keepdim=True))
    return model


def post_process(model, raw, output_format=None, **options):
    options = dict(max_detections=30, **options) if 'max_detections' not in options else options
    return make_task(model, 'model').post_process(
        raw, SHAPE, output_format or OutputFormat(), options
    )


def predict(model, image):
    from mmdet.structures import DetDataSample

    about = dict(img_shape=SHAPE, ori_shape=SHAPE, scale_factor=(1.0, 1.0))
    (sample,) = model.predict(image, [DetDataSample(metainfo=about)], rescale=False)
    return sample.pred_instances


MODELS_OF = dict(
    standard={},
    one_class=dict(classes=1),
    class_agnostic=dict(agnostic=True),
    many_classes=dict(classes=80),
    boxes_alone=dict(with_mask=False),
)


@pytest.mark.parametrize('arguments', MODELS_OF.values(), ids=MODELS_OF)
def test_results_are_those_of_mmdet(arguments):
    from mmdet.structures.bbox import bbox2roi

    model, image = build(**arguments), smooth(0, SHAPE)
    assert not explain_refusal(model)
    task = make_task(model, 'model')
    raw, expected = task(image), predict(model, image)
    assert len(task.name_outputs(raw)) == len(raw) == 14
    results_of = post_process(model, raw)
    results = results_of(raw)
    boxes, scores, labels, *masks = (x[0] for x in results)
    by_operators = post_process(model, raw, OutputFormat(nms='operator'))
    # Not element by element: boxes with nearly the same score may change places.
    assert results_of.max_error(raw, [x.numpy() for x in by_operators(raw)]) < 1e-4
    used = scores > 0.05
    assert used.sum() == len(expected) > 5
    boxes, scores, labels, *masks = (x[used] for x in (boxes, scores, labels, *masks))
    # Ordered by class and place, since boxes with nearly the same score may change places.
    order = (boxes.sum(1) + 1e4 * labels).argsort()
    boxes, scores, labels, *masks = (x[order] for x in (boxes, scores, labels, *masks))
    expected = expected[(expected.bboxes.sum(1) + 1e4 * expected.labels).argsort()]
    torch.testing.assert_close(boxes, expected.bboxes, atol=1e-2, rtol=0)
    torch.testing.assert_close(scores, expected.scores, atol=1e-4, rtol=0)
    assert labels.dtype == torch.int32 and torch.equal(labels.long(), expected.labels)
    assert results_of.max_error(raw, [x.numpy() for x in results]) < 1e-5
    if not arguments.get('with_mask', True):
        assert not masks and 'masks' not in [x['kind'] for x in results_of.outputs]
        return
    logits = model.roi_head._mask_forward(raw, bbox2roi([expected.bboxes]))['mask_preds']
    rows = range(len(logits)), 0 * labels.long() if logits.shape[1] == 1 else labels.long()
    torch.testing.assert_close(masks[0], logits[rows].sigmoid(), atol=1e-3, rtol=0)
    pasted = paste_masks(masks[0].numpy(), boxes.numpy(), SHAPE)
    assert pasted.any() and (pasted == expected.masks.numpy()).mean() > 0.999


def test_nothing_is_found():
    """Scores below the threshold are left to apps; without proposals, all are 0."""
    model, image = build(), smooth(0, SHAPE)
    raw = make_task(model, 'model')(image)
    model.roi_head.bbox_head.fc_cls.bias[-1] = 100
    assert not len(predict(model, image))
    assert post_process(model, raw)(raw)[1].max() < 0.05
    model.roi_head.bbox_head.fc_cls.bias[-1] = 0
    model.rpn_head.test_cfg.min_bbox_size = 1000
    assert not len(predict(model, image))
    scores = post_process(model, raw)(raw)[1]
    assert scores.shape == (1, 30) and not scores.any()


def test_few_proposals_with_low_scores(tmp_path):
    """ONNX Runtime's sigmoid is 0 for their logits, and files have places for more of them."""
    pytest.importorskip('onnxruntime')
    model, image = build(), smooth(0, SHAPE)
    model.rpn_head.rpn_cls.bias.fill_(-25)
    model.rpn_head.test_cfg.update(nms_pre=30, max_per_img=1000)
    expected = predict(model, image)
    source = LoadedModel('low', 'random', make_task(model, 'model'), IMAGENET)
    options = dict(outputs='decoded', proposals=1000, compare_float16=False)
    report = export_model(source, tmp_path, SHAPE, ('onnx',), **options)['onnx']
    assert report['max_rel_error']['random'] < 1e-4
    boxes, scores, labels, _ = open_exported(tmp_path / report['file']).run(image.numpy())
    found = scores[0] > 0.05
    number = len(expected)
    assert number > 10 and found.sum() >= number
    np.testing.assert_allclose(scores[0, :number], expected.scores, atol=1e-5)
    np.testing.assert_allclose(boxes[0, :number], expected.bboxes, atol=1e-2)
    assert (labels[0, :number] == expected.labels.numpy()).all()


def test_numbers_and_styles():
    model, image = build(), smooth(0, SHAPE)
    raw = make_task(model, 'model')(image)
    plain = post_process(model, raw, max_detections=20, proposals=30)
    options = dict(relative=True, box_format='cxcywh', labels=torch.float32, with_count=True)
    output_format = OutputFormat(**options)
    other = post_process(model, raw, output_format, max_detections=20, proposals=30)
    boxes, scores, _, masks = plain(raw)
    centers, their_scores, labels, count, their_masks = other(raw)
    assert [x['kind'] for x in other.outputs] == ['boxes', 'scores', 'labels', 'count', 'masks']
    assert boxes.shape == (1, 20, 4) and masks.shape == (1, 20, 14, 14)
    assert labels.dtype == torch.float32 and count.item() == (scores > 0).sum()
    assert torch.equal(scores, their_scores) and torch.equal(masks, their_masks)
    assert other.outputs[0]['scale'] == SIDES.tolist()
    read = other.read_boxes(centers[0]) * SIDES
    torch.testing.assert_close(read, boxes[0], atol=1e-4, rtol=0)


SPOILT = dict(
    moved=lambda boxes, *rest: (boxes + 5 * torch.eye(30)[:, :1], *rest),
    doubled=lambda *results: [torch.cat([x[:, :1], x[:, :1], x[:, 2:]], 1) for x in results],
    other_classes=lambda boxes, scores, labels, masks: (boxes, scores, 2 - labels, masks),
    other_masks=lambda *results: (*results[:3], results[3].flip(3)),
    nan=lambda boxes, scores, *rest: (boxes, scores * float('nan'), *rest),
)


@pytest.mark.parametrize('spoil', SPOILT.values(), ids=SPOILT)
def test_wrong_results_are_found(spoil):
    model = build()
    raw = make_task(model, 'model')(smooth(0, SHAPE))
    results_of = post_process(model, raw)
    assert not results_of.max_error(raw, [*spoil(*results_of(raw))]) < 1e-2


def test_roundings_are_admitted():
    """The order of proposals changes, and with it which are kept; results stay as good."""
    model = build()
    raw = make_task(model, 'model')(smooth(0, SHAPE))
    results_of = post_process(model, raw)
    results = results_of([x * (1 + 1e-3 * torch.randn_like(x)) for x in raw])
    assert (results[1] - results_of(raw)[1]).abs().max() > 1e-4
    assert results_of.max_error(raw, results) < 2e-2


def test_either_level_is_admitted_at_a_bound():
    """Float16 may take a proposal from the next map, where it has other scores."""
    model = build()
    raw = make_task(model, 'model')(smooth(0, SHAPE))
    results_of, rounded = post_process(model, raw), post_process(model, raw)
    proposals, valid, _ = results_of.propose(raw)
    *_, pairs = results_of.detect(raw[:4], proposals, valid)
    for pair in pairs[:4]:
        low, high = proposals[pair // results_of.classes].chunk(2)
        scale = (high - low).prod().sqrt().item()
        results_of.box_rois[0].bounds = [scale * 0.999, 9, 9]
        rounded.box_rois[0].bounds = [scale * 1.001, 9, 9]
        results, others = results_of(raw), rounded(raw)
        assert (results[1] - others[1]).abs().max() > 2e-2
        assert results_of.max_error(raw, others) < 1e-2
        assert rounded.max_error(raw, results) < 1e-2


def test_what_is_refused():
    def refused(**changes):
        settings = Config(config())
        settings.merge_from_dict(changes)
        with DefaultScope.overwrite_default_scope('mmdet'):
            return explain_refusal(MODELS.build(settings))

    assert not refused()
    assert 'NMS of the RPNHead' in refused(**{'test_cfg.rpn.nms.type': 'soft_nms'})
    assert 'NMS of the StandardRoIHead' in refused(**{'test_cfg.rcnn.nms.class_agnostic': True})
    assert 'DoubleHeadRoIHead' in refused(
        **{'roi_head.type': 'DoubleHeadRoIHead', 'roi_head.reg_roi_scale_factor': 1.3}
    )
    coder = 'roi_head.bbox_head.bbox_coder'
    assert 'YOLOBBoxCoder' in refused(**{coder: dict(type='YOLOBBoxCoder', _delete_=True)})
    cascade = Config.fromstring(
        "_base_ = 'mmdet::cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco.py'", '.py'
    )
    with DefaultScope.overwrite_default_scope('mmdet'), torch.device('meta'):
        model = MODELS.build(cascade.model)
    assert not explain_refusal(model)
    model.roi_head.bbox_head[0].reg_class_agnostic = False
    assert 'boxes for each class between its stages' in explain_refusal(model)
    model.roi_head.bbox_roi_extractor[1].roi_layers[0].pool_mode = 'max'
    model.roi_head.bbox_head[0].reg_class_agnostic = True
    assert 'RoIAlign of the bbox_roi_extractor' in explain_refusal(model)


def test_requests_that_are_refused():
    task = make_task(build(), 'model')
    for words, arguments in (
        (r"raw outputs .* use outputs='decoded'", dict(outputs='raw')),
        ("'center' is not for two-stage", dict(letterbox='center')),
        ('nms= is for one-stage', dict(options=dict(nms='outside'))),
        ('batch= is not for two-stage', dict(batch=2)),
    ):
        request = ExportRequest(SHAPE, ('onnx',), **dict(dict(outputs='decoded'), **arguments))
        with pytest.raises(ValueError, match=words):
            task.check_request(request)
    pytest.importorskip('pnnx')
    model, request = LoadedModel('care', 'random', task, IMAGENET), dict(outputs='decoded')
    with pytest.raises(ValueError, match=r"ncnn has neither topk nor gather, .* use part='neck'"):
        plan_export(model, ExportRequest(SHAPE, ('ncnn',), **request))


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'options'),
    [
        ('onnx', {}),
        ('coreml', {}),
        ('executorch', {}),
        ('executorch', dict(delegate='coreml')),
        ('litert', {}),
        ('litert', dict(precision='int8')),
    ],
    ids=str,
)
def test_files(name, options, tmp_path):
    """The export compares boxes, scores, labels and masks with PyTorch's, which are mmdet's."""
    for package in BACKENDS[name].packages:
        pytest.importorskip(package)
    source = sure_model('detection', tmp_path, **{'model.test_cfg.rpn.nms_pre': 100})
    for parameter_name, weight in source.task.named_parameters():
        if 'head' in parameter_name and weight.dim() > 1:
            weight.mul_(2 / 3)  # surer ones multiply float16's roundings
    options = dict(options, outputs='decoded', max_detections=20, proposals=20)
    report = export_model(source, tmp_path, (64, 96), (name,), 'image', **options)[name]
    names = [output['name'] for output in report['outputs']]
    assert names == ['boxes', 'scores', 'labels', *['count'] * (name == 'litert'), 'masks']
    assert report['outputs'][-1] == dict(
        name='masks', shape=[1, 20, 28, 28], layout='NCHW', kind='masks'
    )
    assert report['nms'] == ('operator' if name == 'onnx' else 'matrix')
    picture = np.random.default_rng(0).integers(0, 256, (80, 100, 3), np.uint8)
    found = open_exported(tmp_path / report['file']).predict(picture)
    assert found['masks'].dtype == bool
    assert found['masks'].shape == (len(found['boxes']), 80, 100) and found['masks'].any()


def test_masks_are_pasted_as_mmdet_does():
    from mmdet.models.roi_heads.mask_heads.fcn_mask_head import _do_paste_mask

    boxes, odd = rois(40)
    boxes, shape = torch.cat([boxes, odd]), (123, 157)
    # mmdet fails on boxes outside of the picture, and gives empty ones a row of pixels.
    inside = (boxes[:, 2:] > 0).all(1) & (boxes[:, 0] < 157) & (boxes[:, 1] < 123)
    boxes = boxes[inside & (boxes[:, 2:] - boxes[:, :2] > 0.1).all(1)]
    masks = F.interpolate(torch.rand(len(boxes), 1, 5, 5), (28, 28), mode='bicubic').clamp(0, 1)
    pasted = paste_masks(masks[:, 0].numpy(), boxes.numpy(), shape, 0.5)
    assert pasted.dtype == bool and pasted.any((1, 2)).sum() > 15
    for mask, box, mine in zip(masks, boxes, pasted, strict=True):
        expected = np.zeros(shape, bool)
        values, place = _do_paste_mask(mask[None], box[None], *shape)
        expected[place] = (values[0] >= 0.5).numpy()
        assert (mine == expected).mean() > 0.999
