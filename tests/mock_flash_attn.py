"""A mock of flash-attn's interface, which needs CUDA: its three functions for packed sequences, written out.

What the real ones demand of their arguments is asserted, and what they round is rounded: outputs and gradients to the
dtype of the queries, the log-sum-exp to float32. Unlike them it also takes float64, in which the code that calls it can
be held to float32's rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

UNLIMITED = (-1, -1)
computed = 0  # pairs of a query and a key that it sees, of every head, in all forward calls of this process


def install() -> None:
    """As the package `flash_attn` of this process."""
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    for module in (package, interface):
        module.__spec__ = ModuleSpec(module.__name__, None)
    interface._flash_attn_varlen_forward = _flash_attn_varlen_forward  # type: ignore[attr-defined]
    interface._flash_attn_varlen_backward = _flash_attn_varlen_backward  # type: ignore[attr-defined]
    interface.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    sys.modules |= {"flash_attn": package, "flash_attn.flash_attn_interface": interface}


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Any = None, return_softmax: bool = False, block_table: Any = None,
    leftpad_k: Any = None, seqused_k: Any = None, zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0, *UNLIMITED, 0, None)
    assert all(each.stride(-1) == 1 for each in (q, k, v))
    global computed
    out, lse = torch.full_like(q, torch.nan), q.new_full((q.shape[1], len(q)), torch.nan, dtype=torch.float32)
    for at, keys in _sequences(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        scores, _, values = _scores(q[at], k[keys], v[keys], softmax_scale, causal)
        computed += int(scores.isfinite().sum())
        lse[:, at] = scores.logsumexp(-1).float()
        out[at] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    return out, lse, None, None


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: Any, deterministic: bool, rng_state: Any = None, zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0, *UNLIMITED, 0, None)
    assert all(each.stride(-1) == 1 for each in (q, k, v, out, dq, dk, dv))
    assert softmax_lse.shape == (q.shape[1], len(q))
    assert softmax_lse.is_contiguous()
    delta = torch.einsum("qhd,qhd->hq", _wide(dout), _wide(out))
    for at, keys in _sequences(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        scores, wide_k, wide_v = _scores(q[at], k[keys], v[keys], softmax_scale, causal)
        weights = (scores - softmax_lse[:, at].to(scores.dtype).unsqueeze(-1)).exp()
        dweights = torch.einsum("qhd,khd->hqk", _wide(dout[at]), wide_v)
        dscores = weights * (dweights - delta[:, at].unsqueeze(-1)) * softmax_scale
        dq[at] = torch.einsum("hqk,khd->qhd", dscores, wide_k).to(dq.dtype)
        dk[keys] = _narrow(torch.einsum("hqk,qhd->khd", dscores, _wide(q[at])), k)
        dv[keys] = _narrow(torch.einsum("hqk,qhd->khd", weights, _wide(dout[at])), v)
    return delta


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    where = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, scale, causal)
    out: Tensor = _Func.apply(q, k, v, where, deterministic)
    return out


class _Func(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, where: tuple[Any, ...], deterministic: bool) -> Tensor:
        out, lse, _, _ = _flash_attn_varlen_forward(q, k, v, *where)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = (*where, *UNLIMITED, 0.0, None, deterministic)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(each) for each in (q, k, v))
        _flash_attn_varlen_backward(grads[0], q, k, v, out, lse, dq, dk, dv, *ctx.rest)
        return dq, dk, dv, None, None


def _sequences(
    q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int
) -> Iterator[tuple[slice, slice]]:
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert len(cu_q) == len(cu_k)
    assert (int(cu_q[0]), int(cu_q[-1]), int(cu_k[0]), int(cu_k[-1])) == (0, len(q), 0, len(k))
    assert int(cu_q.diff().max()) <= longest_q
    assert int(cu_k.diff().max()) <= longest_k
    for place in range(len(cu_q) - 1):
        yield slice(int(cu_q[place]), int(cu_q[place + 1])), slice(int(cu_k[place]), int(cu_k[place + 1]))


def _scores(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(H, q, k), and the keys and values of every head. Causality is aligned to the end of both, as flash-attn's is."""
    serves = q.shape[1] // k.shape[1]
    k, v = (_wide(each).repeat_interleave(serves, 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", _wide(q), k) * scale
    if causal:
        assert len(k) >= len(q), "rows without keys"
        later = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + len(k) - len(q))
        scores = scores.masked_fill(later, -torch.inf)
    return scores, k, v


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _narrow(x_kHD: Tensor, like_kGD: Tensor) -> Tensor:
    """The gradients of the heads of queries that a head of keys serves, added up."""
    return x_kHD.unflatten(1, (like_kGD.shape[1], -1)).sum(2).to(like_kGD.dtype)
