"""Generated sums with their results: prompts for a reward that can be checked."""

from __future__ import annotations

import random

from rlexp.types import PromptRow


def generate(size: int, seed: int, split: str, digits: int) -> list[PromptRow]:
    """Return `size` prompts like "12 + 7 =" with numbers of at most `digits` digits, fixed by (seed, split)."""
    random_ = random.Random(f"{split}-{seed}")
    return [_sum(random_, 10**digits, f"arithmetic {split} prompt {number}") for number in range(size)]


def _sum(random_: random.Random, below: int, origin: str) -> PromptRow:
    one, other = random_.randrange(below), random_.randrange(below)
    return PromptRow(f"{one} + {other} =", str(one + other), origin)
