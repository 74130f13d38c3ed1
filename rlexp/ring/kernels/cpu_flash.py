"""torch's own CPU flash kernel, segment by segment.

bfloat16 blocks are computed in float32: more exact than one bfloat16 flash call over the whole sequence (0.24 to 0.81
of its error), and the merge needs float32 outputs anyway. Alone that costs more, since this kernel's backward pass has
less to do in bfloat16. Part of it is won back where the kernel does what is not needed: in a causal call the scores of
whole blocks of 512 keys beyond the diagonal, so that such calls are cut into strips. docs/attention.md has the numbers.

A strip's mask is added to its scores, so that a key that is NaN or infinite reaches the queries of its strip that come
before it, which a causal call of the kernel's own would hide. Of finite numbers none does.

Inside, tensors are as the kernel takes them, (1, H, t, D), views of what is given. What segments and strips give is
put together once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from rlexp.ring.kernels.base import ANY, Grads, Lengths, accumulation_dtype

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Measured on one core of a Zen 4, heads of 64, in float32.
NARROW = 64  # tokens of a causal strip: of fewer, too little is computed at once; of more, too much beyond the diagonal
WHOLE = 1024  # of more the forward pass is not cut: the kernel itself stops near the diagonal
KEYS = 504  # of a call of the backward pass: with 512, rows of scores are 2 KiB apart, and it is 3 to 5 % slower
FEW = 1 << 16  # pairs of query and key, of all heads, in which a call's own 0.02 ms are lost


class CpuFlash:
    name = "cpu_flash"
    dtypes = ANY

    def ready(self, x: Tensor) -> Tensor:
        return x.to(accumulation_dtype(x.dtype))

    def forward(
        self,
        q_qHD: Tensor,
        k_kGD: Tensor,
        v_kGD: Tensor,
        q_lengths: Lengths,
        k_lengths: Lengths,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (_heads_first(self.ready(x)) for x in (q_qHD, k_kGD, v_kGD))
        of_each = zip(*_by_segment((q,), q_lengths), *_by_segment((k, v), k_lengths), strict=True)
        found = [_forward_segment(*one, causal=causal, scale=scale) for one in of_each]
        out, lse = (_joined(each) for each in zip(*found, strict=True))
        return _tokens_first(out), lse.squeeze(0).transpose(0, 1)

    def backward(
        self,
        dout_qHD: Tensor,
        q_qHD: Tensor,
        k_kGD: Tensor,
        v_kGD: Tensor,
        out_qHD: Tensor,
        lse_qH: Tensor,
        q_lengths: Lengths,
        k_lengths: Lengths,
        *,
        causal: bool,
        scale: float,
    ) -> Grads:
        dout, q, k, v, out = (_heads_first(self.ready(x)) for x in (dout_qHD, q_qHD, k_kGD, v_kGD, out_qHD))
        lse = lse_qH.transpose(0, 1).unsqueeze(0)
        of_each = zip(*_by_segment((dout, q, out, lse), q_lengths), *_by_segment((k, v), k_lengths), strict=True)
        found = [_backward_segment(*one, causal=causal, scale=scale) for one in of_each]
        dq, dk, dv = (_tokens_first(_joined(each)) for each in zip(*found, strict=True))
        return dq, dk, dv


def _heads_first(x_tHD: Tensor) -> Tensor:
    """(t, H, D) -> (1, H, t, D), a view; the kernel reads a head's elements as contiguous, whatever their stride."""
    return (x_tHD if x_tHD.stride(-1) == 1 else x_tHD.contiguous()).transpose(0, 1).unsqueeze(0)


def _tokens_first(x_1HtD: Tensor) -> Tensor:
    return x_1HtD.squeeze(0).transpose(0, 1)


def _by_segment(tensors: Sequence[Tensor], lengths: Lengths) -> list[tuple[Tensor, ...]]:
    """Where there is no segment, one without tokens."""
    return [x.split(list(lengths) or [0], dim=2) for x in tensors]


def _joined(found: Sequence[Tensor]) -> Tensor:
    """Along the tokens, which are left as the outermost dimension in memory, as the kernel has them."""
    if len(found) == 1:
        return found[0]
    return torch.cat([x.transpose(1, 2) for x in found], dim=1).transpose(1, 2)


def _forward_segment(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    queries, keys = q.shape[2], k.shape[2]
    if not (queries and keys):
        return torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
    strips = _strips(queries, NARROW, keys * q.shape[1]) if causal and queries <= WHOLE else []
    if len(strips) < 2:
        out, lse = _forward(q, k, v, 0.0, causal, attn_mask=None, scale=scale)
        return out, lse
    found = []
    for strip in strips:
        mask = _beyond(strip, q)
        given = (q[:, :, strip], k[:, :, : strip.stop], v[:, :, : strip.stop])
        found.append(_forward(*given, 0.0, False, attn_mask=mask, scale=scale))
    out, lse = (_joined(each) for each in zip(*found, strict=True))
    return out, lse


def _beyond(strip: slice, like: Tensor) -> Tensor:
    """What a strip of queries adds to its scores, up to its own last key: −inf beyond the diagonal."""
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
    dq, found = torch.zeros_like(q), []
    for strip in strips:
        # A causal strip begins at the same position as its queries, and ends before them: it is causal as it is.
        seen = slice(strip.start if causal else 0, None)
        given = (dout[:, :, seen], q[:, :, seen], k[:, :, strip], v[:, :, strip], out[:, :, seen], lse[:, :, seen])
        added, *several = _backward(*given, 0.0, causal, attn_mask=None, scale=scale)
        dq[:, :, seen] += added
        found.append(several)
    dk, dv = (_joined(each) for each in zip(*found, strict=True))
    return dq, dk, dv


def _strips(tokens: int, widest: int, across: int) -> list[slice]:
    """Even parts of so many tokens, of which each meets `across` others, of all heads."""
    count = -(-tokens // widest) if min(widest, tokens) * across >= FEW else 1
    bounds = [tokens * number // count for number in range(count + 1)]
    return list(itertools.starmap(slice, itertools.pairwise(bounds)))
