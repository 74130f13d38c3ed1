"""Rewards that `verify` asks again: what it computes, what it takes as the run says it, and what it notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from rlexp.config.schema import Config
from rlexp.config.schema.losses import PPOConfig
from rlexp.config.schema.models import Precision
from rlexp.config.schema.rollouts import (
    ModelRewardConfig,
    Overlong,
    PythonRewardConfig,
    RewardConfig,
    RolloutConfig,
    SumRewardConfig,
)
from rlexp.training.dealer.packing import pack_sequences, shard_pack
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.model.reward_model import RewardModel
from rlexp.training.ring.kernels import CpuFlash
from rlexp.training.ring.layouts import get_layout
from rlexp.training.types import Sample
from rlexp.training.world.groups import ALONE
from rlexp.verify.recording import DrawnSample
from rlexp.verify.rewards import Judges
from tests.helpers.rewards import TOKENIZER, built, function, sample, samples

CPU = torch.device("cpu")


def judged(
    cfg: RewardConfig, drawn: Sequence[Sample], by_run: Mapping[str, Sequence[float]], *, tokenizer: Any = TOKENIZER,
    exact: bool = True, **rollout: Any,
) -> tuple[Judges, dict[str, Any]]:  # fmt: skip
    """Ask again about samples of which the run says so much, by term."""
    whole = Config(loss=PPOConfig(), reward=cfg, rollout=RolloutConfig(**rollout))
    judges = Judges(whole, tokenizer, CPU, exact)
    recorded = [DrawnSample(each.place, each.example.index, each.example.prompt, each.example.origin, each.answer, True,
                      each.text, each.behaviour, {name: scores[place] for name, scores in by_run.items()}, 0.0,
                      asked=each.example.text, right=each.example.expected)
                for place, each in enumerate(drawn)]  # fmt: skip
    terms = judges.judged(recorded, [each.text for each in drawn])
    return judges, {name: scores.tolist() for name, scores in terms.items()}


def by_product(cfg: RewardConfig, drawn: Sequence[Sample], of_models: dict[str, list[float]]) -> list[Any]:
    with built(cfg) as rewards:
        rewards.submit(drawn)
        return list(rewards.judged(drawn, of_models))


# ---- functions ----


@pytest.mark.parametrize("name", ["by_row", "by_length", "noisy"])
def test_a_steady_function_is_asked_again(name: str) -> None:
    drawn = [sample("a", answer="a", number=0), sample("b", answer="a", number=1), sample("", number=2)]
    scores = [each.terms["python"] for each in by_product(function(name), drawn, {})]
    judges, terms = judged(function(name), drawn, {"python": [0.0, 7.0, 0.0]})  # as a run that misheard it
    assert (terms, judges.given, judges.notes, judges.again) == ({"python": scores}, {}, {}, {"python"})


@pytest.mark.parametrize(("name", "texts", "timeout", "reason"), [
    ("process", "a b c", 20, " answers otherwise when it is asked again (3 of 3 answers)"),
    ("raises", "a bad", 20, ": for rows.jsonl:2 "),
    ("hangs", "a slow", 0.3, " has not returned in that time for rows.jsonl:1 "),
    ("nowhere", "a b", 20, ": cannot be imported."),
])  # fmt: skip
def test_what_a_function_does_not_say_twice_is_given(name: str, texts: str, timeout: float, reason: str) -> None:
    drawn = samples(*texts.split())
    by_run = [float(place) for place in range(len(drawn))]
    judges, terms = judged(function(name, timeout), drawn, {"python": by_run})
    assert f"tests.helpers.reward_functions:{name}" in judges.given["python"]
    assert reason in judges.given["python"]
    assert (terms, judges.notes, judges.again) == ({"python": by_run}, {}, set())


def test_a_function_that_judges_by_the_company_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found in the current folder. The run asked about two answers at a time."""
    code = """def rank(prompts, answers, rows):
    if len(answers) == 1 and answers[0] == "odd":
        raise ValueError("alone")
    return [sorted(answers).index(answer) for answer in answers]
"""
    (tmp_path / "judges_of_company.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    cfg = PythonRewardConfig(function="judges_of_company:rank", timeout_seconds=20)
    judges, terms = judged(cfg, samples("d", "c", "b", "a"), {"python": [1, 0, 1, 0]})
    assert terms["python"] == [3, 2, 1, 0]
    assert "what it says depends on what it is asked together with" in judges.notes["python"]
    judges, _ = judged(cfg, samples("a", "odd"), {"python": [0, 0]})
    assert judges.notes["python"].startswith("asked about each answer alone: reward.function=judges_of_company:rank")


# ---- reward models, and sums ----


@pytest.mark.parametrize("own_tokens", [False, True], ids=["the policy's tokens", "tokens of its own"])
def test_a_reward_model_is_computed_again(own_tokens: bool, tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(**shape, vocab_size=len(TOKENIZER), num_labels=1, pad_token_id=TOKENIZER.pad_token_id)
    LlamaForSequenceClassification(config).bfloat16().save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    cfg = ModelRewardConfig(path=str(tmp_path), precision=Precision.fp64, max_length=40 if own_tokens else None)
    policy = byte_tokenizer()
    policy.add_tokens(["<more>"] * own_tokens)
    drawn = [sample(answer, prompt) for prompt, answer in (("What now?", "No."), ("a", ""), ("b" * 37, "c" * 10))]
    model, layout = RewardModel(cfg, "reward", policy, Config().data.max_length, CPU), get_layout("zigzag")
    pack = pack_sequences([model.encode(each) for each in drawn], layout.multiple(1))
    scores = model(shard_pack(pack, ALONE, layout, CpuFlash(), 512), pack.end_S).tolist()
    judges, terms = judged(cfg, drawn, {"model": [0.0] * 3}, tokenizer=policy)
    assert terms["model"] == pytest.approx(scores, rel=0, abs=1e-12)
    assert np.std(scores) > 1e-3
    judges, terms = judged(cfg, drawn, {"model": [0.0] * 3}, tokenizer=policy, exact=False)
    assert (terms, judges.given) == ({"model": [0.0] * 3}, {"model": "the run computes in less than float64"})


def test_a_sum_is_judged_term_by_term() -> None:
    cfg = SumRewardConfig(terms={
        "size": {"kind": "python", "weight": -0.3, "function": "tests.helpers.reward_functions:by_length"},
        "dogs": {"kind": "rule", "weight": 2.1, "rule": "count", "text": "dog", "most": 3},
        "judge": {"kind": "model", "weight": 0.7, "path": "nowhere", "precision": "fp32"},
    })  # fmt: skip
    drawn = samples("dog", "dog dog", "a cat")
    made = by_product(cfg, drawn, {"judge": [3.1, -1.7, 0.1]})
    ran = {name: [each.terms[name] for each in made] for name in cfg.terms}
    for overlong, less in ((Overlong.mask, 0.0), (Overlong.penalty, 0.25)):
        judges, terms = judged(cfg, drawn, ran, overlong=overlong, overlong_penalty=0.25)
        assert terms == ran
        assert judges.given == {"judge": "the run computes in less than float64"}
        arrays = {name: np.array(scores) for name, scores in terms.items()}
        assert judges.scored(arrays, [True, False, True]).tolist() == [made[0].score, made[1].score - less,
                                                                       made[2].score]  # fmt: skip
