"""What PPO and GRPO know of drawn tokens in one process, in float64, one sequence at a time, by the Llama of
`tests.helpers.textbook`. It shares no code with the product; losses are the plain loops of `policy_losses`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.helpers import textbook
from tests.helpers.policy_losses import Case, plain_gradient
from tests.helpers.textbook import Weights

CRITIC = "critic."


@dataclasses.dataclass
class Answer:
    """An answer as it was drawn: the prompt's tokens, the answer's tokens, and its text."""

    prompt: list[int]
    tokens: list[int]
    text: str


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
def known(policy: Weights, reference: Weights, config, answers: Sequence[Answer], scores: Sequence[float], each: int,
          temperature: float) -> Case:  # fmt: skip
    """Return what is known of answers before the first step on them, `each` to a prompt: what the models say."""
    everyone = range(len(answers))
    case = Case(tuple(len(answer.tokens) for answer in answers), (True,) * len(answers),
                tuple(number // each for number in everyone))  # fmt: skip
    case.scores = [*scores]
    case.old, case.reference = ([said(weights, config, answer, temperature)[0].tolist() for answer in answers]
                                for weights in (policy, reference))  # fmt: skip
    case.behaviour = case.old
    if f"{CRITIC}head.weight" in policy:
        case.old_values = [valued(policy, config, answer).tolist() for answer in answers]
    return case


def gradient_of(case: Case, weights: Weights, config, answers: Sequence[Answer], temperature: float,
                loss: Callable[[], Any]) -> dict[str, Tensor]:  # fmt: skip
    """Put into a case what the weights say now, and return the gradient of its loss by the chain rule: the plain
    loops' own by log-probabilities and values, then torch's."""
    spoken = [said(weights, config, answer, temperature) for answer in answers]
    by_name = {"logps": [logps for logps, _ in spoken]}
    if f"{CRITIC}head.weight" in weights:
        by_name["values"] = [valued(weights, config, answer) for answer in answers]
    case.entropy = [entropy.tolist() for _, entropy in spoken]
    for name, rows in by_name.items():
        setattr(case, name, [row.tolist() for row in rows])
    slopes = [torch.tensor(plain_gradient(case, name, loss), dtype=torch.float64) for name in by_name]
    total = sum((torch.cat(rows) * slope).sum() for rows, slope in zip(by_name.values(), slopes, strict=True))
    gradient = dict(zip(weights, torch.autograd.grad(total, list(weights.values())), strict=True))
    for name in gradient:  # torch gives the padding token's embedding none; an untrained model draws that token too
        if name.endswith("embed_tokens.weight"):
            gradient[name][config.pad_token_id] = 0
    return gradient
