"""Rules for the files and folders that a configuration names.

`os.path.isdir` and `isfile` are False of a name that no file can have, and of what may not be looked at.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path

from rlexp.base.errors import ConfigError, DataError

MADE = {"long_pairs.jsonl": "python -m rlexp.long_pairs"}  # files of rows that a command of rlexp makes, by name
ROWS = (".jsonl", ".json", ".ndjson", ".parquet", ".gz", ".zst")


def check_rows(key: str, path: str) -> None:
    file = expanded(key, path)
    if os.path.isdir(file):
        raise DataError(f"{key}={path}: is a folder. Give a file of rows, or say data=hf for a folder.")
    if not os.path.isfile(file):
        makes = f" `{MADE[file.name]}` makes such a file." if file.name in MADE else ""
        raise DataError(
            f"{key}={path}: no such file. Give one that exists; relative paths start at {Path.cwd()}.{makes}"
        )


def check_rows_or_name(key: str, path: str) -> None:
    """Rows may also be several files, a folder, or a data set of the hub, which is only looked up when it is read."""
    if not path:
        raise DataError(f"{key}={path}: is empty. Give a file, a folder or a hub name.")
    file = expanded(key, path)
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or file.suffix in ROWS
    if glob.has_magic(path):
        if not any(map(os.path.isfile, glob.glob(str(file)))):
            raise DataError(f"{key}={path}: matches no file; relative paths start at {Path.cwd()}.")
    elif looks_local and not os.path.isfile(file) and not os.path.isdir(file):
        raise DataError(
            f"{key}={path}: no such file or folder. Give one that exists, or a hub name; relative paths start at "
            f"{Path.cwd()}."
        )


def check_model_path(key: str, path: str) -> None:
    """A hub name (`organization/name`) is only looked up when the model is loaded."""
    if not path:
        raise ConfigError(f"{key}={path}: is empty. Give a model's folder, or a hub name.")
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    folder = expanded(key, path)
    if looks_local and not os.path.isdir(folder):
        raise ConfigError(f"{key}={path}: no such folder. Give a model's folder, or a hub name.")
    if os.path.isfile(folder / "adapter_config.json") and not os.path.isfile(folder / "config.json"):
        raise ConfigError(
            f"{key}={path}: holds an adapter, and not a model. Train on with adapter=lora adapter.path={path} and its "
            f"model in model.path; or merge the two, with peft's merge_and_unload or checkpoint.export=merged."
        )


def expanded(key: str, path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{key}={path}: there is no such user here. Give the path without ~.") from None
