"""BCO's shift of the rewards: the mean reward of all answers trained on so far, which outlives the step.

It is two numbers, whose names begin with that of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rlexp.training.algos.base import Values


def shift_of(carried: Mapping[str, float], loss: str) -> float:
    return carried.get(f"{loss}/rewards", 0.0)


def moved_shift(values: Values, loss: str, rewards_B: Tensor) -> Mapping[str, float]:
    """Return the mean with the rewards of a train batch, and how many answers it is of; held-out ones do not move it.

    Before the first answer there is none.
    """
    names = rewards, answers = f"{loss}/rewards", f"{loss}/answers"
    before = {name: values.carried[name] for name in names if name in values.carried}
    if values.held_out or not len(rewards_B):
        return before
    count, mean = before.get(answers, 0.0) + len(rewards_B), before.get(rewards, 0.0)
    return {rewards: mean + (float(rewards_B.sum()) - len(rewards_B) * mean) / count, answers: count}
