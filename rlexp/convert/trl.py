"""TRL (1.16): `trl sft`, `dpo`, `kto`, `reward`, `grpo` and `rloo`, CPO and ORPO; and PPO and BCO of earlier versions.
Older names are known too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rlexp.convert import answers, engines, huggingface, launchers, preference
from rlexp.convert.huggingface import LORA_NOT_YET, HeldOut
from rlexp.convert.rules import (
    Conversion,
    ConvertError,
    Fate,
    Rule,
    absent,
    needless,
    other,
    taken,
    worked_out,
)

TRAINERS = ("dpo", "grpo", "rloo", "ppo", "cpo", "orpo", "sft", "kto", "bco", "reward")
# Arguments that one trainer has and no other: a file does not name its trainer.
TELLTALE = {
    "dpo": "discopop_tau f_divergence_type f_alpha_divergence_coef ld_alpha loss_weights use_weighting "
    "reference_free rpo_alpha",
    "grpo": "scale_rewards delta importance_sampling_level top_entropy_quantile use_bias_correction_kl "
    "off_policy_mask_threshold multi_objective_aggregation",
    "rloo": "normalize_advantages reward_clip_range rloo_k",
    "ppo": "kl_coef cliprange cliprange_value vf_coef gamma lam num_ppo_epochs num_mini_batches total_episodes "
    "missing_eos_penalty sft_model_path",
    "cpo": "cpo_alpha simpo_gamma",
    "sft": "packing_strategy assistant_only_loss completion_only_loss dataset_text_field",
    "reward": "center_rewards_coefficient",
    "kto": "desirable_weight undesirable_weight",
    "bco": "prompt_sample_size min_density_ratio max_density_ratio",
}
RL, DRAWING, PAIRS, OF_CPO = "grpo rloo ppo", "grpo rloo", "dpo cpo orpo", "cpo orpo"
SINGLE = "kto bco"
OFFLINE = f"{PAIRS} sft {SINGLE} reward"
RATES = {"ppo": 3e-6, "sft": 2e-5, "reward": 1e-4, "bco": 5e-5}
DIVISORS = {"grpo": "sequence", "dapo": "token", "dr_grpo": "fixed"}
LONG = 1024
OF_SFT = (*answers.SUPERVISED, "dft")
ORDERS = {"random": True, "sequential": False}

RULES: tuple[Rule, ...] = (
    *(rule for rule in huggingface.RULES if rule.names[0] not in ("dataloader_drop_last", "train_sampling_strategy")),
    worked_out("dataloader_drop_last", "data.drop_last", "", of=OFFLINE),
    needless("dataloader_drop_last", "a rollout has whole train batches", of=RL),
    worked_out("train_sampling_strategy", "data.shuffle", "random is true, sequential is false; kto is sequential",
               of=OFFLINE),
    needless("train_sampling_strategy", "shuffle_dataset says it", of=RL),
    # the model
    worked_out("model_name_or_path", "model=hf, model.path", ""),
    worked_out("sft_model_path", "model.path", "the policy and the reference", of="ppo"),
    taken("model_revision", "model.revision", to=lambda value: None if value == "main" else value),
    taken("dtype torch_dtype", "model.dtype", "weights that are trained are float32 here", to=huggingface.dtype_of),
    taken("attn_implementation", "parallel.kernel", to=huggingface.kernel_of),
    taken("trust_remote_code", "model.trust_remote_code"),
    absent("model_init_kwargs", "keys of model name the revision, the dtype and the tokenizer's additions", {}),
    absent("use_peft", "LoRA is not here: all weights are trained, with a smaller rate", False,
           until=LORA_NOT_YET),
    *(absent(f"lora_{name}", "LoRA is not here", until=LORA_NOT_YET) for name in (
        "r", "alpha", "dropout", "target_modules", "target_parameters", "modules_to_save", "task_type")),
    absent("use_rslora use_dora", "LoRA is not here", False, until=LORA_NOT_YET),
    absent("load_in_4bit load_in_8bit use_bnb_nested_quant bnb_4bit_quant_type bnb_4bit_quant_storage",
           "weights are not quantized", False, "nf4", until="quant"),
    absent("router_aux_loss_coef", "the loss of a mixture of experts has no term of its own", 0, 0.0,
           until="router aux_loss"),
    absent("sync_ref_model", "the reference is the model at the start", False),
    needless("ref_model_mixup_alpha ref_model_sync_steps", "only with sync_ref_model"),
    needless("disable_dropout", "there is no dropout here"),
    needless("ignore_bias_buffers activation_offloading ds3_gather_for_generation pad_to_multiple_of padding_free "
             "pad_token gradient_checkpointing_use_reentrant cast_lm_head_to_fp32", "no number depends on it here"),
    # data
    worked_out("dataset_name", "data=hf, data.path", ""),
    worked_out("dataset_config", "data.subset", ""),
    worked_out("dataset_train_split", "data.split", ""),
    worked_out("dataset_test_split", "data.eval_split", "only if it is evaluated"),
    worked_out("dataset_streaming streaming", "data.streaming", ""),
    worked_out("datasets", "data.sources", "a fraction is a weight; it takes other rows in the next epoch here"),
    worked_out("test_split_size", "data.eval_size", "a number of rows"),
    taken("dataset_num_proc", "data.workers"),
    worked_out("max_length", "data.max_length", "tokens of prompt and answer together", of=OFFLINE),
    worked_out("max_prompt_length", "data.max_length", "there is one limit, for prompt and answer together"),
    worked_out("truncation_mode", "data.too_long=truncate",
               "the start of the prompt is cut first, then the end of the answers", of=f"{PAIRS} sft {SINGLE}"),
    absent("tools", "tools are a column of the rows"),
    absent("dataset_kwargs", "rows are always tokenized here", {}, {"skip_prepare_dataset": False}),
    taken("chat_template_kwargs", "data.template_options", of=DRAWING),
    taken("shuffle_dataset", "data.shuffle", of=DRAWING),
    worked_out("chat_template_path", "model.chat_template", "a jinja file", of="sft reward"),
    absent("eos_token", "the tokenizer's own end of sequence, or its template, ends an answer", of="sft reward"),
    # supervised training
    worked_out("loss_type", "loss=sft", "nll; others are not here", of="sft", until="loss=dft"),
    worked_out("dataset_text_field", "data.columns.text", "of rows that are plain texts", of="sft"),
    worked_out("packing", "data.packing",
               "a sample of the batch is a block of several rows there, and one row here", of="sft"),
    absent("packing_strategy", "no row is cut into pieces", "bfd", of="sft"),
    needless("eval_packing", "held-out rows count alike, packed or not", of="sft"),
    needless("shuffle_dataset", "an epoch has an order of its own in any case", of="sft"),
    worked_out("assistant_only_loss", "loss=sft", "the assistant's turns alone are trained on", of="sft"),
    worked_out("completion_only_loss", "loss=sft", "a prompt is never trained on", of="sft"),
    # single answers
    worked_out("loss_type", "loss=kto or loss=apo_zero_unpaired", "", of="kto"),
    worked_out("beta", "loss.beta", "", of=SINGLE),
    worked_out("desirable_weight", "loss.desirable_weight", "", of="kto"),
    worked_out("undesirable_weight", "loss.undesirable_weight", "", of="kto"),
    needless("precompute_ref_log_probs precompute_ref_batch_size label_pad_token_id padding_value is_encoder_decoder "
             "max_completion_length", "the numbers are the same; data.max_length is one limit", of=SINGLE),
    absent("generate_during_eval", "no answers are drawn for rows that have one", False, of=SINGLE),
    needless("prompt_sample_size min_density_ratio max_density_ratio",
             "only with a function for embeddings, which a file does not name", of="bco"),
    # reward models
    worked_out("center_rewards_coefficient", "loss.center", "", of="reward"),
    # DPO and its family
    worked_out("loss_type", "loss, loss.normalize, loss.shift", preference.TYPES, of="dpo", until=preference.NOT_YET),
    worked_out("loss_weights", "loss.terms, loss.sft_weight", "", of="dpo"),
    taken("beta", "loss.beta", default=0.1, of=PAIRS),
    worked_out("label_smoothing", "loss.label_smoothing", "TRL ignores it for sigmoid since 0.29", of="dpo cpo"),
    worked_out("ld_alpha", "loss.ld_alpha", "", of="dpo"),
    worked_out("discopop_tau", "loss.tau", "", of="dpo"),
    worked_out("use_weighting", "loss.wpo", "", of="dpo"),
    worked_out("rpo_alpha", "loss.sft_weight", "of older TRL", of="dpo"),
    worked_out("loss_type", "loss=cpo or loss=simpo", "hinge and ipo have a reference here", of="cpo"),
    worked_out("cpo_alpha", "loss.sft_weight", "", of="cpo"),
    worked_out("simpo_gamma", "loss.gamma", "", of="cpo"),
    absent("alpha", "a reward is a log-probability (AlphaPO is not here)", 0, 0.0, of="cpo"),
    absent("f_divergence_type", "the reverse KL is the divergence here", "reverse_kl", of="dpo"),
    needless("f_alpha_divergence_coef", "only with another f_divergence_type", of="dpo"),
    absent("reference_free force_use_ref_model", "the reference is the model at the start; loss=cpo has none", False,
           of="dpo"),
    absent("generate_during_eval", "no answers are drawn for pairs", False, of=PAIRS),
    needless("precompute_ref_log_probs precompute_ref_batch_size label_pad_token_id use_logits_to_keep "
             "max_target_length",
             "the numbers are the same", of="dpo"),
    needless("label_pad_token_id padding_value is_encoder_decoder max_completion_length", "the numbers are the same; "
             "data.max_length is one limit", of=OF_CPO),
    # samples
    worked_out("num_generations rloo_k", "rollout.n_samples", "", of=DRAWING),
    worked_out("max_completion_length response_length", "rollout.max_new_tokens", "", of=RL),
    worked_out("steps_per_generation", "rollout.batch_size", "samples of a rollout are split into train batches",
               of=DRAWING),
    worked_out("generation_batch_size", "rollout.batch_size", "prompts, not answers", of=DRAWING),
    taken("num_iterations", "rollout.epochs", default=1, of=DRAWING),
    taken("temperature", "rollout.temperature", default=1.0, of=DRAWING),
    taken("temperature", "rollout.temperature", default=0.7, of="ppo"),
    taken("top_p", "rollout.top_p", default=1.0, of=DRAWING),
    taken("top_k", "rollout.top_k", default=0, to=lambda value: value or 0, of=DRAWING),
    taken("min_p", "rollout.min_p", to=lambda value: value or 0.0, of=DRAWING),
    absent("generation_kwargs", "rollout.stop, top_k, top_p, min_p and temperature are the choices here", {},
           of=DRAWING),
    absent("repetition_penalty", "tokens are drawn by their likelihood alone", 1.0, 1, of=DRAWING, until="repetition"),
    absent("vllm_structured_outputs_regex", "answers are drawn freely", of=DRAWING),
    absent("num_generations_eval", "each held-out prompt gets one answer", of=DRAWING),
    worked_out("use_vllm", "rollout.engine=vllm", "", of=DRAWING),
    worked_out("vllm_mode", "rollout.mode", "a server of vLLM's own is not here", of=DRAWING),
    taken("vllm_gpu_memory_utilization", "rollout.vllm_memory", of=DRAWING),
    absent("vllm_tensor_parallel_size", "a model is not split across GPUs to sample", 1, of=DRAWING),
    absent("vllm_enable_sleep_mode", "vLLM keeps its memory", False, of=DRAWING),
    needless("vllm_model_impl vllm_max_model_length vllm_max_model_len vllm_device vllm_dtype vllm_server_base_url "
             "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port cache_implementation",
             "no number depends on it", of=DRAWING),
    worked_out("vllm_importance_sampling_correction", "rollout.importance_cap",
               "weighs samples that vLLM's own kernels drew", of=DRAWING),
    worked_out("vllm_importance_sampling_mode", "rollout.importance_cap", "token_truncate is here, others are not",
               of=DRAWING),
    worked_out("vllm_importance_sampling_clip_max vllm_importance_sampling_cap", "rollout.importance_cap", "",
               of=DRAWING),
    absent("vllm_importance_sampling_clip_min", "a weight has no lower limit", of=DRAWING),
    needless("use_transformers_paged use_transformers_continuous_batching transformers_continuous_batching_config",
             "no number depends on it", of=DRAWING),
    worked_out("mask_truncated_completions", "rollout.overlong=mask", "", of=DRAWING),
    worked_out("log_completions", "rollout.show_every", "", of=DRAWING),
    taken("num_completions_to_print", "rollout.show", of=DRAWING),
    needless("log_unique_prompts wandb_log_unique_prompts log_multimodal log_completions_hub_repo",
             "a few samples of a rollout are shown", of=DRAWING),
    absent("max_tool_calling_iterations", "answers call no tools while they are drawn", of=DRAWING, until="tool_call"),
    # rewards
    worked_out("reward_funcs", "reward=python, reward.function",
               "the function gets other arguments: docs/rewards.md", of=DRAWING),
    worked_out("reward_model_name_or_path reward_model_path", "reward=model, reward.path", "", of=RL),
    worked_out("reward_weights", "reward.terms.NAME.weight", "", of=DRAWING),
    absent("multi_objective_aggregation", "scores are added up, then normalized", "sum_then_normalize", of="grpo"),
    # GRPO
    worked_out("scale_rewards", "loss=grpo or loss=dr_grpo", "", of="grpo"),
    worked_out("loss_type", "loss.normalize", "grpo is sequence, dapo is token, dr_grpo is fixed", of="grpo"),
    worked_out("importance_sampling_level", "loss=gspo", "sequence, with loss_type=grpo", of="grpo"),
    worked_out("beta", "loss.beta", "", of="grpo"),
    worked_out("use_bias_correction_kl", "loss.kl", "", of="grpo"),
    worked_out("epsilon", "loss.clip_low", "", of=DRAWING),
    worked_out("epsilon_high", "loss.clip_high", "", of=DRAWING),
    taken("delta", "loss.dual_clip", of="grpo"),
    taken("entropy_coef", "loss.entropy", of="grpo"),
    absent("use_adaptive_entropy", "the weight of the entropy is fixed", False, of="grpo"),
    needless("entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target", "only with use_adaptive_entropy",
             of="grpo"),
    absent("top_entropy_quantile", "every token of an answer is trained on", 1.0, 1, of="grpo"),
    absent("off_policy_mask_threshold", "samples are weighed, not left out", of="grpo"),
    needless("sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg",
             "only with losses that are not here", of="grpo"),
    # RLOO
    taken("beta", "loss.beta", default=0.05, of="rloo"),
    absent("normalize_advantages", "loss.whiten normalizes over the train batch, by tokens", False, of="rloo"),
    absent("reward_clip_range", "scores are taken as they are", of="rloo"),
    # PPO
    taken("kl_coef", "loss.beta", default=0.05, of="ppo"),
    taken("kl_estimator", "loss.kl", default="k1", of="ppo"),
    worked_out("cliprange", "loss.clip_low, loss.clip_high", "", of="ppo"),
    taken("cliprange_value", "loss.value_clip", default=0.2, of="ppo"),
    taken("vf_coef", "loss.value_coef", default=0.1, of="ppo"),
    taken("gamma", "loss.gamma", default=1.0, of="ppo"),
    taken("lam", "loss.lam", default=0.95, of="ppo"),
    taken("num_ppo_epochs", "rollout.epochs", default=4, of="ppo"),
    other("num_mini_batches", "rollout.minibatches",
          "TRL takes one step for each of its PPO epochs, whatever this says; here train.batch_size decides", of="ppo"),
    worked_out("total_episodes", "train.max_steps", "", of="ppo"),
    worked_out("missing_eos_penalty", "rollout.overlong=penalty, rollout.overlong_penalty", "", of="ppo"),
    needless("stop_token stop_token_id", "an answer ends with the end-of-sequence token", of="ppo"),
    absent("whiten_rewards", "advantages are normalized (loss.whiten), rewards are not", False, of="ppo"),
    needless("local_rollout_forward_batch_size num_sample_generations exp_name batch_size mini_batch_size "
             "micro_batch_size local_batch_size num_total_batches", "no number depends on it", of="ppo"),
    # the launcher
    worked_out("num_processes", "launch.nproc", "the GPUs of all machines together"),
    *launchers.RULES,
    worked_out("accelerate_config config_file", "engine", "zero1, zero2, zero3, fsdp1 or fsdp2"),
    worked_out("deepspeed_config_file", "engine, engine.offload", "as deepspeed"),
    worked_out("zero_stage", "engine", ""),
    worked_out("offload_optimizer_device", "engine.offload=optimizer", ""),
    worked_out("offload_param_device", "engine.offload=all", "with engine=zero3"),
    worked_out("use_fsdp", "engine=fsdp2", ""),
    worked_out("parallelism_config_cp_size", "parallel.ring_size", ""),
    worked_out("parallelism_config_sp_size", "parallel.ring_size, parallel.layout=ulysses", ""),
    needless("machine_rank main_process_ip main_process_port mixed_precision gpu_ids use_deepspeed env config "
             "multi_gpu fsdp_version dynamo_backend", launchers.STARTS),
    absent("parallelism_config_tp_size", "a model is not split across GPUs by tensor parallelism", 1,
           until="tensor_parallel"),
)  # fmt: skip


def trainer_of(given: dict[str, Any]) -> str | None:
    """Return the trainer that a file is for, if an argument of it belongs to one trainer only."""
    found = [name for name, words in TELLTALE.items() if set(words.split()) & given.keys()]
    loss = given.get("loss_type")
    if not found and isinstance(loss, str) and loss in (*DIVISORS, "bnpo"):
        return "grpo"
    if not found and loss == "simpo":
        return "cpo"
    if not found and isinstance(loss, str):
        found = [name for name, types in (("sft", OF_SFT), ("kto", answers.SINGLE)) if loss in types]
    losses = [str(each) for each in (loss if isinstance(loss, list) else [loss])]
    if not found and losses and all(each in (*preference.LOSSES, preference.SFT) for each in losses):
        return "dpo"
    return found[0] if len(found) == 1 else None


def convert(conv: Conversion) -> None:
    gpus = launchers.asked_for(conv.name("per_device_train_batch_size") or "per_device_train_batch_size",
        launchers.ranks(conv, "nproc_per_node"),
    )  # fmt: skip
    ring = _ring(conv)
    sized = huggingface.sizes(conv, gpus, ring=ring, ring_name=_ring_name(conv))
    steps = huggingface.shared(conv, bf16=True)
    _engine(conv)
    conv.put("optim.lr", conv.number("learning_rate", RATES.get(conv.trainer, 1e-6)), "learning_rate")
    if conv.name("activation_checkpointing") is None and "memory.checkpointing" not in conv.values:
        conv.put("memory.checkpointing", True, "gradient_checkpointing")
    _model(conv)
    huggingface.evaluation(conv, steps, _data(conv))
    families = {"dpo": _dpo, "cpo": _cpo, "orpo": _orpo, "grpo": _grpo, "rloo": _rloo, "ppo": _ppo,
                "sft": _sft, "kto": _kto, "bco": _bco, "reward": _reward}  # fmt: skip
    families[conv.trainer](conv)
    if conv.trainer in OFFLINE.split():
        _lengths(conv)
        _order(conv)
        huggingface.drop_last(conv)
    else:
        _rewards(conv)
        _rollout(conv, gpus // ring, *sized)


def _ring_name(conv: Conversion) -> str:
    return next(
        (name for name in ("parallelism_config_cp_size", "parallelism_config_sp_size") if conv.whole(name, 1) != 1),
        "parallelism_config_cp_size",
    )


def _ring(conv: Conversion) -> int:
    """Set the ring by accelerate's sizes for context and sequence parallelism."""
    name = _ring_name(conv)
    ring = int(conv.whole(name, 1, least=1))
    if ring > 1:
        conv.put("parallel.ring_size", ring, name)
        if name == "parallelism_config_sp_size":
            conv.put("parallel.layout", "ulysses", name)
    for each in ("parallelism_config_cp_size", "parallelism_config_sp_size"):
        conv.tell(Fate.NEEDLESS, each, "it is 1" if conv.whole(each, 1) == 1 else f"{name} decides")
    return ring


def _engine(conv: Conversion) -> None:
    """Choose the engine by accelerate's arguments, unless the trainer's own have chosen one. The first one decides."""
    for name, choose in (
        ("accelerate_config", _by_profile),
        ("deepspeed_config_file", engines.from_deepspeed),
        ("zero_stage", _by_stage),
    ):
        if "engine" in conv.choices:
            conv.tell(Fate.NEEDLESS, name, f"{conv.choices['engine'].origin} decides")
        elif conv.get(name) is not None:
            choose(conv, name)
    if "engine" not in conv.choices and conv.flag("use_fsdp"):
        conv.choose("engine", "fsdp2", "use_fsdp")
    why = "another argument chooses the engine" if conv.flag("use_fsdp") else "it is not asked for"
    conv.tell(Fate.NEEDLESS, "use_fsdp", why)
    engines.offload(conv, weights="offload_param_device", optimizer="offload_optimizer_device")


def _by_profile(conv: Conversion, name: str) -> None:
    profile = conv.text(name).rpartition("/")[2]
    if (found := re.search(r"zero([0-3])", profile)) is not None:
        conv.choose("engine", f"zero{found[1]}", name)
    elif "fsdp" in profile:
        conv.choose("engine", "fsdp2", name)
    else:
        conv.tell(Fate.OTHER, name, "the engine holds the training state: engine=zero3, as docs/engines.md says")


def _by_stage(conv: Conversion, name: str) -> None:
    stage = conv.whole(name)
    if stage not in engines.BY_STAGE:
        conv.refuse(name, "must be 0, 1, 2 or 3", "Give one of them.")
    conv.choose("engine", engines.BY_STAGE[stage], name)


def _model(conv: Conversion) -> None:
    """Choose the model that is trained: TRL's PPO takes policy and reference from sft_model_path."""
    conv.choose("model", "hf")
    if conv.trainer == "ppo" and conv.get("sft_model_path") is not None:
        conv.put("model.path", conv.text("sft_model_path"), "sft_model_path")
        if conv.text("model_name_or_path") != conv.text("sft_model_path"):
            conv.tell(Fate.OTHER, "model_name_or_path", "PPO takes the tokenizer from it; policy and reference are "
                      "sft_model_path, whose own tokenizer is used here")  # fmt: skip
        conv.tell(Fate.NEEDLESS, "model_name_or_path", "it is sft_model_path")
        return
    name = (
        "sft_model_path" if conv.trainer == "ppo" and conv.get("model_name_or_path") is None else "model_name_or_path"
    )
    conv.put("model.path", conv.needed(name, "the model that is trained", "Qwen/Qwen3-0.6B"), name)
    if conv.trainer == "ppo":
        why = (
            "TRL's PPO takes policy and reference from sft_model_path, which the file does not give; this one is taken"
        )
        conv.remark(Fate.OTHER, "model_name_or_path", conv.get("model_name_or_path"), why)


def _data(conv: Conversion) -> HeldOut:
    """Set the rows; return whether some are held out."""
    conv.choose("data", "hf")
    sources = conv.entries("datasets")
    if not sources:
        conv.tell(Fate.NEEDLESS, "datasets", "it is empty")
    for key, source in zip(_sources(conv), sources, strict=False):
        _source(conv, key, source)
    if sources:
        for name in ("dataset_name", "dataset_config", "dataset_train_split"):
            conv.tell(Fate.NEEDLESS, name, "datasets decides")
    elif conv.get("dataset_name") is None:
        raise ConvertError(
            "dataset_name: is missing, and so is datasets; without them nothing says what to train on. Add it to the "
            "file, as dataset_name=trl-lib/ultrafeedback_binarized."
        )
    else:
        conv.put("data.path", conv.text("dataset_name"), "dataset_name")
        for name, key in (("dataset_config", "subset"), ("dataset_train_split", "split")):
            if conv.get(name) is not None:
                conv.put(f"data.{key}", conv.text(name), name)
    if conv.flag("dataset_streaming"):
        conv.put("data.streaming", True, "dataset_streaming")
    conv.tell(Fate.NEEDLESS, "dataset_streaming", "rows are read from files")
    rows = huggingface.held_out(conv, "test_split_size")
    if rows is HeldOut.NONE and huggingface.evaluates(conv) and not sources:
        conv.put("data.eval_split", conv.text("dataset_test_split", "test"), "dataset_test_split")
        rows = HeldOut.ROWS
    elif rows is HeldOut.NONE and huggingface.evaluates(conv):
        why = "datasets has no held-out rows: give data.eval_size, or data.sources.NAME.eval_split"
        conv.tell(Fate.OTHER, "eval_strategy", why)
    conv.tell(Fate.NEEDLESS, "dataset_test_split", "test_split_size decides" if sources else "nothing is evaluated")
    return rows


def _sources(conv: Conversion) -> list[str]:
    """Return our keys of the sources that the file has."""
    several = len(conv.entries("datasets"))
    return [f"data.sources.source{number}" for number in range(1, several + 1)] if several > 1 else ["data"]


def _source(conv: Conversion, key: str, source: dict[str, Any]) -> None:
    files, path = source.get("data_files"), source.get("path")
    if files is None and path is None:
        conv.refuse("datasets", "must be a list of mappings, each with a path", "Give each one a path.")
    conv.put(f"{key}.path", files if files and path in ("json", "parquet") else path, "datasets")
    known = {"name": "subset", "split": "split"} | ({"fraction": "weight"} if key != "data" else {})
    for theirs, ours in known.items():
        if source.get(theirs) is not None:
            conv.put(f"{key}.{ours}", source[theirs], "datasets")
    for name in source.keys() - {"path", "data_files", *known}:
        why = "columns are found by their names: data.columns" if name == "columns" else "a source has no such key"
        conv.remark(Fate.ABSENT, f"datasets: {name}", source[name], why)


def _dpo(conv: Conversion) -> None:
    preference.choose(conv, preference.Names())


def _cpo(conv: Conversion) -> None:
    loss = preference.of_cpo(conv, "loss_type")
    preference.without_reference(conv, loss, by="loss_type", weight_name="cpo_alpha")


def _orpo(conv: Conversion) -> None:
    preference.without_reference(conv, "orpo", told=preference.OF_PROMPTS)


def _sft(conv: Conversion) -> None:
    answers.chosen_of(conv, answers.SUPERVISED, "nll")
    alone = conv.flag("assistant_only_loss")
    answers.supervised(conv, "loss_type", *([] if alone else [answers.OF_CONVERSATIONS]))
    conv.tell(
        Fate.NEEDLESS if alone else Fate.OTHER, "assistant_only_loss", "the assistant's turns alone are trained on"
    )
    if conv.get("completion_only_loss") is not None:
        fate = Fate.NEEDLESS if conv.flag("completion_only_loss") else Fate.OTHER
        conv.tell(fate, "completion_only_loss", "a prompt is never trained on")
    _template(conv)
    _texts(conv)
    _packing(conv)


def _texts(conv: Conversion) -> None:
    """Name the column of rows that are plain texts."""
    if (column := conv.text("dataset_text_field", "text")) != "text":
        sources = [f"{each}.columns.text" for each in _sources(conv)]
        for key in sources:
            conv.put(key, column, "dataset_text_field", why="only if rows are plain texts")
    conv.tell(Fate.NEEDLESS, "dataset_text_field", "the column is found by its name")


def _packing(conv: Conversion) -> None:
    if conv.flag("packing"):
        conv.tell(Fate.OTHER, "packing", answers.OF_BLOCKS)
    conv.tell(Fate.NEEDLESS, "packing", "the numbers are the same with packing or without (data.packing)")
    if not conv.flag("packing"):
        conv.tell(Fate.NEEDLESS, "packing_strategy", "nothing is packed")


def _template(conv: Conversion) -> None:
    """Take over a template that is a file; that of another tokenizer has to be written to one."""
    if (template := conv.text("chat_template_path")) is None:
        return
    if template.endswith((".jinja", ".jinja2")):
        conv.put("model.chat_template", template, "chat_template_path")
    else:
        why = "a tokenizer, whose template is taken: write it to a file, and give model.chat_template=FILE"
        conv.tell(Fate.OTHER, "chat_template_path", why)


def _kto(conv: Conversion) -> None:
    answers.single(conv, answers.chosen_of(conv, answers.SINGLE, "kto"), "loss_type")
    conv.notes.append(answers.OF_PAIRS)


def _bco(conv: Conversion) -> None:
    answers.single(conv, "bco", "")
    conv.notes.append(answers.OF_PAIRS)


def _reward(conv: Conversion) -> None:
    answers.reward_model(conv, "", answers.OF_ENDS, answers.OF_SCORES, center="center_rewards_coefficient")
    _template(conv)


def _order(conv: Conversion) -> None:
    """Set whether rows are shuffled: TRL's KTO takes them as they are."""
    name = "train_sampling_strategy"
    said = conv.text(name, "sequential" if conv.trainer == "kto" else "random")
    if said in ORDERS and (conv.name(name) or conv.trainer == "kto"):
        conv.put("data.shuffle", ORDERS[said], name)
    conv.tell(Fate.ABSENT, name, "samples are shuffled, or taken in their order (data.shuffle)")


def _lengths(conv: Conversion) -> None:
    if conv.name("max_length") is not None and conv.get("max_length") is None:
        conv.put("data.too_long", "error", "max_length")
        why = "no limit there; data.max_length is a number here, and a longer row is an error that names it"
        conv.remark(Fate.OTHER, "max_length", None, why)
        conv.tell(Fate.NEEDLESS, "truncation_mode", "nothing is cut")
    else:
        conv.put("data.max_length", conv.whole("max_length", LONG, least=1), "max_length")
        if conv.trainer == "reward":
            conv.put("data.too_long", "drop", "max_length", why="longer pairs are left out")
        else:
            conv.put(
                "data.too_long", "truncate", "truncation_mode", why="another part is cut than by TRL: docs/data.md"
            )
    conv.tell(Fate.OTHER, "max_prompt_length", "data.max_length is one limit, for prompt and answer together")


def _grpo(conv: Conversion) -> None:
    scale, divisor = conv.given.get("scale_rewards", "group"), conv.get("loss_type", "dapo")  # none: only centred
    level = conv.get("importance_sampling_level", "token")
    if level not in ("token", "sequence"):
        conv.refuse("importance_sampling_level", "must be token or sequence", "Give one of them.")
    by_sequence = level == "sequence"
    by_group = scale in ("group", "true") or scale is True
    loss = "gspo" if by_sequence else "grpo" if by_group else "dr_grpo"
    conv.choose("loss", loss, "importance_sampling_level" if by_sequence else "scale_rewards")
    if scale == "batch":
        why = "the scores of a whole batch have one deviation there; here they are only centred, and no longer scaled"
        conv.remark(Fate.ABSENT, "scale_rewards", scale, why)
    elif not by_group and scale not in ("none", None, False):
        conv.refuse("scale_rewards", "must be group, batch or none", "Give one of them.")
    if by_sequence and (divisor != "grpo" or not by_group):
        conv.remark(
            Fate.OTHER,
            "importance_sampling_level",
            "sequence",
            "loss=gspo is TRL's with loss_type=grpo and scale_rewards=group",
        )
    conv.tell(Fate.NEEDLESS, "scale_rewards", "importance_sampling_level=sequence decides")
    conv.tell(Fate.NEEDLESS, "importance_sampling_level", "token is the level of every loss but gspo")
    known = isinstance(divisor, str) and divisor in DIVISORS
    conv.put("loss.normalize", DIVISORS[divisor] if known else "token", "loss_type")
    if not known:
        conv.remark(Fate.ABSENT, "loss_type", divisor, "grpo, dapo and dr_grpo are here; dapo's divisor is taken")
    beta = conv.number("beta", 0.0)
    conv.put("loss.beta", beta, "beta")
    if beta and conv.flag("use_bias_correction_kl", True):
        conv.remark(
            Fate.OTHER,
            "beta",
            beta,
            "TRL 1.16 multiplies the divergence by the ratio, unless "
            "use_bias_correction_kl is false; here it is k3 itself, as in TRL before",
        )
    conv.tell(Fate.NEEDLESS, "use_bias_correction_kl", "the divergence is k3 itself here")
    _clip(conv)


def _clip(conv: Conversion) -> None:
    low = conv.number("epsilon", 0.2)
    conv.put("loss.clip_low", low, "epsilon")
    conv.put("loss.clip_high", conv.number("epsilon_high", low), "epsilon_high", "epsilon")


def _rloo(conv: Conversion) -> None:
    conv.choose("loss", "rloo")
    _clip(conv)
    conv.notes.append(
        "RLOO: the advantages are TRL's. TRL clips the ratio of the whole answer, rlexp the ratio of each token, and "
        "divides by rollout.max_new_tokens: with one step for each rollout the gradients differ by that factor alone."
    )


def _ppo(conv: Conversion) -> None:
    conv.choose("loss", "ppo")
    clip = conv.number("cliprange", 0.2)
    conv.put("loss.clip_low", clip, "cliprange")
    conv.put("loss.clip_high", clip, "cliprange")
    if (penalty := conv.number("missing_eos_penalty")) is not None:
        conv.put("rollout.overlong", "penalty", "missing_eos_penalty")
        conv.put("rollout.overlong_penalty", penalty, "missing_eos_penalty")
    conv.notes.append("PPO: TRL's critic begins as the reward model, ours with the policy's weights (loss.critic).")


def _rewards(conv: Conversion) -> None:
    terms: dict[str, dict[str, Any]] = {}
    functions = conv.texts("reward_funcs")
    for name in functions:
        module, _, function = name.rpartition(".")
        terms[_unused(terms, name)] = {"kind": "python", "function": f"{module or 'rewards'}:{function}"}
    models = [name for name in ("reward_model_name_or_path",) if conv.get(name) is not None]
    for name in models:
        terms[_unused(terms, "model")] = {"kind": "model", "path": conv.text(name)}
    if not terms:
        raise ConvertError(
            "reward_funcs: is missing, and so is a reward model; without them nothing scores an answer. Add one to the "
            "file, as reward_funcs=my_rewards.score."
        )
    names = [name for name in ("reward_funcs", "reward_model_name_or_path") if conv.name(name)]
    if functions:
        files = sorted(
            {f"{t['function'].partition(':')[0].replace('.', '/')}.py" for t in terms.values() if "path" not in t}
        )
        conv.notes.append(
            "Rewards: TRL calls f(prompts, completions, completion_ids, **columns), rlexp f(prompts, answers, rows). "
            f"Write {' and '.join(files)} with functions of our form, which call the old ones: docs/rewards.md."
        )
    weights = _weights(conv, len(terms))
    if len(terms) == 1 and not weights:
        ((_, term),) = terms.items()
        conv.choose("reward", term.pop("kind"), *names)
        for key, value in term.items():
            conv.put(f"reward.{key}", value, *names)
        conv.tell(Fate.NEEDLESS, "reward_weights", "there is one reward")
        return
    conv.choose("reward", "sum", *names)
    for place, (name, term) in enumerate(terms.items()):
        for key, value in term.items():
            conv.put(f"reward.terms.{name}.{key}", value, *names)
        conv.put(f"reward.terms.{name}.weight", weights[place] if weights else 1.0, "reward_weights")


def _unused(terms: dict[str, dict[str, Any]], name: str) -> str:
    """Return a name for a term of a reward: the last part of its path, or of more parts if two end alike."""
    parts = [re.sub(r"\W", "_", part) for part in name.split(".")]
    names = ["_".join(parts[-count:]) for count in range(1, len(parts) + 1)]
    names += [f"{names[-1]}{number}" for number in range(2, len(terms) + 3)]
    return next(each for each in names if each not in terms)


def _weights(conv: Conversion, terms: int) -> Sequence[float]:
    said = conv.get("reward_weights") if "reward_weights" in conv.by_name else None
    if said is None or said == []:
        return []
    weights = said if isinstance(said, list) else [said]
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in weights):
        conv.refuse("reward_weights", "must be a list of numbers", "Give one for each reward.")
    if len(weights) != terms:
        conv.refuse("reward_weights", f"has {len(weights)} weights for {terms} rewards", "Give one for each reward.")
    return weights


def _rollout(conv: Conversion, replicas: int, micro: int, steps: int) -> None:
    """Set the sizes of a rollout, in prompts and answers, from the sizes of one GPU."""
    batch, ppo = micro * steps * replicas, conv.trainer == "ppo"
    answers = 1 if ppo else int(conv.whole("num_generations", 8 if conv.trainer == "grpo" else 2, least=1))
    drawn = batch if ppo else _generation(conv, micro * replicas, steps)
    if ppo:
        conv.put("rollout.n_samples", 1)
        _episodes(conv, batch)
    else:
        conv.put("rollout.n_samples", answers, "num_generations")
    if drawn % answers:
        raise ConvertError(
            f"{conv.said('num_generations')}={answers}: does not divide the {drawn} answers of a rollout "
            f"(per_device_train_batch_size × steps_per_generation × GPUs). TRL would refuse it too; check --gpus."
        )
    drawing = () if ppo else ("steps_per_generation", "generation_batch_size")
    sized = [name for name in drawing if conv.name(name)]
    conv.put("rollout.batch_size", drawn // answers, *sized, why=f"prompts: {drawn} answers / {answers}")
    new = conv.whole("max_completion_length", 53 if ppo else 512, least=1)
    conv.put("rollout.max_new_tokens", new, "max_completion_length")
    prompt = conv.whole("max_prompt_length", least=1)
    conv.put(
        "data.max_length",
        new + (prompt or LONG),
        "max_prompt_length",
        why="" if prompt else f"TRL has no limit of prompts; {LONG} tokens are allowed here",
    )
    if not ppo:
        _drawing(conv)


def _drawing(conv: Conversion) -> None:
    if conv.flag("mask_truncated_completions"):
        conv.put("rollout.overlong", "mask", "mask_truncated_completions")
    conv.tell(Fate.NEEDLESS, "mask_truncated_completions", "cut answers are kept")
    conv.put("rollout.show_every", 10 if conv.flag("log_completions") else 0, "log_completions")
    vllm = conv.flag("use_vllm")
    if vllm:
        conv.choose("rollout", "default")
        conv.put("rollout.engine", "vllm", "use_vllm")
    conv.tell(Fate.NEEDLESS, "use_vllm", "samples are drawn by the model itself")
    if vllm and conv.get("vllm_mode") == "server":
        conv.tell(Fate.OTHER, "vllm_mode", "rollout=pipelined gives some ranks to sampling, one rollout ahead")
    conv.tell(Fate.NEEDLESS, "vllm_mode", "all ranks sample, then all train")
    _importance(conv, vllm)


def _importance(conv: Conversion, vllm: bool) -> None:
    """Weigh samples of vLLM as TRL does by default; only the mode token_truncate is here."""
    names = ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
             "vllm_importance_sampling_clip_max")  # fmt: skip
    mode, cap = conv.text(names[1], "sequence_mask"), conv.number(names[2], 3.0)
    if not vllm or not conv.flag(names[0], True):
        for name in names:
            conv.tell(Fate.NEEDLESS, name, "no weight is asked for" if vllm else "vLLM draws no samples")
    elif mode == "token_truncate":
        conv.put("rollout.importance_cap", cap, *names)
    else:
        why = f"{mode} drops answers whose weight is above {cap:g}; rollout.importance_cap limits each token's weight"
        if conv.name(names[1]) is None:
            conv.remark(Fate.ABSENT, names[1], mode, f"their default: {why}")
        for name in names:
            conv.tell(Fate.ABSENT, name, why)


def _generation(conv: Conversion, forward: int, steps: int) -> int:
    """Return the answers that TRL draws at once, as a whole number of train batches."""
    each = int(conv.whole("steps_per_generation", steps, least=1))
    if (size := conv.whole("generation_batch_size", least=1)) is not None:
        each = size // forward
    if each < steps:
        return forward * steps  # the weights do not change between the generations of a step
    if each % steps:
        said = f"generation_batch_size={size}" if size is not None else f"steps_per_generation={each}"
        raise ConvertError(
            f"{said}: is no multiple of gradient_accumulation_steps={steps}, so that a step "
            f"would take samples of two generations. rlexp has whole train batches of one rollout: give a multiple."
        )
    return forward * each


def _episodes(conv: Conversion, batch: int) -> None:
    if (episodes := conv.whole("total_episodes", least=1)) is not None:
        conv.values.pop("train.epochs", None)
        count = -(-int(episodes) // batch) * int(conv.whole("num_ppo_epochs", 4, least=1))
        conv.put("train.max_steps", count, "total_episodes", "num_ppo_epochs")
