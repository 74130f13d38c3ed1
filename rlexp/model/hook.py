"""The attention of ours that any transformers model runs, entered through transformers' own interfaces.

What it needs to know of the batch arrives as the keyword argument `ring_batch` of the model's forward call, so
that recomputation under activation checkpointing sees the right batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from rlexp.errors import ModelError
from rlexp.ring.attention import RingBatch, ring_attention

NAME = "rlexp_ring"


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    ring_batch: RingBatch | None = None,
    is_causal: bool | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """(1, H, t, D) queries and (1, G, t, D) keys and values to (1, t, H, D)."""
    if ring_batch is None:
        raise ModelError(f"attention {NAME!r}: the forward call needs `ring_batch`; generation has another path.")
    if dropout:
        raise ModelError("attention dropout: its mask would depend on the layout. Set it to 0 in the model's config.")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"{type(module).__name__}: is not causal. Only causal decoders can be trained over a ring.")
    q_tHD, k_tGD, v_tGD = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return ring_attention(q_tHD, k_tGD, v_tGD, ring_batch, scale).unsqueeze(0), None


def register() -> None:
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda *_args, **_kwargs: None)  # causality is the layout's
