"""Tables of runs that draw their own samples: every layout, and every algorithm on two layouts."""

from __future__ import annotations

from bench.curves import Curve, draw, excesses, shares, weight_difference
from bench.layouts import ROLLOUT, ROLLOUT_PAIR, VARIANTS, RolloutCase, rollout_cases
from rlexp.config.load import compose_config
from rlexp.config.schema import Config

STEPS = 6  # a rollout has 2 epochs × 2 train batches
BASE = ("launch.device=cpu", "logger=none", "train.precision=fp64", f"train.max_steps={STEPS}")


def config_of(case: RolloutCase, *more: str) -> Config:
    return compose_config([*ROLLOUT, *BASE, *case.overrides(), *more])


def rollout_tables() -> tuple[str, list[str]]:
    """Markdown, and every difference beyond rounding."""
    by_layout, broken = layout_table()
    by_variant, more = variant_table()
    text = (
        f"{STEPS} optimizer steps of PPO on `model=tiny` in float64; a rollout of 8 prompts × 2 samples serves 2 "
        f"epochs × 2 train batches of 8.\nEvery layout generates the same tokens for every sample, or is listed as "
        f"broken. Differences are to one process, micro-batch 1,\n16 generated and 8 scored at once.\n\n"
        f"#### Every layout\n\n{by_layout}\n\n#### Every algorithm, on ring 2 × 2\n\n{by_variant}"
    )
    return text, [*broken, *more]


def layout_table() -> tuple[str, list[str]]:
    """A row per metric: the largest difference on any layout, its share of the tolerance, and the layout."""
    cases = rollout_cases()
    baseline, *curves = draw([config_of(case) for case in cases])
    by_case = dict(zip(cases[1:], curves, strict=True))
    broken = [f"{case.label}: {excess}" for case, curve in by_case.items() for excess in excesses(baseline, curve)]
    if broken:  # the runs may not even have the same samples
        return "(broken)", broken
    apart = {case: shares(baseline, curve) for case, curve in by_case.items()}
    names = next(iter(apart.values()))
    lines = ["| metric | largest difference | share of the tolerance | on |", "| --- | ---: | ---: | --- |"]
    for name in names:
        worst = max(apart, key=lambda case: apart[case][name][1])
        most = max(each[name][0] for each in apart.values())
        lines.append(_row(name, most, apart[worst][name][1], worst.label if most else ""))
    worst = max(by_case, key=lambda case: weight_difference(baseline, by_case[case]))
    lines.append(f"| final weights, relative | {weight_difference(baseline, by_case[worst]):.1e} | | {worst.label} |")
    return "\n".join(lines), broken


def _row(name: str, most: float, share: float, where: str) -> str:
    return f"| {name if ' ' in name else f'`{name}`'} | {most:.1e} | {share:.1e} | {where} |"


def variant_table() -> tuple[str, list[str]]:
    """A row per variant: differences of loss, advantages and weights, and the metric closest to its limit."""
    curves = draw([config_of(case, *more) for more in VARIANTS.values() for case in ROLLOUT_PAIR])
    broken, lines = [], [
        "| run | overrides | loss | advantages | weights, relative | nearest to its limit |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]  # fmt: skip
    for number, (label, more) in enumerate(VARIANTS.items()):
        one, other = curves[2 * number : 2 * number + 2]
        wrong = [f"{label}: {excess}" for excess in excesses(one, other)]
        broken += wrong
        lines.append(f"| {label} | `{' '.join(more)}` | {'(broken) | | | ' if wrong else _cells(one, other)} |")
    return "\n".join(lines), broken


def _cells(one: Curve, other: Curve) -> str:
    apart = shares(one, other)
    name, (_, share) = max(apart.items(), key=lambda item: item[1][1])
    loss, advantages = apart["train/loss"][0], apart["a token's advantage"][0]
    nearest = f"{share:.0e} of it ({name if ' ' in name else f'`{name}`'})"
    return f"{loss:.1e} | {advantages:.1e} | {weight_difference(one, other):.1e} | {nearest}"
