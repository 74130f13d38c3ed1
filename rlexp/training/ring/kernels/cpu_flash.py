"""torch's own CPU flash kernel, called once for each segment.

It computes bfloat16 blocks in float32. That is more exact than one bfloat16 flash call over the whole sequence (0.24 to
0.81 of its error), and the merge needs float32 outputs anyway. By itself it is slower, since the kernel's backward pass
has less to do in bfloat16. Part of that time is won back: in a causal call the kernel computes scores beyond the
diagonal, up to blocks of 512 keys, so causal calls are cut into strips. docs/attention.md has the numbers.

A strip's mask is added to its scores. So a key that is NaN or infinite reaches earlier queries of the same strip, where
the kernel's own causal call would hide it. Finite keys never do.

Inside, tensors are views in the kernel's shape, (1, H, t, D). Segments and strips are joined once, at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from rlexp.training.ring.kernels.base import BlockKernel, Call, Grads, Seen, readable
from rlexp.training.ring.selection import Lengths

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Measured on one core of a Zen 4, heads of 64, in float32.
NARROW = 64  # tokens of a causal strip: fewer make calls too small, more compute too much beyond the diagonal
WHOLE = 1024  # a longer forward pass is not cut: there the kernel itself stops near the diagonal
KEYS = 504  # most keys of a backward call: at 512, rows of scores lie 2 KiB apart, and it is 3 to 5 % slower
FEW = 1 << 16  # fewest query-key pairs of a strip without a window: a call's overhead of 0.02 ms is then small


class CpuFlash(BlockKernel):
    name = "cpu_flash"

    def forward(self, q_qHD: Tensor, k_kGD: Tensor, v_kGD: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (_heads_first(self.ready(x)) for x in (q_qHD, k_kGD, v_kGD))
        segments = zip(*_by_segment((q,), call.queries.lengths), *_by_segment((k, v), call.keys.lengths), strict=True)
        results = [_forward_segment(each, call.seen(number), scale) for number, each in enumerate(segments)]
        out, lse = (_joined(parts) for parts in zip(*results, strict=True))
        return _tokens_first(out), lse.squeeze(0).transpose(0, 1)

    def backward(
        self, dout_qHD: Tensor, q_qHD: Tensor, k_kGD: Tensor, v_kGD: Tensor, out_qHD: Tensor, lse_qH: Tensor,
        call: Call, scale: float,
    ) -> Grads:  # fmt: skip
        dout, q, k, v, out = (_heads_first(self.ready(x)) for x in (dout_qHD, q_qHD, k_kGD, v_kGD, out_qHD))
        lse = lse_qH.transpose(0, 1).unsqueeze(0)
        ours = _by_segment((dout, q, out, lse), call.queries.lengths)
        segments = zip(*ours, *_by_segment((k, v), call.keys.lengths), strict=True)
        results = [_backward_segment(each, call.seen(number), scale) for number, each in enumerate(segments)]
        dq, dk, dv = (_tokens_first(_joined(parts)) for parts in zip(*results, strict=True))
        return dq, dk, dv


def _heads_first(x_tHD: Tensor) -> Tensor:
    """View (t, H, D) as (1, H, t, D)."""
    return readable(x_tHD).transpose(0, 1).unsqueeze(0)


def _tokens_first(x_1HtD: Tensor) -> Tensor:
    return x_1HtD.squeeze(0).transpose(0, 1)


def _by_segment(tensors: Sequence[Tensor], lengths: Lengths) -> list[tuple[Tensor, ...]]:
    """Split tensors by segment; without segments, return one that has no tokens."""
    return [x.split(list(lengths) or [0], dim=2) for x in tensors]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Join along the tokens, which stay the outermost dimension in memory, as the kernel has them."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([x.transpose(1, 2) for x in parts], dim=1).transpose(1, 2)


def _forward_segment(given: Sequence[Tensor], seen: Seen | None, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = given
    queries, keys = q.shape[2], k.shape[2]
    if not (queries and keys):
        return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -torch.inf)
    window = seen[1] if seen else None
    whole = seen is None or (window is None and queries > WHOLE)
    widest = queries if whole else max(NARROW, (window or 0) // 8)
    strips = _strips(queries, widest, keys * q.shape[1], band=window is not None)
    if seen is None or (window is None and len(strips) == 1):
        return _forward(q, k, v, 0.0, seen is not None, attn_mask=None, scale=scale)
    results = []
    for strip in strips:
        first = 0 if window is None else max(0, strip.start + seen[0] - window + 1)
        near = slice(first, min(keys, strip.stop + seen[0]))
        part = (q[:, :, strip], k[:, :, near], v[:, :, near])
        results.append(_forward(*part, 0.0, False, attn_mask=_mask(strip, near, seen, q), scale=scale))
    out, lse = (_joined(parts) for parts in zip(*results, strict=True))
    return out, lse


def _mask(queries: slice, keys: slice, seen: Seen, like: Tensor) -> Tensor:
    """Return (queries, keys), with −inf where a query does not see a key."""
    rows, columns = queries.stop - queries.start, keys.stop - keys.start
    mask, last = like.new_zeros(rows, columns), queries.start + seen[0] - keys.start  # key of the first query
    beyond = min(columns, max(0, last))
    mask[:, beyond:] = like.new_full((rows, columns - beyond), -torch.inf).triu(last - beyond + 1)
    if seen[1] is not None:
        before = min(columns, max(0, last - seen[1] + rows))
        mask[:, :before] += like.new_full((rows, before), -torch.inf).tril(last - seen[1])
    return mask


def _backward_segment(given: Sequence[Tensor], seen: Seen | None, scale: float) -> Grads:
    dout, q, out, lse, k, v = given
    queries, keys = q.shape[2], k.shape[2]
    if not (queries and keys):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    window = seen[1] if seen else None
    causal = seen is not None and window is None
    widest = KEYS if seen is None else min(KEYS, max(NARROW, (window or keys) // 8))
    strips = _strips(keys, widest, queries * q.shape[1], band=window is not None)
    if len(strips) == 1 and window is None:
        return _backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=None, scale=scale)
    dq, grads = torch.zeros_like(q), []
    for strip in strips:
        # A strip of keys and the queries that see it begin at the same position, so a causal call stays one.
        some, mask = slice(strip.start if causal else 0, queries), None
        if seen is not None and window is not None:
            some = slice(max(0, strip.start - seen[0]), min(queries, strip.stop - 1 - seen[0] + window))
            mask = _mask(some, strip, seen, q)
        dout_s, q_s, out_s, lse_s = (x[:, :, some] for x in (dout, q, out, lse))
        part = (dout_s, q_s, k[:, :, strip], v[:, :, strip], out_s, lse_s)
        added, *dkv = _backward(*part, 0.0, causal, attn_mask=mask, scale=scale)
        dq[:, :, some] += added
        grads.append(dkv)
    dk, dv = (_joined(parts) for parts in zip(*grads, strict=True))
    return dq, dk, dv


def _strips(tokens: int, widest: int, across: int, *, band: bool) -> list[slice]:
    """Cut tokens into even parts of at most `widest`: those of a band always, others if the calls stay large enough.
    Each token meets `across` others, counted over all heads."""
    count = -(-tokens // widest) if band or min(widest, tokens) * across >= FEW else 1
    bounds = [tokens * number // count for number in range(count + 1)]
    return list(itertools.starmap(slice, itertools.pairwise(bounds)))
