"""The interface of a layout: how it deals a pack to the ranks of a ring, and the plan by which a rank attends.

Shape letters: t tokens of this rank, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlexp.training.ring.kernels.base import Ask, BlockKernel
from rlexp.training.types import Segment
from rlexp.training.world.groups import Ring

Window = int | None  # positions that a query sees, its own included; None: all up to its own


@dataclass(frozen=True)
class Deal:
    """Shares of a pack: each field has one entry per rank."""

    places: tuple[Tensor, ...]  # the places in the pack that the rank holds, in the order in which it holds them
    real: tuple[int, ...]  # tokens without padding
    work: tuple[float, ...]  # query-key pairs summed over heads: a rank that computes half of the heads counts half


class AttentionPlan(Protocol):
    """The attention of one pack on one rank of a ring, planned once for all layers of the model that have a window."""

    def attend(self, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, ask: Ask) -> Tensor:
        """Attend causally within each segment and to its ancestors, over the whole ring.

        The result is (t, H, D) in the dtype of the queries, and differentiable.
        """

    def to(self, device: torch.device) -> AttentionPlan: ...


class Layout(ABC):
    """All of a layout is a pure function of the pack and the ring, so it is tested without processes."""

    name: str

    def multiple(self, ring_size: int) -> int:
        """Return the number of which the pack's length must be a multiple."""
        return ring_size

    def unit(self, ring_size: int) -> int:  # noqa: ARG002
        """Return the number of which each segment's length must be a multiple."""
        return 1

    @abstractmethod
    def deal(self, segments: Sequence[Segment], ring_size: int, window: Window = None) -> Deal: ...

    @abstractmethod
    def plan(
        self, segments: Sequence[Segment], ring: Ring, kernel: BlockKernel, window: Window = None
    ) -> AttentionPlan: ...


class RingBatch:
    """All that attention needs of the batch. It travels as a keyword argument of the model's forward call.

    Not a dataclass: in those FSDP looks for tensors, at every layer's call, and would go through all numbers of a plan.
    """

    def __init__(
        self, layout: Layout, segments: Sequence[Segment], ring: Ring, kernel: BlockKernel, max_length: int
    ) -> None:
        self.max_length = max_length  # of any sequence of the run: a longer window is none
        self.layout, self.segments, self.ring, self.kernel = layout, segments, ring, kernel
        self._device, self.plans = torch.device("cpu"), dict[Window, AttentionPlan]()

    def plan(self, window: Window) -> AttentionPlan:
        """Return the plan of all layers with this window. It is made once."""
        if window not in self.plans:
            plan = self.layout.plan(self.segments, self.ring, self.kernel, window)
            self.plans[window] = plan.to(self._device)
        return self.plans[window]

    def to(self, device: torch.device) -> RingBatch:
        there = RingBatch(self.layout, self.segments, self.ring, self.kernel, self.max_length)
        there._device, there.plans = device, {window: plan.to(device) for window, plan in self.plans.items()}
        return there

    def attend(self, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, ask: Ask) -> Tensor:
        return self.plan(ask.window).attend(q_tHD, k_tGD, v_tGD, ask)
