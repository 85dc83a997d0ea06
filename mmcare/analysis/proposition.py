"""Proposition 3, Omega(D) < Omega(0), at the widths of the published networks."""

from collections.abc import Sequence
from dataclasses import dataclass

from mmcare.analysis.equations import Number, delta_limit, proposition_holds
from mmcare.models import CARE
from mmcare.models.backbones.care import NUM_STRIP_STAGES


@dataclass(frozen=True)
class StageOfNetwork:
    """A width of the published networks in the complexity model.

    Attributes:
        name: Archs and stage, such as ``'s0 s1 stage 3'``.
        d: Channels of the features.
        delta: D = d2 - d1 of the network, d / 3.
        kernels: Kernel sizes of the model's local learner.
        heads: The model's number of attention heads, n.
        attends: Whether the network has linear attention in this stage.
    """

    name: str
    d: int
    delta: int
    kernels: tuple[int, ...]
    heads: int
    attends: bool

    @property
    def limit(self) -> Number:
        """The D below which the proposition holds."""
        return delta_limit(self.d, self.kernels, self.heads)

    @property
    def holds_for_all(self) -> bool:
        """Whether it holds for all 0 < D < d."""
        return self.limit >= self.d

    @property
    def holds_here(self) -> bool:
        """Whether it holds at the network's own D."""
        return proposition_holds(self.d, self.delta, self.kernels, self.heads)


def network_stages(
    kernel_choices: Sequence[tuple[int, ...]] = ((3, 7), (7,)),
) -> list[StageOfNetwork]:
    """Every width of the published networks, with a single head and with the arch's heads.

    Stages 1 and 2 have heads (of one channel) only with ``early_conv=False``; as released they
    aggregate with strip convolutions, and the model says nothing about them.

    Args:
        kernel_choices: Kernel sizes to go through.
    """
    archs: dict[tuple[int, int, int], list[str]] = {}
    for arch, values in CARE.arch_zoo.items():
        for index, (d, head_channels) in enumerate(
            zip(values['widths'], values['head_channels'], strict=True)
        ):
            archs.setdefault((index, d, d // 3 // head_channels), []).append(arch)
    return [
        StageOfNetwork(
            f'{" ".join(names)} stage {index + 1}',
            d,
            d // 3,
            kernels,
            n,
            attends=index >= NUM_STRIP_STAGES,
        )
        for (index, d, heads), names in sorted(archs.items())
        for kernels in kernel_choices
        for n in (1, heads)
    ]
