"""The rules of runs that draw their own samples, written out a second time from the documentation, on plain numbers.

A rollout is `rollout.batch_size` prompts with `rollout.n_samples` answers each; a sample's place in it is its prompt's
place × n_samples + its number. No code comes from the modules of training.

Shape letters: N samples of a rollout, B samples of a train batch, L tokens of an answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rlexp.config.schema import Config
from rlexp.config.schema.losses import KLEstimator, Normalize, PolicyLossConfig
from rlexp.config.schema.rollouts import Overlong, RolloutMode
from rlexp.verify import rules
from rlexp.verify.recording import Array

ALIKE = 1e-9  # scores of a group this close, relatively, count as equal
OF_VARIANCE = 1e-8  # added to the variance in whitening, as by TRL
BEYOND = 0.2  # a token's gap from here on is as large as what clipping lets a policy move
MOST = 0.2  # the largest relative change of the divergence's coefficient after a rollout


def loss_of(cfg: Config) -> PolicyLossConfig:
    assert isinstance(cfg.loss, PolicyLossConfig)
    return cfg.loss


# ---- which prompts, and which samples ----


def size_of(cfg: Config) -> int:
    return cfg.rollout.batch_size * cfg.rollout.n_samples


def steps_each(cfg: Config) -> int:
    """The optimizer steps that a rollout serves."""
    return cfg.rollout.epochs * size_of(cfg) // cfg.train.batch_size


def steps_per_epoch(cfg: Config, sizes: Sequence[int]) -> int:
    return rollouts_per_epoch(cfg, sizes) * steps_each(cfg)


def rollouts_per_epoch(cfg: Config, sizes: Sequence[int]) -> int:
    return sum(rules.shares(cfg, sizes)) // cfg.rollout.batch_size


def total_steps(cfg: Config, sizes: Sequence[int]) -> int:
    return rules.bounded_steps(cfg, steps_per_epoch(cfg, sizes))


def rollout_of(cfg: Config, step: int) -> int:
    return (step - 1) // steps_each(cfg)


def prompts_of(cfg: Config, sizes: Sequence[int], rollout: int) -> list[int]:
    """The prompts of a rollout, counted from 0: the next ones of the epoch's permutation."""
    epoch, place = divmod(rollout, rollouts_per_epoch(cfg, sizes))
    return rules.order_of(cfg, sizes, epoch)[place * cfg.rollout.batch_size :][: cfg.rollout.batch_size]


def samples_of(cfg: Config, step: int) -> list[int]:
    """The samples of an optimizer step, by their places in its rollout: a permutation of its own in each pass."""
    number, within = divmod(step - 1, steps_each(cfg))
    epoch, batch = divmod(within, size_of(cfg) // cfg.train.batch_size)
    order = np.random.default_rng([cfg.seed, number, epoch]).permutation(size_of(cfg))
    return [int(place) for place in order[batch * cfg.train.batch_size :][: cfg.train.batch_size]]


def drawn_after(cfg: Config, rollout: int) -> int:
    """The optimizer step whose weights drew a rollout: in a pipelined run those from before the last rollout."""
    behind = cfg.rollout.mode is RolloutMode.pipelined and rollout > 0
    return (rollout - behind) * steps_each(cfg)


# ---- which samples count ----


def without_signal(cfg: Config, scores_N: Array) -> Array:
    """Whether all answers to a sample's prompt have the same score; never for a single answer."""
    each = cfg.rollout.n_samples
    alike = np.zeros(len(scores_N), dtype=bool)
    for first in range(0, len(scores_N), each):
        group = scores_N[first : first + each]
        alike[first : first + each] = each > 1 and max(group) - min(group) <= ALIKE * max(map(abs, group))
    return alike


def counts_of(cfg: Config, scores_N: Array, stopped_N: Sequence[bool]) -> Array:
    """Whether a sample is trained on."""
    counts = np.ones(len(scores_N), dtype=bool)
    if cfg.rollout.overlong is Overlong.mask:
        counts &= np.array(stopped_N, dtype=bool)
    if loss_of(cfg).filter:
        counts &= ~without_signal(cfg, scores_N)
    return counts


# ---- advantages and weights ----


def divergence(kind: KLEstimator, ratio_L: Array) -> Array:
    """The estimate of each token's divergence from its log-ratio, policy less reference."""
    return {
        KLEstimator.k1: ratio_L,
        KLEstimator.k2: ratio_L**2 / 2,
        KLEstimator.k3: np.expm1(-ratio_L) + ratio_L,
    }[kind]


def divergences_of(cfg: Config, old: Sequence[Array], reference: Sequence[Array] | None) -> list[Array]:
    """The estimate of each token's divergence from the reference; zeros without one."""
    if reference is None:
        return [np.zeros(len(each)) for each in old]
    return [divergence(loss_of(cfg).kl, a.astype(np.float64) - b.astype(np.float64))
            for a, b in zip(old, reference, strict=True)]  # fmt: skip


def whitened(advantages: Sequence[Array], counts_B: Sequence[bool]) -> list[Array]:
    """Mean 0 and variance 1 over all tokens of the samples that count; 0 for the others, and where all are equal."""
    flat = np.concatenate([each for each, counts in zip(advantages, counts_B, strict=True) if counts] or [np.zeros(0)])
    if not len(flat) or flat.min() == flat.max():
        return [np.zeros_like(each) for each in advantages]
    mean = math.fsum(flat) / len(flat)
    variance = math.fsum((flat - mean) ** 2) / max(1, len(flat) - 1)
    deviation = math.sqrt(variance + OF_VARIANCE)
    return [(each - mean) / deviation if counts else np.zeros_like(each)
            for each, counts in zip(advantages, counts_B, strict=True)]  # fmt: skip


def token_weights(cfg: Config, lengths_B: Sequence[int], counts_B: Sequence[bool]) -> list[float]:
    """The weight of each sample's tokens in the loss of the train batch."""
    samples = sum(map(bool, counts_B))
    tokens = sum(length for length, counts in zip(lengths_B, counts_B, strict=True) if counts)
    divisors = {
        Normalize.token: lambda _: tokens,
        Normalize.sequence: lambda length: samples * length,
        Normalize.fixed: lambda _: samples * cfg.rollout.max_new_tokens,
    }[loss_of(cfg).normalize]
    return [1 / divisors(length) if counts else 0.0 for length, counts in zip(lengths_B, counts_B, strict=True)]


def sequence_weights(counts_B: Sequence[bool]) -> list[float]:
    samples = sum(map(bool, counts_B))
    return [1 / samples if counts else 0.0 for counts in counts_B]


# ---- the coefficient of the divergence ----


def next_coefficient(cfg: Config, before: float, divergence_of_answer: float) -> float:
    """The coefficient after a rollout: with a target it moves by as much as the divergence is off, at most a fifth."""
    loss = loss_of(cfg)
    if loss.kl_target is None:
        return before
    off = max(-MOST, min(MOST, divergence_of_answer / loss.kl_target - 1))
    return before * (1 + off * min(1.0, size_of(cfg) / loss.kl_horizon))


# ---- logged values of a rollout ----


def of_answers(terms: Mapping[str, Array], scores_N: Array, lengths_N: Sequence[int], stopped_N: Sequence[bool]
               ) -> dict[str, float]:  # fmt: skip
    """Values of drawn answers alone, as they are logged of held-out prompts too."""
    return {
        "objective/scores": float(np.mean(scores_N)),
        "response/length": float(np.mean(lengths_N)),
        "response/stopped": float(np.mean(stopped_N)),
    } | {f"reward/{name}": float(np.mean(each)) for name, each in terms.items()}


def of_gap(old: Sequence[Array], behaviour: Sequence[Array]) -> dict[str, float]:
    """Values of how far the model that draws lies from the model that is trained, over all tokens of a rollout."""
    of_sample = [a.astype(np.float64) - b.astype(np.float64) for a, b in zip(old, behaviour, strict=True)]
    gaps = np.concatenate(of_sample)
    return {
        "sampling/sampling_logp_difference/mean": math.fsum(abs(gaps)) / len(gaps),
        "sampling/sampling_logp_difference/max": float(abs(gaps).max()),
        "rollout/gap_beyond": float(np.mean(abs(gaps) > BEYOND)),
        "rollout/effective_tokens": effective(gaps),
        "rollout/effective_answers": effective(np.array([each.sum() for each in of_sample])),
    }


def effective(logs: Array) -> float:
    """The effective share of importance weights, from their logarithms: (Σw)² / (n Σw²)."""
    weights = np.exp(logs - logs.max())
    return math.fsum(weights) ** 2 / (len(logs) * math.fsum(weights**2))


def of_rollout(
    cfg: Config, number: int, kl_coef: float, scores_N: Array, lengths_N: Sequence[int], old: Sequence[Array],
    reference: Sequence[Array] | None,
) -> dict[str, float]:  # fmt: skip
    """Values of a rollout: means over its samples of sums over their tokens."""
    ratios = [np.zeros(len(a)) if reference is None else a.astype(np.float64) - reference[n].astype(np.float64)
              for n, a in enumerate(old)]  # fmt: skip
    kl = float(np.mean([ratio.sum() for ratio in ratios]))
    kind = loss_of(cfg).kl
    penalty = -kl_coef * float(np.mean([divergence(kind, ratio).sum() for ratio in ratios]))
    score = float(np.mean(scores_N))
    return {
        "objective/scores_std": float(np.std(scores_N)),
        "objective/kl": kl,
        "objective/entropy": -float(np.mean([each.sum(dtype=np.float64) for each in old])),
        "objective/non_score_reward": penalty,
        "objective/rlhf_reward": score + penalty,
        "objective/kl_coef": kl_coef,
        "response/length_max": float(max(lengths_N)),
        "rollout/staleness": float(number - drawn_after(cfg, number) // steps_each(cfg)),
        "rollout/without_signal": float(np.mean(without_signal(cfg, scores_N))),
    }


def explained_variance(returns: Sequence[Array], values: Sequence[Array]) -> float:
    """The share of the returns' variance that the critic predicts; 0 where all returns are equal."""
    r, v = (np.concatenate([each.astype(np.float64) for each in of]) for of in (returns, values))
    spread = float(((r - r.mean()) ** 2).sum())
    error = r - v
    return 1 - float(((error - error.mean()) ** 2).sum()) / spread if spread > 1e-9 * float((r**2).sum()) else 0.0
