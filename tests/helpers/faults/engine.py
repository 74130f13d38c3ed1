"""Defects of engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rlexp.config.schema import OptimName
from tests.helpers.faults.base import ENGINE, left_out, nothing, one
from tests.helpers.faults.plant import Given, Seeing


def summed(original: Any, self: Any) -> None:
    bucket = self._sent[0][0]
    original(self)
    for master in bucket:
        master.grad *= self.world.size


def in_the_ring(all_reduce: Any, self: Any) -> Callable[..., Any]:
    return lambda flat, **options: all_reduce(flat, group=self.world.ring.group, **options)


def not_zeroed(original: Any, self: Any) -> None:
    kept = {name: master.grad for name, master in self.masters.items()}
    original(self)
    for name, master in self.masters.items():
        master.grad = kept[name]


def emptied_first(original: Any, self: Any, loss: Any, *, last: bool) -> None:
    self.optimizer.zero_grad()
    original(self, loss, last=last)


def all_but_one(original: Any, self: Any) -> None:
    first = self._sent[0][0][0]
    own = first.grad.clone()
    original(self)
    first.grad.copy_(own)


def measured_first(original: Any, self: Any, loss: Any, *, last: bool) -> None:
    """Measure the gradient before it is reduced, and not again."""
    norms, land = [], self.reducing._land

    def measuring() -> None:
        norms.append(type(self).grad_norm(self))
        land()

    self.reducing._land = measuring
    original(self, loss, last=last)
    del self.reducing._land
    if last and norms:  # one rank alone reduces nothing
        self.grad_norm = lambda: norms[0]


def unclipped(original: Any, self: Any) -> None:
    limit, self.max_grad_norm = self.max_grad_norm, 0.0
    original(self)
    self.max_grad_norm = limit


def clipped_one_by_one(original: Any, self: Any) -> None:
    if self.grad_norm() > self.max_grad_norm:
        for master in self.masters.values():
            master.grad /= max(1.0, float(master.grad.norm()) / self.max_grad_norm)
    unclipped(original, self)


def all_decay(original: Any, policy: Any, weight_decay: float) -> Any:
    return [group | {"weight_decay": weight_decay} for group in original(policy, weight_decay)]


PLAIN, BASE_ENGINE, FSDP2 = "engine.plain:PlainEngine.", "engine.base:", "engine.fsdp2:FSDP2Engine."
REDUCING = "engine.reducing:Reducing."
ENGINE_FAULTS = (
    one("summed, not averaged", REDUCING + "_land", summed, "gradient", ENGINE),
    one("reduced over the ring only", REDUCING + "_send_complete",
        Seeing({"dist.all_reduce": Given(in_the_ring)}), "gradient", ENGINE),
    one("not reduced", REDUCING + "_send_complete", nothing, "gradient", ENGINE),
    one("gradients are not zeroed", PLAIN + "_clip_and_step", not_zeroed, "gradient", ENGINE, step=2),
    one("the last micro-batch's gradient only", PLAIN + "backward", emptied_first, "gradient", ENGINE),
    one("a parameter is left out of the reduction", REDUCING + "_land", all_but_one, "gradient", ENGINE),
    one("reduced in float32", REDUCING + "_send_complete",
        Seeing({"torch.cat": lambda cat: lambda pieces: cat(pieces).float()}), "gradient", ENGINE),
    one("the norm before the reduction", PLAIN + "backward", measured_first, "optimizer", ENGINE),
    one("not clipped", PLAIN + "_clip_and_step", unclipped, "optimizer", ENGINE),
    one("clipped parameter by parameter", PLAIN + "_clip_and_step", clipped_one_by_one, "optimizer", ENGINE),
    one("another rate", PLAIN + "step", lambda original, self, lr: original(self, lr * 1.01), "optimizer", ENGINE),
    one("gains decay too", BASE_ENGINE + "parameter_groups", all_decay, "optimizer", ENGINE),
    one("nothing decays", BASE_ENGINE + "parameter_groups", lambda original, policy, _decay: original(policy, 0.0),
        "optimizer", ENGINE),
    one("other betas", BASE_ENGINE + "optimizer_for",
        lambda original, policy, optim: original(policy, replace(optim, betas=[optim.betas[0], 0.99])),
        "optimizer", ENGINE, step=2),
    one("another eps", BASE_ENGINE + "optimizer_for",
        lambda original, policy, optim: original(policy, replace(optim, eps=1e-7)), "optimizer",
        ENGINE),
    one("Adam for descent", BASE_ENGINE + "optimizer_for",
        lambda original, policy, optim: original(policy, replace(optim, name=OptimName.adamw)),
        "optimizer", ENGINE, "optim=sgd", "optim.lr=0.05"),
    one("float32 parameters", PLAIN + "__init__",
        Seeing({"cast_parameters": lambda cast: lambda policy, *_, **__: cast(policy, torch.float32)}),
        "log-probabilities", ENGINE),
    one("the norm of one rank's pieces", FSDP2 + "grad_norm", Seeing({"dist.all_reduce": left_out}), "optimizer",
        ENGINE, "engine=fsdp2"),
    one("FSDP2 does not accumulate", FSDP2 + "backward", emptied_first, "gradient", ENGINE, "engine=fsdp2"),
)  # fmt: skip
