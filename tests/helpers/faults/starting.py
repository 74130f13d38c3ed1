"""Defects of starting weights: as they are loaded, as they are placed, and as an engine takes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlexp.training.model.placing import EXACT
from tests.helpers.faults.base import BASE, ENGINE, MODEL, TRAIN, one
from tests.helpers.faults.plant import OfKinds
from tests.helpers.faults.samples import PPO


def bits_lost(original: Any, self: Any, parameter: Any) -> Any:
    """Keep, beside a parameter of fewer bits, no more than these bits."""
    placed = original(self, parameter)
    if hasattr(placed, EXACT):
        setattr(placed, EXACT, getattr(placed, EXACT).to(self.dtype).float())
    return placed


def masters_of_few_bits(original: Any, self: Any) -> Any:
    for parameter in self.parameters.values():
        parameter.data = parameter.data.bfloat16().float()
    return original(self)


def coarse_angles(original: Any, model: Any, device: Any) -> None:
    original(model, device)
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.copy_(buffer.bfloat16())


def rounded_weights(original: Any, self: Any, parameter: Any) -> Any:
    placed = original(self, parameter)
    if placed.ndim > 1:
        placed.data = placed.data.half().to(placed.dtype)
    return placed


def of_another_seed(original: Any, cfg: Any, *args: Any, **kwargs: Any) -> Any:
    return original(replace(cfg, model=replace(cfg.model, seed=cfg.model.seed + 1)), *args, **kwargs)


def forward_rounded(kind: str) -> OfKinds:
    return OfKinds(lambda outputs: outputs._replace(logps_n=outputs.logps_n * (1 + 1e-7)), kind)


def without_window(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs | {"sliding_window": None})


def head_of_ones(original: Any, self: Any, *args: Any) -> None:
    original(self, *args)
    self.head.bias.data += 1e-3


STARTING_FAULTS = (
    one("placed weights are rounded", "model.placing:Placing._whole", rounded_weights, "log-probabilities", MODEL),
    one("exact bits are lost when weights are placed", "model.placing:Placing._whole", bits_lost, "log-probabilities",
        MODEL, "train.precision=bf16", base=BASE),
    one("masters of few bits", "engine.plain:PlainEngine._split_masters", masters_of_few_bits, "log-probabilities",
        ENGINE, "train.precision=bf16", "engine=torch", base=BASE),
    one("a policy of another seed", "train.build:build_policy", of_another_seed, "log-probabilities", TRAIN),
    one("coarse rotary angles", "model.placing:put_buffers", coarse_angles, "log-probabilities", MODEL),
    one("an engine's forward pass differs", "engine.plain:PlainEngine.forward", forward_rounded("PlainEngine"),
        "log-probabilities", ENGINE),
    one("FSDP2's forward pass differs", "engine.fsdp2:FSDP2Engine.forward", forward_rounded("FSDP2Engine"),
        "log-probabilities", ENGINE, "engine=fsdp2"),
    one("FSDP2's frozen model differs", "engine.fsdp2:FrozenRows.forward", forward_rounded("FrozenRows"),
        "log-probabilities", ENGINE, "engine=fsdp2"),
    one("a layer's window is not handed over", "model.hook:attention", without_window, "log-probabilities", MODEL,
        "model.window=32"),
    one("a critic that begins with a value", "model.policy:Critic.__init__", head_of_ones, "log-probabilities", MODEL,
        base=PPO),
)  # fmt: skip
