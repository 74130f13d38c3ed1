"""Adapters that plain peft has written, and what plain peft and transformers say of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TARGETS = ["q_proj", "v_proj", "down_proj"]
RANK, ALPHA = 4, 8


def adapter_of(base: Path, place: Path, *, trained: bool = True, **options: Any) -> Path:
    """Write an adapter of a model; without `trained` it changes nothing yet."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    keys = {"r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**(keys | options)))
    for name, parameter in model.named_parameters():
        if trained and ("lora_B" in name or "modules_to_save" in name):
            parameter.data += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(place)
    return place


def loaded(base: Path, adapter: Path | None = None) -> Any:
    """Load a model with plain transformers, and an adapter with plain peft."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return model if adapter is None else PeftModel.from_pretrained(model, str(adapter))


@torch.no_grad()
def logps_by(model: Any, sequences: Sequence[tuple[Tensor, int]]) -> list[float]:
    """Return the log-probability of each sequence's answer, which begins at a place."""
    sums = []
    for tokens, first in sequences:
        logps = model(input_ids=tokens.unsqueeze(0)).logits[0, first - 1 : -1].double().log_softmax(-1)
        sums.append(float(logps.gather(-1, tokens[first:].unsqueeze(-1)).sum()))
    return sums
