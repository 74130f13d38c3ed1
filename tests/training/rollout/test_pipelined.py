"""The pipelined mode: the curve does not depend on which ranks sample, also after a stop."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from bench.curves import differences, draw
from rlexp.base.errors import DrawError
from rlexp.config.load import compose_config
from rlexp.run_files import checkpoint_folder as checkpoint
from rlexp.run_files.curve_distance import compared
from rlexp.run_files.metrics_jsonl import read_rows
from rlexp.training.checkpoint.restore import Reader
from rlexp.training.rollout.bridge import Bridge
from rlexp.training.rollout.rewards.weighted import Rewards
from rlexp.training.rollout.sources import Ahead, Colocated, Pipelined, Showing, refuse_other_prompts
from rlexp.training.types import Example, Sample
from rlexp.training.world.groups import ALONE, World
from tests.conftest import Shell
from tests.helpers import warm
from tests.helpers.refusals import refusal_of
from tests.helpers.rollout_runs import PIPELINED
from tests.helpers.runs import descendants, gone, run_json, wait_for_steps

LAYOUTS = (
    ("parallel=ring1",),
    ("parallel=ring1", "rollout.sampling_ranks=2", "rollout.micro_batch_size=3"),
    ("parallel=ring2", "rollout.sampling_ranks=1", "train.micro_batch_size=2"),
)
SHORT = ("rollout.epochs=1", "train.max_steps=5", "train.eval_every=3")  # three rollouts of 2 train batches
REPLICAS = ("parallel=ring1", "launch.nproc=4", "rollout.sampling_ranks=2")


def moved(row: dict[str, float], other: dict[str, float]) -> list[str]:
    """Return the metrics that differ by more than rounding.

    Loss terms of both signs cancel, so the tolerance has an absolute part. A flipped token moves the score by 1e-2.
    """
    assert set(filter(compared, row)) == set(filter(compared, other))
    return [
        f"step {row['step']}: {name} {row[name]!r} {other[name]!r}"
        for name in filter(compared, row)
        if not name.startswith(("train/time/", "train/samples_per_second"))
        and not abs(row[name] - other[name]) <= 1e-9 * max(abs(row[name]), abs(other[name])) + 1e-11
    ]


@pytest.mark.parametrize(
    ("layouts", "more", "each"),
    [(LAYOUTS, SHORT, 2), pytest.param((LAYOUTS[0], REPLICAS), (), 4, marks=pytest.mark.slow)],
    ids=["sampling ranks and a ring", "replicas"],
)
def test_one_curve_whoever_samples(layouts: tuple[tuple[str, ...], ...], more: tuple[str, ...], each: int) -> None:
    straight, *others = draw([compose_config([*PIPELINED, *more, *layout]) for layout in layouts])
    assert [row.get("train/rollout/staleness") for row in straight.rows[::each]] == [0, 1, 1]
    assert sum("eval/objective/scores" in row for row in straight.rows) == 2
    assert all(0 < row["train/time/sampling"] < 600 for row in straight.rows[::each])
    for layout, curve in zip(layouts[1:], others, strict=True):
        assert [fault for a, b in zip(straight.rows, curve.rows, strict=True) for fault in moved(a, b)] == [], layout
        # Largest difference measured: 1.1e-12, in the critic's head; Adam divides by its gradients, which are small.
        assert differences(straight, curve)["weights"] < 1e-11, layout


def test_a_step_behind_is_weighed_by_what_is_now_likely() -> None:
    """Pipelined samples come from older weights than those being trained, and the ratio shows it; colocated ones do
    not."""
    ahead, along = draw([compose_config([*PIPELINED, *how]) for how in (("parallel=ring1",), ("rollout=default",))])
    ratios = [[abs(row["train/val/behaviour_ratio"] - 1) for row in curve.rows] for curve in (ahead, along)]
    assert max(ratios[0][:4]) < 1e-12
    assert min(ratios[0][4:]) > 1e-6
    assert max(ratios[1]) < 1e-12
    gaps = [[row.get("train/sampling/sampling_logp_difference/mean") for row in curve.rows[::4]]
            for curve in (ahead, along)]  # fmt: skip
    assert gaps[0][0] < 1e-12 < 1e-6 < min(gaps[0][1:]), "the gap is that of the weights' age"
    assert max(gaps[1]) < 1e-12
    shares = [[row["train/rollout/effective_tokens"] for row in curve.rows[::4]] for curve in (ahead, along)]
    assert max(shares[0][1:]) < 1 - 1e-9 < min(shares[1])


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run to the end without a stop."""
    place = tmp_path_factory.mktemp("straight")
    warm.run("rlexp", [*PIPELINED, "hydra.run.dir=run"], place, timeout=200).check_returncode()
    return place / "run"


def same_run(one: Path, other: Path) -> list[str]:
    rows, others = (read_rows(each / "metrics.jsonl") for each in (one, other))
    assert [row["step"] for row in others] == list(range(1, 11))
    faults = [fault for a, b in zip(rows, others, strict=True) for fault in moved(a, b)]
    readers = [
        Reader(at, checkpoint.read_manifest(at)) for at in (checkpoint.latest_first(each)[0] for each in (one, other))
    ]
    for name in readers[0].shapes:
        a, b = (reader.whole("weight", name).numpy() for reader in readers)
        if not np.abs(a - b).max() <= 1e-11 * np.abs(a).max():
            faults.append(name)
    samples = [
        [json.loads(line)["digests"] for line in (each / "rollouts.jsonl").read_text().splitlines()]
        for each in (one, other)
    ]
    return faults + ["samples"] * (samples[0] != samples[1])


@pytest.mark.parametrize(
    ("stop", "layout"),
    [
        pytest.param(3, ("parallel=ring2",), id="within a rollout", marks=pytest.mark.slow),
        pytest.param(4, ("parallel=ring1", "rollout.sampling_ranks=2"), id="between two", marks=pytest.mark.slow),
        pytest.param(9, ("parallel=ring1",), id="in the last", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_stops_goes_on_with_what_was_drawn_ahead(
    straight: Path, rlexp: Shell, tmp_path: Path, stop: int, layout: tuple[str, ...]
) -> None:
    first = rlexp(*PIPELINED, "hydra.run.dir=run", f"train.stop_after={stop}")
    assert first.returncode == 0, first.stderr
    again = rlexp(*PIPELINED, "hydra.run.dir=run", *layout)
    assert again.returncode == 0, again.stderr
    assert same_run(straight, tmp_path / "run") == []


@pytest.mark.slow
def test_a_rank_that_samples_is_killed_and_nothing_is_lost(straight: Path, rlexp: Shell, tmp_path: Path) -> None:
    command = [*PIPELINED, "hydra.run.dir=run", "checkpoint.save_every=1"]
    process = warm.start("rlexp", command, tmp_path)
    wait_for_steps(tmp_path, process, 2)
    ranks = descendants(process.pid)
    os.kill(max(ranks), signal.SIGKILL)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 1, said
    assert "SIGKILL" in said
    assert run_json(tmp_path / "run")["status"] == "failed"
    assert gone(ranks, within=240)
    again = rlexp(*command)
    assert again.returncode == 0, again.stderr
    assert same_run(straight, tmp_path / "run") == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("rollout=default", "rollout.sampling_ranks=1"), "rollout.sampling_ranks=1: rollout.mode=colocated needs"),
        (("rollout.sampling_ranks=0",), "rollout.sampling_ranks=0: rollout.mode=pipelined needs at least 1 rank"),
        (("launch.nproc=2", "rollout.sampling_ranks=2"), "rollout.sampling_ranks=2: there are 2 ranks in all"),
        (("loss=dpo",), "rollout.mode=pipelined: loss=dpo generates no samples"),
        (("loss.value_lr=1e-3", "optim.lr=0"), "loss.value_lr=0.001: is applied as a multiple of optim.lr"),
        (("checkpoint.keep_best=1", "train.eval_every=1"), "checkpoint.best_metric=eval/loss: loss=ppo has no loss"),
    ],
)
def test_what_cannot_come_of_it_is_refused(overrides: tuple[str, ...], said: str) -> None:
    assert said in refusal_of([*PIPELINED, *overrides])


def test_answers_to_other_prompts_than_this_rank_has_are_refused() -> None:
    """A sampling node with other rows, or another tokenizer, would answer other prompts under the same numbers."""

    def prompt(*tokens: int) -> Example:
        return Example(0, np.array(tokens, np.int32), origin=f"rows.jsonl:{tokens[0]}")

    def sample(place: int, asked: Example) -> Sample:
        return Sample(place=place, example=asked, number=place % 2, answer=np.zeros(1, np.int32), stopped=True, text="",
                      behaviour=np.zeros(1))  # fmt: skip

    mine = [prompt(1, 2), prompt(3)]
    refuse_other_prompts([sample(1, prompt(1, 2)), sample(2, prompt(3))], mine, 2)
    with pytest.raises(DrawError, match=r"rows\.jsonl:3: a sampling rank drew .* another prompt \(rows\.jsonl:1\)"):
        refuse_other_prompts([sample(3, prompt(1, 2))], mine, 2)


class Doors:
    """A bridge's end on a sampling rank, whose training ranks take nothing before `open` is set."""

    sampling, sampler = 2, 1

    def __init__(self) -> None:
        self.open = threading.Event()
        self.through: list[Any] = []

    def show(self, sampler: int, message: Any = None) -> Any:
        assert self.open.wait(60)
        self.through.append((sampler, message))
        return message

    def shown(self, sampler: int) -> Iterator[Any]:
        for message in ("theirs", None):
            self.show(sampler, message)
            yield message


def test_a_sampling_rank_draws_on_while_nobody_takes_its_samples() -> None:
    doors = Doors()
    showing = Showing(cast(Bridge, doors))
    for number in range(50):
        showing.add([number])
    assert doors.through == []
    doors.open.set()
    showing.finish((1.0, 2.0))
    theirs, mine = doors.through[:2], doors.through[2:]
    assert theirs == [(0, "theirs"), (0, None)]
    assert mine == [*((1, [number]) for number in range(50)), (1, (1.0, 2.0)), (1, None)]


def test_what_ends_the_showing_reaches_the_rank() -> None:
    class Gone(Doors):
        def show(self, sampler: int, message: Any = None) -> Any:  # noqa: ARG002
            raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="Connection closed"):
        Showing(cast(Bridge, Gone())).finish((1.0, 2.0))


def test_samples_are_judged_as_they_come() -> None:
    prompts = [Example(index, np.array([0, index], dtype=np.int32), origin=f"row {index}") for index in range(4)]
    samples = [
        Sample(
            place=place,
            example=prompts[place],
            number=0,
            answer=np.array([1], dtype=np.int32),
            stopped=True,
            text="",
            behaviour=np.zeros(1),
        )
        for place in range(4)
    ]
    judged: list[list[int]] = []

    def arriving(_: int) -> Iterator[Any]:
        for place in (2, 0, 3, 1):
            yield [samples[place]]
            assert [place] in judged
        yield (1.0, 3.0)

    rewards = SimpleNamespace(submit=lambda taken: judged.append([each.place for each in taken]))
    bridge = SimpleNamespace(rank=1, sampling=1, shown=arriving)
    ahead = Pipelined(
        cast(Bridge, bridge), World(0, 1, ALONE), lambda: iter(()), torch.float32, 2, cast(Colocated, None)
    )
    mine = ahead.draw(0, prompts, 1, cast(Rewards, rewards))
    assert [sample.place for sample in mine] == [0, 1, 2, 3]
    assert judged == [[2], [0], [3], [1]]
    assert ahead.seconds == 2.0
    ahead._ahead = Ahead(1, samples)  # they had come before a checkpoint was written
    ahead.draw(1, prompts, 1, cast(Rewards, rewards))
    assert judged[4:] == [[0, 1, 2, 3]]
