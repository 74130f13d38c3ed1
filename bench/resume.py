"""Measure the resume matrix: a run stops on one layout and resumes on another, for every pair of layouts.

python -m bench.resume                          print it
python -m bench.resume --write docs/measured/invariance.md

Engines that compute in float64 must meet the tolerances of the curves. The others, in float32, may differ by ten times
the noise floor: the difference of undisturbed runs on the same layouts. Runs stop in turn in the first step, at the end
of an epoch, within an epoch and before the last step. One chain stops after every single step.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.curves import Curve, differences, excesses
from bench.tables import put, signature
from rlexp.config.load import compose_config
from rlexp.launch import run_folder
from rlexp.launch.joining import ON_CPU, RankSpec, prepare_environment
from rlexp.launch.local import PRELOAD, run_ranks
from rlexp.run.job import train_rank
from rlexp.run_files import checkpoint_folder as checkpoint
from rlexp.run_files.curve_distance import compared
from rlexp.run_files.metrics_jsonl import read_rows
from rlexp.training.checkpoint.restore import Reader

STEPS, EPOCH = 7, 3  # 3 steps an epoch
BASE = (
    *(
        "launch.device=cpu",
        "logger=none",
        "logger.progress=false",
        f"train.max_steps={STEPS}",
        f"data.size={8 * EPOCH}",
    ),
    *("checkpoint.export=false", "checkpoint.save_every=null", "train.eval_every=3", "checkpoint.keep_last=99"),
)
STOPS = (1, EPOCH, 4, STEPS - 1)  # after the first step, at the end of an epoch, within one, before the last step


@dataclass(frozen=True)
class Where:
    engine: str
    ring_size: int
    replicas: int
    precision: str
    elastic: bool = False  # the ring has all ranks, because its size is left to rlexp

    @property
    def label(self) -> str:
        return f"{self.engine} {self.ring_size} × {self.replicas}"

    def overrides(self) -> list[str]:
        nproc = self.ring_size * self.replicas
        ring = "elastic" if self.elastic else f"ring{self.ring_size}"
        return [f"engine={self.engine}", f"parallel={ring}", f"launch.nproc={nproc}",
                f"train.micro_batch_size={2 if nproc > 2 else 1}", f"train.precision={self.precision}"]  # fmt: skip


LAYOUTS = ((1, 1), (4, 1), (2, 2))
FLOAT64 = [Where(engine, *layout, "fp64") for engine in ("torch", "fsdp2") for layout in LAYOUTS]
FLOAT32 = [Where(engine, *layout, "fp32") for engine in ("torch", "zero1", "zero3") for layout in LAYOUTS]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.resume", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--write", type=Path, help="put the table into this page")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlexp-resume-") as place:
        exact, broken = matrix(FLOAT64, Path(place) / "fp64")
        rounded, wide = matrix(FLOAT32, Path(place) / "fp32")
    text = (
        f"{STEPS} steps of `model=tiny`, batch 8, 3 steps per epoch. Rows: the layout on which the run stopped; "
        f"columns: the layout on which it resumed. The value\nis the largest relative difference of the loss, over all "
        f"steps, to the undisturbed run of one process. {signature('bench.resume')}\n\n"
        f"### float64\n\n{exact}\n\n### float32\n\n{rounded}"
    )
    print(text)
    if options.write:
        put(options.write, text, "resume")
    for line in (*broken, *wide):
        print(f"BROKEN: {line}", file=sys.stderr)
    return 1 if broken or wide else 0


def matrix(places: Sequence[Where], work: Path) -> tuple[str, list[str]]:
    """A Markdown table, and every difference beyond rounding."""
    straight = {where: curve_of(run(where, work / f"straight-{n}")) for n, where in enumerate(places)}
    baseline = straight[places[0]]
    floor = max(differences(baseline, curve)["train/loss"] for curve in straight.values())
    broken, cells = [], {}
    stops = itertools.cycle(STOPS)
    for number, (one, other) in enumerate(itertools.product(places, places)):
        stop = next(stops)
        begun = run(one, work / f"begun-{number}", f"train.stop_after={stop}")
        curve = curve_of(run(other, begun))
        cells[one, other] = differences(baseline, curve)["train/loss"]
        broken += [
            f"{one.label} → {other.label} after step {stop}: {fault}" for fault in faults(baseline, curve, one, floor)
        ]
    chained = chain(places, work / "chain")
    broken += [f"a stop after every step: {fault}" for fault in faults(baseline, chained, places[0], floor)]
    lines = [
        f"| stopped \\ resumed | {' | '.join(where.label for where in places)} |",
        f"| --- |{' ---: |' * len(places)}",
    ]
    for one in places:
        lines.append(f"| {one.label} | {' | '.join(f'{cells[one, other]:.0e}' for other in places)} |")
    every = differences(baseline, chained)["train/loss"]
    lines.append(f"\nStopped after every single step, on each layout in turn: {every:.1e}. Undisturbed: {floor:.1e}.")
    return "\n".join(lines), broken


def faults(baseline: Curve, curve: Curve, where: Where, floor: float) -> Iterator[str]:
    """Yield differences beyond the curves' tolerances in float64, or beyond ten times the noise floor in float32."""
    if [row["step"] for row in curve.rows] != list(range(1, STEPS + 1)):
        yield f"its steps are {[row['step'] for row in curve.rows]}"
    elif where.precision == "fp64":
        yield from excesses(baseline, curve)
    else:
        apart = differences(baseline, curve)
        if apart["train/loss"] > 10 * floor:
            yield f"its loss differs by {apart['train/loss']:.1e}, where undisturbed layouts differ by {floor:.1e}"
        if any(apart[name] for name in apart if name in ("train/tokens", "train/total_tokens", "train/epoch")):
            yield "its samples differ"


def chain(places: Sequence[Where], run_dir: Path) -> Curve:
    """One run that stops after every step; each step runs on the next layout."""
    for where in itertools.islice(itertools.cycle(places), STEPS):
        run(where, run_dir, "train.stop_after=1")
    return curve_of(run_dir)


def run(where: Where, run_dir: Path, *more: str, base: Sequence[str] = BASE) -> Path:
    """Start or resume the run in a folder, as the command line does, but in this process."""
    cfg = compose_config([*base, *where.overrides(), *more])
    prepare_environment(ON_CPU)
    run_folder.enter(cfg, run_dir)
    preload = (*PRELOAD, "deepspeed")
    outcome = run_ranks(quiet_rank, cfg.parallel.world_size, (str(run_dir),), preload=preload, timeout=300.0)[0]
    run_folder.close(run_dir, outcome.status, outcome.reason)
    run_folder.leave(run_dir)
    return run_dir


def quiet_rank(spec: RankSpec, run_dir: str) -> Any:
    with open(os.devnull, "w") as nowhere:  # rank 0 would write to the terminal
        os.dup2(nowhere.fileno(), 2)
    return train_rank(spec, run_dir)


def curve_of(run_dir: Path) -> Curve:
    weights = weights_of(run_dir)
    rows = [
        {k: v for k, v in row.items() if k == "step" or compared(k)} for row in read_rows(run_dir / "metrics.jsonl")
    ]
    assert all(np.isfinite(weight).all() for weight in weights.values())
    return Curve(rows, weights, [])


def weights_of(run_dir: Path) -> dict[str, np.ndarray]:
    """Return the weights of a run's last checkpoint."""
    last = checkpoint.latest_first(run_dir)[0]
    reader = Reader(last, checkpoint.check_sizes(last))
    return {name: reader.whole("weight", name).double().numpy() for name in reader.shapes}


if __name__ == "__main__":
    started = time.monotonic()
    code = main()
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
    sys.exit(code)
