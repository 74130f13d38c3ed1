"""Defects of drawing: which tokens may be drawn, by which random number, and what the scoring pass keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tests.helpers.faults.base import ROLLOUT, TRAIN
from tests.helpers.faults.gathered import half_derived
from tests.helpers.faults.plant import Change
from tests.helpers.faults.samples import GRPO, kept, one_off, sample


def with_keys(change: Callable[[Any], Any]) -> Change:
    """Cut by other keys than those that are given."""
    return lambda original, logps_BV, cfg: original(logps_BV, change(cfg))


def without_the_last(original: Any, logps_BV: Any, cfg: Any) -> Any:
    """Leave out the token with which the likeliest ones reach top_p together."""
    probs_BV = original(logps_BV, replace(cfg, top_p=1.0))
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    enough_BV = (sorted_BV.cumsum(-1) >= cfg.top_p * sorted_BV.sum(-1, keepdim=True)) & (sorted_BV < sorted_BV[:, :1])
    return probs_BV.masked_fill(torch.zeros_like(enough_BV).scatter(-1, order_BV, enough_BV), 0.0)


def of_the_whole(original: Any, logps_BV: Any, cfg: Any) -> Any:
    """Compare each probability with min_p itself, and not with its share of the largest."""
    probs_BV = original(logps_BV, replace(cfg, min_p=0.0))
    return probs_BV.where((probs_BV >= cfg.min_p) | (probs_BV == probs_BV.amax(-1, keepdim=True)), 0.0)


def one_number_for_all(original: Any, stream_B: Any, position: int) -> Any:
    """Let all rows of a rank's batch be drawn by the number of its first row."""
    return original(stream_B, position)[:1].repeat(len(stream_B))


def half_of_the_loss(original: Any, self: Any, held: Any, meter: Any) -> Any:
    return half_derived(original(self, held, meter))


def half_of_each_token(original: Any, held: Any, said: Any) -> Any:
    return original(held, said._replace(logps_n=half_derived(said.logps_n)))


def at_no_temperature(original: Any, self: Any, *args: Any) -> None:
    original(self, *args)
    self.wanted = replace(self.wanted, temperature=1.0)


CHOOSE, SCORER = "rollout.choose:", "rollout.scoring:Scorer"
DRAWING_FAULTS = (
    sample("top_p is not kept", CHOOSE + "kept", with_keys(lambda cfg: replace(cfg, top_p=1.0)), "log-probabilities",
           ROLLOUT, "rollout.top_p=0.5", base=GRPO),
    sample("top_p without the last token", CHOOSE + "kept", without_the_last, "log-probabilities", ROLLOUT,
           "rollout.top_p=0.5", base=GRPO),
    sample("top_k is one token more", CHOOSE + "kept", with_keys(lambda cfg: replace(cfg, top_k=cfg.top_k + 1)),
           "log-probabilities", ROLLOUT, "rollout.top_k=3", base=GRPO),
    sample("min_p of the whole", CHOOSE + "kept", of_the_whole, "log-probabilities", ROLLOUT, "rollout.min_p=0.5",
           base=GRPO),
    sample("one random number for all rows", "rollout.choose:uniform", one_number_for_all, "log-probabilities", ROLLOUT,
           base=GRPO),
    sample("a reference one token off", f"{SCORER}._keep", kept("reference", one_off), "log-probabilities", ROLLOUT,
           base=GRPO),
    sample("trained at another temperature", "train.rollout_task:RolloutTask.__init__", at_no_temperature,
           "log-probabilities", TRAIN, "rollout.temperature=0.7", base=GRPO),
    sample("half of a rollout's derivative", "train.rollout_task:RolloutStep.loss", half_of_the_loss, "gradient", TRAIN,
           base=GRPO),
    sample("half of each token's derivative", "train.rollout_task:tokens_of", half_of_each_token, "gradient", TRAIN),
)  # fmt: skip
