"""Changes of a configuration that need less memory, as words to type and as the configuration that they make.

Nearly all of them leave the curve as it is. An adapter in the place of the weights is another training, with another
learning rate: it is named after all others, with what it is, and never taken for one of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlexp.base.byte_counts import GIB, size
from rlexp.base.engine_facts import ENGINES
from rlexp.base.errors import ConfigError, first_line
from rlexp.config.checks.across_fields import check_engine
from rlexp.config.checks.adapter import check_adapter
from rlexp.config.checks.layout import check_layout, heads_of
from rlexp.config.checks.micro_batches import BUDGET, at_once, longest_sample
from rlexp.config.checks.reference import check_reference
from rlexp.config.schema import AUTO, Checkpointing, Config, Device, EngineName, LoraConfig, Offload, with_values
from rlexp.config.schema.bounds import as_typed
from rlexp.config.schema.loss_terms import compares
from rlexp.config.schema.models import ReferenceName
from rlexp.config.vllm_memory import KEY as VLLM_MEMORY
from rlexp.config.vllm_memory import uses_vllm
from rlexp.preflight.host import COPIES, HostBytes
from rlexp.preflight.predict import Found, Prediction
from rlexp.preflight.rehearsal.longest_samples import smaller
from rlexp.training.checkpoint.host_copy import PIECE

CHEAPEST = ("zero1", "zero2", "fsdp2", "zero3")  # engines, from the one that sends least to those that hold least
LORA, PRECOMPUTE, KEPT = "adapter=lora", "reference=precompute", "reference.offload=true"
SLEEP = "rollout.vllm_sleep=true"
OTHERWISE = "it trains small matrices beside the model, and not the model's weights"
LEAST_COPIES = 2 * PIECE  # bytes of each rank: one piece is copied while the other is written
LESS_KEPT = {  # what recomputes more, the fastest first
    Checkpointing.none: (Checkpointing.attention, Checkpointing.full),
    Checkpointing.attention: (Checkpointing.full,),
    Checkpointing.full: (),
}

Words = tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """One change of the configuration, with what follows from it. `refused` says why it cannot be made."""

    words: str
    prediction: Prediction | None = None
    refused: str | None = None

    @staticmethod
    def of(words: str, result: Found | Exception) -> Change:
        if isinstance(result, Exception):
            return Change(words, refused=first_line(result))
        return Change(words, result.prediction)

    def fits(self, limit: int) -> bool:
        return self.prediction is not None and self.prediction.fits(limit)


def cost(change: Change, before: float = 0.0) -> tuple[bool, bool, float]:
    """Order changes by their time; `before` is what a pass before training takes of each step.

    Offload comes after the others: the roofline has neither the way to the host nor the host's optimizer step. What
    trains other weights comes last.
    """
    took = seconds(change.prediction)
    more = before if PRECOMPUTE in change.words else 0.0
    return trains_otherwise(change.words), offloads(change.words), math.inf if took is None else took + more


def offloads(words: str) -> bool:
    return "engine.offload=optimizer" in words or "engine.offload=all" in words or KEPT in words


def trains_otherwise(words: str) -> bool:
    return LORA in words


def pass_before(cfg: Config, asked: Prediction) -> float:
    """Return the seconds of each step that go into computing the reference before training: the reference's, once for
    all epochs."""
    took = asked.counts("reference").took
    epochs = (cfg.train.epochs or 1) if cfg.train.max_steps is None else 1
    return took / epochs


def seconds(prediction: Prediction | None) -> float | None:
    """Return the estimated seconds of a step; None if no step was rehearsed."""
    if prediction is None or prediction.build_alone:
        return None
    return prediction.seconds


def cheapest_alone(changes: Sequence[Change], cfg: Config, asked: Prediction, limit: int) -> Change | None:
    """Return the change that fits and takes the least time; None if none fits."""
    price = functools.partial(cost, before=pass_before(cfg, asked))
    return min((change for change in changes if change.fits(limit)), key=price, default=None)


def needed(prediction: Prediction) -> str:
    return "more than " * prediction.build_alone + size(prediction.peak.bytes)


def engines_for(cfg: Config) -> list[Config]:
    """Return the configuration with each engine that engine=auto may take, the default first."""
    names = dict.fromkeys((cfg.engine.name.value, *CHEAPEST))
    return [changed for name in names if (changed := with_engine(cfg, name)) is not None]


def with_engine(cfg: Config, name: str) -> Config | None:
    """Return the configuration with another engine; None if that engine cannot do what is asked."""
    return _checked(with_values(cfg, "engine", name=EngineName(name), chosen=None))


def one(cfg: Config, key: str, value: Any) -> tuple[str, Config]:
    """Return the change of one key, as words and as the configuration."""
    group, _, name = key.partition(".")
    written = f"{value:g}" if isinstance(value, float) else as_typed(value)
    return f"{key}={written}", with_values(cfg, group, **{name: value})


def singles(cfg: Config, *, engines: bool = True, short: HostBytes | None = None) -> Iterator[tuple[str, Config]]:
    """Yield single changes. Without `engines` the engine stays: all were tried. `short` is a machine with less memory
    than the run needs there."""
    on_gpu, name = cfg.launch.device is not Device.cpu, cfg.engine.name.value
    for less in LESS_KEPT[cfg.memory.recomputed]:
        yield one(cfg, "memory.checkpointing", less.value)
    double = 2 * cfg.parallel.ring_size
    if cfg.parallel.world_size % double == 0 and (wider := _checked(_with_ring(cfg, double))) is not None:
        # On CPU the number of ranks follows the ring unless it is given.
        yield f"parallel.ring_size={double}{'' if on_gpu else f' launch.nproc={cfg.launch.nproc}'}", wider
    held = CHEAPEST.index(name) if name in CHEAPEST else -1
    for engine in CHEAPEST[held + 1 :] if engines else ():
        if (other := with_engine(cfg, engine)) is not None:
            yield f"engine={engine}", other
    if cfg.engine.offload is Offload.none and "optimizer" in ENGINES[name].offload:
        yield one(cfg, "engine.offload", Offload.optimizer)
    samples, batches = cfg.train.micro_batch_size, cfg.train.grad_acc
    if isinstance(samples, int) and samples > 1 and samples % 2 == 0:
        assert batches is not None
        yield one(with_values(cfg, "train", grad_acc=2 * batches), "train.micro_batch_size", samples // 2)
    else:
        yield from itertools.islice(fewer_tokens(cfg), 1)
    for key, count in smaller(cfg):
        yield one(cfg, key, count)
    if uses_vllm(cfg) and on_gpu:  # other shares of a GPU: what training leaves, and none while the ranks train
        if cfg.rollout.vllm_memory != AUTO:
            yield one(cfg, VLLM_MEMORY, AUTO)
        if not cfg.rollout.vllm_sleep:
            yield one(cfg, "rollout.vllm_sleep", True)
    yield from _of_reference(cfg)
    if short is not None:
        yield from _for_machine(cfg, short)
    if not isinstance(cfg.adapter, LoraConfig):
        yield from _with_adapter(cfg)


def _of_reference(cfg: Config) -> Iterator[tuple[str, Config]]:
    """Yield other ways to the same reference."""
    reference = cfg.reference
    if not compares(cfg.loss):
        return
    others = [_compared_with(cfg, name) for name in (ReferenceName.adapter, ReferenceName.precompute)
              if reference.name not in (name, ReferenceName.precompute)]  # fmt: skip
    on_gpu = cfg.launch.device is not Device.cpu and cfg.engine.offload is not Offload.all
    if reference.name is ReferenceName.model and not reference.offload and on_gpu:
        others.append(one(cfg, "reference.offload", True))
    yield from ((words, changed) for words, changed in others if _checked(changed) is not None)


def _for_machine(cfg: Config, host: HostBytes) -> Iterator[tuple[str, Config]]:
    """Yield what takes less of the host's memory: smaller copies for a checkpoint, or nothing moved there."""
    copies = host.by_kind[COPIES]
    left = max((host.limit or 0) - host.counted + copies, host.ranks * LEAST_COPIES)
    if left < copies:
        yield one(cfg, "checkpoint.host_memory_gib", max(math.floor(left / GIB * 100) / 100, 0.01))
    if cfg.reference.offload:
        yield one(cfg, "reference.offload", False)
    if cfg.engine.offload is not Offload.none:
        yield one(cfg, "engine.offload", Offload.none)


def _with_adapter(cfg: Config) -> Iterator[tuple[str, Config]]:
    """Yield LoRA with its own defaults. It needs no second model, unless the reference is another one."""
    words, changed = LORA, dataclasses.replace(cfg, adapter=LoraConfig())
    reference = cfg.reference
    if compares(cfg.loss) and reference.name is ReferenceName.model and reference.path is None:
        also, changed = _compared_with(changed, ReferenceName.adapter)
        words = f"{words} {also}"
    if (other := _checked(changed)) is not None:
        yield words, other


def _compared_with(cfg: Config, name: ReferenceName) -> tuple[str, Config]:
    words = f"reference={name.value}" + " reference.offload=false" * cfg.reference.offload
    return words, with_values(cfg, "reference", name=name, offload=False)


def pairs(cfg: Config, *, engines: bool = True, short: HostBytes | None = None) -> dict[Words, Config]:
    """Return two changes at once. Two of the same key are the later one alone."""
    combined: dict[Words, Config] = {}
    alone = list(singles(cfg, engines=engines, short=short))
    for first, changed in alone:
        for second, twice in singles(changed, engines=engines, short=short):
            words = (second,) if key_of(first) == key_of(second) else (first, second)
            if not any(twice == known for known in (*(each for _, each in alone), *combined.values())):
                combined[words] = twice
    return combined


def key_of(words: str) -> str:
    return words.partition("=")[0]


def _with_ring(cfg: Config, size: int) -> Config:
    replicas, samples = cfg.parallel.world_size // size, cfg.train.micro_batch_size
    batches = cfg.train.batch_size // (samples * replicas) if isinstance(samples, int) else None
    other = with_values(cfg, "parallel", ring_size=size, dp_size=replicas, elastic=False)
    return with_values(other, "train", grad_acc=batches)


def fewer_tokens(cfg: Config) -> Iterator[tuple[str, Config]]:
    """Yield micro-batches of half the tokens, and so on, down to the longest sample."""
    tokens, least = at_once(cfg).tokens, longest_sample(cfg)
    while tokens is not None and tokens > least:
        tokens = max(tokens // 2, least)
        yield one(cfg, BUDGET, tokens)


def _checked(cfg: Config) -> Config | None:
    try:
        check_engine(cfg)
        check_layout(cfg, heads_of(cfg.model))
        check_adapter(cfg)
        check_reference(cfg, here=False)
    except ConfigError:
        return None
    return cfg
