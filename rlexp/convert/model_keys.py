"""Keys of the model that several trainers have: a chat template by name, and positions beyond the native ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlexp.base import plain_json
from rlexp.convert import kinds
from rlexp.convert.conversion import Conversion
from rlexp.convert.rules import Fate, RefusedValue

# Their names of templates that write the same text as ours: `tests/files/chat_templates.json` has what each wrote.
FACTORY = {
    "chatml": "chatml", "qwen3_nothink": "chatml", "yi": "chatml", "smollm": "chatml", "llama3": "llama3",
    "qwen": "qwen", "mistral": "mistral", "ministral": "mistral_nemo", "mistral_small": "mistral_small",
    "gemma": "gemma", "gemma2": "gemma", "gemma3": "gemma", "phi": "phi3", "phi4": "phi4", "phi4_mini": "phi4_mini",
    "deepseek3": "deepseek_v3",
}  # fmt: skip
AXOLOTL = {
    "chatml": "chatml", "llama3": "llama3", "qwen_25": "qwen", "gemma3": "gemma", "gemma": "gemma", "phi_35": "phi3",
    "deepseek_v3": "deepseek_v3", "alpaca": "alpaca",
}  # fmt: skip
SWIFT = {"chatml": "chatml", "qwen3_nothinking": "chatml", "qwen2_5": "qwen", "llama3": "llama3", "phi4": "phi4",
         "deepseek_v2_5": "deepseek_v3"}  # fmt: skip


def trained(conv: Conversion, argument: str) -> None:
    """Set the model that is trained."""
    if (path := conv.text(argument)) is None:
        conv.missing(argument, "it names the model that is trained", "Qwen/Qwen3-0.6B")
    conv.put("model.path", str(path), argument)


def template(conv: Conversion, argument: str, names: Mapping[str, str], *own: str) -> None:
    """Take over a template by its name, where ours writes the same text; `own` are names of the tokenizer's."""
    name = conv.text(argument)
    if name in names:
        conv.put("model.chat_template", names[name], argument)
    elif name is None or name in own:
        conv.tell(Fate.NEEDLESS, argument, "it is the tokenizer's own")
    else:
        why = f"the tokenizer's own template is used; if it is not {name}, give a file or a name: model.chat_template"
        conv.tell(Fate.OTHER, argument, why)


def template_file(value: Any) -> Any:
    """Return the file of a template; any other text is a template, or names a tokenizer that has one."""
    if kinds.text(value).endswith((".jinja", ".jinja2")):
        return value
    return RefusedValue(
        "a template, or a tokenizer with one: write it to a file, and give model.chat_template=FILE", Fate.OTHER
    )


def tokens(value: Any) -> Any:
    """Return new tokens, which theirs may read from a file."""
    tokens = value if isinstance(value, list) else [value]
    if any(str(each).endswith(".txt") for each in tokens):
        return RefusedValue("theirs reads the tokens of this file: give them as model.add_tokens", Fate.INSTEAD)
    return tokens


def rope(conv: Conversion, argument: str, value: Any, reach: str | None = None) -> None:
    """Take over YaRN: a mapping with its factor, or its bare name, whose factor follows from data.max_length."""
    try:
        options = yaml.safe_load(value) if isinstance(value, str) and value.startswith("{") else value
    except yaml.YAMLError:
        conv.refuse(argument, "must be a mapping", 'For example: {"type": "yarn", "factor": 4.0}.')
    options = options if isinstance(options, Mapping) else {"type": value}
    kind = options.get("rope_type", options.get("type"))
    factor, native = options.get("factor"), options.get("original_max_position_embeddings")
    rest = sorted({*options} - {"rope_type", "type", "factor", "original_max_position_embeddings"})
    if kind != "yarn":
        conv.tell(Fate.ABSENT, argument, "of ways to more positions, YaRN is here (model.rope)")
    elif isinstance(factor, int | float) and factor > 1:
        parts = ["yarn", f"{factor:g}", *([str(native)] if isinstance(native, int) else [])]
        conv.put("model.rope", ":".join(parts), argument)
        if rest:
            conv.remark(Fate.OTHER, argument, ", ".join(rest), "write them into rope_parameters of config.json")
    elif factor is None and reach is not None and conv.get(reach) is not None:
        conv.put("model.rope", "yarn", argument)
    else:
        conv.tell(Fate.OTHER, argument, "give its factor: model.rope=yarn:4")


def described(model: str) -> Mapping[str, Any]:
    """Return config.json of a model that is a folder here; nothing for any other."""
    return plain_json.mapping_in(Path(model).expanduser() / "config.json") or {}
