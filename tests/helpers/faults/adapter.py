"""Defects of adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.helpers.faults.base import ENGINE, FP64, MODEL, one

LORA = (*FP64, "adapter=lora", "adapter.rank=4", "optim.lr=1e-2")


def base_that_moves(original: Any, self: Any, lr: float) -> None:
    """Step, and move a weight that is frozen, by little."""
    original(self, lr)
    for name, parameter in self.policy.named():
        if name.endswith("0.mlp.up_proj.base_layer.weight"):
            parameter.data *= 1 + 1e-6


def base_that_is_trained(original: Any, part: Any, *args: Any) -> None:
    original(part, *args)
    for name, parameter in part.named_parameters():
        if name.endswith("1.self_attn.o_proj.base_layer.weight"):
            parameter.requires_grad_(True)


def without_second_matrices(original: Any, self: Any) -> float:
    """Return the norm of the gradient of the first matrices alone."""
    squares = [master.grad.double().square().sum() for name, master in self.masters.items() if ".lora_A." in name]
    return float(torch.stack(squares).sum().sqrt())


def left_on(_original: Any, _self: Any) -> Iterator[None]:
    yield


def scaled_by_rank_alone(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave alpha out of what the adapter adds."""
    adapter = original(*args, **kwargs)
    for layer in adapter.layers:
        if hasattr(layer, "scaling"):
            layer.scaling = {name: 1.0 / layer.r[name] for name in layer.scaling}
    return adapter


PLAIN = "engine.plain:PlainEngine"
ADAPTER = "model.adapter:"
ADAPTER_FAULTS = (
    one("a base weight that moves", f"{PLAIN}.step", base_that_moves, "optimizer", ENGINE, base=LORA),
    one("a base weight that is trained", f"{ADAPTER}_inject", base_that_is_trained, "gradient", MODEL, base=LORA),
    one("an adapter left out of the gradient's norm", f"{PLAIN}.grad_norm", without_second_matrices, "optimizer",
        ENGINE, base=LORA),
    one("a reference with the adapter on", f"{ADAPTER}Adapter.starting", left_on, "log-probabilities", MODEL,
        base=LORA, step=2),
    one("an adapter without its scale", f"{ADAPTER}put_adapter", scaled_by_rank_alone, "gradient", MODEL, base=LORA),
)  # fmt: skip
