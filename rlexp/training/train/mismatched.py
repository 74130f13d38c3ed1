"""Answers to other prompts, by which a loss estimates how far the policy has moved. The order of the train batch pairs
them, so no layout changes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rlexp.training.dataset.tokens import fitted
from rlexp.training.types import Example


@dataclass(frozen=True)
class Mismatched:
    """Each prompt of a batch, with the answer of its partner."""

    examples: Sequence[Example]
    max_length: int
    begin: int | None  # the token that begins a text

    @cached_property
    def partners(self) -> list[int]:
        return partners_of([example.prompt.tobytes() for example in self.examples])

    def at(self, place: int) -> Example:
        own, other = self.examples[place], self.examples[self.partners[place]]
        answer, mask = other.masked[0]
        prompt, answers, masks = fitted(own.prompt, (answer,), (mask,), self.max_length, self.begin)
        origin = f"{own.origin} with the answer of {other.origin}"
        return replace(own, prompt=prompt, answers=answers, masks=masks, origin=origin)


def partners_of(prompts: Sequence[Hashable]) -> list[int]:
    """Return, for each place of a batch, the place of the answer that its prompt is given.

    It is the place before, round the batch. Where k places in a row have one prompt, it is k places before: so two
    answers to a prompt, a good and a bad one, are given those of the prompt before, each its own. If that has the same
    prompt again, the nearest place before it with another one; if all have one prompt, just the place before.
    """
    count = len(prompts)
    if len(set(prompts)) <= 1:
        return [(place - 1) % count for place in range(count)]
    turn = next(place for place in range(count) if prompts[place] != prompts[place - 1])  # a row of equal ones begins
    begins = [0] * count  # for each place, where its row of equal ones begins
    sizes = Counter[int]()
    for place in range(turn, turn + count):
        here, before = place % count, (place - 1) % count
        begins[here] = begins[before] if prompts[here] == prompts[before] else here
        sizes[begins[here]] += 1
    partners = []
    for place, begin in enumerate(begins):
        other = (place - sizes[begin]) % count
        same = prompts[other] == prompts[place]
        partners.append((begins[other] - 1) % count if same else other)
    return partners
