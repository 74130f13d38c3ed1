"""The plain engine: replicated weights, any dtype. The other engines are compared with it.

In bfloat16 the optimizer steps float32 masters, and gradients are accumulated and reduced in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rlexp.config.schema import OptimConfig
from rlexp.training.engine.base import Engine, Fragment, moments_of, optimizer_for, set_lr, set_steps, trained
from rlexp.training.engine.reducing import Reducing
from rlexp.training.model.policy import Policy, cast_parameters
from rlexp.training.world.groups import World


class PlainEngine(Engine):
    name = "torch"

    def __init__(self, policy: Policy, optim: OptimConfig, world: World, dtype: torch.dtype) -> None:
        self.policy, self.steps = policy, 0
        self.module: Any = policy
        self.max_grad_norm = optim.max_grad_norm
        cast_parameters(policy, torch.promote_types(dtype, torch.float32), frozen=dtype)
        self.optimizer = optimizer_for(policy, optim)
        self.parameters = trained(policy)
        self.masters = self._split_masters() if dtype is torch.bfloat16 else self.parameters
        self.reducing = Reducing(list(self.masters.values()), world, at_the_end=policy.listed_experts() is not None)
        for name, parameter in self.parameters.items():
            self._take_gradients(parameter, self.masters[name])
        self._norm: float | None = None

    def _split_masters(self) -> dict[str, nn.Parameter]:
        """Keep float32 parameters in the optimizer, and give the model bfloat16 copies."""
        masters: dict[str, nn.Parameter] = {}
        for name, parameter in self.parameters.items():
            master = nn.Parameter(parameter.data)
            for group in self.optimizer.param_groups:
                group["params"] = [master if each is parameter else each for each in group["params"]]
            parameter.data = parameter.data.to(torch.bfloat16)
            masters[name] = master
        return masters

    def _take_gradients(self, parameter: nn.Parameter, master: nn.Parameter) -> None:
        """Hand a parameter's gradient over to its master as soon as it exists, and let it be reduced."""

        def take(low: Tensor) -> None:
            if low is not master:
                assert low.grad is not None
                master.grad = low.grad.float() if master.grad is None else master.grad.add_(low.grad)
                low.grad = None
            self.reducing.arrived(master)

        parameter.register_post_accumulate_grad_hook(take)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        with self.reducing.during(last=last):
            loss.backward()
        self._norm = None

    def grad_norm(self) -> float:
        if self._norm is None:
            norms = torch._foreach_norm(self._gradients(), dtype=torch.float64)
            norm = float(torch.linalg.vector_norm(torch.stack(norms)))
            self._norm = norm if math.isfinite(norm) else math.inf
        return self._norm

    def _gradients(self) -> list[Tensor]:
        return [master.grad for master in self.masters.values() if master.grad is not None]

    def step(self, lr: float) -> None:
        set_lr(self.optimizer, lr)
        self._clip_and_step()
        self._copy_down()
        self._norm = None
        self.steps += 1

    def _clip_and_step(self) -> None:
        clip = (self.grad_norm() + 1e-6) / self.max_grad_norm if self.max_grad_norm else 0.0
        if clip > 1:
            torch._foreach_div_(self._gradients(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _copy_down(self) -> None:
        if self.masters is not self.parameters:
            low = [parameter.data for parameter in self.parameters.values()]
            torch._foreach_copy_(low, [self.masters[name].data for name in self.parameters])

    def gradients(self) -> dict[str, Tensor]:
        return {name: m.grad.detach().clone() for name, m in self.masters.items() if m.grad is not None}

    def _whole(self, name: str, parameter: nn.Parameter) -> Tensor:
        return self.masters.get(name, parameter).detach()

    def fragments(self) -> list[Fragment]:
        fragments = []
        for name, master in self.masters.items():
            moments = {moment: tensor.view(-1) for moment, tensor in moments_of(self.optimizer, master).items()}
            fragments.append(Fragment(name, 0, master.data.view(-1), moments))
        return fragments

    def restored(self, steps: int) -> None:
        for master in self.masters.values():
            set_steps(self.optimizer, master, steps)
        self.steps = steps
        self._copy_down()
