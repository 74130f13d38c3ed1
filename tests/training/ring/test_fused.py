"""The Triton kernels of attention, run by Triton's interpreter on the CPU, against plain torch."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.programs import python
from tests.helpers.ranks import seeded

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
HEADS, KEY_HEADS, SIZE = 4, 2, 24  # a size that is no power of 2
CASES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def block(dtype: torch.dtype, tokens: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Make an output and a log-sum-exp in the memory layout of flash kernels: heads first in the log-sum-exp."""
    out = seeded(tokens, HEADS, SIZE, dtype=torch.float32, seed=seed).to(dtype)
    return out, seeded(HEADS, tokens, dtype=torch.float32, seed=seed + 1).T


def merged(fused: bool, dtype: torch.dtype) -> list[Tensor]:
    """Merge three blocks into rows of a larger output, one of them without keys for some queries."""
    from rlexp.training.ring.kernels import fused_triton
    from rlexp.training.ring.kernels.base import merge_plain

    out = torch.zeros(40, HEADS, SIZE)
    lse = torch.full((HEADS, 40), -torch.inf).T
    rows = slice(3, 36)
    for number in range(3):
        block_out, block_lse = block(dtype, 33, seed=10 * number)
        if number != 1:
            block_lse[5:9] = -torch.inf
            block_out[5:9] = 0
        (fused_triton.merge if fused else merge_plain)(out[rows], lse[rows], block_out, block_lse)
    return [out, lse]


def added(fused: bool, dtype: torch.dtype) -> list[Tensor]:
    from rlexp.training.ring.kernels import fused_triton
    from rlexp.training.ring.kernels.fused import _add_plain

    into = seeded(2, 40, KEY_HEADS, SIZE, dtype=torch.float32)
    index = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:33]
    for rows in (None, index):
        dk, dv = (seeded(33, KEY_HEADS, SIZE, dtype=torch.float32, seed=s).to(dtype) for s in (1, 2))
        there = into[:, 3:36] if rows is None else into
        (fused_triton.add_keys if fused else _add_plain)(*there, rows, dk, dv)
    return [into]


def main() -> None:
    for name, dtype in CASES.items():
        for what in (merged, added):
            for got, wanted in zip(what(True, dtype), what(False, dtype), strict=True):
                assert torch.equal(got.isneginf(), wanted.isneginf()), (name, what)
                # Both compute in float32: the interpreter's exp and log are numpy's, 4e-7 from torch's at most.
                torch.testing.assert_close(got, wanted, rtol=2e-6, atol=2e-6)
    print("all agree")


@needs_triton
def test_the_fused_kernels_equal_plain_torch() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    done = python("-m", "tests.training.ring.test_fused", TRITON_INTERPRET="1")
    assert done.stdout == "all agree\n", done.stderr


def test_a_rehearsal_without_memory_checks_the_shapes() -> None:
    import_module("rlexp.training.ring.kernels.fused")
    with FakeTensorMode():
        out, lse = torch.empty(6, HEADS, SIZE), torch.empty(6, HEADS)
        keys, rows = torch.empty(6, KEY_HEADS, SIZE), torch.empty(4, dtype=torch.int64)
        torch.ops.rlexp.merge(out, lse, out.clone(), lse.clone())
        torch.ops.rlexp.add_keys(keys, keys.clone(), rows, keys[:4], keys[:4])
        with pytest.raises(AssertionError):
            torch.ops.rlexp.merge(out, lse, out[:3], lse)
        with pytest.raises(AssertionError):
            torch.ops.rlexp.add_keys(keys, keys.clone(), rows, keys, keys)


if __name__ == "__main__":
    main()
