"""Start the ranks that generate."""

from __future__ import annotations

import dataclasses
import tempfile

from rlexp.base.engine_facts import ENGINES
from rlexp.generate.job import Answered, GenerateJob
from rlexp.launch.joining import prepare_environment
from rlexp.launch.local import PRELOAD, run_ranks
from rlexp.launch.preflight_check import laid_out


def generate(job: GenerateJob) -> list[Answered]:
    """Generate on ranks of this machine."""
    from rlexp.generate.rank import generate_rank

    job = dataclasses.replace(job, cfg=laid_out(job.cfg))
    prepare_environment(job.cfg.launch)
    deepspeed = ("deepspeed",) if ENGINES[job.cfg.engine.name.value].loads_pieces else ()
    with tempfile.TemporaryDirectory(prefix="rlexp-generate-") as nothing:
        found: list[list[Answered]] = run_ranks(
            generate_rank, job.cfg.parallel.world_size, (job, nothing), device=job.cfg.launch.device.value,
            preload=(*PRELOAD, *deepspeed),
        )  # fmt: skip
    return found[0]
