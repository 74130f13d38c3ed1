"""The table of a run of mutants."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.tables import signature
from tests.helpers.mutants.configurations import CONFIGURATIONS
from tests.helpers.mutants.runs import WHOLE_RUNS, Outcome, is_below
from tests.helpers.mutants.sites import KINDS, Site
from tests.helpers.paths import FILES, ROOT

# Changes that are active and that nothing has to find, by their line and the texts before and after; and why.
_LINES = (FILES / "mutants_known.tsv").read_text(encoding="utf-8").splitlines()
KNOWN = {tuple(place): why for *place, why in (line.split("\t") for line in _LINES[1:])}


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
    def by_verify(self) -> bool:
        return self.outcome is not None and self.outcome.by.startswith("verify")

    @property
    def reason(self) -> str | None:
        line = (ROOT / self.site.path).read_text(encoding="utf-8").splitlines()[self.site.line - 1]
        return KNOWN.get((self.site.path.removeprefix("rlexp/"), line.strip(), self.site.before, self.site.after))

    @property
    def open(self) -> bool:
        """Return whether this change is to be found and is not."""
        return self.active and not self.found and self.reason is None


def table(results: Sequence[Result], broken: Sequence[str], args: argparse.Namespace) -> str:
    return "\n".join(_lines(results, broken, args))


def _lines(results: Sequence[Result], broken: Sequence[str], args: argparse.Namespace) -> Iterator[str]:
    active = [each for each in results if each.active]
    found = [each for each in active if each.found]
    command = f"tests.helpers.mutants {' '.join(args.folders)} --count {args.count} --seed {args.seed}"
    for name, default in (("only", None), ("beside", WHOLE_RUNS), ("verify", [*CONFIGURATIONS])):
        if (given := getattr(args, name)) != default:
            command += " ".join([f" --{name}", *given])
    yield signature(command)
    yield ""
    asked = [each for each in active if each.found or each.reason is None]
    yield (
        f"{len(results)} changes, of which {len(active)} are active. Of these, {len(active) - len(asked)} need not be "
        f"found, for the reason below. Of the other {len(asked)}, {len(found)} "
        f"({100 * len(found) / max(1, len(asked)):.1f} %) are found."
    )
    yield ""
    yield "| changes | all | reached | active | found by fast tests | found by `verify` | found |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for folder in args.folders:
        yield _row(f"in {folder}/", [each for each in results if is_below(each.site, folder)])
    for kind in KINDS:
        yield _row(kind, [each for each in results if each.site.kind == kind])
    yield ""
    yield "| active and not found | before | after | why nothing has to find it |\n| --- | --- | --- | --- |"
    for each in active:
        if not each.found:
            place = each.site.id.removeprefix("rlexp/")
            yield f"| {place} | {_code(each.site.before)} | {_code(each.site.after)} | {each.reason or 'not known'} |"
    if broken:
        yield f"\nNot counted, since they fail or are skipped when they are only watched: {', '.join(broken)}."


def _row(name: str, results: Sequence[Result]) -> str:
    """Count those of a folder or a kind. A change is found once: by tests if a fast one finds it first."""
    by_verify = sum(each.found and each.by_verify for each in results)
    found = sum(each.found for each in results)
    counts = [len(results), sum(each.reached for each in results), sum(each.active for each in results),
              found - by_verify, by_verify, found]  # fmt: skip
    return f"| {name} | {' | '.join(map(str, counts))} |"


def _code(text: str) -> str:
    return f"`{' '.join(text.split()).replace('|', chr(92) + '|')[:90]}`"
