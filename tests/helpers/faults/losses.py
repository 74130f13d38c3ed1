"""Defects around the losses on answers that the rows give: each in the loss that it would hurt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlexp.training.algos.base import Values
from tests.helpers.faults.base import DEALER, MIXED, MODEL, TRAIN, Fault, one
from tests.helpers.faults.plant import Change, Seeing
from tests.helpers.faults.train import scaled

ROWS_TASK, WHOLE = "train.rows_task:", "train.whole_batch:"
# The losses, with what each needs to show all of itself. Weights make KTO's divergence larger than 0.
LOSSES: dict[str, tuple[str, ...]] = dict.fromkeys((
    "dpo", "dpo_norm", "ipo", "apo_zero", "apo_down", "simpo", "orpo", "cpo", "bco_pair", "mpo", "hinge", "robust",
    "aot", "aot_unpaired", "exo_pair", "nca_pair", "sppo_hard", "discopop", "kto", "bco", "apo_zero_unpaired",
    "sft", "reward"
), ()) | {
    "dpo": ("loss.label_smoothing=0.1", "loss.sft_weight=0.3"), "dpo_norm": ("loss.wpo=true",),
    "apo_zero": ("loss.ld_alpha=0.3",), "kto": ("loss.desirable_weight=3",), "bco": ("loss.undesirable_weight=2",),
    "reward": ("loss.center=0.1",)
}  # fmt: skip
UNPAIRED = ("kto", "bco", "apo_zero_unpaired")
ON_ROWS = (*(word for word in MIXED if not word.startswith("train.batch_size=")), "train.batch_size=8")


def of(name: str) -> tuple[str, ...]:
    return (f"loss={name}", *LOSSES[name])


def with_mean_tokens(other: Callable[[Any, Any], float]) -> Change:
    """Give the loss another mean of the tokens: `other(step, held)`."""

    def change(original: Any, self: Any, held: Any, *known: Any) -> Any:
        values, tokens = original(self, held, *known)
        return replace(values, mean_tokens=other(self, held)), tokens

    return change


def with_other_entropies(original: Any, *args: Any) -> Any:
    found = original(*args)
    return *found[:3], found[3].roll(1), *found[4:]


def of_micro_batch(_step: Any, held: Any) -> float:
    return float(next(iter(held.tokens.values())).mean()) if held.places else 1.0


def of_replica(step: Any, _held: Any) -> float:
    mine = [place for places in step.micro_batches for place in places]
    return float(np.mean([len(step.examples[place].answers[0]) for place in mine])) if mine else 1.0


def with_all_tokens(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Count the answers' tokens as if none were masked."""
    held = original(self, *args, **kwargs)
    answers_of = zip(*(each.answers for each in held.examples), strict=True)
    sides = zip(self.task.sides, answers_of, strict=True) if held.examples else ()
    lengths = {side: torch.tensor([float(len(answer)) for answer in answers]) for side, answers in sides}
    return replace(held, tokens={side: lengths.get(side, tokens).to(tokens) for side, tokens in held.tokens.items()})


def of_another_pair(original: Any, *args: Any, **kwargs: Any) -> Any:
    held = original(*args, **kwargs)
    return replace(held, margin_E=held.margin_E.roll(1))


def of_the_replica(original: Any, parts: Any, count: int, world: Any) -> Values:
    """Take the examples of this replica for those of all."""
    values = original(parts, count, world)
    mine = [place for places, _ in parts for place in places] or list(range(count))
    at = torch.tensor([place if place in mine else mine[place % len(mine)] for place in range(count)])

    def taken(sides: Any) -> Any:
        return sides and {side: each[at] for side, each in sides.items()}

    return replace(values, logps=taken(values.logps), reference=taken(values.reference), tokens=taken(values.tokens))


def of_chosen_answers(original: Any, self: Any, places: Any) -> Any:
    """Forget the derivatives by the rejected answers."""
    losses, slopes = original(self, places)
    return losses, {side: slope if side == "chosen" else 0 * slope for side, slope in slopes.items()}


def forgetful(original: Any, self: Any, values: Any) -> None:
    original(self, values)
    self.task.carried = {}


def tail_of_all(_original: Any, example: Any, weight: float) -> list[Any]:
    """Weigh tokens by their places among all of the answer's, with those that are masked."""
    lengths = [*map(len, example.answers)]
    places = [np.flatnonzero(np.ones(len(answer)) if mask is None else mask) for answer, mask in example.masked]
    return [np.where(each < min(lengths), 1.0, weight) for each in places]


def in_each_loss() -> Iterator[Fault]:
    """A denominator of the micro-batch, and masks that are ignored, in each loss."""
    for name in LOSSES:
        yield one(f"{name}: mean of means", ROWS_TASK + "RowsStep.loss", scaled(lambda _, pairs: 1 / max(1, pairs)),
                  "loss", TRAIN, *of(name))  # fmt: skip
        yield one(f"{name}: divided by the replica's pairs", ROWS_TASK + "RowsStep.loss",
                  scaled(lambda step, _: step.task.run.world.dp_size), "loss", TRAIN, *of(name))  # fmt: skip
        words = [word for word in of(name) if "ld_alpha" not in word] + ["data.unpair=true"] * (name in UNPAIRED)
        words += ["train.batch_size=16"] * (name == "sft")  # few chosen answers have masks
        if name != "reward":  # which trains on no single token
            yield one(f"{name}: masks are ignored", "dealer.packing:pack_sequences",
                      lambda original, *args, **kwargs: original(*args, **kwargs | {"masks": ()}), "data", DEALER,
                      *words, base=ON_ROWS)  # fmt: skip


def of_next_place(_original: Any, prompts: Any) -> list[int]:
    """Take the answer that comes after, and not the one before."""
    return [(place + 1) % len(prompts) for place in range(len(prompts))]


def of_place_before(_original: Any, prompts: Any) -> list[int]:
    """Take the answer before, even if it is the same prompt's."""
    return [(place - 1) % len(prompts) for place in range(len(prompts))]


def of_this_replica(original: Any, self: Any) -> Any:
    """Take the log-ratios of the replica's own micro-batches for those of the train batch."""
    whole_B = original(self)
    return whole_B[[place for places in self.micro_batches for place in places]]


def without_margins(original: Any, *args: Any, **kwargs: Any) -> Any:
    held = original(*args, **kwargs)
    return replace(held, margin_E=0 * held.margin_E)


def one_token_early(original: Any, shard: Any, end_S: Any) -> Any:
    return original(shard, end_S - 1)


def one_twice(original: Any, self: Any, meter: Any) -> None:
    """Evaluate the last micro-batch once more."""
    self.micro_batches = [*self.micro_batches, self.micro_batches[-1]]
    original(self, meter)


def other_label(original: Any, *args: Any, **kwargs: Any) -> Any:
    held = original(*args, **kwargs)
    return replace(held, label_E=1 - held.label_E)


def of_the_other_answer(original: Any, self: Any, held: Any, *known: Any) -> Any:
    values, tokens = original(self, held, *known)
    return replace(values, scores=dict(zip(values.scores, reversed(values.scores.values()), strict=True))), tokens


def given_no_margins(original: Any, self: Any, held: Any, *known: Any) -> Any:
    values, tokens = original(self, held, *known)
    return replace(values, margin_E=None), tokens


def learned_from(original: Any, *args: Any) -> Any:
    """Show the loss held-out examples as if they were trained on."""
    values, tokens = original(*args)
    return replace(values, held_out=False), tokens


def cut_early(original: Any, shard: Any, pack: Any) -> Any:
    shard = original(shard, pack)
    return replace(shard, ends_n=(shard.ends_n - 1).clamp(min=0))


def of_the_policy_alone(log_ratio: Any) -> Callable[..., Any]:
    return lambda values, side: log_ratio(replace(values, reference={side: 0 * values.reference[side]}), side)


HELD_OUT = ("data.eval_size=13", "train.eval_every=1")


def in_each_task() -> Iterator[Fault]:
    """An example that is counted twice, in each kind of evaluation: with and without a pass that comes first."""
    for name in ("dpo", "kto", "bco", "sft", "reward"):
        yield one(f"{name}: a held-out row counts twice", ROWS_TASK + "RowsStep.evaluate", one_twice, "metrics", TRAIN,
                  *of(name), *HELD_OUT)  # fmt: skip


# Losses that divide by an answer's tokens, which are not all of its tokens where rows have several turns.
COUNTING = ("dpo_norm", "ipo", "simpo", "orpo")
COUPLED = ("bco_pair", "mpo", "aot", "aot_unpaired")
PASS = "train.rows_task:RowsStep."
LOSS_FAULTS = (
    *in_each_loss(),
    *in_each_task(),
    one("kto: the partner after", WHOLE + "partners_of", of_next_place, "data", TRAIN, *of("kto")),
    one("kto: a partner with the same prompt", WHOLE + "partners_of", of_place_before, "data", TRAIN,
        *of("kto"), "data.unpair=true", "data.shuffle=false"),
    one("kto: log-ratios of the replica", PASS + "log_ratios_of_others", of_this_replica, "loss", TRAIN, *of("kto")),
    one("bco: the whole batch is the replica's", WHOLE + "gathered", of_the_replica, "loss", TRAIN, *of("bco")),
    one("kto: mismatched answers without a reference", PASS + "log_ratios_of_others",
        Seeing({"log_ratio": of_the_policy_alone}), "loss", TRAIN, *of("kto")),
    one("reward: scores of the other answer", ROWS_TASK + "RowsStep.values", of_the_other_answer,
        "log-probabilities", TRAIN, *of("reward")),
    one("reward: cut one token early", "train.sequence_sums:with_ends", cut_early, "log-probabilities", TRAIN,
        *of("reward")),
    one("apo_zero_unpaired: good is bad", ROWS_TASK + "RowsStep.packed", other_label, "loss", TRAIN,
        *of("apo_zero_unpaired")),
    one("sft: tokens of the micro-batch", ROWS_TASK + "RowsStep.values", with_mean_tokens(of_micro_batch), "loss",
        TRAIN, *of("sft")),
    one("sft: the entropy of other tokens", "model.fused.plain:read_logits", with_other_entropies,
        "log-probabilities", MODEL, *of("sft")),
    one("reward: read one token early", "train.sequence_sums:here", one_token_early, "log-probabilities", TRAIN,
        *of("reward")),
    one("reward: the loss is given no margins", ROWS_TASK + "RowsStep.values", given_no_margins, "loss", TRAIN,
        *of("reward")),
    one("reward: margins are left out", ROWS_TASK + "RowsStep.packed", without_margins, "loss", TRAIN, *of("reward")),
    *(one(f"{name}: masked tokens are counted", ROWS_TASK + "RowsStep.packed", with_all_tokens, "loss", TRAIN,
          *of(name), base=ON_ROWS) for name in COUNTING),
    *(one(f"{name}: the whole batch is the replica's", WHOLE + "gathered", of_the_replica, "loss", TRAIN, *of(name))
      for name in COUPLED),
    *(one(f"{name}: another derivative", WHOLE + "WholeBatch.of_places", of_chosen_answers, "loss", TRAIN, *of(name))
      for name in COUPLED),
    *(one(f"{name}: tokens of the micro-batch", ROWS_TASK + "RowsStep.values", with_mean_tokens(of_micro_batch),
          "loss", TRAIN, *of(name)) for name in ("dpo", "orpo", "cpo", "mpo")),
    one("dpo: tokens of the replica", ROWS_TASK + "RowsStep.values", with_mean_tokens(of_replica), "loss", TRAIN,
        *of("dpo")),
    one("dpo: the supervised term is not divided", ROWS_TASK + "RowsStep.values",
        with_mean_tokens(lambda *_: 1.0), "loss", TRAIN, *of("dpo")),
    one("dpo: the margin of another pair", ROWS_TASK + "RowsStep.packed", of_another_pair, "loss", TRAIN, *of("dpo"),
        "loss.margin_weight=0.5"),
    one("bco_pair: the shift starts anew", ROWS_TASK + "RowsStep.finish", forgetful, "loss", TRAIN, *of("bco_pair"),
        step=2),
    one("bco_pair: held-out pairs move the shift", ROWS_TASK + "RowsStep.values", learned_from, "metrics", TRAIN,
        *of("bco_pair"), "data.eval_size=13", "train.eval_every=1"),
    one("apo_zero: the tail counts masked tokens", ROWS_TASK + "tail_weights", tail_of_all, "log-probabilities", TRAIN,
        *of("apo_zero"), base=ON_ROWS),
)  # fmt: skip
