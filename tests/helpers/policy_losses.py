"""The losses of reinforcement learning in plain loops, and the code under test put together as the train step does.

The loops use Python's own numbers only, so they also run on complex ones. f(x + ih).imag / h with h = 1e-30 is the
derivative to the last bit, so each gradient is compared with the formula alone.
"""

from __future__ import annotations

import cmath
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from rlexp.config.schema import KINDS
from rlexp.config.schema.losses import KLEstimator, KLPlace, Normalize, PolicyLossConfig
from rlexp.training.algos.advantages import sequence_weight, token_weight, whiten
from rlexp.training.algos.policy import POLICY, ClippedRatio
from rlexp.training.algos.policy_loss import Outcomes, PolicyLoss, PolicyTokens

LOSSES = [kind.name for kind in POLICY]
GROUPED = ("grpo", "dr_grpo", "rloo", "gspo")  # compare the answers to one prompt with each other
EXACT = 1e-12  # relative; largest difference measured: 2e-15, for sums of twenty terms in another order
FIXED = 8  # rollout.max_new_tokens
Numbers = list[list[float]]  # by sample, by token


def configured(name: str, **changes: Any) -> PolicyLossConfig:
    kind: type[PolicyLossConfig] = KINDS["loss"][name]
    return kind(**changes)


def built(cfg: PolicyLossConfig, importance_cap: float | None = None) -> ClippedRatio:
    return POLICY[type(cfg)](cfg, importance_cap)


def tensor(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@dataclass
class Case:
    """A rollout of two prompts with three answers each, which is also the train batch.

    One answer is empty, and one is not trained on. The prompts' tokens belong to no answer.
    """

    lengths: tuple[int, ...] = (3, 1, 5, 2, 0, 4)
    counts: tuple[bool, ...] = (True, True, True, False, True, True)
    groups: tuple[int, ...] = (0, 0, 0, 1, 1, 1)
    seed: int = 0
    apart: float = 0.3  # deviation between two sets of log-probabilities

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)

        def near(values: Numbers, by: float) -> Numbers:
            return [[value + draw.gauss(0, by) for value in each] for each in values]

        self.logps: Numbers = [[-abs(draw.gauss(2, 1)) for _ in range(length)] for length in self.lengths]
        self.old, self.reference = near(self.logps, self.apart), near(self.logps, self.apart)
        self.behaviour = near(self.old, self.apart)
        self.entropy: Numbers = [[draw.uniform(0.5, 2) for _ in range(length)] for length in self.lengths]
        self.values: Numbers = [[draw.gauss(0, 1) for _ in range(length)] for length in self.lengths]
        self.old_values = near(self.values, self.apart)
        self.scores = [draw.uniform(-1, 1) for _ in self.lengths]


# ---- the formulas, in plain loops -----------------------------------------------------------------------------------


def k_of(kind: KLEstimator, d: Any) -> Any:
    return {KLEstimator.k1: d, KLEstimator.k2: d**2 / 2, KLEstimator.k3: cmath.exp(-d) - 1 + d}[kind]


def divergences(case: Case, cfg: PolicyLossConfig) -> Numbers:
    """Return the divergence estimates of each token, for the old policy."""
    return [
        [k_of(cfg.kl, o - r).real if cfg.beta > 0 else 0.0 for o, r in zip(old, reference, strict=True)]
        for old, reference in zip(case.old, case.reference, strict=True)
    ]


def plain_advantages(case: Case, cfg: Any, kl_coef: float) -> tuple[Numbers, Numbers]:
    """Return the advantages of each token, and the critic's targets."""
    charged = kl_coef if cfg.kl_in is KLPlace.reward else 0.0
    divergence = divergences(case, cfg)
    advantages: Numbers = []
    returns: Numbers = []
    totals = [score - charged * sum(kl) for score, kl in zip(case.scores, divergence, strict=True)]
    for sample, length in enumerate(case.lengths):
        rewards = [-charged * kl for kl in divergence[sample]]
        if length:
            rewards[-1] += case.scores[sample]
        values = [*case.old_values[sample], 0.0]
        own = [totals[other] for other, group in enumerate(case.groups) if group == case.groups[sample]]
        mean = sum(own) / len(own)
        deviation = math.sqrt(sum((each - mean) ** 2 for each in own) / (len(own) - 1))
        others = (sum(own) - totals[sample]) / (len(own) - 1)
        deltas = [rewards[t] + getattr(cfg, "gamma", 1) * values[t + 1] - values[t] for t in range(length)]
        match cfg.name:
            case "ppo":
                decay = cfg.gamma * cfg.lam
                row = [sum(decay ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)]
            case "reinforce_pp":
                row = [sum(rewards[t:]) for t in range(length)]
            case "grpo" | "gspo":
                row = [(totals[sample] - mean) / (deviation + 1e-4)] * length
            case "dr_grpo":
                row = [totals[sample] - mean] * length
            case "rloo":
                row = [totals[sample] - others] * length
        advantages.append(row)
        returns.append([row[t] + values[t] for t in range(length)])
    if cfg.whiten:
        every = [each for row, counts in zip(advantages, case.counts, strict=True) if counts for each in row]
        mean = sum(every) / len(every)
        variance = sum((each - mean) ** 2 for each in every) / (len(every) - 1)
        advantages = [[(each - mean) / math.sqrt(variance + 1e-8) for each in row] for row in advantages]
    return advantages, returns


def plain_surrogate(ratio: Any, advantage: float, cfg: PolicyLossConfig) -> Any:
    held = min(max(ratio.real, 1 - cfg.clip_low), 1 + cfg.clip_high)
    clipped = ratio if held == ratio.real else held
    loss = max(-advantage * ratio, -advantage * clipped, key=lambda each: each.real)
    if cfg.dual_clip is not None and advantage < 0:
        loss = min(loss, -advantage * cfg.dual_clip, key=lambda each: each.real)
    return loss


def plain_weight(case: Case, cfg: PolicyLossConfig, sample: int) -> float:
    counted = [length for length, counts in zip(case.lengths, case.counts, strict=True) if counts]
    match cfg.normalize:
        case Normalize.token:
            return 1 / sum(counted)
        case Normalize.sequence:
            return 1 / len(counted) / case.lengths[sample]
        case Normalize.fixed:
            return 1 / len(counted) / FIXED


def plain_loss(case: Case, cfg: Any, kl_coef: float, cap: float | None) -> Any:
    advantages, returns = plain_advantages(case, cfg, kl_coef)
    loss: Any = 0.0
    for sample, length in enumerate(case.lengths):
        if not case.counts[sample] or length == 0:
            continue
        logp, old, drawn = case.logps[sample], case.old[sample], case.behaviour[sample]
        if cfg.name == "gspo":
            ratio = cmath.exp(sum(logp[t] - old[t] for t in range(length)) / length)
            late = math.exp(sum(old[t] - drawn[t] for t in range(length)) / length)
            factor = 1.0 if cap is None else min(late, cap)
            loss += factor * plain_surrogate(ratio, advantages[sample][0], cfg) / sum(case.counts)
        for t in range(length):
            term: Any = 0.0
            if cfg.name != "gspo":
                factor = 1.0 if cap is None else min(math.exp(old[t] - drawn[t]), cap)
                term += factor * plain_surrogate(cmath.exp(logp[t] - old[t]), advantages[sample][t], cfg)
            if cfg.kl_in is KLPlace.loss and cfg.beta > 0:
                term += kl_coef * k_of(cfg.kl, logp[t] - case.reference[sample][t])
            term -= cfg.entropy * case.entropy[sample][t]
            if cfg.name == "ppo":
                value, before, target = case.values[sample][t], case.old_values[sample][t], returns[sample][t]
                errors = [(value - target) ** 2]
                if cfg.value_clip is not None:
                    held = min(max(value.real, before - cfg.value_clip), before + cfg.value_clip)
                    errors.append(((value if held == value.real else held) - target) ** 2)
                term += cfg.value_coef * max(errors, key=lambda each: each.real) / 2
            loss += plain_weight(case, cfg, sample) * term
    return loss


def plain_logged(case: Case, cfg: Any, kl_coef: float) -> dict[str, list[float]]:
    """Return the values of each token that counts, of which means are logged."""
    advantages, returns = plain_advantages(case, cfg, kl_coef)
    wanted: dict[str, list[float]] = {}
    for sample, t in ((sample, t) for sample, length in enumerate(case.lengths) for t in range(length)):
        if not case.counts[sample]:
            continue
        apart = [logp - old for logp, old in zip(case.logps[sample], case.old[sample], strict=True)]
        ratio = math.exp(sum(apart) / len(apart) if cfg.name == "gspo" else apart[t])
        below = ratio < 1 - cfg.clip_low or ratio > (cfg.dual_clip or math.inf)
        values = {
            "val/ratio": ratio,
            "policy/clipfrac_avg": float(ratio > 1 + cfg.clip_high if advantages[sample][t] > 0 else below),
            "policy/approxkl_avg": apart[t] ** 2 / 2,
            "policy/entropy_avg": case.entropy[sample][t],
            "val/behaviour_ratio": math.exp(case.old[sample][t] - case.behaviour[sample][t]),
            "policy/kl_avg": k_of(KLEstimator.k3, case.logps[sample][t] - case.reference[sample][t]).real,
        }
        if cfg.name == "ppo":
            value, before, target = case.values[sample][t], case.old_values[sample][t], returns[sample][t]
            held = min(max(value, before - cfg.value_clip), before + cfg.value_clip)
            values["val/clipfrac_avg"] = float((held - target) ** 2 > (value - target) ** 2)
        for name, value in values.items():
            wanted.setdefault(name, []).append(value)
    return wanted


def plain_gradient(case: Case, what: str, loss: Callable[[], Any]) -> list[float]:
    """Differentiate by the complex step, in the order of samples and tokens."""
    step, gradient = 1e-30, []
    for row in getattr(case, what):
        for t, value in enumerate(row):
            row[t] = complex(value, step)
            gradient.append(complex(loss()).imag / step)
            row[t] = value
    return gradient


# ---- the code under test, as the train step puts it together --------------------------------------------------------


def advantages_of(case: Case, cfg: PolicyLossConfig, loss: PolicyLoss, kl_coef: float) -> tuple[list[Tensor], Numbers]:
    divergence = [tensor(each) for each in divergences(case, cfg)]
    kl_N = torch.stack([each.sum() for each in divergence])
    credit_N = loss.credit(Outcomes(tensor(case.scores), kl_N, torch.tensor(case.groups)), kl_coef)
    spreads = [
        loss.spread(float(credit), kl_L, tensor(values) if loss.wanted.values is not None else None, kl_coef)
        for credit, kl_L, values in zip(credit_N, divergence, case.old_values, strict=True)
    ]
    advantages = [each.advantages_L for each in spreads]
    if cfg.whiten:
        advantages = whiten(advantages, torch.tensor(case.counts))
    returns = [
        [0.0] * len(each.advantages_L) if each.returns_L is None else each.returns_L.tolist() for each in spreads
    ]
    return advantages, returns


def laid_out(case: Case, rows: Sequence[Sequence[float]]) -> Tensor:
    """Lay the rows one after the other."""
    return tensor([value for row in rows for value in row])


def tokens_of(case: Case, cfg: PolicyLossConfig, loss: PolicyLoss, kl_coef: float) -> PolicyTokens:
    advantages, returns = advantages_of(case, cfg, loss, kl_coef)
    samples = len(case.lengths)
    lengths, counts = torch.tensor(case.lengths), torch.tensor(case.counts)
    weight_B = token_weight(cfg.normalize, lengths, counts, FIXED).tolist()
    owner = [each for sample, length in enumerate(case.lengths) for each in [sample] * length]
    sequence_n = torch.tensor(owner, dtype=torch.int64)

    def by_sequence(values_n: Tensor) -> Tensor:
        return torch.zeros(samples, dtype=torch.float64).index_add(0, sequence_n, values_n.double())

    def spread(values: Sequence[float]) -> Tensor:
        return laid_out(case, [[value] * length for value, length in zip(values, case.lengths, strict=True)])

    critic = loss.wanted.values is not None
    return PolicyTokens(
        logps_n=laid_out(case, case.logps).requires_grad_(),
        old_n=laid_out(case, case.old),
        behaviour_n=laid_out(case, case.behaviour),
        reference_n=laid_out(case, case.reference) if loss.wanted.reference else None,
        advantages_n=laid_out(case, [each.tolist() for each in advantages]),
        entropy_n=laid_out(case, case.entropy).requires_grad_(loss.wanted.entropy_gradient),
        values_n=laid_out(case, case.values).requires_grad_() if critic else None,
        old_values_n=laid_out(case, case.old_values) if critic else None,
        returns_n=laid_out(case, returns) if critic else None,
        weight_n=spread(weight_B),
        trained_n=spread([float(each) for each in case.counts]),
        sequence_n=sequence_n,
        weight_S=sequence_weight(counts),
        length_S=lengths,
        by_sequence=by_sequence,
    )


def close(got: Any, wanted: Any) -> None:
    assert got == pytest.approx(wanted, rel=EXACT, abs=EXACT)


def answers_of(tokens: PolicyTokens, values_n: Tensor | None) -> list[float]:
    assert values_n is not None
    return [float(each) for each in values_n]


def padded(case: Case, rows: Sequence[Sequence[float]]) -> Tensor:
    width = max(case.lengths)
    return tensor([[*row, *[0.0] * (width - len(row))] for row in rows])
