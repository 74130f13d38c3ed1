"""DeepSpeed: its only door. ZeRO-1 here; the ring is no business of DeepSpeed's.

No mpu, no mesh, no sequence parallelism of its own (each leaves some stage silently wrong): to DeepSpeed every rank
is a data-parallel rank whose gradients it averages, and the scaling contract of `engine/base.py` does the rest.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlexp.config.schema import OptimConfig
from rlexp.engine.base import adamw, export, parameter_groups
from rlexp.engine.state import MOMENTS, EngineState
from rlexp.model.policy import Policy
from rlexp.ring.groups import World
from rlexp.types import Shard, TokenLogps

STAGES = {"zero1": 1}


def _import_deepspeed() -> Any:
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed calls collectives by the names that torch 2.13 is about to rename.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Shim: on CPU, DeepSpeed compiles its shared-memory collectives at start (40 to 140 s, needs g++ and ninja, and
    # a stale lock file hangs it; see deepspeed/comm/torch.py, build_shm_op). gloo does all that is asked of it here.
    # To be removed when DeepSpeed has a public switch for it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class DeepSpeedEngine:
    def __init__(self, policy: Policy, optim: OptimConfig, world: World, dtype: torch.dtype, name: str) -> None:
        self.name = name
        deepspeed = _import_deepspeed()
        self._utils = deepspeed.utils
        self.policy, self.world = policy, world
        optimizer = adamw(parameter_groups(policy, optim.weight_decay), optim)  # its own would be compiled on CPU
        deepspeed.init_distributed(dist_init_required=False, verbose=False)
        # DeepSpeed casts to bfloat16 first and makes its float32 masters from that; give them the bits they lost.
        exact = {n: p.detach().clone() for n, p in self._parameters().items()} if dtype is torch.bfloat16 else {}
        with contextlib.redirect_stdout(io.StringIO()):  # its bf16 optimizer prints memory tables as it starts
            self.engine, *_ = deepspeed.initialize(
                model=policy,
                optimizer=optimizer,
                config=_config(STAGES[name], optim.max_grad_norm, dtype),
                dist_init_required=False,
            )
        for parameter_name, parameter in self._parameters().items() if exact else ():
            self._utils.safe_set_full_fp32_param(parameter, exact[parameter_name])
        self._steps = 0

    def forward(self, shard: Shard) -> TokenLogps:
        logps: TokenLogps = self.engine(shard)
        return logps

    def backward(self, loss: Tensor, *, last: bool) -> None:
        # The boundary is ours, so any number of micro-batches makes a step; and the loss is scaled already.
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss, scale_wrt_gas=False)

    def grad_norm(self) -> float:
        """Before `step`, so that a gradient that is not finite stops the run before it does harm. DeepSpeed would
        skip such a step in silence. Its ZeRO optimizer marks such a norm with −1; its bf16 optimizer holds the
        whole float32 gradient on every rank."""
        optimizer = self.engine.optimizer
        if self._is_bf16_optimizer():
            grads, _ = optimizer.get_grads_for_norm()
            norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads])))
        else:
            norm = float(optimizer.scaled_global_norm())
        return norm if math.isfinite(norm) and norm >= 0 else math.inf

    def step(self, lr: float) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        self._steps += 1

    def _is_bf16_optimizer(self) -> bool:
        """What DeepSpeed takes for ZeRO-1 in bfloat16 with gradients added up in float32."""
        return type(self.engine.optimizer).__name__ == "BF16_Optimizer"

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.policy.model.named_parameters() if p.requires_grad}

    def gradients(self) -> dict[str, Tensor]:
        return {name: self._utils.safe_get_full_grad(p).detach().clone() for name, p in self._parameters().items()}

    def weights(self) -> dict[str, Tensor]:
        return {name: self._utils.safe_get_full_fp32_param(p).detach() for name, p in self._parameters().items()}

    def save(self, folder: Path) -> None:
        moments: dict[str, dict[str, Tensor]] = {}
        if self._steps:
            get = self._utils.safe_get_full_optimizer_state
            moments = {m: {name: get(p, m) for name, p in self._parameters().items()} for m in MOMENTS}
        state = EngineState(self.weights(), moments, self._steps)
        if self.world.rank == 0:
            state.write(folder)
        torch.distributed.barrier()

    def load(self, folder: Path) -> None:
        state = EngineState.read(folder)
        for name, parameter in self._parameters().items():
            self._utils.safe_set_full_fp32_param(parameter, state.weights[name])
            parameter.data.copy_(state.weights[name])  # what the forward pass reads, until the next step
        if state.steps:
            self._load_moments(state)
        self._steps = state.steps

    def _load_moments(self, state: EngineState) -> None:
        """The flat partitions' state is made by the first step; give the moments a place to be written to before.

        Shim: DeepSpeed has no public way to do so before a step (the two private names below, in
        deepspeed/runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py). To be removed when it has.
        """
        optimizer = self.engine.optimizer
        for group in optimizer.optimizer.param_groups:
            for partition in group["params"]:
                optimizer.optimizer.state[partition] = {
                    "step": torch.tensor(float(state.steps)),
                    **{moment: torch.zeros_like(partition) for moment in MOMENTS},
                }
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
        for moment in MOMENTS:
            for name, parameter in self._parameters().items():
                self._utils.safe_set_full_optimizer_state(parameter, state.moments[moment][name], moment)

    def export(self, folder: Path) -> None:
        export(self.policy, folder, self.world.rank)


def _config(stage: int, max_grad_norm: float, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,  # left out it would be 1.0; 0 turns it off
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype is torch.bfloat16},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 1 << 60,
        "wall_clock_breakdown": False,
    }
