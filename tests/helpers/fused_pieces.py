"""Every operator of the fused pieces with arguments, for kernels that are compared with plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlexp.training.model.fused import plain
from tests.helpers.ranks import seeded

EPS = 1e-2  # so large that it counts
# Measured in Triton's interpreter: 5e-15, 3e-6 and 6e-3, bfloat16's last digit. A GPU's exponentials are less exact.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}
BLOCK = 8192  # logits of a row that a program reads at once
SIZES = ((5, 48), (33, 8), (3, 4100))  # rows and columns: a size that is no power of 2, and one wider than a block


def calls(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield every operator with arguments: every size, kind and option."""

    def rows(*shape: int, seed: int = 0) -> Tensor:
        return seeded(*shape, seed=seed).to(dtype)

    for (r, size), offset in zip(SIZES, (0.0, 1.0, 0.0), strict=True):
        x, residual, dout, along = (rows(r, size, seed=n) for n in range(4))
        weight = rows(size, seed=4)
        yield "norm", (x, weight, EPS, offset)
        yield "add_norm", (x, residual, weight, EPS, offset)
        scale = plain.norm(x, weight, EPS, offset)[1]
        for beside, of_weight in itertools.product((None, along), (False, True)):
            yield "norm_backward", (dout, beside, x, weight, scale, offset, of_weight)
    q, k = (rows(2, 7, heads, 24, seed=heads).transpose(1, 2) for heads in (3, 1))
    for inverse, batch in itertools.product((False, True), (1, 2)):
        yield "rotate", (q, k, rows(batch, 7, 24, seed=5), rows(batch, 7, 24, seed=6), inverse)
    for kind in plain.KINDS:
        gate, up = rows(4, 2200, seed=7).mul(3).chunk(2, dim=-1)
        yield "gate", (gate, up, kind)
        yield "gate_backward", (rows(4, 1100, seed=8), gate, up, kind)
    heights = torch.tensor([*itertools.permutations((0, 4, 8))]).repeat_interleave(BLOCK, dim=1)
    logits = rows(6, 2 * BLOCK + 808, seed=9).mul(3)
    logits += heights[:, : logits.shape[1]]  # the blocks of a row rise and fall in every order
    targets = torch.tensor([0, logits.shape[1] - 1, 17, 4000, BLOCK - 1, BLOCK])
    targets[2] = logits[2].argmax()
    for asked in (False, True):
        yield "read_logits", (logits, targets, 0.7, asked, asked, asked)
    _, norm, _, entropy, *_ = plain.read_logits(logits, targets, 0.7, True, False, False)
    given, of_entropy = (seeded(6, seed=n).to(norm.dtype) for n in (10, 11))
    for known in ((None, None), (entropy, of_entropy)):
        yield "logits_backward", (logits, targets, norm, given, *known, 0.7)


def results(kernels: Any, name: str, args: tuple[Any, ...]) -> list[Tensor]:
    args = tuple(each.clone() if each is args[0] and name == "logits_backward" else each for each in args)
    found = getattr(kernels, name)(*args)
    if name == "logits_backward":
        return [args[0]]
    return [*found] if isinstance(found, tuple) else [found]


def compare(kernels: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Hold kernels on a device to plain torch on the CPU. Distances are relative to the largest number."""
    for name, args in calls(dtype):
        there = tuple(each.to(device) if isinstance(each, Tensor) else each for each in args)
        for got, wanted in zip(results(kernels, name, there), results(plain, name, args), strict=True):
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), name
            scale = 1.0 + wanted.double().abs().max().item() if wanted.numel() else 1.0
            apart = (got.cpu().double() - wanted.double()).abs()
            assert not apart.numel() or apart.max() <= TOLERANCES[dtype] * scale, (name, dtype, float(apart.max()))
