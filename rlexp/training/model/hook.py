"""Our attention inside any transformers model, registered through transformers' own interfaces.

It learns of the batch from the keyword argument `ring_batch` of the model's forward call (`decoding` while answers are
drawn). So recomputation under activation checkpointing sees the right batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from rlexp.base.errors import ModelError
from rlexp.training.model.decoding import Decoding, attend
from rlexp.training.ring.base import RingBatch
from rlexp.training.ring.kernels.base import Ask, refused

NAME = "rlexp_ring"

# Arguments of a model's attention that change nothing here. Any other that is not None is a request.
INERT = {
    *("position_ids", "position_embeddings", "cache_position", "use_cache", "past_key_values", "layer_idx"),
    *("output_attentions", "output_hidden_states", "return_dict", "num_items_in_batch"),
}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    ring_batch: RingBatch | None = None,
    decoding: Decoding | None = None,
    **requests: Any,
) -> tuple[Tensor, None]:
    """Take (1, H, t, D) queries and (1, G, t, D) keys and values, and return (1, t, H, D).

    While decoding, these are (B, H, q, D), (B, G, q, D) and (B, q, H, D).
    """
    if ring_batch is None and decoding is None:
        raise ModelError(f"{type(module).__name__} is given no batch: its layers hand on no keyword arguments")
    if dropout:
        raise ModelError("attention has dropout, and its mask would depend on the layout")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"{type(module).__name__} is not causal")
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} makes its own attention mask")
    unknown = sorted(name for name, request in requests.items() if request is not None and name not in INERT)
    if unknown:
        raise ModelError(f"{type(module).__name__} asks its attention for {', '.join(unknown)}")
    if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        raise ModelError(f"{type(module).__name__} has values of another head size than its keys")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    ask = Ask(scale, sliding_window, softcap, s_aux is not None)
    if ring_batch is not None and sliding_window is not None and sliding_window >= ring_batch.max_length:
        ask = replace(ask, window=None)
    if why := refused(ask) if ring_batch is None else ring_batch.kernel.refuses(ask):
        raise ModelError(f"{type(module).__name__} asks its attention for {why}")
    if decoding is not None:
        return attend(module, query, key, value, decoding, ask), None
    assert ring_batch is not None
    q_tHD, k_tGD, v_tGD = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    return ring_batch.attend(q_tHD, k_tGD, v_tGD, ask).unsqueeze(0), None


AttentionInterface.register(NAME, attention)
