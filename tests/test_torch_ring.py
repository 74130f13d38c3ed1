"""Our attention against the one that torch has for its own context parallelism, on the same ranks.

It shares nothing with ours but torch's CPU flash kernel: its blocks, its merging, its rotation and what its backward
pass sends are its own. torch's dispatcher has no way to it on CPU, so its two functions are called directly.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.launch.place import Place
from tests.ranks import on_ranks
from tests.test_attention import HEADS, SIZE, Case, attend_rank, cases, expected_of, inputs, put_together

LENGTH = 592  # its ranks hold equal chunks alone: a multiple of 2 × 8
# Of the largest element. Measured: ours to theirs 2.8e-15 and 5.7e-7, theirs to full attention 2.9e-15 and 4.4e-7.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6}
aten = torch.ops.aten


def home() -> Any:
    """The module that has both of its functions; which one differs by version, and both are private."""
    for name in ("_context_parallel._attention", "_attention"):
        try:
            found = importlib.import_module(f"torch.distributed.tensor.experimental.{name}")
        except ImportError:
            continue
        if hasattr(found, "_templated_ring_attention_backward"):
            return found
    return None


def theirs(place: Place, kv_heads: int, dtype: torch.dtype, balanced: bool) -> list[Tensor]:
    """This rank's part of out, dq, dk, dv, with the places in the sequence that it holds."""
    ring = home()
    ring._cp_options.enable_load_balance = balanced
    ring._cp_options.convert_to_f32 = dtype is not torch.float64
    world, rank = place.world_size, place.rank
    chunks = torch.arange(LENGTH).chunk(2 * world if balanced else world)
    index = torch.cat((chunks[rank], chunks[2 * world - 1 - rank])) if balanced else chunks[rank]
    q, k, v, dout = (x[index].transpose(0, 1).unsqueeze(0) for x in inputs((LENGTH,), kv_heads, dtype)[0])
    how: dict[str, Any] = {"is_causal": True, "dropout_p": 0.0, "scale": SIZE**-0.5}
    forward, backward = (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    )
    out, lse, *_ = ring._templated_ring_attention(dist.group.WORLD, 2, forward, q, k, v, **how)
    grads = ring._templated_ring_attention_backward(
        dist.group.WORLD, 2, backward, dout, "grad_out", q, k, v, out, lse, **how
    )
    return [index, *(x.squeeze(0).transpose(0, 1) for x in (out, *grads[:3]))]


def both_rank(place: Place, several: list[Case], dtypes: list[torch.dtype]) -> list[tuple[dict, list]]:
    """For each dtype, by heads of keys and token order what torch makes of it, and ours case by case."""
    kinds = [(kv_heads, balanced) for kv_heads in {case.kv_heads for case in several} for balanced in (True, False)]
    return [
        (
            {kind: theirs(place, kind[0], dtype, kind[1]) for kind in kinds},
            attend_rank(place, (LENGTH,), several, dtype, "cpu_flash"),
        )
        for dtype in dtypes
    ]


@pytest.mark.skipif(home() is None, reason="this torch has no templated ring attention")
@pytest.mark.parametrize("world", [2, 4, 8])
def test_torch_s_own_ring_attention_agrees(world: int) -> None:
    """Every layout of ours, with as many heads of keys as of queries and with fewer, against both of its token orders,
    and those against full attention, so that they are not wrong together."""
    several, dtypes = cases(world, (HEADS, 2)), [torch.float64, torch.float32]
    for dtype, by_rank in zip(dtypes, zip(*on_ranks(world, both_rank, several, dtypes), strict=True), strict=True):
        references = {kind: whole(world, [rank[0][kind] for rank in by_rank], dtype) for kind in by_rank[0][0]}
        for (kv_heads, balanced), reference in references.items():
            found = gap(reference, expected_of((LENGTH,), kv_heads, dtype)[0])
            assert found < TOLERANCE[dtype], ("torch", kv_heads, balanced, found)
        for number, case in enumerate(several):
            ours = whole(world, [rank[1][number] for rank in by_rank], dtype)
            for balanced in (True, False):
                found = gap(ours, references[case.kv_heads, balanced])
                assert found < TOLERANCE[dtype], (case, balanced, found)


def whole(world: int, results: list[list[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    """Out, dq, dk and dv of the one sequence, from the parts of all ranks."""
    return put_together(world, (LENGTH,), results, dtype)[0]


def gap(got: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of out, dq, dk and dv, each relative to its own largest element."""
    pairs = zip(got, expected, strict=True)
    found = torch.stack([(a.double() - b.double()).abs().max() / b.double().abs().max() for a, b in pairs])
    return float(found.max())  # a NaN stays one, and is below no tolerance
