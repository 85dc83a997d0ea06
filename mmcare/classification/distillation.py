"""Train with a teacher, as the released script and DeiT do.

Touvron et al., "Training data-efficient image transformers & distillation through attention",
ICML 2021, https://arxiv.org/abs/2012.12877.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from mmpretrain.models.classifiers import ImageClassifier
from mmpretrain.registry import MODELS as MMPRETRAIN_MODELS
from mmpretrain.structures import DataSample
from torch import Tensor, nn

from mmcare.registry import MODELS
from mmcare.weights.reading import load_weights


@MODELS.register_module()
class DistillationClassifier(ImageClassifier):
    """A classifier whose distillation head learns from a teacher.

    The teacher sees the batch that the student sees: mixed, and normalised by the student's data
    preprocessor. With Z the logits, y the labels and alpha the teacher's share, the loss is DeiT's
    hard distillation (Eq. 3): ``(1 - alpha) CE(Z_cls, y) + alpha CE(Z_distill, argmax Z_teacher)``.

    CE against the labels is the head's own loss, with label smoothing and mixed labels.

    The teacher is built when training starts, so testing needs neither the teacher nor its file,
    and neither do averaged copies, which ``EMAHook`` makes before. It gets no gradients, stays in
    evaluation mode, and is not part of the student's parameters and checkpoints.

    Args:
        teacher: Config of a classifier, such as mmpretrain's ``TimmClassifier``, or a module. It
            maps images (B, 3, H, W) to logits (B, K) of the same classes.
        teacher_checkpoint: File or URL with the teacher's weights, which must fill it. None if
            the config itself loads weights (``pretrained`` or ``init_cfg``), or for a module.
        alpha: Share of the teacher in the loss, 0 to 1.
        teacher_dtype: Type in which the teacher computes, such as ``'bfloat16'``. None: float32,
            or autocast's.
        teacher_channels_last: Lay the teacher's weights and images out channels-last.
        **kwargs: Arguments of mmpretrain's ``ImageClassifier``; the head is a ``CAREClsHead``.

    Raises:
        ValueError: If ``alpha`` is not allowed, or the teacher has no weights.
    """

    def __init__(
        self,
        *,
        teacher: Mapping[str, Any] | nn.Module,
        teacher_checkpoint: str | None = None,
        alpha: float = 0.5,
        teacher_dtype: str | None = None,
        teacher_channels_last: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not 0 <= alpha <= 1:
            raise ValueError(f'alpha must be in [0, 1], got {alpha!r}')
        self.alpha, self.teacher_checkpoint = alpha, teacher_checkpoint
        self.teacher_layout: dict[str, Any] = dict(
            dtype=getattr(torch, teacher_dtype) if teacher_dtype else None,
            memory_format=torch.channels_last if teacher_channels_last else None,
        )
        self._teacher_device: torch.device | None = None
        # A config until its first use. In a list, PyTorch does not take it for a part.
        self._teacher: list[Any] = [teacher]
        if not isinstance(teacher, nn.Module):
            loads = teacher_checkpoint or teacher.get('pretrained') or teacher.get('init_cfg')
            if not loads:
                raise ValueError("teacher_checkpoint must be the teacher's weights, got None")

    @property
    def teacher(self) -> nn.Module:
        """The teacher with its weights; it is built on first use."""
        (teacher,) = self._teacher
        if not isinstance(teacher, nn.Module):
            teacher = MMPRETRAIN_MODELS.build(deepcopy(teacher))
            if self.teacher_checkpoint:
                state = load_weights(self.teacher_checkpoint)
                teacher.load_state_dict(state.get('model', state))  # DeiT's key is `model`
            elif teacher.init_cfg:  # timm's models have loaded theirs, which this would replace
                teacher.init_weights()
            self._teacher = [teacher]
        return teacher

    def init_weights(self) -> None:
        """Initialise the student; also build the teacher, so that a missing file is found early."""
        self.teacher  # noqa: B018
        super().init_weights()

    def loss(self, inputs: Tensor, data_samples: list[DataSample]) -> dict[str, Any]:
        """Compute the losses of normalised images (B, 3, H, W), see :meth:`CAREClsHead.loss`.

        Raises:
            ValueError: If the teacher's logits have another shape than the head's.
        """
        if self._teacher_device != inputs.device:  # only once, since it takes milliseconds
            self.teacher.requires_grad_(False).eval().to(inputs.device, **self.teacher_layout)
            self._teacher_device = inputs.device
        with torch.no_grad():
            teacher_logits = self.teacher(inputs.to(**self.teacher_layout)).to(inputs.dtype)
        distill = partial(self._distillation_loss, teacher_logits)
        return self.head.loss(self.extract_feat(inputs), data_samples, self.alpha, distill)

    def _distillation_loss(self, teacher_logits: Tensor, logits: Tensor) -> Tensor:
        shape, needed = tuple(teacher_logits.shape), tuple(logits.shape)
        if shape != needed:
            name = "the shape of the teacher's logits"
            raise ValueError(f"{name} must be the head's {needed}, got {shape}")
        return F.cross_entropy(logits, teacher_logits.argmax(1))
