"""A run's surroundings, for programs that give it its examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlexp.config.schema import Config
from rlexp.training.train.examples import Examples, longest_examples
from rlexp.training.train.surroundings import Unprobed


class GivenExamples(Unprobed):
    """Examples of which the tokens are known: there is no tokenizer."""

    def __init__(self, examples: Callable[[Config], Sequence[Any]]) -> None:
        self.given = examples

    def examples(self, cfg: Config, *_: Any, **__: Any) -> Examples:
        return Examples(self.given(cfg))

    def tokenizer(self, *_: Any) -> None:
        return None


LONGEST = GivenExamples(lambda cfg: longest_examples(cfg).train)
