"""What the packs of the first steps are like on rings of several sizes: padding, and how evenly a ring shares them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlexp.base.errors import ConfigError
from rlexp.config import sizes
from rlexp.config.checks.layout import WITH_WIDTHS, check_layout, choose, described, heads_of
from rlexp.config.checks.micro_batches import shares, size_in_words
from rlexp.config.schema import BackendName, Config, Device, LayoutName, with_values
from rlexp.config.schema.cadence import plural
from rlexp.config.schema.row_kinds import Kind
from rlexp.data.facts import RingFacts
from rlexp.data.read_rows import Rows
from rlexp.training.dataset.sampler import Batch, Sampler
from rlexp.training.dealer.deal import Dealer, TooLargeError, Unit
from rlexp.training.dealer.forest import Share
from rlexp.training.dealer.of_run import costs_of_rank, dealer_of, too_large
from rlexp.training.dealer.packing import pack_sequences, widths_of
from rlexp.training.ring.layouts import Layout
from rlexp.training.ring.widths import Costs, even
from rlexp.training.train.build import build_layout
from rlexp.training.train.rollout_supply import samples_of_step
from rlexp.training.types import Example, Ids, Segment

SIZES = (1, 2, 4, 8)
STEPS = 32  # that are looked at
MOST_SAMPLES, MOST_TOKENS = 2048, 1 << 22  # after which no further step is


@dataclass
class _Seen:
    """Sums over packs."""

    real: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})  # by whether sequences are packed
    held: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})  # with padding
    sequences: int = 0  # tokens of all sequences
    most_work: float = 0.0
    mean_work: float = 0.0
    most_tokens: int = 0
    mean_tokens: float = 0.0
    widths: list[int] = field(default_factory=list)  # ranks that hold each sequence
    packs: int = 0  # of a replica, in all steps
    slowest: float = 0.0  # the estimate for the slowest replica, over all steps


@dataclass(frozen=True)
class _Shape:
    """A ring of some size in this run, with as many replicas as the run's ranks make."""

    cfg: Config
    size: int
    replicas: int
    layout: Layout
    name: str
    dealer: Dealer
    windows: tuple[int | None, ...]  # of the model's layers
    costs: Costs | None  # by which a step is estimated; None: its layout has no estimate

    @property
    def ranks(self) -> int:
        return self.size * self.replicas


def rings_of(cfg: Config, rows: Rows, sampler: Sampler) -> tuple[tuple[RingFacts, ...], str]:
    """Return what each ring size makes of the first steps, and what was looked at, in words."""
    own, elastic = cfg.parallel.ring_size, elastic_size(cfg)
    fixed = {*SIZES} if cfg.parallel.elastic else {*SIZES, own}
    # An elastic ring does what a fixed one of as many ranks does, which has widths too.
    looked_at = sorted(fixed if elastic is None else fixed | {elastic})
    shapes: dict[int, _Shape | str] = {size: _shape(cfg, size) for size in looked_at}
    batches: list[tuple[Batch, Callable[[int], Example]]] = []  # that are looked at, and how their samples are found
    samples = tokens = 0
    for batch, example_of, size in _batches(cfg, rows, sampler):
        batches.append((batch, example_of))
        samples, tokens = samples + len(batch.indices), tokens + size
        if len(batches) == STEPS or samples >= MOST_SAMPLES or tokens >= MOST_TOKENS:
            break
    seen = {size: _Seen() for size in shapes}
    for batch, example_of in batches:
        examples = [example_of(index) for index in batch.indices]
        units: list[Unit] = [[np.concatenate(each) for each in _sequences(cfg, place, example)]
                             for place, example in enumerate(examples)]  # fmt: skip
        for each in [each for each in shapes.values() if isinstance(each, _Shape)]:
            try:
                dealt = each.dealer.deal_all(len(units), units.__getitem__)
            except TooLargeError as error:
                shapes[each.size] = too_large(error, each.cfg, examples[error.place].origin)
                continue
            seen[each.size].packs += len(dealt.packs[0])
            seen[each.size].slowest += max(
                sum(_look(cfg, each, [examples[place] for place in places], seen[each.size]) for places in packs)
                for packs in dealt.packs
            )
    known = [(each, seen[each.size]) for each in shapes.values() if isinstance(each, _Shape)]
    steps = _steps(known, cfg.parallel.world_size)
    rows_of = {size: RingFacts(size, own=False, why=shape) if isinstance(shape, str) else
               _ring(shape, seen[size], len(batches), steps.get(size), packing=cfg.data.packing)
               for size, shape in shapes.items()}  # fmt: skip
    rings = [replace(rows_of[size], own=size == own and not cfg.parallel.elastic) for size in sorted(fixed)]
    if elastic is not None:
        rings.append(replace(rows_of[elastic], own=cfg.parallel.elastic, elastic=True))
    return tuple(rings), _words(cfg, rows.kind, batches)


def elastic_size(cfg: Config) -> int | None:
    """Return how many ranks an elastic ring would have; None if there is one rank, or elastic is refused."""
    world, launch = cfg.parallel.world_size, cfg.launch
    if cfg.parallel.elastic or world == 1:
        return cfg.parallel.ring_size if cfg.parallel.elastic else None
    size = sizes.elastic_ring(world, launch.nproc, launch.nodes, on_cpu=launch.device is Device.cpu)
    try:
        check_layout(with_values(cfg, "parallel", ring_size=size, dp_size=world // size, elastic=True), None)
    except ConfigError:
        return None
    return size


def _steps(known: Sequence[tuple[_Shape, _Seen]], ranks: int) -> dict[int, float]:
    """Return by ring size the estimated time of a step, relative to the best of the rings that the run's ranks make."""
    times = {shape.size: seen.slowest for shape, seen in known if shape.costs is not None and shape.ranks == ranks}
    best = min(times.values(), default=0.0)
    return {size: time / best for size, time in times.items()}


def _shape(cfg: Config, size: int) -> _Shape | str:
    """Return the shape of a ring, or why this run cannot have it."""
    world = cfg.parallel.world_size
    replicas = world // size if world % size == 0 else 1
    layout = LayoutName.zigzag if cfg.parallel.layout is LayoutName.auto else cfg.parallel.layout
    try:
        sizes.grad_acc(cfg.train.batch_size, cfg.train.micro_batch_size, replicas)
        on_ring = with_values(cfg, "parallel", ring_size=size, dp_size=replicas, world_size=replicas * size,
                              layout=layout)  # fmt: skip
        heads = heads_of(cfg.model)
        choice = choose(on_ring, heads)
    except ConfigError as error:
        return str(error)
    windows = heads.windows_within(cfg.data.max_length) if heads else (None,)
    own = build_layout(on_ring, choice, described(cfg.model) or {})
    estimated = size == 1 or (choice.layout in WITH_WIDTHS and cfg.parallel.backend is BackendName.native)
    costs = costs_of_rank(on_ring, described(cfg.model) or {}) if estimated else None
    return _Shape(on_ring, size, replicas, own, choice.name, dealer_of(on_ring, heads, replicas), windows, costs)


def _batches(cfg: Config, rows: Rows, sampler: Sampler) -> Iterator[tuple[Batch, Callable[[int], Example], int]]:
    """Yield the train batches of an epoch with their tokens."""
    examples = rows.examples.train
    if rows.kind is not Kind.prompts:
        for batch in sampler.batches(1, sampler.steps_per_epoch):
            places = np.array(batch.indices)
            copies = rows.lengths.shape[1] - 1
            tokens = int(rows.lengths[places, 0].sum()) * copies + int(rows.lengths[places, 1:].sum())
            yield batch, examples.__getitem__, tokens
        return
    rollout = cfg.rollout
    steps_each = rollout.epochs * rollout.minibatches
    for step in range(1, sampler.steps_per_epoch * steps_each + 1):
        prompts = sampler.batch((step - 1) // steps_each + 1).indices
        batch = samples_of_step(rollout, cfg.seed, cfg.train.batch_size, step)
        drawn = [prompts[place // rollout.n_samples] for place in batch.indices]
        tokens = int(rows.lengths[drawn, 0].sum()) + len(drawn) * rollout.max_new_tokens

        def example_of(place: int, prompts: Sequence[int] = prompts) -> Example:
            return examples[prompts[place // rollout.n_samples]]

        yield batch, example_of, tokens


def _look(cfg: Config, shape: _Shape, examples: Sequence[Example], seen: _Seen) -> float:
    """Pack a micro-batch and deal it to the ring, as training does; and pack it the other way, to compare. Return the
    estimate for the slowest rank."""
    layout, size, slowest = shape.layout, shape.size, 0.0
    sequences = [each for place, example in enumerate(examples) for each in _sequences(cfg, place, example)]
    for packing in (True, False):
        share = Share() if packing and shares(cfg) else None
        pack = pack_sequences(sequences, layout.multiple(size), unit=layout.unit(size), spare=layout.spare(size),
                              packing=packing, share=share)  # fmt: skip
        seen.real[packing] += pack.real_tokens
        seen.held[packing] += len(pack.tokens_T)
        if packing is not cfg.data.packing:
            continue
        works = {window: shape.layout.work(pack.segments, shape.size, window) for window in set(shape.windows)}
        work = np.mean([works[window] for window in shape.windows], axis=0)  # of a layer
        placement = shape.layout.place(pack.segments, shape.size)
        real, widths = placement.real, widths_of(pack, placement)
        seen.widths += widths
        seen.sequences += sum(pack.lengths)
        seen.most_work += float(work.max())
        seen.mean_work += float(work.mean())
        seen.most_tokens += max(real)
        seen.mean_tokens += sum(real) / shape.size
        slowest = _slowest(shape, pack.segments)
    return slowest


def _slowest(shape: _Shape, segments: Sequence[Segment]) -> float:
    """Return the dealer's estimate for the slowest rank, in pairs of a query and a key; 0 where there is none."""
    if shape.costs is None:
        return 0.0
    dealt = shape.layout.estimate(segments, shape.size)
    return even(segments, shape.size, shape.costs).slowest if dealt is None else dealt[0]


def _sequences(cfg: Config, place: int, example: Example) -> list[tuple[Ids, Ids]]:
    """Return the sequences of an example; of a prompt, with an answer that no other has."""
    drawn = (np.full(cfg.rollout.max_new_tokens, -1 - place, np.int32),)
    return [(example.prompt, answer) for answer in example.answers or drawn]


def _ring(shape: _Shape, seen: _Seen, steps: int, step: float | None, *, packing: bool) -> RingFacts:
    packed, padded = (seen.real[each] / seen.held[each] for each in (True, False))
    shared = 1 - seen.real[packing] / seen.sequences
    cut = sum(width > 1 for width in seen.widths) / len(seen.widths)
    uneven = seen.most_work / seen.mean_work, seen.most_tokens / seen.mean_tokens
    return RingFacts(shape.size, False, shape.name, shape.ranks, shape.replicas, seen.packs / steps, packed, padded,
                     shared, *uneven, cut, step)  # fmt: skip


def _words(cfg: Config, kind: Kind, batches: Sequence[tuple[Batch, Callable[[int], Example]]]) -> str:
    samples = sum(len(batch.indices) for batch, _ in batches)
    long = f", each answer with rollout.max_new_tokens={cfg.rollout.max_new_tokens}" if kind is Kind.prompts else ""
    auto = "; parallel.layout=auto is chosen when the run starts" if cfg.parallel.layout is LayoutName.auto else ""
    return f"the first {plural(len(batches), 'step')}: {plural(samples, 'sample')} in {size_in_words(cfg)}{long}{auto}"
