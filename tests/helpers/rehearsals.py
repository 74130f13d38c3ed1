"""Rehearse runs, and count what real ranks do, for the tests of rehearsals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlexp.config.elsewhere import compose_elsewhere
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec
from rlexp.preflight import quietly
from rlexp.preflight.children import at_once
from rlexp.preflight.predict import Prediction, plan_of, predict
from rlexp.preflight.rehearsal.log import passes
from rlexp.preflight.rehearsal.rehearse import RehearsalPlan, count, rehearse
from rlexp.preflight.whether_it_fits import judge
from rlexp.training.model.loading import load_config
from tests.helpers.paths import FILES
from tests.helpers.ranks import on_ranks

ENGINES = ("torch", "zero0", "zero1", "zero2", "zero3", "fsdp2")
SHORT = ("launch.device=cpu", "logger=none", "data.max_length=256", "train.batch_size=4", "train.max_steps=1")
GPU = ("logger=none", "data.max_length=512", "train.max_steps=1", "hardware=h100")

MODELS = FILES / "models"
STEP = ("forward", "reference", "backward")
PEAKS = (*STEP, "rollout", "score")
Summary = dict[str, Any]


def elsewhere(*words: str) -> Config:
    return compose_elsewhere([*GPU, *words])


def summary(passes: Any) -> Summary:
    """Return the highest sum of each phase, and what is computed and sent in all."""
    found = Prediction(passes, 0, 1)
    peaks = {phase: peak.bytes for phase, peak in found.peaks.items() if phase in PEAKS}
    counts = found.counts()
    return {"peak": found.peak.bytes, "peaks": peaks, "flops": counts.flops, "sent": +counts.sent}


def plan(cfg: Config, rank: int, *, gpu: bool = False, **changes: Any) -> Any:
    return RehearsalPlan(cfg, load_config(cfg.model, cfg.data.max_length), rank, gpu=gpu, **changes)


def counted(spec: RankSpec, cfg: Config) -> Summary:
    return summary(passes(count(plan(cfg, spec.rank))))


def rehearsed(cfg: Config, rank: int) -> Summary:
    return alone(_rehearsed, cfg, rank)


def _rehearsed(cfg: Config, rank: int) -> Summary:
    return summary(passes(rehearse(plan(cfg, rank))))


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a process of its own that belongs to no world."""
    return on_ranks(1, parted, function, args)[0]


def parted(_spec: RankSpec, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.distributed.destroy_process_group()
    return function(*args)


def judged(cfg: Config, helping: float = 0) -> dict[str, Any]:
    """Return what a launcher is told of whether a run fits."""
    quietly()
    return judge(cfg, fitting=True, seconds=200, helping=helping)


def fast(*engines: str) -> list[Any]:
    """All engines, of which these are in `make test`."""
    return [pytest.param(engine, marks=() if engine in engines else pytest.mark.slow) for engine in ENGINES]


def stretched(cfg: Config) -> tuple[Summary, Summary]:
    """Predict all layers from few, and rehearse all."""
    model = load_config(cfg.model, cfg.data.max_length)
    calls: list[int] = []

    def watched() -> Any:
        task, answer = predict(cfg, model, 0), None
        while True:
            try:
                asked = task.send(answer)
            except StopIteration as end:
                return end.value
            calls.append(max(call[1][0].layers or model.num_hidden_layers for call in asked))
            answer = yield asked

    def whole() -> Any:
        (log,) = yield [(rehearse, (plan_of(cfg, model, 0, None),))]
        return log

    found, log = at_once([watched(), whole()], 2)
    all_of_them = cfg.engine.name.value not in ("zero3", "fsdp2")  # which treat all layers alike
    assert (max(calls) == model.num_hidden_layers) == all_of_them
    return summary(found.prediction.passes), summary(passes(log))
