"""axolotl: a yaml with `rl: dpo`, or ipo, orpo, simpo, kto; with `reward_model: true`; or without either (sft)."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from rlexp.convert import adapters, huggingface, kinds, launchers, losses, model_keys
from rlexp.convert.conversion import Conversion
from rlexp.convert.rules import Fate, Rule, absent, extended, needless, other, taken, worked_out

TRAINERS = ("dpo", "ipo", "orpo", "simpo", "sft", "kto", "reward")
OF_DPO = "dpo ipo"
OF_TRL = ("dpo", "ipo", "orpo", "simpo", "kto")  # with a beta
TOO_LONG = {"drop": "drop", "truncate": "truncate", "raise": "error"}
RING_FUNCTIONS = {"varlen_llama3": "allgather", "batch_zigzag": "zigzag", "batch_ring": "contiguous"}
BACKENDS = ("flash_attention", "attn_implementation", "flex_attention", "xformers_attention", "sdp_attention")
PLAIN_PLUGINS = re.compile("liger|cut_cross_entropy|lm_eval|kernels|swanlab|expert_parallel")  # no number changes
HUB = re.compile(r"[\w.-]+/[\w.-]+")
# Keys of a source, and of a data set's columns.
SOURCE = {"name": "subset", "split": "split", "revision": "revision", "field_messages": "columns.prompt",
          "field_prompt": "columns.prompt", "field_chosen": "columns.chosen", "field_rejected": "columns.rejected",
          "field_tools": "columns.tools", "text_column": "columns.text"}  # fmt: skip
# Those of a type that is a mapping.
OWN_TYPE = {"field_prompt": "prompt", "field_instruction": "prompt", "field_input": "input",
            "field_output": "completion", "field_completion": "completion", "field_label": "label",
            "field_chosen": "chosen", "field_rejected": "rejected", "field_system": "system"}  # fmt: skip
TOLD = {"path", "field", "data_files", "ds_type", "type", "roles", "message_property_mappings", "roles_to_train",
        *SOURCE}  # fmt: skip
SCORED = "bradley_terry.chat_template"
# The columns of some of its types, by our fields.
COLUMNS = {"chatml.intel": {"prompt": "question"}, "chatml.icr": {"prompt": "input"},
           "chatml.argilla": {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"},
           "alpaca_chat.load_qa": {"prompt": "question", "completion": "answer"},
           "oasst": {"prompt": "INSTRUCTION", "completion": "RESPONSE"}, "gpteacher": {"completion": "response"},
           "context_qa": {"prompt": "article", "input": "question", "completion": "answer"},
           "context_qa.load_v2": {"prompt": "context", "input": "question", "completion": "answer"},
           "summarizetldr": {"prompt": "article", "completion": "summary"}, "metharme": {"completion": "generation"},
           "jeopardy": {"prompt": "question", "input": "category", "completion": "answer"}}  # fmt: skip
TEMPLATES = ("chat_template", SCORED, "completion", "pretrain")  # types that write rows as we do

RULES: tuple[Rule, ...] = extended(
    [rule for rule in huggingface.RULES if rule.names[0] not in ("run_name", "report_to", "warmup_ratio")],
    worked_out("warmup_ratio", "optim.warmup_ratio, optim.warmup_start=0", rest=huggingface.NO_WARMUP, least=0),
    worked_out("base_model", "model=hf, model.path"),
    taken("revision_of_model", "model.revision"),
    huggingface.TRUST,
    needless("base_model_config tokenizer_config model_type tokenizer_type", "the model's folder has them"),
    worked_out("chat_template", "model.chat_template", "by default the tokenizer's own", "it is the tokenizer's own"),
    absent("chat_template_jinja", "use model.chat_template=FILE"),
    taken("chat_template_kwargs", "data.template_options"),
    absent("special_tokens", "the tokenizer's own are used; new ones: model.add_tokens"),
    taken("tokens", "model.add_tokens"),
    worked_out("overrides_of_model_config model_config", "model.rope", "YaRN in its rope_scaling or rope_parameters",
               "each of its keys is told"),
    worked_out("rope_scaling", "model.rope", "yarn with its factor"),
    worked_out("adapter", "adapter=lora", "lora, and qlora without quantization; others are missing",
               until="adapter=llama"),
    *adapters.rules({"rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout",
                     "targets": "lora_target_modules", "also": "lora_modules_to_save", "rslora": "peft_use_rslora"}, {},
                    {"peft_use_dora": "dora", "lora_target_parameters": "parameters",
                     "loraplus_lr_ratio": "adapter.lr_ratio"}),
    *adapters.of_adapter(
        worked_out("lora_target_linear", "adapter.targets=[]", "all linear layers but the head"),
        worked_out("lora_model_dir", "adapter.path", "the reference is this adapter", alias=adapters.FOLDER),
        absent("lora_rank_pattern lora_alpha_pattern", "all layers have one rank and one alpha",
               until="rank_pattern alpha_pattern"),
        absent("lora_exclude_modules peft_layers_to_transform peft_layers_pattern", "use adapter.targets",
               until="exclude adapter.layers"),
        absent("peft peft_init_lora_weights", adapters.OF_START, True, until="adapter.init"),
        absent("peft_layer_replication peft_trainable_token_indices", "use adapter.also to train a module whole",
               until="replication token_indices"),
        absent("relora", "no ReLoRA", until="relora"),
        worked_out("merge_lora", "checkpoint.export=merged", adapters.MERGED),
    ),
    absent("load_in_8bit load_in_4bit gptq", adapters.QUANTIZED, until="quant"),
    needless("bnb_config_kwargs qlora_sharded_model_loading", adapters.OF_QUANTIZED),
    needless("merge_method", "the adapter is added to the weights"),
    needless("rl_adapter_ref_model", adapters.ONE_REFERENCE),
    needless("loraplus_lr_embedding lora_fan_in_fan_out lora_on_cpu lora_mlp_kernel lora_qkv_kernel lora_o_kernel "
             "lora_embedding_kernel peft_ensure_weight_tying peft_autocast_adapter_dtype relora_prune_ratio "
             "relora_prune_method relora_cpu_offload", "no number depends on it here"),
    worked_out("rl", "loss", "dpo, ipo, orpo, simpo or kto; without it loss=sft", "the loss is chosen"),
    worked_out("reward_model", "loss=reward", rest="rl says what is trained"),
    *losses.weights("kto_desirable_weight", "kto_undesirable_weight", "kto"),
    taken("center_rewards_coefficient", "loss.center", default=0.0, of="reward"),
    needless("num_labels", "an answer has one score", of="reward"),
    other("train_on_inputs", "loss=sft", "rlexp never trains on prompts", of="sft"),
    worked_out("pretraining_dataset", "data=hf, data.path or data.sources", "rows that are texts",
               "datasets decides", of="sft"),
    absent("use_eaft", "all tokens weigh the same", of="sft", fate=Fate.INSTEAD),
    needless("eaft_alpha eaft_k diffusion", "only with an objective that rlexp lacks", of="sft"),
    absent("eot_tokens", "the template ends a turn"),
    absent("unfrozen_parameters", "all weights are trained: model.freeze", fate=Fate.INSTEAD),
    absent("early_stopping_patience", "no early stopping"),
    needless("liger_rms_norm liger_rms_norm_gated liger_glu_activation liger_layer_norm liger_rope use_kernels "
             "liger_fused_linear_cross_entropy loss_watchdog_threshold loss_watchdog_patience experts_implementation "
             "use_scattermoe use_sonicmoe quantize_moe_experts eval_batch_size push_dataset_to_hub low_cpu_mem_usage "
             "skip_prepare_dataset experimental_skip_move_to_device llama4_linearized_experts fused_attn_kernel",
             "no number depends on it here"),
    worked_out("rl_beta dpo_beta", "loss.beta", rest=losses.OTHERS, default=0.1, alias="beta"),
    worked_out("trl", "loss.beta", "its beta wins over rl_beta", losses.OTHERS),
    worked_out("orpo_alpha", "loss.beta", "it is TRL's beta", default=0.1, of="orpo"),
    *losses.rules(OF_DPO, loss_type="dpo_loss_type", loss_weights="dpo_loss_weights", discopop_tau="", ld_alpha="",
                  label_smoothing="dpo_label_smoothing", use_weighting="dpo_use_weighting"),
    worked_out("cpo_alpha", "loss.sft_weight", "their default is 1", default=1.0, least=0, of="simpo"),
    worked_out("simpo_gamma", "loss.gamma", default=0.5, of="simpo"),
    absent("dpo_label_smoothing_mode", "it has no counterpart", of=OF_DPO),
    worked_out("precompute_ref_log_probs", "reference=precompute", "of dpo and ipo", "only rl: dpo and ipo read it"),
    needless("dpo_use_logits_to_keep dpo_padding_free dpo_use_liger_kernel", "the numbers are the same"),
    worked_out("context_parallel_size sequence_parallel_degree", "parallel.ring_size",
               "the curve is the same for any size", default=1),
    worked_out("ring_attn_func", "parallel.layout", rest="there is no ring"),
    needless("heads_k_stride dp_shard_size dp_replicate_size", "the layout and the engine decide"),
    absent("tensor_parallel_size", launchers.NOT_SPLIT, 1, until="tensor_parallel"),
    worked_out("batch_size", "train.batch_size", "of one GPU, without gradient_accumulation_steps",
               "batch_size / micro_batch_size are the accumulated steps, as before axolotl 0.4"),
    worked_out("micro_batch_size", "train.micro_batch_size, train.batch_size",
               "train.batch_size counts all GPUs together", default=1, least=1, alias="per_device_train_batch_size"),
    worked_out("num_epochs", "train.epochs", "whole passes over the data", "max_steps decides", default=1.0, least=0,
               alias="num_train_epochs"),
    worked_out("lr_scheduler", "optim.decay", "linear, cosine, constant", default="cosine", alias="lr_scheduler_type"),
    worked_out("cosine_min_lr_ratio", "optim.min_lr_ratio", default=0, least=0),
    absent("cosine_constant_lr_ratio", "the rate decays until the end"),
    worked_out("optimizer", "optim", "adamw and sgd", default="adamw_torch", alias="optim",
               until="optim=muon optim=adafactor optim=adamw_8bit"),
    taken("sequence_len", "data.max_length", "tokens of prompt and answer", default=512, least=1),
    worked_out("excess_length_strategy", "data.too_long", default="drop"),
    taken("curriculum_sampling", "data.shuffle", "rows in their order", to=lambda value: not value),
    needless("sample_packing_sequentially", "samples are packed in their order"),
    worked_out("sample_packing", "data.packing", "sft: theirs counts blocks of rows"),
    needless("eval_sample_packing pad_to_sequence_len", "held-out rows are packed as the others"),
    worked_out("datasets", "data=hf, data.path or data.sources"),
    worked_out("test_datasets", "data.eval_path, data.eval_split"),
    taken("default_system_message", "data.system", to=lambda value: value or None),
    worked_out("val_set_size", "data.eval_size", "rlexp rounds a share down, theirs up"),
    needless("dataset_prepared_path dataset_processes dataset_exact_deduplication", "rows are tokenized once and kept"),
    worked_out("evals_per_epoch", "train.eval_every", "a share of an epoch", "no rows are held out", least=0),
    worked_out("saves_per_epoch", "checkpoint.save_every", "a share of an epoch", least=0),
    needless("flash_attention attn_implementation sdp_attention eager_attention xformers_attention",
             "the fastest kernel is taken"),
    worked_out("deepspeed", "engine, engine.offload", "the ZeRO stage chooses the engine"),
    worked_out("fsdp_version", "engine=fsdp2"),
    absent("activation_offloading", "use memory.checkpointing", until="activation_offload"),
    worked_out("wandb_project", "logger=wandb, logger.project"),
    taken("wandb_entity", "logger.entity", to=lambda value: value or None),
    taken("wandb_name", "logger.run_name"),
    needless("wandb_watch wandb_log_model wandb_run_id strict plugins special auto_resume_from_checkpoints",
             "no number depends on it"),
    worked_out("num_processes", "launch.nproc", "GPUs of all machines (accelerate)", launchers.COUNTED),
    needless("config_file launcher", launchers.STARTS),
    *launchers.RULES,
    save_total_limit=4,
)  # fmt: skip


def convert(conv: Conversion) -> None:
    _normalize(conv)
    gpus = launchers.needed(conv)
    huggingface.sizes(conv, launchers.spread(conv, gpus, "tensor_parallel_size"), "context_parallel_size")
    if (function := conv.text("ring_attn_func")) is not None and conv.whole("context_parallel_size") > 1:
        if function not in RING_FUNCTIONS:
            conv.differs("ring_attn_func", "no layout here has its name; any has the same curve")
        conv.put("parallel.layout", RING_FUNCTIONS.get(function, "zigzag"), "ring_attn_func")
    steps = huggingface.length(conv)
    _schedule(conv, steps)
    huggingface.optimizer(conv)
    huggingface.precision(conv, bf16=True)
    huggingface.saving(conv, steps, "steps" if conv.given_value("save_steps") else "epoch")
    packed = conv.flag("sample_packing")
    conv.put("data.packing", packed, "sample_packing")
    split = packed and not conv.flag("eval_sample_packing", True)
    huggingface.drop_last(conv, split, why="without eval_sample_packing" if split else "")
    huggingface.engine(conv, "fsdp_version")
    if conv.given_value("learning_rate") is None:
        conv.missing("learning_rate", "axolotl has no default", "5e-7")
    model_keys.trained(conv, "base_model")
    model_keys.template(conv, "chat_template", model_keys.AXOLOTL, "tokenizer_default")
    _model_config(conv)
    _adapter(conv)
    if conv.trainer in OF_TRL:
        _beta(conv)
    _loss(conv)
    if conv.trainer in OF_DPO.split():
        adapters.precomputed(conv)
    if conv.trainer == "sft" and gpus > 1:
        conv.notes.append(losses.OF_GPUS)
    if packed and conv.trainer == "sft":
        conv.differs("sample_packing", losses.OF_BLOCKS)
    if packed and not any(conv.get(name) for name in BACKENDS):
        conv.differs("sample_packing", "without flash_attention, rows of a block see each other there")
    _data(conv)
    _evaluation(conv, steps, _held_out(conv) or huggingface.held_out(conv, "val_set_size"))
    project = conv.text("wandb_project")
    conv.choose("logger", "wandb" if project else "none", "wandb_project")
    if project:
        conv.put("logger.project", project, "wandb_project")


def _evaluation(conv: Conversion, steps: int | None, rows: bool) -> None:
    """Set when held-out rows are evaluated, and checkpoints saved; by default theirs leaves the best model."""
    huggingface.evaluation(conv, steps, rows, default="steps" if conv.get("eval_steps") else "no")
    for what, key, wanted in (("eval", "train.eval_every", rows), ("save", "checkpoint.save_every", True)):
        times = conv.whole(f"{what}s_per_epoch", 0)
        if what == "eval" and times * conv.number("num_train_epochs") == 1:
            conv.tell(Fate.NEEDLESS, "evals_per_epoch", "theirs skips a single evaluation of the whole run")
        elif wanted and times:
            every = "1 epoch" if times == 1 else f"1/{times} epoch"
            conv.put(key, every, f"{what}s_per_epoch", f"{what}_strategy", f"{what}_steps")
    saves, evals = (conv.number(f"{what}s_per_epoch") for what in ("save", "eval"))
    save, every = conv.given_value("save_steps"), conv.number("eval_steps")
    in_step = (saves and evals and evals % saves == 0) or (save and every and conv.number("save_steps") % every == 0)
    stops = conv.get("early_stopping_patience") and conv.trainer in ("sft", "reward")
    if rows and conv.get("load_best_model_at_end") is None and in_step and stops:
        conv.put("checkpoint.keep_best", 1)
        conv.remark(Fate.OTHER, "load_best_model_at_end", True, "with early_stopping_patience the best model is what "
                    "they leave; the run exports its last one, and keeps the best too")  # fmt: skip


def _model_config(conv: Conversion) -> None:
    """Take YaRN from what the model's configuration is overridden with."""
    by, apart = "overrides_of_model_config", conv.get("rope_scaling")
    options, whole = conv.mapping(by), conv.spelled(by)
    rope = options.pop("rope_parameters", None) or options.pop("rope_scaling", None) or apart
    if rope is not None:
        model_keys.rope(conv, "rope_scaling" if apart else by, rope)
    if options.pop("output_router_logits", False):
        conv.remark(Fate.INSTEAD, f"{whole}: output_router_logits", True, "no auxiliary loss for experts")
    for name, value in options.items():
        conv.remark(Fate.OTHER, f"{whole}: {name}", value, "write it into config.json")


def _schedule(conv: Conversion, steps: int | None) -> None:
    """Set decay and warm-up: by default of 3 % of the steps, at most 100, and 2 in place of 1."""
    huggingface.schedule(conv, steps, rounded=math.floor)
    least, decay = conv.number("cosine_min_lr_ratio"), conv.values.get("optim.decay")
    if least and decay is not None and decay.value == "cosine":
        conv.put("optim.min_lr_ratio", least, "cosine_min_lr_ratio")
    if conv.given_value("warmup_steps") == 1:
        conv.put("optim.warmup_steps", 2, "warmup_steps", why="as theirs, which takes no single step")
    given = [conv.given_value(name) for name in ("warmup_steps", "warmup_ratio")]
    if given == [None, None] and steps is not None:
        count = min(int(0.03 * steps), 100)
        huggingface.warm_up(conv, "warmup_ratio", count=2 if count == 1 else count)
    elif given == [None, None]:
        conv.put("optim.warmup_ratio", 0.03, "warmup_ratio", why="at most 100 steps there")
        conv.put("optim.warmup_start", 0)


def _adapter(conv: Conversion) -> None:
    kind = conv.text("adapter")
    if kind in ("lora", "qlora"):
        adapters.lora(conv, "adapter")
        if conv.flag("merge_lora"):
            conv.put("checkpoint.export", "merged", "merge_lora")
        if kind == "qlora":
            conv.differs("adapter", f"lora is taken: {adapters.QUANTIZED}", Fate.INSTEAD)
        return
    if kind:
        conv.tell(Fate.INSTEAD, "adapter", "of adapters, lora is here; all weights are trained")
    adapters.none(conv, "adapter")
    split = any(map(conv.get, ("deepspeed", "fsdp", "fsdp_config")))
    if conv.flag("bf16", not conv.flag("fp16")) and not split:
        why = "weights that are trained are float32, theirs bfloat16 without DeepSpeed or FSDP"
        conv.remark(Fate.OTHER, "bf16", conv.get("bf16", "auto"), why)


def _normalize(conv: Conversion) -> None:
    """Write some arguments as transformers has them."""
    given = {**conv.given}
    if conv.get("batch_size") is not None and conv.get("gradient_accumulation_steps") is None:
        steps = conv.whole("batch_size", least=1) // conv.whole("micro_batch_size")
        given["gradient_accumulation_steps"] = max(1, steps)
    for name in [each for each in conv.texts("plugins") if PLAIN_PLUGINS.search(each) is None]:
        conv.remark(Fate.INSTEAD, "plugins", name, "the plugin changes what is trained, and is not here")
    if given.get("bf16") in ("auto", "full"):
        if given["bf16"] == "full":
            conv.differs("bf16", "weights that are trained are float32; bf16 computes with them")
        given["bf16"] = True
    if given.get("gradient_checkpointing") == "offload":
        conv.differs("gradient_checkpointing", "activations stay on the GPU", Fate.ABSENT)
        given["gradient_checkpointing"] = True
    for what in ("save", "eval"):
        if given.get(f"{what}_steps") and given.get(f"{what}_strategy", "no") not in ("no", False):
            name = f"{what}_strategy"
            conv.remark(Fate.NEEDLESS, name, given.pop(name), f"{what}_steps decides")
    conv.given = given


def _beta(conv: Conversion) -> None:
    """Take beta: the one of `trl` comes first."""
    section = conv.mapping("trl")
    if section.get("beta") is not None:
        conv.put("loss.beta", section["beta"], "trl", why="its beta")
    else:
        name = "orpo_alpha" if conv.trainer == "orpo" and conv.given_value("rl_beta") is None else "rl_beta"
        conv.put("loss.beta", conv.number(name), name)
    for name in sorted(section.keys() - {"beta"}):
        conv.remark(Fate.ABSENT, f"trl: {name}", section[name], f"no argument of rl: {conv.trainer}")


def _loss(conv: Conversion) -> None:
    match conv.trainer:
        case "ipo":
            losses.choose(conv, types=["ipo"], by="rl")
        case "orpo":
            losses.without_reference(conv, "orpo", "rl", note=losses.OF_PROMPTS)
        case "simpo":
            losses.without_reference(conv, "simpo", "rl", likelihood="cpo_alpha")
        case "kto":
            losses.single(conv, "kto", "rl")
        case "reward":
            losses.reward_model(conv, "reward_model", notes=[losses.OF_ENDS], margins=False)
        case "sft":
            conv.choose("loss", "sft")
        case _:
            losses.choose(conv, smoothed=losses.SMOOTHED | {"dpo"})
            if not kinds.has("loss.beta", conv.chosen("loss")):
                del conv.values["loss.beta"]
                conv.done -= {"rl_beta", "trl"}


def _data(conv: Conversion) -> None:
    by = "datasets" if conv.get("datasets") or conv.trainer != "sft" else "pretraining_dataset"
    texts = isinstance(conv.get(by), str) and by == "pretraining_dataset"
    sources = [{"path": conv.text(by), "type": "pretrain"}] if texts else conv.entries(by)
    if not sources:
        conv.missing("datasets", "it names the rows to train on", "[{path: org/pairs}]")
    for key, source in zip(huggingface.keys_of(sources), sources, strict=True):
        _source(conv, key, source, by)
    own_types = [source["type"] if isinstance(source.get("type"), dict) else {} for source in sources]
    prompts = {str(kind.get("system_prompt") or "") for kind in own_types}
    if len(prompts) == 1 and (prompt := prompts.pop()):
        conv.put("data.system", prompt, by, why="its system_prompt")
    elif prompts - {""}:
        conv.remark(Fate.OTHER, f"{by}: system_prompt", sorted(prompts), "data.system is one for all sets")
    whole = [str(source.get("type")).startswith(("completion", "pretrain")) and conv.trainer == "sft"
             for source in sources]  # fmt: skip
    if all(whole):
        conv.tell(Fate.NEEDLESS, "train_on_inputs", "a row that is a text is trained on whole")
    if any(whole):
        why = "a text that is longer goes on in the next block there, here it is left out: split it first"
        conv.remark(Fate.OTHER, "sequence_len", conv.given_value("sequence_len"), why)
    strategy = conv.text("excess_length_strategy")
    if strategy not in TOO_LONG:
        conv.refuse("excess_length_strategy", f"must be one of {', '.join(TOO_LONG)}", "Give one of them.")
    cut = any(source.get("type") == SCORED for source in sources)
    why = "theirs cuts the end of an answer of this type" if cut else ""
    conv.put("data.too_long", "truncate" if cut else TOO_LONG[strategy], "excess_length_strategy", why=why)


def _held_out(conv: Conversion) -> bool:
    sets = conv.entries("test_datasets")
    files = [each.get("data_files") or each.get("path") for each in sets]
    return bool(sets) and huggingface.held_out_set(
        conv, "test_datasets", files[0], sets[0].get("split") if files[0] == sets[0].get("path") else None,
        several=len(sets) > 1 or isinstance(files[0], list),
    )  # fmt: skip


def _source(conv: Conversion, key: str, source: dict[str, Any], by: str) -> None:
    files, kind, path = source.get("data_files"), source.get("ds_type"), str(source.get("path") or "")
    files = files[0] if isinstance(files, list) and len(files) == 1 else files
    if files and (isinstance(files, list) or (HUB.fullmatch(path) and not Path(path).exists())):
        conv.remark(Fate.ABSENT, f"{by}: data_files", files, "all rows of a set are read, not those of some files")
        files = None
    if files is None and not path:
        conv.refuse(by, "must be a list of mappings, each with a path", "Give each one a path.")
    of_file = files and kind in ("json", "parquet", None) and Path(str(files)).suffix
    conv.put(f"{key}.path", files if of_file else source.get("path"), by)
    renamed = {"field_messages": "columns.messages"} if conv.trainer == "sft" else {}
    messages = str(source.get("type")).startswith(("sharegpt", "chat_template"))
    field = {"field": "columns.messages" if messages and conv.trainer == "sft" else "columns.text"}
    for theirs, ours in (SOURCE | renamed | field).items():
        value = source.get(theirs)
        if value is not None and value != ours.rpartition(".")[2]:
            conv.put(f"{key}.{ours}", value, by)
    if source.get("type") == SCORED:
        conv.put(f"{key}.columns.prompt", "input", by)
    for name in sorted(source.keys() - TOLD):
        conv.remark(Fate.ABSENT, f"datasets: {name}", source[name], "a source has no key of this kind")
    kind, roles = source.get("type", "chat_template"), source.get("roles_to_train")
    if isinstance(kind, dict):
        for theirs in sorted(kind.keys() & OWN_TYPE.keys()):
            if kind[theirs] and kind[theirs] != OWN_TYPE[theirs]:
                conv.put(f"{key}.columns.{OWN_TYPE[theirs]}", kind[theirs], by)
    if roles not in (None, ["assistant"], ["gpt", "assistant"]):
        conv.remark(Fate.OTHER, "datasets: roles_to_train", roles, "the assistant's turns are trained on")
    for ours, theirs in COLUMNS.get(str(kind), {}).items():
        conv.put(f"{key}.columns.{ours}", theirs, by)
    if not str(kind).startswith(TEMPLATES):
        ours, theirs = "model.chat_template", "the tokenizer's template, or as Role: text without one"
        why = f"rows are written by {ours if ours in conv.values else theirs}"
        conv.remark(Fate.OTHER, "datasets: type", source["type"], why)
