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
    chain: float  # the derivative by each token, which follows from that by what the loss is given
    formula: float  # what the formula of a policy loss makes of given tokens, in the run's own numbers
    kept: float  # values that are kept for each token, in the run's own numbers, relative to the largest


FLOAT64 = Allowed(logp=1e-11, loss=1e-12, gradient=1e-11, weights=1e-12, given=1e-12, norm=1e-12, chain=1e-12,
                  formula=1e-12, kept=1e-12, updated=(1e-9, 1e-15), metric=(1e-9, 0.01))  # fmt: skip


@dataclass(frozen=True)
class Requirement:
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


def of_model(
    quantity: str, folder: str = MODEL, gauge: str = "log-probability of a token", trial: str = ""
) -> Requirement:
    return Requirement(quantity, LOGPS, folder, "logp", 1.0, gauge=gauge, trial=trial)


def given(quantity: str, trial: str = "") -> Requirement:
    """What the loss is given of each token."""
    return Requirement(quantity, LOSS, TRAIN, "kept", largest=True, gauge="what the loss is given", trial=trial)


def slopes(quantity: str, stage: str, folder: str, trial: str = "") -> Requirement:
    gauge = "derivatives of the loss, given the tokens"
    return Requirement(quantity, stage, folder, "formula", largest=True, gauge=gauge, trial=trial)


def of_sums(quantity: str, stage: str, folder: str) -> Requirement:
    """What the loss makes of sums of log-probabilities."""
    return Requirement(quantity, stage, folder, "logp", sums=True)


TO_THE_LOSS = ("number of trained tokens", "margin", "label", "mean of the trained tokens", "carried",
               "log-ratio of a mismatched answer")  # fmt: skip
DUE = Requirement("rollout", DATA, TRAIN)
OF_DTYPE, STOPPED = "precision of the parameters", "the run refuses to step"

CHECKS: tuple[Requirement, ...] = (
    Requirement("examples", DATA, DATASET),
    Requirement("total_steps", DATA, DATASET),
    Requirement("text of an example*", DATA, DATASET),
    Requirement("tokens that are too many", DATA, DATASET),
    Requirement("last token of an answer", DATA, DATASET),
    Requirement("tokens that are trained on", DATA, DATASET),
    Requirement("turns that are trained on", DATA, DATASET),
    Requirement("* of the row", DATA, DATASET),
    Requirement("held-out rows that are trained on", DATA, DATASET),
    # a rollout
    Requirement("prompts", DATA, DATASET),
    Requirement("ranks that hold a sample", DATA, ROLLOUT),
    Requirement("answer to a held-out prompt", DATA, TRAIN),
    Requirement("prompt of a sample", DATA, TRAIN),
    Requirement("prompt's tokens", DATA, DATASET),
    Requirement("answer", DATA, ROLLOUT),
    Requirement("tokens of an answer", DATA, ROLLOUT),
    Requirement("text of an answer", DATA, ROLLOUT),
    Requirement("end of an answer", DATA, ROLLOUT),
    # a step
    DUE,
    Requirement("steps that are taken", DATA, TRAIN),
    Requirement("train batch", DATA, DATASET),
    Requirement("samples of the train batch", DATA, TRAIN),
    Requirement("dealt", DATA, DEALER),
    Requirement("taken", DATA, TRAIN),
    Requirement("answers to other prompts", DATA, TRAIN),
    Requirement("tokens of a sample", DATA, TRAIN),
    Requirement("places of trained tokens*", DATA, DEALER),
    Requirement("trained tokens*", DATA, DEALER),
    Requirement("tokens in no sequence", DATA, DEALER),
    Requirement("reward *", REWARDS, ROLLOUT, "logp"),
    Requirement("score", REWARDS, TRAIN, "logp"),
    Requirement(OF_DTYPE, LOGPS, ENGINE),
    Requirement("weights at the start", LOGPS, MODEL, trial="start"),
    Requirement("weights as they compute", LOGPS, ENGINE),
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
    Requirement("random number of a generated token", LOGPS, ROLLOUT, "border", 1.0),
    Requirement("counts", ADVANTAGES, TRAIN),
    Requirement("coefficient", ADVANTAGES, TRAIN, "logp", 1e-300),
    *(Requirement(f"outcomes: {name}", ADVANTAGES, TRAIN, "logp") for name in ("scores", "divergences", "prompts")),
    Requirement("outcomes: credit", ADVANTAGES, ALGOS, "logp"),
    Requirement("scored: advantages", ADVANTAGES, TRAIN, "logp", largest=True),
    Requirement("scored: returns", ADVANTAGES, TRAIN, "logp", largest=True),
    # what the loss is given
    *(of_sums(f"{called}{name}", LOSS, TRAIN) for called in ("", "formula: ") for name in TO_THE_LOSS),
    replace(of_model("formula: sum of *", TRAIN, ""), stage=LOSS),
    given("given: advantages", "weighed"),
    given("given: weight", "weighed"),
    given("given: *"),
    given("weight of an answer", "weighed"),
    Requirement("length of an answer", LOSS, TRAIN),
    # what it makes of it
    of_sums("formula: loss", LOSS, ALGOS),
    of_sums("formula: slope", LOSS, ALGOS),
    slopes("formula: slope by *", LOSS, ALGOS),
    of_sums("loss", LOSS, TRAIN),
    of_sums("slope", LOSS, TRAIN),
    Requirement("part of the loss", LOSS, TRAIN, "formula", 1.0),
    Requirement("loss handed to the engine", LOSS, TRAIN, "formula"),
    Requirement("derivative of the loss handed to the engine", LOSS, TRAIN, "given"),
    Requirement("mark of the last micro-batch", LOSS, TRAIN),
    Requirement("loss of the train batch", LOSS, TRAIN, "loss", 1e-300, gauge="loss"),
    replace(slopes("derivative by *", GRADIENT, TRAIN, "chain"), bound="chain"),
    Requirement("gradient", GRADIENT, ENGINE, trial="gradient"),
    Requirement("the same bits on all ranks", GRADIENT, ENGINE),
    Requirement("learning rate", OPTIMIZER, TRAIN, "given", 1e-300),
    Requirement("norm of the gradient", OPTIMIZER, ENGINE, "norm", 1e-300),
    Requirement("weights, given the gradient", OPTIMIZER, ENGINE),
    of_sums("formula: logged *", METRICS, ALGOS),
    of_sums("formula: weight of *", METRICS, ALGOS),
    of_sums("logged *", METRICS, TRAIN),
    of_sums("weight of *", METRICS, TRAIN),
    Requirement("mean logits", METRICS, MODEL, "logp", 1.0),
    Requirement("row", METRICS, METER),
    Requirement("a metric of the layout", METRICS, TRAIN),
    Requirement("the same on all ranks", METRICS, TRAIN),
    Requirement(STOPPED, METRICS, TRAIN),
)  # fmt: skip
# Logged values that the step itself works out; all others are the meter's.
OF_TRAIN = ("train/epoch", "train/total_tokens", "train/tokens", "train/global_step", "train/episode", "step",
            "train/learning_rate", "train/logits/*", "eval/*")  # fmt: skip
