"""The interface of engines, and the contract on how losses are scaled.

Each rank gives `backward` its part of

    replica_loss_sum * world_size / global_count

and the engine takes the *mean* of the gradients over all ranks. For a sequence loss, `replica_loss_sum` is the same on
all ranks of a ring (the ring sum's backward is the identity, so each rank's gradient is the part of its own tokens).
For a token loss, each rank holds the part of its tokens. Either way, the mean over the world of `world_size` times the
parts is their sum: exactly the gradient of the train batch's loss. Nothing else may divide again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlexp.base.engine_facts import ENGINES
from rlexp.config.schema import OptimConfig, OptimName
from rlexp.training.model.decoding import Decoding
from rlexp.training.model.policy import CRITIC, Policy
from rlexp.training.types import Shard, TokenLogps

AT_ONCE = {"cpu": 1 << 20}  # elements widened at once: in float64 they fit a cache, and are read 9 times as fast
MOST_AT_ONCE = 1 << 24  # 128 MiB in float64
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Fragment:
    """Consecutive elements of a flattened parameter that a rank holds, with their moments, as views to read and write.
    A rank holds at most one fragment of a parameter; together the ranks hold every element."""

    name: str
    start: int  # in the flattened parameter
    weight: Tensor  # in the optimizer's precision
    moments: dict[str, Tensor]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors by kind: `weight`, then each of `MOMENTS`."""
        yield "weight", self.weight
        yield from self.moments.items()


class Engine(Protocol):
    name: str  # under which `rlexp/base/engine_facts.py` has its facts
    policy: Policy
    module: Any  # what runs the policy: itself, or what gathers its pieces
    parameters: dict[str, nn.Parameter]  # those that are trained, as a checkpoint has them
    steps: int  # that the optimizer has taken
    leaves: tuple[str, ...] = ()  # how names begin that a checkpoint may have and the engine does not

    @property
    def replicated(self) -> bool:
        """Whether every rank holds all of the training state."""
        return ENGINES[self.name].replicated

    @property
    def sharded(self) -> bool:
        """Whether weights are gathered during a forward pass, which is then a collective call."""
        return ENGINES[self.name].sharded

    def forward(self, shard: Shard) -> TokenLogps:
        return self.module(shard)

    @torch.no_grad()
    def decode(self, batch: Decoding) -> Tensor:
        """Return the (B, V) logits of each row's next token from the trained weights, without a gradient."""
        return (self.module if self.sharded else self.policy)(batch)

    @abstractmethod
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add to the gradient; with `last`, reduce it over the ranks. A collective call."""

    @abstractmethod
    def grad_norm(self) -> float:
        """Return the norm of the whole accumulated gradient before clipping; inf if it is not finite. Collective."""

    @abstractmethod
    def step(self, lr: float) -> None:
        """Clip, step the optimizer, and zero the gradients."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Return the whole gradient by parameter, between the last `backward` and `step`. A collective call."""

    def weights(self, *, trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield whole parameters in the optimizer's precision, and frozen ones as they are; or the trained ones alone.

        A collective call: every rank iterates to the end. Only one parameter is whole at a time."""
        for name, parameter in self.policy.named():
            if name in self.parameters or not trained:
                yield name, self._whole(name, parameter)

    def _whole(self, _name: str, parameter: nn.Parameter) -> Tensor:
        return parameter.detach()

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the same of the model alone, without a critic: under its own names, with an adapter merged into it."""
        adapter = self.policy.adapter
        weights = ((name, weight) for name, weight in self.weights() if not name.startswith(CRITIC))
        return weights if adapter is None else adapter.merged(weights)

    def shapes(self) -> dict[str, torch.Size]:
        """Return the whole shapes of the parameters that a checkpoint holds, which are those that are trained."""
        return {name: shape_of(parameter) for name, parameter in self.parameters.items()}

    @abstractmethod
    def fragments(self) -> list[Fragment]:
        """Return this rank's state of the trained parameters. Missing moments are created."""

    @abstractmethod
    def restored(self, steps: int) -> None:
        """Bring all else in line after the fragments were written from a state at `steps`. A collective call."""


def parameter_groups(policy: Policy, weight_decay: float) -> list[dict[str, object]]:
    """Group trained parameters: matrices decay, biases and norm gains do not; the critic may have its own rate."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in trained(policy).items():
        decay = weight_decay if len(shape_of(parameter)) > 1 else 0.0
        scale = policy.critic_lr_scale if name.startswith(CRITIC) else 1.0
        groups.setdefault((decay, scale), []).append(parameter)
    return [{"params": group, "weight_decay": decay, "lr_scale": scale} for (decay, scale), group in groups.items()]


def optimizer_for(policy: Policy, optim: OptimConfig) -> torch.optim.Optimizer:
    """Build torch's own optimizer, fused: nothing is compiled, and every engine steps by the same code."""
    groups = parameter_groups(policy, optim.weight_decay)
    if optim.name is OptimName.sgd:
        return torch.optim.SGD(groups, lr=optim.lr)
    betas = (optim.betas[0], optim.betas[1])
    return torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=True)


def moments_of(optimizer: torch.optim.Optimizer, tensor: Tensor) -> dict[str, Tensor]:
    """Return the optimizer's moments of a tensor. Missing ones are created as its first step would."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return {}
    state = optimizer.state[tensor]
    if not state:
        set_steps(optimizer, tensor, 0)
        state.update({moment: torch.zeros_like(tensor) for moment in MOMENTS})
    return {moment: state[moment] for moment in MOMENTS}


def set_steps(optimizer: torch.optim.Optimizer, tensor: Tensor, steps: int) -> None:
    """Set AdamW's count of steps. A fused AdamW keeps it on the tensor's device."""
    if isinstance(optimizer, torch.optim.AdamW):
        fused = any(group["fused"] for group in optimizer.param_groups)
        optimizer.state[tensor]["step"] = torch.tensor(float(steps), device=tensor.device if fused else "cpu")


def sum_of_squares(pieces: Iterable[Tensor], device: torch.device | str) -> Tensor:
    """Return the sum in float64 on this device. Pieces are read where they lie, a part of one at a time: torch copies
    what it widens."""
    totals: dict[torch.device, Tensor] = {}
    for piece in pieces:
        for part in piece.reshape(-1).split(AT_ONCE.get(piece.device.type, MOST_AT_ONCE)):
            square = torch.linalg.vector_norm(part, dtype=torch.float64).square()
            totals[part.device] = totals[part.device] + square if part.device in totals else square
    total = torch.zeros((), dtype=torch.float64, device=device)
    for each in totals.values():
        total += each.to(device)
    return total


def set_lr(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """Return a parameter's whole shape. A parameter partitioned by DeepSpeed has an empty shape of its own."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def trained(policy: Policy) -> dict[str, nn.Parameter]:
    return {name: p for name, p in policy.named() if p.requires_grad}
