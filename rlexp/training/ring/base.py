"""The interface of a layout: how it deals a pack to the ranks of a ring, and the plan by which a rank attends.

Shape letters: t tokens of this rank, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from rlexp.training.ring.groups import Ring
from rlexp.training.ring.kernels.base import BlockKernel
from rlexp.training.types import Segment


class Part(Enum):
    """A part of a rank's share of a segment: its first chunk, its last chunk, or all of it."""

    ALL = "all"
    EARLY = "early"
    LATE = "late"


ALL, EARLY, LATE = Part.ALL, Part.EARLY, Part.LATE


@dataclass(frozen=True)
class Deal:
    """Shares of a pack: each field has one entry per rank."""

    places: tuple[Tensor, ...]  # the places in the pack that the rank holds, in the order in which it holds them
    real: tuple[int, ...]  # tokens without padding
    work: tuple[float, ...]  # query-key pairs summed over heads: a rank that computes half of the heads counts half


class AttentionPlan(Protocol):
    """The attention of one pack on one rank of a ring, worked out once for all layers of the model."""

    def attend(self, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, scale: float) -> Tensor:
        """Attend causally within each segment, over the whole ring.

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
    def deal(self, segments: Sequence[Segment], ring_size: int) -> Deal: ...

    @abstractmethod
    def plan(self, segments: Sequence[Segment], ring: Ring, kernel: BlockKernel) -> AttentionPlan: ...


class RingBatch:
    """All that attention needs of the batch. It travels as a keyword argument of the model's forward call.

    Not a dataclass: in those FSDP looks for tensors, at every layer's call, and would go through all numbers of a plan.
    """

    def __init__(self, plan: AttentionPlan, max_length: int) -> None:
        self.plan = plan
        self.max_length = max_length  # of any sequence of the run; a model with a shorter window is refused

    def to(self, device: torch.device) -> RingBatch:
        return RingBatch(self.plan.to(device), self.max_length)
