"""Rules across the fields of rollouts."""

from __future__ import annotations

from rlexp.base.errors import ConfigError
from rlexp.config import sizes
from rlexp.config.checks.vllm import check_vllm
from rlexp.config.schema import Config
from rlexp.config.schema.data import ArithmeticDataConfig
from rlexp.config.schema.rollouts import RolloutEngine, RolloutMode


def minibatches(cfg: Config) -> int:
    if not cfg.loss.draws:
        return 1
    return sizes.minibatches(cfg.rollout.batch_size, cfg.rollout.n_samples, cfg.train.batch_size)


def check_rollout(cfg: Config, *, here: bool = True) -> None:
    rollout = cfg.rollout
    if not cfg.loss.draws:
        if isinstance(cfg.data, ArithmeticDataConfig):
            raise ConfigError(
                f"data=arithmetic: has prompts and no answers, and loss={cfg.loss.name} is trained on answers. Use "
                f"data=synthetic or data=jsonl, or a loss that generates its own samples (loss=ppo, loss=grpo, …)."
            )
        if rollout.sampling_ranks or rollout.mode is RolloutMode.pipelined:
            raise ConfigError(
                f"rollout.mode={rollout.mode.value}: loss={cfg.loss.name} generates no samples. Leave it out, or use a "
                f"loss that does (loss=ppo, loss=grpo, …)."
            )
        return
    if "" in rollout.stop:
        raise ConfigError(
            f"rollout.stop={rollout.stop}: has an empty text, which would end every answer. Leave it out."
        )
    _check_lengths(cfg)
    _check_mode(cfg, here=here)
    if cfg.checkpoint.keep_best and cfg.checkpoint.best_metric == "eval/loss":
        raise ConfigError(
            f"checkpoint.best_metric=eval/loss: loss={cfg.loss.name} has no loss on held-out prompts, so there is "
            f"no best. Use checkpoint.best_metric=eval/objective/scores with checkpoint.best=max."
        )
    if not cfg.data.drop_last:
        raise ConfigError(
            "data.drop_last=false: a rollout always has rollout.batch_size prompts. Leave data.drop_last=true, and "
            "choose rollout.batch_size so that it divides the number of prompts."
        )


def _check_lengths(cfg: Config) -> None:
    if cfg.rollout.max_new_tokens >= cfg.data.max_length:
        raise ConfigError(
            f"rollout.max_new_tokens={cfg.rollout.max_new_tokens}: leaves no room for a prompt in data.max_length="
            f"{cfg.data.max_length}, which counts both. Raise data.max_length, or lower rollout.max_new_tokens."
        )
    tokens = cfg.rollout.micro_batch_tokens
    if tokens is not None and tokens < cfg.data.max_length:
        raise ConfigError(
            f"rollout.micro_batch_tokens={tokens}: must hold one sample at least, and data.max_length="
            f"{cfg.data.max_length}. Raise the first, or lower the second."
        )


def _check_mode(cfg: Config, *, here: bool) -> None:
    rollout = cfg.rollout
    pipelined = rollout.mode is RolloutMode.pipelined
    if pipelined != (rollout.sampling_ranks > 0):
        needed = "at least 1 rank that only samples" if pipelined else "all ranks to sample and to train"
        raise ConfigError(
            f"rollout.sampling_ranks={rollout.sampling_ranks}: rollout.mode={rollout.mode.value} needs {needed}. Use "
            f"rollout.sampling_ranks={1 if pipelined else 0}, or "
            f"rollout.mode={'colocated' if pipelined else 'pipelined'}."
        )
    if rollout.engine is RolloutEngine.vllm:
        check_vllm(cfg, here=here)
