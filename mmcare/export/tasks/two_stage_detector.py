"""Two-stage detectors of mmdet and cascades of them: boxes, and masks within them."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from mmengine.config import Config
from mmengine.structures import InstanceData
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mmcare.export.errors import Argument, RequestError
from mmcare.export.tasks.base import (
    Description,
    Options,
    OutputFormat,
    Outputs,
    PostProcess,
    RunImages,
    Shape,
    Substitutes,
    Task,
    describe_classes,
    is_of_class,
)
from mmcare.export.tasks.one_stage_detector import OneStageDetector
from mmcare.export.tasks.one_stage_results import read_test_cfg
from mmcare.export.tasks.two_stage_results import TwoStageResults, list_stages
from mmcare_runtime.masks import paste_masks
from mmcare_runtime.results import read_boxes, read_detections, suppress

PROPOSALS = 100
# The mmdet classes whose methods are reproduced here. Methods of other classes may differ.
METHODS = {
    '': dict(predict='TwoStageDetector'),
    'rpn_head': dict(
        predict='BaseDenseHead',
        predict_by_feat='BaseDenseHead',
        _predict_by_feat_single='RPNHead',
        _bbox_post_process='RPNHead',
    ),
    'roi_head': dict(predict='BaseRoIHead'),
    'roi_head.bbox_roi_extractor': dict(
        forward='SingleRoIExtractor', map_roi_levels='SingleRoIExtractor'
    ),
    'roi_head.bbox_head': dict(predict_by_feat='BBoxHead', _predict_by_feat_single='BBoxHead'),
    'roi_head.mask_roi_extractor': dict(
        forward='SingleRoIExtractor', map_roi_levels='SingleRoIExtractor'
    ),
    'roi_head.mask_head': dict(
        predict_by_feat='FCNMaskHead', _predict_by_feat_single='FCNMaskHead'
    ),
}
ROI_METHODS = ('predict_bbox', 'predict_mask', '_bbox_forward', '_mask_forward')
# Of RoI heads with one stage, and with several.
ROI_HEADS = {'StandardRoIHead': ROI_METHODS, 'CascadeRoIHead': (*ROI_METHODS, '_refine_roi')}


def explain_method(module: Any, methods: Mapping[str, str]) -> str:
    """Say in a sentence which of its methods is not that of the mmdet class; empty if none."""
    for name, base in methods.items():
        if getattr(getattr(module, name, None), '__qualname__', '') != f'{base}.{name}':
            return f'the {type(module).__name__} computes results in another way than {base}'
    return ''


def explain_refusal(model: Any) -> str:
    """Say in a sentence why a two-stage detector cannot be exported; empty if it can be."""
    if not (model.with_rpn and model.with_roi_head):
        return f'the {type(model).__name__} has no RPN, or no RoI head'
    rpn, head = model.rpn_head, model.roi_head
    kind = 'CascadeRoIHead' if is_of_class(head, 'CascadeRoIHead') else 'StandardRoIHead'
    if reason := explain_method(head, dict.fromkeys(ROI_HEADS[kind], kind)):
        return reason
    for path, methods in METHODS.items():
        module = model
        for name in path.split('.') if path else ():
            module = getattr(module, name, None)
        if module is None and 'mask' in path:
            continue
        for stage in list_stages(module):
            if reason := explain_method(stage, methods):
                return reason
    heads = list_stages(head.bbox_head)
    if not all(part.reg_class_agnostic for part in heads[:-1]):
        return f'the {kind} has boxes for each class between its stages'
    for part in (rpn, *heads):
        coder = part.bbox_coder
        if type(coder).__name__ != 'DeltaXYWHBBoxCoder' or coder.add_ctr_clamp:
            return (
                f'the {type(coder).__name__} of the {type(part).__name__} is not the plain '
                'DeltaXYWHBBoxCoder'
            )
    for part in (rpn, head):
        if read_test_cfg(part.test_cfg) is None:
            return f'the NMS of the {type(part).__name__} is not the plain one: {part.test_cfg}'
    for part in heads:
        if not part.with_reg or part.custom_cls_channels:
            return f'the {type(part).__name__} has no boxes, or activations of its own'
    if head.with_mask and head.test_cfg.get('mask_thr_binary', 0.5) < 0:
        return 'mask_thr_binary is negative, so that mmdet leaves masks as probabilities'
    if head.with_shared_head or (head.with_mask and head.share_roi_extractor):
        return 'boxes and masks share a head or a RoI extractor'
    for name in ('bbox_roi_extractor', 'mask_roi_extractor'):
        stages = list_stages(getattr(head, name, None))
        for layer in [layer for stage in stages for layer in getattr(stage, 'roi_layers', ())]:
            if type(layer).__name__ != 'RoIAlign' or layer.pool_mode != 'avg':
                return f'the {type(layer).__name__} of the {name} is not an averaging RoIAlign'
    return ''


class TwoStageDetector(Task):
    """The neck's maps that RoIs are taken from, and the RPN's scores and deltas of each level."""

    summary = 'two-stage detectors'
    head_name = 'roi_head'
    options: ClassVar = {
        **OneStageDetector.options,
        'proposals': dict(
            type=int,
            metavar='N',
            help=f"RoIs of decoded two-stage detectors; default: {PROPOSALS}, or the config's "
            'number if it is lower',
        ),
    }
    operators = 'topk', 'gather'

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Say whether a model is a two-stage detector."""
        return is_of_class(model, 'TwoStageDetector')

    def __init__(self, model: nn.Module, *arguments: Any) -> None:
        super().__init__(model, *arguments)
        if refusal := explain_refusal(model):
            raise RequestError(f'{refusal}: use ', Argument('part', 'neck'))

    @property
    def number_of_maps(self) -> int:
        """The number of the neck's maps that RoIs are taken from."""
        extractors = list_stages(self.head.bbox_roi_extractor)
        if self.head.with_mask:
            extractors += list_stages(self.head.mask_roi_extractor)
        return max(extractor.num_inputs for extractor in extractors)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Map images (B, C, H, W) to maps, scores of each level, and deltas of each level.

        Scores are (B, anchors * classes, h, w), deltas (B, anchors * 4, h, w).
        """
        maps = self.model.extract_feat(images)
        return (*maps[: self.number_of_maps], *tree_leaves(self.model.rpn_head(maps)))

    def name_outputs(self, outputs: Outputs) -> list[str]:
        """Name the outputs ``neck1``, ..., ``rpn_cls_score1``, ..., ``rpn_bbox_pred1``, ..."""
        levels = len(self.model.rpn_head.prior_generator.strides)
        numbers = dict(neck=self.number_of_maps, rpn_cls_score=levels, rpn_bbox_pred=levels)
        return [f'{name}{index + 1}' for name, number in numbers.items() for index in range(number)]

    def check_request(self, request: Any) -> None:
        """Raise a RequestError for what only the toolbox can do.

        It alone reads raw outputs. It pastes masks into pictures at the top left, and single ones.
        """
        super().check_request(request)
        if request.outputs != 'decoded':
            raise RequestError(
                'raw outputs of two-stage detectors mean nothing without what follows them: use ',
                Argument('outputs', 'decoded'),
            )
        if request.letterbox == 'center':
            letterbox = Argument('letterbox', 'center')
            raise RequestError(letterbox, f' is not for {self.summary}')
        if 'nms' in request.options:
            raise RequestError(Argument('nms'), ' is for one-stage detectors')
        if request.batch > 1:
            raise RequestError(Argument('batch'), f' is not for {self.summary}')

    def describe(self, config: Config | None, outputs: Outputs) -> dict[str, Any]:
        """Describe classes."""
        number = list_stages(self.head.bbox_head)[-1].num_classes
        return dict(activation=None, **describe_classes(config, number))

    def keeps_best(self, output_format: OutputFormat) -> bool:
        """Return True: NMS is in the network in every format."""
        return True

    def post_process(
        self, outputs: Outputs, shape: Shape, output_format: OutputFormat, options: Options
    ) -> PostProcess:
        """Build the module that proposes boxes, classifies them and computes masks.

        NMS is always in the network: NMS after the network, as in Vision, takes only the boxes of
        one-stage detectors.
        """
        if not output_format.has_nms:
            output_format = OutputFormat()
        limit = self.model.rpn_head.test_cfg.max_per_img
        options = {'proposals': min(PROPOSALS, limit), **options}
        return TwoStageResults(self.model, outputs, shape, options, output_format)

    def substitutes(self, run: RunImages, description: Description, image: Tensor) -> Substitutes:
        """Replace the methods that find boxes and masks; paste masks as users of the file do."""
        head = self.head

        def predict(images: Tensor, _: Any, samples: Any, rescale: bool = False) -> list[Any]:
            """Read the file's objects, and paste their masks into the picture."""
            (sample,) = samples
            outputs = [output.cpu().numpy() for output in run(images)]
            place = (0, 0, *sample.img_shape)  # without the padding
            detections = read_detections(description, outputs)
            results = suppress(*detections, place, description['test_cfg'])
            rows = results.pop('rows')
            scale = np.array(tuple(sample.scale_factor) * 2 if rescale else [1] * 4, np.float32)
            results['boxes'] /= scale
            if head.with_mask:
                boxes = read_boxes(description, outputs)[rows] / scale
                size = sample.ori_shape if rescale else sample.img_shape
                threshold = head.test_cfg.mask_thr_binary
                results['masks'] = paste_masks(outputs[-1][0, rows], boxes, size, threshold)
            tensors = {name: torch.from_numpy(x).to(images.device) for name, x in results.items()}
            return [InstanceData(bboxes=tensors.pop('boxes'), **tensors)]

        return [
            (self.model, 'extract_feat', lambda images: images),
            (self.model.rpn_head, 'predict', lambda images, samples, rescale: None),
            (head, 'predict', predict),
        ]
