"""axolotl: a yaml with `rl: dpo`."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from rlexp.convert import huggingface
from rlexp.convert.rules import Conversion, ConvertError, Fate, Rule, absent, needless, taken, worked_out

TRAINERS = ("dpo",)
TOO_LONG = {"drop": "drop", "truncate": "truncate", "raise": "error"}
RING_FUNCTIONS = {"varlen_llama3": "allgather", "batch_zigzag": "zigzag", "batch_ring": "contiguous"}
# Their names of arguments that transformers has too.
RENAMED = {"num_epochs": "num_train_epochs", "lr_scheduler": "lr_scheduler_type", "optimizer": "optim"}

RULES: tuple[Rule, ...] = (
    *(rule for rule in huggingface.RULES if not {"per_device_train_batch_size", "num_train_epochs", "lr_scheduler_type",
      "optim", "run_name", "report_to", "deepspeed", "save_strategy", "eval_strategy"} & set(rule.names)),
    worked_out("base_model", "model=hf, model.path", ""),
    taken("revision_of_model", "model.revision"),
    taken("trust_remote_code", "model.trust_remote_code", to=bool),
    needless("base_model_config tokenizer_config model_type tokenizer_type", "they are those of the model's folder"),
    worked_out("chat_template", "model.chat_template", "by default the tokenizer's own"),
    absent("chat_template_jinja", "a template is a file: model.chat_template=FILE"),
    taken("chat_template_kwargs", "data.template_options"),
    absent("special_tokens", "the tokenizer's own special tokens are used", {}),
    taken("tokens", "model.add_tokens"),
    absent("adapter", "LoRA is not here: all weights are trained, with a smaller rate"),
    absent("lora_r lora_alpha lora_dropout lora_target_modules lora_target_linear lora_modules_to_save peft_use_dora",
           "LoRA is not here"),
    absent("load_in_8bit load_in_4bit", "weights are not quantized", False),
    worked_out("rl", "loss=dpo", ""),
    taken("rl_beta", "loss.beta", default=0.1),
    worked_out("trl", "loss, rollout", "its keys are those of TRL: convert a file of TRL"),
    taken("dpo_label_smoothing", "loss.label_smoothing", default=0.0),
    absent("dpo_loss_type", "sigmoid is the one preference loss here", ["sigmoid"], "sigmoid"),
    absent("dpo_loss_weights", "there is one loss", [1.0]),
    absent("dpo_use_weighting rpo_alpha dpo_use_logits_to_keep dpo_label_smoothing_mode", "it is not here", False, 0,
           0.0),
    needless("precompute_ref_log_probs dpo_padding_free dpo_use_liger_kernel", "the numbers are the same"),
    worked_out("context_parallel_size sequence_parallel_degree", "parallel.ring_size", "any layout has the same curve"),
    worked_out("ring_attn_func", "parallel.layout", ""),
    needless("heads_k_stride dp_shard_size dp_replicate_size", "the layout and the engine decide"),
    absent("tensor_parallel_size", "a model is not split across GPUs by tensor parallelism", 1),
    worked_out("micro_batch_size", "train.micro_batch_size, train.batch_size",
               "for each GPU there; of all together here"),
    worked_out("num_epochs", "train.epochs", "whole passes over the data"),
    worked_out("lr_scheduler", "optim.decay", "linear, cosine, constant"),
    absent("cosine_min_lr_ratio cosine_constant_lr_ratio", "the rate decays to 0"),
    worked_out("optimizer", "optim", "adamw and sgd"),
    worked_out("sequence_len", "data.max_length", "tokens of prompt and answer together"),
    worked_out("excess_length_strategy", "data.too_long", ""),
    taken("sample_packing", "data.packing", default=False, to=bool),
    needless("eval_sample_packing pad_to_sequence_len", "held-out rows are packed as the others"),
    worked_out("datasets", "data=hf, data.path or data.sources", ""),
    absent("test_datasets", "name held-out rows by data.eval_path"),
    worked_out("val_set_size", "data.eval_size", "a number of rows"),
    needless("dataset_prepared_path dataset_processes dataset_exact_deduplication", "rows are tokenized once and kept"),
    absent("evals_per_epoch saves_per_epoch", "steps or times, not shares of an epoch: train.eval_every, "
           "checkpoint.save_every",
           0),
    needless("flash_attention attn_implementation sdp_attention eager_attention xformers_attention",
             "the fastest kernel is taken"),
    worked_out("deepspeed", "engine, engine.offload", "the stage of its file"),
    worked_out("fsdp_version", "engine=fsdp2", ""),
    absent("activation_offloading", "activations stay on the GPU", False),
    worked_out("wandb_project", "logger=wandb, logger.project", ""),
    taken("wandb_entity", "logger.entity", to=lambda value: value or None),
    taken("wandb_name", "logger.run_name"),
    needless("wandb_watch wandb_log_model wandb_run_id strict plugins special auto_resume_from_checkpoints",
             "no number depends on it"),
    worked_out("save_strategy", "checkpoint.save_every", ""),
    worked_out("eval_strategy", "train.eval_every", ""),
    worked_out("report_to", "logger", ""),
)  # fmt: skip


def convert(conv: Conversion) -> None:
    _like_transformers(conv)
    gpus = conv.gpus
    if gpus is None:
        raise ConvertError(
            "micro_batch_size: is the batch of one GPU, and the file does not say how many. Say --gpus=8."
        )
    ring = conv.whole("context_parallel_size", 1)
    _sizes(conv, gpus, ring)
    steps = huggingface.length(conv, 1.0)
    huggingface.schedule(conv, steps, decay="cosine")
    huggingface.optimizer(conv)
    huggingface.precision(conv, bf16=True)
    huggingface.saving(conv, steps)
    huggingface.evaluation(conv, steps)
    huggingface.device(conv)
    huggingface.drop_last(conv)
    _engine(conv)
    if conv.get("learning_rate") is None:
        raise ConvertError("learning_rate: is missing. Give it one.")
    conv.put("optim.lr", conv.get("learning_rate"), "learning_rate")
    conv.choose("model", "hf")
    conv.put("model.path", conv.get("base_model"), "base_model")
    if (template := conv.get("chat_template")) not in (None, "tokenizer_default"):
        conv.tell(
            Fate.OTHER,
            "chat_template",
            f"the tokenizer's own template is used; if it is not {template}, give a file: model.chat_template=FILE",
        )
    conv.tell(Fate.NEEDLESS, "chat_template", "it is the tokenizer's own")
    conv.choose("loss", "dpo", "rl")
    _data(conv)
    _logger(conv)


def _like_transformers(conv: Conversion) -> None:
    """Let arguments that have another name here be found by the name that transformers has for them."""
    for theirs, general in RENAMED.items():
        conv.by_name[general] = conv.by_name[theirs]
    if conv.given.get("bf16") == "auto":
        conv.given = {**conv.given, "bf16": True}


def _sizes(conv: Conversion, gpus: int, ring: int) -> None:
    micro, steps = conv.whole("micro_batch_size", 1), conv.whole("gradient_accumulation_steps", 1)
    if gpus % ring:
        raise ConvertError(f"context_parallel_size={ring}: does not divide --gpus={gpus}.")
    conv.put("launch.nproc", gpus, why="--gpus")
    conv.put("parallel.ring_size", ring, "context_parallel_size")
    if (function := conv.get("ring_attn_func")) is not None and ring > 1:
        conv.put("parallel.layout", RING_FUNCTIONS.get(str(function), "zigzag"), "ring_attn_func")
    conv.tell(Fate.NEEDLESS, "ring_attn_func", "there is no ring")
    conv.put("train.micro_batch_size", micro, "micro_batch_size")
    conv.put(
        "train.batch_size",
        micro * steps * gpus // ring,
        "micro_batch_size",
        "gradient_accumulation_steps",
        why=f"{micro} × {steps} × {gpus} GPUs / ring of {ring}",
    )


def _engine(conv: Conversion) -> None:
    if conv.get("deepspeed"):
        huggingface.engine(conv)
        if "offload" in str(conv.get("deepspeed")):
            conv.put("engine.offload", "all" if "all" in str(conv.get("deepspeed")) else "optimizer", "deepspeed")
    elif conv.get("fsdp") or conv.get("fsdp_config") or conv.get("fsdp_version"):
        conv.choose("engine", "fsdp2", "fsdp", "fsdp_config", "fsdp_version")


def _data(conv: Conversion) -> None:
    conv.choose("data", "hf")
    sources: list[dict[str, Any]] = conv.get("datasets") or []
    if not sources:
        raise ConvertError("datasets: is missing, what is trained on.")
    for number, source in enumerate(sources, start=1):
        key = "data" if len(sources) == 1 else f"data.sources.source{number}"
        files = source.get("data_files")
        conv.put(
            f"{key}.path",
            files
            if files and source.get("ds_type") in ("json", "parquet", None) and PurePosixPath(str(files)).suffix
            else source.get("path"),
            "datasets",
        )
        for theirs, ours in (
            ("name", "subset"),
            ("split", "split"),
            ("revision", "revision"),
            ("field_messages", "columns.prompt"),
            ("field_chosen", "columns.chosen"),
            ("field_rejected", "columns.rejected"),
        ):
            value = source.get(theirs)
            if value is not None and value != ours.rpartition(".")[2]:
                conv.put(f"{key}.{ours}", value, "datasets")
        known = {
            "path",
            "data_files",
            "ds_type",
            "name",
            "split",
            "revision",
            "field_messages",
            "field_chosen",
            "field_rejected",
            "type",
            "roles",
            "message_property_mappings",
        }
        for name in source.keys() - known:
            conv.remark(Fate.ABSENT, f"datasets: {name}", source[name], "a source has no key of this kind")
        if not str(source.get("type", "chat_template.default")).startswith("chat_template"):
            conv.remark(Fate.OTHER, "datasets: type", source["type"], "rows are written by the tokenizer's template")
    conv.put("data.max_length", conv.whole("sequence_len", 512), "sequence_len")
    conv.put(
        "data.too_long", TOO_LONG.get(str(conv.get("excess_length_strategy", "drop")), "drop"), "excess_length_strategy"
    )
    held_out = conv.get("val_set_size", 0)
    if held_out >= 1:
        conv.put("data.eval_size", int(held_out), "val_set_size")
    elif held_out:
        conv.tell(Fate.OTHER, "val_set_size", "a share of the rows there; data.eval_size is a number of rows")
        conv.values.pop("train.eval_every", None)
    conv.tell(Fate.NEEDLESS, "val_set_size", "no rows are held out")


def _logger(conv: Conversion) -> None:
    project = conv.get("wandb_project")
    conv.choose("logger", "wandb" if project else "none", "wandb_project")
    if project:
        conv.put("logger.project", project, "wandb_project")
