"""Tokenize rows. Prompt and answers are tokenized apart, since a prompt is never trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlexp.config.schema import TooLong
from rlexp.errors import DataError
from rlexp.types import Ids, Pair, Prompt, PromptRow, Row

Messages = Sequence[dict[str, str]]


@dataclass(frozen=True)
class Encoded:
    """The pairs kept, in the order of their rows, and counts of the others by reason."""

    pairs: list[Pair]
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class EncodedPrompts:
    """The prompts kept, in the order of their rows, and counts of the others by reason."""

    prompts: list[Prompt]
    dropped: Counter[str] = field(default_factory=Counter)


class TextTokenizer:
    """Applies the tokenizer's chat template, if it has one, and ends each answer with an end-of-sequence token.

    Chat messages without a template are written as `Role: text` paragraphs.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.eos_id: int | None = tokenizer.eos_token_id

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def prompt(self, prompt: str | Messages, origin: str) -> Ids:
        """Return the tokens up to the start of the answer."""
        if self.has_template:
            ids = self._ids(self._rendered(origin)(_as_messages(prompt), add_generation_prompt=True))
        else:
            ids = self._ids(as_text(prompt), special=True)
        return _not_empty(ids, origin)

    def with_answers(self, prompt: str | Messages, texts: Sequence[str], origin: str) -> tuple[Ids, list[Ids]]:
        """Return the tokens of the prompt, and of each answer to its end."""
        if self.has_template:
            ids, answers = self._templated(_as_messages(prompt), texts, origin)
        else:
            ids, answers = self._ids(as_text(prompt), special=True), [self._ids(text) for text in texts]
        return _not_empty(ids, origin), [self._ended(answer) for answer in answers]

    def _templated(self, messages: list[dict[str, str]], texts: Sequence[str], origin: str) -> tuple[Ids, list[Ids]]:
        template = self._rendered(origin)
        prompt = template(messages, add_generation_prompt=True)
        answers = []
        for text in texts:
            whole = template([*messages, {"role": "assistant", "content": text}])
            if not whole.startswith(prompt):
                raise DataError(
                    f"{origin}: the chat template changes the prompt when an answer follows, so the two "
                    f"cannot be told apart. Use a tokenizer whose template does not, or one without a template."
                )
            answers.append(self._ids(whole[len(prompt) :]))
        return self._ids(prompt), answers

    def _rendered(self, origin: str) -> Callable[..., str]:
        def render(messages: list[dict[str, str]], **options: Any) -> str:
            try:
                return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))
            except Exception as error:  # a template is foreign code and may raise anything
                raise DataError(f"{origin}: field `prompt`: the tokenizer's chat template raises: {error}") from error

        return render

    def _ids(self, text: str, *, special: bool = False) -> Ids:
        return np.asarray(self.tokenizer(text, add_special_tokens=special)["input_ids"], dtype=np.int32)

    def _ended(self, answer: Ids) -> Ids:
        """Append the end-of-sequence token, unless the template did (perhaps with a newline after it)."""
        if self.eos_id is None or self.eos_id in answer[-2:]:
            return answer
        return np.append(answer, np.int32(self.eos_id))


class PairTokenizer(TextTokenizer):
    """Tokenizes preference pairs: a prompt with either answer has at most `max_length` tokens."""

    def __init__(self, tokenizer: Any, max_length: int, too_long: TooLong) -> None:
        super().__init__(tokenizer)
        self.max_length = max_length
        self.too_long = too_long

    def encode(self, rows: Iterable[Row]) -> Encoded:
        pairs: list[Pair] = []
        dropped: Counter[str] = Counter()
        for row in rows:
            pair = self._pair(row)
            cut = pair.longest() > self.max_length
            if cut:
                match self.too_long:
                    case TooLong.error:
                        raise DataError(
                            f"{row.origin}: {pair.longest()} tokens, and data.max_length={self.max_length}. "
                            f"Raise it, or say data.too_long=truncate or data.too_long=drop."
                        )
                    case TooLong.drop:
                        dropped["longer than data.max_length"] += 1
                        continue
                    case TooLong.truncate:
                        pair = truncated(pair, self.max_length, self.tokenizer.bos_token_id)
                        dropped["kept, but truncated"] += 1
            if np.array_equal(pair.chosen, pair.rejected):
                dropped["chosen and rejected are the same"] += 1
                dropped["kept, but truncated"] -= cut
                continue
            pairs.append(pair)
        return Encoded(pairs, +dropped)

    def _pair(self, row: Row) -> Pair:
        prompt, (chosen, rejected) = self.with_answers(row.prompt, (row.chosen, row.rejected), row.origin)
        return Pair(-1, prompt, chosen, rejected, row.origin)


class PromptTokenizer(TextTokenizer):
    """Tokenizes prompts to at most `longest` tokens: data.max_length − rollout.max_new_tokens."""

    def __init__(self, tokenizer: Any, longest: int, too_long: TooLong) -> None:
        super().__init__(tokenizer)
        self.longest = longest
        self.too_long = too_long

    def encode(self, rows: Iterable[PromptRow]) -> EncodedPrompts:
        prompts: list[Prompt] = []
        dropped: Counter[str] = Counter()
        for row in rows:
            tokens = self.prompt(row.prompt, row.origin)
            if len(tokens) > self.longest:
                match self.too_long:
                    case TooLong.error:
                        raise DataError(
                            f"{row.origin}: the prompt has {len(tokens)} tokens, and data.max_length − "
                            f"rollout.max_new_tokens leaves it {self.longest}. Raise data.max_length, lower "
                            f"rollout.max_new_tokens, or say data.too_long=truncate or data.too_long=drop."
                        )
                    case TooLong.drop:
                        dropped["longer than data.max_length − rollout.max_new_tokens"] += 1
                        continue
                    case TooLong.truncate:
                        tokens = cut_from_start(tokens, self.longest, self.tokenizer.bos_token_id)
                        dropped["kept, but truncated"] += 1
            prompts.append(Prompt(-1, tokens, as_text(row.prompt), row.answer, row.origin))
        return EncodedPrompts(prompts, dropped)


def truncated(pair: Pair, max_length: int, bos_id: int | None = None) -> Pair:
    """Cut the prompt at its start, keeping a begin-of-sequence token; then the answers at their end."""
    room = max(1, max_length - max(len(pair.chosen), len(pair.rejected)))
    prompt = cut_from_start(pair.prompt, room, bos_id)
    rest = max_length - len(prompt)
    return Pair(pair.index, prompt, pair.chosen[:rest], pair.rejected[:rest], pair.origin)


def cut_from_start(prompt: Ids, longest: int, bos_id: int | None = None) -> Ids:
    """Return the last `longest` tokens. If the prompt starts with a begin-of-sequence token, it stays first."""
    if len(prompt) <= longest or bos_id is None or prompt[0] != bos_id:
        return prompt[-longest:]
    return np.concatenate((prompt[:1], prompt[1:][len(prompt) - longest :]))


def numbered(pairs: Sequence[Pair]) -> list[Pair]:
    """Number the pairs by their place in the whole data set."""
    return [Pair(index, pair.prompt, pair.chosen, pair.rejected, pair.origin) for index, pair in enumerate(pairs)]


def numbered_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Number the prompts by their place in the whole data set."""
    return [replace(prompt, index=index) for index, prompt in enumerate(prompts)]


def _not_empty(prompt: Ids, origin: str) -> Ids:
    if not len(prompt):
        raise DataError(f"{origin}: field `prompt` has no tokens.")
    return prompt


def _as_messages(prompt: str | Messages) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def as_text(prompt: str | Messages) -> str:
    """Write messages as paragraphs, up to the start of the answer."""
    if isinstance(prompt, str):
        return prompt
    lines = [f"{message['role'].capitalize()}: {message['content']}" for message in prompt]
    return "\n\n".join([*lines, "Assistant: "])
