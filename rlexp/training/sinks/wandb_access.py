"""Whether there is a W&B account, and what it refuses; and runs read back from the folders that W&B's client writes, or
from an online project."""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlparse

from rlexp.base.errors import SinkError
from rlexp.config.schema import LoggerConfig, WandbMode
from rlexp.run_files.metrics_jsonl import MetricRow

Mode = Literal["online", "offline", "disabled", "shared"]
# W&B's own server by both its names: `wandb login` has written one or the other into netrc.
HOSTS = ("api.forge.coreweave.com", "api.wandb.ai")
NO_ACCOUNT = (
    "there is no W&B account here: neither WANDB_API_KEY nor an entry in netrc. Log in with `wandb login` "
    "(and set WANDB_BASE_URL for a server of your own)."
)
STEP = "train/global_step"
NONE = -1  # the last step where there is no row: a row before the first step has step 0
SAMPLES = "samples"  # a table: offline it appears as values such as `samples.nrows`
_FRAGMENT = re.compile(r"(?:offline-)?run-(\d{8}_\d{6})-(.+)")
LONGEST = 600  # seconds to read one folder of W&B
STATES = {0: "finished", None: "unfinished"}  # by exit code; any other code means failed


def wandb_mode(asked: WandbMode) -> Mode:
    """Return the mode: the one asked for, or WANDB_MODE, or online if there is a key for the server, else offline."""
    if asked is not WandbMode.auto:
        return cast(Mode, asked.value)
    if os.environ.get("WANDB_MODE"):
        return cast(Mode, os.environ["WANDB_MODE"])
    return "online" if has_account() else "offline"


def upload_in_words(logger: LoggerConfig, mode: Mode) -> str:
    """Say that a run is uploaded, to whose account, and how to leave that out; nothing where it is not uploaded."""
    if mode in ("offline", "disabled"):
        return ""
    entity = logger.entity or os.environ.get("WANDB_ENTITY")
    account = "your W&B account" if entity is None else f"W&B, account {entity}"
    server = f" on {url}" if (url := os.environ.get("WANDB_BASE_URL")) else ""
    return (
        f"rlexp: the run is uploaded to {account}{server}, project {logger.project}. To leave this out: logger=none; "
        f"to upload later: logger.mode=offline.\n"
    )


def has_account() -> bool:
    return bool(os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")) or _netrc_has_key()


def _netrc_has_key() -> bool:
    server = urlparse(os.environ.get("WANDB_BASE_URL", ""))
    names = HOSTS if server.hostname in (None, *HOSTS) else (server.netloc, server.hostname or "")
    try:
        known = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return any(known.authenticators(name) is not None for name in names)


@contextlib.contextmanager
def refusals(about: str) -> Iterator[None]:
    """Turn what W&B's client raises while it asks the server into one message."""
    import wandb
    from wandb.sdk.lib.service.service_connection import WandbApiFailedError  # is not a wandb.Error

    try:
        yield
    except (wandb.Error, WandbApiFailedError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise SinkError(f"{about}: W&B's server could not be reached, or refused ({reason}).") from error


@dataclass(frozen=True)
class WandbRun:
    id: str
    name: str
    group: str | None
    state: str  # W&B's word; offline `unfinished` if the log does not say how the run ended
    config: dict[str, Any]
    rows: list[MetricRow]  # one per step, in order; `step` comes first
    summary: dict[str, Any]


def read_offline(folder: Path) -> list[WandbRun]:
    """Read the runs in a folder that W&B's client wrote, in a folder of such folders, or in a run's folder.

    A run that was stopped and resumed has several pieces, which are put together in order.
    """
    pieces: dict[str, list[Path]] = {}
    for path in _fragments(folder):
        match = _FRAGMENT.fullmatch(path.name)
        assert match
        pieces.setdefault(match[2], []).append(path)
    runs = [run for run_id, paths in pieces.items() if (run := _put_together(run_id, paths)) is not None]
    if not runs:
        raise SinkError(f"{folder}: its W&B runs hold no record; they ended before one was written.")
    return runs


def read_project(path: str) -> list[WandbRun]:
    """Read all runs of the online project `entity/project`, or `project`."""
    if not re.fullmatch(r"[^/\s]+(?:/[^/\s]+)?", path):
        raise SinkError(f"{path}: is not the name of a W&B project. Give ENTITY/PROJECT.")
    if not has_account():
        raise SinkError(f"{path}: {NO_ACCOUNT}")
    import wandb

    with refusals(path):
        return [
            WandbRun(
                id=str(run.id),
                name=str(run.name or run.id),
                group=run.group,
                state=run.state,
                config=dict(run.config),
                # Without the client's cache, which does not have the newest rows.
                rows=by_step(run.scan_history(use_cache=False)),
                summary=_public(run.summary_metrics),
            )
            for run in wandb.Api().runs(path, lazy=False)
        ]


def fragments_beneath(runs: Path) -> Iterator[Path]:
    """Return what the client wrote offline for the runs in a folder, and for the jobs of sweeps in it."""
    for depth in ("*", "*/*"):
        yield from filter(_is_fragment, runs.glob(f"{depth}/wandb/offline-run-*"))


def last_step(folder: Path, run_id: str) -> int:
    """Return the last step in the folders of a run's earlier processes."""
    last = NONE
    for path in _inside(folder, f"*-{run_id}"):
        rows = by_step(record["history"]["item"] for record in _records(path, ("history",)))
        last = max([last, *(int(row["step"]) for row in rows)])
    return last


def by_step(items: Iterable[Mapping[str, Any]]) -> list[MetricRow]:
    """Return one row of numbers per step, without W&B's own keys. If a value comes twice, the later one counts."""
    rows: dict[int, MetricRow] = {}
    for item in items:
        step = item.get(STEP, item.get("_step"))
        if isinstance(step, int | float):
            values = {name: value for name, value in _public(item).items() if type(value) in (int, float)}
            rows.setdefault(int(step), {"step": int(step)}).update(values)
    return [rows[step] for step in sorted(rows)]


def _public(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out W&B's own keys, which begin with an underscore, and tables."""
    return {name: value for name, value in values.items() if not name.startswith(("_", f"{SAMPLES}."))}


def _fragments(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise SinkError(f"{folder}: no such folder. Give a folder that W&B's client wrote, or a run's folder.")
    folder = folder.resolve()
    if _is_fragment(folder):
        return [folder]
    fragments = _inside(folder) or _inside(folder / "wandb")
    if not fragments:
        raise SinkError(f"{folder}: is not a W&B folder: there is no offline-run-… in it, nor in its wandb/.")
    return fragments


def _inside(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the fragments in a folder, in the order in which they began."""
    fragments = [path for path in folder.glob(pattern) if _is_fragment(path)]
    return sorted(fragments, key=lambda path: path.name.removeprefix("offline-"))


def _is_fragment(path: Path) -> bool:
    return _FRAGMENT.fullmatch(path.name) is not None and any(path.glob("run-*.wandb"))


def _put_together(run_id: str, fragments: list[Path]) -> WandbRun | None:
    facts: dict[str, Any] = {}
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    items: list[dict[str, Any]] = []
    exit_code: int | None = None
    for fragment in fragments:
        exit_code = None
        for record in _records(fragment, ("run", "config", "summary", "history", "exit")):
            match record["type"]:
                case "run":
                    facts = record["run"]
                    config |= facts.get("config", {}).get("update", {})
                case "config":
                    config |= record["config"].get("update", {})
                case "summary":
                    summary |= record["summary"].get("update", {})
                case "history":
                    items.append(record["history"]["item"])
                case "exit":
                    exit_code = record["exit"].get("exit_code", 0)
    if not facts:
        return None
    return WandbRun(
        id=run_id,
        name=facts.get("display_name") or run_id,
        group=facts.get("run_group"),
        state=STATES.get(exit_code, "failed"),
        config=_public(config),
        rows=by_step(items),
        summary=_public(summary),
    )


def _records(fragment: Path, kinds: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Read a run's log with W&B's own reader."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(fragment)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, check=False)
    except subprocess.TimeoutExpired:
        raise SinkError(f"{fragment}: `wandb leet inspect` did not read it within {LONGEST} s.") from None
    if answer.returncode:
        reason = (answer.stderr.strip() or answer.stdout.strip()).rpartition("\n")[2]
        raise SinkError(f"{fragment}: `wandb leet inspect` cannot read it ({reason}).")
    marks = tuple(f'"type":"{kind}"' for kind in kinds)
    for line in answer.stdout.splitlines():
        if any(mark in line[:80] for mark in marks):
            yield json.loads(line)
