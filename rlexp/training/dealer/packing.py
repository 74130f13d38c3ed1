"""Packing: a forest's segments are laid end to end, and targets are shifted before any sharding. Each rank of the ring
then takes its shard of the pack."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rlexp.config.schema.cadence import plural
from rlexp.training.dealer.forest import Forest, Share, copied, shared
from rlexp.training.ring.base import Layout, RingBatch, Window
from rlexp.training.ring.kernels.base import BlockKernel
from rlexp.training.ring.placement import Placement
from rlexp.training.types import Example, Floats, Ids, Mask, Pack, Segment, Shard
from rlexp.training.world.groups import Ring


def pack_examples(
    examples: Sequence[Example], multiple: int, *, unit: int = 1, spare: int = 0, packing: bool = True,
    share: Share | None = None, forest: Forest | None = None,
) -> Pack:  # fmt: skip
    """Pack the answers of each example, one after the other, each after its prompt.

    The pack is padded to a multiple of `multiple`, which the layout can share out, and by `spare` rows; each segment to
    a multiple of `unit`. With `packing=False` all sequences are padded to the longest of the micro-batch, as in a
    padded batch. Sequences share the beginnings that they have in common where `share` says so; None: nothing. A
    `forest` that the dealer has made says it already.
    """
    sequences = [(example.prompt, answer) for example in examples for answer in example.answers]
    masks = [mask for example in examples for _, mask in example.masked]
    return pack_sequences(sequences, multiple, unit=unit, spare=spare, packing=packing, share=share, masks=masks,
                          forest=forest)  # fmt: skip


def pack_sequences(
    sequences: Sequence[tuple[Ids, Ids]],
    multiple: int,
    *,
    unit: int = 1,
    spare: int = 0,
    packing: bool = True,
    share: Share | None = None,
    masks: Sequence[Mask | None] = (),
    forest: Forest | None = None,
) -> Pack:
    """Pack (prompt, answer) sequences. An empty micro-batch becomes a pack of padding: its rank takes part in every
    collective and adds nothing. `masks` says which tokens of each answer are trained on; None: all."""
    whole = [np.concatenate(each) for each in sequences]
    forest = forest or (copied(whole) if share is None else shared(whole, share))
    segments = _segments(forest, multiple, unit=unit, spare=spare, packing=packing)
    total = segments[-1].start + segments[-1].padded
    # Padding stays at 0, which any table of positions has.
    tokens, targets, positions = np.zeros((3, total), dtype=np.int64)
    for segment, branch in zip(segments, forest.branches, strict=False):
        tokens[segment.start : segment.start + segment.length] = branch.tokens
    places = [_places(segments, path, length) for path, length in zip(forest.paths, forest.lengths, strict=True)]
    predicting = []
    for number, (sequence, place) in enumerate(zip(whole, places, strict=True)):
        positions[place] = np.arange(len(sequence))
        targets[place[:-1]] = sequence[1:]
        # The prompt's last token predicts the answer's first; the answer's last token predicts nothing.
        answer, mask = len(sequences[number][0]) - 1, masks[number] if masks else None
        predicting.append(place[answer:-1] if mask is None else place[answer:-1][mask])
    place_N = np.concatenate([np.zeros(0, dtype=np.int64), *predicting])
    return Pack(
        torch.from_numpy(tokens),
        torch.from_numpy(targets),
        torch.from_numpy(positions),
        place_N=torch.from_numpy(place_N),
        sequence_N=torch.from_numpy(np.repeat(np.arange(len(whole)), [*map(len, predicting)])),
        segments=_with_trained(segments, place_N),
        lengths=forest.lengths,
        end_S=torch.tensor([place[-1] for place in places], dtype=torch.int64),
    )


def _segments(forest: Forest, multiple: int, *, unit: int, spare: int, packing: bool) -> tuple[Segment, ...]:
    """Lay the branches of a forest end to end, with padding."""
    lengths = [len(branch.tokens) for branch in forest.branches] or [0]
    parents = [branch.parent for branch in forest.branches] or [None]
    longest = max(lengths)
    padded = [width + -width % unit for width in (lengths if packing else [longest] * len(lengths))]
    padded[-1] += spare + (-sum(padded) % multiple if forest.branches else multiple)
    starts = accumulate(padded, initial=0)
    return tuple(map(Segment, starts, lengths, padded, parents))


def _with_trained(segments: Sequence[Segment], place_N: np.ndarray) -> tuple[Segment, ...]:
    """Count in each segment the tokens that predict one that is trained on."""
    bounds = np.searchsorted(np.unique(place_N), [segment.start for segment in segments] + [sys.maxsize])
    counts = np.diff(bounds).tolist()
    return tuple(replace(segment, trained=count) for segment, count in zip(segments, counts, strict=True))


def _places(segments: Sequence[Segment], path: Sequence[int], length: int) -> np.ndarray:
    """Return where the tokens of a sequence stand, which runs through segments."""
    ranges = [np.arange(segments[each].start, segments[each].start + segments[each].length) for each in path]
    return (ranges[0] if len(ranges) == 1 else np.concatenate(ranges))[:length]


def listed(arrays: Sequence[Floats], dtype: torch.dtype) -> Tensor:
    """Join the values of each sequence's trained tokens, (N,), in the order of a pack's list of them."""
    return torch.from_numpy(np.concatenate(arrays)).to(dtype) if arrays else torch.zeros(0, dtype=dtype)


def parted(pack: Pack, values_N: Tensor) -> list[Floats]:
    """Part the values of a pack's trained tokens by sequence."""
    lengths = torch.bincount(pack.sequence_N, minlength=pack.sequences).tolist()
    return [part.numpy() for part in values_N.split(lengths)] if pack.sequences else []


def shard_pack(
    pack: Pack, ring: Ring, layout: Layout, kernel: BlockKernel, max_length: int, windows: Sequence[Window] = (None,)
) -> Shard:
    """`windows` are those of the model's layers: attention is planned once for each kind, work is the layers' mean."""
    placement = layout.place(pack.segments, ring.size)
    attention = RingBatch(layout, pack.segments, ring, kernel, max_length)
    works = {window: layout.work(pack.segments, ring.size, window) for window in dict.fromkeys(windows)}
    for window in works:
        attention.plan(window)
    work = [sum(works[window][rank] for window in windows) / len(windows) for rank in range(ring.size)]
    index = placement.places[ring.rank]
    listed_n, row_n = _held(pack, index)
    trained_u, reads_n = np.unique(row_n, return_inverse=True)
    listed = torch.from_numpy(listed_n)
    return Shard(
        tokens_t=pack.tokens_T[index],
        targets_t=pack.targets_T[index],
        positions_t=pack.positions_T[index],
        index_t=index,
        trained_u=torch.from_numpy(trained_u),
        reads_n=torch.from_numpy(reads_n) if len(trained_u) < len(row_n) else None,
        sequence_n=pack.sequence_N[listed],
        listed_n=listed,
        sequences=pack.sequences,
        real_tokens=placement.real[ring.rank],
        sequence_tokens=sum(pack.lengths),
        most_work=max(work),
        mean_work=sum(work) / ring.size,
        most_tokens=max(placement.real),
        ring_tokens=sum(placement.real),
        widths_S=widths_of(pack, placement),
        estimate=layout.estimate(pack.segments, ring.size),
        attention=attention,
        ring=ring,
    )


def widths_of(pack: Pack, placement: Placement) -> tuple[int, ...]:
    """Return how many ranks hold tokens of each sequence: of the segment in which it ends, and of that one's
    ancestors."""
    holders: list[frozenset[int]] = []
    for segment in pack.segments:
        before = holders[segment.parent] if segment.parent is not None else frozenset()
        holders.append(before | placement.holders(range(segment.start, segment.start + segment.length)))
    starts = [segment.start for segment in pack.segments]
    return tuple(len(holders[bisect_right(starts, end) - 1]) for end in pack.end_S.tolist())


def cuts_in_words(packs: Iterable[Pack], layout: Layout, ring_size: int) -> str | None:
    """Say how many ranks hold the sequences of packs, and what is estimated of the slowest rank; None if they are all
    cut alike."""
    widths, slowest, mean = Counter[int](), 0.0, 0.0
    for pack in packs:
        if (estimate := layout.estimate(pack.segments, ring_size)) is None:
            return None
        widths.update(widths_of(pack, layout.place(pack.segments, ring_size)))
        slowest, mean = slowest + estimate[0], mean + estimate[1]
    whole, cut = widths.pop(1, 0), sorted(widths)
    ranks = f"{cut[0]} to {cut[-1]}" if cut[1:] else f"{cut[0]}" if cut else ""
    parts = [f"{plural(whole, 'sequence')} held whole by one rank"] * (whole > 0)
    parts += [f"{widths.total()} cut over {ranks} ranks"] * bool(cut)
    return f"{', '.join(parts)}; the slowest rank has {slowest / mean:.2f} times the mean work"


def _held(pack: Pack, index_t: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return which of the pack's trained tokens a rank predicts, and by which of its rows, in the rows' order."""
    row_T = np.full(len(pack.tokens_T), -1)
    row_T[index_t.numpy()] = np.arange(len(index_t))
    row_N = row_T[pack.place_N.numpy()]
    listed_n = np.flatnonzero(row_N >= 0)
    listed_n = listed_n[np.argsort(row_N[listed_n], kind="stable")]
    return listed_n, row_N[listed_n]
