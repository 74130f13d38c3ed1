"""A run's folder: its lock, the resolved configuration, and run.json with the facts needed to trust the curve."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from shlex import join
from typing import Any

from rlexp.base import files, plain_json
from rlexp.base.errors import CheckpointError, ConfigError, FolderError
from rlexp.base.files import write_text
from rlexp.base.printable import printable
from rlexp.base.version import __version__
from rlexp.config import load
from rlexp.config.checks.micro_batches import at_once
from rlexp.config.identity import check_force, identity, refuse_changes
from rlexp.config.options import quoted
from rlexp.config.schema import Config
from rlexp.config.sizes import joined_world
from rlexp.launch import rank_progress
from rlexp.launch.slurm.meeting import job_id, start_of_job
from rlexp.run_files.checkpoint_folder import (
    FOLDER,
    NEVER,
    candidates,
    check_sizes,
    latest_first,
    read_position,
    step_of,
    sweep,
)

PACKAGES = ("torch", "transformers", "deepspeed", "hydra-core", "omegaconf", "wandb", "numpy")

TEXT, NUMBER = (str, plain_json.NOTHING), (int, plain_json.NOTHING)  # or null
FACTS: plain_json.Kinds = {
    **dict.fromkeys(("status", "host", "wandb_id"), str),
    **dict.fromkeys(("reason", "job_id", "started", "ended", "git_commit", "continued_by"), TEXT),
    **dict.fromkeys(("steps", "warmup_steps", "exported_step", "pid", "cores"), NUMBER),
    **dict.fromkeys(("sizes", "identity", "data", "versions", "evaluated"), dict),
    "requeues": list,
}  # the kinds of the values of run.json
SIZES: plain_json.Kinds = dict.fromkeys(("world_size", "ring_size", "dp_size", "batch_size"), int)
REQUEUE: plain_json.Kinds = {"job": TEXT, "why": str, "step": int, "at": str}
# keys of run.json that survive when a run continues
KEPT = ("wandb_id", "steps", "exported_step", "requeues", "data", "evaluated")
LOCK, RANKS = ".lock", ".ranks"
PATIENCE = 15.0  # seconds that ranks of an earlier process get to end
LOST = 180.0  # seconds for which a network file system may keep the locks of a lost node
_claimed: dict[Path, int] = {}


def enter(cfg: Config, run_dir: Path) -> bool:
    """Claim the folder for this process and write its config.yaml and run.json. Return False if the folder holds this
    very run and it is finished."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if cfg.logger.baseline is not None and Path(cfg.logger.baseline).expanduser().resolve() == run_dir.resolve():
        raise ConfigError(f"logger.baseline={cfg.logger.baseline}: is this run itself. Give another run's folder.")
    _refuse_links(run_dir)
    again = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
    claim(run_dir, patience=LOST if again else 0.0)
    _wait_for_ranks(run_dir, LOST if again else PATIENCE)
    before = read(run_dir)
    if (before or latest_first(run_dir)) and cfg.resume.mode == NEVER:
        raise FolderError(
            f"hydra.run.dir={run_dir}: holds a run already. Give another folder, or leave resume.mode=auto, which goes "
            f"on with it."
        )
    _check_writable(run_dir)
    what = identity(cfg)
    check_force(cfg.resume.force, what)
    if _is_finished(cfg, run_dir, before, what):
        return False
    forced = _check_identity(cfg, run_dir, before, what)
    sweep(run_dir)
    for left in run_dir.glob(".*.tmp"):  # by a process that was killed while it wrote
        left.unlink(missing_ok=True)
    (run_dir / rank_progress.FILE).unlink(missing_ok=True)  # of an earlier world
    if cfg.parallel.world_size + cfg.rollout.sampling_ranks > 1:
        (run_dir / "logs").mkdir(exist_ok=True)
    load.to_file(cfg, run_dir / "config.yaml")
    begun = {
        "status": "running",
        "reason": None,
        "sizes": derived_sizes(cfg),
        "command": sys.argv[1:],
        "continued_by": _same_command(run_dir),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cores": len(os.sched_getaffinity(0)),
        "job_id": job_id(),
        "start": start_of_job(),
        "started": before.get("started", now()),
        "ended": None,
        "versions": {"rlexp": __version__, "python": sys.version.split()[0]}
        | {name: _version(name) for name in PACKAGES},
        "git_commit": git_commit(),
        "identity": what,
        "forced": forced,
    }
    kept = {key: value for key, value in before.items() if key in KEPT}
    _write(run_dir, kept | begun | _requeues(run_dir, before))
    return True


def _same_command(run_dir: Path) -> str | None:
    """Return the command that this process was given, with the run's folder; None for a job of a sweep, which goes on
    with its sweep, and for one rank of several that were started with it."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    single = HydraConfig.initialized() and HydraConfig.get().mode is RunMode.RUN
    return command_in(run_dir, "hydra.run.dir") if single and _program() and joined_world() is None else None


def _program() -> list[str]:
    """Return the words by which rlexp was started; none if this process is another program."""
    started = Path(sys.argv[0])
    if started.parts[-2:] == ("rlexp", "__main__.py"):
        return ["python", "-m", "rlexp"]
    return ["rlexp"] if started.name == "rlexp" else []


def command_in(folder: Path, key: str) -> str:
    """Return this process's command as a shell reads it, with a key that names a folder."""
    words = [word for word in sys.argv[1:] if not word.startswith(f"{key}=")]
    plain = re.fullmatch(r"[\w./-]+( [\w./-]+)*", str(folder)) is not None
    return join([*_program(), *words, f"{key}={folder if plain else quoted(str(folder))}"])


def continued_by(run_dir: Path) -> str:
    """Say how to go on with a run that stopped."""
    command = read(run_dir).get("continued_by")
    what = "to continue" if latest_first(run_dir) else "to start again"
    return f"{what}: {printable(command)}\n" if command else ""


def _requeues(run_dir: Path, before: dict[str, Any]) -> dict[str, Any]:
    """Return the run's requeues with the one that Slurm made by itself, after it had ended the job's batch script."""
    job, restarts = os.environ.get("SLURM_JOB_ID"), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    known = before.get("requeues", [])
    if restarts <= sum(each.get("job") == job for each in known):
        return {}
    newest = latest_first(run_dir)
    return {"requeues": [*known, requeue(job, "slurm", step_of(newest[0]) if newest else 0)]}


def requeue(job: str | None, why: str, step: int) -> dict[str, Any]:
    """Return an entry of run.json's `requeues`, the list of restarts."""
    return {"job": job, "why": why, "step": step, "at": now()}


def _refuse_links(run_dir: Path) -> None:
    """Refuse a run whose folders are links: old checkpoints and unfinished files would be removed elsewhere."""
    for path in (run_dir / FOLDER, run_dir / "model", run_dir / "logs"):
        if path.is_symlink():
            raise FolderError(
                f"hydra.run.dir={run_dir}: its {path.name} is a link to {os.readlink(path)}, and rlexp would remove "
                f"files there. Put the whole run there: hydra.run.dir=FOLDER."
            )


def leave(run_dir: Path) -> None:
    """Release a folder that this process has claimed."""
    if run_dir in _claimed:
        os.close(_claimed.pop(run_dir))


def claim(run_dir: Path, key: str = "hydra.run.dir", patience: float = 0.0) -> None:
    """Lock the folder for as long as this process lives, or refuse where another process holds the lock."""
    handle = _opened(run_dir / LOCK, key)
    if not _locked(handle, fcntl.LOCK_EX, patience):
        os.close(handle)
        raise FolderError(f"{key}={run_dir}: another process is training there. Wait for it, or give another folder.")
    _claimed[run_dir] = handle


def _opened(lock: Path, key: str = "hydra.run.dir") -> int:
    try:
        return os.open(lock, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise _unwritable(lock.parent, error, key) from None


def _unwritable(run_dir: Path, error: OSError, key: str = "hydra.run.dir") -> FolderError:
    return FolderError(f"{key}={run_dir}: nothing can be written there ({error.strerror}). Give another folder.")


def _locked(handle: int, kind: int, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        except OSError as error:  # a file system without locks: nobody can hold one
            sys.stderr.write(f"rlexp: this file system locks no files ({error.strerror}): do not start a run twice.\n")
            return True


def hold(run_dir: Path) -> None:
    """Hold the ranks' lock while this rank lives. A rank may outlive a killed launcher for a moment."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(os.open(run_dir / RANKS, os.O_CREAT | os.O_RDWR, 0o644), fcntl.LOCK_SH)


def _wait_for_ranks(run_dir: Path, patience: float) -> None:
    handle = _opened(run_dir / RANKS)
    free = _locked(handle, fcntl.LOCK_EX, patience)
    os.close(handle)
    if not free:
        raise FolderError(
            f"hydra.run.dir={run_dir}: ranks of an earlier process are still at work there. Wait for them, or give "
            f"another folder."
        )


def _check_writable(run_dir: Path) -> None:
    """Refuse a folder in which no file can be written, before anything is computed."""
    try:
        with tempfile.NamedTemporaryFile(dir=run_dir, prefix=".try-") as file:
            file.write(b"0" * 65536)
            file.flush()
    except OSError as error:
        raise _unwritable(run_dir, error) from None


def _check_identity(cfg: Config, run_dir: Path, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Compare the configuration with the newest checkpoint whose files have their sizes. The ranks check the contents.
    Return the keys that differ by `resume.force`."""
    checkpoints = candidates(cfg.resume.mode, run_dir)
    for path in checkpoints:
        try:
            check_sizes(path)
            was = read_position(path).get("identity") or {}
        except CheckpointError:
            continue
        return refuse_changes(path, was, now, cfg.resume.force)
    if checkpoints:
        return []  # the ranks report what is wrong with each of them
    if before.get("status") == "finished":
        raise FolderError(
            f"hydra.run.dir={run_dir}: holds a finished run without a checkpoint to continue from, and it would be "
            f"written over. Give another folder."
        )
    return refuse_changes(run_dir, before.get("identity", now), now, cfg.resume.force)


def _is_finished(cfg: Config, run_dir: Path, before: dict[str, Any], now: dict[str, Any]) -> bool:
    if before.get("status") != "finished" or before.get("identity") != now:
        return False
    old = load.from_file(run_dir / "config.yaml").train
    return (old.max_steps, old.epochs) == (cfg.train.max_steps, cfg.train.epochs)


def read(run_dir: Path) -> dict[str, Any]:
    """Return run.json's facts, without those of another kind than is written; empty where there is no run yet."""
    try:
        facts = plain_json.loads(files.read_regular(run_dir / "run.json"))
    except (OSError, ValueError):
        return {}
    facts = plain_json.of_kinds(facts, FACTS)
    if "sizes" in facts:
        sizes = plain_json.of_kinds(facts["sizes"], SIZES)
        facts["sizes"] = sizes if all(sizes.get(name, 0) > 0 for name in SIZES) else {}
    if "requeues" in facts:
        requeues = [plain_json.of_kinds(each, REQUEUE) for each in facts["requeues"]]
        facts["requeues"] = [each for each in requeues if "why" in each]
    return facts


def commits(checkpoint: Path) -> dict[str, str]:
    """Return the commits of the hub's sets and models with which the run of a checkpoint was started, by the keys of
    their paths."""
    above = checkpoint.parent
    versions = read(above.parent if above.name == FOLDER else above).get("data", {}).get("versions", {})
    versions = versions if isinstance(versions, dict) else {}
    return {key: commit for key, commit in versions.items() if isinstance(commit, str)}


def close(run_dir: Path, status: str, reason: str) -> None:
    """Write how the run ended: `finished`, `failed` or `stopped`, and why."""
    note(run_dir, status=status, reason=reason, ended=now())


def note(run_dir: Path, **facts: Any) -> None:
    """Add facts to run.json."""
    if known := read(run_dir):
        _write(run_dir, known | facts)


def record_end(run_dir: Path, **facts: Any) -> None:
    """Write how a run ended, after its ranks are gone. The run may never have begun."""
    run_dir.mkdir(parents=True, exist_ok=True)
    _write(run_dir, read(run_dir) | facts | {"ended": now()})


def in_use(run_dir: Path) -> bool:
    """Whether another process has claimed the folder."""
    try:
        handle = os.open(run_dir / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def drop_if_empty(folder: Path, *beside: str) -> None:
    """Remove the folder that Hydra made, with these files, before a run or a sweep was refused."""
    ours = {LOCK, RANKS} if folder in _claimed else {*beside}
    with contextlib.suppress(OSError):
        if {path.name for path in folder.iterdir()} <= ours:
            for name in ours:
                (folder / name).unlink(missing_ok=True)
        folder.rmdir()
        if folder.parent == Path.cwd() / "runs":  # the default parent, if this would have been its first run
            folder.parent.rmdir()


def derived_sizes(cfg: Config) -> dict[str, int | str | None]:
    """Return the sizes that were asked for and those that follow from them."""
    return {
        "world_size": cfg.parallel.world_size,
        "ring_size": cfg.parallel.ring_size,
        "dp_size": cfg.parallel.dp_size,
        "batch_size": cfg.train.batch_size,
        "micro_batch_size": cfg.train.micro_batch_size,
        "max_tokens_per_micro_batch": at_once(cfg).tokens,
        "grad_acc": cfg.train.grad_acc,
    }


def _write(run_dir: Path, run: dict[str, Any]) -> None:
    try:
        write_text(run_dir / "run.json", json.dumps(run, indent=2) + "\n")
    except OSError as error:  # a full disk must not end a training run; the file keeps its earlier content
        sys.stderr.write(f"rlexp: {run_dir / 'run.json'} could not be written ({error.strerror}).\n")


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit(*paths: str) -> str | None:
    """Return the commit of the checkout that this package runs from, with `+dirty` if files were changed since, of
    these paths or of any."""
    here = Path(__file__).resolve().parent.parent.parent
    if not (here / ".git").exists():
        return None

    def git(*args: str) -> str:
        answer = subprocess.run(["git", "-C", str(here), *args], capture_output=True, text=True, timeout=20, check=True)
        return answer.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+dirty" if git("status", "--porcelain", "--", *paths) else "")
    except (OSError, subprocess.SubprocessError):
        return None
