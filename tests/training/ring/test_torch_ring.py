"""Our attention against torch's own context parallelism, on the same ranks.

Both share only torch's CPU flash kernel: torch has its own blocks, merging and rotation, and its own backward pass.
torch's dispatcher does not reach it on CPU, so its two functions are called directly.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.launch.joining import RankSpec
from tests.helpers.attention import HEADS, SIZE, Case, attend_rank, cases, expected_of, inputs, put_together
from tests.helpers.ranks import on_ranks

LENGTH = 592  # a multiple of 2 × 8, since torch's ranks hold equal chunks only
# Relative to the largest element. Measured: ours to torch's 2.8e-15 and 5.7e-7, torch's to full attention 2.9e-15 and
# 4.4e-7.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6}
aten = torch.ops.aten


def home() -> Any:
    """Return the module with torch's two functions: it differs by version, and both are private."""
    for name in ("_context_parallel._attention", "_attention"):
        try:
            found = importlib.import_module(f"torch.distributed.tensor.experimental.{name}")
        except ImportError:
            continue
        if hasattr(found, "_templated_ring_attention_backward"):
            return found
    return None


def theirs(spec: RankSpec, kv_heads: int, dtype: torch.dtype, balanced: bool) -> list[Tensor]:
    """Return the places in the sequence that this rank holds, and torch's result for its part of out, dq, dk, dv."""
    ring = home()
    ring._cp_options.enable_load_balance = balanced
    ring._cp_options.convert_to_f32 = dtype is not torch.float64
    world, rank = spec.world_size, spec.rank
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


def both_rank(spec: RankSpec, several: list[Case], dtypes: list[torch.dtype]) -> list[tuple[dict, list]]:
    """Return for each dtype torch's results by key/value heads and token order, and ours case by case."""
    kinds = [(kv_heads, balanced) for kv_heads in {case.kv_heads for case in several} for balanced in (True, False)]
    return [
        (
            {kind: theirs(spec, kind[0], dtype, kind[1]) for kind in kinds},
            attend_rank(spec, (LENGTH,), several, dtype, "cpu_flash"),
        )
        for dtype in dtypes
    ]


@pytest.mark.skipif(home() is None, reason="this torch has no templated ring attention")
@pytest.mark.parametrize("world", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_torch_s_own_ring_attention_agrees(world: int) -> None:
    """Compare every layout of ours, with as many key/value heads as query heads and with fewer, with both token orders
    of torch. Those are compared with full attention too, so that both cannot be wrong together."""
    several, dtypes = cases(world, (HEADS, 2)), [torch.float64, torch.float32]
    for dtype, by_rank in zip(dtypes, zip(*on_ranks(world, both_rank, several, dtypes), strict=True), strict=True):
        references = {kind: whole(world, [rank[0][kind] for rank in by_rank], dtype) for kind in by_rank[0][0]}
        for (kv_heads, balanced), reference in references.items():
            apart = gap(reference, expected_of((LENGTH,), kv_heads, dtype)[0])
            assert apart < TOLERANCE[dtype], ("torch", kv_heads, balanced, apart)
        for number, case in enumerate(several):
            ours = whole(world, [rank[1][number] for rank in by_rank], dtype)
            for balanced in (True, False):
                apart = gap(ours, references[case.kv_heads, balanced])
                assert apart < TOLERANCE[dtype], (case, balanced, apart)


def whole(world: int, results: list[list[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    """Put out, dq, dk and dv of the sequence together from the parts of all ranks."""
    return put_together(world, (LENGTH,), results, dtype)[0]


def gap(got: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of out, dq, dk and dv, each relative to its own largest element."""
    pairs = zip(got, expected, strict=True)
    gaps = torch.stack([(a.double() - b.double()).abs().max() / b.double().abs().max() for a, b in pairs])
    return float(gaps.max())  # NaN stays NaN, which is below no tolerance
