"""The layouts on which the same run is drawn: rings, replicas, micro-batches, packing."""

from __future__ import annotations

from dataclasses import dataclass

BATCH = 8


@dataclass(frozen=True)
class Case:
    ring_size: int
    dp_size: int
    micro_batch_size: int
    packing: bool

    @property
    def label(self) -> str:
        packed = "packed" if self.packing else "padded"
        return f"ring {self.ring_size} × {self.dp_size}, micro-batch {self.micro_batch_size}, {packed}"

    def overrides(self) -> list[str]:
        return [
            f"parallel=ring{self.ring_size}",
            f"launch.nproc={self.ring_size * self.dp_size}",
            f"train.batch_size={BATCH}",
            f"train.micro_batch_size={self.micro_batch_size}",
            f"data.packing={str(self.packing).lower()}",
        ]


GRIDS = ((1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (1, 4))  # ring size, replicas


def cases() -> list[Case]:
    """Every grid with every micro-batch that divides it, packed and padded; the baseline first."""
    return [
        Case(ring_size, dp_size, micro, packing)
        for packing in (True, False)
        for ring_size, dp_size in GRIDS
        for micro in (1, 2, 4, 8)
        if BATCH % (micro * dp_size) == 0
    ]
