"""A checkpoint on disk. Imports no torch, so that the launcher can look before a process starts.

    <run>/checkpoints/step-00000050/
        manifest.json                        the size and SHA-256 of every other file, and its own SHA-256
        position.json                        step, epoch, seed, tokens, configuration, identity, …
        metrics.jsonl                        the rows so far
        state-00000-of-00004.safetensors     one per rank that wrote: its share of weights and moments, by name
        model/                               configuration and tokenizer, so that an export needs nothing else

It is written under a temporary name, synced, and renamed: a reader sees a whole checkpoint or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlexp.base import plain_json
from rlexp.base.errors import CheckpointError
from rlexp.base.files import read_regular, sync

FORMAT = 1
AUTO, NEVER = "auto", "never"  # the values of resume.mode that are not a path
FOLDER, MANIFEST, POSITION, METRICS, MODEL = "checkpoints", "manifest.json", "position.json", "metrics.jsonl", "model"
MANIFEST_KINDS: plain_json.Kinds = {"files": dict, "parameters": dict, "layout": dict}
POSITION_KINDS: plain_json.Kinds = {
    **dict.fromkeys(("step", "seed", "total_tokens", "optimizer_steps"), int),
    **dict.fromkeys(("config", "schedule", "layout"), dict),
    "identity": (dict, plain_json.NOTHING),
    "wandb_id": (str, plain_json.NOTHING),
}  # of what is written there
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED, _DISCARDED, _DAMAGED = ".unfinished-", ".discarded-", ".damaged-"


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f"step-{step:08d}"


def unfinished(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f"{_UNFINISHED}step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    match = _NAME.fullmatch(checkpoint.name)
    assert match, checkpoint
    return int(match[1])


def latest_first(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run by their names, the latest first. They may be damaged."""
    try:
        checkpoints = [path for path in (run_dir / FOLDER).iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(checkpoints, key=step_of, reverse=True)


def described(path: Path) -> dict[str, Any]:
    """Return a file's entry in the manifest."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def commit(run_dir: Path, step: int, files: dict[str, dict[str, Any]], facts: dict[str, Any]) -> Path:
    """Add the manifest and give the folder its final name. All files must be written and synced."""
    temporary, final = unfinished(run_dir, step), folder_of(run_dir, step)
    manifest = {"format": FORMAT, "step": step, "files": dict(sorted(files.items())), **facts}
    (temporary / MANIFEST).write_text(json.dumps(manifest | {"sha256": _digest(manifest)}, indent=1), encoding="utf-8")
    sync(temporary / MANIFEST)
    sync(temporary)
    if final.exists():  # a damaged one, whose step the run has now reached again
        discard(final)
    os.rename(temporary, final)
    sync(final.parent)
    sync(run_dir)  # its entry for the folder may be new too
    return final


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def discard(checkpoint: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a half-deleted one does not look like a checkpoint."""
    doomed = checkpoint.with_name(f"{_DISCARDED}{checkpoint.name}-{os.getpid()}")
    os.rename(checkpoint, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that it no longer counts as one but can still be inspected."""
    aside = checkpoint.with_name(f"{_DAMAGED}{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(checkpoint, aside)
    return aside


def sweep(run_dir: Path) -> None:
    """Remove what an earlier process left unfinished. No other process writes to this folder now."""
    with contextlib.suppress(FileNotFoundError):
        for path in (run_dir / FOLDER).iterdir():
            if path.name.startswith((_UNFINISHED, _DISCARDED)):
                shutil.rmtree(path, ignore_errors=True)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    try:
        manifest = plain_json.loads(read_regular(checkpoint / MANIFEST))
        digest = manifest.pop("sha256")
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint}: has no {MANIFEST}, so it is no whole checkpoint.") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise CheckpointError(f"{checkpoint}: its {MANIFEST} cannot be read.") from None
    if digest != _digest(manifest):
        raise CheckpointError(f"{checkpoint}: its {MANIFEST} was changed after it was written.")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{checkpoint}: is of format {manifest.get('format')}, and this version reads {FORMAT}.")
    checked = plain_json.of_kinds(manifest, MANIFEST_KINDS)
    entries = checked.get("files", {}).values()
    if checked.keys() != manifest.keys() or not all(isinstance(each, dict) and "bytes" in each for each in entries):
        raise CheckpointError(f"{checkpoint}: its {MANIFEST} is none that rlexp has written.")
    return checked


def check_sizes(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest, after checking that every file exists and has its size."""
    manifest = read_manifest(checkpoint)
    for name, expected in manifest["files"].items():
        path = checkpoint / name
        size = path.stat().st_size if path.is_file() else None
        if size != expected["bytes"]:
            is_ = "is missing" if size is None else f"has {size:,} bytes of {expected['bytes']:,}"
            raise CheckpointError(f"{checkpoint}: {name} {is_}.")
    return manifest


def check_contents(checkpoint: Path, names: Iterable[str], manifest: dict[str, Any]) -> None:
    """Read these files whole and compare their checksums."""
    for name in names:
        if described(checkpoint / name) != manifest["files"][name]:
            raise CheckpointError(f"{checkpoint}: {name} is not what was written (its SHA-256 differs).")


def read_position(checkpoint: Path) -> dict[str, Any]:
    try:
        position = plain_json.loads(read_regular(checkpoint / POSITION))
    except (OSError, ValueError):
        raise CheckpointError(f"{checkpoint}: its {POSITION} cannot be read.") from None
    checked = plain_json.of_kinds(position, POSITION_KINDS)
    if not isinstance(position, dict) or checked.keys() != position.keys():
        raise CheckpointError(f"{checkpoint}: its {POSITION} is none that rlexp has written.")
    return checked


def named(path: Path) -> list[Path]:
    """Return the checkpoints that a path names: itself, or those of the run that it is, the latest first."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder. Give a run's folder, or a checkpoint's.")
    path = path.resolve()
    if path.name == FOLDER:
        path = path.parent
    if _NAME.fullmatch(path.name):
        return [path]
    checkpoints = latest_first(path)
    if not checkpoints:
        raise CheckpointError(f"{path}: is neither a checkpoint nor a run that has one ({FOLDER}/step-…).")
    return checkpoints


def candidates(mode: str, run_dir: Path) -> list[Path]:
    """Return the checkpoints that `resume.mode` may go on from, the latest first. A run's own come before those at a
    PATH, so that a requeued job that began from a PATH goes on where it was."""
    if mode == NEVER:
        return []
    own = latest_first(run_dir)
    if own or mode == AUTO:
        return own
    try:
        return named(Path(mode).expanduser())
    except CheckpointError as error:
        raise CheckpointError(f"resume.mode={mode}: {error}") from None
