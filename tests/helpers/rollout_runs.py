"""Command lines of small runs that draw their own samples."""

from __future__ import annotations

# Three rollouts of 2 epochs × 2 train batches; the run uses half of the last one.
PIPELINED = (
    *("launch.device=cpu", "logger=none", "logger.progress=false", "engine=torch", "train.precision=fp64", "loss=ppo"),
    *("rollout=pipelined", "reward.rule=regex", "reward.pattern='[a-z]'", "train.batch_size=4"),
    *("rollout.batch_size=4", "rollout.n_samples=2", "rollout.epochs=2", "rollout.max_new_tokens=6", "data.size=16"),
    *("data.eval_size=4", "train.eval_every=5", "train.max_steps=10", "optim.lr=1e-3", "checkpoint.export=false"),
)
