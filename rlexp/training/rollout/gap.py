"""How far the model that generates lies from the model that is trained, in the tokens of a rollout.

A token's gap is its log-probability before the first step on the rollout, by the scoring pass, less the one with which
it was drawn. In a colocated run it is rounding; in a pipelined one it is also what training moved since.

Shape letters: N samples of a rollout, L tokens of an answer.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from rlexp.base.errors import DrawError
from rlexp.training.rollout.experience import Table
from rlexp.training.types import ScoredSample

# A token is beyond this gap if its importance weight leaves e^±0.2 (0.82 to 1.22). That is about as far as the usual
# clipping (loss.clip_low and loss.clip_high: 0.2) lets all steps on a rollout move its probability.
BEYOND = 0.2
# On average, and with the weights that are trained. Rounding to bfloat16 made 0.045 of it in SmolLM2-135M.
ANOTHER_MODEL = 0.5
COLUMNS = ("gap_sum", "gap_max", "gap_beyond", "gap_whole", "gap_weights", "gap_squares")


def gap_of(sample: ScoredSample) -> dict[str, float]:
    """Return a sample's row in the rollout's table. Sums of weights are logarithms: a weight may be huge."""
    assert sample.old is not None
    gap_L = sample.old.astype(np.float64) - sample.behaviour
    size_L = np.abs(gap_L)
    weights = [torch.from_numpy(each_L).logsumexp(0) for each_L in (gap_L, 2 * gap_L)]
    sums = (size_L.sum(), size_L.max(), (size_L > BEYOND).sum(), gap_L.sum(), *weights)
    return {name: float(value) for name, value in zip(COLUMNS, sums, strict=True)}


def gap_values(table: Table) -> dict[str, float]:
    """Return the rollout's values: under TRL's names, where it has one, and over all tokens of all samples."""
    tokens = float(table["length"].sum())
    whole_N = table["gap_whole"]
    return {
        "sampling/sampling_logp_difference/mean": float(table["gap_sum"].sum()) / tokens,
        "sampling/sampling_logp_difference/max": float(table["gap_max"].max()),
        "rollout/gap_beyond": float(table["gap_beyond"].sum()) / tokens,
        "rollout/effective_tokens": _effective(table["gap_weights"], table["gap_squares"], tokens),
        "rollout/effective_answers": _effective(whole_N, 2 * whole_N, len(whole_N)),
    }


def refuse_another_model(values: dict[str, float], rollout: int) -> None:
    """Refuse the samples of a rollout if they were drawn from something else than the policy: training on them would
    be training on noise."""
    mean = values["sampling/sampling_logp_difference/mean"]
    if not mean <= ANOTHER_MODEL:
        raise DrawError(
            f"rollout {rollout}: the log-probabilities of the tokens of vLLM differ by {mean:.2g} on average from "
            f"those of the model that is trained, with the same weights, and rounding does not make {ANOTHER_MODEL}. "
            f"vLLM computes something else. `python -m rlexp.verify` with the same words tells possible causes apart. "
            f"Use rollout.engine=native."
        )


def _effective(weights_N: torch.Tensor, squares_N: torch.Tensor, count: float) -> float:
    """Return (Σw)² / (n Σw²), the share of n weights that as many equal ones would have."""
    return min(1.0, math.exp(2 * float(weights_N.logsumexp(0)) - float(squares_N.logsumexp(0))) / count)
