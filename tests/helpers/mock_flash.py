"""A mock of the flash kernels for CUDA, which cannot run without a GPU."""
# ruff: noqa: ARG002

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
UNLIMITED = (-1, -1)


# flash-attn's functions are operators of torch, which take no other types than these.
OPERATORS = {
    "_flash_attn_varlen_forward": (
        "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
        "SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1, "
        "SymInt window_size_right=-1, float softcap=0., Tensor? alibi_slopes=None, bool return_softmax=False, "
        "Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False) -> "
        "(Tensor, Tensor, Tensor, Tensor)"
    ),
    "_flash_attn_varlen_backward": (
        "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a6!)? dq, "
        "Tensor(a7!)? dk, Tensor(a8!)? dv, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
        "SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, "
        "SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None, "
        "bool zero_tensors=False) -> Tensor"
    ),
}


@functools.cache
def install() -> MockFlash:
    """Install a mock as the package `flash_attn` of this process.

    It takes float64 too, in which the code that calls it can be held to float32's rounding.
    """
    flash = MockFlash((*HALF, torch.float64), strided=True)
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    for module in (package, interface):
        module.__spec__ = ModuleSpec(module.__name__, None)
    for name, schema in OPERATORS.items():
        changed = [each for each in ("dq", "dk", "dv") if f"!)? {each}," in schema]
        operator = torch.library.custom_op(
            f"rlexp_mock::{name}", as_function(getattr(flash, name)), mutates_args=changed, schema=schema
        )
        setattr(interface, name, operator)
    interface.flash_attn_varlen_func = as_function(flash.flash_attn_varlen_func)  # type: ignore[attr-defined]
    sys.modules |= {"flash_attn": package, "flash_attn.flash_attn_interface": interface}
    return flash


def as_function(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function with the method's parameters, whose names ring-flash-attn reads from functions only."""

    @functools.wraps(method)
    def function(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    function.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return function


class MockFlash:
    """One flash call over packed segments, in plain torch, under the names and parameters of each package.

    It asserts what the sources of torch and flash-attn demand of their arguments, and rounds what they round: outputs
    and gradients to the dtype of the queries, the log-sum-exp to float32.
    """

    def __init__(self, dtypes: tuple[torch.dtype, ...] = HALF, *, strided: bool = False) -> None:
        self.dtypes = dtypes
        self.strided = strided  # gradients may be written with gaps between heads, as ring-flash-attn asks for
        self.calls = 0
        self.computed = 0  # pairs of a query and a key that it sees, of every head, in all forward passes

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool,
        scale: float, window: tuple[int, int] = UNLIMITED,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        self._demand(q, k, v, cu_q, cu_k, max_q, max_k)
        out = torch.full_like(q, torch.nan)
        # Under the float64 mode of rlexp.training.model.float64 this stays float64.
        lse = q.new_full((q.shape[1], len(q)), torch.nan, dtype=torch.float32)
        for at, keys in self._segments(cu_q, cu_k):
            scores = self._scores(q[at], k[keys], causal, scale, window, max_k)
            self.computed += int(scores.isfinite().sum())
            lse[:, at] = scores.logsumexp(-1).float()
            out[at] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), self._expanded(v[keys], q)).to(q.dtype)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor,
        max_q: int, max_k: int, causal: bool, scale: float, window: tuple[int, int] = UNLIMITED,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        self._demand(q, k, v, cu_q, cu_k, max_q, max_k)
        assert dout.dtype == out.dtype == q.dtype
        assert dout.stride(-1) == out.stride(-1) == 1
        assert dout.shape == out.shape == q.shape
        assert lse.shape == (q.shape[1], len(q))
        assert lse.dtype == torch.float32 or q.dtype == torch.float64
        assert lse.is_contiguous()  # its strides are not read
        dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
        for at, keys in self._segments(cu_q, cu_k):
            wide_k, wide_v, wide_dout = self._expanded(k[keys], q), self._expanded(v[keys], q), wide(dout[at])
            scores = self._scores(q[at], k[keys], causal, scale, window, max_k)
            p = (scores - lse[:, at].to(scores.dtype).unsqueeze(-1)).exp()
            delta = (wide_dout * wide(out[at])).sum(-1).transpose(0, 1).unsqueeze(-1)
            ds = p * (torch.einsum("qhd,khd->hqk", wide_dout, wide_v) - delta) * scale
            dq[at] = torch.einsum("hqk,khd->qhd", ds, wide_k).to(q.dtype)
            for grad, weights, x in ((dk, ds, q), (dv, p, dout)):
                by_head = torch.einsum("hqk,qhd->khd", weights, wide(x[at]))
                grad[keys] = by_head.unflatten(1, (k.shape[1], -1)).sum(2).to(q.dtype)
        return dq, dk, dv

    def _demand(self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> None:
        self.calls += 1
        assert q.dtype == k.dtype == v.dtype
        assert q.dtype in self.dtypes
        assert q.shape[1] % k.shape[1] == 0
        for x in (q, k, v):
            assert x.dim() == 3
            assert x.stride(-1) == 1
        for x, cu, longest in ((q, cu_q, max_q), (k, cu_k, max_k)):
            assert cu.dtype == torch.int32
            assert cu.is_contiguous()
            assert (cu[0], cu[-1]) == (0, len(x))
            assert (cu.diff() > 0).all(), "an empty segment: its result depends on the version"
            assert isinstance(longest, int)
            assert longest >= int(cu.diff().max())
        assert max_q > 1, "the path for decoding"
        assert len(cu_q) == len(cu_k)

    def _segments(self, cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[slice, slice]]:
        for number in range(len(cu_q) - 1):
            yield slice(int(cu_q[number]), int(cu_q[number + 1])), slice(int(cu_k[number]), int(cu_k[number + 1]))

    def _expanded(self, x_kGD: Tensor, q: Tensor) -> Tensor:
        return wide(x_kGD).repeat_interleave(q.shape[1] // x_kGD.shape[1], 1)

    def _scores(
        self, q: Tensor, k: Tensor, causal: bool, scale: float, window: tuple[int, int], max_k: int
    ) -> Tensor:  # fmt: skip
        scores = torch.einsum("qhd,khd->hqk", wide(q), self._expanded(k, q)) * scale
        if window != UNLIMITED:
            left, right = window
            assert not causal
            assert left >= 0
            assert right >= 0
            if left >= max_k or right >= max_k:  # as flash-attn 2 does: a row then sees no key further than that
                left, right = min(left, max_k), min(right, max_k)
            beyond = torch.arange(len(k)) - torch.arange(len(q)).unsqueeze(1) - (len(k) - len(q))
            unseen = (beyond > right) | (beyond < -left)
            assert not unseen.all(1).any(), "rows without keys"
            return scores.masked_fill(unseen, -torch.inf)
        if not causal:
            return scores
        assert len(k) >= len(q), "rows without keys"
        later = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + len(k) - len(q))  # aligned at the bottom right
        return scores.masked_fill(later, -torch.inf)

    # torch.ops.aten, with the parameters of its schema

    def aten_forward(
        self, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
        dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float, window_size_left: int = -1,
        window_size_right: int = -1,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert (dropout_p, return_debug_mask) == (0.0, False)
        window = (window_size_left, window_size_right)
        out, lse = self.forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, window)
        return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty(()), torch.empty(0)

    def aten_backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
        rng_state: Tensor, unused: Tensor, *, scale: float, window_size_left: int = -1, window_size_right: int = -1,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert dropout_p == 0.0
        assert rng_state.dtype == torch.uint64
        return self.backward(
            grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale,
            (window_size_left, window_size_right),
        )  # fmt: skip

    # flash_attn.flash_attn_interface 2.8

    def _flash_attn_varlen_forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
        window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
        return_softmax: bool = False, block_table: Tensor | None = None, leftpad_k: Tensor | None = None,
        seqused_k: Tensor | None = None, zero_tensors: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes) == (0, 0, None)
        assert (block_table, leftpad_k, seqused_k, zero_tensors) == (None, None, None, False)
        window = (window_size_left, window_size_right)
        args = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window)
        return *self.forward(q, k, v, *args), torch.empty(0), torch.empty(2)

    def _flash_attn_varlen_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
        dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
        softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
        alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None, zero_tensors: bool = False,
    ) -> Tensor:  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes, zero_tensors) == (0, 0, None, False)
        window = (window_size_left, window_size_right)
        args = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window)
        return self._into((dq, dk, dv), self.backward(dout, q, k, v, out, softmax_lse, *args))

    def flash_attn_varlen_func(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = UNLIMITED, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
        deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert (dropout_p, window_size, softcap) == (0, UNLIMITED, 0)
        assert (alibi_slopes, return_attn_probs, block_table) == (None, False, None)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        args = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, scale)
        out: Tensor = _Func.apply(q, k, v, self, args)
        return out

    # flash_attn_interface, of flash-attn 3

    def _flash_attn_forward(
        self, q: Tensor, k: Tensor, v: Tensor, k_new: None, v_new: None, qv: None, out: None, cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor, cu_seqlens_k_new: None, seqused_q: None, seqused_k: None, max_seqlen_q: int,
        max_seqlen_k: int, page_table: None, kv_batch_idx: None, leftpad_k: None, rotary_cos: None, rotary_sin: None,
        seqlens_rotary: None, q_descale: None, k_descale: None, v_descale: None, softmax_scale: float,
        causal: bool = False, window_size: tuple[int, int] = UNLIMITED,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        args = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window_size)
        return *self.forward(q, k, v, *args), torch.empty(0), torch.empty(0)

    def _flash_attn_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor, sequed_q: None, sequed_k: None, max_seqlen_q: int, max_seqlen_k: int, dq: Tensor,
        dk: Tensor, dv: Tensor, softmax_scale: float, is_causal: bool, window_size_left: int = -1,
        window_size_right: int = -1, softcap: float = 0.0, deterministic: bool = False, sm_margin: int = 0,
    ) -> Tensor:  # fmt: skip
        assert sequed_q is None
        assert sequed_k is None
        window = (window_size_left, window_size_right)
        args = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, softmax_scale, window)
        return self._into((dq, dk, dv), self.backward(dout, q, k, v, out, softmax_lse, *args))

    # flash_attn.cute.interface, of flash-attn 4

    def _flash_attn_fwd(
        self, q: Tensor, k: Tensor, v: Tensor, qv: None = None, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, seqused_q: None = None, seqused_k: None = None,
        max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, softmax_scale: float | None = None,
        causal: bool = False, return_lse: bool = False, window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert return_lse
        window = self._both_or_none(window_size_left, window_size_right)
        args: Any = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window)
        return *self.forward(q, k, v, *args), None, None, None

    def _flash_attn_bwd(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor,
        softmax_scale: float | None = None, causal: bool = False, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
        deterministic: bool = False, window_size_left: int | None = None, window_size_right: int | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        window = self._both_or_none(window_size_left, window_size_right)
        args: Any = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window)
        return self.backward(dout, q, k, v, out, lse, *args)

    def _both_or_none(self, left: int | None, right: int | None) -> tuple[int, int]:
        """Return a window as the others take it. Its package takes None for no bound, and a negative one for a bound,
        unless both are negative."""
        if left is None or right is None:
            assert left is right, "a bound on one side"
            return UNLIMITED
        assert left >= 0
        assert right >= 0
        return left, right

    def _into(self, grads: tuple[Tensor, ...], computed: tuple[Tensor, ...]) -> Tensor:
        for grad, values in zip(grads, computed, strict=True):
            assert grad.is_contiguous() or (self.strided and grad.stride(-1) == 1)
            grad.copy_(values)
        return torch.empty(0)


class _Func(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, flash: MockFlash, args: tuple[Any, ...]) -> Tensor:
        out, lse = flash.forward(q, k, v, *args)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.flash, ctx.args = flash, args
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.flash.backward(grads[0], *ctx.saved_tensors, *ctx.args), None, None


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
