"""LLaMA-Factory: a yaml with `stage: dpo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlexp.convert import huggingface
from rlexp.convert.rules import Conversion, ConvertError, Fate, Rule, absent, needless, taken, worked_out

TRAINERS = ("dpo",)

RULES: tuple[Rule, ...] = (
    *huggingface.RULES,
    worked_out("stage", "loss=dpo", ""),
    worked_out("model_name_or_path", "model=hf, model.path", ""),
    taken("trust_remote_code", "model.trust_remote_code", to=bool),
    absent("ref_model", "the reference is the model at the start"),
    absent("finetuning_type", "all weights are trained: LoRA is not here, and a full fine-tuning wants a smaller rate",
           "full"),
    absent("lora_rank lora_alpha lora_dropout lora_target use_rslora use_dora additional_target loraplus_lr_ratio",
           "LoRA is not here"),
    absent("quantization_bit quantization_method", "weights are not quantized"),
    taken("pref_beta", "loss.beta", default=0.1),
    absent("pref_loss", "sigmoid is the one preference loss here", "sigmoid"),
    taken("dpo_label_smoothing", "loss.label_smoothing", default=0.0),
    absent("pref_ftx pref_bco_weight ld_alpha", "no other loss is added", 0, 0.0),
    worked_out("dataset", "data=hf, data.path or data.sources", "by dataset_info.json"),
    worked_out("dataset_dir", "data.path", ""),
    absent("eval_dataset", "name held-out rows by data.eval_path"),
    worked_out("val_size", "data.eval_size", "a number of rows"),
    worked_out("template", "model.chat_template", "by default the tokenizer's own"),
    taken("default_system", "data.system"),
    taken("cutoff_len", "data.max_length", "tokens of prompt and answer together", default=2048),
    absent("max_samples", "cut a file, or take a part of a split: 'data.split=\"train[:1000]\"'"),
    absent("mix_strategy interleave_probs", "sources with data.sources.NAME.weight", "concat"),
    taken("preprocessing_num_workers", "data.workers"),
    needless("packing neat_packing overwrite_cache plot_loss flash_attn enable_liger_kernel tokenized_path",
             "no number depends on it here"),
    absent("pure_bf16", "weights that are trained are float32; train.precision=bf16 computes in bfloat16", False),
    worked_out("disable_gradient_checkpointing", "memory.checkpointing", ""),
    absent("cp_mode cp_size", "a ring: parallel.ring_size", 1),
)  # fmt: skip


def convert(conv: Conversion) -> None:
    if conv.gpus is None:
        raise ConvertError(
            "per_device_train_batch_size: is the batch of one GPU, and the file does not say how many. Say --gpus=8."
        )
    conv.put("launch.nproc", conv.gpus, why="--gpus")
    huggingface.sizes(conv, conv.gpus)
    huggingface.shared(conv)
    huggingface.drop_last(conv)
    conv.put("optim.lr", conv.get("learning_rate", 5e-5), "learning_rate")
    conv.put(
        "memory.checkpointing", not conv.get("disable_gradient_checkpointing", False), "disable_gradient_checkpointing"
    )
    conv.choose("model", "hf")
    conv.put("model.path", conv.get("model_name_or_path"), "model_name_or_path")
    conv.tell(
        Fate.OTHER, "template", "the tokenizer's own template is used; another is a file: model.chat_template=FILE"
    )
    conv.choose("loss", "dpo", "stage")
    if "offload" in str(conv.get("deepspeed", "")):
        conv.put("engine.offload", "all" if conv.choices["engine"].value == "zero3" else "optimizer", "deepspeed")
    _data(conv)


def _data(conv: Conversion) -> None:
    conv.choose("data", "hf")
    said = conv.get("dataset")
    if said is None:
        raise ConvertError("dataset: is missing, what is trained on.")
    folder = Path(str(conv.get("dataset_dir", "data")))
    names = [each.strip() for each in (said if isinstance(said, list) else str(said).split(","))]
    known = _described(folder)
    for number, name in enumerate(names, start=1):
        key = "data" if len(names) == 1 else f"data.sources.source{number}"
        described = known.get(name)
        if described is None:
            raise ConvertError(
                f"dataset={name}: is a name in {folder}/dataset_info.json, and there is none here. Run this where "
                f"that file "
                f"is, or give dataset_dir."
            )
        file = described.get("file_name")
        conv.put(f"{key}.path", str(folder / file) if file else described.get("hf_hub_url"), "dataset", "dataset_dir")
        for theirs, ours in (("subset", "subset"), ("split", "split")):
            if described.get(theirs) and not file:
                conv.put(f"{key}.{ours}", described[theirs], "dataset")
        for theirs, column in described.get("columns", {}).items():
            ours = {"messages": "prompt", "query": "input"}.get(theirs, theirs)
            if column != ours and ours in ("prompt", "chosen", "rejected", "input", "system", "tools"):
                conv.put(f"{key}.columns.{ours}", column, "dataset")
    conv.put("data.too_long", "truncate", why="another part is cut than by theirs: docs/data.md")
    held_out = conv.get("val_size", 0)
    if held_out >= 1:
        conv.put("data.eval_size", int(held_out), "val_size")
    elif held_out:
        conv.tell(Fate.OTHER, "val_size", "a share of the rows there; data.eval_size is a number of rows")
        conv.values.pop("train.eval_every", None)
    conv.tell(Fate.NEEDLESS, "val_size", "no rows are held out")


def _described(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        described = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return described if isinstance(described, dict) else {}
