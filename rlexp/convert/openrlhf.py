"""OpenRLHF: `openrlhf.cli.train_dpo`, `train_sft`, `train_rm`, `train_kto` and `train_ppo_ray`.

Arguments have the dotted names since 0.10.2 and the flat ones before."""

from __future__ import annotations

from pathlib import PurePosixPath

from rlexp.convert import adapters, answers, huggingface, launchers, preference
from rlexp.convert import openrlhf_rollouts as rollouts
from rlexp.convert.rules import Conversion, Fate, Rule, absent, needless, taken, worked_out

TRAINERS = ("dpo", "ppo", "sft", "rm", "kto")
OF_PAIRS, OF_ANSWERS = "dpo rm", "sft kto"
# Their defaults: the rate, samples of a micro-batch, tokens of a sequence, passes over the rows, the held-out split.
RATES = {"dpo": 1e-5, "ppo": 1e-6, "sft": 5e-6, "rm": 9e-6, "kto": 1e-5}
MICRO = {"dpo": 8, "ppo": 1, "sft": 8, "rm": 1, "kto": 8}
LENGTHS = {"dpo": 512, "ppo": 2048, "sft": 2048, "rm": 512, "kto": 2048}
EPOCHS = {"dpo": 1, "sft": 2, "rm": 1, "kto": 1}
HELD_OUT = {"dpo": "test", "ppo": "train", "sft": "test", "rm": "train", "kto": "test"}
PROMPTS = {"ppo": "input", "sft": "input", "kto": "input"}

EVERY = "rlexp trains on every answer"
FOUND, NO_SPLITS = "the column is found by its name", "a file has no splits"
OF_LORA = adapters.Names()
OF_HEADS = (
    "LoRA: theirs freezes the head that scores, or puts an adapter beside it. Here the head is trained whole, of a "
    "reward model and of a critic."
)

RULES: tuple[Rule, ...] = (
    # the model
    worked_out("model.model_name_or_path actor.model_name_or_path pretrain", "model=hf, model.path", ""),
    taken("ref.model_name_or_path ref_pretrain", "reference.path", of="dpo ppo"),
    worked_out("ref.offload ref_offload ref_reward_offload", "reference.offload",
               "with an adapter, the reference stays on the GPU",
               "there is no reference, or it is the trained model without its adapter"),
    taken("ds.param_dtype param_dtype", "train.precision", default="bf16"),
    needless("bf16", "it is the default of what computes on GPUs"),
    taken("ds.attn_implementation attn_implementation", "parallel.kernel", to=huggingface.kernel_of),
    needless("flash_attn", "the fastest kernel is taken"),
    taken("model.gradient_checkpointing_enable actor.gradient_checkpointing_enable gradient_checkpointing",
          "memory.checkpointing", default=False),
    needless("model.gradient_checkpointing_reentrant actor.gradient_checkpointing_reentrant "
             "gradient_checkpointing_use_reentrant", "the numbers are the same"),
    worked_out("ds.lora.rank lora_rank", "adapter=lora, adapter.rank", "0, their default, is no adapter"),
    worked_out("ds.lora.alpha lora_alpha", "adapter.alpha", "their default is 16"),
    worked_out("ds.lora.dropout lora_dropout", "adapter.dropout", adapters.NO_DROPOUT),
    worked_out("ds.lora.target_modules target_modules", "adapter.targets", "same default: all linear layers"),
    absent("ds.load_in_4bit load_in_4bit", adapters.QUANTIZED, until="quant"),
    absent("model.aux_loss_coef actor.aux_loss_coef aux_loss_coef", "no auxiliary loss for experts"),
    # data
    worked_out("data.dataset data.prompt_dataset dataset prompt_data", "data=hf, data.path or data.sources", ""),
    worked_out("data.dataset_probs data.prompt_probs dataset_probs prompt_data_probs", "data.sources.NAME.weight",
               "rlexp ends an epoch with the first empty source, OpenRLHF with the last",
               "there is one set"),
    worked_out("data.dataset_split data.prompt_split dataset_split train_split prompt_split", "data.split", "",
               NO_SPLITS),
    worked_out("eval.dataset eval_dataset", "data.eval_path", ""),
    worked_out("eval.split eval_split", "data.eval_split", "used only if an evaluation set is given",
               f"nothing is evaluated, or {NO_SPLITS}"),
    worked_out("data.max_samples max_samples", "data.max_samples", ""),
    worked_out("data.prompt_key data.input_key prompt_key input_key", "data.columns.prompt", "", FOUND),
    worked_out("data.chosen_key chosen_key", "data.columns.chosen", "", FOUND, of=OF_PAIRS),
    worked_out("data.rejected_key rejected_key", "data.columns.rejected", "", FOUND, of=OF_PAIRS),
    worked_out("data.output_key output_key", "data.columns.completion",
               "without it, the input is a conversation or a text", FOUND, of=OF_ANSWERS),
    worked_out("data.label_key label_key", "data.columns.label", "", FOUND, of="kto"),
    taken("data.label_key label_key", "data.columns.answer", of="ppo"),
    worked_out("data.apply_chat_template apply_chat_template", "data.template", ""),
    absent("data.input_template input_template", "use the tokenizer's template"),
    worked_out("data.tokenizer_chat_template tokenizer_chat_template", "model.chat_template",
               "rlexp takes a file"),
    worked_out("data.max_len max_len", "data.max_length", "tokens of prompt and answer",
               "prompt_max_len and generate_max_len decide"),
    worked_out("prompt_max_len", "data.max_length", "one limit, for prompt and answer together"),
    absent("data.image_key image_key data.max_images_per_prompt max_images_per_prompt", "images are not read", "images",
           until="image"),
    taken("ds.packing_samples packing_samples", "data.packing", default=False),
    # sizes
    taken("train.batch_size train_batch_size", "train.batch_size", "of all GPUs, as in rlexp", default=128),
    worked_out("train.micro_batch_size micro_train_batch_size", "train.micro_batch_size", "of one ring, as in rlexp"),
    taken("train.seed seed", "seed", default=42),
    taken("train.full_determinism_enable full_determinism", "launch.deterministic"),
    worked_out("ds.ring_attn_size ring_attn_size", "parallel.ring_size", ""),
    needless("ds.ring_attn_head_stride ring_head_stride", "the layout decides what is sent at once"),
    absent("ds.tensor_parallel_size ds_tensor_parallel_size", "no tensor parallelism",
           1, until="tensor_parallel"),
    # the engine
    worked_out("ds.zero_stage zero_stage", "engine", ""),
    worked_out("ds.adam_offload adam_offload", "engine.offload=optimizer", "", "ZeRO 0 keeps the optimizer on the GPU"),
    needless("reward.offload offload", "a reward model is held as the engine holds its weights"),
    absent("ds.zpg zpg", "no ZeRO++ partition", 1),
    needless("ds.grad_accum_dtype grad_accum_dtype ds.overlap_comm overlap_comm ds.deepcompile deepcompile "
             "ds.use_liger_kernel use_liger_kernel ds.experts_implementation ds.use_universal_ckpt "
             "use_ds_universal_ckpt ds.enable_sleep deepspeed_enable_sleep local_rank perf actor_init_on_gpu "
             "data.disable_fast_tokenizer disable_fast_tokenizer data.dataloader_num_workers dataloader_num_workers "
             "bos_token_id use_ms", "no number depends on it here"),
    # the optimizer
    worked_out("optim actor.optim", "optim", "their adam becomes adamw"),
    taken("adam.lr actor.adam.lr learning_rate actor_learning_rate", "optim.lr"),
    worked_out("adam.betas actor.adam.betas adam_betas", "optim.betas", ""),
    taken("adam.eps actor.adam.eps", "optim.eps", default=1e-8),
    taken("adam.weight_decay actor.adam.weight_decay l2", "optim.weight_decay", default=0.0),
    worked_out("lr_scheduler actor.lr_scheduler", "optim.decay", ""),
    worked_out("lr_warmup_ratio actor.lr_warmup_ratio", "optim.warmup_ratio, optim.warmup_start=0", ""),
    worked_out("min_lr_ratio actor.min_lr_ratio", "optim.min_lr_ratio", "by default a tenth"),
    taken("max_norm actor.max_norm", "optim.max_grad_norm", default=1.0),
    absent("muon.lr muon.momentum muon.ns_steps muon.nesterov muon.no_nesterov actor.muon.lr actor.muon.momentum "
           "actor.muon.ns_steps actor.muon.nesterov actor.muon.no_nesterov critic.muon.lr", "no Muon",
           until="optim=muon"),
    # length, checkpoints, logs
    worked_out("train.max_epochs max_epochs", "train.epochs, or rollout.epochs", "for PPO: passes over a rollout"),
    worked_out("ckpt.output_dir save_path", "hydra.run.dir",
               "the run's folder; the trained model is in its folder model/"),
    needless("ckpt.path ckpt_path", "checkpoints lie in the run's folder"),
    worked_out("ckpt.save_steps save_steps", "checkpoint.save_every", "for PPO, theirs counts rollouts"),
    taken("ckpt.max_num max_ckpt_num", "checkpoint.keep_last", default=3),
    absent("ckpt.max_mem max_ckpt_mem", "use checkpoint.keep_last"),
    needless("ckpt.save_hf save_hf_ckpt", "`python -m rlexp.export` makes a model of any checkpoint"),
    needless("ckpt.load_enable load_checkpoint", "a run continues if its folder has a checkpoint"),
    worked_out("ckpt.disable_ds disable_ds_ckpt", "checkpoint.on_exit=false", ""),
    absent("ckpt.best_metric_key best_metric_key", "use a metric of rlexp, such as eval/loss"),
    worked_out("eval.steps eval_steps", "train.eval_every", "for PPO, theirs counts rollouts", "nothing is evaluated"),
    needless("logger.logging_steps logging_steps", "every step is logged"),
    worked_out("logger.wandb.key use_wandb", "logger=wandb", "log in with `wandb login`"),
    taken("logger.wandb.org wandb_org", "logger.entity"),
    taken("logger.wandb.group wandb_group", "logger.group"),
    taken("logger.wandb.project wandb_project", "logger.project"),
    taken("logger.wandb.run_name wandb_run_name", "logger.run_name"),
    worked_out("logger.tensorboard_dir use_tensorboard", "logger=tensorboard", "in the run's folder",
               "a run has one logger, beside metrics.jsonl"),
    # DPO
    taken("model.beta beta", "loss.beta", default=0.1, of="dpo"),
    worked_out("model.label_smoothing label_smoothing", "loss.label_smoothing", "", "it changes nothing with ipo",
               of="dpo"),
    worked_out("model.ipo_enable ipo", "loss=ipo, loss.normalize=sequence", "", of="dpo"),
    worked_out("model.nll_loss_coef nll_loss_coef", "loss.sft_weight",
               "a mean over the train batch's tokens, not each answer's", of="dpo"),
    # supervised training, KTO and reward models
    worked_out("model.pretrain_mode_enable pretrain_mode", "loss=sft", "rlexp never trains on prompts",
               "a row that is a text is trained on whole, and no prompt is", of="sft"),
    worked_out("data.multiturn multiturn", "loss=sft", EVERY, EVERY, of="sft"),
    worked_out("beta", "loss.beta", "", of="kto"),
    worked_out("desirable_loss_weight", "loss.desirable_weight", "", of="kto"),
    worked_out("undesirable_loss_weight", "loss.undesirable_weight", "", of="kto"),
    worked_out("model.loss_type loss", "loss=reward", "sigmoid; others are missing", of="rm"),
    worked_out("model.margin_loss_enable margin_loss", "loss.margin_weight", "of rows with a margin", of="rm"),
    needless("model.compute_fp32_loss_enable compute_fp32_loss", "scores are compared in float64", of="rm"),
    *rollouts.RULES,
    # the launcher
    *launchers.RULES,
)  # fmt: skip


def convert(conv: Conversion) -> None:
    _ranks(conv)
    micro = conv.whole("train.micro_batch_size", MICRO[conv.trainer], least=1)
    conv.put("train.micro_batch_size", micro, "train.micro_batch_size")
    conv.choose("model", "hf")
    conv.put("model.path", conv.needed("pretrain", "the model that is trained", "Qwen/Qwen3-0.6B"), "pretrain")
    conv.put("parallel.ring_size", conv.whole("ring_attn_size", 1, least=1), "ring_attn_size")
    _adapter(conv)
    _engine(conv)
    _optimizer(conv)
    _data(conv)
    if conv.trainer == "ppo":
        _files(conv, rollouts.convert(conv))
    else:
        {"dpo": _preference, "sft": _supervised, "rm": _reward_model, "kto": _kto}[conv.trainer](conv)
        _files(conv)
    _reference(conv)


def _adapter(conv: Conversion) -> None:
    if conv.whole("lora_rank", 0, least=0):
        adapters.lora(conv, OF_LORA, adapters.Defaults(None, 16.0, targets=("all-linear",)), "lora_rank")
    else:
        adapters.none(conv, OF_LORA)


def _reference(conv: Conversion) -> None:
    """Set what becomes of the weights of a reference, which with an adapter is the trained model."""
    ppo = conv.trainer == "ppo"
    compared = conv.number("init_kl_coef", 0.01) != 0 if ppo else adapters.compared(conv)
    alone = adapters.has(conv) and conv.text("ref_pretrain") in (None, conv.text("pretrain"))
    if alone:
        conv.tell(Fate.NEEDLESS, "ref_pretrain", adapters.ONE_REFERENCE)
    if conv.flag("ref_offload") and compared and not alone:
        conv.put("reference.offload", True, "ref_offload")
    if adapters.has(conv) and conv.choices["loss"].value in ("reward", "ppo"):
        conv.notes.append(OF_HEADS)


def _preference(conv: Conversion) -> None:
    smoothing = conv.number("label_smoothing", 0.0, least=0)
    if conv.flag("ipo"):
        conv.choose("loss", "ipo", "ipo")
        conv.put("loss.normalize", "sequence", "ipo", why="of whole answers, as theirs")
    else:
        conv.choose("loss", "dpo", "ipo")
        conv.put("loss.label_smoothing", smoothing, "label_smoothing")
    weight = conv.number("nll_loss_coef", 0.0, least=0)
    preference.put_likelihood(conv, weight, preference.OF_ANSWERS, "nll_loss_coef")


def _supervised(conv: Conversion) -> None:
    answers.supervised(conv, "", answers.OF_MICRO_BATCHES)
    if conv.flag("pretrain_mode") and (conv.flag("apply_chat_template") or conv.get("output_key") is not None):
        conv.tell(Fate.OTHER, "pretrain_mode", "rlexp never trains on prompts")
    if not conv.flag("apply_chat_template") and conv.get("output_key") is not None:
        why = "theirs writes a prompt into it; here it stays as it is: write the rows so"
        conv.remark(Fate.OTHER, conv.said("input_template"), conv.get("input_template", "User: {}\nAssistant: "), why)
    bare = conv.flag("apply_chat_template") and conv.get("output_key") is None
    if bare and not conv.flag("multiturn") and conv.name("multiturn") is None:
        why = "without it theirs trains the last answer of a conversation; here every one is trained on"
        conv.remark(Fate.OTHER, "multiturn", False, why)


def _kto(conv: Conversion) -> None:
    answers.single(conv, "kto", "", good="desirable_loss_weight", bad="undesirable_loss_weight", scale=0.01)


def _reward_model(conv: Conversion) -> None:
    answers.reward_model(conv, "model.loss_type")
    if (said := conv.text("model.loss_type", "sigmoid")) != "sigmoid":
        conv.remark(Fate.INSTEAD, conv.said("model.loss_type"), said, "sigmoid is the loss of two scores here")
    margins = conv.flag("margin_loss")
    conv.put("loss.margin_weight", float(margins), "margin_loss")


def _ranks(conv: Conversion) -> None:
    """Set the ranks. The batch counts all GPUs together, so that their number need not be known."""
    actor = conv.trainer == "ppo"
    each = ("actor_num_gpus_per_node", "num_gpus", "nproc_per_node") if actor else ("num_gpus", "nproc_per_node")
    nodes = "actor_num_nodes" if actor and conv.name("actor_num_nodes") else "num_nodes"
    if launchers.ranks(conv, *each, nodes=nodes) is None:
        conv.notes.append(
            "GPUs: the file does not say how many there are. All that are visible are taken (launch.nproc)."
        )


def _engine(conv: Conversion) -> None:
    stage = conv.whole("zero_stage", 2, least=0)
    if stage > 3:
        conv.refuse("zero_stage", "must be 0, 1, 2 or 3", "Give one of them.")
    conv.choose("engine", f"zero{stage}", "zero_stage")
    if conv.flag("adam_offload") and stage:
        conv.put("engine.offload", "optimizer", "adam_offload")


def _optimizer(conv: Conversion) -> None:
    if conv.get("optim", "adam") == "adam":
        conv.choose("optim", "adamw", "optim")
    else:
        conv.tell(Fate.INSTEAD, "optim", "adamw and sgd are the optimizers here; adamw is taken")
    if conv.get("adam.lr") is None:
        conv.put("optim.lr", RATES[conv.trainer], "adam.lr")
    conv.put("optim.betas", conv.pair("adam.betas", (0.9, 0.95)), "adam.betas")
    name = conv.text("lr_scheduler", "cosine_with_min_lr")
    least = {"min_lr_rate": conv.number("min_lr_ratio", 0.1, least=0)}
    huggingface.falls(conv, name, least, "lr_scheduler", "min_lr_ratio")
    huggingface.warm_up(conv, "lr_warmup_ratio", conv.number("lr_warmup_ratio", 0.03, least=0))


def _data(conv: Conversion) -> None:
    paths = conv.texts("dataset", split=",")
    if not paths:
        said = "prompt_data" if conv.trainer == "ppo" else "dataset"
        conv.missing(said, "it names the rows to train on", "org/rows")
    conv.choose("data", "hf")
    weights = _probabilities(conv, len(paths))
    split, most = conv.text("dataset_split"), conv.whole("max_samples", least=1)
    columns = _columns(conv)
    for number, path in enumerate(paths, start=1):
        key = "data" if len(paths) == 1 else f"data.sources.source{number}"
        conv.put(f"{key}.path", path.partition("@")[0], "dataset")
        if "@" in path:
            conv.remark(Fate.ABSENT, "dataset", path, "a folder within a set of the hub is not read (@)")
        if weights:
            conv.put(f"{key}.weight", weights[number - 1], "dataset_probs")
        if split and PurePosixPath(path).suffix not in huggingface.FILES:
            conv.put(f"{key}.split", split, "dataset_split")
        for ours, (name, theirs) in columns.items():
            if theirs and theirs != ours:
                conv.put(f"{key}.columns.{ours}", theirs, name)
    if most is not None:
        conv.put("data.max_samples", most, "max_samples", why="of all sets together there" if paths[1:] else "")
    conv.put("data.template", "auto" if conv.flag("apply_chat_template") else "never", "apply_chat_template")
    _template(conv)
    _lengths(conv)
    _held_out(conv, paths)


def _columns(conv: Conversion) -> dict[str, tuple[str, str | None]]:
    """Return their name of an argument and its column for each of our fields."""
    asked, answer = conv.text("prompt_key", PROMPTS.get(conv.trainer)), None
    if conv.trainer in OF_ANSWERS.split():
        answer = conv.text("output_key")
    bare, templated = conv.trainer == "sft" and answer is None, conv.flag("apply_chat_template")
    if bare and not templated and not conv.flag("pretrain_mode"):
        why = "OpenRLHF leaves out every row without an answer"
        conv.missing("output_key", why, "output")
    if bare:
        return {"messages" if templated else "text": ("prompt_key", asked)}
    columns = {"prompt": ("prompt_key", asked)}
    for ours, name in (("chosen", "chosen_key"), ("rejected", "rejected_key")):
        if name in conv.by_name:
            columns[ours] = (name, conv.text(name))
    if conv.trainer in OF_ANSWERS.split():
        columns["completion"] = ("output_key", answer)
    if conv.trainer == "kto":
        columns["label"] = ("label_key", conv.text("label_key", "label"))
    return columns


def _probabilities(conv: Conversion, sources: int) -> list[float]:
    """Return the weights of several sets."""
    said = conv.texts("dataset_probs", split=",")
    if sources == 1:
        return []
    try:
        weights = [float(each) for each in said]
    except ValueError:
        weights = [-1.0]
    if said and (len(weights) != sources or not all(0 < each < float("inf") for each in weights)):
        conv.refuse("dataset_probs", f"must be {sources} numbers, one for each set", "Give them, as 0.5,0.5.")
    return weights


def _template(conv: Conversion) -> None:
    template = conv.text("tokenizer_chat_template")
    if template is None:
        return
    if template.endswith((".jinja", ".jinja2")):
        conv.put("model.chat_template", template, "tokenizer_chat_template")
    else:
        conv.tell(Fate.OTHER, "tokenizer_chat_template", "the template itself there, a file with it here: write it to "
                  "a file, and give model.chat_template=FILE")  # fmt: skip


def _lengths(conv: Conversion) -> None:
    prompt, cut = conv.whole("prompt_max_len", least=1), conv.trainer == "ppo" and _new_tokens(conv)
    if prompt or cut:  # until 0.9.7 of OpenRLHF; max_len was then the window of vLLM
        new = conv.whole("generate_max_len", 1024, least=1) if conv.trainer == "ppo" else 0
        why = f"{prompt or 1024} of a prompt and {new} of an answer" if new else ""
        conv.put("data.max_length", (prompt or 1024) + new, "prompt_max_len", why=why)
    else:
        conv.put("data.max_length", conv.whole("max_len", LENGTHS[conv.trainer], least=2), "max_len")
    conv.put("data.too_long", "truncate", why="another part is cut than by theirs: docs/data.md")


def _new_tokens(conv: Conversion) -> bool:
    return conv.name("generate_max_len") == "generate_max_len"


def _held_out(conv: Conversion, paths: list[str]) -> None:
    if (path := conv.text("eval_dataset")) is None:
        return
    if path not in paths and len(paths) == 1:
        conv.put("data.eval_path", path, "eval_dataset")
    elif len(paths) > 1:
        conv.tell(Fate.OTHER, "eval_dataset", "of several sets each has its own: data.sources.NAME.eval_path")
        conv.tell(Fate.OTHER, "eval_split", "of several sets each has its own: data.sources.NAME.eval_split")
        return
    split = conv.text("eval_split", HELD_OUT[conv.trainer])
    if PurePosixPath(path).suffix not in huggingface.FILES:
        conv.put("data.eval_split", split, "eval_split", "eval_dataset")


def _files(conv: Conversion, steps: int = 1) -> None:
    """Set what is written and logged. `steps` is how many a rollout has."""
    if conv.trainer != "ppo":
        conv.put("train.epochs", conv.whole("max_epochs", EPOCHS[conv.trainer], least=1), "max_epochs")
    if (folder := conv.text("save_path")) is not None:
        conv.on_command_line("hydra.run.dir", folder, "save_path")
    every = int(conv.whole("save_steps", -1))
    conv.put("checkpoint.save_every", None if every < 1 else str(every * steps), "save_steps",
             why=f"{every} rollouts" if every > 0 and conv.trainer == "ppo" else "")  # fmt: skip
    if conv.flag("disable_ds_ckpt"):
        conv.put("checkpoint.save_every", None, "disable_ds_ckpt")
        conv.put("checkpoint.on_exit", False, "disable_ds_ckpt")
    _evaluation(conv, steps)
    key = conv.name("use_wandb")
    if key is not None and conv.get("use_wandb") not in (None, False):
        conv.choose("logger", "wandb", why=f"{key}, whose value is not written here: `wandb login`")
        conv.done.add(key)
    else:
        board = conv.get("use_tensorboard") not in (None, False)
        conv.choose("logger", "tensorboard" if board else "none", "use_tensorboard")


def _evaluation(conv: Conversion, steps: int) -> None:
    every = int(conv.whole("eval_steps", -1))
    if conv.get("eval_dataset") is None:
        return
    if every > 0:
        conv.put("train.eval_every", every * steps, "eval_steps")
    elif conv.trainer != "ppo":
        why = "once an epoch there: give train.eval_every, once `python -m rlexp.data` has said how many steps it has"
        conv.tell(Fate.OTHER, "eval_steps", why)
        if conv.name("eval_steps") is None:
            conv.remark(Fate.OTHER, "eval_steps", -1, f"their default, {why}")
