"""Run a configuration's first steps on its layout and compare them with a plain reference.

First in float64, where two correct programs differ by rounding alone. Then in the run's own precision and engine,
beside the noise floor: the same layout with another micro-batch size. See docs/verify.md.
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

from rlexp.base.engine_facts import ENGINES
from rlexp.base.errors import ConfigError, UserError
from rlexp.base.waiting import busy_message
from rlexp.config import sizes
from rlexp.config.schema import Config, Device
from rlexp.config.schema.models import Precision
from rlexp.config.schema.rollouts import RolloutEngine
from rlexp.launch.joining import prepare_environment
from rlexp.launch.local import PRELOAD, RankFailed, run_ranks
from rlexp.launch.preflight_check import laid_out, with_vllm_memory
from rlexp.verify.findings import Failure
from rlexp.verify.variants import another_micro_batch, bounded, contained, exact, generating, usual_steps

if TYPE_CHECKING:
    from rlexp.preflight.rehearsal.sharding import Sharding
    from rlexp.verify.compared import Comparison
    from rlexp.verify.diagnose import Alone
    from rlexp.verify.findings import Finding
    from rlexp.verify.fit_memory import VerifyPlan
    from rlexp.verify.gap import Gap
    from rlexp.verify.given_samples import Drawing
    from rlexp.verify.precision import Measured
    from rlexp.verify.records import Expected, Met, Trace, Update

OURS = (
    "rlexp.verify.trace",
    "rlexp.verify.reference.one_process",
    "rlexp.verify.reference.drawn",
    "rlexp.verify.fit_memory",
    "rlexp.verify.diagnose",
    "rlexp.verify.kept",
    "rlexp.verify.gap",
)
TIMEOUT = 3600.0  # seconds for one start of ranks
LONG = 1024  # tokens; from here on several threads are faster than one
Progress = Callable[[str], None]


@dataclass
class Verification:
    """The result of verifying one configuration."""

    plan: VerifyPlan | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    float64: Comparison | None = None
    measured: list[Measured] = field(default_factory=list)
    failure: Failure | None = None
    gap: Gap | None = None  # of answers by vLLM
    sharding: Sharding | None = None  # None for a ring of one, and after a failure
    not_held: Sequence[str] = ()
    met: Met | None = None  # None if the reference was not computed
    given: dict[str, dict[str, str]] = field(default_factory=dict)  # by precision: rewards taken as given, and why
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether all values agree with the reference."""
        return self.failure is None

    @property
    def passed(self) -> bool:
        """Whether the ring also shards every module: one that keeps the whole sequence makes it useless."""
        return self.agrees and (self.sharding is None or not self.sharding.whole)


def verify(cfg: Config, steps: int | None, say: Progress) -> Verification:
    """Verify a configuration. The user's own mistakes are raised."""
    began = time.monotonic()
    refuse(steps)
    steps = steps or usual_steps(cfg)
    other = cfg.loss.draws and cfg.rollout.engine is not RolloutEngine.native
    cfg = laid_out(contained(cfg))
    prepare_environment(cfg.launch)
    with tempfile.TemporaryDirectory(prefix="rlexp-verify-") as folder:
        result = Verifier(cfg, Path(folder), say, vllm=other).run(steps)
    result.seconds = time.monotonic() - began
    return result


def refuse(steps: int | None) -> None:
    """Refuse a configuration that cannot be verified, before anything is printed or started."""
    if steps is not None and steps < 1:
        raise ConfigError(f"--steps={steps}: must be at least 1.")
    if sizes.joined_world() is not None:
        raise ConfigError(
            "rlexp.verify: starts its own ranks on this machine, and torchrun or srun has already started some. Run it "
            "once, without them, with the run's parallel.ring_size and as many ranks as fit here (launch.nproc)."
        )


class Verifier:
    """Starts the ranks of one verification and compares their results, in a folder of its own."""

    def __init__(self, cfg: Config, folder: Path, say: Progress, *, vllm: bool = False) -> None:
        self.cfg, self.folder, self.say, self.vllm = cfg, folder, say, vllm
        deepspeed = ("deepspeed",) if ENGINES[cfg.engine.name.value].stage is not None else ()
        self.preload = (*PRELOAD, *OURS, *deepspeed)

    def start(self, what: str, target: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
        began = time.monotonic()
        device = self.cfg.launch.device.value
        with busy_message(what, self.say):
            answers = run_ranks(target, ranks, args, device=device, preload=self.preload, timeout=TIMEOUT)
        self.say(f"{what}: {time.monotonic() - began:.1f} s")
        return answers

    def run(self, steps: int) -> Verification:
        from rlexp.verify.fit_memory import plan_rank, shrunk

        result = Verification()
        try:
            plan: VerifyPlan = self.start(
                "reading the data, sizing the model", plan_rank, 1, self.cfg, steps, self.folder
            )[0]
            result.plan, self.cfg = plan, shrunk(self.cfg, plan)
            self._float64(result, plan)
            if result.agrees and self.cfg.train.precision is not Precision.fp64:
                self._own_precision(result, plan)
            if result.agrees and self.cfg.parallel.ring_size > 1:
                self._sharding(result)
            if result.agrees and self.vllm:
                self._gap(result, plan)
        except RankFailed as failed:
            exact_agrees = result.float64 is not None
            result.failure = _crashed(
                failed, self.cfg.train.precision.value if exact_agrees else "float64", exact_agrees
            )
        return result

    # ---- float64 ----

    def _float64(self, result: Verification, plan: VerifyPlan) -> None:
        from rlexp.verify.findings import FLOAT64
        from rlexp.verify.stages.metrics import not_held

        cfg = exact(self.cfg)
        traces, ran = self.recorded("float64, as the run computes it", [cfg], plan, counted=True)
        result.facts = _facts(self.cfg, traces[0][0])
        self.kept = [trace.kept for trace in traces[0][: cfg.parallel.ring_size]]
        result.failure = self.incomplete(cfg, traces[0], plan, "float64")
        if not result.agrees:
            return
        self.drawing = drawing_of(cfg, traces[0], ran[0])
        self.exact_drawing = self.drawing
        self.expect("float64, by the reference", cfg, plan, "reference")
        comparison = self.compared(cfg, traces[0], ran[0], FLOAT64)
        result.float64 = comparison
        result.met = met(self.expected)
        result.given["float64"] = taken_as_given(self.expected)
        result.not_held = not_held([step.row for step in traces[0][0].steps],
                                   [step.row for step in self.expected.steps])  # fmt: skip
        result.failure = self.first_failure(comparison, "float64")
        _forget(ran[0])

    def incomplete(self, cfg: Config, traces: list[Trace], plan: VerifyPlan, precision: str) -> Failure | None:
        """The first thing that is missing of a run's rollouts: without it the reference has nothing to begin with."""
        from rlexp.verify.naming import module_of
        from rlexp.verify.stages.rollouts import incomplete

        finding = next(incomplete(cfg, traces, plan.held_out), None) if cfg.loss.draws else None
        return None if finding is None else _failure(finding, precision, module_of(finding, cfg, None), "")

    def expect(self, what: str, cfg: Config, plan: VerifyPlan, name: str) -> None:
        """Compute what the reference expects; of a run that draws, from the samples that it has drawn."""
        self.reference = self.folder / name
        self.expected: Expected = self.start(what, _expected_rank, 1, cfg, plan, self.reference, self.drawing)[0]

    def recorded(
        self, what: str, configs: Sequence[Config], plan: VerifyPlan, *, counted: bool = False
    ) -> tuple[list[list[Trace]], list[Path]]:
        """Run the configurations in one start of ranks. Return, for each, the traces of all ranks and a folder."""
        from rlexp.verify.trace import TraceJob, trace_rank

        folders = [Path(tempfile.mkdtemp(dir=self.folder)) for _ in configs]
        # Those after the first are noise floors, which are measured at the first step; to draw more takes long.
        steps = [plan.steps, *[1 if self.cfg.loss.draws else plan.steps] * (len(configs) - 1)]
        held_out = [plan.held_out, *[0 if self.cfg.loss.draws else plan.held_out] * (len(configs) - 1)]
        plans = [dataclasses.replace(plan, steps=own, held_out=held)
                 for own, held in zip(steps, held_out, strict=True)]  # fmt: skip
        jobs = [
            TraceJob(bounded(cfg, own), own.held_out, folder, counted)
            for cfg, folder, own in zip(configs, folders, plans, strict=True)
        ]
        training, sampling = self.cfg.parallel.world_size, self.cfg.rollout.sampling_ranks
        by_rank = self.start(what, trace_rank, training + sampling, jobs)[:training]
        return [[traces[number] for traces in by_rank] for number in range(len(configs))], folders

    def compared(self, cfg: Config, traces: list[Trace], folder: Path, allowed: Any) -> Comparison:
        from rlexp.verify.stages.in_order import has_its_data

        comparison = self.beside(cfg, traces, folder, allowed)
        lrs, given = [step.lr for step in self.expected.steps], comparison.given(has_its_data)
        comparison.given_weights, made = self.start(
            "loss and optimizer, given what the run computed", _given_rank, 1, cfg, lrs, given, folder
        )[0]
        comparison.apply_formula(made)
        return comparison

    def beside(self, cfg: Config, traces: list[Trace], folder: Path, allowed: Any) -> Comparison:
        """Put a recorded run beside the reference."""
        from rlexp.verify.compared import Comparison
        from rlexp.verify.compared_samples import SamplesComparison
        from rlexp.verify.records import TensorFiles

        kind = SamplesComparison if cfg.loss.draws else Comparison
        return kind(
            cfg=cfg,
            traces=traces,
            expected=self.expected,
            ran=TensorFiles(folder),
            meant=TensorFiles(self.reference),
            given_weights=[],
            allowed=allowed,
        )

    def first_failure(self, comparison: Comparison, precision: str) -> Failure | None:
        from rlexp.verify.stages.in_order import differences

        finding = next(differences(comparison), None)
        refused = comparison.traces[0].refused
        if finding is None and refused is None:
            return None
        if finding is None:
            return Failure(
                precision=precision,
                step=1,
                stage="log-probabilities",
                quantity="the probe of the model",
                got=refused or "",
                expected="no difference",
                module="rlexp/training/model/",
            )
        return self.located(comparison, finding, precision)

    def located(self, comparison: Comparison, finding: Finding, precision: str) -> Failure:
        """Find the module that a difference points to. If the difference alone does not say it, try parts."""
        from rlexp.verify.diagnose import Case, alone_rank, differing
        from rlexp.verify.naming import evidence, module_of, module_of_traceback, needs_trial

        alone: Alone | None = None
        said = ""
        if needs_trial(finding):
            steps, said_of_step = len(self.expected.steps), differing(comparison, finding)
            case = Case(comparison.cfg, finding.step, self.reference, steps, finding.clue, self.drawing, said_of_step)
            try:
                answer = self.start("trying its parts alone", alone_rank, comparison.cfg.parallel.world_size, case)
                alone = answer[0]
                said = evidence(finding, comparison.cfg, answer[0])
            except RankFailed as failed:
                module = module_of_traceback(str(failed)) or "rlexp/"
                return _failure(finding, precision, module, f"its parts cannot be tried alone: {_last_line(failed)}")
        module = module_of(finding, comparison.cfg, alone)
        refused = comparison.traces[0].refused
        probe = f"the probe of the model says: {refused}" if refused else ""
        return _failure(finding, precision, module, "; ".join(filter(None, [said, probe])))

    # ---- answers by vLLM ----

    def _gap(self, result: Verification, plan: VerifyPlan) -> None:
        """Let vLLM generate as in the run, and say why its log-probabilities are not those of training."""
        from rlexp.verify.compared_samples import rollouts_of
        from rlexp.verify.gap import gap_rank
        from rlexp.verify.report_gap import failure_of

        cfg, plan = with_vllm_memory(generating(self.cfg)), dataclasses.replace(plan, held_out=0)
        traces, ran = self.recorded("generated by vLLM", [cfg], plan)
        result.failure = self.incomplete(cfg, traces[0], plan, cfg.train.precision.value)
        if not result.agrees:
            return
        last = rollouts_of(traces[0])[-1]
        samples = list(last.drawn.samples)
        result.gap = self.start("its rollout under every assumption", gap_rank, 1, cfg, samples, last.number, ran[0])[0]
        result.failure = failure_of(cfg, result.gap, last.seen[0].step)

    # ---- the ring's use ----

    def _sharding(self, result: Verification) -> None:
        from rlexp.verify.kept import alone_rank, shared_out

        one, attention = self.start(
            "the first micro-batch on a ring of one", alone_rank, 1, exact(self.cfg), self.exact_drawing
        )[0]
        result.sharding = shared_out(self.kept, one, attention)

    # ---- the run's own precision ----

    def _own_precision(self, result: Verification, plan: VerifyPlan) -> None:
        from rlexp.verify.diagnose import Parts, parts_rank
        from rlexp.verify.precision import OWN, given_parts, measure, of_drawn
        from rlexp.verify.records import TensorFiles

        cfg, name = self.cfg, self.cfg.train.precision.value
        other = another_micro_batch(cfg)
        traces, ran = self.recorded(f"{name} with {cfg.engine.name.value}, and its noise floor", [cfg, other], plan)
        result.failure = self.incomplete(cfg, traces[0], plan, name)
        if not result.agrees:
            return
        if cfg.loss.draws:  # other samples than in float64, if rounding made it draw others
            self.drawing = drawing_of(cfg, traces[0], ran[0])
            _forget(self.reference)
            self.expect("its samples, by the reference", exact(cfg), plan, "reference of its samples")
            result.given[name] = taken_as_given(self.expected)
        comparison = self.compared(cfg, traces[0], ran[0], OWN[cfg.train.precision])
        result.failure = self.first_failure(comparison, name)
        if not result.agrees:
            return
        floor = self.beside(other, traces[1], ran[1], OWN[cfg.train.precision])
        result.measured, finding = measure(comparison, floor)
        result.measured += of_drawn(comparison)
        if finding is None:
            parts = Parts(cfg, plan.steps, ran[0], self.folder / "parts", self.drawing)
            self.start("its gradient without the engine", parts_rank, cfg.parallel.world_size, parts)
            measured, finding = given_parts(comparison, TensorFiles(parts.folder))
            result.measured.append(measured)
        result.failure = self.located(comparison, finding, name) if finding else None


def drawing_of(cfg: Config, traces: Sequence[Trace], ran: Path) -> Drawing | None:
    """What a recorded run has drawn; None if its loss draws nothing."""
    from rlexp.verify.compared_samples import held_rollout_of, rollouts_of
    from rlexp.verify.given_samples import Drawing
    from rlexp.verify.precision import rounding_of_token

    if not cfg.loss.draws:
        return None
    rollouts = rollouts_of(traces)
    return Drawing(
        rollouts=[each.drawn for each in rollouts],
        coefficients=[each.seen[0].kl_coef for each in rollouts],
        held_out=held_rollout_of(traces),
        steps=len(traces[0].steps),
        exact=cfg.train.precision is Precision.fp64,
        rounding=rounding_of_token(cfg.train.precision),
        ran=ran,
    )


def met(expected: Expected) -> Met:
    """Count what the reference has seen of the data."""
    from rlexp.verify.records import Met

    if not expected.rollouts:
        lengths = [len(each.sequence(side)) for each in expected.tokens.values() for side in each.sides]
        return Met(len(expected.tokens), expected.examples, min(lengths), max(lengths))
    lengths, counting, alike = [], 0, 0
    for rollout in expected.rollouts:
        each = len(rollout.old) // len(rollout.prompts)
        lengths += [len(rollout.prompts[n // each].prompt) + len(old) for n, old in enumerate(rollout.old)]
        counting += int(rollout.counts.sum())
        alike += sum(
            each > 1 and len(set(rollout.answers[n : n + each])) == 1 for n in range(0, len(rollout.old), each)
        )
    prompts = {index for rollout in expected.rollouts for index in rollout.indices}
    values = [value for step in expected.steps for value in step.values.values()]
    return Met(
        examples=len(prompts), of=expected.examples, shortest=min(lengths), longest=max(lengths),
        rollouts=len(expected.rollouts), samples=len(lengths), counting=counting,
        advantages=sum(step.learned for step in expected.steps), alike=alike,
        values=not values or any(value.any() for value in values),
        doubtful=sum(rollout.doubtful for rollout in expected.rollouts),
    )  # fmt: skip


def taken_as_given(expected: Expected) -> dict[str, str]:
    """The rewards that the reference could not compute again, and why."""
    held = [] if expected.held_rollout is None else [expected.held_rollout]
    return {name: why for rollout in (*expected.rollouts, *held) for name, why in rollout.given.items()}


def _expected_rank(_spec: Any, cfg: Config, plan: VerifyPlan, folder: Path, drawing: Drawing | None) -> Expected:
    """Run the reference with as many threads as the ranks had together."""
    import torch

    from rlexp.verify.reference.drawn import Given, expected_of_samples
    from rlexp.verify.reference.one_process import expected_steps
    from rlexp.verify.trace_rows import loss_of
    from rlexp.verify.trace_samples import policy_loss_of

    if cfg.launch.device is Device.cpu and plan.longest >= LONG:  # threads slow down short sequences
        torch.set_num_threads(min(os.cpu_count() or 1, cfg.parallel.world_size * cfg.launch.torch_threads))
    if drawing is None:
        return expected_steps(cfg, loss_of(cfg), plan.steps, plan.held_out, folder)
    given = Given(drawing.rollouts, drawing.held_out, plan.held_out, drawing.ran, exact=drawing.exact,
                  rounding=drawing.rounding)  # fmt: skip
    return expected_of_samples(cfg, policy_loss_of(cfg), min(plan.steps, drawing.steps), given, folder)


def _given_rank(
    _spec: Any, cfg: Config, lrs: Sequence[float], given: Any, folder: Path
) -> tuple[Sequence[Mapping[str, Update]], Any]:
    """Apply optimizer and formula to what the run computed, step by step."""
    from rlexp.verify.reference.formula import losses_of_steps
    from rlexp.verify.reference.optimizer import given_steps
    from rlexp.verify.reference.policy_formula import judged_again
    from rlexp.verify.trace_rows import loss_of
    from rlexp.verify.trace_samples import policy_loss_of

    weights = list(given_steps(cfg, len(lrs), lrs, folder))
    if cfg.loss.draws:
        return weights, judged_again(policy_loss_of(cfg), given, cfg.rollout.n_samples)
    return weights, list(losses_of_steps(loss_of(cfg), given))


def _facts(cfg: Config, trace: Trace) -> dict[str, Any]:
    return {
        "parameters": trace.parameters,
        "layout": trace.layout,
        "examples": trace.examples,
        "total_steps": trace.total_steps,
        "ring_size": cfg.parallel.ring_size,
        "dp_size": cfg.parallel.dp_size,
    }


def _failure(finding: Finding, precision: str, module: str, said: str) -> Failure:
    return Failure(
        precision=precision,
        step=finding.step,
        stage=finding.stage,
        quantity=finding.quantity,
        got=finding.got,
        expected=finding.expected,
        module=module,
        note=finding.note,
        evidence=said,
    )


def _crashed(failed: RankFailed, precision: str, exact_agrees: bool) -> Failure:
    """The failure of a run that raised an error of its own. If float64 agreed, the engine is the first suspect."""
    from rlexp.verify.modules import ENGINE
    from rlexp.verify.naming import module_of_traceback

    module = module_of_traceback(str(failed)) or (ENGINE if exact_agrees else "rlexp/")
    return Failure(
        precision=precision,
        step=1,
        stage="running",
        quantity="the run",
        got=_last_line(failed),
        expected="a step",
        module=module,
        note=str(failed),
    )


def _last_line(error: UserError) -> str:
    return str(error).strip().rpartition("\n")[2]


def _forget(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)
