"""The interface of a layout: how it places a pack on the ranks of a ring, and the plan by which a rank attends.

Shape letters: t tokens of this rank, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rlexp.training.ring.kernels.base import Ask, BlockKernel
from rlexp.training.ring.placement import Placement, Window
from rlexp.training.ring.widths import Costs, Deal
from rlexp.training.types import Segment
from rlexp.training.world.groups import Ring

HOST = torch.device("cpu")


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
    costs: Costs | None = None  # by which each tree is given a width; None: all are cut over the whole ring

    def multiple(self, ring_size: int) -> int:
        """Return the number of which the pack's length must be a multiple."""
        return ring_size

    def spare(self, ring_size: int) -> int:  # noqa: ARG002
        """Return how much padding a pack needs beside that, so that a rank without a token of it has a row."""
        return 0

    def unit(self, ring_size: int) -> int:  # noqa: ARG002
        """Return the number of which each segment's length must be a multiple."""
        return 1

    @abstractmethod
    def place(self, segments: Sequence[Segment], ring_size: int) -> Placement: ...

    @abstractmethod
    def work(self, segments: Sequence[Segment], ring_size: int, window: Window = None) -> tuple[float, ...]:
        """Return by rank the pairs of a query and a key that it sees, summed over heads: half of them count half."""

    def with_room(self, tokens: int) -> Layout:  # noqa: ARG002
        """Return the layout of packs of which a rank may hold so many tokens."""
        return self

    def deal(self, segments: Sequence[Segment], ring_size: int) -> Deal | None:  # noqa: ARG002
        """Return which ranks hold each segment, where it is chosen by `costs`."""
        return None

    def estimate(self, segments: Sequence[Segment], ring_size: int) -> tuple[float, float] | None:
        """Return what the slowest rank computes and waits for, and the mean rank, where the layout estimates it."""
        dealt = self.deal(segments, ring_size)
        return None if dealt is None else (dealt.slowest, dealt.mean)

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
        self._device, self.plans = HOST, dict[Window, AttentionPlan]()

    def plan(self, window: Window) -> AttentionPlan:
        """Return the plan of all layers with this window. It is made once."""
        if window not in self.plans:
            plan = self.layout.plan(self.segments, self.ring, self.kernel, window)
            self.plans[window] = plan if self._device == HOST else plan.to(self._device)
        return self.plans[window]

    def to(self, device: torch.device) -> RingBatch:
        moved = RingBatch(self.layout, self.segments, self.ring, self.kernel, self.max_length)
        moved._device, moved.plans = device, {window: plan.to(device) for window, plan in self.plans.items()}
        return moved

    def attend(self, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, ask: Ask) -> Tensor:
        return self.plan(ask.window).attend(q_tHD, k_tGD, v_tGD, ask)
