"""Kill one run again and again, and check the disk after each kill and the curve at the end.

    python -m bench.kills --write docs/measured/invariance.md

SIGKILL ends a rank or the launcher: while the run starts, while it trains, and most often while it saves. The same
command then resumes, on another layout each time. After each kill every checkpoint must be whole and none lost. At the
end the curve must be that of an undisturbed run of one process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.curves import differences, excesses
from bench.resume import curve_of
from bench.tables import put
from rlexp.base.errors import CheckpointError
from rlexp.launch.run_folder import git_commit
from rlexp.run_files import checkpoint_folder
from rlexp.run_files.curve_distance import compared
from rlexp.run_files.metrics_jsonl import read_rows

STEPS, SAVE_EVERY, KEEP_LAST = 120, 2, 2
# The learning rate is low, so that the loss stays away from 0. At a loss of 6e-4 (240 steps at 5e-4), two undisturbed
# layouts differ by 2e-12, which is only rounding, but more than the tolerance of shorter runs.
BASE = (
    *("launch.device=cpu", "logger=none", "train.precision=fp64", f"train.max_steps={STEPS}", "train.batch_size=4"),
    "optim.lr=1e-4",
    *("model.hidden_size=32", "model.intermediate_size=64", "data.size=120", "data.eval_size=8", "train.eval_every=20"),
    *(f"checkpoint.save_every={SAVE_EVERY}", f"checkpoint.keep_last={KEEP_LAST}", "checkpoint.export=false"),
)
RINGS = ((1, 1), (2, 4), (4, 4))  # ring size, ranks
LAYOUTS = tuple(
    (f"engine={engine}", f"parallel=ring{ring}", f"launch.nproc={ranks}")
    for engine in ("torch", "fsdp2")
    for ring, ranks in RINGS
)
RANKS = tuple(ranks for _ in ("torch", "fsdp2") for _, ranks in RINGS)
# The moments to kill at, and their weights. All but the first two are within a save, from its begin to the removal of
# the checkpoint that it replaces.
AIMS = {"start": 6, "train": 5, "begun": 6, "state": 4, "position": 3, "manifest": 3, "renamed": 3}
SEEN = {"begun": "", "state": "/state-*", "position": "/position.json", "manifest": "/manifest.json", "renamed": None}
PHASES = ("start-up", "training", "saving", "pruning")
STARTING, STOPPING, FINISHING = 120.0, 30.0, 400.0  # seconds that each may take


@dataclass(frozen=True)
class Kill:
    """One kill to carry out; `rank` is None for the launcher."""

    layout: int
    rank: int | None
    aim: str
    steps: int  # to let pass first
    delay: float  # seconds after that


@dataclass
class Tally:
    phases: Counter[tuple[str, str]] = field(default_factory=Counter)  # victim, phase
    lost: list[int] = field(default_factory=list)  # steps, of each kill after start-up
    resumed: int = 0
    blamed: list[bool] = field(default_factory=list)  # for each killed rank, whether the launcher named the kill
    victim: str = ""  # the last one killed, not always the planned one
    gone_after: float = 0.0  # seconds, the longest until the last process was gone
    broken: list[str] = field(default_factory=list)


class Process:
    """One start of the run, in a session of its own, by which all of its processes are found."""

    def __init__(self, run_dir: Path, log: Path, layout: Sequence[str]) -> None:
        self.run_dir, self._log = run_dir, log
        with log.open("w") as file:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "rlexp", f"hydra.run.dir={run_dir}", *BASE, *layout],
                cwd=run_dir.parent, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file,
                start_new_session=True,
            )  # fmt: skip

    def said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def trains(self) -> bool:
        return " on cpu\n" in self.said()  # the header, after everything that a resume puts back

    def members(self) -> dict[int, int]:
        """The living processes of the launcher's session, each with its parent."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, parent, _, session = stat.read_text().rpartition(")")[2].split()[:4]
                if int(session) == self.popen.pid and state not in "ZX":
                    parents[int(stat.parent.name)] = int(parent)
        return parents

    def ranks(self) -> list[int]:
        """The processes that the launcher's fork server has forked, in that order."""
        members = self.members()
        servers = {pid for pid, parent in members.items() if parent == self.popen.pid and is_fork_server(pid)}
        return sorted(pid for pid, parent in members.items() if parent in servers)

    def ended(self, within: float) -> bool:
        """Whether the launcher and all of its processes are gone."""
        return wait_for(lambda: self.popen.poll() is not None and not self.members(), within, every=0.05)

    def end(self) -> None:
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait(timeout=STOPPING)


def is_fork_server(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def wait_for(condition: Callable[[], bool], within: float, *, every: float = 0.001) -> bool:
    until = time.monotonic() + within
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(every)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kills", description=__doc__)
    parser.add_argument("--times", type=int, default=30, help="how often the run is killed (30)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims (0)")
    parser.add_argument("--folder", type=Path, help="leave both runs here, rather than in a temporary folder")
    parser.add_argument("--write", type=Path, help="put the table into this page, between its markers")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rlexp-kills-") as temporary:
        place = (options.folder or Path(temporary)).absolute()
        place.mkdir(parents=True, exist_ok=True)
        if list(place.iterdir()):
            parser.error(f"--folder {place}: is not empty")
        undisturbed, killed = Process(place / "undisturbed", place / "undisturbed.log", LAYOUTS[0]), place / "killed"
        tally = Tally(broken=finish(undisturbed))
        table = ""
        if not tally.broken:
            kill_often(killed, random.Random(options.seed), options.times, tally)
            tally.broken += finish(Process(killed, place / "last.log", LAYOUTS[options.times % len(LAYOUTS)]))
            tally.broken += left_over(killed)
            apart, excess = compare(undisturbed.run_dir, killed)
            tally.broken += excess
            table = report(tally, options.times, options.seed, apart, time.monotonic() - began)
            print(table)
    if options.write and not tally.broken:
        put(options.write, table, "kills")
    for line in tally.broken:
        print(f"BROKEN: {line}", file=sys.stderr)
    return 1 if tally.broken else 0


def finish(process: Process) -> list[str]:
    """Let the run end, and return what went wrong."""
    try:
        if not process.ended(FINISHING):
            return [f"{process.run_dir.name}: did not end within {FINISHING:g} s: {process.said()[-500:]}"]
        code = process.popen.returncode
        return [f"{process.run_dir.name}: ended with {code}: {process.said()[-2000:]}"] if code else []
    finally:
        process.end()


def kill_often(run_dir: Path, draw: random.Random, times: int, tally: Tally) -> None:
    whole: set[int] = set()
    for number in range(times):
        left = STEPS - max(whole, default=0)
        layout = number % len(LAYOUTS)
        kill = plan(draw, layout, RANKS[layout], most_steps(left, times - number))
        process = Process(run_dir, run_dir.parent / f"kill-{number:02d}.log", LAYOUTS[kill.layout])
        try:
            tally.broken += [f"kill {number} ({kill}): {wrong}" for wrong in strike(process, kill, tally)]
        finally:
            process.end()
        if process.trains:
            tally.broken += resumed(process, max(whole, default=0), number, tally)
        phase = phase_of(run_dir, process.trains)
        tally.phases[tally.victim, phase] += 1
        now, wrong = look(run_dir, whole)
        tally.broken += [f"kill {number} ({kill}): {each}" for each in wrong]
        newest = max(now, default=0)
        if process.trains:
            rows = read_rows(run_dir / checkpoint_folder.METRICS)
            tally.lost.append((int(rows[-1]["step"]) if rows else 0) - newest)
        whole = now
        print(
            f"kill {number + 1:2} of {times}: {tally.victim:8} {phase:8} (aim {kill.aim:8}), "
            f"{' '.join(LAYOUTS[kill.layout])}; whole: "
            f"{sorted(whole)}",
            file=sys.stderr,
        )


def most_steps(left: int, kills: int) -> int:
    """The most steps to wait before the next kill, so that enough steps are left for all kills."""
    return min(12, 2 * left // (kills + 1))


def plan(draw: random.Random, layout: int, ranks: int, most_steps: int, launcher: float = 0.25) -> Kill:
    """Draw a kill. `launcher` is the launcher's share of the victims."""
    (aim,) = draw.choices(list(AIMS), list(AIMS.values()))
    rank = None if draw.random() < launcher else draw.randrange(ranks)
    delay = {"start": draw.uniform(0, 7), "train": draw.uniform(0, 0.5)}.get(
        aim, draw.choice([0, draw.uniform(0, 0.03)])
    )
    return Kill(layout, rank, aim, draw.randint(0, max(0, most_steps - SAVE_EVERY)), delay)


def strike(process: Process, kill: Kill, tally: Tally) -> list[str]:
    """Wait for the moment, kill, wait until all processes are gone, and return what went wrong."""
    if kill.aim == "start":
        time.sleep(kill.delay)
    elif not wait_for(lambda: process.trains or process.popen.poll() is not None, STARTING, every=0.02):
        return [f"did not train within {STARTING:g} s: {process.said()[-2000:]}"]
    ranks = process.ranks()
    a_rank = kill.rank is not None and bool(ranks)  # before there are ranks, there is the launcher
    rank = min(kill.rank or 0, len(ranks) - 1)
    victim = ranks[rank] if a_rank else process.popen.pid
    tally.victim = f"rank {rank}" if a_rank else "launcher"
    if kill.aim != "start" and not wait_for(
        moment(process.run_dir, kill, lambda: process.popen.poll() is not None), STARTING
    ):
        return [f"the moment did not come within {STARTING:g} s: {process.said()[-2000:]}"]
    if process.popen.poll() is not None:
        return [f"ended by itself with {process.popen.returncode}: {process.said()[-2000:]}"]
    if kill.aim != "start":
        time.sleep(kill.delay)
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    if not process.ended(STOPPING):
        return [f"{sorted(process.members())} still live {STOPPING:g} s after the kill"]
    tally.gone_after = max(tally.gone_after, time.monotonic() - killed)
    if a_rank:
        tally.blamed.append("was killed by SIGKILL" in process.said())
    code, expected = process.popen.returncode, 1 if a_rank else -signal.SIGKILL
    return [] if code == expected else [f"exit code {code} and not {expected}: {process.said()[-2000:]}"]


def moment(run_dir: Path, kill: Kill, over: Callable[[], bool]) -> Callable[[], bool]:
    """Return a check for the moment: enough steps, then a save that has come as far as aimed; or the run is over."""
    room, curve = run_dir / checkpoint_folder.FOLDER, run_dir / checkpoint_folder.METRICS
    first = curve.stat().st_size if curve.exists() else 0
    row = 900  # bytes at most; a guess is enough, since the number of steps is random
    begun: list[Path] = []

    def saving() -> bool:
        now = list(room.glob(".unfinished-*"))
        if begun and begun[0] not in now:
            return True  # renamed, or finished between two looks
        begun[:] = now[:1]
        wanted = SEEN[kill.aim]
        return bool(now) and wanted is not None and (not wanted or any(now[0].glob(wanted[1:])))

    def come() -> bool:
        if over():
            return True
        if not begun and (curve.stat().st_size if curve.exists() else 0) < first + kill.steps * row:
            return False
        return True if kill.aim == "train" else saving()

    return come


def phase_of(run_dir: Path, trains: bool) -> str:
    """The phase in which the run was killed, from the files that it left."""
    if not trains:
        return PHASES[0]
    left = [path.name for path in (run_dir / checkpoint_folder.FOLDER).glob(".*")]
    if any(name.startswith(".unfinished-") for name in left):
        return PHASES[2]
    return PHASES[3] if left else PHASES[1]


def resumed(process: Process, newest: int, number: int, tally: Tally) -> list[str]:
    """Check that the run resumed from the newest whole checkpoint and skipped none."""
    said = process.said()
    wrong = [line for line in said.splitlines() if "skipped a checkpoint" in line or "could not be saved" in line]
    resumes = re.search(r"continues from .*, after step (\d+)", said)
    step = int(resumes[1]) if resumes else 0
    tally.resumed += bool(resumes)
    if step != newest:
        wrong.append(f"went on from step {step}, and step {newest} was whole")
    return [f"kill {number}: {each}" for each in wrong]


def look(run_dir: Path, before: set[int]) -> tuple[set[int], list[str]]:
    """The steps of all whole checkpoints; and what is wrong: damaged checkpoints, and whole ones that are gone."""
    whole, wrong = set(), []
    for path in checkpoint_folder.latest_first(run_dir):
        step = checkpoint_folder.step_of(path)
        try:
            manifest = checkpoint_folder.check_sizes(path)
            checkpoint_folder.check_contents(path, manifest["files"], manifest)
        except CheckpointError as error:
            wrong.append(str(error))
            continue
        if checkpoint_folder.read_position(path)["step"] != step or not counts_to(
            path / checkpoint_folder.METRICS, step
        ):
            wrong.append(f"{path}: its position or its curve is not of that step")
        whole.add(step)
    lost = [step for step in before - whole if sum(newer > step for newer in whole) < KEEP_LAST]
    return whole, wrong + [f"the checkpoint of step {step} was whole, and is gone" for step in lost]


def counts_to(curve: Path, step: int) -> bool:
    return [row["step"] for row in read_rows(curve)] == list(range(1, step + 1))


def left_over(run_dir: Path) -> list[str]:
    """Check that a finished run left nothing but its last checkpoints."""
    there = {path.name for path in (run_dir / checkpoint_folder.FOLDER).iterdir()}
    expected = {checkpoint_folder.folder_of(run_dir, STEPS - back * SAVE_EVERY).name for back in range(KEEP_LAST)}
    return [] if there == expected else [f"left behind: {sorted(there)}, and not {sorted(expected)}"]


def compare(undisturbed: Path, killed: Path) -> tuple[dict[str, float], list[str]]:
    """The largest differences between the two curves and last weights, and the differences beyond rounding."""
    curve = killed / checkpoint_folder.METRICS
    if not counts_to(curve, STEPS):
        return {}, [f"metrics.jsonl does not have one row per step: {[row['step'] for row in read_rows(curve)]}"]
    for run_dir in (undisturbed, killed):
        assert checkpoint_folder.step_of(checkpoint_folder.latest_first(run_dir)[0]) == STEPS, run_dir
    one, other = curve_of(undisturbed), curve_of(killed)
    wrong = excesses(one, other)
    if one.rows[-1]["train/total_tokens"] != other.rows[-1]["train/total_tokens"]:
        wrong.append("total tokens differ")
    return differences(one, other), wrong


def report(tally: Tally, times: int, seed: int, apart: dict[str, float], seconds: float) -> str:
    victims = sorted({victim for victim, _ in tally.phases})
    lines = [f"| killed | {' | '.join(PHASES)} |", f"| --- |{' ---: |' * len(PHASES)}"]
    for victim in victims:
        lines.append(f"| {victim} | {' | '.join(str(tally.phases[victim, phase]) for phase in PHASES)} |")
    sums = [sum(tally.phases[victim, phase] for victim in victims) for phase in PHASES]
    lines.append(f"| together | {' | '.join(map(str, sums))} |")
    others = {name: difference for name, difference in apart.items() if compared(name) and name != "train/loss"}
    worst = max(others, key=lambda name: others[name], default="")
    facts = [
        f"- steps repeated after a kill: {sum(tally.lost)} in total, {max(tally.lost, default=0)} at most "
        f"(a save every {SAVE_EVERY} steps)",
        f"- resumed from a checkpoint {tally.resumed} times before the last start",
        f"- the launcher named {sum(tally.blamed)} of {len(tally.blamed)} killed ranks as the cause",
        f"- all processes were gone at most {tally.gone_after:.1f} s after the kill",
        f"- largest relative difference to the undisturbed run: loss {apart.get('train/loss', float('nan')):.1e}, "
        f"final weights {apart.get('weights', float('nan')):.1e}, any other metric {others.get(worst, 0.0):.1e} "
        f"({worst})",
        f"- violations: {len(tally.broken)}",
    ]
    commit = (git_commit() or "unknown")[:12]
    intro = (
        f"{times} kills (seed {seed}) of a run of {STEPS} steps in float64, on {len(LAYOUTS)} layouts in turn, "
        f"against one process\nundisturbed. Measured {time.strftime('%Y-%m-%d')} at commit {commit}, CPU, "
        f"in {seconds:.0f} s, by `python -m bench.kills`."
    )
    return "\n".join([intro, "", *lines, "", *facts])


if __name__ == "__main__":
    sys.exit(main())
