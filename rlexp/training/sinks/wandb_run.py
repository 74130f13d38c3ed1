"""Log to W&B through its client: offline without an account, online with one."""

from __future__ import annotations

import functools
import re
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from rlexp.base.errors import SinkError
from rlexp.config.schema import Best, LoggerConfig
from rlexp.config.schema.models import Precision
from rlexp.run_files.metrics_jsonl import MetricRow
from rlexp.training.sinks.base import Ending, RolloutFacts, Sink
from rlexp.training.sinks.baseline import LOSS, PARITY, excess
from rlexp.training.sinks.console import say
from rlexp.training.sinks.wandb_access import NONE, SAMPLES, STEP, Mode, last_step, upload_in_words, wandb_mode

TEXT_LINES, TEXT_LENGTH = 12, 1000  # the most of an alert's text
LONGEST_NAME = 48  # characters in an id's readable part
# Errors that the client raises once its process is gone, besides ConnectionError. They have no public names.
GONE = ("MailboxClosedError", "HandleAbandonedError")
P = ParamSpec("P")


def while_it_lives(method: Callable[Concatenate[WandbSink, P], None]) -> Callable[Concatenate[WandbSink, P], None]:
    """Ignore calls after W&B's process has ended.

    W&B's client sends from a process of its own. A cluster that asks a job to stop signals that process too. It ends at
    once, before the run has saved, and the run must not fail for that.
    """

    @functools.wraps(method)
    def guarded(self: WandbSink, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.gone:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            if not isinstance(error, ConnectionError) and type(error).__name__ not in GONE:
                raise
            self.gone = True
            say(
                "rlexp: W&B's process has ended before the run. The run continues without it; what W&B lacks is sent "
                "when the run is resumed.\n"
            )

    return guarded


class WandbSink(Sink):
    """Log to W&B. A resumed run stays one W&B run: only rows that W&B does not have are sent.

    `best` says which value of a metric is its best. `history` are the rows up to the step where the run resumes. A
    killed process may have sent rows beyond that step, which are computed again, or may have lost its last rows.
    """

    def __init__(
        self, logger: LoggerConfig, run_dir: Path, config: Mapping[str, Any], tags: Sequence[str], *,
        best: Mapping[str, Best], precision: Precision, run_id: str, history: Sequence[MetricRow] = (),
    ) -> None:  # fmt: skip
        mode = wandb_mode(logger.mode)
        say(upload_in_words(logger, mode))
        stored = _last_step_offline(run_dir, run_id) if mode == "offline" else NONE
        self._run = _begin(logger, run_dir, config, tags, run_id, mode)
        # The step is a value, not W&B's own counter: W&B silently drops a step below its counter.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        self._artifacts, self._precision = logger.artifacts, precision
        self._extremes = Extremes({LOSS: Best.min, **best})
        self.gone = False  # the client's process has ended
        self._told = False  # an alert said that the loss left its baseline
        self._tables: dict[int, Any] = {}  # tables of samples, by the step whose row they wait for

        if stored == NONE and self._run.resumed:
            stored = self._run.starting_step - 1
        self._stored = stored
        latest: dict[str, Any] = {}
        for row in history:
            latest |= {name: value for name, value in row.items() if name != "step"} | self._extremes.better(row)
            self._told = self._told or excess(row, self._precision) is not None
            self._send(row)
        if latest:  # offline, each piece of a run has a summary of its own
            self._run.summary.update(latest)

    @while_it_lives
    def log(self, row: MetricRow) -> None:
        self._send(row)
        if better := self._extremes.better(row):
            self._run.summary.update(better)
        allowed = excess(row, self._precision)
        if allowed is not None and not self._told:
            self._told = True
            text = (
                f"At step {row['step']} the loss, {row[LOSS]:.9g}, is {row[PARITY]:.3g} away from its baseline's; "
                f"{self._precision.value} allows {allowed:.1g}."
            )
            self._run.alert(title="The loss has left its baseline", text=text, level="WARN")

    def rollout(self, facts: RolloutFacts) -> None:
        """Keep the rollout's table for the row of its first step, since W&B drops steps below its last one."""
        if facts.shown and facts.step > self._stored:
            self._tables[facts.step] = table_of(facts)

    def _send(self, row: MetricRow) -> None:
        step = int(row["step"])
        if step > self._stored:
            values: dict[str, Any] = {name: value for name, value in row.items() if name != "step"}
            if step in self._tables:
                values[SAMPLES] = self._tables.pop(step)
            self._run.log(values, step=step, commit=True)  # at once, not with the next step

    @while_it_lives
    def saved(self, step: int, checkpoint: Path) -> None:
        """Log a checkpoint as an artifact by reference: the files stay where they are, and may be pruned."""
        if not self._artifacts:
            return
        import wandb

        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", type="checkpoint", metadata={"step": step})
        artifact.add_reference(checkpoint.resolve().as_uri(), checksum=False)
        self._run.log_artifact(artifact, aliases=["latest", f"step-{step}"])

    @while_it_lives
    def close(self, ending: Ending) -> None:
        facts = {name: value for name, value in ending.facts.items() if not isinstance(value, str)}
        if ending.facts:
            self._run.summary.update(dict(ending.facts) | self._extremes.better(facts))
        if ending.failed:
            lines = ending.reason.strip().splitlines()[:TEXT_LINES]
            self._run.alert(title="The run has failed", text="\n".join(lines)[:TEXT_LENGTH] or "", level="ERROR")
        elif ending.exit_code == 128 + signal.SIGTERM:
            self._run.mark_preempting()
        self._run.finish(exit_code=ending.exit_code)


def table_of(facts: RolloutFacts) -> Any:
    import wandb

    terms = list(dict.fromkeys(name for sample in facts.shown for name in sample.terms))
    names: list[str | int] = ["rollout", "prompt", "answer", "score", *(f"score/{name}" for name in terms)]
    names += ["length", "stopped"]
    rows = [
        [facts.rollout, each.prompt, each.answer, each.score, *map(each.terms.get, terms), each.length, each.stopped]
        for each in facts.shown
    ]
    return wandb.Table(columns=names, data=rows)


class Extremes:
    """Best values and peaks over a run's whole life, as `best/<metric>` and `max/<metric>`.

    W&B's own extremes (`define_metric(summary="max")`) begin anew with every process of a resumed run, and W&B then
    keeps the last value under another name than the metric's.
    """

    def __init__(self, best: Mapping[str, Best]) -> None:
        self._best = best
        self._so_far: dict[str, float] = {}

    def better(self, row: Mapping[str, float | int]) -> dict[str, float]:
        """Return the values of this row that are better than all before."""
        better = {}
        for name, value in row.items():
            largest = name.startswith("memory/") and name.endswith("_bytes")
            if not largest and name not in self._best:
                continue
            key, sign = (f"max/{name}", 1) if largest else (f"best/{name}", 1 if self._best[name] is Best.max else -1)
            if key not in self._so_far or sign * value > sign * self._so_far[key]:
                self._so_far[key] = better[key] = value
        return better


def _last_step_offline(run_dir: Path, run_id: str) -> int:
    """Return the last step in W&B's offline log. A log that cannot be read must not stop a run from resuming."""
    try:
        return last_step(run_dir / "wandb", run_id)
    except SinkError as error:
        say(f"rlexp: {error} All rows are sent to W&B again.\n")
        return NONE


def _begin(
    logger: LoggerConfig, run_dir: Path, config: Mapping[str, Any], tags: Sequence[str], run_id: str, mode: Mode
) -> Any:
    import wandb  # here, since the import takes a second and only rank 0 needs it

    try:
        return wandb.init(
            project=logger.project,
            entity=logger.entity,
            group=logger.group,
            name=name_of(logger, run_dir),
            job_type="train",
            tags=[*tags, *logger.tags],
            dir=str(run_dir),
            config=dict(config),
            mode=mode,
            id=run_id,
            resume="allow",
            settings=wandb.Settings(
                console="off",
                silent=True,
                # By default the client writes its log every 15 s, and a killed run would lose what came since.
                x_transaction_log_flush_interval=1,
            ),
        )
    except wandb.Error as error:
        reason = str(error).strip().partition("\n")[0]
        raise SinkError(
            f"logger.mode={logger.mode.value}: W&B could not be reached, or refused ({reason}). Try `wandb login`, or "
            f"train with logger.mode=offline and send the run later with `wandb sync`."
        ) from error


def name_of(logger: LoggerConfig, run_dir: Path) -> str:
    """Return the given name, or the folder's. A sweep's job has a number as folder: the sweep's name goes before."""
    numbered = f"{run_dir.parent.name}-{run_dir.name}" if run_dir.name.isdigit() else run_dir.name
    return logger.run_name or numbered


def new_id(logger: LoggerConfig, run_dir: Path) -> str:
    """Return an id that people see in lists and folders: the run's name, and six random digits."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", name_of(logger, run_dir)).strip("-")[-LONGEST_NAME:].strip("-")
    return f"{readable or 'run'}-{secrets.token_hex(3)}"
