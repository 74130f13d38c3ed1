"""`verify` passes for every loss that draws its own samples, and says what it takes as given. What it finds around them
is in tests/helpers/faults/samples.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, LlamaConfig, LlamaForSequenceClassification

from rlexp.base.errors import ModelError
from rlexp.config.load import compose_config
from rlexp.config.schema import KINDS
from rlexp.training.model.loading import byte_tokenizer
from rlexp.verify.precision import OfStep, of_pairs
from rlexp.verify.profiles import usual_steps
from rlexp.verify.recording import TensorFiles
from rlexp.verify.report import failure_in_words, report
from rlexp.verify.verdict import Verification
from rlexp.verify.verification import verify

LOSSES = [name for name, kind in KINDS["loss"].items() if kind.draws]
# Four prompts with four answers each are a rollout, of two train batches.
SMALL = ("launch.device=cpu", "logger=none", "data.size=12", "data.eval_size=0", "rollout.batch_size=4",
         "rollout.n_samples=4", "rollout.max_new_tokens=12", "train.batch_size=8", "train.micro_batch_size=2",
         "optim.lr=1e-3", "reward.rule=length", "reward.target=20")  # fmt: skip
FP64 = (*SMALL, "train.precision=fp64")


def on(ring: int, replicas: int, mode: str) -> tuple[str, ...]:
    sampling = mode == "pipelined"
    return (f"parallel=ring{ring}", f"launch.nproc={ring * replicas + sampling}", *(["rollout=pipelined"] * sampling))


def verified(*overrides: str, base: Sequence[str] = SMALL, steps: int | None = None) -> Verification:
    return verify(compose_config([*base, *overrides]), steps, lambda _line: None)


def passed(result: Verification) -> None:
    assert result.passed, failure_in_words(result.failure) if result.failure else result.sharding
    assert not result.not_held
    assert result.met is not None
    assert result.met.advantages


# Each loss, ring, number of replicas and mode in `make check`, and all of them together in `make prove`.
CHECKED = {(loss, (1, 2, 4)[n % 3], 1 + n % 2, ("colocated", "pipelined")[n // 2 % 2]) for n, loss in enumerate(LOSSES)}
CHECKED |= {("ppo", 4, 1, "pipelined"), ("gspo", 2, 2, "pipelined")}
ALL = [
    pytest.param(*case, id=f"{case[0]}, ring {case[1]} × {case[2]}, {case[3]}",
                 marks=[pytest.mark.slow, *([] if case in CHECKED else [pytest.mark.prove])])
    for case in product(LOSSES, (1, 2, 4), (1, 2), ("colocated", "pipelined"))
]  # fmt: skip


@pytest.mark.parametrize(("loss", "ring", "replicas", "mode"), ALL)
def test_every_policy_loss_passes(loss: str, ring: int, replicas: int, mode: str) -> None:
    """Rollouts until one is drawn by trained weights, in float64 and in fp32."""
    result = verified(f"loss={loss}", *on(ring, replicas, mode))
    passed(result)
    assert result.met is not None
    rollouts = 3 if mode == "pipelined" else 2
    assert (result.met.rollouts, result.met.samples, result.met.counting) == (rollouts, 16 * rollouts, 16 * rollouts)


def test_ppo_passes_on_two_replicas_of_a_ring() -> None:
    """With masked answers; its other keys are tried below."""
    keys = ("rollout.overlong=mask", "rollout.stop=[a,e]", "rollout.temperature=0.8")
    result = verified("loss=ppo", *keys, *on(2, 2, ""), base=FP64)
    passed(result)
    assert result.met is not None
    assert result.met.counting < result.met.samples


MORE = [
    pytest.param(("loss=ppo", "loss.critic=shared", "rollout.epochs=2", "loss.value_clip=0.01"), id="a shared critic"),
    pytest.param(("loss=ppo", "loss.value_lr=1e-2", "loss.gamma=0.9", "loss.lam=0.8", "optim.weight_decay=0.1",
                  "optim.max_grad_norm=0.1"), id="a rate of the critic's own"),
    # With two letters only 3 of 32 answers end, and none of them has an advantage.
    pytest.param(("loss=grpo", "loss.filter=true", "rollout.overlong=mask", "rollout.stop=[a,e,i,o,n,r,s,t,l,d]",
                  "loss.kl=k2"), id="filtered and masked"),
    pytest.param(("loss=rloo", "loss.entropy=0.01", "loss.kl_target=0.1", "loss.kl_horizon=100", "loss.dual_clip=3"),
                 id="entropy and a target"),
    pytest.param(("loss=reinforce_pp", "rollout.overlong=penalty", "rollout.top_k=5", "rollout.temperature=1.3",
                  "train.eval_every=1", "data.eval_size=10"), id="held-out prompts"),
    pytest.param(("loss=dr_grpo", "data=arithmetic", "reward.rule=arithmetic", "data.size=12", "data.eval_size=0",
                  "reward=sum", "reward.terms.sums={kind: rule, rule: arithmetic}",
                  "reward.terms.brief={kind: rule, rule: length, target: 9, weight: 0.1}"), id="a sum of rules"),
    pytest.param(("loss=gspo", "memory.checkpointing=true", "model.freeze=[*layers.0.*]"), id="frozen and recomputed"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("overrides", MORE)
def test_its_keys_pass(overrides: tuple[str, ...]) -> None:
    words = [word for word in (*FP64, *on(2, 2, ""), *overrides) if "reward=sum" not in overrides or
             not word.startswith(("reward.rule", "reward.target"))]  # fmt: skip
    passed(verified(base=words))


@pytest.mark.slow
@pytest.mark.parametrize("more", ["engine=zero3", "engine=fsdp2", "engine=zero2", "parallel.layout=ulysses"])
def test_engines_and_layouts_pass_in_bf16(more: str) -> None:
    passed(verified("loss=ppo", "train.precision=bf16", more, *on(2, 2, "")))


@pytest.mark.slow
def test_a_reward_model_is_asked_again_in_float64(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                             "num_key_value_heads": 2, "intermediate_size": 64}  # fmt: skip
    config = LlamaConfig(**shape, vocab_size=259, num_labels=1, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    torch.manual_seed(0)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "judge")
    byte_tokenizer().save_pretrained(tmp_path / "judge")
    words = [word for word in SMALL if not word.startswith("reward.")]
    result = verified("loss=grpo", "reward=model", f"reward.path={tmp_path}/judge", *on(2, 2, ""), base=words)
    passed(result)
    assert result.given == {"float64": {}, "fp32": {"model": "the run computes in less than float64"}}


@pytest.mark.slow
def test_a_large_rate_passes() -> None:
    """Adam makes of rounding what would grow over 17 steps: the reference goes on from the run's weights."""
    passed(verified("loss=ppo", "rollout.epochs=8", "optim.lr=0.1", *on(2, 1, ""), base=FP64))


@pytest.mark.slow
def test_scores_without_a_signal_pass() -> None:
    """The loss's derivative is then a difference of log-probabilities that rounding alone makes."""
    words = [word for word in FP64 if not word.startswith(("reward.", "optim.lr="))]
    result = verified("loss=grpo", "loss.beta=0.04", "reward.rule=count", "reward.text=never", "optim.lr=1e-2",
                      *on(2, 1, ""), base=words, steps=4)  # fmt: skip
    assert result.passed, failure_in_words(result.failure) if result.failure else ""
    assert result.met is not None
    assert not result.met.advantages


@pytest.mark.slow
def test_a_divergence_in_the_reward_is_no_signal_of_scores() -> None:
    """Decaying weights leave the reference. Each token has an advantage then, and none comes from a score."""
    words = [word for word in FP64 if not word.startswith("reward.")]
    keys = ("reward.rule=count", "reward.text=never", "optim.weight_decay=0.5", "optim.lr=1e-2")
    result = verified("loss=reinforce_pp", *keys, *on(2, 1, ""), base=words)
    assert result.passed, failure_in_words(result.failure) if result.failure else ""
    assert result.met is not None
    assert not result.met.advantages


@pytest.mark.slow
def test_a_target_of_the_divergence_passes_in_fp32() -> None:
    """The coefficient follows the divergence that the run has measured, in its own precision."""
    passed(verified("loss=rloo", "loss.kl_target=0.0748265", "loss.kl_horizon=20", *on(2, 1, ""), steps=5))


# ---- what is given, and what is not met ----

JUDGES = """
import random

def steady(prompts, answers, rows):
    return [len(answer) / 20 for answer in answers]

def fickle(prompts, answers, rows):
    return [random.random() for _ in answers]

calls = []

def remembers(prompts, answers, rows):
    calls.append(answers)
    return [len(answer) + len(calls) for answer in answers]

def company(prompts, answers, rows):
    return [len(answer) - len(answers[0]) for answer in answers]
"""


@pytest.fixture
def judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "judges_of_verify.py").write_text(JUDGES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


def by(function: str) -> list[str]:
    words = [word for word in FP64 if not word.startswith("reward.")]
    return [*words, "loss=rloo", "reward=python", f"reward.function=judges_of_verify:{function}", *on(2, 1, "")]


@pytest.mark.slow
@pytest.mark.usefixtures("judges")
@pytest.mark.parametrize("function", ["fickle", "remembers"])
def test_a_function_that_answers_otherwise_when_asked_again_is_given(function: str) -> None:
    result = verified(base=by(function), steps=1)
    passed(result)
    told = report(compose_config(by(function)), result)
    said = (
        f"given in float64: reward python, since judges_of_verify:{function} answers otherwise when it is asked again"
    )
    assert said.split() == told[told.index("given in") :].split()[: len(said.split())]
    assert "given: the generated tokens" in told


@pytest.mark.slow
@pytest.mark.usefixtures("judges")
def test_a_steady_function_is_asked_again() -> None:
    result = verified(base=by("steady"), steps=1)
    passed(result)
    assert result.given == {"float64": {}}


@pytest.mark.slow
@pytest.mark.usefixtures("judges")
def test_a_function_that_judges_answers_by_their_company_is_named() -> None:
    result = verified(base=by("company"), steps=1)
    assert result.failure is not None
    assert (result.failure.stage, result.failure.module) == (
        "rewards", "reward.function=judges_of_verify:company"
    )  # fmt: skip
    assert "depends on what it is asked together with" in result.failure.note


@pytest.mark.slow
def test_what_the_steps_have_not_met_is_said() -> None:
    """One step of a rollout in which no answer ends: none counts, and nothing is learned from the scores."""
    words = [*FP64, "loss=grpo", "rollout.overlong=mask", "rollout.stop=[never said]"]
    result = verified(base=words, steps=1)
    assert result.passed
    told = report(compose_config(words), result)
    assert "4 of 12 prompts in 1 rollout, 16 samples of which 0 count" in told
    assert "not met: samples that trained weights have generated, which begin with step 3 (--steps 3)" in told
    assert "not met: an advantage that is not 0" in told
    assert "But nothing was learned from scores in these steps: see 'not met' above." in " ".join(told.split())


@pytest.mark.parametrize(
    ("more", "steps"),
    [((), 3), (("rollout=pipelined", "launch.nproc=2"), 5), (("rollout.epochs=4",), 9), (("rollout.epochs=20",), 17)],
    ids=["a rollout", "two of a pipelined run", "four passes", "no more than 17"],
)
def test_it_takes_the_steps_up_to_samples_that_trained_weights_have_drawn(more: tuple[str, ...], steps: int) -> None:
    assert usual_steps(compose_config([*SMALL, "loss=grpo", *more])) == steps


def test_rounding_of_a_short_answer_counts_less(tmp_path: Path) -> None:
    """An answer of one token may differ by as much as a token. In one of 1,024 tokens it has averaged out."""

    def apart(tokens: int, *, scores: bool = False) -> float:
        said = [{"policy": {(0, "answer"): np.full(tokens, -2.0 * (1 + more))}} for more in (1e-3, 0.0)]
        ours, theirs = (OfStep(1, each, 0.0, 1.0, TensorFiles(tmp_path), scores) for each in said)
        return of_pairs(ours, theirs)

    assert apart(1) == pytest.approx(1e-3 / 32)
    assert apart(256) == pytest.approx(1e-3 / 2)
    assert apart(1024) == pytest.approx(1e-3)
    assert apart(5000) == pytest.approx(1e-3)
    assert apart(1, scores=True) == pytest.approx(1e-3)


# ---- mistakes of the user ----


@pytest.mark.slow
def test_a_model_whose_answers_cannot_be_drawn_is_one_message(tmp_path: Path) -> None:
    config = Lfm2Config(vocab_size=259, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, bos_token_id=0,
                        num_key_value_heads=2, intermediate_size=64, layer_types=["conv", "full_attention"],
                        eos_token_id=1, pad_token_id=2)  # fmt: skip
    Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    said = "Lfm2ForCausalLM: its logits for the next token differ .* It cannot generate answers"
    with pytest.raises(ModelError, match=said):
        verified("loss=grpo", "model=hf", f"model.path={tmp_path}")
