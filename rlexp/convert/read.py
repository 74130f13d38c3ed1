"""Read the arguments of another trainer's run: from a yaml file, or from a command in a shell script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from rlexp.base import plain_yaml
from rlexp.base.secrets import is_secret, masked
from rlexp.convert.conversion import ConvertError
from rlexp.convert.shell import ENDS, Command, ScriptCall, TooMuch, Unknown, commands, shown

SCRIPTS_OF_TRL = {"gspo": "grpo", "grpo_agent": "grpo", "ppo_tldr": "ppo", "dpo_online": "online dpo",
                  "reward_modeling": "reward"}  # fmt: skip
TRAINERS_OF_TRL = ("dpo", "grpo", "rloo", "ppo", "sft", "reward", "kto")
OF_SWIFT = ("rlhf", "sft", "pt")
OF_MEGATRON = "tensor_model_parallel_size"  # an argument of Megatron-SWIFT alone
LARGEST = 1 << 18  # bytes of a file
OF_TRAINING = {"per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "model_name_or_path",
               "output_dir", "learning_rate", "max_steps", "deepspeed", "train_batch_size"}  # fmt: skip
SHOWN = 4  # commands in a message
MOST_DIGITS = 300  # of a number: a float has no more
NUMBER = re.compile(r"-?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Asked:
    """What a file asks for. Where it does not name its trainer, that is None."""

    framework: str
    trainer: str | None
    given: dict[str, Any]  # as written: `plain` makes numbers of texts
    launcher: dict[str, Any] = field(default_factory=dict)  # arguments of accelerate, deepspeed, torchrun or ray
    environment: dict[str, Any] = field(default_factory=dict)  # variables that the script gives to the command
    positional: list[str] = field(default_factory=list)  # words of the command that are no argument's value
    around: list[str] = field(default_factory=list)  # words of a command around this one: srun … bash -c
    again: list[tuple[str, Any]] = field(default_factory=list)  # values of arguments that a later one overrides
    of_command: bool = False
    used: frozenset[str] = frozenset()  # variables that the script reads too, as far as it does not set them
    sourced: tuple[str, ...] = ()  # other scripts that it takes in
    program: str = ""  # not the trainer's own, but one that reads arguments as it does


def read(file: Path, call: ScriptCall | None = None) -> Asked:
    text = text_of(file)
    repeated: list[tuple[str, Any]] = []
    given = mapping_of(text, file, repeated)
    if given is not None:
        return replace(_of_mapping(file, given), again=repeated)
    try:
        every = [*commands(text, file, call)]
    except (TooMuch, RecursionError) as error:
        reason = error if isinstance(error, TooMuch) else "its commands are too deep in each other"
        raise ConvertError(f"{file}: cannot be read, since {reason}.") from None
    of_trainers = [(command, asked) for command in every if (asked := _asked(command)) is not None]
    line = call.line if call is not None else None
    meant = [each for each in of_trainers if line in (None, each[0].line)]
    if len(meant) == 1:
        _refuse_undecided(file, meant[0][1], call or ScriptCall())
        return meant[0][1]
    if of_trainers and not meant:
        lines = ", ".join(str(command.line) for command, _ in of_trainers[:SHOWN])
        raise ConvertError(f"--line {line}: {file} has no command of a trainer there. There is one in line {lines}.")
    if of_trainers:
        raise ConvertError(f"{file}: has {_several(of_trainers)}")
    if every and every[-1].words == [ENDS]:
        raise ConvertError(
            f"{file}: ends at line {every[-1].line}, before a command of a trainer. If its arguments change that, give "
            f"them behind --, as: python -m rlexp.convert {quote(str(file))} -- ARGUMENT."
        )
    count, own = max((_own_program(each, file) for each in every), key=lambda each: each[0], default=(0, ""))
    if count:
        raise ConvertError(f"{file}: {own}")
    if file.suffix in (".yaml", ".yml") and (where := _wrong_line(text)):
        raise ConvertError(f"{file}{where}: is no yaml. Correct it there, or in the line before.")
    raise ConvertError(f"{file}: {_UNKNOWN}")


def _own_program(command: Command, file: Path) -> tuple[int, str]:
    """Say what can be done with a command that starts a program of the author's own, and how many arguments of a
    trainer it has."""
    first = command.words[0]
    unknown = 0 if isinstance(first, Unknown) else None
    place = next((place for place, word in enumerate(command.words) if word.endswith(".py")), unknown)
    if place is None:
        return 0, ""
    line = _Arguments(command.words[place + 1 :])
    files = [each for each in (line.given.get("config"), *line.positional) if str(each).endswith((".yaml", ".yml"))]
    count = len(OF_TRAINING & line.given.keys())
    if not files and count < 2:
        return 0, ""
    if isinstance(first, Unknown) and not place and count > 1:
        variables = re.findall(r"[A-Za-z_]\w*", first.part)
        return count, (
            f"line {command.line} starts {shown([first])}, and only bash knows what that is. Say it: "
            f"--set {variables[0] if variables else 'VARIABLE'}=VALUE."
        )
    cause = (
        f"line {command.line} starts {command.words[place]}, a program of its own, whose code decides what is trained."
    )
    if files:
        rest = ", ".join(f"{name}={masked(name, value)}" for name, value in line.given.items() if name != "config")
        more = f" Then add what the command gives: {rest}." if rest else ""
        ask = f"python -m rlexp.convert {quote(near(str(files[0]), file))} --trainer NAME."
        return count + 2, f"{cause} If it reads {files[0]} as TRL does: {ask}{more}"
    return count, f"{cause} Write its arguments as those of a trainer: trl dpo …, or a yaml file of TRL."


def near(named: str, file: Path) -> str:
    """Return where a file that another one names is, if it is here: beside it, or where the command is typed."""
    places = (file.parent / named, Path(named), file.parent / Path(named).name)
    return next((str(place) for place in places if place.is_file()), named)


def _several(several: Sequence[tuple[Command, Asked]]) -> str:
    """Say which commands a script has, and how to name the one that is meant."""
    names = [f"{asked.framework}'s {asked.trainer} in line {command.line}" for command, asked in several]
    listed = f"{', '.join(names[:SHOWN])}{', …' * (len(names) > SHOWN)}"
    unsure = next((command.unsure for command, _ in several if command.unsure), None)
    decides = f", and {unsure} decides which of them run" if unsure else ""
    if len({command.line for command, _ in several}) > 1:
        remedy = f"Say which one is meant: --line {several[-1][0].line}."
    elif loop := several[0][0].loop:
        remedy = f"Say which one is meant by the loop's variable: --set {loop}=VALUE."
    else:
        remedy = "Leave one in it, and convert them in turn."
    return f"{len(several)} commands ({listed}){decides}. {remedy}"


def _refuse_undecided(file: Path, asked: Asked, call: ScriptCall) -> None:
    """Refuse a word that depends on a branch or a loop of which only bash knows whether it runs."""
    for name, value in (*asked.given.items(), *(("", word) for word in asked.positional)):
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Unknown) and each.why and not is_secret(name):
                names = re.findall(r"\$\{?([A-Za-z_]\w*)", f"{each.why} {each.part}")
                left = [name for name in names if name not in call.variables]
                remedy = f"Say it: --set {left[0] if left else 'VARIABLE'}=VALUE."
                if call.arguments is None and not call.variables and asked.used & {*"123456789@*#"}:
                    remedy = f"It reads arguments: give them as python -m rlexp.convert {quote(str(file))} -- ARGUMENT."
                raise ConvertError(
                    f"{file}: {each.why} decides what {shown([each.part])} is, and only bash knows how. {remedy}"
                )


def text_of(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            content = stream.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ConvertError(f"{file}: is larger than {LARGEST >> 10} KiB, and {_UNKNOWN}")
        return content.decode()
    except OSError as error:
        raise ConvertError(f"{file}: cannot be read ({error.strerror or error}). Give a file.") from None
    except UnicodeDecodeError:
        raise ConvertError(f"{file}: is no text, and {_UNKNOWN}") from None


# ---- yaml ----


def mapping_of(text: str, file: Path, repeated: list[tuple[str, Any]] | None = None) -> dict[str, Any] | None:
    """Return the mapping of a yaml file whose keys are names; None if the text is something else. Of a key that is
    there twice the last one holds, as for the trainers; the earlier ones are added to `repeated`."""
    lines: dict[str, int] = {}

    class ConfigLoader(plain_yaml.Loader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: dict[str, yaml.Node] = {}
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                    if key.value in seen:
                        lines[key.value] = key.start_mark.line + 1
                        if repeated is not None:
                            repeated.append((key.value, self.construct_object(seen[key.value], deep=True)))
                    seen[key.value] = value
            return super().construct_mapping(node, deep)

    try:
        given = plain_yaml.load(text, ConfigLoader)
    except plain_yaml.TooLarge as error:
        raise ConvertError(f"{file}: cannot be read, since {error}.") from None
    except yaml.YAMLError:
        return None
    if not isinstance(given, dict) or not all(re.fullmatch(r"[A-Za-z_][\w.-]*", str(name)) for name in given):
        return None
    unlike = [name for name, value in repeated or () if value != given.get(name)]
    if unlike and "stage" in given:  # LLaMA-Factory reads it by OmegaConf, which refuses that
        name, line = unlike[0], lines[unlike[0]]
        raise ConvertError(f"{file}, line {line}: {name} is given twice. Leave one of them out.")
    return {str(name): value for name, value in given.items()}


def _wrong_line(text: str) -> str:
    """Return the line at which a text is no yaml."""
    try:
        plain_yaml.load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        return f", line {mark.line + 1}" if mark else ""
    return ""


def _of_mapping(file: Path, given: dict[str, Any]) -> Asked:
    if "base_model" in given:
        return Asked("axolotl", trainer_of_axolotl(given), given)
    if {"model", "train_dataset"} <= given.keys():
        return Asked("LLaMA-Factory", str(given.get("stage", "v1")), given)
    if {"stage", "finetuning_type"} & given.keys():
        return Asked("LLaMA-Factory", str(given.get("stage", "sft")), given)
    if "model" in given and {"rlhf_type", "tuner_type", "train_type", OF_MEGATRON} & given.keys():
        return _with_variables(Asked("ms-swift", "megatron" if OF_MEGATRON in given else None, given))
    if not {"model_name_or_path", "sft_model_path", "dataset_name", "datasets", "dataset_mixture", "output_dir"} & {
        *given
    }:
        raise ConvertError(f"{file}: {_UNKNOWN}")
    return _with_variables(Asked("TRL", None, given))


def _with_variables(asked: Asked) -> Asked:
    """Take the environment's variables out of the arguments of a yaml file: TRL's `env`, ms-swift's `ENV`."""
    name = "ENV" if asked.framework == "ms-swift" else "env"
    trainer = asked.trainer or (str(asked.given.get("rlhf_type", "sft")) if name == "ENV" else None)
    variables = asked.given.get(name)
    if not isinstance(variables, dict):
        return replace(asked, trainer=trainer)
    rest = {each: value for each, value in asked.given.items() if each != name}
    return replace(asked, trainer=trainer, given=rest, environment={str(key): each for key, each in variables.items()})


def trainer_of_axolotl(given: dict[str, Any]) -> str:
    kinds = {"reward_model": "reward", "process_reward_model": "prm"}
    return str(given.get("rl") or next((kind for name, kind in kinds.items() if given.get(name)), "sft"))


_UNKNOWN = (
    "is none of the files that can be converted. These are: a yaml file of TRL, axolotl, LLaMA-Factory or ms-swift, "
    "and a shell script with a command of TRL (trl dpo …), OpenRLHF (openrlhf.cli.train_dpo …), ms-swift (swift sft …, "
    "swift rlhf …), axolotl (axolotl train …) or LLaMA-Factory (llamafactory-cli train …)."
)


def plain(value: Any) -> Any:
    """Return the number, truth value or nothing that a text means: YAML takes `5e-7` for a text. `007` and `1_000`
    remain texts."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if not isinstance(value, str) or isinstance(value, Unknown):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value.lower() in ("none", "null"):
        return None
    if len(value) > MOST_DIGITS or NUMBER.fullmatch(value) is None:
        return value
    return int(value) if re.fullmatch(r"-?\d+", value) else float(value)


# ---- commands ----


def _asked(command: Command) -> Asked | None:
    """Return what a command of a trainer asks for; None for any other command."""
    words, blank = command.words, command.words[-1] and not command.words[-1].strip()
    for place, word in enumerate(words):
        for find in (_openrlhf, _trl, _swift, _factory, _axolotl, _recipe):
            if (match := find(words, place, word)) is None:
                continue
            framework, trainer, after = match
            if blank:
                raise ConvertError(f"the command of line {command.line} ends too early, at a space behind a backslash: "
                                   f"bash takes it for a word. Remove that space.")  # fmt: skip
            line, before = _Arguments(words[after:]), _Arguments(words[:place])
            if framework == "ms-swift" and trainer == "rlhf":
                trainer = str(line.given.get("rlhf_type", "dpo"))
            if framework == "LLaMA-Factory":
                trainer = str(line.given.get("stage", "sft"))
            return Asked(framework, trainer, line.given, before.given, dict(command.environment), line.positional,
                         command.around, line.again, of_command=True, used=command.used,
                         sourced=command.sourced, program=word if find is _recipe else "")  # fmt: skip
    return None


def _openrlhf(words: Sequence[str], place: int, word: str) -> tuple[str, str, int] | None:
    match = re.fullmatch(r"(?:\S*[/.])?(train_\w+?)(\.py)?", word)
    of_old = match is not None and match[2] and "--pretrain" in words[place:]  # examples/train_dpo.py
    if match is None or not ("openrlhf" in word or of_old):
        return None
    trainer = {"train_ppo_ray": "ppo", "train_ppo": "ppo"}.get(match[1], match[1].removeprefix("train_"))
    return "OpenRLHF", trainer, place + 1


def _trl(words: Sequence[str], place: int, word: str) -> tuple[str, str, int] | None:
    if word.rpartition("/")[2] == "trl" and words[place + 1 : place + 2] and words[place + 1] in TRAINERS_OF_TRL:
        return "TRL", words[place + 1], place + 2
    script = re.fullmatch(r"(?:\S*/)?(?:trl|examples)/scripts/(?:\w+/)?(\w+?)\.py|trl\.scripts\.(\w+)", word)
    if script is None:
        return None
    name = "rloo of TRL before 0.19" if "/rloo/" in word else script[1] or script[2]
    return "TRL", SCRIPTS_OF_TRL.get(name, name), place + 1


def _recipe(words: Sequence[str], place: int, word: str) -> tuple[str, str, int] | None:
    """Recognize the programs of open-r1 and alignment-handbook, which have TRL's arguments, and copies of them."""
    script = re.fullmatch(r"(?:\S*/)?(?:open_r1/|run_)(sft|grpo|dpo|orpo|kto|simpo)\.py", word)
    rest = words[place + 1 :]
    names = {each.removeprefix("--").partition("=")[0] for each in rest}
    if script is None or not (any(each.endswith((".yaml", ".yml")) for each in rest) or len(OF_TRAINING & names) > 1):
        return None
    return "TRL", {"simpo": "cpo"}.get(script[1], script[1]), place + 1


def _swift(words: Sequence[str], place: int, word: str) -> tuple[str, str, int] | None:
    if word.rpartition("/")[2] == "swift" and words[place + 1 : place + 2] and words[place + 1] in OF_SWIFT:
        return "ms-swift", words[place + 1], place + 2
    if word == "megatron" and words[place + 1 : place + 2] and words[place + 1] in OF_SWIFT:
        return "ms-swift", "megatron", place + 2
    script = re.search(rf"swift/cli/({'|'.join(OF_SWIFT)})\.py$", word)
    return ("ms-swift", script[1], place + 1) if script else None


def _factory(words: Sequence[str], place: int, word: str) -> tuple[str, str, int] | None:
    if word.rpartition("/")[2] == "llamafactory-cli" and words[place + 1 : place + 2] == ["train"]:
        return "LLaMA-Factory", "", place + 2
    script = re.fullmatch(r"(?:\S*/)?(train_bash|train)\.py", word)
    rest = words[place + 1 :]
    reads = rest[:1] and rest[0].endswith((".yaml", ".yml"))
    flags = "--stage" in rest and "--finetuning_type" in rest
    return ("LLaMA-Factory", "", place + 1) if script and (flags or reads) else None


def _axolotl(words: Sequence[str], place: int, word: str) -> tuple[str, str, int] | None:
    if word.rpartition("/")[2] == "axolotl" and words[place + 1 : place + 2] == ["train"]:
        return "axolotl", "sft", place + 2
    module = re.fullmatch(r"(?:\S*/)?axolotl[./]cli[./]train(?:\.py)?", word)
    return ("axolotl", "sft", place + 1) if module else None


class _Arguments:
    """The arguments of a command: `--name value …`. A name without a value is true."""

    def __init__(self, words: Sequence[str]) -> None:
        self.given: dict[str, Any] = {}
        self.positional: list[str] = []
        self.again: list[tuple[str, Any]] = []
        name = None
        for word in words:
            if (option := re.match(r"--?[A-Za-z]", word)) is not None:
                dashes = 2 if option[0].startswith("--") else 0
                name, equals, value = word[dashes:].partition("=")
                self._begin(name, _like(word, value) if equals else True)
            elif word == "--":
                name = None
            elif name is not None:
                self._add(name, word)
            elif word != "\\":
                self.positional.append(word)

    def _begin(self, name: str, value: Any) -> None:
        if name in self.given:
            self.again.append((name, self.given.pop(name)))
        self.given[name] = value

    def _add(self, name: str, value: str) -> None:
        before = self.given[name]
        if isinstance(before, list):
            before.append(value)
        else:
            self.given[name] = value if before is True else [before, value]


def is_named_value(word: str) -> bool:
    return re.match(r"[A-Za-z_]\w*=", word) is not None


def named_value(word: str) -> tuple[str, str]:
    """Return the name and the value of a word like learning_rate=1e-7."""
    name, _, value = word.partition("=")
    return str(name), _like(word, value)


def _like(word: str, value: str) -> str:
    """Return a part of a word; it is unknown if the word is."""
    return Unknown.of(value, word.part, word.why) if isinstance(word, Unknown) else value


def refuse_unknown(name: str, value: Any, sourced: Sequence[str] = ()) -> None:
    """Refuse a value that only bash could know. Scripts that are `sourced` are not read."""
    elsewhere = f", and {', '.join(sourced)}, which it takes in, is not read" if sourced else ""
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, Unknown) or is_secret(name):
            continue
        variable = re.fullmatch(r"\$\{?(\w+|[@*#])\}?", each.part)
        part, value = shown([each.part]), shown([str(masked(name, str(each)))])
        if variable is None:
            raise ConvertError(f"{name}={value}: only bash knows what {part} is. Write the value in its place.")
        if not re.match(r"[A-Za-z_]", variable[1]):
            raise ConvertError(
                f"{name}={value}: only bash knows what {part} is. Give the script's arguments behind --: "
                f"python -m rlexp.convert FILE -- ARGUMENT."
            )
        raise ConvertError(
            f"{name}={value}: {variable[1]} has no value in the script{elsewhere}. Set it there, as "
            f"{variable[1]}=VALUE, or say it: --set {variable[1]}=VALUE."
        )
