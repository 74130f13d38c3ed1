"""What a model computes between its matrix products, each piece read and written once: `model.fused`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlexp.config.schema.models import FusedName
from rlexp.training.model.fused.classes import fused_class

__all__ = ["Fused", "fuse", "fuses"]


@dataclass(frozen=True)
class Fused:
    """How many modules compute with fused pieces, by piece, and the classes of those that are left as they are."""

    pieces: Counter[str]
    left: Counter[str]

    def __str__(self) -> str:
        left = f"; left as they are: {_counted(self.left)}" if self.left else ""
        return f"{_counted(self.pieces) or 'nothing of this model'}{left}"


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{count} × {name}" for name, count in names.items())


def fuses(name: FusedName, device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether a model computes with fused pieces: on a GPU in 16 bits, unless the run says otherwise."""
    if name is FusedName.auto:
        return device.type != "cpu" and dtype in (torch.bfloat16, torch.float16)
    return name is FusedName.always


def fuse(*models: nn.Module) -> Fused:
    """Let the models' modules compute with fused pieces wherever these fit, whatever the family."""
    fused = Fused(Counter(), Counter())
    modules = [module for model in models for module in model.modules() if _has_own_code(module)]
    chosen = [(module, fused_class(module)) for module in modules]
    for module, choice in chosen:  # a layer is tried before its norms change
        if choice is None:
            fused.left[type(module).__name__] += 1
        else:
            piece, module.__class__ = choice
            fused.pieces[piece] += 1
    return fused


def _has_own_code(module: nn.Module) -> bool:
    """Say whether a module may compute something between products: it has weights, is none of torch's, and no list,
    model or table of others."""
    known = isinstance(module, PreTrainedModel | nn.Embedding | Conv1D)
    plain = known or type(module).__module__.startswith(("torch.", "peft."))
    return not plain and any(True for _ in module.parameters())
