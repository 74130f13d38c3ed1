"""The arguments of transformers' TrainingArguments, which TRL, LLaMA-Factory and ms-swift have too."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any

from rlexp.config.schema.bounds import WEEK
from rlexp.convert import engines
from rlexp.convert.rules import Conversion, ConvertError, Fate, Rule, absent, needless, one_of, other, taken, worked_out

KEEP_ALL = 1_000_000
OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw": "adamw", "sgd": "sgd"}
DECAYS = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
TO_A_LEAST = ("cosine_with_min_lr", "cosine_warmup_with_min_lr")  # a cosine that ends above 0
LOGGERS = ("wandb", "tensorboard", "trackio")
METRICS = {
    "loss": "eval/loss",
    "eval_loss": "eval/loss",
    "eval_rewards/accuracies": "eval/rewards/accuracies",
    "rewards/accuracies": "eval/rewards/accuracies",
    "eval_accuracy": "eval/rewards/accuracies",
    "accuracy": "eval/rewards/accuracies",
    "eval_mean_token_accuracy": "eval/mean_token_accuracy",
    "mean_token_accuracy": "eval/mean_token_accuracy",
}


class HeldOut(Enum):
    """Rows to evaluate on."""

    NONE = "none"
    ROWS = "rows"
    SHARE = "share"  # as many as a share of the rows is: unknown here


LOGGED = "every step is logged, for all ranks together"
NO_WARMUP = "lr_scheduler_type=constant has no warm-up"
NO_EVALUATION = "nothing is evaluated, or another argument decides"
RULES: tuple[Rule, ...] = (
    worked_out("per_device_train_batch_size", "train.micro_batch_size, train.batch_size", "samples of one GPU there; "
               "here train.micro_batch_size has those of one ring, and train.batch_size those of a whole step"),
    worked_out("gradient_accumulation_steps", "train.batch_size",
               "train.grad_acc follows from the batch, and is not set"),
    worked_out("learning_rate", "optim.lr", ""),
    taken("max_grad_norm", "optim.max_grad_norm", default=1.0),
    taken("weight_decay", "optim.weight_decay", default=0.0),
    worked_out("adam_beta1", "optim.betas", ""),
    worked_out("adam_beta2", "optim.betas", ""),
    taken("adam_epsilon", "optim.eps", default=1e-8),
    worked_out("lr_scheduler_type", "optim.decay", "linear, cosine, constant; with warm-up or without"),
    absent("lr_scheduler_kwargs", "the rate is constant, or decays to 0 by a line or a cosine", {"num_cycles": 0.5},
           until="min_lr"),
    worked_out("warmup_steps", "optim.warmup_steps", "the first step has a small rate here, and the rate 0 there",
               NO_WARMUP),
    worked_out("warmup_ratio", "optim.warmup_steps", "a number of steps, not a share of them", NO_WARMUP),
    worked_out("num_train_epochs", "train.epochs", "whole passes over the data", "max_steps decides"),
    worked_out("max_steps", "train.max_steps", "", "it sets no limit"),
    worked_out("optim", "optim", "adamw and sgd", until="optim=muon optim=adafactor optim=adamw_8bit"),
    absent("optim_args optim_target_modules", "AdamW and SGD take the keys of optim only"),
    worked_out("bf16", "train.precision", "bf16 computes in bfloat16; the weights that are trained stay float32"),
    absent("fp16", "fp32, bf16 and fp64 are the precisions here"),
    absent("tf32", "there is no key for it", until="tf32"),
    taken("activation_checkpointing gradient_checkpointing", "memory.checkpointing"),
    needless("gradient_checkpointing_kwargs activation_checkpointing_kwargs", "the numbers are the same"),
    worked_out("deepspeed", "engine, engine.offload", "the ZeRO stage of your file chooses the engine; rlexp writes "
               "the rest of DeepSpeed's configuration itself"),
    worked_out("fsdp", "engine=fsdp2", "", "deepspeed decides"),
    worked_out("fsdp_config", "engine=fsdp2", "its other settings are not translated: rlexp chooses FSDP2's settings",
               "deepspeed decides"),
    taken("seed", "seed", default=42),
    absent("data_seed", "one seed decides the order of samples and all draws"),
    taken("full_determinism", "launch.deterministic"),
    taken("ddp_timeout", "launch.timeout_seconds", f"at most {WEEK} s, a week",
          to=lambda value: min(value, WEEK) if isinstance(value, int | float) else value),
    worked_out("use_cpu", "launch.device", ""),
    worked_out("output_dir", "hydra.run.dir", "a run's folder; its trained model lies in model/ below it"),
    worked_out("save_strategy", "checkpoint.save_every", "", "save_steps decides"),
    worked_out("save_steps", "checkpoint.save_every", "", "save_strategy decides"),
    worked_out("save_total_limit", "checkpoint.keep_last", ""),
    absent("save_only_model", "a checkpoint is whole, so that a run can continue"),
    other("load_best_model_at_end", "checkpoint.keep_best",
          "the last model is exported; `python -m rlexp.export` writes that of any checkpoint"),
    worked_out("metric_for_best_model", "checkpoint.best_metric", "", "nothing is evaluated"),
    worked_out("greater_is_better", "checkpoint.best", "", "nothing is evaluated"),
    other("resume_from_checkpoint", "hydra.run.dir",
          "a run continues if it is given the folder of one that began; checkpoints of other trainers are not read"),
    worked_out("eval_strategy evaluation_strategy", "train.eval_every", "", NO_EVALUATION),
    worked_out("eval_steps", "train.eval_every", "", NO_EVALUATION),
    absent("eval_delay", "held-out rows are evaluated every train.eval_every steps"),
    worked_out("eval_on_start", "eval.before_training", "", "no rows are held out"),
    needless("per_device_eval_batch_size do_train do_eval do_predict bf16_full_eval eval_accumulation_steps",
             "held-out rows are evaluated as the others are trained on"),
    worked_out("report_to", "logger", "one of wandb, tensorboard, trackio, none"),
    taken("run_name", "logger.run_name"),
    worked_out("disable_tqdm", "logger.progress", ""),
    needless("logging_steps", LOGGED),
    needless("logging_strategy logging_first_step log_level logging_dir project log_level_replica log_on_each_node "
             "logging_nan_inf_filter include_num_input_tokens_seen debug skip_memory_metrics trackio_space_id "
             "trackio_bucket_id trackio_static_space_id", LOGGED),
    worked_out("dataloader_drop_last", "data.drop_last", "", "a rollout has whole train batches"),
    needless("dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor",
             "rows are tokenized once and then mapped"),
    needless("remove_unused_columns no_remove_unused_columns label_names ddp_find_unused_parameters ddp_bucket_cap_mb "
             "ddp_backend use_liger_kernel average_tokens_across_devices torch_empty_cache_steps local_rank "
             "overwrite_output_dir", "no number depends on it here"),
    absent("group_by_length", "packing takes samples in their order"),
    taken("train_sampling_strategy", "data.shuffle", "random is true, sequential is false",
          to=one_of({"random": True, "sequential": False}, "the order")),
    absent("label_smoothing_factor", "no label of a token is smoothed"),
    absent("neftune_noise_alpha", "no noise is added to embeddings (NEFTune)", until="neftune"),
    absent("torch_compile torch_compile_backend torch_compile_mode", "models are not compiled", until="compile"),
    absent("auto_find_batch_size", "batches are never resized; `python -m rlexp.preflight` says what fits"),
    absent("push_to_hub hub_model_id hub_token hub_strategy hub_private_repo hub_revision",
           "nothing is uploaded; the trained model lies in the run's folder", until="hub"),
    needless("dataloader_in_order dataloader_multiprocessing_context ddp_broadcast_buffers ddp_static_graph "
             "save_on_each_node enable_jit_checkpoint restore_callback_states_from_checkpoint use_cache "
             "length_column_name hub_always_push liger_kernel_config fp16_full_eval prediction_loss_only "
             "eval_do_concat_batches eval_use_gather_object batch_eval_metrics include_for_metrics",
             "no number depends on it here"),
    absent("accelerator_config", "each replica takes whole micro-batches of the train batch"),
    absent("parallelism_config", "a ring: parallel.ring_size"),
    absent("ignore_data_skip", "a run continues with the samples that come next"),
)  # fmt: skip


def sizes(
    conv: Conversion, gpus: int, *, batch: int = 8, name: str = "per_device_train_batch_size", ring: int = 1,
    ring_name: str = "sequence_parallel_size", fill: int = 0,
) -> tuple[int, int]:  # fmt: skip
    """Set the batch of a step from the batch of one GPU; return the micro-batch and the accumulation. Where none is
    given, the accumulation is the one that fills a batch of `fill` samples."""
    if gpus % ring:
        raise ConvertError(
            f"{conv.name(ring_name)}={ring}: does not divide the {gpus} GPUs. Give a size that does, or another --gpus."
        )
    micro = conv.whole(name, batch, least=1)
    replicas = gpus // ring
    steps = conv.whole("gradient_accumulation_steps", max(1, math.ceil(fill / (micro * replicas))), least=1)
    conv.put("train.micro_batch_size", micro, name)
    shared = f" / ring of {ring}" if ring > 1 else ""
    why = f"{micro} × {steps} × {gpus} GPUs{shared}"
    conv.put("train.batch_size", micro * steps * replicas, name, "gradient_accumulation_steps", why=why)
    return micro, steps


def length(conv: Conversion, epochs: float = 3.0) -> int | None:
    """Set how long the run is; return its steps, if they are known."""
    most = int(conv.whole("max_steps", -1))
    if most > 0:
        conv.put("train.max_steps", most, "max_steps")
        return most
    passes = conv.number("num_train_epochs", epochs, least=0)
    if passes != int(passes):
        conv.tell(Fate.OTHER, "num_train_epochs",
                  "only whole epochs are counted here: give train.max_steps, once `python -m rlexp.data` has said how "
                  "many steps an epoch has")  # fmt: skip
        passes = max(1, math.floor(passes))
    conv.put("train.epochs", int(passes), "num_train_epochs")
    return None


def schedule(
    conv: Conversion, steps: int | None, *, decay: str = "linear", rounded: Callable[[float], int] = math.ceil,
    short: bool = False,
) -> None:  # fmt: skip
    """Set the decay and the warm-up. `short`: without either argument there is axolotl's own warm-up."""
    name = conv.text("lr_scheduler_type", decay)
    if name in DECAYS or name in TO_A_LEAST:
        conv.put("optim.decay", DECAYS.get(name, "cosine"), "lr_scheduler_type")
    else:
        conv.tell(
            Fate.INSTEAD, "lr_scheduler_type", "by a line or a cosine to 0, or constant: a line is taken (optim.decay)"
        )
    if name in TO_A_LEAST:
        conv.remark(Fate.OTHER, conv.said("lr_scheduler_type"), name, "the rate decays to 0 here, not to a least rate")
    ratio, warm = conv.number("warmup_ratio", 0, least=0), conv.number("warmup_steps", 0, least=0)
    if short and conv.get("warmup_ratio") is None and conv.get("warmup_steps") is None and name != "constant":
        _short_warmup(conv, steps)
    elif name != "constant":
        _warmup(conv, steps, ratio, warm, rounded)


def _warmup(conv: Conversion, steps: int | None, ratio: float, warm: float, rounded: Callable[[float], int]) -> None:
    argument = "warmup_steps" if warm else "warmup_ratio"
    share = warm if warm and warm < 1 else ratio if not warm else 0
    if share and steps is None:
        conv.tell(Fate.OTHER, argument,
                  "a share of the run's steps there, a number of steps here: give optim.warmup_steps, once "
                  "`python -m rlexp.data` has said how many steps an epoch has")  # fmt: skip
        conv.put("optim.warmup_steps", 0)
    else:
        count = rounded(share * steps) if share and steps is not None else int(warm)
        conv.put("optim.warmup_steps", count, argument, why=f"of {steps} steps" if share else "")


def _short_warmup(conv: Conversion, steps: int | None) -> None:
    """axolotl's: 3 % of the steps, at most 100, and 2 in place of 1."""
    if steps is not None:
        count = min(int(0.03 * steps), 100)
        conv.put("optim.warmup_steps", 2 if count == 1 else count, "warmup_steps", why=f"3 % of {steps} steps")
        return
    conv.put("optim.warmup_steps", 0)
    conv.remark(Fate.OTHER, "warmup_steps", "3 %, at most 100",
                "their default, a share of the run's steps: give optim.warmup_steps, once `python -m rlexp.data` has "
                "said how many steps an epoch has")  # fmt: skip


def optimizer(conv: Conversion, betas: tuple[float, float] = (0.9, 0.999)) -> None:
    name = conv.text("optim", "adamw_torch")
    if name in OPTIMIZERS:
        conv.choose("optim", OPTIMIZERS[name], "optim")
    else:
        fate = Fate.ABSENT if "adamw" in name else Fate.INSTEAD  # of 8 bits, or in pages: the same rule
        conv.tell(fate, "optim", "adamw and sgd are the optimizers here, in float32; adamw is taken")
    first, second = conv.number("adam_beta1", betas[0]), conv.number("adam_beta2", betas[1])
    conv.put("optim.betas", [first, second], "adam_beta1", "adam_beta2")


def precision(conv: Conversion, *, bf16: bool, name: str = "bf16") -> None:
    """Set the precision: of `bf16`, else of the argument that `name` says has a default."""
    half = conv.flag("bf16", bf16 and not conv.flag("fp16")) or conv.flag("fp16")
    conv.put("train.precision", "bf16" if half else "fp32", "bf16", *([] if name == "bf16" else [name]))


def saving(conv: Conversion, steps: int | None, *, strategy: str = "steps", keep: int | None = None) -> None:
    """Set when checkpoints are saved, and how many are kept; None: all."""
    if (folder := conv.text("output_dir")) is not None:
        conv.on_command_line("hydra.run.dir", folder, "output_dir")
    said, count = conv.get("save_strategy", strategy), conv.number("save_steps", 500, least=0)
    if said in ("no", False):
        conv.put("checkpoint.save_every", None, "save_strategy")
    elif said == "steps" and 0 < count < 1:
        if steps is None:
            conv.tell(Fate.OTHER, "save_steps", "a share of the run's steps there; a number of steps, or a time, here")
        else:
            every = str(math.ceil(count * steps))
            conv.put("checkpoint.save_every", every, "save_steps", "save_strategy", why=f"of {steps} steps")
    elif said == "steps":
        conv.put("checkpoint.save_every", str(int(count)), "save_steps", "save_strategy")
    else:
        why = "checkpoint.save_every takes steps or a time: 500, 30m"
        if conv.name("save_strategy") is None:
            conv.remark(Fate.OTHER, "save_strategy", said, f"their default; {why}")
        conv.tell(Fate.OTHER, "save_strategy", why)
    limit = int(conv.whole("save_total_limit", keep or 0))
    kept = limit if limit > 0 else keep or KEEP_ALL
    conv.put("checkpoint.keep_last", kept, "save_total_limit", why="all are kept" if kept == KEEP_ALL else "")
    _best(conv)


def _best(conv: Conversion) -> None:
    metric = conv.text("metric_for_best_model")
    if conv.flag("load_best_model_at_end") or metric in METRICS:
        conv.put("checkpoint.keep_best", 1)
    if metric in METRICS:
        conv.put("checkpoint.best_metric", METRICS[metric], "metric_for_best_model")
    elif metric is not None:
        conv.tell(Fate.ABSENT, "metric_for_best_model", "checkpoint.best_metric takes a logged name, as eval/loss")
    if conv.get("greater_is_better") is not None:
        conv.put("checkpoint.best", "max" if conv.flag("greater_is_better") else "min", "greater_is_better")


def evaluates(conv: Conversion, strategy: str = "no") -> bool:
    return conv.get("eval_strategy", strategy) not in ("no", False)


def held_out(conv: Conversion, name: str, *, share: bool = False) -> HeldOut:
    """Hold out as many rows as an argument says. Less than 1 is a share of them, and so is all with `share`."""
    size = conv.number(name, 0, least=0)
    if size >= 1 and not share:
        conv.put("data.eval_size", conv.whole(name, 0), name)
        return HeldOut.ROWS
    if size:
        conv.tell(
            Fate.OTHER,
            name,
            "a share of the rows there, a number of rows here: give data.eval_size=N, and train.eval_every",
        )
        return HeldOut.SHARE
    return HeldOut.NONE


def evaluation(
    conv: Conversion, steps: int | None, rows: HeldOut, *, strategy: str = "no", every: float | None = None
) -> None:
    """Set how often held-out rows are evaluated. `every` is the default of their eval_steps."""
    said = conv.get("eval_strategy", strategy)
    count = conv.number("eval_steps", every if every is not None else conv.number("logging_steps", 10), least=0)
    if not evaluates(conv, strategy) or rows is HeldOut.NONE:
        pass
    elif rows is HeldOut.SHARE:
        conv.tell(Fate.OTHER, "eval_steps", "give train.eval_every, once data.eval_size holds out rows")
        conv.tell(Fate.OTHER, "eval_strategy", "give train.eval_every, once data.eval_size holds out rows")
    elif said == "epoch":
        conv.tell(Fate.OTHER, "eval_strategy", "train.eval_every counts steps; give as many as an epoch has")
    elif count < 1 and steps is None:
        conv.tell(Fate.OTHER, "eval_steps", "a share of the run's steps there; a number of steps here")
    else:
        number = math.ceil(count * (steps or 1)) if count < 1 else int(count)
        conv.put("train.eval_every", number, "eval_steps", "eval_strategy")
    _at_the_start(conv, rows)
    if "train.eval_every" not in conv.values:  # nothing is measured by which a checkpoint could be kept
        for key in ("keep_best", "best_metric", "best"):
            conv.values.pop(f"checkpoint.{key}", None)
        conv.done -= {"metric_for_best_model", "greater_is_better"}


def _at_the_start(conv: Conversion, rows: HeldOut) -> None:
    asked = conv.flag("eval_on_start")
    if asked and rows is HeldOut.ROWS:
        conv.put("eval.before_training", True, "eval_on_start")
    elif asked and rows is HeldOut.SHARE:
        conv.tell(Fate.OTHER, "eval_on_start", "give eval.before_training=true, once data.eval_size holds out rows")


def logger(conv: Conversion, default: str = "none") -> None:
    names = [each for each in conv.texts("report_to") or [default] if each != "none"]
    known = [each for each in names if each in LOGGERS]
    conv.choose("logger", known[0] if known else "none", "report_to")
    if names != known[:1]:
        why = f"a run has one of {', '.join(LOGGERS)}, beside metrics.jsonl"
        conv.remark(Fate.OTHER, "report_to", conv.get("report_to"), why)
    progress(conv)


def progress(conv: Conversion) -> None:
    if conv.get("disable_tqdm") is not None:
        conv.put("logger.progress", not conv.flag("disable_tqdm"), "disable_tqdm")


def engine(conv: Conversion, *fsdp: str) -> None:
    """Choose the engine by a DeepSpeed configuration, or FSDP."""
    if conv.get("deepspeed"):
        engines.from_deepspeed(conv)
    else:
        engines.from_fsdp(conv, *(fsdp or ("fsdp", "fsdp_config")))


def drop_last(conv: Conversion) -> None:
    """Keep the last, short batch of an epoch, as theirs do by default."""
    conv.put("data.drop_last", conv.flag("dataloader_drop_last"), "dataloader_drop_last")


def device(conv: Conversion) -> None:
    if conv.flag("use_cpu"):
        conv.put("launch.device", "cpu", "use_cpu")


def shared(
    conv: Conversion, *, bf16: bool = False, decay: str = "linear", name: str = "bf16",
    betas: tuple[float, float] = (0.9, 0.999), log: str = "none",
) -> int | None:  # fmt: skip
    """Convert what follows from these arguments alone, but for the sizes and the evaluation; return the steps of the
    run, if they are known."""
    steps = length(conv)
    schedule(conv, steps, decay=decay)
    optimizer(conv, betas)
    precision(conv, bf16=bf16, name=name)
    logger(conv, log)
    saving(conv, steps)
    engine(conv)
    device(conv)
    return steps


def dtype_of(value: Any) -> Any:
    """Return our name of the dtype to which weights are rounded as they are read."""
    names = {"float32": "auto", "auto": "auto", "bfloat16": "bf16", "float16": "fp16"}
    return one_of(names, "dtype")(value)


def kernel_of(value: Any) -> Any:
    """Return our name of an attention implementation; by default rlexp takes the fastest."""
    if isinstance(value, str) and "flash" in value:
        return "flash_attn_3" if "3" in value else "auto"
    names = {"eager": "plain", "sdpa": "auto", "auto": "auto", "disabled": "auto"}
    return one_of(names, "the fastest kernel is taken: attention")(value)
