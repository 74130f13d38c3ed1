"""The small configuration that a model is probed with: fewer layers and experts, narrower, and otherwise alike.

What the probe tests stays: every kind of layer, the numbers and sizes of heads, windows, rotary positions, how many
experts a token takes. Each change is tried on models without memory, and taken back where more than sizes would follow.
A rehearsal takes fewer layers alone.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlexp.config.schema import ModelConfig
from rlexp.training.model import hook
from rlexp.training.model.loading import from_config_options

VOCABULARY = 512
WIDTHS = {  # by the name in a configuration: what a copy has at most
    "hidden_size": 256,
    "intermediate_size": 320,
    "ffn_dim": 320,
    "n_inner": 320,
    "ffn_hidden_size": 320,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
MOST_KINDS = 12  # of layers; if more differ, they differ by number, and not by kind

PLACES = ("layer_idx", "layer_id", "layer_number", "idx")  # attributes by which all layers differ
SIZED = (nn.Linear, nn.Embedding, Conv1D)  # modules that are nothing but their sizes


def small_config(cfg: ModelConfig, config: PreTrainedConfig, windows: Mapping[str, int]) -> PreTrainedConfig:
    """Return the configuration of a copy with few parameters, a small vocabulary, and these windows."""
    small = copy.deepcopy(config)
    small.vocab_size = min(VOCABULARY, config.vocab_size)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token = getattr(config, name, None)
        if isinstance(token, int):
            setattr(small, name, min(token, small.vocab_size - 1))
    layers = _layers_by_name(config)
    like = _without_memory(cfg, small)
    if like is not None:
        small = _narrowed(cfg, small, like)
        layers = max(layers, _layers_with_all_kinds(like, config.num_hidden_layers))
    for name, window in windows.items():
        setattr(small, name, window)
    return first_layers(small, layers)


def _without_memory(cfg: ModelConfig, config: PreTrainedConfig) -> PreTrainedModel | None:
    """Return the model on torch's meta device; None if it cannot be made there or at all."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=hook.NAME, **from_config_options(cfg, config)
            )
    except Exception:  # whatever a model's own code raises over sizes that it does not take
        return None


def _narrowed(cfg: ModelConfig, config: PreTrainedConfig, like: PreTrainedModel) -> PreTrainedConfig:
    """Apply one change after the other, and keep those after which the model still has the structure of `like`."""
    narrowed = config
    replaced: set[Any] = set()
    for change in _changes(config):
        tried = copy.deepcopy(narrowed)
        try:
            for name, value in change.items():
                setattr(tried, name, value)
        except Exception:  # a configuration may check its values
            continue
        old = replaced | {getattr(config, name, None) for name in change}
        model = _without_memory(cfg, tried)
        if model is not None and _alike(like, model, old):
            narrowed, replaced = tried, old
    return narrowed


def _changes(config: PreTrainedConfig) -> list[dict[str, int]]:
    """List what may be made smaller. A head keeps its size while the model becomes narrower."""
    own = {name: value for name, value in vars(config).items() if type(value) is int}
    most = WIDTHS | dict.fromkeys(EXPERTS, _fewer_experts(own))
    changes = [{name: value} for name, value in most.items() if own.get(name, 0) > value > 0]
    heads = getattr(config, "num_attention_heads", None)
    for change in changes:
        if "hidden_size" in change and heads and getattr(config, "head_dim", None) is None:
            change["head_dim"] = own["hidden_size"] // heads
    return changes


def _fewer_experts(own: Mapping[str, int]) -> int:
    """Return a number of experts among which a token still chooses; 0 if none says how many it takes."""
    taken = [value for name, value in own.items() if re.search("per_tok|top_?k(?!_group)|moe_k", name)]
    if not taken:
        return 0
    groups = max(1, own.get("n_group", 1))
    each = max(2, -(-2 * max(taken) // groups), -(-max(taken) // max(1, own.get("topk_group", groups))))
    return groups * each


def _alike(one: PreTrainedModel, other: PreTrainedModel, sizes: set[Any]) -> bool:
    """Return whether two models have the same modules with the same attributes, but for `sizes` of the first."""
    ones, others = (dict(model.named_modules()) for model in (one, other))
    if not others.keys() <= ones.keys() or any("expert" not in name for name in ones.keys() - others.keys()):
        return False
    for name, module in others.items():
        was, now = _facts(name, ones[name]), _facts(name, module)
        if type(module) is not type(ones[name]) or was.keys() != now.keys():
            return False
        if any(was[key] != now[key] and was[key] not in sizes for key in was):
            return False
    return True


def _facts(name: str, module: nn.Module) -> dict[str, Any]:
    """Return what says how a module computes: numbers, flags and names, the scale of attention, rotary positions."""
    plain = (int, str, float) if "att" in name else (int, str)
    kept = {} if type(module).__module__.startswith("torch.nn") or isinstance(module, SIZED) else vars(module)
    facts: dict[str, Any] = {
        key: value for key, value in kept.items() if isinstance(value, plain) and key[0] != "_" and key not in PLACES
    }
    return facts | {key: table.shape for key, table in module.named_buffers(recurse=False) if "inv_freq" in key}


def _layers_by_name(config: PreTrainedConfig) -> int:
    """Return how many of the first layers have every kind that the configuration names; at least two."""
    kinds = getattr(config, "layer_types", None) or []
    return max(min(2, config.num_hidden_layers), max((kinds.index(kind) + 1 for kind in set(kinds)), default=0))


def _layers_with_all_kinds(model: PreTrainedModel, number: int) -> int:
    """Return how many of the first layers have every kind of module that any layer has; 0 if that cannot be said."""
    stacks = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == number]
    if not stacks:
        return 0
    firsts: dict[str, int] = {}
    for at, layer in enumerate(stacks[0], 1):
        kind = [(name, type(each).__name__, _facts(name, each)) for name, each in layer.named_modules()]
        firsts.setdefault(repr(kind), at)
    return max(firsts.values()) if len(firsts) <= MOST_KINDS else 0


# ---- fewer layers ----


def first_layers(config: Any, layers: int | None) -> Any:
    """Return the configuration with this many of its layers; with all of them for None."""
    if layers is None or layers == config.num_hidden_layers:
        return config
    small = copy.deepcopy(config)
    for name, each in listed(config).items():
        setattr(small, name, list(each[:layers]))
    small.num_hidden_layers = layers
    return small


def listed(config: Any) -> dict[str, Sequence[Any]]:
    """Return what a configuration lists layer by layer."""
    count = int(config.num_hidden_layers)
    return {name: each for name, each in vars(config).items() if isinstance(each, list | tuple) and len(each) == count}
