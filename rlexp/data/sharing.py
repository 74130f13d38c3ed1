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
    arrays = []
    for tokens, ends in blocks:
        of_parts = [hash(part.tobytes()) for part in np.split(tokens, ends)[:-1]]
        rows = (of_parts[first : first + parts] for first in range(0, len(of_parts), parts))
        arrays.append(np.array([(row[0], hash(tuple(row))) for row in rows], np.int64).reshape(-1, 2))
    return np.concatenate(arrays) if arrays else np.zeros((0, 2), np.int64)


def blocks_of(examples: Store | Sequence[Any], parts: Any) -> Iterator[Block]:
    """Yield the tokens of a store, or of examples in memory, whose `parts` a function returns."""
    if isinstance(examples, Store):
        yield from examples.blocks(BLOCK)
        return
    ids = [part for example in examples for part in parts(example)]
    yield np.concatenate(ids) if ids else np.zeros(0, np.int32), np.cumsum([len(part) for part in ids], dtype=np.int64)


def sharing_of(digests: np.ndarray, lengths: np.ndarray, copies: int) -> Sharing:
    """Count what is shared. `lengths` is (examples, parts), of the same examples; each has `copies` of its prompt."""
    prompts, rows = digests[:, 0], digests[:, 1]
    distinct, firsts, counts = np.unique(prompts, return_index=True, return_counts=True)
    of_prompts = int(lengths[:, 0].sum())
    every = of_prompts * copies
    return Sharing(
        examples=len(rows), prompts=len(distinct), sharing=int(counts[counts > 1].sum()),
        duplicates=len(rows) - len(np.unique(rows)), copies=copies, tokens=every + int(lengths[:, 1:].sum()),
        prompt_tokens=every, saved_within=every - of_prompts, saved_across=every - int(lengths[firsts, 0].sum()),
    )  # fmt: skip
