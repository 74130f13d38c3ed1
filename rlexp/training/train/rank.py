"""The life of a rank once it has joined: build, train, export, close."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from shlex import quote

import torch.distributed as dist

from rlexp import __version__
from rlexp.base.errors import NonFiniteError
from rlexp.base.host_memory import host_memory
from rlexp.base.kernel_rates import faster
from rlexp.config.checks.kernel import tokens_of_rank
from rlexp.config.checks.layout import heads_in
from rlexp.config.checks.micro_batches import batch_in_words
from rlexp.config.checks.rope import note_on_loaded
from rlexp.config.model_names import called
from rlexp.config.rates import rates_in_words
from rlexp.config.schema import BackendName, Collectives, Config, CountTensors, LoggerName
from rlexp.config.schema.cadence import eval_cadence, save_cadence
from rlexp.config.vllm_memory import KEY, held_by_vllm, uses_vllm
from rlexp.launch import run_folder, watch
from rlexp.launch.joining import leave_world
from rlexp.launch.rank_progress import Whereabouts
from rlexp.launch.stops import Outcome, finishing_steps, stopped_by
from rlexp.run_files.checkpoint_folder import METRICS, latest_first
from rlexp.training.metrics.memory import Phases
from rlexp.training.metrics.tensor_count import TensorCount
from rlexp.training.rollout.bridge import Bridge
from rlexp.training.sinks.base import Ending, Sinks
from rlexp.training.sinks.console import say
from rlexp.training.sinks.jsonl import JsonlSink
from rlexp.training.train.build import build, device_of, memory_of
from rlexp.training.train.build_sinks import build_sinks, ending_of
from rlexp.training.train.export_at_end import alone, export_run
from rlexp.training.train.loop import Position, train_loop
from rlexp.training.train.parts import Run
from rlexp.training.train.resume import build_keeper, refuse_other_versions, resume, versions_of
from rlexp.training.train.sampling_rank import sample_for
from rlexp.training.train.task import Task
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
    phases = Phases(device_of(cfg), Whereabouts(run_dir, rank).tell, tensor_count(cfg))
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
    device = device_of(cfg)
    match cfg.memory.count_tensors:
        case CountTensors.always:
            return TensorCount(device, always=True)
        case CountTensors.auto if device.type == "cpu":
            return TensorCount(device, always=False)
        case _:
            return None


def train_watched(
    cfg: Config, run_dir: Path, phases: Phases, bridge: Bridge | None = None, closing: Closing | None = None
) -> Outcome:
    with phases("build"):
        task = build(cfg, phases, bridge)
    run = task.run
    first = run.world.rank == 0
    position, came_from = resume(task, run_dir)
    run = task.run
    if position.step:
        for versions in gather_objects(versions_of(task), run.world.size):  # each machine has a cache of its own
            refuse_other_versions(run_dir, versions, cfg.resume.force)
    if position.step >= run.total_steps:
        print_line(run, f"rlexp: {run_dir}: step {position.step} of {run.total_steps} is done already.\n")
        exported = run_folder.read(run_dir).get("exported_step") == position.step
        if cfg.checkpoint.export and not from_rank0(exported, run.world.size):
            with phases.between("export"):
                export_run(run, run_dir, position.step)
        return leave(task, Outcome(), closing)
    curve = JsonlSink(run_dir / METRICS) if first else None
    with watch.elsewhere():  # a service on the network
        sinks = build_sinks(run, run_dir, position, curve) if curve else Sinks([])
    phases.watch = sinks.within_step
    if first:
        run_folder.note(run_dir, **ledger(task), began_after_step=position.step)
        say(header(task, run_dir) + came_from)
    ending = Ending(1)
    try:
        keeper = build_keeper(task, run_dir, position, curve, sinks.saved)
        with finishing_steps(cfg.launch.grace_seconds):
            row, stop = train_loop(task, sinks, position, keeper.after_step)
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
        task.close()
    print_line(run, footer(run, run_dir, outcome))
    return leave(task, outcome, closing)


def leave(task: Task, outcome: Outcome, closing: Closing | None) -> Outcome:
    task.finish()
    if closing is not None:
        closing(outcome.status, outcome.reason)
    leave_world()
    return outcome


def print_line(run: Run, text: str) -> None:
    if run.world.rank == 0:
        say(text)


def how_it_ended(run: Run, position: Position, stop: signal.Signals | None, failed: str | None) -> Outcome:
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


def header(task: Task, run_dir: Path) -> str:
    run = task.run
    cfg, world = run.cfg, run.world
    replicas = f"{world.dp_size} replica{'s' * (world.dp_size > 1)}"
    reasons = sorted(task.examples.dropped.items())
    dropped = "".join(f"\n  {count} {task.kind}s: {reason}" for reason, count in reasons)
    remarks = "".join(f"\n  {each}" for each in task.remarks())
    return (
        f"rlexp {__version__}  {cfg.loss.name} on {called(cfg.model)} ({run.parameters:,} parameters{trained(run)}, "
        f"{cfg.train.precision.value}), engine {run.engine.name}\n"
        f"  ring of {world.ring.size} ({run.attention}) × {replicas} = "
        f"{world.size} rank{'s' * (world.size > 1)} on {run.device.type}{sampling(run)}\n"
        f"{generating(run)}{carried(run)}{chosen(run)}{installable(run)}{fused(run)}"
        f"  {batch_in_words(cfg)}\n"
        f"  learning rate {rates_in_words(cfg)}, {run.schedule.in_words()}\n"
        f"{sharing(task)}{positions(run)}"
        f"  {task.describe()}, {run.total_steps} steps (an epoch has {task.steps_per_epoch}){dropped}{remarks}\n"
        f"{shares_in_words(task)}"
        f"  {run_dir}\n"
    )


def shares_in_words(task: Task) -> str:
    """Say what shares of the data and of its epochs came to."""
    cfg, an_epoch = task.run.cfg, task.steps_per_epoch
    said = []
    if isinstance(size := getattr(cfg.data, "eval_size", 0), float):
        said.append(f"{len(task.examples.held_out):,} {task.kind}s held out (data.eval_size={size:g})")
    cadences = {"evaluated": eval_cadence(cfg.train.eval_every), "saved": save_cadence(cfg.checkpoint.save_every)}
    said += [f"{what} {every.in_words(an_epoch)}" for what, every in cadences.items() if every.epochs is not None]
    return f"  {', '.join(said)}\n" if said else ""


def trained(run: Run) -> str:
    """Say how many parameters are trained, where it is not all of the model's."""
    if run.trained == run.parameters:
        return ""
    return f", {run.trained:,} trained{' in an adapter' if run.engine.policy.adapter is not None else ''}"


def sharing(task: Task) -> str:
    """Say what is computed once for several sequences."""
    said = task.sharing()
    return "" if said is None else f"  sharing, in the first batch: {said}\n"


def positions(run: Run) -> str:
    """Warn of a data.max_length beyond the model's positions, where that was not known before the ranks started."""
    said = note_on_loaded(run.cfg, run.engine.policy.model.config.to_dict())
    return "" if said is None else f"  {said}\n"


def carried(run: Run) -> str:
    """Say that ranks talk through the host, which is slow."""
    launch = run.cfg.launch
    if launch.carrier is not Collectives.staged or run.device.type != "cuda":
        return ""
    sharing = f"{launch.ranks_per_gpu} ranks share each GPU, and " if launch.ranks_per_gpu > 1 else ""
    return f"  slow: {sharing}what ranks tell each other goes through the host's memory (launch.collectives=staged)\n"


def generating(run: Run) -> str:
    """Say what vLLM holds with its share of memory."""
    if not uses_vllm(run.cfg):
        return ""
    host = host_memory()
    memory = memory_of(run.device) or (host.total if host is not None else 0)
    model = run.engine.policy.model.config.to_dict()
    holds = held_by_vllm(run.cfg, model, run.parameters, memory)
    where = "each GPU" if run.device.type == "cuda" else "this machine"
    return f"  vLLM has {holds.share:g} of the memory of {where} ({KEY}): {holds.in_words()}\n"


def chosen(run: Run) -> str:
    """Say why `auto` chose this layout."""
    return f"  layout {run.choice.name}: {run.choice.reason}\n" if run.choice.reason else ""


def fused(run: Run) -> str:
    """Say which of the model's modules compute with fused pieces, where any may."""
    pieces = run.engine.policy.fused
    return "" if pieces is None else f"  fused: {pieces}\n"


def installable(run: Run) -> str:
    """Name a faster kernel that could be installed for the run's GPU."""
    kernel, heads = run.kernel, heads_in(run.engine.policy.model.config.to_dict())
    if kernel.generation is None or heads is None or run.cfg.parallel.backend is not BackendName.native:
        return ""
    exact = run.cfg.launch.deterministic
    said = faster(kernel.name, kernel.generation, heads.size, tokens_of_rank(run.cfg), deterministic=exact)
    return f"  kernel {kernel.name}: {said}\n" if said else ""


def sampling(run: Run) -> str:
    ranks = run.cfg.rollout.sampling_ranks
    return f", and {ranks} that sample{'s' * (ranks == 1)}" if ranks else ""


def footer(run: Run, run_dir: Path, outcome: Outcome) -> str:
    if outcome.status != "finished":
        return f"{outcome.status}: {outcome.reason}; {run_dir} continues from {latest(run_dir)}\n"
    model = f", trained {'adapter' if alone(run) else 'model'} in model/" if run.cfg.checkpoint.export else ""
    wandb = ", W&B run in wandb/" if run.cfg.logger.name is LoggerName.wandb else ""
    ask = f"its answers: python -m rlexp.generate {quote(str(run_dir))}\n"
    answers = "" if run.engine.policy.scores is not None else ask
    return f"done: {run_dir}  (curve in metrics.jsonl{wandb}{model})\n{answers}"


def latest(run_dir: Path) -> str:
    checkpoints = latest_first(run_dir)
    return checkpoints[0].name if checkpoints else "its first step"
