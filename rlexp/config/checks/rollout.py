"""Rules across the fields of rollouts."""

from __future__ import annotations

import importlib.util

from rlexp.base.errors import ConfigError
from rlexp.config import sizes
from rlexp.config.checks.layout import experts_in
from rlexp.config.schema import Collectives, Config, Device
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
                f"data=synthetic or data=jsonl, or a loss that draws its own samples (loss=ppo, loss=grpo, …)."
            )
        if rollout.sampling_ranks or rollout.mode is RolloutMode.pipelined:
            raise ConfigError(
                f"rollout.mode={rollout.mode.value}: loss={cfg.loss.name} draws no samples. Leave it out, or use a "
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
        _check_vllm(cfg, here=here)


def _check_vllm(cfg: Config, *, here: bool) -> None:
    rollout = cfg.rollout
    if cfg.launch.device is Device.cpu:
        raise ConfigError(
            "rollout.engine=vllm: samples on GPUs, and launch.device=cpu. Use launch.device=cuda, or "
            "rollout.engine=native."
        )
    experts = experts_in(cfg.model)
    if experts is not None:
        raise ConfigError(
            f"rollout.engine=vllm: the model is a mixture of experts ({experts}). vLLM rearranges their weights once, "
            f"when it loads them, and cannot be given new ones. Use rollout.engine=native."
        )
    if rollout.mode is RolloutMode.colocated and cfg.launch.carrier is Collectives.staged:
        raise ConfigError(
            f"rollout.engine=vllm: with rollout.mode=colocated it makes its own groups of ranks, which "
            f"launch.collectives=staged has never carried (launch.ranks_per_gpu={cfg.launch.ranks_per_gpu} takes it). "
            f"Use rollout=pipelined, or rollout.engine=native."
        )
    on_a_gpu = min(cfg.launch.ranks_per_gpu, rollout.sampling_ranks or cfg.launch.ranks_per_gpu)
    if on_a_gpu * rollout.vllm_memory >= 1:
        raise ConfigError(
            f"rollout.vllm_memory={rollout.vllm_memory:g}: each rank that samples takes this share of its GPU, and "
            f"launch.ranks_per_gpu={cfg.launch.ranks_per_gpu} puts {on_a_gpu} of them on one. Use less than "
            f"{1 / on_a_gpu:.2g}, or launch.ranks_per_gpu=1."
        )
    if here and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine=vllm: the package vllm is not installed. Install it on a GPU machine with "
            "`pip install vllm`, or use rollout.engine=native."
        )
    if (rollout.top_k, rollout.top_p, rollout.min_p) != (0, 1.0, 0.0):
        raise ConfigError(
            "rollout.engine=vllm: renormalizes log-probabilities after top_k, top_p and min_p; training needs those of "
            "the whole distribution. Leave rollout.top_k=0, top_p=1, min_p=0, or use rollout.engine=native."
        )
