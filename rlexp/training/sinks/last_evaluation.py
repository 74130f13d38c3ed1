"""The last evaluation, in run.json: `status` shows it without reading the curve, which may be long."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlexp.launch import run_folder
from rlexp.run_files import evaluations
from rlexp.training.sinks.base import Sink

if TYPE_CHECKING:  # importing it would import torch, which readers do without
    from rlexp.run_files.metrics_jsonl import MetricRow


class LastEvaluation(Sink):
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def log(self, row: MetricRow) -> None:
        if values := evaluations.values_of(row):
            run_folder.note(self.run_dir, evaluated={"step": row["step"], **values})
