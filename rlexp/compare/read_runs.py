"""Read the runs to compare: from rlexp's folders, W&B's offline folders, or a W&B project."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlexp.base.errors import SinkError
from rlexp.compare.runs import SIZES, CompareError, Group, LoggedRun, RunReader, merge
from rlexp.run_files.metrics_jsonl import columns_of
from rlexp.training.sinks.wandb_access import WandbRun, read_offline, read_project

FOLDERS = ("offline-run-*", "run-*")


class Sources:
    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._reader = RunReader()

    def read(self) -> Group:
        return merge([self._one(name) for name in dict.fromkeys(self.names)])

    def _one(self, name: str) -> Group:
        path = Path(name).expanduser()
        if path.is_dir():
            group = self._reader.group(path)
            if group is not None:
                return group
            if has_wandb(path):
                return from_wandb(path.resolve().name, read_offline(path))
            raise CompareError(
                f"{name}: holds no run: no metrics.jsonl, no run.json, no folder with one of them, and no offline W&B "
                f"run. Give a sweep's folder, or runs' folders."
            )
        if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            try:
                return from_wandb(name, read_project(name))
            except SinkError as error:
                raise CompareError(f"{name}: no such folder in {Path.cwd()}. As a W&B project: {error}") from error
        raise CompareError(f"{name}: no such folder. Relative paths start at {Path.cwd()}.")


def has_wandb(path: Path) -> bool:
    inside = any(True for _ in path.glob("*.wandb"))
    return inside or any(True for pattern in FOLDERS for _ in (*path.glob(pattern), *path.glob(f"wandb/{pattern}")))


def from_wandb(title: str, wandb_runs: Sequence[WandbRun]) -> Group:
    runs, axes = [], []
    for each in wandb_runs:
        config: dict[str, Any] = {key: value for key, value in each.config.items() if isinstance(value, dict)}
        config["seed"] = each.config.get("seed")
        identity = config.pop("identity", {})
        steps, columns = columns_of(each.rows)
        own = config.get("logger", {}).get("axes")
        own = own if isinstance(own, dict) else {}
        axes += list(own)
        sizes = {key: each.config[key] for key in SIZES if key in each.config}
        label = ", ".join(str(value) for value in own.values()) or each.name
        run = LoggedRun(each.id, label, None, each.state, None, steps, columns, config, identity, sizes)
        runs.append(run)
    return Group(title, runs, list(dict.fromkeys(axes)))
