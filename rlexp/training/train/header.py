"""What a run says on the terminal before its first step and after its last one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from rlexp.base.host_memory import host_memory
from rlexp.base.kernel_rates import faster
from rlexp.base.version import __version__
from rlexp.config.checks.kernel import tokens_of_rank
from rlexp.config.checks.layout import heads_in
from rlexp.config.checks.micro_batches import batch_in_words
from rlexp.config.checks.rope import note_on_loaded
from rlexp.config.rates import rates_in_words
from rlexp.config.schema import BackendName, Collectives, LoggerName
from rlexp.config.schema.cadence import eval_cadence, plural, save_cadence
from rlexp.config.vllm_memory import KEY, held_by_vllm, uses_vllm
from rlexp.launch import run_folder
from rlexp.launch.stops import Outcome
from rlexp.run_files import evaluations
from rlexp.run_files.checkpoint_folder import latest_first
from rlexp.training.train.export_at_end import alone
from rlexp.training.train.fitting import remarks
from rlexp.training.train.parts import TrainingRun
from rlexp.training.train.surroundings import HERE
from rlexp.training.train.task import Task


def header(task: Task, run_dir: Path) -> str:
    run = task.run
    cfg, world, policy = run.cfg, run.world, run.engine.policy
    samplers = cfg.rollout.sampling_ranks
    sampling = f", and {samplers} that sample{'s' * (samplers == 1)}" if samplers else ""
    shared, cuts = task.sharing(), task.cuts()
    lines = [
        f"rlexp {__version__}  {cfg.loss.name} on {cfg.model.called} ({run.parameters:,} parameters{trained(run)}, "
        f"{cfg.train.precision.value}), engine {run.engine.name}",
        f"{'elastic ' * cfg.parallel.elastic}ring of {world.ring.size} ({run.attention}) × "
        f"{plural(world.dp_size, 'replica')} = {plural(world.size, 'rank')} on {run.device.type}{sampling}",
        generating(run),
        carried(run),
        run.choice.reason and f"layout {run.choice.name}: {run.choice.reason}",
        installable(run),
        None if policy.fused is None else f"fused: {policy.fused}",
        batch_in_words(cfg),
        f"learning rate {rates_in_words(cfg)}, {run.schedule.in_words()}",
        None if shared is None else f"sharing, in the first batch: {shared}",
        None if cuts is None else f"widths, in the first batch: {cuts}",
        note_on_loaded(cfg, policy.model.config.to_dict()),  # on positions, where they were not known before the start
        f"{task.describe()}, {plural(run.total_steps, 'step')} (an epoch has {task.steps_per_epoch})",
        *(f"{plural(count, task.kind)}: {reason}" for reason, count in sorted(task.examples.dropped.items())),
        *remarks(cfg, task.examples),
        shares_in_words(task),
        str(run_dir),
    ]
    return "\n  ".join(filter(None, lines)) + "\n"


def shares_in_words(task: Task) -> str:
    """Say what shares of the data and of its epochs came to."""
    cfg, an_epoch = task.run.cfg, task.steps_per_epoch
    parts = []
    if isinstance(size := getattr(cfg.data, "eval_size", 0), float):
        parts.append(f"{plural(len(task.examples.held_out), task.kind)} held out (data.eval_size={size:g})")
    cadences = {"evaluated": eval_cadence(cfg.train.eval_every), "saved": save_cadence(cfg.checkpoint.save_every)}
    parts += [f"{what} {every.in_words(an_epoch)}" for what, every in cadences.items() if every.epochs is not None]
    return ", ".join(parts)


def trained(run: TrainingRun) -> str:
    """Say how many parameters are trained, where it is not all of the model's."""
    if run.trained == run.parameters:
        return ""
    return f", {run.trained:,} trained{' in an adapter' if run.engine.policy.adapter is not None else ''}"


def carried(run: TrainingRun) -> str:
    """Say that ranks talk through the host, which is slow."""
    launch = run.cfg.launch
    if launch.carrier is not Collectives.staged or run.device.type != "cuda":
        return ""
    sharing = f"{launch.ranks_per_gpu} ranks share each GPU, and " if launch.ranks_per_gpu > 1 else ""
    return f"slow: {sharing}what ranks tell each other goes through the host's memory (launch.collectives=staged)"


def generating(run: TrainingRun) -> str:
    """Say what vLLM holds with its share of memory."""
    if not uses_vllm(run.cfg):
        return ""
    host = host_memory()
    memory = HERE.memory(run.device) or (host.total if host is not None else 0)
    model = run.engine.policy.model.config.to_dict()
    holds = held_by_vllm(run.cfg, model, run.parameters, memory)
    where = "each GPU" if run.device.type == "cuda" else "this machine"
    return f"vLLM has {holds.share:g} of the memory of {where} ({KEY}): {holds.in_words()}"


def installable(run: TrainingRun) -> str:
    """Name a faster kernel that could be installed for the run's GPU."""
    kernel, heads = run.kernel, heads_in(run.engine.policy.model.config.to_dict())
    if kernel.generation is None or heads is None or run.cfg.parallel.backend is not BackendName.native:
        return ""
    exact = run.cfg.launch.deterministic
    advice = faster(kernel.name, kernel.generation, heads.size, tokens_of_rank(run.cfg), deterministic=exact)
    return f"kernel {kernel.name}: {advice}" if advice else ""


def footer(task: Task, run_dir: Path, outcome: Outcome, evaluated: Mapping[str, Any]) -> str:
    """Say how the run ended, what its last evaluation showed, and what can be typed next."""
    run = task.run
    held_out = (
        f"held-out rows, after step {evaluated['step']}: {evaluations.in_words(evaluated)}\n" if evaluated else ""
    )
    if outcome.status != "finished":
        how = outcome.reason if outcome.reason.startswith(outcome.status) else f"{outcome.status}: {outcome.reason}"
        latest = next((each.name for each in latest_first(run_dir)), "its first step")
        return f"{how}; {run_dir} continues from {latest}\n{held_out}{run_folder.continued_by(run_dir)}"
    model = f", trained {'adapter' if alone(run) else 'model'} in model/" if run.cfg.checkpoint.export else ""
    wandb = ", W&B run in wandb/" if run.cfg.logger.name is LoggerName.wandb else ""
    typed = "" if len(task.examples.held_out) else " --prompt TEXT"
    ask = f"see its answers: python -m rlexp.generate {quote(str(run_dir))}{typed}\n"
    answers = "" if run.engine.policy.scores is not None else ask
    return f"done: {run_dir}  (curve in metrics.jsonl{wandb}{model})\n{held_out}{answers}"
