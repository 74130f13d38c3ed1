"""The kinds of examples, by what is trained on, and the names of their answers."""

from __future__ import annotations

from enum import Enum


class Kind(Enum):
    pairs = "pairs"  # two answers to a prompt, of which one is preferred
    unpaired = "unpaired"  # an answer, and whether it is good
    supervised = "supervised"  # an answer to be learned
    prompts = "prompts"  # none: the policy generates its own


# The answers that an example of each kind has, in the order in which they are packed.
SIDES: dict[Kind, tuple[str, ...]] = {
    Kind.pairs: ("chosen", "rejected"),
    Kind.unpaired: ("answer",),
    Kind.supervised: ("answer",),
    Kind.prompts: (),
}
# The name of one example of each kind.
EXAMPLE = {Kind.pairs: "pair", Kind.unpaired: "answer", Kind.supervised: "answer", Kind.prompts: "prompt"}
# Rows of each kind, for sentences.
ROWS_OF = {
    Kind.pairs: "pairs",
    Kind.unpaired: "unpaired answers",
    Kind.supervised: "supervised rows",
    Kind.prompts: "prompts",
}
