"""Which module a difference names, and what was found right on the way to it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlexp.config.schema import Config
from rlexp.verify.diagnose import APART, ATTENTION, GRADIENT, Alone
from rlexp.verify.findings import Clue, Finding
from rlexp.verify.modules import ALGOS, DATA, DEALER, ENGINE, METRICS, MODEL, RING, ROLLOUT, TRAIN


def module_of(finding: Finding, cfg: Config, alone: Alone | None) -> str:
    """The module of a finding. `alone` is needed only where `needs_trial` says so."""
    fixed = {
        Clue.PAIRS: DATA,
        Clue.SAMPLES: DATA,
        Clue.DRAWN: ROLLOUT,
        Clue.REWARD: ROLLOUT,
        Clue.SCORED: ROLLOUT,
        Clue.BEHAVIOUR: ROLLOUT,
        Clue.OUTCOMES: TRAIN,
        Clue.CREDIT: ALGOS,
        Clue.SPREAD: TRAIN,
        Clue.EXECUTED: TRAIN,
        Clue.TOKENS: DATA,
        Clue.DEALT: DEALER,
        Clue.PACK: DEALER,
        Clue.SHARD: DEALER,
        Clue.PLACED: RING,
        Clue.DTYPE: ENGINE,
        Clue.STALE: ENGINE,
        Clue.OF_TOKENS: MODEL,
        Clue.OTHERS: TRAIN,
        Clue.COUNTS: TRAIN,
        Clue.LOSSES: ALGOS,
        Clue.SLOPES: ALGOS,
        Clue.TAKEN: TRAIN,
        Clue.HANDED: TRAIN,
        Clue.PARTS: ENGINE,
        Clue.RANKS: ENGINE,
        Clue.RATE: TRAIN,
        Clue.NORM: ENGINE,
        Clue.WEIGHTS: ENGINE,
        Clue.VALUES: ALGOS,
        Clue.LOGITS: MODEL,
        Clue.POSITION: TRAIN,
        Clue.ABSENT: TRAIN,
    }
    if finding.module:
        return finding.module
    if finding.clue in fixed:
        return fixed[finding.clue]
    assert alone is not None
    precision = cfg.train.precision
    match finding.clue:
        case Clue.POLICY | Clue.REFERENCE | Clue.START | Clue.TRAINED:
            return RING if alone.tried is None else alone.tried.module
        case Clue.WEIGHED:
            return ALGOS if alone.weighing > 1e-12 else TRAIN
        case Clue.SUMS:
            return RING if alone.ring_sum > 0 else TRAIN
        case Clue.CHAIN:
            return RING if alone.ring_sum_backward > 0 else TRAIN
        case Clue.GRADIENT:
            if alone.ring_sum_backward > 0 or alone.attention_backward > ATTENTION[precision]:
                return RING
            return MODEL if alone.gradient > GRADIENT[precision] else ENGINE
        case Clue.REDUCED:
            return METRICS if alone.meter > 1e-9 else TRAIN
        case _:
            raise AssertionError(finding.clue)


def needs_trial(finding: Finding) -> bool:
    return finding.clue in (*APART, Clue.WEIGHED, Clue.SUMS, Clue.CHAIN, Clue.GRADIENT, Clue.REDUCED)


def module_of_traceback(text: str) -> str | None:
    """The innermost module in a rank's traceback. What all modules call, or lies around them, is passed over."""
    passed_over = r"verify/|launch/|preflight/|base/|training/(?:model/float64|metrics/live_tensors|types)\."
    files = re.findall(r'File "[^"]*/rlexp/([^"]*)"', text)  # after the last /rlexp/: a checkout has that name too
    modules = [
        f"rlexp/{module[0]}" for file in files
        if not re.match(passed_over, file) and (module := re.match(r"(?:training/)?\w+/", file))
    ]  # fmt: skip
    return modules[-1] if modules else None


EVIDENCE: Mapping[Clue, str] = {
    Clue.POLICY: "packs and shards are right",
    Clue.REFERENCE: "the policy is right",
    Clue.SUMS: "each token's log-probability is right",
    Clue.WEIGHED: "the advantages of the rollout are right",
    Clue.CHAIN: "the derivatives of the loss by each sum are right",
    Clue.GRADIENT: "log-probabilities and losses are right",
    Clue.REDUCED: "the values of each pair and token are right",
}


def evidence(finding: Finding, cfg: Config, alone: Alone) -> str:
    """Say which parts were tried alone, and their results."""

    def said(value: float, bound: float) -> str:
        wrong = f"wrong by {value:.1g}" if value < 1e300 else "not a number, or raises an error"
        return "right" if value <= bound else wrong

    precision = cfg.train.precision
    attention = [("attention alone", alone.attention, ATTENTION[precision])]
    tried = {
        Clue.POLICY: attention,
        Clue.REFERENCE: attention,
        Clue.WEIGHED: [("the formula of whitening and weights alone", alone.weighing, 1e-12)],
        Clue.SUMS: [("the ring's sum alone", alone.ring_sum, 0.0)],
        Clue.CHAIN: [("the backward of the ring's sum", alone.ring_sum_backward, 0.0)],
        Clue.GRADIENT: [
            ("the backward of the ring's sum", alone.ring_sum_backward, 0.0),
            ("the backward of attention", alone.attention_backward, ATTENTION[precision]),
            ("the gradient without the engine", alone.gradient, GRADIENT[precision]),
        ],
        Clue.REDUCED: [("the meter alone", alone.meter, 1e-9)],
    }
    answers = [f"{what} is {said(value, bound)}" for what, value, bound in tried.get(finding.clue, [])]
    apart = alone.tried.said if alone.tried is not None else ""
    return "; ".join(filter(None, [EVIDENCE.get(finding.clue, ""), *answers, apart]))
