"""LLaMA-Factory: a yaml with `stage: dpo`, or sft, pt, kto, rm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlexp.base import plain_json
from rlexp.convert import adapters, huggingface, kinds, launchers, losses, model_keys
from rlexp.convert.conversion import Conversion, ConvertError
from rlexp.convert.rules import UNSAID, Fate, Rule, absent, extended, needless, other, taken, worked_out

TRAINERS = ("dpo", "sft", "pt", "kto", "rm")
# Our fields, by their names of columns.
ASKED = {"prompt": "prompt", "query": "input", "system": "system", "tools": "tools"}
PAIRS = ASKED | {"messages": "prompt", "chosen": "chosen", "rejected": "rejected"}
FIELDS = {
    "dpo": PAIRS, "rm": PAIRS, "sft": ASKED | {"response": "completion", "messages": "messages"},
    "pt": {"prompt": "text"}, "kto": ASKED | {"response": "completion", "kto_tag": "label"},
}  # fmt: skip
OF_HEADS = ("Reward model: theirs is a value head beside the language model, with a bias and dropout. Ours is the head "
            "of transformers' sequence classification, `score`, without either.")  # fmt: skip
REFERRED = "dpo kto"
SPLIT = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


RULES: tuple[Rule, ...] = extended(
    huggingface.RULES,
    needless("gradient_checkpointing activation_checkpointing", "disable_gradient_checkpointing says it"),
    worked_out("stage", "loss", rest="the loss is chosen"),
    worked_out("model_name_or_path", "model=hf, model.path"),
    huggingface.TRUST,
    taken("ref_model", "reference.path", of=REFERRED),
    worked_out("finetuning_type", "adapter=lora", "lora (their default) and full; others are missing",
               "all weights are trained", default="lora", until="adapter=oft"),
    *adapters.rules({**adapters.SHAPE, "targets": "lora_target", "also": "additional_target"},
                    {"rank": 8, "targets": ("all",)},
                    {"use_dora": "dora", "loraplus_lr_ratio": "adapter.lr_ratio"}, split=",",
                    alpha="by default twice the rank", targets="all (their default) is [], the same layers"),
    *adapters.of_adapter(
        absent("pissa_init", adapters.OF_START, until="pissa adapter.init"),
        absent("use_llama_pro", "no layers are added", until="llama_pro"),
        worked_out("adapter_name_or_path", "adapter.path", split=",", alias=adapters.FOLDER,
                   why="theirs compares with the model without it: set reference.path"),
        worked_out("create_new_adapter", "adapter.path", "merge the earlier adapter first"),
    ),
    needless("loraplus_lr_embedding pissa_iter pissa_convert adapter_folder", "only with another argument that is not "
             "here"),
    worked_out("ref_model_adapters", "reference=adapter", "only the same adapter",
               "only with ref_model, and a loss that compares with a reference", of=REFERRED),
    needless("use_unsloth use_unsloth_gc", "the numbers are the same"),
    absent("freeze_trainable_layers freeze_trainable_modules freeze_extra_modules", "use model.freeze",
           when=lambda conv: conv.text("finetuning_type") == "freeze", rest="only with finetuning_type=freeze"),
    absent("train_mm_proj_only", "all weights are trained", fate=Fate.INSTEAD),
    absent("quantization_bit", adapters.QUANTIZED, until="quant"),
    absent("ref_model_quantization_bit", adapters.QUANTIZED, until="quant", of=REFERRED),
    needless("quantization_method quantization_type double_quantization quantization_device_map",
             adapters.OF_QUANTIZED),
    taken("pref_beta", "loss.beta", default=0.1, of=REFERRED, alias="beta"),
    *losses.weights("kto_chosen_weight", "kto_rejected_weight", "kto"),
    absent("use_dft_loss use_asft_loss use_eaft_loss", "all tokens weigh the same", until="loss=dft",
           of="sft", fate=Fate.INSTEAD),
    absent("use_badam use_galore use_apollo use_muon use_adam_mini mixture_of_depths", "use adamw or sgd",
           fate=Fate.INSTEAD, until="optim=muon optim=galore"),
    needless("badam_mode badam_switch_mode badam_switch_interval badam_verbose galore_layerwise galore_target "
             "galore_rank galore_scale apollo_layerwise apollo_target apollo_rank apollo_scale apollo_scale_type "
             "asft_alpha", "only with an optimizer or a loss that rlexp lacks"),
    other("train_on_prompt", "loss=sft", "rlexp never trains on prompts", of="sft"),
    other("mask_history", "loss=sft", "rlexp trains on every answer", of="sft"),
    taken("disable_shuffling", "data.shuffle", to=lambda value: False if kinds.flag(value) else UNSAID),
    worked_out("pref_loss", "loss", "sigmoid is dpo; hinge, ipo, orpo, simpo", of="dpo", until=losses.NOT_YET,
               default="sigmoid", alias="loss_type"),
    worked_out("dpo_label_smoothing", "loss.label_smoothing", rest=losses.OTHERS, of="dpo", default=0.0, least=0,
               alias="label_smoothing"),
    worked_out("pref_ftx", "loss.sft_weight", "a mean over the train batch's tokens, not each answer's",
               losses.OTHERS, of=REFERRED, default=0.0, least=0, alias="rpo_alpha"),
    worked_out("pref_bco_weight", "loss=mpo, loss.terms", "same shift: the mean reward so far",
               losses.OTHERS, of="dpo", default=0.0, least=0),
    worked_out("simpo_gamma", "loss.gamma", rest=losses.OTHERS, of="dpo", default=0.5),
    worked_out("ld_alpha", "loss.ld_alpha", "rlexp applies it to the reference too", losses.OTHERS,
               of="dpo", default=1.0, least=0),
    worked_out("dataset", "data=hf, data.path or data.sources", "by dataset_info.json", split=","),
    worked_out("dataset_dir", "data.path", default="data"),
    worked_out("eval_dataset", "data.eval_path", split=","),
    worked_out("val_size", "data.eval_size", "rlexp rounds a share down, theirs up"),
    worked_out("template", "model.chat_template", "a template with the same text; else the tokenizer's own"),
    worked_out("rope_scaling", "model.rope", "yarn"),
    worked_out("add_tokens", "model.add_tokens", split=","),
    worked_out("add_special_tokens", "model.add_tokens", split=","),
    taken("default_system", "data.system"),
    taken("cutoff_len", "data.max_length", "tokens of prompt and answer", default=2048),
    taken("max_samples", "data.max_samples"),
    absent("mix_strategy interleave_probs", "sources with data.sources.NAME.weight", "concat"),
    taken("preprocessing_num_workers", "data.workers"),
    worked_out("packing neat_packing", "data.packing", "sft, pt: theirs counts blocks of rows",
               "the numbers are the same with packing or without (data.packing)"),
    needless("overwrite_cache plot_loss flash_attn enable_liger_kernel tokenized_path preprocessing_batch_size "
             "compute_accuracy sequence_parallel_mode include_effective_tokens_per_second",
             "no number depends on it here"),
    absent("pure_bf16", "trained weights are float32"),
    taken("disable_gradient_checkpointing", "memory.checkpointing", default=False,
          to=lambda value: not kinds.flag(value)),
    worked_out("sequence_parallel_size", "parallel.ring_size"),
    absent("cp_mode cp_size", "use parallel.ring_size", 1),
    worked_out("num_processes", "launch.nproc", "GPUs of all machines (accelerate)", launchers.COUNTED),
    absent("tensor_model_parallel_size", launchers.NOT_SPLIT, 1, until="tensor_parallel"),
    absent("pipeline_model_parallel_size expert_model_parallel_size", launchers.NOT_SPLIT, 1),
    needless("config_file use_v1_kernels FORCE_TORCHRUN", launchers.STARTS),
    *launchers.RULES,
)  # fmt: skip


OF_PT = "their default for pt: "


def convert(conv: Conversion) -> None:
    for name in ("do_predict", "do_eval"):
        if conv.flag(name) and not conv.flag("do_train"):
            conv.refuse(name, "does that alone, and trains nothing", "Convert a file that has do_train.")
    gpus = launchers.spread(conv, launchers.needed(conv), *SPLIT)
    huggingface.sizes(conv, gpus, "sequence_parallel_size")
    steps = huggingface.shared(conv, bf16=conv.flag("pure_bf16"))
    if conv.values["train.precision"].value == "fp32":
        conv.differs("bf16", "without bf16 and fp16 theirs computes as the checkpoint is stored, ours in float32")
    huggingface.drop_last(conv)
    model_keys.trained(conv, "model_name_or_path")
    model_keys.template(conv, "template", model_keys.FACTORY)
    model_keys.rope(conv, "rope_scaling", conv.get("rope_scaling"), "cutoff_len")
    if tokens := [*conv.texts("add_tokens"), *conv.texts("add_special_tokens")]:
        conv.put("model.add_tokens", tokens, "add_tokens", "add_special_tokens")
    _adapter(conv)
    _loss(conv)
    _reference(conv)
    known = _data(conv)
    huggingface.evaluation(conv, steps, _held_out(conv, known) or huggingface.held_out(conv, "val_size"))


def _adapter(conv: Conversion) -> None:
    """Set the adapter, which theirs has by default."""
    kind = conv.text("finetuning_type")
    if kind == "freeze":
        conv.tell(Fate.INSTEAD, "finetuning_type", "all weights are trained, but for those that model.freeze names")
    if kind in ("full", "freeze"):
        return
    new = conv.flag("create_new_adapter")
    if new:
        conv.tell(Fate.ABSENT, "adapter_name_or_path", adapters.MERGE_FIRST)
    adapters.lora(conv, "finetuning_type", alpha=2.0 * conv.whole("lora_rank"), folder=not new)
    if kind != "lora":
        conv.differs("finetuning_type", "of adapters, lora is here; it is taken", Fate.INSTEAD)


def _reference(conv: Conversion) -> None:
    """Set what the policy is compared with: where training starts from an adapter, theirs leaves that out."""
    reference, model = conv.text("ref_model_adapters"), conv.text("ref_model")
    same = adapters.has(conv) and model == conv.text("model_name_or_path")
    if not adapters.compared(conv) or model is None:
        adapters.compare_without(conv)
        return
    if reference is None and same and "adapter.path" not in conv.values:
        conv.tell(Fate.NEEDLESS, "ref_model", adapters.ONE_REFERENCE)
    elif reference is not None and same and reference == conv.text("adapter_name_or_path"):
        why = "the adapter that training starts from"
        conv.choose("reference", "adapter", "ref_model_adapters", "ref_model", why=why)
    conv.tell(Fate.ABSENT, "ref_model_adapters", adapters.UNREAD)


def _loss(conv: Conversion) -> None:
    match conv.trainer:
        case "rm":
            losses.reward_model(conv, "stage", notes=[OF_HEADS], margins=False)
        case "kto":
            losses.single(conv, "kto", "stage")
            if conv.number("pref_ftx"):
                conv.tell(Fate.ABSENT, "pref_ftx", "loss=kto adds no likelihood of good answers")
        case "dpo" if (loss := conv.text("pref_loss")) in ("orpo", "simpo"):
            conv.tell(Fate.NEEDLESS, "dpo_label_smoothing", losses.OTHERS)
            losses.without_reference(conv, loss, "pref_loss", likelihood="pref_ftx", added=float(loss == "orpo"),
                                     note=losses.OF_ANSWERS)  # fmt: skip
        case "dpo":
            losses.choose(conv, smoothed=frozenset({"dpo"}), note=losses.OF_ANSWERS)
        case _:
            conv.choose("loss", "sft", "stage")
            if conv.flag("packing", conv.trainer == "pt"):
                whose = "" if conv.name("packing") else OF_PT
                conv.remark(Fate.OTHER, "packing", True, f"{whose}{losses.OF_BLOCKS}")


def _held_out(conv: Conversion, known: Mapping[str, Mapping[str, Any]]) -> bool:
    names = conv.texts("eval_dataset")
    described = known.get(names[0], {}) if names else {}
    file, path = described.get("file_name"), described.get("hf_hub_url")
    if names and not (file or path):
        conv.tell(Fate.OTHER, "eval_dataset", "dataset_info.json here does not describe it: data.eval_path")
    if not (file or path):
        return False
    path = str(Path(conv.text("dataset_dir")) / str(file)) if file else path
    split = None if file else described.get("split", "train")
    return huggingface.held_out_set(conv, "eval_dataset", path, split, several=len(names) > 1)


def _data(conv: Conversion) -> Mapping[str, Mapping[str, Any]]:
    """Set the rows; return what describes all sets that are known here."""
    names = conv.texts("dataset")
    if not names:
        conv.missing("dataset", "it names the rows to train on", "dpo_en_demo")
    folder = Path(conv.text("dataset_dir"))
    known = plain_json.mapping_in(folder / "dataset_info.json") or {}
    for key, name in zip(huggingface.keys_of(names), names, strict=True):
        described = known.get(name)
        if not isinstance(described, dict):
            raise ConvertError(f"dataset={name}: is a name in {folder}/dataset_info.json, and there is none here. Run "
                               f"this where that file is, or give dataset_dir.")  # fmt: skip
        _source(conv, key, described, folder)
    conv.put("data.too_long", "truncate", why="another part is cut than by theirs: docs/data.md")
    if conv.trainer == "pt" and conv.flag("packing", True):
        why = "their default; a long text goes on in the next block there, here its end is cut: split it first"
        conv.remark(Fate.OTHER, "packing", True, why)
    return known


def _source(conv: Conversion, key: str, described: dict[str, Any], folder: Path) -> None:
    file = described.get("file_name")
    path = str(folder / str(file)) if file else described.get("hf_hub_url")
    if path is None:
        raise ConvertError(f"dataset={conv.text('dataset')}: {folder}/dataset_info.json gives it neither file_name nor "
                           f"hf_hub_url. Give it one of them.")  # fmt: skip
    conv.put(f"{key}.path", path, "dataset", "dataset_dir")
    for name in ("subset", "split"):
        if described.get(name) and not file:
            conv.put(f"{key}.{name}", described[name], "dataset")
    columns, fields = described.get("columns"), FIELDS[conv.trainer]
    for theirs, column in (columns if isinstance(columns, dict) else {}).items():
        ours = fields.get(theirs)
        if theirs in ("images", "videos", "audios") and column:
            conv.remark(Fate.INSTEAD, f"dataset: {theirs}", column, "only texts are read")
        if theirs == "history" and column:
            conv.remark(Fate.OTHER, "dataset: history", column, "earlier turns in a column of their own are not read")
        if theirs == "query" and column and conv.trainer in ("dpo", "rm", "kto"):
            why = "theirs adds this column to the prompt; here write it there"
            conv.remark(Fate.OTHER, "dataset: query", column, why)
        elif ours and column and column != ours:
            conv.put(f"{key}.columns.{ours}", column, "dataset")
    if conv.trainer == "kto" and described.get("formatting") == "sharegpt":
        why = "a conversation with a label is not read: make its rows prompt, completion and label"
        conv.remark(Fate.OTHER, "dataset: formatting", "sharegpt", why)
