"""The two classification heads of the published networks, for timm and mmpretrain."""

from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmcare.deployment import check_fusible

NORM_EPS = 1e-6


class NormedLinear(nn.Module):
    """LayerNorm, then a linear classifier, initialised as the published networks are."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(in_channels, eps=NORM_EPS)
        self.fc = nn.Linear(in_channels, num_classes)
        nn.init.trunc_normal_(self.fc.weight, std=0.02)
        nn.init.zeros_(self.fc.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Map features (B, C) to logits (B, K)."""
        return self.fc(self.norm(features))


class TwoHeads(nn.Module):
    """Class head and distillation head; ``kwargs`` go to the next base class."""

    def __init__(self, in_channels: int, num_classes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.cls_head = NormedLinear(in_channels, num_classes)
        self.distill_head = NormedLinear(in_channels, num_classes)
        self.deploy = False

    def forward(self, features: Tensor, separate: bool = False) -> Any:
        """Map pooled features (B, C) to the mean of both heads' logits (B, K), or to both."""
        if self.deploy and not separate:
            return self.folded_head(features)
        logits, distilled = self.cls_head(features), self.distill_head(features)
        return (logits, distilled) if separate else (logits + distilled) / 2

    @torch.no_grad()
    def switch_to_deploy(self) -> None:
        """Fuse both heads into one that computes the mean of their logits, for evaluation only.

        Both share the normalisation: W = mean(W_i diag(scale_i)), b = mean(W_i shift_i + b_i).

        Raises:
            RuntimeError: If a layer has hooks, parametrizations or another forward.
        """
        if self.deploy:
            return
        for name in ('cls_head.norm', 'cls_head.fc', 'distill_head.norm', 'distill_head.fc'):
            check_fusible(name, self.get_submodule(name))
        # Some devices have no float64.
        heads = [deepcopy(head).cpu().double() for head in (self.cls_head, self.distill_head)]
        weights = [head.fc.weight * head.norm.weight for head in heads]
        biases = [head.fc.weight @ head.norm.bias + head.fc.bias for head in heads]
        self.folded_head = self.cls_head
        self.folded_head.norm = nn.LayerNorm(self.cls_head.fc.in_features, NORM_EPS, False)
        self.folded_head.fc.weight.copy_(torch.stack(weights).mean(0))
        self.folded_head.fc.bias.copy_(torch.stack(biases).mean(0))
        del self.cls_head, self.distill_head
        self.deploy = True


def pool(x: Tensor) -> Tensor:
    """Pool and activate a map (B, C, H, W), or activate pooled features (B, C), to (B, C)."""
    return F.gelu(x.mean((2, 3)) if x.dim() == 4 else x)
