"""The losses over pairs. Each is a function of its keys and of what is known of the pairs; `PAIRS` lists them all.

A run trains on `PairLoss`, the weighted sum of one or several. It adds the supervised term, weighs the pairs, and logs
the rewards. A *reward* is β times a log-ratio. A reward model trains on `RewardLoss`. Shape letter: P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlexp.config.schema import losses as schema
from rlexp.config.schema.loss_terms import LossTerm, loss_terms
from rlexp.training.algos.base import Losses, Values
from rlexp.training.algos.log_ratios import implicit_rewards, log_ratios, logistic, per_token, reward_metrics, shift_of
from rlexp.training.types import Wanted


def margins(cfg: schema.PreferenceConfig, values: Values) -> Tensor:
    """Return the margin of the rewards, less what the rows ask for."""
    chosen_P, rejected_P = log_ratios(values)
    margin_P = cfg.beta * (chosen_P - rejected_P)
    if not cfg.margin_weight:
        return margin_P
    assert values.margin_E is not None
    return margin_P - cfg.margin_weight * values.margin_E


def rewards(cfg: schema.PreferenceConfig, values: Values) -> tuple[Tensor, Tensor]:
    chosen_P, rejected_P = log_ratios(values)
    return cfg.beta * chosen_P, cfg.beta * rejected_P


def dpo(cfg: schema.DPOConfig, values: Values) -> Tensor:
    """−log σ(β·margin). The margin is the chosen answer's log-ratio of policy to reference, less the rejected one's.

    With policy = reference the margin is 0 and every loss is ln 2 (Rafailov et al. 2023, arXiv 2305.18290; with label
    smoothing, cDPO).
    """
    return logistic(margins(cfg, values), cfg.label_smoothing)


def cpo(cfg: schema.CPOConfig, values: Values) -> Tensor:
    """DPO with a reference that gives all answers alike (Xu et al. 2024, arXiv 2401.08417); the likelihood of the
    chosen answers is `loss.sft_weight`."""
    return logistic(margins(cfg, values), cfg.label_smoothing)


def dpo_norm(cfg: schema.DPONormConfig, values: Values) -> Tensor:
    """DPO on log-ratios per token (Lambert et al. 2024, Tülu 3, arXiv 2411.15124). The rewards are of whole answers."""
    return logistic(margins(cfg, per_token(values)), cfg.label_smoothing)


def ipo(cfg: schema.IPOConfig, values: Values) -> Tensor:
    """(chosen − rejected − 1/(2β))², of log-ratios per token or of whole answers. β is the paper's τ (Azar et al. 2023,
    arXiv 2310.12036, equation 17). The logged rewards are of whole answers either way."""
    by_token = cfg.normalize is schema.IPONormalize.token
    chosen_P, rejected_P = log_ratios(per_token(values) if by_token else values)
    return (chosen_P - rejected_P - 1 / (2 * cfg.beta)) ** 2


def apo_zero(cfg: schema.APOZeroConfig, values: Values) -> Tensor:
    """σ(−chosen) + σ(rejected), of rewards: where the chosen answers are better than the policy's own (D'Oosterlinck et
    al. 2024, arXiv 2408.06266, equation 7)."""
    chosen_P, rejected_P = rewards(cfg, values)
    return torch.sigmoid(-chosen_P) + torch.sigmoid(rejected_P)


def apo_down(cfg: schema.APODownConfig, values: Values) -> Tensor:
    """σ(chosen) + σ(rejected − chosen), of rewards: where the policy's own answers are better than the chosen ones
    (equation 8)."""
    chosen_P, rejected_P = rewards(cfg, values)
    return torch.sigmoid(chosen_P) + torch.sigmoid(rejected_P - chosen_P)


def simpo(cfg: schema.SimPOConfig, values: Values) -> Tensor:
    """−log σ(β·(chosen − rejected) − γ), of log-probabilities per token (Meng et al. 2024, arXiv 2405.14734)."""
    return logistic(margins(cfg, per_token(values)) - cfg.gamma)


def orpo(cfg: schema.ORPOConfig, values: Values) -> Losses:
    """−β·log σ(the log of the chosen answer's odds over the rejected one's) (Hong et al. 2024, arXiv 2403.07691).

    An answer's odds are p/(1 − p), where p is the geometric mean of its tokens' probabilities. The likelihood of the
    chosen answers is `loss.sft_weight`.
    """
    means = per_token(values).logps
    ratio_P = log_odds(means["chosen"]) - log_odds(means["rejected"])
    log_odds_P = ratio_P.detach()
    return Losses(
        cfg.beta * logistic(ratio_P), {"log_odds_chosen": log_odds_P, "log_odds_ratio": -logistic(log_odds_P)}
    )


def log_odds(logp_P: Tensor) -> Tensor:
    """Return log(p/(1 − p)) for log p. `expm1` keeps the digits of 1 − p near p = 1.

    In float64, log p is exact to no more than its epsilon: p = 1 is taken as 1 − epsilon, and its gradient as 0.
    """
    logp_P = logp_P.clamp(max=-torch.finfo(logp_P.dtype).eps)
    return logp_P - torch.log(-torch.expm1(logp_P))


def bco_pair(cfg: schema.BCOPairConfig, values: Values) -> Losses:
    """−log σ(chosen − δ) − log σ(−(rejected − δ)), of rewards (Jung et al. 2024, arXiv 2404.04656).

    δ is 0, or the mean reward of all answers that have been trained on, with those of this train batch. No gradient
    passes through it.
    """
    (chosen_P, rejected_P), delta, carried = rewards(cfg, values), 0.0, dict[str, float]()
    if cfg.shift is schema.Shift.mean:
        delta, carried = shift_of(values, "bco_pair", cfg.beta * torch.cat(log_ratios(values)).detach())
    losses_P = logistic(chosen_P - delta) + logistic(delta - rejected_P)
    return Losses(losses_P, {"bco_pair/shift": torch.full_like(values.tokens["chosen"], delta)}, carried=carried)


def hinge(cfg: schema.HingeConfig, values: Values) -> Tensor:
    """max(0, 1 − β·margin), with the margin of DPO (Zhao et al. 2023, arXiv 2305.10425; Liu et al. 2023, arXiv
    2309.06657)."""
    return torch.relu(1 - margins(cfg, values))


def robust(cfg: schema.RobustConfig, values: Values) -> Tensor:
    """(−(1 − ε)·log σ(β·margin) + ε·log σ(−β·margin)) / (1 − 2ε) (Ray Chowdhury et al. 2024, arXiv 2403.00409).

    If each label is wrong with probability ε, its mean over the labels is DPO's loss of the right labels.
    """
    margin_P, wrong = margins(cfg, values), cfg.label_smoothing
    return ((1 - wrong) * logistic(margin_P) - wrong * logistic(-margin_P)) / (1 - 2 * wrong)


def aot(cfg: schema.AOTConfig, values: Values) -> Tensor:
    """−log σ(β·(policy − reference)), of log π(chosen) − log π(rejected), each value with the one of the same rank in
    the train batch: the policy prefers as the reference, or more (Melnyk et al. 2024, arXiv 2406.05882).

    The loss of a pair is the one where the policy's value is its own.
    """
    assert values.reference is not None
    policy, reference = values.logps, values.reference
    ours_P, theirs_P = policy["chosen"] - policy["rejected"], reference["chosen"] - reference["rejected"]
    return logistic(cfg.beta * (ours_P - of_the_same_rank(theirs_P, ours_P)), cfg.label_smoothing)


def aot_unpaired(cfg: schema.AOTUnpairedConfig, values: Values) -> Tensor:
    """−log σ(β·(chosen − rejected)), of log-ratios: chosen answers are compared with any rejected ones.

    The loss of a pair is the one where the chosen answer is its own.
    """
    chosen_P, rejected_P = log_ratios(values)
    return logistic(cfg.beta * (chosen_P - of_the_same_rank(rejected_P, chosen_P)), cfg.label_smoothing)


def of_the_same_rank(values_P: Tensor, places_P: Tensor) -> Tensor:
    """Return, for each of `places_P`, that of `values_P` which has the same rank among them.

    A sort is stable, so that among equal values those of earlier pairs come first on any layout.
    """
    ranks_P = places_P.detach().argsort(stable=True).argsort(stable=True)
    return values_P[values_P.detach().argsort(stable=True)][ranks_P]


def exo_pair(cfg: schema.EXOPairConfig, values: Values) -> Tensor:
    """KL(q ‖ p) over the two answers: q = (σ(β·margin), σ(−β·margin)), and p = (1 − ε, ε) (Ji et al. 2024, arXiv
    2402.00856, equation 16)."""
    margin_P = margins(cfg, values)
    chosen_P = torch.sigmoid(margin_P) * (F.logsigmoid(margin_P) - math.log1p(-cfg.label_smoothing))
    return chosen_P + torch.sigmoid(-margin_P) * (F.logsigmoid(-margin_P) - math.log(cfg.label_smoothing))


def nca_pair(cfg: schema.NCAPairConfig, values: Values) -> Tensor:
    """−log σ(chosen) − ½·log σ(−chosen) − ½·log σ(−rejected), of rewards (Chen et al. 2024, arXiv 2402.05369)."""
    chosen_P, rejected_P = rewards(cfg, values)
    return logistic(chosen_P) + 0.5 * (logistic(-chosen_P) + logistic(-rejected_P))


def sppo_hard(cfg: schema.SPPOHardConfig, values: Values) -> Tensor:
    """(chosen − 1/(2β))² + (rejected + 1/(2β))², of log-ratios: the chosen answer wins with probability 1, and 1/β is
    the paper's η (Wu et al. 2024, arXiv 2405.00675, equation 4.7)."""
    chosen_P, rejected_P = log_ratios(values)
    return (chosen_P - 1 / (2 * cfg.beta)) ** 2 + (rejected_P + 1 / (2 * cfg.beta)) ** 2


def discopop(cfg: schema.DiscoPOPConfig, values: Values) -> Tensor:
    """(1 − s)·(−log σ(m)) + s·exp(−m), where m = β·margin and s = σ(m/τ) (Lu et al. 2024, arXiv 2406.08414).

    The second summand is computed as one power, since exp(−m) overflows where s·exp(−m) does not.
    """
    margin_P = margins(cfg, values)
    scaled_P = margin_P / cfg.tau
    return torch.sigmoid(-scaled_P) * logistic(margin_P) + torch.exp(F.logsigmoid(scaled_P) - margin_P)


PAIRS: dict[type[schema.PreferenceConfig], Callable[[Any, Values], Tensor | Losses]] = {
    schema.DPOConfig: dpo,
    schema.DPONormConfig: dpo_norm,
    schema.IPOConfig: ipo,
    schema.APOZeroConfig: apo_zero,
    schema.APODownConfig: apo_down,
    schema.SimPOConfig: simpo,
    schema.ORPOConfig: orpo,
    schema.CPOConfig: cpo,
    schema.BCOPairConfig: bco_pair,
    schema.HingeConfig: hinge,
    schema.RobustConfig: robust,
    schema.AOTConfig: aot,
    schema.AOTUnpairedConfig: aot_unpaired,
    schema.EXOPairConfig: exo_pair,
    schema.NCAPairConfig: nca_pair,
    schema.SPPOHardConfig: sppo_hard,
    schema.DiscoPOPConfig: discopop,
}
PER_TOKEN = (simpo, orpo)  # their rewards are means over tokens


@dataclass(frozen=True)
class PairLoss:
    cfg: schema.PreferenceConfig

    @cached_property
    def terms(self) -> list[LossTerm]:
        return loss_terms(self.cfg)

    @cached_property
    def wanted(self) -> Wanted:
        cfg = self.cfg
        wanted = Wanted(likelihoods=cfg.wpo, mean_tokens=cfg.sft_weight > 0, tail_weight=cfg.ld_alpha)
        for each in (term.cfg for term in self.terms):
            together = isinstance(each, schema.AOTConfig) or getattr(each, "shift", None) is schema.Shift.mean
            wanted |= Wanted(reference=each.has_reference, margins=each.margin_weight > 0, whole_batch=together)
        return wanted

    def __call__(self, values: Values) -> Losses:
        made = [judged(term.cfg, values) for term in self.terms]
        parts = {term.name: term.weight * each.losses_E for term, each in zip(self.terms, made, strict=True)}
        losses_P = sum(parts.values(), start=torch.zeros_like(values.tokens["chosen"]))
        metrics: dict[str, Tensor] = {}
        if self.cfg.wpo:
            metrics["wpo_weight"] = weight_P = on_policy_weight(values)
            losses_P = weight_P * losses_P
        if self.cfg.sft_weight:
            nll_P = -values.logps["chosen"] / values.mean_tokens
            metrics["nll_loss"] = nll_P.detach()
            losses_P = losses_P + self.cfg.sft_weight * nll_P
        if len(parts) > 1:
            metrics |= {f"loss/{name}": part_P.detach() for name, part_P in parts.items()}
        carried: dict[str, float] = {}
        for each in reversed(made):  # the rewards are those of the first
            metrics |= each.metrics_E
            carried |= each.carried
        return Losses(losses_P, metrics, carried=carried)


def judged(cfg: schema.PreferenceConfig, values: Values) -> Losses:
    """Return a loss of each pair, with its rewards and metrics of its own."""
    formula, own = PAIRS[type(cfg)], shown(values, cfg)
    made = formula(cfg, own)
    made = made if isinstance(made, Losses) else Losses(made, {})
    rewarded = per_token(own) if formula in PER_TOKEN else own
    return replace(made, metrics_E={**implicit_rewards(rewarded, cfg.beta), **made.metrics_E})


def shown(values: Values, cfg: schema.PreferenceConfig) -> Values:
    """Return the values without a reference that only another term wants."""
    return values if cfg.has_reference else replace(values, reference=None)


def on_policy_weight(values: Values) -> Tensor:
    """Return the weight of each pair by WPO (Zhou et al. 2024, arXiv 2406.11827, equation 2, as TRL writes it), (P,).

    For each answer, the mean over its tokens of log p − log Σ p², where p is the policy's distribution: how probable
    the token is, relative to one that the policy would draw. The weight is the product of both exponentials.
    """
    likelihoods = values.of_tokens["likelihoods"]
    with torch.no_grad():
        means = [(values.logps[side].detach() - likelihoods[side]) / values.tokens[side].clamp(min=1)
                 for side in ("chosen", "rejected")]  # fmt: skip
        return torch.exp(means[0] + means[1])


@dataclass(frozen=True)
class RewardLoss:
    """−log σ(chosen − rejected − margin) + center · (chosen + rejected)², of scores: the loss of Bradley and Terry.

    InstructGPT has it (Ouyang et al. 2022, arXiv 2203.02155), with margins Llama 2 (Touvron et al. 2023, arXiv
    2307.09288, equation 2). Centring is by Eisenstein et al. 2023 (arXiv 2312.09244).
    """

    cfg: schema.RewardModelConfig

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
