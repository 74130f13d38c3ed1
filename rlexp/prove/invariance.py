"""The invariance table: ten steps of the same run on every layout, in float64 and in float32.

python -m rlexp.prove.invariance                       print it
python -m rlexp.prove.invariance --write docs/invariance.md
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rlexp.launch.folder import git_commit
from rlexp.prove.curves import Curve, compose_config, differences, draw, excesses
from rlexp.prove.layouts import Case, cases

STEPS = 10
BASE = ("launch.device=cpu", "logger=none", f"train.max_steps={STEPS}", "model=tiny", "train.eval_every=10")
SHOWN = ("train/loss", "weights", "train/grad_norm", "train/rewards/margins", "eval/loss")
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rlexp.prove.invariance", description=__doc__)
    parser.add_argument("--write", type=Path, help="put the tables into this page, between its markers")
    options = parser.parse_args()
    float64, broken = table("fp64")
    float32, _ = table("fp32")
    commit = (git_commit() or "unknown")[:12]
    text = (
        f"{STEPS} optimizer steps of `model=tiny`, batch 8; largest relative difference to ring 1 × 1, micro-batch 1, "
        f"packed.\nMeasured {time.strftime('%Y-%m-%d')} at commit {commit}, CPU, by `python -m rlexp.prove.invariance`."
        f"\n\n### float64 (`engine=torch`)\n\n{float64}\n\n### float32 (`engine=zero1`)\n\n{float32}\n"
    )
    print(text)
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        options.write.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")
    for line in broken:
        print(f"BROKEN: {line}", file=sys.stderr)
    return 1 if broken else 0


def table(precision: str) -> tuple[str, list[str]]:
    """A Markdown table, and in float64 every difference beyond rounding."""
    grid = cases()
    curves = draw([compose_config([*BASE, f"train.precision={precision}", *case.overrides()]) for case in grid])
    baseline = curves[0]
    broken = [
        f"{case.label}: {excess}"
        for case, curve in zip(grid, curves, strict=True)
        for excess in excesses(baseline, curve)
        if precision == "fp64"
    ]
    return _markdown(grid, curves), broken


def _markdown(grid: list[Case], curves: list[Curve]) -> str:
    """A row per layout; the last column is the largest of all other compared metrics."""
    lines = [
        f"| layout | {' | '.join(SHOWN)} | any other metric |",
        f"| --- |{' ---: |' * (len(SHOWN) + 1)}",
    ]
    for case, curve in list(zip(grid, curves, strict=True))[1:]:
        apart = differences(curves[0], curve)
        name, other = max(((n, d) for n, d in apart.items() if n not in SHOWN), key=lambda pair: pair[1])
        cells = [f"{apart[shown]:.1e}" for shown in SHOWN]
        lines.append(f"| {case.label} | {' | '.join(cells)} | {other:.1e} ({name}) |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
