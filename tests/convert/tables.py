"""Tables of arguments, for the least of a file, and of what becomes of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rlexp.config.schema import Config
from rlexp.convert.conversion import Conversion
from rlexp.convert.experiment import composed, overrides, text_of
from rlexp.convert.rules import Fate
from tests.convert.texts import conversion, named, values, written

COUNTED = re.compile(
    "NPROC|VISIBLE|include|nproc_per_node|config_file|num_processes"
)  # in files that say how many GPUs
IMAGES = "Images: "
OTHER, ABSENT, NEEDLESS, INSTEAD, REMARK = Fate.OTHER, Fate.ABSENT, Fate.NEEDLESS, Fate.INSTEAD, "remark"
# Our keys with their values, None for one that nothing sets; behind a fate, the arguments that have it, separated by
# commas, or an empty text if none has it; and behind REMARK, what the comments say, even without --verbose.
Becomes = Mapping[str | Fate, Any]
# For the least of a file, with the trainer if that is TRL's: the arguments that follow, and what is wanted of them.
Table = Mapping[str | tuple[str, str], Mapping[str, Any]]


def cases(table: Table) -> list[Any]:
    """Return the rows of a table as cases of a test: the text of a file, its trainer, and what is wanted."""
    rows_of_all = []
    for key, rows in table.items():
        base, trainer = (key, None) if isinstance(key, str) else key
        for more, wanted in rows.items():
            name = "; ".join(filter(None, [trainer, *more.splitlines()])) or "defaults"
            text = f"{base}{more}\n" if base.endswith("\n") else base + more
            rows_of_all.append(pytest.param(text, trainer, wanted, id=name))
    return rows_of_all


def of_eight(text: str, trainer: str | Sequence[str] | None = None) -> Conversion:
    """Convert a text for 8 GPUs, unless it says how many there are."""
    return conversion(text, trainer, None if COUNTED.search(text) else 8)


def comments(conv: Conversion) -> str:
    """Return the file that is written without --verbose, in one line without signs of comments."""
    lines = [line.removeprefix("#") for line in text_of(conv, "mine", "theirs", verbose=False).splitlines()]
    return " ".join(" ".join(lines).split())


def assert_becomes(conv: Conversion, wanted: Becomes) -> None:
    ours = {key: value for key, value in wanted.items() if isinstance(key, str) and key != REMARK}
    assert {key: values(conv).get(key) for key in ours} == ours
    for fate, names in ((key, value) for key, value in wanted.items() if isinstance(key, Fate)):
        assert set(filter(None, names.split(", "))) <= named(conv, fate), (fate, named(conv, fate))
        assert names or not conv.lines[fate], fate
    text = comments(conv)
    assert wanted.get(REMARK, "") in text
    assert (IMAGES in text) == (wanted.get(REMARK) == IMAGES)
    assert not [line for lines in conv.lines.values() for line in lines if lines.count(line) > 1]


def experiment_of(conv: Conversion, *words: str) -> Config:
    """Compose the file that is written, with its command and more words."""
    return composed(written(conv), "mine", [*overrides(conv), *words])
