"""Decoding token by token, with our own cache of keys and values.

The cache reaches the attention as a keyword argument of the model's forward call, as a ring's batch does. So the same
weights train and decode, under every engine. Rows are padded on the left, so that all write the same column.

Shape letters: B rows, q new tokens of each, K columns so far, H heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rlexp.training.ring.kernels.base import Ask

GROWTH = 64  # fewest columns by which the cache grows


class KeyValues:
    """Keys and values of a batch of rows. The first `pads_B` columns of each row are padding.

    There is room for `capacity` columns at first, and never for more than `most`, if that is given. Who knows whether
    there is padding says so: asking the device would be a wait.
    """

    def __init__(self, pads_B: Tensor, capacity: int, most: int | None = None, *, padded: bool | None = None) -> None:
        self.pads_B, self.capacity, self.most, self.length = pads_B, capacity, most, 0
        self.padded = bool((pads_B > 0).any()) if padded is None else padded
        self._held: dict[nn.Module, Tensor] = {}  # (2, B, G, columns there is room for, D)

    def add(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append a layer's new keys and values, (B, G, q, D). Return all of the layer's keys and values so far."""
        end = self.length + key.shape[2]
        held = self._held.get(module)
        if held is None:
            held = key.new_empty(2, key.shape[0], key.shape[1], max(end, self.capacity), key.shape[3])
        elif held.shape[3] < end:
            held = self._copied(held, end, slice(None))
        self._held[module] = held
        held[0][:, :, self.length : end], held[1][:, :, self.length : end] = key, value
        return held[0][:, :, :end], held[1][:, :, :end]

    def _copied(self, held: Tensor, end: int, rows: Tensor | slice) -> Tensor:
        """Copy these rows, with room for at least `end` columns; where they lack room, it grows by half."""
        before = width = held.shape[3]
        if before < end:
            width = max(end, before + max(GROWTH, before // 2))
            width = width if self.most is None else max(end, min(width, self.most))
        kept = held[:, rows, :, : self.length]
        copied = held.new_empty(2, kept.shape[1], held.shape[2], width, held.shape[4])
        copied[:, :, :, : self.length] = kept
        return copied

    def first_seen(self, window: int | None) -> int:
        """Return the first column that any new token sees."""
        return 0 if window is None else max(0, self.length + 1 - window)

    def mask(self, new: int, window: int | None = None) -> Tensor | None:
        """Return (B or 1, 1, q, K), the columns from the first seen one on that each new token sees; None if all tokens
        see all of them.

        A token sees its own row up to itself, as far back as its window. Padding sees all columns before it: nobody
        reads its result, but that must be finite.
        """
        if new == 1 and not self.padded:
            return None
        columns_K = torch.arange(self.first_seen(window), self.length + new, device=self.pads_B.device)
        queries_q = columns_K[-new:].unsqueeze(-1)
        causal_qK = columns_K <= queries_q
        if window is not None:
            causal_qK &= columns_K > queries_q - window
        if not self.padded:
            return causal_qK[None, None]
        pads = self.pads_B.view(-1, 1, 1, 1)
        return causal_qK & ((columns_K >= pads) | (queries_q < pads))

    def take(self, rows: Tensor) -> None:
        """Continue with these rows, in this order; a row may be taken several times.

        It copies layer by layer, so that only one layer exists twice at a time.
        """
        self.pads_B = self.pads_B[rows]
        for module, held in self._held.items():
            self._held[module] = self._copied(held, self.length + 1, rows)

    def tensors(self) -> Iterable[Tensor]:
        """Return the memory of each layer's keys and values, with what is not filled yet."""
        return self._held.values()


@dataclass(frozen=True)
class Decoding:
    """New tokens of a batch of rows, (B, q), which follow those in `cache`."""

    tokens_Bq: Tensor
    positions_Bq: Tensor
    cache: KeyValues
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)  # by window, made once for all layers

    def mask(self, window: int | None) -> Tensor | None:
        if window not in self.masks:
            self.masks[window] = self.cache.mask(self.tokens_Bq.shape[1], window)
        return self.masks[window]

    def finished(self) -> None:
        """Count the new tokens as read, once the forward pass is over."""
        self.cache.length += self.tokens_Bq.shape[1]


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, batch: Decoding, ask: Ask) -> Tensor:
    """Attend with (B, H, q, D) queries to the keys in the cache; return (B, q, H, D)."""
    first = batch.cache.first_seen(ask.window)
    keys, values = (x[:, :, first:] for x in batch.cache.add(module, key, value))
    rows, heads, new, size = query.shape
    if new == 1:  # a group's heads see the same columns, so they become queries of one head, whose keys are read once
        query = query.reshape(rows, keys.shape[1], -1, size)
    mask, grouped = batch.mask(ask.window), query.shape[1] != keys.shape[1]
    out_BHqD = nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=ask.scale, enable_gqa=grouped
    )
    return out_BHqD.reshape(rows, heads, new, size).transpose(1, 2)
