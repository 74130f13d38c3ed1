"""Start the ranks that generate."""

from __future__ import annotations

import dataclasses

from rlexp.base.waiting import busy_message
from rlexp.eval.evaluation import on_ranks
from rlexp.generate.job import Answered, GenerateJob
from rlexp.launch.preflight_check import laid_out


def generate(job: GenerateJob) -> list[Answered]:
    """Generate on ranks of this machine."""
    with busy_message("generates"):
        from rlexp.generate.rank import generate_rank

        job = dataclasses.replace(job, cfg=laid_out(job.cfg))
        answers: list[Answered] = on_ranks(generate_rank, job, job.cfg)
    return answers
