"""Read the arguments of another trainer's run: from a yaml file, or from a command in a shell script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlexp.convert.rules import ConvertError

SCRIPTS_OF_TRL = {"gspo": "grpo", "grpo_agent": "grpo", "ppo_tldr": "ppo", "dpo_online": "online dpo"}
TRAINERS_OF_TRL = ("dpo", "grpo", "rloo", "ppo", "sft", "reward", "kto")


@dataclass(frozen=True)
class Asked:
    """What a file asks for. Where it does not name its trainer, that is None."""

    framework: str
    trainer: str | None
    given: dict[str, Any]
    launcher: dict[str, Any] = field(default_factory=dict)  # of accelerate, deepspeed or torchrun


def read(file: Path) -> Asked:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConvertError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or error}).") from None
    words = _words(text)
    for find in (_openrlhf, _trl_command, _swift):
        if (asked := find(words)) is not None:
            return asked
    return _yaml(file, text)


# ---- yaml ----


def _yaml(file: Path, text: str) -> Asked:
    try:
        given = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConvertError(f"{file}{where}: {_UNKNOWN}") from None
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise ConvertError(f"{file}: {_UNKNOWN}")
    given = {name: plain(value) for name, value in given.items()}
    if "base_model" in given:
        return Asked("axolotl", str(given.get("rl") or "sft"), given)
    if "stage" in given:
        return Asked("LLaMA-Factory", str(given["stage"]), given)
    if not {"model_name_or_path", "dataset_name", "datasets", "dataset_mixture", "output_dir"} & given.keys():
        raise ConvertError(f"{file}: {_UNKNOWN}")
    return Asked("TRL", None, given)


_UNKNOWN = (
    "is none of the files that can be converted. These are: a yaml file of TRL, axolotl or LLaMA-Factory, and a shell "
    "script with a command of TRL (trl dpo …), OpenRLHF (openrlhf.cli.train_dpo …) or ms-swift (swift rlhf …)."
)


def plain(value: Any) -> Any:
    """Return the number, truth value or nothing that a text stands for: YAML takes `5e-7` for a text."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value.lower() in ("none", "null"):
        return None
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


# ---- commands ----


def _words(text: str) -> list[str]:
    """Split a script into words: lines that go on are joined, comments left out, variables replaced by their values."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\s*\n", " ", "\n".join(lines))
    text = _with_variables(text)
    words: list[str] = []
    for line in text.splitlines():
        try:
            words += [*shlex.split(line, comments=True), "\n"]
        except ValueError:  # an open quote: of a script around the command
            words += [*line.replace('"', " ").replace("'", " ").split(), "\n"]
    for word in words:
        if word != text and re.search(r"(openrlhf\.cli|\btrl|\bswift)\b.* --", word, re.S):
            return _words(word)  # a command in quotes: bash -c "…"
    return words


def _with_variables(text: str) -> str:
    """Put in the values of plain variables (`MODEL=…`), and of arrays (`ARGS=( … )`) and here-documents."""
    known = {
        name: value.strip("\"'") for name, value in re.findall(r"^\s*(?:export )?(\w+)=([^\s(][^\n]*)$", text, re.M)
    }
    known |= {name: " ".join(body.split()) for name, body in re.findall(r"^\s*(\w+)=\(([^)]*)\)", text, re.M)}
    known |= {
        name: " ".join(body.split())
        for name, _, body in re.findall(r"read .*?(\w+) <<-?\s*['\"]?(\w+)['\"]?\n(.*?)\n\s*\2", text, re.S)
    }
    for _ in range(3):  # variables in variables
        text = re.sub(r"\$\{?(\w+)(?:\[@\])?\}?", lambda found: known.get(found[1], found[0]), text)
    return text


def _arguments(words: Sequence[str]) -> dict[str, Any]:
    """Read `--name value …` up to the end of the command. A name without a value is true."""
    given: dict[str, Any] = {}
    name = None
    for word in words:
        if word in ("\n", "&&", ";", "|", "&") or re.match(r"[&\d]?>", word):
            break
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            given[name] = plain(value) if equals else True
        elif name is not None:
            _add(given, name, plain(word.rstrip("\"'")))
    return given


def _add(given: dict[str, Any], name: str, value: Any) -> None:
    if given[name] is True:
        given[name] = value
    else:
        given[name] = [*(given[name] if isinstance(given[name], list) else [given[name]]), value]


def _commands(words: Sequence[str]) -> Iterator[list[str]]:
    line: list[str] = []
    for word in words:
        if word == "\n":
            yield line
            line = []
        else:
            line.append(word)
    yield line


def _openrlhf(words: Sequence[str]) -> Asked | None:
    for command in _commands(words):
        for place, word in enumerate(command):
            found = re.fullmatch(r"(?:\S*[/.])?(train_\w+?)(?:\.py)?", word)
            if found and "openrlhf" in word:
                trainer = {"train_ppo_ray": "ppo", "train_ppo": "ppo"}.get(found[1], found[1].removeprefix("train_"))
                before = _arguments(command[:place])
                return Asked("OpenRLHF", trainer, _arguments(command[place + 1 :]), before)
    return None


def _trl_command(words: Sequence[str]) -> Asked | None:
    for command in _commands(words):
        for place, word in enumerate(command):
            trainer = None
            if word == "trl" and command[place + 1 : place + 2] and command[place + 1] in TRAINERS_OF_TRL:
                trainer, after = command[place + 1], place + 2
            elif found := re.fullmatch(r"(?:\S*/)?(?:trl/scripts|examples/scripts(?:/ppo)?)/(\w+?)\.py", word):
                trainer, after = SCRIPTS_OF_TRL.get(found[1], found[1]), place + 1
            if trainer:
                return Asked("TRL", trainer, _arguments(command[after:]), _arguments(command[:place]))
    return None


def _swift(words: Sequence[str]) -> Asked | None:
    for command in _commands(words):
        if "swift" in command and "rlhf" in command[command.index("swift") + 1 :]:
            given = _arguments(command[command.index("rlhf") + 1 :])
            before = {
                name: plain(value) for name, _, value in (word.partition("=") for word in command) if name.isupper()
            }
            return Asked("ms-swift", str(given.get("rlhf_type", "dpo")), given, before)
    return None
