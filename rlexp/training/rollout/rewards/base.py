"""Interface of a reward that runs on the rank that drew the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlexp.training.types import Sample

NAMED = 4  # samples that an error names


class Reward(Protocol):
    """One term of a sample's score. Each sample is judged on its own, so the rank that drew it does not matter.

    `submit` or `collect` raises RewardError for a sample that cannot be judged.
    """

    @property
    def name(self) -> str: ...

    def submit(self, samples: Sequence[Sample]) -> None:
        """Begin to judge new samples. If that takes long, return while it goes on."""

    def collect(self) -> dict[int, float]:
        """Wait until all samples that were submitted are judged, and return their terms by the samples' places."""

    def close(self) -> None: ...


def named(samples: Sequence[Sample]) -> str:
    """Return the names of samples for an error: `rows.jsonl:3 (sample 0), …`."""
    names = [f"{sample.example.origin} (sample {sample.number})" for sample in samples]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
