"""Make a store once per machine: under a lock, in parallel, going on where a process that made it was killed.

A finished store lies under its key in the cache folder, one in the making beside it under `KEY.making`. The key is the
content of the rows, the tokenizer and the options; so what changed has another key, and nothing is ever stale.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlexp.base.errors import DataError
from rlexp.base.made_once import is_whole, making
from rlexp.base.waiting import progress
from rlexp.training.dataset.hub import HubSplit
from rlexp.training.dataset.recipe import Recipe
from rlexp.training.dataset.row_files import Files, PartOf, rows_in
from rlexp.training.dataset.store import Origin, Store, StoreInTheMaking
from rlexp.training.dataset.tokenize_worker import Ended, Made, made_beside
from rlexp.training.dataset.tokens import Refused

INLINE = 4  # parts that are tokenized before other processes are started: they take seconds to come up
AFTER_A_PROBLEM = 64  # parts that are still read, to report more problems at once
SHOWN = 10  # problems in a message


@dataclass(frozen=True)
class Work:
    """The rows of a source: how they are read, and what becomes of them."""

    name: str  # for messages and the progress bar
    rows: Files | HubSplit
    first: int | None  # so many of the rows; None: all
    names: Origin
    recipe: Callable[[Iterator[PartOf]], Recipe]  # from the first rows
    known: Any  # the rows' contents when the key was made
    workers: int
    shown: bool  # with a progress bar

    def parts(self) -> Iterator[PartOf]:
        count = self.first
        for file, part in self.rows.parts():
            rows = rows_in(part) if count is not None else 0
            if count is not None and rows >= count:
                ends = [end for end, row in enumerate(part.rows, 1) if not isinstance(row, bytes) or row.strip()]
                yield file, replace(part, rows=part.rows[: ends[count - 1]])
                return
            yield file, part
            count = count and count - rows


def store_of(cache: Path, key: str, work: Work) -> Store:
    """Return the store of this key; make it if there is none, or if it is damaged."""
    place = cache / "tokens" / key
    try:
        if not is_whole(place):  # a whole one is also used in a cache that may only be read
            with making(place, f"waits for another run that tokenizes {work.name}." if work.shown else "") as folder:
                if folder is not None:
                    _make(folder, work, place)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DataError(
                f"data.cache={cache}: has no room for the tokens of {work.name} ({error.strerror}). Free some and "
                f"start again: it continues where it stopped. Or give another folder: data.cache=FOLDER."
            ) from None
        raise DataError(
            f"data.cache={cache}: cannot be written ({error.strerror}). Give a folder where you may write: "
            f"data.cache=FOLDER."
        ) from None
    return Store(place, work.names)


def _make(folder: Path, work: Work, place: Path) -> None:
    try:
        first, parts = itertools.tee(work.parts())
        recipe = work.recipe(first)
        del first  # or all parts would be kept for it
        with contextlib.closing(StoreInTheMaking(folder)) as store:
            problems = _append(store, recipe, itertools.islice(parts, len(store.facts), None), work)
            if work.rows.contents() != work.known:
                raise DataError(f"{work.name}: was changed while it was read. Start again when it is whole.")
            if problems:
                raise _refusal(problems, work, place)
            store.complete(recipe.shape.kind, {"shape": recipe.shape.words()})
    except Ended:  # what is made is kept: the next start goes on from it
        raise
    except DataError:  # of rows that will have another key when they are mended
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _append(store: StoreInTheMaking, recipe: Recipe, parts: Iterator[PartOf], work: Work) -> list[Refused]:
    """Append every part, until a row is a problem; then read on for a while to find more."""
    problems: list[Refused] = []
    after = shown = 0
    passed, parts = itertools.tee(parts)  # the parts in flight: few
    bar = {"total": work.rows.size, "desc": f"tokenizing {work.name}", "unit": "B", "unit_scale": True, "delay": 1.0}
    with progress(work.shown, **bar) as show:
        for (block, refused), (_, part) in zip(_made(recipe, parts, work.workers), passed, strict=True):
            problems += refused
            if problems:
                after += 1
                if after > AFTER_A_PROBLEM:
                    break
                continue
            store.add(block)
            show(part.done - shown)
            shown = part.done
    return problems


def _made(recipe: Recipe, parts: Iterator[PartOf], workers: int) -> Iterator[Made]:
    """Tokenize the first parts here, and many parts in processes beside each other."""
    for file, part in itertools.islice(parts, INLINE if workers > 1 else None):
        yield recipe.block(file, part)
    more = next(parts, None)
    if more is not None:
        yield from made_beside(recipe, itertools.chain([more], parts), workers)


def _refusal(problems: list[Refused], work: Work, place: Path) -> DataError:
    first, others = problems[0].message, len(problems) - 1
    if not any(problem.bad for problem in problems):
        return DataError(first + (f" {others:,} other rows are too long, too." if others else ""))
    if not others:
        return DataError(first)
    report = place.with_name(f"{place.name}.problems.txt")
    report.write_text("".join(f"{problem.message}\n" for problem in problems), encoding="utf-8")
    shown = "".join(f"\n  {problem.message}" for problem in problems[:SHOWN])
    return DataError(
        f"{work.name}: {len(problems):,} rows cannot be used.{shown}\n"
        + (f"  … and {len(problems) - SHOWN:,} more, all in {report}\n" if len(problems) > SHOWN else "")
        + "Mend them, or leave unusable rows out with data.bad_rows=drop."
    )
