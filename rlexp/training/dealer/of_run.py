"""The dealer of a run: how much room its packs have, what they share, and what they have no room for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from rlexp.config.checks.layout import Heads, gives_widths, heads_in, near, number_in, of_text, windows_in
from rlexp.config.checks.micro_batches import BUDGET, AtOnce, at_once, longest_sample, shares
from rlexp.config.schema import Config, Device
from rlexp.config.schema.losses import RewardModelConfig
from rlexp.training.dataset.views import lengths_of
from rlexp.training.dealer.deal import Dealer, Room, Size, TooLargeError, Unit, unit_of
from rlexp.training.dealer.forest import Share
from rlexp.training.ring.widths import Costs
from rlexp.training.types import Example

# A layer of a common model has as many operations for a token as for 6 × heads × head size pairs of a query and a key;
# and the width of heads where it is not known.
TOKEN, USUAL = 6, 2048
# Rates by which it is estimated what is worth cutting: operations, bytes, seconds. They are round numbers of a core and
# of an H100, since all ranks must come to the same deal, whatever GPU each of them finds. A deal moves little by them.
CORE, GPU = 5e10, 4e14
BETWEEN_PROCESSES, LINK, NETWORK = 2e9, 4e11, 5e10
MESSAGE_ON_CPU, MESSAGE_ON_GPU = 1e-3, 2e-4  # seconds of a layer for another rank from which keys come, both passes
CALL, TILE = 1e-4, 128 * 64  # a segment of a kernel's call: seconds on a CPU; on a GPU half a tile of pairs is lost
MEMORY_OF_CORE, MEMORY_OF_GPU = 1e10, 3e12  # bytes
MERGED = 40  # bytes of an element of an output, read and written in both passes where another is merged into it
PASSES = 14  # operations for a pair and an element of its head, in both passes
BLOCK = 1 << 16  # examples whose lengths are held at once


def dealer_of(cfg: Config, heads: Heads | None, replicas: int) -> Dealer:
    """Return the dealer of a run, whose model has such heads if they are known."""
    width = heads.queries * heads.size if heads else USUAL
    return Dealer(replicas, room_of(cfg, at_once(cfg)), Share() if shares(cfg) else None, TOKEN * width)


def room_of(cfg: Config, most: AtOnce) -> Room:
    """Return how much a pack of a ring takes."""
    return Room(most.samples, None if most.tokens is None else most.tokens * cfg.parallel.ring_size)


def costs_of(cfg: Config, described: Mapping[str, Any], most: AtOnce | None = None) -> Costs | None:
    """Return by what a run's packs are cut, from a model's config.json; None if all sequences are, over all ranks.
    `most` is held at once: where it is not given, as much as in training."""
    return costs_of_rank(cfg, described, most) if gives_widths(cfg) else None


def costs_of_rank(cfg: Config, described: Mapping[str, Any], most: AtOnce | None = None) -> Costs:
    """Return what a rank's part of a pack costs, whether its sequences have widths or are all cut alike."""
    heads, fields = heads_in(described) or Heads(USUAL // 64, USUAL // 64, 64), of_text(described)
    width, layers = heads.queries * heads.size, number_in(fields, "num_hidden_layers", "n_layer", "num_layers") or 1
    scores = isinstance(cfg.loss, RewardModelConfig)  # by a head that is next to nothing
    hidden, outputs = number_in(fields, "hidden_size", "n_embd", "d_model"), number_in(fields, "vocab_size")
    on_cpu, windows = cfg.launch.device is Device.cpu, windows_in(described, cfg.data.max_length)
    link = BETWEEN_PROCESSES if on_cpu else LINK if near(cfg, cfg.parallel.ring_size) else NETWORK
    pair = PASSES * width / (CORE if on_cpu else GPU)  # seconds
    # Keys and values, in both passes, and their gradients; in whatever precision, so that `verify` has the run's deals.
    sent = 3 * 2 * heads.keys * heads.size * (4 if on_cpu else 2)
    return Costs(
        token=TOKEN * width,
        trained=0.0 if scores else 6 * outputs * hidden / layers / (PASSES * width),
        row=sent / link / pair,
        merge=MERGED * width / (MEMORY_OF_CORE if on_cpu else MEMORY_OF_GPU) / pair,
        step=(MESSAGE_ON_CPU if on_cpu else MESSAGE_ON_GPU) / pair,
        piece=CALL / pair if on_cpu else TILE,
        most=most_tokens(cfg, most or at_once(cfg)),
        windows=windows if len(set(windows)) > 1 else windows[:1],
    )


def most_tokens(cfg: Config, most: AtOnce) -> int:
    """Return how many tokens a rank holds at once, at the most."""
    return most.samples * longest_sample(cfg) if most.samples is not None else most.tokens or 0


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
