"""Weights without an optimizer, as an evaluation has them: those of the checkpoint, to the bit, and nothing beside."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rlexp.config.load import compose_config
from rlexp.launch.joining import RankSpec
from rlexp.training.checkpoint.restore import load
from rlexp.training.metrics.live_tensors import LiveTensors
from rlexp.training.train.build import build
from rlexp.training.train.step import train_step
from rlexp.training.train.surroundings import UNPROBED
from tests.helpers.ranks import begin_saving, on_ranks

BASE = ("launch.device=cpu", "logger=none", "data.size=16", "data.eval_size=3", "parallel=ring2", "train.batch_size=2",
        "optim.lr=1e-3", "model.freeze=['model.embed_tokens.*', '*.norm.*']")  # fmt: skip
PPO = ("loss=ppo", "loss.critic=own", "reward.text=e", "rollout.max_new_tokens=8", "rollout.batch_size=2",
       "data.max_length=128")  # fmt: skip
KINDS = [("engine=zero3", "engine.offload=all"), ("engine=zero2", "engine.offload=optimizer"), ("engine=fsdp2",),
         ("engine=zero3",), ("engine=torch",), ("engine=zero0",), ("engine=zero1",)]  # fmt: skip


@dataclass(frozen=True)
class Found:
    weights: bool  # whether they are those that were saved, without a critic's
    values: bool  # whether the held-out values are those of the run
    held: float  # the bytes of all tensors, over those of this rank's weights


def frozen_rank(spec: RankSpec, cfgs: Sequence[tuple], folder: str) -> list[Found]:
    """For each pair of configurations: the first takes a step and saves; the second loads that without an optimizer."""
    found = []
    for number, (cfg, then) in enumerate(cfgs):
        task = build(cfg, around=UNPROBED)
        train_step(task, 1)
        reader = begin_saving(task.run, Path(folder) / str(number), 1)()
        weights = {name: weight.clone() for name, weight in task.run.engine.merged()}
        values = task.evaluate(1)
        gc.collect()
        with LiveTensors() as live:
            live.find()
            before = live.held("cpu").live
            frozen = build(then, trains=False, around=UNPROBED)
            gc.collect()
            held = live.held("cpu").live - before
        engine = frozen.run.engine
        frozen.evaluate(0)  # what is gathered for it is not what is read next
        load(engine, reader, 1)
        got = dict(engine.weights())
        same = all(torch.equal(got[name], weight.to(got[name].dtype)) for name, weight in weights.items())
        mine = sum(weight.nbytes for weight in got.values()) / (spec.world_size if engine.sharded else 1)
        found.append(Found(same and got.keys() == weights.keys(), frozen.evaluate(1) == values, held / mine))
    return found


@pytest.mark.parametrize(
    ("kinds", "precision", "loss"),
    [(KINDS[:3], "bf16", PPO),
     *(pytest.param(KINDS, each, ("loss=sft",), marks=pytest.mark.slow) for each in ("fp32", "bf16")),
     pytest.param(KINDS[2:5], "fp32", ("loss=reward",), marks=pytest.mark.slow)],
    ids=["three in bf16", "all in fp32", "all in bf16", "a reward model"],
)  # fmt: skip
def test_an_evaluation_holds_the_weights_of_a_checkpoint_alone(
    kinds: list[tuple[str, ...]], precision: str, loss: tuple[str, ...], tmp_path: Path
) -> None:
    """A PPO run has a critic and a reference, which no answer to a held-out prompt needs."""
    cfgs = [compose_config([*BASE, *loss, f"train.precision={precision}", *kind]) for kind in kinds]
    pairs = [(cfgs[number - 1], cfg) for number, cfg in enumerate(cfgs)]
    for results in on_ranks(2, frozen_rank, pairs, str(tmp_path)):
        for kind, found in zip(kinds, results, strict=True):
            assert found.weights, kind
            assert found.values, kind
            assert found.held < 1.1, kind
