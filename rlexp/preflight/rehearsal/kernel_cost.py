"""A block kernel that tells a log of the work of each call, which only the call's segments show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rlexp.base.kernel_rates import BACKWARD, FORWARD
from rlexp.preflight.rehearsal.log import Log
from rlexp.preflight.rehearsal.rates import Attending
from rlexp.training.ring.kernels import get_kernel
from rlexp.training.ring.kernels.base import Ask, BlockKernel, Call, Grads, segments
from rlexp.training.ring.kernels.flash import TorchFlash
from rlexp.training.ring.slices import Slice

BY_TORCH = ("flash_attn", "flash_attn_3")  # torch's copy of flash-attn 2 stands in for them in a rehearsal


def rehearsed_kernel(log: Log, *asked: Any) -> CountedKernel:
    """Return the kernel that `get_kernel` returns, as it can be called in a rehearsal: without any package."""
    kernel = get_kernel(*asked)
    return CountedKernel(kernel, log, TorchFlash() if kernel.name in BY_TORCH else None)


class CountedKernel(BlockKernel):
    def __init__(self, kernel: BlockKernel, log: Log, stand_in: BlockKernel | None = None) -> None:
        self.name, self.dtypes, self.generation = kernel.name, kernel.dtypes, kernel.generation
        self.kernel, self.log = stand_in or kernel, log

    def refuses(self, ask: Ask) -> str | None:
        return self.kernel.refuses(ask)

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.kernel.gradient_dtype(dtype)

    def prepare(self, calls: Iterable[Call], device: torch.device) -> None:
        self.kernel.prepare(calls, device)

    def ready(self, x: Tensor) -> Tensor:
        return self.kernel.ready(x)

    def forward(self, q_qHD: Tensor, k_kGD: Tensor, v_kGD: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        self._count(FORWARD, q_qHD, call)
        self.log.attending.add(self.log.module)
        return self.kernel.forward(q_qHD, k_kGD, v_kGD, call, scale)

    def backward(
        self, dout_qHD: Tensor, q_qHD: Tensor, k_kGD: Tensor, v_kGD: Tensor, out_qHD: Tensor, lse_qH: Tensor,
        call: Call, scale: float,
    ) -> Grads:  # fmt: skip
        self._count(BACKWARD, q_qHD, call)
        return self.kernel.backward(dout_qHD, q_qHD, k_kGD, v_kGD, out_qHD, lse_qH, call, scale)

    def _count(self, operations: int, q_qHD: Tensor, call: Call) -> None:
        _, heads, size = q_qHD.shape
        for tokens, number in by_length(call).items():
            by = Attending(self.name, size, tokens, backward=operations == BACKWARD)
            self.log.attended(operations * number * heads * size, by)


def by_length(call: Call) -> Counter[int]:
    """Count the pairs by the tokens of the causal sequence whose queries see as many keys."""
    counts: Counter[int] = Counter()
    for queries, keys, seen in segments(call):
        q, k = queries.stop - queries.start, keys.stop - keys.start
        number = q * k if seen is None else Slice(range(q), range(k), *seen).pairs()
        counts[max(1, 2 * number // q)] += number
    return counts
