"""Change the product at random, one token at a time, and list which changes no test and no `verify` finds.

    python -m tests.helpers.mutants training/ring training/train --count 200
    python -m tests.helpers.mutants training/ring --only rlexp/training/ring/slices.py:51:82:+
    python -m tests.helpers.mutants --listed

The fast tests of the folders run, and `verify` on the configurations of configurations.py that reach the change. It
takes an hour or two on two cores. The exit code is 1 if a change that is active is not found and has no reason in
tests/files/mutants_known.tsv.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.tables import put
from tests.helpers.mutants.configurations import CONFIGURATIONS
from tests.helpers.mutants.listed import replant
from tests.helpers.mutants.runs import WHOLE_RUNS, Outcome, Runs, Watched, digest
from tests.helpers.mutants.sites import Site, chosen, sites_of
from tests.helpers.mutants.table import Result, table
from tests.helpers.paths import ROOT


def sites_in(folders: Sequence[str]) -> list[Site]:
    paths = sorted({path for folder in folders for path in (ROOT / "rlexp" / folder).rglob("*.py")})
    return [site for path in paths for site in sites_of(path.relative_to(ROOT).as_posix(), path.read_text())]


def asked_for(args: argparse.Namespace) -> list[Site]:
    """Return the places that are named, or an equal share of the count in every folder."""
    if args.only:
        every = {site.id: site for site in sites_in(args.folders)}
        if gone := [name for name in args.only if name not in every]:
            sys.exit(f"--only {gone[0]}: no such place in {', '.join(args.folders)}.")
        named = [every[name] for name in dict.fromkeys(args.only)]
        for one, other in itertools.combinations(named, 2):
            if (one.path, one.node) == (other.path, other.node):
                sys.exit(f"--only {one.id} {other.id}: are two changes of one place. Give them in two commands.")
        return named
    each, more = divmod(args.count, len(args.folders))
    sites = [site for number, folder in enumerate(args.folders)
             for site in chosen(sites_in([folder]), each + (number < more), args.seed)]  # fmt: skip
    return [*{(site.path, site.node): site for site in sites}.values()]  # folders may lie in each other


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.helpers.mutants", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="below rlexp/, and below tests/")
    parser.add_argument("--count", type=int, default=200, help="changes, shared out among the folders (200)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (0)")
    parser.add_argument("--only", nargs="+", metavar="PLACE", help="these places, as the table names them")
    parser.add_argument("--listed", action="store_true",
                        help="plant those of tests/files/mutants_listed.tsv again, in these folders")  # fmt: skip
    parser.add_argument("--verify", nargs="*", metavar="NAME", default=list(CONFIGURATIONS), choices=CONFIGURATIONS,
                        help="configurations of configurations.py (all of them)")  # fmt: skip
    parser.add_argument("--beside", nargs="*", metavar="FOLDER", default=WHOLE_RUNS,
                        help=f"folders below tests/ whose fast tests run last ({' '.join(WHOLE_RUNS)})")  # fmt: skip
    parser.add_argument("--workers", type=int, default=2, help="runs at a time (2)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="a folder that keeps results for the next start")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into this page, between its markers")
    parser.add_argument("--markers", default="mutants", metavar="NAME", help="the name of these markers (mutants)")
    args = parser.parse_args()
    for option, root, folders, example in (("", "rlexp", args.folders, "training/ring"),
                                           ("--beside ", "tests", args.beside, "run")):  # fmt: skip
        if wrong := [folder for folder in folders if not (ROOT / root / folder).is_dir()]:
            parser.error(f"{option}{wrong[0]}: is no folder of {root}/. Give for example {example}.")
    if args.listed:
        return replant(args.folders, args.workers)
    if not args.folders:
        parser.error("Give a folder of rlexp/, for example training/ring, or --listed.")
    sites = asked_for(args)
    with tempfile.TemporaryDirectory(prefix="rlexp-mutants-") as folder:
        results, seen = judge(sites, args, kept_in(args.keep, sites) if args.keep else Path(folder))
    text = table(results, seen.broken, args)
    print(text)
    if args.write:
        put(args.write, text, args.markers)
    return 1 if any(each.open for each in results) else 0


def kept_in(folder: Path, sites: Sequence[Site]) -> Path:
    """Return the part of a folder that belongs to these places of the product, and of what its tests use, as they
    are."""
    used = (*sources("rlexp"), *sources("tests/helpers"), *sources("tests", "conftest.py"), *sources("conf", "*.yaml"))
    kept = folder / digest("".join(f"{site.id}\n" for site in sites), *used)
    kept.mkdir(parents=True, exist_ok=True)
    return kept


def sources(folder: str, names: str = "*.py") -> list[str]:
    return [path.read_text() for path in sorted((ROOT / folder).rglob(names))]


def judge(sites: Sequence[Site], args: argparse.Namespace, folder: Path) -> tuple[list[Result], Watched]:
    """Watch, plant each active change, and keep what comes of it. What other tests did not find is judged again."""
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.0f} s  {line}", file=sys.stderr, flush=True)

    runs = Runs(sites, args.folders, folder, args.workers, say)
    seen = runs.watch(args.beside, args.verify)
    active = [number for number, site in enumerate(sites) if seen.active(number) and not site.checks]
    say(f"{len(active)} of {len(sites)} changes are active; broken when watched: {seen.broken or 'nothing'}")
    net = digest(*sources("tests"), *args.folders, *args.beside, *args.verify)
    known = folder / "outcomes.jsonl"
    lines = known.read_text().splitlines() if known.exists() else []
    outcomes = {each.number: each for each in map(Outcome.read, lines) if each.by or each.net == net}
    for outcome in runs.judge(seen, [number for number in active if number not in outcomes]):
        outcomes[outcome.number] = outcome
        with known.open("a") as file:
            file.write(replace(outcome, net=net).written() + "\n")
        count = len(outcomes.keys() & set(active))
        say(f"{count}/{len(active)} {sites[outcome.number].id}: {outcome.by or 'NOT FOUND'} {outcome.said}")
    return [Result(site, seen.reached(number), number in active, outcomes.get(number)) for number, site in
            enumerate(sites)], seen  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
