"""An optimizer of its own: clipping by the whole norm, then AdamW or SGD, written out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rlexp.config.schema import Config, OptimConfig, OptimName
from rlexp.verify.recording import TensorFiles, Update

CRITIC = "critic."
FLOOR = 1e-6  # added to the norm when clipping, as by torch's clip_grad_norm_


def norm(gradients: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in gradients))


class Optimizer:
    """Clipping by the whole norm, then AdamW (arXiv 1711.05101) or SGD, written out. Only matrices decay.

    The critic's parameters, whose names begin with `critic.`, may have a rate of their own: `critic` times the other.
    """

    def __init__(self, optim: OptimConfig, critic: float = 1.0) -> None:
        self.optim, self.taken, self.critic = optim, 0, critic
        self.means: dict[str, Tensor] = {}
        self.squares: dict[str, Tensor] = {}

    def step(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: float) -> None:
        """Change the weights in place; the gradients stay as they are."""
        self.taken += 1
        most = self.optim.max_grad_norm
        shrink = min(1.0, most / (norm(gradients.values()) + FLOOR)) if most else 1.0
        for name, weight in weights.items():
            decay = self.optim.weight_decay if weight.dim() > 1 else 0.0
            rate = lr * self.critic if name.startswith(CRITIC) else lr
            weight *= 1 - rate * decay
            gradient = gradients[name] * shrink
            weight -= rate * (self._adam(name, gradient) if self.optim.name is OptimName.adamw else gradient)

    def _adam(self, name: str, gradient: Tensor) -> Tensor:
        first, second = self.optim.betas
        mean = self.means.get(name, torch.zeros_like(gradient)) * first + gradient * (1 - first)
        square = self.squares.get(name, torch.zeros_like(gradient)) * second + gradient**2 * (1 - second)
        self.means[name], self.squares[name] = mean, square
        unbiased, spread = mean / (1 - first**self.taken), (square / (1 - second**self.taken)).sqrt()
        return unbiased / (spread + self.optim.eps)


def optimizer_of(cfg: Config) -> Optimizer:
    value_lr = getattr(cfg.loss, "value_lr", None)
    return Optimizer(cfg.optim, 1.0 if value_lr is None else float(value_lr) / cfg.optim.lr)


def given_steps(cfg: Config, lrs: Sequence[float], files: TensorFiles) -> Iterator[dict[str, Update]]:
    """Apply a run's own gradients to its own weights, step by step in float64, and compare with the run's results."""
    optimizer = optimizer_of(cfg)

    def read(kind: str, number: int, name: str) -> Tensor:
        return torch.from_numpy(files.read(kind, number, name).copy()).double()

    for number, lr in enumerate(lrs, start=1):
        gradients = {name: read("gradient", number, name) for name in files.names("gradient", number)}
        changed = {*gradients, *files.moved(number)}
        weights = {name: read("weights", number - 1, name) for name in files.names("weights", number)
                   if name in changed}  # fmt: skip
        before = {name: weight.clone() for name, weight in weights.items()}
        optimizer.step({name: weights[name] for name in gradients if name in weights}, gradients, lr)
        yield {
            name: Update(
                apart=float((read("weights", number, name) - weight).norm()),
                step=float((weight - before[name]).norm()),
                weight=float(weight.norm()),
            )
            for name, weight in weights.items()
        }
