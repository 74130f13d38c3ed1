"""The promise, proved on one's own configuration: the first steps on its layout, held to a plain reference.

First in float64, where two right programs differ by rounding alone; then in the run's own precision and engine,
beside the noise floor (the same layout with another micro-batch). See docs/verify.md.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlexp.config import sizes
from rlexp.config.checks import check
from rlexp.config.schema import (
    BackendName,
    Config,
    Device,
    EngineName,
    KernelName,
    LoggerConfig,
    LoggerName,
    PolicyLossConfig,
    Precision,
)
from rlexp.engines import ENGINES
from rlexp.errors import ConfigError, UserError
from rlexp.kernels import NEEDS
from rlexp.launch.local import PRELOAD, RankFailed, run_ranks
from rlexp.launch.place import prepare_environment

if TYPE_CHECKING:
    from rlexp.prove.diagnose import Alone
    from rlexp.prove.precision import Measured
    from rlexp.prove.records import Expected, Trace, Update
    from rlexp.prove.shrink import Plan
    from rlexp.prove.stages import Comparison, Finding

OURS = (
    "rlexp.prove.trace",
    "rlexp.prove.reference",
    "rlexp.prove.shrink",
    "rlexp.prove.diagnose",
)
TIMEOUT = 3600.0  # seconds for one start of ranks
LONG = 1024  # tokens from which on several threads are worth their cost
WAIT = 180.0  # seconds for a collective that a rank never joins, at most
Progress = Callable[[str], None]


@dataclass
class Failure:
    """Where the run first departs, and the room of the house that it points to."""

    precision: str
    step: int
    stage: str
    quantity: str
    got: str
    expected: str
    room: str
    note: str = ""
    evidence: str = ""


@dataclass
class Verification:
    """What came of it."""

    plan: Plan | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    float64: Comparison | None = None
    measured: list[Measured] = field(default_factory=list)
    failure: Failure | None = None
    not_held: Sequence[str] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.failure is None


def verify(cfg: Config, steps: int, say: Progress) -> Verification:
    """Prove it or say where it fails. The user's own mistakes are raised."""
    began = time.monotonic()
    refuse(cfg, steps)
    cfg = _contained(cfg)
    prepare_environment(cfg.launch.device.value, cfg.launch.torch_threads)
    with tempfile.TemporaryDirectory(prefix="rlexp-verify-") as folder:
        verdict = Verifier(cfg, Path(folder), say).run(steps)
    verdict.seconds = time.monotonic() - began
    return verdict


def refuse(cfg: Config, steps: int) -> None:
    """What cannot be verified, before anything is said or started."""
    sizes.positive("--steps", steps)
    if isinstance(cfg.loss, PolicyLossConfig):
        raise ConfigError(
            f"loss={cfg.loss.name}: rlexp.verify has no reference for losses that draw their own samples. Verify the "
            f"model, the layout and the engine with loss=dpo on pairs (data=synthetic or data=jsonl). See "
            f"docs/invariance.md for how little rollouts depend on the layout."
        )
    if sizes.joined_world() is not None:
        raise ConfigError(
            "rlexp.verify: starts its own ranks on this machine. Start it once, without torchrun or srun, with the "
            "run's parallel.ring_size and as many ranks as fit here (launch.nproc)."
        )


def _contained(cfg: Config) -> Config:
    """The same run without what is no part of a step: no logger, no checkpoint, no long wait."""
    launch = dataclasses.replace(cfg.launch, timeout_seconds=min(WAIT, cfg.launch.timeout_seconds))
    checkpoint = dataclasses.replace(cfg.checkpoint, export=False, on_exit=True)
    return dataclasses.replace(
        cfg, launch=launch, checkpoint=checkpoint, logger=LoggerConfig(name=LoggerName.none, progress=False)
    )


class Verifier:
    """One verification, in a folder of its own."""

    def __init__(self, cfg: Config, folder: Path, say: Progress) -> None:
        self.cfg, self.folder, self.say = cfg, folder, say
        deepspeed = ("deepspeed",) if ENGINES[cfg.engine.name.value].stage is not None else ()
        self.preload = (*PRELOAD, *OURS, *deepspeed)

    def start(self, what: str, target: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
        began = time.monotonic()
        answers = run_ranks(
            target, ranks, args, device=self.cfg.launch.device.value, preload=self.preload, timeout=TIMEOUT
        )
        self.say(f"{what}: {time.monotonic() - began:.1f} s")
        return answers

    def run(self, steps: int) -> Verification:
        from rlexp.prove.shrink import plan_rank, shrunk

        verdict = Verification()
        try:
            plan: Plan = self.start("reading the data, sizing the model", plan_rank, 1, self.cfg, steps, self.folder)[0]
            verdict.plan, self.cfg = plan, shrunk(self.cfg, plan)
            self._float64(verdict, plan)
            if verdict.passed and self.cfg.train.precision is not Precision.fp64:
                self._own_precision(verdict, plan)
        except RankFailed as failed:
            exact_agrees = verdict.float64 is not None
            verdict.failure = _crashed(
                failed, self.cfg.train.precision.value if exact_agrees else "float64", exact_agrees
            )
        return verdict

    # ---- float64 ----

    def _float64(self, verdict: Verification, plan: Plan) -> None:
        from rlexp.prove.stages import FLOAT64, not_held

        cfg = exact(self.cfg)
        traces, ran = self.recorded("float64, as the run computes it", [cfg], plan)
        expected: Expected = self.start(
            "float64, by the reference",
            _expected_rank,
            1,
            cfg,
            plan.steps,
            plan.held_out,
            plan.longest,
            self.folder / "reference",
        )[0]
        self.expected = expected
        comparison = self.compared(cfg, traces[0], ran[0], FLOAT64)
        verdict.float64, verdict.facts = comparison, _facts(self.cfg, traces[0][0])
        verdict.not_held = not_held(traces[0][0].steps[-1].row, expected.steps[-1].row)
        verdict.failure = self.first_failure(comparison, "float64")
        _forget(ran[0])

    def recorded(self, what: str, configs: Sequence[Config], plan: Plan) -> tuple[list[list[Trace]], list[Path]]:
        """Every configuration on its ranks, in one start; by configuration the traces of all ranks, and a folder."""
        from rlexp.prove.trace import Job, trace_rank

        folders = [Path(tempfile.mkdtemp(dir=self.folder)) for _ in configs]
        jobs = [
            Job(bounded(cfg, plan), plan.steps, plan.held_out, folder)
            for cfg, folder in zip(configs, folders, strict=True)
        ]
        by_rank = self.start(what, trace_rank, self.cfg.parallel.world_size, jobs)
        return [[traces[number] for traces in by_rank] for number in range(len(configs))], folders

    def compared(self, cfg: Config, traces: list[Trace], folder: Path, allowed: Any) -> Comparison:
        from rlexp.prove.records import TensorFiles
        from rlexp.prove.stages import Comparison

        lrs = [step.lr for step in self.expected.steps]
        given = self.start("the optimizer, given its gradients", _given_rank, 1, cfg, len(lrs), lrs, folder)[0]
        return Comparison(
            cfg, traces, self.expected, TensorFiles(folder), TensorFiles(self.folder / "reference"), given, allowed
        )

    def first_failure(self, comparison: Comparison, precision: str) -> Failure | None:
        finding = next(comparison.differences(), None)
        refused = comparison.traces[0].refused
        if finding is None and refused is None:
            return None
        if finding is None:
            return Failure(precision, 1, "log-probabilities", "the probe of the model", refused or "",
                           "no difference", "rlexp/model/")  # fmt: skip
        return self.located(comparison, finding, precision)

    def located(self, comparison: Comparison, finding: Finding, precision: str) -> Failure:
        """The room, by trying parts of the run alone where the difference does not say it."""
        from rlexp.prove.diagnose import Case, alone_rank, evidence, needs_trial, room_of, room_of_traceback

        alone: Alone | None = None
        said = ""
        if needs_trial(finding):
            case = Case(comparison.cfg, finding.step, self.folder / "reference")
            try:
                answer = self.start("trying its parts alone", alone_rank, comparison.cfg.parallel.world_size, case)
                alone = answer[0]
                said = evidence(finding, comparison.cfg, answer[0])
            except RankFailed as failed:
                room = room_of_traceback(str(failed)) or "rlexp/"
                return _failure(finding, precision, room, f"its parts cannot be tried alone: {_last_line(failed)}")
        room = room_of(finding, comparison.cfg, alone)
        refused = comparison.traces[0].refused
        probe = f"the probe of the model says: {refused}" if refused else ""
        return _failure(finding, precision, room, "; ".join(filter(None, [said, probe])))

    # ---- the run's own precision ----

    def _own_precision(self, verdict: Verification, plan: Plan) -> None:
        from rlexp.prove.diagnose import Parts, parts_rank
        from rlexp.prove.precision import OWN, given_parts, measure
        from rlexp.prove.records import TensorFiles

        cfg, name = self.cfg, self.cfg.train.precision.value
        other = another_micro_batch(cfg)
        traces, ran = self.recorded(f"{name} with {cfg.engine.name.value}, and its noise floor", [cfg, other], plan)
        comparison = self.compared(cfg, traces[0], ran[0], OWN[cfg.train.precision])
        verdict.failure = self.first_failure(comparison, name)
        if not verdict.passed:
            return
        floor = self.compared(other, traces[1], ran[1], OWN[cfg.train.precision])
        verdict.measured, finding = measure(comparison, floor)
        if finding is None:
            parts = Parts(cfg, plan.steps, ran[0], self.folder / "parts")
            self.start("its gradient without the engine", parts_rank, cfg.parallel.world_size, parts)
            measured, finding = given_parts(comparison, TensorFiles(parts.folder))
            verdict.measured.append(measured)
        verdict.failure = self.located(comparison, finding, name) if finding else None


def _expected_rank(_place: Any, cfg: Config, steps: int, held_out: int, longest: int, folder: Path) -> Expected:
    """The reference has the machine to itself, as the ranks had."""
    import torch

    from rlexp.prove.reference import expected_steps

    if cfg.launch.device is Device.cpu and longest >= LONG:  # short sequences are slower by it
        torch.set_num_threads(min(os.cpu_count() or 1, cfg.parallel.world_size * cfg.launch.torch_threads))
    return expected_steps(cfg, steps, held_out, folder)


def _given_rank(_place: Any, cfg: Config, steps: int, lrs: Sequence[float], folder: Path) -> list[Mapping[str, Update]]:
    from rlexp.prove.reference import given_steps

    return list(given_steps(cfg, steps, lrs, folder))


def exact(cfg: Config) -> Config:
    """In float64, with an engine and a kernel that can: the run's own, or the plain one; and over rings that can, which
    are ours."""
    engine = cfg.engine
    if Precision.fp64.value not in ENGINES[engine.name.value].precisions:
        engine = dataclasses.replace(engine, name=EngineName.torch, offload=type(engine.offload).none, overrides={})
    kernel = KernelName.plain if cfg.parallel.kernel.value in NEEDS else cfg.parallel.kernel
    parallel = dataclasses.replace(cfg.parallel, backend=BackendName.native, kernel=kernel)
    train = dataclasses.replace(cfg.train, precision=Precision.fp64)
    return dataclasses.replace(cfg, engine=engine, parallel=parallel, train=train)


def bounded(cfg: Config, plan: Plan) -> Config:
    """Only so many steps of it: the schedule stays that of the whole run. Held-out pairs come after the last."""
    every = plan.steps if plan.held_out else None
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, stop_after=plan.steps, eval_every=every))


def another_micro_batch(cfg: Config) -> Config:
    """The same layout with another micro-batch: the largest smaller one, else the next larger, else unpacked."""
    share, micro = cfg.train.batch_size // cfg.parallel.dp_size, cfg.train.micro_batch_size
    others = [size for size in sizes.divisors(share) if size != micro]
    if others:
        smaller = [size for size in others if size < micro]
        size = max(smaller) if smaller else min(others)
        acc = share // size
        other = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, micro_batch_size=size, grad_acc=acc))
    else:
        other = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, packing=not cfg.data.packing))
    check(other)
    return other


def _facts(cfg: Config, trace: Trace) -> dict[str, Any]:
    return {
        "parameters": trace.parameters,
        "layout": trace.layout,
        "pairs": trace.pairs,
        "total_steps": trace.total_steps,
        "ring_size": cfg.parallel.ring_size,
        "dp_size": cfg.parallel.dp_size,
    }


def _failure(finding: Finding, precision: str, room: str, said: str) -> Failure:
    return Failure(
        precision, finding.step, finding.stage, finding.quantity, finding.got, finding.expected, room,
        finding.note, said,
    )  # fmt: skip


def _crashed(failed: RankFailed, precision: str, exact_agrees: bool) -> Failure:
    """The run itself raised what is no mistake of the user's. If float64 went well, the engine is what is new."""
    from rlexp.prove.diagnose import ENGINE, room_of_traceback

    room = room_of_traceback(str(failed)) or (ENGINE if exact_agrees else "rlexp/")
    return Failure(precision, 1, "running", "the run", _last_line(failed), "a step", room, str(failed))


def _last_line(error: UserError) -> str:
    return str(error).strip().rpartition("\n")[2]


def _forget(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)
