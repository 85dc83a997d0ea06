"""The two classification heads of the published networks."""

from __future__ import annotations

from typing import Any

from mmpretrain.models.heads import ClsHead
from mmpretrain.structures import DataSample
from torch import Tensor

from mmcare.models.heads import TwoHeads, pool
from mmcare.registry import MODELS


@MODELS.register_module()
class CAREClsHead(TwoHeads, ClsHead):
    """Class head and distillation head on globally pooled features.

    Each head is GELU, LayerNorm and a linear classifier. Predictions come from the mean of their
    logits. In training both heads learn the labels. In a :class:`DistillationClassifier` the
    distillation head learns from a teacher instead.

    Args:
        num_classes: Number of classes, K.
        in_channels: Channels of the last feature map, C: 1024 for S0 and S1, 1536 for S2.
        deploy: Build the folded head, see :meth:`switch_to_deploy`.
        **kwargs: Arguments of mmpretrain's ``ClsHead``. ``loss`` is that of each head; for mixed
            labels it must accept soft labels, as ``LabelSmoothLoss`` does. ``cal_acc`` logs the
            accuracy of the mean logits.
    """

    def __init__(
        self, num_classes: int, in_channels: int, deploy: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(in_channels, num_classes, **kwargs)
        self.num_classes, self.in_channels = num_classes, in_channels
        if deploy:
            self.switch_to_deploy()

    def pre_logits(self, feats: tuple[Tensor, ...]) -> Tensor:
        """Pool and activate the last of ``feats``, (B, C, H, W) or pooled (B, C), to (B, C)."""
        return pool(feats[-1])

    def head_logits(self, feats: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Compute the logits (B, K) of the class head and of the distillation head."""
        return TwoHeads.forward(self, self.pre_logits(feats), separate=True)

    def forward(self, feats: tuple[Tensor, ...]) -> Tensor:  # type: ignore[override]
        """Compute the mean of both heads' logits, (B, K)."""
        return TwoHeads.forward(self, self.pre_logits(feats))

    def loss(
        self, feats: tuple[Tensor, ...], data_samples: list[DataSample], **kwargs: Any
    ) -> dict[str, Any]:
        """Compute the losses of both heads against the labels, each with weight 1/2.

        Returns:
            ``loss_cls`` and ``loss_distill``, whose sum is the loss, and accuracies in percent.
        """
        cls_logits, distill_logits = self.head_logits(feats)
        return {
            'loss_cls': self.label_loss(cls_logits, data_samples, **kwargs) / 2,
            'loss_distill': self.label_loss(distill_logits, data_samples, **kwargs) / 2,
            **self.accuracies((cls_logits + distill_logits) / 2, data_samples),
        }

    def label_loss(self, logits: Tensor, data_samples: list[DataSample], **kwargs: Any) -> Tensor:
        """Compute the mean loss of logits (B, K) against the labels."""
        return ClsHead._get_loss(self, logits, data_samples, **kwargs)['loss']

    def accuracies(self, logits: Tensor, data_samples: list[DataSample]) -> dict[str, Any]:
        """Compute the accuracies of logits (B, K) in percent; empty without ``cal_acc``."""
        results = ClsHead._get_loss(self, logits, data_samples) if self.cal_acc else {}
        return {name: value for name, value in results.items() if name != 'loss'}
