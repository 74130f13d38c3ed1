"""Defects of loading, head and hook."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlexp.training.types import TokenLogps
from tests.helpers.faults.base import MODEL, nothing, one


def rounded_logits(original: Any, *args: Any) -> Any:
    return (original(*args) * 2**26).round() / 2**26


def scaled_mean(original: Any, *args: Any) -> Any:
    said = original(*args)
    return said._replace(mean_logits_n=said.mean_logits_n * 1.001)


def half_the_gradient(original: Any, *args: Any) -> Any:
    for at, logits_grad_nV in original(*args):
        yield at, logits_grad_nV * 0.5


def own_scale(original: Any, module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
    return original(module, query, *args, **kwargs | {"scaling": query.shape[-1] ** -0.5 * 1.01})


HEAD = "model.head:"
MODEL_FAULTS = (
    one("positions are not handed over", "model.policy:hidden_states",
        lambda original, trunk, shard: original(lambda **asked: trunk(**asked | {"position_ids": None}), shard),
        "log-probabilities", MODEL),
    one("positions off by one in the model", "model.policy:hidden_states",
        lambda original, trunk, shard: original(trunk, replace(shard, positions_t=shard.positions_t * 2)),
        "log-probabilities", MODEL),
    one("float32 in the softmax", "model.fused.plain:widened", rounded_logits, "log-probabilities", MODEL),
    one("log-probability of the token itself", HEAD + "HeadLogps.forward",
        lambda original, *args: original(*args[:-1], replace(args[-1], targets_t=args[-1].tokens_t)),
        "log-probabilities", MODEL),
    one("the head does not hand its gradient down", HEAD + "_logits_grads", half_the_gradient, "gradient", MODEL),
    one("mean logits", HEAD + "HeadLogps.forward", scaled_mean, "metrics", MODEL),
    one("nothing is frozen", "model.policy:Policy.freeze", nothing, "gradient", MODEL, "model.freeze=[*layers.0.*]"),
    one("the model's own scale", "model.hook:attention", own_scale, "log-probabilities", MODEL),
    one("random weights by another seed", "model.loading:load_model",
        lambda original, cfg, *args, **kwargs: original(replace(cfg, seed=cfg.seed + 1), *args, **kwargs),
        "log-probabilities", MODEL),
    one("the log-probabilities of the padding", HEAD + "HeadLogps.forward",
        lambda original, *args: TokenLogps(*(value if value is None else value * 0.999 for value in original(*args))),
        "log-probabilities", MODEL),
)  # fmt: skip
