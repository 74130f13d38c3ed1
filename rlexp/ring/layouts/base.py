"""What a layout answers. All but `attend` are pure functions of (rank, size), tested without a process group."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from rlexp.ring.attention import RingBatch


class Part(Enum):
    """A part of a rank's share of a segment: its first chunk, its second, or both."""

    ALL = "all"
    EARLY = "early"
    LATE = "late"


ALL, EARLY, LATE = Part.ALL, Part.EARLY, Part.LATE


@dataclass(frozen=True)
class Block:
    """One call of a kernel: which of our queries meet which of the source's keys, and whether causally."""

    queries: Part
    keys: Part
    causal: bool


class Layout(Protocol):
    name: str

    def multiple(self, ring_size: int) -> int:
        """Segments are padded to a multiple of this."""

    def chunks(self, padded: int, rank: int, ring_size: int) -> tuple[range, ...]:
        """The positions of a segment that `rank` holds, in ascending order; one or two chunks of equal size."""

    def attend(self, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, batch: RingBatch, scale: float) -> Tensor:
        """The attention itself, differentiable: by rotation (`rlexp/ring/rotation.py`), or by other means."""


class RotatingLayout(Layout, Protocol):
    def block(self, rank: int, source: int, ring_size: int) -> Block | None:
        """How our queries attend to the keys of `source`; None if they are all later than ours."""
