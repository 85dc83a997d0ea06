"""The two classification heads of the published networks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.logging import print_log
from mmengine.registry import MODELS as MMENGINE_MODELS
from mmpretrain.evaluation import Accuracy
from mmpretrain.models.heads import ClsHead
from mmpretrain.structures import DataSample
from torch import Tensor, nn

from mmcare.checkpoint import CheckpointError, find_faults
from mmcare.models.arguments import check_switches
from mmcare.models.layers import Foldable
from mmcare.registry import MODELS

NORM_EPS = 1e-6


class NormedLinear(nn.Module):
    """LayerNorm, then a linear classifier.

    Args:
        in_channels: Channels of the features, C.
        num_classes: Number of classes, K.
    """

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(in_channels, eps=NORM_EPS)
        self.fc = nn.Linear(in_channels, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        """Map features (B, C) to logits (B, K)."""
        return self.fc(self.norm(features))


def average(heads: Sequence[NormedLinear]) -> NormedLinear:
    """Return one head that puts out the mean of several heads' logits.

    All normalise the same features alike. What differs, scale, shift and classifier, is affine,
    and so is its mean: W = mean(W_i diag(scale_i)), b = mean(W_i shift_i + b_i).
    """
    weights = torch.stack([head.fc.weight.double() * head.norm.weight.double() for head in heads])
    biases = torch.stack(
        [
            head.fc.weight.double() @ head.norm.bias.double() + head.fc.bias.double()
            for head in heads
        ]
    )
    fc = heads[0].fc
    averaged = NormedLinear(fc.in_features, fc.out_features)
    averaged.norm = nn.LayerNorm(fc.in_features, eps=NORM_EPS, elementwise_affine=False)
    averaged.fc.weight = nn.Parameter((weights.sum(0) / len(heads)).to(fc.weight))
    averaged.fc.bias = nn.Parameter((biases.sum(0) / len(heads)).to(fc.weight))
    return averaged


@MODELS.register_module()
@MMENGINE_MODELS.register_module()
class CAREClsHead(Foldable, ClsHead):
    """Class head and distillation head on globally pooled features.

    Each is GELU, LayerNorm and a linear classifier. Predictions come from the mean of their
    logits. In training both learn the labels, with the mean of their losses; with a teacher, in
    :class:`DistillationClassifier`, the distillation head learns from it instead.

    The head takes a map (B, C, H, W) and pools it, or what a ``GlobalAveragePooling`` neck has
    pooled (B, C). It takes its weights whole or raises, whatever ``strict`` says.

    Args:
        num_classes: Number of classes, K.
        in_channels: Channels of the last feature map, C: 1024 for S0 and S1, 1536 for S2.
        loss: Config of the loss of either head; mixed (soft) labels need one that takes them, as
            mmpretrain's ``CrossEntropyLoss`` and ``LabelSmoothLoss`` do.
        topk: Accuracies to log in training with ``cal_acc``: a number of guesses, or several.
        cal_acc: Log the accuracy of the mean logits in training; not with mixed labels.
        deploy: Build the folded head, for evaluation only, which takes the weights of a folded
            one, see :meth:`switch_to_deploy`.
        init_cfg: By default truncated normal, std 0.02, biases 0.

    Raises:
        TypeError: If ``cal_acc`` or ``deploy`` is not True or False, or ``topk`` not of integers.
        ValueError: If ``num_classes``, ``in_channels`` or ``topk`` is not of integers of at least
            1, or ``cal_acc`` asks for more guesses than there are classes.
    """

    loss_module: nn.Module  # of ClsHead
    topk: int | Sequence[int]

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
        for name, value in (('num_classes', num_classes), ('in_channels', in_channels)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f'{name} of CAREClsHead must be an integer of at least 1, got {value!r}'
                )
        check_switches(cal_acc=cal_acc, deploy=deploy)
        _check_topk(topk, num_classes if cal_acc else None)
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
        if deploy:
            self.eval()
            self.switch_to_deploy()

    def _fold(self) -> None:
        """Fold both heads into one that puts out the mean of their logits."""
        self.folded_head = average([self.cls_head, self.distill_head])
        del self.cls_head, self.distill_head

    def pre_logits(self, feats: tuple[Tensor, ...]) -> Tensor:
        """Pool and activate what both heads start from.

        Args:
            feats: The last one counts: (B, C, H, W), or (B, C) if a neck has pooled it.

        Returns:
            Features (B, C).

        Raises:
            ValueError: If the features have another number of channels than ``in_channels``.
        """
        features = feats[-1]
        if features.dim() not in (2, 4) or features.shape[1] != self.in_channels:
            raise ValueError(
                f'CAREClsHead has in_channels={self.in_channels} and takes features (B, '
                f'{self.in_channels}) or (B, {self.in_channels}, H, W), got a tensor of shape '
                f'{tuple(features.shape)}; set model.head.in_channels to the channels of the '
                "backbone's last output"
            )
        if features.dim() == 4:
            features = features.mean((2, 3))
        return F.gelu(features)

    def head_logits(self, feats: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Compute the logits (B, K) of the class head and of the distillation head.

        Raises:
            RuntimeError: If the head is folded, so that there is one left.
        """
        if self.deploy:
            raise RuntimeError(
                'this CAREClsHead is folded: it puts out the mean of both heads alone, which is '
                'what forward() and predict() return, and has no losses'
            )
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
    ) -> dict[str, Tensor]:
        """Compute the losses of both heads against the labels, each with weight 1/2.

        Args:
            feats: See :meth:`pre_logits`.
            data_samples: With ``gt_label``, or ``gt_score`` for mixed labels.
            **kwargs: Passed to the loss module.

        Returns:
            ``loss_cls`` and ``loss_distill``, whose sum is the loss; accuracies if asked for.
        """
        cls_logits, distill_logits = self.head_logits(feats)
        return {
            'loss_cls': self.label_loss(cls_logits, data_samples, **kwargs) / 2,
            'loss_distill': self.label_loss(distill_logits, data_samples, **kwargs) / 2,
            **self.accuracies((cls_logits + distill_logits) / 2, data_samples),
        }

    def label_loss(self, logits: Tensor, data_samples: list[DataSample], **kwargs: Any) -> Tensor:
        """Compute the mean loss of logits (B, K) against the labels."""
        return self.loss_module(
            logits, _stack_labels(data_samples), avg_factor=len(logits), **kwargs
        )

    def accuracies(self, logits: Tensor, data_samples: list[DataSample]) -> dict[str, Tensor]:
        """Compute the accuracies of logits (B, K) in percent; nothing unless ``cal_acc``.

        Raises:
            ValueError: If labels are mixed, so that no class is the right one.
        """
        if not self.cal_acc:
            return {}
        labels = _stack_labels(data_samples)
        if labels.dim() != 1:
            raise ValueError(
                'model.head.cal_acc=True has no meaning with the mixed labels of Mixup and '
                'CutMix; set it to False, or model.train_cfg.augments=None'
            )
        topk = [self.topk] if isinstance(self.topk, int) else self.topk
        shares = Accuracy.calculate(logits, labels, topk=topk)
        return {f'accuracy_top-{k}': share for k, (share,) in zip(topk, shares, strict=True)}

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any], *args: Any
    ) -> None:
        """Take a state dict whole or raise, whatever ``strict`` says (the MM loaders pass False).

        Raises:
            CheckpointError: If a weight is missing, of another shape or not finite. It names the
                first few, and the argument that disagrees.
        """
        self._check_state(state_dict, prefix, local_metadata.get('file'))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if local_metadata.get('classifier_file'):
            print_log(
                f'{local_metadata["classifier_file"]}: class and distillation head are loaded, '
                'too; this is the whole classifier.',
                logger='current',
            )

    def _check_state(self, state_dict: Mapping[str, Tensor], prefix: str, file: str | None) -> None:
        # Names without those of wrappers such as torch.compile's.
        expected = {
            name.replace('_orig_mod.', ''): tuple(parameter.shape)
            for name, parameter in self.named_parameters()
            if name.startswith(('cls_head.', 'distill_head.', 'folded_head.'))
        }
        values = {
            name: state_dict[prefix + name] for name in expected if prefix + name in state_dict
        }
        given = {
            name: tuple(value.shape) for name, value in values.items() if isinstance(value, Tensor)
        }
        missing = [name for name in expected if name not in values]
        faults = find_faults(values, of_network=True)
        misshapen = [name for name in given if given[name] != expected[name]]
        if not missing and not misshapen and not faults:
            return
        file = f'in {file}' if file else 'given'
        lines = [f'The weights {file} do not fit the classification heads (prefix {prefix!r}).']
        if missing:
            more = f' and {len(missing) - 3} more' if len(missing) > 3 else ''
            lines.append(f'  missing: {", ".join(missing[:3])}{more}')
        if misshapen:
            name = misshapen[0]
            lines.append(f'  of another shape: {name} {given[name]} instead of {expected[name]}')
        if faults:
            lines.append(f'  no usable weights: {faults[0]}')
        if f'{prefix}folded_head.fc.weight' in state_dict and not self.deploy:
            lines.append(
                '  The weights are folded (tools/reparameterize_model.py), the head is not: build '
                'it with deploy=True (--cfg-options model.head.deploy=True '
                'model.backbone.deploy=True) to evaluate, or give the weights from before folding '
                'to train'
            )
        elif f'{prefix}cls_head.fc.weight' in state_dict and self.deploy:
            lines.append(
                '  The head is folded (deploy=True), the weights are not: fold them first (python '
                'tools/reparameterize_model.py CONFIG CHECKPOINT OUT), or leave deploy out'
            )
        for argument, axis in (('num_classes', 0), ('in_channels', 1)):
            shape = next((given[name] for name in given if name.endswith('fc.weight')), None)
            if shape is not None and len(shape) == 2 and shape[axis] != getattr(self, argument):
                lines.append(
                    f'  {argument}: the file has {shape[axis]}, the head {getattr(self, argument)} '
                    f'(model.head.{argument})'
                )
        lines.append(
            'A classifier is loaded whole. To begin from the backbone alone and train new heads, '
            'give the file to the backbone: --cfg-options model.backbone.init_cfg.type=Pretrained '
            'model.backbone.init_cfg.checkpoint=FILE model.backbone.init_cfg.prefix=backbone.'
        )
        raise CheckpointError('\n'.join(lines))


def _check_topk(topk: Any, num_classes: int | None) -> None:
    """Check ``topk``; ``num_classes`` is None if it is not used.

    Then it may be larger: configs of few classes inherit mmpretrain's ``topk=(1, 5)``.
    """
    ranks = [topk] if isinstance(topk, int) else topk
    if not isinstance(ranks, list | tuple) or not all(type(rank) is int for rank in ranks):
        raise TypeError(f'topk of CAREClsHead must be an integer or a tuple of them, got {topk!r}')
    if not ranks or min(ranks) < 1:
        raise ValueError(f'topk of CAREClsHead must be of integers of at least 1, got {topk!r}')
    if num_classes is not None and max(ranks) > num_classes:
        raise ValueError(
            f'topk of CAREClsHead must not exceed num_classes={num_classes} where cal_acc=True '
            f'asks for these accuracies, got {topk!r}'
        )


def _stack_labels(data_samples: list[DataSample]) -> Tensor:
    """Labels (B,), or scores (B, K) where the batch was mixed."""
    if 'gt_score' in data_samples[0]:
        return torch.stack([sample.gt_score for sample in data_samples])
    return torch.cat([sample.gt_label for sample in data_samples])
