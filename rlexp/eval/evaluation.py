"""Start the ranks of an evaluation."""

from __future__ import annotations

import dataclasses
import tempfile

from rlexp.base.engine_facts import ENGINES
from rlexp.eval.job import EvalJob, Evaluation
from rlexp.launch.joining import prepare_environment
from rlexp.launch.local import PRELOAD, run_ranks
from rlexp.launch.preflight_check import laid_out


def evaluate(job: EvalJob) -> Evaluation:
    """Evaluate on ranks of this machine."""
    from rlexp.eval.rank import evaluate_rank

    job = dataclasses.replace(job, cfg=laid_out(job.cfg))
    prepare_environment(job.cfg.launch)
    deepspeed = ("deepspeed",) if ENGINES[job.cfg.engine.name.value].loads_pieces else ()
    with tempfile.TemporaryDirectory(prefix="rlexp-eval-") as folder:
        found: list[Evaluation] = run_ranks(
            evaluate_rank, job.cfg.parallel.world_size, (job, folder), device=job.cfg.launch.device.value,
            preload=(*PRELOAD, *deepspeed),
        )  # fmt: skip
    return found[0]
