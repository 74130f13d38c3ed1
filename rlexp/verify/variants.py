"""The configurations that a verification runs: in float64, with another micro-batch size, and short."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rlexp.base.engine_facts import ENGINES
from rlexp.base.kernel_needs import NEEDS
from rlexp.config import sizes
from rlexp.config.checks.across_fields import check
from rlexp.config.checks.micro_batches import at_once
from rlexp.config.schema import BackendName, Config, EngineName, KernelName, LoggerConfig, LoggerName
from rlexp.config.schema.models import Precision
from rlexp.config.schema.rollouts import ModelRewardConfig, RewardConfig, RolloutEngine, RolloutMode, SumRewardConfig

if TYPE_CHECKING:
    from rlexp.verify.fit_memory import VerifyPlan

STEPS, MOST_STEPS = 3, 17  # optimizer steps if nothing else is asked for
WAIT = 180.0  # seconds at most for a collective that a rank never joins


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
        engine = dataclasses.replace(engine, name=EngineName.torch, offload=type(engine.offload).none, overrides={})
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
