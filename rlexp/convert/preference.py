"""The losses over pairs of other trainers, most of which are TRL's: what each is here, alone or in a sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlexp.config.schema import KINDS
from rlexp.config.schema.losses import PreferenceConfig
from rlexp.convert import answers
from rlexp.convert.rules import Conversion, Fate, Rule, worked_out

# Their names, and ours. TRL's `aot_pair` became `aot_unpaired`.
LOSSES = {
    "sigmoid": "dpo", "sigmoid_norm": "dpo_norm", "hinge": "hinge", "ipo": "ipo", "exo_pair": "exo_pair",
    "nca_pair": "nca_pair", "robust": "robust", "bco_pair": "bco_pair", "sppo_hard": "sppo_hard", "aot": "aot",
    "aot_unpaired": "aot_unpaired", "aot_pair": "aot_unpaired", "apo_zero": "apo_zero", "apo_down": "apo_down",
    "discopop": "discopop",
}  # fmt: skip
SFT = "sft"
TYPES = "several types are loss=mpo with loss.terms; sft alone is loss=sft"
ONE_LOSS = "there is one loss"
SMOOTHING = "TRL ignores it for sigmoid and sigmoid_norm"
OTHERS = "it changes nothing with this loss"
NOT_YET = "loss=kto_pair"  # an option of ours that would have what is refused
SMOOTHED = frozenset({"robust", "exo_pair", "aot", "aot_unpaired"})  # with label_smoothing in TRL since 0.29
IGNORED = (
    "it changes nothing there with this loss: 0 is taken. In TRL before 0.29 it meant loss.label_smoothing with sigmoid"
)
OF_MICRO_BATCHES = (
    "Supervised term: theirs is a mean over the tokens of each micro-batch, ours over the chosen answers' tokens of "
    "the train batch (loss.sft_weight)."
)
OF_ANSWERS = (
    "Supervised term: theirs is a mean over each answer's tokens, ours over the chosen answers' tokens of the train "
    "batch (loss.sft_weight)."
)
OF_PROMPTS = (
    "ORPO: the likelihood in theirs counts the tokens of the prompt too, ours those of the chosen answer alone "
    "(loss.sft_weight)."
)


@dataclass(frozen=True)
class Names:
    """The names of their arguments."""

    loss: str = "loss_type"
    weights: str = "loss_weights"  # empty: there is none
    smoothing: str = "label_smoothing"
    tau: str = "discopop_tau"
    weighting: str = "use_weighting"
    lengths: str = "ld_alpha"
    likelihood: str = "rpo_alpha"
    beta: str = "beta"


@dataclass
class Asked:
    """The losses that a file asks for, by our names."""

    weights: dict[str, float] = field(default_factory=dict)
    likelihood: float = 0.0

    def add(self, loss: str, weight: float) -> None:
        self.weights[loss] = self.weights.get(loss, 0.0) + weight


def rules(names: Names, of: str, more: str = "") -> Sequence[Rule]:
    """Return the rules of these arguments. `more` are trainers whose labels are smoothed too."""
    rest = {names.lengths: "ld_alpha", names.tau: "tau", names.weighting: "wpo", names.likelihood: "sft_weight"}
    return (
        worked_out(names.loss, "loss, loss.normalize, loss.shift", TYPES, "it is said elsewhere", of=of, until=NOT_YET),
        worked_out(names.weights, "loss.terms, loss.sft_weight", "", ONE_LOSS, of=of),
        worked_out(names.smoothing, "loss.label_smoothing", SMOOTHING, OTHERS, of=f"{of} {more}"),
        *(worked_out(name, f"loss.{key}", "", OTHERS, of=of) for name, key in rest.items() if name),
    )


def of_cpo_rules(of: str, told: str = "") -> Sequence[Rule]:
    """Return the rules of TRL's CPO, which has SimPO too."""
    return (
        worked_out(
            "loss_type", "loss=cpo or loss=simpo", "rlexp's hinge and ipo have a reference", "it is said", of=of
        ),
        worked_out("cpo_alpha", "loss.sft_weight", told, of=of),
        worked_out("simpo_gamma", "loss.gamma", "", OTHERS, of=of),
    )


def choose(
    conv: Conversion, names: Names, *, types: Sequence[str] = (), smoothed: frozenset[str] = SMOOTHED,
    told: str = OF_MICRO_BATCHES, by: str = "", bco: str = "",
) -> None:  # fmt: skip
    """Set the loss, and the keys that belong to it.

    `types` are given where another argument (`by`) says the loss. `smoothed` are our losses to which their label
    smoothing applies. `bco` names LLaMA-Factory's weight of a second term.
    """
    origins = (by,) if types else (names.loss, names.weights)
    asked = _asked(conv, names, types)
    if not asked.weights:
        _supervised(conv, names, asked.likelihood, *origins)
        return
    likelihood_by = [names.loss, names.weights] if asked.likelihood else []
    if (more := _number(conv, names.likelihood, 0.0)) or not asked.likelihood:
        likelihood_by.append(names.likelihood)
    asked.likelihood += more
    second = _number(conv, bco, 0.0)
    if second:
        asked.weights = {loss: weight / (1 + second) for loss, weight in asked.weights.items()}
        asked.add("bco_pair", second / (1 + second))
        origins = (*origins, bco)
    put_likelihood(conv, asked.likelihood, told, *likelihood_by)
    smoothing = _number(conv, names.smoothing, 0.0)
    if smoothing and not smoothed & asked.weights.keys():
        conv.tell(Fate.OTHER, names.smoothing, IGNORED)
    shift = "mean" if second else "none"
    own = {loss: _keys(conv, names, loss, smoothing if loss in smoothed else 0.0, shift) for loss in asked.weights}
    if [*asked.weights.values()] == [1.0]:
        (loss,) = asked.weights
        conv.choose("loss", loss, *origins)
        for leaf, (value, origin) in own[loss].items():
            conv.put(f"loss.{leaf}", value, origin, why=WHY.get(leaf, ""))
    else:
        loss = "mpo"
        conv.choose("loss", loss, *origins)
        used = {origin: None for keys in own.values() for _, origin in keys.values()}
        beta = conv.values["loss.beta"].value if "loss.beta" in conv.values else _number(conv, names.beta, 0.1)
        scale = {name: {"beta": beta} if kind_of(name).own_beta() else {} for name in asked.weights}
        terms = [{"loss": name, "weight": weight, **scale[name],
                  **{leaf: value for leaf, (value, _) in own[name].items()}}
                 for name, weight in asked.weights.items()]  # fmt: skip
        conv.put("loss.terms", terms, *origins, *used)
    _modifiers(conv, names, loss, asked.likelihood)


def _supervised(conv: Conversion, names: Names, weight: float, *origins: str) -> None:
    """Set supervised training on the chosen answers, where no loss over pairs is asked for."""
    conv.choose("loss", SFT, *filter(None, origins), why="of the chosen answers")
    conv.notes.append(answers.OF_MICRO_BATCHES)
    if weight != 1:
        conv.remark(Fate.OTHER, conv.said(names.weights), weight, "the only loss has no weight here")
    conv.tell(Fate.NEEDLESS, "ref_model", "loss=sft has no reference")


def kind_of(loss: str) -> type[PreferenceConfig]:
    return KINDS["loss"][loss]


def put_likelihood(conv: Conversion, weight: float, told: str, *origins: str) -> None:
    """Set the weight of the chosen answers' likelihood, and say how theirs is averaged."""
    by = [*filter(None, origins)]
    conv.put("loss.sft_weight", weight, *by, why="" if by else "theirs has it by itself")
    if weight:
        conv.notes.append(told)


WHY = {"normalize": "of mean log-probabilities, as theirs", "shift": "theirs has none"}


def _asked(conv: Conversion, names: Names, types: Sequence[str]) -> Asked:
    said = list(types) or conv.texts(names.loss) or ["sigmoid"]
    asked, unknown = Asked(), []
    weights = [1.0] * len(said) if types else _weights(conv, names, len(said))
    for name, weight in zip(said, weights, strict=True):
        if name == SFT:
            asked.likelihood += weight
        elif name not in LOSSES:
            unknown.append(name)
        elif weight:
            asked.add(LOSSES[name], weight)
    if unknown:
        taken = "" if asked.weights else "; sigmoid is taken"
        why = f"{', '.join(unknown)} is missing{taken}"
        conv.remark(Fate.INSTEAD, conv.said(names.loss), conv.get(names.loss), why)
    if unknown and not asked.weights:
        asked.add("dpo", 1.0)
    elif not asked.weights and not asked.likelihood:
        conv.refuse(names.weights, "all weights are 0", "Give a loss a weight above 0.")
    return asked


def _weights(conv: Conversion, names: Names, losses: int) -> Sequence[float]:
    said = conv.get(names.weights)
    if said is None or said == []:
        return [1.0] * losses
    weights = said if isinstance(said, list) else [said]
    if not all(isinstance(each, int | float) and not isinstance(each, bool) and each >= 0 for each in weights):
        conv.refuse(names.weights, "must be a list of numbers of at least 0", "Give one for each loss.")
    if len(weights) != losses:
        conv.refuse(names.weights, f"has {len(weights)} weights for {losses} losses", "Give one for each loss.")
    return [float(each) for each in weights]


def _keys(conv: Conversion, names: Names, loss: str, smoothing: float, shift: str) -> Mapping[str, tuple[Any, str]]:
    """Return the keys of a loss that theirs sets, each with the argument that it is from."""
    has = {each.name for each in dataclasses.fields(kind_of(loss))}
    keys: dict[str, tuple[Any, str]] = {}
    if "label_smoothing" in has:
        keys["label_smoothing"] = (smoothing, names.smoothing)
    if loss == "exo_pair" and not smoothing:  # theirs needs one too
        conv.tell(Fate.OTHER, names.smoothing, "exo_pair needs one greater than 0: the paper's 0.001 is taken")
        del keys["label_smoothing"]
    if loss == "ipo":
        keys["normalize"] = ("token", names.loss)
    if loss == "bco_pair":
        keys["shift"] = (shift, names.loss)
    if loss == "discopop":
        keys["tau"] = (_number(conv, names.tau, 0.05), names.tau)
    return keys


def _number(conv: Conversion, name: str, default: float) -> float:
    """Return a number that the trainer may not have an argument for."""
    return float(conv.number(name, default, least=0)) if name in conv.by_name else default


def _modifiers(conv: Conversion, names: Names, loss: str, likelihood: float) -> None:
    """Set what changes any loss that it fits."""
    kind = kind_of(loss)
    weighs = names.weighting in conv.by_name and conv.flag(names.weighting)
    if weighs and "wpo" in kind.fits:
        conv.put("loss.wpo", True, names.weighting)
        if likelihood:
            conv.remark(Fate.OTHER, names.weighting, True, "theirs weighs the likelihood too, ours the loss alone")
    elif weighs:
        conv.tell(Fate.ABSENT, names.weighting, f"loss={loss} has no weights of pairs")
    _lengths(conv, names.lengths, loss, whole=bool(likelihood or weighs))


def _lengths(conv: Conversion, name: str, loss: str, *, whole: bool = False) -> None:
    """Set the weight of what a longer answer has beyond the shorter one. `whole`: others need whole answers."""
    lengths = _number(conv, name, 1.0)
    if lengths == 1:
        return
    if "ld_alpha" not in kind_of(loss).fits:
        conv.tell(Fate.ABSENT, name, f"loss={loss} counts every token of an answer alike")
    elif whole:
        conv.tell(Fate.ABSENT, name, "it does not go together with a likelihood of answers, or their weights")
    else:
        conv.put("loss.ld_alpha", lengths, name)


def without_reference(
    conv: Conversion, loss: str, *, by: str = "", weight_name: str = "", weight: float = 1.0, added: float = 0.0,
    gamma: float = 0.5, beta: float = 0.1, told: str = OF_MICRO_BATCHES, beta_name: str = "beta",
) -> None:  # fmt: skip
    """Set orpo, simpo or cpo. `weight`, `gamma` and `beta` are their defaults; `added` is what they add to the weight
    of the likelihood in any case."""
    conv.choose("loss", loss, *filter(None, [by]))
    if "loss.beta" not in conv.values:
        conv.put("loss.beta", conv.number(beta_name, beta), beta_name)
    if loss == "simpo":
        conv.put("loss.gamma", conv.number("simpo_gamma", gamma), "simpo_gamma")
    conv.tell(Fate.NEEDLESS, "ref_model", f"loss={loss} has no reference")
    _lengths(conv, "ld_alpha", loss)
    put_likelihood(conv, added + _number(conv, weight_name, weight), told, weight_name)
    smoothing = _number(conv, "label_smoothing", 0.0)
    if loss == "cpo":
        conv.put("loss.label_smoothing", smoothing, "label_smoothing")
    elif smoothing:
        conv.tell(Fate.ABSENT, "label_smoothing", f"loss={loss} has none")


def of_cpo(conv: Conversion) -> str:
    """Return our name of a loss of TRL's CPO, which has no reference."""
    said = conv.text("loss_type", "simpo" if conv.trainer == "simpo" else "sigmoid")
    if said not in ("sigmoid", "simpo"):
        conv.tell(Fate.INSTEAD, "loss_type", f"{said} without a reference is missing; cpo's sigmoid is used")
    return "simpo" if said == "simpo" else "cpo"
