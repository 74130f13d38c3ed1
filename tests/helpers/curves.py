"""Make run folders with invented curves, as a run would leave them."""

from __future__ import annotations

import functools
import json
import os
import socket
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlexp.compare import comparison as reports
from rlexp.compare.__main__ import main
from rlexp.compare.families import sort_out
from rlexp.compare.runs import RunReader
from rlexp.config.identity import identity
from rlexp.config.load import compose_config, to_file
from rlexp.config.schema import Config
from rlexp.launch.run_folder import derived_sizes
from rlexp.run_files.rollouts_jsonl import digests
from rlexp.training.sinks.base import RolloutFacts
from rlexp.training.sinks.jsonl import line_of_rollout

Edit = Callable[[dict[str, Any]], None]
Flip = tuple[int, int, int, int]


@functools.cache
def composed(*overrides: str) -> Config:
    """Compose each configuration once: most runs here are of a few."""
    return compose_config(["launch.device=cpu", "logger=none", *overrides])


@functools.cache
def written(*overrides: str) -> tuple[str, dict[str, Any]]:
    """Return config.yaml, and what run.json says of the configuration."""
    cfg = composed(*overrides)
    with tempfile.TemporaryDirectory() as folder:
        to_file(cfg, Path(folder) / "config.yaml")
        text = (Path(folder) / "config.yaml").read_text(encoding="utf-8")
    return text, {"sizes": derived_sizes(cfg), "identity": identity(cfg)}


def a_run(
    folder: Path,
    *overrides: str,
    steps: int = 20,
    noise: float = 0.0,
    edit: Edit | None = None,
    total_steps: int = 20,
    drawn: Sequence[RolloutFacts] = (),
    **facts: Any,
) -> Path:
    """Write a run with the same curve for every layout, up to relative `noise`.

    `edit` changes rows, `facts` changes run.json. A run with `drawn` samples has the metrics of such a run, with those
    of a rollout in the row of its first step.
    """
    text, of_configuration = written(*overrides)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    known = {"status": "finished", "reason": "all steps are done", **of_configuration, "steps": total_steps,
             "host": socket.gethostname(), "pid": os.getpid()}  # fmt: skip
    (folder / "run.json").write_text(json.dumps(known | facts), encoding="utf-8")
    random = np.random.default_rng(zlib.crc32(folder.name.encode()))
    lines = []
    firsts = {facts.step for facts in drawn}
    for row in rows(steps):
        if drawn:
            row["train/policy/approxkl_avg"] = 1e-4 * abs(row["train/rewards/margins"])
            row |= {"train/objective/scores": row["step"] / 20} if row["step"] in firsts else {}
        for name in row:
            if noise and name in ("train/loss", "eval/loss", "train/rewards/margins"):
                row[name] *= 1 + noise * random.uniform(-1, 1)
        row["train/step_seconds"] = 0.1 * composed(*overrides).parallel.ring_size
        if edit:
            edit(row)
        lines.append(json.dumps(row) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    if drawn:
        (folder / "rollouts.jsonl").write_bytes(b"".join(map(line_of_rollout, drawn)))
    return folder


def drawn(
    steps: int = 20, *, each: int = 4, prompts: int = 4, n_samples: int = 2, flips: Sequence[Flip] = ()
) -> list[RolloutFacts]:
    """Make rollouts of `each` steps. A flip (step, prompt's place, sample, token) changes it and all after it."""
    rollouts = []
    for number, step in enumerate(range(1, steps + 1, each), 1):
        random = np.random.default_rng(number)
        answers = [random.integers(0, 50, 11, dtype=np.int32) for _ in range(prompts * n_samples)]
        for at, prompt, sample, token in flips:
            if at <= step:  # later samples come from other weights
                answers[prompt * n_samples + sample][token - 1 :] += 50
        indices = [10 * number + place for place in range(prompts)]
        rollouts.append(RolloutFacts(number, step, n_samples, indices, [digests(answer) for answer in answers]))
    return rollouts


def rows(steps: int) -> list[dict[str, Any]]:
    curve = []
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "train/loss": 0.1 + 0.593 * float(np.exp(-step / 30)) + 0.02 * float(np.sin(step)),
            "train/rewards/margins": float(np.sin(step / 5)),
            "train/tokens": 1000 + step,
            "train/total_tokens": sum(1000 + s for s in range(1, step + 1)),
            "memory/peak_bytes": 4_000_000 + step,
        }
        if step % 10 == 0:
            row["eval/loss"] = 0.2 + 0.1 / step
        curve.append(row)
    return curve


def compare(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def report_of(folder: Path) -> reports.Report:
    group = RunReader().group(folder)
    assert group is not None
    return reports.make(group, sort_out(group, baseline=None, force=False))


def nudged(step: int, by: float, name: str = "train/loss") -> Edit:
    """Return a change of a metric, from a step on."""

    def edit(row: dict[str, Any]) -> None:
        if row["step"] >= step and name in row:
            row[name] += by

    return edit


def a_job(number: int, folder: str, axes: dict[str, str], *, baseline: int = 0, **facts: Any) -> dict[str, Any]:
    """Return an entry of a sweep's ledger."""
    known = {"number": number, "folder": folder, "overrides": [], "axes": axes, "baseline": baseline}
    return known | {"status": "finished", "reason": None} | facts
