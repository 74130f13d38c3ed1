"""The page about a run of mutants."""

from __future__ import annotations

import argparse
import datetime
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.mutants.known import KNOWN
from tests.helpers.mutants.runs import Outcome
from tests.helpers.mutants.sites import KINDS, Site
from tests.helpers.paths import ROOT


@dataclass(frozen=True)
class Result:
    site: Site
    reached: bool
    active: bool
    outcome: Outcome | None  # of what is active

    @property
    def found(self) -> bool:
        return self.outcome is not None and bool(self.outcome.by)

    @property
    def reason(self) -> str | None:
        return KNOWN.get((self.site.path, self.site.before, self.site.after))

    @property
    def open(self) -> bool:
        """Return whether this change is to be found and is not."""
        return self.active and not self.found and self.reason is None


def page(results: Sequence[Result], broken: Sequence[str], args: argparse.Namespace, seconds: float) -> str:
    return "\n".join(_lines(results, broken, args, seconds)) + "\n"


def _lines(results: Sequence[Result], broken: Sequence[str], args: argparse.Namespace, seconds: float) -> Iterator[str]:
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True,
                            check=True).stdout.strip()  # fmt: skip
    active = [each for each in results if each.active]
    found = [each for each in active if each.found]
    by_tests = [each for each in found if each.outcome is not None and not each.outcome.by.startswith("verify")]
    share = 100 * len(found) / max(1, len(active))
    yield "# Which random changes do the tests find?"
    yield ""
    yield (f"Of {len(results)} changes of one token each, {len(active)} are active, and {len(found)} of these "
           f"({share:.1f} %) are found: {len(by_tests)} by a fast test of these folders, the others by "
           f"`rlexp.verify`.")  # fmt: skip
    yield ""
    yield (f"`python -m tests.helpers.mutants {' '.join(args.folders)} --count {args.count} --seed {args.seed}`, "
           f"{datetime.date.today().isoformat()}, commit {commit}, {seconds / 60:.0f} minutes on this machine: "
           f"{_processor()}.")  # fmt: skip
    yield ""
    yield "| folder | changes | reached | active | found |\n|---|---|---|---|---|"
    for folder in args.folders:
        yield _row(folder, [each for each in results if each.site.path.startswith(f"rlexp/{folder}/")])
    for kind in KINDS:
        yield _row(f"kind: {kind}", [each for each in results if each.site.kind == kind])
    yield ""
    yield "## Active and not found"
    yield ""
    yield "| place | before | after | why |\n|---|---|---|---|"
    for each in active:
        if not each.found:
            yield f"| {each.site.id} | {_code(each.site.before)} | {_code(each.site.after)} | {each.reason or ''} |"
    if broken:
        yield f"\nNot counted, since they fail when they are only watched: {', '.join(broken)}."


def _row(name: str, results: Sequence[Result]) -> str:
    counts = [
        len(results),
        *(sum(each) for each in zip(*((r.reached, r.active, r.found) for r in results), strict=True)),
    ]
    return f"| {name} | {' | '.join(map(str, counts))} |"


def _code(text: str) -> str:
    return f"`{' '.join(text.split()).replace('|', chr(92) + '|')[:90]}`"


def _processor() -> str:
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]  # fmt: skip
    return f"{len(names)} cores of {names[0]}" if names else "an unknown processor"
