"""Measure the invariance tables: the same run on every layout, in float64 and float32, and runs that draw samples.

python -m bench.invariance                       print it
python -m bench.invariance --write docs/measured/invariance.md
python -m bench.invariance --only layouts        every layout, in float64, float32 and bfloat16
python -m bench.invariance --only rollouts       the runs that draw their own samples
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from bench.curves import Curve, differences, draw, excesses
from bench.layouts import BASELINE, Case, cases, layout_cases
from bench.rollout_tables import rollout_tables
from bench.tables import put, signature
from rlexp.config.load import compose_config

STEPS = 10
BASE = ("launch.device=cpu", "logger=none", f"train.max_steps={STEPS}", "model=tiny", "train.eval_every=10")
SHOWN = ("train/loss", "weights", "train/grad_norm", "train/rewards/margins", "eval/loss")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.invariance", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--write", type=Path, help="put the tables into this page, between their markers")
    parser.add_argument("--only", choices=[*TABLES], help="only these tables")
    options = parser.parse_args()
    broken = []
    for name, made in TABLES.items():
        if options.only in (None, name):
            broken += made(options.write)
    for line in broken:
        print(f"BROKEN: {line}", file=sys.stderr)
    return 1 if broken else 0


def pairs(page: Path | None) -> list[str]:
    float64, broken = table("fp64")
    float32, _ = table("fp32")
    text = (
        f"{STEPS} optimizer steps of `model=tiny`, batch 8. Each row has the largest relative difference, over all "
        f"steps and its micro-batch sizes,\nto one process with micro-batch 1, packed. "
        f"{signature('bench.invariance')}\n\n"
        f"### float64 (`engine=torch`)\n\n{float64}\n\n### float32 (`engine=zero1`)\n\n{float32}"
    )
    print(text)
    if page:
        put(page, text)
    return broken


def layouts(page: Path | None) -> list[str]:
    """Every layout of a ring; in float32 and bfloat16 beside the noise floor, one process with other micro-batches."""
    floor = replace(BASELINE, micro_batch_size=4)
    grid = [floor, *layout_cases()[1:]]
    by_precision, broken = [], []
    for precision in ("fp64", "fp32", "bf16"):
        configs = [compose_config([*BASE, f"train.precision={precision}", *c.overrides()]) for c in (BASELINE, *grid)]
        baseline, *curves = draw(configs)
        by_precision.append([differences(baseline, curve) for curve in curves])
        if precision == "fp64":
            broken = [f"{case.label}: {each}" for case, curve in zip(grid, curves, strict=True)
                      for each in excesses(baseline, curve)]  # fmt: skip
    lines = [
        "| layout | ring | fp64: train/loss | weights | any other metric | fp32: train/loss | grad_norm "
        "| bf16: train/loss | grad_norm |",
        f"| --- | --- |{' ---: |' * 7}",
    ]
    for case, fp64, fp32, bf16 in zip(grid, *by_precision, strict=True):
        other = max(apart for name, apart in fp64.items() if name not in ("train/loss", "weights"))
        cells = [fp64["train/loss"], fp64["weights"], other]
        cells += [apart[name] for apart in (fp32, bf16) for name in ("train/loss", "train/grad_norm")]
        lines.append(f"| {named(case)} | {case.ring_size} | {' | '.join(f'{cell:.1e}' for cell in cells)} |")
    text = f"{signature('bench.invariance')}\n" + "\n".join(lines)
    print(text)
    if page:
        put(page, text, "layouts")
    return broken


def named(case: Case) -> str:
    if case.ring_size == 1:
        return "one process, other micro-batches"
    return f"{case.layout}, `ulysses_size={case.ulysses_size}`" if case.ulysses_size else case.layout


def rollouts(page: Path | None) -> list[str]:
    tables, broken = rollout_tables()
    text = f"{signature('bench.invariance')}\n{tables}"
    print(text)
    if page:
        put(page, text, "rollouts")
    return broken


TABLES = {"pairs": pairs, "layouts": layouts, "rollouts": rollouts}


def table(precision: str) -> tuple[str, list[str]]:
    """A Markdown table, and in float64 every difference beyond rounding."""
    grid = cases()
    curves = draw([compose_config([*BASE, f"train.precision={precision}", *case.overrides()]) for case in grid])
    broken = [
        f"{case.label}: {excess}"
        for case, curve in zip(grid, curves, strict=True)
        for excess in excesses(curves[0], curve)
        if precision == "fp64"
    ]
    return _markdown(grid, curves), broken


def _markdown(grid: list[Case], curves: list[Curve]) -> str:
    """A row per ring, replicas and packing; the last column is the largest of all other compared metrics."""
    rows: dict[tuple[int, int, bool], list[tuple[Case, dict[str, float]]]] = {}
    for case, curve in list(zip(grid, curves, strict=True))[1:]:
        key = (case.ring_size, case.dp_size, case.packing)
        rows.setdefault(key, []).append((case, differences(curves[0], curve)))
    lines = [
        f"| ring × replicas | micro-batches | {' | '.join(SHOWN)} | any other metric |",
        f"| --- | --- |{' ---: |' * (len(SHOWN) + 1)}",
    ]
    for (ring_size, dp_size, packing), here in rows.items():
        worst = {name: max(apart[name] for _, apart in here) for name in here[0][1]}
        name, other = max(((n, d) for n, d in worst.items() if n not in SHOWN), key=lambda pair: pair[1])
        micros = ", ".join(str(case.micro_batch_size) for case, _ in here)
        cells = " | ".join(f"{worst[shown]:.1e}" for shown in SHOWN)
        packed = "packed" if packing else "padded"
        lines.append(f"| {ring_size} × {dp_size}, {packed} | {micros} | {cells} | {other:.1e} ({name}) |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
