"""Steps of PPO and GRPO on a ring of 2 with 2 replicas, against hand arithmetic from the drawn tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import Tensor

from bench.layouts import RolloutCase
from bench.rollout_tables import config_of
from rlexp.config.schema import Config
from rlexp.training.model.loading import load_config, load_model, load_tokenizer
from rlexp.training.rollout.experience import fetch
from rlexp.training.train.build import build
from rlexp.training.train.step import train_step
from rlexp.training.train.surroundings import UNPROBED
from tests.helpers import textbook, textbook_rl
from tests.helpers.policy_losses import Case, plain_advantages, plain_logged, plain_loss
from tests.helpers.ranks import largest_gap, on_ranks
from tests.helpers.textbook_rl import CRITIC, Answer

LAYOUT = RolloutCase(2, 2, 2, 3, 6)
# float64, sums in another order. Largest differences measured: 1.7e-14 of a tensor's largest element for gradients;
# 3e-16 and 1.2e-15 of an answer's largest value for log-probabilities and advantages.
GRADIENT, LOGPS, ADVANTAGES = 1e-11, 1e-12, 1e-11
TEMPERATURE, PATTERN = 0.8, "[0-9A-Za-z]"
STOPS = "abcdefghijkl"


@dataclasses.dataclass
class Taken:
    """Rank 0's record of each step (weights before it, gradient, row, samples) and of each rollout."""

    weights: list[dict[str, Tensor]]
    gradients: list[dict[str, Tensor]]
    rows: list[dict[str, float]]
    places: list[tuple[int, ...]]
    rollouts: list[list[Any]]  # samples, by place


def policy_steps(place: Any, cfg: Config, steps: int) -> Taken:
    from bench.engines import SpyEngine

    task = build(cfg, around=UNPROBED)
    engine = SpyEngine(task.run.engine)
    task.run = dataclasses.replace(task.run, engine=engine)
    rollouts = task.rollouts
    taken = Taken([], [], [], [], [])
    for step in range(1, steps + 1):
        taken.weights.append({name: weight.detach().clone() for name, weight in engine.weights()})
        taken.rows.append(train_step(task, step))
        taken.places.append(task.batch(step).indices)
        if len(taken.rollouts) == rollouts.number:
            taken.rollouts.append(fetch(rollouts.own_samples, range(rollouts.size), rollouts.host))
    taken.gradients = engine.kept
    task.close()
    return taken


def steps_of(cfg: Config, steps: int) -> Taken:
    return on_ranks(cfg.parallel.world_size, policy_steps, cfg, steps)[0]


def answers_of(cfg: Config, samples: list[Any]) -> list[Answer]:
    """Return the drawn tokens as answers, and decode their texts again."""
    tokenizer = load_tokenizer(cfg.model)
    answers = []
    for sample in samples:
        tokens = sample.answer.tolist()
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        for place, char in enumerate(text):
            if char in STOPS:
                text = text[:place]
                break
        answers.append(Answer(sample.example.prompt.tolist(), tokens, text))
    return answers


def as_leaves(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.double().clone().requires_grad_() for name, weight in weights.items()}


@pytest.fixture(scope="module")
def ppo() -> tuple[Config, Taken]:
    cfg = config_of(LAYOUT, f"rollout.temperature={TEMPERATURE}", "loss.gamma=0.99", "loss.lam=0.9", "loss.beta=0.1",
                    "loss.value_clip=0.01", "optim.max_grad_norm=0", "optim.lr=5e-3")  # fmt: skip
    return cfg, steps_of(cfg, 7)


def model_of(cfg: Config) -> tuple[Any, dict[str, Tensor]]:
    config = load_config(cfg.model, cfg.data.max_length)
    return config, textbook.float64_weights(load_model(cfg.model, config, cfg.data.max_length))


def test_what_ppo_knows_of_its_samples(ppo: tuple[Config, Taken]) -> None:
    """Both rollouts: in the second one the policy has left its reference and the critic's values are not 0."""
    cfg, taken = ppo
    config, reference = model_of(cfg)
    for number, samples in enumerate(taken.rollouts):
        case = known(cfg, config, taken.weights[4 * number], reference, samples)
        advantages, returns = plain_advantages(case, dataclasses.replace(cfg.loss, whiten=False), 0.1)
        for place, sample in enumerate(samples):
            assert sample.score == case.scores[place]
            assert sample.behaviour == pytest.approx(case.old[place], rel=LOGPS)
            assert sample.old == pytest.approx(case.old[place], rel=LOGPS)
            assert sample.reference == pytest.approx(case.reference[place], rel=LOGPS)
            assert sample.values == pytest.approx(case.old_values[place], rel=ADVANTAGES, abs=1e-14)
            assert sample.advantages == pytest.approx(advantages[place], rel=ADVANTAGES, abs=1e-14)
            assert sample.returns == pytest.approx(returns[place], rel=ADVANTAGES, abs=1e-14)
        row = taken.rows[4 * number]
        away = mean([sum(old) - sum(ref) for old, ref in zip(case.old, case.reference, strict=True)])
        for name, expected in {
            "objective/scores": mean(case.scores),
            "objective/kl": away,
            "objective/entropy": mean([-sum(old) for old in case.old]),
            "objective/non_score_reward": -0.1 * away,
            "objective/rlhf_reward": mean(case.scores) - 0.1 * away,
            "response/length": mean([len(old) for old in case.old]),
        }.items():
            assert row[f"train/{name}"] == pytest.approx(expected, rel=1e-11, abs=1e-13), name
    assert taken.rows[4]["train/objective/kl"] > 0.01  # the second rollout differs from the first
    assert max(abs(sample.values).max() for sample in taken.rollouts[1]) > 0.01


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def known(cfg: Config, config: Any, weights: dict[str, Tensor], reference: dict[str, Tensor],
          samples: list[Any], each: int | None = None) -> Case:  # fmt: skip
    answers = answers_of(cfg, samples)
    scores = [textbook_rl.share_of(PATTERN, answer.text) for answer in answers]
    return textbook_rl.known(weights, reference, config, answers, scores, each or len(answers), TEMPERATURE)


@pytest.mark.parametrize("step", [1, 4, 5, 7])
def test_a_step_of_ppo(ppo: tuple[Config, Taken], step: int) -> None:
    """The first step of a rollout, where the ratio is 1, and later steps, where some tokens are clipped."""
    cfg, taken = ppo
    config, reference = model_of(cfg)
    number = (step - 1) // 4
    samples = [taken.rollouts[number][place] for place in taken.places[step - 1]]
    case = known(cfg, config, taken.weights[4 * number], reference, samples)
    gradient = textbook_rl.gradient_of(case, as_leaves(taken.weights[step - 1]), config, answers_of(cfg, samples),
                                       TEMPERATURE, lambda: plain_loss(case, cfg.loss, 0.1, None))  # fmt: skip
    row, loss = taken.rows[step - 1], plain_loss(case, cfg.loss, 0.1, None)
    assert row["train/loss"] == pytest.approx(loss, rel=1e-11, abs=1e-13)
    of_policy = plain_loss(case, dataclasses.replace(cfg.loss, value_coef=0.0), 0.1, None)
    logged = {name: mean(values) for name, values in plain_logged(case, cfg.loss, 0.1).items()}
    logged |= {"loss/policy_avg": of_policy, "loss/value_avg": (loss - of_policy) / cfg.loss.value_coef}
    for name in ("loss/policy_avg", "loss/value_avg", "policy/approxkl_avg", "policy/clipfrac_avg",
                 "policy/entropy_avg", "val/ratio", "val/clipfrac_avg"):  # fmt: skip
        assert row[f"train/{name}"] == pytest.approx(logged[name], rel=1e-10, abs=1e-13), name
    moved = {name: grad for name, grad in gradient.items() if float(grad.abs().max()) > 1e-15}
    still = set(gradient) - set(moved)  # a critic with a head of zeros passes no gradient to its trunk
    assert all(name.startswith(f"{CRITIC}trunk") for name in still) if step == 1 else not still
    assert largest_gap(moved, {name: taken.gradients[step - 1][name] for name in moved}) < GRADIENT
    assert all(float(taken.gradients[step - 1][name].abs().max()) < 1e-15 for name in still)
    if step == 4:
        assert row["train/policy/clipfrac_avg"] > 0.1
        assert row["train/val/clipfrac_avg"] > 0.1


def test_a_step_of_grpo() -> None:
    """Groups of four, in a later step, where ratio and divergence have a gradient."""
    cfg = config_of(LAYOUT, "loss=grpo", "loss.beta=0.2", "rollout.n_samples=4", "rollout.batch_size=4",
                    f"rollout.temperature={TEMPERATURE}", "optim.max_grad_norm=0", "optim.lr=5e-3")  # fmt: skip
    taken = steps_of(cfg, 3)
    config, reference = model_of(cfg)
    case = known(cfg, config, taken.weights[0], reference, taken.rollouts[0], each=4)
    advantages, _ = plain_advantages(case, cfg.loss, 0.2)
    assert max(map(max, advantages)) > 0.5
    for sample, advantage in zip(taken.rollouts[0], advantages, strict=True):
        assert sample.advantages == pytest.approx(advantage, rel=ADVANTAGES, abs=1e-14)
    case.counts = tuple(place in taken.places[2] for place in range(len(advantages)))
    gradient = textbook_rl.gradient_of(case, as_leaves(taken.weights[2]), config,
                                       answers_of(cfg, taken.rollouts[0]), TEMPERATURE,
                                       lambda: plain_loss(case, cfg.loss, 0.2, None))  # fmt: skip
    assert taken.rows[2]["train/loss"] == pytest.approx(plain_loss(case, cfg.loss, 0.2, None), rel=1e-11, abs=1e-13)
    assert taken.rows[2]["train/policy/clipfrac_avg"] > 0
    assert largest_gap(gradient, taken.gradients[2]) < GRADIENT
