"""Sampling by a real vLLM: its build for CPUs, in an environment of its own (`make vllm`). Nothing here is a mock."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlexp.config.load import compose_config
from rlexp.launch import run_folder
from rlexp.launch.joining import RankSpec
from rlexp.launch.local import run_ranks
from rlexp.run import job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vllm is installed: make vllm"),
]
SMALL = """loss=grpo reward.rule=length launch.device=cpu engine=torch logger=none checkpoint.export=false
    model.hidden_size=256 data.max_length=160 data.size=32 data.eval_size=4 train.eval_every=3 train.max_steps=3
    train.batch_size=16 rollout.batch_size=4 rollout.n_samples=4 rollout.max_new_tokens=16"""


def rank(spec: RankSpec, run_dir: str) -> None:
    job.train_rank(spec, run_dir)


def ran(place: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run, and return the lines of rollouts.jsonl: checksums of every sample's tokens."""
    cfg = compose_config([*SMALL.split(), *overrides])
    assert run_folder.enter(cfg, place)
    run_ranks(rank, cfg.launch.nproc, (str(place),), log_dir=place, timeout=300)
    return [json.loads(line) for line in (place / "rollouts.jsonl").read_text().splitlines()]


def rows(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]


CASES = {
    "one rank": (),
    "a ring of two": ("parallel=ring2",),
    "pipelined": ("rollout=pipelined", "launch.nproc=2"),
    "everything of sampling": (
        "rollout.temperature=0.7", "rollout.top_k=20", "rollout.top_p=0.9", "rollout.min_p=0.02", "rollout.stop=[e,qq]",
        "rollout.max_new_tokens=40",
    ),
    "an adapter": ("adapter=lora",),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_its_samples_are_those_of_native(tmp_path: Path, case: str) -> None:
    """In float32 no logit of these was so near a border that rounding would choose another token."""
    native = ran(tmp_path / "native", *CASES[case])
    theirs = ran(tmp_path / "vllm", *CASES[case], "rollout.engine=vllm")
    assert len(native) == 3
    assert [each["digests"] for each in theirs] == [each["digests"] for each in native]
    for one, other in zip(rows(tmp_path / "native"), rows(tmp_path / "vllm"), strict=True):
        for name in ("train/loss", "train/grad_norm", "train/objective/scores", "eval/objective/scores"):
            np.testing.assert_allclose(other.get(name, 0.0), one.get(name, 0.0), rtol=1e-4, atol=1e-6)
