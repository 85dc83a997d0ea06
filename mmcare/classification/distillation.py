"""Training with a teacher, as the released script and DeiT do it.

Touvron et al., "Training data-efficient image transformers & distillation through attention",
ICML 2021, https://arxiv.org/abs/2012.12877.
"""

import math
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.logging import print_log
from mmengine.registry import MODELS as MMENGINE_MODELS
from mmengine.runner import CheckpointLoader
from mmpretrain.models.classifiers import ImageClassifier
from mmpretrain.registry import MODELS as MMPRETRAIN_MODELS
from mmpretrain.structures import DataSample
from torch import Tensor, nn

from mmcare.checkpoint import CheckpointError, load_from_local_checked
from mmcare.classification.head import CAREClsHead
from mmcare.models.arguments import check_numbers
from mmcare.registry import MODELS

DISTILLATIONS = ('hard', 'soft')
TRIAL_SIZE = 224

WHERE_TO_GET_THE_TEACHER = """\
The teacher of the released script is RegNetY-160, regnety_160-a5fe301d.pth of the DeiT repository
(facebookresearch/deit on GitHub). Put the file there, or name another:
    --cfg-options model.teacher_checkpoint=FILE
or train without a teacher, with configs/imagenet/care_s0_in1k.py and its like."""


class _Unregistered:
    """Holds a module out of sight of the module that uses it.

    A child would be trained, saved, averaged and set to training mode with its parent. Copies of
    the parent (an averaged model is one) share the module.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> '_Unregistered':
        return self


@MODELS.register_module()
@MMENGINE_MODELS.register_module()
class DistillationClassifier(ImageClassifier):
    """A classifier whose distillation head learns from a teacher.

    The teacher sees the very batch that the student sees: mixed, and normalised by the student's
    data preprocessor (the teacher's own is left aside). With Z the logits, y the labels and
    alpha the teacher's share, the loss is

    - hard (DeiT, Eq. 3): ``(1 - alpha) CE(Z_cls, y) + alpha CE(Z_distill, argmax Z_teacher)``;
    - soft (DeiT, Eq. 2): the second cross-entropy becomes
      ``tau^2 KL(softmax(Z_teacher / tau) || softmax(Z_distill / tau))``, a mean over the batch.

    CE against the labels is the head's own loss, with label smoothing and mixed labels; against
    the teacher it is plain.

    The teacher is built when training starts, so testing needs neither it nor its file. It gets
    no gradient, stays in evaluation mode, follows the student to its device and dtype, and is
    not part of the student: not of its parameters, its checkpoints or its averaged copies.

    Args:
        teacher: Config of a classifier (mmpretrain's ``TimmClassifier`` for a network of timm), or
            the module itself. It maps images (B, 3, H, W) to logits (B, K).
        teacher_checkpoint: File or URL with the teacher's weights, which must fill it. None if
            the config brings its weights (``pretrained=True`` of timm, an ``init_cfg`` of type
            Pretrained) or the module has them.
        alpha: Share of the teacher in the loss, 0 to 1.
        distillation: ``'hard'`` or ``'soft'``.
        temperature: tau of the soft distillation.
        **kwargs: Arguments of mmpretrain's ``ImageClassifier``; the head is a ``CAREClsHead``.

    Raises:
        TypeError: If the head is no ``CAREClsHead``, or an argument has the wrong type.
        ValueError: If an argument is outside of what is allowed.
    """

    def __init__(
        self,
        *,
        teacher: Mapping[str, Any] | nn.Module,
        teacher_checkpoint: str | None,
        alpha: float = 0.5,
        distillation: str = 'hard',
        temperature: float = 1.0,
        **kwargs: Any,
    ) -> None:
        _check_arguments(teacher, teacher_checkpoint, alpha, distillation, temperature)
        super().__init__(**kwargs)
        if not isinstance(self.head, CAREClsHead):
            raise TypeError(
                "DistillationClassifier needs head=dict(type='mmcare.CAREClsHead', ...), which "
                f'has a distillation head; got {type(self.head).__name__}'
            )
        self.teacher_checkpoint = teacher_checkpoint
        self.alpha = alpha
        self.distillation = distillation
        self.temperature = temperature
        self._teacher = _Unregistered()
        self.teacher_cfg: dict[str, Any] | None = None
        if isinstance(teacher, nn.Module):
            self._teacher.module = self._prepare(teacher)
        else:
            self.teacher_cfg = deepcopy(dict(teacher))

    @property
    def teacher(self) -> nn.Module:
        """The teacher, with its weights; built when first asked for.

        Raises:
            FileNotFoundError: If there is no file ``teacher_checkpoint``.
            CheckpointError: If its weights do not fill the teacher.
            ValueError: If the teacher tells another number of classes apart than the head.
        """
        if self._teacher.module is None:
            self._teacher.module = self._prepare(self._build_teacher())
        return self._teacher.module

    def init_weights(self) -> None:
        """Get the teacher, which fails before any training if it cannot; initialise the student."""
        print_log(f'The teacher is a {type(self.teacher).__name__}.', logger='current')
        super().init_weights()

    def loss(self, inputs: Tensor, data_samples: list[DataSample]) -> dict[str, Tensor]:
        """Compute the losses of a batch.

        Args:
            inputs: Normalised images (B, 3, H, W).
            data_samples: With their labels.

        Returns:
            ``loss_cls`` and ``loss_distill``, whose sum is the loss; accuracies if asked for.
        """
        teacher_logits = self.ask_teacher(inputs)
        cls_logits, distill_logits = self.head.head_logits(self.extract_feat(inputs))
        if teacher_logits.shape != distill_logits.shape:
            raise ValueError(
                f'the teacher gives logits of shape {tuple(teacher_logits.shape)}, the head '
                f'{tuple(distill_logits.shape)}'
            )
        label_loss = self.head.label_loss(cls_logits, data_samples)
        return {
            'loss_cls': (1 - self.alpha) * label_loss,
            'loss_distill': self.alpha * self.distillation_loss(distill_logits, teacher_logits),
            **self.head.accuracies((cls_logits + distill_logits) / 2, data_samples),
        }

    def ask_teacher(self, inputs: Tensor) -> Tensor:
        """Compute the teacher's logits (B, K) of a batch, without gradients."""
        teacher = self.teacher
        parameter = next(teacher.parameters(), inputs)
        if parameter.device != inputs.device:  # a copy of the student was moved elsewhere
            teacher.to(inputs.device)
        with torch.no_grad():
            return _ask(teacher, inputs)

    def distillation_loss(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Compute the loss of the distillation head's logits (B, K) against the teacher's."""
        if self.distillation == 'hard':
            return F.cross_entropy(logits, teacher_logits.argmax(1))
        divergence = F.kl_div(
            F.log_softmax(logits / self.temperature, 1),
            F.log_softmax(teacher_logits / self.temperature, 1),
            reduction='batchmean',
            log_target=True,
        )
        return self.temperature**2 * divergence

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> 'DistillationClassifier':
        """Move or cast the teacher with the student; what ``to``, ``cuda`` and ``half`` go by."""
        super()._apply(fn, *args, **kwargs)
        if self._teacher.module is not None:
            self._teacher.module._apply(fn, *args, **kwargs)
        return self

    def _build_teacher(self) -> nn.Module:
        checkpoint = self.teacher_checkpoint
        if checkpoint is not None:
            is_local = (
                CheckpointLoader._get_checkpoint_loader(checkpoint) is load_from_local_checked
            )
            if is_local and not Path(checkpoint).expanduser().is_file():
                raise FileNotFoundError(
                    f'model.teacher_checkpoint names {checkpoint!r}, and there is no such file in '
                    f'{Path.cwd()}.\n{WHERE_TO_GET_THE_TEACHER}'
                )
        teacher = MMPRETRAIN_MODELS.build(deepcopy(self.teacher_cfg))
        if checkpoint is None:
            teacher.init_weights()
        else:
            _load_whole(teacher, checkpoint)
        return teacher

    def _prepare(self, teacher: nn.Module) -> nn.Module:
        """Check a teacher, freeze it and bring it to the student's device and dtype."""
        teacher.requires_grad_(False).eval()
        classes = _count_classes(teacher)
        if classes != self.head.num_classes:
            raise ValueError(
                f'the teacher ({type(teacher).__name__}) tells {classes} classes apart, the head '
                f'has model.head.num_classes={self.head.num_classes}: they must be the same '
                'classes, in the same order; choose another model.teacher or another number'
            )
        student = next(self.parameters())
        return teacher.to(device=student.device, dtype=student.dtype)


def _check_arguments(
    teacher: Any, teacher_checkpoint: Any, alpha: float, distillation: str, temperature: float
) -> None:
    if not isinstance(teacher, Mapping | nn.Module):
        raise TypeError(f'teacher must be the config of a classifier or a module, got {teacher!r}')
    if not isinstance(teacher_checkpoint, str | None):
        raise TypeError(
            f'teacher_checkpoint must be text, a file or URL, or None, got {teacher_checkpoint!r}'
        )
    if isinstance(teacher, nn.Module) and teacher_checkpoint is not None:
        raise ValueError(
            'teacher is a module, which has its weights already; set teacher_checkpoint=None'
        )
    if isinstance(teacher, Mapping) and teacher_checkpoint is None and not _loads_itself(teacher):
        raise ValueError(
            'teacher_checkpoint is None, and the config of the teacher names no weights either '
            "(pretrained=True of timm, or an init_cfg of type 'Pretrained'): the teacher would be "
            'random; set model.teacher_checkpoint to the file of its weights'
        )
    check_numbers(alpha=alpha, temperature=temperature)
    if not 0 <= alpha <= 1:
        raise ValueError(f'alpha must lie in [0, 1], got {alpha!r}')
    if distillation not in DISTILLATIONS:
        raise ValueError(f'distillation must be one of {DISTILLATIONS}, got {distillation!r}')
    if not 0 < temperature < math.inf:
        raise ValueError(f'temperature must be greater than 0 and finite, got {temperature!r}')


def _loads_itself(teacher: Mapping[str, Any]) -> bool:
    init_cfgs = teacher.get('init_cfg') or []
    init_cfgs = init_cfgs if isinstance(init_cfgs, list | tuple) else [init_cfgs]
    return bool(teacher.get('pretrained')) or any(
        init_cfg.get('type') == 'Pretrained' for init_cfg in init_cfgs
    )


def _load_whole(teacher: nn.Module, checkpoint: str) -> None:
    """Fill a teacher with the weights of a file or URL, which may come from MM, timm or DeiT."""
    state = CheckpointLoader.load_checkpoint(checkpoint, map_location='cpu')
    for key in ('state_dict', 'model'):
        if isinstance(state.get(key), Mapping):
            state = state[key]
    state = {key.removeprefix('module.'): value for key, value in state.items()}
    try:
        teacher.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(
            f'the weights in model.teacher_checkpoint={checkpoint!r} are not those of the teacher '
            f'in model.teacher. {error}'
        ) from error


def _count_classes(teacher: nn.Module) -> int:
    """How many classes a teacher tells apart: what it says, or what it does."""
    for part in (getattr(teacher, 'head', None), getattr(teacher, 'model', None)):
        number = getattr(part, 'num_classes', None)
        if isinstance(number, int):
            return number
    parameter = next(teacher.parameters())
    with torch.no_grad():
        return _ask(teacher, parameter.new_zeros(1, 3, TRIAL_SIZE, TRIAL_SIZE)).shape[1]


def _ask(teacher: nn.Module, inputs: Tensor) -> Tensor:
    logits = teacher(inputs)
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise TypeError(
            f'the teacher ({type(teacher).__name__}) must map images to logits (B, K), it gives '
            f'{tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__}; a '
            'classifier with a head does'
        )
    return logits
