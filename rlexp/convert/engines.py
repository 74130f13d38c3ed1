"""The engine and what it offloads, from a DeepSpeed configuration or the settings of FSDP."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rlexp.base import plain_json
from rlexp.convert.conversion import Conversion, ConvertError
from rlexp.convert.rules import Fate

BY_STAGE = {stage: f"zero{stage}" for stage in range(4)}
STAGE = re.compile(r"(?:zero|z|stage)[_-]?([0-3])(?!\d)", re.I)


def by_stage(conv: Conversion, name: str) -> None:
    """Choose the engine by the number of a ZeRO stage."""
    if (stage := conv.whole(name)) not in BY_STAGE:
        conv.refuse(name, "must be 0, 1, 2 or 3", "Give one of them.")
    conv.choose("engine", BY_STAGE[stage], name)


def from_deepspeed(conv: Conversion, name: str = "deepspeed") -> None:
    """Choose the engine by a DeepSpeed configuration: a mapping, its JSON text, a file that is there, or the name of a
    file."""
    value = conv.get(name)
    if not value:
        return
    config = value if isinstance(value, dict) else _written(conv, name)
    if config is not None:
        _from_mapping(conv, name, config)
    else:
        _from_name(conv, name, conv.text(name))


def _written(conv: Conversion, name: str) -> dict[str, Any] | None:
    """Return the mapping of a JSON text or of a file that is there."""
    text = conv.text(name)
    if not text.lstrip().startswith("{"):
        places = (Path(text).expanduser(), conv.folder / text)
        file = next((each for each in places if each.suffix == ".json" and each.is_file()), None)
        if file is None:
            return None
        text = file.read_text(encoding="utf-8", errors="replace")
    try:
        config = plain_json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        conv.refuse(name, "is no configuration of DeepSpeed in JSON", "Correct it, or leave it out and set engine.")
    return config


def _from_mapping(conv: Conversion, name: str, config: dict[str, Any]) -> None:
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0 if not zero else 1) if isinstance(zero, dict) else None
    if isinstance(stage, bool) or stage not in BY_STAGE:
        raise ConvertError(
            f"{conv.name(name)}: zero_optimization.stage={stage} must be 0, 1, 2 or 3. Give the stage in its place."
        )
    conv.choose("engine", BY_STAGE[int(stage)], name)
    parts = {part: _device(zero, part) for part in ("param", "optimizer")}
    if "nvme" in parts.values():
        conv.remark(Fate.OTHER, name, "offload to nvme", "to the host's memory here, not to a disk")
    _offload(conv, name, int(stage), weights=parts["param"] is not None, optimizer=parts["optimizer"] is not None)


def _device(zero: dict[str, Any], part: str) -> str | None:
    """Return where a part is offloaded to."""
    options = zero.get(f"offload_{part}")
    device = options.get("device") if isinstance(options, dict) else None
    if device is None and zero.get("cpu_offload") and part == "optimizer":
        return "cpu"  # the old key
    return None if device in (None, "none") else str(device)


def _from_name(conv: Conversion, name: str, file: str) -> None:
    """Take the stage from the name of a file that is not here: zero3.json, ds_z2_offload_config.json."""
    base = Path(file).name
    match, offloads = STAGE.search(base), "offload" in base.lower()
    if match is None:
        also = ", and engine.offload=optimizer or all" if offloads else ""
        conv.tell(Fate.OTHER, name, f"that file is not here: give engine=zero1, zero2 or zero3, as it says{also}")
        return
    stage = int(match[1])
    conv.choose("engine", BY_STAGE[stage], name, why="by the file's name")
    if offloads:
        _offload(conv, name, stage, weights=stage == 3, optimizer=True)


def offload(conv: Conversion, *, weights: str, optimizer: str) -> None:
    """Take over accelerate's arguments for a device that holds a part of the training state."""
    stage = next((stage for stage, option in BY_STAGE.items() if option == conv.chosen("engine")), 0)
    moved = {part: conv.text(part) not in (None, "none") for part in (weights, optimizer)}
    _offload(conv, weights if moved[weights] else optimizer, stage, weights=moved[weights], optimizer=moved[optimizer])


def _offload(conv: Conversion, name: str, stage: int, *, weights: bool, optimizer: bool) -> None:
    if not (weights or optimizer):
        return
    if stage == 0:
        conv.remark(Fate.ABSENT, name, "offload", "only engine=zero1, zero2 and zero3 offload")
        return
    if weights and not optimizer:
        conv.remark(Fate.OTHER, name, "offload of weights alone", "engine.offload=all moves the optimizer's state too")
    if weights and stage < 3:
        conv.remark(Fate.ABSENT, name, "offload of weights", "only engine=zero3 offloads them")
    if optimizer or stage == 3:
        conv.put("engine.offload", "all" if weights and stage == 3 else "optimizer", name)


def from_fsdp(conv: Conversion, *names: str) -> None:
    """Choose FSDP2. `fsdp_config` may turn checkpointing on, and offload, which FSDP2 does not do here."""
    given = [name for name in names if conv.get(name)]
    if not given:
        return
    conv.choose("engine", "fsdp2", *given)
    value, listed = conv.get("fsdp_config"), conv.get("fsdp")
    config = value if isinstance(value, dict) else {}
    if config.get("activation_checkpointing") or config.get("fsdp_activation_checkpointing"):
        conv.put("memory.checkpointing", True, "fsdp_config", why="activation_checkpointing")
    keys = ("cpu_offload", "fsdp_cpu_offload", "offload_params", "fsdp_offload_params")
    asked = [f"fsdp_config: {key}" for key in keys if config.get(key)]
    asked += ["fsdp: offload"] * ("offload" in (listed if isinstance(listed, list) else str(listed or "").split()))
    for name in asked[:1]:
        conv.remark(Fate.ABSENT, name, True, "only engine=zero1, zero2 and zero3 offload: engine.offload")
