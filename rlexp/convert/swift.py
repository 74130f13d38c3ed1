"""ms-swift: `swift sft`, `swift pt`, and `swift rlhf --rlhf_type dpo …`, or cpo, orpo, simpo, kto and rm."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from rlexp.convert import adapters, huggingface, kinds, launchers, losses, model_keys
from rlexp.convert import trl_rollouts as rollouts
from rlexp.convert.conversion import Conversion
from rlexp.convert.read import text_of
from rlexp.convert.rules import UNSAID, ByTrainer, Fate, Rule, absent, extended, needless, other, taken, worked_out

TRAINERS = ("dpo", "cpo", "orpo", "simpo", "sft", "pt", "kto", "rm", "grpo")
OF_CPO, SUPERVISED, OF_RLHF = "cpo simpo", "sft pt", "dpo cpo orpo simpo kto rm grpo"
PAIRS = "rows of messages and rejected_response are not read: make them prompt, chosen and rejected"
# What rows have to be, by trainer.
ROWS = {
    "sft": "rows of messages are read as they are",
    "pt": "rows of messages with an answer alone are not read: make them a text",
    "grpo": "rows of messages are not read: make them prompt, and columns that the reward reads",
    "kto": "rows of messages and label are not read: make them prompt, completion and label",
}
LEAST_BATCH = 16  # where no accumulation is given, theirs is the smallest that reaches this batch
TOO_LONG = {"delete": "drop", "left": "truncate"}
OF_QUANTIZED = ("quant_bits hqq_axis bnb_4bit_compute_dtype bnb_4bit_quant_type bnb_4bit_use_double_quant "
                "bnb_4bit_quant_storage")  # fmt: skip

# TRL's arguments of rollouts that ms-swift has too, but for these.
OTHERWISE = ("vllm_importance", "use_bias", "max_prompt")
LIKE_TRL = [replace(rule, trainers=("grpo",)) for rule in rollouts.RULES
            if "grpo" in rule.trainers and not rule.names[0].startswith(OTHERWISE)]  # fmt: skip


RULES: tuple[Rule, ...] = extended(
    (*huggingface.RULES, *LIKE_TRL),
    taken("temperature", "rollout.temperature", default=0.9, of="grpo"),
    taken("dynamic_sample", "loss.filter", "no other prompts replace them", of="grpo"),
    absent("advantage_estimator kl_in_reward", "advantages are per group, and the KL is in the loss",
           "grpo", of="grpo", fate=Fate.INSTEAD),
    absent("multi_turn_scheduler use_gym_env", "answers have one turn", of="grpo", fate=Fate.INSTEAD),
    absent("soft_cache_length soft_max_length", "use rollout.overlong", of="grpo"),
    absent("external_plugins", "its code is not here", fate=Fate.INSTEAD),
    needless("sleep_level offload_optimizer offload_model move_model_batches log_entropy "
             "vllm_max_num_seqs vllm_enforce_eager vllm_limit_mm_per_prompt max_resample_times", rollouts.ELSEWHERE,
             of="grpo"),
    worked_out("rlhf_type", "loss", "swift sft and swift pt are loss=sft", "the loss is chosen", of=OF_RLHF),
    worked_out("model ckpt_dir", "model=hf, model.path"),
    taken("model_revision", "model.revision"),
    taken("ref_model", "reference.path", of="dpo kto"),
    worked_out("torch_dtype", "train.precision", "bfloat16 is bf16, float32 is fp32", default="bfloat16"),
    worked_out("tuner_type train_type", "adapter=lora", "lora (their default) and full; others are missing",
               "all weights are trained", default="lora", until="adapter=adalora adapter=longlora adapter=vera"),
    *adapters.rules(adapters.SHAPE, {"rank": 8, "alpha": 32.0, "dropout": 0.05, "targets": ("all-linear",)},
                    {"use_dora": "dora", "target_parameters": "parameters", "lorap_lr_ratio": "adapter.lr_ratio"},
                    targets="same default: all linear layers"),
    *adapters.of_adapter(
        absent("target_regex", "use adapter.targets", until="regex"),
        absent("lora_bias", "no biases are trained", "none", until="adapter.bias"),
        absent("init_weights", adapters.OF_START, True, "true", until="adapter.init"),
        worked_out("adapters", "adapter.path", alias=adapters.FOLDER),
        worked_out("merge_lora", "checkpoint.export=merged", adapters.MERGED),
    ),
    worked_out("ref_adapters", "reference=adapter", "only the same adapter as adapters",
               "the loss compares with no reference", of="dpo kto grpo"),
    needless("lora_dtype tuner_backend use_swift_lora lora_ga_batch_size lora_ga_iters lora_ga_max_length "
             "lora_ga_direction lora_ga_scale lora_ga_stable_gamma", "an adapter's weights are float32"),
    absent("quant_method", adapters.QUANTIZED, until="quant"),
    needless(OF_QUANTIZED, adapters.OF_QUANTIZED),
    taken("beta", "loss.beta", default=ByTrainer(dpo=0.1, cpo=0.1, orpo=0.1, simpo=2.0, kto=0.1, grpo=0.04)),
    *losses.rules("dpo", also=OF_CPO),
    *losses.of_cpo_rules(OF_CPO, text="their default is 1, with simpo too"),
    *losses.weights("desirable_weight", "undesirable_weight", "kto"),
    taken("center_rewards_coefficient", "loss.center", default=0.0, of="rm"),
    absent("loss_scale", "all tokens weigh the same", "default"),
    worked_out("dataset", "data=hf, data.path or data.sources",
               "columns: prompt, chosen, rejected; for kto prompt, completion, label; for sft messages"),
    worked_out("val_dataset", "data.eval_path"),
    worked_out("split_dataset_ratio", "data.eval_size", default=0, least=0),
    other("columns", "data.columns", "rlexp maps field to column"),
    taken("max_length", "data.max_length", "tokens of prompt and answer; their default is the model's limit"),
    worked_out("truncation_strategy", "data.too_long"),
    taken("packing", "data.packing", "sft, pt: theirs counts blocks of rows"),
    taken("padding_free", "data.packing"),
    absent("freeze_parameters freeze_parameters_regex freeze_parameters_ratio trainable_parameters "
           "trainable_parameters_regex", "all weights are trained, but for those that model.freeze names", 0, 0.0,
           fate=Fate.INSTEAD),
    other("custom_dataset_info", "data", "give data.path and data.columns"),
    other("model_type", "model", "the model's own folder says it; a type of one's own code is not here"),
    absent("freeze_llm", "the language model is what is trained here", fate=Fate.INSTEAD),
    worked_out("system", "data.system"),
    absent("loss_type", "all tokens weigh the same", "cross_entropy", of=SUPERVISED, fate=Fate.INSTEAD),
    taken("streaming", "data.streaming"),
    taken("dataset_shuffle", "data.shuffle", of="grpo"),
    taken("train_dataloader_shuffle", "data.shuffle", of="sft pt dpo cpo orpo simpo kto rm"),
    taken("use_chat_template", "data.template", "", "rows are written by the tokenizer's template",
          to=lambda value: UNSAID if kinds.flag(value) else "never"),
    worked_out("template", "model.chat_template", "a template with the same text; else the tokenizer's own"),
    worked_out("rope_scaling", "model.rope", "yarn with its factor"),
    taken("new_special_tokens", "model.add_tokens", to=model_keys.tokens),
    taken("enable_thinking", "data.template_options.enable_thinking"),
    taken("dataset_num_proc", "data.workers"),
    worked_out("sequence_parallel_size", "parallel.ring_size", "the curve is the same for any size", default=1),
    needless("attn_impl load_from_cache_file use_hf lazy_tokenize", "no number depends on it here"),
    worked_out("NPROC_PER_NODE", "launch.nproc", rest=launchers.COUNTED),
    worked_out("NNODES", "launch.nodes", rest=launchers.ONE_NODE),
    absent("cached_dataset", "give the rows themselves by dataset"),
    needless("model_name model_author", "they are written into rows of self-cognition alone"),
    worked_out("task_type", "loss", "causal_lm", "it is the only one here", default="causal_lm"),
    absent("enable_dft_loss", "all tokens weigh the same", fate=Fate.INSTEAD, until="loss=dft"),
    worked_out("num_processes", "launch.nproc", "GPUs of all machines (accelerate)", launchers.COUNTED),
    needless("config_file machine_rank use_ray zero_stage offload_optimizer_device offload_param_device",
             launchers.STARTS),
    *launchers.RULES,
    per_device_train_batch_size=1, lr_scheduler_type="cosine", adam_beta2=0.95, weight_decay=0.1, loss_type="grpo",
    report_to="tensorboard", gradient_checkpointing=True,
)  # fmt: skip


def convert(conv: Conversion) -> None:
    _task(conv)
    gpus = launchers.needed(conv)
    if conv.values["launch.nproc"].origin == "CUDA_VISIBLE_DEVICES" and gpus > 1:
        why = "theirs is one process, whose model is spread over these GPUs; here they are one ring"
        conv.differs("CUDA_VISIBLE_DEVICES", why)
        conv.put("parallel.ring_size", gpus, "CUDA_VISIBLE_DEVICES")
        gpus = 1  # replicas of theirs
    sized = huggingface.sizes(conv, gpus, "sequence_parallel_size", fill=LEAST_BATCH)
    ring = int(conv.whole("sequence_parallel_size"))
    if conv.trainer == "grpo" and ring > 1:  # whose accumulation is as many times as long
        conv.put("train.batch_size", sized[0] * sized[1] * gpus, "gradient_accumulation_steps", why=f"× ring of {ring}")
    dtype = conv.text("torch_dtype")
    if dtype not in ("bfloat16", "float32"):
        conv.tell(Fate.ABSENT, "torch_dtype", "fp32, bf16 and fp64 are the precisions here; bf16 is taken")
    steps = huggingface.shared(conv, "torch_dtype", bf16=dtype != "float32")
    if conv.trainer != "grpo":
        huggingface.drop_last(conv)
    model_keys.trained(conv, "model")
    model_keys.template(conv, "template", model_keys.SWIFT)
    model_keys.rope(conv, "rope_scaling", conv.get("rope_scaling"))
    _adapter(conv)
    rate = conv.given_value("learning_rate")
    conv.put("optim.lr", (1e-4 if adapters.has(conv) else 1e-5) if rate is None else rate, "learning_rate")
    if conv.trainer == "grpo":
        for name in ("use_gym_env", "multi_turn_scheduler", "teacher_model"):
            if conv.given.get(name) and not (conv.get("reward_funcs") or conv.get("reward_model_name_or_path")):
                conv.refuse(name, "scores the answers, and is missing in rlexp", "Give reward_funcs.")
        rollouts.convert(conv, gpus, *sized, prompt="max_length")
    else:
        _loss(conv)
    _reference(conv)
    _data(conv)
    names = conv.texts("val_dataset")
    path = names[0].partition("#")[0].removeprefix("hf::").removeprefix("ms::") if names else ""
    rows = bool(names) and huggingface.held_out_set(conv, "val_dataset", path, several=len(names) > 1)
    rows = rows or huggingface.held_out(conv, "split_dataset_ratio", share=True)
    huggingface.evaluation(conv, steps, rows, default="steps" if rows else "no", every="save_steps")


def _task(conv: Conversion) -> None:
    """Refuse what trains another head, has no rows, or is for ms-swift 2."""
    for name in sorted({"sft_type", "model_id_or_path"} & conv.given.keys()):
        conv.refuse(name, "is an argument of ms-swift before 3, which is not converted", "Write it for a newer one.")
    if (task := conv.text("task_type")) != "causal_lm":
        rule = f"trains {task}, which is missing in rlexp"
        conv.refuse("task_type", rule, "rlexp trains answers, or a reward model.")
    if conv.get("dataset") is None and conv.get("cached_dataset") is not None:
        conv.refuse("cached_dataset", "has rows that `swift export` tokenized, which are not read",
                    "Name the rows themselves by dataset.")  # fmt: skip


def _adapter(conv: Conversion) -> None:
    """Set the adapter, which theirs has by default."""
    tuner = conv.text("tuner_type")
    if tuner != "full":
        adapters.lora(conv, "tuner_type")
    if tuner not in ("full", "lora"):
        conv.differs("tuner_type", "of adapters, lora is here; it is taken", Fate.INSTEAD)
    if conv.flag("merge_lora") and adapters.has(conv):
        conv.put("checkpoint.export", "merged", "merge_lora")


def _reference(conv: Conversion) -> None:
    """Set what an adapter from a folder is compared with: theirs leaves it out unless ref_adapters has it."""
    start, reference = (conv.texts(name) for name in ("adapters", "ref_adapters"))
    if not adapters.compared(conv):
        return
    if reference and reference == start:
        conv.choose("reference", "adapter", "ref_adapters", why="the adapter that training starts from")
    elif reference:
        conv.tell(Fate.ABSENT, "ref_adapters", adapters.UNREAD)
    elif conv.get("ref_model") is None:
        adapters.compare_without(conv)


def _loss(conv: Conversion) -> None:
    match conv.trainer:
        case "sft" | "pt":
            conv.choose("loss", "sft")
            if conv.name("packing") == "packing" and conv.flag("packing"):
                conv.differs("packing", losses.OF_BLOCKS)
        case "kto":
            losses.single(conv, "kto", "rlhf_type")
        case "rm":
            losses.reward_model(conv, "rlhf_type", notes=[losses.OF_SCORES])
        case "dpo":
            losses.choose(conv, smoothed=losses.SMOOTHED | {"dpo"})
        case "orpo":
            losses.without_reference(conv, "orpo", "rlhf_type", note=losses.OF_PROMPTS)
        case _:
            losses.without_reference(conv, losses.of_cpo(conv), "rlhf_type", likelihood="cpo_alpha", gamma=1.0)


def _data(conv: Conversion) -> None:
    names = conv.texts("dataset")
    if any("self-cognition" in name for name in names):
        conv.differs("dataset", "{{NAME}} and {{AUTHOR}} in rows of self-cognition are not replaced here: write the "
                     "names into them")  # fmt: skip
    if not names:
        conv.missing("dataset", "it names the rows to train on", "org/pairs")
    for key, name in zip(huggingface.keys_of(names), names, strict=True):
        match = re.fullmatch(r"(?:hf::|ms::)?((?:\w+://)?[^:#]+)(?::([^#]+))?(?:#(\d+))?", name)
        if match is None:
            conv.refuse("dataset", "must be a path or a name, as ID, ID:SUBSET or ID#ROWS", "Correct it.")
        path, subset, most = match.groups()
        conv.put(f"{key}.path", path, "dataset")
        if subset:
            conv.put(f"{key}.subset", subset, "dataset")
        if most:
            why = "the first rows; theirs are drawn, or repeated up to it"
            conv.put(f"{key}.max_samples", int(most), "dataset", why=why)
    conv.differs("dataset", f"{ROWS.get(conv.trainer, PAIRS)}; the hub is Hugging Face's, and a set that ms-swift "
                 "knows by name has other splits and columns there")  # fmt: skip
    strategy = conv.text("truncation_strategy", "left" if conv.trainer == "grpo" else "delete")
    if strategy not in TOO_LONG:
        conv.remark(Fate.ABSENT, "truncation_strategy", strategy, "a longer row is dropped, or cut at its start")
    if conv.get("max_length") is None and conv.trainer != "grpo":
        conv.put("data.too_long", "error", "max_length", "truncation_strategy")
        why = "their default is the model's own limit; here a longer row is an error: give data.max_length"
        conv.remark(Fate.OTHER, "max_length", None, why)
    else:
        conv.put("data.too_long", TOO_LONG.get(strategy, "drop"), "truncation_strategy")
    _system(conv)


def _system(conv: Conversion) -> None:
    """Set the system prompt, which theirs reads from a file that ends in .txt."""
    text = conv.text("system")
    of_file = text is not None and text.endswith(".txt")
    if of_file and not Path(text).is_file():
        conv.tell(Fate.INSTEAD, "system", "theirs reads the text of this file, which is not here: data.system")
    elif text is not None:
        conv.put("data.system", text_of(Path(text)) if of_file else text, "system")
