"""A Llama and DPO written out in float64, one sequence at a time: no packing, no ring, no engine, and none of
transformers' modelling code.

Shape letters: T tokens of one sequence, n of its answer, E width, H heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlexp.config.schema import Config
from rlexp.config.schema.row_kinds import Kind
from rlexp.verify import rules as order
from rlexp.verify.recording import TokenExample
from tests.oracles.examples import SIDES
from tests.oracles.pairs import load_tokenizer, set_of

Weights = dict[str, Tensor]


def batches_of(cfg: Config, steps: int) -> list[list[TokenExample]]:
    """Return the pairs of the first train batches, by the second reader."""
    data = set_of(cfg.data, Kind.pairs, load_tokenizer(cfg))
    return [[data.train[place] for place in order.samples_of(cfg, data.sizes, step)] for step in range(1, steps + 1)]


def float64_weights(model: torch.nn.Module) -> Weights:
    return {name: p.detach().double().clone().requires_grad_() for name, p in model.named_parameters()}


def logits(weights: Weights, config, tokens_T: Tensor) -> Tensor:
    """(T, V)."""
    hidden_TE = hidden_states(weights, config, tokens_T)
    return hidden_TE @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T


def hidden_states(weights: Weights, config, tokens_T: Tensor) -> Tensor:
    hidden = weights["model.embed_tokens.weight"][tokens_T]
    cos, sin = _angles(config, len(tokens_T))
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
    """Cosines and sines in float32, as transformers computes them in a model of any precision."""
    size = config.hidden_size // config.num_attention_heads
    frequencies = 1.0 / (config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size))
    angles = torch.outer(torch.arange(length, dtype=torch.float), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().double(), angles.sin().double()


def _attention(x_TE: Tensor, layer: Weights, config, cos: Tensor, sin: Tensor) -> Tensor:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def split(name: str, count: int) -> Tensor:
        return (x_TE @ layer[f"self_attn.{name}.weight"].T).view(len(x_TE), count, -1).transpose(0, 1)

    def rotate(y_HTD: Tensor) -> Tensor:
        half = y_HTD.shape[-1] // 2
        return y_HTD * cos + torch.cat((-y_HTD[..., half:], y_HTD[..., :half]), dim=-1) * sin

    q, k, v = rotate(split("q_proj", heads)), rotate(split("k_proj", kv_heads)), split("v_proj", kv_heads)
    k, v = (y.repeat_interleave(heads // kv_heads, dim=0) for y in (k, v))
    # One head at a time, whose scores are computed again for the gradient: a long text's would take all memory.
    out_HTD = torch.stack([checkpoint(_attended, *head, use_reentrant=False) for head in zip(q, k, v, strict=True)])
    return out_HTD.transpose(0, 1).reshape(len(x_TE), -1) @ layer["self_attn.o_proj.weight"].T


def _attended(q_TD: Tensor, k_TD: Tensor, v_TD: Tensor) -> Tensor:
    later = torch.ones(len(q_TD), len(q_TD), dtype=torch.bool).triu(1)
    scores = (q_TD @ k_TD.T / q_TD.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
    return scores.softmax(-1) @ v_TD


def answer_logits(weights: Weights, config, pair: TokenExample, side: str) -> Tensor:
    """The logits from which each trained token of an answer is predicted, (n, V)."""
    tokens_T = torch.from_numpy(pair.sequence(side))
    return logits(weights, config, tokens_T)[len(pair.prompt) - 1 : -1][pair.masks[side]]


def pair_logps(weights: Weights, config, pairs: Sequence[TokenExample]) -> dict[str, Tensor]:
    """Σ log p(answer token | what precedes it) by side, (P,)."""
    sums: dict[str, list[Tensor]] = {side: [] for side in SIDES}
    for pair in pairs:
        for side in SIDES:
            logps_nV = answer_logits(weights, config, pair, side).log_softmax(-1)
            answer_n = torch.from_numpy(pair.answers[side][pair.masks[side]])
            sums[side].append(logps_nV.gather(-1, answer_n.unsqueeze(-1)).sum())
    return {side: torch.stack(each) for side, each in sums.items()}


def dpo_loss(policy: Mapping[str, Tensor], reference: Mapping[str, Tensor], beta: float) -> Tensor:
    """Equation 7 of arXiv 2305.18290, the mean over the batch."""
    chosen, rejected = (policy[side] - reference[side] for side in SIDES)
    return -torch.log(torch.sigmoid(beta * (chosen - rejected))).mean()
