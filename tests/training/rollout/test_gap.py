"""The gap between the model that generates and the model that is trained, as the rows of a run say it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlexp.base.errors import DrawError
from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec
from rlexp.training.train.build import build
from rlexp.training.train.rollout_supply import ANOTHER_MODEL, BEYOND, gap_of, gap_values, refuse_another_model
from rlexp.training.train.rollout_task import RolloutTask
from rlexp.training.train.surroundings import UNPROBED
from rlexp.training.types import Example, Sample, ScoredSample
from tests.helpers.ranks import on_ranks

SIZE = ("launch.device=cpu", "logger=none", "engine=torch", "train.precision=fp64", "loss=grpo", "reward.rule=length",
        "data.size=16", "data.eval_size=0", "model.layers=1", "rollout.batch_size=4", "rollout.n_samples=2",
        "rollout.max_new_tokens=6", "train.batch_size=8", "parallel=ring1")  # fmt: skip


def sample_with(place: int, old: list[float], behaviour: list[float]) -> ScoredSample:
    prompt = Example(0, np.zeros(1, dtype=np.int32))
    answer = np.zeros(len(old), dtype=np.int32)
    return ScoredSample(place=place, example=prompt, number=place, answer=answer, stopped=True, text="",
                        behaviour=np.array(behaviour), old=np.array(old), score=0.0, terms={}, counts=True)  # fmt: skip


def values_of(samples: list[ScoredSample]) -> dict[str, float]:
    rows = [gap_of(sample) | {"length": float(len(sample.answer))} for sample in samples]
    return gap_values({name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in rows[0]})


def by_hand(samples: list[ScoredSample]) -> dict[str, float]:
    gaps = [[float(a) - float(b) for a, b in zip(s.old, s.behaviour, strict=True)] for s in samples]  # type: ignore[arg-type]
    flat = [gap for each in gaps for gap in each]
    weights, of_answers = [math.exp(gap) for gap in flat], [math.exp(sum(each)) for each in gaps]
    return {
        "sampling/sampling_logp_difference/mean": sum(map(abs, flat)) / len(flat),
        "sampling/sampling_logp_difference/max": max(map(abs, flat)),
        "rollout/gap_beyond": sum(abs(gap) > 0.2 for gap in flat) / len(flat),
        "rollout/effective_tokens": sum(weights) ** 2 / (len(flat) * sum(w * w for w in weights)),
        "rollout/effective_answers": sum(of_answers) ** 2 / (len(gaps) * sum(w * w for w in of_answers)),
    }


def test_values_are_over_all_tokens_not_means_of_answers() -> None:
    assert BEYOND == 0.2
    samples = [sample_with(0, [-1.0, -2.0, -0.5], [-1.1, -1.7, -0.5]), sample_with(1, [-3.0], [-1.0])]
    assert values_of(samples) == pytest.approx(by_hand(samples), rel=1e-14)
    assert values_of(samples)["rollout/gap_beyond"] == 0.5


def test_equal_log_probabilities_have_no_gap_and_lose_no_token() -> None:
    same = [sample_with(place, [-1.0, -4.0], [-1.0, -4.0]) for place in range(3)]
    assert list(values_of(same).values()) == [0, 0, 0, 1, 1]


def test_samples_of_another_model_are_refused() -> None:
    near = values_of([sample_with(0, [-1.0, -2.0], [-1.0 - ANOTHER_MODEL, -2.0 + ANOTHER_MODEL])])
    refuse_another_model(near, 1)
    for far in ([-1.0, -3.1], [-1.0, math.nan]):
        with pytest.raises(DrawError, match=r"rollout 3: .* of vLLM differ by .* vLLM computes something else"):
            refuse_another_model(values_of([sample_with(0, [-1.0, -2.0], far)]), 3)


def test_one_huge_weight_is_all_that_is_left() -> None:
    """Its exponential is no finite number."""
    samples = [sample_with(0, [-1.0, -1.0], [-1.0, -800.0]), sample_with(1, [-1.0, -1.0], [-1.0, -1.0])]
    values = values_of(samples)
    assert values["rollout/effective_tokens"] == pytest.approx(1 / 4)
    assert values["rollout/effective_answers"] == pytest.approx(1 / 2)


class Astray:
    """A source of samples whose generating model is another than the one that is trained."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def draw(self, *args: Any) -> list[Sample]:
        return [replace(each, behaviour=each.behaviour + 0.3 * np.sin(each.place + np.arange(len(each.answer))))
                for each in self.source.draw(*args)]  # fmt: skip


def astray_rank(_spec: RankSpec, cfg: Config) -> tuple[dict[str, float], list[ScoredSample]]:
    task = build(cfg, around=UNPROBED)
    assert isinstance(task, RolloutTask)
    rollouts = task.rollouts
    rollouts.source = Astray(rollouts.source)
    try:
        made = rollouts.ensure(1)
        assert made is not None
        return made.values, [each for part in rollouts.host.gathered(rollouts.own_samples) for each in part]
    finally:
        task.close()


def test_each_rank_says_what_all_samples_say() -> None:
    alone = on_ranks(1, astray_rank, compose_config([*SIZE, "launch.nproc=1"]))[0]
    both = on_ranks(2, astray_rank, compose_config([*SIZE, "launch.nproc=2", "rollout.micro_batch_size=1"]))
    assert both[0][0] == both[1][0]
    wanted = by_hand(both[0][1])
    for values, _ in (alone, both[0]):
        assert {name: values[name] for name in wanted} == pytest.approx(wanted, rel=1e-9)
    assert 0.1 < wanted["rollout/gap_beyond"] < 0.9
