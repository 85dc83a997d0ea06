from __future__ import annotations

from collections.abc import Callable
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
    logits. Both heads learn the labels; in a :class:`DistillationClassifier`, the second learns
    from a teacher.

    Args:
        num_classes: Number of classes, K.
        in_channels: Channels of the last feature map, C: 1024 for S0 and S1, 1536 for S2.
        deploy: Build the fused head, see :meth:`switch_to_deploy`.
        **kwargs: Arguments of mmpretrain's ``ClsHead``. ``loss`` is used for each head; for mixed
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
        """Pool and activate the last map, (B, C, H, W) or already pooled (B, C), to (B, C)."""
        return pool(feats[-1])

    def forward(self, feats: Any, separate: bool = False) -> Any:
        """Compute the mean of both heads' logits (B, K), or the logits of each head."""
        return super().forward(self.pre_logits(feats), separate)

    def loss(
        self,
        feats: tuple[Tensor, ...],
        data_samples: list[DataSample],
        alpha: float = 0.5,
        distill: Callable[[Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Compute the losses of both heads, which add up, and accuracies in percent.

        Args:
            feats: See :meth:`pre_logits`.
            data_samples: The images' data samples, with labels.
            alpha: Weight of the distillation head; the class head has the rest.
            distill: Loss of the distillation head's logits (B, K); None: against the labels.
            **kwargs: Arguments of the loss against the labels.
        """

        def label_loss(logits: Tensor) -> Tensor:
            return ClsHead._get_loss(self, logits, data_samples, **kwargs)['loss']

        logits, distilled = self(feats, separate=True)
        mean = (logits + distilled) / 2
        losses = ClsHead._get_loss(self, mean, data_samples) if self.cal_acc else {}
        losses.pop('loss', None)  # the mean is for the accuracies only
        losses['loss_cls'] = (1 - alpha) * label_loss(logits)
        losses['loss_distill'] = alpha * (distill or label_loss)(distilled)
        return losses
