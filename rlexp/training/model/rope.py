"""Rotary positions: more of them by YaRN (`model.rope`), and those of other kinds pinned to data.max_length.

Where angles depend on the largest position (`dynamic`, `longrope`), a shard has other positions than the whole
sequence, and would otherwise rotate its queries by other angles. YaRN's angles do not depend on it.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlexp.base.errors import ConfigError, ModelError
from rlexp.config.rope import YARN, Yarn, extended, positions_in, refuse_unlike

MOVING = ("dynamic", "longrope")


def pin(model: nn.Module, max_length: int) -> None:
    """Pin the moving rotary embeddings of `model` to the angles of a sequence of `max_length`."""
    for name, module in model.named_modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and any(each in MOVING for each in kind.values()):
            raise ModelError(f"{name}: rotary positions of several kinds ({kind}) cannot be pinned to data.max_length.")
        if isinstance(kind, str) and kind in MOVING:
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, module.inv_freq.device, seq_len=max_length)
            module.inv_freq.copy_(frequencies)
            module.attention_scaling = scaling
            module.rope_type = "default"  # on this instance: the update of the angles reads it at each call


def extend(config: PreTrainedConfig, yarn: Yarn, of: str) -> None:
    """Let a model's configuration say YaRN, as transformers reads it. `of` names the model's key with its value."""
    text = config.get_text_config()
    positions = positions_in(text.to_dict())
    try:
        refuse_unlike(yarn, positions, of)
    except ConfigError as error:  # it was not known before
        raise ModelError(str(error)) from None
    if (yarn.native or positions.native) is None:
        raise ModelError(f"model.rope={yarn}: {of} does not say how many positions it has. Say it: {yarn}:4096.")
    text.rope_parameters, text.max_position_embeddings = extended(yarn, positions)
    if hasattr(text, "original_max_position_embeddings"):  # transformers takes it first
        text.original_max_position_embeddings = text.rope_parameters["original_max_position_embeddings"]


def refuse_unless_extended(model: nn.Module, yarn: Yarn, of: str) -> None:
    """Refuse a model whose code does not take the angles from its configuration."""
    if not any(getattr(module, "rope_type", None) == YARN for module in model.modules()):
        raise ModelError(
            f"model.rope={yarn}: the code of {of} ({type(model).__name__}) computes its rotary positions by itself, "
            f"and not from rope_parameters. Leave model.rope out."
        )
