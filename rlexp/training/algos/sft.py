"""Supervised training: the negative log-likelihood of the answers, per token of the train batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlexp.training.algos.base import Losses, Values
from rlexp.training.types import Wanted


@dataclass(frozen=True)
class SFT:
    """−log π of each trained token, in the mean over those of the whole train batch."""

    wanted: ClassVar[Wanted] = Wanted(mean_tokens=True, entropies=True, hits=True)

    def __call__(self, values: Values) -> Losses:
        tokens_E = values.tokens["answer"]
        some_E = tokens_E.clamp(min=1)
        metrics_E = {
            "mean_token_accuracy": values.of_tokens["hits"]["answer"] / some_E,
            "entropy": values.of_tokens["entropies"]["answer"] / some_E,
        }
        weights_E = dict.fromkeys(metrics_E, tokens_E) | {"loss": tokens_E / values.mean_tokens}
        return Losses(-values.logps["answer"] / values.mean_tokens, metrics_E, weights_E)
