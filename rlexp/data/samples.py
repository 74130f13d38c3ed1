"""Samples as text, token by token: which tokens are trained on, and which are special."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rlexp.data.facts import Piece, RowPart, ShownSample
from rlexp.training.types import Example, Ids, Mask

HEAD, TAIL = 1600, 800  # tokens of a part that are shown at least, if it is longer
CONTEXT = 4  # tokens before a part that decide how its first one is written
UNFINISHED = "\ufffd"  # what a tokenizer makes of half a character


def sample_of(example: Example, sides: Sequence[str], tokenizer: Any, special: frozenset[int]) -> ShownSample:
    parts = _Decoder(tokenizer, special).parts(example.prompt, dict(zip(sides, example.masked, strict=True)))
    return ShownSample(example.origin, parts, example.label, example.expected, example.margin)


def special_ids(tokenizer: Any) -> frozenset[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset({*tokenizer.all_special_ids, *(each for each, token in added.items() if token.special)})


class _Decoder:
    def __init__(self, tokenizer: Any, special: frozenset[int]) -> None:
        self._tokenizer, self._special = tokenizer, special

    def parts(self, prompt: Ids, answers: dict[str, tuple[Ids, Mask | None]]) -> tuple[RowPart, ...]:
        untrained = np.zeros(len(prompt), bool)
        parts = [RowPart("prompt", len(prompt), 0, self._pieces(prompt, untrained, prompt[:0]))]
        for name, (answer, mask) in answers.items():
            trained = np.ones(len(answer), bool) if mask is None else mask
            pieces = self._pieces(answer, trained, prompt[-CONTEXT:])
            parts.append(RowPart(name, len(answer), int(trained.sum()), pieces))
        return tuple(parts)

    def _pieces(self, ids: Ids, trained: Mask, before: Ids) -> tuple[Piece, ...]:
        if len(ids) <= HEAD + TAIL:
            return tuple(self._decoded(ids.tolist(), trained, before.tolist()))
        head = self._decoded(ids[:HEAD].tolist(), trained[:HEAD], before.tolist())
        tail = self._decoded(ids[-TAIL:].tolist(), trained[-TAIL:], ids[-TAIL - CONTEXT : -TAIL].tolist())
        return (*head, Piece("", (), hidden=len(ids) - HEAD - TAIL), *tail)

    def _decoded(self, ids: list[int], trained: Mask, before: list[int]) -> Iterator[Piece]:
        """Yield the text that each token adds. Tokens that share a character come together."""
        whole = [*before, *ids]
        start, read, offset = 0, len(before), len(before)

        def piece(stop: int, text: str) -> Piece:
            special = stop == read + 1 and whole[read] in self._special
            return Piece(text, tuple(whole[read:stop]), bool(trained[read - offset]), special)

        for place in range(offset, len(whole)):
            last = place + 1 == len(whole)
            known, text = self._text(whole[start:read]), self._text(whole[start : place + 1])
            ends = last or self._special.intersection(whole[place : place + 2]) or self._parted(trained, place - offset)
            if ends or (len(text) > len(known) and not text.endswith(UNFINISHED)) or text == known:
                yield piece(place + 1, text[len(known) :])
                start, read = read, place + 1

    def _text(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    @staticmethod
    def _parted(trained: Mask, place: int) -> bool:
        """Say whether the next token is trained on and this one not, or the other way round."""
        return bool(trained[place] != trained[place + 1])
