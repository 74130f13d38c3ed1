"""Start the ranks of an evaluation, or of another command that looks at a trained model."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any, TypeVar

from rlexp.base.engine_facts import ENGINES
from rlexp.base.waiting import busy_message
from rlexp.eval.job import EvalJob, Evaluation
from rlexp.launch.joining import prepare_environment
from rlexp.launch.local import PRELOAD, run_ranks
from rlexp.launch.preflight_check import laid_out

Result = TypeVar("Result")


def evaluate(job: EvalJob) -> Evaluation:
    """Evaluate on ranks of this machine."""
    with busy_message("evaluates"):
        from rlexp.eval.rank import evaluate_rank

        return on_ranks(evaluate_rank, job)


def on_ranks(work: Callable[..., Result], job: Any) -> Result:
    """Run `work` on ranks of this machine, with the job and an empty folder, and return what rank 0 returns."""
    job = dataclasses.replace(job, cfg=(cfg := laid_out(job.cfg)))
    prepare_environment(cfg.launch)
    deepspeed = ("deepspeed",) if ENGINES[cfg.engine.name.value].loads_pieces else ()
    with tempfile.TemporaryDirectory(prefix="rlexp-eval-") as folder:
        return run_ranks(
            work, cfg.parallel.world_size, (job, folder), device=cfg.launch.device.value,
            preload=(*PRELOAD, *deepspeed),
        )[0]  # fmt: skip
