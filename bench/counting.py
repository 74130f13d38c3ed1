"""Measure what counting live tensors costs: user time of a step of DPO on one rank, with and without.

    python -m bench.counting                     print the table; some minutes
    python -m bench.counting --write docs/benchmarks.md

Steps are measured in turn, so that other work on the machine slows all of them alike. The last lines are whole runs of
`python -m rlexp`, from the first import to the exported model, in pairs.
"""

from __future__ import annotations

import itertools
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from bench.checkpoint import join_world, on_ranks
from bench.measured import print_tables
from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import ON_CPU, RankSpec, prepare_environment
from rlexp.training.metrics.live_tensors import LiveTensors, TensorCount
from rlexp.training.metrics.memory import Phases
from rlexp.training.train.build import build
from rlexp.training.train.step import train_step
from rlexp.training.train.surroundings import UNPROBED

CPU = torch.device("cpu")
COMMON = ("launch.device=cpu", "logger=none", "parallel=ring1", "train.batch_size=4", "train.micro_batch_size=1",
          "data=long")  # fmt: skip
SHAPES: dict[str, Sequence[str]] = {
    "`model=tiny`, 512 tokens": ("data.max_length=512",),
    "4 layers, 512 wide, 1024 tokens": ("data.max_length=1024", "model.layers=4", "model.hidden_size=512",
                                        "model.intermediate_size=1536"),
}  # fmt: skip
ROUNDS, PAIRS = 3, 8


def main() -> None:
    prepare_environment(ON_CPU)
    print_tables("bench.counting", __doc__, {"steps": steps, "runs": runs}, "counting")


def steps() -> str:
    lines = [
        "| user seconds of a step | not counted | in chosen micro-batches | throughout | finding what exists |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for shape, words in SHAPES.items():
        never, chosen, always, found = on_ranks(measured, 1, compose_config([*COMMON, *words]))
        counted = " | ".join(f"{each:.3f} (+{each / never - 1:.0%})" for each in (chosen, always))
        lines.append(f"| {shape} | {never:.3f} | {counted} | {found:.3f} |")
    return "\n".join(lines)


def measured(spec: RankSpec, cfg: Config) -> tuple[float, ...]:
    """Return the median user time of a step: not counted, in chosen micro-batches, throughout; and of `find`."""
    join_world(spec, cfg)
    task = build(cfg, around=UNPROBED)
    numbers = itertools.count(1)

    def step(phases: Phases) -> float:
        task.run = replace(task.run, phases=phases)
        phases.begin(0)  # finds what exists
        began = time.process_time()
        with phases.throughout():
            train_step(task, next(numbers))
        return time.process_time() - began

    def find() -> float:
        began = time.process_time()
        LiveTensors().find()
        return time.process_time() - began

    for _ in range(2):
        step(Phases(CPU))
    found = [
        (
            step(Phases(CPU)),
            step(Phases(CPU, count=TensorCount(CPU, always=False))),
            step(Phases(CPU, count=TensorCount(CPU, always=True))),
            find(),
        )
        for _ in range(ROUNDS)
    ]
    return tuple(map(statistics.median, zip(*found, strict=True)))


def runs() -> str:
    """Return the user time of whole runs, in pairs."""
    pairs = [(whole("never"), whole("auto")) for _ in range(PAIRS)]
    never, auto = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(auto / never for never, auto in pairs)
    return (
        f"`python -m rlexp parallel=ring1` as a whole: {never:.1f} s with `memory.count_tensors=never`, {auto:.1f} s "
        f"with `auto`; the median of {PAIRS} pairs' ratios is {ratio:.3f}."
    )


def whole(how: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    joined = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": "0"}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="rlexp-counting-") as folder:
        command = [sys.executable, "-m", "rlexp", "launch.device=cpu", "logger=none", f"memory.count_tensors={how}",
                   f"hydra.run.dir={folder}/run"]  # fmt: skip
        subprocess.run(command, env=os.environ | joined, check=True, capture_output=True, timeout=900)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


if __name__ == "__main__":
    main()
