"""W&B by its own client: offline without an account, online with one."""

from __future__ import annotations

import netrc
import os
import signal
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlparse

from rlexp.config.schema import LoggerConfig, WandbMode
from rlexp.sinks.base import MetricRow

Mode = Literal["online", "offline", "disabled", "shared"]


class WandbSink:
    def __init__(self, logger: LoggerConfig, run_dir: Path, config: dict[str, Any], tags: list[str]) -> None:
        import wandb  # here, since it takes a second and only rank 0 needs it

        self._run = wandb.init(
            project=logger.project,
            entity=logger.entity,
            group=logger.group,
            name=logger.run_name or _name(run_dir),
            job_type="train",
            tags=[*tags, *logger.tags],
            dir=str(run_dir),
            config=config,
            mode=wandb_mode(logger.mode),
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

    def log(self, row: MetricRow) -> None:
        self._run.log({name: value for name, value in row.items() if name != "step"})

    def close(self, exit_code: int) -> None:
        if exit_code == 128 + signal.SIGTERM:
            self._run.mark_preempting()
        self._run.finish(exit_code=exit_code)


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
