"""Pin rotary variants whose angles depend on the largest position (`dynamic`, `longrope`) to data.max_length.

A shard has other positions than the whole sequence, and would otherwise rotate its queries by other angles.
"""

from __future__ import annotations

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlexp.base.errors import ModelError

MOVING = ("dynamic", "longrope")


def pin(model: nn.Module, max_length: int) -> list[str]:
    """Pin the moving rotary embeddings of `model` to the angles of a sequence of `max_length`; return their names."""
    pinned = []
    for name, module in model.named_modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and any(each in MOVING for each in kind.values()):
            raise ModelError(f"{name}: rotary positions of several kinds ({kind}) cannot be pinned to data.max_length.")
        if isinstance(kind, str) and kind in MOVING:
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, module.inv_freq.device, seq_len=max_length)
            module.inv_freq.copy_(frequencies)
            module.attention_scaling = scaling
            module.rope_type = "default"  # on this instance: the update of the angles reads it at each call
            pinned.append(f"{name} ({kind})")
    return pinned
