"""All keys of the schema, and the nearest one to a key that does not exist."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Sequence

from rlexp.config.schema import KINDS, Config
from rlexp.config.schema.launcher_keys import LocalJobs, SlurmJobs

LAUNCHER = "hydra.launcher."
PAGE = "docs/keys.md"
APPENDED = ("experiment", "sweep")  # groups outside the defaults list
NAMED = 4  # of the options that have a key
GONE = {  # keys of older versions, with what stands for them now
    "model.suggested_lr": "is gone: optim.lr follows from the loss and from what is trained. Say optim.lr=RATE.",
}


def all_keys() -> dict[str, tuple[str, ...]]:
    """Return each key with the options that have it (`data=jsonl`); with none if the key always exists."""
    keys: dict[str, tuple[str, ...]] = {}
    hints = typing.get_type_hints(Config)
    for top in dataclasses.fields(Config):
        keys[top.name] = ()
        if not dataclasses.is_dataclass(hints[top.name]):
            continue
        kinds = KINDS.get(top.name, {"": hints[top.name]})
        for kind, node in kinds.items():
            for leaf in dataclasses.fields(node):
                name = f"{top.name}.{leaf.name}"
                keys[name] = (*keys.get(name, ()), *([f"{top.name}={kind}"] if kind else []))
    return {key: () if set(owners) == _every_kind(key) else owners for key, owners in keys.items()}


def launcher_keys() -> list[str]:
    fields = [*dataclasses.fields(SlurmJobs), *dataclasses.fields(LocalJobs)]
    return list(dict.fromkeys(f"{LAUNCHER}{field.name}" for field in fields))


def _every_kind(key: str) -> set[str]:
    group = key.partition(".")[0]
    return {f"{group}={kind}" for kind in KINDS.get(group, {})}


def about_unknown(key: str) -> str:
    """Explain in one line why a key cannot be set: where it belongs, or the nearest key."""
    if key.startswith(LAUNCHER):
        near = suggestion(key, launcher_keys()) or f" {PAGE} lists the keys of launchers."
        return f"{key}: no such key.{near} Give other options of sbatch in {LAUNCHER}additional_parameters."
    keys = all_keys()
    if key in GONE:
        return f"{key}: {GONE[key]}"
    if key in APPENDED:
        return f"{key}: is appended to the configuration: say +{key}=NAME."
    if keys.get(key):
        owners = keys[key]
        named = owners if len(owners) <= NAMED else (*owners[: NAMED - 1], f"{len(owners) - NAMED + 1} others")
        return f"{key}: belongs to {listed(named)}. Say {owners[0]} {key}=VALUE."
    group = key.partition(".")[0]
    which = f"all keys of {group}" if group in keys and group != key else "all keys"
    return f"{key}: no such key.{suggestion(key, [*keys, *APPENDED]) or f' {PAGE} lists {which}.'}"


def listed(names: Sequence[str]) -> str:
    """Write names as `one, two and three`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def suggestion(word: str, candidates: list[str]) -> str:
    """Find the nearest key by spelling: by the whole key, or by its last part if the group is wrong or missing."""
    others = [candidate for candidate in candidates if not word.startswith(candidate)]
    own, likes = word.rpartition("."), difflib.get_close_matches(word, others, n=3, cutoff=0.6)
    # A group that both share says nothing of the key in it: train.foo is not near train.epochs.
    close = [
        each for each in likes if each.rpartition(".")[0] != own[0] or _alike(each.rpartition(".")[2], own[2]) >= 0.5
    ]
    leaves = {candidate.rpartition(".")[2]: candidate for candidate in reversed(others)}  # of two groups, the first
    leaf = difflib.get_close_matches(own[2], list(leaves), n=1, cutoff=0.75)
    if leaf and (not close or _alike(word, close[0]) < 0.8):
        close = [leaves[leaf[0]]]
    return f" Did you mean {close[0]}?" if close else ""


def _alike(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
