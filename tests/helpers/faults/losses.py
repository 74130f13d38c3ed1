"""Defects around the losses over pairs: each in the loss that it would hurt, which `verify` must find too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlexp.training.algos.base import Values
from tests.helpers.faults.base import ALGOS, DATA, MIXED, TRAIN, Fault, one
from tests.helpers.faults.plant import Change, Given, Seeing
from tests.helpers.faults.train import scaled

OFFLINE, WHOLE = "train.offline_task:", "train.whole_batch:"
# The losses over pairs, with what each needs to show all of itself.
LOSSES: dict[str, tuple[str, ...]] = {
    "dpo": ("loss.label_smoothing=0.1", "loss.sft_weight=0.3"),
    "dpo_norm": ("loss.wpo=true",),
    "ipo": (),
    "apo_zero": ("loss.ld_alpha=0.3",),
    "apo_down": (),
    "simpo": (),
    "orpo": (),
    "cpo": (),
    "bco_pair": (),
    "mpo": (),
    "hinge": (),
    "robust": (),
    "aot": (),
    "aot_unpaired": (),
    "exo_pair": (),
    "nca_pair": (),
    "sppo_hard": (),
    "discopop": (),
}
ON_ROWS = (*(word for word in MIXED if not word.startswith("train.batch_size=")), "train.batch_size=8")


def of(name: str) -> tuple[str, ...]:
    return (f"loss={name}", *LOSSES[name])


def with_mean_tokens(other: Callable[[Any, Any], float]) -> Change:
    """Give the loss another mean of the tokens: `other(step, held)`."""

    def change(original: Any, self: Any, held: Any, *known: Any) -> Any:
        values, tokens = original(self, held, *known)
        return replace(values, mean_tokens=other(self, held)), tokens

    return change


def of_micro_batch(_step: Any, held: Any) -> float:
    return float(held.tokens["chosen"].mean()) if held.places else 1.0


def of_replica(step: Any, _held: Any) -> float:
    mine = [place for places in step.micro_batches for place in places]
    return float(np.mean([len(step.example(place).answers[0][0]) for place in mine])) if mine else 1.0


def with_all_tokens(original: Any, self: Any, examples: Any) -> Any:
    """Count the answers' tokens as if none were masked."""
    held = original(self, examples)
    sides = zip(self.sides, zip(*(each.answers for each in examples), strict=True), strict=True) if examples else ()
    lengths = {side: torch.tensor([float(len(answer)) for answer, _ in answers]) for side, answers in sides}
    return replace(held, tokens={side: lengths.get(side, tokens).to(tokens) for side, tokens in held.tokens.items()})


def of_another_pair(original: Any, self: Any, examples: Any) -> Any:
    held = original(self, examples)
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
    lengths = [len(answer) for answer, _ in example.answers]
    places = [np.flatnonzero(np.ones(len(answer)) if mask is None else mask) for answer, mask in example.answers]
    return [np.where(each < min(lengths), 1.0, weight) for each in places]


def in_each_loss() -> Iterator[Fault]:
    """A denominator of the micro-batch, and masks that are ignored, in each loss."""
    for name in LOSSES:
        yield one(f"{name}: mean of means", OFFLINE + "OfflineStep.loss", scaled(lambda _, pairs: 1 / max(1, pairs)),
                  "loss", TRAIN, *of(name))  # fmt: skip
        yield one(f"{name}: divided by the replica's pairs", OFFLINE + "OfflineStep.loss",
                  scaled(lambda step, _: step.task.run.world.dp_size), "loss", TRAIN, *of(name))  # fmt: skip
        yield one(f"{name}: masks are ignored", "dataset.packing:pack_sequences",
                  lambda original, *args, **kwargs: original(*args, **kwargs | {"masks": ()}), "data", DATA,
                  *(word for word in of(name) if "ld_alpha" not in word), base=ON_ROWS)  # fmt: skip


# Losses that divide by an answer's tokens, which are not all of its tokens where rows have several turns.
COUNTING = ("dpo_norm", "ipo", "simpo", "orpo")
COUPLED = ("bco_pair", "mpo", "aot", "aot_unpaired")
LOSS_FAULTS = (
    *in_each_loss(),
    *(one(f"{name}: masked tokens are counted", OFFLINE + "OfflineTask.shard", with_all_tokens, "loss", TRAIN,
          *of(name), base=ON_ROWS) for name in COUNTING),
    *(one(f"{name}: the whole batch is the replica's", WHOLE + "gathered", of_the_replica, "loss", TRAIN, *of(name))
      for name in COUPLED),
    *(one(f"{name}: another derivative", WHOLE + "WholeBatch.of_places", of_chosen_answers, "loss", ALGOS, *of(name))
      for name in COUPLED),
    *(one(f"{name}: tokens of the micro-batch", OFFLINE + "OfflineStep.values", with_mean_tokens(of_micro_batch),
          "loss", TRAIN, *of(name)) for name in ("dpo", "orpo", "cpo", "mpo")),
    one("dpo: tokens of the replica", OFFLINE + "OfflineStep.values", with_mean_tokens(of_replica), "loss", TRAIN,
        *of("dpo")),
    one("dpo: the supervised term is not divided", OFFLINE + "OfflineStep.values",
        with_mean_tokens(lambda *_: 1.0), "loss", TRAIN, *of("dpo")),
    one("dpo: the margin of another pair", OFFLINE + "OfflineTask.shard", of_another_pair, "loss", TRAIN, *of("dpo"),
        "loss.margin_weight=0.5"),
    one("bco_pair: the shift starts anew", OFFLINE + "OfflineStep.finish", forgetful, "loss", TRAIN, *of("bco_pair"),
        step=2),
    one("bco_pair: held-out pairs move the shift", OFFLINE + "OfflineTask.evaluate",
        Seeing({"OfflineStep": Given(lambda made, *_: lambda *args, **_kwargs: made(*args))}), "metrics", TRAIN,
        *of("bco_pair"), "data.eval_size=13", "train.eval_every=1"),
    one("apo_zero: the tail counts masked tokens", OFFLINE + "tail_weights", tail_of_all, "log-probabilities", TRAIN,
        *of("apo_zero"), base=ON_ROWS),
)  # fmt: skip
