"""The life of a rank once it has joined: build, train, export, close; or only sample, for the others."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from rlexp.base.errors import NonFiniteError
from rlexp.base.printable import fitted
from rlexp.config.schema import Config, CountTensors, EngineConfig, EngineName
from rlexp.config.schema.rollouts import RolloutEngine
from rlexp.launch import run_folder, watch
from rlexp.launch.joining import leave_world
from rlexp.launch.rank_progress import Whereabouts
from rlexp.launch.stops import Outcome, finishing_steps, stopped_by
from rlexp.run_files import evaluations
from rlexp.run_files.checkpoint_folder import METRICS
from rlexp.run_files.metrics_jsonl import read_rows
from rlexp.training.engine.base import trained
from rlexp.training.metrics.live_tensors import TensorCount
from rlexp.training.metrics.memory import Phases
from rlexp.training.model.loading import load_config, load_tokenizer
from rlexp.training.model.placing import Placing
from rlexp.training.model.policy import DTYPES, Policy
from rlexp.training.rollout.bridge import Bridge
from rlexp.training.rollout.deal import Weights
from rlexp.training.rollout.sources import serve
from rlexp.training.sinks.base import Ending, Sinks
from rlexp.training.sinks.console import say
from rlexp.training.sinks.jsonl import JsonlSink
from rlexp.training.train.build import build, build_policy
from rlexp.training.train.build_rollouts import build_drawer
from rlexp.training.train.build_sinks import build_sinks, ending_of
from rlexp.training.train.deal_record import DealRecord
from rlexp.training.train.examples import read_examples, sampler_of
from rlexp.training.train.export_at_end import export_run
from rlexp.training.train.header import footer, header
from rlexp.training.train.loop import Position, last_step, train_loop
from rlexp.training.train.parts import TrainingRun
from rlexp.training.train.resume import build_keeper, refuse_other_versions, resume, versions_of
from rlexp.training.train.surroundings import HERE
from rlexp.training.train.task import Task
from rlexp.training.types import Example, Wanted
from rlexp.training.world.groups import ALONE, World
from rlexp.training.world.objects import from_rank0, gather_objects

Closing = Callable[[str, str], None]  # writes down the status, and why


def train(cfg: Config, run_dir: Path, bridge: Bridge | None = None, closing: Closing | None = None) -> Outcome:
    """Train, or sample for the ranks that train; however it ends, `memory.jsonl` says how far each rank came.

    Rank 0 calls `closing` while the others still wait: the first to leave with a code takes all others along.
    """
    run_folder.hold(run_dir)
    if bridge is not None and bridge.samples:
        return sample_for(cfg, bridge)
    rank = dist.get_rank()  # asked here, since it cannot be asked once the ranks have parted
    phases = Phases(HERE.device(cfg), Whereabouts(run_dir, rank).tell, tensor_count(cfg))
    try:
        with phases.throughout():
            return train_watched(cfg, run_dir, phases, bridge, closing)
    except Exception as error:
        explained = phases.explained(error, rank)
        if explained is None:
            raise
        raise explained from error


def tensor_count(cfg: Config) -> TensorCount | None:
    """Choose where live tensors are counted; None: nowhere."""
    device, always = HERE.device(cfg), cfg.memory.count_tensors is CountTensors.always
    counts = always or (cfg.memory.count_tensors is CountTensors.auto and device.type == "cpu")
    return TensorCount(device, always=always) if counts else None


def train_watched(
    cfg: Config, run_dir: Path, phases: Phases, bridge: Bridge | None = None, closing: Closing | None = None
) -> Outcome:
    with phases("build"):
        task = build(cfg, phases, bridge)
    try:
        outcome = train_task(task, run_dir, phases)
    finally:
        task.close()
    task.finish()
    if closing is not None:
        closing(outcome.status, outcome.reason)
    leave_world()
    return outcome


def train_task(task: Task, run_dir: Path, phases: Phases) -> Outcome:
    """Resume the run if it has begun, and train to its end."""
    cfg, run = task.run.cfg, task.run
    first = run.world.rank == 0
    position, came_from = resume(task, run_dir)
    run = task.run
    if position.step:
        for versions in gather_objects(versions_of(task), run.world.size):  # each machine has a cache of its own
            refuse_other_versions(run_dir, versions, cfg.resume.force)
    if position.step >= run.total_steps:
        if first:
            say(f"rlexp: {run_dir}: step {position.step} of {run.total_steps} is done already.\n")
        exported = run_folder.read(run_dir).get("exported_step") == position.step
        if cfg.checkpoint.export and not from_rank0(exported, run.world.size):
            with phases.between("export"):
                export_run(run, run_dir, position.step)
        return Outcome()
    curve = JsonlSink(run_dir / METRICS) if first else None
    with watch.elsewhere():  # a service on the network
        sinks = build_sinks(run, run_dir, position, curve) if curve else Sinks([])
    ending = Ending(1)
    try:
        phases.watch = sinks.within_step
        if first:
            run_folder.note(run_dir, **ledger(task), began_after_step=position.step)
            say(fitted(header(task, run_dir) + came_from, sys.stderr))
        keeper = build_keeper(task, run_dir, position, curve, sinks.saved)
        with finishing_steps(cfg.launch.grace_seconds):
            record = DealRecord(run, run_dir, position.step, last_step(run, position))
            row, stop = train_loop(task, sinks, position, keeper.after_step, record)
            keeper.close(row)
        outcome = how_it_ended(run, position, stop, keeper.failed)
        if outcome.status == "finished" and cfg.checkpoint.export:
            with phases.between("export"):
                export_run(run, run_dir, position.step)
        ending = Ending(outcome.exit_code, outcome.reason)
    except BaseException as error:
        ending = ending_of(error, run, run_dir)
        if isinstance(error, NonFiniteError):  # on all ranks alike, so what is being saved can be saved
            keeper.settle()
        raise
    finally:
        with watch.elsewhere():
            sinks.close(ending)
    if first:
        summary = footer(task, run_dir, outcome, evaluations.last(read_rows(run_dir / METRICS)))
        say(fitted(summary, sys.stderr))
    return outcome


def how_it_ended(run: TrainingRun, position: Position, stop: signal.Signals | None, failed: str | None) -> Outcome:
    if failed is not None:
        return Outcome("failed", f"the checkpoint of step {position.step} could not be saved: {failed}", 1)
    if stop is not None:
        return Outcome("stopped", stopped_by(stop), 128 + stop)
    if position.step < run.total_steps:
        return Outcome("stopped", f"train.stop_after={run.cfg.train.stop_after}")
    return Outcome()


def ledger(task: Task) -> dict[str, object]:
    """Return what run.json says of the data and the length of the run."""
    run = task.run
    return {
        "steps": run.total_steps,
        "warmup_steps": run.schedule.warmup_steps,
        "parameters": run.parameters,
        "data": {
            **task.counts(),
            "versions": versions_of(task),
            "not_as_read": dict(task.examples.dropped),
            "eval_not_as_read": dict(task.examples.held_out_dropped),
        },
    }


# ---- a rank that only samples ----


def sample_for(cfg: Config, bridge: Bridge) -> Outcome:
    """Draw samples for the ranks that train: with the policy and a cache, no engine, no critic and no reference."""
    torch.use_deterministic_algorithms(cfg.launch.deterministic)
    device = HERE.device(cfg)
    tokenizer = load_tokenizer(cfg.model)
    examples = read_examples(cfg, tokenizer, World(0, 1, ALONE))
    sampler = sampler_of(cfg, cfg.loss.rows, len(examples.train), examples.mixture)
    whole = replace(cfg, engine=EngineConfig(EngineName.torch))  # whole on every rank: each samples alone
    wanted = Wanted(temperature=cfg.rollout.temperature)
    # vLLM has the weights on the device. These are handed over to it, and need not be there too.
    at = torch.device("cpu") if cfg.rollout.engine is RolloutEngine.vllm else device
    placing = Placing(at, DTYPES[cfg.train.precision])
    policy = build_policy(whole, load_config(cfg.model, cfg.data.max_length), at, wanted, placing)
    handed_over = trained(policy)
    policy.eval().requires_grad_(False)
    drawer = build_drawer(cfg, torch.no_grad()(policy), policy.model, tokenizer, device)

    def prompts_of(number: int) -> list[Example]:
        return [examples.train[index] for index in sampler.batch(number + 1).indices]

    with finishing_steps(cfg.launch.grace_seconds):  # the training ranks save what is being drawn
        serve(bridge, drawer, handed_over, weights_of(policy), cfg.rollout, prompts_of)
    leave_world()
    return Outcome()


def weights_of(policy: Policy) -> Weights:
    """Return what yields the weights that another engine draws by, with an adapter merged into them."""
    adapter, held = policy.adapter, policy.model.named_parameters
    return held if adapter is None else lambda: adapter.merged(held())
