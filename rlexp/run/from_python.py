"""Training from a script or a notebook: the command `python -m rlexp`, started from there and waited for."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from rlexp.base.errors import ConfigError, UserError
from rlexp.base.pages import addressed
from rlexp.config import load
from rlexp.config.explain import explain
from rlexp.config.options import quoted
from rlexp.launch import run_folder
from rlexp.launch.stops import ENDS_WITH_PARENT
from rlexp.run_files.metrics_jsonl import METRICS, MetricRow, read_rows

RUN_DIR = "hydra.run.dir"
KEPT = 50  # last lines of what it says, for the error


@dataclass(frozen=True)
class Run:
    """A run that has ended, by its folder."""

    folder: Path

    @property
    def rows(self) -> list[MetricRow]:
        """The curve: one row for each optimizer step."""
        return read_rows(self.folder / METRICS)

    @property
    def status(self) -> str:
        """`finished`, or `stopped` where the configuration or a signal stopped it."""
        return str(run_folder.read(self.folder).get("status"))

    def model(self, **options: Any) -> Any:
        """Load the trained model, an adapter on its base or a reward model, with options of `from_pretrained`."""
        from rlexp.training.model.exported import load_exported

        place = self.folder / "model"
        if not place.is_dir():
            raise ConfigError(
                f"{self.folder}: has no model/, since the run is {self.status} or had checkpoint.export=false. Write "
                f"one: python -m rlexp.export {quote(str(self.folder))}."
            )
        return load_exported(place, **options)


def train(overrides: Sequence[str]) -> Run:
    """Train as `python -m rlexp OVERRIDES` does, in processes of its own, and return the run when it has ended.

    What the command refuses is raised as a `UserError` with the command's message.
    """
    refuse_process()
    if isinstance(overrides, str):
        raise ConfigError(f"rlexp.train: takes a list of words. Say rlexp.train([{overrides!r}]).")
    words = [str(each) for each in overrides]
    for word in words:
        if word.startswith("-"):
            raise ConfigError(f"{word}: rlexp.train takes KEY=VALUE alone. For sweeps, type python -m rlexp -m ….")
    folder = checked(words)
    rest = [word for word in words if not word.startswith(f"{RUN_DIR}=")]
    failed = run_command([sys.executable, "-m", "rlexp", *rest, f"{RUN_DIR}={quoted(str(folder))}"])
    if failed is not None:
        known = run_folder.read(folder)
        reason = known.get("reason") if known.get("status") == "failed" else None
        raise UserError(reason or failed or "the run has failed, as is said above")
    return Run(folder)


def refuse_process() -> None:
    """Refuse a process whose state its ranks would not have, or that holds what they need."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise ConfigError(
            "rlexp.train: this process is a rank already (torch.distributed is initialized), and rlexp starts its own. "
            "Call it from a plain process, or start the ranks by torchrun -m rlexp."
        )
    if torch.cuda.is_initialized():
        raise ConfigError(
            "rlexp.train: this process holds a GPU already (torch.cuda is initialized), whose memory its ranks need. "
            "Restart it (a notebook's kernel), and call rlexp.train before anything else uses the GPU."
        )


def checked(words: Sequence[str]) -> Path:
    """Refuse what the command refuses before a process starts, and return the folder of the run. Notes are left to the
    command."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.initialize import get_gh_backup, restore_gh_from_backup
    from hydra.types import RunMode
    from omegaconf import open_dict

    from rlexp.config.paths import conf_dir

    load.register()
    around = get_gh_backup()  # of the program that calls this
    GlobalHydra.instance().clear()
    try:
        with redirect_stderr(io.StringIO()), initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = compose("config", overrides=load.open_ended(words), return_hydra_config=True)
        if composed.hydra.mode is RunMode.MULTIRUN:
            raise ConfigError("rlexp.train: trains one run, and this is a sweep. Type python -m rlexp -m ….")
        folder = Path(str(composed.hydra.run.dir)).absolute()
        with open_dict(composed):
            del composed["hydra"]
        with redirect_stderr(io.StringIO()):
            load.from_hydra(composed)
    except Exception as error:
        if (message := explain(error)) is None:
            raise
        raise ConfigError(addressed(message)) from None
    finally:
        restore_gh_from_backup(around)
    return folder


def run_command(command: Sequence[str]) -> str | None:
    """Run the command and show what it says. Return None if it ended well or was stopped as it was asked; else its
    message, empty where the terminal has it.

    It has a process group of its own, so that Ctrl-C reaches it through here, once.
    """
    shown = sys.stderr.isatty()
    process = subprocess.Popen(
        command, stderr=None if shown else subprocess.PIPE, text=True, process_group=0,
        env=os.environ | {ENDS_WITH_PARENT: "1"},
    )  # fmt: skip
    last: list[str] = []
    while True:
        try:
            for line in process.stderr or ():
                sys.stderr.write(line)
                last = [*last[-KEPT:], line]
            code = process.wait()
            break
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code == 0 or code > 128:
        return None
    started = max((place for place, line in enumerate(last) if line.startswith("rlexp: ")), default=0)
    return "".join(last[started:]).strip().removeprefix("rlexp: ")
