"""Whether what a rank keeps for the backward pass really falls with the ring, module by module."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rlexp.rehearse.log import ACTIVATIONS, Log, kinds_of

WHOLE = 1.5  # times its share: padding and uneven chunks keep a little more
SMALL = 0.01  # of all that is kept: less is not named


@dataclass(frozen=True)
class Sharding:
    """Bytes that a rank keeps for the backward pass, on the ring and on a ring of one."""

    ring_size: int
    kept: int
    alone: int
    whole: Mapping[str, float]  # modules that keep more than their share, with their multiple of it

    @property
    def share(self) -> float:
        """What is kept, over what a ring of one keeps: 1 / ring_size if all of it is sharded."""
        return self.kept / self.alone if self.alone else 0.0

    def plain(self) -> dict[str, object]:
        return {"kept_bytes": self.kept, "alone_bytes": self.alone, "share": self.share, "whole": dict(self.whole)}


def compare(ring: Log, alone: Log, ring_size: int) -> Sharding:
    """Compare the rehearsal of a rank with that of a ring of one on the same sequences."""
    assert ring.layers == alone.layers, "logs of other numbers of layers"
    here, there = kept_by_module(ring), kept_by_module(alone)
    total = sum(here.values())
    multiples = {name: here[name] * ring_size / there[name] if there[name] else float(ring_size) for name in here}
    whole = {name: times for name, times in multiples.items() if times > WHOLE and here[name] > SMALL * total}
    return Sharding(ring_size, total, sum(there.values()), whole)


def kept_by_module(log: Log) -> Counter[str]:
    """Add up what is kept at the end of the first forward pass by the module that made it; layers count together."""
    first = next(place for place, section in enumerate(log.sections) if section.phase == "forward")
    last = next(place for place in range(first, len(log.sections)) if log.sections[place].phase != "forward")
    kinds = kinds_of(log)
    kept: Counter[str] = Counter()
    for place in range(log.sections[first].first, log.sections[last].first):
        if kinds[place] == ACTIVATIONS:
            kept[re.sub(r"\.\d+\.", ".*.", log.modules.get(log.numbers[place], "the loss"))] += log.sizes[place]
    return kept
