"""Whether what a rank keeps for the backward pass really falls with the ring, module by module."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlexp.config.checks.layout import choose, copied, heads_in
from rlexp.config.schema import Config
from rlexp.preflight.rehearsal.log import ACTIVATIONS, Log, kinds_of

NEARLY = 1.1  # times its share: padding keeps a little more
SMALL = 0.01  # of all that is kept: less is not named
UNEVEN = 0.1  # by which a rank may hold more or less than an even part of the tokens, and it goes unsaid


@dataclass(frozen=True)
class KeptBytes:
    """Bytes by module, of which layers count together."""

    forward: Counter[str]  # from the forward to the backward pass
    again: Counter[str]  # from the recomputation of a layer to its backward pass, all layers added up
    attending: frozenset[str]  # modules that called an attention kernel

    @property
    def total(self) -> int:
        return self.forward.total()


@dataclass(frozen=True)
class Sharding:
    """Bytes that a rank keeps for the backward pass, on the ring and on a ring of one."""

    ring_size: int
    kept: int
    alone: int
    whole: Mapping[str, float]  # modules that keep more than their share, with their multiple of it
    meant: Mapping[str, float] = field(default_factory=dict)  # the same, for attention whose layout keeps more
    tokens: float | None = None  # the rank's part of the tokens, where it is not an even one

    @property
    def share(self) -> float:
        """What is kept, over what a ring of one keeps: 1 / ring_size if all of it is sharded."""
        return self.kept / self.alone if self.alone else 0.0

    def plain(self) -> dict[str, object]:
        return {"kept_bytes": self.kept, "alone_bytes": self.alone, "share": self.share, "whole": dict(self.whole),
                "meant": dict(self.meant)}  # fmt: skip


def compare(
    ring: KeptBytes, alone: KeptBytes, ring_size: int, *, share: float | None = None, attention: float = 1
) -> Sharding:
    """Compare a rank with a ring of one on the same sequences.

    `share` is the rank's part of their tokens. The layout's attention keeps up to `attention` times its share.
    """
    share = 1 / ring_size if share is None else share
    forward, again = (_over(ring.forward, alone.forward, share), _over(ring.again, alone.again, share))
    over = {name: max(forward.get(name, 0.0), again.get(name, 0.0)) for name in forward | again}
    meant = {name: times for name, times in over.items() if name in ring.attending and times <= NEARLY * attention}
    whole = {name: times for name, times in over.items() if name not in meant}
    uneven = share if abs(share * ring_size - 1) > UNEVEN else None
    return Sharding(ring_size, ring.total, alone.total, whole, meant, uneven)


def _over(here: Counter[str], alone: Counter[str], share: float) -> dict[str, float]:
    """Return the modules that keep more than their share, with their multiple of it."""
    multiples = {}
    for name, size in here.items():
        due = share * alone[name]
        if size > NEARLY * due and size - due > SMALL * here.total():
            multiples[name] = size / due if due else 1 / share
    return multiples


def kept(log: Log) -> KeptBytes:
    """Add up what is kept in the first micro-batch, by the module that made it."""
    again: Counter[str] = Counter()
    for first, last in log.recomputed:
        again += _made_and_held(log, first, last)
    attending = frozenset(map(together, log.attending))
    return KeptBytes(_with_parts(_kept_forward(log), attending), _with_parts(again, attending), attending)


def _with_parts(sizes: Counter[str], attending: frozenset[str]) -> Counter[str]:
    """Count attention's projections with it: alone it keeps what they made, and on a ring a copy."""
    sums: Counter[str] = Counter()
    for name, size in sizes.items():
        sums[next((each for each in attending if each and name.startswith(f"{each}.")), name)] += size
    return sums


def _kept_forward(log: Log) -> Counter[str]:
    first = next(place for place, section in enumerate(log.sections) if section.phase == "forward")
    last = next(place for place in range(first, len(log.sections)) if log.sections[place].phase != "forward")
    kinds = kinds_of(log)
    sizes: Counter[str] = Counter()
    for place in range(log.sections[first].first, log.sections[last].first):
        if kinds[place] == ACTIVATIONS:
            sizes[together(log.modules.get(log.numbers[place], "the loss"))] += log.sizes[place]
    return sizes


def _made_and_held(log: Log, first: int, last: int) -> Counter[str]:
    """Add up the storages that are made between two events and are there at the second."""
    sizes: Counter[str] = Counter()
    made: set[int] = set()  # weights are labelled, and no part of it
    for number, size in zip(log.numbers[first:last], log.sizes[first:last], strict=True):
        if size > 0 and number in log.modules and (number not in log.kinds or number in log.received):
            made.add(number)
        if number in made:
            sizes[together(log.modules[number])] += size
    return sizes


def together(module: str) -> str:
    """Name a module of any layer: model.layers.3.mlp as model.layers.*.mlp."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", module)


def of_attention(cfg: Config, model: Any) -> float:
    """Return how many times its share the attention of a layout keeps: queries, keys, values and outputs.

    Ulysses keeps outputs by heads and by tokens, and as many copies of keys and values as it sends.
    """
    heads = heads_in(model.to_dict())
    inner = choose(cfg, heads).ulysses_size
    if heads is None or inner == 1:
        return 1.0
    return (3 * heads.queries + 2 * copied(heads, inner)) / (2 * heads.queries + 2 * heads.keys)


def in_words(sharding: Sharding) -> list[str]:
    """Say how much of its memory a rank saves by the ring, and what does not fall with it."""
    size = sharding.ring_size
    even = f"1/{size} is {1 / size:.3f}" if sharding.tokens is None else f"it holds {sharding.tokens:.3f} of the tokens"
    lines = [f"sharding: for the backward pass a rank keeps {sharding.share:.3f} of what a ring of one keeps ({even})."]
    for name, times in sharding.meant.items():
        lines.append(
            f"  {name} keeps {times:.1f} times its share, as Ulysses does: outputs by heads and by tokens, and a "
            f"key/value head on every rank whose queries need it."
        )
    for name, times in sharding.whole.items():
        lines.append(
            f"  {name} keeps {times:.1f} times its share: it holds the whole sequence, or part of it, on every rank."
        )
    return lines
