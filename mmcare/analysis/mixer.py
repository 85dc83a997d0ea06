"""Omega against what the network's token mixer costs, term by term (stages 3 and 4).

With d2 = 2 d1 and kernels k1 and k2, on h x w positions and with n heads::

    omega - h w (k1^2 + k2^2) d1 - 2 h w d1^2 = multiply-adds of the network's mixer
                                                without the normaliser, h w d1

since omega has a second local pass, and projections of the values and of the output, that the
network does not have. Stages 1 and 2 aggregate with strip convolutions, which omega does not model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mmcare.analysis.counting import check_shape, macs_by_module
from mmcare.analysis.equations import omega_decoupled
from mmcare.models import CARE
from mmcare.models.backbones.care import (
    NUM_STAGES,
    NUM_STRIP_STAGES,
    STEM_STRIDE,
    TOTAL_STRIDE,
    check_arch,
)

KERNELS = (3, 7)  # of the network's local learner
ATTENTION_STAGES = tuple(range(NUM_STRIP_STAGES + 1, NUM_STAGES + 1))  # counted from 1


@dataclass(frozen=True)
class Term:
    """A term of omega or of the network.

    Attributes:
        name: What is computed.
        formula: Its multiply-adds.
        omega: How much of it omega has.
        network: How much of it the network's mixer has, by the same formula.
    """

    name: str
    formula: str
    omega: int
    network: int


@dataclass(frozen=True)
class MixerTerms:
    """Omega and the network's mixer side by side.

    Attributes:
        stage: Stage, counted from 1.
        height, width: Size of the stage's map, padding to a multiple of 32 included.
        global_channels: d1; the local channels are d2 = 2 d1.
        heads: Number of attention heads, n.
        terms: All terms; each one's share in omega or in the network can be 0.
    """

    stage: int
    height: int
    width: int
    global_channels: int
    heads: int
    terms: tuple[Term, ...]

    @property
    def omega(self) -> int:
        """Sum of omega's terms, Eq. 23 with two kernels."""
        return sum(term.omega for term in self.terms)

    @property
    def network(self) -> int:
        """Sum of the network's terms, the normaliser included."""
        return sum(term.network for term in self.terms)

    @property
    def normalizer(self) -> int:
        """The normaliser's multiply-adds, which omega leaves out: h w d1."""
        return self.height * self.width * self.global_channels

    @property
    def network_by_omega(self) -> int:
        """The right side of the identity: Eq. 23 less what the network does not have."""
        d1, positions = self.global_channels, self.height * self.width
        model = omega_decoupled(self.height, self.width, d1, 2 * d1, KERNELS, self.heads)
        return model - positions * sum(k**2 for k in KERNELS) * d1 - 2 * positions * d1**2


def mixer_terms(
    arch: str | Mapping[str, Sequence], stage: int, shape: tuple[int, int] = (224, 224)
) -> MixerTerms:
    """Compare omega at the network's own dimensions with the network's token mixer.

    Args:
        arch: As for :class:`mmcare.models.CARE`.
        stage: 3 or 4.
        shape: Height and width of the image.

    Returns:
        The terms, of a single block's mixer.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the arch is unknown, the stage has no attention, or the image is too small.
    """
    arch = check_arch(arch, CARE.arch_zoo)
    height, width = _map_size(stage, shape)
    d1 = arch['widths'][stage - 1] // 3
    heads = d1 // arch['head_channels'][stage - 1]
    positions = height * width
    local_pass = positions * sum(k**2 for k in KERNELS) * d1
    product = positions * d1**2 // heads
    terms = (
        Term('local, one pass', 'hw (k1² + k2²) d1', local_pass, local_pass),
        Term('local, another pass', 'hw (k1² + k2²) d1', local_pass, 0),
        Term('projections of q and k', '2 hw d1²', 2 * positions * d1**2, 2 * positions * d1**2),
        Term('projections of v and output', '2 hw d1²', 2 * positions * d1**2, 0),
        Term('keys with values', 'hw d1² / n', product, product),
        Term('queries with the result', 'hw d1² / n', product, product),
        Term('normaliser', 'hw d1', 0, positions * d1),
    )
    return MixerTerms(stage, height, width, d1, heads, terms)


def count_mixer(
    arch: str | Mapping[str, Sequence],
    stage: int,
    shape: tuple[int, int] = (224, 224),
    feature_map: str = 'elu',
) -> dict[str, int]:
    """Count the multiply-adds of a real block's mixer with mmengine.analysis.

    Args:
        arch: As for :class:`mmcare.models.CARE`.
        stage: 3 or 4.
        shape: Height and width of the image.
        feature_map: ``'elu'`` has the normaliser, ``'identity'`` has not.

    Returns:
        ``local``, ``projections``, ``products`` (the normaliser among them) and their sum, ``all``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the arch is unknown, the stage has no attention, or the image is too small.
    """
    height, width = _map_size(stage, shape)
    backbone = CARE(arch, out_indices=(stage - 1,), feature_map=feature_map)
    features = torch.zeros(1, backbone.arch['widths'][stage - 1], height, width)
    macs = macs_by_module(backbone.get_submodule(f'stages.{stage - 1}.blocks.0.mixer'), features)
    projections = macs['global_learner.query_key']
    return dict(
        local=macs['local_learner'],
        projections=projections,
        products=macs['global_learner'] - projections,
        all=macs[''],
    )


def _map_size(stage: int, shape: tuple[int, int]) -> tuple[int, int]:
    """Height and width of a stage's map, padding included."""
    if stage not in ATTENTION_STAGES:
        raise ValueError(
            f'stage must be one of {ATTENTION_STAGES}, counted from 1, got {stage!r}: the stages '
            'before aggregate with strip convolutions, which omega does not model'
        )
    stride = STEM_STRIDE * 2 ** (stage - 1)
    height, width = (
        math.ceil(side / TOTAL_STRIDE) * TOTAL_STRIDE // stride for side in check_shape(shape)
    )
    return height, width
