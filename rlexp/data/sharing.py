"""Prompts and rows that stand more than once, found by hashes of their tokens: 16 bytes an example."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from rlexp.data.facts import Sharing
from rlexp.training.dataset.store import Store

BLOCK = 1 << 21  # tokens hashed at once
Block = tuple[np.ndarray, np.ndarray]  # tokens, and where among them each part ends


def hashes(blocks: Iterable[Block], parts: int) -> np.ndarray:
    """Return (examples, 2): a hash of each prompt, and of each whole row."""
    arrays = [_hashed(*block, parts) for block in blocks]
    return np.concatenate(arrays) if arrays else np.zeros((0, 2), np.uint64)


def blocks_of(examples: Store | Sequence[Any], parts: Any) -> Iterator[Block]:
    """Yield the tokens of a store, or of examples in memory, whose `parts` a function returns."""
    if isinstance(examples, Store):
        yield from examples.blocks(BLOCK)
        return
    ids = [part for example in examples for part in parts(example)]
    yield np.concatenate(ids) if ids else np.zeros(0, np.int32), np.cumsum([len(part) for part in ids], dtype=np.int64)


def _hashed(tokens: np.ndarray, ends: np.ndarray, parts: int) -> np.ndarray:
    """Hash each part as the sum of a random number for each (token, place); modulo 2^64."""
    starts = np.concatenate(([0], ends[:-1]))
    lengths = (ends - starts).astype(np.uint64)
    places = np.arange(len(tokens)) - np.repeat(starts, ends - starts)
    numbers = _mixed(tokens.astype(np.uint64) << np.uint64(32) | places.astype(np.uint64))
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(numbers, dtype=np.uint64)))
    of_parts = _mixed(sums[ends] - sums[starts] + lengths).reshape(-1, parts)
    of_rows = of_parts[:, 0]
    for place in range(1, parts):
        of_rows = _mixed(of_rows + _mixed(of_parts[:, place] + np.uint64(place)))
    return np.stack((of_parts[:, 0], of_rows), axis=1)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Scramble 64-bit numbers (the finalizer of SplitMix64)."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(31))


def sharing_of(digests: np.ndarray, lengths: np.ndarray, copies: int) -> Sharing:
    """Count what is shared. `lengths` is (examples, parts), of the same examples; each has `copies` of its prompt."""
    prompts, rows = digests[:, 0], digests[:, 1]
    distinct, firsts, counts = np.unique(prompts, return_index=True, return_counts=True)
    of_prompts = int(lengths[:, 0].sum())
    return Sharing(
        examples=len(rows),
        prompts=len(distinct),
        sharing=int(counts[counts > 1].sum()),
        duplicates=len(rows) - len(np.unique(rows)),
        copies=copies,
        tokens=of_prompts * copies + int(lengths[:, 1:].sum()),
        prompt_tokens=of_prompts * copies,
        saved_within=of_prompts * (copies - 1),
        saved_across=of_prompts * copies - int(lengths[firsts, 0].sum()),
    )
