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

from rlexp.training.ring.kernels.base import ANY, Call, Grads, Lengths, accumulation_dtype

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Measured on one core of a Zen 4, heads of 64, in float32.
NARROW = 64  # tokens of a causal strip: fewer make calls too small, more compute too much beyond the diagonal
WHOLE = 1024  # a longer forward pass is not cut: there the kernel itself stops near the diagonal
KEYS = 504  # most keys of a backward call: at 512, rows of scores lie 2 KiB apart, and it is 3 to 5 % slower
FEW = 1 << 16  # fewest query-key pairs of a strip, over all heads: a call's overhead of 0.02 ms is then small


class CpuFlash:
    name = "cpu_flash"
    dtypes = ANY

    def prepare(self, q_lengths: Lengths, k_lengths: Lengths, device: torch.device) -> None:
        """Need nothing."""

    def ready(self, x: Tensor) -> Tensor:
        return x.to(accumulation_dtype(x.dtype))

    def forward(self, q_qHD: Tensor, k_kGD: Tensor, v_kGD: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        q, k, v = (_heads_first(self.ready(x)) for x in (q_qHD, k_kGD, v_kGD))
        segments = zip(*_by_segment((q,), call.q_lengths), *_by_segment((k, v), call.k_lengths), strict=True)
        results = [_forward_segment(*each, causal=call.causal, scale=call.scale) for each in segments]
        out, lse = (_joined(parts) for parts in zip(*results, strict=True))
        return _tokens_first(out), lse.squeeze(0).transpose(0, 1)

    def backward(
        self, dout_qHD: Tensor, q_qHD: Tensor, k_kGD: Tensor, v_kGD: Tensor, out_qHD: Tensor, lse_qH: Tensor, call: Call
    ) -> Grads:
        dout, q, k, v, out = (_heads_first(self.ready(x)) for x in (dout_qHD, q_qHD, k_kGD, v_kGD, out_qHD))
        lse = lse_qH.transpose(0, 1).unsqueeze(0)
        ours = _by_segment((dout, q, out, lse), call.q_lengths)
        segments = zip(*ours, *_by_segment((k, v), call.k_lengths), strict=True)
        results = [_backward_segment(*each, causal=call.causal, scale=call.scale) for each in segments]
        dq, dk, dv = (_tokens_first(_joined(parts)) for parts in zip(*results, strict=True))
        return dq, dk, dv


def _heads_first(x_tHD: Tensor) -> Tensor:
    """View (t, H, D) as (1, H, t, D). The kernel takes a head's elements for contiguous, whatever their stride."""
    return (x_tHD if x_tHD.stride(-1) == 1 else x_tHD.contiguous()).transpose(0, 1).unsqueeze(0)


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


def _forward_segment(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    queries, keys = q.shape[2], k.shape[2]
    if not (queries and keys):
        return torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
    strips = _strips(queries, NARROW, keys * q.shape[1]) if causal and queries <= WHOLE else []
    if len(strips) < 2:
        out, lse = _forward(q, k, v, 0.0, causal, attn_mask=None, scale=scale)
        return out, lse
    results = []
    for strip in strips:
        mask = _beyond(strip, q)
        given = (q[:, :, strip], k[:, :, : strip.stop], v[:, :, : strip.stop])
        results.append(_forward(*given, 0.0, False, attn_mask=mask, scale=scale))
    out, lse = (_joined(parts) for parts in zip(*results, strict=True))
    return out, lse


def _beyond(strip: slice, like: Tensor) -> Tensor:
    """Return the mask of a strip of queries over the keys up to its own last one: −inf beyond the diagonal."""
    rows = strip.stop - strip.start
    mask = like.new_zeros(rows, strip.stop)
    mask[:, strip.start :] = like.new_full((rows, rows), -torch.inf).triu(1)
    return mask


def _backward_segment(
    dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> Grads:
    queries, keys = q.shape[2], k.shape[2]
    if not (queries and keys):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    widest = min(KEYS, max(NARROW, keys // 8)) if causal else KEYS
    strips = _strips(keys, widest, queries * q.shape[1])
    if len(strips) == 1:
        dq, dk, dv = _backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=None, scale=scale)
        return dq, dk, dv
    dq, grads = torch.zeros_like(q), []
    for strip in strips:
        # A strip of keys and the queries that see it begin at the same position, so this call is causal as well.
        seen = slice(strip.start if causal else 0, None)
        given = (dout[:, :, seen], q[:, :, seen], k[:, :, strip], v[:, :, strip], out[:, :, seen], lse[:, :, seen])
        added, *dkv = _backward(*given, 0.0, causal, attn_mask=None, scale=scale)
        dq[:, :, seen] += added
        grads.append(dkv)
    dk, dv = (_joined(parts) for parts in zip(*grads, strict=True))
    return dq, dk, dv


def _strips(tokens: int, widest: int, across: int) -> list[slice]:
    """Cut tokens into even parts of at most `widest`, if the calls stay large enough.

    Each token meets `across` others, counted over all heads.
    """
    count = -(-tokens // widest) if min(widest, tokens) * across >= FEW else 1
    bounds = [tokens * number // count for number in range(count + 1)]
    return list(itertools.starmap(slice, itertools.pairwise(bounds)))
