"""Pairs of a wanted length: as much text as fits, counted with a tokenizer or estimated from characters."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from rlexp.base.errors import ConfigError, DataError
from rlexp.config.schema import ModelConfig
from rlexp.long_pairs.question import Pair, ask
from rlexp.long_pairs.texts import Texts

CHARACTERS = 3.0  # of a token, where no tokenizer counts; fewer than most texts have, so that estimates are not too low
SHORT = 0.01  # how much shorter than asked a pair may be
FEW = 100  # tokens by which it always may be
TRIES = 12
Count = Callable[[Pair], int]  # the tokens of a prompt with its longer answer


def estimated(pair: Pair) -> int:
    return round((len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))) / CHARACTERS)


def counting(model: ModelConfig) -> Count:
    """Count as training will, with the tokenizer and the chat template of a model."""
    from rlexp.training.dataset.tokens import Example, RowTokenizer
    from rlexp.training.model.loading import load_tokenizer
    from rlexp.training.types import Row

    rows = RowTokenizer(load_tokenizer(model))

    def count(pair: Pair) -> int:
        (made,) = rows.sequences([Row(pair.prompt, (pair.chosen, pair.rejected), "the pair")])
        if not isinstance(made, Example):
            raise DataError(made.message)
        return made.longest()

    return count


def pairs(texts: Texts, tokens: int, number: int, seed: int, count: Count) -> Iterator[Pair]:
    """Yield pairs of at most so many tokens. Their questions are about places spread evenly over the texts."""
    parts = random.Random(f"{seed}").sample(range(number), number)
    each = CHARACTERS  # characters of a token, as the last pair had them
    for pair, part in enumerate(parts):
        place = (part + random.Random(f"{seed} {pair} place").random()) / number
        made = _fitted(texts, tokens, f"{seed} {pair}", place, count, each)
        each = len(made.prompt) / made.tokens
        yield made


def _fitted(texts: Texts, tokens: int, seed: str, place: float, count: Count, each: float) -> Pair:
    """Try lengths in characters until the tokens fit, each between one that is too short and one that is too long."""
    least = tokens - max(FEW, int(tokens * SHORT))
    low, high, best = (0, 0), None, None
    characters = int(tokens * each)
    for _ in range(TRIES):
        draw = random.Random(seed)
        text = texts.shuffled(draw, characters)
        if len(text) > characters:  # cut behind the last whole line
            text = text[: max(text.rfind("\n", 0, characters + 1), 0)]
        pair = ask(text, place, draw)
        if pair is None:
            raise DataError(f"--texts={texts.named}: a part of {len(text):,} characters has no two lines that can be "
                            "asked for: each occurs once, as does the line below it. Give other texts.")  # fmt: skip
        trial = replace(pair, tokens=count(pair))
        if trial.tokens < least and characters >= texts.characters:
            raise ConfigError(f"--tokens={tokens}: the texts have {trial.tokens:,} tokens in all. Give more texts, or "
                              f"--tokens={trial.tokens}.")  # fmt: skip
        if trial.tokens <= tokens and (best is None or trial.tokens > best.tokens):
            best = trial
        if least <= trial.tokens <= tokens:
            break
        low, high = ((characters, trial.tokens), high) if trial.tokens < least else (low, (characters, trial.tokens))
        from_, to = (low, high) if high is not None else ((0, 0), low)
        aim = (least + tokens) / 2 - from_[1]
        characters = from_[0] + int((to[0] - from_[0]) * aim / (to[1] - from_[1]))
    if best is None or best.tokens < tokens // 2:  # lines may be longer than that
        raise DataError(f"--tokens={tokens}: no text of this length was found in {TRIES} tries. Give other texts.")
    return best
