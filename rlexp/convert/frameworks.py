"""The trainers whose files are read, and the way from a file to a conversion."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from rlexp.config.schema import KINDS
from rlexp.convert import axolotl, llamafactory, openrlhf, swift, trl, versions
from rlexp.convert.conversion import Conversion, ConvertError
from rlexp.convert.launchers import STARTS
from rlexp.convert.model_keys import described
from rlexp.convert.read import Asked, mapping_of, near, plain, read, refuse_unknown, text_of, trainer_of
from rlexp.convert.rules import Fate, Rule
from rlexp.convert.shell import ScriptCall, shown
from rlexp.convert.shell_words import Unknown, like
from rlexp.convert.versions import Versions


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
OF_PROFILES = ("num_processes", "num_machines", "zero_stage", "offload_optimizer_device", "offload_param_device")
NAMES = ("hydra.run.dir", "logger.run_name", "logger.project", "logger.group")  # no number depends on these
SETTING_UP = re.compile(r"(?:activate|conda\.sh|bashrc|profile|setup_vars\.sh|set_env\.sh)$")  # of a machine
COUNTS = ("launch.nproc", "launch.nodes")
SHORTEST = 8  # letters of an argument that is shortened
OF_PYTHON = ("-m", "-u")  # options of `python -m trl`
# Trainers whose files are recognized and refused, with the option of ours that would have them.
NOT_YET = {"gkd": "loss=gkd", "kd": "loss=gkd", "prm": "loss=prm"}
# Forms of files that are recognized and not read.
FORMS = {
    "v1": "has the form of LLaMA-Factory's v1 (model, train_dataset), which is not converted, but that of files with "
    "`stage`. Write its settings as those.",
    "megatron": "is for Megatron-SWIFT, which splits a model by tensor and pipeline parallelism, and is not converted. "
    "Write its settings as those of swift sft, swift pt or swift rlhf; an engine splits the state: docs/engines.md.",
}
UNREAD = "rlexp reads texts alone."
OF_A_MODEL = re.compile(
    r"(?<![a-z])(?:vl|vlm|vision|omni|audio|ocr|llava|pixtral|internvl|smolvlm|voxtral|minicpm[-_]?v|glm[-_]?4v|mllama|"
    r"idefics|paligemma|qvq|cogvlm|florence)(?![a-z])",
    re.I,
)
# Arguments that only a model with images, videos or sound has.
OF_A_FILE = re.compile(
    r"(?:processor_type|image_\w+|video_\w+|freeze_(?:vit|aligner|vision_tower|multi_modal_projector|language_model)|"
    r"(?:vit|aligner)_\w+|(?i:(?:video_)?max_pixels)|FPS_MAX_FRAMES|VIDEO_\w+)"
)
# Other names of what we have, where a framework's files are not converted.
OURS = {"pt": "sft", "rm": "reward"}


def converted(
    file: Path, trainer: str | Sequence[str] | None, gpus: int | None, call: ScriptCall | None = None
) -> Conversion:
    """Read a file and decide what becomes of each of its arguments. `trainer` may name a version too: trl==0.15."""
    asked = _with_profile(_with_yaml(read(file, call), file), file)
    trainer, version = versions.asked_for([trainer] if isinstance(trainer, str) else trainer or [])
    if version is not None and version[0] != asked.framework:
        raise ConvertError(
            f"--trainer: names a version of {version[0]}, and {file} is {asked.framework}'s. Leave it out."
        )
    trainers = FRAMEWORKS[asked.framework].trainers
    by_arguments = trl.trainer_of(asked.given) if asked.framework == "TRL" else None
    chosen = asked.trainer or trainer or by_arguments
    if chosen is None:
        others = ", ".join(each for each in trainers if each != "dpo")
        raise ConvertError(f"{file}: does not say which trainer it is for. Say --trainer dpo, or one of {others}.")
    if trainer not in (None, chosen):
        raise ConvertError(f"--trainer={trainer}: {file} is for {chosen}. Leave --trainer out.")
    if chosen not in trainers:
        raise ConvertError(f"{file}: {_unread(asked.framework, chosen)}")
    known = version[1] if version is not None else versions.of_file(asked.framework, file, asked.given)
    conv = of_asked(replace(asked, trainer=chosen), gpus, known, file.parent)
    if asked.program:
        conv.notes.insert(0, f"Program: {asked.program} is not TRL's own. It is taken to train as TRL's {chosen}: what "
                             f"else its code does is not seen.")  # fmt: skip
    if sourced := [each for each in asked.sourced if SETTING_UP.search(each) is None]:
        conv.notes.append(
            f"Sourced: {', '.join(sourced)} is not read; what it sets is not seen (--set VARIABLE=VALUE)."
        )
    if trainer is not None and by_arguments not in (None, chosen):
        conv.notes.insert(0, f"Trainer: --trainer says {chosen}, and the file has arguments of {by_arguments} alone.")
    return conv


def _unread(framework: str, trainer: str) -> str:
    """Say of a trainer whose files are not converted whether rlexp has what it does."""
    ours, read = OURS.get(trainer, trainer), ", ".join(FRAMEWORKS[framework].trainers)
    if trainer in FORMS:
        return FORMS[trainer]
    if trainer.endswith("_vlm"):
        return f"is for {framework}'s {trainer}, which trains on images. {UNREAD}"
    if framework == "TRL" and "_" in trainer and trainer.partition("_")[0] in trl.TRAINERS:
        return (
            f"is for TRL's script {trainer}.py, which sets rows and arguments that the command does not say. Write "
            f"them as arguments of trl {trainer.partition('_')[0]}."
        )
    if ours in KINDS["loss"]:
        return (
            f"is for {framework}'s {trainer}, whose files are not converted, but those of {read}. rlexp has it: "
            f"loss={ours}, whose keys are in docs/keys.md."
        )
    return (
        f"is for {framework}'s {trainer}, or one of that name in a fork, which rlexp does not have. It has {read} of "
        f"{framework}."
    )


def of_asked(
    asked: Asked, gpus: int | None, known_versions: Versions | None = None, folder: Path = Path()
) -> Conversion:
    """Convert what a file asks for."""
    framework, trainer = FRAMEWORKS[asked.framework], asked.trainer or ""
    rules = [rule for rule in framework.rules if not rule.trainers or trainer in rule.trainers]
    known = {name: rule for rule in rules for name in rule.names}
    arguments = _spelled(asked.given, known, shortened=asked.of_command)
    around = _spelled(asked.launcher, known)
    launcher = {name: around[name] for name in around if name not in arguments and name not in OF_PYTHON}
    variables = {name: value for name, value in asked.environment.items()
                 if name not in arguments and (name in known or name not in asked.used)}  # fmt: skip
    raw = {**launcher, **variables, **arguments}
    unnamed = {name: value for name, value in raw.items()
               if name in known and isinstance(value, Unknown)
               and (known[name].key in NAMES or (gpus is not None and known[name].key in COUNTS))}  # fmt: skip
    raw = {name: value for name, value in raw.items() if name not in unnamed}
    for name, value in raw.items():
        if name in known and known[name].key in COUNTS and isinstance(value, Unknown):
            raise ConvertError(
                f"{name}={value}: only bash knows {shown([value.part])}. Say how many GPUs there are: --gpus=8."
            )
        if name in known and known[name].fate is Fate.TAKEN:
            refuse_unknown(name, value, asked.sourced)
    given = {name: plain(value) for name, value in raw.items()}
    conv = Conversion(asked.framework, trainer, given, framework.rules, gpus, raw, frozenset(variables),
                      of_command=asked.of_command, versions=known_versions or Versions(), folder=folder)  # fmt: skip
    for name, value in unnamed.items():
        instead = "--gpus says how many" if known[name].key in COUNTS else "rlexp gives its own name"
        conv.remark(Fate.OTHER, name, value, f"only bash knows {shown([value.part])}: {instead}")
    for name, value in asked.again:
        conv.remark(Fate.NEEDLESS, name, value, "it is given again behind this, and the last one decides")
    for word in asked.positional:
        conv.remark(Fate.ABSENT, "a word without a name", word, "no argument's value")
    if options := [word.partition("=")[0] for word in asked.around if word.startswith("--")]:
        conv.remark(Fate.NEEDLESS, asked.around[0], " ".join(options), STARTS)
    conv.choose("model", "hf")
    conv.choose("data", "hf")
    framework.convert(conv)
    _images(conv, str(conv.values["model.path"].value))
    conv.settle()
    return conv


def _images(conv: Conversion, model: str) -> None:
    """Say first that only texts are trained on, where a model or an argument is made for more."""
    names = [name for name in conv.given if OF_A_FILE.fullmatch(name) and conv.given[name] not in (None, False)]
    theirs = conv.framework == "LLaMA-Factory"  # whose defaults these are
    frozen = [name for name in names if theirs and name.startswith("freeze_") and conv.given[name] is True]
    names = [name for name in names if name not in frozen]
    for name in frozen:
        conv.tell(Fate.NEEDLESS, name, "only with a model that reads images")
    for name in names:
        conv.remark(Fate.ABSENT, name, conv.given[name], "images, videos and sound are not read")
    named = ("/".join(model.rstrip("/").split("/")[-3:]), str(conv.given.get("model_type") or ""))
    if names or any(map(OF_A_MODEL.search, named)) or "vision_config" in described(model):
        conv.notes.insert(0, f"Images: the file is for a model that reads more than texts. {UNREAD}")


def _spelled(given: Mapping[str, Any], known: Iterable[str], *, shortened: bool = False) -> dict[str, Any]:
    """Return arguments with underscores, where the trainer takes dashes for them too, and with the whole name where a
    command may have its beginning."""
    spelled = {}
    for name, value in given.items():
        start = name if name in known else name.replace("-", "_")
        meant = [each for each in known if each.startswith(start)] if shortened and len(start) >= SHORTEST else []
        whole = meant[0] if start not in known and len(meant) == 1 else start
        spelled[whole if whole in known else name] = value
    return spelled


def _with_yaml(asked: Asked, file: Path) -> Asked:
    """Put in the arguments of the yaml file that a command of TRL or ms-swift names. Those of the command win."""
    option = asked.framework in ("TRL", "ms-swift") and asked.of_command and "config" in asked.given
    first = asked.positional[0] if asked.positional and (asked.framework != "TRL" or asked.program) else ""
    named = asked.given["config"] if option else first
    of_yaml = option or first.endswith((".yaml", ".yml"))
    if of_yaml or (asked.framework in ("LLaMA-Factory", "axolotl") and first and not asked.given):
        refuse_unknown("the yaml file", named)
    if not of_yaml:
        return asked
    line = {name: value for name, value in asked.given.items() if name != "config"}
    positional = [word for word in asked.positional if word != named]
    given = _beside(named, file)
    if given is None:
        way, trainer = ("--config=", f" --trainer {asked.trainer}") if asked.framework == "TRL" else ("", "")
        also = f", and add {', '.join([*line, *positional])}" if line or positional else ""
        raise ConvertError(
            f"{way}{named}: the rest of the arguments are in that file, and there is none at {file.parent / named}. "
            f"Put it there, or convert it: python -m rlexp.convert {quote(near(named, file))}{trainer}{also}."
        )
    variables = given.pop("env", None)
    if asked.framework == "LLaMA-Factory":  # key=value behind the file, as OmegaConf reads them
        named_values = [word for word in positional if re.match(r"[A-Za-z_]\w*=", word)]
        line |= {word.partition("=")[0]: like(word, word.partition("=")[2]) for word in named_values}
        positional = [word for word in positional if word not in named_values]
    environment = {**(variables if isinstance(variables, dict) else {}), **asked.environment}
    given |= {name.replace("-", "_") if asked.framework == "axolotl" else name: value for name, value in line.items()}
    trainer = trainer_of(asked.framework, given, str(asked.trainer))
    return replace(asked, trainer=trainer, given=given, positional=positional, environment=environment)


def _beside(named: str, file: Path) -> dict[str, Any] | None:
    """Return the mapping of a yaml file that a file names; None where it is not here."""
    path = next((path for path in (file.parent / named, Path(named)) if path.is_file()), None)
    if path is None:
        return None
    if (given := mapping_of(text_of(path), path)) is None:
        raise ConvertError(f"{path}: is no yaml with names and values. Correct it.")
    return given


def _with_profile(asked: Asked, file: Path) -> Asked:
    """Put in the GPUs and the engine of accelerate's yaml file, where it is here. Those of the command win."""
    named = str(asked.launcher.get("config_file") or "")
    given = (_beside(named, file) if named.endswith((".yaml", ".yml")) else None) or {}
    nested = given.pop("deepspeed_config", None)
    known = {**given, **(nested if isinstance(nested, dict) else {})}
    kept = {name: known[name] for name in OF_PROFILES if name in known}
    return replace(asked, launcher={**kept, **asked.launcher})
