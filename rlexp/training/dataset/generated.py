"""Generated rows: pairs with a rule that a model can learn (the chosen answer is the courteous one); and sums
with their results, as prompts for a reward that can be checked.

A pair's request names some things, and both answers speak about them at random length. Lengths vary, so that packing
and sharding are exercised.
"""

from __future__ import annotations

import random

from rlexp.config.schema.row_kinds import Kind
from rlexp.training.types import Row

THINGS = ("tea", "a lamp", "two maps", "the harbour", "old coins", "a violin", "plums", "snow", "the gate", "ink")
VERBS = ("describe", "count", "draw", "bring", "compare", "explain", "find")
COURTEOUS = ("gladly", "thank you", "of course", "with pleasure", "you are welcome", "kindly")
CURT = ("no", "whatever", "go away", "who cares", "not my job", "stop it")
WORDS = ("salt", "river", "moon", "glass", "wood", "letter", "iron", "bread", "wind", "stone")
FILLER = ("it is", "there are", "one sees", "we know", "near", "below", "and then", "some say")


def sums(size: int, seed: int, split: str, digits: int) -> list[Row]:
    """Return `size` prompts like "12 + 7 =" with numbers of at most `digits` digits, fixed by (seed, split)."""
    random_, rows = random.Random(f"{split}-{seed}"), list[Row]()
    for number in range(size):
        one, other = random_.randrange(10**digits), random_.randrange(10**digits)
        rows.append(Row(f"{one} + {other} =", (), f"arithmetic {split} prompt {number}", expected=str(one + other)))
    return rows


def pairs(size: int, seed: int, split: str, words: int = 0) -> list[Row]:
    """Return `size` pairs, fixed by (seed, split). Each request follows a text of `words` words, which has at least as
    many tokens."""
    random_, margins = random.Random(f"{split}-{seed}"), random.Random(f"{split}-{seed}-margins")
    rows = list[Row]()
    for number in range(size):
        things = random_.sample(THINGS, k=random_.randint(1, 4))
        prompt = f"Please {random_.choice(VERBS)} {', '.join(things)}.\n"
        if words:
            prompt = f"{' '.join(random_.choices(WORDS, k=words))}.\n{prompt}"
        answers = _answer(random_, things, COURTEOUS), _answer(random_, things, CURT)
        rows.append(Row(prompt, answers, f"synthetic {split} pair {number}", margin=margins.randint(1, 8) / 4))
    return rows


def taken(kind: Kind, pair: Row, place: int) -> Row:
    """Return a pair as a row of another kind: its prompt, its chosen answer, or one answer, by turns a good and a bad
    one."""
    match kind:
        case Kind.pairs:
            return pair
        case Kind.prompts:
            return Row(pair.prompt, (), pair.origin)
        case Kind.supervised:
            return Row(pair.prompt, pair.answers[:1], pair.origin)
        case Kind.unpaired:
            good = place % 2 == 0
            return Row(pair.prompt, (pair.answers[0 if good else 1],), pair.origin, label=good)


def _answer(random_: random.Random, things: list[str], manner: tuple[str, ...]) -> str:
    words = [random_.choice(manner)]
    for _ in range(random_.randint(1, 6)):
        words += [random_.choice(FILLER), random_.choice(things)]
        if random_.random() < 0.4:
            words.append(random_.choice(manner))
    return " ".join(words) + "."
