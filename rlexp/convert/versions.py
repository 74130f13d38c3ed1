"""Defaults of trainers that changed, and what tells which version a file was written for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlexp.base.errors import ConfigError

Version = tuple[int, ...]
PACKAGES = {"trl": "TRL", "ms-swift": "ms-swift", "openrlhf": "OpenRLHF", "axolotl": "axolotl",
            "llamafactory": "LLaMA-Factory"}  # fmt: skip
LATEST: Version = (9999,)
VERSION = r"\d{1,6}(?:\.\d{1,6})*"
MOST = 1 << 20  # characters of a file


@dataclass(frozen=True)
class ChangedDefault:
    """A default that was another one before a version."""

    framework: str
    trainers: str  # empty: all
    name: str  # the newest of the argument's
    until: str
    before: Any


# By the releases of each, the oldest first; only those that change a number.
CHANGES: Sequence[ChangedDefault] = (
    ChangedDefault("TRL", "", "bf16", "0.19", False),
    ChangedDefault("TRL", "grpo", "loss_type", "0.17", "grpo"),
    ChangedDefault("TRL", "grpo", "loss_type", "0.22", "bnpo"),
    ChangedDefault("TRL", "grpo", "temperature", "0.18", 0.9),
    ChangedDefault("TRL", "grpo", "top_k", "0.18", 50),
    ChangedDefault("TRL", "grpo", "beta", "0.19", 0.04),
    ChangedDefault("TRL", "grpo", "max_prompt_length", "0.26", 512),
    ChangedDefault("TRL", "grpo rloo", "max_completion_length", "1.10", 256),
    ChangedDefault("TRL", "grpo", "vllm_importance_sampling_correction", "0.23", False),
    ChangedDefault("TRL", "grpo", "vllm_importance_sampling_mode", "0.26", "token_truncate"),
    ChangedDefault("TRL", "reward", "learning_rate", "0.24", 5e-5),
    ChangedDefault("TRL", "bco", "learning_rate", "0.29", 5e-5),
    ChangedDefault("TRL", "grpo", "vllm_importance_sampling_clip_max", "0.26", 2.0),
    ChangedDefault("ms-swift", "", "split_dataset_ratio", "3.6", 0.01),
    ChangedDefault("ms-swift", "dpo", "rpo_alpha", "3.8", 1.0),
    ChangedDefault("ms-swift", "grpo", "top_p", "4.0.3", 0.9),
    ChangedDefault("ms-swift", "grpo", "top_k", "4.0.3", 50),
    ChangedDefault("LLaMA-Factory", "", "cutoff_len", "0.9.1", 1024),
    ChangedDefault("OpenRLHF", "ppo", "loss.normalize", "0.6.4", "sequence"),
    ChangedDefault("OpenRLHF", "ppo", "algo.advantage.lambd", "0.5.7", 0.95),
    ChangedDefault("OpenRLHF", "ppo", "algo.advantage.lambd", "0.6.0", 1.0),
    ChangedDefault("OpenRLHF", "ppo", "algo.advantage.lambd", "0.6.4", 0.95),
    ChangedDefault("OpenRLHF", "ppo", "critic.value_clip", "0.8.2", 0.2),
)


def parsed(text: str) -> Version:
    return tuple(int(each) for each in text.split("."))


@dataclass(frozen=True)
class Versions:
    """The versions of a trainer that a file may be for."""

    low: Version = ()
    high: Version = LATEST

    def older(self, until: str) -> bool | None:
        """Say whether it is one before a version; None: it may be either."""
        if self.high < parsed(until):
            return True
        return False if self.low >= parsed(until) else None


def changes_of(framework: str, trainer: str, names: Iterable[str]) -> list[ChangedDefault]:
    known = set(names)
    return [each for each in CHANGES if each.framework == framework and each.name in known
            and (not each.trainers or trainer in each.trainers.split())]  # fmt: skip


def asked_for(words: Sequence[str]) -> tuple[str | None, tuple[str, Versions] | None]:
    """Take --trainer apart: the trainer (dpo), and the framework with its version (trl==0.15)."""
    trainer, versions = None, None
    for word in words:
        package, equals, version = word.partition("==")
        if not equals:
            trainer = word
        elif package not in PACKAGES or not re.fullmatch(VERSION, version):
            raise ConfigError(f"--trainer {word}: must be one of {', '.join(PACKAGES)}, == and a version. For example: "
                              f"--trainer trl==0.15.")  # fmt: skip
        else:
            versions = PACKAGES[package], Versions(parsed(version), parsed(version))
    return trainer, versions


def of_file(framework: str, file: Path, given: Iterable[str]) -> Versions:
    """Return the versions that a file may be for: by a requirement in it or beside it, or by its arguments' names."""
    package = next(name for name, of in PACKAGES.items() if of == framework)
    for each in (file, *sorted(file.parent.glob("*requirements*.txt")), file.parent / "uv.lock"):
        try:
            if not each.is_file():
                continue
            with each.open(encoding="utf-8", errors="replace") as stream:
                text = stream.read(MOST)
        except OSError:
            continue
        text = text if each == file else re.sub(r"#.*", "", text)
        pattern = rf'(?<![\w-]){package}(?:(?:\[[\w,-]*\])?==|"\nversion = ")({VERSION})'
        if (match := re.search(pattern, text)) is not None:
            return Versions(parsed(match[1]), parsed(match[1]))
    names = set(given)
    if framework == "ms-swift" and names & {"train_type", "tuner_type"}:
        return Versions((3,), (3, 9999)) if "train_type" in names else Versions((4,))
    if framework == "TRL" and "vllm_device" in names:
        return Versions((), (0, 17, 9999))
    if framework == "OpenRLHF" and "train_split" in names:
        return Versions((), (0, 6, 9999))
    if framework == "OpenRLHF":
        return Versions((0, 10, 2)) if any("." in name for name in names) else Versions((), (0, 10, 1))
    return Versions()
