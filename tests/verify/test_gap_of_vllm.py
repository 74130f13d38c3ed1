"""`verify` on answers by a real vLLM: its build for CPUs, in an environment of its own (`make vllm`).

Causes are planted in rlexp's side of it."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rlexp.config.load import compose_config
from rlexp.launch.joining import RankSpec
from rlexp.verify import verification
from rlexp.verify.gap import CAUSE, NORMAL, Gap
from rlexp.verify.jobs import run_job, shrunk
from rlexp.verify.profiles import contained, usual_steps
from rlexp.verify.report import as_json, report
from rlexp.verify.verification import Verifier, verify

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vllm is installed: make vllm"),
]
SMALL = """loss=grpo reward.rule=length launch.device=cpu engine=torch logger=none model.hidden_size=256
    data.max_length=160 data.size=32 data.eval_size=0 train.batch_size=16 rollout.batch_size=4 rollout.n_samples=4
    rollout.max_new_tokens=16 rollout.engine=vllm rollout.temperature=0.7 rollout.top_p=0.9 optim.lr=1e-3"""


def stale_rank(spec: RankSpec, target: str, *args: Any) -> Any:
    """Give vLLM the weights once, and never again."""
    from rlexp.training.rollout.vllm.weights import HandOver

    handed_over, hand_over = [], HandOver.__call__

    def once(self: Any, *args: Any) -> None:
        if not handed_over:
            hand_over(self, *args)
        handed_over.append(True)

    with mock.patch.object(HandOver, "__call__", once):
        return run_job(spec, target, *args)


def hot_rank(spec: RankSpec, target: str, *args: Any) -> Any:
    """Let vLLM choose without the temperature."""
    from rlexp.training.rollout.vllm import chooser

    chosen = chooser.chosen_only

    def hot(logits_BV: Any, rows: Any, notes: Any, cfg: Any) -> Any:
        return chosen(logits_BV, rows, notes, dataclasses.replace(cfg, temperature=1.0))

    with mock.patch.object(chooser, "chosen_only", hot):
        return run_job(spec, target, *args)


def gap_of(place: Path, *overrides: str) -> Gap:
    """Verify the gap alone."""
    cfg = contained(compose_config([*SMALL.split(), *overrides]))
    verifier = Verifier(cfg, place, lambda _line: None, vllm=True)
    verifier.plan = verifier.start("the plan", "fit_memory.plan_rank", 1, cfg, usual_steps(cfg), place)[0]
    verifier.cfg = shrunk(cfg, verifier.plan)
    verifier._gap()
    result = verifier.result
    assert result.gap is not None
    assert (result.failure is None) == result.gap.normal
    return result.gap


def test_what_vllm_generates_is_as_configured() -> None:
    """In float32, with the whole verification around it."""
    cfg = compose_config(SMALL.split())
    result = verify(cfg, None, lambda _line: None)
    assert result.passed
    assert result.gap is not None
    assert result.gap.normal
    assert (result.gap.rollout, result.gap.samples, result.gap.strayed) == (2, 16, 0)
    assert result.gap.of_generating < 1e-5
    assert "vllm, normal: its log-probabilities are as configured" in report(cfg, result)
    assert as_json(cfg, result)["gap"]["normal"] is True


@pytest.mark.parametrize("more", [("train.precision=bf16",), ("rollout=pipelined", "launch.nproc=2")])
def test_bf16_and_a_pipelined_run_are_normal(tmp_path: Path, more: tuple[str, ...]) -> None:
    gap = gap_of(tmp_path, *more)
    assert gap.normal
    assert (gap.of_age > 0.1) == ("rollout=pipelined" in more)


@pytest.mark.parametrize(
    ("rank", "cause"), [(stale_rank, "weights after step 0"), (hot_rank, "temperature 1")], ids=["stale", "hot"]
)
def test_what_is_wrong_in_vllm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: Any, cause: str) -> None:
    monkeypatch.setattr(verification, "run_job", rank)
    gap = gap_of(tmp_path)
    assert [side.verdict for side in gap.sides] == [CAUSE, NORMAL]
    assert gap.sides[0].cause == cause
