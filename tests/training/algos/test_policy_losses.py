"""The algorithms of reinforcement learning against their papers' formulas, written as plain loops, and against TRL.

The loops use Python's own numbers only, so they also run on complex ones. f(x + ih).imag / h with h = 1e-30 is the
derivative to the last bit, so each gradient is compared with the formula alone.
"""

from __future__ import annotations

import cmath
import collections
import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlexp.base.errors import ConfigError
from rlexp.config.checks.policy_loss import check_policy_loss
from rlexp.config.schema import KINDS, Config
from rlexp.config.schema.bounds import check_bounds
from rlexp.config.schema.losses import CriticName, DPOConfig, KLEstimator, KLPlace, Normalize, PolicyLossConfig
from rlexp.training.algos.clipped import ClippedRatio
from rlexp.training.algos.dr_grpo import DrGRPO
from rlexp.training.algos.gae import gae, returns_to_go, token_rewards
from rlexp.training.algos.grpo import GRPO
from rlexp.training.algos.gspo import GSPO
from rlexp.training.algos.kl import KLController, estimate
from rlexp.training.algos.policy_loss import Outcomes, PolicyLoss, PolicyTerms, PolicyTokens
from rlexp.training.algos.ppo import PPO
from rlexp.training.algos.reinforce_pp import ReinforcePP
from rlexp.training.algos.rloo import RLOO
from rlexp.training.algos.weights import sequence_weight, token_weight
from rlexp.training.algos.whiten import centred, mean_and_variance, whiten

LOSSES: dict[str, type[ClippedRatio]] = {
    "ppo": PPO, "grpo": GRPO, "dr_grpo": DrGRPO, "rloo": RLOO, "reinforce_pp": ReinforcePP, "gspo": GSPO,
}  # fmt: skip
GROUPED = ("grpo", "dr_grpo", "rloo", "gspo")  # compare the answers to one prompt with each other
EXACT = 1e-12  # relative; largest difference measured: 2e-15, for sums of twenty terms in another order
FIXED = 8  # rollout.max_new_tokens
Numbers = list[list[float]]  # by sample, by token


def configured(name: str, **changes: Any) -> PolicyLossConfig:
    kind: type[PolicyLossConfig] = KINDS["loss"][name]
    return kind(**changes)


def built(cfg: PolicyLossConfig, importance_cap: float | None = None) -> ClippedRatio:
    kind = LOSSES[cfg.name]
    names = {field.name for field in dataclasses.fields(kind)} - {"importance_cap"}
    return kind(**{name: getattr(cfg, name) for name in names}, importance_cap=importance_cap)


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
        loss.spread(float(credit), kl_L, tensor(values) if loss.needs_critic else None, kl_coef)
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
    """Lay the rows in a pack: before each answer, two tokens of a prompt with value 0."""
    return tensor([value for row in rows for value in (0.0, 0.0, *row)])


def tokens_of(case: Case, cfg: PolicyLossConfig, loss: PolicyLoss, kl_coef: float) -> PolicyTokens:
    advantages, returns = advantages_of(case, cfg, loss, kl_coef)
    samples = len(case.lengths)
    lengths, counts = torch.tensor(case.lengths), torch.tensor(case.counts)
    weight_B = token_weight(cfg.normalize, lengths, counts, FIXED).tolist()
    owner = [each for sample, length in enumerate(case.lengths) for each in (samples, samples, *[sample] * length)]
    sequence_t = torch.tensor(owner)

    def by_sequence(values_t: Tensor) -> Tensor:
        return torch.zeros(samples + 1, dtype=torch.float64).index_add(0, sequence_t, values_t.double())[:-1]

    def spread(values: Sequence[float]) -> Tensor:
        return laid_out(case, [[value] * length for value, length in zip(values, case.lengths, strict=True)])

    critic = loss.needs_critic
    return PolicyTokens(
        logps_t=laid_out(case, case.logps).requires_grad_(),
        old_t=laid_out(case, case.old),
        behaviour_t=laid_out(case, case.behaviour),
        reference_t=laid_out(case, case.reference) if loss.needs_reference else None,
        advantages_t=laid_out(case, [each.tolist() for each in advantages]),
        entropy_t=laid_out(case, case.entropy).requires_grad_(loss.needs_entropy),
        values_t=laid_out(case, case.values).requires_grad_() if critic else None,
        old_values_t=laid_out(case, case.old_values) if critic else None,
        returns_t=laid_out(case, returns) if critic else None,
        weight_t=spread(weight_B),
        trained_t=spread([float(each) for each in case.counts]),
        sequence_t=sequence_t,
        weight_S=sequence_weight(counts),
        length_S=lengths,
        by_sequence=by_sequence,
    )


def close(got: Any, wanted: Any) -> None:
    assert got == pytest.approx(wanted, rel=EXACT, abs=EXACT)


def answers_of(tokens: PolicyTokens, values_t: Tensor | None) -> list[float]:
    assert values_t is not None
    inside = tokens.sequence_t < len(tokens.weight_S)
    assert not bool(values_t[~inside].any())  # no gradient reaches a prompt
    return [float(each) for each in values_t[inside]]


VARIANTS: list[dict[str, Any]] = [
    {},
    {"beta": 0.0},
    {"kl_in": KLPlace.reward, "beta": 0.3, "kl": KLEstimator.k1},
    {"kl_in": KLPlace.reward, "beta": 0.3, "kl": KLEstimator.k2, "normalize": Normalize.sequence},
    {"kl_in": KLPlace.loss, "beta": 0.3, "kl": KLEstimator.k1, "normalize": Normalize.fixed},
    {"kl_in": KLPlace.loss, "beta": 0.3, "kl": KLEstimator.k2, "normalize": Normalize.token},
    {"kl_in": KLPlace.loss, "beta": 0.3, "kl": KLEstimator.k3, "whiten": True},
    {"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.3, "whiten": False},
    {"entropy": 0.02, "clip_low": 0.1, "clip_high": 0.1, "cap": 1.1},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda each: "-".join(each) or "defaults")
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_the_papers(name: str, variant: dict[str, Any]) -> None:
    changes = dict(variant)
    cap = changes.pop("cap", None)
    cfg = configured(name, **changes)
    loss: PolicyLoss = built(cfg, cap)
    for seed in range(3):
        case, kl_coef = Case(seed=seed), 1.7 * cfg.beta  # a controller has moved it
        tokens = tokens_of(case, cfg, loss, kl_coef)
        terms = loss(tokens, kl_coef)
        terms.loss.backward()

        def wanted(case: Case = case, kl_coef: float = kl_coef) -> Any:
            return plain_loss(case, cfg, kl_coef, cap)

        close(float(terms.loss.detach()), wanted().real)
        close(answers_of(tokens, tokens.logps_t.grad), plain_gradient(case, "logps", wanted))
        if loss.needs_critic:
            assert tokens.values_t is not None
            close(answers_of(tokens, tokens.values_t.grad), plain_gradient(case, "values", wanted))
        if loss.needs_entropy:
            close(answers_of(tokens, tokens.entropy_t.grad), plain_gradient(case, "entropy", wanted))
        parts = terms.weighted | terms.replicated
        coefficients = {"loss/value_avg": getattr(cfg, "value_coef", None)}
        close(float(terms.loss.detach()), sum(coefficients.get(key, 1.0) * float(part) for key, part in parts.items()))


@pytest.mark.parametrize("changes", [{"value_clip": None}, {"gamma": 0.9, "lam": 0.7}, {"lam": 0.0}, {"lam": 1.0}])
def test_what_is_ppos_alone(changes: dict[str, Any]) -> None:
    cfg, case = configured("ppo", **changes), Case()
    loss = built(cfg)
    tokens = tokens_of(case, cfg, loss, cfg.beta)
    terms = loss(tokens, cfg.beta)
    terms.loss.backward()
    close(float(terms.loss.detach()), plain_loss(case, cfg, cfg.beta, None).real)
    assert tokens.values_t is not None
    wanted = plain_gradient(case, "values", lambda: plain_loss(case, cfg, cfg.beta, None))
    close(answers_of(tokens, tokens.values_t.grad), wanted)


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_logged_by_token(name: str) -> None:
    cfg, case = configured(name, clip_low=0.1, clip_high=0.2, dual_clip=1.25, beta=0.1), Case(seed=3)
    loss = built(cfg)
    tokens = tokens_of(case, cfg, loss, 0.1)
    terms = loss(tokens, 0.1)
    advantages, returns = plain_advantages(case, cfg, 0.1)
    wanted: dict[str, list[float]] = {key: [] for key in terms.means_t}
    for sample, length in enumerate(case.lengths):
        if not case.counts[sample]:
            continue
        for t in range(length):
            apart = [case.logps[sample][k] - case.old[sample][k] for k in range(length)]
            ratio = math.exp(sum(apart) / length if name == "gspo" else apart[t])
            up = advantages[sample][t] > 0
            wanted["val/ratio"].append(ratio)
            wanted["policy/clipfrac_avg"].append(float(ratio > 1.2 if up else ratio < 0.9 or ratio > 1.25))
            wanted["policy/approxkl_avg"].append(apart[t] ** 2 / 2)
            wanted["policy/entropy_avg"].append(case.entropy[sample][t])
            wanted["val/behaviour_ratio"].append(math.exp(case.old[sample][t] - case.behaviour[sample][t]))
            wanted["policy/kl_avg"].append(k_of(KLEstimator.k3, case.logps[sample][t] - case.reference[sample][t]).real)
            if name == "ppo":
                value, before, target = case.values[sample][t], case.old_values[sample][t], returns[sample][t]
                held = min(max(value, before - 0.2), before + 0.2)
                wanted["val/clipfrac_avg"].append(float((held - target) ** 2 > (value - target) ** 2))
    for key, values_t in terms.means_t.items():
        assert not values_t.requires_grad
        close(values_t[tokens.trained_t > 0].tolist(), wanted[key])
    for key in terms.means_t.keys() & {"policy/clipfrac_avg", "val/clipfrac_avg"}:
        assert 0 < sum(wanted[key]) < len(wanted[key]), "both branches should be there"
    close(float(terms.peaks_t["val/ratio_max"][tokens.trained_t > 0].max()), max(wanted["val/ratio"]))


# ---- what does not move: the ring, the rounding ---------------------------------------------------------------------


def over_two_ranks(loss: PolicyLoss, tokens: PolicyTokens, kl_coef: float) -> tuple[list[PolicyTerms], Tensor]:
    """Give every other token to one rank and the rest to the other.

    A first pass records the other rank's sums. The backward of the sum over the ring is the identity.
    """
    sent: list[list[Tensor]] = [[], []]

    def part(rank: int, by_sequence: Callable[[Tensor], Tensor]) -> PolicyTokens:
        values = {field.name: getattr(tokens, field.name) for field in dataclasses.fields(tokens)}
        return PolicyTokens(
            **{key: each[rank::2] if key.endswith("_t") and each is not None else each for key, each in values.items()}
            | {"by_sequence": by_sequence}
        )

    def own(rank: int, values_t: Tensor) -> Tensor:
        sums = torch.zeros(len(tokens.weight_S) + 1, dtype=torch.float64)
        return sums.index_add(0, tokens.sequence_t[rank::2], values_t.double())[:-1]

    def record(rank: int, values_t: Tensor) -> Tensor:
        sent[rank].append(own(rank, values_t).detach())
        return sent[rank][-1]

    for rank in (0, 1):
        loss(part(rank, lambda values_t, rank=rank: record(rank, values_t)), kl_coef)
    results = []
    for rank in (0, 1):
        others = iter(sent[1 - rank])
        terms = loss(part(rank, lambda values_t, rank=rank, o=others: own(rank, values_t) + next(o)), kl_coef)
        terms.loss.backward()
        results.append(terms)
    assert tokens.logps_t.grad is not None
    return results, tokens.logps_t.grad


@pytest.mark.parametrize("name", LOSSES)
def test_two_ranks_are_one(name: str) -> None:
    cfg, case = configured(name, beta=0.1, entropy=0.01, clip_low=0.1, clip_high=0.1), Case(seed=5)
    loss = built(cfg, importance_cap=1.5)
    alone_tokens, tokens = tokens_of(case, cfg, loss, 0.1), tokens_of(case, cfg, loss, 0.1)
    alone = loss(alone_tokens, 0.1)
    alone.loss.backward()
    ranks, gradient = over_two_ranks(loss, tokens, 0.1)
    for key, part in alone.weighted.items():
        close(sum(float(each.weighted[key]) for each in ranks), float(part))
    for key, part in alone.replicated.items():
        assert [float(each.replicated[key]) for each in ranks] == pytest.approx([float(part)] * 2, rel=EXACT)
    for key, values_t in (alone.means_t | alone.peaks_t).items():
        for rank, each in enumerate(ranks):
            close((each.means_t | each.peaks_t)[key].tolist(), values_t[rank::2].tolist())
    assert alone_tokens.logps_t.grad is not None
    close(gradient.tolist(), alone_tokens.logps_t.grad.tolist())


@pytest.mark.parametrize("name", LOSSES)
def test_a_rank_without_a_token_has_its_graph(name: str) -> None:
    cfg = configured(name, entropy=0.01)
    loss = built(cfg)
    tokens = tokens_of(Case(lengths=(0, 0), counts=(True, False), groups=(0, 0)), cfg, loss, cfg.beta)
    nothing: dict[str, Any] = {
        field.name: getattr(tokens, field.name)[:0]
        for field in dataclasses.fields(tokens)
        if field.name.endswith("_t") and getattr(tokens, field.name) is not None
    }
    none_S = torch.zeros(2, dtype=torch.float64)
    nothing["by_sequence"] = lambda values_t: none_S + values_t.sum()
    for some in (tokens, dataclasses.replace(tokens, **nothing)):
        terms = loss(some, cfg.beta)
        assert float(terms.loss.detach()) == 0.0
        terms.loss.backward()
        assert tokens.logps_t.grad is not None
        assert tokens.logps_t.grad.eq(0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_rounding_about_one_clips_nothing(name: str) -> None:
    cfg = configured(name, dual_clip=3.0)
    loss = built(cfg)
    tokens = tokens_of(Case(apart=1e-7), cfg, loss, cfg.beta)
    values = {f.name: getattr(tokens, f.name) for f in dataclasses.fields(tokens)}
    coarse = {key: each.detach().float() for key, each in values.items() if key.endswith("_t") and each is not None}
    for some in (tokens, dataclasses.replace(tokens, **coarse | {"sequence_t": tokens.sequence_t})):
        terms = loss(some, cfg.beta)
        for key in terms.means_t.keys() & {"policy/clipfrac_avg", "val/clipfrac_avg"}:
            assert terms.means_t[key].eq(0).all()


def test_an_advantage_of_zero_is_a_tie_and_not_clipped() -> None:
    losses, clipped = built(configured("ppo", dual_clip=3.0)).surrogate(tensor([0.1, 1.0, 9.0]), torch.zeros(3))
    assert losses.eq(0).all()
    assert clipped.eq(0).all()


def test_the_four_corners_of_the_clipped_ratio() -> None:
    ratio, advantage = tensor([0.5, 1.5, 0.5, 1.5, 4.0]), tensor([1.0, 1.0, -1.0, -1.0, -1.0])
    losses, clipped = built(configured("ppo", dual_clip=3.0)).surrogate(ratio, advantage)
    assert losses.tolist() == [-0.5, -1.2, 0.8, 1.5, 3.0]
    assert clipped.tolist() == [0, 1, 1, 0, 1]


# ---- with policy = old, as the docstrings say -----------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_at_the_old_policy_it_is_reinforce(name: str) -> None:
    cfg, case = configured(name, beta=0.0), Case(counts=(True,) * 6, lengths=(3, 1, 5, 2, 1, 4))
    case.logps, case.values = [list(each) for each in case.old], [list(each) for each in case.old_values]
    loss = built(cfg)
    tokens = tokens_of(case, cfg, loss, 0.0)
    terms = loss(tokens, 0.0)
    terms.loss.backward()
    policy = (terms.weighted | terms.replicated)["loss/policy_avg"]
    if name not in ("rloo", "dr_grpo"):  # lengths weigh in their value
        close(float(policy), 0.0)
    assert tokens.logps_t.grad is not None
    close(tokens.logps_t.grad.tolist(), (-tokens.advantages_t * tokens.weight_t).tolist())
    if name == "ppo":
        raw = [gae(token_rewards(s, torch.zeros(len(v)), 0.0), tensor(v), 1.0, 0.95)
               for s, v in zip(case.scores, case.old_values, strict=True)]  # fmt: skip
        close(float(terms.weighted["loss/value_avg"]), float(torch.cat(raw).square().mean() / 2))


@pytest.mark.parametrize(("name", "wanted"), [("grpo", 0.5 / (math.sqrt(0.5) + 1e-4)), ("dr_grpo", 0.5), ("rloo", 1.0)])
def test_two_answers_that_score_0_and_1(name: str, wanted: float) -> None:
    outcomes = Outcomes(tensor([1.0, 0.0]), torch.zeros(2).double(), torch.tensor([4, 4]))
    close(built(configured(name)).credit(outcomes, 0.05).tolist(), [wanted, -wanted])


@pytest.mark.parametrize("name", LOSSES)
def test_equal_scores_and_a_group_of_one_earn_exactly_nothing(name: str) -> None:
    scores = [0.1] * 3 + [7.0]
    outcomes = Outcomes(tensor(scores), torch.zeros(4).double(), torch.tensor([0, 0, 0, 1]))
    wanted = [0.0] * 4 if name in GROUPED else scores
    assert built(configured(name)).credit(outcomes, 0.05).tolist() == wanted
    assert float(tensor([0.1] * 3).mean()) != 0.1  # a plain mean would leave rounding


def test_groups_need_not_lie_together() -> None:
    outcomes = Outcomes(tensor([1.0, 10.0, 3.0, 30.0]), torch.zeros(4).double(), torch.tensor([5, 2, 5, 2]))
    assert built(configured("rloo")).credit(outcomes, 0.0).tolist() == [-2.0, -20.0, 2.0, 20.0]


def test_what_an_algorithm_needs() -> None:
    for name in LOSSES:
        for beta, entropy in ((0.0, 0.0), (0.1, 0.01)):
            loss = built(configured(name, beta=beta, entropy=entropy))
            assert loss.needs_reference is (beta > 0)
            assert loss.needs_entropy is (entropy > 0)
            assert loss.needs_critic is (name == "ppo")


# ---- the parts ------------------------------------------------------------------------------------------------------


def test_gae_is_its_definition_and_its_two_ends_are_known() -> None:
    draw = random.Random(1)
    rewards, values = ([draw.gauss(0, 1) for _ in range(40)] for _ in range(2))
    to_go = returns_to_go(tensor(rewards)).tolist()
    close(to_go, [sum(rewards[t:]) for t in range(40)])
    for gamma, lam in ((1.0, 0.95), (0.9, 0.5), (0.99, 0.0), (1.0, 1.0)):
        got = gae(tensor(rewards), tensor(values), gamma, lam).tolist()
        deltas = [rewards[t] + gamma * [*values, 0.0][t + 1] - values[t] for t in range(40)]
        close(got, [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, 40)) for t in range(40)])
    close(gae(tensor(rewards), tensor(values), 1.0, 1.0).tolist(), [g - v for g, v in zip(to_go, values, strict=True)])


def test_an_empty_answer_is_paid_nothing() -> None:
    empty = torch.zeros(0)
    assert (
        token_rewards(1.0, empty, 0.1).shape == gae(empty, empty, 1.0, 0.95).shape == returns_to_go(empty).shape == (0,)
    )
    assert token_rewards(1.0, tensor([2.0, 3.0]), 0.1).tolist() == pytest.approx([-0.2, 0.7])
    kept = tensor([2.0])
    token_rewards(1.0, kept, 1.0)
    assert kept.tolist() == [2.0]


def test_whitening_is_by_the_tokens_that_count() -> None:
    advantages = [tensor([1.0, 2.0]), tensor([100.0]), tensor([]), tensor([6.0])]
    got = whiten(advantages, torch.tensor([True, False, True, True]))
    deviation = math.sqrt((4 + 1 + 9) / 2 + 1e-8)  # about the mean, 3
    wanted: Numbers = [[-2 / deviation, -1 / deviation], [0.0], [], [3 / deviation]]
    for each, values in zip(got, wanted, strict=True):
        close(each.tolist(), values)
    every = torch.cat([got[0], got[3]])
    assert float(every.mean()) == pytest.approx(0.0, abs=1e-15)
    assert float(every.var()) == pytest.approx(1.0, rel=1e-8)


@pytest.mark.parametrize("lengths", [(3, 2), (1,), (0,), (0, 0), ()])
def test_whitening_leaves_nothing_of_what_is_all_alike(lengths: tuple[int, ...]) -> None:
    advantages = [torch.full((length,), 0.1, dtype=torch.float64) for length in lengths]
    for got in whiten(advantages, torch.ones(len(lengths))):
        assert got.eq(0).all()
    assert centred(tensor([0.1] * 3)).tolist() == [0.0] * 3


def test_mean_and_variance_of_parts_are_those_of_the_whole() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(length, dtype=torch.float64) * 3 + 1000 for length in (5, 2, 1, 200)]
    whole = torch.cat(parts)
    assert mean_and_variance(parts) == pytest.approx((float(whole.mean()), float(whole.var())), rel=1e-13)


def test_weights_by_hand() -> None:
    lengths, counts = torch.tensor([1, 3, 0, 5]), torch.tensor([True, True, True, False])
    expected = {
        Normalize.token: [1 / 4, 1 / 4, 0, 0],
        Normalize.sequence: [1 / 3, 1 / 9, 0, 0],
        Normalize.fixed: [1 / 24, 1 / 24, 0, 0],
    }
    for normalize, wanted in expected.items():
        assert token_weight(normalize, lengths, counts, FIXED).tolist() == pytest.approx(wanted, rel=1e-15)
        for none in (torch.zeros(4), torch.tensor([0, 0, 1, 0])):
            assert token_weight(normalize, lengths, none, FIXED).tolist() == [0.0] * 4
        assert token_weight(normalize, lengths[:0], counts[:0], FIXED).shape == (0,)
    assert sequence_weight(counts).tolist() == pytest.approx([1 / 3] * 3 + [0.0], rel=1e-15)
    assert sequence_weight(torch.zeros(4)).tolist() == [0.0] * 4


def test_estimators_have_the_divergence_as_their_mean() -> None:
    """The mean over all tokens, by the policy's probabilities: exact for k1 and k3; k2 is off in the third order."""
    policy, reference = tensor([0.5, 0.3, 0.2]), tensor([0.45, 0.31, 0.24])
    d = (policy / reference).log()
    exact = float((policy * d).sum())
    mean = {kind: float((policy * estimate(kind, d)).sum()) for kind in KLEstimator}
    assert [mean[KLEstimator.k1], mean[KLEstimator.k3]] == pytest.approx([exact] * 2, rel=1e-12)
    assert abs(mean[KLEstimator.k2] - exact) < float((policy * d.abs() ** 3).sum())
    assert estimate(KLEstimator.k3, d).gt(0).all()


def test_estimators_and_their_slopes() -> None:
    for value in (-2.0, -1e-5, 0.0, 1e-5, 2.0):
        for kind in KLEstimator:
            d = tensor([value]).requires_grad_()
            estimate(kind, d).backward()
            assert d.grad is not None
            slope = complex(k_of(kind, complex(value, 1e-30))).imag / 1e-30
            assert float(d.grad) == pytest.approx(slope, rel=1e-14, abs=1e-15)
    tiny = torch.tensor([1e-4])  # float32, where exp(−d) − 1 + d has no correct digit
    assert float(estimate(KLEstimator.k3, tiny)) == pytest.approx(5e-9, rel=2e-3)


def test_the_coefficient_follows_the_divergence() -> None:
    controller = KLController(beta=0.1, target=2.0, horizon=1000)
    controller.update(2.0, 100)
    assert controller.beta == 0.1
    controller.update(2.2, 100)  # 10 % above: + 10 % × 100 / 1000
    assert controller.beta == pytest.approx(0.101, rel=1e-14)
    controller.update(40.0, 100)
    assert controller.beta == pytest.approx(0.101 * 1.02, rel=1e-14)
    controller.update(-1.0, 100_000)  # k1 may be negative; more samples than the horizon count as the horizon
    assert controller.beta == pytest.approx(0.101 * 1.02 * 0.8, rel=1e-14)
    fixed = KLController(0.1, None, 1000)
    fixed.update(40.0, 100)
    assert fixed.beta == 0.1


# ---- values that are refused ----------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("ppo", {"beta": -0.1}, "loss.beta=-0.1: must be at least 0."),
    ("ppo", {"beta": math.nan}, "loss.beta=nan: must be at least 0."),
    ("grpo", {"clip_low": 0.0}, "loss.clip_low=0.0: must be greater than 0."),
    ("gspo", {"clip_high": -1.0}, "loss.clip_high=-1.0: must be greater than 0."),
    ("rloo", {"entropy": -0.1}, "loss.entropy=-0.1: must be at least 0."),
    ("ppo", {"dual_clip": 1.0}, "loss.dual_clip=1.0: must be greater than 1 (3 is usual), or null."),
    ("ppo", {"kl_target": 0.0}, "loss.kl_target=0.0: must be greater than 0, or null."),
    ("dr_grpo", {"kl_target": 6.0}, "loss.kl_target=6.0: adapts loss.beta, which starts at 0 and would stay there."),
    ("ppo", {"kl_horizon": 0}, "loss.kl_horizon=0: must be at least 1"),
    ("ppo", {"kl_in": KLPlace.loss}, "loss.kl=k1: with loss.kl_in=loss its gradient does not depend on"),
    ("ppo", {"gamma": 1.5}, "loss.gamma=1.5: must be at least 0 and at most 1."),
    ("ppo", {"lam": -0.5}, "loss.lam=-0.5: must be at least 0 and at most 1."),
    ("ppo", {"value_coef": -1.0}, "loss.value_coef=-1.0: must be at least 0."),
    ("ppo", {"value_clip": 0.0}, "loss.value_clip=0.0: must be greater than 0, or null."),
    ("ppo", {"value_lr": -1.0}, "loss.value_lr=-1.0: must be at least 0, or null."),
    (
        "ppo",
        {"value_lr": 1e-3, "critic": CriticName.shared},
        "loss.value_lr=0.001: loss.critic=shared uses the policy's",
    ),
]


def _check(cfg: Config) -> None:
    check_bounds(cfg.loss, "loss.")
    check_policy_loss(cfg)


@pytest.mark.parametrize(("name", "changes", "says"), REFUSED, ids=lambda each: str(each)[:40])
def test_values_that_are_refused(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _check(Config(loss=configured(name, **changes)))
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("name", LOSSES)
def test_one_answer_to_a_prompt_is_refused_where_it_learns_nothing(name: str) -> None:
    cfg = Config(loss=configured(name))
    check_policy_loss(cfg)
    cfg.rollout.n_samples = 1
    if name in GROUPED:
        with pytest.raises(ConfigError, match=r"rollout\.n_samples=1: .* Use rollout\.n_samples=2 or more"):
            check_policy_loss(cfg)
    else:
        check_policy_loss(cfg)
        cfg.loss = configured(name, filter=True)
        with pytest.raises(ConfigError, match=r"rollout\.n_samples=1: with loss\.filter=true"):
            check_policy_loss(cfg)


def test_a_loss_of_pairs_is_not_looked_at() -> None:
    cfg = Config(loss=DPOConfig())
    cfg.rollout.n_samples = 1
    check_policy_loss(cfg)


# ---- other implementations ------------------------------------------------------------------------------------------


def padded(case: Case, rows: Sequence[Sequence[float]]) -> Tensor:
    width = max(case.lengths)
    return tensor([[*row, *[0.0] * (width - len(row))] for row in rows])


def test_ppo_is_a_batch_of_tensors_under_autograd() -> None:
    """The formulas again, as libraries write them: answers of one length as rows of a batch, differentiated by torch.

    The terms of the policy and of the critic are compared separately.
    """
    cfg = configured("ppo", beta=0.2, value_coef=0.3)
    case = Case(lengths=(5,) * 6, counts=(True,) * 6)
    loss = built(cfg)
    tokens = tokens_of(case, cfg, loss, 0.2)
    terms = loss(tokens, 0.2)
    terms.loss.backward()

    old, values = padded(case, case.old), padded(case, case.old_values)
    rewards = -0.2 * (old - padded(case, case.reference))
    rewards[:, -1] += tensor(case.scores)
    advantages, later = torch.zeros_like(values), torch.zeros(6, dtype=torch.float64)
    for t in reversed(range(5)):
        after = values[:, t + 1] if t < 4 else 0.0
        later = rewards[:, t] + cfg.gamma * after - values[:, t] + cfg.gamma * cfg.lam * later
        advantages[:, t] = later
    returns = advantages + values
    whitened = (advantages - advantages.mean()) * torch.rsqrt(advantages.var() + 1e-8)
    logps, now = (padded(case, each).requires_grad_() for each in (case.logps, case.values))
    ratio = (logps - old).exp()
    gains, clipped_gains = ratio * whitened, ratio.clamp(0.8, 1.2) * whitened
    policy = -torch.minimum(gains, clipped_gains).mean()
    near = values + (now - values).clamp(-0.2, 0.2)
    value = 0.5 * torch.maximum((now - returns) ** 2, (near - returns) ** 2).mean()
    total = policy + 0.3 * value
    total.backward()
    inside = tokens.trained_t > 0
    close(float(terms.loss.detach()), float(total.detach()))
    close(float(terms.weighted["loss/policy_avg"]), float(policy.detach()))
    close(float(terms.weighted["loss/value_avg"]), float(value.detach()))
    close(float(terms.means_t["val/ratio"][inside].mean()), float(ratio.mean().detach()))
    close(float(terms.means_t["policy/clipfrac_avg"][inside].mean()), float((clipped_gains < gains).double().mean()))
    assert tokens.values_t is not None
    close(answers_of(tokens, tokens.logps_t.grad), logps.grad.flatten().tolist())
    close(answers_of(tokens, tokens.values_t.grad), now.grad.flatten().tolist())


def trl_loss(case: Case, name: str, cfg: PolicyLossConfig, advantages: Tensor) -> tuple[float, Tensor]:
    """Return the loss of TRL's GRPOTrainer and its gradient; its method is called without a trainer."""
    from trl import GRPOTrainer

    logps = padded(case, case.logps).requires_grad_()
    mask = padded(case, [[1.0] * length for length in case.lengths])
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, padded(case, case.entropy), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        importance_sampling_level="sequence" if name == "gspo" else "token", beta=cfg.beta,
        loss_type="dr_grpo" if name == "dr_grpo" else "grpo", epsilon_low=cfg.clip_low, epsilon_high=cfg.clip_high,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None), max_completion_length=FIXED,
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        _metrics={"train": collections.defaultdict(list)},
        accelerator=SimpleNamespace(gather=lambda each: each, reduce=lambda each, reduction: each),  # noqa: ARG005
    )  # fmt: skip
    ids = torch.zeros_like(mask)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": mask[:, :1], "completion_ids": ids, "completion_mask": mask,
        "advantages": advantages, "old_per_token_logps": padded(case, case.old),
        "ref_per_token_logps": padded(case, case.reference),
    }  # fmt: skip
    loss = GRPOTrainer._compute_loss(stub, None, inputs)
    loss.backward()
    assert logps.grad is not None
    return float(loss.detach()), logps.grad[mask > 0]


@pytest.mark.parametrize("changes", [{}, {"beta": 0.2, "clip_low": 0.1, "clip_high": 0.3}], ids=["defaults", "changed"])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo"])
def test_the_group_losses_are_trls(name: str, changes: dict[str, Any]) -> None:
    from trl.trainer.utils import nanstd

    cfg, case = configured(name, **changes), Case(counts=(True,) * 6, seed=7)
    loss = built(cfg)
    tokens = tokens_of(case, cfg, loss, cfg.beta)
    terms = loss(tokens, cfg.beta)
    terms.loss.backward()
    scores = tensor(case.scores).view(2, 3)
    advantages = scores - scores.mean(1, keepdim=True)
    if name != "dr_grpo":
        advantages = advantages / (nanstd(scores, dim=1, keepdim=True) + 1e-4)
    wanted, gradient = trl_loss(case, name, cfg, advantages.flatten())
    close(float(terms.loss.detach()), wanted)
    close(answers_of(tokens, tokens.logps_t.grad), gradient.tolist())


def test_rloo_is_trls_at_the_old_policy() -> None:
    """TRL clips the ratio of the whole answer. At the old policy the gradients agree, except that ours is divided by
    the fixed length."""
    from trl import RLOOTrainer

    cfg, case = configured("rloo", beta=0.2), Case(counts=(True,) * 6)
    case.logps = [list(each) for each in case.old]
    loss = built(cfg)
    tokens = tokens_of(case, cfg, loss, 0.2)
    loss(tokens, 0.2).loss.backward()
    logps, mask = padded(case, case.logps).requires_grad_(), padded(case, [[1.0] * n for n in case.lengths])
    divergence = tensor([sum(each) for each in divergences(case, cfg)])
    rewards = (tensor(case.scores) - 0.2 * divergence).view(2, 3)
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, mask, None),
        aux_loss_enabled=False, epsilon_low=0.2, epsilon_high=0.2, model=SimpleNamespace(training=True),
        _metrics={"train": collections.defaultdict(list)},
        accelerator=SimpleNamespace(gather=lambda each: each, reduce=lambda each, reduction: each),  # noqa: ARG005
    )  # fmt: skip
    inputs = {
        "prompt_ids": mask[:, :1], "prompt_mask": mask[:, :1], "completion_ids": mask, "completion_mask": mask,
        "advantages": (rewards - (rewards.sum(1, keepdim=True) - rewards) / 2).flatten(),
        "old_logps": (logps * mask).sum(1).detach(),
    }  # fmt: skip
    RLOOTrainer._compute_loss(stub, None, inputs).backward()
    assert logps.grad is not None
    close(answers_of(tokens, tokens.logps_t.grad), (logps.grad[mask > 0] / FIXED).tolist())
