"""The one place in which text becomes token ids, and which says what it did at the edges of what is trained on.

A sequence is a prompt and parts that follow it, some of them trained on. It is tokenized as a whole, as models read it.
Where a token would span an edge (the end of the prompt, the beginning or end of a turn), both sides are tokenized apart
there: the prompt then has the tokens that it has when a model is asked, and no token is trained on in part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlexp.training.types import Ids, Mask

ANCHORS = ("\n", ".", "x", "1")  # texts after which a continuation is tokenized where it cannot be tokenized alone


@dataclass(frozen=True)
class Text:
    """A sequence as text: the prompt, and the parts after it with whether they are trained on."""

    prompt: str
    parts: tuple[tuple[str, bool], ...] = ()
    changed: bool = False  # the template calls for an answer in other words than it writes one

    @property
    def whole(self) -> str:
        return self.prompt + "".join(text for text, _ in self.parts)


@dataclass(frozen=True)
class Tokens:
    """A sequence as token ids. Without a mask, all tokens of the answer are trained on."""

    prompt: Ids
    answer: Ids
    mask: Mask | None = None
    apart: bool = False  # a token would have spanned an edge


class Seam:
    """A tokenizer, and how it begins a text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        plain, full = (self._ids(["a"], special=special)[0] for special in (False, True))
        at = next((i for i in range(len(full)) if np.array_equal(full[i : i + len(plain)], plain)), 0)
        self.leading = full[:at]  # the special tokens that it puts before a text that is no template's
        anchored = self._after_anchor("a")
        # A continuation has the same tokens alone. SentencePiece puts a space before it.
        self.alone = anchored is None or np.array_equal(anchored, plain)

    def tokens(self, texts: Sequence[Text], *, leading: bool) -> list[Tokens]:
        """Tokenize sequences, all at once. `leading`: the prompt begins with the tokenizer's own special tokens, as any
        text without a prompt does."""
        distinct = list(dict.fromkeys(text.prompt for text in texts))
        wholes = [text.whole for text in texts if text.parts]
        ids = self._ids([*distinct, *wholes])
        of_prompt = dict(zip(distinct, ids, strict=False))
        of_whole = iter(ids[len(distinct) :])
        before = self.leading if leading else self.leading[:0]
        sequences = []
        for text in texts:
            prompt = of_prompt[text.prompt]
            made = self._joined(text, prompt, next(of_whole)) if text.parts else Tokens(prompt, prompt[:0])
            first = before if text.prompt else self.leading
            sequences.append(Tokens(np.concatenate((first, made.prompt)), made.answer, made.mask, made.apart))
        return sequences

    def _joined(self, text: Text, prompt: Ids, whole: Ids) -> Tokens:
        """Take the answer from the whole if no token spans an edge, or else tokenize its parts apart."""
        fits = np.array_equal(whole[: len(prompt)], prompt)
        if all(trained for _, trained in text.parts):
            answer = whole[len(prompt) :] if fits else self._continued("".join(part for part, _ in text.parts))
            return Tokens(prompt, answer, None, apart=not fits)
        mask = self._by_offsets(text, len(prompt), whole) if fits else None
        if mask is not None:
            return Tokens(prompt, whole[len(prompt) :], mask)
        pieces = [self._continued(part) for part, _ in text.parts]
        flags = [np.full(len(piece), trained) for piece, (_, trained) in zip(pieces, text.parts, strict=True)]
        return Tokens(prompt, np.concatenate(pieces), np.concatenate(flags), apart=True)

    def _by_offsets(self, text: Text, start: int, whole: Ids) -> Mask | None:
        """Return the mask of the tokens from `start` on; None if one spans an edge, or if that cannot be known."""
        if not getattr(self.tokenizer, "is_fast", False):
            return None
        encoding = self.tokenizer(text.whole, add_special_tokens=False, return_offsets_mapping=True)
        if not np.array_equal(np.asarray(encoding["input_ids"], dtype=np.int32), whole):
            return None
        spans = np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        # Some tokenizers leave a token's spaces out of its span (trim_offsets): they follow the token before.
        spans[1:, 0] = np.minimum(spans[1:, 0], spans[:-1, 1])
        spans = spans[start:]
        edges = np.cumsum([len(text.prompt), *(len(part) for part, _ in text.parts)])
        first, last = (np.searchsorted(edges, ends, side="right") for ends in (spans[:, 0], spans[:, 1] - 1))
        empty = spans[:, 0] == spans[:, 1]
        if np.any((first != last) & ~empty) or np.any(empty):
            return None
        flags = np.array([False, *(trained for _, trained in text.parts), False])
        mask: Mask = flags[first]
        return mask

    def _continued(self, text: str) -> Ids:
        """Tokenize a text that follows another one."""
        anchored = None if self.alone else self._after_anchor(text)
        return self._ids([text])[0] if anchored is None else anchored

    def _after_anchor(self, text: str) -> Ids | None:
        """Tokenize a text after the first anchor that no token joins to it; a special token is never joined."""
        for anchor in (*ANCHORS, self.tokenizer.eos_token or ""):
            lead, both = self._ids([anchor, anchor + text])
            if np.array_equal(both[: len(lead)], lead):
                return both[len(lead) :]
        return None

    def _ids(self, texts: Sequence[str], *, special: bool = False) -> list[Ids]:
        if not texts:
            return []
        id_lists = self.tokenizer(list(texts), add_special_tokens=special, return_attention_mask=False)["input_ids"]
        return [np.asarray(ids, dtype=np.int32) for ids in id_lists]
