"""Make a store once per machine: under a lock, in parallel, going on where a process that made it was killed.

A finished store lies under its key in the cache folder, one in the making beside it under `KEY.making`. The key is the
content of the rows, the tokenizer and the options; so what changed has another key, and nothing is ever stale.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rlexp.base.cache import locked
from rlexp.base.errors import DataError
from rlexp.base.file_hashes import unchanged
from rlexp.base.files import sync
from rlexp.training.dataset.recipe import Names, Problem, Recipe
from rlexp.training.dataset.store import META, Appending, Store, damage, is_finished
from rlexp.training.dataset.tokenize_worker import Ended, Made, PartOf, made_beside

INLINE = 4  # parts that are tokenized before other processes are started: they take seconds to come up
AFTER_A_PROBLEM = 64  # parts that are still read, to report more problems at once
SHOWN = 10  # problems in a message


@dataclass(frozen=True)
class Work:
    """The rows of a source: how they are read, and what becomes of them."""

    name: str  # for messages and the progress bar
    parts: Callable[[], Iterator[PartOf]]
    size: int  # of all parts, in the unit of `Part.done`
    names: Names
    recipe: Callable[[Iterator[PartOf]], Recipe]  # from the first rows
    contents: Callable[[], Any]  # of the rows, as it is now
    known: Any  # what it was when the key was made
    workers: int
    shown: bool  # with a progress bar
    version: str | None = None  # of a set that may change under its name


def store_of(cache: Path, key: str, work: Work, first: int = 0) -> Store:
    """Return the store of this key; make it if there is none, or if it is damaged."""
    place = cache / "tokens" / key
    try:
        if place.exists() and _wrong(place) is None:  # also in a cache that may only be read
            return Store(place, work.names, first)
        with locked(place, f"waits for another run that tokenizes {work.name}." if work.shown else ""):
            if place.exists() and (wrong := _wrong(place)) is not None:
                sys.stderr.write(f"rlexp: {place}: is damaged ({wrong}), and is made anew.\n")
                shutil.rmtree(place)
            if not place.exists():
                _make(place, work)
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
    return Store(place, work.names, first)


def _wrong(place: Path) -> str | None:
    """Read a store whole when it was last changed after it was last looked at; a look at its files else."""
    if not (place / META).exists():
        return f"{META} is missing"
    return unchanged(place / META, lambda: damage(place), [place / name for name in os.listdir(place)])


def _make(place: Path, work: Work) -> None:
    making = place.with_name(f"{place.name}.making")
    if not is_finished(making):  # else its maker was killed before it had its name
        try:
            _write(making, work, place)
        except Ended:  # what is made is kept: the next start goes on from it
            raise
        except DataError:  # of rows that will have another key when they are mended
            shutil.rmtree(making, ignore_errors=True)
            raise
    os.rename(making, place)
    sync(place.parent)


def _write(making: Path, work: Work, place: Path) -> None:
    recipe, parts = _recipe(work, work.parts())
    appending = Appending(making)
    try:
        problems = _append(appending, recipe, itertools.islice(parts, appending.blocks, None), work)
        if work.contents() != work.known:
            raise DataError(f"{work.name}: was changed while it was read. Start again when it is whole.")
        if problems:
            raise _refusal(problems, work, place)
        appending.finish(recipe.kind, {"shape": recipe.shape.words()})
    finally:
        appending.close()


def _recipe(work: Work, parts: Iterator[PartOf]) -> tuple[Recipe, Iterator[PartOf]]:
    """Look at the first rows, and return the recipe with all parts again."""
    seen: list[PartOf] = []

    def looked_at() -> Iterator[PartOf]:
        for each in parts:
            seen.append(each)
            yield each

    recipe = work.recipe(looked_at())
    return recipe, itertools.chain(seen, parts)


def _append(appending: Appending, recipe: Recipe, parts: Iterator[PartOf], work: Work) -> list[Problem]:
    """Append every part, until a row is a problem; then read on for a while to find more."""
    problems: list[Problem] = []
    after = 0
    passed, parts = itertools.tee(parts)  # the parts in flight: few
    with _progress(work) as show:
        for (block, found), (_, part) in zip(_made(recipe, parts, work.workers), passed, strict=True):
            problems += found
            if problems:
                after += 1
                if after > AFTER_A_PROBLEM:
                    break
                continue
            appending.append(block)
            show(part.done)
    return problems


@contextlib.contextmanager
def _progress(work: Work) -> Iterator[Callable[[int], None]]:
    """Show on a terminal how far the source is read."""
    if not (work.shown and sys.stderr.isatty()):
        yield lambda _done: None
        return
    tqdm.set_lock(threading.RLock())  # its own is shared between processes, and says so when a process fails
    with tqdm(
        total=work.size, desc=f"tokenizing {work.name}", unit="B", unit_scale=True, delay=1.0, leave=False
    ) as bar:
        yield lambda done: bar.update(done - bar.n)


def _made(recipe: Recipe, parts: Iterator[PartOf], workers: int) -> Iterator[Made]:
    """Tokenize the first parts here, and many parts in processes beside each other."""
    for file, part in itertools.islice(parts, INLINE if workers > 1 else None):
        yield recipe.block(file, part)
    more = next(parts, None)
    if more is not None:
        yield from made_beside(recipe, itertools.chain([more], parts), workers)


def _refusal(problems: list[Problem], work: Work, place: Path) -> DataError:
    first, others = problems[0].said, len(problems) - 1
    if not any(problem.bad for problem in problems):
        return DataError(first + (f" {others:,} other rows are too long, too." if others else ""))
    if not others:
        return DataError(first)
    report = place.with_name(f"{place.name}.problems.txt")
    report.write_text("".join(f"{problem.said}\n" for problem in problems), encoding="utf-8")
    shown = "".join(f"\n  {problem.said}" for problem in problems[:SHOWN])
    return DataError(
        f"{work.name}: {len(problems):,} rows cannot be used.{shown}\n"
        + (f"  … and {len(problems) - SHOWN:,} more, all in {report}\n" if len(problems) > SHOWN else "")
        + "Mend them, or leave unusable rows out with data.bad_rows=drop."
    )
