"""Find where a recorded run and the reference first differ, stage by stage.

data → log-probabilities → loss → gradient → optimizer → metrics, for each step. Of samples that the policy draws also
their rewards, before log-probabilities, and their advantages, before the loss. Where possible a stage is checked
twice: against the reference, and *given* the run's own values before it (its own log-probabilities for its loss, its
own gradient for its weights), which is exact in every precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rlexp.config.schema.models import Precision
from rlexp.verify.compared import ComparedStep, Comparison
from rlexp.verify.compared_samples import SamplesComparison, SampleStep
from rlexp.verify.findings import (
    ADVANTAGES,
    DATA,
    GRADIENT,
    LOGPS,
    LOSS,
    METRICS,
    OPTIMIZER,
    REWARDS,
    Clue,
    Finding,
    worst_element,
)
from rlexp.verify.norms import in_bfloat16
from rlexp.verify.records import Array
from rlexp.verify.stages import rollouts, samples
from rlexp.verify.stages.data import data
from rlexp.verify.stages.loss import derivatives, logps, losses
from rlexp.verify.stages.metrics import metrics
from rlexp.verify.stages.update import gradient, optimizer


def _gradient_of_rows(step: ComparedStep) -> Iterator[Finding]:
    yield from derivatives(step)
    yield from gradient(step)


def _gradient_of_samples(step: SampleStep) -> Iterator[Finding]:
    yield from samples.derivatives(step)
    yield from gradient(step)


OF_ROWS = {DATA: data, LOGPS: logps, LOSS: losses, GRADIENT: _gradient_of_rows, OPTIMIZER: optimizer, METRICS: metrics}
OF_SAMPLES = {
    DATA: samples.data,
    REWARDS: rollouts.rewards,
    LOGPS: samples.logps,
    ADVANTAGES: rollouts.credit,
    LOSS: samples.losses,
    GRADIENT: _gradient_of_samples,
    OPTIMIZER: optimizer,
    METRICS: samples.metrics,
}
STAGES = {**OF_ROWS, **OF_SAMPLES}  # the names of all


def differences(whole: Comparison) -> Iterator[Finding]:
    """Yield all differences in order; usually none. The first is the one to report."""
    yield from _start(whole)
    stages: Any = OF_SAMPLES if isinstance(whole, SamplesComparison) else OF_ROWS
    for step in whole.steps():
        for stage in stages.values():
            yield from stage(step)
    if (stopped := whole.traces[0].stopped) is not None:
        last = len(whole.traces[0].steps)
        yield Finding(last, METRICS, Clue.POSITION, "the run refuses to step", stopped, "everything is finite")


def has_its_data(step: ComparedStep) -> bool:
    """Whether a step has the samples and tokens that it must have."""
    stage: Any = samples.data if isinstance(step, SampleStep) else data
    return next(stage(step), None) is None


def _start(whole: Comparison) -> Iterator[Finding]:
    head = whole.traces[0]
    if head.examples != whole.expected.examples:
        what = f"{whole.word}s in the data set"
        yield Finding(1, DATA, Clue.PAIRS, what, str(head.examples), str(whole.expected.examples))
    if head.total_steps != whole.expected.total_steps:
        got, wanted = str(head.total_steps), str(whole.expected.total_steps)
        yield Finding(1, DATA, Clue.SAMPLES, "optimizer steps of the whole run", got, wanted)
    if whole.cfg.train.precision is Precision.fp64 and head.dtypes != ("torch.float64",):
        yield Finding(1, LOGPS, Clue.DTYPE, "precision of the parameters", ", ".join(head.dtypes), "torch.float64")
    names, meant = whole.ran.names("weights", 0), whole.meant.names("weights", 0)
    for name in sorted(set(names) ^ set(meant)):
        there = ("is there", "is not there")
        yield Finding(1, LOGPS, Clue.START, name, there[name not in names], there[name not in meant])
    for name in names:
        ours, theirs = whole.ran.read("weights", 0, name), whole.meant.read("weights", 0, name)
        theirs = _as_held(whole, name, theirs)
        if ours.shape != theirs.shape or not np.array_equal(ours, theirs):
            yield Finding(1, LOGPS, Clue.START, f"starting weight {name}", *worst_element(ours, theirs))


def _as_held(whole: Comparison, name: str, weight: Array) -> Array:
    """A starting weight with the bits that a run holds: those of its masters, or of what computes if nothing trains
    it."""
    precision = whole.cfg.train.precision
    if precision is Precision.fp64:
        return weight
    trained = name in whole.meant.names("gradient", 1)
    return in_bfloat16(weight) if precision is Precision.bf16 and not trained else weight.astype(np.float32)
