"""Answering token by token: keys and values of what has been read stay in a cache of ours.

The cache reaches the attention as a keyword argument of the model's forward call, as a ring's batch does, so one set
of weights serves both, under every engine. Rows are padded on the left, so that all write the same column.

Shape letters: B rows, q new tokens of each, K columns so far, H heads, G key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

GROWTH = 64  # columns at least by which the cache grows


class KeyValues:
    """Of a batch of rows; `pads_B` columns at each row's start hold nothing."""

    def __init__(self, pads_B: Tensor, capacity: int) -> None:
        self.pads_B, self.capacity, self.length = pads_B, capacity, 0
        self._held: dict[nn.Module, Tensor] = {}  # (2, B, G, capacity, D)

    def add(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values, (B, G, q, D); all of its so far."""
        end = self.length + key.shape[2]
        held = self._held.get(module)
        if held is None or held.shape[3] < end:
            held = self._grown(held, key, end)
            self._held[module] = held
        held[0][:, :, self.length : end], held[1][:, :, self.length : end] = key, value
        return held[0][:, :, :end], held[1][:, :, :end]

    def _grown(self, held: Tensor | None, key: Tensor, end: int) -> Tensor:
        """To the capacity asked for at first; later by half of what there is."""
        before = 0 if held is None else held.shape[3]
        width = max(end, self.capacity, before + max(GROWTH, before // 2) if before else 0)
        grown = key.new_zeros(2, key.shape[0], key.shape[1], width, key.shape[3])
        if held is not None:
            grown[:, :, :, : self.length] = held[:, :, :, : self.length]
        return grown

    def mask(self, new: int) -> Tensor:
        """(B, 1, q, K): which columns each new token may see; its own row's, up to itself. A place of padding sees
        all before it: what comes of it is looked at by nobody, and must be finite."""
        columns_K = torch.arange(self.length + new, device=self.pads_B.device)
        queries_q = columns_K[self.length :].unsqueeze(-1)
        causal_qK = columns_K <= queries_q
        pads = self.pads_B.view(-1, 1, 1, 1)
        return causal_qK & ((columns_K >= pads) | (queries_q < pads))

    def take(self, rows: Tensor) -> None:
        """Go on with these rows, in this order; a row may be taken several times."""
        self.pads_B = self.pads_B[rows]
        self._held = {module: held[:, rows, :, :] for module, held in self._held.items()}

    def bytes_held(self) -> int:
        return sum(held.numel() * held.element_size() for held in self._held.values())


@dataclass(frozen=True)
class Decoding:
    """New tokens of a batch of rows, (B, q), behind what `cache` holds."""

    tokens_Bq: Tensor
    positions_Bq: Tensor
    cache: KeyValues
    mask: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", self.cache.mask(self.tokens_Bq.shape[1]))

    def finished(self) -> None:
        """The forward pass is over: the new tokens are read."""
        self.cache.length += self.tokens_Bq.shape[1]


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, batch: Decoding, scale: float) -> Tensor:
    """(B, H, q, D) queries over all that the cache holds, to (B, q, H, D)."""
    keys, values = batch.cache.add(module, key, value)
    grouped = query.shape[1] != keys.shape[1]
    out_BHqD = nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=batch.mask, scale=scale, enable_gqa=grouped
    )
    return out_BHqD.transpose(1, 2)
