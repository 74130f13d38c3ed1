"""What a loss wants of a whole train batch: a function of all its examples, or its prompts with others' answers.

A loss that is a function of all examples has a derivative by the values of each. Every rank evaluates it on the same
numbers in the same order, so all come to the same result, to the bit. Shape letter: B examples of the train batch, E of
a micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from rlexp.training.algos.base import Loss, Losses, Sides, Values
from rlexp.training.dataset.tokens import fitted
from rlexp.training.types import Example, moved
from rlexp.training.world.groups import World

DIFFERING = ("logps", "reference", "tokens", "of_tokens", "margin_E", "label_E")  # values that differ between examples


@dataclass(frozen=True)
class WholeBatch:
    losses: Losses  # of all examples, in the order of the batch
    slopes: Sides  # derivative of the losses' sum by each answer's log-probabilities, (B,)

    @staticmethod
    def of(loss: Loss, values: Values, device: torch.device) -> WholeBatch:
        """Evaluate the loss in the host's memory; its results are on the device."""
        leaves = {side: logps_B.detach().requires_grad_() for side, logps_B in values.logps.items()}
        with torch.enable_grad():
            losses = loss(replace(values, logps=leaves))
            slopes = torch.autograd.grad(losses.losses_E.sum(), list(leaves.values()), materialize_grads=True)
        metrics_E, weights_E = ({name: moved(each_B, device) for name, each_B in of.items()}
                                for of in (losses.metrics_E, losses.weights_E))  # fmt: skip
        losses_E = moved(losses.losses_E.detach(), device)
        on_device = replace(losses, losses_E=losses_E, metrics_E=metrics_E, weights_E=weights_E)
        by_side = zip(leaves, slopes, strict=True)
        return WholeBatch(on_device, {side: moved(slope_B, device) for side, slope_B in by_side})

    def of_places(self, places: Sequence[int]) -> tuple[Losses, Sides]:
        """Return the losses and derivatives of a micro-batch's examples."""
        at = moved(torch.tensor(places, dtype=torch.int64), self.losses.losses_E.device)
        metrics_E, weights_E = ({name: each_B[at] for name, each_B in of.items()}
                                for of in (self.losses.metrics_E, self.losses.weights_E))  # fmt: skip
        losses = replace(self.losses, losses_E=self.losses.losses_E[at], metrics_E=metrics_E, weights_E=weights_E)
        return losses, {side: slope_B[at] for side, slope_B in self.slopes.items()}


def with_slopes(losses: Losses, slopes: Sides, values: Values) -> Tensor:
    """Return the sum of a micro-batch's losses; its gradient is that of the whole batch's sum by the values."""
    parts = (slopes[side] * (logps_E - logps_E.detach()) for side, logps_E in values.logps.items())
    return sum((each.sum() for each in parts), start=losses.losses_E.sum())


def gathered(parts: Sequence[tuple[Sequence[int], Values]], count: int, world: World) -> Values:
    """Return the values of all examples of the batch, in its order, in the host's memory. A collective call.

    Each place belongs to one rank alone, so the sum over the ranks is exact.
    """
    of_parts = [
        {name: each for name in DIFFERING if (each := getattr(values, name)) is not None} for _, values in parts
    ]
    rows = [torch.stack([each_E.detach() for each_E in tree_leaves(each)]) for each in of_parts]
    table = rows[0].new_zeros(len(rows[0]), count)
    if world.ring.rank == 0:
        for (places, _), row in zip(parts, rows, strict=True):
            table[:, moved(torch.tensor(places, dtype=torch.int64), table.device)] = row
    if world.size > 1:
        dist.all_reduce(table)
    columns: dict[str, Any] = tree_unflatten(table.cpu().unbind(), tree_structure(of_parts[0]))
    return replace(parts[0][1], **columns)


# ---- answers to other prompts, by which a loss estimates how far the policy has moved ----


def mismatched(examples: Sequence[Example], max_length: int, begin: int | None) -> Callable[[int], Example]:
    """Return what makes, for each place of a batch, its prompt with the answer of its partner. The order of the batch
    pairs them, so no layout changes them. `begin` is the token that begins a text."""
    partners = partners_of([example.prompt.tobytes() for example in examples])

    def at(place: int) -> Example:
        own, other = examples[place], examples[partners[place]]
        answer, mask = other.masked[0]
        origin = f"{own.origin} with the answer of {other.origin}"
        return fitted(replace(own, answers=(answer,), masks=(mask,), origin=origin), max_length, begin)

    return at


def partners_of(prompts: Sequence[Hashable]) -> list[int]:
    """Return, for each place of a batch, the place of the answer that its prompt is given.

    It is the place before, round the batch. Where k places in a row have one prompt, it is k places before: so two
    answers to a prompt, a good and a bad one, are given those of the prompt before, each its own. If that has the same
    prompt again, the nearest place before it with another one; if all have one prompt, just the place before.
    """
    count = len(prompts)
    if len(set(prompts)) <= 1:
        return [(place - 1) % count for place in range(count)]
    turn = next(place for place in range(count) if prompts[place] != prompts[place - 1])  # a row of equal ones begins
    begins = [0] * count  # for each place, where its row of equal ones begins
    sizes = Counter[int]()
    for place in range(turn, turn + count):
        here, before = place % count, (place - 1) % count
        begins[here] = begins[before] if prompts[here] == prompts[before] else here
        sizes[begins[here]] += 1
    partners = []
    for place, begin in enumerate(begins):
        other = (place - sizes[begin]) % count
        same = prompts[other] == prompts[place]
        partners.append((begins[other] - 1) % count if same else other)
    return partners
