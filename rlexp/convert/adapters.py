"""Adapters (LoRA) of other trainers, and the references that go with them: what each is here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlexp.config.schema import KINDS
from rlexp.config.schema.loss_terms import compares
from rlexp.convert import model_keys
from rlexp.convert.rules import Conversion, Fate, Rule, absent, worked_out

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
NO_DORA = "no DoRA: plain LoRA is used"
NO_PARAMETERS = "an adapter is on linear layers only"
ONE_RATE = "no LoRA+"
OF_START = "always peft's default start"
LACKING = {
    **dict.fromkeys(("use_dora", "peft_use_dora"), (NO_DORA, "dora")),
    **dict.fromkeys(("target_parameters", "lora_target_parameters"), (NO_PARAMETERS, "parameters")),
    **dict.fromkeys(("lorap_lr_ratio", "loraplus_lr_ratio"), (ONE_RATE, "adapter.lr_ratio")),
}
ONE_REFERENCE = "the reference is the trained model without its adapter, as theirs, and no second model is loaded"
UNREAD = "an adapter of a reference model is not read: merge it into its model, and give reference.path=FOLDER"
MERGED = "the run writes the merged model at its end"
MERGE_FIRST = "merge it into its model first, and train that: model.path=FOLDER"
UNWANTED = "no adapter is asked for"
OF_FOLDER = "the adapter's folder says it"
STARTS_WITHOUT = "theirs compares with the model without any adapter"


@dataclass(frozen=True)
class Names:
    """The names of their arguments. `every` asks for all linear layers; `rest` change nothing without an adapter."""

    rank: str = "lora_rank"
    alpha: str = "lora_alpha"
    dropout: str = "lora_dropout"
    targets: str = "target_modules"
    also: str = ""
    rslora: str = ""
    path: str = ""
    every: str = ""
    rest: str = ""

    @property
    def shape(self) -> Sequence[str]:
        """What makes an adapter, and is read from the folder of one that is there."""
        return [each for each in (self.rank, self.alpha, self.dropout, self.targets, self.also, self.rslora, self.every)
                if each]  # fmt: skip


@dataclass(frozen=True)
class Defaults:
    """Their defaults. Without a rank or an alpha, a file must have them; without targets, it names the layers."""

    rank: int | None
    alpha: float | None
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    split: str | None = None  # what separates names in one text


def rules(names: Names, *, rank: str = "", alpha: str = "", dropout: str = "", targets: str = "") -> Sequence[Rule]:
    """Return the rules that every trainer has under names of its own, with what is said of its defaults."""
    return (
        worked_out(names.rank, "adapter.rank", rank),
        worked_out(names.alpha, "adapter.alpha", alpha),
        worked_out(names.dropout, "adapter.dropout", f"{dropout}{NO_DROPOUT}"),
        worked_out(names.targets, "adapter.targets", targets),
        worked_out(names.also, "adapter.also", ""),
        worked_out(names.rslora, "adapter.rslora", ""),
        *(absent(name, LACKING[name][0], until=LACKING[name][1]) for name in names.rest.split() if name in LACKING),
    )


def lora(conv: Conversion, names: Names, defaults: Defaults, *by: str) -> None:
    """Set an adapter, which the arguments `by` ask for: a new one, or the one in a folder."""
    conv.choose("adapter", "lora", *by)
    if names.path and (folder := _folder(conv, names.path, defaults.split)) is not None:
        conv.put("adapter.path", folder, names.path, why="its rank, alpha and layers are as there, its dropout is 0")
        for name in names.shape:
            conv.tell(Fate.NEEDLESS, name, OF_FOLDER)
        return
    rank = conv.whole(names.rank, defaults.rank, least=1)
    conv.put("adapter.rank", _needed(conv, names.rank, rank), names.rank)
    alpha = conv.number(names.alpha, defaults.alpha, least=0)
    conv.put("adapter.alpha", _needed(conv, names.alpha, alpha), names.alpha)
    _dropout(conv, names.dropout, defaults.dropout)
    _targets(conv, names, defaults)
    if names.rslora and conv.flag(names.rslora):
        conv.put("adapter.rslora", True, names.rslora)
    if names.also:
        _also(conv, names.also, defaults.split)


def none(conv: Conversion, names: Names, *by: str) -> None:
    """Say of the arguments of an adapter, and of those that ask for one, that they change nothing."""
    if by and conv.get(names.rank) and not any(map(conv.name, by)):
        switch = " or ".join(by)
        conv.remark(Fate.INSTEAD, conv.said(names.rank), conv.get(names.rank), f"without {switch} theirs has no "
                    f"adapter: all weights are trained, as there, at the given rate")  # fmt: skip
    for name in (*by, *names.shape, *filter(None, [names.path]), *names.rest.split()):
        conv.tell(Fate.NEEDLESS, name, UNWANTED)


def has(conv: Conversion) -> bool:
    return "adapter" in conv.choices


def _folder(conv: Conversion, name: str, split: str | None) -> str | None:
    """Return the folder of an adapter to go on from, the last one that is named."""
    folders = [each for each in conv.texts(name, split) if each]
    if folders[:-1]:
        conv.remark(Fate.ABSENT, conv.said(name), folders[:-1], MERGE_FIRST)
    return folders[-1] if folders else None


def _needed(conv: Conversion, name: str, value: float | None) -> float:
    if value is None:
        conv.missing(name, f"{conv.framework} has no default", "16")
    return value


def _dropout(conv: Conversion, name: str, default: float) -> None:
    share = conv.number(name, default, least=0)
    conv.put("adapter.dropout", 0.0, name)
    if share:
        why = NO_DROPOUT if conv.name(name) else f"their default: {NO_DROPOUT}"
        conv.remark(Fate.OTHER, conv.said(name), share, why)


def _targets(conv: Conversion, names: Names, defaults: Defaults) -> None:
    """Set the layers that get an adapter; all linear layers but the head are `[]` here."""
    name, every = names.targets, bool(names.every) and conv.flag(names.every)
    said = [each for each in conv.texts(name, defaults.split) if each] or [*defaults.targets]
    alone = next((each for each in names.rest.split() if "parameters" in each and conv.get(each)), None)
    if not said and not every and alone:
        conv.refuse(alone, NO_PARAMETERS, f"Name layers: {name}=[q_proj, v_proj].")
    if not said and not every:
        conv.missing(
            name, "nothing says which layers get an adapter", "q_proj v_proj" if conv.of_command else "[q_proj, v_proj]"
        )
    layers = [each.rstrip(",") for each in said]
    if layers != said:
        conv.remark(Fate.OTHER, conv.said(name), said, "theirs takes the comma for a part of the name; here it is none")
    other = [each for each in layers if each in NO_ADAPTER]
    patterns = [each for each in layers if re.fullmatch(r"[\w.-]+", each) is None]
    if every or patterns or any(each in ALL_LINEAR for each in layers):
        why = "all linear layers but the head"
        conv.put("adapter.targets", [], name, *filter(None, [names.every * every]), why=why)
    elif named := [each for each in layers if each not in other]:
        conv.put("adapter.targets", named, name)
    else:
        conv.refuse(name, "names the head or embeddings alone, which take no adapter here", "Name linear layers too.")
    if patterns:
        why = "all linear layers get an adapter: name others by adapter.targets"
        conv.remark(Fate.ABSENT, conv.said(name), patterns, why)
    if other:
        why = "head and embeddings take no adapter here; adapter.also trains them whole"
        conv.remark(Fate.ABSENT, conv.said(name), other, why)


def _also(conv: Conversion, name: str, split: str | None) -> None:
    """Set the modules that are trained whole beside the adapter."""
    said = [each.rstrip(",") for each in conv.texts(name, split) if each]
    words = [each for each in said if each.startswith("all-")]
    if words:
        conv.remark(Fate.ABSENT, conv.said(name), words, "adapter.also takes names of modules, as lm_head")
    if modules := [each for each in said if each not in words]:
        conv.put("adapter.also", modules, name)


def of_family(conv: Conversion, name: str) -> tuple[str, ...]:
    """Return the layers that peft takes by itself. Only a folder that is here says which family its model is of."""
    family = _family(str(conv.values["model.path"].value))
    if conv.texts(name) or family in OF_FAMILIES:
        return OF_FAMILIES.get(family or "", QUERIES_AND_VALUES)
    known = f"and peft has none for {family}" if family else "which no config.json here says"
    why = (
        f"their default depends on the model's family, {known}; q_proj and v_proj are taken, those of Llama, Mistral, "
        f"Qwen2, Qwen3 and Gemma; for another family give adapter.targets"
    )
    conv.remark(Fate.OTHER, name, None, why)
    return QUERIES_AND_VALUES


def _family(folder: str) -> str | None:
    found = model_keys.described(folder).get("model_type")
    return str(found) if found else None


# ---- references ----


def compared(conv: Conversion) -> bool:
    """Return whether the chosen loss compares the policy with a reference, whatever its weight is."""
    loss = str(conv.choices["loss"].value)
    return loss == "mpo" or compares(KINDS["loss"][loss]())


def precomputed(conv: Conversion, name: str = "precompute_ref_log_probs") -> None:
    """Choose a reference that is computed once before training, where theirs is, and where one can be here."""
    loss = conv.choices["loss"].value
    if not conv.flag(name):
        return
    if not compared(conv):
        conv.tell(Fate.NEEDLESS, name, f"loss={loss} compares with no reference")
    elif loss == "kto":
        conv.tell(
            Fate.NEEDLESS,
            name,
            "the numbers are the same: loss=kto also asks for answers to other prompts of the train batch, so the "
            "reference is computed in each step",
        )
    else:
        conv.choose("reference", "precompute", name)


def compare_without(conv: Conversion, path: str) -> None:
    """Compare with the model itself where training starts from an adapter in a folder, and theirs leaves it out then.
    Ours would be the adapter at the start."""
    if "adapter.path" in conv.values and compared(conv):
        conv.put("reference.path", conv.values["model.path"].value, path, why=STARTS_WITHOUT)
