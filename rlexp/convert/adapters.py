"""Adapters (LoRA) of other trainers, and the references that go with them: what each is here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlexp.config.schema import KINDS
from rlexp.config.schema.loss_terms import compares
from rlexp.convert import model_keys
from rlexp.convert.conversion import Conversion
from rlexp.convert.rules import UNSAID, Fate, Rule, absent, worked_out

# Words for all linear layers but the head; `[]` of ours.
ALL_LINEAR = ("all-linear", "all")
# Layers that take no adapter here: the head, and embeddings.
NO_ADAPTER = ("lm_head", "embed_tokens", "wte", "embed_in", "embed_out", "word_embeddings", "output_layer", "score",
              "all-embedding")  # fmt: skip
# The layers that peft takes where a file names none, and the models that have them, by `model_type` of config.json.
QUERIES_AND_VALUES = ("q_proj", "v_proj")
BY_PEFT: Mapping[tuple[str, ...], str] = {
    QUERIES_AND_VALUES: "llama llama4 mistral mixtral qwen2 qwen3 gemma gemma2 gemma3_text stablelm opt gptj gpt_neo",
    ("query_key_value",): "gpt_neox bloom falcon",
    ("c_attn",): "gpt2 gpt_bigcode",
    ("q_proj", "v_proj", "fc1", "fc2"): "phi",
    ("Wqkv",): "mpt",
    ("qkv_proj",): "codegen",
    ("q_proj", "k_proj", "v_proj", "o_proj"): "nemotron_h",
}
OF_FAMILIES = {family: layers for layers, families in BY_PEFT.items() for family in families.split()}

NO_DROPOUT = "no dropout (0 is used)"
QUANTIZED = "weights stay in the dtype that computes (no QLoRA): that takes more memory"
OF_QUANTIZED = "only with weights that are quantized"
OF_START = "always peft's default start"
PARAMETERS = ("target_parameters", "lora_target_parameters")
LACKING = {
    **dict.fromkeys(("use_dora", "peft_use_dora"), "no DoRA: plain LoRA is used"),
    **dict.fromkeys(PARAMETERS, "an adapter is on linear layers only"),
    **dict.fromkeys(("lorap_lr_ratio", "loraplus_lr_ratio"), "no LoRA+"),
}
ONE_REFERENCE = "the reference is the trained model without its adapter, as theirs, and no second model is loaded"
UNREAD = "an adapter of a reference model is not read: merge it into its model, and give reference.path=FOLDER"
MERGED = "the run writes the merged model at its end"
MERGE_FIRST = "merge it into its model first, and train that: model.path=FOLDER"
UNWANTED = "no adapter is asked for"
STARTS_WITHOUT = "theirs compares with the model without any adapter"
# What makes an adapter, by our keys: the names by which code that several trainers share asks for it.
SHAPE = {"rank": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "target_modules",
         "also": "modules_to_save", "rslora": "use_rslora"}  # fmt: skip
FOLDER, EVERY = "adapter_path", "lora_target_linear"


def has(conv: Conversion) -> bool:
    return "adapter" in conv.choices


def rules(
    names: Mapping[str, str], defaults: Mapping[str, Any], lacks: Mapping[str, str], *, split: str | None = None,
    **texts: str,
) -> Sequence[Rule]:  # fmt: skip
    """Return the rules of what makes an adapter, by their names and defaults, with what is said of some of our keys;
    and of what is missing, by their names and what would have it."""
    made = []
    for key in [key for key in SHAPE if key in names]:
        default, least = defaults.get(key, UNSAID), {"rank": 1, "alpha": 0, "dropout": 0}.get(key)
        text = texts.get(key, f"their default is {default:g}" if isinstance(default, int | float) else "")
        text = "; ".join(filter(None, [text, NO_DROPOUT])) if key == "dropout" else text
        apart = split if key in ("targets", "also") else None
        made.append(worked_out(names[key], f"adapter.{key}", text, default=default, alias=SHAPE[key], split=apart,
                               least=least))  # fmt: skip
    return of_adapter(*made, *(absent(name, LACKING[name], until=until) for name, until in lacks.items()))


def of_adapter(*rules: Rule) -> Sequence[Rule]:
    """Return rules of arguments that change nothing without an adapter."""
    return [replace(rule, when=has, rest=UNWANTED) for rule in rules]


def lora(
    conv: Conversion, *by: str, alpha: float | None = None, targets: tuple[str, ...] = (), folder: bool = True
) -> None:
    """Set an adapter, which the arguments `by` ask for: a new one, or the one in a folder. Where a file names no
    layers, it has `targets`."""
    conv.choose("adapter", "lora", *by)
    folders = [each for each in conv.texts(FOLDER) if each] if folder else []  # the last one holds
    if folders[:-1]:
        conv.remark(Fate.ABSENT, conv.spelled(FOLDER), folders[:-1], MERGE_FIRST)
    if folders:
        conv.put("adapter.path", folders[-1], FOLDER, why="its rank, alpha and layers are as there, its dropout is 0")
        for name in (*SHAPE.values(), EVERY):
            conv.tell(Fate.NEEDLESS, name, "the adapter's folder says it")
        return
    for name, value in (("lora_rank", conv.whole("lora_rank")), ("lora_alpha", conv.number("lora_alpha", alpha))):
        if value is None:
            conv.missing(name, f"{conv.framework} has no default", "16")
        conv.put(name.replace("lora_", "adapter."), value, name)
    conv.put("adapter.dropout", 0.0, "lora_dropout")
    if conv.number("lora_dropout", 0.0):
        conv.differs("lora_dropout", NO_DROPOUT)
    _targets(conv, targets)
    if conv.flag("use_rslora"):
        conv.put("adapter.rslora", True, "use_rslora")
    also = "modules_to_save"  # which are trained whole beside the adapter
    given = [each.rstrip(",") for each in conv.texts(also) if each]
    if words := [each for each in given if each.startswith("all-")]:
        conv.remark(Fate.ABSENT, conv.spelled(also), words, "adapter.also takes names of modules, as lm_head")
    if modules := [each for each in given if each not in words]:
        conv.put("adapter.also", modules, also)


def none(conv: Conversion, *by: str) -> None:
    """Say of an adapter's rank that it changes nothing without the arguments that ask for one."""
    if conv.get("lora_rank") and conv.name("lora_rank") and not any(map(conv.name, by)):
        why = f"without {' or '.join(by)} theirs has no adapter: all weights are trained, as there, at the given rate"
        conv.differs("lora_rank", why, Fate.INSTEAD)


def _targets(conv: Conversion, default: tuple[str, ...]) -> None:
    """Set the layers that get an adapter; all linear layers but the head are `[]` here."""
    name, every = "target_modules", conv.flag(EVERY)
    given = [each for each in conv.texts(name) if each] or [*default]
    alone = next((each for each in PARAMETERS if conv.get(each)), None)
    if not given and not every and alone:
        conv.refuse(alone, LACKING[alone], f"Name layers: {conv.spelled(name)}=[q_proj, v_proj].")
    if not given and not every:
        example = "q_proj v_proj" if conv.of_command else "[q_proj, v_proj]"
        conv.missing(name, "nothing says which layers get an adapter", example)
    layers = [each.rstrip(",") for each in given]
    heads = [each for each in layers if each in NO_ADAPTER]
    patterns = [each for each in layers if re.fullmatch(r"[\w.-]+", each) is None]
    if every or patterns or any(each in ALL_LINEAR for each in layers):
        conv.put("adapter.targets", [], name, *[EVERY] * every, why="all linear layers but the head")
    elif named := [each for each in layers if each not in heads]:
        conv.put("adapter.targets", named, name)
    else:
        conv.refuse(name, "names the head or embeddings alone, which take no adapter here", "Name linear layers too.")
    for fate, some, why in (
        (Fate.OTHER, given * (layers != given), "theirs takes the comma for a part of the name; here it is none"),
        (Fate.ABSENT, patterns, "all linear layers get an adapter: name others by adapter.targets"),
        (Fate.ABSENT, heads, "head and embeddings take no adapter here; adapter.also trains them whole"),
    ):
        if some:
            conv.remark(fate, conv.spelled(name), some, why)


def of_family(conv: Conversion) -> tuple[str, ...]:
    """Return the layers that peft takes by itself. Only a folder that is here says which family its model is of."""
    family = str(model_keys.described(str(conv.values["model.path"].value)).get("model_type") or "")
    if conv.texts("target_modules") or family in OF_FAMILIES:
        return OF_FAMILIES.get(family, QUERIES_AND_VALUES)
    known = f"and peft has none for {family}" if family else "which no config.json here says"
    conv.remark(Fate.OTHER, conv.spelled("target_modules"), None,
                f"their default depends on the model's family, {known}; q_proj and v_proj are taken, those of Llama, "
                f"Mistral, Qwen2, Qwen3 and Gemma; for another family give adapter.targets")  # fmt: skip
    return QUERIES_AND_VALUES


# ---- references ----


def compared(conv: Conversion) -> bool:
    """Return whether the chosen loss compares the policy with a reference, whatever its weight is."""
    loss = conv.chosen("loss")
    return loss == "mpo" or compares(KINDS["loss"][loss]())


def precomputed(conv: Conversion, name: str = "precompute_ref_log_probs") -> None:
    """Choose a reference that is computed once before training, where theirs is, and where one can be here."""
    loss = conv.chosen("loss")
    if not conv.flag(name):
        return
    if not compared(conv):
        conv.tell(Fate.NEEDLESS, name, f"loss={loss} compares with no reference")
    elif loss == "kto":
        conv.tell(Fate.NEEDLESS, name, "the numbers are the same: loss=kto also asks for answers to other prompts of "
                  "the train batch, so the reference is computed in each step")  # fmt: skip
    else:
        conv.choose("reference", "precompute", name)


def compare_without(conv: Conversion) -> None:
    """Compare with the model itself where training starts from an adapter in a folder, and theirs leaves it out then.
    Ours would be the adapter at the start."""
    if "adapter.path" in conv.values and compared(conv):
        conv.put("reference.path", conv.values["model.path"].value, FOLDER, why=STARTS_WITHOUT)
