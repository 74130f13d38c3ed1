"""The optimizer's moments, group by group: every engine saves them under the right parameters, and any other goes on
from them, to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec
from rlexp.run_files.checkpoint_folder import folder_of, read_manifest
from rlexp.training.checkpoint.restore import Reader, load
from rlexp.training.engine.base import MOMENTS
from rlexp.training.train.build import build
from rlexp.training.train.step import train_step
from rlexp.training.train.surroundings import UNPROBED
from tests.helpers.ranks import begin_saving, largest_gap, on_ranks

ENGINES = ("torch", "zero0", "zero1", "zero2", "zero3", "fsdp2")
BASE = ("launch.device=cpu", "logger=none", "train.batch_size=4", "data.size=16", "data.eval_size=0",
        "train.max_steps=3", "optim.lr=1e-3", "optim.weight_decay=0.1")  # fmt: skip
STEPS, EXACT = 2, "float64"
# float32 against float64, relative to the largest element of each moment. Measured: 2.5e-6.
FLOAT32 = 2e-5
State = Mapping[str, Tensor]  # whole tensors, by kind and parameter


def configs(ranks: int) -> dict[str, Config]:
    """Return a configuration of each engine, and one that computes exactly."""
    place = (*BASE, f"parallel=ring{ranks}", f"launch.nproc={ranks}")
    engines = {engine: compose_config([*place, f"engine={engine}"]) for engine in ENGINES}
    return engines | {EXACT: compose_config([*place, "engine=torch", "train.precision=fp64"])}


def read(place: Path) -> dict[str, Tensor]:
    at = folder_of(place, STEPS)
    reader = Reader(at, read_manifest(at))
    return {f"{kind} {name}": reader.whole(kind, name) for kind in ("weight", *MOMENTS) for name in reader.shapes}


def trained_rank(spec: RankSpec, cfgs: Mapping[str, Config], saved: Mapping[str, Path]) -> None:
    """Take two steps with each configuration and save."""
    for name, cfg in cfgs.items():
        task = build(cfg, around=UNPROBED)
        for step in range(1, STEPS + 1):
            train_step(task, step)
        begin_saving(task.run, saved[name], STEPS)()


def reloaded_rank(
    spec: RankSpec, cfgs: Mapping[str, Config], saved: Mapping[str, Path], again: Mapping[tuple[str, str], Path]
) -> None:
    """Load what one engine saved into a new one of another, and save it again."""
    for (one, other), place in again.items():
        run, at = build(cfgs[other], around=UNPROBED).run, folder_of(saved[one], STEPS)
        load(run.engine, Reader(at, read_manifest(at)), STEPS)
        begin_saving(run, place, STEPS)()


def groups(state: State) -> tuple[set[str], set[str]]:
    """Return the names of the moments that belong to parameters with weight decay, and of the others."""
    moments = {name: tensor for name, tensor in state.items() if not name.startswith("weight ")}
    decayed = {name for name, tensor in moments.items() if tensor.dim() > 1}
    return decayed, moments.keys() - decayed


def hold(saved: Mapping[str, Path], again: Mapping[tuple[str, str], Path]) -> None:
    states = {engine: read(place) for engine, place in saved.items()}
    exact = states.pop(EXACT)
    decayed, others = groups(exact)
    assert (len(decayed), len(others)) == (2 * 16, 2 * 5)
    assert all(exact[name].any() for name in decayed | others)
    for engine, state in states.items():
        for group in (decayed, others):
            assert largest_gap(*({name: each[name].double() for name in group} for each in (exact, state))) < FLOAT32, (
                engine
            )
    for (one, other), place in again.items():
        found = read(place)
        assert [name for name, tensor in states[one].items() if not torch.equal(found[name], tensor)] == [], (
            one,
            other,
        )


def test_moments_go_on_from_one_engine_to_the_next(tmp_path: Path) -> None:
    """On two ranks, from each engine to the one after it, and from the last to the first."""
    cfgs = configs(2)
    saved = {engine: tmp_path / engine for engine in cfgs}
    again = {pair: tmp_path / "-".join(pair) for pair in itertools.pairwise((*ENGINES, ENGINES[0]))}
    on_ranks(2, both_rank, cfgs, saved, again)
    hold(saved, again)


def both_rank(
    spec: RankSpec, cfgs: Mapping[str, Config], saved: Mapping[str, Path], again: Mapping[tuple[str, str], Path]
) -> None:
    trained_rank(spec, cfgs, saved)
    reloaded_rank(spec, cfgs, saved, again)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "then"), [(2, 2), (2, 1), (1, 2), (1, 1)])
def test_moments_go_on_from_every_engine_to_every_other(ranks: int, then: int, tmp_path: Path) -> None:
    cfgs = configs(ranks)
    saved = {engine: tmp_path / engine for engine in cfgs}
    again = {(one, other): tmp_path / f"{one}-{other}" for one in ENGINES for other in ENGINES}
    on_ranks(ranks, trained_rank, cfgs, saved)
    on_ranks(then, reloaded_rank, configs(then), saved, again)
    hold(saved, again)
