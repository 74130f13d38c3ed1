"""A rehearsal counts the kernels that attention launches, and the bytes that it copies, in a layer of a ring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlexp.preflight.rehearsal.device import rehearsed_device
from rlexp.preflight.rehearsal.log import Log
from rlexp.preflight.rehearsal.memo import Cost
from rlexp.preflight.rehearsal.mode import Rehearsing
from rlexp.preflight.rehearsal.rehearse import joined
from rlexp.training.ring.kernels import get_kernel
from rlexp.training.ring.kernels.base import Ask
from rlexp.training.ring.layouts import get_layout
from rlexp.training.world.groups import build_world
from tests.helpers.attention import forest
from tests.helpers.faults.plant import plant
from tests.helpers.rehearsals import alone


def launches(size: int, rank: int, lengths: tuple[int, ...], transport: str = "direct") -> tuple[int, int]:
    """Count the kernels that attention launches in a layer's forward and backward pass."""
    device = rehearsed_device()
    log = Log(device.type)
    with joined(rank, size), Rehearsing(log):
        ring = build_world(size).ring
        kernel = get_kernel("torch_flash", "cuda", torch.bfloat16)
        plan = get_layout("zigzag", 1, transport).plan(forest(lengths, size), ring, kernel)
        plan, tokens = plan.to(device), sum(lengths) // size
        q, k, v = (torch.randn(tokens, heads, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
                   for heads in (32, 8, 8))  # fmt: skip
        log.enter("forward")
        out = plan.attend(q, k, v, Ask(1.0))
        forward = log.counts.launches
        log.enter("backward")
        out.backward(torch.empty_like(out))
        return forward, log.counts.launches


def test_attention_launches_few_kernels() -> None:
    """On a ring of 8, for a pair: 64 to 85 forward and 93 to 114 backward before blocks were merged by one kernel each,
    and the parts of a shard were views. Rank 0 has most, since all other ranks' keys are between its chunks. With
    `neighbour` it selects what arrives at each step, keys and values apart."""
    assert alone(launches, 8, 0, (4096, 4096)) == (23, 39)
    assert alone(launches, 8, 7, (4096, 4096)) == (22, 37)
    assert alone(launches, 8, 0, (8192,)) == (18, 30)
    assert alone(launches, 8, 0, (4096, 4096), "neighbour") == (37, 56)


def units_sent(*cases: dict[str, Any]) -> list[tuple[float, float]]:
    """Count what all ranks of a ring of 8 send of a layer, in the keys and values of one: forward, and in both."""
    from bench.traffic import RING, Case, by_rank

    found = []
    for case in (Case("zigzag", **each) for each in cases):
        ranks = [by_rank(case, rank) for rank in range(RING)]
        forward, backward = (sum(sum(rank.sent[number]) for rank in ranks) / case.unit for number in range(2))
        found.append((forward, forward + backward))
    return found


@pytest.mark.slow
def test_a_ring_sends_only_what_is_seen() -> None:
    """An 8B model's layer. Before, all keys went all the way round: 7 units a rank, and 30 in both passes."""
    short, long = 16384, 131072
    whole, wide, around, *windowed = alone(
        units_sent, {"tokens": long}, {"tokens": 1024, "kernel": "plain"},
        {"tokens": long, "window": 1024, "transport": "neighbour"},
        *({"tokens": tokens, "window": 1024} for tokens in (short, long)),
    )  # fmt: skip
    assert whole == (0.75 * 8 * 7, 0.525 * 8 * 30)
    assert wide[1] == 0.7 * 8 * 30, "a kernel that returns gradients in float32"
    assert around == windowed[1], "a window's rows go straight: around the ring they would pass ranks that see none"
    assert 0 < windowed[1][1] * long <= windowed[0][1] * short, "however long the sequence is"


class Copies:
    """The bytes that attention reads and writes outside of its kernel, in both passes."""

    def __init__(self, log: Any) -> None:
        class OutsideOfTheKernel(Rehearsing):
            def cost(self, func: Any, *args: Any) -> Cost:
                return Cost() if "flash" in func._schema.name else super().cost(func, *args)

        self.mode = OutsideOfTheKernel(log)


def copied(layout: str, inner: int, heads: tuple[int, int], planted: bool = False) -> tuple[Any, Any]:
    """Count launches and bytes of a layer's copies on a rank of a ring of 8 that holds 16,384 tokens.

    Bytes are in those of one head: of its tokens in bfloat16. The queries, keys and values come as the rotary embedding
    leaves them, one head after the other.
    """
    if planted:
        plant("rlexp.training.ring.transports.heads:SharedHeads._to_heads", packed_twice, lambda: None)
    device, tokens, queries, keys = rehearsed_device(), 16384, *heads
    log = Log(device.type)
    with joined(0, 8), Copies(log).mode:
        ring = build_world(8, inner).ring
        kernel = get_kernel("torch_flash", "cuda", torch.bfloat16)
        plan = get_layout(layout, inner).plan(forest((4 * tokens, 4 * tokens), 8), ring, kernel).to(device)
        given = (torch.randn(each, tokens, 128, device=device, dtype=torch.bfloat16) for each in (queries, keys, keys))
        q, k, v = (each.transpose(0, 1).requires_grad_() for each in given)
        log.enter("forward")
        out = plan.attend(q, k, v, Ask(1.0))
        forward = log.counts
        log.enter("backward")
        out.backward(torch.empty_like(out))
        one = tokens * 128 * 2
        return tuple((each.launches, round(each.bytes / one)) for each in (forward, log.counts))


def packed_twice(original: Any, self: Any, *tensors: Tensor, **copies: int) -> tuple[Tensor, ...]:
    return tuple(each.clone() for each in original(self, *tensors, **copies))


def test_ulysses_packs_straight_into_what_it_sends() -> None:
    """Each element is read and written once to be sent; outputs are read and written once where they arrive.

    Before that, it were 512 and 656 times a head's bytes, by 7 and 12 kernels.
    """
    queries, keys = 32, 8
    sent, home = 2 * (queries + 2 * keys), 2 * queries
    assert alone(copied, "ulysses", 1, (queries, keys)) == ((4, sent + home), (4, home + sent))
    (_, forward), (_, backward) = alone(copied, "ulysses", 1, (queries, keys), True)
    assert forward == 2 * sent + home
    assert backward == 2 * home + sent


@pytest.mark.slow
def test_hybrid_packs_straight_into_what_it_sends() -> None:
    """The rest is what its rings copy: parts of queries, keys that travel, outputs merged in float32. It were 1171 and
    1588 times a head's bytes."""
    (_, forward), (_, backward) = alone(copied, "hybrid", 2, (32, 8))
    assert (forward, backward) == (819, 1035)
