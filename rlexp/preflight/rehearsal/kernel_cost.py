"""A block kernel that tells a log of the work of each call, which only the call's segments show."""

from __future__ import annotations

import torch
from torch import Tensor

from rlexp.preflight.rehearsal.log import Log
from rlexp.training.ring.kernels.base import Ask, BlockKernel, Call, Grads, segments
from rlexp.training.ring.slices import Slice

FORWARD, BACKWARD = 4, 10  # floating-point operations for each query, key and channel: two products, and five


class CountedKernel(BlockKernel):
    def __init__(self, kernel: BlockKernel, log: Log) -> None:
        self.name, self.dtypes = kernel.name, kernel.dtypes
        self.kernel, self.log = kernel, log

    def refuses(self, ask: Ask) -> str | None:
        return self.kernel.refuses(ask)

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.kernel.gradient_dtype(dtype)

    def prepare(self, call: Call, device: torch.device) -> None:
        self.kernel.prepare(call, device)

    def ready(self, x: Tensor) -> Tensor:
        return self.kernel.ready(x)

    def forward(self, q_qHD: Tensor, k_kGD: Tensor, v_kGD: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        work = FORWARD * pairs(call) * q_qHD.shape[1] * q_qHD.shape[2]
        self.log.attended(work)
        self.log.attending.add(self.log.module)
        return self.kernel.forward(q_qHD, k_kGD, v_kGD, call)

    def backward(
        self, dout_qHD: Tensor, q_qHD: Tensor, k_kGD: Tensor, v_kGD: Tensor, out_qHD: Tensor, lse_qH: Tensor, call: Call
    ) -> Grads:
        work = BACKWARD * pairs(call) * q_qHD.shape[1] * q_qHD.shape[2]
        self.log.attended(work)
        return self.kernel.backward(dout_qHD, q_qHD, k_kGD, v_kGD, out_qHD, lse_qH, call)


def pairs(call: Call) -> int:
    """Count the pairs of a query and a key that it sees."""
    total = 0
    for queries, keys, seen in segments(call):
        q, k = queries.stop - queries.start, keys.stop - keys.start
        total += q * k if seen is None else Slice(range(q), range(k), *seen).pairs()
    return total
