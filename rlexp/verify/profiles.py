"""The plain run: a configuration at its plainest, and the settings that lead from it to the user's own.

Each setting has a plain value: one rank, one sample at a time, nothing fused, shared, packed or computed again. A
window, an adapter or a loss is no setting: it is what is trained.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from rlexp.base.engine_facts import ENGINES
from rlexp.base.errors import ConfigError
from rlexp.base.kernel_needs import NEEDS
from rlexp.config import sizes
from rlexp.config.checks.across_fields import check
from rlexp.config.checks.layout import gives_widths
from rlexp.config.checks.micro_batches import at_once
from rlexp.config.schema import (
    AUTO,
    BackendName,
    Checkpointing,
    Config,
    Cut,
    Device,
    EngineName,
    KernelName,
    LayoutName,
    LoggerConfig,
    LoggerName,
    Offload,
    TransportName,
)
from rlexp.config.schema.models import FusedName, Precision, ReferenceName
from rlexp.config.schema.rollouts import ModelRewardConfig, RewardConfig, RolloutEngine, RolloutMode, SumRewardConfig

if TYPE_CHECKING:
    from rlexp.verify.jobs import VerifyPlan

STEPS, MOST_STEPS = 3, 17  # optimizer steps if nothing else is asked for
WAIT = 180.0  # seconds at most for a collective that a rank never joins


@dataclass(frozen=True)
class Axis:
    """An axis from a configuration to its plainest form: its keys with their plain values, and where its code is."""

    name: str
    plain: Mapping[str, Any]
    folder: str
    needs: tuple[str, ...] = ()  # settings without which it is nothing

    @property
    def key(self) -> str:
        """The key that people type."""
        return next(iter(self.plain))


TRAINING = "rlexp/training/"
# What needs another comes behind it: the halves of the search begin with what is most at work.
SETTINGS: tuple[Axis, ...] = (
    Axis("ring", {"parallel.ring_size": 1}, f"{TRAINING}ring/"),
    Axis("replicas", {"launch.nproc": 1}, f"{TRAINING}engine/"),
    Axis("micro-batches", {"train.micro_batch_size": 1, "train.max_tokens_per_micro_batch": None},
            f"{TRAINING}train/"),
    Axis("packing", {"data.packing": False}, f"{TRAINING}dealer/"),
    Axis("engine", {"engine.name": EngineName.torch, "engine.overrides": {}}, f"{TRAINING}engine/"),
    Axis("kernel", {"parallel.kernel": KernelName.plain}, f"{TRAINING}ring/kernels/"),
    Axis("layout", {"parallel.layout": LayoutName.contiguous, "parallel.ulysses_size": None},
            f"{TRAINING}ring/layouts/", ("ring",)),
    Axis("transport", {"parallel.transport": TransportName.auto}, f"{TRAINING}ring/transports/", ("ring", "layout")),
    Axis("widths", {"parallel.cut": Cut.all}, f"{TRAINING}ring/", ("ring", "layout")),
    Axis("sharing", {"data.share_prefix": False}, f"{TRAINING}dealer/", ("packing",)),
    Axis("checkpointing", {"memory.checkpointing": "none"}, f"{TRAINING}model/"),
    Axis("fused", {"model.fused": FusedName.off}, f"{TRAINING}model/fused/"),
    Axis("reference", {"reference.name": ReferenceName.model}, f"{TRAINING}reference/"),
    Axis("scoring", {"rollout.score_batch_size": 1}, f"{TRAINING}rollout/"),
    Axis("backend", {"parallel.backend": BackendName.native}, f"{TRAINING}ring/layouts/", ("ring",)),
    Axis("offload", {"engine.offload": Offload.none}, f"{TRAINING}engine/", ("engine",)),
    Axis("offloaded reference", {"reference.offload": False}, f"{TRAINING}engine/", ("reference",)),
    Axis("shared GPU", {"launch.ranks_per_gpu": 1}, f"{TRAINING}world/", ("replicas",)),
    Axis("precision", {"train.precision": Precision.fp64}, f"{TRAINING}model/"),
)  # fmt: skip
NAMED = {setting.name: setting for setting in SETTINGS}


def read(cfg: Config, key: str) -> Any:
    group, field = key.split(".")
    return getattr(getattr(cfg, group), field)


def written(cfg: Config, values: Mapping[str, Any]) -> Config:
    """Put values into a configuration, by their keys."""
    for key, value in values.items():
        group, field = key.split(".")
        cfg = dataclasses.replace(cfg, **{group: dataclasses.replace(getattr(cfg, group), **{field: value})})
    return cfg


def differing(cfg: Config) -> list[str]:
    """The settings whose value is not the plain one and that have an effect, in their order."""
    compares = cfg.loss.compares and cfg.reference.name is not ReferenceName.none
    fuses = cfg.launch.device is Device.cuda and cfg.train.precision is Precision.bf16
    at_work = {  # of those that may be without an effect
        "replicas": cfg.parallel.dp_size > 1,
        "checkpointing": cfg.memory.recomputed is not Checkpointing.none,
        "reference": compares and cfg.reference.name is not ReferenceName.model,
        "scoring": cfg.loss.draws,
        "fused": cfg.model.fused is FusedName.always or (cfg.model.fused is FusedName.auto and fuses),
        "sharing": cfg.data.share_prefix is not False and cfg.data.packing,
        "layout": cfg.parallel.ring_size > 1 and cfg.parallel.layout is not LayoutName.contiguous,
        "transport": cfg.parallel.ring_size > 1 and cfg.parallel.transport is not TransportName.auto,
        "widths": gives_widths(cfg),
        "offloaded reference": compares and cfg.reference.offload,
    }
    return [setting.name for setting in SETTINGS
            if at_work.get(setting.name, {key: read(cfg, key) for key in setting.plain} != setting.plain)]  # fmt: skip


def plain(cfg: Config, but: Collection[str] = ()) -> Config:
    """The configuration at its plainest, but for some settings, and those that they need."""
    keep, values = closed(cfg, but), dict[str, Any]()
    for setting in SETTINGS:
        if setting.name not in keep and setting.name != "replicas":
            values |= setting.plain
    from_adapter = cfg.reference.name is ReferenceName.adapter and getattr(cfg.adapter, "path", None) is not None
    if cfg.reference.name is ReferenceName.none or not cfg.loss.compares or from_adapter:  # it has no other form
        values.pop("reference.name", None)
    made, replicas = written(cfg, values), cfg.parallel.dp_size if "replicas" in keep else 1
    if made.train.batch_size % replicas and made.train.micro_batch_size == 1:  # replicas cannot have equally many
        made = written(made, {key: read(cfg, key) for key in NAMED["micro-batches"].plain})
    if not made.data.packing:
        made = written(made, {"train.max_tokens_per_micro_batch": None})
    ring, train = made.parallel.ring_size, made.train
    made = written(made, {
        "train.grad_acc": sizes.grad_acc(train.batch_size, train.micro_batch_size, replicas),
        "launch.nproc": ring * replicas + made.rollout.sampling_ranks,
        "parallel.world_size": ring * replicas, "parallel.dp_size": replicas,
    })  # fmt: skip
    check(made)
    return made


def closed(cfg: Config, names: Collection[str]) -> set[str]:
    """Some settings, and those that they need, as far as the configuration has them."""
    own, keep = set(differing(cfg)), set(names)
    while more := {need for name in keep for need in NAMED[name].needs if need in own} - keep:
        keep |= more
    return keep


# ---- in words ----


def shown(value: Any) -> str:
    value = value.value if isinstance(value, Enum) else value
    return {"True": "true", "False": "false", "None": "null"}.get(str(value), str(value))


def typed(cfg: Config, setting: Axis) -> str:
    """A setting's value, as people type it."""
    if setting.name == "micro-batches" and cfg.train.max_tokens_per_micro_batch is not None:
        return f"{AUTO} (train.max_tokens_per_micro_batch={cfg.train.max_tokens_per_micro_batch})"
    return shown(read(cfg, setting.key))


def in_words(cfg: Config, names: Collection[str]) -> str:
    return " and ".join(f"{NAMED[name].key}={typed(cfg, NAMED[name])}" for name in names)


def described(cfg: Config, name: str) -> dict[str, str]:
    """A setting, with its own value and the plain one."""
    setting = NAMED[name]
    return {"name": name, "key": setting.key, "value": typed(cfg, setting), "plain": shown(setting.plain[setting.key])}


def ways_around(cfg: Config, names: Sequence[str]) -> list[tuple[str, Config]]:
    """Configurations that may agree though the run with these settings does not, each in words."""
    ways = []
    for layout in (LayoutName.ulysses, LayoutName.allgather) if {"ring", "layout", "transport"} & set(names) else ():
        if layout is not cfg.parallel.layout:
            other = {"parallel.layout": layout, "parallel.ulysses_size": None,
                     "parallel.transport": TransportName.auto}  # fmt: skip
            words = f"parallel.layout={layout.value} in place of {cfg.parallel.layout.value}"
            ways.append((words, written(cfg, other)))
    for name in names:
        setting = NAMED[name]
        words = f"{setting.key}={shown(setting.plain[setting.key])} in place of {typed(cfg, setting)}"
        with contextlib.suppress(ConfigError):
            ways.append((words, plain(cfg, [other for other in differing(cfg) if other != name])))
    return ways


# ---- the configurations that a verification runs ----


def contained(cfg: Config) -> Config:
    """The same run without logger and checkpoints, with short waits, and with samples drawn by our own code."""
    launch = dataclasses.replace(cfg.launch, timeout_seconds=min(WAIT, cfg.launch.timeout_seconds))
    checkpoint = dataclasses.replace(cfg.checkpoint, export=False, on_exit=True)
    rollout = dataclasses.replace(cfg.rollout, engine=RolloutEngine.native)
    logger = LoggerConfig(name=LoggerName.none, progress=False)
    return dataclasses.replace(cfg, launch=launch, checkpoint=checkpoint, logger=logger, rollout=rollout)


def generating(cfg: Config) -> Config:
    """The same run with answers by vLLM, as it was configured."""
    return dataclasses.replace(cfg, rollout=dataclasses.replace(cfg.rollout, engine=RolloutEngine.vllm))


def usual_steps(cfg: Config) -> int:
    """Three steps; of samples that the policy draws those up to the first on samples that trained weights have drawn,
    up to a limit."""
    return min(first_step_on_new_weights(cfg), MOST_STEPS) if cfg.loss.draws else STEPS


def first_step_on_new_weights(cfg: Config) -> int:
    """The first step on samples that other weights than the first have drawn: of the second rollout, and of the third
    in a pipelined run."""
    rollouts = 2 if cfg.rollout.mode is RolloutMode.pipelined else 1
    return rollouts * cfg.rollout.epochs * cfg.rollout.minibatches + 1


def exact(cfg: Config) -> Config:
    """The configuration in float64, on our own rings. An engine or kernel that has no float64 becomes the plain one."""
    engine = cfg.engine
    if Precision.fp64.value not in ENGINES[engine.name.value].precisions:
        engine = dataclasses.replace(engine, name=EngineName.torch, offload=Offload.none, overrides={})
    kernel = KernelName.plain if cfg.parallel.kernel.value in NEEDS else cfg.parallel.kernel
    parallel = dataclasses.replace(cfg.parallel, backend=BackendName.native, kernel=kernel)
    train = dataclasses.replace(cfg.train, precision=Precision.fp64)
    return dataclasses.replace(cfg, engine=engine, parallel=parallel, train=train, reward=_exact_reward(cfg.reward))


def _exact_reward(cfg: RewardConfig) -> RewardConfig:
    """The same reward, with reward models that compute in float64."""
    match cfg:
        case ModelRewardConfig():
            return dataclasses.replace(cfg, precision=Precision.fp64)
        case SumRewardConfig():
            terms = {name: {**keys, "precision": Precision.fp64.value} if keys["kind"] == "model" else keys
                     for name, keys in cfg.terms.items()}  # fmt: skip
            return dataclasses.replace(cfg, terms=terms)
        case _:
            return cfg


def bounded(cfg: Config, plan: VerifyPlan) -> Config:
    """Stop the run after the planned steps and evaluate after the last. The schedule stays that of the whole run."""
    every = plan.steps if plan.held_out else None
    train = dataclasses.replace(cfg.train, stop_after=plan.steps, eval_every=every)
    return dataclasses.replace(cfg, train=train, eval=dataclasses.replace(cfg.eval, before_training=False))


def another_micro_batch(cfg: Config) -> Config:
    """The same layout with the next smaller micro-batch size, else the next larger one, else unpacked."""
    share, rest = divmod(cfg.train.batch_size, cfg.parallel.dp_size)
    micro = at_once(cfg).samples or share
    others = [size for size in sizes.divisors(share) if size != micro] if not rest else []
    if others:
        smaller = [size for size in others if size < micro]
        size = max(smaller) if smaller else min(others)
        acc = share // size
        other = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, micro_batch_size=size, grad_acc=acc,
                                                                    max_tokens_per_micro_batch=None))  # fmt: skip
    else:
        data = dataclasses.replace(cfg.data, packing=not cfg.data.packing, share_prefix=None)
        train = dataclasses.replace(cfg.train, max_tokens_per_micro_batch=None)
        other = dataclasses.replace(cfg, data=data, train=train)
    check(other)
    return other
