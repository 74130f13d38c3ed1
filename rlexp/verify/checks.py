"""What two recordings of the same steps must agree in: a table, in the order of a step.

data → rewards → log-probabilities → advantages → loss → gradient → optimizer → metrics. The first difference is the one
that is reported: what comes after it follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

DATA, REWARDS, LOGPS, ADVANTAGES = "data", "rewards", "log-probabilities", "advantages"
LOSS, GRADIENT, OPTIMIZER, METRICS = "loss", "gradient", "optimizer", "metrics"
STAGES = (DATA, REWARDS, LOGPS, ADVANTAGES, LOSS, GRADIENT, OPTIMIZER, METRICS)

DATASET, DEALER, RING, MODEL, REFERENCE, ALGOS, ROLLOUT, ENGINE, METER, TRAIN = (
    f"rlexp/training/{name}/"
    for name in ("dataset", "dealer", "ring", "model", "reference", "algos", "rollout", "engine", "metrics", "train")
)


@dataclass(frozen=True)
class Allowed:
    """The largest differences that rounding explains. docs/measured/verify.md says where the numbers come from."""

    logp: float  # of a token, relative to max(1, |logp|); and what follows from it
    loss: float  # relative to the loss
    gradient: float  # ‖a − b‖ / ‖a‖ of a parameter; see `shares`
    weights: float  # largest difference relative to the largest weight of the parameter
    given: float  # values that follow by float64 arithmetic from the run's earlier values
    norm: float  # the gradient's norm, given the gradient
    updated: tuple[float, float]  # the weights, given the gradient: relative to the step, and to the weights
    metric: tuple[float, float]  # relative to the value and so much more: one that is only rounding weighs little
    formula: float  # what the formula of a policy loss makes of given tokens, in the run's own numbers
    kept: float  # values that are kept for each token, in the run's own numbers, relative to the largest


FLOAT64 = Allowed(logp=1e-11, loss=1e-12, gradient=1e-11, weights=1e-12, given=1e-12, norm=1e-12, formula=1e-12,
                  kept=1e-12, updated=(1e-9, 1e-15), metric=(1e-9, 0.01))  # fmt: skip


@dataclass(frozen=True)
class Check:
    """Quantities that must agree: their names (`*` stands for any), and their bound.

    A difference is relative to a value's size, or to `least` if the value is smaller; with `largest`, to the largest
    value of the quantity in its scene; with `sums`, at least to a thousandth of the largest sum of log-probabilities,
    of which the quantity is made. Without a bound two values are to be equal.
    """

    quantity: str
    stage: str
    folder: str
    bound: str | None = None  # the field of `Allowed`
    least: float = 0.1
    largest: bool = False
    sums: bool = False
    gauge: str = ""  # the line of the report's table
    trial: str = ""  # what has to be tried to know the folder (`trials.py`)


def of_model(quantity: str, folder: str = MODEL, gauge: str = "log-probability of a token", trial: str = "") -> Check:
    return Check(quantity, LOGPS, folder, "logp", 1.0, gauge=gauge, trial=trial)


def given(quantity: str, trial: str = "") -> Check:
    """What the loss is given of each token."""
    return Check(quantity, LOSS, TRAIN, "kept", largest=True, gauge="what the loss is given", trial=trial)


def slopes(quantity: str, stage: str, folder: str, trial: str = "") -> Check:
    gauge = "derivatives of the loss, given the tokens"
    return Check(quantity, stage, folder, "formula", largest=True, gauge=gauge, trial=trial)


def of_sums(quantity: str, stage: str, folder: str) -> Check:
    """What the loss makes of sums of log-probabilities."""
    return Check(quantity, stage, folder, "logp", sums=True)


TO_THE_LOSS = ("number of trained tokens", "margin", "label", "mean of the trained tokens", "carried",
               "log-ratio of a mismatched answer")  # fmt: skip
OF_DTYPE, STOPPED = "precision of the parameters", "the run refuses to step"

CHECKS: tuple[Check, ...] = (
    Check("examples", DATA, DATASET),
    Check("total_steps", DATA, DATASET),
    Check("text of an example*", DATA, DATASET),
    Check("tokens that are too many", DATA, DATASET),
    Check("last token of an answer", DATA, DATASET),
    Check("tokens that are trained on", DATA, DATASET),
    Check("turns that are trained on", DATA, DATASET),
    Check("* of the row", DATA, DATASET),
    Check("held-out rows that are trained on", DATA, DATASET),
    # a rollout
    Check("prompts", DATA, DATASET),
    Check("ranks that hold a sample", DATA, ROLLOUT),
    Check("prompt of a sample", DATA, TRAIN),
    Check("prompt's tokens", DATA, DATASET),
    Check("answer", DATA, ROLLOUT),
    Check("tokens of an answer", DATA, ROLLOUT),
    Check("text of an answer", DATA, ROLLOUT),
    Check("end of an answer", DATA, ROLLOUT),
    # a step
    Check("rollout", DATA, TRAIN),
    Check("train batch", DATA, DATASET),
    Check("dealt", DATA, DEALER),
    Check("taken", DATA, TRAIN),
    Check("answers to other prompts", DATA, TRAIN),
    Check("tokens of a sample", DATA, TRAIN),
    Check("places of trained tokens*", DATA, DEALER),
    Check("trained tokens*", DATA, DEALER),
    Check("tokens in no sequence", DATA, DEALER),
    Check("reward *", REWARDS, ROLLOUT, "logp"),
    Check("score", REWARDS, TRAIN, "logp"),
    Check(OF_DTYPE, LOGPS, ENGINE),
    Check("weights at the start", LOGPS, MODEL, trial="start"),
    Check("weights as they compute", LOGPS, ENGINE),
    of_model("policy", trial="policy"),
    of_model("reference", REFERENCE, trial="reference"),
    *(of_model(name) for name in ("likelihoods", "entropies", "hits")),
    of_model("values", gauge="value of a token"),
    of_model("* of mismatched answers", TRAIN),
    of_model("sum of policy", TRAIN, "sum of a sequence's log-probabilities"),
    of_model("sum of *", TRAIN, ""),
    of_model("scored: old", ROLLOUT),
    of_model("scored: behaviour", ROLLOUT),
    of_model("scored: reference", ROLLOUT, trial="reference"),
    of_model("scored: values", ROLLOUT, "value of a token"),
    Check("random number of a generated token", LOGPS, ROLLOUT, "border", 1.0),
    Check("counts", ADVANTAGES, TRAIN),
    Check("coefficient", ADVANTAGES, TRAIN, "logp", 1e-300),
    *(Check(f"outcomes: {name}", ADVANTAGES, TRAIN, "logp") for name in ("scores", "divergences", "prompts")),
    Check("outcomes: credit", ADVANTAGES, ALGOS, "logp"),
    Check("scored: advantages", ADVANTAGES, TRAIN, "logp", largest=True),
    Check("scored: returns", ADVANTAGES, TRAIN, "logp", largest=True),
    # what the loss is given
    *(of_sums(f"{called}{name}", LOSS, TRAIN) for called in ("", "formula: ") for name in TO_THE_LOSS),
    replace(of_model("formula: sum of *", TRAIN, ""), stage=LOSS),
    given("given: advantages", "weighed"),
    given("given: weight", "weighed"),
    given("given: *"),
    given("weight of an answer", "weighed"),
    Check("length of an answer", LOSS, TRAIN),
    # what it makes of it
    of_sums("formula: loss", LOSS, ALGOS),
    of_sums("formula: slope", LOSS, ALGOS),
    slopes("formula: slope by *", LOSS, ALGOS),
    of_sums("loss", LOSS, TRAIN),
    of_sums("slope", LOSS, TRAIN),
    Check("part of the loss", LOSS, TRAIN, "formula", 1.0),
    Check("loss handed to the engine", LOSS, TRAIN, "formula"),
    Check("derivative of the loss handed to the engine", LOSS, TRAIN, "given"),
    Check("mark of the last micro-batch", LOSS, TRAIN),
    Check("loss of the train batch", LOSS, TRAIN, "loss", 1e-300, gauge="loss"),
    slopes("derivative by *", GRADIENT, TRAIN, "chain"),
    Check("gradient", GRADIENT, ENGINE, trial="gradient"),
    Check("the same bits on all ranks", GRADIENT, ENGINE),
    Check("learning rate", OPTIMIZER, TRAIN, "given", 1e-300),
    Check("norm of the gradient", OPTIMIZER, ENGINE, "norm", 1e-300),
    Check("weights, given the gradient", OPTIMIZER, ENGINE),
    of_sums("formula: logged *", METRICS, ALGOS),
    of_sums("formula: weight of *", METRICS, ALGOS),
    of_sums("logged *", METRICS, TRAIN),
    of_sums("weight of *", METRICS, TRAIN),
    Check("mean logits", METRICS, MODEL, "logp", 1.0),
    Check("row", METRICS, METER),
    Check("a metric of the layout", METRICS, TRAIN),
    Check("the same on all ranks", METRICS, TRAIN),
    Check(STOPPED, METRICS, TRAIN),
)  # fmt: skip
# Logged values that the step itself works out; all others are the meter's.
OF_TRAIN = ("train/epoch", "train/total_tokens", "train/tokens", "train/global_step", "train/episode", "step",
            "train/learning_rate", "train/logits/*", "eval/*")  # fmt: skip
