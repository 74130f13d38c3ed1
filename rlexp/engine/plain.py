"""The plain engine: replicated weights, any dtype. The reference that the others are held to.

In bfloat16 the optimizer steps float32 masters, and gradients are added up and reduced in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.config.schema import OptimConfig
from rlexp.engine.base import adamw, export, parameter_groups
from rlexp.engine.state import MOMENTS, EngineState
from rlexp.model.policy import Policy, cast_parameters
from rlexp.ring.groups import World
from rlexp.types import Shard, TokenLogps

BUCKET = 1 << 25  # elements reduced in one collective


class PlainEngine:
    name = "torch"

    def __init__(self, policy: Policy, optim: OptimConfig, world: World, dtype: torch.dtype) -> None:
        self.policy, self.world, self.dtype = policy, world, dtype
        self.max_grad_norm = optim.max_grad_norm
        cast_parameters(policy, torch.float64 if dtype is torch.float64 else torch.float32)
        self.optimizer = adamw(parameter_groups(policy, optim.weight_decay), optim)
        self.parameters = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        self.masters = self._split_masters() if dtype is torch.bfloat16 else self.parameters
        self._norm: float | None = None
        self._steps = 0

    def _split_masters(self) -> dict[str, Tensor]:
        """The optimizer keeps the float32 parameters; the model gets bfloat16 copies that hand over their
        gradients as soon as they are there."""
        masters: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            master = torch.nn.Parameter(parameter.data.clone())
            for group in self.optimizer.param_groups:
                group["params"] = [master if each is parameter else each for each in group["params"]]
            parameter.data = parameter.data.to(torch.bfloat16)

            def hand_over(low: Tensor, master: Tensor = master) -> None:
                assert low.grad is not None
                master.grad = low.grad.float() if master.grad is None else master.grad.add_(low.grad)
                low.grad = None

            parameter.register_post_accumulate_grad_hook(hand_over)
            masters[name] = master
        cast_parameters(self.policy, torch.bfloat16)  # what is frozen too
        return masters

    def forward(self, shard: Shard) -> TokenLogps:
        logps: TokenLogps = self.policy(shard)
        return logps

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()
        if last:
            self._reduce()

    def _reduce(self) -> None:
        """The mean over all ranks. A parameter that got no gradient here may have got one elsewhere."""
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        if self.world.size > 1:
            for bucket in _buckets([m.grad for m in self.masters.values() if m.grad is not None]):
                flat = torch.cat([grad.reshape(-1) for grad in bucket])
                dist.all_reduce(flat)
                flat /= self.world.size
                for grad, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                    grad.copy_(piece.view_as(grad))
        squares = [torch.linalg.vector_norm(m.grad, dtype=torch.float64) for m in self.masters.values()]
        norm = float(torch.linalg.vector_norm(torch.stack(squares)))
        self._norm = norm if math.isfinite(norm) else math.inf

    def grad_norm(self) -> float:
        assert self._norm is not None, "no gradient has been reduced yet"
        return self._norm

    def step(self, lr: float) -> None:
        clip = (self.grad_norm() + 1e-6) / self.max_grad_norm if self.max_grad_norm else 0.0
        for master in self.masters.values():
            if clip > 1 and master.grad is not None:
                master.grad /= clip
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._copy_down()
        self._norm = None
        self._steps += 1

    def _copy_down(self) -> None:
        if self.masters is not self.parameters:
            for name, parameter in self.parameters.items():
                parameter.data.copy_(self.masters[name].data)

    def gradients(self) -> dict[str, Tensor]:
        return {name: m.grad.detach().clone() for name, m in self.masters.items() if m.grad is not None}

    def weights(self) -> dict[str, Tensor]:
        return {name: master.detach() for name, master in self.masters.items()}

    def save(self, folder: Path) -> None:
        states = {name: self.optimizer.state.get(master, {}) for name, master in self.masters.items()}
        moments = {moment: {n: s[moment] for n, s in states.items()} for moment in MOMENTS} if self._steps else {}
        if self.world.rank == 0:
            EngineState(self.weights(), moments, self._steps).write(folder)
        dist.barrier()

    def load(self, folder: Path) -> None:
        state = EngineState.read(folder)
        for name, master in self.masters.items():
            master.data.copy_(state.weights[name])
            if state.steps:
                moments = {m: state.moments[m][name].to(master.device, master.dtype) for m in MOMENTS}
                self.optimizer.state[master] = {"step": torch.tensor(float(state.steps)), **moments}
        self._steps = state.steps
        self._copy_down()

    def export(self, folder: Path) -> None:
        export(self.policy, folder, self.world.rank)


def _buckets(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for grad in grads:
        if bucket and sum(g.numel() for g in bucket) + grad.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(grad)
    if bucket:
        yield bucket
