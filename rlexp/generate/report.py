"""Prompts and answers for people, and as lines of JSON."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rlexp.base import plain_json
from rlexp.base.printable import printable
from rlexp.base.version import __version__
from rlexp.generate.job import Answered, Beside, GenerateJob

WIDEST = 100  # columns


def head(job: GenerateJob) -> str:
    """Say what is generated, before it is."""
    cfg, rollout, parallel = job.cfg, job.cfg.rollout, job.cfg.parallel
    of = cfg.model.called if job.folder is None else str(job.folder)
    beside = {Beside.start: ", beside its start", Beside.reference: f", beside {cfg.reference.path}"}
    how = (
        "the likeliest token each time"
        if rollout.top_k == 1
        else f"{rollout.n_samples} sampled answer{'s' * (rollout.n_samples > 1)} to each prompt, at "
        f"rollout.temperature={rollout.temperature:g}"
    )
    return (
        f"rlexp {__version__}  answers of {of}{beside.get(job.beside, '')}, {cfg.train.precision.value}\n"
        f"  {how}, at most {rollout.max_new_tokens:,} tokens, on {parallel.world_size} "
        f"rank{'s' * (parallel.world_size > 1)}\n"
    )


def text(job: GenerateJob, answers: Sequence[Answered]) -> str:
    trained = job.folder is not None or job.beside is Beside.start
    alone = "answer" if job.beside is Beside.none else "model"
    names = "trained" if trained else alone, {Beside.reference: "reference"}.get(job.beside, "start")
    wide, columns = max(map(len, names)), min(WIDEST, shutil.get_terminal_size().columns)
    lines = [line for each in answers for line in ("", *block(each, names, wide, columns))]
    return "\n".join(lines) + "\n"


def block(each: Answered, names: tuple[str, str], wide: int, columns: int) -> Iterator[str]:
    yield each.origin
    yield from indented(f"{'prompt':<{wide}}", legible(each.prompt), columns)
    for name, answers in ((names[1], each.beside), (names[0], each.answers)):
        for answer in answers:
            end = "" if answer.stopped else f" … (cut off after {len(answer.tokens):,} tokens)"
            yield from indented(f"{name:<{wide}}", f"{legible(answer.text) or '(nothing)'}{end}", columns)


def legible(words: str) -> str:
    """Return a text whose lines stay, without a character that moves the cursor."""
    return "\n".join(printable(line) for line in words.strip().splitlines())


def indented(label: str, words: str, columns: int) -> Iterator[str]:
    room = max(20, columns - len(label) - 4)
    lines = [part for line in words.splitlines() for part in (textwrap.wrap(line, room) or [""])]
    for place, line in enumerate(lines or [""]):
        yield f"  {label if place == 0 else ' ' * len(label)}  {line}".rstrip()


def write(answers: Sequence[Answered], place: Path) -> None:
    lines = [plain_json.dumps(asdict(each)) for each in answers]
    place.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
