"""Generated sums with their results: prompts for a reward that can be checked."""

from __future__ import annotations

import random

from rlexp.training.types import Row


def generate(size: int, seed: int, split: str, digits: int) -> list[Row]:
    """Return `size` prompts like "12 + 7 =" with numbers of at most `digits` digits, fixed by (seed, split)."""
    random_ = random.Random(f"{split}-{seed}")
    return [_sum(random_, 10**digits, f"arithmetic {split} prompt {number}") for number in range(size)]


def _sum(random_: random.Random, below: int, origin: str) -> Row:
    one, other = random_.randrange(below), random_.randrange(below)
    return Row(f"{one} + {other} =", (), origin, expected=str(one + other))
