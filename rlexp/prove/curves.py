"""Draw the curves of configurations in-process, and measure how far two of them lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from rlexp.compare.difference import LOSS_TOLERANCE, METRIC_TOLERANCE, compared
from rlexp.config.schema import Config, EngineName
from rlexp.launch.local import PRELOAD, run_ranks
from rlexp.launch.place import Place, prepare_environment
from rlexp.sinks.base import Sink, Sinks
from rlexp.types import MetricRow

if TYPE_CHECKING:
    from rlexp.ring.bridge import Bridge


@dataclass(frozen=True)
class Curve:
    """What a run came to: its rows, and its final weights."""

    rows: list[MetricRow]
    weights: dict[str, np.ndarray]
    samples: list[tuple[int, ...]]  # of each optimizer step


def draw(configs: Sequence[Config], *, timeout: float = 1800.0) -> list[Curve]:
    """The curves of configurations, those of equal world sizes in one start of ranks."""
    prepare_environment("cpu")
    preload = PRELOAD + (("deepspeed",) if any(c.engine.name is not EngineName.torch for c in configs) else ())
    curves: dict[int, Curve] = {}
    for training, sampling in sorted({_ranks(config) for config in configs}):
        places = [place for place, config in enumerate(configs) if _ranks(config) == (training, sampling)]
        drawn = run_ranks(
            draw_rank, training + sampling, ([configs[place] for place in places],), preload=preload, timeout=timeout
        )[0]
        curves |= dict(zip(places, cast(list[Curve], drawn), strict=True))
    return [curves[place] for place in range(len(configs))]


def _ranks(config: Config) -> tuple[int, int]:
    """How many train, and how many only sample."""
    return config.parallel.world_size, config.rollout.sampling_ranks


def draw_rank(place: Place, configs: Sequence[Config]) -> list[Curve] | None:
    from rlexp.launch.place import join

    launch, sampling = configs[0].launch, configs[0].rollout.sampling_ranks
    bridge = join(place, launch.device.value, launch.timeout_seconds, launch.torch_threads, sampling)
    curves = [_draw_one(config, bridge) for config in configs]
    return cast(list[Curve], curves) if place.rank == 0 else None


def _draw_one(config: Config, bridge: Bridge | None) -> Curve | None:
    from rlexp.train.build import build
    from rlexp.train.loop import train_loop
    from rlexp.train.sampling_rank import sample_for

    if bridge is not None and bridge.samples:
        sample_for(config, bridge)
        return None
    run = build(config, bridge=bridge)
    kept = _Kept()
    train_loop(run, Sinks([kept]))
    if run.rollouts is not None:
        run.rollouts.finish()
        run.rollouts.close()
    weights = {name: weight.double().cpu().numpy() for name, weight in run.engine.weights()}
    return Curve(kept.rows, weights, [batch.indices for batch in run.sampler.batches(1, run.total_steps)])


class _Kept(Sink):
    """A sink that keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[MetricRow] = []

    def log(self, row: MetricRow) -> None:
        self.rows.append(row)


def differences(one: Curve, other: Curve) -> dict[str, float]:
    """The largest relative difference of every compared metric over all steps, and of the final weights."""
    assert len(one.rows) == len(other.rows), (len(one.rows), len(other.rows))
    worst: dict[str, float] = {}
    for a, b in zip(one.rows, other.rows, strict=True):
        assert a.keys() == b.keys(), a.keys() ^ b.keys()
        for name in filter(compared, a):
            worst[name] = max(worst.get(name, 0.0), relative(a[name], b[name]))
    worst["weights"] = weight_difference(one, other)
    return worst


def weight_difference(one: Curve, other: Curve) -> float:
    """Relative to the largest weight of each tensor."""
    return max(
        float(np.abs(weight - other.weights[name]).max() / np.abs(weight).max()) for name, weight in one.weights.items()
    )


def relative(a: float, b: float) -> float:
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def excesses(one: Curve, other: Curve) -> list[str]:
    """Where two float64 curves differ by more than rounding: step, metric, both values."""
    found = []
    for a, b in zip(one.rows, other.rows, strict=True):
        for name in filter(compared, a):
            difference = abs(a[name] - b[name])
            scale = max(abs(a[name]), abs(b[name]))
            rel, absolute = (LOSS_TOLERANCE, 0.0) if name.endswith("/loss") else METRIC_TOLERANCE
            if not difference <= rel * scale + absolute:
                found.append(f"step {a['step']}: {name} is {a[name]!r} and {b[name]!r}")
    if not (difference := weight_difference(one, other)) <= LOSS_TOLERANCE:
        found.append(f"final weights differ by {difference:.1e}")
    return found
