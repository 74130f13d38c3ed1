"""Live tensors are counted in real runs: what a rehearsal predicts, less on a larger ring, and nothing else moves."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from rlexp.config.load import compose_config
from rlexp.config.schema import Config, CountTensors
from rlexp.launch.joining import RankSpec
from rlexp.launch.rank_progress import Whereabouts, read
from rlexp.run_files.curve_distance import compared
from rlexp.training.metrics.live_tensors import LiveTensors, TensorCount
from rlexp.training.metrics.memory import Phases
from rlexp.training.metrics.meter import Meter
from rlexp.training.world.groups import ALONE, World
from tests.helpers.ranks import on_ranks
from tests.helpers.rehearsals import SHORT, rehearsed

CPU = torch.device("cpu")
PHASES = ("forward", "reference", "backward")
Row = dict[str, float]


def run(_spec: RankSpec, cfg: Config, steps: int, longest: bool) -> list[Row]:
    """Build a run as `rlexp` does, and take its first steps: on pairs of the greatest length, or the run's own."""
    from bench.given import LONGEST
    from rlexp.training.train.build import build
    from rlexp.training.train.rank import tensor_count
    from rlexp.training.train.step import train_step
    from rlexp.training.train.surroundings import UNPROBED

    phases = Phases(CPU, count=tensor_count(cfg))
    with phases.throughout():
        task = build(cfg, phases, around=LONGEST if longest else UNPROBED)
        return [train_step(task, step) for step in range(1, steps + 1)]


def tensors_of(row: Row) -> Row:
    return {name: value for name, value in row.items() if "tensors" in name}


@pytest.mark.parametrize("engine", ["torch", pytest.param("zero1", marks=pytest.mark.slow)])
def test_a_larger_ring_holds_fewer_bytes_as_predicted(engine: str) -> None:
    """The process's own peak says nothing here: it is the same on every ring."""
    peaks = []
    for ring in (1, 2, 4):
        cfg = compose_config([*SHORT, "train.batch_size=3", "train.micro_batch_size=1", "data.max_length=1024",
                              f"engine={engine}", f"launch.nproc={ring}", f"parallel.ring_size={ring}"])  # fmt: skip
        first, second = on_ranks(ring, run, cfg, 2, True)[0]
        predicted = rehearsed(cfg, int(second["memory/tensors_peak_rank"]))
        for phase in PHASES:
            found = second[f"memory/{phase}_tensors_peak_bytes"]
            assert found == pytest.approx(predicted["peaks"][phase], rel=0.02), (ring, phase)
        assert first["memory/tensors_peak_bytes"] < second["memory/tensors_peak_bytes"]  # the optimizer's state
        peaks.append(second["memory/tensors_peak_bytes"])
    assert peaks[1] < 0.65 * peaks[0]
    assert peaks[2] < 0.65 * peaks[1]


@pytest.mark.parametrize(
    "words",
    [
        ("engine=zero1",),
        *(
            pytest.param((f"engine={engine}", f"memory.checkpointing={checkpointing}"), marks=pytest.mark.slow)
            for engine in ("torch", "zero2", "zero3", "fsdp2")
            for checkpointing in ("true", "false")
        ),
        pytest.param(("engine=torch", "loss=mpo", "train.micro_batch_size=1"), marks=pytest.mark.slow),
    ],
    ids=lambda words: "-".join(words),
)
def test_counting_moves_no_number_and_its_choice_misses_nothing(words: tuple[str, ...]) -> None:
    """The highest peak of chosen micro-batches is that of all, but for a buffer that FSDP2 keeps from the micro-batch
    before: a layer's gradients, up to 4 % of so small a model. And gloo's thread holds the tensors of a collective for
    a moment after it is done: under load a bucket of ZeRO-2's gradients, 1.2 %; if each waited 5 ms longer, nothing."""
    settings = [*SHORT, "data.max_length=512", "parallel=ring2", "train.max_steps=5", *words]
    curves = {
        how: on_ranks(2, run, compose_config([*settings, f"memory.count_tensors={how.value}"]), 5, False)[0]
        for how in CountTensors
    }
    plain = [{name: row[name] for name in row if compared(name)} for row in curves[CountTensors.never]]
    for rows in curves.values():
        assert [{name: row[name] for name in row if compared(name)} for row in rows] == plain
    assert not any(map(tensors_of, curves[CountTensors.never]))
    auto, always = curves[CountTensors.auto], curves[CountTensors.always]
    assert all(map(tensors_of, always))
    assert [bool(tensors_of(row)) for row in auto][:2] == [True, True]
    for phase in ("collect", "forward", "backward") if "loss=mpo" in words else PHASES:
        name = f"memory/{phase}_tensors_peak_bytes"
        highest = max(row[name] for row in always)
        assert max(row.get(name, 0) for row in auto) == pytest.approx(
            highest, rel={"engine=fsdp2": 0.05, "engine=zero2": 0.02}.get(words[0], 0.01)
        ), phase


# ---- the counter ----


def test_what_existed_before_is_found_and_a_mode_can_be_entered_again() -> None:
    live, held = LiveTensors(lasting=True), 0
    before = torch.zeros(1 << 20)
    live.find()
    held = live.held("cpu").live
    assert held >= 4 << 20
    with live:
        inside = torch.zeros(1 << 20)
        assert live.held("cpu").live == held + (4 << 20)
    del before, inside  # while it is left
    assert live.held("cpu").live == held - (4 << 20)
    resized = torch.zeros(1 << 10)
    with live:
        live.see(resized)
    resized.untyped_storage().resize_(0)
    held = live.held("cpu").live
    with live:
        assert live.held("cpu").live == held - (4 << 10)


@pytest.mark.parametrize(("lasting", "left"), [(False, 4 << 10), (True, 0)])
def test_what_is_freed_after_it_was_left_is_told_if_it_is_lasting(lasting: bool, left: int) -> None:
    with LiveTensors(lasting=lasting) as live:
        made = torch.zeros(1 << 10)
    del made
    assert live.held("cpu").live == left


def test_a_backward_pass_is_counted_with_what_it_recomputes() -> None:
    from torch.utils.checkpoint import checkpoint

    def wide(x: Tensor) -> Tensor:
        threads.add(threading.get_ident())
        return (x * torch.ones(1 << 20)).sin().sum()

    threads: set[int] = set()
    x = torch.ones((), requires_grad=True)
    with LiveTensors() as live:
        y: Any = checkpoint(wide, x, use_reentrant=False)
        kept = live.held("cpu").live
        live.reset_peaks()
        y.backward()
        assert live.held("cpu").peak - kept >= 3 * (4 << 20)
    assert threads == {threading.get_ident()}


def test_micro_batches_are_chosen_that_may_hold_more_than_before() -> None:
    count = TensorCount(CPU, always=False)

    def counted(*sizes: int) -> list[int]:
        count.begin()
        count.choose(sizes)
        return [place for place in range(len(sizes)) if on(place)]

    def on(place: int) -> bool:
        with count.micro_batch(place):
            return count.on

    assert counted(5, 9, 7, 8) == [0, 1, 3]
    assert counted(5, 6, 7, 4) == [0, 2, 3]  # the second step: with the optimizer's state
    assert counted(7, 7, 7, 7) == []
    assert counted(1, 1, 1, 8) == [0, 3]
    for phase in ("collect", "optimizer"):
        with count.phase(phase):
            assert count.on
    assert counted(2) == []
    expected = {"collect": False, "optimizer": False, "rollout": True, "forward": False}
    for phase, on_ in (*expected.items(), ("rollout", False)):
        with count.phase(phase):
            assert count.on is on_
    before = count.peak
    kept = torch.zeros(1 << 20)  # by a part that is not counted
    assert counted(9) == [0]
    assert count.peak >= before + 4 * len(kept)


def test_all_that_exists_is_looked_at_first_and_after_steps_that_were_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []
    looks: list[int] = []
    monkeypatch.setattr(LiveTensors, "find", lambda _self: looks.append(len(begun)))
    count = TensorCount(CPU, always=False)
    for tokens in (5, 5, 5, 4, 9, 9, 10, 11):
        begun.append(tokens)
        count.begin()
        count.choose([tokens])
    assert looks == [1, 5, 7]


def test_what_is_freed_between_two_counted_parts_is_not_held() -> None:
    count = TensorCount(CPU, always=True)
    with count.throughout():
        made = torch.zeros(1 << 20)
    del made
    count.reset_peak()
    assert count.peak == 0


def test_phases_report_the_highest_count_so_far(tmp_path) -> None:
    phases = Phases(CPU, Whereabouts(tmp_path, 0).tell, TensorCount(CPU, always=False))
    world = World(0, 1, ALONE)
    with phases("data"):
        (line,) = read(tmp_path)
    assert line["step"] == 0

    def step(number: int, size: int) -> Row:
        phases.begin(number)
        phases.choose([size])
        with phases.micro_batch(0):
            with phases("forward"):
                kept = torch.zeros(1 << 20)
            with phases("backward"):
                torch.zeros(1 << 21)
        with phases("optimizer"):
            del kept
        phases.report(meter := Meter(world, CPU))
        return meter.reduce()

    step(1, 7)
    found = step(2, 7)
    least = found["forward_tensors_peak"]
    assert found["tensors_peak"] == found["backward_tensors_peak"] == least + (8 << 20)
    assert found["optimizer_tensors_peak"] == least
    uncounted = step(3, 7)  # the highest so far
    assert {name: uncounted[name] for name in found if "tensors" in name} == {
        name: value for name, value in found.items() if "tensors" in name
    }
    (line,) = read(tmp_path)
    assert line["tensors"]["backward"] == found["backward_tensors_peak"]
    assert set(line["tensors"]) == {"forward", "backward", "optimizer"}
