"""What judges answers on the rank that drew them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlexp.types import Sample

NAMED = 4  # samples named in an error


class Reward(Protocol):
    """One term of a sample's score. Each sample is judged on its own, so that it does not matter who drew it with
    which others. What cannot be judged is a RewardError, of `submit` or of `collect`."""

    def submit(self, samples: Sequence[Sample]) -> None:
        """Begin to judge samples that have just been drawn. Returns while the judging goes on, if it takes long."""

    def collect(self) -> None:
        """Wait for all that was submitted; each sample then has its term in `terms`."""

    def close(self) -> None: ...


def named(samples: Sequence[Sample]) -> str:
    """The samples of an error: `rows.jsonl:3 (sample 0), …`."""
    names = [f"{sample.prompt.origin} (sample {sample.number})" for sample in samples]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
