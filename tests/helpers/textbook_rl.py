"""PPO and GRPO in one process, as plain loops: from the drawn tokens to the loss of a train batch.

It shares no code with the product. It uses the Llama of `tests.helpers.textbook`, in float64, one sequence at a time.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.helpers import textbook
from tests.helpers.textbook import Weights

CRITIC = "critic."


@dataclasses.dataclass
class Answer:
    """An answer as it was drawn: the prompt's tokens, the answer's tokens, and its text."""

    prompt: list[int]
    tokens: list[int]
    text: str


@dataclasses.dataclass
class Credit:
    """Values of an answer's tokens before the first step on it."""

    score: float
    old: Tensor
    reference: Tensor
    values: Tensor
    advantages: list[float]
    returns: list[float]


@dataclasses.dataclass
class Knobs:
    beta: float
    gamma: float
    lam: float
    temperature: float
    clip: float
    value_clip: float
    value_coef: float


def share_of(pattern: str, text: str) -> float:
    return sum(re.fullmatch(pattern, char) is not None for char in text) / len(text) if text else 0.0


def said(weights: Weights, config, answer: Answer, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each of the answer's tokens, and the entropy of its distribution."""
    sequence = torch.tensor(answer.prompt + answer.tokens)
    rows = textbook.logits(weights, config, sequence)[len(answer.prompt) - 1 : -1] / temperature
    logps = rows.log_softmax(-1)
    return logps[torch.arange(len(answer.tokens)), torch.tensor(answer.tokens)], -(logps.exp() * logps).sum(-1)


def valued(weights: Weights, config, answer: Answer) -> Tensor:
    """Return the critic's value before each of the answer's tokens."""
    begin = f"{CRITIC}trunk."
    trunk = {f"model.{name.removeprefix(begin)}": w for name, w in weights.items() if name.startswith(begin)}
    sequence = torch.tensor(answer.prompt + answer.tokens)
    hidden = textbook.hidden_states(trunk, config, sequence)[len(answer.prompt) - 1 : -1]
    return hidden @ weights[f"{CRITIC}head.weight"][0] + weights[f"{CRITIC}head.bias"][0]


@torch.no_grad()
def credited(policy: Weights, critic: Weights, reference: Weights, config, answer: Answer, score: float,
             knobs: Knobs) -> Credit:  # fmt: skip
    """Equations 11 and 12 of arXiv 1707.06347, from the last token; each token pays for its divergence."""
    old, _ = said(policy, config, answer, knobs.temperature)
    ref, _ = said(reference, config, answer, knobs.temperature)
    values = valued(critic, config, answer)
    rewards = [-knobs.beta * (float(o) - float(r)) for o, r in zip(old, ref, strict=True)]
    rewards[-1] += score
    advantages = [0.0] * len(rewards)
    later_value, later_advantage = 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + knobs.gamma * later_value - float(values[t])
        later_advantage = delta + knobs.gamma * knobs.lam * later_advantage
        advantages[t], later_value = later_advantage, float(values[t])
    returns = [a + float(v) for a, v in zip(advantages, values, strict=True)]
    return Credit(score, old, ref, values, advantages, returns)


def whitened(known: Sequence[Credit]) -> list[list[float]]:
    flat = [a for credit in known for a in credit.advantages]
    mean = sum(flat) / len(flat)
    deviation = (sum((a - mean) ** 2 for a in flat) / (len(flat) - 1) + 1e-8) ** 0.5
    return [[(a - mean) / deviation for a in credit.advantages] for credit in known]


def ppo(policy: Weights, critic: Weights, config, answers: Sequence[Answer], known: Sequence[Credit],
        knobs: Knobs) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """Return the loss of a train batch, summed token by token, and its metrics."""
    tokens = sum(len(answer.tokens) for answer in answers)
    policy_sum, value_sum = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    sums = dict.fromkeys(("approxkl", "clipfrac", "entropy", "ratio", "value_clipfrac"), 0.0)
    for answer, credit, advantages in zip(answers, known, whitened(known), strict=True):
        logps, entropy = said(policy, config, answer, knobs.temperature)
        values = valued(critic, config, answer)
        for t, advantage in enumerate(advantages):
            ratio = torch.exp(logps[t] - credit.old[t])
            held = ratio.clamp(1 - knobs.clip, 1 + knobs.clip)
            plain, clipped = -advantage * ratio, -advantage * held
            policy_sum = policy_sum + torch.maximum(plain, clipped)
            before = credit.values[t]
            near = torch.clamp(values[t], before - knobs.value_clip, before + knobs.value_clip)
            errors = (values[t] - credit.returns[t]) ** 2, (near - credit.returns[t]) ** 2
            value_sum = value_sum + torch.maximum(*errors) / 2
            sums["approxkl"] += float((logps[t] - credit.old[t]).detach() ** 2) / 2
            sums["clipfrac"] += float(clipped > plain)
            sums["value_clipfrac"] += float(errors[1] > errors[0])
            sums["entropy"] += float(entropy[t].detach())
            sums["ratio"] += float(ratio.detach())
    loss = policy_sum / tokens + knobs.value_coef * value_sum / tokens
    logged = {name: total / tokens for name, total in sums.items()}
    return loss, {
        "train/loss/policy_avg": float(policy_sum.detach()) / tokens,
        "train/loss/value_avg": float(value_sum.detach()) / tokens,
        "train/policy/approxkl_avg": logged["approxkl"],
        "train/policy/clipfrac_avg": logged["clipfrac"],
        "train/policy/entropy_avg": logged["entropy"],
        "train/val/ratio": logged["ratio"],
        "train/val/clipfrac_avg": logged["value_clipfrac"],
    }


def grpo_advantages(scores: Sequence[float], n_samples: int) -> list[float]:
    """Return (score − mean) / deviation of each answer, within its group (arXiv 2402.03300)."""
    advantages = []
    for first in range(0, len(scores), n_samples):
        group = scores[first : first + n_samples]
        mean = sum(group) / n_samples
        deviation = (sum((s - mean) ** 2 for s in group) / (n_samples - 1)) ** 0.5
        advantages += [(s - mean) / (deviation + 1e-4) for s in group]
    return advantages


def grpo(policy: Weights, reference: Weights, config, answers: Sequence[Answer], olds: Sequence[Tensor],
         advantages: Sequence[float], knobs: Knobs) -> Tensor:  # fmt: skip
    """Return the mean over answers of each answer's mean over its tokens, with the divergence (k3) in the loss."""
    total = torch.zeros((), dtype=torch.float64)
    for answer, old, advantage in zip(answers, olds, advantages, strict=True):
        logps, _ = said(policy, config, answer, knobs.temperature)
        with torch.no_grad():
            ref, _ = said(reference, config, answer, knobs.temperature)
        ratio = torch.exp(logps - old)
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - knobs.clip, 1 + knobs.clip) * advantage)
        divergence = torch.exp(ref - logps) - (ref - logps) - 1
        total = total + (-surrogate + knobs.beta * divergence).mean()
    return total / len(answers)
