"""From the exceptions of Hydra and OmegaConf to one clear message: key, value, rule, remedy."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from rlexp.config.keys import about_unknown, suggestion
from rlexp.errors import UserError

# How OmegaConf says that a value is of another kind, and of which.
_KINDS = {"is not a ListConfig": "a list, as [ONE, TWO] or []", "to Dict[": "a mapping, as {NAME: VALUE} or {}",
          "is not Optional": "given: it cannot be null"}  # fmt: skip


def explain(error: BaseException) -> str | None:
    """The message a user should see, or None for an exception that is a defect and deserves its traceback."""
    links = list(chain(error))
    for link in links:
        if isinstance(link, UserError):
            return str(link)
    for link in links:
        # OmegaConf keeps a resolver's error as text only.
        found = re.search(r"(?:Config|Data)Error raised while resolving interpolation: (.*)", str(link))
        if found is not None:
            return found.group(1)
    for link in links:
        # Hydra makes the folder before our job runs; an error of the job itself is another matter.
        through = _origin(link)
        if isinstance(link, OSError) and link.filename and "/hydra/" in through and "launch/job.py" not in through:
            return (
                f"hydra.run.dir: {link.filename} cannot be made ({link.strerror}). "
                f"Give a folder that can be written: hydra.run.dir=FOLDER (hydra.sweep.dir=FOLDER for a sweep)."
            )
    for link in links:
        if (mark := getattr(link, "problem_mark", None)) is not None:  # yaml's own errors have one
            return f"{mark.name}, line {mark.line + 1}: is no yaml ({getattr(link, 'problem', '')})."
    if any('Could not detect "srun"' in str(link) for link in links):
        return "hydra/launcher=slurm: there is no srun here. Start it where Slurm is, or use hydra/launcher=local."
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return None
    if isinstance(error, OverrideParseException):
        reason = str(error).splitlines()[0]
        return f"{error.override}: cannot be read as key=value ({reason}). Quote values with special characters."
    text = "\n".join(dict.fromkeys(str(link).strip() for link in links if str(link).strip()))
    return _unknown_key(text) or _unknown_option(text) or _bad_value(text, links) or text


def _origin(error: BaseException) -> str:
    """The files that an exception came through."""
    return "\n".join(frame.filename for frame in traceback.extract_tb(error.__traceback__))


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and what it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _unknown_key(text: str) -> str | None:
    """`Could not override 'train.batchsize'`, with where the key belongs or the nearest that exists."""
    exists = re.search(r"An item is already at '([^']+)'", text)
    if exists is not None:
        return f"{exists.group(1)}: is there already. Leave out the +: {exists.group(1)}=VALUE."
    undeletable = re.search(r"full_key: (\S+)", text) if "does not support deletion" in text else None
    if undeletable is not None:
        return f"{undeletable.group(1)}: keys cannot be deleted. Give it another value, or leave it out."
    found = re.search(r"Could not (override|append|delete)[^']*'([^']+)'", text)
    if found is None:
        return None
    key = found.group(2).split("@")[0].lstrip("+~")
    if found.group(1) == "delete" or "does not support deletion" in text:
        return f"{key}: keys cannot be deleted. Give it another value, or leave it out."
    # A whole group at once (`train={…}`): Hydra names the group and says which key it did not know.
    inner = re.search(r"Key '([^']+)' (?:is )?not in", text)
    if inner is not None and not key.endswith(inner.group(1)):
        key = f"{key}.{inner.group(1)}"
    return about_unknown(key)


def _unknown_option(text: str) -> str | None:
    """`Could not find 'loss/dop'`, with the options of that group."""
    found = re.search(r"(?:Could not find|In [^:]*: Could not load|Could not load) '([^']+)'", text)
    if found is None or "/" not in found.group(1):
        return None
    group, _, option = found.group(1).rpartition("/")
    options = re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)
    listed = f" Options: {', '.join(options)}." if options else ""
    return f"{group}={option}: no such option.{suggestion(option, options)}{listed}"


def _bad_value(text: str, links: list[BaseException]) -> str | None:
    for link in links:
        key = getattr(link, "full_key", None)
        if isinstance(link, OmegaConfBaseException) and key:
            reason = str(getattr(link, "msg", None) or link).splitlines()[0]
            if re.match(r"Key '.*' not in", reason):
                return about_unknown(key)
            kind = next((kind for said, kind in _KINDS.items() if said in reason), None)
            return f"{key}: {f'must be {kind}.' if kind else reason}"
    found = re.search(r"Error merging override (\S+)\n(.*)", text)
    return f"{found.group(1)}: {found.group(2)}" if found else None
