"""Plan the jobs of a sweep. rlexp's launchers run every job, or say why not, and keep the sweep's ledger.

Hydra's own launchers end a sweep at its first failure, record nothing, and give every job the resources of the command
line. rlexp's go on after a failure, record how each job ended, and size each job by its own configuration.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from rlexp.base.errors import ConfigError, FolderError, UserError
from rlexp.config import load
from rlexp.config.explain import chain, explain
from rlexp.config.identity import curve_keys, depends_on_length
from rlexp.config.options import in_grammar
from rlexp.launch import preflight_check, run_folder
from rlexp.launch.preflight_check import Decision, DoesNotFitError
from rlexp.launch.sweep import Job, Sweep

SUBDIR = "hydra.sweep.subdir"
opened: list[Sweep] = []  # the sweeps of this process


@dataclass(frozen=True)
class Refusal:
    """Why a job is not run: its sizes do not fit together, or it does not fit its device (a grid may have such
    corners), or it has an error."""

    status: str  # skipped, or failed
    reason: str
    predicted: int | None = None  # bytes, of a job that does not fit its device


def refusal(error: BaseException) -> Refusal | None:
    """Return why the job is refused; None where the error is a bug."""
    reason = explain(error)
    if reason is None:
        return None
    links = list(chain(error))
    folders = any(isinstance(link, FolderError) for link in links)
    corner = not folders and any(isinstance(link, ConfigError) for link in links)
    if (unfit := next((link for link in links if isinstance(link, DoesNotFitError)), None)) is not None:
        return Refusal("skipped", unfit.reason, unfit.decision.peak)
    corner |= "ConfigError raised while resolving" in " ".join(map(str, links))  # OmegaConf keeps only the text
    return Refusal("skipped" if corner else "failed", reason)


@dataclass
class Planned:
    job: Job
    overrides: list[str]  # the job's own, then those that the sweep adds
    config: DictConfig  # composed from the overrides
    refusal: Refusal | None = None
    decision: Decision = field(default_factory=Decision)  # what was predicted of it


class SweepLauncher(Launcher):
    """What all launchers share: planning the jobs, and recording how each ended."""

    checked_here = True  # jobs run on this machine, so its hardware is checked

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context, self.task_function = config, hydra_context, task_function

    @property
    def where(self) -> Path:
        return Path(str(self.config.hydra.sweep.dir)).absolute()

    @contextlib.contextmanager
    def nothing_begun(self) -> Iterator[None]:
        """Remove the folder that Hydra made if the block raises a user error."""
        try:
            yield
        except UserError:
            run_folder.drop_if_empty(self.where, "multirun.yaml")
            raise

    def open(self) -> Sweep:
        """Return this process's sweep, opened once. Hydra calls the launcher once for every batch of jobs."""
        where = self.where
        if not opened or opened[-1].folder != where:
            where.mkdir(parents=True, exist_ok=True)
            run_folder.claim(where, key="hydra.sweep.dir")
            name = OmegaConf.select(self.config, "hydra.runtime.choices.sweep") or where.name
            opened.append(Sweep(where, str(name)))
        return opened[-1]

    def plan(self, sweep: Sweep, job_overrides: Sequence[Sequence[str]], first: int) -> list[Planned]:
        jobs = []
        for number, overrides in enumerate(job_overrides, first):
            typed = [*overrides, *load.displaced(overrides)]
            config = self.compose(typed, number)
            job = sweep.add(number, str(OmegaConf.select(config, SUBDIR)), filter_overrides(overrides))
            jobs.append(Planned(job, typed, config))
        for planned in jobs:
            keys = self._check(sweep, planned)
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

    def _check(self, sweep: Sweep, planned: Planned) -> str | None:
        """Return the values that the job's curve depends on; or None, and set the reason why the job cannot run."""
        plain = planned.config.copy()
        with open_dict(plain):
            del plain["hydra"]
        around = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(planned.config)  # for ${hydra:…} in its values
        try:
            cfg = load.from_hydra(plain, here=self.checked_here)
            where = sweep.folder / planned.job.folder
            _, planned.decision = preflight_check.prepared(cfg, where, here=self.checked_here, helping=False)
        except Exception as error:
            planned.refusal = refusal(error)
            if planned.refusal is None:
                raise
            return None
        finally:
            HydraConfig.instance().cfg = around
        keys = curve_keys(cfg)
        length = (cfg.train.max_steps, cfg.train.epochs) if depends_on_length(keys) else None
        return json.dumps([keys, length], sort_keys=True)

    def _told(self, sweep: Sweep, planned: Planned) -> list[str]:
        """Return the overrides that the sweep adds: group, name, baseline and axes, unless the user gave them."""
        job, given = planned.job, {override.partition("=")[0].lstrip("+") for override in planned.overrides}
        added = {"logger.group": sweep.folder.name, "logger.run_name": f"{sweep.folder.name}-{job.label}"}
        if job.baseline not in (None, job.number):
            baseline = next(each for each in sweep.jobs if each.number == job.baseline)
            added["logger.baseline"] = str(sweep.folder / baseline.folder)
        axes = ",".join(f"{key.lstrip('+')}:{in_grammar(value)}" for key, value in job.axes.items())
        free = [key for key in added if key not in given and OmegaConf.select(self.config, key) is None]
        pinned = f"{SUBDIR}={in_grammar(job.folder)}"  # it may depend on the overrides, which have grown
        return [*(f"{key}={in_grammar(added[key])}" for key in free), f"++logger.axes={{{axes}}}", pinned]


def refuse(sweep: Sweep, job: Job, refused: Refusal) -> None:
    """Write why a job is not run into the ledger, and print it."""
    job.predicted = refused.predicted
    sweep.note(job, refused.status, refused.reason)
    say_how(job)


def done() -> JobReturn:
    """Return what Hydra's sweeper is told of every job: completed, so that the sweep goes on."""
    return JobReturn(status=JobStatus.COMPLETED)


def say_how(job: Job) -> None:
    sys.stderr.write(f"rlexp: {job.label} is {job.status}: {job.reason}\n")
