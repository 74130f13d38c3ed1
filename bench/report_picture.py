"""Draw the picture of the report: run the README's sweep and photograph its page in a real browser.

    python -m bench.report_picture --write docs/report.png

Needs playwright and a Chromium.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.browser import chromium
from bench.pictures import mark
from rlexp.run_files.metrics_jsonl import read_rows

WIDTH, HEIGHT = 1240, 1240
SWEEP = ("-m", "+sweep=ring_sizes", "launch.device=cpu", "logger=none", "checkpoint.export=false",
         "train.eval_every=10")  # fmt: skip
LOSS = "train/loss"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.report_picture", description=__doc__)
    parser.add_argument("--write", type=Path, required=True, help="the picture, a PNG")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlexp-report-") as place:
        sweep = Path(place) / "ring_sizes"
        command = [sys.executable, "-m", "rlexp", *SWEEP, f"hydra.sweep.dir={sweep}"]
        subprocess.run(command, check=True, timeout=1800)
        photograph(sweep / "report.html", options.write)
        mark(options.write, {LOSS: losses(sweep / "0")})
    print(f"{options.write}: the report of python -m rlexp {' '.join(SWEEP[:2])}")


def losses(run: Path) -> list[float]:
    return [float(row[LOSS]) for row in read_rows(run / "metrics.jsonl") if LOSS in row]


def photograph(page: Path, picture: Path) -> None:
    with chromium() as browser:
        window = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        window.goto(page.resolve().as_uri())
        window.wait_for_function("window.rlexpReport && window.rlexpReport.ready")
        window.screenshot(path=picture)


if __name__ == "__main__":
    main()
