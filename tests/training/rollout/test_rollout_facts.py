"""The facts of a rollout that sinks get: its samples by their places, whichever ranks drew them."""

from __future__ import annotations

from typing import Any

from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec
from rlexp.run_files.rollouts_jsonl import digests
from rlexp.training.train.build import build
from rlexp.training.train.rollout_supply import shown
from rlexp.training.train.rollout_task import RolloutTask
from rlexp.training.train.surroundings import UNPROBED
from tests.helpers.ranks import on_ranks

SIZE = ("launch.device=cpu", "logger=none", "engine=torch", "loss=grpo", "reward.rule=length", "data.size=16",
        "data.eval_size=0", "model.layers=1", "rollout.batch_size=4", "rollout.n_samples=2", "rollout.max_new_tokens=6",
        "rollout.show=4", "rollout.show_every=1", "train.batch_size=8", "parallel=ring1", "launch.nproc=2")  # fmt: skip


def told_rank(_spec: RankSpec, cfg: Config) -> dict[str, Any]:
    """Draw a rollout; return what the sinks are told of it, and its samples in the order of the ranks."""
    task = build(cfg, around=UNPROBED)
    assert isinstance(task, RolloutTask)
    try:
        task.rollouts.ensure(1)
        parts = task.rollouts.host.gathered(task.rollouts.own_samples)
        told, again = task.rollouts.facts_of(1), task.rollouts.facts_of(1)
    finally:
        task.close()
    return {"told": told, "again": again, "samples": [sample for part in parts for sample in part]}


def test_samples_are_told_by_their_places_whichever_rank_drew_them() -> None:
    first, second = on_ranks(2, told_rank, compose_config(SIZE))
    samples = first["samples"]
    by_place = sorted(samples, key=lambda sample: sample.place)
    assert [sample.place for sample in by_place] == list(range(8))
    said, in_turn = ([digests(sample.answer) for sample in each] for each in (by_place, samples))
    assert said != in_turn, "the ranks drew the samples in the order of their places: nothing can be out of order"
    told = first["told"]
    assert told.digests == said
    assert told.shown == [shown(sample) for sample in by_place[::2]]
    assert len(told.prompts) == 4
    assert (first["again"], second["told"]) == (None, None)
