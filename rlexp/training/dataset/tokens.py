"""Rows as token ids: a prompt is never trained on, an answer ends, and nothing is longer than data.max_length.

Rows come in and go out in batches, since a tokenizer takes many texts at once much faster than one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlexp.base.errors import DataError
from rlexp.config.schema.data import TooLong
from rlexp.training.dataset.chat import Chat
from rlexp.training.dataset.messages import as_text
from rlexp.training.dataset.seam import Seam, Text, Tokens
from rlexp.training.types import Example, Ids, Row

UNPLACED = -1  # the index of an example until its place in the data set is known
TRUNCATED = "kept, but truncated"
APART = "kept, but tokenized apart where a token would span the edge of an answer"
CHANGED = "kept, but the template calls for the answer in other words than it writes it"
SAME = "chosen and rejected are the same"
UNTRAINED = "no token to train on is left after truncation"


@dataclass(frozen=True)
class Dropped:
    reason: str


@dataclass(frozen=True)
class Refused:
    """A row that cannot be used; `text` goes on after the row's name."""

    origin: str
    text: str
    bad: bool = True  # the row's own fault, which data.bad_rows=drop forgives

    @property
    def message(self) -> str:
        return f"{self.origin}: {self.text}"


Outcome = Example | Dropped | Refused


class RowTokenizer:
    """Writes rows as text, by the tokenizer's chat template if it has one, and tokenizes them to the answers' ends."""

    def __init__(self, tokenizer: Any, *, use_template: bool = True) -> None:
        self.tokenizer = tokenizer
        self.chat = Chat(tokenizer, use_template)
        self.eos_id: int | None = tokenizer.eos_token_id

    @functools.cached_property
    def seam(self) -> Seam:
        return Seam(self.tokenizer)

    @functools.cached_property
    def special(self) -> set[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return {*self.tokenizer.all_special_ids, *(each for each, token in added.items() if token.special)}

    def sequences(self, rows: Sequence[Row]) -> list[Example | Refused]:
        texts = list[list[Text] | Refused]()
        for row in rows:
            try:
                texts.append(self.chat.texts(row))
            except DataError as error:
                texts.append(Refused(row.origin, str(error)))
        flat = [text for each in texts if isinstance(each, list) for text in each]
        tokens = iter(self.seam.tokens(flat, leading=not self.chat.templated))
        return [
            each if isinstance(each, Refused) else self._example(row, each, [next(tokens) for _ in each])
            for row, each in zip(rows, texts, strict=True)
        ]

    def with_answer(self, prompt: str, answer: str, origin: str) -> tuple[Ids, Ids]:
        """Return the tokens of a prompt, and of an answer to its end."""
        (made,) = self.sequences([Row(prompt, (answer,), origin)])
        if isinstance(made, Refused):
            raise DataError(made.message)
        return made.prompt, made.answers[0]

    def _example(self, row: Row, texts: Sequence[Text], tokens: Sequence[Tokens]) -> Example | Refused:
        ended = [self._ended(each) for each in tokens] if row.answers else []
        if ended and not row.prompt:  # nothing predicts the first token of a text, unless a special token leads it
            tokens = ended = [
                each if len(each.prompt) else replace(each, prompt=each.answer[:1], answer=each.answer[1:])
                for each in ended
            ]
        prompt = tokens[0].prompt
        if not len(prompt):
            return Refused(row.origin, "field `prompt` has no tokens.")
        notes = [APART] if any(each.apart for each in tokens) else []
        notes += [CHANGED] if any(text.changed for text in texts) else []
        answers = tuple(each.answer for each in ended)
        return Example(
            index=UNPLACED, prompt=prompt, answers=answers, masks=tuple(each.mask for each in ended), origin=row.origin,
            label=row.label, margin=row.margin, text="" if answers else as_text(row.prompt), expected=row.expected,
            notes=tuple(notes),
        )  # fmt: skip

    def _ended(self, tokens: Tokens) -> Tokens:
        """Append the end-of-sequence token, unless the answer has it, or the template ended the turn with a special
        token (and perhaps a newline)."""
        if self.eos_id is None or self._ends(tokens.answer.tolist()[-2:]):
            return tokens
        mask = None if tokens.mask is None else np.append(tokens.mask, True)
        return replace(tokens, answer=np.append(tokens.answer, np.int32(self.eos_id)), mask=mask)

    def _ends(self, last: list[int]) -> bool:
        if not self.chat.templated:
            return last[-1:] == [self.eos_id]
        if last and last[-1] in self.special:
            return True
        return len(last) == 2 and last[0] in self.special and not self.tokenizer.decode(last[1:]).strip()


@dataclass(frozen=True)
class Encoder:
    """Tokenizes the rows of a data set. `room` is kept for the answers that a policy draws to a prompt."""

    rows: RowTokenizer
    max_length: int
    too_long: TooLong
    room: int = 0

    def encode(self, rows: Sequence[Row]) -> list[Outcome]:
        return [self._fitted(each) if isinstance(each, Example) else each for each in self.rows.sequences(rows)]

    def _fitted(self, example: Example) -> Outcome:
        most = self.max_length - self.room
        if example.longest() > most:
            match self.too_long:
                case TooLong.error:
                    return Refused(example.origin, self._too_long(example), bad=False)
                case TooLong.drop:
                    return Dropped(f"longer than data.max_length{' − rollout.max_new_tokens' * bool(self.room)}")
                case TooLong.truncate:
                    example = truncated(example, most, self.rows.tokenizer.bos_token_id)
        if len(example.answers) == 2 and np.array_equal(*example.answers):
            return Dropped(SAME)
        if not all(len(answer) for answer in example.answers) or any(
            mask is not None and not mask.any() for mask in example.masks
        ):
            return Dropped(UNTRAINED)
        return example

    def _too_long(self, example: Example) -> str:
        if self.room:
            return (
                f"the prompt has {example.longest()} tokens, and data.max_length − rollout.max_new_tokens leaves it "
                f"{self.max_length - self.room}. Raise data.max_length, lower rollout.max_new_tokens, or say "
                f"data.too_long=truncate or data.too_long=drop."
            )
        return (
            f"{example.longest()} tokens, and data.max_length={self.max_length}. Raise it, or say "
            f"data.too_long=truncate or data.too_long=drop."
        )


def truncated(example: Example, most: int, bos_id: int | None = None) -> Example:
    return replace(fitted(example, most, bos_id), notes=(TRUNCATED, *example.notes))


def fitted(example: Example, most: int, bos_id: int | None = None) -> Example:
    """Cut the prompt at its start, keeping a begin-of-sequence token; then the answers at their end."""
    room = max(1, most - max((len(answer) for answer in example.answers), default=0))
    prompt = cut_from_start(example.prompt, room, bos_id)
    rest = most - len(prompt)
    answers = tuple(answer[:rest] for answer in example.answers)
    masks = tuple(None if mask is None else mask[:rest] for mask in example.masks)
    return replace(example, prompt=prompt, answers=answers, masks=masks)


def cut_from_start(prompt: Ids, longest: int, bos_id: int | None = None) -> Ids:
    """Return the last `longest` tokens. If the prompt starts with a begin-of-sequence token, it stays first."""
    if len(prompt) <= longest or bos_id is None or prompt[0] != bos_id:
        return prompt[-longest:]
    return np.concatenate((prompt[:1], prompt[1:][len(prompt) - longest :]))


def notes_of(outcome: Outcome) -> tuple[str, ...]:
    """Say how a row was not taken as it was read. One that is refused says it by itself."""
    match outcome:
        case Dropped(reason=reason):
            return (reason,)
        case Example(notes=notes):
            return notes
        case Refused():
            return ()
