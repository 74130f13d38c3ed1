"""Make a rank fail on purpose. Python imports this module by itself if its folder is on PYTHONPATH.

    RLEXP_TEST_FAULT=rank=2,where=step3,how=kill     one fault of one rank at one moment
    RLEXP_TEST_FAULT=1:rank=0,…;4:rank=2,…           faults in jobs 1 and 4 of a sweep on Slurm

`where` is `import` (before anything else), `load` (as the product is imported), `meet` (before the process group),
`step` (before a step), `forward` and `backward` (within a step), `collective` (as it is about to send keys and values
within a step, in the call that does it), `save` (the rank's state is written, the rest of the
checkpoint is not) or `end` (after the last collective). With a number, as step3 or save4, the fault happens at that
optimizer step; without one, at the first time.

`how` is `raise`, `exit0` or `exit3` (at once), `quit0` or `quit3` (by sys.exit), `kill` (SIGKILL), `stop` (SIGSTOP),
`hang` (it sleeps, and handles signals), `loop` (it computes for ever), `memory` (it allocates until that fails) or
`eat` (it takes 2 GB, and waits to be killed for it).

`once`: only in a job's first start. RLEXP_TEST_FAULT_NOTE names a file that gets a line when the fault happens.

    RLEXP_TEST_PACE=0.2              every step takes so many seconds longer, so that there is time to disturb a run

With it, RLEXP_TEST_TAKEN names a file that gets a line for every step that rank 0 computes, repeated steps included.
rlexp has no hook for this: its modules are changed when they are imported.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

PLACES = ("import", "load", "meet", "step", "forward", "backward", "collective", "save", "end")
WAYS = re.compile(r"raise|kill|stop|hang|loop|memory|eat|(exit|quit)\d+")


@dataclass
class Fault:
    rank: int
    place: str
    step: int | None
    how: str
    once: bool
    now: int = 0  # the current step
    mine: bool | None = None  # whether this process is the faulty rank, once that is known

    @staticmethod
    def read(text: str) -> Fault:
        said = dict(part.partition("=")[::2] for part in text.split(","))
        place = re.fullmatch(r"([a-z]+)(\d+)?", said.get("where", ""))
        if place is None or place[1] not in PLACES or not WAYS.fullmatch(said.get("how", "")):
            raise SystemExit(f"RLEXP_TEST_FAULT={text}: is not a known fault.")
        step = int(place[2]) if place[2] else None
        return Fault(int(said["rank"]), place[1], step, said["how"], "once" in said)

    def reach(self, place: str, step: int | None = None) -> None:
        """Strike if this process is the faulty rank, at the fault's place and step."""
        if place != self.place or not self.mine or (self.step is not None and step != self.step):
            return
        if self.once and os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
            return
        self.place = ""  # a fault happens once
        note(self.rank, place, step, self.how)
        strike(self.how)


def strike(how: str) -> None:
    number = int(re.sub(r"\D", "", how) or 0)
    if how == "raise":
        raise ZeroDivisionError("on purpose")
    if how.startswith("exit"):
        os._exit(number)
    if how.startswith("quit"):
        sys.exit(number)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "memory":
        take_all_memory()
    if how == "eat":
        taken = [b"." * 2**26 for _ in range(32)]
        time.sleep(60)
        del taken
    while how in ("hang", "loop"):
        time.sleep(0.1 if how == "hang" else 0.0)


def take_all_memory() -> NoReturn:
    """Allocate until torch raises its own error. A limit leaves little memory to take."""
    import resource

    import torch

    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, resource.RLIM_INFINITY))
    taken = []
    try:
        while True:
            taken.append(torch.ones(2**22))
    finally:
        taken.clear()  # else there is no memory for the error's message


def job() -> str:
    """Return the number of this job in its sweep, which is its folder's name."""
    return os.path.basename(os.environ.get("RLEXP_RUN_DIR", ""))


def of_this_job(text: str) -> str | None:
    """Return the fault that is planted in this job, if any."""
    if ":" not in text:
        return text
    jobs = dict(each.split(":", 1) for each in text.split(";"))
    return jobs.get(job())


def note(rank: int, place: str, step: int | None, how: str) -> None:
    facts = {"job": job(), "rank": rank, "where": place, "step": step, "how": how, "at": time.time(),
             "pid": os.getpid()}  # fmt: skip
    sys.stderr.write(f"planted: {how} by rank {rank} at {place} {step or ''}\n")
    sys.stderr.flush()
    if path := os.environ.get("RLEXP_TEST_FAULT_NOTE"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")


def rank_by_environment() -> int | None:
    """Return the rank if srun or torchrun started this process. None for the batch script, also Slurm's task 0."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    return int(os.environ["SLURM_PROCID"]) if "SLURM_STEP_ID" in os.environ else None


# ---- where rlexp is changed ----


def in_job(_: Any) -> None:
    """This is among the first modules that a rank imports, whoever started it."""
    fault.reach("load")


def around(holder: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap a function of rlexp. A name that no longer exists is an error, since its fault would never happen."""
    setattr(holder, name, wrap(getattr(holder, name)))


def in_place(module: Any) -> None:
    """A rank that rlexp's own launcher forked learns its number only here."""

    def wrap(join: Callable[..., Any]) -> Callable[..., Any]:
        def joined(place: Any, *args: Any, **kwargs: Any) -> Any:
            fault.mine = place.rank == fault.rank
            fault.reach("meet")
            return join(place, *args, **kwargs)

        return joined

    around(module, "join", wrap)


def in_loop(module: Any) -> None:
    def wrap(train_step: Callable[..., Any]) -> Callable[..., Any]:
        def taken(task: Any, step: int, *others: Any) -> Any:
            fault.now = step
            fault.reach("step", step)
            return train_step(task, step, *others)

        return taken

    around(module, "train_step", wrap)


def in_loop_paced(module: Any) -> None:
    """Slow every step down, and note the steps that the run really computes."""

    def wrap(train_step: Callable[..., Any]) -> Callable[..., Any]:
        def taken(task: Any, step: int, *others: Any) -> Any:
            time.sleep(float(os.environ["RLEXP_TEST_PACE"]))
            values = train_step(task, step, *others)
            if task.run.world.rank == 0:
                note_taken(step)
            return values

        return taken

    around(module, "train_step", wrap)


def note_taken(step: int) -> None:
    start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID", "")
    with open(os.environ["RLEXP_TEST_TAKEN"], "a", encoding="utf-8") as file:
        file.write(json.dumps({"job": job, "start": start, "step": step, "at": time.time(), "pid": os.getpid()}) + "\n")


def in_policy(module: Any) -> None:
    """Strike before a forward pass that is part of a step."""

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def passed(self: Any, *args: Any, **kwargs: Any) -> Any:
            if fault.now:
                fault.reach("forward", fault.now)
            return forward(self, *args, **kwargs)

        return passed

    around(module.Policy, "forward", wrap)


def in_collectives(module: Any) -> None:
    """Strike in the call that begins messages between the ranks of a ring."""

    def wrap(begin: Callable[..., Any]) -> Callable[..., Any]:
        def begun(*args: Any, **kwargs: Any) -> Any:
            if fault.now:
                fault.reach("collective", fault.now)
            return begin(*args, **kwargs)

        return begun

    around(module.dist, "batch_isend_irecv", wrap)


def in_engine(module: Any) -> None:
    def wrap(backward: Callable[..., Any]) -> Callable[..., Any]:
        def passed(self: Any, *args: Any, **kwargs: Any) -> Any:
            fault.reach("backward", fault.now)
            return backward(self, *args, **kwargs)

        return passed

    around(module.PlainEngine, "backward", wrap)


def in_saver(module: Any) -> None:
    """Strike in the writing thread, when this rank's state is written and the rest is not."""
    saving = threading.local()

    def remember(write: Callable[..., Any]) -> Callable[..., Any]:
        def written(self: Any, step: int, *args: Any, **kwargs: Any) -> Any:
            saving.step = step
            return write(self, step, *args, **kwargs)

        return written

    def wrap(drain: Callable[..., Any]) -> Callable[..., Any]:
        def drained(*args: Any, **kwargs: Any) -> Any:
            drain(*args, **kwargs)
            fault.reach("save", saving.step)

        return drained

    around(module.Saver, "_write", remember)
    around(module.HostCopy, "drain", wrap)


def in_run(module: Any) -> None:
    def wrap(leave: Callable[..., Any]) -> Callable[..., Any]:
        def left(*args: Any, **kwargs: Any) -> Any:
            outcome = leave(*args, **kwargs)
            fault.reach("end")
            return outcome

        return left

    around(module, "leave_world", wrap)


CHANGES = {
    "rlexp.run.job": in_job,
    "rlexp.launch.joining": in_place,
    "rlexp.training.train.loop": in_loop,
    "rlexp.training.model.policy": in_policy,
    "rlexp.training.ring.collectives": in_collectives,
    "rlexp.training.engine.plain": in_engine,
    "rlexp.training.checkpoint.saver": in_saver,
    "rlexp.training.train.rank": in_run,
}


class Changed(importlib.abc.MetaPathFinder):
    """Import a module as usual, then change it."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        change = self._changes.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if change else None
        if change is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


if planted := of_this_job(os.environ.get("RLEXP_TEST_FAULT", "")):
    fault = Fault.read(planted)
    with contextlib.suppress(ValueError):
        rank = rank_by_environment()
        fault.mine = None if rank is None else rank == fault.rank
    sys.meta_path.insert(0, Changed(CHANGES))
    fault.reach("import")
if "RLEXP_TEST_PACE" in os.environ:
    sys.meta_path.insert(0, Changed({"rlexp.training.train.loop": in_loop_paced}))
