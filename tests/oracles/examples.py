"""Examples as token ids, as the second readers write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlexp.config.schema.row_kinds import SIDES as SIDES_OF
from rlexp.config.schema.row_kinds import Kind

Array = npt.NDArray[Any]
SIDES = SIDES_OF[Kind.pairs]
ANSWER = "answer"  # the side of an answer that stands alone


@dataclass(frozen=True)
class TokenExample:
    """A prompt with an answer for each side. A mask says of each token of an answer whether it is trained on."""

    prompt: Array
    answers: Mapping[str, Array]
    masks: Mapping[str, Array]
    origin: str
    margin: float | None = None  # by how much the chosen answer is better, where the row says so
    label: bool | None = None  # whether the answer is good, where the row says so
    text: str = ""  # the prompt as a reward is given it
    right: str | None = None  # the row's own answer, for rewards that compare with it

    def sequence(self, side: str) -> Array:
        return np.concatenate((self.prompt, self.answers[side]))

    @property
    def tokens(self) -> int:
        return sum(len(self.prompt) + len(answer) for answer in self.answers.values())
