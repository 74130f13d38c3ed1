"""Shapes of rows: which columns a row has decides what it is, and how it becomes a prompt with its answers.

The first row of a source decides, by the forms below; columns may be declared (`data.columns`). All other rows must
have the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlexp.base import plain_json
from rlexp.base.errors import DataError
from rlexp.config.schema.row_kinds import ROWS_OF, Kind
from rlexp.training.dataset.messages import (
    FieldError,
    as_answer,
    as_messages,
    before_answers,
    dialogue,
    messages,
    shared_beginning,
    text_or_messages,
    with_system,
)
from rlexp.training.types import Messages, Row

Fields = Mapping[str, Any]
ALIASES = {  # other names of our fields, in the order in which they are looked for
    "prompt": ("question", "instruction", "query"),
    "messages": ("conversations", "conversation"),
    "completion": ("response", "output"),
    "system": ("system_prompt",),
    "options": ("chat_template_kwargs",),
}
BAD = (
    "is false, and supervised training learns every answer. Leave such rows out (data.bad_rows=drop), or train with "
    "loss=kto."
)
OPTIONAL = ("system", "tools", "options")  # of every form
COMPLETED = ("prompt", "completion")  # what a supervised row needs that may have an input
HELD = (  # kinds that rows of another kind hold: a prompt alone, a pair's chosen answer alone, or a good answer
    *((Kind.prompts, other) for other in (Kind.pairs, Kind.unpaired, Kind.supervised)),
    (Kind.supervised, Kind.pairs),
    (Kind.supervised, Kind.unpaired),
)


@dataclass(frozen=True)
class Form:
    """A form that rows have: the fields that they need and may have, in the words of this file."""

    kind: Kind
    needs: tuple[str, ...]
    read: Callable[[Fields], dict[str, Any]]  # the row's part of `Row`, from our fields
    may: tuple[str, ...] = ()
    asks: bool = True  # its rows have prompts

    @property
    def words(self) -> str:
        return f"{self.kind.value} ({', '.join(self.needs)})"


def recognised(fields: Fields, wanted: Kind | None, columns: Mapping[str, str], origin: str) -> Shape:
    """Return the shape of a source's rows, by its first row; of the wanted kind, or of any."""
    for ours, theirs in columns.items():
        if theirs not in fields:
            raise DataError(
                f"data.columns.{ours}={theirs}: {origin} has no such column, but {_listed(fields)}. Name one of them."
            )
    fitting = [Shape(form, by_field, dict(columns)) for form in FORMS if (by_field := _columns(form, fields, columns))]
    if (shape := _preferred(fitting, wanted)) is not None:
        return shape
    for form in FORMS:
        if form.kind is wanted and (missing := _missing_beside_others(form, fields, columns)):
            raise DataError(f"{origin}: field `{missing}` is missing; the row has {_listed(fields)}.")
    needed = " or ".join(" and ".join(f"`{need}`" for need in form.needs) for form in FORMS if form.kind is wanted)
    if wanted is None:
        raise DataError(f"{origin}: no shape of rows that is known. It has {_listed(fields)}. Name its columns: "
                        f"data.columns.prompt=…, data.columns.chosen=…, as docs/data.md says.")  # fmt: skip
    others = [shape.kind for shape in fitting][:1]
    is_other = "".join(f", as {ROWS_OF[other]} have" for other in others)
    halves = (wanted, others) == (Kind.unpaired, [Kind.pairs])
    raise DataError(
        f"{origin}: the run needs {ROWS_OF[wanted]}, with {needed}, and the row has {_listed(fields)}{is_other}. "
        f"{'Read each pair as two answers (data.unpair=true), give' if halves else 'Give'} other rows or another loss, "
        f"or name the columns: data.columns.{_first_missing(wanted, fields)}=COLUMN."
    )


def _preferred(fitting: Sequence[Shape], wanted: Kind | None) -> Shape | None:
    """Return the first shape of the wanted kind, else of one that holds it: first one with all declared columns, and a
    text without a prompt last. The prompt of a completion has its input, unless it has a label."""
    own = [shape for shape in fitting if wanted in (None, shape.kind)]
    more = [replace(shape, taken=wanted) for shape in fitting if shape.form.asks and (wanted, shape.kind) in HELD]
    completed = next((shape for shape in fitting if shape.form.needs == COMPLETED), None)
    if any(shape.kind is Kind.unpaired for shape in fitting):  # a completion with a label may be a bad one
        own = [shape for shape in own if shape is not completed]
    elif completed is not None:
        own = [_asking_input(shape, completed) if shape.kind is Kind.prompts else shape for shape in own]

    def rank(shape: Shape) -> tuple[int, bool]:
        unused = sum(1 for column in shape.declared if column not in shape.columns)
        return unused, not shape.form.asks

    return min([*own, *more], key=rank, default=None)


def _asking_input(prompts: Shape, completed: Shape) -> Shape:
    """Return a shape of prompts that have an input, as they have in supervised rows."""
    input_column = {ours: column for ours, column in completed.columns.items() if ours == "input"}
    form = replace(prompts.form, may=(*prompts.form.may, "input"))
    return replace(prompts, form=form, columns={**prompts.columns, **input_column})


def _missing_beside_others(form: Form, fields: Fields, declared: Mapping[str, str]) -> str | None:
    """Return the field that a row lacks which has another of the form's own fields."""
    missing = [ours for ours in form.needs if not any(name in fields for name in _names(ours, declared))]
    own = [ours for ours in form.needs if ours not in missing and ours != "prompt"]
    return _names(missing[0], declared)[0] if missing and own else None


def _first_missing(wanted: Kind, fields: Fields) -> str:
    needs = next(form.needs for form in FORMS if form.kind is wanted)
    return next((need for need in needs if need not in fields), needs[0])


def _columns(form: Form, fields: Fields, declared: Mapping[str, str]) -> dict[str, str] | None:
    """Return the column of each field of a form; None if a needed one is missing."""
    columns: dict[str, str] = {}
    for ours in (*form.needs, *form.may, *OPTIONAL):
        present = [name for name in _names(ours, declared) if name in fields]
        if present:
            columns[ours] = next((name for name in present if fields[name] is not None), present[0])
        elif ours in form.needs:
            return None
    return columns


def _names(ours: str, declared: Mapping[str, str]) -> tuple[str, ...]:
    return (declared[ours],) if ours in declared else (ours, *ALIASES.get(ours, ()))


def _listed(fields: Fields) -> str:
    return ", ".join(sorted(map(str, fields))) or "no columns"


@dataclass(frozen=True)
class Shape:
    """What the rows of a source are, and the columns in which the first row has our fields.

    A field that a form needs stands in the same column of all rows. Others are looked for in every row.
    """

    form: Form
    columns: Mapping[str, str]
    declared: Mapping[str, str]
    taken: Kind | None = None  # what is taken of them, if it is less: their prompts, or their chosen answers

    @property
    def kind(self) -> Kind:
        return self.taken or self.form.kind

    def words(self) -> str:
        """Say it as a person would: "pairs: `prompt` from `question`, `chosen`, `rejected`"."""
        first = sorted(self.columns.items(), key=lambda each: each[0] != "prompt")
        names = [f"`{ours}`" + (f" from `{column}`" if column != ours else "") for ours, column in first]
        return f"{self.kind.value}: {', '.join(names)}"

    def row(self, fields: Fields, origin: str, system: str | None, options: Mapping[str, Any]) -> Row:
        """Return a row; raise FieldError for one that cannot be used."""
        for ours in self.form.needs:
            if self.columns[ours] not in fields:
                self._refuse_missing(fields, ours)
        own = {ours: fields[self.columns[ours]] for ours in self.form.needs}
        for ours in (*self.form.may, *OPTIONAL):
            values = (fields.get(name) for name in _names(ours, self.declared))
            own[ours] = next((value for value in values if value is not None), None)
        try:
            parts = self.form.read(own)
            match self.taken:
                case Kind.prompts:
                    parts = _prompt_alone(self.form.kind, parts)
                case Kind.supervised:
                    if parts.get("label") is False:
                        raise FieldError("label", BAD)
                    parts = {"prompt": parts["prompt"], "answers": parts["answers"][:1]}
            prompt = parts.pop("prompt")
            if self.form.asks:
                prompt = with_system(prompt, _system(own) or system)
            return Row(prompt, origin=origin, tools=_tools(own), options={**options, **_options(own)}, **parts)
        except FieldError as error:  # the user knows the column
            raise FieldError(self.columns.get(error.field, error.field), error.rule) from None

    def _refuse_missing(self, fields: Fields, missing: str) -> None:
        other = next((form for form in FORMS if form.kind not in (self.form.kind, Kind.prompts)
                      and _columns(form, fields, {})), None)  # fmt: skip
        column = self.columns[missing]
        here = [need for need in self.form.needs if need != "prompt" and self.columns[need] in fields]
        if other is not None and not here:
            raise FieldError(column, f"is missing: the row has {_listed(fields)}, which make it {other.words}, and the "
                             f"rows before it are {self.form.words}. Give each shape a source of its own "
                             f"(data.sources).")  # fmt: skip
        raise FieldError(column, f"is missing; the row has {_listed(fields) if fields else 'none'}.")


def _prompt_alone(kind: Kind, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without its answers; a conversation up to its last one."""
    prompt = parts["prompt"]
    if kind is Kind.supervised and len(answer := as_answer(parts["answers"][0])) > 1:
        prompt = [*as_messages(prompt), *answer[:-1]]
    return {"prompt": prompt, "answers": ()}


# ---- fields of every form ----


def _system(own: Fields) -> str | None:
    system = own.get("system")
    if system is not None and not isinstance(system, str):
        raise FieldError("system", "must be a text.")
    return system


def _tools(own: Fields) -> Sequence[Any] | None:
    tools = _parsed(own.get("tools"), "tools")
    if tools is not None and not isinstance(tools, list):
        raise FieldError("tools", "must be a list of tools, or its JSON.")
    return tools or None


def _options(own: Fields) -> Mapping[str, Any]:
    options = _parsed(own.get("options"), "options")
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise FieldError("options", "must be a mapping of options for the template.")
    return {str(key): value for key, value in options.items() if value is not None}


def _parsed(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return plain_json.loads(value) if value else None
    except (ValueError, RecursionError):
        raise FieldError(name, "is a text, and not JSON.") from None


# ---- the forms ----


def _pairs(own: Fields) -> dict[str, Any]:
    return {**_two_answers(own), "margin": _margin(own)}


def _margin(own: Fields) -> float | None:
    """Return by how much the chosen answer is better: as the row says, or the difference of both answers' scores; None
    if neither is a number. Few losses ask for it, and they refuse a pair that has none."""
    margin = _number(own.get("margin"))
    if margin is not None:
        return margin
    scores = [_number(own.get(f"score_{side}")) for side in ("chosen", "rejected")]
    return None if scores[0] is None or scores[1] is None else _number(scores[0] - scores[1])


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer that no float is near
        return None


def _two_answers(own: Fields) -> dict[str, Any]:
    chosen, rejected = (_answer(own[name], name) for name in ("chosen", "rejected"))
    whole = tuple(_whole(answer) for answer in (chosen, rejected))
    if whole == (None, None) and own.get("prompt") is not None:
        prompt = _asked(own["prompt"])
        answers = (_to_last_answer(_after(own["prompt"], prompt, answer)) for answer in (chosen, rejected))
        return {"prompt": prompt, "answers": tuple(answers)}
    if whole == (None, None):
        raise FieldError("prompt", "is missing, and `chosen` and `rejected` are no whole conversations that share one.")
    if whole[0] is None or whole[1] is None:
        raise FieldError("chosen", "and `rejected` must both be whole conversations, or both be answers alone.")
    shared = shared_beginning(whole[0], whole[1])
    if not shared:
        raise FieldError("chosen", "and `rejected` are conversations that share no message before an answer.")
    prompt = whole[0][:shared]
    _refuse_other_prompt(own.get("prompt"), prompt)
    return {"prompt": prompt, "answers": (_to_last_answer(whole[0][shared:]), _to_last_answer(whole[1][shared:]))}


def _answer(value: Any, name: str) -> str | Messages:
    if isinstance(value, str) and value:
        return value
    if value is None or isinstance(value, str | bool | int | float):
        raise FieldError(name, "must be a text that is not empty (with chat messages, the answer alone).")
    return messages(value, name)


def _whole(answer: str | Messages) -> Messages | None:
    """Return an answer that is a whole conversation, with what was asked."""
    if isinstance(answer, str):
        return dialogue(answer)
    return answer if answer[0]["role"] != "assistant" else None


def _asked(value: Any) -> str | Messages:
    """Return a prompt. A dialogue as one text that ends with the call for an answer is a conversation."""
    prompt = text_or_messages(value, "prompt")
    talk = dialogue(prompt) if isinstance(prompt, str) else None
    return talk[:-1] if talk and talk[-1]["role"] == "assistant" and not talk[-1]["content"].strip() else prompt


def _after(value: Any, prompt: str | Messages, answer: str | Messages) -> str | Messages:
    """Return an answer without the space that a dialogue has between the call for it and its text."""
    is_dialogue = isinstance(value, str) and not isinstance(prompt, str)
    return answer.removeprefix(" ") if is_dialogue and isinstance(answer, str) else answer


def _to_last_answer(answer: str | Messages) -> str | Messages:
    if isinstance(answer, str):
        return answer
    last = max(place for place, message in enumerate(answer) if message["role"] == "assistant")
    if not answer[last]["content"] and answer[last].keys() <= {"role", "content"}:
        raise FieldError("answer", "ends with a message that is empty.")
    return answer[: last + 1]


def _refuse_other_prompt(given: Any, shared: Messages) -> None:
    if given is None:
        return
    prompt = as_messages(text_or_messages(given, "prompt"))
    texts = [message["content"].strip() for message in shared]
    if any(message["content"].strip() not in texts for message in prompt):
        raise FieldError("prompt", "is not in the beginning that the conversations in `chosen` and `rejected` share.")


def _unpaired(own: Fields) -> dict[str, Any]:
    label = own["label"]
    if not isinstance(label, bool):
        raise FieldError("label", "must be true or false.")
    return _completion(own) | {"label": label}


def _completion(own: Fields) -> dict[str, Any]:
    completion = _answer(own["completion"], "completion")
    asked = _with_input(own)
    prompt = _asked(asked)
    if not isinstance(completion, str) and completion[0]["role"] != "assistant":
        raise FieldError("completion", "must begin with a message of the role `assistant`.")
    return {"prompt": prompt, "answers": (_to_last_answer(_after(asked, prompt, completion)),)}


def _with_input(own: Fields) -> Any:
    asked, context = own["prompt"], own.get("input")
    if isinstance(asked, str) and isinstance(context, str) and context:
        return f"{asked}\n\n{context}"
    return asked


def _conversation(own: Fields) -> dict[str, Any]:
    prompt, answer = before_answers(messages(own["messages"], "messages"), "messages")
    return {"prompt": prompt, "answers": (answer,)}


def _text(own: Fields) -> dict[str, Any]:
    text = own["text"]
    if not isinstance(text, str) or not text:
        raise FieldError("text", "must be a text that is not empty.")
    return {"prompt": "", "answers": (text,)}


def _prompt(own: Fields) -> dict[str, Any]:
    answer = own.get("answer")
    is_number = type(answer) is int or (type(answer) is float and math.isfinite(answer))  # no float is near 10**400
    if answer is not None and not is_number and not (isinstance(answer, str) and answer):
        raise FieldError("answer", "must be a number or a text that is not empty. Leave it out if there is none.")
    expected = None if answer is None else str(answer)
    return {"prompt": _asked(_with_input(own)), "answers": (), "expected": expected}


FORMS = (
    Form(Kind.pairs, ("chosen", "rejected"), _pairs, may=("prompt", "margin", "score_chosen", "score_rejected")),
    Form(Kind.unpaired, ("prompt", "completion", "label"), _unpaired),
    Form(Kind.supervised, ("messages",), _conversation),
    Form(Kind.supervised, COMPLETED, _completion, may=("input",)),
    Form(Kind.prompts, ("prompt",), _prompt, may=("answer",)),
    Form(Kind.supervised, ("text",), _text, asks=False),
)
