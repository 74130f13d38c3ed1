"""Supervised training, losses on single answers and reward models of other trainers: what each is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlexp.convert.conversion import Conversion
from rlexp.convert.rules import Fate, Rule, taken

# Where theirs means something else, in one note each.
OF_CONVERSATIONS = (
    "Supervised training: of a row of messages, theirs trains every token unless assistant_only_loss is true. rlexp "
    "trains the assistant's turns alone."
)
OF_MICRO_BATCHES = (
    "Supervised training: theirs is a mean over the tokens of each micro-batch, ours over the trained tokens of the "
    "train batch."
)
OF_GPUS = (
    "Supervised training: theirs is a mean over the tokens of each GPU, and then over the GPUs; ours over the trained "
    "tokens of the train batch."
)
OF_MISMATCHES = (
    "KTO: theirs estimates the divergence from each micro-batch's prompts with answers of other rows, and averages it "
    "over the ranks. rlexp estimates it from all prompts and answers of the train batch."
)
OF_PAIRS = (
    "Rows: theirs makes two single answers of each pair by itself. rlexp does so with data.unpair=true; without it, "
    "rows are prompt, completion and label."
)
OF_BLOCKS = (
    "a sample of the batch there is a block of the longest length, with several rows; train.batch_size counts rows: "
    "multiply it by the rows of a block, which `python -m rlexp.data` shows"
)
OF_SHIFTS = "BCO: theirs moves the mean reward with each micro-batch, ours with each train batch."
OF_ENDS = (
    "Reward model: where the tokenizer pads with its end of sequence, theirs reads the score at the token before the "
    "end, ours at the end itself."
)
OF_SCORES = (
    "Margins: both take those of a column `margin`. Where rows have none, rlexp takes the difference of the columns "
    "score_chosen and score_rejected, theirs takes nothing. loss.margin_weight=0 is a run without margins."
)
SUPERVISED: Mapping[str, str] = {"nll": "sft", "chunked_nll": "sft"}  # TRL's names, and ours
SINGLE: Mapping[str, str] = {"kto": "kto", "apo_zero_unpaired": "apo_zero_unpaired"}


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
