"""Segmentors of mmseg: logits, probabilities, or a map of labels."""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.config import Config
from torch import Tensor, nn

from mmcare.deployment import BackboneInfo
from mmcare.export.pipelines import describe_sliding, is_slid, name_steps
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
    test_dataset,
)
from mmcare.export.tasks.classifier import Probabilities
from mmcare_runtime.results import to_logits

# ncnn has no argmax. A logit that is at least 1 / 60000**2 = 3e-10 below the largest is not chosen;
# each factor is within the range of float16, whose largest number is 65504.
SHARPNESS = 60000.0
# With logits of this magnitude, mmseg's sigmoid is within 2e-9 of 0 or 1, far from thresholds.
CERTAIN = 20.0


class Segmentor(Task):
    """Logits (B, K, h, w) at the stride of the head."""

    summary = 'segmentors'
    has_probabilities = True

    def __init__(self, model: nn.Module, backbone_name: str, info: BackboneInfo) -> None:
        super().__init__(model, backbone_name, info)
        for module in model.modules():
            if is_of_class(module, 'Hamburger') and not hasattr(module.ham, 'bases'):
                fix_bases(module)

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Say whether a model is a segmentor with a head."""
        return is_of_class(model, 'BaseSegmentor') and hasattr(model, 'decode_head')

    @property
    def head(self) -> Any:
        """The head that predicts, the last of a cascade."""
        heads = self.model.decode_head
        return heads[-1] if isinstance(heads, nn.ModuleList) else heads

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Map images to the logits that mmseg resizes, whatever else the head may return."""
        logits: list[Tensor] = []

        def keep(seg_logits: Tensor, *_: Any, **__: Any) -> Tensor:
            logits.append(seg_logits)
            return seg_logits

        self.head.predict_by_feat = keep
        try:
            self.model.encode_decode(images, [dict(img_shape=images.shape[2:])] * len(images))
        finally:
            del self.head.predict_by_feat  # restores the method of the class
        return tuple(logits)

    def pads_to_stride(self, shape: Shape) -> bool:
        """Return True, except for windows of mmseg's test, which are as they are."""
        test_cfg = getattr(self.model, 'test_cfg', None) or {}
        return [*shape] != [*(test_cfg.get('crop_size') or ())]

    def describe(self, config: Config | None, outputs: Outputs) -> dict[str, Any]:
        """Describe how logits are enlarged and read, and the windows that the test uses, if any.

        With one channel, ``threshold`` is the probability above which a pixel is class 1.
        ``reduce_zero_label`` says how the test data's masks are read.
        """
        channels = outputs[0].shape[1]
        described: dict[str, Any] = dict(
            activation=self.choose_activation(channels), align_corners=self.head.align_corners
        )
        if channels == 1:
            described['threshold'] = self.head.threshold
        if config is not None and is_slid(config):
            described['slide'] = describe_sliding(config)
        if config is not None and config.get('test_dataloader'):
            dataset, dataset_type = test_dataset(config)
            parameters = signature(dataset_type).parameters
            default = getattr(parameters.get('reduce_zero_label'), 'default', False)
            reduced = bool(dataset.get('reduce_zero_label', default))
            described['reduce_zero_label'] = reduced
        return described | describe_classes(config, self.head.num_classes)

    def explain_padding(self, config: Config | None, shape: Shape) -> str:
        """Say how mmseg is made to pad pictures, which it tests at their own sizes by default."""
        if config is None or is_slid(config):
            return ''
        preprocessor, changes = config.model.get('data_preprocessor') or {}, []
        if 'ResizeToMultiple' in name_steps(config):
            changes.append('remove ResizeToMultiple from the test pipeline')
        if [*((preprocessor.get('test_cfg') or {}).get('size') or ())] != [*shape]:
            changes.append(f'set model.data_preprocessor.test_cfg=dict(size={(*shape,)})')
        what = 'of pictures with another ratio, which mmseg does not pad so: for equal results, '
        return what + ' and '.join(changes) if changes else ''

    def choose_activation(self, channels: int) -> str:
        """Choose ``'softmax'`` or ``'sigmoid'``, which the losses of several classes may name."""
        losses: list[Any] = [module for module in self.head.modules() if is_loss(module)]
        is_sigmoid = all(loss.use_sigmoid for loss in losses) and bool(losses)
        return 'sigmoid' if channels == 1 or is_sigmoid else 'softmax'

    def post_process(
        self, outputs: Outputs, shape: Shape, output_format: OutputFormat, options: Options
    ) -> PostProcess:
        """Make the module that enlarges logits and chooses labels; windows get probabilities."""
        channels = outputs[0].shape[1]
        slides = (getattr(self.model, 'test_cfg', None) or {}).get('mode') == 'slide'
        if output_format.probabilities or slides:
            activation = self.choose_activation(channels)
            return ProbabilityMap(activation, shape, self.head.align_corners)
        return LabelMap(self.head, channels, shape, output_format.label_map)

    def substitutes(self, run: RunImages, description: Description, image: Tensor) -> Substitutes:
        """Replace the method that makes logits; labels become one-hot logits, or one channel.

        Logits made from probabilities keep the network's largest class, even if they are averaged.
        """
        output, channels = description['outputs'][0], self(image)[0].shape[1]

        def predict(images: Tensor, metas: Sequence[Any]) -> Tensor:
            (logits,) = run(images)
            if output.get('kind') == 'probabilities':
                values = to_logits(logits.cpu().numpy(), output['activation'])
                logits = torch.from_numpy(values).to(images.device)
            elif output.get('kind') == 'labels':
                logits = F.one_hot(logits.long(), max(channels, 2)).permute(0, 3, 1, 2).float()
                logits = logits if channels > 1 else CERTAIN * (2 * logits[:, 1:] - 1)
            return self.head.predict_by_feat(logits, metas)

        return [(self.model, 'encode_decode', predict)]


def fix_bases(hamburger: Any) -> None:
    """Draw the bases of LightHam's factorization once, in place, as mmseg does for each image."""
    ham, channels = hamburger.ham, hamburger.ham_in.conv.out_channels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        bases = ham._build_bases(1, ham.S, channels // ham.S, ham.R, device='cpu')
    ham.register_buffer('bases', bases, persistent=False)  # not in checkpoints
    ham.rand_init = False


def is_loss(module: Any) -> bool:
    """Tell whether a module is a loss of mmseg that says how logits become probabilities."""
    return isinstance(getattr(module, 'use_sigmoid', None), bool)


class ProbabilityMap(Probabilities):
    """Logits (B, K, h, w) to the probability of each class at each pixel (B, K, H, W)."""

    def __init__(self, activation: str, shape: Shape, align_corners: bool) -> None:
        super().__init__(activation)
        self.shape, self.align_corners = shape, align_corners

    def forward(self, raw: Outputs) -> tuple[Tensor, ...]:
        """Enlarge logits, and apply the activation."""
        return super().forward(
            [F.interpolate(raw[0], self.shape, None, 'bilinear', self.align_corners)]
        )


class LabelMap(PostProcess):
    """Logits (B, K, h, w) to the class of each pixel (B, H, W); one channel to 0 and 1."""

    takes_batches = True
    classes: Tensor

    def __init__(self, head: Any, channels: int, shape: Shape, dtype: torch.dtype):
        super().__init__()
        self.shape, self.align_corners = shape, head.align_corners
        self.dtype = torch.int32 if channels > 256 and dtype == torch.uint8 else dtype
        self.outputs = [dict(name='labels', kind='labels')]
        self.threshold = getattr(head, 'threshold', None)  # of one channel
        self.register_buffer('classes', torch.arange(max(channels, 2)).float()[None, :, None, None])

    def enlarge(self, logits: Tensor) -> Tensor:
        """Resize logits to the image; if there is one channel, add the logits of class 0."""
        logits = F.interpolate(logits, self.shape, None, 'bilinear', self.align_corners)
        if logits.shape[1] > 1:
            return logits
        least = torch.logit(torch.tensor(self.threshold)).item()
        return torch.cat([torch.full_like(logits, least), logits], 1)

    def forward(self, raw: Outputs) -> tuple[Tensor, ...]:
        """Enlarge logits, and choose the largest."""
        logits = self.enlarge(raw[0])
        if self.dtype != torch.float32:
            return (logits.argmax(1).to(self.dtype),)
        # 0 where a logit is the largest, else 1.
        below = logits.amax(1, keepdim=True) - logits
        for _ in range(2):
            below = (below * SHARPNESS).clamp(max=1)
        return (((1 - below) * self.classes).amax(1),)

    def max_error(self, raw: Outputs, results: Sequence[Any]) -> float:
        """Return how far chosen logits are below the best, as a share of the largest magnitude."""
        logits = self.enlarge(raw[0])
        chosen = logits.gather(1, torch.as_tensor(results[0])[:, None].long())
        return ((logits.amax(1, keepdim=True) - chosen).max() / logits.abs().max()).item()
