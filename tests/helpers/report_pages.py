"""Payloads of the report's page, and what a test does with the page in a browser."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlexp.compare.page import Banner, ConfigRow, Knots, MetricCurves, Payload, RankMemory, RunCard, Worst, render
from tests.helpers.browser import Opened

PHASES = ("data", "reference", "forward", "backward", "optimizer")


STEPS = 30


def card(number: int, ring: int, steps: int = STEPS) -> RunCard:
    ranks = [
        RankMemory(rank, {phase: int(4e8 + 2.5e8 * place / ring + 1e6 * rank) for place, phase in enumerate(PHASES)})
        for rank in range(8)
    ]
    knots = np.unique(np.linspace(1, steps, min(500, steps)).astype(int))
    return RunCard(
        name=f"ring{ring}-{number}", label=f"ring {ring}", status="finished", baseline=number == 0,
        baseline_label=None if number == 0 else "ring 1", path=f"/runs/sweep/{number}_ring{ring}",
        sizes={"world_size": 8, "ring_size": ring, "dp_size": 8 // ring, "micro_batch_size": 1, "grad_acc": ring},
        steps=steps, last_loss=0.1592847, worst_difference=None if number == 0 else 2.4e-7 * ring,
        tokens_per_second=12_345.0 / (1 + 0.1 * number), step_seconds=0.83 * (1 + 0.1 * number),
        efficiency=1 / (1 + 0.1 * number), memory=ranks, peak_bytes=ranks[7].peaks["optimizer"], peak_rank=7,
        peak_phase="optimizer",
        clock=Knots(knots, knots * 4096.0, knots * 0.83 * (1 + 0.1 * number) + 2 * number),
    )  # fmt: skip


def curves(name: str, count: int, steps: np.ndarray, *, seed: int = 0, noise: float = 1e-7) -> MetricCurves:
    """Make a falling curve, and others that differ from it by rounding; some values are equal to the bit."""
    rng = np.random.default_rng(seed)
    base = 0.7 * np.exp(-steps / (0.4 * steps[-1])) + 0.06 * rng.standard_normal(len(steps)) + 0.15
    values: list[np.ndarray | None] = [base]
    differences: list[np.ndarray | None] = [None]
    for number in range(1, count):
        apart = noise * number**0.5 * np.exp(0.6 * rng.standard_normal(len(steps))) * rng.choice([-1, 1], len(steps))
        apart[rng.random(len(steps)) < 0.15] = 0.0
        values.append(base * (1 + apart))
        differences.append(np.abs(apart))
    size = [0.0 if each is None else float(each.max()) for each in differences]
    run = int(np.argmax(size))
    worst = differences[run]
    return MetricCurves(
        name=name, compared=True, total_steps=int(steps[-1]), steps=steps, values=values, differences=differences,
        floor=noise * np.exp(0.3 * rng.standard_normal(len(steps))), floor_kind="measured: ring 1 with micro-batch 2",
        worst=None if worst is None else Worst(run, int(steps[int(worst.argmax())]), size[run]),
    )  # fmt: skip


def own(name: str, count: int, steps: np.ndarray, value: float) -> MetricCurves:
    """Make a metric of the layout itself."""
    rng = np.random.default_rng(1)
    values: list[np.ndarray | None] = [value * (1 + 0.1 * i + 0.05 * rng.random(len(steps))) for i in range(count)]
    return MetricCurves(name, False, int(steps[-1]), steps, values, [None] * count)


def ring_sizes() -> Payload:
    """Make a payload of four ring sizes that agree, thirty steps each."""
    runs = [card(number, ring) for number, ring in enumerate((1, 2, 4, 8))]
    steps = np.arange(1, STEPS + 1)
    config = [ConfigRow("parallel.ring_size", ["1", "2", "4", "8"], True, False),
              ConfigRow("train.grad_acc", ["1", "2", "4", "8"], True, False),
              ConfigRow("seed", ["0"] * 4, False, True), ConfigRow("loss.beta", ["0.1"] * 4, False, True),
              ConfigRow("data.path", ["pairs.jsonl"] * 4, False, True)]  # fmt: skip
    metrics = [
        curves("train/loss", 4, steps),
        curves("train/grad_norm", 4, steps, seed=3, noise=3e-7),
        curves("eval/loss", 4, steps[4::5], seed=4),
        own("train/tokens_per_second", 4, steps, 12_000.0),
        own("memory/forward_peak_bytes", 4, steps, 7.2e8),
    ]
    apart = metrics[0].differences
    runs = [
        replace(run, worst_difference=None if d is None else float(d.max())) for run, d in zip(runs, apart, strict=True)
    ]
    return Payload(
        title="Ring sizes", made="21 November 2026, 10:14", version="0.1.0",
        verdict=Banner("agree", "4 runs agree on all 3 metrics, to 3.6e-7 at most: rounding in float32.",
                        ["Largest difference of train/loss: 3.6e-7 at step 12 (ring 8), 1.9 times the noise floor."]),
        runs=runs, metrics=metrics, config=config,
    )  # fmt: skip


HOSTILE = "</script><img src=x onerror=\"document.title='taken'\"><b>$title & 'ünï' \udcff"


def troubled() -> Payload:
    """Make a payload with failures, skips, missing values, and names that look like markup."""
    good = ring_sizes()
    empty = RunCard(name="none", label="ring 3", status="skipped", reason="parallel.ring_size=3: 8 ranks do not divide")
    failed = replace(
        good.runs[3], label=HOSTILE, name=HOSTILE, status="failed", reason=f"RuntimeError: {HOSTILE}", steps=9,
        last_loss=None, worst_difference=None, tokens_per_second=None, efficiency=math.nan, memory=[],
        peak_bytes=None, peak_rank=None, peak_phase=None, clock=None,
    )  # fmt: skip
    running = replace(good.runs[1], status="running", steps=18)
    steps = np.arange(1, STEPS + 1)

    def cut(metric: MetricCurves, name: str) -> MetricCurves:
        columns = [metric.values, metric.differences]
        for column in columns:
            for run, last in ((1, 18), (3, 9)):
                each = column[run]
                column[run] = None if each is None else np.where(metric.steps <= last, each, np.nan)
            column.append(None)
        return replace(metric, name=name)

    metrics = [cut(metric, metric.name) for metric in good.metrics[:4]]
    metrics.append(cut(curves("x", 4, steps, seed=5), HOSTILE))
    nothing = MetricCurves("train/empty", True, 30, steps, [None] * 5, [None] * 5)
    huge = np.full(STEPS, np.inf)
    metrics += [
        nothing,
        MetricCurves("train/huge", True, 30, steps, [huge, huge * np.nan, None, None, None], [None] * 5),
    ]
    return replace(
        good,
        title=HOSTILE, metrics=metrics, runs=[good.runs[0], running, good.runs[2], failed, empty],
        verdict=Banner("apart", f"train/loss lies apart at step 3: ring 8 and {HOSTILE}", [HOSTILE] * 8),
        notes=["metrics.jsonl of ring 8 ends in a torn line: 9 rows were read", HOSTILE],
        forced=["seed: 0 and 1", HOSTILE],
        config=[ConfigRow("seed", ["0", "0", "0", "1", ""], True, True),
                ConfigRow("parallel.ring_size", ["1", "2", "4", "8", "3"], True, False),
                ConfigRow("model.path", [HOSTILE] * 5, False, True)],
    )  # fmt: skip


def crowd(count: int = 50, drawn: int = 1000, metrics: int = 30) -> Payload:
    """Make a payload as large as a report gets, with a clock for every run."""
    runs = []
    for number in range(count):
        ring, length = 2 ** (number % 4), 1024 << number // 10
        label = f"ring {ring}, sequence {length}, seed {number}"
        run = card(number, ring, steps=10_000)
        runs.append(replace(run, label=label, baseline=number % 10 == 0, family=number // 10))
    steps = np.unique(np.linspace(1, 10_000, drawn).astype(int))
    names = [f"{group}/metric_{number}" for number in range(metrics // 3) for group in ("train", "eval", "rewards")]
    made = [curves(name, count, steps, seed=place) for place, name in enumerate(["train/loss", *names[1:]])]
    for metric in made:
        for number in range(0, count, 10):
            metric.differences[number] = None
    config = []
    for key in range(90):
        values = [str(run % (key % 4 + 1)) for run in range(count)]
        config.append(ConfigRow(f"group{key % 9}.key_{key}", values, key % 4 > 0, key % 3 == 0))
    return replace(ring_sizes(), title="Fifty runs", runs=runs, metrics=made, config=config)


def write(folder: Path, payload: Payload) -> Path:
    path = folder / "report.html"
    path.write_text(render(payload), encoding="utf-8")
    return path


def choose(it: Opened, name: str) -> None:
    it.page.get_by_test_id("metric").select_option(label=name)


def hover(it: Opened, step: float, chart: str = "overlay") -> None:
    """Move the mouse to a value of the x axis."""
    node = it.page.get_by_test_id(chart)
    node.scroll_into_view_if_needed()
    left = it.page.evaluate("([chart, x]) => rlexpReport.charts[chart].valToPos(x, 'x')", [chart, step])
    box = node.locator(".u-over").bounding_box()
    assert box is not None
    left = min(max(left, 1), box["width"] - 1)  # the last step is on the very edge
    it.page.mouse.move(box["x"] + left, box["y"] + box["height"] / 2)


def readout(it: Opened, name: str) -> dict[str, str]:
    row = it.page.locator("#readout-body tr").and_(it.page.locator(f"[data-run={name!r}]"))
    return {cell: row.locator(f"[data-cell={cell}]").inner_text() for cell in ("value", "difference")}


def limits(it: Opened, chart: str) -> tuple[float, float]:
    return tuple(
        it.page.evaluate("(c) => { const {min, max} = rlexpReport.charts[c].scales.x; return [min, max]; }", chart)
    )


def pixels(it: Opened, chart: str) -> list[int]:
    """Count the pixels of a chart that have about each run's colour (edges are blended)."""
    return it.page.evaluate(
        """(name) => {
          const u = rlexpReport.charts[name];
          const {width, height} = u.ctx.canvas;
          const copy = new OffscreenCanvas(width, height).getContext('2d', {willReadFrequently: true});
          copy.drawImage(u.ctx.canvas, 0, 0);
          const {data} = copy.getImageData(0, 0, width, height);
          return [...document.querySelectorAll('#legend line')].map((line) => {
            const [r, g, b] = getComputedStyle(line).stroke.match(/\\d+/g).map(Number);
            let count = 0;
            for (let i = 0; i < data.length; i += 4) {
              const far = Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b);
              if (data[i + 3] > 200 && far < 30) count += 1;
            }
            return count;
          });
        }""",
        chart,
    )


def readout_value(it: Opened) -> str:
    return it.page.locator("#readout-body [data-cell=value]").first.inner_text()
