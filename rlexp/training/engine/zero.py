"""The only door to DeepSpeed, with its stages 0 to 3. DeepSpeed knows nothing about the ring.

It gets no mpu, no mesh and no sequence parallelism of its own: each makes some stage silently wrong. To DeepSpeed every
rank is a data-parallel rank whose gradients it averages; the scaling contract of `engine/base.py` does the rest.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import io
import logging
import math
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlexp.base.engine_facts import ENGINES
from rlexp.base.errors import ConfigError
from rlexp.config.schema import EngineConfig, Offload, OptimConfig
from rlexp.training.engine.base import (
    Engine,
    Fragment,
    moments_of,
    optimizer_for,
    set_lr,
    set_steps,
    shape_of,
    sum_of_squares,
    trained,
)
from rlexp.training.engine.frozen import Frozen
from rlexp.training.engine.plain import PlainEngine
from rlexp.training.model.placing import gathered, take_exact
from rlexp.training.model.policy import Policy
from rlexp.training.types import Shard, TokenLogps
from rlexp.training.world.groups import World

BUCKET = 50_000_000  # most elements of a gradient that are reduced together: 100 MB in bfloat16


def import_deepspeed() -> Any:
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed calls collectives by names that torch deprecates since 2.13.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    # Its hooks for the backward pass stand on layers whose inputs need no gradient, where what lies before is frozen.
    warnings.filterwarnings("ignore", message=r"Full backward hook is firing when gradients are computed with respect")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Shim: on CPU, DeepSpeed compiles its shared-memory collectives at start. That takes 40 to 140 s, needs g++ and
    # ninja, and hangs on a stale lock file (deepspeed/comm/torch.py, build_shm_op). gloo does all that is needed here.
    # Remove this when DeepSpeed has a public switch for it.
    # On a GPU nothing is asked: a look at one operator of DeepSpeed's tries all of them.
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _import_muon()
    return deepspeed


def _import_muon() -> None:
    """Shim: import DeepSpeed's Muon without torch.compile, which it decorates functions with.

    DeepSpeed compares every optimizer with its Muon. Importing the compiler takes 2 to 3 seconds of a core in every
    rank, and Muon is not used here."""
    from deepspeed.runtime import compiler

    before, compiler.compile = compiler.compile, lambda: compiler.dummy_decorator
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    except ImportError:
        pass  # another version of DeepSpeed: then the import takes its time
    finally:
        compiler.compile = before


def _initialize(**arguments: Any) -> Any:
    deepspeed = import_deepspeed()
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    with contextlib.redirect_stdout(io.StringIO()):  # its bf16 optimizer prints memory tables at its start
        engine, *_ = deepspeed.initialize(dist_init_required=False, **arguments)
    return engine


def build_zero(cfg: EngineConfig, policy: Policy, optim: OptimConfig, world: World, dtype: torch.dtype) -> Engine:
    _refuse_wrong_values(cfg)
    classes: dict[int | None, Any] = {0: Stage0, 1: Stage12, 2: Stage12, 3: Stage3}
    return classes[ENGINES[cfg.name.value].stage](cfg, policy, optim, world, dtype)


def _refuse_wrong_values(cfg: EngineConfig) -> None:
    """Check the values of `engine.overrides` by DeepSpeed's own schema, before DeepSpeed starts."""
    import_deepspeed()
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**ds_config(cfg, 0.0, torch.float32)["zero_optimization"])
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"engine.overrides={cfg.overrides}: DeepSpeed refuses it: {reason}") from error


class Stage0(PlainEngine):
    """Stage 0: replicated weights, whose optimizer DeepSpeed steps.

    DeepSpeed gets only the float32 masters: its own stage 0 in bfloat16 would accumulate gradients in bfloat16, and
    start Adam at its second step. It would also reduce gradients only after the backward pass."""

    def __init__(self, cfg: EngineConfig, policy: Policy, optim: OptimConfig, world: World, dtype: torch.dtype) -> None:
        super().__init__(policy, optim, world, dtype)
        self.name = cfg.name.value
        holder = _Holder(self.masters, policy)
        config = ds_config(cfg, optim.max_grad_norm, torch.float32, buffers_of(policy))
        self.module = _initialize(model=holder, optimizer=self.optimizer, config=config)
        self.module.enable_backward_allreduce = False

    def backward(self, loss: Tensor, *, last: bool) -> None:
        with self.reducing.during(last=last):
            _backward(self.module, loss, last)
        self._norm = None

    def _clip_and_step(self) -> None:
        self.module.step()


class _Holder(nn.Module):
    """The module that DeepSpeed sees at stage 0: the parameters to step, and a forward pass."""

    def __init__(self, masters: dict[str, nn.Parameter], policy: Policy) -> None:
        super().__init__()
        for name, master in masters.items():
            self.register_parameter(name.replace(".", "/"), master)
        self._policy = [policy]  # in a list, to hide the model's own parameters from DeepSpeed

    def forward(self, shard: Shard) -> TokenLogps:
        logps: TokenLogps = self._policy[0](shard)
        return logps


class _Partitioned(Engine):
    """The common part of stages 1 to 3."""

    def __init__(self, cfg: EngineConfig, policy: Policy, optim: OptimConfig, world: World, dtype: torch.dtype) -> None:
        self.name, self.policy, self.world, self.steps = cfg.name.value, policy, world, 0
        self.parameters = trained(policy)
        self._utils = import_deepspeed().utils
        config = ds_config(cfg, optim.max_grad_norm, dtype, buffers_of(policy))
        with _zero_optimizer_at_stage_1():
            self.module = _initialize(model=policy, optimizer=optimizer_for(policy, optim), config=config)
        if dtype is torch.bfloat16:
            # DeepSpeed makes its float32 masters from bfloat16 weights: restore the bits that this loses.
            self._restore_bits()

    @abc.abstractmethod
    def _restore_bits(self) -> None:
        """Write the exact float32 weights into the masters. A collective call."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        _backward(self.module, loss, last)

    def step(self, lr: float) -> None:
        set_lr(self.module.optimizer, lr)
        self.module.step()
        self.steps += 1

    def gradients(self) -> dict[str, Tensor]:
        return {name: self._utils.safe_get_full_grad(p).detach().clone() for name, p in self.parameters.items()}

    def _whole(self, _name: str, parameter: nn.Parameter) -> Tensor:
        if parameter.requires_grad:
            whole: Tensor = self._utils.safe_get_full_fp32_param(parameter)
            return whole.detach()
        return _gathered(parameter) if self.sharded else parameter.detach()


@contextlib.contextmanager
def _zero_optimizer_at_stage_1() -> Iterator[None]:
    """Shim: for stage 1 in bfloat16 with float32 gradients DeepSpeed takes its BF16_Optimizer, unless the optimizer is
    offloaded. That one holds the whole float32 gradient from its start, and reduces it after the backward pass. Its
    ZeRO optimizer does neither. Remove this when DeepSpeed takes it by itself."""
    from deepspeed.runtime import engine as runtime

    def asked(engine: Any, optimizer: Any) -> str:
        chosen = before(engine, optimizer)
        return str(runtime.ZERO_OPTIMIZATION if chosen == runtime.BFLOAT16 else chosen)

    before = runtime.DeepSpeedEngine._do_optimizer_sanity_check
    runtime.DeepSpeedEngine._do_optimizer_sanity_check = asked
    try:
        yield
    finally:
        runtime.DeepSpeedEngine._do_optimizer_sanity_check = before


class Stage12(_Partitioned):
    """Stages 1 and 2: whole weights, and a partition of the flattened masters and their moments."""

    def __init__(self, cfg: EngineConfig, policy: Policy, optim: OptimConfig, world: World, dtype: torch.dtype) -> None:
        super().__init__(cfg, policy, optim, world, dtype)
        self._kept = _KeptGradient(self.module.optimizer)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        super().backward(loss, last=last)
        self._kept.let_go()

    def _restore_bits(self) -> None:
        mapped = dict(self._mapped())
        for name, parameter in self.policy.named():
            part = take_exact(parameter)
            if part is None or not parameter.requires_grad:  # on every rank alike: bfloat16 holds all bits, or suffices
                continue
            whole = gathered(part, parameter.numel(), parameter.device)
            if name in mapped:
                weight, start = mapped[name].hp_fragment.detach(), mapped[name].lp_fragment_address.start
                weight.copy_(whole[start : start + weight.numel()])

    def _mapped(self) -> Iterator[tuple[str, Any]]:
        """Yield DeepSpeed's description of each fragment that this rank holds, by parameter."""
        for name, parameter in self.parameters.items():
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is not None:
                yield name, mapping

    def fragments(self) -> list[Fragment]:
        """Cut the moments from the flat ones. DeepSpeed's own functions find moments only after its first step, and
        only in the first parameter group."""
        moments = [moments_of(self.module.optimizer.optimizer, partition) for partition in self._partitions()]
        fragments = []
        for name, mapping in self._mapped():
            place = mapping.hp_fragment_address
            flat = moments[mapping.param_group_index]
            own_moments = {moment: tensor.narrow(0, place.start, place.numel) for moment, tensor in flat.items()}
            weight, start = mapping.hp_fragment.detach(), mapping.lp_fragment_address.start
            fragments.append(Fragment(name, start, weight, own_moments))
        return fragments

    def _partitions(self) -> list[Tensor]:
        return [partition for group in self.module.optimizer.optimizer.param_groups for partition in group["params"]]

    def restored(self, steps: int) -> None:
        for partition in self._partitions():
            set_steps(self.module.optimizer.optimizer, partition, steps)
        self.steps = steps
        self.module.optimizer.update_lp_params()

    def grad_norm(self) -> float:
        """Before `step`, so that a gradient that is not finite stops the run before it does harm. DeepSpeed would
        skip such a step in silence, and marks such a norm with −1."""
        norm = float(self.module.optimizer.scaled_global_norm())
        return norm if math.isfinite(norm) and norm >= 0 else math.inf


class _KeptGradient:
    """Shim: keep a gradient until the stream that reduces it has done so.

    DeepSpeed reduces a gradient larger than a bucket where it lies, on a stream of its own, and writes the mean back.
    At stage 2, a rank that owns no part of it drops it at once: `reduce_ipg_grads` clears `param.grad`, and only owners
    call `record_stream`. The backward pass would then get memory that the other stream still reads and writes. With
    offload, DeepSpeed records all gradients (`_record_gradient_stream`).
    Remove this when DeepSpeed does that without offload too.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._average = optimizer, optimizer.average_tensor
        self._gradient: Tensor | None = None
        optimizer.average_tensor = self._average_and_keep

    def _average_and_keep(self, gradient: Tensor, *args: Any) -> None:
        self.let_go()
        self._average(gradient, *args)
        if gradient.numel() > self._optimizer.reduce_bucket_size:  # smaller ones were copied into a bucket
            self._gradient = gradient

    def let_go(self) -> None:
        """Let what is computed next wait for the reduction, and drop the gradient. The host does not wait."""
        stream = self._optimizer.reduction_stream
        if self._gradient is not None and stream is not None:  # None on CPU
            import_deepspeed().accelerator.get_accelerator().current_stream().wait_stream(stream)
        self._gradient = None


def _begin_gradients_at_the_embeddings(policy: Policy) -> None:
    """Let the hidden states need a gradient from the embeddings on.

    DeepSpeed lets go of a layer's weights when it has the gradient of its inputs; where these need none, that is before
    the layer's backward pass, which still multiplies with an adapter's second matrix.
    """

    def needed(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_(True)

    for trunk in policy.trunks:
        trunk.get_input_embeddings().register_forward_hook(needed)


class Stage3(_Partitioned):
    """Stage 3: each rank holds a piece of every parameter. Each module's parameters are gathered while it is used."""

    def __init__(self, cfg: EngineConfig, policy: Policy, optim: OptimConfig, world: World, dtype: torch.dtype) -> None:
        partition(policy, cfg)
        self._exact = _cast_partitions(policy, dtype)
        super().__init__(cfg, policy, optim, world, dtype)

    def _restore_bits(self) -> None:
        for name, parameter in self.parameters.items():
            weight = self._partition_of(parameter)
            weight.copy_(self._exact.pop(name)[: weight.numel()])

    def _partition_of(self, parameter: nn.Parameter, moment: str | None = None) -> Tensor:
        """Shim: return this rank's piece as a view. DeepSpeed's public functions copy it if the optimizer is offloaded.
        Remove this when they do not."""
        partition_of = self.module.optimizer._get_fp32_opt_state_partition
        piece, _ = partition_of(parameter, release_swap_buffers=False, optim_state_key=moment)
        _, real = place_of_piece(parameter, piece, self.world)
        return piece.detach()[:real]

    def _gradient_of(self, parameter: nn.Parameter) -> Tensor:
        """Shim: return this rank's piece of the gradient, on the host if the optimizer is offloaded. DeepSpeed's public
        function copies it to the device. Remove this when it does not."""
        piece: Tensor
        piece, _ = self.module.optimizer._get_fp32_grad_state_partition(parameter, release_swap_buffers=True)
        return piece

    def fragments(self) -> list[Fragment]:
        optimizer = self.module.optimizer.optimizer
        made = [moments_of(optimizer, flat) for flat in self.module.optimizer.fp32_partitioned_groups_flat]
        moments = list(made[0]) if made else []
        fragments = []
        for name, parameter in self.parameters.items():
            weight = self._partition_of(parameter)
            start = self.world.rank * -(-shape_of(parameter).numel() // self.world.size)
            if weight.numel():
                own_moments = {moment: self._partition_of(parameter, moment) for moment in moments}
                fragments.append(Fragment(name, start, weight, own_moments))
        return fragments

    def restored(self, steps: int) -> None:
        """Shim: do what DeepSpeed's step does at its end (deepspeed/runtime/zero/stage3.py), which is not public."""
        optimizer = self.module.optimizer
        optimizer._partition_all_parameters()  # small parameters stay gathered otherwise; the next pass gathers them
        for number, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
            set_steps(optimizer.optimizer, flat, steps)
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        self.steps = steps

    def grad_norm(self) -> float:
        """Compute the norm from the pieces' gradients: DeepSpeed has no norm before its step."""
        device = import_deepspeed().accelerator.get_accelerator().current_device_name()
        total = sum_of_squares(map(self._gradient_of, self.parameters.values()), device)
        dist.all_reduce(total)
        return math.sqrt(total) if bool(total.isfinite()) else math.inf


def place_of_piece(parameter: nn.Parameter, piece: Tensor, world: World) -> tuple[int, int]:
    """Return where this rank's piece starts in the flattened parameter, and how much of it is no padding."""
    start = world.rank * piece.numel()
    return start, max(0, min(piece.numel(), shape_of(parameter).numel() - start))


def _gathered(parameter: nn.Parameter) -> Tensor:
    with import_deepspeed().zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def partition(policy: Policy, cfg: EngineConfig) -> None:
    """Give each rank its piece of every parameter. A model that was loaded in pieces stays as it is."""
    deepspeed = import_deepspeed()
    if not all(hasattr(parameter, "ds_id") for parameter in policy.parameters()):
        deepspeed.init_distributed(dist_init_required=False, verbose=False)
        deepspeed.zero.Init(module=policy, config_dict_or_path=ds_config(cfg, 0.0, torch.float32))
    for head in policy.heads:
        for parameter in head.parameters(recurse=False):
            deepspeed.zero.register_external_parameter(policy.outlet, parameter)
    if policy.adapter is not None:
        # A layer is gathered with its adapter, on or off, so that all passes over the model gather the same. A module
        # that is trained whole is not: of a head only the weight is used.
        kinds = {type(layer) for layer in policy.adapter.layers if hasattr(layer, "lora_A")}
        deepspeed.utils.set_z3_leaf_modules(policy, sorted(kinds, key=str))
        _begin_gradients_at_the_embeddings(policy)


def loading_config(cfg: EngineConfig) -> dict[str, Any]:
    """Return the DeepSpeed configuration for loading a model in float32 pieces."""
    _refuse_wrong_values(cfg)
    import_deepspeed().init_distributed(dist_init_required=False, verbose=False)
    return ds_config(cfg, 0.0, torch.float32)


def _cast_partitions(policy: Policy, dtype: torch.dtype) -> dict[str, Tensor]:
    """Cast the pieces to the dtype that computes, and return the exact float32 ones of what is trained."""
    exact: dict[str, Tensor] = {}
    if dtype is torch.bfloat16:
        for name, parameter in policy.named():
            piece = parameter.ds_tensor
            if parameter.requires_grad:
                exact[name] = piece.data
            piece.data = piece.data.to(dtype)
            parameter.data = parameter.data.to(dtype)
    return exact


class FrozenPieces(Frozen):
    """A model that is not trained, in stage 3's pieces."""

    def __init__(self, cfg: EngineConfig, policy: Policy, world: World, dtype: torch.dtype) -> None:
        super().__init__(cfg.name.value, policy)
        self.world = world
        partition(policy, cfg)
        _cast_partitions(policy, dtype)
        self.module = _initialize(model=policy, config=ds_config(cfg, 0.0, dtype, buffers_of(policy)))

    def _whole(self, _name: str, parameter: nn.Parameter) -> Tensor:
        return _gathered(parameter)

    def fragments(self) -> list[Fragment]:
        fragments = []
        parameter: Any  # with DeepSpeed's marks
        for name, parameter in self.parameters.items():
            piece = parameter.ds_tensor
            start, real = place_of_piece(parameter, piece, self.world)
            if real:
                fragments.append(Fragment(name, start, piece.detach()[:real], {}))
        return fragments

    def restored(self, steps: int) -> None:
        super().restored(steps)
        self.module.optimizer.partition_all_parameters()  # the next pass gathers small ones too


def _backward(engine: Any, loss: Tensor, last: bool) -> None:
    # We set the boundary, so any number of micro-batches makes a step. The loss is already scaled.
    engine.set_gradient_accumulation_boundary(last)
    engine.backward(loss, scale_wrt_gas=False)


def buffers_of(policy: Policy) -> dict[str, Any]:
    """Return how much DeepSpeed reduces and gathers together, in elements, by the size of a layer.

    Its own numbers, half a billion and a billion, are the same for all models: a small one gets buffers many times its
    size. With these, each layer ends its buckets, and the next one is gathered while one computes. So all layers need
    the same memory, which a rehearsal of a few can predict.
    """
    names = set(policy.model._no_split_modules or ())
    layers = [module for module in policy.modules() if type(module).__name__ in names]
    sizes = [[shape_of(parameter).numel() for parameter in layer.parameters()] for layer in layers] or [[BUCKET]]
    layer = max(map(sum, sizes))
    return {
        "reduce_bucket_size": min(BUCKET, max(map(max, sizes))),
        "overlap_comm": True,
        "stage3_prefetch_bucket_size": layer,
        "stage3_max_live_parameters": 3 * layer,
        "stage3_max_reuse_distance": layer,
    }


def ds_config(
    cfg: EngineConfig, max_grad_norm: float, dtype: torch.dtype, buffers: dict[str, Any] | None = None
) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": ENGINES[cfg.name.value].stage, **(buffers or {})}
    if cfg.offload is not Offload.none:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if cfg.offload is Offload.all:
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,  # the default is 1.0; 0 turns it off
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype is torch.bfloat16},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 1 << 60,
        "wall_clock_breakdown": False,
    }
    return _merged(config, cfg.overrides)


def _merged(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Merge the user's keys over ours. `config/checks/deepspeed.py` lists the keys that may be set."""
    merged = dict(config)
    for key, value in overrides.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
