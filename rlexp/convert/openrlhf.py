"""OpenRLHF: `openrlhf.cli.train_dpo`, `train_sft`, `train_rm`, `train_kto` and `train_ppo_ray`.

Arguments have the dotted names since 0.10.2 and the flat ones before."""

from __future__ import annotations

import contextlib
from pathlib import PurePosixPath

from rlexp.convert import adapters, engines, huggingface, kinds, launchers, losses, model_keys
from rlexp.convert import openrlhf_rollouts as rollouts
from rlexp.convert.conversion import Conversion
from rlexp.convert.rules import ByTrainer, Fate, Rule, absent, needless, taken, worked_out

TRAINERS = ("dpo", "ppo", "sft", "rm", "kto")
OF_PAIRS, OF_ANSWERS = "dpo rm", "sft kto"
EVERY = "rlexp trains on every answer"
FOUND, NO_SPLITS = "the column is found by its name", "a file has no splits"
OF_HEADS = ("LoRA: theirs freezes the head that scores, or puts an adapter beside it. Here the head is trained whole, "
            "of a reward model and of a critic.")  # fmt: skip

RULES: tuple[Rule, ...] = (
    # the model
    worked_out("model.model_name_or_path actor.model_name_or_path pretrain", "model=hf, model.path"),
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
    worked_out("ds.lora.rank lora_rank", "adapter=lora, adapter.rank", "0, their default, is no adapter", default=0,
               least=0),
    *adapters.rules({"alpha": "ds.lora.alpha lora_alpha", "dropout": "ds.lora.dropout lora_dropout",
                     "targets": "ds.lora.target_modules target_modules"}, {"alpha": 16.0, "targets": ("all-linear",)},
                    {}, targets="same default: all linear layers"),
    absent("ds.load_in_4bit load_in_4bit", adapters.QUANTIZED, until="quant"),
    absent("model.aux_loss_coef actor.aux_loss_coef aux_loss_coef", "no auxiliary loss for experts"),
    # data
    worked_out("data.dataset data.prompt_dataset dataset prompt_data", "data=hf, data.path or data.sources", split=","),
    worked_out("data.dataset_probs data.prompt_probs dataset_probs prompt_data_probs", "data.sources.NAME.weight",
               "rlexp ends an epoch with the first empty source, OpenRLHF with the last",
               "there is one set", split=","),
    worked_out("data.dataset_split data.prompt_split dataset_split train_split prompt_split", "data.split",
               rest=NO_SPLITS),
    worked_out("eval.dataset eval_dataset", "data.eval_path"),
    worked_out("eval.split eval_split", "data.eval_split", "used only if an evaluation set is given",
               f"nothing is evaluated, or {NO_SPLITS}",
               default=ByTrainer(dpo="test", ppo="train", sft="test", rm="train", kto="test")),
    worked_out("data.max_samples max_samples", "data.max_samples", least=1),
    worked_out("data.prompt_key data.input_key prompt_key input_key", "data.columns.prompt", rest=FOUND,
               default=ByTrainer(ppo="input", sft="input", kto="input")),
    worked_out("data.chosen_key chosen_key", "data.columns.chosen", rest=FOUND, of=OF_PAIRS),
    worked_out("data.rejected_key rejected_key", "data.columns.rejected", rest=FOUND, of=OF_PAIRS),
    worked_out("data.output_key output_key", "data.columns.completion",
               "without it, the input is a conversation or a text", FOUND, of=OF_ANSWERS),
    worked_out("data.label_key label_key", "data.columns.label", rest=FOUND, of="kto", default="label"),
    taken("data.label_key label_key", "data.columns.answer", of="ppo"),
    taken("data.apply_chat_template apply_chat_template", "data.template", default=False,
          to=lambda value: "auto" if kinds.flag(value) else "never"),
    absent("data.input_template input_template", "use the tokenizer's template"),
    taken("data.tokenizer_chat_template tokenizer_chat_template", "model.chat_template", "rlexp takes a file",
          to=model_keys.template_file),
    worked_out("data.max_len max_len", "data.max_length", "tokens of prompt and answer",
               "prompt_max_len and generate_max_len decide", least=2,
               default=ByTrainer(dpo=512, ppo=2048, sft=2048, rm=512, kto=2048)),
    worked_out("prompt_max_len", "data.max_length", "one limit, for prompt and answer together", least=1),
    absent("data.image_key image_key data.max_images_per_prompt max_images_per_prompt", "images are not read", "images",
           until="image"),
    taken("ds.packing_samples packing_samples", "data.packing", default=False),
    # sizes
    taken("train.batch_size train_batch_size", "train.batch_size", "of all GPUs, as in rlexp", default=128),
    taken("train.micro_batch_size micro_train_batch_size", "train.micro_batch_size", "of one ring, as in rlexp",
          least=1, default=ByTrainer(dpo=8, ppo=1, sft=8, rm=1, kto=8)),
    taken("train.seed seed", "seed", default=42),
    taken("train.full_determinism_enable full_determinism", "launch.deterministic"),
    taken("ds.ring_attn_size ring_attn_size", "parallel.ring_size", default=1, least=1),
    needless("ds.ring_attn_head_stride ring_head_stride", "the layout decides what is sent at once"),
    absent("ds.tensor_parallel_size ds_tensor_parallel_size", "no tensor parallelism", 1, until="tensor_parallel"),
    # the engine
    worked_out("ds.zero_stage zero_stage", "engine", default=2, least=0),
    worked_out("ds.adam_offload adam_offload", "engine.offload=optimizer",
               rest="ZeRO 0 keeps the optimizer on the GPU"),
    needless("reward.offload offload", "a reward model is held as the engine holds its weights"),
    absent("ds.zpg zpg", "no ZeRO++ partition", 1),
    needless("ds.grad_accum_dtype grad_accum_dtype ds.overlap_comm overlap_comm ds.deepcompile deepcompile "
             "ds.use_liger_kernel use_liger_kernel ds.experts_implementation ds.use_universal_ckpt "
             "use_ds_universal_ckpt ds.enable_sleep deepspeed_enable_sleep local_rank perf actor_init_on_gpu "
             "data.disable_fast_tokenizer disable_fast_tokenizer data.dataloader_num_workers dataloader_num_workers "
             "bos_token_id use_ms", "no number depends on it here"),
    # the optimizer
    worked_out("optim actor.optim", "optim", "their adam becomes adamw", default="adam"),
    taken("adam.lr actor.adam.lr learning_rate actor_learning_rate", "optim.lr",
          default=ByTrainer(dpo=1e-5, ppo=1e-6, sft=5e-6, rm=9e-6, kto=1e-5)),
    worked_out("adam.betas actor.adam.betas adam_betas", "optim.betas", default=(0.9, 0.95)),
    taken("adam.eps actor.adam.eps", "optim.eps", default=1e-8),
    taken("adam.weight_decay actor.adam.weight_decay l2", "optim.weight_decay", default=0.0),
    worked_out("lr_scheduler actor.lr_scheduler", "optim.decay", default="cosine_with_min_lr"),
    worked_out("lr_warmup_ratio actor.lr_warmup_ratio", "optim.warmup_ratio, optim.warmup_start=0",
               default=0.03, least=0),
    worked_out("min_lr_ratio actor.min_lr_ratio", "optim.min_lr_ratio", "by default a tenth", default=0.1, least=0),
    taken("max_norm actor.max_norm", "optim.max_grad_norm", default=1.0),
    absent("muon.lr muon.momentum muon.ns_steps muon.nesterov muon.no_nesterov actor.muon.lr actor.muon.momentum "
           "actor.muon.ns_steps actor.muon.nesterov actor.muon.no_nesterov critic.muon.lr", "no Muon",
           until="optim=muon"),
    # length, checkpoints, logs
    worked_out("train.max_epochs max_epochs", "train.epochs, or rollout.epochs", "for PPO: passes over a rollout",
               least=1, default=ByTrainer(dpo=1, sft=2, rm=1, kto=1, ppo=1)),
    worked_out("ckpt.output_dir save_path", "hydra.run.dir",
               "the run's folder; the trained model is in its folder model/"),
    needless("ckpt.path ckpt_path", "checkpoints lie in the run's folder"),
    worked_out("ckpt.save_steps save_steps", "checkpoint.save_every", "for PPO, theirs counts rollouts", default=-1),
    taken("ckpt.max_num max_ckpt_num", "checkpoint.keep_last", default=3),
    absent("ckpt.max_mem max_ckpt_mem", "use checkpoint.keep_last"),
    needless("ckpt.save_hf save_hf_ckpt", "`python -m rlexp.export` makes a model of any checkpoint"),
    needless("ckpt.load_enable load_checkpoint", "a run continues if its folder has a checkpoint"),
    worked_out("ckpt.disable_ds disable_ds_ckpt", "checkpoint.on_exit=false"),
    absent("ckpt.best_metric_key best_metric_key", "use a metric of rlexp, such as eval/loss"),
    worked_out("eval.steps eval_steps", "train.eval_every", "for PPO, theirs counts rollouts", "nothing is evaluated",
               default=-1),
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
    taken("model.label_smoothing label_smoothing", "loss.label_smoothing", rest="it changes nothing with ipo",
          of="dpo", default=0.0, least=0),
    worked_out("model.ipo_enable ipo", "loss=ipo, loss.normalize=sequence", of="dpo"),
    worked_out("model.nll_loss_coef nll_loss_coef", "loss.sft_weight",
               "a mean over the train batch's tokens, not each answer's", of="dpo", default=0.0, least=0),
    # supervised training, KTO and reward models
    worked_out("model.pretrain_mode_enable pretrain_mode", "loss=sft", "rlexp never trains on prompts",
               "a row that is a text is trained on whole, and no prompt is", of="sft"),
    worked_out("data.multiturn multiturn", "loss=sft", EVERY, EVERY, of="sft"),
    taken("beta", "loss.beta", of="kto", default=0.01),
    *losses.weights("desirable_loss_weight", "undesirable_loss_weight", "kto"),
    worked_out("model.loss_type loss", "loss=reward", "sigmoid; others are missing", of="rm", default="sigmoid"),
    taken("model.margin_loss_enable margin_loss", "loss.margin_weight", "of rows with a margin", of="rm", default=False,
          to=lambda value: float(kinds.flag(value))),
    needless("model.compute_fp32_loss_enable compute_fp32_loss", "scores are compared in float64", of="rm"),
    *rollouts.RULES,
    # the launcher
    *launchers.RULES,
)  # fmt: skip


def convert(conv: Conversion) -> None:
    if launchers.ranks(conv) is None:  # the batch counts all GPUs together
        conv.notes.append(
            "GPUs: the file does not say how many there are. All that are visible are taken (launch.nproc)."
        )
    model_keys.trained(conv, "pretrain")
    if conv.whole("lora_rank"):
        adapters.lora(conv, "lora_rank")
    engines.by_stage(conv, "zero_stage")
    if conv.flag("adam_offload") and conv.chosen("engine") != "zero0":
        conv.put("engine.offload", "optimizer", "adam_offload")
    _optimizer(conv)
    _data(conv)
    _files(conv, _loss(conv))
    _reference(conv)


def _loss(conv: Conversion) -> int:
    """Set the loss; return the steps that are taken on a rollout, or 1."""
    match conv.trainer:
        case "ppo":
            return rollouts.convert(conv)
        case "dpo":
            conv.choose("loss", "ipo" if conv.flag("ipo") else "dpo", "ipo")
            if conv.flag("ipo"):
                conv.put("loss.normalize", "sequence", "ipo", why="of whole answers, as theirs")
            losses.put_likelihood(conv, conv.number("nll_loss_coef"), losses.OF_ANSWERS, "nll_loss_coef")
        case "sft":
            _supervised(conv)
        case "kto":
            losses.single(conv, "kto")
        case _:
            losses.reward_model(conv, "model.loss_type")
            if conv.text("model.loss_type") != "sigmoid":
                conv.differs("model.loss_type", "sigmoid is the loss of two scores here", Fate.INSTEAD)
    return 1


def _reference(conv: Conversion) -> None:
    """Set what becomes of the weights of a reference, which with an adapter is the trained model."""
    compared = conv.number("init_kl_coef") != 0 if conv.trainer == "ppo" else adapters.compared(conv)
    alone = adapters.has(conv) and conv.text("ref_pretrain") in (None, conv.text("pretrain"))
    if alone:
        conv.tell(Fate.NEEDLESS, "ref_pretrain", adapters.ONE_REFERENCE)
    if conv.flag("ref_offload") and compared and not alone:
        conv.put("reference.offload", True, "ref_offload")
    if adapters.has(conv) and conv.chosen("loss") in ("reward", "ppo"):
        conv.notes.append(OF_HEADS)


def _supervised(conv: Conversion) -> None:
    conv.choose("loss", "sft")
    conv.notes.append(losses.OF_MICRO_BATCHES)
    templated, answered = conv.flag("apply_chat_template"), conv.get("output_key") is not None
    if conv.flag("pretrain_mode") and (templated or answered):
        conv.tell(Fate.OTHER, "pretrain_mode", "rlexp never trains on prompts")
    if not templated and answered:
        theirs = conv.get("input_template", "User: {}\nAssistant: ")
        why = "theirs writes a prompt into it; here it stays as it is: write the rows so"
        conv.remark(Fate.OTHER, conv.spelled("input_template"), theirs, why)
    if templated and not answered and not conv.flag("multiturn") and conv.name("multiturn") is None:
        why = "without it theirs trains the last answer of a conversation; here every one is trained on"
        conv.remark(Fate.OTHER, "multiturn", False, why)


def _optimizer(conv: Conversion) -> None:
    if conv.get("optim") == "adam":
        conv.choose("optim", "adamw", "optim")
    else:
        conv.tell(Fate.INSTEAD, "optim", "adamw and sgd are the optimizers here; adamw is taken")
    conv.put("optim.betas", conv.pair("adam.betas"), "adam.betas")
    least = {"min_lr_rate": conv.number("min_lr_ratio")}
    huggingface.falls(conv, conv.text("lr_scheduler"), least, "lr_scheduler", "min_lr_ratio")
    huggingface.warm_up(conv, "lr_warmup_ratio", conv.number("lr_warmup_ratio"))


def _data(conv: Conversion) -> None:
    paths = conv.texts("dataset")
    if not paths:
        name = "prompt_data" if conv.trainer == "ppo" else "dataset"
        conv.missing(name, "it names the rows to train on", "org/rows")
    weights = _probabilities(conv, len(paths))
    split, most = conv.text("dataset_split"), conv.whole("max_samples")
    columns = _columns(conv)
    for number, (key, path) in enumerate(zip(huggingface.keys_of(paths), paths, strict=True)):
        conv.put(f"{key}.path", path.partition("@")[0], "dataset")
        if "@" in path:
            conv.remark(Fate.ABSENT, "dataset", path, "a folder within a set of the hub is not read (@)")
        if weights:
            conv.put(f"{key}.weight", weights[number], "dataset_probs")
        if split and PurePosixPath(path).suffix not in huggingface.FILES:
            conv.put(f"{key}.split", split, "dataset_split")
        for ours, name in columns.items():
            if (theirs := conv.text(name)) and theirs != ours:
                conv.put(f"{key}.columns.{ours}", theirs, name)
    if most is not None:
        conv.put("data.max_samples", most, "max_samples", why="of all sets together there" if paths[1:] else "")
    _lengths(conv)
    _held_out(conv, paths)


def _columns(conv: Conversion) -> dict[str, str]:
    """Return their argument for each of our columns."""
    templated = conv.flag("apply_chat_template")
    if conv.trainer == "sft" and conv.text("output_key") is None:
        if not templated and not conv.flag("pretrain_mode"):
            conv.missing("output_key", "OpenRLHF leaves out every row without an answer", "output")
        return {"messages" if templated else "text": "prompt_key"}
    columns = {"prompt": "prompt_key", "chosen": "chosen_key", "rejected": "rejected_key", "completion": "output_key"}
    columns |= {"label": "label_key"} if conv.trainer == "kto" else {}
    return {ours: name for ours, name in columns.items() if name in conv.by_name}


def _probabilities(conv: Conversion, sources: int) -> list[float]:
    """Return the weights of several sets."""
    texts, weights = conv.texts("dataset_probs"), list[float]()
    if sources == 1:
        return []
    with contextlib.suppress(ValueError):
        weights = [float(each) for each in texts]
    if texts and (len(weights) != sources or not all(0 < each < float("inf") for each in weights)):
        conv.refuse("dataset_probs", f"must be {sources} numbers, one for each set", "Give them, as 0.5,0.5.")
    return weights


def _lengths(conv: Conversion) -> None:
    prompt = conv.whole("prompt_max_len")
    if prompt or (conv.trainer == "ppo" and conv.name("generate_max_len") == "generate_max_len"):
        # until 0.9.7 of OpenRLHF; max_len was then the window of vLLM
        new = conv.whole("generate_max_len", 1024, least=1) if conv.trainer == "ppo" else 0
        why = f"{prompt or 1024} of a prompt and {new} of an answer" if new else ""
        conv.put("data.max_length", (prompt or 1024) + new, "prompt_max_len", why=why)
    else:
        conv.put("data.max_length", conv.whole("max_len"), "max_len")
    conv.put("data.too_long", "truncate", why="another part is cut than by theirs: docs/data.md")


def _held_out(conv: Conversion, paths: list[str]) -> None:
    if (path := conv.text("eval_dataset")) is None:
        if conv.name("train_split") == "train_split" and conv.name("eval_split") and len(paths) == 1:
            conv.put("data.eval_split", conv.text("eval_split"), "eval_split")  # until OpenRLHF 0.6: of the same set
        return
    if len(paths) > 1:
        for name in ("eval_dataset", "eval_split"):
            conv.tell(Fate.OTHER, name, huggingface.OF_EACH)
        return
    if path not in paths:
        conv.put("data.eval_path", path, "eval_dataset")
    if PurePosixPath(path).suffix not in huggingface.FILES:
        conv.put("data.eval_split", conv.text("eval_split"), "eval_split", "eval_dataset")


def _files(conv: Conversion, steps: int = 1) -> None:
    """Set what is written and logged. `steps` is how many a rollout has."""
    if conv.trainer != "ppo":
        conv.put("train.epochs", conv.whole("max_epochs"), "max_epochs")
    if (folder := conv.text("save_path")) is not None:
        conv.on_command_line("hydra.run.dir", folder, "save_path")
    every, evaluated = int(conv.whole("save_steps")), int(conv.whole("eval_steps"))
    conv.put("checkpoint.save_every", None if every < 1 else str(every * steps), "save_steps",
             why=f"{every} rollouts" if every > 0 and conv.trainer == "ppo" else "")  # fmt: skip
    if conv.flag("disable_ds_ckpt"):
        conv.put("checkpoint.save_every", None, "disable_ds_ckpt")
        conv.put("checkpoint.on_exit", False, "disable_ds_ckpt")
    held_out = not {"data.eval_path", "data.eval_split"}.isdisjoint(conv.values)
    if held_out and (evaluated > 0 or conv.trainer != "ppo"):
        conv.put("train.eval_every", evaluated * steps if evaluated > 0 else "1 epoch", "eval_steps")
    key = conv.name("use_wandb")
    if key is not None and conv.get("use_wandb") not in (None, False):
        conv.choose("logger", "wandb", why=f"{key}, whose value is not written here: `wandb login`")
        conv.done.add(key)
    else:
        board = conv.get("use_tensorboard") not in (None, False)
        conv.choose("logger", "tensorboard" if board else "none", "use_tensorboard")
