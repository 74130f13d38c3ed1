"""Samples to judge, rewards that are built and closed, and the processes that they leave."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from rlexp.config.schema.rollouts import PythonRewardConfig, RewardConfig
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.rollout.rewards.weighted import Rewards, build_reward
from rlexp.training.types import Example, Sample
from tests.helpers.runs import descendants

TOKENIZER = byte_tokenizer()


def ids(text: str) -> np.ndarray:
    return np.asarray(TOKENIZER(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


def sample(text: str, prompt: str = "ask", answer: str | None = None, number: int = 0) -> Sample:
    asked = Example(number + 10, ids(prompt), origin=f"rows.jsonl:{number + 1}", text=prompt, expected=answer)
    return Sample(place=number, example=asked, number=number, answer=ids(text), stopped=True, text=text,
                  behaviour=np.zeros(len(ids(text))))  # fmt: skip


def samples(*texts: str) -> list[Sample]:
    return [sample(text, number=number) for number, text in enumerate(texts)]


def scored(rewards: Rewards, drawn: Sequence[Sample]) -> list[float]:
    rewards.submit(drawn)
    return [each.score for each in rewards.judged(drawn, {})]


@contextlib.contextmanager
def built(cfg: RewardConfig) -> Iterator[Rewards]:
    before = {*children()}  # of an earlier test, whose ranks may still be ending
    rewards = build_reward(cfg)
    try:
        yield rewards
    finally:
        rewards.close()
    assert {*children()} <= before, "a reward's process outlived it"


def children() -> list[int]:
    """Return the child processes that run reward functions."""
    found = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += [pid] * (b"rewards.worker" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


def function(name: str, timeout: float = 240.0, workers: int = 1) -> PythonRewardConfig:
    return PythonRewardConfig(
        function=f"tests.helpers.reward_functions:{name}", timeout_seconds=timeout, workers=workers
    )  # fmt: skip
