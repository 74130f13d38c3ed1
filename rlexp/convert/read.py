"""Read the arguments of another trainer's run: from a yaml file, or from a command in a shell script."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import yaml

from rlexp.base import plain_yaml
from rlexp.base.secrets import is_secret, masked
from rlexp.convert.conversion import ConvertError
from rlexp.convert.shell import ENDS, Command, ScriptCall, commands, shown
from rlexp.convert.shell_words import TooMuch, Unknown, like

# What the programs of trainers are called, where that is not the trainer.
SCRIPTS = {"gspo": "grpo", "grpo_agent": "grpo", "ppo_tldr": "ppo", "dpo_online": "online dpo",
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
    of_v1 = {"model", "train_dataset"} <= given.keys()
    if "base_model" in given:
        return Asked("axolotl", trainer_of("axolotl", given, ""), given)
    if of_v1 or {"stage", "finetuning_type"} & given.keys():
        return Asked("LLaMA-Factory", str(given.get("stage", "v1" if of_v1 else "sft")), given)
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


def trainer_of(framework: str, given: Mapping[str, Any], other: str) -> str:
    """Return the trainer that arguments ask for, where a framework has an argument for it; else another one."""
    kinds = {"reward_model": "reward", "process_reward_model": "prm"}
    match framework:
        case "LLaMA-Factory":
            return str(given.get("stage", "sft"))
        case "ms-swift":
            return str(given.get("rlhf_type", other))
        case "axolotl":
            return str(given.get("rl") or next((kind for name, kind in kinds.items() if given.get(name)), "sft"))
    return other


_UNKNOWN = ("is none of the files that can be converted. These are: a yaml file of TRL, axolotl, LLaMA-Factory or "
            "ms-swift, and a shell script with a command of TRL (trl dpo …), OpenRLHF (openrlhf.cli.train_dpo …), "
            "ms-swift (swift sft …, swift rlhf …), axolotl (axolotl train …) or LLaMA-Factory (llamafactory-cli train "
            "…).")  # fmt: skip


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


class Program(NamedTuple):
    """How a command starts a trainer: by a program, whose name may have the trainer, or by a command of the program."""

    framework: str
    name: str
    commands: Sequence[str] = ()
    takes: Callable[[Sequence[str]], bool] = lambda _: True  # whether the words behind it are a trainer's


def _has_stage(rest: Sequence[str]) -> bool:
    return "".join(rest[:1]).endswith((".yaml", ".yml")) or {"--stage", "--finetuning_type"} <= {*rest}


def _as_trl(rest: Sequence[str]) -> bool:
    names = {each.removeprefix("--").partition("=")[0] for each in rest}
    return any(each.endswith((".yaml", ".yml")) for each in rest) or len(OF_TRAINING & names) > 1


# The programs of open-r1 and alignment-handbook, and copies of them, have TRL's arguments.
RECIPE = Program("TRL", r"(?:\S*/)?(?:open_r1/|run_)(sft|grpo|dpo|orpo|kto|simpo)\.py", takes=_as_trl)
PROGRAMS = (
    Program("OpenRLHF", r"(?=.*openrlhf)(?:\S*[/.])?train_(\w+?)(?:\.py)?"),
    Program("OpenRLHF", r"(?:\S*[/.])?train_(\w+?)\.py", takes=lambda rest: "--pretrain" in rest),
    Program("TRL", r"(?:.*/)?trl", TRAINERS_OF_TRL),
    Program("TRL", r"(?:\S*/)?(?:trl|examples)/scripts/(?:\w+/)?(\w+?)\.py"),
    Program("TRL", r"trl\.scripts\.(\w+)"),
    Program("ms-swift", r"(?:.*/)?swift", OF_SWIFT),
    Program("ms-swift", "(megatron)", OF_SWIFT),
    Program("ms-swift", rf".*swift/cli/({'|'.join(OF_SWIFT)})\.py"),
    Program("LLaMA-Factory", r"(?:.*/)?llamafactory-cli", ["train"]),
    Program("LLaMA-Factory", r"(?:\S*/)?train(?:_bash)?\.py", takes=_has_stage),
    Program("axolotl", r"(?:.*/)?axolotl", ["train"]),
    Program("axolotl", r"(?:\S*/)?axolotl[./]cli[./]train(?:\.py)?"),
    RECIPE,
)


def _asked(command: Command) -> Asked | None:
    """Return what a command of a trainer asks for; None for any other command."""
    words, blank = command.words, command.words[-1] and not command.words[-1].strip()
    for place, word in enumerate(words):
        rest = words[place + 1 :]
        for program in PROGRAMS:
            match, command_of = re.fullmatch(program.name, word), "".join(rest[: bool(program.commands)])
            if match is None or command_of not in (program.commands or [""]) or not program.takes(rest):
                continue
            if blank:
                raise ConvertError(f"the command of line {command.line} ends too early, at a space behind a backslash: "
                                   f"bash takes it for a word. Remove that space.")  # fmt: skip
            line, before = _Arguments(rest[bool(program.commands) :]), _Arguments(words[:place])
            trainer = _trainer_of(program, word, match[1] if match.lastindex else command_of, line.given)
            return Asked(program.framework, trainer, line.given, before.given, dict(command.environment),
                         line.positional, command.around, line.again, of_command=True, used=command.used,
                         sourced=command.sourced, program=word if program is RECIPE else "")  # fmt: skip
    return None


def _trainer_of(program: Program, word: str, name: str, given: Mapping[str, Any]) -> str:
    framework = program.framework
    if framework in ("LLaMA-Factory", "axolotl") or (framework, name) == ("ms-swift", "rlhf"):
        return trainer_of(framework, {} if framework == "axolotl" else given, "dpo")
    if "scripts" in program.name:  # TRL's
        return "rloo of TRL before 0.19" if "/rloo/" in word else SCRIPTS.get(name, name)
    if program is RECIPE and name == "simpo":
        return "cpo"
    return "ppo" if (framework, name) == ("OpenRLHF", "ppo_ray") else name


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
                if name in self.given:
                    self.again.append((name, self.given.pop(name)))
                self.given[name] = like(word, value) if equals else True
            elif word == "--":
                name = None
            elif name is not None:
                before = self.given[name]
                self.given[name] = (
                    word if before is True else [*(before if isinstance(before, list) else [before]), word]
                )
            elif word != "\\":
                self.positional.append(word)


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
