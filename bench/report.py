"""Measure the cost of the report of many long runs: 50 runs of 10,000 steps, extended from one short real run.

    python -m bench.report                       print the table; two minutes
    python -m bench.report --write docs/measured/benchmarks.md

Writing: the whole process of `python -m rlexp.compare`, relative to the floor, which is reading the bytes and parsing
the JSON. The page: in headless Chromium, from the file to the drawn curves, and from a choice or a movement to the next
frame.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from bench.browser import chromium
from bench.tables import put, signature

RUNS, STEPS, SHORT = 50, 10_000, 12
COPIED = ("run.json", "config.yaml", "memory.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="put the table into this page")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlexp-report-") as place:
        folder = Path(place)
        make(folder)
        measured = signature("bench.report")
        text = f"{measured}\n\n{table(folder)}"
    print(text)
    if options.write:
        put(options.write, text, "report")


def make(folder: Path) -> None:
    """Run the real program for a few steps, extend its curves, and write copies that differ by rounding."""
    command = [sys.executable, "-m", "rlexp", "launch.device=cpu", "logger=none", "parallel=ring2", "engine=torch",
               f"train.max_steps={SHORT}", "train.eval_every=1", "checkpoint.export=false",
               f"hydra.run.dir={folder / 'short'}"]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    rows = [json.loads(line) for line in (folder / "short" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    random = np.random.default_rng(0)
    curve = {name: _drawn_out([row[name] for row in rows], random) for name in rows[0] if name != "step"}
    for number in range(RUNS):
        run = folder / "runs" / f"run{number:02d}"
        run.mkdir(parents=True)
        for name in COPIED:
            shutil.copy(folder / "short" / name, run / name)
        apart = 1e-7 if number else 0.0
        columns = {name: values * (1 + apart * random.standard_normal(STEPS)) for name, values in curve.items()}
        with (run / "metrics.jsonl").open("wb") as file:
            for step in range(STEPS):
                row = {"step": step + 1} | {name: float(values[step]) for name, values in columns.items()}
                file.write(orjson.dumps(row) + b"\n")


def _drawn_out(values: list[float], random: np.random.Generator) -> np.ndarray:
    smooth = np.interp(np.linspace(0, len(values) - 1, STEPS), range(len(values)), values)
    return smooth * (1 + 0.01 * random.standard_normal(STEPS))


def table(folder: Path) -> str:
    runs, out = folder / "runs", folder / "out"
    bytes_read = sum(path.stat().st_size for path in runs.glob("*/metrics.jsonl"))
    floor = best(lambda: _parse(runs), 2)
    command = [sys.executable, "-m", "rlexp.compare", str(runs), "--out", str(out)]
    writing = best(lambda: subprocess.run(command, check=True, capture_output=True, timeout=600), 2)
    page = out / "report.html"
    lines = [
        "| what | measured | |",
        "| --- | ---: | --- |",
        f"| {RUNS} runs × {STEPS:,} steps on disk | {bytes_read / 1e6:,.0f} MB | |",
        f"| floor: reading and parsing them | {floor:.1f} s | |",
        f"| `python -m rlexp.compare`, whole | {writing:.1f} s | {writing / floor:.1f} × the floor |",
        f"| `report.html` | {page.stat().st_size / 1e6:.1f} MB | |",
    ]
    for what, seconds in browse(page).items():
        lines.append(f"| page: {what} | {seconds * 1000:,.0f} ms | |")
    return "\n".join(lines)


def _parse(runs: Path) -> None:
    for path in runs.glob("*/metrics.jsonl"):
        for line in path.read_bytes().splitlines():
            orjson.loads(line)


def best(act: Callable[[], Any], times: int) -> float:
    seconds = []
    for _ in range(times):
        started = time.monotonic()
        act()
        seconds.append(time.monotonic() - started)
    return min(seconds)


def browse(path: Path) -> dict[str, float]:
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        started = time.monotonic()
        page.goto(path.resolve().as_uri())
        page.wait_for_function("window.rlexpReport && window.rlexpReport.ready")
        _next_frame(page)
        seconds = {"from the file to the drawn curves": time.monotonic() - started}
        options = page.evaluate("Array.from(document.querySelectorAll('option'), o => o.value)")
        names = [name for name in options if name]
        seconds["choosing a metric"] = statistics.median(
            _until_drawn(page, functools.partial(page.evaluate, "name => window.rlexpReport.select(name)", name))
            for name in names[1:7]
        )
        seconds["moving the pointer"] = statistics.median(
            _until_drawn(page, functools.partial(page.mouse.move, 300 + 40 * across, 450)) for across in range(10)
        )
    return seconds


def _until_drawn(page: Any, act: Callable[[], Any]) -> float:
    """Seconds from an action to the next frame."""
    started = time.monotonic()
    act()
    _next_frame(page)
    return time.monotonic() - started


def _next_frame(page: Any) -> None:
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


if __name__ == "__main__":
    main()
