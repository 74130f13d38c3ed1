"""Deal the samples to draw: give each rank equally many samples of similar prompt length. And the interface of engines
that draw them.

The samples of one prompt stay on one rank where that is possible. The deal does not change the samples themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rlexp.training.types import Example, Sample


@dataclass(frozen=True)
class Request:
    """A sample to draw. `place` is (the prompt's place in the rollout) × n_samples + `number`."""

    place: int
    example: Example
    number: int


def deal(prompts: Sequence[Example], n_samples: int, ranks: int) -> list[list[Request]]:
    """Return the requests of each rank, longest prompts first."""
    unit = _together(len(prompts), n_samples, ranks)
    longest_first = sorted(range(len(prompts)), key=lambda place: (-len(prompts[place].prompt), place))
    hands: list[list[Request]] = [[] for _ in range(ranks)]
    turn = 0
    for place in longest_first:
        for first in range(0, n_samples, unit):
            lap, seat = divmod(turn, ranks)
            hand = hands[seat if lap % 2 == 0 else ranks - 1 - seat]  # forth and back, to even out the lengths
            numbers = range(first, min(first + unit, n_samples))
            hand += [Request(place * n_samples + number, prompts[place], number) for number in numbers]
            turn += 1
    return hands


def _together(prompts: int, n_samples: int, ranks: int) -> int:
    """Return how many samples of a prompt stay together: the most that still gives every rank the same number."""
    for unit in range(n_samples, 0, -1):
        if n_samples % unit == 0 and prompts * (n_samples // unit) % ranks == 0:
            return unit
    return 1


def micro_batches(requests: Sequence[Request], size: int, tokens: int | None, longest: int) -> list[list[Request]]:
    """Cut one rank's requests into parts of at most `size` rows, and at most `tokens` tokens with padding.

    For the second limit every answer counts as `longest` tokens. A part has at least one row.
    """
    parts: list[list[Request]] = []
    for request in requests:
        rows = len(parts[-1]) + 1 if parts else size + 1
        width = max(len(each.example.prompt) for each in (*parts[-1], request)) + longest if parts else 0
        if rows > size or (tokens is not None and rows * width > tokens):
            parts.append([])
        parts[-1].append(request)
    return parts


# Yields the policy's whole parameters one after the other, with their names; may be a collective call.
Weights = Callable[[], Iterator[tuple[str, Tensor]]]


class Draws(Protocol):
    def renew(self, weights: Weights) -> None:
        """Take the policy's weights before a rollout, if the engine keeps a copy. All ranks call `weights`, or none."""

    def draw(self, micro_batches: Sequence[Sequence[Request]], rollout: int) -> Iterator[list[Sample]]:
        """Yield the samples of all requests, those together that end together. Every rank must exhaust it."""
