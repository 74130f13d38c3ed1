"""Every choice of a run, made once. What comes after branches on nothing but cadence."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlexp.algos.base import PreferenceLoss
from rlexp.algos.dpo import DPO
from rlexp.config.schema import (
    Config,
    DataConfig,
    Device,
    DPOConfig,
    EngineConfig,
    EngineName,
    JsonlDataConfig,
    LossConfig,
    OptimConfig,
    Precision,
    SyntheticDataConfig,
)
from rlexp.data import synthetic
from rlexp.data.packing import pack_pairs
from rlexp.data.rows import read_jsonl
from rlexp.data.sampler import Sampler, total_steps
from rlexp.data.tokens import PairTokenizer, numbered
from rlexp.engine.base import Engine, shape_of
from rlexp.engine.plain import PlainEngine
from rlexp.errors import DataError, UserError
from rlexp.metrics.memory import Phases
from rlexp.model.loading import in_pieces, load_config, load_model, load_tokenizer
from rlexp.model.policy import Policy, cast_parameters
from rlexp.model.probe import probe
from rlexp.ring.groups import World, build_world
from rlexp.ring.kernels import BlockKernel, get_kernel
from rlexp.ring.layouts import Layout, get_layout
from rlexp.ring.shard import shard_pack
from rlexp.train.schedule import Schedule
from rlexp.types import Pair, Row, Shard, TokenLogps

REPLICATING = (EngineName.torch, EngineName.zero0)  # engines that reduce all gradients at the end
DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16, Precision.fp64: torch.float64}


@dataclass(frozen=True)
class Run:
    """All that a step needs. Built anew on every rank, from the same configuration."""

    cfg: Config
    world: World
    device: torch.device
    layout: Layout
    kernel: BlockKernel
    tokenizer: Any
    pairs: Sequence[Pair]
    eval_pairs: Sequence[Pair]
    dropped: Counter[str]
    eval_dropped: Counter[str]
    sampler: Sampler
    schedule: Schedule
    engine: Engine
    reference: Callable[[Shard], TokenLogps]
    loss: PreferenceLoss
    parameters: int
    phases: Phases

    @property
    def total_steps(self) -> int:
        return self.schedule.total_steps

    def shard(self, pairs: Sequence[Pair]) -> Shard:
        """This rank's part of a micro-batch, on its device."""
        data = self.cfg.data
        pack = pack_pairs(pairs, self.layout.multiple(self.world.ring.size), packing=data.packing)
        return shard_pack(pack, self.world.ring, self.layout, self.kernel, data.max_length).to(self.device)


def build(cfg: Config, phases: Phases | None = None) -> Run:
    """A collective call: every rank builds the same run, and what is refused is refused on all."""
    world = build_world(cfg.parallel.ring_size)
    device = device_of(cfg)
    layout, kernel = get_layout(cfg.parallel.layout), get_kernel(cfg.parallel.kernel, device.type)
    tokenizer = load_tokenizer(cfg.model)
    encoder = PairTokenizer(tokenizer, cfg.data.max_length, cfg.data.too_long)
    train_rows, eval_rows = read_rows(cfg.data)
    pairs, dropped = encode_shared(encoder, train_rows, world)
    eval_pairs, eval_dropped = encode_shared(encoder, eval_rows, world)
    _refuse_empty(pairs, dropped, "data")
    if eval_rows:
        _refuse_empty(eval_pairs, eval_dropped, "the held-out data")
    sampler = Sampler(len(pairs), cfg.train.batch_size, cfg.seed, cfg.data.shuffle, cfg.data.drop_last)
    steps = total_steps(sampler.steps_per_epoch, cfg.train.max_steps, cfg.train.epochs)
    model_config = load_config(cfg.model, cfg.data.max_length)
    probe(cfg.model, model_config, world.ring, layout, kernel, cfg.data.max_length, device)
    dtype = DTYPES[cfg.train.precision]
    policy = build_policy(cfg, model_config, device)
    _refuse_foreign_tokens([*pairs, *eval_pairs], policy.model.get_input_embeddings().num_embeddings)
    reference = build_reference(cfg, lambda: build_policy(cfg, model_config, device), dtype, world)
    if cfg.memory.checkpointing:
        policy.recompute_activations()
    return Run(
        cfg, world, device, layout, kernel, tokenizer, pairs, eval_pairs, dropped, eval_dropped, sampler,
        Schedule(cfg.optim.lr, cfg.optim.warmup_steps, steps, cfg.optim.decay),
        build_engine(cfg.engine, policy, cfg.optim, world, dtype),
        reference,
        build_loss(cfg.loss),
        sum(shape_of(parameter).numel() for parameter in policy.parameters()),
        phases or Phases(device),
    )  # fmt: skip


def device_of(cfg: Config) -> torch.device:
    cuda = cfg.launch.device is Device.cuda
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def _refuse_empty(pairs: Sequence[Pair], dropped: Counter[str], what: str) -> None:
    if not pairs:
        reasons = "; ".join(f"{count} pairs: {reason}" for reason, count in sorted(dropped.items()))
        raise DataError(f"{what}: no pair is left ({reasons}).")


def _refuse_foreign_tokens(pairs: Sequence[Pair], vocabulary: int) -> None:
    for pair in pairs:
        highest = max(int(part.max(initial=0)) for part in (pair.prompt, pair.chosen, pair.rejected))
        if highest >= vocabulary:
            raise DataError(
                f"{pair.origin}: token {highest} is not in the model's vocabulary of {vocabulary}. The tokenizer is "
                f"not this model's, or the model's embedding was not resized to it."
            )


def build_loss(cfg: LossConfig) -> PreferenceLoss:
    match cfg:
        case DPOConfig(beta=beta, label_smoothing=label_smoothing):
            return DPO(beta, label_smoothing)
        case _:
            raise AssertionError(cfg)


def build_policy(cfg: Config, config: Any, device: torch.device) -> Policy:
    """The model as it starts: the same on every rank, or under ZeRO-3 in pieces from the first moment."""
    float64 = cfg.train.precision is Precision.fp64
    with pieces_for(cfg.engine):
        model = load_model(cfg.model, config, cfg.data.max_length, float64=float64)
    policy = Policy(model).to(device)
    policy.freeze(cfg.model.freeze)
    if cfg.engine.name not in REPLICATING:
        policy.refuse_listed_experts(cfg.engine.name.value)
    return policy


def pieces_for(cfg: EngineConfig) -> contextlib.AbstractContextManager[Any]:
    if cfg.name is not EngineName.zero3:
        return contextlib.nullcontext()
    from rlexp.engine.zero import loading_config

    return in_pieces(loading_config(cfg))


def build_engine(cfg: EngineConfig, policy: Policy, optim: OptimConfig, world: World, dtype: torch.dtype) -> Engine:
    match cfg.name:
        case EngineName.torch:
            return PlainEngine(policy, optim, world, dtype)
        case EngineName.fsdp2:
            from rlexp.engine.fsdp2 import FSDP2Engine

            return FSDP2Engine(policy, optim, world, dtype)
        case _:
            from rlexp.engine.zero import build_zero  # here, since DeepSpeed takes seconds to import

            return build_zero(cfg, policy, optim, world, dtype)


def build_reference(
    cfg: Config, policy: Callable[[], Policy], dtype: torch.dtype, world: World
) -> Callable[[Shard], TokenLogps]:
    """The starting weights, frozen, in the dtype that computes; in pieces where the engine holds them so."""
    starting = policy().eval().requires_grad_(False)
    match cfg.engine.name:
        case EngineName.zero3:
            from rlexp.engine import zero

            forward = zero.frozen(cfg.engine, starting, dtype)
        case EngineName.fsdp2:
            from rlexp.engine import fsdp2

            forward = fsdp2.frozen(starting, dtype, world)
        case _:
            cast_parameters(starting, dtype)
            forward = starting

    @torch.no_grad()
    def reference(shard: Shard) -> TokenLogps:
        return forward(shard)

    return reference


def read_rows(cfg: DataConfig) -> tuple[list[Row], list[Row]]:
    """The rows to train on, and those held out."""
    match cfg:
        case SyntheticDataConfig(size=size, eval_size=eval_size, seed=seed):
            words = cfg.max_length if cfg.fill else 0
            return synthetic.generate(size, seed, "train", words), synthetic.generate(eval_size, seed, "eval", words)
        case JsonlDataConfig(path=path, eval_path=eval_path):
            held_out = read_jsonl(Path(eval_path).expanduser()) if eval_path else []
            return read_jsonl(Path(path).expanduser()), held_out
        case _:
            raise AssertionError(cfg)


def encode_shared(encoder: PairTokenizer, rows: Sequence[Row], world: World) -> tuple[list[Pair], Counter[str]]:
    """Every rank tokenizes its part of the rows, and all get the whole; the first bad row is everybody's error."""
    mine = rows[world.rank * len(rows) // world.size : (world.rank + 1) * len(rows) // world.size]
    try:
        part: Any = encoder.encode(mine)
    except UserError as error:
        part = str(error)
    parts = [part] * world.size
    if world.size > 1:
        dist.all_gather_object(parts, part)
    for part in parts:
        if isinstance(part, str):
            raise DataError(part)
    dropped: Counter[str] = sum((part.dropped for part in parts), start=Counter())
    return numbered([pair for part in parts for pair in part.pairs]), dropped
