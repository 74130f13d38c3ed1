"""Defects of the fused pieces, and of what a layer that is computed again keeps."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.helpers.faults.base import FP64, MODEL, RING, one

FUSED = (*FP64, "model.fused=always")
KEPT = (*FP64, "memory.checkpointing=attention")


def of_the_neighbour(original: Any, ctx: Any, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    """Divide each row by the root mean square of the row before."""
    out, again = original(ctx, x, weight, *rest)
    size = x.square().mean(-1, keepdim=True).sqrt()
    return out * size / size.roll(1, dims=-2), again


def keys_one_off(original: Any, ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Rotate keys by the position before theirs."""
    queries, _ = original(ctx, q, k, cos, sin)
    _, keys = original(ctx, q, k, cos.roll(1, dims=-2), sin.roll(1, dims=-2))
    return queries, keys


def without_its_sigmoid(original: Any, dout: Tensor, gate: Tensor, up: Tensor, kind: str) -> Any:
    _, of_up = original(dout, gate, up, kind)
    return dout * up, of_up


def without_the_stream(original: Any, dout: Tensor, _dtotal: Any, *rest: Any) -> Any:
    """Forget the gradient that comes along the residual stream."""
    return original(dout, None, *rest)


def all_but_the_last(original: Any, *args: Any) -> Any:
    """Leave the last part out of the gradient of a norm's weight."""
    dx, parts = original(*args)
    return dx, parts[:-1]


def of_the_layer_before(original: Any, self: Any, out: Tensor, lse: Tensor) -> None:
    """Keep what the attention of the layer before found, where it has the same shape."""
    before = BEFORE[-1] if BEFORE and BEFORE[-1][0].shape == out.shape else (out, lse)
    BEFORE[:] = [(out.detach(), lse.detach())]
    original(self, *before)


BEFORE: list[tuple[Tensor, Tensor]] = []
OURS = "model.fused.plain:"
FUNCTIONS = "model.fused.operators:"
FUSED_FAULTS = (
    one("a norm over the neighbour's row", FUNCTIONS + "_Norm.forward", of_the_neighbour, "log-probabilities", MODEL,
        base=FUSED),
    one("a rotary table one position off", FUNCTIONS + "_Rotate.forward", keys_one_off, "log-probabilities", MODEL,
        base=FUSED),
    one("rotated back the wrong way", OURS + "rotate",
        lambda original, q, k, cos, sin, _inverse: original(q, k, cos, sin, False), "gradient", MODEL, base=FUSED),
    one("a gate's gradient without its sigmoid", OURS + "gate_backward", without_its_sigmoid, "gradient", MODEL,
        base=FUSED),
    one("the residual stream sends no gradient back", OURS + "norm_backward", without_the_stream, "gradient", MODEL,
        base=FUSED),
    one("a norm's weight misses rows", OURS + "norm_backward", all_but_the_last, "gradient", MODEL, base=FUSED),
    one("the head's gradient is half", OURS + "logits_backward",
        lambda original, logits, targets, norm, given, *rest: original(logits, targets, norm, given * 0.5, *rest),
        "gradient", MODEL, base=FUSED),
    one("attention of the layer before", "ring.attention:KeptOutputs.add", of_the_layer_before, "gradient", RING,
        base=KEPT),
)  # fmt: skip
