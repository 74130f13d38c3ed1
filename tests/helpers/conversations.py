"""Rows of preference pairs that are conversations, in the shapes that data sets have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.rows import assistant, user
from tests.oracles.examples import SIDES

Row = dict[str, Any]
Messages = list[dict[str, Any]]


def text_only(row: Row) -> Row:
    return {"prompt": row["prompt"][-1]["content"], "chosen": row["chosen"], "rejected": row["rejected"]}


def answered(row: Row) -> tuple[Messages, Messages]:
    chosen, rejected = ([*row["prompt"], assistant(row[side])] for side in SIDES)
    return chosen, rejected


def whole(row: Row) -> Row:
    return dict(zip(SIDES, answered(row), strict=True))


def dialogue(row: Row) -> Row:
    named = {"user": "Human", "assistant": "Assistant"}
    return {side: "".join(f"\n\n{named[each['role']]}: {each['content']}" for each in talk)
            for side, talk in zip(SIDES, answered(row), strict=True)}  # fmt: skip


def from_value(row: Row) -> Row:
    named = {"user": "human", "assistant": "gpt"}
    chosen, rejected = ([{"from": named[each["role"]], "value": each["content"]} for each in talk]
                        for talk in answered(row))  # fmt: skip
    return {"chosen": chosen, "rejected": rejected}


def of_several_turns(row: Row) -> Row:
    """Ask the first question only; all that follows is the answer."""
    chosen, rejected = answered(row)
    return {"prompt": chosen[:1], "chosen": chosen[1:], "rejected": rejected[1:]}


def as_question(row: Row) -> Row:
    asked = text_only(row)
    return {"question": asked.pop("prompt"), **asked, "system_prompt": "Be brief."}


def with_its_question(row: Row) -> Row:
    return {"prompt": row["prompt"][0]["content"], **whole(row), "score_chosen": 8.0, "id": "x"}


def in_parts(row: Row) -> Row:
    return {**row, "prompt": [{**each, "content": [{"type": "text", "text": each["content"]}]}
                              for each in row["prompt"]]}  # fmt: skip


def one_message(row: Row) -> Row:
    return {"prompt": row["prompt"], **{side: assistant(row[side]) for side in SIDES}}


def called_for(row: Row) -> Row:
    asked = dialogue({**row, "chosen": ""})["chosen"].removesuffix(" ")
    return {"prompt": asked, **{side: f" {row[side]}" for side in SIDES}}


def asked_on(row: Row) -> Row:
    return {"prompt": row["prompt"], **{side: [assistant(row[side]), user(f"And {side}?")] for side in SIDES}}


SHAPES: tuple[Callable[[Row], Row], ...] = (text_only, whole, dialogue, from_value, of_several_turns, as_question,
                                            with_its_question, in_parts, one_message, called_for, asked_on)  # fmt: skip


def hh(shared: Path, rows: int = 200) -> list[Row]:
    lines = (shared / "data" / "hh_helpful_base" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:rows]
    return [{name: json.loads(line)[name] for name in ("prompt", *SIDES)} for line in lines]
