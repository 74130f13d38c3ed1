"""TensorBoard: event files in the run's folder. They hold values in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlexp.run_files.metrics_jsonl import MetricRow
from rlexp.training.sinks import legible
from rlexp.training.sinks.base import Ending, RolloutFacts, Sink

FOLDER = "tensorboard"
SAMPLES = "samples"


class TensorBoardSink(Sink):
    """Write rows as TensorBoard events. A resumed run makes TensorBoard drop the steps that it repeats.

    `history` are the rows before. A folder without events gets them: they came from another run's folder.
    """

    def __init__(self, run_dir: Path, history: Sequence[MetricRow] = ()) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here, since the package may be missing

        folder = run_dir / FOLDER
        before = any(folder.glob("events.out.tfevents.*"))
        first = int(history[-1]["step"]) + 1 if history else 0
        self._writer = SummaryWriter(str(folder), purge_step=first if before else None)
        for row in () if before else history:
            self._write(row)
        self._writer.flush()

    def log(self, row: MetricRow) -> None:
        self._write(row)
        self._writer.flush()  # so that a killed process loses nothing

    def rollout(self, facts: RolloutFacts) -> None:
        if facts.shown:  # indented, so that Markdown leaves the text as it is
            text = "\n".join(f"    {line}" for line in legible.lines(facts, None))
            self._writer.add_text(SAMPLES, text, facts.step)
            self._writer.flush()

    def _write(self, row: MetricRow) -> None:
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, int(row["step"]))

    def close(self, ending: Ending) -> None:  # noqa: ARG002
        self._writer.close()
