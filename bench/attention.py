"""The work of a ring of N over one plain flash call, without communication, in one run.

    python bench/attention.py                       print the table
    python bench/attention.py --write docs/attention.md

All blocks of all ranks are computed here one after the other, forward, merge and backward, by the very functions
that a rank runs. The floor: a causal call over S tokens computes S²/2 scores, and so do the blocks of a zigzag
ring together; what a ring adds is the merge (per step: read and write the output once, S·H·D elements in float32)
and the smaller calls. So the ratio can come near 1 and not below.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from rlexp.config.schema import KernelName, LayoutName
from rlexp.launch.folder import git_commit
from rlexp.prove.tables import put
from rlexp.ring.attention import ring_batch
from rlexp.ring.groups import Ring
from rlexp.ring.kernels import get_kernel
from rlexp.ring.kernels.base import accumulation_dtype
from rlexp.ring.layouts import get_layout
from rlexp.ring.rotation import backward_block, empty_output, forward_block
from rlexp.types import Segment

TOKENS, HEADS, SIZE = 4096, 8, 64
RINGS = (1, 2, 4, 8)
REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(prog="python bench/attention.py", description=__doc__)
    parser.add_argument("--write", type=Path, help="put the table into this page, between its markers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["| ring | float32 | bfloat16 (blocks in float32) |", "| ---: | ---: | ---: |"]
    columns = [ratios(dtype) for dtype in (torch.float32, torch.bfloat16)]
    lines += [f"| {ring} | {columns[0][ring]:.2f} | {columns[1][ring]:.2f} |" for ring in RINGS]
    text = (
        f"Forward and backward over {TOKENS} tokens, {HEADS} heads of {SIZE}, one thread, best of {REPEATS}; "
        f"1.00 is one call of `scaled_dot_product_attention`.\nMeasured {time.strftime('%Y-%m-%d')} at commit "
        f"{(git_commit() or 'unknown')[:12]} on CPU ({platform.machine()}), torch {torch.__version__}, "
        f"by `python bench/attention.py`.\n\n" + "\n".join(lines)
    )
    print(text)
    if options.write:
        put(options.write, text)


def ratios(dtype: torch.dtype) -> dict[int, float]:
    """Best time of each ring over that of a plain call; all are run in turn, so that all meet the same noise."""
    q, k, v, dout = (
        torch.randn(TOKENS, HEADS, SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(4)
    )
    works: dict[int, Callable[[], None]] = {0: lambda: plain(q, k, v, dout)}
    works |= {ring: lambda ring=ring: whole_ring(ring, q, k, v, dout) for ring in RINGS}  # type: ignore[misc]
    best = dict.fromkeys(works, float("inf"))
    for _ in range(REPEATS):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - started)
    return {ring: best[ring] / best[0] for ring in RINGS}


def plain(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    q, k, v = (x.detach().transpose(0, 1).unsqueeze(0).requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.autograd.grad(out, (q, k, v), dout.transpose(0, 1).unsqueeze(0))


def whole_ring(size: int, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    """Every block of every rank, as if the ranks took turns on one core."""
    layout, scale = get_layout(LayoutName.zigzag), SIZE**-0.5
    ring = Ring(0, tuple(range(size)))
    batch = ring_batch([Segment(0, TOKENS, TOKENS)], ring, layout, get_kernel(KernelName.auto, "cpu"), TOKENS)
    share = TOKENS // size
    dtype = accumulation_dtype(q.dtype)
    shards = [slice(rank * share, (rank + 1) * share) for rank in range(size)]
    kvs = [torch.stack((k[shard], v[shard])) for shard in shards]
    dkvs = [torch.zeros(kv.shape, dtype=dtype) for kv in kvs]
    for rank, shard in enumerate(shards):
        out, lse = empty_output(q[shard])
        order = [(rank - step) % size for step in range(size)]
        for source in order:
            forward_block(batch, rank, source, q[shard], kvs[source], out, lse, scale)
        result, dq = out.to(q.dtype), torch.zeros_like(out)
        for source in order:
            added = backward_block(batch, rank, source, dout[shard], q[shard], kvs[source], result, lse, dq, scale)
            assert added is not None
            at, dk, dv = added
            dkvs[source][0][at] += dk
            dkvs[source][1][at] += dv


if __name__ == "__main__":
    main()
