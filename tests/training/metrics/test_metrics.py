"""How long ranks wait, what each phase of a step holds, and what is told of a step while it goes on."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec
from rlexp.launch.rank_progress import Whereabouts, last_seen, read, seconds_in_step, within_step
from rlexp.training.metrics import meter
from rlexp.training.metrics.memory import Phases, peak_bytes, reset_peak
from rlexp.training.metrics.meter import REPLICATED, SHARDED, Computing, Meter
from rlexp.training.sinks.base import Ending
from rlexp.training.sinks.jsonl import JsonlSink
from rlexp.training.world.groups import ALONE, Traffic, World, build_world
from tests.helpers.ranks import on_ranks


def meter_rank(spec: RankSpec) -> dict[str, float]:
    world = build_world(2)  # two replicas, a ring of two each
    meter = Meter(world, torch.device("cpu"))
    for _ in range(2):  # micro-batches
        # A sequence sum: both ranks of a ring hold the same. Replica 0 has 3 sequences, replica 1 has 1.
        total, count = ((6.0, 3), (10.0, 1))[world.replica]
        meter.add_mean("sequence", torch.tensor(total), count, REPLICATED)
        # A token sum: each rank holds the sum of its own tokens.
        meter.add_mean("token", torch.tensor(float(spec.rank)), torch.tensor(1 + spec.rank), SHARDED)
        meter.add_total("tokens", 5, SHARDED)
        meter.add_total("sequences", count, REPLICATED)
        meter.add_mean("nothing", torch.tensor(0.0), 0, SHARDED)
        meter.add_difference("apart", "sequence", "token")
        meter.add_difference("one alone", "sequence", "nothing")
    meter.add_max("peak", (3.0, 9.0, 4.0, 1.0)[spec.rank])
    meter.add_spread("wait", (2.0, 0.5, 4.0, 1.0)[spec.rank])
    return meter.reduce()


def test_one_reduction_tells_sharded_from_replicated() -> None:
    """And a difference of two means is that of the train batch's; without one of them there is none."""
    expected = {"sequence": 2 * 16 / 8, "token": 12 / 20, "tokens": 40.0, "sequences": 8.0, "peak": 9.0, "peak@rank": 1}
    assert on_ranks(4, meter_rank) == [expected | {"apart": 4.0 - 0.6, "wait": 3.5}] * 4


def test_values_are_added_up_in_float64() -> None:
    meter = Meter(World(0, 1, ALONE), torch.device("cpu"))
    for value in (1.0, 2.0**-30):
        meter.add_total("sum", torch.tensor(value), SHARDED)
    meter.add_max("largest", 0.1)
    meter.add_max("largest", torch.tensor(0.0))
    row = meter.reduce()
    assert (row["sum"], row["largest"]) == (1 + 2.0**-30, 0.1)


def slow_rank(spec: RankSpec, cfg: Config) -> tuple[float, float, tuple[int, ...]]:
    """Return how long a replica waits, by a clock in which only rank 1's forward passes take time: 0.2 s each; and how
    uneven the replicas' work is said to be, with the work of each."""
    from rlexp.training.metrics import meter
    from rlexp.training.train.build import build
    from rlexp.training.train.step import train_step
    from rlexp.training.train.surroundings import UNPROBED

    task = build(cfg, around=UNPROBED)
    forward, clock = task.run.engine.forward, SimpleNamespace(now=0.0)

    def slowly(shard: Any) -> Any:
        clock.now += 0.2 * spec.rank
        return forward(shard)

    task.run.engine.forward = slowly  # type: ignore[method-assign]
    meter.time = SimpleNamespace(monotonic=lambda: clock.now)  # type: ignore[assignment]
    row = train_step(task, 1)
    return row["train/replica_wait_seconds"], row["train/replica_skew"], task.begin(1).dealt.work


def test_how_long_a_replica_waits_for_a_slow_one_is_told() -> None:
    """Two micro-batches of a replica take 0.4 s longer, before anything is reduced. And the busiest replica's work is
    told, over the mean of both."""
    cfg = compose_config(["launch.device=cpu", "launch.nproc=2", "logger=none", "data=synthetic", "data.size=16",
                          "train.batch_size=8", "train.micro_batch_size=2", "engine=torch"])  # fmt: skip
    one, other = on_ranks(2, slow_rank, cfg)
    assert one == other
    waited, skew, work = one
    assert waited == pytest.approx(0.4)
    assert skew == pytest.approx(max(work) / np.mean(work))
    assert skew > 1


def test_waiting_for_the_others_of_the_ring_is_not_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, traffic = SimpleNamespace(now=0.0), Traffic()
    monkeypatch.setattr(meter, "time", SimpleNamespace(process_time=lambda: clock.now))
    computing = Computing(torch.device("cpu"), traffic)
    clock.now += 1.0
    for seconds in (0.25, 0.5):
        with traffic.waiting(traffic.send(8)):
            clock.now += seconds
        clock.now += 2.0
    computing.stop()
    clock.now += 4.0
    computing.stop()  # once more, which changes nothing
    with traffic.waiting():  # no one looks on any more
        clock.now += 8.0
    assert computing.seconds() == 5.0


def test_the_memory_peak_is_of_the_step_alone() -> None:
    cpu = torch.device("cpu")
    size = 256 << 20
    block = np.ones(size, dtype=np.uint8)
    assert peak_bytes(cpu) > size
    high = peak_bytes(cpu)
    del block
    reset_peak(cpu)
    assert peak_bytes(cpu) < high - size // 2


def test_each_phase_has_its_own_peak(tmp_path) -> None:
    phases = Phases(torch.device("cpu"), Whereabouts(tmp_path, 1).tell)
    phases.begin(7)
    with phases("data"):
        pass
    with phases("forward"), phases("data"):  # a phase inside another counts as part of it
        np.ones(256 << 20, dtype=np.uint8)
    with phases("backward"):
        pass
    meter = Meter(World(0, 1, ALONE), torch.device("cpu"))
    phases.report(meter)
    peaks = meter.reduce()
    assert peaks["forward_peak"] == peaks["peak"]
    assert peaks["forward_peak"] - max(peaks["data_peak"], peaks["backward_peak"]) > 200 << 20
    phases.begin(8)
    with phases("data"):
        pass
    again = Meter(World(0, 1, ALONE), torch.device("cpu"))
    phases.report(again)
    assert set(again.reduce()) == {"data_peak", "data_peak@rank", "peak", "peak@rank"}  # of this step only
    Whereabouts(tmp_path, 2).tell(step=9, phase="data", peaks={})
    assert last_seen(tmp_path, 2) == "in step 9, in its data phase"
    line, _ = read(tmp_path)  # rank 0 has written nothing
    assert (line["rank"], line["step"]) == (1, 8)
    assert line["peaks"]["forward"] == peaks["forward_peak"]


def test_how_far_a_step_is_is_told_while_it_goes_on(tmp_path) -> None:
    """Three packs have 60 tokens: 10 are done when the second begins. The next step knows how long a token takes."""
    phases = Phases(torch.device("cpu"), Whereabouts(tmp_path, 0).tell)
    told: list[dict[str, Any]] = []
    phases.watch = told.append
    phases.begin(4)
    phases.choose([10, 20, 30])
    for place in range(3):
        with phases.micro_batch(place):
            with phases("forward"):
                pass
            if place < 2:
                with phases.micro_batch(place + 1), phases("data"):
                    pass
                with phases("backward"):
                    pass
    with phases("optimizer"):
        pass
    assert [(each["pack"], each["packs"], each["tokens"], each["of_tokens"]) for each in told] == [
        (1, 3, 0, 60), (2, 3, 10, 60), (1, 3, 0, 60), (2, 3, 10, 60), (3, 3, 30, 60), (2, 3, 10, 60), (3, 3, 30, 60),
        (3, 3, 60, 60),
    ]  # fmt: skip
    assert [each["pace"] is None for each in told] == [place in (0, 2) for place in range(8)]
    assert last_seen(tmp_path, 0) == "in step 4, pack 3 of 3, in its optimizer phase"
    (line,) = read(tmp_path)
    line |= {"began": 100.0, "pace": 2.0}
    assert seconds_in_step(line, 130.0) == 30.0
    assert within_step(line, 130.0) == "pack 3 of 3, optimizer, 60 of 60 tokens, 90 s left of the step"
    phases.report(Meter(World(0, 1, ALONE), torch.device("cpu")))
    assert "packs" not in told[-1]
    assert seconds_in_step(told[-1], 130.0) == 0.0
    phases.begin(5)
    phases.choose([6])
    with phases.micro_batch(0), phases("forward"):
        pass
    assert told[-1]["pace"] > 0


def test_an_allocation_that_fails_is_told_with_its_phase(tmp_path) -> None:
    phases = Phases(torch.device("cpu"), Whereabouts(tmp_path, 2).tell)
    phases.begin(3)
    phases.choose([5, 6, 7])
    with pytest.raises(RuntimeError) as failure, phases.micro_batch(1), phases("backward"):
        torch.empty(1 << 60, dtype=torch.uint8)
    explained = str(phases.explained(failure.value, 2))
    assert explained.startswith("rank 2 ran out of memory in step 3, pack 2 of 3, in its backward phase (")
    assert "parallel.ring_size" in explained
    assert read(tmp_path)[0]["died"] == "out of memory"
    assert last_seen(tmp_path, 2) == "in step 3, pack 2 of 3, in its backward phase"
    assert phases.explained(ValueError("something else"), 2) is None


def test_rows_are_flushed_in_full_precision(tmp_path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log({"step": 1, "train/loss": 0.1 + 0.2})
    line = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")  # before it is closed
    assert json.loads(line) == {"step": 1, "train/loss": 0.30000000000000004}
    assert line.startswith('{"step"')
    sink.close(Ending())
