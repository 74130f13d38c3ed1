"""A plain DPO in one process: no packing, no ring, no engine, and none of transformers' modelling code.

A right-padded batch, a Llama written out in float64, a softmax of its own, the formula of the paper. What the
product computes is held to this.

Shape letters: B sequences, T padded length, H heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlexp.types import Pair

Weights = dict[str, Tensor]
QUERIES = 512  # of the attention's score matrix at once, so that long sequences fit


def float64_weights(model: torch.nn.Module) -> Weights:
    return {name: p.detach().double().clone().requires_grad_() for name, p in model.named_parameters()}


def logits(weights: Weights, config, tokens_BT: Tensor) -> Tensor:
    hidden = hidden_states(weights, config, tokens_BT)
    return hidden @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T


def hidden_states(weights: Weights, config, tokens_BT: Tensor) -> Tensor:
    hidden = weights["model.embed_tokens.weight"][tokens_BT]
    cos, sin = _angles(config, tokens_BT.shape[1])
    for number in range(config.num_hidden_layers):
        layer = {
            name.removeprefix(f"model.layers.{number}."): w
            for name, w in weights.items()
            if name.startswith(f"model.layers.{number}.")
        }
        normed = _norm(hidden, layer["input_layernorm.weight"], config.rms_norm_eps)
        hidden = hidden + _attention(normed, layer, config, cos, sin)
        normed = _norm(hidden, layer["post_attention_layernorm.weight"], config.rms_norm_eps)
        gate = normed @ layer["mlp.gate_proj.weight"].T
        gate = gate * torch.sigmoid(gate)
        hidden = hidden + (gate * (normed @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return _norm(hidden, weights["model.norm.weight"], config.rms_norm_eps)


def _norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return gain * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def _angles(config, length: int) -> tuple[Tensor, Tensor]:
    """float32, as transformers makes them in a model of any precision."""
    size = config.hidden_size // config.num_attention_heads
    frequencies = 1.0 / (config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size))
    angles = torch.outer(torch.arange(length, dtype=torch.float), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().double(), angles.sin().double()


def _attention(x: Tensor, layer: Weights, config, cos: Tensor, sin: Tensor) -> Tensor:
    batch, length, _ = x.shape
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def split(name: str, count: int) -> Tensor:
        return (x @ layer[f"self_attn.{name}.weight"].T).view(batch, length, count, -1).transpose(1, 2)

    def rotate(y: Tensor) -> Tensor:
        half = y.shape[-1] // 2
        return y * cos + torch.cat((-y[..., half:], y[..., :half]), dim=-1) * sin

    q, k, v = rotate(split("q_proj", heads)), rotate(split("k_proj", kv_heads)), split("v_proj", kv_heads)
    k, v = (y.repeat_interleave(heads // kv_heads, dim=1) for y in (k, v))
    pieces = [
        checkpoint(_softmax_rows, q[:, :, first : first + QUERIES], k, v, first, use_reentrant=False)
        for first in range(0, length, QUERIES)
    ]
    out = torch.cat(pieces, dim=2).transpose(1, 2).reshape(batch, length, -1)
    return out @ layer["self_attn.o_proj.weight"].T


def _softmax_rows(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
    last = first + q.shape[2]  # later keys are masked for all of these queries
    scores = q @ k[:, :, :last].transpose(-1, -2) / math.sqrt(q.shape[-1])
    later = torch.arange(last) > torch.arange(first, last).unsqueeze(1)
    return torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1) @ v[:, :, :last]


def answer_logps(weights: Weights, config, sequences: Sequence[tuple[list[int], list[int]]]) -> Tensor:
    """Σ log p(answer token | what precedes it), per sequence, from a right-padded batch."""
    _, taken, mask = _answers(weights, config, sequences)
    return (taken * mask).sum(-1)


def _answers(
    weights: Weights, config, sequences: Sequence[tuple[list[int], list[int]]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, log-probabilities of the next token, and which next tokens are of the answer; all without the last."""
    width = max(len(prompt) + len(answer) for prompt, answer in sequences)
    tokens = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(sequences):
        tokens[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        mask[row, len(prompt) : len(prompt) + len(answer)] = True
    whole = logits(weights, config, tokens)[:, :-1]
    taken = whole.log_softmax(-1).gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    return whole, taken, mask[:, 1:]


def pair_logps(weights: Weights, config, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    chosen = [(pair.prompt.tolist(), pair.chosen.tolist()) for pair in pairs]
    rejected = [(pair.prompt.tolist(), pair.rejected.tolist()) for pair in pairs]
    return answer_logps(weights, config, chosen), answer_logps(weights, config, rejected)


def dpo_loss(policy: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor], beta: float) -> Tensor:
    """Equation 7 of arXiv 2305.18290, the mean over the batch."""
    ratio = (policy[0] - reference[0]) - (policy[1] - reference[1])
    return -torch.log(torch.sigmoid(beta * ratio)).mean()


@torch.no_grad()
def logged(weights: Weights, start: Weights, config, pairs: Sequence[Pair], beta: float) -> dict[str, float]:
    """Every value that TRL's users know, as a mean over the pairs (over the answers' tokens for logits)."""
    values: dict[str, float] = {}
    policy, reference = [], []
    for side in ("chosen", "rejected"):
        sequences = [(pair.prompt.tolist(), getattr(pair, side).tolist()) for pair in pairs]
        whole, taken, mask = _answers(weights, config, sequences)
        policy.append((taken * mask).sum(-1))
        reference.append(answer_logps(start, config, sequences))
        values[f"logps/{side}"] = float(policy[-1].mean())
        values[f"logits/{side}"] = float(whole.mean(-1)[mask].mean())
        values[f"rewards/{side}"] = float(beta * (policy[-1] - reference[-1]).mean())
    margins = beta * ((policy[0] - reference[0]) - (policy[1] - reference[1]))
    values["rewards/margins"] = float(margins.mean())
    values["rewards/accuracies"] = float((margins > 0).double().mean())
    values["loss"] = float(dpo_loss((policy[0], policy[1]), (reference[0], reference[1]), beta))
    values["tokens"] = sum(2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected) for pair in pairs)
    return values
