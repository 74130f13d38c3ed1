"""Check the launcher's own keys before anything is submitted. Hydra checks only their types, and the cluster refuses a
wrong one late."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlexp.base.errors import ConfigError
from rlexp.base.printable import printable
from rlexp.base.secrets import is_secret
from rlexp.config.schema.bounds import check_number
from rlexp.config.schema.keys import LAUNCHER, about_unknown
from rlexp.config.schema.launcher_keys import LocalJobs, SlurmJobs
from rlexp.launch.slurm.queue import last_line

PATIENCE = 60.0  # seconds for a container to start
# Launcher keys that follow from keys of each job's configuration.
_DERIVED = {"nodes": "launch.nodes", "tasks_per_node": "launch.nproc"}


def check(given: DictConfig, known: type[SlurmJobs] | type[LocalJobs]) -> None:
    """Check `given`, the launcher's composed configuration, against the keys of the class `known`."""
    fields = dataclasses.fields(known)
    for key in map(str, given):
        if key not in [field.name for field in fields]:
            raise ConfigError(about_unknown(f"{LAUNCHER}{key}"))
    for key, owner in _DERIVED.items() if known is SlurmJobs else ():
        if not OmegaConf.is_interpolation(given, key):
            raise ConfigError(
                f"{LAUNCHER}{key}={given[key]}: follows from each job's configuration. Give {owner}={given[key]}."
            )
    if known is SlurmJobs:
        _own(given)
    params = {key: given[key] for key in given if not OmegaConf.is_interpolation(given, str(key))}
    for field in fields:
        check_number(f"{LAUNCHER}{field.name}", params.get(field.name), field)
    for name in params.get("environment", {}):
        if not re.fullmatch(r"[A-Za-z_]\w*", str(name), flags=re.ASCII):
            raise ConfigError(f"hydra.launcher.environment: {name} is no variable's name (letters, digits, _).")
        if is_secret(str(name)):
            raise ConfigError(
                f"hydra.launcher.environment.{name}: would stand in files of the sweep, which others may read. Leave "
                f"it out, and set it before the command: export {name}=…. The jobs get the variables that it has."
            )


def check_folder(key: str, folder: str) -> None:
    """Refuse a folder that Slurm would not take as it is: sbatch and srun expand a % in the paths of logs."""
    if "%" in folder:
        raise ConfigError(f"{key}={folder}: Slurm expands a % in the paths of logs. Give a folder without.")
    one_line(key, folder)


def one_line(key: str, value: Any) -> None:
    """Refuse what would end a line of the batch script: the rest of it would be a command."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            one_line(key, str(name))
            one_line(f"{key}.{name}", each)
    elif isinstance(value, list | tuple):
        for each in value:
            one_line(key, each)
    elif re.search(r"[\x00-\x1f\x7f]", str(value)):
        raise ConfigError(
            f"{key}={printable(str(value))}: has a line break, or another control character. Leave it out."
        )


def _own(given: DictConfig) -> None:
    """Refuse values that rlexp would overwrite, or that would overwrite its own."""
    options = given.additional_parameters.get("comment")
    for key, value in ((f"{LAUNCHER}comment", given.comment), (f"{LAUNCHER}additional_parameters.comment", options)):
        if value is not None:
            raise ConfigError(
                f"{key}={value}: the comment of a job is rlexp's own, by which it finds its jobs in the queue. Leave "
                f"it out. To mark your jobs, use {LAUNCHER}name=NAME, or "
                f"{LAUNCHER}additional_parameters={{wckey: NAME}}."
            )
    if given.max_num_timeout != SlurmJobs.max_num_timeout:
        raise ConfigError(
            f"{LAUNCHER}max_num_timeout={given.max_num_timeout}: has no effect, since rlexp continues a job after its "
            f"time limit as often as needed. Leave it out. {LAUNCHER}retries limits restarts after a failure."
        )


def check_container(params: Mapping[str, Any]) -> None:
    """Refuse a container whose Python does not have rlexp. Skipped where this machine cannot start the container."""
    container = params["container"]
    if not container or shutil.which(_first_word(container)) is None or _error(f"{container} true") is not None:
        return
    python = params["python"] or "python"
    error = _error(f"{container} {shlex.quote(python)} -c 'import rlexp'")
    if error is not None:
        raise ConfigError(
            f"hydra.launcher.container={container}: `{python} -c 'import rlexp'` fails in it ({error}). Install rlexp "
            f"there, or name the Python that has it: hydra.launcher.python=PATH."
        )


def _first_word(command: str) -> str:
    try:
        return next(iter(shlex.split(command)), "")
    except ValueError as error:
        raise ConfigError(f"hydra.launcher.container={command}: is no command of a shell ({error}).") from None


def _error(command: str) -> str | None:
    """Return why a command fails; None if it succeeds."""
    try:
        answer = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {PATIENCE:g} s"
    return (last_line(answer.stderr) or f"exit code {answer.returncode}") if answer.returncode else None
