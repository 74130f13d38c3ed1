"""Rehearse one rank of a run: the product's own build and step, from the model's configuration alone."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from rlexp.base.engine_facts import ENGINES
from rlexp.config.schema import Config, Device, ModelConfig, with_values
from rlexp.config.schema.rollouts import RolloutEngine
from rlexp.preflight.host import Held, power_of_two
from rlexp.preflight.rehearsal.device import NAME, conversions, joined, rehearsed_device, replaced
from rlexp.preflight.rehearsal.holdings import label, mark_modules, mark_trunk
from rlexp.preflight.rehearsal.kernel_cost import rehearsed_kernel
from rlexp.preflight.rehearsal.log import COLLECT, Log, peak_of
from rlexp.preflight.rehearsal.longest_samples import LongestSamples, Wordless
from rlexp.preflight.rehearsal.mode import Counting, Rehearsing, calling_line
from rlexp.preflight.rehearsal.rates import UNTIMED, DeviceClock, Rates
from rlexp.training.checkpoint.saver import share
from rlexp.training.engine import rehearsed
from rlexp.training.engine.streamed import Streamed
from rlexp.training.metrics.memory import Phases
from rlexp.training.metrics.meter import Meter
from rlexp.training.model.loading import random_model
from rlexp.training.model.placing import Placing, put_all
from rlexp.training.model.small import first_layers
from rlexp.training.reference.models import Reference
from rlexp.training.ring.kernels import BlockKernel
from rlexp.training.train.build import build
from rlexp.training.train.examples import Examples, longest_examples, sharing_examples
from rlexp.training.train.export_at_end import weights_to_write
from rlexp.training.train.parts import Setting
from rlexp.training.train.step import train_step
from rlexp.training.train.task import Task
from rlexp.training.types import Pack, Shard
from rlexp.training.world.groups import World


@dataclass(frozen=True)
class RehearsalPlan:
    """What to rehearse: a configuration with its model's, as which rank, and with how many of the layers."""

    cfg: Config
    model: Any  # transformers' configuration
    rank: int = 0
    layers: int | None = None  # None: all
    steps: int = 1
    gpu: bool = True
    rates: Rates = UNTIMED
    limit: float = math.inf  # bytes; a build that needs more is enough
    answers: int | None = None  # tokens of each answer of pairs that share their prompt; None: nothing is shared


def preload() -> None:
    """Import what every rehearsal needs and nothing has imported yet. Rehearsals are then forked from this process."""
    from rlexp.training.engine import fsdp2, zero  # noqa: F401

    zero.import_deepspeed()


def rehearse(plan: RehearsalPlan) -> Log:
    """Build the run and take its first steps. Nothing is computed, and nothing is sent."""
    gc.disable()  # what it frees, and when, would depend on what this process did before
    device = rehearsed_device() if plan.gpu else torch.device("cpu")
    layers = plan.layers or int(plan.model.num_hidden_layers)
    log = Log(device.type, clock=DeviceClock(plan.rates), layers=layers)
    mode = Rehearsing(log)
    with (
        joined(plan.rank, plan.cfg.parallel.world_size),
        conversions(),
        answering(log),
        fused_attention(log, plan.cfg.hardware.generation),
        _deepspeed(plan),
        mode,
    ):
        take_steps(plan, device, mode)
    log.learned = mode.memo.learned
    return log


def _deepspeed(plan: RehearsalPlan) -> contextlib.AbstractContextManager[None]:
    if ENGINES[plan.cfg.engine.name.value].stage is None:
        return contextlib.nullcontext()
    if plan.gpu:
        rehearsed.install(rehearsed_device())
    return rehearsed.agreeing()


def count(plan: RehearsalPlan) -> Log:
    """Build the same run on real tensors and ranks of the CPU, and take the same steps. A collective call."""
    log = Log("cpu")
    with (mode := Counting(log)):
        take_steps(plan, torch.device("cpu"), mode)
    return log


def take_steps(plan: RehearsalPlan, device: torch.device, mode: Counting) -> None:
    log = mode.log
    phases = LoggedPhases(device, log)
    around = Rehearsed(plan, device, mode)
    with phases("build"):
        # vLLM is not rehearsed: its drawer is another part of the run.
        task = build(with_values(plan.cfg, "rollout", engine=RolloutEngine.native), phases, around=around)
        engine = task.run.engine
        gc.collect()  # engines and modules refer to each other
        held = of_host(mode, task)  # makes the moments, as the first optimizer step does
    log.build_alone = peak_of(log) > plan.limit
    log.host_peak = built = log.host_live
    ring = task.run.world.ring
    ring.traffic.watcher = log
    mode.watched = {each.group.group_name for each in (ring, ring.inner, ring.outer) if each is not None and each.group}
    within = set(engine.policy.modules())
    frozen = [model for model in around.loaded if model.base_model not in within]
    for model in around.loaded:
        mark_trunk(log, model.base_model)
    mark_modules(log, mode, engine.policy)
    label(log, mode, engine, [*frozen, *around.judging])
    with uncounted_objects():
        for step in range(1, 0 if log.build_alone else plan.steps + 1):
            train_step(task, step)
        if plan.cfg.checkpoint.export and not log.build_alone:
            with phases("export"):
                for _ in weights_to_write(task.run):  # one after the other; the files are the host's
                    pass
    log.held = dataclasses.replace(held, beside=log.host_peak - built)
    log.closed = True


def of_host(mode: Counting, task: Task) -> Held:
    """Return what a rank holds in the host's memory after the build, as torch takes it: pinned tensors are rounded up,
    and all are pinned but the moments and the reference that the ranks share."""
    run, reference = task.run, getattr(getattr(task, "reference", None), "frozen", None)
    fragments = share(run.engine, run.world.rank, run.world.size)
    state = sum(tensor.nbytes for each in fragments for _, tensor in each.tensors())
    if mode.log.device == "cpu":
        return Held(state=state, elements=run.parameters)
    sizes = mode.sizes_on("cpu")
    weights = reference.policy.parameters() if isinstance(reference, Streamed) else ()
    shared = sum(sizes.pop(number, 0) for number in {mode.number_of(each) for each in weights} if number is not None)
    moments = {mode.number_of(tensor) for each in fragments for tensor in each.moments.values()}
    pinned = [size for number, size in sizes.items() if number not in moments]
    rounded, loose = sum(map(power_of_two, pinned)), sum(sizes.values()) - sum(pinned)
    return Held(shared, loose, sum(pinned), rounded, state=state, elements=run.parameters)


class Rehearsed(LongestSamples):
    """The longest examples, models with random weights, and the hardware that is asked about."""

    has_packages = False

    def __init__(self, plan: RehearsalPlan, device: torch.device, mode: Counting) -> None:
        super().__init__(plan.cfg, mode, int(plan.model.get_text_config().vocab_size))
        self.plan, self.on = plan, device
        self.loaded: list[Any] = []

    def examples(self, cfg: Config, tokenizer: Any, world: World, *, trains: bool) -> Examples:  # noqa: ARG002
        answers = self.plan.answers
        return longest_examples(cfg) if answers is None else sharing_examples(cfg, answers)

    def tokenizer(self, cfg: ModelConfig) -> Any:  # noqa: ARG002
        return Wordless()

    def model_config(self, cfg: ModelConfig, max_length: int) -> Any:  # noqa: ARG002
        return first_layers(self.plan.model, self.plan.layers)

    def model(self, _cfg: Any, config: Any, max_length: int, placing: Placing | None, **kwargs: Any) -> Any:
        with self.on if placing is None else torch.device("cpu"):  # each of ZeRO-3's pieces is made where it stays
            model = random_model(config, max_length, **kwargs)
        if placing is not None:
            wide = getattr(self.plan.model, "dtype", None) is not torch.bfloat16  # then bfloat16 loses bits of weights
            put_all(model, dataclasses.replace(placing, loses=lambda *_: wide) if self.short else placing)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.eos_token_id = None  # no answer ends before it is as long as it may be
        self.loaded.append(model)
        return model

    def stored_reference(self, setting: Setting, *_: Any, **__: Any) -> Reference:
        return StandInReference(setting)

    def device(self, cfg: Config) -> torch.device:  # noqa: ARG002
        return self.on

    def generation(self, device: Device) -> int | None:  # noqa: ARG002
        return self.plan.cfg.hardware.generation or None if self.plan.gpu else None

    def memory(self, device: torch.device) -> int | None:  # noqa: ARG002
        return int(self.plan.cfg.hardware.memory_gib * (1 << 30)) if self.plan.gpu else None

    def kernel(self, *args: Any) -> BlockKernel:
        return rehearsed_kernel(self.mode.log, *args)

    def neighbours(self, world: World) -> None:  # noqa: ARG002
        return None


class StandInReference(Reference):
    """Stands in for what is computed before training: each token has a value, and no model is in memory."""

    def __init__(self, setting: Setting) -> None:
        self.dtype = torch.promote_types(setting.dtype, torch.float32)

    def known(self, pack: Pack, shard: Shard) -> Shard:  # noqa: ARG002
        return dataclasses.replace(shard, known_n=torch.zeros(len(shard.listed_n), dtype=self.dtype))

    def logps(self, shard: Shard) -> Tensor:
        assert shard.known_n is not None
        return shard.known_n


class LoggedPhases(Phases):
    """Phases that begin sections of a log. What is inside the pass that collects values counts as part of it."""

    def __init__(self, device: torch.device, log: Log) -> None:
        super().__init__(device)
        self.log = log

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        before = self.log.phase
        if before == COLLECT:
            yield
            return
        self.log.enter(phase)
        try:
            yield
        finally:
            self.log.enter(before)

    def report(self, meter: Meter) -> None:
        """Report nothing: the log has it all."""


aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
HOPPER = 9  # from this generation on, torch prefers cuDNN's attention, which takes masks and grouped heads


def uncounted_objects() -> contextlib.AbstractContextManager[None]:
    """Leave Python objects that ranks tell each other out of the count: they are pickled on the host.

    In a rehearsal every rank is told what this rank says.
    """
    gather = dist.all_gather_object

    def gathered(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            gather(*args, **kwargs)

    return replaced(dist, all_gather_object=gathered)


def answering(log: Log) -> contextlib.AbstractContextManager[None]:
    """Answer a program that takes a tensor's numbers to the host, as the mode does for a single one: with 1, true or 0.

    The host waits for the device once.
    """

    def numbers(tensor: FakeTensor, **_: Any) -> np.ndarray:
        if tensor.device.type == NAME:
            log.counts.syncs[f"{calling_line()}: numbers of the device"] += 1
        kind = str(tensor.dtype).rpartition(".")[2]
        ones = tensor.dtype.is_floating_point or tensor.dtype is torch.bool
        return np.full(tuple(tensor.shape), ones, dtype="float32" if kind == "bfloat16" else kind)

    return replaced(FakeTensor, numpy=numbers, tolist=lambda tensor: numbers(tensor).tolist())


def fused_attention(log: Log, generation: int) -> contextlib.AbstractContextManager[None]:
    """Let torch's own attention take what its kernels take on a GPU, where torch would choose one that fuses.

    As `select_sdp_backend` of torch 2.13 chooses (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). Its fused
    kernels make the output and a float32 number for each query; a mask of booleans is made one of numbers first. Where
    none fits, torch multiplies matrices, in a rehearsal too.
    """
    plain = nn.functional.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *, scale: float, enable_gqa: bool
    ) -> Tensor:
        if query.device.type != NAME or not fuses(query.dtype, attn_mask is not None, enable_gqa, generation):
            return plain(query, key, value, attn_mask=attn_mask, scale=scale, enable_gqa=enable_gqa)
        bias = None if attn_mask is None else torch.where(attn_mask, 0.0, query.new_full((), -torch.inf))
        log.attended(4 * query.numel() * key.shape[2])
        # The operator for CPUs has the results that all of them have, and no numbers to compute here.
        out: Tensor
        out, *_ = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=bias, scale=scale)
        return out

    return replaced(nn.functional, scaled_dot_product_attention=attention)


def fuses(dtype: torch.dtype, masked: bool, grouped: bool, generation: int) -> bool:
    """Say whether torch has a fused kernel on a GPU of this generation."""
    cudnn = dtype in HALF and generation >= HOPPER
    flash = dtype in HALF and not masked
    efficient = dtype is not torch.float64 and not grouped
    return cudnn or flash or efficient
