"""A layer that is computed again does not attend again: what its attention found is kept, and used each time."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlexp.training.ring.attention import Attended, Attention, Kept, KeptOutputs
from rlexp.training.ring.kernels.base import Ask, Grads
from tests.helpers.ranks import seeded

ASK = Ask(1.0)


class Counted(Attention):
    """Attention that is only a product, and counts how often it attends."""

    def __init__(self) -> None:
        self.attended = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> tuple[Tensor, Kept]:  # noqa: ARG002
        self.attended += 1
        out = q * k * v
        return out, (q, k, v, out, q.sum(-1))

    def again(self, q: Tensor, k: Tensor, v: Tensor, attended: Attended) -> tuple[Tensor, Kept]:
        return attended[0], (q, k, v, *attended)

    def backward(self, dout: Tensor, kept: Kept, ask: Ask) -> Grads:  # noqa: ARG002
        q, k, v, *_ = kept
        return dout * k * v, dout * q * v, dout * q * k


def layer(attention: Counted, x: Tensor, weight: Tensor) -> Tensor:
    """Attend twice, the second time with what the first has given."""
    once = attention.attend(x, x + 1, x + 2, ASK)
    return attention.attend(once * 0.5, x, once, ASK) * weight


def recomputed(attention: Counted, x: Tensor, weight: Tensor, stores: list[Any] | None = None) -> Tensor:
    def contexts() -> tuple[Any, Any]:
        kept = KeptOutputs()
        if stores is not None:
            stores.append(weakref.ref(kept))
        return kept.keeping(), kept.using(within=contextlib.nullcontext())

    out: Tensor = checkpoint(layer, attention, x, weight, use_reentrant=False, context_fn=contexts)
    return out


def test_gradients_are_those_of_a_layer_that_keeps_all() -> None:
    """With two layers' graphs at once, whose backward passes come in the other order; each graph is used twice."""
    inputs = [seeded(5, 2, 3, seed=n).requires_grad_() for n in range(2)]
    weight = seeded(3, seed=7).requires_grad_()
    plain, kept = Counted(), Counted()
    wanted = [torch.autograd.grad(layer(plain, x, weight).sum(), [x, weight]) for x in inputs]
    outs = [recomputed(kept, x, weight) for x in inputs]
    for _ in range(2):
        for place in (1, 0):
            got = torch.autograd.grad(outs[place].sum(), [inputs[place], weight], retain_graph=True)
            for one, other in zip(got, wanted[place], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)
    assert kept.attended == 4, "each layer attends twice, in its forward pass"


def test_attention_that_needs_no_gradient_is_kept_too() -> None:
    """As under frozen weights: what follows it in the layer does."""
    x, weight, attention = seeded(5, 2, 3), seeded(3, seed=7).requires_grad_(), Counted()
    (got,) = torch.autograd.grad(recomputed(attention, x, weight).sum(), [weight])
    (wanted,) = torch.autograd.grad(layer(Counted(), x, weight).sum(), [weight])
    assert torch.equal(got, wanted)
    assert attention.attended == 2


def test_nothing_is_left_behind() -> None:
    """After a backward pass, a graph that is dropped, and a pass without gradient."""
    stores: list[Any] = []
    x, weight = seeded(5, 2, 3).requires_grad_(), seeded(3, seed=7)
    gc.disable()  # what only the collector finds would hold a GPU's memory until then
    try:
        recomputed(Counted(), x, weight, stores).sum().backward()
        recomputed(Counted(), x, weight, stores)
        with torch.no_grad():
            recomputed(Counted(), x, weight, stores)
        assert len(stores) == 3
        assert [store() for store in stores] == [None] * 3
    finally:
        gc.enable()
