"""W&B by its own client: offline without an account, online with one."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from rlexp.config.schema import Best, LoggerConfig, Precision
from rlexp.errors import SinkError
from rlexp.sinks.base import Ending, RolloutFacts, Sink
from rlexp.sinks.baseline import LOSS, PARITY, excess
from rlexp.sinks.console import say
from rlexp.sinks.names import name_of
from rlexp.sinks.wandb_account import Mode, wandb_mode
from rlexp.sinks.wandb_read import SAMPLES, STEP, last_step
from rlexp.types import MetricRow

TEXT_LINES, TEXT_LENGTH = 12, 1000  # of an alert
# What the client raises once its process is gone, beside ConnectionError; it has no public names for these.
GONE = ("MailboxClosedError", "HandleAbandonedError")
P = ParamSpec("P")


def while_it_lives(
    method: Callable[Concatenate[WandbSink, P], None],
) -> Callable[Concatenate[WandbSink, P], None]:
    """W&B's client sends from a process of its own. A cluster that asks a job to stop signals that one too, which ends
    at once, before the run has saved: no reason for the run to fail."""

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
                "rlexp: W&B's process has ended before the run. The run goes on without it; what W&B does not have by "
                "then is sent when the run is started again.\n"
            )

    return guarded


@dataclass(frozen=True)
class WandbFacts:
    """What W&B is told of a run beside its rows."""

    config: Mapping[str, Any]
    tags: Sequence[str]
    best_metric: str
    best: Best
    precision: Precision


class WandbSink(Sink):
    """A run that goes on is one run: rows that W&B has are not sent again, and what it lost of the curve is.

    `history` are the rows up to where the run goes on. A process that was killed may have sent some beyond that, which
    are about to be computed again, or have lost its last ones.
    """

    def __init__(
        self, logger: LoggerConfig, run_dir: Path, facts: WandbFacts, *, run_id: str, history: Sequence[MetricRow] = ()
    ) -> None:
        mode = wandb_mode(logger.mode)
        stored = _last_step_offline(run_dir, run_id) if mode == "offline" else 0
        self._run = _begin(logger, run_dir, facts, run_id, mode)
        # Steps as a value, not as W&B's own counter: a step below the counter would be dropped in silence.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        self._artifacts, self._precision = logger.artifacts, facts.precision
        self._extremes = Extremes({LOSS: Best.min, facts.best_metric: facts.best})
        self.gone = False  # the client's process
        self._told = False  # that the loss left its baseline
        self._tables: dict[int, Any] = {}  # of samples, by the step whose row they wait for

        self._stored = stored or (self._run.starting_step - 1 if self._run.resumed else 0)
        latest: dict[str, Any] = {}
        for row in history:
            latest |= {name: value for name, value in row.items() if name != "step"} | self._extremes.better(row)
            self._told = self._told or excess(row, self._precision) is not None
            self._send(row)
        if latest:  # what is kept of a run offline is put together from pieces, each with a summary of its own
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
                f"At step {row['step']} the loss, {row[LOSS]:.9g}, lies {row[PARITY]:.3g} from its baseline's; "
                f"{self._precision.value} allows {allowed:.1g}."
            )
            self._run.alert(title="The loss has left its baseline", text=text, level="WARN")

    def rollout(self, facts: RolloutFacts) -> None:
        """Its table goes with the row of its first step: W&B drops a row whose step is below one that it has."""
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
        """By reference: the files stay where they are, and may be pruned."""
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
    names: list[str | int] = [
        "rollout",
        "prompt",
        "answer",
        "score",
        *(f"score/{name}" for name in terms),
        "length",
        "stopped",
    ]
    rows = [
        [facts.rollout, each.prompt, each.answer, each.score, *map(each.terms.get, terms), each.length, each.stopped]
        for each in facts.shown
    ]
    return wandb.Table(columns=names, data=rows)


class Extremes:
    """Best values and peaks of a run's whole life, as `best/<metric>` and `max/<metric>`.

    W&B's own (`define_metric(summary="max")`) begin anew with every process of a run that goes on, and put the last
    value elsewhere than under the metric's name.
    """

    def __init__(self, best: Mapping[str, Best]) -> None:
        self._best = best
        self._so_far: dict[str, float] = {}

    def better(self, row: Mapping[str, float | int]) -> dict[str, float]:
        """What this row has that is better than before."""
        found = {}
        for name, value in row.items():
            largest = name.startswith("memory/") and name.endswith("_bytes")
            if not largest and name not in self._best:
                continue
            key, sign = (f"max/{name}", 1) if largest else (f"best/{name}", 1 if self._best[name] is Best.max else -1)
            if key not in self._so_far or sign * value > sign * self._so_far[key]:
                self._so_far[key] = found[key] = value
        return found


def _last_step_offline(run_dir: Path, run_id: str) -> int:
    """A log of W&B's that cannot be read must not keep a run from going on."""
    try:
        return last_step(run_dir / "wandb", run_id)
    except SinkError as error:
        say(f"rlexp: {error} All rows are given to W&B again.\n")
        return 0


def _begin(logger: LoggerConfig, run_dir: Path, facts: WandbFacts, run_id: str, mode: Mode) -> Any:
    import wandb  # here, since it takes a second and only rank 0 needs it

    try:
        return wandb.init(
            project=logger.project,
            entity=logger.entity,
            group=logger.group,
            name=name_of(logger, run_dir),
            job_type="train",
            tags=[*facts.tags, *logger.tags],
            dir=str(run_dir),
            config=dict(facts.config),
            mode=mode,
            id=run_id,
            resume="allow",
            settings=wandb.Settings(
                console="off",
                silent=True,
                # The client writes its log to disk every 15 s; a run that is killed would lose what came since.
                x_transaction_log_flush_interval=1,
            ),
        )
    except wandb.Error as error:
        said = str(error).strip().partition("\n")[0]
        raise SinkError(
            f"logger.mode={logger.mode.value}: W&B could not be reached, or refused ({said}). Try `wandb login`, or "
            f"train with logger.mode=offline and send it later by `wandb sync`."
        ) from error
