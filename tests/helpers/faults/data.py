"""Defects of rows, tokens, batches and packs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rlexp.training.types import Example
from tests.helpers.faults.base import CUT, CUT_ANSWERS, DATA, DEALER, MIXED, SHORT_BATCH, one
from tests.helpers.faults.plant import Change


def answers_from(cut: Callable[[Any, int], Any]) -> Change:
    """Cut the answers of a truncated pair by `cut(answer, tokens that are kept)`."""

    def change(original: Any, whole: Example, *args: Any) -> Example:
        kept: Example = original(whole, *args)
        answers = zip(whole.answers, kept.answers, strict=True)
        return replace(kept, answers=tuple(cut(answer, len(short)) for answer, short in answers))

    return change


def swapped(example: Example) -> Example:
    return replace(example, answers=example.answers[::-1])


def rejected_first(pair: Example) -> Example:
    """Swap the answers of a pair, with their masks."""
    return replace(pair, answers=pair.answers[::-1], masks=pair.masks[::-1])


def longer(original: Any, self: Any, rows: Any) -> Any:
    return original(replace(self, max_length=self.max_length + 40), rows)


def redealt(rewrite: Callable[[list[list[tuple[int, ...]]]], Any]) -> Change:
    """Rewrite the packs of all replicas. Their forests are then found when they are packed."""

    def change(original: Any, *args: Any) -> Any:
        dealt = original(*args)
        packs = [[*of_replica] for of_replica in dealt.packs]
        rewrite(packs)
        return replace(dealt, packs=tuple(map(tuple, packs)), forests=())

    return change


def twice(packs: list[list[tuple[int, ...]]]) -> None:
    packs[-1][-1] = (*packs[-1][-1][:-1], packs[0][0][0])


def not_at_all(packs: list[list[tuple[int, ...]]]) -> None:
    packs[-1][-1] = packs[-1][-1][:-1]


def all_of_the_first(packs: list[list[tuple[int, ...]]]) -> None:
    packs[:] = [packs[0]] * len(packs)


def last_packs_lost(packs: list[list[tuple[int, ...]]]) -> None:
    for of_replica in packs:
        of_replica.pop()


def repacked(rewrite: Callable[[Any, Any, slice], None]) -> Change:
    """Rewrite the tensors of a pack at the real tokens of each segment: `rewrite(pack, segment, place)`."""

    def change(original: Any, *args: Any, **kwargs: Any) -> Any:
        pack = original(*args, **kwargs)
        for number, segment in enumerate(pack.segments):
            rewrite(pack, number, slice(segment.start, segment.start + segment.length))
        return pack

    return change


def relisted(rewrite: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Change:
    """Rewrite which places of a pack predict each sequence's trained tokens: `rewrite(places, the sequence's end)`."""

    def change(original: Any, *args: Any, **kwargs: Any) -> Any:
        pack = original(*args, **kwargs)
        lists = [rewrite(pack.place_N[pack.sequence_N == number], end) for number, end in enumerate(pack.end_S)]
        owners = torch.arange(len(lists)).repeat_interleave(torch.tensor([*map(len, lists)]))
        return replace(pack, place_N=torch.cat(lists), sequence_N=owners)

    return change


def unshifted(pack: Any, _sequence: Any, at: slice) -> None:
    pack.targets_T[at.start : at.stop - 1] = pack.tokens_T[at.start : at.stop - 1]


def shifted_twice(pack: Any, _sequence: Any, at: slice) -> None:
    pack.targets_T[at.start : at.stop - 2] = pack.tokens_T[at.start + 2 : at.stop]
    pack.targets_T[at.stop - 2] = pack.targets_T[at.stop - 1]


def with_prompt(places: torch.Tensor, _end: torch.Tensor) -> torch.Tensor:
    return torch.cat((places[:1] - 1, places))


def without_first(places: torch.Tensor, _end: torch.Tensor) -> torch.Tensor:
    return places[1:]


def with_end(places: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    return torch.cat((places, end.view(1)))


def not_restarted(pack: Any, _sequence: Any, at: slice) -> None:
    pack.positions_T[at] = torch.arange(at.start, at.stop)


def off_by_one(pack: Any, _sequence: Any, at: slice) -> None:
    pack.positions_T[at] += 1


def padding_as_tokens(original: Any, *args: Any, **kwargs: Any) -> Any:
    pack = original(*args, **kwargs)
    return replace(pack, segments=tuple(replace(segment, length=segment.padded) for segment in pack.segments))


def first_half_twice(original: Any, *args: Any, **kwargs: Any) -> Any:
    order = original(*args, **kwargs)
    half = len(order) // 2
    order[half : 2 * half] = order[:half]
    return order


DEAL, UNFOUND = "dealer.deal:Dealer.deal", {"forest": None}
TOKENS, SAMPLER, PACKING = "dataset.tokens:", "dataset.sampler:", "dealer.packing:"
MIXTURE, VIEWS = "dataset.sampler:Mixture.", "dataset.views:"
DATA_FAULTS = (
    one("no end of sequence", TOKENS + "RowTokenizer._ended", lambda _, _self, tokens: tokens, "data", DATA),
    one("truncated at the wrong side", TOKENS + "cut_from_start",
        lambda _original, prompt, longest, *_bos: prompt[:longest], "data", DATA, *CUT),
    one("answers cut at their beginning", TOKENS + "truncated",
        answers_from(lambda answer, kept: answer[len(answer) - kept :]), "data", DATA, *CUT_ANSWERS),
    one("one token too many is kept", TOKENS + "truncated", answers_from(lambda answer, kept: answer[: kept + 1]),
        "data", DATA, *CUT_ANSWERS),
    one("chosen and rejected swapped", TOKENS + "RowTokenizer._example",
        lambda original, *args: swapped(original(*args)), "data", DATA),
    one("too long is not dropped", TOKENS + "Encoder.encode", longer, "data", DATA, "data.max_length=140",
        "data.too_long=drop"),
    one("another permutation", SAMPLER + "Sampler._order",
        lambda original, self, epoch: original(replace(self, seed=epoch), self.seed), "data", DATA),
    one("every epoch the same", SAMPLER + "Sampler._order", lambda original, self, _epoch: original(self, 0),
        "data", DATA, "data.size=11", "train.epochs=2", step=2),
    one("the seed is ignored", SAMPLER + "Sampler._order",
        lambda original, self, epoch: original(replace(self, seed=0), epoch), "data", DATA),
    one("not shuffled", SAMPLER + "Sampler._order",
        lambda original, self, epoch: original(replace(self, shuffle=not self.shuffle), epoch), "data", DATA),
    one("a unit is dealt twice", DEAL, redealt(twice), "data", DEALER),
    one("a unit is not dealt", DEAL, redealt(not_at_all), "data", DEALER),
    one("every replica has the same", DEAL, redealt(all_of_the_first), "data", DEALER),
    one("each replica's last pack is lost", DEAL, redealt(last_packs_lost), "data", DEALER, *SHORT_BATCH),
    one("the short batch is dropped", SAMPLER + "Sampler.steps_per_epoch",
        lambda _original, self: self.size // self.batch_size, "data", DATA, *SHORT_BATCH),
    one("the run is longer", SAMPLER + "total_steps",
        lambda original, steps_per_epoch, most, epochs: original(steps_per_epoch, most, epochs or 2), "data", DATA),
    one("targets not shifted", PACKING + "pack_sequences", repacked(unshifted), "data", DEALER),
    one("targets shifted twice", PACKING + "pack_sequences", repacked(shifted_twice), "data", DEALER),
    one("prompts are trained on", PACKING + "pack_sequences", relisted(with_prompt), "data", DEALER),
    one("the first token of an answer is not", PACKING + "pack_sequences", relisted(without_first), "data", DEALER),
    one("the end predicts too", PACKING + "pack_sequences", relisted(with_end), "data", DEALER),
    one("positions do not restart", PACKING + "pack_sequences", repacked(not_restarted), "data", DEALER),
    one("positions off by one", PACKING + "pack_sequences", repacked(off_by_one), "data", DEALER),
    one("padding counts as tokens", PACKING + "pack_sequences", padding_as_tokens, "data", DEALER),
    one("sequences in another order", PACKING + "pack_examples",
        lambda original, pairs, *args, **kwargs: original([*map(rejected_first, pairs)], *args, **kwargs | UNFOUND),
        "data", DEALER),
    one("a pack ignores masks", PACKING + "pack_sequences",
        lambda original, *args, **kwargs: original(*args, **kwargs | {"masks": ()}), "data", DEALER, base=MIXED),
    one("weights are ignored", MIXTURE + "counts", lambda _, self: self.sizes, "data", DATA, base=MIXED),
    one("samples twice in an epoch", MIXTURE + "order", first_half_twice, "data", DATA, base=MIXED),
    one("every epoch begins a source anew", MIXTURE + "_of_source",
        lambda original, self, source, count, seed, _epoch, **how: original(self, source, count, seed, 0, **how),
        "data", DATA, base=MIXED, step=2),
    one("held-out rows are trained on", VIEWS + "Places.__getitem__",
        lambda original, self, index: original(self, index) if self.held_out else index, "data", DATA, base=MIXED),
)  # fmt: skip
