"""Draw the curves of configurations in-process, and measure the differences between two of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np

from rlexp.base.engine_facts import ENGINES
from rlexp.config.schema import Config
from rlexp.launch.joining import ON_CPU, RankSpec, prepare_environment
from rlexp.launch.local import PRELOAD, run_ranks
from rlexp.run_files.curve_distance import LOSS_TOLERANCE, METRIC_TOLERANCE, compared
from rlexp.run_files.metrics_jsonl import MetricRow
from rlexp.training.sinks.base import Sink, Sinks
from rlexp.training.types import Floats

if TYPE_CHECKING:
    from rlexp.training.rollout.bridge import Bridge
    from rlexp.training.train.rollout_supply import Rollouts
    from rlexp.training.train.task import Task

# Runs that draw their own samples log this beside the whole loss. It is a sum of advantages of both signs whose mean
# vanishes: what remains may be only rounding (1e-18 with whitened advantages), and a relative difference says nothing.
# Such a loss has the tolerance of the other metrics.
POLICY_LOSS = "train/loss/policy_avg"
# How far apart the final weights may be. AdamW divides each gradient by its size, so that of an element which is nearly
# rounding counts in full. Measured: 1.1e-12 for dpo_norm and ipo over a ring of 4 with padding; 1e-14 with
# optim.eps=1e-6, 1e-16 with SGD.
WEIGHTS_TOLERANCE = 3e-12


@dataclass(frozen=True)
class Drawn:
    """A sample that a run drew, with its score and advantages."""

    prompt: int
    tokens: tuple[int, ...]
    score: float
    advantages: Floats


@dataclass(frozen=True)
class Curve:
    """The rows and final weights of a run."""

    rows: list[MetricRow]
    weights: dict[str, np.ndarray]
    samples: list[tuple[int, ...]]  # of each optimizer step
    drawn: list[list[Drawn]] = field(default_factory=list)  # of each rollout, by their places


def draw(configs: Sequence[Config], *, timeout: float = 1800.0) -> list[Curve]:
    """Draw the curves of configurations, with one start of ranks for each world size."""
    prepare_environment(ON_CPU)
    preload = PRELOAD + (("deepspeed",) if any(ENGINES[c.engine.name.value].stage is not None for c in configs) else ())
    curves: dict[int, Curve] = {}
    for training, sampling in sorted({_ranks(config) for config in configs}):
        places = [place for place, config in enumerate(configs) if _ranks(config) == (training, sampling)]
        drawn = run_ranks(
            draw_rank, training + sampling, ([configs[place] for place in places],), preload=preload, timeout=timeout
        )[0]
        curves |= dict(zip(places, cast(list[Curve], drawn), strict=True))
    return [curves[place] for place in range(len(configs))]


def _ranks(config: Config) -> tuple[int, int]:
    """The number of training ranks, and of ranks that only sample."""
    return config.parallel.world_size, config.rollout.sampling_ranks


def draw_rank(spec: RankSpec, configs: Sequence[Config]) -> list[Curve] | None:
    from rlexp.run.job import join_for

    bridge = join_for(spec, configs[0])
    curves = [_draw_one(config, bridge) for config in configs]
    return cast(list[Curve], curves) if spec.rank == 0 else None


def _draw_one(config: Config, bridge: Bridge | None) -> Curve | None:
    from rlexp.training.train.build import build
    from rlexp.training.train.loop import train_loop
    from rlexp.training.train.rank import sample_for
    from rlexp.training.train.surroundings import UNPROBED

    if bridge is not None and bridge.samples:
        sample_for(config, bridge)
        return None
    task = build(config, bridge=bridge, around=UNPROBED)
    kept = _Kept(task)
    try:
        train_loop(task, Sinks([kept]))
        task.finish()
    finally:
        task.close()
    weights = {name: weight.double().cpu().numpy() for name, weight in task.run.engine.weights()}
    return Curve(kept.rows, weights, kept.samples, kept.drawn)


class _Kept(Sink):
    """A sink that keeps the rows, and the samples that they are of. Every rank has one."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.rows: list[MetricRow] = []
        self.samples: list[tuple[int, ...]] = []
        self.drawn: list[list[Drawn]] = []

    def log(self, row: MetricRow) -> None:
        self.rows.append(row)
        from rlexp.training.train.rollout_task import RolloutTask

        if row["step"] == 0:  # before the first step
            return
        task = self._task
        self.samples.append(task.batch(int(row["step"])).indices)
        if isinstance(task, RolloutTask) and len(self.drawn) <= task.rollouts.number:
            self.drawn.append(drawn_of(task.rollouts))


def drawn_of(rollouts: Rollouts) -> list[Drawn]:
    """The samples of the rollout that is held, of all ranks. A collective call."""
    from rlexp.training.rollout.experience import fetch

    samples = []
    for sample in fetch(rollouts.own_samples, range(rollouts.size), rollouts.host):
        assert sample.advantages is not None
        samples.append(Drawn(sample.example.index, tuple(sample.answer.tolist()), sample.score, sample.advantages))
    return samples


def differences(one: Curve, other: Curve) -> dict[str, float]:
    """The largest relative difference of every compared metric, over all steps, and of the final weights."""
    assert len(one.rows) == len(other.rows), (len(one.rows), len(other.rows))
    worst: dict[str, float] = {}
    for a, b in zip(one.rows, other.rows, strict=True):
        apart = set(filter(compared, a.keys() ^ b.keys()))  # those of a layout itself may be another's
        assert not apart, apart
        for name in filter(compared, a):
            worst[name] = max(worst.get(name, 0.0), relative(a[name], b[name]))
    worst["weights"] = weight_difference(one, other)
    return worst


def weight_difference(one: Curve, other: Curve) -> float:
    """The largest difference, relative to the largest weight of each tensor; NaN if any is."""
    return float(np.max([_gap(weight, other.weights[name]) for name, weight in one.weights.items()]))


def _gap(one: Floats, other: Floats) -> float:
    gap = float(np.abs(one - other).max())
    return gap / float(np.abs(one).max()) if gap else 0.0  # two tensors of zeros, like a new critic's head, are equal


def relative(a: float, b: float) -> float:
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def excesses(one: Curve, other: Curve) -> list[str]:
    """List where two float64 curves differ by more than rounding: step, metric, both values."""
    lines = list(_other_samples(one, other))
    for a, b in zip(one.rows, other.rows, strict=True):
        for name in filter(compared, a):
            if not within(name, a[name], b[name], samples=POLICY_LOSS in a):
                lines.append(f"step {a['step']}: {name} is {a[name]!r} and {b[name]!r}")
    if not (difference := weight_difference(one, other)) <= WEIGHTS_TOLERANCE:
        lines.append(f"final weights differ by {difference:.1e}")
    return lines


def within(name: str, a: float, b: float, *, samples: bool) -> bool:
    """Whether two float64 values of a metric agree. `samples`: whether the run draws its own samples."""
    rel, absolute = (LOSS_TOLERANCE, 0.0) if name.endswith("/loss") and not samples else METRIC_TOLERANCE
    return abs(a - b) <= rel * max(abs(a), abs(b)) + absolute


def shares(one: Curve, other: Curve) -> dict[str, tuple[float, float]]:
    """The largest absolute difference, and the largest share of the tolerance, of every compared metric over all steps
    and of the drawn samples' scores and advantages."""
    worst: dict[str, tuple[float, float]] = {}

    def note(name: str, a: float, b: float) -> None:
        rel, absolute = METRIC_TOLERANCE
        apart = abs(a - b)
        share = apart / (rel * max(abs(a), abs(b)) + absolute)
        most, share_of_it = worst.get(name, (0.0, 0.0))
        worst[name] = (max(most, apart), max(share_of_it, share))

    for a, b in zip(one.rows, other.rows, strict=True):
        apart = set(filter(compared, a.keys() ^ b.keys()))  # those of a layout itself may be another's
        assert not apart, apart
        for name in filter(compared, a):
            note(name, a[name], b[name])
    for ours, theirs in zip(one.drawn, other.drawn, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            note("a sample's score", x.score, y.score)
            for v, w in zip(x.advantages.tolist(), y.advantages.tolist(), strict=True):
                note("a token's advantage", v, w)
    return worst


def _other_samples(one: Curve, other: Curve) -> Iterator[str]:
    """Yield differences between the drawn samples, or between the scores and advantages of the same samples."""
    if len(one.drawn) != len(other.drawn):
        yield f"{len(one.drawn)} rollouts and {len(other.drawn)}"
    for number, (ours, theirs) in enumerate(zip(one.drawn, other.drawn, strict=False)):
        if len(ours) != len(theirs):
            yield f"rollout {number}: {len(ours)} samples and {len(theirs)}"
        for place, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if (a.prompt, a.tokens) != (b.prompt, b.tokens):
                yield f"rollout {number}: sample {place} is {a.tokens} and {b.tokens}"
            elif not within("score", a.score, b.score, samples=True):
                yield f"rollout {number}: sample {place} scored {a.score!r} and {b.score!r}"
            elif not all(within("advantages", float(x), float(y), samples=True)
                         for x, y in zip(a.advantages, b.advantages, strict=True)):  # fmt: skip
                yield f"rollout {number}: sample {place} has advantages {a.advantages} and {b.advantages}"
