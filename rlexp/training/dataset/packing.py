"""Packing: the sequences of a micro-batch are laid end to end, and targets are shifted before any sharding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlexp.training.types import Answered, Floats, Ids, Mask, Pack, Segment


def pack_examples(
    examples: Sequence[Answered], multiple: int, *, unit: int = 1, packing: bool = True, pad_id: int = 0
) -> Pack:
    """Pack the answers of each example, one after the other, each with its own copy of the prompt.

    The pack is padded to a multiple of `multiple`, which the layout can share out, and each sequence to a multiple of
    `unit`. With `packing=False` all sequences are padded to the longest of the micro-batch, as in a padded batch.
    """
    sequences = [(example.prompt, answer) for example in examples for answer, _ in example.answers]
    masks = [mask for example in examples for _, mask in example.answers]
    return pack_sequences(sequences, multiple, unit=unit, packing=packing, pad_id=pad_id, masks=masks)


def pack_sequences(
    sequences: Sequence[tuple[Ids, Ids]],
    multiple: int,
    *,
    unit: int = 1,
    packing: bool = True,
    pad_id: int = 0,
    masks: Sequence[Mask | None] = (),
) -> Pack:
    """Pack (prompt, answer) sequences. An empty micro-batch becomes a pack of padding: its rank takes part in every
    collective and adds nothing. `masks` says which tokens of each answer are trained on; None: all."""
    lengths = [len(prompt) + len(answer) for prompt, answer in sequences]
    longest = max(lengths, default=0)
    padded = [width + -width % unit for width in (lengths if packing else [longest] * len(lengths))]
    if not sequences:
        lengths, padded = [0], [multiple]
    padded[-1] += -sum(padded) % multiple
    total = sum(padded)
    tokens = torch.full((total,), pad_id, dtype=torch.int64)
    targets = torch.full((total,), pad_id, dtype=torch.int64)
    positions = torch.zeros(total, dtype=torch.int64)
    owner = torch.full((total,), -1, dtype=torch.int64)
    segments, start = [], 0
    for number, (length, width) in enumerate(zip(lengths, padded, strict=True)):
        segments.append(Segment(start, length, width))
        positions[start : start + length] = torch.arange(length)  # padding stays at 0, which any table of positions has
        if sequences:
            prompt, answer = sequences[number]
            tokens[start : start + len(prompt)] = torch.from_numpy(prompt)
            tokens[start + len(prompt) : start + length] = torch.from_numpy(answer)
            targets[start : start + length - 1] = tokens[start + 1 : start + length]
            # The prompt's last token predicts the answer's first; the answer's last token predicts nothing.
            mask = masks[number] if masks else None
            trained = slice(start + len(prompt) - 1, start + length - 1)
            owner[trained] = torch.from_numpy(np.where(mask, number, -1)) if mask is not None else number
        start += width
    return Pack(tokens, targets, positions, owner, tuple(segments), len(sequences))


def on_pack(pack: Pack, arrays: Sequence[Floats], dtype: torch.dtype) -> Tensor:
    """Lay the values of each sequence's answer where its tokens are predicted, (T,); zero elsewhere."""
    values_T = torch.zeros(len(pack.tokens_T), dtype=dtype)
    if arrays:
        values_T[trained_places(pack)] = torch.from_numpy(np.concatenate(arrays)).to(dtype)
    return values_T


def trained_places(pack: Pack) -> Tensor:
    """Return the places in the pack whose targets are trained on, in their order."""
    return (pack.sequence_T >= 0).nonzero().squeeze(-1)
