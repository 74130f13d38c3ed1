"""W&B by its own client: offline without an account, online with one."""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlparse

from rlexp.config.schema import LoggerConfig, WandbMode
from rlexp.types import MetricRow

Mode = Literal["online", "offline", "disabled", "shared"]


class WandbSink:
    """A run that goes on is one run: rows that W&B has are not sent again, and what it lost of the curve is.

    `history` are the rows up to where the run goes on. A process that was killed may have sent some beyond that, which
    are about to be computed again, or have lost its last ones.
    """

    def __init__(
        self,
        logger: LoggerConfig,
        run_dir: Path,
        config: dict[str, Any],
        tags: list[str],
        *,
        run_id: str | None = None,
        history: Sequence[MetricRow] = (),
    ) -> None:
        import wandb  # here, since it takes a second and only rank 0 needs it

        mode = wandb_mode(logger.mode)
        stored = last_step_offline(run_dir, run_id) if run_id and mode == "offline" else 0
        self._run = wandb.init(
            project=logger.project,
            entity=logger.entity,
            group=logger.group,
            name=logger.run_name or _name(run_dir),
            job_type="train",
            tags=[*tags, *logger.tags],
            dir=str(run_dir),
            config=config,
            mode=mode,
            id=run_id,
            resume="allow" if run_id else None,
            settings=wandb.Settings(
                console="off",
                silent=True,
                # The client writes its log to disk every 15 s; a run that is killed would lose what came since.
                x_transaction_log_flush_interval=1,
            ),
        )
        # Steps as a value, not as W&B's own counter: a step below the counter would be dropped in silence.
        self._run.define_metric("train/global_step")
        for family in ("train/*", "eval/*", "memory/*"):
            self._run.define_metric(family, step_metric="train/global_step")

        self._stored = stored or (self._run.step - 1 if self._run.resumed else 0)
        for row in history:
            self.log(row)

    @property
    def run_id(self) -> str:
        return str(self._run.id)

    def log(self, row: MetricRow) -> None:
        step = int(row["step"])
        if step > self._stored:
            self._run.log({name: value for name, value in row.items() if name != "step"}, step=step)

    def close(self, exit_code: int) -> None:
        if exit_code == 128 + signal.SIGTERM:
            self._run.mark_preempting()
        self._run.finish(exit_code=exit_code)


def last_step_offline(run_dir: Path, run_id: str) -> int:
    """The last step that stands in the folders of a run's earlier processes; W&B's own reader reads them."""
    last = 0
    for fragment in (run_dir / "wandb").glob(f"offline-run-*-{run_id}"):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(fragment)]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
        for line in filter(lambda line: '"type":"history"' in line, shown.splitlines()):
            with contextlib.suppress(ValueError, KeyError):
                last = max(last, int(json.loads(line)["history"]["step"]["num"]))
    return last


def _name(run_dir: Path) -> str:
    """The folder's; that of a sweep's job, which is but a number, with the sweep's before it."""
    return f"{run_dir.parent.name}-{run_dir.name}" if run_dir.name.isdigit() else run_dir.name


def wandb_mode(asked: WandbMode) -> Mode:
    """What was asked, or what WANDB_MODE says, or online where there is a key for the server."""
    if asked is not WandbMode.auto:
        return cast(Mode, asked.value)
    if os.environ.get("WANDB_MODE"):
        return cast(Mode, os.environ["WANDB_MODE"])
    return "online" if os.environ.get("WANDB_API_KEY") or _netrc_has_key() else "offline"


def _netrc_has_key() -> bool:
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
