"""Rows of preference pairs that are conversations, in the shapes that data sets have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlexp.verify.records import SIDES

Row = dict[str, Any]
Messages = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


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


SHAPES: tuple[Callable[[Row], Row], ...] = (text_only, whole, dialogue, from_value, of_several_turns, as_question)


def hh(shared: Path, rows: int = 200) -> list[Row]:
    lines = (shared / "data" / "hh_helpful_base" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:rows]
    return [{name: json.loads(line)[name] for name in ("prompt", *SIDES)} for line in lines]
