"""Start the tests and `verify`: once watched, and then with each change planted, until something fails."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlexp.base.files import write_text
from tests.helpers import warm
from tests.helpers.mutants.configurations import CONFIGURATIONS
from tests.helpers.mutants.planting import Plan, environment
from tests.helpers.mutants.sites import Site
from tests.helpers.paths import ROOT

FAST = "not slow and not slurm and not gpu and not prove"
WHOLE_RUNS = ("training/checkpoint", "run", "export", "preflight")  # tests of whole runs, which reach every folder
PYTEST = ("-q", "-n0", "-p", "no:cacheprovider")
FIRST = 30.0  # seconds of the cheapest tests, which come before `verify`
ELSEWHERE = 120.0  # seconds of tests of the other folders, which come last
MOST = 8  # configurations, drawn from those that reach a place
Rows = list[dict[str, Any]]
VERIFY = "verify: "  # begins the name of a configuration that finds a change
HANGS, ENDS = "hangs", "ends with"
ACCIDENTS = (HANGS, ENDS, "raised The ranks did not end")  # are tried again, since the machine may be the cause
SLACK, TIMES = 60.0, 6.0  # a run that takes longer than this, and so many times as long as unchanged, hangs


@dataclass(frozen=True)
class Reaching:
    """A test, or a configuration of `verify`, and the numbers of the places that it reaches."""

    name: str
    seconds: float = 20.0
    reached: frozenset[int] = frozenset()
    active: frozenset[int] = frozenset()

    @property
    def verifies(self) -> bool:
        return self.name.startswith(VERIFY)


@dataclass
class Watched:
    reaching: list[Reaching] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # what fails when it is only watched

    def reached(self, number: int) -> bool:
        return any(number in each.reached for each in self.reaching)

    def active(self, number: int) -> bool:
        return any(number in each.active for each in self.reaching)


@dataclass(frozen=True)
class Outcome:
    number: int
    by: str = ""  # the test or configuration that found it
    said: str = ""
    net: str = ""  # which tests and configurations there were

    def written(self) -> str:
        return json.dumps([self.number, self.by, self.said, self.net])

    @staticmethod
    def read(line: str) -> Outcome:
        return Outcome(*json.loads(line))


class Runs:
    def __init__(
        self, sites: Sequence[Site], folders: Sequence[str], folder: Path, workers: int, say: Callable[[str], None]
    ) -> None:
        self.sites, self.folders, self.workers, self.say = sites, folders, workers, say
        self.scratch = tempfile.TemporaryDirectory(prefix="rlexp-mutants-")
        self.kept = folder / "watched"
        self.kept.mkdir(exist_ok=True)
        warm.meet()

    # ---- watched ----

    @contextlib.contextmanager
    def pool(self) -> Iterator[ThreadPoolExecutor]:
        """Work side by side. At an error, or Ctrl-C, only what runs already goes on to its end."""
        with ThreadPoolExecutor(self.workers) as pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def watch(self, beside: Sequence[str], configurations: Sequence[str]) -> Watched:
        """Run the fast tests of the folders and of those beside, and `verify` on the configurations, with all places
        watched."""
        files = dict.fromkeys(path.relative_to(ROOT).as_posix() for each in (*self.folders, *beside)
                              for path in sorted((ROOT / "tests" / each).rglob("test_*.py")))  # fmt: skip
        seen = Watched()
        with self.pool() as pool:
            running = [pool.submit(self._once, self._watch_tests, file, (ROOT / file).read_text()) for file in files]
            running += [pool.submit(self._once, self._watch_configuration, name, repr(CONFIGURATIONS[name]))
                        for name in configurations]  # fmt: skip
            for row in (row for each in running for row in each.result()):
                if row["found"] is None:
                    reached, active = frozenset(row["reached"]), frozenset(row["active"])
                    seen.reaching.append(Reaching(row["name"], row["seconds"], reached, active))
                else:
                    seen.broken.append(row["name"])
        return seen

    def _once(self, watch: Callable[[str], Rows], name: str, what: str) -> Rows:
        """Watch, or read what a run that was stopped has watched of the same test or configuration."""
        kept = self.kept / f"{name.replace('/', '_')}-{digest(what)}.json"
        if kept.exists():
            rows: Rows = json.loads(kept.read_text())
            return rows
        rows = watch(name)
        self.say(f"watched {name}")
        if all(row["found"] is None for row in rows):  # a failure is tried again
            write_text(kept, json.dumps(rows))
        return rows

    def _watch_tests(self, file: str) -> Rows:
        where = self.planted(watched=True)
        said = self._run("pytest", [*PYTEST, "-m", FAST, "-p", "tests.helpers.mutants.plugin", file], where, 1800)
        rows = where / "watch.tests"
        found = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
        assert found, f"{file}: pytest wrote nothing: {said.stdout[-500:]}"
        *tests, shared = found
        return [row | {what: [*row[what], *numbers] for what, numbers in shared.items()} for row in tests]

    def _watch_configuration(self, name: str) -> Rows:
        where = self.planted(watched=True)
        said = self._run("tests.helpers.mutants.examine", [name], where, 900)
        rows = [json.loads(line) for line in said.stdout.splitlines() if line.startswith("{")]
        return rows or [{"name": f"{VERIFY}{name}", "found": said.stderr[-500:]}]

    # ---- planted ----

    def judge(self, seen: Watched, numbers: Sequence[int]) -> Iterator[Outcome]:
        """Plant each change by itself, and yield what finds it as soon as it is known."""
        with self.pool() as pool:
            for running in as_completed([pool.submit(self._judge, seen, number) for number in numbers]):
                yield running.result()

    def _judge(self, seen: Watched, number: int) -> Outcome:
        """Run the cheapest tests of the change's folder, `verify`, the folder's other tests, and those elsewhere."""
        where = self.planted(self.sites[number])
        active = sorted((each for each in seen.reaching if number in each.active), key=lambda each: each.seconds)
        tests = [each for each in active if not each.verifies]
        own = next(f"tests/{folder}/" for folder in self.folders if is_below(self.sites[number], folder))
        first, later = _split([each for each in tests if each.name.startswith(own)], FIRST)
        elsewhere, _ = _split([each for each in tests if not each.name.startswith(own)], ELSEWHERE)
        configurations = [each for each in active if each.verifies]
        some = random.Random(number).sample(configurations, min(MOST, len(configurations)))
        for what in (first, some, later, elsewhere):
            if (failure := self.failure(where, what)) is not None:
                return Outcome(number, *failure)
        return Outcome(number)

    def failure(self, where: Path, what: Sequence[Reaching]) -> tuple[str, str] | None:
        """Run tests, and then `verify` on configurations. Return the first that fails, and how."""
        for run, verifies in ((self._pytest, False), (self._verify, True)):
            some = [each for each in what if each.verifies == verifies]
            given = (where, [each.name for each in some], SLACK + TIMES * sum(each.seconds for each in some))
            failure = run(*given) if some else None
            if failure is not None and failure[1].startswith(ACCIDENTS):
                failure = run(*given)
            if failure is not None:
                return failure
        return None

    def _pytest(self, where: Path, names: Sequence[str], longest: float) -> tuple[str, str] | None:
        try:
            said = self._run("pytest", [*PYTEST, "-x", *names], where, longest)
        except subprocess.TimeoutExpired:
            return "a test", HANGS
        failed = [line for line in said.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if failed:
            name, _, error = failed[0].partition(" ")[2].partition(" - ")
            return name, error[:80]
        return None if said.returncode == 0 else ("a test", f"{ENDS} {said.returncode}")

    def _verify(self, where: Path, names: Sequence[str], longest: float) -> tuple[str, str] | None:
        args = [name.removeprefix(VERIFY) for name in names]
        try:
            said = self._run("tests.helpers.mutants.examine", args, where, longest)
        except subprocess.TimeoutExpired:
            return "verify", HANGS
        rows = [json.loads(line) for line in said.stdout.splitlines() if line.startswith("{")]
        if said.returncode:
            return names[min(len(rows), len(names) - 1)], f"{ENDS} {said.returncode}"
        return (rows[-1]["name"], rows[-1]["found"]) if rows[-1]["found"] is not None else None

    def planted(self, *sites: Site, watched: bool = False) -> Path:
        """Return a folder of its own for a run, with what it changes or watches."""
        where = Path(tempfile.mkdtemp(dir=self.scratch.name))
        plan = Plan(self.sites, str(where / "watch.log")) if watched else Plan(sites)
        plan.write(where / "plan.json")
        return where

    def _run(self, module: str, args: Sequence[str], where: Path, timeout: float) -> subprocess.CompletedProcess[str]:
        return warm.run(module, args, ROOT, timeout=timeout, env=environment(where / "plan.json"))


def is_below(site: Site, folder: str) -> bool:
    return site.path.startswith(f"rlexp/{folder}/")


def digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def _split(tests: Sequence[Reaching], seconds: float) -> tuple[list[Reaching], list[Reaching]]:
    """Split into those that take so many seconds together, and the others."""
    total = 0.0
    first: list[Reaching] = []
    for each in tests:
        total += each.seconds
        if total > seconds and first:
            break
        first.append(each)
    return first, list(tests[len(first) :])
