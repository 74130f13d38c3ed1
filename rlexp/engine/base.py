"""What an engine answers.

The scaling contract, in one place. Each rank gives `backward` its part of

    replica_loss_sum * world_size / global_count

and the engine takes the *mean* over all ranks of the gradients. For a sequence loss, `replica_loss_sum` is the same
on all ranks of a ring (the ring sum's backward is the identity, so each rank's gradient is its own tokens' part);
for a token loss each rank holds its tokens' part. Either way the mean over the world of `world_size` times the
parts is their sum: exactly the gradient of the loss of the train batch. Nothing else may divide again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlexp.config.schema import OptimConfig, OptimName
from rlexp.engines import ENGINES
from rlexp.model.decoding import Decoding
from rlexp.model.policy import CRITIC, Policy
from rlexp.types import Shard, TokenLogps

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Fragment:
    """A run of a parameter's elements, flattened, with its moments: views of what a rank holds, to be read and
    written. A rank holds at most one fragment of a parameter; together the ranks hold every element."""

    name: str
    start: int  # in the flattened parameter
    weight: Tensor  # in the optimizer's precision
    moments: dict[str, Tensor]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """By the kind of what it is: `weight`, and each of `MOMENTS`."""
        yield "weight", self.weight
        yield from self.moments.items()


class Engine(Protocol):
    name: str
    policy: Policy
    steps: int  # the optimizer has taken

    @property
    def replicated(self) -> bool: ...

    @property
    def sharded(self) -> bool:
        """A forward pass is then a collective call."""

    def forward(self, shard: Shard) -> TokenLogps: ...

    def decode(self, batch: Decoding) -> Tensor:
        """(B, V) logits of each row's next token, without a gradient, by the weights that are trained."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add to the gradient; with `last`, reduce it over the ranks. A collective call."""

    def grad_norm(self) -> float:
        """Of the accumulated and reduced gradient, whole, before clipping; inf where it is not finite. Collective."""

    def step(self, lr: float) -> None:
        """Clip, step the optimizer, and set the gradients to zero."""

    def gradients(self) -> dict[str, Tensor]:
        """The whole gradient by parameter, between the last `backward` and `step`. A collective call."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter whole, one after the other, in the optimizer's precision; frozen ones as they are.
        A collective call, on every rank to its end: no more than one parameter is whole at a time."""

    def fragments(self) -> list[Fragment]:
        """The state that this rank holds of the trained parameters; moments are made where there are none yet."""

    def restored(self, steps: int) -> None:
        """The fragments have been written from a state after `steps`: let all else follow. A collective call."""


class Named:
    """An engine's name, with what `rlexp/engines.py` says of that engine."""

    name: str

    @property
    def replicated(self) -> bool:
        return ENGINES[self.name].replicated

    @property
    def sharded(self) -> bool:
        return ENGINES[self.name].sharded


def parameter_groups(policy: Policy, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay; biases and the gains of norms do not. The critic may have a learning rate of its own."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in trained(policy).items():
        decay = weight_decay if len(shape_of(parameter)) > 1 else 0.0
        scale = policy.critic_lr_scale if name.startswith(CRITIC) else 1.0
        groups.setdefault((decay, scale), []).append(parameter)
    return [{"params": found, "weight_decay": decay, "lr_scale": scale} for (decay, scale), found in groups.items()]


def optimizer_for(policy: Policy, optim: OptimConfig, device: torch.device) -> torch.optim.Optimizer:
    """torch's own, on GPU in one fused kernel: nothing is compiled, and every engine steps by the same code."""
    groups = parameter_groups(policy, optim.weight_decay)
    if optim.name is OptimName.sgd:
        return torch.optim.SGD(groups, lr=optim.lr)
    fused = device.type == "cuda"
    betas = (optim.betas[0], optim.betas[1])
    return torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=fused or None)


def moments_of(optimizer: torch.optim.Optimizer, tensor: Tensor) -> dict[str, Tensor]:
    """The optimizer's moments of a tensor it steps; made, as its first step would, where there are none yet."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return {}
    state = optimizer.state[tensor]
    if not state:
        set_steps(optimizer, tensor, 0)
        state.update({moment: torch.zeros_like(tensor) for moment in MOMENTS})
    return {moment: state[moment] for moment in MOMENTS}


def set_steps(optimizer: torch.optim.Optimizer, tensor: Tensor, steps: int) -> None:
    """How many steps AdamW believes to have taken; a fused one keeps that beside the tensor."""
    if isinstance(optimizer, torch.optim.AdamW):
        fused = any(group["fused"] for group in optimizer.param_groups)
        optimizer.state[tensor]["step"] = torch.tensor(float(steps), device=tensor.device if fused else "cpu")


def set_lr(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """Also of a parameter that DeepSpeed has partitioned, whose own shape is empty."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def trained(policy: Policy) -> dict[str, nn.Parameter]:
    return {name: p for name, p in policy.named() if p.requires_grad}
