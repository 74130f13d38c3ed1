"""DPO (Rafailov et al. 2023, arXiv 2305.18290), the sigmoid loss, with label smoothing as in cDPO."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F

from rlexp.training.algos.base import PairLogps, PairLosses
from rlexp.training.algos.implicit_rewards import implicit_rewards


@dataclass(frozen=True)
class DPO:
    """−log σ(β·margin). The margin is the chosen answer's log-ratio of policy to reference, less the rejected one's.

    With policy = reference the margin is 0 and every loss is ln 2.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    needs_reference: bool = True

    def __call__(self, policy: PairLogps, reference: PairLogps | None) -> PairLosses:
        assert reference is not None
        margin_P = (policy.chosen_P - reference.chosen_P) - (policy.rejected_P - reference.rejected_P)
        logit_P = self.beta * margin_P
        smoothing = self.label_smoothing
        losses_P = -(1 - smoothing) * F.logsigmoid(logit_P) - smoothing * F.logsigmoid(-logit_P)
        return PairLosses(losses_P, implicit_rewards(policy, reference, self.beta))
