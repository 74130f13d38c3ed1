"""Run configurations with the code of one commit, for bench.unmoved, which starts this file by its path.

All else is imported from that commit's tree, so this file uses few names of rlexp. A line of JSON names a run's folder
and its settings; the answer is the seconds that it took, or NaN if it failed. CONSOLE has what rank 0 prints.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

CONSOLE = "console.txt"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    for line in sys.stdin:
        folder, words = json.loads(line)
        began = time.monotonic()
        try:
            run(Path(folder), words)
            seconds = time.monotonic() - began
        except Exception:
            seconds = math.nan
            (Path(folder) / CONSOLE).open("a", encoding="utf-8").write(traceback.format_exc())
        print(seconds, file=answers, flush=True)


def run(folder: Path, words: Sequence[str]) -> None:
    """Start or continue the run in a folder, as the command line does, but with ranks of this process."""
    folder.mkdir(parents=True, exist_ok=True)
    from rlexp.config.load import compose_config
    from rlexp.launch import run_folder
    from rlexp.launch.joining import ON_CPU, prepare_environment
    from rlexp.launch.local import PRELOAD, run_ranks

    cfg = compose_config(list(words))
    prepare_environment(ON_CPU)
    ranks = cfg.parallel.world_size + cfg.rollout.sampling_ranks
    try:
        if run_folder.enter(cfg, folder):
            outcome = run_ranks(rank, ranks, (str(folder),), preload=(*PRELOAD, "deepspeed"), timeout=300.0)[0]
            run_folder.close(folder, outcome.status, outcome.reason)
    finally:
        run_folder.leave(folder)


def rank(spec: Any, folder: str) -> Any:
    from rlexp.run.job import train_rank

    if spec.rank == 0:
        with open(os.path.join(folder, CONSOLE), "a") as console:
            for stream in (1, 2):
                os.dup2(console.fileno(), stream)
    # What else runs on this machine changes the seconds of the processor least, and one rank waits for no other.
    with mock.patch("time.monotonic", time.monotonic if spec.world_size > 1 else time.process_time):
        return train_rank(spec, folder)


if __name__ == "__main__":
    main()
