"""The arguments of transformers' TrainingArguments, which TRL, LLaMA-Factory and ms-swift have too."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlexp.config.schema.bounds import WEEK
from rlexp.convert import engines, kinds
from rlexp.convert.conversion import Conversion, ConvertError
from rlexp.convert.read import plain
from rlexp.convert.rules import UNSAID, Fate, Rule, absent, needless, one_of, other, taken, worked_out

KEEP_ALL = 1_000_000
FILES = (".json", ".jsonl", ".parquet", ".gz", ".zst")
OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw": "adamw", "sgd": "sgd"}
DECAYS = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
          "cosine_with_min_lr": "cosine", "cosine_with_restarts": "cosine", "cosine_warmup_with_min_lr": "cosine",
          "inverse_sqrt": "inverse_sqrt"}  # fmt: skip
NO_DECAY = "the rate decays by a line, a cosine or an inverse square root, or stays (optim.decay)"
LOGGERS = ("wandb", "tensorboard", "trackio")
METRICS = {f"{prefix}{theirs}": f"eval/{ours}" for prefix in ("", "eval_") for theirs, ours in (
    ("loss", "loss"), ("rewards/accuracies", "rewards/accuracies"), ("accuracy", "rewards/accuracies"),
    ("mean_token_accuracy", "mean_token_accuracy"))}  # fmt: skip
LOGGED = "every step is logged, for all ranks together"
NO_WARMUP = "it is 0, or another argument decides"
NO_EVALUATION = "nothing is evaluated, or another argument decides"
OF_EACH = "of several sets each has its own: data.sources.NAME.eval_path"
TRUST = other("trust_remote_code", "model.trust_remote_code",
              "a recipe does not decide that a model's own code runs: give it on the command line")  # fmt: skip
RULES: tuple[Rule, ...] = (
    worked_out("per_device_train_batch_size", "train.micro_batch_size, train.batch_size",
               "theirs counts a GPU's samples; train.batch_size all of a step", default=8, least=1),
    worked_out("gradient_accumulation_steps", "train.batch_size", "rlexp derives train.grad_acc from the batch",
               least=1),
    taken("learning_rate", "optim.lr", default=5e-5),
    taken("max_grad_norm", "optim.max_grad_norm", default=1.0),
    taken("weight_decay", "optim.weight_decay", default=0.0),
    worked_out("adam_beta1", "optim.betas", default=0.9),
    worked_out("adam_beta2", "optim.betas", default=0.999),
    taken("adam_epsilon", "optim.eps", default=1e-8),
    worked_out("lr_scheduler_type", "optim.decay", "linear, cosine, inverse_sqrt, constant", default="linear"),
    worked_out("lr_scheduler_kwargs", "optim.min_lr_ratio", "min_lr or min_lr_rate"),
    worked_out("warmup_steps", "optim.warmup_steps, optim.warmup_start=0", "a share (0.1) is optim.warmup_ratio",
               NO_WARMUP, default=0, least=0),
    worked_out("warmup_ratio", "optim.warmup_ratio, optim.warmup_start=0", rest=NO_WARMUP, default=0, least=0),
    worked_out("num_train_epochs", "train.epochs", "whole passes over the data", "max_steps decides", default=3.0,
               least=0),
    worked_out("max_steps", "train.max_steps", rest="it sets no limit", default=-1),
    worked_out("optim", "optim", "adamw and sgd", default="adamw_torch",
               until="optim=muon optim=adafactor optim=adamw_8bit"),
    absent("optim_args optim_target_modules", "use the keys of optim"),
    worked_out("bf16", "train.precision", "trained weights stay float32"),
    absent("fp16", "bf16 is taken"),
    absent("tf32", "there is no key for it", until="tf32"),
    taken("gradient_checkpointing activation_checkpointing", "memory.checkpointing"),
    needless("gradient_checkpointing_kwargs activation_checkpointing_kwargs", "the numbers are the same"),
    worked_out("deepspeed", "engine, engine.offload", "the ZeRO stage chooses the engine; rlexp writes the rest"),
    worked_out("fsdp", "engine=fsdp2", rest="deepspeed decides"),
    worked_out("fsdp_config", "engine=fsdp2", "rlexp chooses FSDP2's settings", "deepspeed decides"),
    taken("seed", "seed", default=42),
    absent("data_seed", "one seed for everything"),
    taken("full_determinism", "launch.deterministic"),
    taken("ddp_timeout", "launch.timeout_seconds", f"at most {WEEK} s, a week",
          to=lambda value: min(value, WEEK) if isinstance(value, int | float) else value),
    taken("use_cpu", "launch.device", to=lambda value: "cpu" if kinds.flag(value) else UNSAID),
    worked_out("output_dir", "hydra.run.dir", "the run's folder; the trained model is in its folder model/"),
    worked_out("save_strategy", "checkpoint.save_every", rest="save_steps decides"),
    worked_out("save_steps", "checkpoint.save_every", rest="save_strategy decides", default=500, least=0),
    worked_out("save_total_limit", "checkpoint.keep_last"),
    absent("save_only_model", "a checkpoint is always whole"),
    other("load_best_model_at_end", "checkpoint.keep_best",
          "the run exports its last model; `python -m rlexp.export` exports any checkpoint"),
    worked_out("metric_for_best_model", "checkpoint.best_metric", rest="nothing is evaluated"),
    worked_out("greater_is_better", "checkpoint.best", rest="nothing is evaluated"),
    other("resume_from_checkpoint", "hydra.run.dir",
          "the folder of an rlexp run; other trainers' checkpoints are not read"),
    worked_out("eval_strategy evaluation_strategy", "train.eval_every", rest=NO_EVALUATION),
    worked_out("eval_steps", "train.eval_every", rest=NO_EVALUATION, least=0),
    absent("eval_delay", "train.eval_every has no delay"),
    worked_out("eval_on_start", "eval.before_training", rest="no rows are held out"),
    needless("per_device_eval_batch_size do_train do_eval do_predict bf16_full_eval eval_accumulation_steps",
             "held-out rows are evaluated as the others are trained on"),
    worked_out("report_to", "logger", "one of wandb, tensorboard, trackio, none", default="none"),
    taken("run_name", "logger.run_name"),
    taken("disable_tqdm", "logger.progress", to=lambda value: not kinds.flag(value)),
    needless("logging_steps", LOGGED),
    needless("logging_strategy logging_first_step log_level logging_dir project log_level_replica log_on_each_node "
             "logging_nan_inf_filter include_num_input_tokens_seen debug skip_memory_metrics trackio_space_id "
             "trackio_bucket_id trackio_static_space_id", LOGGED),
    worked_out("dataloader_drop_last", "data.drop_last", rest="a rollout has whole train batches"),
    needless("dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor",
             "rows are tokenized once and then mapped"),
    needless("remove_unused_columns no_remove_unused_columns label_names ddp_find_unused_parameters ddp_bucket_cap_mb "
             "ddp_backend use_liger_kernel torch_empty_cache_steps local_rank "
             "overwrite_output_dir", "no number depends on it here"),
    absent("average_tokens_across_devices", "the tokens of all GPUs have one mean", True, fate=Fate.OTHER),
    absent("group_by_length", "no sample is moved by its length"),
    taken("train_sampling_strategy", "data.shuffle", "random is true, sequential is false",
          to=one_of({"random": True, "sequential": False}, "the order")),
    absent("label_smoothing_factor", "no smoothing of tokens"),
    absent("neftune_noise_alpha", "no NEFTune", until="neftune"),
    absent("torch_compile torch_compile_backend torch_compile_mode", "models are not compiled", until="compile"),
    absent("auto_find_batch_size", "`python -m rlexp.preflight` tells what fits"),
    absent("push_to_hub hub_model_id hub_token hub_strategy hub_private_repo hub_revision",
           "rlexp uploads no model", until="hub"),
    needless("dataloader_in_order dataloader_multiprocessing_context ddp_broadcast_buffers ddp_static_graph "
             "save_on_each_node enable_jit_checkpoint restore_callback_states_from_checkpoint use_cache "
             "length_column_name hub_always_push liger_kernel_config fp16_full_eval prediction_loss_only "
             "eval_do_concat_batches eval_use_gather_object batch_eval_metrics include_for_metrics",
             "no number depends on it here"),
    absent("accelerator_config", "rlexp has no accelerator options"),
    absent("parallelism_config", "use parallel.ring_size"),
    absent("ignore_data_skip", "a resumed run takes the next samples"),
)  # fmt: skip


def sizes(conv: Conversion, gpus: int, ring: str, *, fill: int = 0) -> tuple[int, int]:
    """Set the ring and the batch of a step from the batch of one GPU; return the micro-batch and the accumulation.
    Where none is given, the accumulation is the one that fills a batch of `fill` samples."""
    size = int(conv.whole(ring, 1, least=1))
    if gpus % size:
        raise ConvertError(
            f"{conv.name(ring)}={size}: does not divide the {gpus} GPUs. Give a size that does, or another --gpus."
        )
    if conv.name(ring) or (conv.default(ring) is not None and "parallel.ring_size" not in conv.values):
        conv.put("parallel.ring_size", size, ring)
    replicas = gpus // size
    micro = conv.whole("per_device_train_batch_size")
    steps = conv.whole("gradient_accumulation_steps", max(1, math.ceil(fill / (micro * replicas))))
    conv.put("train.micro_batch_size", micro, "per_device_train_batch_size")
    shared = f" / ring of {size}" if size > 1 else ""
    conv.put("train.batch_size", micro * steps * replicas, "per_device_train_batch_size", "gradient_accumulation_steps",
             why=f"{micro} × {steps} × {gpus} GPUs{shared}")  # fmt: skip
    return micro, steps


def length(conv: Conversion) -> int | None:
    """Set how long the run is; return its steps, if they are known."""
    most = int(conv.whole("max_steps"))
    if most > 0:
        conv.put("train.max_steps", most, "max_steps")
        return most
    passes = conv.number("num_train_epochs")
    if passes != int(passes):
        conv.tell(Fate.OTHER, "num_train_epochs",
                  f"only whole epochs are counted here, and {max(1, math.floor(passes))} is taken: give "
                  "train.max_steps, once `python -m rlexp.data` has said how many steps an epoch has")  # fmt: skip
        passes = max(1, math.floor(passes))
    conv.put("train.epochs", int(passes), "num_train_epochs")
    return None


def schedule(conv: Conversion, steps: int | None, *, rounded: Callable[[float], int] = math.ceil) -> None:
    """Set the decay and the warm-up."""
    name = conv.text("lr_scheduler_type")
    falls(conv, name, conv.mapping("lr_scheduler_kwargs"), "lr_scheduler_type", "lr_scheduler_kwargs")
    ratio, warm = conv.number("warmup_ratio"), conv.number("warmup_steps")
    if warm >= 1 and name != "constant":  # which has no warm-up
        warm_up(conv, "warmup_steps", count=int(warm))
    elif name != "constant":
        warm_up(conv, "warmup_steps" if warm else "warmup_ratio", warm or ratio, steps, rounded)


def falls(conv: Conversion, name: str, options: Mapping[str, Any], by: str, to: str) -> None:
    """Set how the rate falls by an argument, and to what by another one."""
    if name not in DECAYS:
        conv.tell(Fate.INSTEAD, by, NO_DECAY)
        return
    conv.put("optim.decay", DECAYS[name], by)
    least, lr = plain(options.get("min_lr_rate")), conv.number("learning_rate")
    if least is None and lr and isinstance(rate := plain(options.get("min_lr")), int | float):
        least = float(f"{rate / lr:.6g}")
    if "min_lr" in name and least is not None:
        conv.put("optim.min_lr_ratio", least, to)
    elif any((key, value) != ("num_cycles", 1 if "restarts" in name else 0.5) for key, value in options.items()):
        conv.tell(Fate.INSTEAD if "restarts" in name else Fate.ABSENT, to, NO_DECAY)


def warm_up(
    conv: Conversion, argument: str, ratio: float = 0.0, steps: int | None = None,
    rounded: Callable[[float], int] = math.ceil, count: int = 0,
) -> None:  # fmt: skip
    """Set a warm-up that begins at the rate 0, as transformers' do. A share is rounded up here."""
    if ratio and rounded is not math.ceil and steps is not None:
        count, ratio = rounded(ratio * steps), 0.0
    if ratio:
        down = "" if rounded is math.ceil else "rounded up here, and down there"
        conv.put("optim.warmup_ratio", ratio, argument, why=down)
    elif count:
        conv.put("optim.warmup_steps", count, argument)
    if ratio or count:
        conv.put("optim.warmup_start", 0)


def optimizer(conv: Conversion) -> None:
    name = conv.text("optim")
    if name in OPTIMIZERS:
        conv.choose("optim", OPTIMIZERS[name], "optim")
    else:
        same = "adamw" in name and not re.search("galore|lomo|grokadamw|schedule_free|stable", name)
        fate = Fate.ABSENT if same else Fate.INSTEAD  # of 8 bits, or in pages: the same rule
        conv.tell(fate, "optim", "adamw and sgd are the optimizers here, in float32; adamw is taken")
    conv.put("optim.betas", [conv.number("adam_beta1"), conv.number("adam_beta2")], "adam_beta1", "adam_beta2")


def precision(conv: Conversion, *names: str, bf16: bool) -> None:
    """Set the precision: by bf16, whose default may follow from arguments with these names."""
    half = conv.flag("bf16", bf16 and not conv.flag("fp16"))
    if conv.flag("fp16") and not half:
        conv.put("train.precision", "bf16", why="in place of fp16")
    else:
        conv.put("train.precision", "bf16" if half else "fp32", "bf16", *names)


def saving(conv: Conversion, steps: int | None, strategy: str = "steps") -> None:
    """Set when checkpoints are saved, and how many are kept; None: all."""
    if folder := conv.text("output_dir"):
        conv.on_command_line("hydra.run.dir", folder, "output_dir")
    match conv.get("save_strategy", strategy):
        case "no" | False | "epoch" as when:
            conv.put("checkpoint.save_every", "1 epoch" if when == "epoch" else None, "save_strategy")
        case "steps":
            every = cadence(conv, conv.number("save_steps"), steps)
            conv.put("checkpoint.save_every", str(every) if every else None, "save_steps", "save_strategy")
        case _:
            why = "checkpoint.save_every takes steps, epochs or a time: 500, 1 epoch, 30m"
            conv.tell(Fate.OTHER, "save_strategy", why)
    limit, keep = int(conv.whole("save_total_limit", 0)), conv.default("save_total_limit")
    kept = limit if limit > 0 else keep or KEEP_ALL
    conv.put("checkpoint.keep_last", kept, "save_total_limit", why="all are kept" if kept == KEEP_ALL else "")
    _best(conv)


def cadence(conv: Conversion, count: float, steps: int | None) -> int | str:
    """Return what a number of steps, or a share of the run's, is here: of a run of epochs, a share of an epoch."""
    if count >= 1 or not count:
        return int(count)
    if steps is not None:
        return math.ceil(count * steps)
    return f"{count * conv.values['train.epochs'].value:.9g} epoch"


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


def keys_of(sets: Sequence[Any]) -> list[str]:
    """Return our key of each set of rows."""
    return ["data"] if len(sets) == 1 else [f"data.sources.source{number}" for number in range(1, len(sets) + 1)]


def held_out(conv: Conversion, name: str, *, share: bool = False) -> bool:
    """Hold out as many rows as an argument says; return whether there are any. Less than 1 is a share of them, and so
    is all with `share`."""
    size = conv.number(name, 0, least=0)
    if size >= 1 and share:
        conv.refuse(name, "must be less than 1, since it is a share of the rows", f"For example: {name}=0.05.")
    if size:
        conv.put("data.eval_size", float(size) if size < 1 else conv.whole(name, 0), name)
    return bool(size)


def held_out_set(conv: Conversion, name: str, path: Any, split: Any = None, *, several: bool = False) -> bool:
    """Hold out the rows of a set of their own, if there is one for the one set to train on; return whether there is."""
    if several or "data.path" not in conv.values:
        conv.tell(Fate.OTHER, name, OF_EACH)
        return False
    same, split = path == conv.values["data.path"].value, None if Path(str(path)).suffix in FILES else split
    trained = conv.values.get("data.split")
    if (same and split == (trained.value if trained else "train")) or (same and split is None):
        conv.tell(Fate.OTHER, name, "theirs evaluates rows that it trains on: hold out others by data.eval_size")
        return False
    if not same or split is None:
        conv.put("data.eval_path", path, name)
    if split is not None:
        conv.put("data.eval_split", split, name)
    return True


def evaluation(
    conv: Conversion, steps: int | None, rows: bool, *, default: str = "no", every: str = "logging_steps"
) -> None:
    """Set how often held-out rows are evaluated: by `default`, and as often as another argument says."""
    strategy = conv.get("eval_strategy", default)
    count = conv.number("eval_steps", conv.number(every, 10))
    if rows and strategy == "epoch":
        conv.put("train.eval_every", "1 epoch", "eval_strategy")
    elif rows and strategy not in ("no", False):
        conv.put("train.eval_every", cadence(conv, count, steps), "eval_steps", "eval_strategy")
    if conv.flag("eval_on_start") and rows:
        conv.put("eval.before_training", True, "eval_on_start")
    if "train.eval_every" not in conv.values:  # nothing is measured by which a checkpoint could be kept
        for key in ("keep_best", "best_metric", "best"):
            conv.values.pop(f"checkpoint.{key}", None)
        conv.done -= {"metric_for_best_model", "greater_is_better"}


def logger(conv: Conversion) -> None:
    off = conv.name("report_to") is not None and conv.given_value("report_to") is None
    names = [] if off else [each for each in conv.texts("report_to") if each.lower() != "none"]
    known = [each for each in names if each in LOGGERS]
    conv.choose("logger", known[0] if known else "none", "report_to")
    if names != known[:1]:
        why = f"a run has one of {', '.join(LOGGERS)}, beside metrics.jsonl"
        conv.remark(Fate.OTHER, "report_to", conv.get("report_to"), why)


def engine(conv: Conversion, *also: str) -> None:
    """Choose the engine by a DeepSpeed configuration, or FSDP."""
    if conv.get("deepspeed"):
        engines.from_deepspeed(conv)
    else:
        engines.from_fsdp(conv, "fsdp", "fsdp_config", *also)


def drop_last(conv: Conversion, default: bool = False, why: str = "") -> None:
    """Keep the last, short batch of an epoch, as theirs do by default."""
    conv.put("data.drop_last", conv.flag("dataloader_drop_last", default), "dataloader_drop_last", why=why)


def shared(conv: Conversion, *names: str, bf16: bool) -> int | None:
    """Convert what follows from these arguments alone, but for the sizes and the evaluation; return the steps of the
    run, if they are known. Arguments with these names decide on the default of bf16."""
    steps = length(conv)
    schedule(conv, steps)
    optimizer(conv)
    precision(conv, *names, bf16=bf16)
    logger(conv)
    saving(conv, steps)
    engine(conv)
    return steps


# Our name of the dtype to which weights are rounded as they are read.
dtype_of = one_of({"float32": "auto", "auto": "auto", "bfloat16": "bf16", "float16": "fp16"}, "dtype")


def kernel_of(value: Any) -> Any:
    """Return our name of an attention implementation; by default rlexp takes the fastest."""
    if isinstance(value, str) and "flash" in value:
        return "flash_attn_3" if "3" in value else "auto"
    names = {"eager": "plain", "sdpa": "auto", "auto": "auto", "disabled": "auto"}
    return one_of(names, "the fastest kernel is taken: attention")(value)
