"""The arguments of transformers' TrainingArguments, which TRL, LLaMA-Factory and ms-swift have too."""

from __future__ import annotations

import math
from typing import Any

from rlexp.convert.rules import Conversion, Fate, Refused, Rule, absent, needless, one_of, other, taken, worked_out

KEEP_ALL = 1_000_000
OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw": "adamw", "sgd": "sgd"}
DECAYS = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
LOGGERS = ("wandb", "tensorboard", "trackio")
METRICS = {
    "loss": "eval/loss",
    "eval_loss": "eval/loss",
    "eval_rewards/accuracies": "eval/rewards/accuracies",
    "rewards/accuracies": "eval/rewards/accuracies",
}
BY_STAGE = {0: "zero0", 1: "zero1", 2: "zero2", 3: "zero3"}

RULES: tuple[Rule, ...] = (
    worked_out("per_device_train_batch_size", "train.micro_batch_size, train.batch_size",
               "for each GPU there; train.batch_size is that of all GPUs together, and the same on every layout"),
    worked_out("gradient_accumulation_steps", "train.batch_size",
               "train.grad_acc follows from the batch, and is not set"),
    worked_out("learning_rate", "optim.lr", ""),
    taken("max_grad_norm", "optim.max_grad_norm", default=1.0),
    taken("weight_decay", "optim.weight_decay", default=0.0),
    worked_out("adam_beta1", "optim.betas", ""),
    worked_out("adam_beta2", "optim.betas", ""),
    taken("adam_epsilon", "optim.eps", default=1e-8),
    worked_out("lr_scheduler_type", "optim.decay", "linear, cosine, constant; with warm-up or without"),
    absent("lr_scheduler_kwargs", "the rate decays to 0, by a line or a cosine", {}, {"num_cycles": 0.5}),
    worked_out("warmup_steps", "optim.warmup_steps", "our first step has a small rate, theirs the rate 0"),
    worked_out("warmup_ratio", "optim.warmup_steps", "steps, not a share of them"),
    worked_out("num_train_epochs", "train.epochs", "whole passes over the data"),
    worked_out("max_steps", "train.max_steps", ""),
    worked_out("optim", "optim", "adamw and sgd"),
    absent("optim_args optim_target_modules", "AdamW and SGD take the keys of optim only"),
    worked_out("bf16", "train.precision", "bf16 computes in bfloat16 over float32 weights"),
    absent("fp16", "fp32, bf16 and fp64 are the precisions here", False),
    absent("tf32", "there is no key for it"),
    taken("activation_checkpointing gradient_checkpointing", "memory.checkpointing", to=bool),
    needless("gradient_checkpointing_kwargs activation_checkpointing_kwargs", "the numbers are the same"),
    worked_out("deepspeed", "engine, engine.offload", "the stage of its file; rlexp writes the rest of DeepSpeed's "
               "configuration"),
    worked_out("fsdp", "engine=fsdp2", ""),
    worked_out("fsdp_config", "engine=fsdp2", "FSDP2's settings are rlexp's own"),
    taken("seed", "seed", default=42),
    absent("data_seed", "one seed decides the order of samples and all draws"),
    taken("full_determinism", "launch.deterministic", to=bool),
    taken("ddp_timeout", "launch.timeout_seconds"),
    worked_out("use_cpu", "launch.device", ""),
    worked_out("output_dir", "hydra.run.dir", "a run's folder; its trained model lies in model/ below it"),
    worked_out("save_strategy", "checkpoint.save_every", ""),
    worked_out("save_steps", "checkpoint.save_every", ""),
    worked_out("save_total_limit", "checkpoint.keep_last", ""),
    absent("save_only_model", "a checkpoint is whole, so that a run can continue", False),
    other("load_best_model_at_end", "checkpoint.keep_best",
          "the last model is exported; `python -m rlexp.export` writes that of any checkpoint"),
    worked_out("metric_for_best_model", "checkpoint.best_metric", ""),
    worked_out("greater_is_better", "checkpoint.best", ""),
    other("resume_from_checkpoint", "hydra.run.dir",
          "a run continues if it is given the folder of one that began; checkpoints of other trainers are not read"),
    worked_out("eval_strategy evaluation_strategy", "train.eval_every", ""),
    worked_out("eval_steps", "train.eval_every", ""),
    absent("eval_delay eval_on_start", "held-out rows are evaluated every train.eval_every steps", 0, False),
    needless("per_device_eval_batch_size do_train do_eval do_predict bf16_full_eval eval_accumulation_steps",
             "held-out rows are evaluated as the others are trained on"),
    worked_out("report_to", "logger", "one of wandb, tensorboard, trackio, none"),
    taken("run_name", "logger.run_name"),
    worked_out("disable_tqdm", "logger.progress", ""),
    needless("logging_steps logging_strategy logging_first_step log_level logging_dir project",
             "every step is logged, for all ranks together"),
    worked_out("dataloader_drop_last", "data.drop_last", ""),
    needless("dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor",
             "rows are tokenized once and then mapped"),
    needless("remove_unused_columns no_remove_unused_columns label_names ddp_find_unused_parameters ddp_bucket_cap_mb "
             "ddp_backend use_liger_kernel average_tokens_across_devices torch_empty_cache_steps local_rank "
             "overwrite_output_dir", "no number depends on it here"),
    absent("group_by_length", "packing takes samples in their order", False),
    absent("train_sampling_strategy", "samples are shuffled, or taken in their order (data.shuffle)", "random"),
    absent("label_smoothing_factor", "it belongs to a cross-entropy", 0, 0.0),
    absent("neftune_noise_alpha", "no noise is added to embeddings (NEFTune)"),
    absent("torch_compile torch_compile_backend torch_compile_mode", "models are not compiled", False),
    absent("auto_find_batch_size", "batches are never resized; `python -m rlexp.preflight` says what fits", False),
    absent("push_to_hub hub_model_id hub_token hub_strategy hub_private_repo hub_revision",
           "nothing is uploaded; the trained model lies in the run's folder", False),
    absent("ignore_data_skip", "a run continues with the samples that come next", False),
)  # fmt: skip


def sizes(conv: Conversion, gpus: int, *, batch: int = 8) -> tuple[int, int]:
    """Set the batch of a step from those of one GPU; return the micro-batch and the accumulation."""
    micro = conv.whole("per_device_train_batch_size", batch)
    steps = conv.whole("gradient_accumulation_steps", 1)
    why = f"{micro} × {steps} × {gpus} GPUs"
    conv.put("train.micro_batch_size", micro, "per_device_train_batch_size")
    conv.put(
        "train.batch_size", micro * steps * gpus, "per_device_train_batch_size", "gradient_accumulation_steps", why=why
    )
    return micro, steps


def length(conv: Conversion, epochs: float = 3.0) -> int | None:
    """Set how long the run is; return its steps, if they are known."""
    most = conv.get("max_steps", -1)
    if isinstance(most, int) and most > 0:
        conv.put("train.max_steps", most, "max_steps")
        conv.tell(Fate.NEEDLESS, "num_train_epochs", "max_steps decides")
        return most
    conv.tell(Fate.NEEDLESS, "max_steps", "it sets no limit")
    passes = conv.get("num_train_epochs", epochs)
    if passes != int(passes):
        conv.tell(
            Fate.OTHER,
            "num_train_epochs",
            "only whole epochs are counted here: give train.max_steps, once `python -m rlexp.data` has said how "
            "many steps an epoch has",
        )
        passes = max(1, math.floor(passes))
    conv.put("train.epochs", int(passes), "num_train_epochs")
    return None


def schedule(conv: Conversion, steps: int | None, *, decay: str = "linear") -> None:
    name = conv.get("lr_scheduler_type", decay)
    if name in DECAYS:
        conv.put("optim.decay", DECAYS[name], "lr_scheduler_type")
    else:
        conv.tell(
            Fate.ABSENT, "lr_scheduler_type", "the rate decays to 0 by a line or a cosine, or stays (optim.decay)"
        )
    ratio, warm = conv.get("warmup_ratio", 0), conv.get("warmup_steps", 0)
    argument = "warmup_steps" if warm else "warmup_ratio"
    share = warm if warm and warm < 1 else ratio if not warm else 0
    if name == "constant":
        conv.tell(Fate.NEEDLESS, "warmup_steps", "lr_scheduler_type=constant has no warm-up")
        conv.tell(Fate.NEEDLESS, "warmup_ratio", "lr_scheduler_type=constant has no warm-up")
        return
    if share and steps is None:
        conv.tell(
            Fate.OTHER,
            argument,
            "a share of the run's steps there, a number of steps here: give optim.warmup_steps, once "
            "`python -m rlexp.data` has said how many steps an epoch has",
        )
        conv.put("optim.warmup_steps", 0)
        return
    count = math.ceil(share * steps) if share and steps is not None else int(warm)
    conv.put("optim.warmup_steps", count, argument, why=f"of {steps} steps" if share else "")
    conv.tell(Fate.NEEDLESS, "warmup_ratio", "warmup_steps decides")
    conv.tell(Fate.NEEDLESS, "warmup_steps", "it is 0")


def optimizer(conv: Conversion) -> None:
    name = conv.get("optim", "adamw_torch")
    if name in OPTIMIZERS:
        conv.choose("optim", OPTIMIZERS[name], "optim")
    else:
        conv.tell(Fate.ABSENT, "optim", "adamw and sgd are the optimizers here; adamw is taken")
    betas = [conv.get("adam_beta1", 0.9), conv.get("adam_beta2", 0.999)]
    conv.put("optim.betas", betas, "adam_beta1", "adam_beta2")


def precision(conv: Conversion, *, bf16: bool) -> None:
    half = conv.get("bf16", bf16 and not conv.get("fp16", False))
    conv.put("train.precision", "bf16" if half or conv.get("fp16", False) else "fp32", "bf16")


def saving(conv: Conversion, steps: int | None, *, every: int = 500) -> None:
    if (folder := conv.get("output_dir")) is not None:
        conv.on_command_line("hydra.run.dir", folder, "output_dir")
    strategy, count = conv.get("save_strategy", "steps"), conv.get("save_steps", every)
    if strategy in ("no", False):
        conv.put("checkpoint.save_every", None, "save_strategy")
        conv.tell(Fate.NEEDLESS, "save_steps", "save_strategy=no")
    elif strategy == "steps" and isinstance(count, float) and count < 1:
        if steps is None:
            conv.tell(Fate.OTHER, "save_steps", "a share of the run's steps there; a number of steps, or a time, here")
        else:
            conv.put("checkpoint.save_every", str(math.ceil(count * steps)), "save_steps", why=f"of {steps} steps")
    elif strategy == "steps":
        conv.put("checkpoint.save_every", str(int(count)), "save_steps", "save_strategy")
    else:
        conv.tell(Fate.OTHER, "save_strategy", "checkpoint.save_every takes steps or a time: 500, 30m")
        conv.tell(Fate.NEEDLESS, "save_steps", f"save_strategy={strategy}")
    conv.put(
        "checkpoint.keep_last",
        conv.whole("save_total_limit", KEEP_ALL),
        "save_total_limit",
        why="" if conv.get("save_total_limit") else "all are kept",
    )
    if conv.get("load_best_model_at_end") or conv.get("metric_for_best_model"):
        conv.put("checkpoint.keep_best", 1)
    metric = conv.get("metric_for_best_model")
    if metric in METRICS:
        conv.put("checkpoint.best_metric", METRICS[metric], "metric_for_best_model")
    elif metric is not None:
        conv.tell(Fate.ABSENT, "metric_for_best_model", "checkpoint.best_metric takes a logged name, as eval/loss")
    if (larger := conv.get("greater_is_better")) is not None:
        conv.put("checkpoint.best", "max" if larger else "min", "greater_is_better")


def evaluates(conv: Conversion) -> bool:
    return conv.get("eval_strategy", "no") not in ("no", False)


def evaluation(conv: Conversion, steps: int | None) -> None:
    """Set how often held-out rows are evaluated. Whether there are some is the data's affair."""
    strategy = conv.get("eval_strategy", "no")
    if not evaluates(conv):
        conv.tell(Fate.NEEDLESS, "eval_strategy", "nothing is evaluated unless train.eval_every says so")
        conv.tell(Fate.NEEDLESS, "eval_steps", "nothing is evaluated")
    elif strategy == "epoch":
        conv.tell(Fate.OTHER, "eval_strategy", "train.eval_every counts steps; give those of an epoch")
        conv.tell(Fate.NEEDLESS, "eval_steps", "eval_strategy=epoch")
    else:
        count = conv.get("eval_steps", conv.given.get("logging_steps", 10))
        if isinstance(count, float) and count < 1:
            if steps is None:
                conv.tell(Fate.OTHER, "eval_steps", "a share of the run's steps there; a number of steps here")
                return
            count = math.ceil(count * steps)
        conv.put("train.eval_every", int(count), "eval_steps", "eval_strategy")


def logger(conv: Conversion) -> None:
    said = conv.get("report_to", "none")
    names = [each for each in (said if isinstance(said, list) else [said]) if each != "none"]
    known = [each for each in names if each in LOGGERS]
    conv.choose("logger", known[0] if known else "none", "report_to")
    if names != known[:1]:
        conv.done.discard("report_to")
        conv.tell(Fate.OTHER, "report_to", f"a run has one of {', '.join(LOGGERS)}, beside metrics.jsonl")
    if (quiet := conv.get("disable_tqdm")) is not None:
        conv.put("logger.progress", not quiet, "disable_tqdm")


def engine(conv: Conversion) -> None:
    """Take the stage of a DeepSpeed configuration, or FSDP."""
    config = conv.get("deepspeed")
    zero = (config or {}).get("zero_optimization", {}) if isinstance(config, dict) else {}
    if isinstance(config, str):
        stage = next((stage for stage in BY_STAGE if str(stage) in config.rpartition("/")[2]), None)
        if stage is None:
            conv.tell(Fate.OTHER, "deepspeed", "give engine=zero1, zero2 or zero3, as that file says")
        else:
            conv.choose("engine", BY_STAGE[stage], "deepspeed", why="by the file's name")
    elif zero:
        conv.choose("engine", BY_STAGE.get(int(zero.get("stage", 1)), "zero1"), "deepspeed")
        if (zero.get("offload_param") or {}).get("device") == "cpu":
            conv.put("engine.offload", "all", "deepspeed")
        elif (zero.get("offload_optimizer") or {}).get("device") == "cpu":
            conv.put("engine.offload", "optimizer", "deepspeed")
    elif conv.get("fsdp") or conv.get("fsdp_config"):
        conv.choose("engine", "fsdp2", "fsdp", "fsdp_config")


def drop_last(conv: Conversion) -> None:
    """Keep the last, short batch of an epoch, as theirs do by default."""
    conv.put("data.drop_last", bool(conv.get("dataloader_drop_last", False)), "dataloader_drop_last")


def device(conv: Conversion) -> None:
    if conv.get("use_cpu"):
        conv.put("launch.device", "cpu", "use_cpu")
    else:
        conv.tell(Fate.NEEDLESS, "use_cpu", "launch.device=auto takes the GPUs that there are")


def shared(
    conv: Conversion, *, epochs: float = 3.0, bf16: bool = False, decay: str = "linear", save: int = 500
) -> None:
    """All that follows from these arguments alone, but for the sizes."""
    steps = length(conv, epochs)
    schedule(conv, steps, decay=decay)
    optimizer(conv)
    precision(conv, bf16=bf16)
    saving(conv, steps, every=save)
    evaluation(conv, steps)
    logger(conv)
    engine(conv)
    device(conv)


def dtype_of(value: Any) -> Any:
    """Return our name of a dtype that weights are read in."""
    names = {"float32": "auto", "auto": "auto", "bfloat16": "bf16", "float16": "fp16"}
    return one_of(names, "dtype")(value)


def kernel_of(value: Any) -> Any:
    """Return our name of an attention implementation; by default rlexp takes the fastest."""
    if not isinstance(value, str):
        return Refused("it names no attention implementation")
    if value == "eager":
        return "plain"
    if "flash" in value:
        return "flash_attn_3" if "3" in value else "auto"
    return (
        "auto"
        if value in ("sdpa", "auto", "disabled")
        else Refused(f"{value} is not here; the fastest kernel is taken")
    )
