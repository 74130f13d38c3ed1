"""What an engine answers.

The scaling contract, in one place. Each rank gives `backward` its part of

    replica_loss_sum * world_size / global_count

and the engine takes the *mean* over all ranks of the gradients. For a sequence loss, `replica_loss_sum` is the same
on all ranks of a ring (the ring sum's backward is the identity, so each rank's gradient is its own tokens' part);
for a token loss each rank holds its tokens' part. Either way the mean over the world of `world_size` times the
parts is their sum: exactly the gradient of the loss of the train batch. Nothing else may divide again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rlexp.config.schema import OptimConfig
from rlexp.model.policy import Policy
from rlexp.types import Shard, TokenLogps


class Engine(Protocol):
    name: str

    def forward(self, shard: Shard) -> TokenLogps: ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add to the gradient; with `last`, reduce it over the ranks. A collective call."""

    def grad_norm(self) -> float:
        """Of the accumulated and reduced gradient, whole, before clipping; inf where it is not finite."""

    def step(self, lr: float) -> None:
        """Clip, step the optimizer, and set the gradients to zero."""

    def gradients(self) -> dict[str, Tensor]:
        """The whole gradient by parameter, between the last `backward` and `step`. A collective call."""

    def weights(self) -> dict[str, Tensor]:
        """The whole weights by parameter, in the optimizer's precision. A collective call."""

    def save(self, folder: Path) -> None:
        """Weights and optimizer state by parameter name. A collective call."""

    def load(self, folder: Path) -> None:
        """What `save` wrote, by this engine or another. A collective call."""

    def export(self, folder: Path) -> None:
        """The model as transformers loads it. A collective call."""


def export(policy: Policy, folder: Path, rank: int) -> None:
    """Write the model as transformers loads it; for engines whose ranks hold the weights whole."""
    if rank == 0:
        policy.model.save_pretrained(folder)
    torch.distributed.barrier()


def parameter_groups(policy: Policy, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay; biases and the gains of norms do not."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    if weight_decay == 0:
        return [{"params": trained, "weight_decay": 0.0}]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    others = [parameter for parameter in trained if parameter.dim() <= 1]
    groups: list[dict[str, object]] = [{"params": matrices, "weight_decay": weight_decay}]
    return groups + ([{"params": others, "weight_decay": 0.0}] if others else [])


def adamw(groups: list[dict[str, object]], optim: OptimConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps)
