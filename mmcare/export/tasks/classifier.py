"""Classifiers of mmpretrain: logits, or probabilities."""

from typing import Any

import torch
from mmengine.config import Config
from torch import Tensor, nn

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
from mmcare_runtime.results import to_logits


class Classifier(Task):
    """Logits (B, K)."""

    summary = 'classifiers'
    head_name = 'head'
    has_probabilities = True

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Say whether a model is a classifier with a head."""
        return is_of_class(model, 'BaseClassifier') and getattr(model, 'head', None) is not None

    def pads_to_stride(self, shape: Shape) -> bool:
        """Return False: a classifier has one map."""
        return False

    def describe(self, config: Config | None, outputs: Outputs) -> dict[str, Any]:
        """Describe the activation, which is sigmoid if several classes can be right."""
        activation = 'sigmoid' if is_of_class(self.head, 'MultiLabelClsHead') else 'softmax'
        number = outputs[0].shape[1]  # not all heads know it
        return dict(activation=activation, **describe_classes(config, number))

    def post_process(
        self, outputs: Outputs, shape: Shape, output_format: OutputFormat, options: Options
    ) -> PostProcess:
        """Make the module that turns logits into probabilities."""
        return Probabilities(self.describe(None, outputs)['activation'])

    def substitutes(self, run: RunImages, description: Description, image: Tensor) -> Substitutes:
        """Replace the methods that make logits; probabilities become logits again."""
        output = description['outputs'][0]

        def predict_logits(images: Tensor) -> Tensor:
            """Map images (B, C, H, W) to logits (B, K)."""
            (scores,) = run(images)
            if output.get('kind') != 'probabilities':
                return scores
            logits = to_logits(scores.cpu().numpy(), output['activation'])
            return torch.from_numpy(logits).to(images.device)

        return [
            (self.model, 'extract_feat', lambda images: images),
            (self.head, 'forward', predict_logits),
        ]


class Probabilities(PostProcess):
    """Logits (B, K, ...) to probabilities of the same shape."""

    takes_batches = True

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = activation
        name = 'probabilities'
        self.outputs = [dict(name=name, kind=name, activation=activation)]

    def forward(self, raw: Outputs) -> tuple[Tensor, ...]:
        """Apply the activation."""
        return (raw[0].sigmoid() if self.activation == 'sigmoid' else raw[0].softmax(1),)
