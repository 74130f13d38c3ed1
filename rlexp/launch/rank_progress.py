"""What every rank of a run is doing, readable after it was killed: `memory.jsonl`, a line of fixed width per rank.

A rank that is killed for its memory cannot report. So each rank writes its step, its phase and its memory peaks as it
goes, always into its own line.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlexp.base import files, plain_json
from rlexp.config.schema.cadence import plural
from rlexp.launch import watch

WIDTH = 1024  # bytes of a line, with its newline
FILE = "memory.jsonl"
PEAKS = ("peaks", "tensors")  # by phase
FACTS: plain_json.Kinds = {
    **dict.fromkeys(("rank", "step", "pack", "packs", "tokens", "of_tokens"), int),
    **dict.fromkeys(("at", "began"), (int, float)),
    **dict.fromkeys(("phase", "died"), str),
    **dict.fromkeys(PEAKS, dict),
    "pace": (int, float, plain_json.NOTHING),
}  # the kinds of the values of a line
WITHIN = {"pack", "packs", "tokens", "of_tokens"}  # what says how far a rank is within its step
BETWEEN = "between steps"  # the phase after a step


class Whereabouts:
    """One rank's line. A full or missing disk does not end training."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._file = os.open(run_dir / FILE, os.O_WRONLY | os.O_CREAT, 0o644)
        self._rank = rank

    def tell(self, **facts: Any) -> None:
        watch.at(seen(facts))
        line = json.dumps({"rank": self._rank, "at": time.time(), **facts})[: WIDTH - 1].ljust(WIDTH - 1) + "\n"
        try:
            os.pwrite(self._file, line.encode(), self._rank * WIDTH)
        except OSError:
            return


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines that ranks have written, in the order of the ranks."""
    lines = []
    try:
        text = files.read_regular(run_dir / FILE)
    except OSError:
        return []
    for each in text.replace(b"\0", b"").splitlines():  # zeros: ranks that have not written yet
        try:
            line = plain_json.of_kinds(plain_json.loads(each), FACTS)
        except ValueError:  # a line that was cut off
            continue
        if {"rank", "step", "phase", "peaks"} <= line.keys():
            peaks = {of: plain_json.of_kinds(line[of], dict.fromkeys(line[of], int)) for of in PEAKS if of in line}
            lines.append(line | peaks)
    return lines


def deaths(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of ranks that failed to allocate memory and could still report it."""
    return [line for line in read(run_dir) if "died" in line]


def last_seen(run_dir: Path, rank: int) -> str:
    """Return where a rank was, as `in step 3, in its forward phase`; empty if it had not begun."""
    return next((seen(line) for line in read(run_dir) if line["rank"] == rank), "")


def seen(line: Mapping[str, Any]) -> str:
    if line["phase"] == BETWEEN:
        return f"after step {line['step']}"
    step = f"in step {line['step']}, " if line["step"] else ""
    pack = f"pack {line['pack']} of {line['packs']}, " if line.get("packs", 1) > 1 else ""
    return f"{step}{pack}in its {line['phase']} phase"


def seconds_in_step(line: Mapping[str, Any], now: float) -> float:
    """Return for how long a rank has computed the packs of a step; 0 if it does not."""
    return now - line["began"] if "began" in line and line["phase"] != BETWEEN else 0.0


def within_step(line: Mapping[str, Any], now: float) -> str:
    """Say how far a rank is within its step: `pack 2 of 8, forward, 31,000 of 82,000 tokens, 40 s left of the step`."""
    tokens = f"{line['tokens']:,} of {line['of_tokens']:,} tokens"
    left = ""
    if line.get("pace") is not None:
        seconds = max(0.0, line["pace"] * line["of_tokens"] - seconds_in_step(line, now))
        left = f", {seconds:.0f} s left of the step"
    return f"pack {line['pack']} of {line['packs']}, {line['phase']}, {tokens}{left}"


def before_steps(run_dir: Path, ranks: int) -> str | None:
    """Say what is done until a run has its header; None: it has."""
    line = next(iter(read(run_dir)), None)
    if line is None:
        return f"starts {plural(ranks, 'rank')}"
    return "reads the rows, and builds the model" if line["phase"] == "build" else None


def once_asked(run_dir: Path | None, why: str, grace: float, *, again: bool) -> str:
    """Say what a request to stop leads to: `SIGINT: finishing step 8, then saving …`. `again` says whether a second
    Ctrl-C is heard."""
    line = next(iter(read(run_dir)), None) if run_dir is not None else None
    phase, step = ("build", 0) if line is None else (line["phase"], line["step"])
    if phase == "export":
        return f"{why}: ending; the last checkpoint stays."
    if not step and phase != "eval":
        return f"{why}: ending, as no step has begun."
    what = f"step {step + (phase in (BETWEEN, 'save'))}" if step else "the evaluation and step 1"
    hint = " Ctrl-C again ends it now." if again else ""
    return f"{why}: finishing {what}, then saving, in at most {grace:g} s.{hint}"
