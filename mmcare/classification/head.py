"""The two classification heads of the published networks."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmpretrain.models.heads import ClsHead
from mmpretrain.structures import DataSample
from torch import Tensor, nn

from mmcare.models.heads import NORM_EPS, NormedLinear
from mmcare.registry import MODELS
from mmcare.weights.fitting import check_fit, shapes_of


@torch.no_grad()
def average(*heads: NormedLinear) -> NormedLinear:
    """Return one head that computes the mean of the logits of several heads.

    All heads normalise the same features in the same way. Scale, shift and classifier are affine,
    and so is their mean: W = mean(W_i diag(scale_i)), b = mean(W_i shift_i + b_i).
    """
    weights, biases = [], []
    for head in heads:
        weight = head.fc.weight.double()
        weights.append(weight * head.norm.weight)
        biases.append(weight @ head.norm.bias.double() + head.fc.bias)
    classes, channels = weight.shape
    averaged = NormedLinear(channels, classes).to(heads[0].fc.weight)
    averaged.norm = nn.LayerNorm(channels, NORM_EPS, elementwise_affine=False)
    averaged.fc.weight.copy_(torch.stack(weights).mean(0))
    averaged.fc.bias.copy_(torch.stack(biases).mean(0))
    return averaged


@MODELS.register_module()
class CAREClsHead(ClsHead):
    """Class head and distillation head on globally pooled features.

    Each head is GELU, LayerNorm and a linear classifier. Predictions come from the mean of their
    logits. In training both heads learn the labels. In a :class:`DistillationClassifier` the
    distillation head learns from a teacher instead.

    The head loads the weights of both heads or raises, whatever ``strict`` says.

    Args:
        num_classes: Number of classes, K.
        in_channels: Channels of the last feature map, C: 1024 for S0 and S1, 1536 for S2.
        loss: Config of the loss of each head. Mixed labels need a loss for soft labels, such as
            mmpretrain's ``LabelSmoothLoss``. Default: cross-entropy.
        topk: Accuracies to log in training with ``cal_acc``.
        cal_acc: Log the accuracy of the mean logits in training; not for mixed labels.
        deploy: Build the folded head, see :meth:`switch_to_deploy`.
        init_cfg: Default: truncated normal with std 0.02, biases 0.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        loss: dict | None = None,
        topk: int | Sequence[int] = (1,),
        cal_acc: bool = False,
        deploy: bool = False,
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        super().__init__(
            loss=loss or dict(type='CrossEntropyLoss', loss_weight=1.0),
            topk=topk,
            cal_acc=cal_acc,
            init_cfg=init_cfg or dict(type='TruncNormal', layer='Linear', std=0.02, bias=0.0),
        )
        self.num_classes = num_classes
        self.in_channels = in_channels
        self.cls_head = NormedLinear(in_channels, num_classes)
        self.distill_head = NormedLinear(in_channels, num_classes)
        self.deploy = False
        if deploy:
            self.switch_to_deploy()

    def switch_to_deploy(self) -> None:
        """Fold both heads into one that computes the mean of their logits, for evaluation only."""
        if not self.deploy:
            self.folded_head = average(self.cls_head, self.distill_head)
            del self.cls_head, self.distill_head
            self.deploy = True

    def pre_logits(self, feats: tuple[Tensor, ...]) -> Tensor:
        """Pool and activate the features that both heads use.

        Args:
            feats: The last entry is used: (B, C, H, W), or (B, C) if a neck has pooled it.

        Returns:
            Features (B, C).
        """
        features = feats[-1]
        return F.gelu(features.mean((2, 3)) if features.dim() == 4 else features)

    def head_logits(self, feats: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Compute the logits (B, K) of the class head and of the distillation head."""
        features = self.pre_logits(feats)
        return self.cls_head(features), self.distill_head(features)

    def forward(self, feats: tuple[Tensor, ...]) -> Tensor:
        """Compute the mean of both heads' logits, (B, K)."""
        if self.deploy:
            return self.folded_head(self.pre_logits(feats))
        cls_logits, distill_logits = self.head_logits(feats)
        return (cls_logits + distill_logits) / 2

    def loss(
        self, feats: tuple[Tensor, ...], data_samples: list[DataSample], **kwargs: Any
    ) -> dict[str, Any]:
        """Compute the losses of both heads against the labels, each with weight 1/2.

        Args:
            feats: See :meth:`pre_logits`.
            data_samples: With ``gt_label``, or ``gt_score`` for mixed labels.
            **kwargs: Passed to the loss module.

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
        return self._get_loss(logits, data_samples, **kwargs)['loss']

    def accuracies(self, logits: Tensor, data_samples: list[DataSample]) -> dict[str, Any]:
        """Compute the accuracies of logits (B, K) in percent; empty without ``cal_acc``."""
        results = self._get_loss(logits, data_samples) if self.cal_acc else {}
        return {name: value for name, value in results.items() if name != 'loss'}

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        """Load both heads or raise, whatever ``strict`` says: the MM loaders pass False.

        Raises:
            CheckpointError: If a weight is missing, has another shape or is not finite.
        """
        expected = shapes_of(self)
        given = {key: state_dict[prefix + key] for key in expected if prefix + key in state_dict}
        file = f'in {local_metadata["file"]} ' if 'file' in local_metadata else ''
        check_fit(
            given,
            expected,
            f'The weights {file}do not fit both classification heads (prefix {prefix!r}).',
            lambda: self._advise(prefix, state_dict),
        )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _advise(self, prefix: str, state_dict: dict[str, Any]) -> Iterator[str]:
        if self.deploy and f'{prefix}cls_head.fc.weight' in state_dict:
            yield '  The head is folded (deploy=True), the weights are not.'
        elif not self.deploy and f'{prefix}folded_head.fc.weight' in state_dict:
            yield '  The weights are folded, the head is not: build it with deploy=True.'
        else:
            yield (
                '  To load the backbone alone and train new heads, give the file to the backbone: '
                "init_cfg=dict(type='Pretrained', checkpoint=FILE)."
            )
