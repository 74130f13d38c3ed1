"""Defects that only the run's own precision or engine shows."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.faults.base import BASE, ENGINE, nothing, one
from tests.helpers.faults.engine import PLAIN


def second_step_off(original: Any, engine: Any, loss: Any, last: bool) -> None:
    original(engine, loss * (1.001 if engine.global_steps else 1.0), last)


def added_in_bfloat16(original: Any, self: Any, parameter: Any, master: Any) -> None:
    """Round the sum, in a hook behind the one that adds a gradient to its master."""
    original(self, parameter, master)

    def round_sum(_low: Any) -> None:  # what a hook returns would be the new value
        master.grad.copy_(master.grad.bfloat16())

    parameter.register_post_accumulate_grad_hook(round_sum)


ZERO = "engine.zero:"
OWN_FAULTS = (
    one("ZeRO-1 doubles the gradient", ZERO + "_backward",
        lambda original, engine, loss, last: original(engine, loss * 2, last), "gradient", ENGINE, base=BASE),
    one("ZeRO-1 steps by another rate", ZERO + "Stage12.step",
        lambda original, self, lr: original(self, lr * 1.05), "optimizer", ENGINE, base=BASE),
    one("ZeRO-1 does not accumulate", ZERO + "_backward",
        lambda original, engine, loss, _last: original(engine, loss, True), "gradient", ENGINE, base=BASE),
    one("ZeRO-1 is wrong from its second step on", ZERO + "_backward", second_step_off, "gradient", ENGINE, step=2,
        base=BASE),
    one("ZeRO-2 keeps the last micro-batch", ZERO + "Stage12.backward",
        lambda original, self, loss, last: original(self, loss if last else loss * 0.0, last=last), "gradient",
        ENGINE, "engine=zero2", base=BASE),
    one("DeepSpeed's own clipping", ZERO + "ds_config",
        lambda original, *args: original(*args) | {"gradient_clipping": 0.1}, "optimizer", ENGINE, "optim=sgd",
        "optim.lr=0.05", base=BASE),
    one("masters from bfloat16", ZERO + "Stage12._restore_bits", nothing, "log-probabilities", ENGINE,
        "train.precision=bf16", base=BASE),
    one("bfloat16 copies are not renewed", PLAIN + "_copy_down", nothing, "log-probabilities", ENGINE,
        "train.precision=bf16", "engine=torch", base=BASE),
    one("bfloat16 gradients added up in bfloat16", PLAIN + "_take_gradients", added_in_bfloat16, "gradient", ENGINE,
        "train.precision=bf16", "engine=torch", base=BASE),
    one("ZeRO-3's reference is another", ZERO + "FrozenPieces.__init__",
        lambda original, self, cfg, policy, world, _dtype: original(self, cfg, policy, world, torch.bfloat16),
        "log-probabilities", ENGINE, "engine=zero3", base=BASE),
)  # fmt: skip
