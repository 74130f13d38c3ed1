"""TRL (1.16): `trl sft`, `dpo`, `kto`, `reward`, `grpo` and `rloo`, CPO and ORPO; and PPO and BCO of earlier versions.
Older names are known too."""

from __future__ import annotations

import re
from typing import Any

from rlexp.convert import adapters, engines, huggingface, kinds, launchers, losses, model_keys
from rlexp.convert import trl_rollouts as rollouts
from rlexp.convert.conversion import Conversion
from rlexp.convert.rules import UNSAID, ByTrainer, Fate, Rule, absent, extended, needless, other, taken, worked_out

TRAINERS = ("dpo", "grpo", "rloo", "ppo", "cpo", "orpo", "sft", "kto", "bco", "reward")
# Arguments that one trainer has and no other: a file does not name its trainer.
TELLTALE = {
    "dpo": "discopop_tau f_divergence_type f_alpha_divergence_coef ld_alpha loss_weights use_weighting rpo_alpha",
    "grpo": "scale_rewards delta importance_sampling_level top_entropy_quantile use_bias_correction_kl "
    "off_policy_mask_threshold multi_objective_aggregation",
    "rloo": "normalize_advantages reward_clip_range rloo_k",
    "ppo": "kl_coef cliprange cliprange_value vf_coef gamma lam num_ppo_epochs num_mini_batches total_episodes "
    "missing_eos_penalty sft_model_path",
    "cpo": "cpo_alpha simpo_gamma gamma_beta_ratio",
    "sft": "packing_strategy assistant_only_loss completion_only_loss dataset_text_field",
    "reward": "center_rewards_coefficient",
    "kto": "desirable_weight undesirable_weight",
    "bco": "prompt_sample_size min_density_ratio max_density_ratio",
}
PAIRS, OF_CPO = "dpo cpo orpo", "cpo orpo"
SINGLE = "kto bco"
OFFLINE = f"{PAIRS} sft {SINGLE} reward"
RATES = ByTrainer(dict.fromkeys(TRAINERS, 1e-6), ppo=3e-6, sft=2e-5, reward=1e-4, bco=5e-7)
# Those whose loss types no other trainer has.
BY_LOSS = {"grpo": (*rollouts.DIVISORS, "bnpo"), "cpo": ("simpo",), "sft": (*losses.SUPERVISED, "dft"),
           "kto": losses.SINGLE, "dpo": (*losses.LOSSES, losses.SFT)}  # fmt: skip
SPLITS = ["train", "test"]  # of alignment-handbook, where a file names none
ORDERS = {"random": True, "sequential": False}
ANOTHER = "another argument chooses the engine"
ALONE = "rlexp always trains only on the assistant's turns"
OF_HEAD = "the head is trained whole here; theirs is frozen unless this is SEQ_CLS, or lora_modules_to_save has it"

RULES: tuple[Rule, ...] = extended(
    huggingface.RULES,
    worked_out("train_sampling_strategy", "data.shuffle", "random is true, sequential is false; kto is sequential",
               of=OFFLINE),
    needless("train_sampling_strategy", "shuffle_dataset says it", of=rollouts.TRAINERS),
    # the model
    worked_out("model_name_or_path", "model=hf, model.path", rest="sft_model_path decides"),
    worked_out("sft_model_path", "model.path", "the policy and the reference", of="ppo"),
    taken("model_revision", "model.revision", to=lambda value: None if value == "main" else value),
    taken("dtype torch_dtype", "model.dtype", "trained weights are float32", to=huggingface.dtype_of),
    taken("attn_implementation", "parallel.kernel", to=huggingface.kernel_of),
    huggingface.TRUST,
    absent("model_init_kwargs", "use the keys of model"),
    worked_out("use_peft", "adapter=lora", "same reference: the model without adapter"),
    *adapters.rules(
        {**adapters.SHAPE, "rank": "lora_r", "targets": "lora_target_modules", "also": "lora_modules_to_save"},
        {"rank": 16, "alpha": 32.0, "dropout": 0.05}, {"use_dora": "dora", "lora_target_parameters": "parameters"},
        targets="all-linear is []; if left out, the file sets peft's choice",
    ),
    worked_out("lora_task_type", "adapter=lora", "rlexp trains a reward model's head whole",
               "the loss says which head the model has", default="CAUSAL_LM"),
    absent("load_in_4bit load_in_8bit", adapters.QUANTIZED, until="quant"),
    needless("use_bnb_nested_quant bnb_4bit_quant_type bnb_4bit_quant_storage", adapters.OF_QUANTIZED),
    absent("router_aux_loss_coef", "no auxiliary loss for experts", until="router aux_loss"),
    absent("sync_ref_model", "the reference stays the model at the start"),
    needless("ref_model_mixup_alpha ref_model_sync_steps", "only with sync_ref_model"),
    needless("disable_dropout", "there is no dropout here"),
    needless("ignore_bias_buffers ds3_gather_for_generation pad_to_multiple_of padding_free pad_token "
             "gradient_checkpointing_use_reentrant cast_lm_head_to_fp32", "no number depends on it here"),
    absent("activation_offloading", "use memory.checkpointing", until="activation_offload"),
    # data
    worked_out("dataset_name", "data=hf, data.path", rest="datasets decides"),
    worked_out("dataset_config", "data.subset", rest="datasets decides"),
    worked_out("dataset_train_split", "data.split", rest="datasets decides"),
    worked_out("dataset_test_split", "data.eval_split", "only if it is evaluated",
               "nothing is evaluated, or another argument says on what", default="test"),
    taken("dataset_streaming streaming", "data.streaming", to=lambda value: True if kinds.flag(value) else UNSAID),
    worked_out("datasets", "data.sources", "a fraction is a weight; each epoch takes other rows"),
    worked_out("dataset_mixture", "data.sources", "alignment-handbook, open-r1", "datasets decides"),
    worked_out("dataset_mixer", "data.sources", "alignment-handbook until 0.4", "datasets decides"),
    worked_out("dataset_splits", "data.split, data.eval_split", "of dataset_mixer", "nothing is evaluated"),
    taken("dataset_prompt_column", "data.columns.prompt", "of open-r1", of=rollouts.DRAWING),
    taken("system_prompt", "data.system", "of open-r1", of=rollouts.DRAWING),
    other("chat_template", "model.chat_template", "rlexp takes a file"),
    worked_out("test_split_size", "data.eval_size", "rlexp rounds a share down, theirs up"),
    taken("dataset_num_proc preprocessing_num_workers", "data.workers"),
    worked_out("max_length max_seq_length", "data.max_length", "tokens of prompt and answer", of=OFFLINE,
               default=rollouts.LONG, least=1),
    worked_out("max_prompt_length", "data.max_length", "one limit, for prompt and answer together"),
    worked_out("truncation_mode", "data.too_long=truncate", "rlexp cuts the prompt's start, then the answer's end",
               "nothing is cut", of=f"{PAIRS} sft {SINGLE}"),
    absent("tools", "put tools in a column of the rows"),
    absent("dataset_kwargs", "rlexp always tokenizes rows", {"skip_prepare_dataset": False}),
    taken("chat_template_kwargs", "data.template_options", of=rollouts.DRAWING),
    taken("shuffle_dataset", "data.shuffle", of=rollouts.DRAWING),
    taken("chat_template_path", "model.chat_template", "a jinja file", of="sft reward", to=model_keys.template_file),
    absent("eos_token", "the tokenizer or its template ends an answer", of="sft reward"),
    # supervised training
    worked_out("loss_type", "loss=sft", "nll; others are missing", of="sft", until="loss=dft"),
    worked_out("dataset_text_field", "data.columns.text", "of rows that are plain texts",
               "the column is found by its name", default="text", of="sft"),
    worked_out("packing", "data.packing", "theirs counts blocks of rows", of="sft"),
    absent("packing_strategy", "no row is cut into pieces", "bfd", of="sft"),
    needless("eval_packing", "held-out rows count alike, packed or not", of="sft"),
    needless("shuffle_dataset", "an epoch has an order of its own in any case", of="sft"),
    worked_out("assistant_only_loss", "loss=sft", ALONE, ALONE, of="sft"),
    worked_out("completion_only_loss", "loss=sft", "rlexp never trains on prompts", "rlexp never trains on prompts",
               default=True, of="sft"),
    # single answers
    worked_out("loss_type", "loss=kto or loss=apo_zero_unpaired", of="kto"),
    taken("beta", "loss.beta", default=0.1, of=SINGLE),
    *losses.weights("desirable_weight", "undesirable_weight", "kto"),
    worked_out("precompute_ref_log_probs", "reference=precompute", "dpo, bco, and kto with apo_zero_unpaired",
               of=f"dpo {SINGLE}"),
    needless("precompute_ref_batch_size label_pad_token_id padding_value is_encoder_decoder use_logits_to_keep",
             "the numbers are the same", of=f"{PAIRS} {SINGLE}"),
    other("max_completion_length max_target_length", "data.max_length",
          "one limit, for prompt and answer together; TRL before 0.29 cuts an answer there", of=f"{PAIRS} {SINGLE}"),
    absent("generate_during_eval", "use `python -m rlexp.generate`", of=f"{PAIRS} {SINGLE}"),
    needless("prompt_sample_size min_density_ratio max_density_ratio",
             "only with a function for embeddings, which a file does not name", of="bco"),
    # reward models
    taken("center_rewards_coefficient", "loss.center", default=0.0, of="reward"),
    # DPO and its family
    *losses.rules("dpo", also="cpo"),
    *losses.of_cpo_rules("cpo"),
    taken("beta", "loss.beta", default=0.1, of=PAIRS),
    absent("alpha", "no AlphaPO", of="cpo"),
    absent("f_divergence_type", "rlexp uses the reverse KL", "reverse_kl", of="dpo"),
    needless("f_alpha_divergence_coef", "only with another f_divergence_type", of="dpo"),
    absent("reference_free force_use_ref_model", "loss=cpo has no reference", of="dpo"),
    worked_out("gamma_beta_ratio", "loss=simpo, loss.gamma", "times beta; of SimPO's own trainer", of="cpo"),
    *rollouts.RULES,
    taken("wandb_project", "logger.project"),
    taken("wandb_entity", "logger.entity"),
    # the launcher
    worked_out("num_processes", "launch.nproc", "GPUs of all machines", launchers.COUNTED),
    *launchers.RULES,
    worked_out("accelerate_config config_file", "engine", "zero1, zero2, zero3, fsdp1 or fsdp2"),
    worked_out("deepspeed_config_file", "engine, engine.offload", "as deepspeed", ANOTHER),
    worked_out("zero_stage", "engine"),
    worked_out("offload_optimizer_device", "engine.offload=optimizer", rest="engine.offload says it"),
    worked_out("offload_param_device", "engine.offload=all", "with engine=zero3", "engine.offload says it"),
    worked_out("use_fsdp", "engine=fsdp2", rest=ANOTHER),
    worked_out("parallelism_config_cp_size", "parallel.ring_size", rest="it is 1"),
    worked_out("parallelism_config_sp_size", "parallel.ring_size, parallel.layout=ulysses",
               rest="it is 1, or the other one decides"),
    needless("machine_rank main_process_ip main_process_port mixed_precision gpu_ids use_deepspeed env config "
             "multi_gpu fsdp_version dynamo_backend", launchers.STARTS),
    absent("parallelism_config_tp_size", "no tensor parallelism", 1, until="tensor_parallel"),
    learning_rate=RATES, gradient_checkpointing=True,
)  # fmt: skip


def trainer_of(given: dict[str, Any]) -> str | None:
    """Return the trainer that a file is for, if an argument of it belongs to one trainer only."""
    trainers = [name for name, words in TELLTALE.items() if set(words.split()) & given.keys()]
    loss = given.get("loss_type")
    losses = {str(each) for each in (loss if isinstance(loss, list) else [loss])}
    trainers = trainers or [name for name, types in BY_LOSS.items() if losses and losses <= {*types}
                            and (isinstance(loss, str) or name == "dpo")]  # fmt: skip
    return trainers[0] if len(trainers) == 1 else None


def convert(conv: Conversion) -> None:
    gpus = launchers.needed(conv)
    name = _ring(conv)
    sized = huggingface.sizes(conv, gpus, name)
    steps = huggingface.shared(conv, bf16=True)
    _engine(conv)
    _model(conv)
    _adapter(conv)
    huggingface.evaluation(conv, steps, _data(conv))
    if conv.trainer in rollouts.TRAINERS.split():
        rollouts.convert(conv, gpus // int(conv.whole(name, 1)), *sized)
        return
    _loss(conv)
    if conv.get("dataset_mixer") and conv.flag("auto_insert_empty_system_msg", True):
        why = (
            "alignment-handbook gives rows without a system message an empty one, and a tokenizer without <|im_start|> "
            "ChatML's tokens (model.add_tokens)"
        )
        conv.remark(Fate.OTHER, "auto_insert_empty_system_msg", True, why)
    if "precompute_ref_log_probs" in conv.by_name:
        adapters.precomputed(conv)
    _lengths(conv)
    _order(conv)
    huggingface.drop_last(conv)


def _ring(conv: Conversion) -> str:
    """Return which of accelerate's sizes, for context and for sequence parallelism, is the ring's."""
    by_context, by_sequence = "parallelism_config_cp_size", "parallelism_config_sp_size"
    if conv.whole(by_context, 1, least=1) > 1 or conv.whole(by_sequence, 1, least=1) == 1:
        return by_context
    conv.put("parallel.layout", "ulysses", by_sequence)
    return by_sequence


def _engine(conv: Conversion) -> None:
    """Choose the engine by accelerate's arguments, unless the trainer's own have chosen one. The first one decides."""
    ways = {"accelerate_config": _by_profile, "deepspeed_config_file": engines.from_deepspeed,
            "zero_stage": engines.by_stage}  # fmt: skip
    for name, choose in ways.items():
        if "engine" not in conv.choices and conv.get(name) is not None:
            choose(conv, name)
    if "engine" not in conv.choices and conv.flag("use_fsdp"):
        conv.choose("engine", "fsdp2", "use_fsdp")
    engines.offload(conv, weights="offload_param_device", optimizer="offload_optimizer_device")


def _by_profile(conv: Conversion, name: str) -> None:
    profile = conv.text(name).rpartition("/")[2]
    if (match := re.search(r"zero([0-3])", profile)) is not None:
        conv.choose("engine", f"zero{match[1]}", name)
    elif "fsdp" in profile:
        conv.choose("engine", "fsdp2", name)
    elif re.search("multi_gpu|single_gpu|ddp", profile):
        conv.tell(Fate.NEEDLESS, name, "each rank holds the whole state, unless an engine splits it")
    else:
        conv.tell(Fate.OTHER, name, "the engine holds the training state: engine=zero3, as docs/engines.md says")


def _model(conv: Conversion) -> None:
    """Choose the model that is trained: TRL's PPO takes policy and reference from sft_model_path."""
    whole, policy = conv.get("model_name_or_path"), conv.get("sft_model_path")
    by_policy = conv.trainer == "ppo" and (policy is not None or whole is None)
    model_keys.trained(conv, "sft_model_path" if by_policy else "model_name_or_path")
    if by_policy and conv.text("model_name_or_path") != conv.text("sft_model_path"):
        conv.tell(Fate.OTHER, "model_name_or_path", "PPO takes the tokenizer from it; policy and reference are "
                  "sft_model_path, whose own tokenizer is used here")  # fmt: skip
    elif conv.trainer == "ppo" and not by_policy:
        why = "TRL's PPO takes policy and reference from sft_model_path, which is not given; this one is taken"
        conv.remark(Fate.OTHER, "model_name_or_path", whole, why)


def _adapter(conv: Conversion) -> None:
    if not conv.flag("use_peft"):
        adapters.none(conv, "use_peft")
        return
    adapters.lora(conv, "use_peft", targets=adapters.of_family(conv))
    whole = conv.text("lora_task_type") == "SEQ_CLS" or "score" in conv.texts("modules_to_save")
    if conv.trainer == "reward" and not whole:
        conv.differs("lora_task_type", OF_HEAD)


def _data(conv: Conversion) -> bool:
    """Set the rows; return whether some are held out."""
    sources = _sets(conv)
    keys = huggingface.keys_of(sources or [{}])
    for key, source in zip(keys, sources, strict=False):
        _source(conv, key, source, _argument(conv))
    if not sources and conv.get("dataset_name") is None:
        why = "so is datasets; without them nothing says what to train on"
        conv.missing("dataset_name", why, "trl-lib/ultrafeedback_binarized")
    if not sources:
        for name, leaf in (("dataset_name", "path"), ("dataset_config", "subset"), ("dataset_train_split", "split")):
            if conv.get(name) is not None:
                conv.put(f"data.{leaf}", conv.text(name), name)
    rows = huggingface.held_out(conv, "test_split_size")
    evaluates = conv.get("eval_strategy", "no") not in ("no", False)
    size, splits = conv.mapping("dataset_mixture").get("test_split_size"), conv.texts("dataset_splits") or SPLITS
    split = splits[1] if splits[1:] and conv.mapping("dataset_mixer") else None
    if kinds.is_number(size) and size:
        conv.put("data.eval_size", size, "dataset_mixture", why="its test_split_size")
    elif split and evaluates:
        for key in keys:
            conv.put(f"{key}.eval_split", split, "dataset_splits")
    elif rows or not evaluates:
        return rows
    elif sources:
        key = "data.eval_split" if len(sources) == 1 else "data.sources.NAME.eval_split"
        why = f"{_argument(conv)} has no held-out rows: give data.eval_size, or {key}"
        conv.tell(Fate.OTHER, "eval_strategy", why)
        return False
    else:
        conv.put("data.eval_split", conv.text("dataset_test_split"), "dataset_test_split")
    return True


def _sets(conv: Conversion) -> list[dict[str, Any]]:
    """Return the sets as TRL's `datasets` has them: each a path, a name, a split."""
    mixture, mixer = conv.mapping("dataset_mixture"), conv.mapping("dataset_mixer")
    each = mixture.get("datasets")
    if mixture and not (isinstance(each, list) and all(isinstance(one, dict) for one in each)):
        conv.refuse("dataset_mixture", "must have datasets, a list of mappings", "Give each one an id.")
    splits = conv.texts("dataset_splits") or SPLITS
    each = each or [{"id": name, "weight": share, "split": splits[0]} for name, share in mixer.items()]
    return conv.entries("datasets") or [_as_trl(conv, one) for one in each]


def _argument(conv: Conversion) -> str:
    """Return the argument that names the sets."""
    return next((each for each in ("datasets", "dataset_mixture", "dataset_mixer") if conv.get(each)), "datasets")


def _as_trl(conv: Conversion, one: dict[str, Any]) -> dict[str, Any]:
    """Write the share of a set's rows as a slice of its split."""
    share, split = one.get("weight"), str(one.get("split") or "train")
    if isinstance(share, int | float) and 0 < share < 1:
        split = f"{split}[:{max(1, round(100 * share))}%]"
        drawn = "; theirs are drawn" * (_argument(conv) == "dataset_mixture")
        conv.remark(Fate.OTHER, f"{_argument(conv)}: weight", share, f"the first rows of a set{drawn}")
    return {"path": one.get("id"), "split": split} | ({"name": one["config"]} if one.get("config") else {})


def _source(conv: Conversion, key: str, source: dict[str, Any], by: str) -> None:
    files, path = source.get("data_files"), source.get("path")
    if files is None and path is None:
        conv.refuse(by, "must be a list of mappings, each with a path", "Give each one a path.")
    conv.put(f"{key}.path", files if files and path in ("json", "parquet") else path, by)
    known = {"name": "subset", "split": "split"} | ({"fraction": "weight"} if key != "data" else {})
    for theirs, ours in known.items():
        if source.get(theirs) is not None:
            conv.put(f"{key}.{ours}", source[theirs], by)
    for name in sorted(source.keys() - {"path", "data_files", *known}):
        why = "columns are found by their names: data.columns" if name == "columns" else "a source has no such key"
        conv.remark(Fate.ABSENT, f"datasets: {name}", source[name], why)


def _loss(conv: Conversion) -> None:
    match conv.trainer:
        case "dpo":
            losses.choose(conv)
        case "cpo":
            _cpo(conv)
        case "orpo":
            losses.without_reference(conv, "orpo", note=losses.OF_PROMPTS)
        case "sft":
            _sft(conv)
        case "reward":
            losses.reward_model(conv, notes=[losses.OF_ENDS, losses.OF_SCORES])
        case single:
            loss = losses.chosen_of(conv, losses.SINGLE, "kto") if single == "kto" else "bco"
            losses.single(conv, loss, *["loss_type"] * (single == "kto"))
            conv.notes.append(losses.OF_PAIRS)


def _cpo(conv: Conversion) -> None:
    """Set CPO's loss, or SimPO's: its own trainer has another default of beta, and no likelihood."""
    loss, ratio = losses.of_cpo(conv), conv.number("gamma_beta_ratio")
    if ratio is None:
        losses.without_reference(conv, loss, "loss_type", likelihood="cpo_alpha")
        return
    beta = conv.number("beta") if conv.name("beta") else 2.0
    conv.put("loss.beta", beta, "beta")
    losses.without_reference(conv, "simpo", "gamma_beta_ratio", likelihood="cpo_alpha", weight=0.0,
                             gamma=ratio * beta)  # fmt: skip


def _sft(conv: Conversion) -> None:
    losses.chosen_of(conv, losses.SUPERVISED, "nll")
    conv.choose("loss", "sft", "loss_type")
    if conv.get("dataset_mixer"):
        why = f"alignment-handbook packs rows by itself; {losses.OF_BLOCKS}"
        conv.remark(Fate.OTHER, "packing", conv.get("packing", True), why)
    if not conv.flag("assistant_only_loss"):
        conv.notes.append(losses.OF_CONVERSATIONS)
        conv.tell(Fate.OTHER, "assistant_only_loss", ALONE)
    if not conv.flag("completion_only_loss"):
        conv.tell(Fate.OTHER, "completion_only_loss", "rlexp never trains on prompts")
    if (column := conv.text("dataset_text_field")) != "text":
        for key in huggingface.keys_of(_sets(conv) or [{}]):
            conv.put(f"{key}.columns.text", column, "dataset_text_field", why="only if rows are plain texts")
    if conv.flag("packing"):
        conv.tell(Fate.OTHER, "packing", losses.OF_BLOCKS)
    else:
        conv.tell(Fate.NEEDLESS, "packing_strategy", "nothing is packed")


def _order(conv: Conversion) -> None:
    """Set whether rows are shuffled: TRL's KTO takes them as they are."""
    name = "train_sampling_strategy"
    order = conv.text(name, "sequential" if conv.trainer == "kto" else "random")
    if order in ORDERS and (conv.name(name) or conv.trainer == "kto"):
        conv.put("data.shuffle", ORDERS[order], name)
    conv.tell(Fate.ABSENT, name, "samples are shuffled, or taken in their order (data.shuffle)")


def _lengths(conv: Conversion) -> None:
    if conv.name("max_length") is not None and conv.given_value("max_length") is None:
        conv.put("data.too_long", "error", "max_length")
        why = "no limit there; data.max_length is a number here, and a longer row is an error that names it"
        conv.remark(Fate.OTHER, "max_length", None, why)
    else:
        conv.put("data.max_length", conv.whole("max_length"), "max_length")
        if conv.trainer == "reward":
            conv.put("data.too_long", "drop", "max_length", why="longer pairs are left out")
        else:
            why = "another part is cut than by TRL: docs/data.md"
            conv.put("data.too_long", "truncate", "truncation_mode", why=why)
    conv.tell(Fate.OTHER, "max_prompt_length", "data.max_length is one limit, for prompt and answer together")
