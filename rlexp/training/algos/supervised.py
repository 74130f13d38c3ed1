"""Supervised training, and reward models. Shape letters: E examples, P pairs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from rlexp.config.schema.losses import RewardModelConfig, SFTConfig
from rlexp.training.algos.base import Losses, Values
from rlexp.training.algos.log_ratios import logistic, reward_metrics
from rlexp.training.types import Wanted


@dataclass(frozen=True)
class SFT:
    """−log π of each trained token, in the mean over those of the whole train batch."""

    cfg: SFTConfig
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


@dataclass(frozen=True)
class RewardLoss:
    """−log σ(chosen − rejected − margin) + center · (chosen + rejected)², of scores: the loss of Bradley and Terry.

    InstructGPT has it (Ouyang et al. 2022, arXiv 2203.02155), with margins Llama 2 (Touvron et al. 2023, arXiv
    2307.09288, equation 2). Centring is by Eisenstein et al. 2023 (arXiv 2312.09244).
    """

    cfg: RewardModelConfig

    @cached_property
    def wanted(self) -> Wanted:
        return Wanted(scores=True, margins=self.cfg.margin_weight > 0)

    def __call__(self, values: Values) -> Losses:
        assert values.scores is not None
        chosen_P, rejected_P = values.scores["chosen"], values.scores["rejected"]
        asked_P = 0.0 if values.margin_E is None else self.cfg.margin_weight * values.margin_E
        losses_P = logistic(chosen_P - rejected_P - asked_P) + self.cfg.center * (chosen_P + rejected_P) ** 2
        chosen_P, rejected_P = chosen_P.detach(), rejected_P.detach()
        return Losses(losses_P, reward_metrics(chosen_P, rejected_P, chosen_P.abs() + rejected_P.abs()))
