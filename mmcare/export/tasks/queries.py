"""Detectors of mmdet with queries, such as DETR and Conditional DETR: their logits and boxes."""

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from mmengine.config import Config
from mmengine.structures import InstanceData
from torch import Tensor, nn

from mmcare.deployment import BackboneInfo
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
from mmcare.export.tasks.one_stage_results import CANDIDATES, Boxes, Detections
from mmcare_runtime.results import read_detections, suppress

SELECTION = 'DETRHead._predict_by_feat_single'  # the method that is reproduced here


class QueryDetector(Task):
    """Logits (B, Q, K) and boxes (B, Q, 4) of the last layer; boxes are shares of the image.

    A file has one size of images, so that no position is masked. mmdet masks padding.
    """

    summary = 'detectors with queries'
    head_name = 'bbox_head'
    options: ClassVar = OneStageDetector.options

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Say whether a model is DETR or one of its successors."""
        return is_of_class(model, 'DetectionTransformer') and hasattr(model, 'bbox_head')

    def __init__(self, model: nn.Module, backbone_name: str, info: BackboneInfo) -> None:
        super().__init__(model, backbone_name, info)
        method = getattr(self.head, '_predict_by_feat_single', None)
        if getattr(method, '__qualname__', '') != SELECTION:
            raise RequestError(
                f'the {type(self.head).__name__} selects boxes in another way than DETRHead: use ',
                Argument('part', 'neck'),
            )
        if any(is_of_class(x, 'MultiScaleDeformableAttention') for x in model.modules()):
            raise RequestError(
                f'the deformable attention of the {type(model).__name__} loops over a tensor of '
                'sizes, which torch.export cannot trace: use ',
                Argument('part', 'neck'),
            )

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Map images (B, C, H, W) to logits and boxes."""
        shape = tuple(images.shape[2:])
        metas = dict(batch_input_shape=shape, img_shape=shape, pad_shape=shape)
        samples = [SimpleNamespace(metainfo=metas, **metas) for _ in images]
        inputs = self.model.forward_transformer(self.model.extract_feat(images), samples)
        logits, boxes = self.head(**inputs)
        return logits[-1], boxes[-1]

    def pads_to_stride(self, shape: Shape) -> bool:
        """Return False: there is one map."""
        return False

    def name_outputs(self, outputs: Outputs) -> list[str]:
        """Name both outputs."""
        return ['logits', 'boxes']

    def describe(self, config: Config | None, outputs: Outputs) -> dict[str, Any]:
        """Describe classes and activation; a softmax has a last class for nothing."""
        activation = 'sigmoid' if self.head.loss_cls.use_sigmoid else 'softmax'
        return dict(activation=activation, **describe_classes(config, self.head.num_classes))

    def keeps_best(self, output_format: OutputFormat) -> bool:
        """Say whether the network keeps the best boxes."""
        return output_format.has_nms

    def explain_padding(self, config: Config | None, shape: Shape) -> str:
        """Say that padding is not masked."""
        return 'seen as part of the picture, while mmdet masks it: choose a shape of your ratio'

    def check_request(self, request: Any) -> None:
        """Raise a RequestError for pictures in the middle of the image."""
        super().check_request(request)
        if request.letterbox == 'center':
            raise RequestError(Argument('letterbox', 'center'), f' is not for {self.summary}')

    def post_process(
        self, outputs: Outputs, shape: Shape, output_format: OutputFormat, options: Options
    ) -> PostProcess:
        """Make the module that chooses boxes."""
        return QueryBoxes(self.head, outputs, shape, options, output_format)

    def substitutes(self, run: RunImages, description: Description, image: Tensor) -> Substitutes:
        """Replace the methods that compute queries, and the head's ``predict``."""
        head = self.head

        def predict(images: Tensor, batch_data_samples: Any, rescale: bool = True) -> list[Any]:
            """Read the file's boxes, and scale them as mmdet does."""
            (sample,), outputs = batch_data_samples, run(images)
            metas = [sample.metainfo]
            if description['outputs'][0].get('kind') != 'boxes':
                logits, boxes = (output[None] for output in outputs)
                return head.predict_by_feat(logits, boxes, metas, rescale=rescale)
            detections = read_detections(description, [x.cpu().numpy() for x in outputs])
            place = (0, 0, *sample.img_shape)  # without the padding
            results = suppress(*detections, place, description['test_cfg'])
            tensors = {name: torch.from_numpy(x).to(images.device) for name, x in results.items()}
            boxes = tensors['boxes']
            if rescale:
                boxes = boxes / boxes.new_tensor(tuple(sample.scale_factor) * 2)
            scores, labels = tensors['scores'], tensors['labels']
            return [InstanceData(bboxes=boxes, scores=scores, labels=labels)]

        return [
            (self.model, 'extract_feat', lambda images: images),
            (self.model, 'forward_transformer', lambda images, samples: dict(images=images)),
            (head, 'predict', predict),
        ]


class QueryBoxes(Boxes):
    """The best boxes of queries; none suppresses another one."""

    def __init__(
        self, head: Any, raw: Outputs, shape: Shape, options: Options, output_format: OutputFormat
    ) -> None:
        Detections.__init__(self, shape, options, output_format)
        self.is_sigmoid = head.loss_cls.use_sigmoid
        self.one_class, self.clips, self.least = not self.is_sigmoid, True, -1
        queries = raw[0].shape[1]
        # No box overlaps another one by more than 1, so that NMS removes none.
        self.set_selection(CANDIDATES, queries, head.num_classes, iou=1.0)
        most = (head.test_cfg or {}).get('max_per_img', queries)
        nms = dict(type='nms', iou_threshold=self.iou)
        self.describe(dict(nms=nms, score_thr=0.0, max_per_img=most), queries)

    def read(self, raw: Outputs) -> tuple[Tensor, Tensor]:
        """Return all boxes (Q, 4), x1, y1, x2, y2 as shares of the image, and scores (Q, K)."""
        logits, (center, size) = raw[0][0], raw[1][0].chunk(2, 1)
        scores = logits.sigmoid() if self.is_sigmoid else logits.softmax(1)[:, :-1]
        return torch.cat([center - size / 2, center + size / 2], 1).clamp(0, 1), scores
