"""ms-swift: `swift rlhf --rlhf_type dpo …`."""

from __future__ import annotations

import math
import re
from typing import Any

from rlexp.convert import huggingface
from rlexp.convert.rules import Conversion, ConvertError, Fate, Rule, absent, needless, other, taken, worked_out

TRAINERS = ("dpo",)
LEAST_BATCH = 16  # their accumulation, where none is given, is that which reaches it
TOO_LONG = {"delete": "drop", "left": "truncate"}

RULES: tuple[Rule, ...] = (
    *huggingface.RULES,
    worked_out("rlhf_type", "loss=dpo", ""),
    worked_out("model", "model=hf, model.path", ""),
    taken("model_revision", "model.revision"),
    absent("ref_model", "the reference is the model at the start"),
    taken("torch_dtype", "train.precision", to=lambda value: "fp32" if value == "float32" else "bf16"),
    absent("tuner_type train_type", "all weights are trained: LoRA is not here, and a full fine-tuning wants a "
           "smaller rate",
           "full"),
    absent("lora_rank lora_alpha lora_dropout target_modules", "LoRA is not here"),
    taken("beta", "loss.beta", default=0.1),
    taken("label_smoothing", "loss.label_smoothing", default=0.0),
    absent("loss_type", "sigmoid is the one preference loss here", "sigmoid"),
    absent("rpo_alpha", "no likelihood of the chosen answer is added"),
    absent("ld_alpha loss_weights loss_scale", "it is not here"),
    worked_out("dataset", "data=hf, data.path or data.sources", "pairs with prompt, chosen and rejected"),
    absent("val_dataset", "name held-out rows by data.eval_path"),
    worked_out("split_dataset_ratio", "data.eval_size", "a number of rows"),
    other("columns", "data.columns", "from column to field there, from field to column here"),
    taken("max_length", "data.max_length", "tokens of prompt and answer together"),
    worked_out("truncation_strategy", "data.too_long", ""),
    taken("packing padding_free", "data.packing", to=bool),
    taken("system", "data.system"),
    worked_out("use_chat_template", "data.template", ""),
    taken("enable_thinking", "data.template_options.enable_thinking", to=bool),
    taken("dataset_num_proc", "data.workers"),
    worked_out("sequence_parallel_size", "parallel.ring_size", "any layout has the same curve"),
    needless("attn_impl load_from_cache_file use_hf model_type template cached_dataset lazy_tokenize",
             "no number depends on it here"),
    worked_out("NPROC_PER_NODE", "launch.nproc", ""),
    worked_out("NNODES", "launch.nodes", ""),
    needless("CUDA_VISIBLE_DEVICES MASTER_PORT MASTER_ADDR NODE_RANK PYTORCH_CUDA_ALLOC_CONF OMP_NUM_THREADS "
             "MAX_PIXELS",
             "`python -m rlexp` starts its own ranks"),
)  # fmt: skip


def convert(conv: Conversion) -> None:
    gpus = conv.gpus or _gpus(conv)
    ring = conv.whole("sequence_parallel_size", 1)
    if gpus % ring:
        raise ConvertError(f"sequence_parallel_size={ring}: does not divide the {gpus} GPUs. Say --gpus.")
    conv.put("launch.nproc", gpus // conv.whole("NNODES", 1), "NPROC_PER_NODE", why="--gpus" if conv.gpus else "")
    conv.put("launch.nodes", conv.whole("NNODES", 1), "NNODES")
    conv.put("parallel.ring_size", ring, "sequence_parallel_size")
    micro = conv.whole("per_device_train_batch_size", 1)
    steps = conv.whole("gradient_accumulation_steps", max(1, math.ceil(LEAST_BATCH / (micro * gpus // ring))))
    conv.put("train.micro_batch_size", micro, "per_device_train_batch_size")
    conv.put(
        "train.batch_size",
        micro * steps * gpus // ring,
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        why=f"{micro} × {steps} × {gpus} GPUs / ring of {ring}",
    )
    huggingface.shared(conv, bf16=True, decay="cosine")
    huggingface.drop_last(conv)
    if conv.name("report_to") is None:
        conv.choose("logger", "tensorboard", "report_to")
    for key, value in (("optim.weight_decay", 0.1), ("optim.betas", [0.9, 0.95])):
        names = ("weight_decay",) if key.endswith("decay") else ("adam_beta1", "adam_beta2")
        if not any(map(conv.name, names)):
            conv.put(key, value, *names)
    conv.put("optim.lr", conv.get("learning_rate", 1e-5), "learning_rate")
    if conv.name("gradient_checkpointing") is None:
        conv.put("memory.checkpointing", True, "gradient_checkpointing")
    conv.choose("model", "hf")
    conv.put("model.path", conv.get("model"), "model")
    conv.choose("loss", "dpo", "rlhf_type")
    _data(conv)


def _gpus(conv: Conversion) -> int:
    here = conv.get("NPROC_PER_NODE")
    if here is None and (seen := conv.given.get("CUDA_VISIBLE_DEVICES")) is not None:
        here = len(str(seen).split(","))
    if here is None:
        raise ConvertError(
            "per_device_train_batch_size: is the batch of one GPU, and the command does not say how many. Say --gpus=8."
        )
    return int(here) * conv.whole("NNODES", 1)


def _data(conv: Conversion) -> None:
    conv.choose("data", "hf")
    said: Any = conv.get("dataset")
    if said is None:
        raise ConvertError("dataset: is missing, what is trained on.")
    names = said if isinstance(said, list) else [said]
    for number, name in enumerate(names, start=1):
        key = "data" if len(names) == 1 else f"data.sources.source{number}"
        path, subset, most = re.fullmatch(r"(?:hf::|ms::)?([^:#]+)(?::([^#]+))?(?:#(\d+))?", str(name)).groups()  # type: ignore[union-attr]
        conv.put(f"{key}.path", path, "dataset")
        if subset:
            conv.put(f"{key}.subset", subset, "dataset")
        if most:
            conv.put(f"{key}.split", f"train[:{most}]", "dataset", why="the first rows; theirs are drawn")
    conv.remark(
        Fate.OTHER,
        "dataset",
        said,
        "rows of messages and rejected_response are not read: make them prompt, "
        "chosen and rejected; and the hub is Hugging Face's",
    )
    strategy = str(conv.get("truncation_strategy", "delete"))
    conv.put("data.too_long", TOO_LONG.get(strategy, "drop"), "truncation_strategy")
    if conv.get("use_chat_template") is False:
        conv.put("data.template", "never", "use_chat_template")
    if conv.get("split_dataset_ratio"):
        conv.tell(Fate.OTHER, "split_dataset_ratio", "a share of the rows there; data.eval_size is a number of rows")
        conv.values.pop("train.eval_every", None)
    conv.tell(Fate.NEEDLESS, "split_dataset_ratio", "no rows are held out")
