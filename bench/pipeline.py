"""Compare pipelined with colocated runs: the reward over samples for three seeds each, and a timeline of the ranks.

    python -m bench.pipeline --write docs/pipeline.png --page docs/measured/rollouts_gpu.md

Both have two ranks. Colocated, both sample and then both train; pipelined, one trains while the other samples. The exit
code is 1 if a run does not learn, or if sampling and training of a pipelined run hardly overlap.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from bench import tables
from bench.pictures import numbers_of, save
from rlexp.run_files.metrics_jsonl import MetricRow, read_rows

MODES = {
    "colocated": ("parallel=ring1", "launch.nproc=2", "train.micro_batch_size=16"),
    "pipelined": ("parallel=ring1", "rollout=pipelined"),
}
SEEDS = (0, 1, 2)
LEARNED = 0.7  # reward above
LAST = 5  # rollouts that a run's reward is taken over
SHOWN = 6  # rollouts on the timeline
COLOURS = {"colocated": "#0072b2", "pipelined": "#d55e00"}
FIRST = "| mode | seed | samples |"  # how the head of its table begins
WORK = {"sampling": "#e69f00", "scoring": "#56b4e9", "training": "#0072b2"}
Span = tuple[float, float]


@dataclass(frozen=True)
class Drawn:
    rows: list[MetricRow]
    rollouts: list[dict[str, Any]]  # lines of rollouts.jsonl

    def reward(self) -> tuple[list[float], list[float]]:
        """Drawn samples, and the reward at each of these points."""
        made = [row for row in self.rows if "train/objective/scores" in row]
        return [row["train/episode"] for row in made], [row["train/objective/scores"] for row in made]

    def learned(self) -> float:
        return float(np.mean(self.reward()[1][-LAST:]))

    def work(self) -> dict[str, list[Span]]:
        """The times of sampling, scoring and training; training is the time between two rollouts."""
        spans = [rollout["spans"] for rollout in self.rollouts]
        times = {kind: [tuple(span) for each in spans for span in each[kind]] for kind in ("sampling", "scoring")}
        ends = [max(end for _, end in each["scoring"]) for each in spans]
        begins = [each["taking"][0][0] for each in spans]
        return times | {"training": list(zip(ends[:-1], begins[1:], strict=True))}

    def overlap(self) -> float:
        """The share of the sampling time during which the other rank scored or trained."""
        work = self.work()
        busy = [*work["scoring"], *work["training"]]
        shared = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in work["sampling"] for b in busy)
        return shared / sum(end - begin for begin, end in work["sampling"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline", description=__doc__)
    parser.add_argument("--write", type=Path, required=True, help="the picture, a PNG")
    parser.add_argument("--page", type=Path, help="the page with the table")
    options = parser.parse_args()
    runs = {(mode, seed): run(mode, seed) for seed in SEEDS for mode in MODES}
    draw(runs, options.write)
    text = table(runs)
    print(text)
    if options.page:
        tables.put(options.page, text, "pipeline")
    sys.exit("\n".join(shortcomings(runs)) or None)


def run(mode: str, seed: int) -> Drawn:
    """Run the command line."""
    with tempfile.TemporaryDirectory(prefix="rlexp-pipeline-") as place:
        command = [sys.executable, "-m", "rlexp", "+experiment=ppo_tiny", *MODES[mode], f"seed={seed}", "logger=none",
                   "launch.device=cpu", "engine=torch", "checkpoint.export=false", "logger.progress=false",
                   f"hydra.run.dir={place}/run"]  # fmt: skip
        subprocess.run(command, check=True, timeout=1200)
        lines = (Path(place) / "run" / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
        return Drawn(read_rows(Path(place) / "run" / "metrics.jsonl"), [json.loads(line) for line in lines])


def shortcomings(runs: dict[tuple[str, int], Drawn]) -> list[str]:
    wrong = [
        f"{mode}, seed {seed}: the reward came to {drawn.learned():.3f}, not above {LEARNED}"
        for (mode, seed), drawn in runs.items()
        if not drawn.learned() > LEARNED
    ]
    shared = min(drawn.overlap() for (mode, _), drawn in runs.items() if mode == "pipelined")
    return wrong + [f"pipelined: only {shared:.0%} of the sampling overlaps"] * (shared < 0.2)


def table(runs: dict[tuple[str, int], Drawn]) -> str:
    lines = [
        f"`+experiment=ppo_tiny` on two ranks; the reward is the mean of the last {LAST} rollouts. "
        f"{tables.signature('bench.pipeline')}",
        "",
        "| mode | seed | samples | reward | share of sampling that overlaps other work | behaviour ratio, last step |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (mode, seed), drawn in sorted(runs.items()):
        samples, ratio = drawn.reward()[0][-1], drawn.rows[-1]["train/val/behaviour_ratio"]
        lines.append(
            f"| {mode} | {seed} | {samples:,.0f} | {drawn.learned():.3f} | {drawn.overlap():.0%} | {ratio:.4f} |"
        )
    return "\n".join(lines)


def draw(runs: dict[tuple[str, int], Drawn], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (curve, *lanes) = plt.subplots(3, 1, figsize=(9, 8), height_ratios=(3, 1, 1), layout="constrained")
    for (mode, seed), drawn in runs.items():
        label = mode if seed == SEEDS[0] else None
        curve.plot(*drawn.reward(), color=COLOURS[mode], alpha=0.85, linewidth=1.4, label=label)
    curve.set(xlabel="generated answers", ylabel="mean reward", ylim=(0, 1),
              title="Pipelined runs need as many answers as colocated runs for the same reward")  # fmt: skip
    curve.legend(frameon=False, loc="lower right", title=f"{len(SEEDS)} seeds each")
    ends = [timeline(lane, runs[mode, SEEDS[0]], mode) for lane, mode in zip(lanes, MODES, strict=True)]
    for lane in lanes:
        lane.set_xlim(0, min(ends))
    lanes[-1].set_xlabel("seconds. The model is so small that generating takes little of them")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in WORK.values()]
    lanes[0].legend(handles, WORK, frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
    for axes in (curve, *lanes):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path, numbers_of(table(runs), FIRST), dpi=110)


def timeline(axes: Any, drawn: Drawn, mode: str) -> float:
    """Draw some rollouts in the middle of a run, and return how many seconds they took."""
    first = len(drawn.rollouts) // 2
    begin = drawn.rollouts[first]["spans"]["taking"][0][0]
    end = drawn.rollouts[min(first + SHOWN, len(drawn.rollouts) - 1)]["spans"]["taking"][0][0]
    apart = mode == "pipelined"
    rows = {"sampling": int(apart), "scoring": 0, "training": 0}
    for kind, spans in drawn.work().items():
        within = [(max(a, begin), min(b, end)) for a, b in spans if b > begin and a < end]
        axes.broken_barh([(a - begin, b - a) for a, b in within], (rows[kind] + 0.1, 0.8), color=WORK[kind])
    names = ("rank 0", "rank 1") if apart else ("both ranks",)
    axes.set(yticks=[0.5, 1.5][: len(names)], yticklabels=names, ylim=(0, len(names)))
    said = "rank 1 generates the next answers while rank 0 trains" if apart else "both ranks generate, then both train"
    axes.set_title(f"{mode}: {said}", loc="left", fontsize=11)
    return float(end - begin)


if __name__ == "__main__":
    main()
