"""All that preflight says of a configuration: its memory, what fits, what would help, and how long a step takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlexp.base.errors import UserError
from rlexp.base.file_hashes import files_of
from rlexp.config.checks.micro_batches import tokens_of_ring
from rlexp.config.checks.rope import note_on_loaded
from rlexp.config.elsewhere import compose_elsewhere
from rlexp.config.schema import Config, LayoutName, with_values
from rlexp.config.schema.data import ArithmeticDataConfig, RowsDataConfig, SyntheticDataConfig
from rlexp.config.schema.data_sources import held_out_of, sources_of, weights_of
from rlexp.launch.preflight_check import print_line
from rlexp.preflight.changes import Change, cheapest_alone
from rlexp.preflight.children import Calls, Watch, at_once
from rlexp.preflight.predict import Found, Prediction, plan_of, predict, rehearsals
from rlexp.preflight.rehearsal.layers import FEWEST, cycle_of, refuse_unlike_reference
from rlexp.preflight.rehearsal.log import Log
from rlexp.preflight.rehearsal.rehearse import preload
from rlexp.preflight.rehearsal.sharding import Sharding, compare, kept, of_attention
from rlexp.preflight.remedy import changes_of, first_that_fits, laid_out
from rlexp.preflight.rings import OnRing, rings_of
from rlexp.preflight.vllm import count_parameters, room
from rlexp.training.dataset.row_files import parts_of, rows_in
from rlexp.training.model.loading import load_config


@dataclass(frozen=True)
class Answer:
    cfg: Config
    parameters: int
    prediction: Prediction
    rings: Sequence[OnRing]  # none where they were not asked for
    changes: Sequence[Change]
    sharding: Sharding | None  # None for a ring of one
    engine_chosen: str | None = None  # why engine=auto takes this engine
    rows: int | None = None  # to train on, where they are at hand

    @property
    def limit(self) -> int:
        return room(self.cfg)

    @property
    def fits(self) -> bool:
        return self.prediction.fits(self.limit)

    @cached_property
    def remedy(self) -> Change | None:
        """The change that fits and takes the least time; None if the run fits, or no single change makes it fit.

        One that trains other weights is the last."""
        return None if self.fits else cheapest_alone(self.changes, self.cfg, self.prediction, self.limit)


def answer(overrides: Sequence[str], *, longest: bool, sharding: bool, watch: Watch | None = None) -> Answer:
    """Rehearse a configuration, then the same with single changes, and on other rings if that is asked for.

    The `longest` sequences that fit are searched anyway where the run does not fit. `sharding`: whether each part of
    the model keeps its share of the sequence alone.
    """
    cfg = compose_elsewhere(overrides)
    model = load_config(cfg.model, cfg.data.max_length)
    print_line(note_on_loaded(cfg, model.to_dict()) or "")
    refuse_unlike_reference(cfg, model)
    preload()  # rehearsals are forked from this process
    task = answering(cfg, model, overrides, longest=longest, sharding=sharding)
    return dataclasses.replace(at_once([task], watch=watch)[0], rows=rows_at_hand(cfg))


def answering(
    composed: Config, model: Any, overrides: Sequence[str], *, longest: bool, sharding: bool
) -> Calls[Answer]:
    engine = yield from first_that_fits(composed, model)
    cfg = yield from laid_out(engine.cfg, model)
    outcome = engine.outcome or (yield from predict(cfg, model))
    known = outcome.prediction
    fits = known.fits(room(cfg))
    rank = known.rank if fits else None  # a change must fit only where the run does not
    rings, logs, changed = yield [
        rings_of(cfg, model, overrides, outcome, wanted=longest or not fits),
        logs_to_compare(cfg, model, outcome, wanted=sharding),
        changes_of(engine, known, model, rank),
    ]
    tried = [*engine.others, *changed]
    compared = shared_out(cfg, model, *logs) if logs else None
    return Answer(cfg, count_parameters(model), known.with_share(), rings, tried, compared, engine.chosen)


def logs_to_compare(cfg: Config, model: Any, known: Found, *, wanted: bool) -> Calls[Sequence[Log] | None]:
    """Return logs of a few layers on the run's ring, which may be known, and with the same sequences on a ring of one.

    None if that is the ring, or if they are not wanted.
    """
    if cfg.parallel.ring_size == 1 or not wanted:
        return None
    layers = next(cycle_of(model).few(model.num_hidden_layers, FEWEST), model.num_hidden_layers)
    if known.log.layers == layers:
        return [known.log, *(yield from rehearsals([plan_of(alone(cfg), model, 0, layers)]))]
    return (yield from rehearsals(plan_of(each, model, 0, layers) for each in (cfg, alone(cfg))))


def shared_out(cfg: Config, model: Any, ring: Log, one: Log) -> Sharding:
    assert ring.layers == one.layers, "logs of other numbers of layers"
    return compare(kept(ring), kept(one), cfg.parallel.ring_size, attention=of_attention(cfg, model))


def alone(cfg: Config) -> Config:
    """Return the configuration of one replica on a ring of one."""
    layout = cfg.parallel.layout
    layout = LayoutName.zigzag if layout.value in ("hybrid", "ulysses", "auto") else layout
    ranks = cfg.parallel.dp_size
    one = with_values(cfg, "parallel", ring_size=1, world_size=ranks, ulysses_size=None, layout=layout)
    return with_values(one, "train", max_tokens_per_micro_batch=tokens_of_ring(cfg))


MOST = 1 << 30  # bytes of files that are counted: some seconds


def rows_at_hand(cfg: Config) -> int | None:
    """Return the rows to train on; None where they are on the hub, are not there, or are too many to be counted."""
    data = cfg.data
    if isinstance(data, SyntheticDataConfig | ArithmeticDataConfig):
        return data.size
    assert isinstance(data, RowsDataConfig)
    sources = sources_of(data)
    if weights_of(sources) is not None:
        return None
    try:
        files = [files_of(each.cfg.path) for each in sources]
        if not all(files) or sum(path.stat().st_size for paths in files for path in paths) > MOST:
            return None
        rows = sum(_rows_of(path) for paths in files for path in paths)
    except (UserError, OSError, pa.ArrowException):  # the run itself says what is wrong with them
        return None
    rows -= held_out_of(data.eval_size, rows)
    return max(0, rows if data.max_samples is None else min(rows, data.max_samples))


def _rows_of(path: Path) -> int:
    with path.open("rb") as file:
        if file.read(4) == b"PAR1":
            return int(pq.read_metadata(path).num_rows)
    return sum(map(rows_in, parts_of(path)))


def steps_of_epoch(cfg: Config, rows: int) -> int:
    batch = cfg.rollout.batch_size if cfg.loss.draws else cfg.train.batch_size
    batches = rows // batch if cfg.data.drop_last else -(-rows // batch)
    return batches * cfg.rollout.epochs * cfg.rollout.minibatches if cfg.loss.draws else batches
