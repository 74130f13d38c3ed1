"""The losses of other trainers: what each is here. Most of those over pairs are TRL's, alone or in a sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rlexp.config.schema import KINDS
from rlexp.config.schema.losses import PreferenceConfig
from rlexp.convert.conversion import Conversion
from rlexp.convert.rules import UNSAID, Fate, Rule, taken, worked_out

# Where theirs means something else, in one note each.
OF_CONVERSATIONS = ("Supervised training: of a row of messages, theirs trains every token unless assistant_only_loss "
                    "is true. rlexp trains the assistant's turns alone.")  # fmt: skip
OF_MICRO_BATCHES = ("Supervised training: theirs is a mean over the tokens of each micro-batch, ours over the trained "
                    "tokens of the train batch.")  # fmt: skip
OF_GPUS = ("Supervised training: theirs is a mean over the tokens of each GPU, and then over the GPUs; ours over the "
           "trained tokens of the train batch.")  # fmt: skip
OF_MISMATCHES = (
    "KTO: theirs estimates the divergence from each micro-batch's prompts with answers of other rows, and averages it "
    "over the ranks. rlexp estimates it from all prompts and answers of the train batch."
)
OF_PAIRS = ("Rows: theirs makes two single answers of each pair by itself. rlexp does so with data.unpair=true; "
            "without it, rows are prompt, completion and label.")  # fmt: skip
OF_BLOCKS = ("a sample of the batch there is a block of the longest length, with several rows; train.batch_size counts "
             "rows: multiply it by the rows of a block, which `python -m rlexp.data` shows")  # fmt: skip
OF_SHIFTS = "BCO: theirs moves the mean reward with each micro-batch, ours with each train batch."
OF_ENDS = ("Reward model: where the tokenizer pads with its end of sequence, theirs reads the score at the token "
           "before the end, ours at the end itself.")  # fmt: skip
OF_SCORES = ("Margins: both take those of a column `margin`. Where rows have none, rlexp takes the difference of the "
             "columns score_chosen and score_rejected, theirs takes nothing. loss.margin_weight=0 is a run without "
             "margins.")  # fmt: skip
SUPERVISED: Mapping[str, str] = {"nll": "sft", "chunked_nll": "sft"}  # TRL's names, and ours
SINGLE: Mapping[str, str] = {"kto": "kto", "apo_zero_unpaired": "apo_zero_unpaired"}
# Their names, and ours. TRL's `aot_pair` became `aot_unpaired`.
ALIKE = "hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop"
LOSSES = {"sigmoid": "dpo", "sigmoid_norm": "dpo_norm", "aot_pair": "aot_unpaired", **{x: x for x in ALIKE.split()}}
SFT, OF_BCO = "sft", "pref_bco_weight"
TYPES = "several types are loss=mpo with loss.terms; sft alone is loss=sft"
ONE_LOSS = "there is one loss"
SMOOTHING = "TRL ignores it for sigmoid and sigmoid_norm"
OTHERS = "it changes nothing with this loss"
NOT_YET = "loss=kto_pair"  # an option of ours that would have what is refused
SMOOTHED = frozenset({"robust", "exo_pair", "aot", "aot_unpaired"})  # with label_smoothing in TRL since 0.29
IGNORED = ("it changes nothing there with this loss: 0 is taken. In TRL before 0.29 it meant loss.label_smoothing with "
           "sigmoid")  # fmt: skip
OF_TERMS = ("Supervised term: theirs is a mean over the tokens of each micro-batch, ours over the chosen answers' "
            "tokens of the train batch (loss.sft_weight).")  # fmt: skip
OF_ANSWERS = ("Supervised term: theirs is a mean over each answer's tokens, ours over the chosen answers' tokens of the"
              " train batch (loss.sft_weight).")  # fmt: skip
OF_PROMPTS = ("ORPO: the likelihood in theirs counts the tokens of the prompt too, ours those of the chosen answer "
              "alone (loss.sft_weight).")  # fmt: skip


# Their usual names, by which code that several trainers share asks, with the keys of ours and their defaults.
KEYS = {"label_smoothing": ("label_smoothing", 0.0), "ld_alpha": ("ld_alpha", 1.0), "discopop_tau": ("tau", 0.05),
        "use_weighting": ("wpo", UNSAID), "rpo_alpha": ("sft_weight", 0.0)}  # fmt: skip


def rules(of: str, *, also: str = "", **names: str) -> Sequence[Rule]:
    """Return the rules of losses over pairs, where they have other names with those; an empty one is missing. `also`
    are trainers whose labels are smoothed too."""
    loss, weights = names.get("loss_type", "loss_type"), names.get("loss_weights", "loss_weights")
    made = [worked_out(loss, "loss, loss.normalize, loss.shift", TYPES, "it is said elsewhere", of=of, until=NOT_YET,
                       alias="loss_type")]  # fmt: skip
    if weights:
        made.append(worked_out(weights, "loss.terms, loss.sft_weight", rest=ONE_LOSS, of=of, alias="loss_weights"))
    for alias, (key, default) in KEYS.items():
        text, trainers = (SMOOTHING, f"{of} {also}") if alias == "label_smoothing" else ("", of)
        if name := names.get(alias, alias):
            made.append(worked_out(name, f"loss.{key}", text, OTHERS, of=trainers, alias=alias, default=default,
                                   least=None if default is UNSAID else 0))  # fmt: skip
    return made


def of_cpo_rules(of: str, default: float = 1.0, text: str = "") -> Sequence[Rule]:
    """Return the rules of TRL's CPO, which has SimPO too."""
    types = "rlexp's hinge and ipo have a reference"
    return (
        worked_out("loss_type", "loss=cpo or loss=simpo", types, "it is said", of=of),
        worked_out("cpo_alpha", "loss.sft_weight", text, of=of, default=default, least=0),
        worked_out("simpo_gamma", "loss.gamma", rest=OTHERS, of=of),
    )


def choose(
    conv: Conversion, *, types: Sequence[str] = (), smoothed: frozenset[str] = SMOOTHED, note: str = OF_TERMS,
    by: str = "",
) -> None:  # fmt: skip
    """Set the loss, and the keys that belong to it.

    `types` are given where another argument (`by`) says the loss. `smoothed` are our losses to which their label
    smoothing applies.
    """
    origins = [by] if types else _named(conv, "loss_type", "loss_weights")
    weights, likelihood = _asked(conv, types)
    if not weights:  # no loss over pairs is asked for
        conv.choose("loss", SFT, *origins, why="of the chosen answers")
        conv.notes.append(OF_MICRO_BATCHES)
        if likelihood != 1:
            conv.remark(Fate.OTHER, conv.spelled("loss_weights"), likelihood, "the only loss has no weight here")
        conv.tell(Fate.NEEDLESS, "ref_model", "loss=sft has no reference")
        return
    likelihood_by = _named(conv, "loss_type", "loss_weights") if likelihood else []
    if (more := conv.number("rpo_alpha", 0.0)) or not likelihood:
        likelihood_by.append("rpo_alpha")
    likelihood += more
    second = conv.number(OF_BCO, 0.0)  # LLaMA-Factory's weight of a second term
    if second:
        weights = {loss: weight / (1 + second) for loss, weight in weights.items()}
        weights["bco_pair"] = weights.get("bco_pair", 0.0) + second / (1 + second)
        origins = [*origins, OF_BCO]
    put_likelihood(conv, likelihood, note, *likelihood_by)
    smoothing = conv.number("label_smoothing", 0.0)
    if smoothing and not smoothed & weights.keys():
        conv.tell(Fate.OTHER, "label_smoothing", IGNORED)
    shift = "mean" if second else "none"
    own = {loss: _keys(conv, loss, smoothing if loss in smoothed else 0.0, shift) for loss in weights}
    if [*weights.values()] == [1.0]:
        (loss,) = weights
        conv.choose("loss", loss, *origins)
        for leaf, (value, origin) in own[loss].items():
            conv.put(f"loss.{leaf}", value, origin, why=WHY.get(leaf, ""))
    else:
        loss = "mpo"
        conv.choose("loss", loss, *origins)
        used = {origin: None for keys in own.values() for _, origin in keys.values()}
        beta = conv.values["loss.beta"].value if "loss.beta" in conv.values else conv.number("beta")
        terms = [{"loss": name, "weight": weight, **({"beta": beta} if kind_of(name).own_beta() else {}),
                  **{leaf: value for leaf, (value, _) in own[name].items()}}
                 for name, weight in weights.items()]  # fmt: skip
        conv.put("loss.terms", terms, *origins, *used)
    _modifiers(conv, loss, likelihood)


def _named(conv: Conversion, *names: str) -> list[str]:
    """Return the names of the arguments that the trainer has."""
    return [name for name in names if name in conv.by_name]


def kind_of(loss: str) -> type[PreferenceConfig]:
    return KINDS["loss"][loss]


def put_likelihood(conv: Conversion, weight: float, note: str, *names: str) -> None:
    """Set the weight of the chosen answers' likelihood, and say how theirs is averaged."""
    by = _named(conv, *names)
    conv.put("loss.sft_weight", weight, *by, why="" if by else "theirs has it by itself")
    if weight:
        conv.notes.append(note)


WHY = {"normalize": "of mean log-probabilities, as theirs", "shift": "theirs has none"}


def _asked(conv: Conversion, types: Sequence[str]) -> tuple[dict[str, float], float]:
    """Return the weights of the losses that a file asks for, by our names, and the weight of the likelihood."""
    names = list(types) or conv.texts("loss_type") or ["sigmoid"]
    given = [] if types else conv.weights("loss_weights", len(names), "loss", least=0)
    unknown = [name for name in names if name != SFT and name not in LOSSES]
    weights: dict[str, float] = {}
    for name, weight in zip(names, map(float, given or [1] * len(names)), strict=True):
        if weight and name not in unknown:
            ours = LOSSES.get(name, SFT)
            weights[ours] = weights.get(ours, 0.0) + weight
    likelihood = weights.pop(SFT, 0.0)
    if unknown:
        taken = "" if weights else "; sigmoid is taken"
        conv.differs("loss_type", f"{', '.join(unknown)} is missing{taken}", Fate.INSTEAD)
    if unknown and not weights:
        weights["dpo"] = 1.0
    elif not weights and not likelihood:
        conv.refuse("loss_weights", "all weights are 0", "Give a loss a weight above 0.")
    return weights, likelihood


def _keys(conv: Conversion, loss: str, smoothing: float, shift: str) -> Mapping[str, tuple[Any, str]]:
    """Return the keys of a loss that theirs sets, each with the argument that it is from."""
    if loss == "exo_pair" and not smoothing:  # theirs needs one too
        conv.tell(Fate.OTHER, "label_smoothing", "exo_pair needs one greater than 0: the paper's 0.001 is taken")
        return {}
    match loss:
        case "ipo":
            return {"normalize": ("token", "loss_type")}
        case "bco_pair":
            return {"shift": (shift, "loss_type")}
        case "discopop":
            return {"tau": (conv.number("discopop_tau", 0.05), "discopop_tau")}
    smoothed = any(each.name == "label_smoothing" for each in dataclasses.fields(kind_of(loss)))
    return {"label_smoothing": (smoothing, "label_smoothing")} if smoothed else {}


def _modifiers(conv: Conversion, loss: str, likelihood: float) -> None:
    """Set what changes any loss that it fits."""
    weighs = conv.flag("use_weighting")
    if weighs and "wpo" in kind_of(loss).fits:
        conv.put("loss.wpo", True, "use_weighting")
        if likelihood:
            conv.differs("use_weighting", "theirs weighs the likelihood too, ours the loss alone")
    elif weighs:
        conv.tell(Fate.ABSENT, "use_weighting", f"loss={loss} has no weights of pairs")
    _lengths(conv, loss, whole=bool(likelihood or weighs))


def _lengths(conv: Conversion, loss: str, *, whole: bool = False) -> None:
    """Set the weight of what a longer answer has beyond the shorter one. `whole`: others need whole answers."""
    weight = conv.number("ld_alpha", 1.0)
    if weight == 1:
        return
    if "ld_alpha" not in kind_of(loss).fits:
        conv.tell(Fate.ABSENT, "ld_alpha", f"loss={loss} counts every token of an answer alike")
    elif whole:
        conv.tell(Fate.ABSENT, "ld_alpha", "it does not go together with a likelihood of answers, or their weights")
    else:
        conv.put("loss.ld_alpha", weight, "ld_alpha")


def without_reference(
    conv: Conversion, loss: str, *by: str, likelihood: str = "", weight: float | None = None, added: float = 0.0,
    gamma: float = 0.5, note: str = OF_TERMS,
) -> None:  # fmt: skip
    """Set orpo, simpo or cpo. `likelihood` names the argument for its weight; `added` is what theirs adds to it in any
    case."""
    conv.choose("loss", loss, *by)
    if "loss.beta" not in conv.values:
        conv.put("loss.beta", conv.number("beta"), "beta")
    if loss == "simpo":
        conv.put("loss.gamma", conv.number("simpo_gamma", gamma), "simpo_gamma")
    conv.tell(Fate.NEEDLESS, "ref_model", f"loss={loss} has no reference")
    _lengths(conv, loss)
    if weight is None or conv.name(likelihood):
        weight = conv.number(likelihood, 1.0)
    put_likelihood(conv, added + weight, note, likelihood)
    smoothing = conv.number("label_smoothing", 0.0)
    if loss == "cpo":
        conv.put("loss.label_smoothing", smoothing, "label_smoothing")
    elif smoothing:
        conv.tell(Fate.ABSENT, "label_smoothing", f"loss={loss} has none")


def of_cpo(conv: Conversion) -> str:
    """Return our name of a loss of TRL's CPO, which has no reference."""
    name = conv.text("loss_type", "simpo" if conv.trainer == "simpo" else "sigmoid")
    if name not in ("sigmoid", "simpo"):
        conv.tell(Fate.INSTEAD, "loss_type", f"{name} without a reference is missing; cpo's sigmoid is used")
    return "simpo" if name == "simpo" else "cpo"


# ---- single answers, supervised training, reward models ----


def weights(good: str, bad: str, of: str) -> Sequence[Rule]:
    """Return the rules of the weights of single answers, by their names."""
    return [taken(name, f"loss.{key}", default=1.0, of=of)
            for key, name in (("desirable_weight", good), ("undesirable_weight", bad))]  # fmt: skip


def single(conv: Conversion, loss: str, *by: str) -> None:
    """Set a loss on single answers."""
    conv.choose("loss", loss, *by)
    if loss == "kto":
        conv.notes.append(OF_MISMATCHES)
    if loss == "bco":
        conv.put("loss.shift", "mean", why="as theirs")
        conv.notes.append(OF_SHIFTS)


def chosen_of(conv: Conversion, known: Mapping[str, str], default: str) -> str:
    """Return our loss by their loss_type; the default one's for a type that rlexp lacks."""
    name = conv.text("loss_type", default)
    if name not in known:
        conv.tell(Fate.INSTEAD, "loss_type", f"{name} is missing; {default} is used")
    return known.get(name, known[default])


def reward_model(conv: Conversion, *by: str, notes: Sequence[str] = (), margins: bool = True) -> None:
    """Set the loss of a reward model; without `margins`, theirs has none."""
    conv.choose("loss", "reward", *by)
    if not margins:
        conv.put("loss.margin_weight", 0.0, why="theirs has no margins")
    conv.notes.extend(notes)
