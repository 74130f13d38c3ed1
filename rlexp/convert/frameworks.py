"""The trainers whose files are read, and the way from a file to a conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlexp.config.schema import KINDS
from rlexp.convert import axolotl, llamafactory, openrlhf, swift, trl
from rlexp.convert.launchers import STARTS
from rlexp.convert.read import Asked, mapping_of, plain, read, refuse_unknown
from rlexp.convert.rules import Conversion, ConvertError, Fate, Rule


@dataclass(frozen=True)
class Framework:
    rules: Sequence[Rule]
    trainers: Sequence[str]  # whose files become an experiment
    convert: Callable[[Conversion], None]


FRAMEWORKS: Mapping[str, Framework] = {
    "TRL": Framework(trl.RULES, trl.TRAINERS, trl.convert),
    "OpenRLHF": Framework(openrlhf.RULES, openrlhf.TRAINERS, openrlhf.convert),
    "ms-swift": Framework(swift.RULES, swift.TRAINERS, swift.convert),
    "axolotl": Framework(axolotl.RULES, axolotl.TRAINERS, axolotl.convert),
    "LLaMA-Factory": Framework(llamafactory.RULES, llamafactory.TRAINERS, llamafactory.convert),
}
OF_PYTHON = ("-m", "-u")  # options of `python -m trl`
# Trainers whose files are recognized and refused, with the option of ours that would have them.
NOT_YET = {"gkd": "loss=gkd", "kd": "loss=gkd", "prm": "loss=prm"}
# Other names of what we have, where a framework's files are not converted.
OURS = {"pt": "sft", "rm": "reward"}


def converted(file: Path, trainer: str | None, gpus: int | None) -> Conversion:
    """Read a file and decide what becomes of each of its arguments."""
    asked = _with_yaml(read(file), file)
    framework = FRAMEWORKS[asked.framework]
    chosen = asked.trainer or trainer or (trl.trainer_of(asked.given) if asked.framework == "TRL" else None)
    if chosen is None:
        others = ", ".join(each for each in framework.trainers if each != "dpo")
        raise ConvertError(f"{file}: does not say which trainer it is for. Say --trainer dpo, or one of {others}.")
    if trainer is not None and trainer != chosen:
        raise ConvertError(f"--trainer={trainer}: {file} is for {chosen}. Leave --trainer out.")
    if chosen not in framework.trainers:
        raise ConvertError(f"{file}: {_unread(asked.framework, chosen)}")
    return of_asked(replace(asked, trainer=chosen), gpus)


def _unread(framework: str, trainer: str) -> str:
    """Say of a trainer whose files are not converted whether rlexp has what it does."""
    ours, read = OURS.get(trainer, trainer), ", ".join(FRAMEWORKS[framework].trainers)
    if ours in KINDS["loss"]:
        return (
            f"is for {framework}'s {trainer}, whose files are not converted, but those of {read}. rlexp has it: "
            f"loss={ours}, whose keys are in docs/keys.md."
        )
    return f"is for {framework}'s {trainer}, which rlexp does not have yet. It has {read} of {framework}."


def of_asked(asked: Asked, gpus: int | None) -> Conversion:
    """Convert what a file asks for."""
    framework, trainer = FRAMEWORKS[asked.framework], asked.trainer or ""
    rules = [rule for rule in framework.rules if not rule.trainers or trainer in rule.trainers]
    known = {name: rule for rule in rules for name in rule.names}
    arguments = _spelled(asked.given, known)
    launcher = {
        name: value
        for name, value in _spelled(asked.launcher, known).items()
        if name not in arguments and name not in OF_PYTHON
    }
    variables = {name: value for name, value in asked.environment.items() if name not in arguments}
    raw = {**launcher, **variables, **arguments}
    for name, value in raw.items():
        if name in known and known[name].fate is Fate.TAKEN:
            refuse_unknown(name, value)
    given = {name: plain(value) for name, value in raw.items()}
    conv = Conversion(asked.framework, trainer, given, framework.rules, gpus, raw, frozenset(variables))
    for name, value in asked.again:
        conv.remark(Fate.NEEDLESS, name, value, "it is given again behind this, and the last one decides")
    for word in asked.positional:
        conv.remark(Fate.ABSENT, "a word without a name", word, "no argument's value")
    if options := [word.partition("=")[0] for word in asked.around if word.startswith("--")]:
        conv.remark(Fate.NEEDLESS, asked.around[0], " ".join(options), STARTS)
    framework.convert(conv)
    conv.settle()
    return conv


def _spelled(given: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return arguments with underscores, where the trainer takes dashes for them too."""
    names = {name: name if name in known else name.replace("-", "_") for name in given}
    return {names[name] if names[name] in known else name: value for name, value in given.items()}


def _with_yaml(asked: Asked, file: Path) -> Asked:
    """Put in the arguments of the yaml file that a command of TRL or ms-swift names. Those of the command win."""
    if asked.framework == "TRL" and "config" in asked.given and asked.trainer is not None:
        named = str(asked.given["config"])
    elif asked.framework == "ms-swift" and asked.positional[:1] and asked.positional[0].endswith((".yaml", ".yml")):
        named = asked.positional[0]
    else:
        return asked
    found = next((path for path in (file.parent / named, Path(named)) if path.is_file()), None)
    given = mapping_of(found.read_text(encoding="utf-8"), found) if found else None
    if given is None:
        raise ConvertError(
            f"--config={named}: the rest of the arguments are in that file, and it is not here. Put it beside {file}, "
            f"or convert it: python -m rlexp.convert {named} --trainer {asked.trainer}."
        )
    variables = given.pop("env", None)
    line = {name: value for name, value in asked.given.items() if name != "config"}
    positional = [word for word in asked.positional if word != named]
    environment = {**(variables if isinstance(variables, dict) else {}), **asked.environment}
    return replace(asked, given={**given, **line}, positional=positional, environment=environment)
