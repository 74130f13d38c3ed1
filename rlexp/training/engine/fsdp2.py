"""torch's own sharding (FSDP2): an independent check of stage 3, and the only sharded engine with float64.

Parameters are float32 (float64 in fp64) and sharded along their first dimension over all ranks. In bfloat16 the
gathered copies are cast, and gradients are reduced in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rlexp.config.schema import OptimConfig
from rlexp.training.engine.base import (
    Engine,
    Fragment,
    moments_of,
    optimizer_for,
    set_lr,
    set_steps,
    sum_of_squares,
    trained,
)
from rlexp.training.engine.frozen import Frozen
from rlexp.training.model.decoding import Decoding
from rlexp.training.model.placing import put_buffers, take_exact
from rlexp.training.model.policy import Policy, cast_parameters
from rlexp.training.types import Shard, TokenLogps
from rlexp.training.world.groups import World


class _Sharded(Engine):
    """What holds some rows of each parameter on each rank, trained or not."""

    name = "fsdp2"
    parts: dict[str, Any]  # all parameters: between a forward and a backward pass the policy has others
    optimizer: Any = None  # of what is trained

    def forward(self, shard: Shard) -> TokenLogps:
        """Run a forward pass. The module frees its gathered weights in the backward pass, or here if there is none."""
        logps = super().forward(shard)
        if not torch.is_grad_enabled():
            self.module.reshard()
        return logps

    @torch.no_grad()
    def decode(self, batch: Decoding) -> Tensor:
        logits_BV = super().decode(batch)
        self.module.reshard()
        return logits_BV

    def weights(self, *, trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.parts.items():
            if name in self.parameters or not trained:
                yield name, _gathered(parameter.detach())

    def fragments(self) -> list[Fragment]:
        fragments = []
        for name, parameter in self.parameters.items():
            weight = _local(parameter.detach()).view(-1)
            moments = {
                moment: _local(tensor).view(-1) for moment, tensor in moments_of(self.optimizer, parameter).items()
            }
            if weight.numel():
                fragments.append(Fragment(name, start=_start(parameter), weight=weight, moments=moments))
        return fragments

    def restored(self, steps: int) -> None:
        self.steps = steps
        self.module.reshard()  # weights gathered for an evaluation are older than those just written


class FSDP2Engine(_Sharded):
    def __init__(self, policy: Policy, optim: OptimConfig, world: World, dtype: torch.dtype) -> None:
        self.policy, self.steps = policy, 0
        self.max_grad_norm = optim.max_grad_norm
        cast_parameters(policy, torch.promote_types(dtype, torch.float32), frozen=dtype)
        self.module = shard(policy, dtype, world)
        self.parts = dict(policy.named())
        self.parameters = trained(policy)
        self.optimizer = optimizer_for(policy, optim)
        self._norm: float | None = None

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Reduce each micro-batch's gradient to this rank's part, and accumulate it there in float32."""
        self.module.set_is_last_backward(last)
        loss.backward()
        if last:
            for parameter in self.parameters.values():
                if parameter.grad is None:  # no rank has a gradient for it
                    parameter.grad = torch.zeros_like(parameter)
            self._norm = None

    def grad_norm(self) -> float:
        if self._norm is None:
            pieces = [_local(parameter.grad) for parameter in self.parameters.values()]  # where they lie
            total = sum_of_squares(pieces, pieces[0].device)
            dist.all_reduce(total)
            self._norm = math.sqrt(total) if bool(total.isfinite()) else math.inf
        return self._norm

    def step(self, lr: float) -> None:
        clip = (self.grad_norm() + 1e-6) / self.max_grad_norm if self.max_grad_norm else 0.0
        for parameter in self.parameters.values():
            if clip > 1:
                _local(parameter.grad).div_(clip)
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._norm = None
        self.steps += 1

    def gradients(self) -> dict[str, Tensor]:
        return {name: _gathered(parameter.grad) for name, parameter in self.parameters.items()}

    def restored(self, steps: int) -> None:
        for parameter in self.parameters.values():
            set_steps(self.optimizer, parameter, steps)
        super().restored(steps)


def shard(policy: Policy, dtype: torch.dtype, world: World, *, offloaded_from: torch.device | None = None) -> Any:
    """Shard layer by layer, by the modules that transformers says must not be split; then the rest together.

    Each rank's part may stay on the host, offloaded from the device that computes.
    """
    precision = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype is torch.bfloat16:
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    parts = {  # of the parameters without memory
        name: exact.to(parameter.dtype)
        for name, parameter in policy.named_parameters()
        if (exact := take_exact(parameter)) is not None
    }
    # The run's device: by default FSDP takes the machine's.
    device = offloaded_from or next(each.device for each in (*parts.values(), *policy.parameters()) if not each.is_meta)
    kept = OffloadPolicy() if offloaded_from is None else CPUOffloadPolicy(pin_memory=device.type == "cuda")
    mesh = init_device_mesh(device.type, (world.size,))
    layers = set(policy.model._no_split_modules or ())  # the layers of a critic's trunk have the same names
    for module in policy.modules():
        if type(module).__name__ in layers and not isinstance(module, FSDPModule):
            fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=kept)
    root = fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=kept)
    _fill(root, parts)
    return root


def _fill(root: Any, parts: dict[str, Tensor]) -> None:
    """Give the parameters without memory this rank's part of the weights."""
    state: dict[str, Tensor] = {}
    filled: dict[int, nn.Parameter] = {}  # a tied parameter has several names, of which the first has its part
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if (part := parts.get(name)) is not None:
            assert isinstance(parameter, DTensor)
            made = _dtensor(part.view(parameter.to_local().shape), parameter)
            filled[id(parameter)] = nn.Parameter(made, requires_grad=parameter.requires_grad)
        if id(parameter) in filled:
            state[name] = filled[id(parameter)]
    root.load_state_dict(state, strict=False, assign=True)


def _dtensor(local: Tensor, like: DTensor) -> DTensor:
    """Shim: torch's own way to a part of the host moves it to the device. FSDP makes its own parts so too. Remove this
    when `DTensor.from_local` leaves a part where it is."""
    if local.device.type != like.device_mesh.device_type:
        return DTensor(local, like._spec, requires_grad=False)
    return DTensor.from_local(local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


class FrozenRows(_Sharded, Frozen):
    """A model that is not trained, sharded as one that is."""

    def __init__(self, policy: Policy, world: World, dtype: torch.dtype, offloaded_from: torch.device | None) -> None:
        super().__init__(self.name, policy)
        if offloaded_from is not None:
            put_buffers(policy, offloaded_from)
        self.module = shard(policy, dtype, world, offloaded_from=offloaded_from)
        self.parts = dict(policy.named())
        self.parameters = {name: self.parts[name] for name in self.parameters}


def _local(tensor: Any) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _gathered(tensor: Any) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().clone()  # on one rank it is the sharded tensor itself


def _start(parameter: nn.Parameter) -> int:
    """Return where this rank's rows start in the flattened parameter."""
    assert isinstance(parameter, DTensor)
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0] * math.prod(parameter.shape[1:])
