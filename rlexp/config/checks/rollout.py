"""Rules across the fields of rollouts."""

from __future__ import annotations

from rlexp.config import sizes
from rlexp.config.checks.rules import Check, refuse_broken
from rlexp.config.checks.vllm import check_vllm
from rlexp.config.schema import Config
from rlexp.config.schema.data import ArithmeticDataConfig
from rlexp.config.schema.rollouts import RolloutEngine, RolloutMode


def _pipelined(cfg: Config) -> bool:
    return cfg.rollout.mode is RolloutMode.pipelined


WITHOUT_SAMPLES = (
    Check("data", lambda cfg: isinstance(cfg.data, ArithmeticDataConfig),
          "has prompts and no answers, and loss={loss.name} is trained on answers. Use data=synthetic or data=jsonl, "
          "or a loss that generates its own samples (loss=ppo, loss=grpo, …)."),
    Check("rollout.mode", lambda cfg: cfg.rollout.sampling_ranks or _pipelined(cfg),
          "loss={loss.name} generates no samples. Leave it out, or use a loss that does (loss=ppo, loss=grpo, …)."),
)  # fmt: skip
OF_SAMPLES = (
    Check("rollout.stop", lambda cfg: "" in cfg.rollout.stop,
          "has an empty text, which would end every answer. Leave it out."),
    Check("rollout.max_new_tokens", lambda cfg: cfg.rollout.max_new_tokens >= cfg.data.max_length,
          "leaves no room for a prompt in data.max_length={data.max_length}, which counts both. Raise data.max_length, "
          "or lower rollout.max_new_tokens."),
    Check("rollout.micro_batch_tokens",
          lambda cfg: cfg.rollout.micro_batch_tokens and cfg.rollout.micro_batch_tokens < cfg.data.max_length,
          "must hold one sample at least, and data.max_length={data.max_length}. Raise the first, or lower the "
          "second."),
    Check("rollout.sampling_ranks", lambda cfg: _pipelined(cfg) and not cfg.rollout.sampling_ranks,
          "rollout.mode=pipelined needs at least 1 rank that only samples. Use rollout.sampling_ranks=1, or "
          "rollout.mode=colocated."),
    Check("rollout.sampling_ranks", lambda cfg: not _pipelined(cfg) and cfg.rollout.sampling_ranks,
          "rollout.mode={rollout.mode.value} needs all ranks to sample and to train. Use rollout.sampling_ranks=0, or "
          "rollout.mode=pipelined."),
    Check("checkpoint.best_metric",
          lambda cfg: cfg.checkpoint.keep_best and cfg.checkpoint.best_metric == "eval/loss",
          "loss={loss.name} has no loss on held-out prompts, so there is no best. Use "
          "checkpoint.best_metric=eval/objective/scores with checkpoint.best=max."),
    Check("data.drop_last", lambda cfg: not cfg.data.drop_last,
          "a rollout always has rollout.batch_size prompts. Leave data.drop_last=true, and choose rollout.batch_size "
          "so that it divides the number of prompts."),
)  # fmt: skip


def minibatches(cfg: Config) -> int:
    if not cfg.loss.draws:
        return 1
    return sizes.minibatches(cfg.rollout.batch_size, cfg.rollout.n_samples, cfg.train.batch_size)


def check_rollout(cfg: Config, *, here: bool = True) -> None:
    if not cfg.loss.draws:
        refuse_broken(WITHOUT_SAMPLES, cfg)
        return
    refuse_broken(OF_SAMPLES, cfg)
    if cfg.rollout.engine is RolloutEngine.vllm:
        check_vllm(cfg, here=here)
