"""Defects of losses that see the whole train batch: what is gathered for them, and what becomes of the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlexp.training.algos.base import Values
from tests.helpers.faults.base import TRAIN, one
from tests.helpers.faults.plant import Change


def gathered_as(change: Callable[[Values], Values]) -> Change:
    """Change what is gathered, and nothing of what each micro-batch knows."""
    return lambda original, *args: change(original(*args))


def of_the_next(sides: Any) -> Any:
    return {side: each_B.roll(1) for side, each_B in sides.items()}


def with_likelihoods_of_the_next(values: Any) -> Any:
    return replace(values, of_tokens={name: of_the_next(sides) for name, sides in values.of_tokens.items()})


def half_of_the_derivatives(original: Any, losses: Any, slopes: Any, values: Any) -> Any:
    """Return the right sum, whose gradient is half as large as it must be."""
    return original(losses, {side: slope_E / 2 for side, slope_E in slopes.items()}, values)


def in_another_order(original: Any, self: Any, places: Any) -> Any:
    """Hand each example the loss of the example before it in its micro-batch."""
    losses, slopes = original(self, places)
    return replace(losses, losses_E=losses.losses_E.roll(1)), slopes


def with_other_margins(original: Any, self: Any, values: Any, *args: Any) -> Any:
    """Give the loss other margins than the micro-batch has."""
    task, given = self.task, []

    class Other:
        wanted = task.wanted

        def __call__(self, values: Values) -> Any:
            given.append(values)
            assert values.margin_E is not None
            return kept(replace(values, margin_E=2 * values.margin_E))

    kept, task.loss = task.loss, Other()
    try:
        return original(self, values, *args)
    finally:
        task.loss = kept


def in_reverse(original: Any, *args: Any) -> Any:
    """Take the reference's sums, which are known already, in another order of the micro-batches."""
    prepared = original(*args)
    sums = prepared.reference
    return replace(prepared, reference=dict(zip(sums, reversed(sums.values()), strict=True)))


def half_derived(values: Any) -> Any:
    """Return the values with half of their derivative."""
    return values / 2 + values.detach() / 2


WHOLE = "train.whole_batch:"
GATHERED_FAULTS = (
    one("bco_pair: gathered token counts of the next pair", WHOLE + "gathered",
        gathered_as(lambda values: replace(values, tokens=of_the_next(values.tokens))), "loss", TRAIN,
        "loss=bco_pair", "loss.wpo=true"),
    one("bco_pair: gathered likelihoods of the next pair", WHOLE + "gathered",
        gathered_as(with_likelihoods_of_the_next), "loss", TRAIN, "loss=bco_pair", "loss.wpo=true"),
    one("bco: gathered labels of the next answer", WHOLE + "gathered",
        gathered_as(lambda values: replace(values, label_E=values.label_E.roll(1))), "loss", TRAIN, "loss=bco"),
    one("aot: gathered with another mean of the tokens", WHOLE + "gathered",
        gathered_as(lambda values: replace(values, mean_tokens=values.mean_tokens * 2)), "loss", TRAIN, "loss=aot",
        "loss.sft_weight=0.3"),
    one("bco_pair: gathered without what the loss carries", WHOLE + "gathered",
        gathered_as(lambda values: replace(values, carried={})), "loss", TRAIN, "loss=bco_pair", step=2),
    one("aot: half of the derivatives", WHOLE + "with_slopes", half_of_the_derivatives, "loss", TRAIN, "loss=aot"),
    one("aot: losses in another order", WHOLE + "WholeBatch.of_places", in_another_order, "loss", TRAIN, "loss=aot"),
    one("simpo: the loss is given other margins", "train.rows_task:RowsStep.judged", with_other_margins, "loss",
        TRAIN, "loss=simpo", "loss.margin_weight=0.5"),
    one("aot: the reference's sums in another order", "train.rows_task:RowsStep.collected", in_reverse,
        "log-probabilities", TRAIN, "loss=aot"),
    one("a sum hands half of its derivative down", "train.sequence_sums:sum_by_sequence",
        lambda original, values_n, shard: half_derived(original(values_n, shard)), "gradient", TRAIN),
)  # fmt: skip
