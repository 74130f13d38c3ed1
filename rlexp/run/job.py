"""One job: start the ranks that train from a composed configuration, here or in the world that a launcher made."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from omegaconf import DictConfig

from rlexp.base.command import say
from rlexp.base.engine_facts import ENGINES
from rlexp.base.errors import ConfigError
from rlexp.base.printable import fitted
from rlexp.base.waiting import busy_message
from rlexp.config import load, sizes
from rlexp.config.explain import explain
from rlexp.config.paths import conf_dir
from rlexp.config.schema import Config
from rlexp.launch import preflight_check, rank_reports, run_folder, stops, watch
from rlexp.launch.joining import RankSpec, join, leave_world, prepare_environment
from rlexp.launch.local import PRELOAD, Interrupted, RankFailed, report_of, run_ranks
from rlexp.launch.rank_progress import before_steps, once_asked
from rlexp.launch.slurm import meeting

if TYPE_CHECKING:
    from rlexp.training.rollout.bridge import Bridge


def run_job(composed: DictConfig) -> None:
    """Run one job; this is Hydra's job function. A user error in a single run prints one line and exits."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    run_dir = Path(hydra.runtime.output_dir)
    try:
        if hydra.mode is RunMode.MULTIRUN and under_torchrun():
            raise ConfigError(NO_SWEEP)
        if hydra.mode is RunMode.RUN and "Slurm" in str(hydra.launcher._target_):
            raise ConfigError(NO_SINGLE_RUN.format(name=hydra.runtime.choices["hydra/launcher"]))
        cfg = load.from_hydra(composed)
        if sizes.joined_world() is None:
            run_here(cfg, run_dir)
        else:
            run_joined(cfg, None if sizes.joined_rank() else run_dir)  # every rank of a submitit job passes here
    except Exception as error:
        run_folder.drop_if_empty(run_dir)
        message = explain(error)
        if message is None or hydra.mode is not RunMode.RUN:
            raise
        say(message)
        sys.exit(1)


def run_here(cfg: Config, run_dir: Path) -> None:
    """Start the ranks on this machine and wait for them."""
    cfg, decision = preflight_check.prepared(cfg, run_dir)
    if not run_folder.enter(cfg, run_dir):
        sys.stderr.write(FINISHED.format(run_dir=run_dir))
        return
    preflight_check.keep(run_dir, decision)
    prepare_environment(cfg.launch)
    preload = PRELOAD + (("deepspeed",) if ENGINES[cfg.engine.name.value].stage is not None else ())
    ranks = cfg.parallel.world_size + cfg.rollout.sampling_ranks
    try:
        with busy_message(partial(before_steps, run_dir, ranks)) as over:
            outcome: stops.Outcome = run_ranks(
                train_rank, ranks, (str(run_dir),), device=cfg.launch.device.value, log_dir=run_dir / "logs",
                preload=preload, grace=cfg.launch.grace_seconds, when_stopped=over.set,
            )[0]  # fmt: skip
    except Interrupted as stop:
        run_folder.close(run_dir, "stopped", str(stop))
        ended = fitted(f"rlexp: {stop}; the run is in {run_dir}", sys.stderr)
        sys.stderr.write(f"\n{ended}\n{run_folder.continued_by(run_dir)}")
        sys.exit(stop.exit_code)
    except RankFailed as error:
        run_folder.close(run_dir, "failed", str(error))
        raise error from None
    except Exception as error:
        run_folder.close(run_dir, "failed", str(error))
        raise
    run_folder.close(run_dir, outcome.status, outcome.reason)
    if outcome.exit_code:
        sys.exit(outcome.exit_code)


TORCHRUN_WAITS = 30.0  # seconds until torchrun kills ranks that it has asked to end
FINISHED = "rlexp: {run_dir}: the run is finished. To train on, raise train.max_steps or train.epochs.\n"


def train_rank(spec: RankSpec, run_dir: str) -> stops.Outcome:
    """Train as one rank that `run_here` started."""
    from rlexp.training.train.rank import train

    cfg = load.from_file(Path(run_dir) / "config.yaml")
    return train(cfg, Path(run_dir), join_for(spec, cfg))


def join_for(spec: RankSpec, cfg: Config) -> Bridge | None:
    """Make this process a rank. If some ranks only sample, return what connects them with those that train."""
    from rlexp.training.rollout import bridge

    sampling = cfg.rollout.sampling_ranks
    store = join(spec, cfg.launch, sampling)
    return bridge.build(store, spec.rank, spec.world_size - sampling, sampling) if sampling else None


NO_SWEEP = "a sweep starts its own ranks. Start it without torchrun; to train one of its jobs, name that job's values."


NO_SINGLE_RUN = (
    "hydra/launcher={name}: is for sweeps, and a single run trains on this machine. Use -m, also for one job: "
    "python -m rlexp -m hydra/launcher={name} ..."
)


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def run_as_joined_rank(argv: list[str]) -> bool:
    """Under torchrun or srun, run every rank other than 0. It composes without a run folder: rank 0 tells it which."""
    rank = sizes.joined_rank()
    if rank is not None and under_torchrun() and any(argument in ("-m", "--multirun") for argument in argv):
        raise ConfigError(NO_SWEEP)
    if not rank:
        return False
    if not any(argument.startswith("-") for argument in argv):  # only rank 0 answers --help and --cfg
        from hydra import compose, initialize_config_dir
        from hydra.types import RunMode

        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            if compose("config", overrides=argv, return_hydra_config=True).hydra.mode is RunMode.MULTIRUN:
                raise ConfigError(NO_SWEEP)
            composed = compose("config", overrides=argv)
        run_joined(load.from_hydra(composed), None)
    return True


def run_joined(cfg: Config, run_dir: Path | None) -> None:
    """Train as one rank of the world that a launcher made. All ranks use rank 0's run folder and configuration."""
    spec = RankSpec.joined()
    assert spec is not None
    prepare_environment(cfg.launch)
    stops.hear_stops(under_launcher=False)
    if under_torchrun():
        stops.end_with_parent()
    claimed: Path | None = None  # only a folder that this rank has claimed may be closed by it
    watch.report_by(lambda error: _leave(spec, claimed, error))
    try:
        from rlexp.training.train.rank import train
        from rlexp.training.world.objects import from_rank0

        if run_dir is not None:
            cfg, decision = prepared_in_job(cfg, run_dir)
        unfinished = run_dir is None or run_folder.enter(cfg, run_dir)
        claimed = run_dir if unfinished else None
        if claimed is not None:
            stops.answer_by(partial(answer, claimed, cfg.launch.grace_seconds))
            preflight_check.keep(claimed, decision)
        bridge = join_for(spec, cfg)
        proposal = (run_dir, unfinished, cfg)
        run_dir, unfinished, cfg = bridge.agreed(proposal) if bridge else from_rank0(proposal, spec.world_size)
        assert run_dir is not None
        closing = partial(run_folder.close, run_dir) if spec.rank == 0 else None
        if unfinished:
            outcome = train(cfg, run_dir, bridge, closing)
        else:
            outcome = stops.Outcome()
            leave_world()
    except BaseException as error:
        _leave(spec, claimed, stops.cause_of(error))
    if spec.rank == 0 and not unfinished:
        sys.stderr.write(FINISHED.format(run_dir=run_dir))
    if outcome.exit_code:
        sys.stderr.flush()
        os._exit(outcome.exit_code)


def answer(run_dir: Path, grace: float, asked: signal.Signals) -> None:
    """Say what a request to stop leads to, on rank 0 of a world that another launcher made."""
    given = min(grace, TORCHRUN_WAITS) if under_torchrun() else grace
    why = "the job's time is nearly up" if asked is stops.TIME_IS_UP else asked.name
    stops.say_at_once(once_asked(run_dir, why, given, again=False))


def prepared_in_job(cfg: Config, run_dir: Path) -> tuple[Config, preflight_check.Decision]:
    """Choose what is left to choose, and refuse a run that does not fit. In a Slurm job, the decision is left for the
    launcher of the sweep, which could not tell the GPUs."""
    try:
        return preflight_check.prepared(cfg, run_dir, helping=meeting.run_dir() is None)
    except preflight_check.DoesNotFitError as unfit:
        if meeting.run_dir() is not None:
            preflight_check.keep(run_dir, unfit.decision)
        raise


def _leave(spec: RankSpec, run_dir: Path | None, error: BaseException) -> NoReturn:
    """Report the error and end this rank at once. Hydra would catch it and exit with 0, and the other ranks would wait.
    `run_dir` is the folder that rank 0 has claimed."""
    if isinstance(error, stops.Terminated):
        if run_dir is not None:
            run_folder.close(run_dir, "stopped", str(error))
        os._exit(error.exit_code)
    stops.ignore_stops()  # the launcher ends all ranks when one is gone; this one reports first, then ends by itself
    report = report_of(spec.rank, error, time.time())
    sys.stderr.write(f"rlexp: rank {spec.rank}: {report.text.rstrip()}\n")
    sys.stderr.flush()
    if (known := meeting.run_dir()) is not None:  # the batch script judges the reports of all ranks
        rank_reports.write(known, meeting.start_of_job(), report)
    elif run_dir is not None:
        run_folder.close(run_dir, "failed", rank_reports.in_words(report, None))
    if report.is_collateral:
        time.sleep(rank_reports.PATIENCE if report.timed_out else rank_reports.LINGER)
    os._exit(1)
