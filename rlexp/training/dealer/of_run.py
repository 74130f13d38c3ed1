"""The dealer of a run: how much room its packs have, what they share, and what they have no room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from rlexp.config.checks.layout import Heads
from rlexp.config.checks.micro_batches import BUDGET, AtOnce, at_once, longest_sample, shares
from rlexp.config.schema import Config
from rlexp.training.dataset.views import lengths_of
from rlexp.training.dealer.deal import Dealer, Room, Size, TooLargeError, Unit, unit_of
from rlexp.training.dealer.forest import Share
from rlexp.training.types import Example

# A layer of a common model has as many operations for a token as for 6 × heads × head size pairs of a query and a key;
# and the width of heads where it is not known.
TOKEN, USUAL = 6, 2048
BLOCK = 1 << 16  # examples whose lengths are held at once


def dealer_of(cfg: Config, heads: Heads | None, replicas: int) -> Dealer:
    """Return the dealer of a run, whose model has such heads if they are known."""
    width = heads.queries * heads.size if heads else USUAL
    return Dealer(replicas, room_of(cfg, at_once(cfg)), Share() if shares(cfg) else None, TOKEN * width)


def room_of(cfg: Config, most: AtOnce) -> Room:
    """Return how much a pack of a ring takes."""
    return Room(most.samples, None if most.tokens is None else most.tokens * cfg.parallel.ring_size)


def without_room(cfg: Config, *parts: Sequence[Example]) -> str | None:
    """Say which is the largest example that no pack of a run has room for; None if all fit."""
    given = cfg.train.max_tokens_per_micro_batch
    if given is None or given >= longest_sample(cfg):
        return None
    dealer = dealer_of(cfg, None, 1)
    room = dealer.room.tokens or 0
    largest, origin = TooLargeError(0, 0), ""
    for example in chain.from_iterable(larger_than(room, examples) for examples in parts):
        try:
            dealer.deal([unit_of(example)])
        except TooLargeError as error:
            if error.tokens > largest.tokens:
                largest, origin = error, example.origin
    return too_large(largest, cfg, origin) if largest.tokens else None


def larger_than(tokens: int, examples: Sequence[Example]) -> Iterator[Example]:
    """Yield the examples that have more tokens, if their answers share nothing. The others are not read."""
    for first in range(0, len(examples), BLOCK):
        places = np.arange(first, min(first + BLOCK, len(examples)))
        lengths = lengths_of(examples, places)
        apart = (lengths[:, :1] + lengths[:, 1:]).sum(axis=1)
        yield from (examples[place] for place in places[apart > tokens].tolist())


def too_large(error: TooLargeError, cfg: Config, origin: str) -> str:
    """Say that no pack of a run has room for an example, and what would help."""
    ring, most = cfg.parallel.ring_size, at_once(cfg).tokens
    ranks = f" on each of {ring} ranks" if ring > 1 else ""
    return (
        f"{origin}: has {error.tokens:,} tokens, and {BUDGET}={most}{ranks} has no room for them. Use "
        f"{BUDGET}={-(-error.tokens // ring)} or more, leave it out, or limit the sequences: data.max_length with "
        f"data.too_long=drop or data.too_long=truncate."
    )


def shared_in_words(dealer: Dealer, units: Sequence[Unit]) -> str | None:
    """Say what the packs of some units share; None if nothing."""
    dealt = dealer.deal(units).size
    alone = sum((Size.of(range(len(each))) for unit in units for each in unit), Size())
    if dealt == alone:
        return None
    return (
        f"{dealt.tokens:,} tokens are computed in place of {alone.tokens:,}, and {dealt.pairs / alone.pairs:.0%} of "
        f"the query-key pairs"
    )
