"""Export of a trained model in transformers' format: weights in shards, configuration, tokenizer, template."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rlexp.config.schema import ExportDtype, HFModelConfig, ModelConfig
from rlexp.errors import ModelError

SHARD = "5GB"


def dtype_of(chosen: ExportDtype, *, bf16: bool) -> torch.dtype:
    """Return the dtype to write; `auto` is the dtype of the run, or float32 for a float64 run."""
    match chosen:
        case ExportDtype.auto:
            return torch.bfloat16 if bf16 else torch.float32
        case ExportDtype.bf16:
            return torch.bfloat16
        case ExportDtype.fp16:
            return torch.float16
        case ExportDtype.fp32:
            return torch.float32


def on_host(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copy the weights to the host one by one, so that a device never holds more than one whole parameter."""
    return {name: weight.detach().to("cpu", dtype, copy=True) for name, weight in weights}


def export(like: PreTrainedModel, weights: Mapping[str, Tensor], tokenizer: Any, place: Path) -> None:
    """Write `weights` as a model of the type of `like`, whose own parameters may be on any device, or in pieces."""
    with torch.device("meta"):
        model = type(like)(plain_config(like))
    buffers = {name: tensor for name, tensor in like.state_dict().items() if name in dict(like.named_buffers())}
    model.load_state_dict({**buffers, **weights}, assign=True, strict=False)
    model.tie_weights()
    lost = sorted(name for name, tensor in model.state_dict().items() if tensor.is_meta)
    if lost:
        raise ModelError(f"{place}: cannot be exported, since there are no weights for {', '.join(lost[:4])}.")
    model.generation_config = like.generation_config
    disable_progress_bar()
    model.save_pretrained(place, max_shard_size=SHARD)
    tokenizer.save_pretrained(place)


def plain_config(like: PreTrainedModel) -> Any:
    """Return its configuration with transformers' own attention."""
    config = copy.deepcopy(like.config)
    config._attn_implementation = "sdpa" if type(like)._supports_sdpa else "eager"
    return config


def save_description(like: PreTrainedModel, tokenizer: Any, place: Path) -> None:
    """Write all of an exported model but its weights."""
    like.config.save_pretrained(place)
    if like.can_generate():
        like.generation_config.save_pretrained(place)
    tokenizer.save_pretrained(place)


def described(place: Path, cfg: ModelConfig) -> tuple[PreTrainedModel, Any]:
    """Read what `save_description` wrote: the model without weights, and its tokenizer."""
    trusted = isinstance(cfg, HFModelConfig) and cfg.trust_remote_code
    config = AutoConfig.from_pretrained(place, trust_remote_code=trusted)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)
    if (place / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(place)
    return model, AutoTokenizer.from_pretrained(place, trust_remote_code=trusted)
