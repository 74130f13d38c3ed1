"""Pairs of a wanted length: as much text as fits, counted with a tokenizer or estimated from characters, and a question
about it whose answer a program knows: which line follows a line that the text has once.

The chosen answer is the line that follows. The rejected answer follows another such line of the same text. The texts
are files and folders, or the Python standard library's own source.
"""

from __future__ import annotations

import platform
import random
import re
import sysconfig
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from rlexp.base.errors import ConfigError, DataError
from rlexp.config.schema import ModelConfig

CHARACTERS = 3.0  # of a token, where no tokenizer counts; fewer than most texts have, so that estimates are not too low
SHORT = 0.01  # how much shorter than asked a pair may be
FEW = 100  # tokens by which it always may be
TRIES = 12
QUOTED, ANSWER = (20, 160), (10, 160)  # fewest and most characters of a line that is quoted, and of an answer
ASKED = "\n\nQuestion: which line follows the line «{}» in the text above? Answer with that line alone."
PATTERN = re.compile(re.escape(ASKED).replace(r"\{\}", "([^«»\n]*)") + r"\Z")
Count = Callable[["Pair"], int]  # the tokens of a prompt with its longer answer


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


@dataclass(frozen=True)
class Pair:
    """A long text with its question, and both answers."""

    prompt: str
    chosen: str
    rejected: str
    place: float  # of the quoted line in the text: 0 is its beginning, 1 its end
    tokens: int = 0  # of the prompt with its longer answer, once they are counted

    def row(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "chosen": self.chosen, "rejected": self.rejected, "place": round(self.place, 4)}


def ask(text: str, place: float, draw: random.Random) -> Pair | None:
    """Ask for the line nearest to a place of the text that may be asked for; None if there are not two such lines."""
    usable = _usable(text)
    if len(usable) < 2:
        return None
    at = bisect_left([start for start, _, _ in usable], place * len(text))
    at = min((near for near in (at - 1, at) if 0 <= near < len(usable)),
             key=lambda near: abs(usable[near][0] - place * len(text)))  # fmt: skip
    start, line, answer = usable[at]
    others = [after for *_, after in usable if after not in (answer, line)]  # the quoted line would be no answer
    if not others:
        return None
    rejected = others[draw.randrange(len(others))]
    return Pair(text + ASKED.format(line), answer, rejected, start / len(text))


def _usable(text: str) -> list[tuple[int, str, str]]:
    """Return where the lines begin that may be asked for, each with the line that follows: the text has both once."""
    raw = text.split("\n")
    starts = accumulate((len(each) + 1 for each in raw), initial=0)
    lines = [line.strip() for line in raw]
    times = Counter(lines)
    return [(start, line, after) for start, (line, after) in zip(starts, pairwise(lines), strict=False)
            if _fits(line, QUOTED) and _fits(after, ANSWER) and times[line] == times[after] == 1
            and not {"«", "»"} & {*line}]  # fmt: skip


def _fits(line: str, sizes: tuple[int, int]) -> bool:
    return sizes[0] <= len(line) <= sizes[1] and line.isprintable()


def wrong(row: Mapping[str, Any]) -> str | None:
    """Answer a row's question again, by its prompt alone, and say what is wrong with the row."""
    fields = [row.get(name) for name in ("prompt", "chosen", "rejected")]
    if not all(isinstance(each, str) for each in fields):
        return "must have the texts prompt, chosen and rejected"
    prompt, chosen, rejected = map(str, fields)
    match = PATTERN.search(prompt)
    if match is None:
        return "its prompt does not end with the question"
    lines = [line.strip() for line in prompt[: match.start()].split("\n")]
    if (times := lines.count(match[1])) != 1:
        return f"its text has the quoted line {times} times"
    at = lines.index(match[1]) + 1
    if at == len(lines) or lines[at] != chosen:
        return "the chosen answer does not follow the quoted line"
    if rejected == chosen or rejected not in lines:
        return "the rejected answer must be another line of the text"
    return None


LICENCE = "PSF-2.0"  # of the Python standard library
LEFT_OUT = ("test", "tests", "site-packages", "dist-packages", "__pycache__")  # folders of the standard library
MAKES = "Give files of text (UTF-8), or leave --texts out: the Python standard library is taken then."


@dataclass(frozen=True)
class Texts:
    """Files of text, with their lengths in characters."""

    named: str  # what they are, for the summary
    files: tuple[Path, ...]
    lengths: tuple[int, ...]
    no_text: int = 0  # files of the folders that are no text, and were left out

    @property
    def characters(self) -> int:
        return sum(self.lengths)

    def shuffled(self, draw: random.Random, least: int) -> str:
        """Join files in a random order, until there are so many characters or no file is left."""
        order = draw.sample(range(len(self.files)), len(self.files))
        parts: list[str] = []
        for at in order:
            parts.append(self.files[at].read_text(encoding="utf-8"))
            least -= self.lengths[at]
            if least <= 0:
                break
        return "\n".join(parts)


def given(places: Sequence[Path]) -> Texts:
    """Read the files, and all files of the folders; a file of a folder may be something else than text."""
    lengths: dict[Path, int] = {}
    no_text = 0
    for place in places:
        if not place.is_file() and not place.is_dir():
            raise DataError(f"--texts={place}: no such file or folder. {MAKES}")
        for file in [place] if place.is_file() else sorted(_files(place)):
            length = _characters(file)
            if length is None and place.is_file():
                raise DataError(f"--texts={place}: is not a text in UTF-8. {MAKES}")
            if length is None:
                no_text += 1
            else:
                lengths[file] = length
    if not sum(lengths.values()):
        raise DataError(f"--texts={' '.join(map(str, places))}: holds no text. {MAKES}")
    return Texts(", ".join(map(str, places)), tuple(lengths), tuple(lengths.values()), no_text)


def of_python() -> Texts:
    """Return the source of the standard library of this Python, without its tests."""
    folder = Path(sysconfig.get_path("stdlib"))
    lengths = {file: length for file in sorted(_files(folder)) if file.suffix == ".py"
               and not {*file.relative_to(folder).parts} & {*LEFT_OUT} and (length := _characters(file))}  # fmt: skip
    if not lengths:
        raise DataError("--texts: the source of this Python's standard library is not here. Give files of text.")
    named = f"the source of Python {platform.python_version()}'s standard library (licence {LICENCE})"
    return Texts(named, tuple(lengths), tuple(lengths.values()))


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, but for hidden ones."""
    for path in folder.rglob("*"):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def _characters(file: Path) -> int | None:
    """Count the characters of a text; None for a file that is something else."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise DataError(f"--texts: {file}: cannot be read ({error.strerror}). Leave it out.") from None
    return None if "\0" in text else len(text)
