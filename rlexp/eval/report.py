"""The values of an evaluation, for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlexp.base.version import __version__
from rlexp.base.wilson import wilson
from rlexp.config.load import to_plain
from rlexp.config.schema.cadence import plural
from rlexp.eval.job import EvalJob, Evaluation
from rlexp.run_files.evaluations import OF_LENGTH, by_length


def head(job: EvalJob) -> str:
    """Say what is evaluated, before it is read."""
    cfg, of = job.cfg, job.folder or job.cfg.model.called
    return f"rlexp {__version__}  {cfg.loss.name} of {of}, {cfg.train.precision.value}\n"


def text(job: EvalJob, result: Evaluation) -> str:
    parallel = job.cfg.parallel
    step = f"after step {result.step}, " * (result.checkpoint is not None)
    lines = [
        f"  {step}{plural(result.held_out, f'held-out {result.kind}')}, on a ring of {parallel.ring_size} "
        f"({result.layout}) × {plural(parallel.dp_size, 'replica')}",
        "",
    ]
    whole = {name: value for name, value in result.values.items() if not OF_LENGTH.fullmatch(name)}
    width = max(map(len, whole))
    lines += [f"  {name:<{width}}  {value:<10.6g}{interval(name, value, result)}".rstrip()
              for name, value in whole.items()]  # fmt: skip
    if parts := by_length(result.values):
        lines += ["", *table(parts, result.kind)]
    return "\n".join(lines) + "\n"


def interval(name: str, value: float, result: Evaluation) -> str:
    """Return the interval of an accuracy that is a share of the examples."""
    if name != "eval/rewards/accuracies":
        return ""
    low, high = wilson(value, result.held_out)
    return f"  95 % interval {low:.4f} to {high:.4f}"


def table(parts: Mapping[str, Mapping[str, float]], kind: str) -> Iterator[str]:
    yield f"  {'tokens':<15}{kind + 's':>9}{'loss':>10}{'accuracy':>10}   95 % interval"
    for name, part in parts.items():
        line = f"  {name:<15}{int(part['examples']):>9,}"
        if "loss" in part:
            line += f"{part['loss']:>10.4f}"
        if "accuracy" in part:
            line += f"{part['accuracy']:>10.4f}   {part['accuracy_low']:.4f} to {part['accuracy_high']:.4f}"
        yield line


def write(job: EvalJob, result: Evaluation, place: Path) -> None:
    record = {
        "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
        "step": result.step,
        "held_out": result.held_out,
        "values": result.values,
        "config": to_plain(job.cfg),
    }
    place.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
