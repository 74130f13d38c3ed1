"""`launch.preflight`: what is decided before the ranks of a run start, from a rehearsal in a process of its own.

A run whose prediction does not fit its device is refused; `engine=auto` becomes the first engine that fits, and
`parallel.layout=auto` the fastest layout. The rehearsal (`preflight/whether_it_fits.py`) needs torch and changes it, so
it has its own process, and its time is bounded: where it fails, the run starts, and one line says that it was not
rehearsed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rlexp.base import files, plain_json
from rlexp.base.byte_counts import GIB, size
from rlexp.base.errors import UserError
from rlexp.base.files import write_text
from rlexp.base.host_memory import host_memory
from rlexp.base.version import __version__
from rlexp.base.waiting import busy_message
from rlexp.config import sizes
from rlexp.config.checks.layout import Choice, candidates, with_layout
from rlexp.config.elsewhere import unrehearsable
from rlexp.config.gpu_descriptions import gpu_of
from rlexp.config.load import to_plain
from rlexp.config.schema import AUTO, Config, Device, EngineName, HardwareConfig, LayoutName, Preflight, with_values
from rlexp.config.vllm_memory import KEY as VLLM_MEMORY
from rlexp.config.vllm_memory import samples_apart, share_beside_training, share_of_sampling, share_on_cpu, uses_vllm

FILE = "preflight.json"  # in a run's folder
PREDICTING, HELPING = 180.0, 180.0  # seconds at most for the prediction, and for the changes that would help
ENDING = 20.0  # seconds that the process may take beyond that
UNPREDICTED = ("seed", "logger", "checkpoint", "resume")  # groups on which no prediction depends
NOT_REHEARSED = "the run was not rehearsed before it starts:"
UNKNOWN = (
    "the memory of its GPUs cannot be told here. hardware=OPTION or hardware.memory_gib=NUMBER tells it, and "
    "launch.preflight=off says nothing of it."
)
ELSEWHERE = (
    "this machine does not know the GPUs of the jobs, so each job is rehearsed when it starts. With hardware=OPTION "
    "jobs that do not fit are not submitted."
)
_known: dict[str, Decision] = {}
_told: set[str] = set()


class DoesNotFitError(UserError):
    """A run that is predicted to need more memory than its device has. `reason` is the message without the table."""

    def __init__(self, reason: str, decision: Decision) -> None:
        super().__init__(f"{reason}\n\n{decision.table}")
        self.reason, self.decision = reason, decision


@dataclass(frozen=True)
class Decision:
    """What a rehearsal says of a run. Without `fits` the memory was not predicted, and `why` says why not."""

    of: str = ""  # the fingerprint of the configuration
    fits: bool | None = None
    why: str = ""
    limit: int = 0  # bytes
    peak: int = 0  # bytes
    phase: str = ""  # of the peak
    host: dict[str, int] = field(default_factory=dict)  # bytes of one machine, by kind
    host_limit: int | None = None  # bytes; None: nobody knows
    short: str | None = None  # what a machine has too little memory for
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)  # bytes, by phase and kind
    engine: str | None = None
    engine_chosen: str | None = None  # why, where engine=auto chose it
    max_tokens: int | None = None  # of a micro-batch, where nobody said how many and the usual ones do not fit
    layout: str | None = None
    ulysses_size: int = 1
    layout_chosen: str | None = None
    vllm_memory: float | None = None  # the share that vLLM has of a device, where it draws the samples
    vllm: str | None = None  # why vLLM and training do not both fit
    table: str = ""
    remedy: str = ""  # a sentence


def prepared(
    cfg: Config, run_dir: Path | None = None, *, here: bool = True, helping: bool = True
) -> tuple[Config, Decision]:
    """Return the configuration with everything chosen, and the decision on it; refuse a run that does not fit.

    A decision in the run's folder, or of this process, on the same configuration is taken again. With `here`, this
    machine runs it. Without `helping` no change that would fit is looked for.
    """
    if here and cfg.launch.device is Device.cpu:
        cfg = with_vllm_memory(cfg)
    cfg, decision = decided(cfg, run_dir, here=here, helping=helping)
    return (with_vllm_memory(cfg, decision.vllm_memory) if here else cfg), decision


def decided(cfg: Config, run_dir: Path | None, *, here: bool, helping: bool) -> tuple[Config, Decision]:
    hardware, why_not = device_of(cfg, here=here)
    if hardware is None and not here:
        print_line(why_not)
        return cfg, Decision()
    if hardware is not None:
        cfg = dataclasses.replace(cfg, hardware=with_machine(cfg, hardware, here=here))
    if cfg.parallel.layout is LayoutName.auto and cfg.parallel.ring_size == 1:
        cfg = with_layout(cfg, candidates(cfg, None)[0])
    sampling = hardware is not None and samples_apart(cfg)  # may vLLM start there?
    if hardware is not None and (reason := unrehearsable(cfg)):
        hardware, why_not = None, reason
    if why_not:
        print_line(f"{NOT_REHEARSED} {why_not}" if here else why_not)
    if hardware is None and cfg.parallel.layout is not LayoutName.auto and not sampling:
        return cfg, Decision()
    fitting = hardware is not None
    key = fingerprint(cfg, fitting=fitting)
    decision = _known.get(key) or read(run_dir, key) or rehearsed(cfg, key, fitting=fitting, helping=helping)
    _known[key] = decision
    if fitting and decision.fits is None:
        print_line(f"{NOT_REHEARSED} {decision.why}")
    if decision.fits is False:
        raise refusal(cfg, decision)
    return chosen(cfg, decision), decision


def laid_out(cfg: Config) -> Config:
    """Return the configuration with the layout that parallel.layout=auto takes, whether or not the run fits."""
    return dataclasses.replace(prepared(with_values(cfg, "launch", preflight=Preflight.off))[0], launch=cfg.launch)


def device_of(cfg: Config, *, here: bool = True) -> tuple[HardwareConfig | None, str]:
    """Return the device whose memory is to suffice, or None; and what is to be told if it should be known, and is not.

    On CPU nothing limits a rank, unless hardware.memory_gib says so.
    """
    hardware, unnamed = cfg.hardware, cfg.hardware.name == HardwareConfig().name
    if cfg.launch.preflight is Preflight.off:
        return None, ""
    if cfg.launch.device is Device.cpu:
        return (hardware if unnamed and hardware.memory_gib else None), ""
    if not unnamed:
        return (hardware if hardware.memory_gib else None), ""
    gpu = gpu_of(hardware, here=here)
    return gpu, "" if gpu else (UNKNOWN if here else ELSEWHERE)


def with_machine(cfg: Config, hardware: HardwareConfig, *, here: bool) -> HardwareConfig:
    """Return the hardware with the memory of a machine, where nobody stated it: this machine's, or what the ranks of a
    job ask a cluster for."""
    if hardware.host_memory_gib:
        return hardware
    memory = host_memory() if here else None
    asked = 0.0 if here else (cfg.launch.rank_memory_gb or 0.0) * cfg.launch.nproc
    return dataclasses.replace(hardware, host_memory_gib=round(memory.total / GIB, 1) if memory else asked)


def chosen(cfg: Config, decision: Decision) -> Config:
    """Return the configuration with the engine, the layout and the size of micro-batches of the decision."""
    if cfg.parallel.layout is LayoutName.auto:
        name = LayoutName(decision.layout or "zigzag")
        why = decision.layout_chosen or f"it takes any heads; no other was rehearsed: {decision.why}"
        cfg = with_layout(cfg, Choice(name, decision.ulysses_size, why))
    if decision.engine is not None and decision.engine_chosen is not None:
        cfg = with_values(cfg, "engine", name=EngineName(decision.engine), chosen=decision.engine_chosen)
        print_line(f"engine=auto takes {decision.engine}: {decision.engine_chosen}")
    if decision.max_tokens not in (None, cfg.train.max_tokens_per_micro_batch):
        cfg = with_values(cfg, "train", max_tokens_per_micro_batch=decision.max_tokens)
        print_line(f"train.micro_batch_size=auto takes up to {decision.max_tokens:,} tokens a rank: more do not fit")
    return cfg


def with_vllm_memory(cfg: Config, predicted: float | None = None) -> Config:
    """Return the configuration with a number in the place of rollout.vllm_memory=auto: what was predicted to be left,
    or what can be told without a prediction."""
    if not uses_vllm(cfg):
        return cfg
    if cfg.launch.device is Device.cpu:
        share, why = share_on_cpu(cfg, host_memory()), "keys and values of a rank's rollout"
    elif cfg.rollout.vllm_memory != AUTO:
        return cfg
    elif cfg.rollout.sampling_ranks:
        share, why = share_of_sampling(cfg), "only samples are generated there"
    elif predicted is not None:
        share, why = predicted, "what training leaves"
    else:
        share, why = share_beside_training(cfg), "what training leaves was not predicted"
    if cfg.rollout.vllm_memory == AUTO:
        print_line(f"{VLLM_MEMORY}=auto takes {share:g}: {why}")
    return with_values(cfg, "rollout", vllm_memory=share)


def refusal(cfg: Config, decision: Decision) -> DoesNotFitError:
    gpu = f"on {cfg.hardware.name}" if cfg.hardware.name != HardwareConfig().name else "on this GPU"
    where = "by hardware.memory_gib" if cfg.launch.device is Device.cpu else gpu
    if (each := cfg.launch.ranks_per_gpu) > 1:
        where += f", of which launch.ranks_per_gpu={each} gives it 1/{each} (fewer ranks on a GPU have more each)"
    engine = "" if decision.engine_chosen is None else f"engine=auto: {decision.engine_chosen}. "
    need, may = size(decision.peak), size(decision.limit)
    device = f"it needs {need} at its peak ({decision.phase}), and a rank may take {may} {where}"
    over = [device] * (decision.peak > decision.limit) + [each for each in (decision.vllm, decision.short) if each]
    start = "To start it all the same: launch.preflight=off."
    return DoesNotFitError(f"the run does not fit: {'; and '.join(over)}. {engine}{decision.remedy}{start}", decision)


# ---- the rehearsal ----


def rehearsed(cfg: Config, key: str, *, fitting: bool, helping: bool) -> Decision:
    """Rehearse the run in a process of its own."""
    waited = cfg.launch.timeout_seconds  # by other ranks
    patience = min(PREDICTING, waited / 2)
    help_for = min(HELPING, waited / 3) if helping else 0.0
    device = Device.cpu if cfg.launch.device is Device.cpu else Device.cuda  # auto: of jobs that run elsewhere
    cfg = with_values(cfg, "launch", device=device)
    asked = {"cfg": to_plain(cfg), "fitting": fitting, "seconds": patience, "helping": help_for}
    around = {name: value for name, value in os.environ.items() if name not in sizes.OF_A_WORLD}
    process = subprocess.Popen(
        [sys.executable, "-m", "rlexp.preflight.whether_it_fits"], env=around | {"CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    limit = patience + help_for + ENDING
    try:
        output, complaints = _answered(process, json.dumps(asked), limit)
    except subprocess.TimeoutExpired:
        return Decision(key, why=f"it took longer than {limit:g} seconds.")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    try:
        answer = json.loads(output)
    except ValueError:
        last = (complaints.strip().splitlines() or ["it said nothing"])[-1]
        return Decision(key, why=f"it ended with status {process.returncode} ({last}).")
    if "refused" in answer:
        raise UserError(answer["refused"])
    return Decision(key, **answer)


def _answered(process: subprocess.Popen[str], question: str, limit: float) -> tuple[str, str]:
    """Return what the process says to a question, on both its streams. Who waits for it is told so now and then."""
    with busy_message(f"rehearses whether the run fits (at most {limit:.0f} s)", print_line):
        return process.communicate(question, timeout=limit)


def fingerprint(cfg: Config, *, fitting: bool) -> str:
    """Return a hash of all that a decision depends on."""
    plain = {group: value for group, value in to_plain(cfg).items() if group not in UNPREDICTED}
    saving = ("host_memory_gib", "save_every", "on_exit", "keep_best", "export", "export_dtype")
    plain["checkpoint"] = {key: to_plain(cfg)["checkpoint"][key] for key in saving}
    launch = ("nproc", "nodes", "ranks_per_gpu", "collectives", "deterministic")
    plain["launch"] = {key: plain["launch"][key] for key in launch} | {"cpu": cfg.launch.device is Device.cpu}
    text = json.dumps([__version__, plain, fitting], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(run_dir: Path | None, key: str | None = None) -> Decision | None:
    """Return the decision that a run's folder holds: with a key, only one by which that very configuration fits."""
    try:
        known = plain_json.loads(files.read_regular(run_dir / FILE)) if run_dir is not None else {}
        decision = Decision(**known)
    except (OSError, ValueError, TypeError):
        return None
    if key is None:
        return decision if decision.of else None
    return decision if decision.of == key and decision.fits else None


def keep(run_dir: Path, decision: Decision) -> None:
    """Write a prediction into the run's folder, for the report, and for when the run goes on. Without one, remove that
    of an earlier start."""
    try:
        if decision.fits is None:
            (run_dir / FILE).unlink(missing_ok=True)
            return
        write_text(run_dir / FILE, json.dumps(dataclasses.asdict(decision), indent=1) + "\n")
    except OSError as error:  # a full disk must not keep the run from starting
        sys.stderr.write(f"rlexp: {run_dir / FILE} could not be written ({error.strerror}).\n")


def print_line(line: str) -> None:
    """Say something once in this process: the jobs of a sweep have much in common."""
    if line and line not in _told:
        _told.add(line)
        sys.stderr.write(f"rlexp: {line}\n")
