"""The README's table of what rlexp does and does not do yet. The left part is made of the schema."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlexp.config.schema import KINDS, EngineName, LayoutName, LoggerName, OptimName, RolloutEngine
from rlexp.config.schema.losses import PolicyLossConfig
from tests.helpers.keys.defaults import options_of
from tests.helpers.paths import ROOT

README = ROOT / "README.md"
BEGIN, END = "<!-- abilities: begin -->\n", "<!-- abilities: end -->\n"
UNNAMED = ("tiny", "hf")  # the options of `model` that name no model
READ = ("jsonl", "hf")  # the options of `data` that read rows


@dataclass(frozen=True)
class Ability:
    what: str
    today: str
    not_yet: dict[str, str]  # what is missing → the option or part of a key that it would bring, or ""


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def abilities(conf: Path = ROOT / "conf") -> list[Ability]:
    """Return the rows of the table, from the options that there are."""
    policies = [name for name, kind in KINDS["loss"].items() if issubclass(kind, PolicyLossConfig)]
    pairs = [name for name in KINDS["loss"] if name not in policies]
    named = [name for name in options_of(conf / "model") if name not in UNNAMED]
    return [
        Ability("preference losses", f"{quoted(pairs)}, with label smoothing",
                {"IPO": "loss=ipo", "SimPO": "loss=simpo", "ORPO": "loss=orpo", "KTO": "loss=kto",
                 "a supervised term": "sft_weight"}),
        Ability("reinforcement learning", quoted(policies), {}),
        Ability("other training", "none", {"supervised fine-tuning": "loss=sft", "reward models": "loss=reward"}),
        Ability("trained weights", "all parameters; `model.freeze` excludes some",
                {"LoRA": "adapter", "QLoRA": "quant"}),
        Ability("models", f"[most causal decoders](docs/models.md#which-models-work), {len(named)} of them by name: "
                "Llama, Qwen 2.5 and 3, Mistral, Phi-4 mini, SmolLM …",
                {"sliding windows (Gemma 3)": "", "soft-capped scores (Gemma 2)": "", "attention sinks (gpt-oss)": "",
                 "Mamba": "", "images": "image"}),
        Ability("engines", quoted(each.value for each in EngineName),
                {"tensor and pipeline parallelism": "tensor_parallel"}),
        Ability("layouts of a ring", quoted(each.value for each in LayoutName if each is not LayoutName.auto)
                + "; `auto` takes the fastest", {}),
        Ability("optimizers", quoted(each.value for each in OptimName), {}),
        Ability("answers are drawn by", quoted(each.value for each in RolloutEngine), {"SGLang": "sglang"}),
        Ability("rewards", quoted(KINDS["reward"]), {}),
        Ability("rows", "JSON, JSON lines, Parquet; folders and the Hugging Face hub "
                f"({quoted(name for name in KINDS['data'] if name in READ)}), generated rows "
                f"({quoted(name for name in KINDS['data'] if name not in READ)})",
                {"images and audio": "image"}),
        Ability("metrics go to", "`metrics.jsonl`, and " + quoted(each.value for each in LoggerName
                if each is not LoggerName.none), {}),
        Ability("GPUs", "the code is written, and checked on CPUs and on fake tensors",
                {"**no GPU has run it yet**": ""}),
    ]  # fmt: skip


def table(rows: Iterable[Ability]) -> str:
    lines = ["| | today | not yet |", "| --- | --- | --- |"]
    lines += [f"| {row.what} | {row.today} | {', '.join(row.not_yet)} |" for row in rows]
    return "\n".join(lines) + "\n"


def readme(file: Path = README) -> str:
    """Return the README with the table of this schema."""
    head, rest = file.read_text(encoding="utf-8").split(BEGIN)
    return head + BEGIN + table(abilities()) + END + rest.partition(END)[2]
