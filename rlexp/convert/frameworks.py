"""The trainers whose files are read, and the way from a file to a conversion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlexp.convert import axolotl, llamafactory, openrlhf, swift, trl
from rlexp.convert.read import Asked, read
from rlexp.convert.rules import Conversion, ConvertError, Rule


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


def converted(file: Path, trainer: str | None, gpus: int | None) -> Conversion:
    """Read a file and decide the fate of each of its arguments."""
    asked = read(file)
    framework = FRAMEWORKS[asked.framework]
    chosen = asked.trainer or trainer or (trl.trainer_of(asked.given) if asked.framework == "TRL" else None)
    if chosen is None:
        raise ConvertError(f"{file}: does not say which trainer it is for. Say --trainer dpo, or grpo, or rloo.")
    if trainer is not None and trainer != chosen:
        raise ConvertError(f"--trainer={trainer}: {file} is for {chosen}. Leave --trainer out.")
    if chosen not in framework.trainers:
        raise ConvertError(
            f"{file}: is for {asked.framework}'s {chosen}, which rlexp does not have yet. It has "
            f"{', '.join(framework.trainers)} of {asked.framework}."
        )
    conv = Conversion(asked.framework, chosen, asked.given | _launcher(asked), framework.rules, gpus)
    framework.convert(conv)
    conv.settle()
    return conv


def _launcher(asked: Asked) -> dict[str, object]:
    """The arguments of accelerate or deepspeed that stand before the trainer's."""
    return {name: value for name, value in asked.launcher.items() if name not in asked.given}
