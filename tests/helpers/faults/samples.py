"""Defects around samples that the policy draws: their rewards, scores, groups, advantages and weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlexp.training.algos.advantages import token_weight
from rlexp.training.metrics.meter import REPLICATED
from rlexp.training.reference.models import OfModel
from tests.helpers.faults.base import ALGOS, ENGINE, FP64, METRICS, MODEL, ROLLOUT, TRAIN, Fault, one
from tests.helpers.faults.plant import Change, Given, Seeing

# Two replicas of a ring of 2. A rollout is two train batches of eight samples, gone through once.
ALONE = (*(word for word in FP64 if not word.startswith("data.size=")), "data.size=12", "rollout.batch_size=4",
         "rollout.n_samples=4", "rollout.max_new_tokens=12", "reward.rule=length", "reward.target=20")  # fmt: skip
PPO, GRPO, GSPO = ((*ALONE, f"loss={name}") for name in ("ppo", "grpo", "gspo"))
PIPELINED = ("rollout=pipelined", "launch.nproc=5")
MASKED = ("rollout.overlong=mask", "rollout.stop=[a,e]")
HELD = ("data.eval_size=8", "train.eval_every=1")
SECOND = 3  # the first step on the second rollout


def of_replica(whiten: Callable[..., Any], task: Any, samples: Sequence[Any]) -> Callable[..., Any]:
    """Whiten each replica's samples by themselves."""
    share = -(-len(samples) // task.run.world.dp_size)

    def apart(advantages: Sequence[Any], counts_B: Any) -> list[Any]:
        parts = [slice(first, first + share) for first in range(0, len(samples), share)]
        return [each for part in parts for each in whiten(advantages[part], counts_B[part])]

    return apart


def member_lost(outcomes: Any) -> Callable[..., Any]:
    """Count the last answer to the first prompt among those to the second."""

    def moved(scores_N: Any, kl_N: Any, group_N: Any) -> Any:
        group_N = group_N.clone()
        group_N[group_N == 0] = torch.tensor([*[0] * (int((group_N == 0).sum()) - 1), 1])
        return outcomes(scores_N, kl_N, group_N)

    return moved


def of_micro_batch(original: Any, task: Any, batch: Any, indices: Sequence[int], *more: Any) -> Any:
    """Divide by the tokens of the micro-batch, as if all had as many."""
    counts_S = torch.tensor([batch.samples[index].counts for index in indices])
    lengths_S = torch.tensor([len(batch.samples[index].answer) for index in indices])
    token_B = batch.token_B.clone()
    parts = len(batch.samples) / len(indices)
    token_B[list(indices)] = token_weight(task.loss_cfg.normalize, lengths_S, counts_S, 12) / parts
    return original(task, replace(batch, token_B=token_B), indices, *more)


def kept(field: str, values: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]) -> Change:
    """Keep other values of the scoring pass."""

    def change(original: Any, self: Any, chunk: Any, name: str, arrays: Any) -> Any:
        return original(self, chunk, name, values(chunk, arrays) if name == field else arrays)

    return change


def as_drawn(chunk: Sequence[Any], _: Any) -> list[Any]:
    return [sample.behaviour for sample in chunk]


def one_off(_: Any, arrays: Sequence[Any]) -> list[Any]:
    return [np.roll(each, 1) for each in arrays]


def trained_reference(original: Any, self: Any, run: Any, _reference: Any) -> None:
    original(self, run, OfModel(run.engine))


def all_count(weights: Any) -> Callable[..., Any]:
    return lambda normalize, lengths_B, counts_B, fixed: weights(normalize, lengths_B, torch.ones_like(counts_B), fixed)


def counting_again(original: Any, *args: Any) -> Any:
    return [replace(sample, counts=True) for sample in original(*args)]


def of_the_neighbour(original: Any, self: Any) -> dict[int, float]:
    terms = original(self)
    return dict(zip(terms, [*terms.values()][1:] + [*terms.values()][:1], strict=True))


def without_penalty(original: Any, self: Any, *args: Any) -> Any:
    held, self.cfg = self.cfg, copy.copy(self.cfg)
    self.cfg.overlong_penalty = 0.5
    scored = original(self, *args)
    self.cfg = held
    return scored


def a_step_more(_original: Any, self: Any, step: int) -> int:
    return int((step - 1) // (self.steps_each + 1))


def the_last_prompts(original: Any, self: Any, number: int, prompts: Any, *more: Any) -> Any:
    return original(self, number, [*prompts[1:], *prompts[:1]], *more)


def at_temperature_1(original: Any, logits_BV: Any, uniform_B: Any, cfg: Any) -> Any:
    token_B, _ = original(logits_BV, uniform_B, cfg)
    logps_BV = (logits_BV.double() * cfg.temperature).log_softmax(-1)
    return token_B, logps_BV.gather(-1, token_B.unsqueeze(-1)).squeeze(-1)


def first_weights(original: Any, engine: Any) -> Any:
    """Hand over the weights that were handed over first, again and again."""
    known = vars(engine.policy).setdefault("_handed", [])
    if not known:
        known += [(name, weight.clone()) for name, weight in original(engine)]
    return iter(known)


def values_one_off(original: Any, self: Any, hidden_tE: Any, shard: Any) -> Any:
    return original(self, hidden_tE, shard).roll(1)


def not_shared_out(original: Any, self: Any, held: Any, meter: Any) -> Any:
    return original(self, held, meter) / self.task.run.world.size


def not_summed(_ring_sum: Any) -> Callable[..., Any]:
    return lambda values, _ring: values


def replicated(original: Any, self: Any, name: str, total: Any, count: Any, _spread: Any) -> None:
    original(self, name, total, count, REPLICATED)


def less_their_mean(original: Any, self: Any, ratio: Any, advantages: Any) -> Any:
    return original(self, ratio, advantages - advantages.mean())


def scores_of_rank(outcomes: Any) -> Callable[..., Any]:
    """Center the scores on those of this rank's samples, before any formula."""
    return lambda scores_N, kl_N, group_N: outcomes(scores_N - scores_N[torch.distributed.get_rank()], kl_N, group_N)


def on_fp32(values: Callable[..., Any]) -> Callable[..., Any]:
    """Only where a run computes in float32, which no float64 pass shows."""
    return lambda chunk, arrays: values(chunk, arrays) if chunk and arrays[0].dtype == np.float32 else arrays


def with_attributes(thing: Any, **changes: Any) -> Any:
    other = copy.copy(thing)
    for name, value in changes.items():
        setattr(other, name, value)
    return other


def half_of_them(original: Any, self: Any) -> dict[str, float]:
    held_out = self.examples.held_out
    return original(with_attributes(self, examples=replace(self.examples, held_out=held_out[: len(held_out) // 2])))


def of_training(original: Any, self: Any) -> dict[str, float]:
    train = self.examples.train[: len(self.examples.held_out)]
    return original(with_attributes(self, examples=replace(self.examples, held_out=train)))


def hotter(original: Any, self: Any, requests: Any, rollout: int) -> Any:
    """Draw the answers to held-out prompts, whose rollout has a number of its own, at another temperature."""
    if rollout < 1 << 40:
        return original(self, requests, rollout)
    forward = self._forward
    return original(with_attributes(self, _forward=lambda batch: forward(batch) * 0.5), requests, rollout)


def another_order(original: Any, cfg: Any, seed: int, train_batch: int, step: int) -> Any:
    return original(cfg, seed + 1, train_batch, step)


def uncapped_in(build: Callable[..., Any]) -> Callable[..., Any]:
    return lambda loss_cfg, _cap: build(loss_cfg, None)


def logged_only(original: Any, self: Any, *args: Any) -> None:
    original(self, *args)
    self.wanted = replace(self.wanted, entropy_gradient=False)  # of the models; the loss adds its term


def no_numbers(original: Any, self: Any, lr: float) -> None:
    original(self, lr)
    for _, weight in self.weights():
        if weight.dtype == torch.float32:
            with torch.no_grad():
                weight.view(-1)[0] = math.nan
            return


def sample(name: str, target: str, change: Change | Seeing, stage: str, module: str, *more: str,
           base: tuple[str, ...] = PPO, step: int | None = 1) -> Fault:  # fmt: skip
    return one(name, target, change, stage, module, *more, base=base, step=step)


TASK, SUPPLY, SCORER = "train.rollout_task", "train.rollout_supply:Rollouts", "rollout.scoring:Scorer"
SAMPLE_FAULTS = (
    sample("a reward given to the neighbour", "rollout.rewards.rule:RuleReward.collect", of_the_neighbour, "rewards",
           ROLLOUT),
    sample("half of the penalty", f"{SUPPLY}._collect", without_penalty, "rewards", TRAIN,
           "rollout.overlong=penalty"),
    sample("other prompts than the sampler's", "rollout.sources:Colocated.draw", the_last_prompts, "data", TRAIN),
    sample("a text that ends an answer is passed over", "rollout.sampling:Drawer._stops", lambda *_: False, "data",
           ROLLOUT, "rollout.stop=[a,e]"),
    sample("an optimizer step too many", f"{SUPPLY}.of_step", a_step_more, "data", TRAIN, step=SECOND),
    sample("drawn at another temperature", "rollout.choose:choose", at_temperature_1, "log-probabilities", ROLLOUT,
           "rollout.temperature=0.7"),
    sample("another permutation of a rollout", "train.rollout_supply:samples_of_step", another_order, "data", TRAIN),
    sample("half of the held-out prompts", f"{SUPPLY}.evaluate", half_of_them, "data", TRAIN, *HELD, step=3),
    sample("training prompts in the place of held-out ones", f"{SUPPLY}.evaluate", of_training, "data", TRAIN, *HELD,
           step=3),
    sample("held-out answers at another temperature", "rollout.sampling:Drawer._drawn", hotter, "log-probabilities",
           ROLLOUT, *HELD, step=3),
    sample("drawn by the first weights", "train.build_rollouts:policy_weights", first_weights, "log-probabilities",
           ROLLOUT, *PIPELINED, "train.epochs=1", step=5),
    sample("a stale old log-probability", f"{SCORER}._keep", kept("old", as_drawn), "log-probabilities", ROLLOUT,
           *PIPELINED, step=SECOND),
    sample("a reference that is trained", f"{TASK}:RolloutTask.start", trained_reference, "log-probabilities", TRAIN,
           base=GRPO, step=SECOND),
    sample("a critic's value one token off", f"{SCORER}._keep", kept("values", one_off), "log-probabilities", ROLLOUT,
           step=SECOND),
    sample("the critic reads one token off", "model.policy:Critic.forward", values_one_off, "gradient", MODEL),
    sample("a group that lost a member", f"{SUPPLY}._give_credit", Seeing({"Outcomes": member_lost}), "advantages",
           TRAIN, base=GRPO),
    sample("scores less the rank's own", f"{SUPPLY}._give_credit", Seeing({"Outcomes": scores_of_rank}), "advantages",
           TRAIN),
    sample("a masked answer counts", f"{SUPPLY}._collect", counting_again, "advantages", TRAIN, *MASKED),
    sample("no limit of the importance", f"{TASK}:RolloutTask.__init__", Seeing({"build_policy_loss": uncapped_in}),
           "loss", TRAIN, *PIPELINED, "rollout.importance_cap=1.00001", "optim.lr=1e-2", step=SECOND),
    sample("an entropy without a gradient", f"{TASK}:RolloutTask.__init__", logged_only, "loss", TRAIN,
           "loss.entropy=0.01"),
    sample("whitened over a replica", f"{TASK}:Weighed.of", Seeing({"whiten": Given(of_replica)}), "loss", TRAIN),
    sample("weights by a micro-batch's tokens", f"{TASK}:laid_out", of_micro_batch, "loss", TRAIN, step=2),
    sample("credit on a masked answer", f"{TASK}:Weighed.of", Seeing({"token_weight": all_count}), "loss", TRAIN,
           *MASKED, base=GRPO),
    sample("an answer's ratio of one rank's tokens", f"{TASK}:tokens_of", Seeing({"ring_sum": not_summed}), "loss",
           TRAIN, base=GSPO),
    sample("advantages less their micro-batch's mean", "algos.policy:ClippedRatio.surrogate", less_their_mean, "loss",
           ALGOS),
    sample("not multiplied by the ranks", f"{TASK}:RolloutStep.loss", not_shared_out, "loss", TRAIN, base=GRPO),
    sample("a stale old log-probability in fp32", f"{SCORER}._keep", kept("old", on_fp32(as_drawn)),
           "log-probabilities", ROLLOUT, *PIPELINED, "train.precision=fp32", "optim.lr=1e-2", step=SECOND),
    sample("a critic's value one token off in fp32", f"{SCORER}._keep", kept("values", on_fp32(one_off)),
           "log-probabilities", ROLLOUT, "train.precision=fp32", "optim.lr=1e-2", step=SECOND),
    sample("weights that are no numbers, in fp32", "engine.plain:PlainEngine.step", no_numbers, "log-probabilities",
           ENGINE, "train.precision=fp32", "engine=torch"),
    sample("means of one rank's tokens", "metrics.meter:Meter.add_mean", replicated, "metrics", METRICS),
)  # fmt: skip
