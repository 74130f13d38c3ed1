"""Rows as token ids, written a second time: templates, edges, ends, and which tokens are trained on.

One sequence at a time, and a mask for every answer. No code comes from training/dataset/.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Any

import numpy as np
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from rlexp.base.errors import DataError
from rlexp.config.schema import Config, HFModelConfig
from rlexp.config.schema.data import BadRows, DataConfig, RowsDataConfig, TemplateUse, TooLong
from rlexp.config.schema.data_sources import sources_of
from rlexp.config.schema.row_kinds import SIDES as SIDES_OF
from rlexp.config.schema.row_kinds import Kind
from rlexp.verify.recording import ANSWER, TokenExample
from tests.oracles.rows import ASSISTANT, Asked, Messages, Unusable, rows_of
from tests.oracles.vocabulary import Bytes

HELD_OUT = 20261123  # the draw of held-out rows
SWITCHES = re.compile(r"/no_think(?!\w)|/think(?!\w)|/system_override(?!\w)")  # words to a template
STAND_IN = "\x02here\x03"  # takes an answer's place, to see what a template writes after it

Parts = list[tuple[str, bool]]  # what follows the prompt, and whether it is trained on


@dataclass(frozen=True)
class ExampleSet:
    """The examples of a run in their order, and how many of those to train on come from each source."""

    train: list[TokenExample]
    held_out: list[TokenExample]
    sizes: tuple[int, ...]


def load_tokenizer(cfg: Config) -> Any:
    return AutoTokenizer.from_pretrained(cfg.model.path) if isinstance(cfg.model, HFModelConfig) else Bytes()


def examples_of(cfg: Config, tokenizer: Any) -> ExampleSet:
    """Return the examples that the loss is trained on."""
    if not cfg.data.unpair:
        room = cfg.rollout.max_new_tokens if cfg.loss.rows is Kind.prompts else 0
        return set_of(cfg.data, cfg.loss.rows, tokenizer, room=room)
    pairs = set_of(cfg.data, Kind.pairs, tokenizer)
    train, held_out = ([answer for pair in part for answer in _both(pair)] for part in (pairs.train, pairs.held_out))
    return ExampleSet(train, held_out, tuple(2 * size for size in pairs.sizes))


def _both(pair: TokenExample) -> Iterator[TokenExample]:
    for side, answer in pair.answers.items():
        yield replace(pair, answers={ANSWER: answer}, masks={ANSWER: pair.masks[side]}, label=side == "chosen")


def set_of(cfg: DataConfig, kind: Kind, tokenizer: Any, *, room: int = 0) -> ExampleSet:
    """Read and tokenize the data set, without rows that are dropped. `room` tokens of each are left to its answers."""
    train, held_out = (_kept(cfg, kind, tokenizer, room, held_out=held) for held in (False, True))
    if isinstance(cfg, RowsDataConfig) and cfg.eval_size:
        order = np.random.default_rng([HELD_OUT, len(train)]).permutation(len(train)).tolist()
        share = isinstance(cfg.eval_size, float)
        out = set(order[: max(1, int(Decimal(str(cfg.eval_size)) * len(train))) if share else int(cfg.eval_size)])
        held_out = [each for place, each in enumerate(train) if place in out]
        train = [each for place, each in enumerate(train) if place not in out]
    sources = len(sources_of(cfg)) if isinstance(cfg, RowsDataConfig) else 1
    sizes = tuple(sum(source == number for source, _ in train) for number in range(sources))
    return ExampleSet([each for _, each in train], [each for _, each in held_out], sizes)


def _kept(cfg: DataConfig, kind: Kind, tokenizer: Any, room: int, *, held_out: bool) -> list[tuple[int, TokenExample]]:
    """Return the examples that are trained on or held out, each with the number of its source."""
    of_rows = cfg if isinstance(cfg, RowsDataConfig) else None
    writer = Writer(tokenizer, templates=of_rows is None or of_rows.template is TemplateUse.auto)
    examples = []
    for source, row in rows_of(cfg, kind, held_out=held_out):
        try:
            if isinstance(row, Unusable):
                raise row
            example = writer.example(row, SIDES_OF[kind]) if kind is not Kind.prompts else writer.prompt(row)
        except Unusable as error:
            if of_rows is not None and of_rows.bad_rows is BadRows.drop:
                continue
            raise DataError(str(error)) from None
        fitted = _fitted(example, cfg.max_length - room, cfg.too_long, tokenizer.bos_token_id)
        if fitted is not None:
            examples.append((source, fitted))
    return examples


def _fitted(example: TokenExample, most: int, too_long: TooLong, begin: int | None) -> TokenExample | None:
    """Return an example as it is trained on, of at most so many tokens; None if it is dropped."""
    longest = len(example.prompt) + max(map(len, example.answers.values()), default=0)
    if longest > most:
        if too_long is TooLong.error:
            raise DataError(f"{example.origin}: {longest} tokens, and data.max_length leaves it {most}.")
        if too_long is TooLong.drop:
            return None
        example = cut(example, most, begin)
    answers = [answer.tolist() for answer in example.answers.values()]
    same = len(answers) == 2 and answers[0] == answers[1]
    return None if same or not all(mask.any() for mask in example.masks.values()) else example


def cut(example: TokenExample, most: int, begin: int | None) -> TokenExample:
    """Cut what is too long: keep the beginning of its answers, and the end of its prompt after its BOS token."""
    room = max(1, most - max(map(len, example.answers.values()), default=0))
    prompt = example.prompt.tolist()
    if len(prompt) > room:
        first = [begin] if begin is not None and prompt[0] == begin else []
        prompt = [*first, *prompt[len(prompt) - (room - len(first)) :]]
    rest = most - len(prompt)
    answers, masks = ({side: each[:rest] for side, each in of.items()} for of in (example.answers, example.masks))
    return replace(example, prompt=np.asarray(prompt, dtype=np.int64), answers=answers, masks=masks)


# ---- an example as text ----


@dataclass(frozen=True)
class Writer:
    """Writes rows as text, by the tokenizer's chat template if it has one and it may be used, and tokenizes them."""

    tokenizer: Any
    templates: bool = True

    @property
    def templated(self) -> bool:
        return self.templates and bool(self.tokenizer.chat_template)

    def example(self, row: Asked, sides: Sequence[str]) -> TokenExample:
        write = self._by_template if self.templated and row.prompt else _as_paragraphs
        written = {side: write(row, answer) for side, answer in zip(sides, row.answers, strict=True)}
        prompt = min((text for text, _ in written.values()), key=len)
        tokens = {}
        for side, (longer, parts) in written.items():
            more: Parts = [(longer[len(prompt) :], False)] if longer != prompt else []
            tokens[side] = self._tokens(prompt, [*more, *parts])
        asked = tokens[sides[0]][0]
        if not asked:
            raise Unusable(f"{row.origin}: the prompt has no tokens.")
        answers = {side: np.asarray(ids, dtype=np.int64) for side, (_, ids, _) in tokens.items()}
        masks = {side: np.asarray(mask, dtype=bool) for side, (_, _, mask) in tokens.items()}
        return TokenExample(np.asarray(asked, dtype=np.int64), answers, masks, row.origin, row.margin, row.label)

    def prompt(self, row: Asked) -> TokenExample:
        """Write a prompt alone, with the call for an answer. A reward is given it without a template."""
        text = _in_text(row.prompt)
        if self.templated:
            asked = self._ids(_Page(self.tokenizer, row, _messages(row.prompt, "user"), asking=True).whole)
        else:
            _refuse_tools(row)
            asked = self._leading() + self._ids(text)
        if not asked:
            raise Unusable(f"{row.origin}: the prompt has no tokens.")
        return TokenExample(np.asarray(asked, dtype=np.int64), {}, {}, row.origin, text=text, right=row.right)

    # ---- by the template ----

    def _by_template(self, row: Asked, answer: str | Messages) -> tuple[str, Parts]:
        asked = _messages(row.prompt, "user")
        answered = _messages(answer, ASSISTANT)
        page = _Page(self.tokenizer, row, [*asked, *answered])
        if len(answered) == 1:
            start = page.begins(len(asked))
            return page.whole[:start], [(page.whole[start:], True)]
        spans = [(page.begins(place), page.ends(place))
                 for place in range(len(asked), len(page.talk)) if page.talk[place]["role"] == ASSISTANT]  # fmt: skip
        start = at = page.begins(len(asked))
        parts: Parts = []
        for begin, end in spans:
            if begin < at:
                raise Unusable(f"{row.origin}: the template changes the order of the messages.")
            parts += [(page.whole[at:begin], False), (page.whole[begin:end], True)]
            at = end
        parts.append((page.whole[at:], False))
        return page.whole[:start], [(text, trained) for text, trained in parts if text or trained]

    # ---- as tokens ----

    def _tokens(self, prompt: str, parts: Parts) -> tuple[list[int], list[int], list[bool]]:
        """Return the tokens of a prompt and of what follows it, and which of these are trained on."""
        asked = self._ids(prompt)
        text = prompt + "".join(part for part, _ in parts)
        whole = self._ids(text)
        answer, mask = whole[len(asked) :], None
        if whole[: len(asked)] == asked:
            if all(trained for _, trained in parts):
                mask = [True] * len(answer)
            else:
                mask = self._mask(text, len(prompt), len(asked), parts)
        if mask is None:  # a token spans an edge
            all_trained = all(trained for _, trained in parts)
            pieces = [("".join(part for part, _ in parts), True)] if all_trained else parts
            apart = [(self._after_something(part), trained) for part, trained in pieces]
            answer = [token for tokens, _ in apart for token in tokens]
            mask = [trained for tokens, trained in apart for _ in tokens]
        end = self.tokenizer.eos_token_id
        if end is not None and not self._ended(answer, end):
            answer, mask = [*answer, end], [*mask, True]
        led = (self._leading() if not self.templated or not prompt else []) + asked
        if prompt or led:
            return led, answer, mask
        return answer[:1], answer[1:], mask[1:]  # nothing predicts the first token of a text

    def _ended(self, answer: Sequence[int], end: int) -> bool:
        """Say whether an answer ends: by the end of sequence, or by a special token of its template, and a newline."""
        if not self.templated:
            return answer[-1:] == [end]
        added = self.tokenizer.added_tokens_decoder
        special = {*self.tokenizer.all_special_ids, *(number for number in added if added[number].special)}
        if len(answer) > 1 and not self.tokenizer.decode(answer[-1:]).strip():
            answer = answer[:-1] if answer[-1] not in special else answer
        return bool(answer) and answer[-1] in special

    def _mask(self, text: str, first: int, tokens: int, parts: Parts) -> list[bool] | None:
        """Return which tokens after the first ones are trained on; None if one of them stands in two parts."""
        owner = [-1] * first + [number for number, (part, _) in enumerate(parts) for _ in part]
        mask = []
        for begin, end in self._places(text)[tokens:]:
            if begin == end or len(set(owner[begin:end])) > 1:
                return None
            mask.append(owner[begin] >= 0 and parts[owner[begin]][1])
        return mask

    def _places(self, text: str) -> list[tuple[int, int]]:
        """Return the characters of each token. Some tokenizers do not count a token's spaces: they are those between
        it and the token before."""
        encoded = self.tokenizer(text, add_special_tokens=False)
        places, before = [], 0
        for place in range(len(encoded["input_ids"])):
            begin, end = encoded.token_to_chars(place)
            places.append((min(begin, before), end))
            before = end
        return places

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _leading(self) -> list[int]:
        """Return the special tokens that the tokenizer puts before a text."""
        if isinstance(self.tokenizer, Bytes):
            return []
        encoded = self.tokenizer("a", add_special_tokens=True, return_special_tokens_mask=True)
        return list(encoded["input_ids"][: encoded["special_tokens_mask"].index(0)])

    def _after_something(self, text: str) -> list[int]:
        """Tokenize a text that goes on another. Some tokenizers put a space before a text: not after another one."""
        alone = self._ids(text)
        return alone if self._behind("a") in (None, self._ids("a")) else self._behind(text) or alone

    def _behind(self, text: str) -> list[int] | None:
        """Return the tokens of a text behind the first of a few others that no token joins to it."""
        for other in ("\n", ".", "x", "1", getattr(self.tokenizer, "eos_token", None) or ""):
            before, both = self._ids(other), self._ids(other + text)
            if both[: len(before)] == before:
                return both[len(before) :]
        return None


class _Day(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> _Day:
        return cls(2024, 7, 26, tzinfo=tz)


@contextlib.contextmanager
def _the_same_day() -> Iterator[None]:
    """To a template that asks, it is always 26 July 2024: the library's clock stands still."""
    clock = vars(chat_template_utils)
    before, clock["datetime"] = clock["datetime"], _Day
    try:
        yield
    finally:
        clock["datetime"] = before


class _Page:
    """A conversation as the template writes it; `asking`: with a call for an answer at its end."""

    def __init__(self, tokenizer: Any, row: Asked, talk: Messages, *, asking: bool = False) -> None:
        self.tokenizer, self.row, self.talk = tokenizer, row, talk
        self.added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        self.whole = self.written(talk, asking=asking)
        self._refuse_silence(asking=asking)

    def _refuse_silence(self, *, asking: bool) -> None:
        """Raise if the system prompt, a tool or a call leaves no trace: one at a time gets a name that is found."""
        plain = SWITCHES.sub("", self.whole)
        for message in self.talk:
            if message["role"] == "system" and SWITCHES.sub("", message["content"]).strip() not in plain:
                raise Unusable(f"{self.row.origin}: the template leaves out the system prompt.")
        calls = [call for message in self.talk for call in message.get("tool_calls", [])]
        for number in range(len(self.row.extra.get("tools", [])) + len(calls)):
            extra, talk = copy.deepcopy((self.row.extra, list(self.talk)))
            thing = [*extra.get("tools", []), *(call for each in talk for call in each.get("tool_calls", []))][number]
            while isinstance(thing, dict) and isinstance(thing.get("function"), dict):
                thing = thing["function"]
            if not isinstance(thing, dict) or not thing.get("name"):
                continue
            thing["name"] = "somethingelse"
            if "somethingelse" not in self.written(talk, asking=asking, extra=extra):
                raise Unusable(f"{self.row.origin}: the template leaves out a tool, or a call of one.")

    def written(
        self, talk: Sequence[Mapping[str, Any]], *, asking: bool = False, extra: Mapping[str, Any] | None = None
    ) -> str:
        asks = "strftime_now" in str(self.tokenizer.chat_template)
        try:
            with _the_same_day() if asks else contextlib.nullcontext():
                return str(self.tokenizer.apply_chat_template(
                    list(talk), tokenize=False, add_generation_prompt=asking,
                    **(self.row.extra if extra is None else extra),
                ))  # fmt: skip
        except Exception as error:
            raise Unusable(f"{self.row.origin}: the chat template raises: {error}") from error

    def begins(self, place: int) -> int:
        """Return where the answer at a place begins: after the template's call for it, or where the two part."""
        call, plain = self.written(self.talk[:place], asking=True), self.written(self.talk[:place])
        if self.whole.startswith(call):
            return len(call)
        parted = self._alike(call, self.whole)
        if parted < len(plain) or not self.whole.startswith(plain):
            raise Unusable(f"{self.row.origin}: the template changes the prompt when an answer follows.")
        return parted

    def ends(self, place: int) -> int:
        """Return where the message at a place ends: behind what the template writes after it, whatever follows."""
        without = [*self.talk[:place], {**self.talk[place], "content": STAND_IN}]
        *_, ending = self.written(without).rpartition(STAND_IN)
        before, _, rest = self.written([*without, *self.talk[place + 1 :]]).rpartition(STAND_IN)
        shared = self._alike(ending, rest)
        if self.whole.startswith(before) and self.whole.endswith(rest) and (shared or not ending):
            return len(self.whole) - len(rest) + shared
        alone = self.written(self.talk[: place + 1])
        if not self.whole.startswith(alone):
            raise Unusable(f"{self.row.origin}: it cannot be seen where message {place + 1} ends.")
        return len(alone)

    def _alike(self, one: str, other: str) -> int:
        """Return how many characters two texts begin with alike; a special token is one character."""
        marks = "|".join([*map(re.escape, self.added), "."])
        length = 0
        for ours, theirs in zip(re.finditer(marks, one, re.S), re.finditer(marks, other, re.S), strict=False):
            if ours[0] != theirs[0]:
                break
            length = ours.end()
        return length


def _messages(text: str | Messages, role: str) -> Messages:
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def _as_paragraphs(row: Asked, answer: str | Messages) -> tuple[str, Parts]:
    """Write a row without a template: a text as it is, and messages as paragraphs that name who speaks."""
    _refuse_tools(row)
    parts: Parts = []
    for place, message in enumerate(_messages(answer, ASSISTANT)):
        if message["role"] != ASSISTANT:
            parts.append((f"\n\n{_paragraph(message)}", False))
            continue
        if place:
            parts.append(("\n\nAssistant: ", False))
        parts.append((message["content"], True))
    while not parts[-1][1]:
        parts.pop()
    joined: Parts = []
    for text, trained in parts:  # paragraphs that are not trained on are one part
        if joined and not trained and not joined[-1][1]:
            joined[-1] = (joined[-1][0] + text, False)
        else:
            joined.append((text, trained))
    return _in_text(row.prompt), joined


def _refuse_tools(row: Asked) -> None:
    talk = [*_messages(row.prompt, "user"), *(each for answer in row.answers for each in _messages(answer, ASSISTANT))]
    if row.extra.get("tools") or any(message.get("tool_calls") for message in talk):
        raise Unusable(f"{row.origin}: no template writes its tools.")


def _in_text(prompt: str | Messages) -> str:
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{_paragraph(message)}\n\n" for message in prompt) + "Assistant: "


def _paragraph(message: Mapping[str, Any]) -> str:
    return f"{message['role'].capitalize()}: {message['content']}"
