"""Predict configurations in a process that sees no GPU, as on a machine without one.

`foretell` starts the process, which runs `main`: they hand each other pickles.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlexp.config.checks.micro_batches import micro_batches
from rlexp.config.schema import Config


@dataclass(frozen=True)
class Asked:
    """What to predict: a configuration at its own length, or at the longest that fits."""

    cfg: Config
    gpu: bool = True  # False: on the CPU, as `rehearse.run.count` measures it
    rank: int = 0
    longest: bool = False


@dataclass(frozen=True)
class Foretold:
    peaks: dict[str, int] = field(default_factory=dict)  # bytes by phase
    seconds: float = 0.0  # of a step
    tokens: int = 0  # of the longest sequence that fits, if that was asked; 0: none does
    failed: str | None = None


def foretell(asked: Sequence[Asked]) -> list[Foretold]:
    """Predict all of them, several at a time. What fails says why."""
    with tempfile.TemporaryDirectory(prefix="rlexp-") as folder:
        question, answers = Path(folder, "asked"), Path(folder, "answers")
        question.write_bytes(pickle.dumps(list(asked)))
        start = "from bench.gpu_foretell import main; main()"  # as a module of its name, which the pickles say
        command = [sys.executable, "-c", start, str(question), str(answers)]
        subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, check=True)
        found: list[Foretold] = pickle.loads(answers.read_bytes())
    return found


def main() -> None:
    from rlexp.preflight import quietly

    quietly()
    from rlexp.preflight.children import at_once

    question, answers = map(Path, sys.argv[1:])
    asked = pickle.loads(question.read_bytes())
    _preload()
    found = at_once([_careful(each) for each in asked], len(os.sched_getaffinity(0)))
    answers.write_bytes(pickle.dumps(found))


def _preload() -> None:
    """Import what is common to all. Without DeepSpeed, its engines fail one by one."""
    if find_spec("deepspeed") is not None:
        from rlexp.preflight.rehearsal.rehearse import preload

        preload()


def _careful(asked: Asked) -> Any:
    try:
        found: Foretold = yield from _one(asked)
        return found
    except Exception as error:
        return Foretold(failed=f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")


def _one(asked: Asked) -> Any:
    from rlexp.preflight.changes import seconds
    from rlexp.preflight.longest_that_fits import fit_from, with_length
    from rlexp.preflight.predict import Prediction, plan_of, predict
    from rlexp.preflight.rehearsal.log import passes
    from rlexp.preflight.rehearsal.rates import UNTIMED
    from rlexp.preflight.rehearsal.rehearse import rehearse
    from rlexp.training.model.loading import load_config

    cfg, tokens = asked.cfg, 0
    model = load_config(cfg.model, cfg.data.max_length)
    if asked.longest:
        longest = yield from fit_from(cfg, model, (yield from predict(cfg, model)))
        tokens = longest.tokens
        if not tokens:
            return Foretold()
        cfg = with_length(cfg, tokens)
    if asked.gpu:
        found = yield from predict(cfg, model, asked.rank)
        prediction = found.prediction
    else:
        plan = dataclasses.replace(plan_of(cfg, model, asked.rank, None), gpu=False, rates=UNTIMED)
        (log,) = yield [(rehearse, (plan,))]
        prediction = Prediction(passes(log), log.layers, micro_batches(cfg))
    peaks = {phase: peak.bytes for phase, peak in prediction.peaks.items() if phase}
    return Foretold(peaks, seconds(prediction) or 0.0, tokens)
