"""Read the examples of a run, tokenize them once per machine or on all ranks together, and cut them into batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlexp.base import cache
from rlexp.base.errors import ConfigError, DataError
from rlexp.config.checks.micro_batches import fullest_micro_batch
from rlexp.config.schema import Config
from rlexp.config.schema.data import ArithmeticDataConfig, DataConfig, RowsDataConfig, SyntheticDataConfig
from rlexp.config.schema.data_sources import has_held_out, held_out_of, sources_of, weights_of
from rlexp.config.schema.row_kinds import EXAMPLE, SIDES, Kind
from rlexp.training.dataset import generated
from rlexp.training.dataset.sampler import Mixture, Sampler
from rlexp.training.dataset.sources import Split, Tokenizing, splits_of
from rlexp.training.dataset.store import Origin, Store, labels_of
from rlexp.training.dataset.store_making import store_of
from rlexp.training.dataset.tokens import Encoder, Outcome, Refused, RowTokenizer, notes_of
from rlexp.training.dataset.views import Halves, Joined, Places, drawn
from rlexp.training.types import Example, Row
from rlexp.training.world.groups import World
from rlexp.training.world.objects import gather_objects, leaders_of, some_do


@dataclass(frozen=True)
class Margins:
    """Which of the rows that were read have one."""

    lacking: int = 0  # the number of those without
    first: str = ""  # the first of them
    rows: int = 0  # all of them

    @property
    def lack(self) -> str:
        return f"{self.first}: has no margin, the first of {self.lacking} such rows in {self.rows}"

    @staticmethod
    def of(parts: Sequence[tuple[int, str]], rows: int) -> Margins:
        return Margins(sum(count for count, _ in parts), next((origin for count, origin in parts if count), ""), rows)


@dataclass(frozen=True)
class Examples:
    """Tokenized examples: those to train on, and those held out."""

    train: Sequence[Example]
    held_out: Sequence[Example] = ()
    dropped: Counter[str] = field(default_factory=Counter)
    held_out_dropped: Counter[str] = field(default_factory=Counter)
    highest: tuple[int, str] = (-1, "")  # the highest token id, and a row that has it
    margins: Margins = field(default_factory=Margins)
    labels: tuple[int, int] = (0, 0)  # of unpaired answers to train on: how many are good, and how many bad
    mixture: Mixture | None = None  # of the examples to train on
    versions: Mapping[str, str] = field(default_factory=dict)  # commits of sets of the hub, by the keys of their paths


def read_examples(
    cfg: Config, tokenizer: Any, world: World, *, trains: bool = True, kind: Kind | None = None
) -> Examples:
    """Read the examples of a kind, by default the one that the loss is trained on; without `trains`, those held out
    alone. A collective call: the first bad row is every rank's error."""
    kind = kind or kind_read(cfg)
    room = cfg.rollout.max_new_tokens if kind is Kind.prompts else 0
    if isinstance(cfg.data, RowsDataConfig):
        shown = cfg.logger.progress and world.rank == 0
        holds_out = has_held_out(cfg.data)
        examples = _stored(cfg.data, Tokenizing(cfg.data, tokenizer, kind, room, shown), world, trains=trains)
    else:
        holds_out = getattr(cfg.data, "eval_size", 0) > 0
        encoder = Encoder(RowTokenizer(tokenizer), cfg.data.max_length, cfg.data.too_long, room)
        examples = _generated(cfg.data, kind, encoder, world, trains=trains)
    word = EXAMPLE[kind]
    if trains:
        _refuse_empty(examples.train, examples.dropped, "data", word)
    if holds_out:
        _refuse_empty(examples.held_out, examples.held_out_dropped, "the held-out data", word)
    return unpaired(examples) if cfg.data.unpair else examples


def kind_read(cfg: Config) -> Kind:
    """Return the kind of rows that the loss is made of."""
    return Kind.pairs if cfg.data.unpair else cfg.loss.rows


def unpaired(examples: Examples) -> Examples:
    """Return each pair as two answers, of which one is good."""
    mixture = examples.mixture and Mixture(tuple(2 * size for size in examples.mixture.sizes), examples.mixture.weights)
    pairs = len(examples.train)
    return replace(examples, train=Halves(examples.train), held_out=Halves(examples.held_out), mixture=mixture,
                   labels=(pairs, pairs))  # fmt: skip


def sampler_of(cfg: Config, kind: Kind, size: int, mixture: Mixture | None = None) -> Sampler:
    """Cut prompts into rollouts, or examples of any other kind into train batches."""
    common: dict[str, Any] = {"seed": cfg.seed, "shuffle": cfg.data.shuffle, "kind": EXAMPLE[kind], "mixture": mixture}
    if kind is Kind.prompts:
        return Sampler(size, cfg.rollout.batch_size, key="rollout.batch_size", **common)
    return Sampler(size, cfg.train.batch_size, drop_last=cfg.data.drop_last, **common)


def longest_examples(cfg: Config) -> Examples:
    """Make one train batch of the longest examples: half of an answer is trained on, and no two sequences have a token
    in common but for the prompt's only one. Or the prompts of one rollout, as long as their answers leave room for."""
    if cfg.loss.draws:
        longest = cfg.data.max_length - cfg.rollout.max_new_tokens
        prompts = (np.full(longest, index, dtype=np.int32) for index in range(cfg.rollout.batch_size))
        return Examples([Example(index, each, origin=f"prompt {index}") for index, each in enumerate(prompts)])
    lengths, sides = fullest_micro_batch(cfg), len(SIDES[cfg.loss.rows])

    def example(index: int) -> Example:
        length = lengths[index % len(lengths)]
        mask = np.arange(length - 1) >= length // 2 - 1
        answers = tuple(np.full(length - 1, index * sides + side, dtype=np.int32) for side in range(sides))
        return Example(index, np.full(1, index, dtype=np.int32), answers, (mask,) * sides, label=True, margin=0.0)

    return Examples([example(index) for index in range(cfg.train.batch_size)])


def longest_in_words(cfg: Config) -> str:
    """Say how the tokens of such an example are divided."""
    if cfg.loss.draws:
        return f"its answer {cfg.rollout.max_new_tokens:,}"
    return "of which half is trained on, and no two share a prompt"


def sharing_examples(cfg: Config, answers: int) -> Examples:
    """Make one train batch of the longest pairs whose answers have so many tokens, all of them trained on. The answers
    of a pair share its prompt, and nothing else is shared."""
    prompt = cfg.data.max_length - answers

    def example(index: int) -> Example:
        both = tuple(np.full(answers, 2 * index + side, dtype=np.int32) for side in range(2))
        masks = (np.ones(answers, dtype=np.bool_),) * 2
        return Example(index, np.full(prompt, 2 * index, dtype=np.int32), both, masks, margin=0.0)

    return Examples([example(index) for index in range(cfg.train.batch_size)])


def _refuse_empty(examples: Sequence[Any], dropped: Counter[str], what: str, kind: str) -> None:
    if not examples:
        reasons = "; ".join(f"{count} {kind}s: {reason}" for reason, count in sorted(dropped.items()))
        raise DataError(f"{what}: no {kind} is left ({reasons}).")


def refuse_foreign_tokens(examples: Examples, vocabulary: int) -> None:
    token, origin = examples.highest
    if token >= vocabulary:
        raise DataError(
            f"{origin}: token {token} is not in the model's vocabulary of {vocabulary}. The tokenizer is not this "
            f"model's, or the model's embedding was not resized to it."
        )


# ---- rows of files and of the hub: a store on every machine ----


def _stored(cfg: RowsDataConfig, tokenizing: Tokenizing, world: World, *, trains: bool) -> Examples:
    """Have one rank of each machine make the stores that are not there; all ranks then map them."""
    sources = sources_of(cfg)
    wanted = (False, True) if trains or cfg.eval_size else (True,)
    splits = [(split, held) for held in wanted for each in sources if (split := splits_of(each, held_out=held))]
    folder = Path(cfg.cache).expanduser() if cfg.cache else cache.root()

    def work() -> list[tuple[str, Origin, str | None]]:
        made = []
        for split, _ in splits:
            key, job = tokenizing.work(split)
            store_of(folder, key, job)
            made.append((key, job.names, job.rows.version))
        return made

    leader = leaders_of(folder, partial(_no_folder, folder), world.size)[world.rank]
    keyed = some_do(work if leader == world.rank else None, world.size)
    _refuse_other_rows([[key for key, _, _ in each] for each in keyed if each is not None], splits)
    made = keyed[leader]
    assert made is not None
    stores = [Store(folder / "tokens" / key, names) for key, names, _ in made]
    commits = {_path_key(split, held): version for (split, held), (_, _, version) in zip(splits, made, strict=True)}
    train, held = ([store for store, (_, is_held) in zip(stores, splits, strict=True) if is_held is held]
                   for held in (False, True))  # fmt: skip
    examples = examples_of(cfg, train, held, weights_of(sources) if trains else None)
    examples = examples if trains else replace(examples, train=(), labels=(0, 0))
    return replace(examples, versions={key: commit for key, commit in commits.items() if commit is not None})


def _path_key(split: Split, held: bool) -> str:
    own = held and split.source.cfg.eval_path is not None
    return f"{split.source.key}.{'eval_path' if own else 'path'}"


def _no_folder(folder: Path, error: OSError) -> str:
    return (
        f"data.cache={folder}: cannot be made ({error.strerror}). Give a folder where you may write: data.cache=FOLDER."
    )


def _refuse_other_rows(keys: Sequence[Sequence[str]], splits: Sequence[Any]) -> None:
    for each in keys:
        for one, other, (split, _) in zip(keys[0], each, splits, strict=True):
            if one != other:
                raise DataError(
                    f"{split.source.key}.path={split.path}: two machines have other rows there, or another tokenizer. "
                    f"Give all of them the same files."
                )


def examples_of(
    cfg: RowsDataConfig, train: Sequence[Store], held: Sequence[Store], weights: Sequence[float] | None
) -> Examples:
    """Join the stores of all sources, and hold some examples out if others are not."""
    joined = Joined(train)
    places = None
    if count := held_out_of(cfg.eval_size, len(joined)):
        if count >= len(joined):
            raise ConfigError(
                f"data.eval_size={cfg.eval_size}: {len(joined)} rows are left to train on, so it would hold out all of "
                f"them. Use data.eval_size={max(0, len(joined) // 10)} or so."
            )
        out = drawn(len(joined), count)
        places = Places(len(joined), out, held_out=False)
    taken = Joined(train, places)
    good, bad = (sum(store.facts.labels[place] for store in train) for place in (0, 1))
    held_out = Joined(held) if places is None else Joined(train, Places(len(joined), places.out, held_out=True))
    return Examples(
        taken,
        held_out,
        _dropped(train),
        _dropped(held),
        max((store.named(store.facts.highest) for store in (*train, *held)), default=(-1, "")),
        Margins.of([store.named(store.facts.no_margin) for store in (*train, *held)], len(joined) + len(Joined(held))),
        (good, bad),
        _mixture(cfg, taken.sizes(), weights) if weights else None,
    )


def _mixture(cfg: RowsDataConfig, sizes: Sequence[int], weights: Sequence[float]) -> Mixture:
    mixture = Mixture(tuple(sizes), tuple(weights))
    for source, count in zip(sources_of(cfg), mixture.counts, strict=True):
        if not count:
            raise ConfigError(
                f"{source.key}.weight={source.cfg.weight:g}: no sample of this source is in an epoch, which ends after "
                f"{mixture.taken} samples with the first source that is used up. Give it a larger weight, or leave it "
                f"out."
            )
    return mixture


def _dropped(stores: Sequence[Store]) -> Counter[str]:
    return sum((Counter(store.facts.counts) for store in stores), start=Counter())


# ---- generated rows: every rank tokenizes a part ----


def _generated(cfg: DataConfig, kind: Kind, encoder: Encoder, world: World, *, trains: bool) -> Examples:
    rows, held_rows = generated_rows(cfg, kind)
    rows = rows if trains else []
    outcomes, held = (encode_shared(encoder, each, world) for each in (rows, held_rows))
    train, held_out = (
        [replace(each, index=index) for index, each in enumerate(one for one in part if isinstance(one, Example))]
        for part in (outcomes, held)
    )
    kept = [each for each in (*outcomes, *held) if isinstance(each, Example)]
    highest = max(((each.highest(), each.origin) for each in kept), default=(-1, ""))
    margins = Margins.of([(1, each.origin) for each in kept if each.margin is None], len(kept))
    labels = labels_of(each for each in outcomes if isinstance(each, Example))
    dropped, held_dropped = (Counter(note for each in part for note in notes_of(each)) for part in (outcomes, held))
    return Examples(train, held_out, dropped, held_dropped, highest, margins, labels)


def generated_rows(cfg: DataConfig, kind: Kind) -> tuple[list[Row], list[Row]]:
    """Return the rows to train on, and those held out; a set of pairs has rows of every kind."""
    assert isinstance(cfg, ArithmeticDataConfig | SyntheticDataConfig)
    parts = ((cfg.size, cfg.seed, "train"), (cfg.eval_size, cfg.seed, "eval"))
    if isinstance(cfg, ArithmeticDataConfig):
        train, held_out = (generated.sums(*part, cfg.digits) for part in parts)
        return train, held_out
    pairs = [generated.pairs(*part, cfg.max_length if cfg.fill else 0) for part in parts]
    train, held_out = ([generated.taken(kind, pair, place) for place, pair in enumerate(each)] for each in pairs)
    return train, held_out


def encode_shared(encoder: Encoder, rows: Sequence[Row], world: World) -> list[Outcome]:
    """Tokenize this rank's part of the rows and share it with all ranks; the first bad row is every rank's error."""
    own_rows = rows[world.rank * len(rows) // world.size : (world.rank + 1) * len(rows) // world.size]
    outcomes = [each for part in gather_objects(encoder.encode(own_rows), world.size) for each in part]
    for each in outcomes:
        if isinstance(each, Refused):
            raise DataError(each.message)
    return outcomes
