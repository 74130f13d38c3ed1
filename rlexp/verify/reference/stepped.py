"""A model that is stepped in one process, in float64: what is trained of it, its gradient, and its optimizer."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlexp.base.errors import NonFiniteError
from rlexp.config.schema import Config, Device, LoraConfig
from rlexp.verify.records import StepExpected, TensorFiles
from rlexp.verify.reference import rules
from rlexp.verify.reference.optimizer import Optimizer, critic_rate, norm


class Stepped:
    """The trained model. Its gradients and weights of each step go to files."""

    total: int  # optimizer steps of the whole run

    def __init__(self, cfg: Config, files: TensorFiles) -> None:
        self.cfg, self.files = cfg, files
        self.device = torch.device("cuda" if cfg.launch.device is Device.cuda else "cpu")
        self.optimizer = Optimizer(cfg.optim, critic_rate(cfg))

    def train(self, model: nn.Module, more: Mapping[str, nn.Parameter] | None = None) -> None:
        """Say what is trained: the model but for what is frozen, and more."""
        own = dict(model.named_parameters())
        for name, parameter in own.items() if not isinstance(self.cfg.adapter, LoraConfig) else ():
            parameter.requires_grad_(not any(fnmatch.fnmatchcase(name, frozen) for frozen in self.cfg.model.freeze))
        self.parameters: dict[str, Any] = own | dict(more or {})
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.write_weights(0)

    def finish(self, expected: StepExpected, origins: Sequence[str]) -> None:
        """Take the optimizer step with the gradients that are there; write them, and the weights after it, to files."""
        number = expected.number
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.detach() for name, p in self.trained.items()
        }
        expected.grad_norm = norm(gradients.values())
        if not math.isfinite(expected.loss + expected.grad_norm):
            raise NonFiniteError(
                f"step {number}: the loss or its gradient is not finite, in the plain reference too. Its samples begin "
                f"with {', '.join(origins[:8])}. A smaller optim.lr or a warm-up may help; or the samples are at fault."
            )
        expected.lr = rules.learning_rate(self.cfg.optim, self.total, number)
        for name, gradient in gradients.items():
            self.files.write("gradient", number, name, gradient.cpu().numpy())
        with torch.no_grad():
            self.optimizer.step({n: p.data for n, p in self.trained.items()}, gradients, expected.lr)
        for parameter in self.trained.values():
            parameter.grad = None
        self.write_weights(number)
        expected.row |= {"grad_norm": expected.grad_norm, "learning_rate": expected.lr, "global_step": number}

    def write_weights(self, step: int) -> None:
        for name, parameter in self.parameters.items():
            self.files.write("weights", step, name, parameter.detach().cpu().numpy())

    def weights_of(self, step: int) -> dict[str, Tensor]:
        """Read the weights after a step back."""
        return {name: torch.from_numpy(self.files.read("weights", step, name).copy()) for name in self.parameters}
