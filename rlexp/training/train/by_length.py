"""The loss and the accuracy of held-out examples by the length of their sequences.

Each part's loss is Σ losses / Σ shares of its examples, where an example's share is what it counts in the loss's
denominator. So the parts' losses, weighted by their shares, add up to the loss of all. Shape letter: E examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlexp.base.wilson import wilson
from rlexp.training.algos.base import Losses
from rlexp.training.metrics.meter import REPLICATED, Meter
from rlexp.training.types import Example, moved

ACCURACIES = ("rewards/accuracies", "mean_token_accuracy")  # the metrics that are an accuracy


@dataclass(frozen=True)
class Buckets:
    """Parts of the held-out data. The bounds belong to the part before them."""

    bounds: Sequence[int]

    @property
    def names(self) -> list[str]:
        if not self.bounds:
            return []
        ends = [0, *self.bounds]
        return [*(f"{one}-{other}" for one, other in zip(ends, self.bounds, strict=False)), f"{self.bounds[-1]}+"]

    def note(self, meter: Meter, examples: Sequence[Example], losses: Losses) -> None:
        places = np.searchsorted(self.bounds, [each.longest() for each in examples], side="left")
        one_E = torch.ones_like(losses.losses_E)
        shares_E = losses.weights_E.get("loss", one_E)
        accuracy = next((name for name in ACCURACIES if name in losses.metrics_E), None)
        for number, name in enumerate(self.names):
            here_E = moved(torch.from_numpy(places == number), one_E.device).to(one_E.dtype)
            meter.add_mean(f"{name}/loss", (here_E * losses.losses_E).sum(), (here_E * shares_E).sum(), REPLICATED)
            meter.add_total(f"{name}/share", (here_E * shares_E).sum(), REPLICATED)
            meter.add_total(f"{name}/examples", here_E.sum(), REPLICATED)
            if accuracy is not None:
                weights_E = here_E * losses.weights_E.get(accuracy, one_E)
                hits = (weights_E * losses.metrics_E[accuracy]).sum()
                meter.add_mean(f"{name}/accuracy", hits, weights_E.sum(), REPLICATED)
                meter.add_total(f"{name}/judged", weights_E.sum(), REPLICATED)

    def completed(self, values: dict[str, float]) -> dict[str, float]:
        """Add each accuracy's interval, and make the shares parts of 1. A part without examples has no loss."""
        whole = sum(values[f"{name}/share"] for name in self.names)
        for name in self.names:
            values[f"{name}/examples"] = int(values[f"{name}/examples"])
            values[f"{name}/share"] /= whole
            judged = values.pop(f"{name}/judged", 0.0)
            if f"{name}/accuracy" in values:
                low, high = wilson(values[f"{name}/accuracy"], judged)
                values |= {f"{name}/accuracy_low": low, f"{name}/accuracy_high": high}
        return values
