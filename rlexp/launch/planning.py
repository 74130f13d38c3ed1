"""Hydra's launchers, ours: every job of a sweep is run, or said why not, and the sweep is compared at its end.

Stock launchers end a sweep at its first failure, write nothing at its end, and give every job the resources of the
command line. These collect what became of each job, go on, and size each by its own configuration.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from rlexp.config import load
from rlexp.config.explain import chain, explain
from rlexp.config.identity import curve_keys
from rlexp.config.schema import Decay
from rlexp.errors import ConfigError, FolderError, UserError
from rlexp.launch import folder
from rlexp.launch.sweep import Job, Sweep

SUBDIR = "hydra.sweep.subdir"


@dataclass(frozen=True)
class Refusal:
    """Why a job is not run: its sizes do not fit together, which a grid may have at its corners; or it is a mistake."""

    status: str  # skipped, or failed
    reason: str


def refusal(error: BaseException) -> Refusal | None:
    """None for what is no user's mistake, but a defect."""
    reason = explain(error)
    if reason is None:
        return None
    links = list(chain(error))
    folders = any(isinstance(link, FolderError) for link in links)
    corner = not folders and any(isinstance(link, ConfigError) for link in links)
    corner |= "ConfigError raised while resolving" in " ".join(map(str, links))  # OmegaConf keeps the text alone
    return Refusal("skipped" if corner else "failed", reason)


@dataclass
class Planned:
    job: Job
    overrides: list[str]  # the job's own, and what it is told of its sweep
    config: DictConfig  # composed of them
    refusal: Refusal | None = None


class SweepLauncher(Launcher):
    """What the launchers share: planning, and what is known of each job afterwards."""

    checked_here = True  # the job's machine is this one

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context, self.task_function = config, hydra_context, task_function

    @property
    def where(self) -> Path:
        return Path(str(self.config.hydra.sweep.dir)).absolute()

    @contextlib.contextmanager
    def nothing_begun(self) -> Iterator[None]:
        """What is refused meanwhile leaves no folder, though Hydra has made one."""
        try:
            yield
        except UserError:
            folder.drop_multirun(self.where)
            raise

    def open(self) -> Sweep:
        """This process's sweep. A launcher is asked once for every batch of jobs, and there is but one sweep."""
        where = self.where
        if not _opened or _opened[-1].folder != where:
            where.mkdir(parents=True, exist_ok=True)
            folder.claim(where, key="hydra.sweep.dir")
            _opened.append(
                Sweep(where, str(OmegaConf.select(self.config, "hydra.runtime.choices.sweep") or where.name))
            )
        return _opened[-1]

    def plan(self, sweep: Sweep, job_overrides: Sequence[Sequence[str]], first: int) -> list[Planned]:
        jobs = []
        for number, overrides in enumerate(job_overrides, first):
            config = self.compose(overrides, number)
            job = sweep.add(number, str(OmegaConf.select(config, SUBDIR)), filter_overrides(overrides))
            jobs.append(Planned(job, list(overrides), config))
        for planned in jobs:
            keys = self._check(planned)
            if keys is not None:
                planned.job.baseline = sweep.families.setdefault(keys, planned.job.number)
            planned.overrides += self._told(sweep, planned)
            planned.config = self.compose(planned.overrides, planned.job.number)
        sweep.write()
        return jobs

    def compose(self, overrides: Sequence[str], number: int) -> DictConfig:
        composed = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(composed):
            composed.hydra.job.id = composed.hydra.job.num = number
        return composed

    def _check(self, planned: Planned) -> str | None:
        """What its curve depends on, or None with the reason why it cannot be run."""
        plain = planned.config.copy()
        with open_dict(plain):
            del plain["hydra"]
        around = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(planned.config)  # what ${hydra:…} asks
        try:
            cfg = load.from_hydra(plain, here=self.checked_here)
        except Exception as error:
            planned.refusal = refusal(error)
            if planned.refusal is None:
                raise
            return None
        finally:
            HydraConfig.instance().cfg = around
        length = None if cfg.optim.decay is Decay.constant else (cfg.train.max_steps, cfg.train.epochs)
        return json.dumps([curve_keys(cfg), length], sort_keys=True)

    def _told(self, sweep: Sweep, planned: Planned) -> list[str]:
        """Every job knows its sweep, what varies in it, and its baseline; what the user says of it comes first."""
        job, said = planned.job, {override.partition("=")[0].lstrip("+") for override in planned.overrides}
        told = {
            "logger.group": _quoted(sweep.folder.name),
            "logger.run_name": _quoted(f"{sweep.folder.name}-{job.label}"),
        }
        if job.baseline not in (None, job.number):
            baseline = next(each for each in sweep.jobs if each.number == job.baseline)
            told["logger.baseline"] = _quoted(str(sweep.folder / baseline.folder))
        axes = ",".join(f"{key.lstrip('+')}:{_quoted(value)}" for key, value in job.axes.items())
        free = [key for key in told if key not in said and OmegaConf.select(self.config, key) is None]
        pinned = f"hydra.sweep.subdir={_quoted(job.folder)}"  # which may depend on the overrides, and now has more
        return [*(f"{key}={told[key]}" for key in free), f"++logger.axes={{{axes}}}", pinned]

    def concluded(self, sweep: Sweep, job: Job, returned: JobReturn) -> None:
        """Write down how a job ended, and say so where it did not end well."""
        if returned.status is not JobStatus.FAILED:
            note_own_word(sweep, job)
            return
        self.failed(sweep, job, returned._return_value)

    def failed(self, sweep: Sweep, job: Job, error: BaseException) -> None:
        found = refusal(error) or Refusal("failed", f"{type(error).__name__}: {error}")
        sweep.note(job, found.status, found.reason)
        say_how(job)


def note_own_word(sweep: Sweep, job: Job) -> None:
    """What the run's folder says of how it ended."""
    run = folder.read(sweep.folder / job.folder)
    sweep.note(job, run.get("status", "failed"), run.get("reason"))


def done() -> JobReturn:
    """What a sweeper is told of every job: nothing that would end the sweep."""
    return JobReturn(status=JobStatus.COMPLETED)


def say_how(job: Job) -> None:
    sys.stderr.write(f"rlexp: {job.label} is {job.status}: {job.reason}\n")


def swept(config: DictConfig) -> set[str]:
    """The keys that this command varies, whichever jobs have been seen of it."""
    params = OmegaConf.to_container(config.hydra.sweeper.get("params") or OmegaConf.create(), resolve=True)
    given = [f"{key}={value}" for key, value in cast(dict[str, Any], params).items()]
    parsed = OverridesParser.create().parse_overrides([*given, *config.hydra.overrides.task])
    return {override.get_key_element() for override in parsed if override.is_sweep_override()}


_opened: list[Sweep] = []  # by this process


def opened() -> Iterator[Sweep]:
    yield from _opened


def _quoted(text: str) -> str:
    """As Hydra's grammar takes any text."""
    return QuotedString(text, Quote.single).with_quotes()
