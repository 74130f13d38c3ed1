"""Run a configuration beside its plainest self, and both beside transformers alone; name the settings at fault.

First in float64, where two correct programs differ by rounding alone. Then in the run's own precision and engine,
beside the noise floor: the same layout with another micro-batch size. See docs/verify.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlexp.base.engine_facts import ENGINES
from rlexp.base.errors import ConfigError, UserError
from rlexp.base.waiting import busy_message
from rlexp.config import sizes
from rlexp.config.schema import Config, with_values
from rlexp.config.schema.models import Precision
from rlexp.config.schema.rollouts import RolloutEngine
from rlexp.launch.joining import prepare_environment
from rlexp.launch.local import PRELOAD, RankFailed, run_ranks, signals_raise
from rlexp.launch.preflight_check import laid_out, with_vllm_memory
from rlexp.verify import profiles
from rlexp.verify.jobs import AloneJob, Parts, RecordJob, VerifyPlan, ranks_of, run_job, shrunk
from rlexp.verify.profiles import another_micro_batch, bounded, contained, exact, generating, usual_steps
from rlexp.verify.verdict import Failure, Met, Verification

if TYPE_CHECKING:
    from rlexp.verify.compare import Deviation, TwoRuns
    from rlexp.verify.recording import Recording

OURS = tuple(f"rlexp.verify.{name}" for name in (
    "jobs", "record", "alone", "fit_memory", "trials", "kept", "gap"))  # fmt: skip
TIMEOUT = 3600.0  # seconds for one start of ranks
AROUND = 3  # ways around a difference that are tried at most
WIDTH = "train/ring_width_"  # of a row: sequences that so many ranks hold
Progress = Callable[[str], None]


def verify(cfg: Config, steps: int | None, say: Progress, *, search: bool = True) -> Verification:
    """Verify a configuration. The user's own mistakes are raised."""
    began = time.monotonic()
    refuse(steps)
    steps = steps or usual_steps(cfg)
    other = cfg.loss.draws and cfg.rollout.engine is not RolloutEngine.native
    cfg = with_values(laid_out(contained(cfg)), "parallel", elastic=False)  # its ring is as large as it came to
    prepare_environment(cfg.launch)
    with tempfile.TemporaryDirectory(prefix="rlexp-verify-") as folder, signals_raise():
        result = Verifier(cfg, Path(folder), say, vllm=other, search=search).run(steps)
    result.seconds = time.monotonic() - began
    return result


def refuse(steps: int | None) -> None:
    """Refuse a configuration that cannot be verified, before anything is printed or started."""
    if steps is not None and steps < 1:
        raise ConfigError(f"--steps={steps}: must be at least 1.")
    if (place := os.environ.get("TMPDIR")) and os.path.abspath(place) != tempfile.gettempdir():
        raise ConfigError(f"TMPDIR={place}: is no folder where files can be written. Gradients and weights are stored "
                          "there: set it to one that is, or unset it.")  # fmt: skip
    if sizes.joined_world() is not None:
        raise ConfigError(
            "rlexp.verify: starts its own ranks on this machine, and torchrun or srun has already started some. Run it "
            "once, without them, with the run's parallel.ring_size and as many ranks as fit here (launch.nproc)."
        )


class Verifier:
    """Starts the ranks of one verification and compares their results, in a folder of its own."""

    def __init__(self, cfg: Config, folder: Path, say: Progress, *, vllm: bool = False, search: bool = True) -> None:
        self.cfg, self.folder, self.say, self.vllm, self.search = cfg, folder, say, vllm, search
        deepspeed = ("deepspeed",) if ENGINES[cfg.engine.name.value].stage is not None else ()
        self.preload = (*PRELOAD, *OURS, *deepspeed)
        self.result = Verification()
        self.ran: Recording | None = None  # in float64
        self.own_ranks = 0  # of the last recording; those of a plain run beside it have higher numbers

    def start(self, what: str, target: str, ranks: int, *args: Any) -> list[Any]:
        """Run a `module.function` of this package on ranks. What it imports, torch for one, is not imported here."""
        began = time.monotonic()
        device = self.cfg.launch.device.value
        with busy_message(what, self.say):
            answers = run_ranks(run_job, ranks, (target, *args), device=device, preload=self.preload, timeout=TIMEOUT)
        self.say(f"{what}: {time.monotonic() - began:.1f} s")
        return answers

    def run(self, steps: int) -> Verification:
        result = self.result
        self.precision = "float64"
        try:
            plan: VerifyPlan = self.start(
                "reading the data, sizing the model", "fit_memory.plan_rank", 1, self.cfg, steps, self.folder
            )[0]
            self.plan = result.plan = plan
            self.cfg = shrunk(self.cfg, plan)
            self._float64()
            if result.agrees and self.cfg.train.precision is not Precision.fp64:
                self.precision = self.cfg.train.precision.value
                self._own_precision()
            if result.agrees and self.cfg.parallel.ring_size > 1:
                self._sharding()
            if result.agrees and self.vllm:
                self._gap()
        except RankFailed as failed:
            result.failure = self._crashed(failed)
        return result

    # ---- recordings ----

    def recorded(
        self, what: str, *worlds: Sequence[Config], counted: bool = False, held_out: int | None = None
    ) -> list[Recording]:
        """Run the worlds side by side, in one start of ranks, and the configurations of each world one after another.
        Return the recordings in that order. `counted`: whether those of the first world count what they keep."""
        from rlexp.verify.recording import merged

        jobs: list[list[RecordJob]] = []
        draws = self.cfg.loss.draws
        for world, configs in enumerate(worlds):
            jobs.append([])
            for number, cfg in enumerate(configs):
                # Those after the first are noise floors, measured at the first step; to draw more takes long.
                plan = self.plan if held_out is None else dataclasses.replace(self.plan, held_out=held_out)
                if number > 0 and draws:
                    plan = dataclasses.replace(plan, steps=1, held_out=0)
                place = Path(tempfile.mkdtemp(dir=self.folder))
                jobs[-1].append(RecordJob(bounded(cfg, plan), plan.held_out, place, counted and not world))
        self.own_ranks = ranks_of(jobs[0][0].cfg)
        by_rank = iter(self.start(what, "record.record_rank", sum(ranks_of(each[0].cfg) for each in jobs), jobs))
        recordings = []
        for each in jobs:
            ranks = [next(by_rank) for _ in range(ranks_of(each[0].cfg))][: each[0].cfg.parallel.world_size]
            recordings += [merged([rank[at] for rank in ranks], job.folder) for at, job in enumerate(each)]
        return recordings

    def alone(
        self, what: str, cfg: Config, given: Recording, *, own: bool = False, until: int | None = None
    ) -> Recording:
        """Compute the same steps by transformers alone. `own`: of a run in its own precision. `until`: the last one."""
        from rlexp.verify.precision import rounding_of_token

        place = Path(tempfile.mkdtemp(dir=self.folder))
        taken = len([scene for scene in given.steps() if scene.row])
        steps = until or self.plan.steps
        steps = min(steps, taken + (given.stopped is not None)) if self.cfg.loss.draws else steps
        held_out = 0 if until else self.plan.held_out
        job = AloneJob(cfg, dataclasses.replace(given, kept=None), steps, held_out, place, exact=not own,
                       rounding=rounding_of_token(self.cfg.train.precision if own else Precision.fp64))  # fmt: skip
        alone: Recording = self.start(what, "alone.alone_rank", 1, job)[0]
        return alone

    # ---- float64 ----

    def _float64(self) -> None:
        from rlexp.verify.compare import TwoRuns

        result, cfg = self.result, exact(self.cfg)
        result.settings = profiles.differing(cfg)
        self.plain = profiles.plain(cfg) if result.settings else cfg
        plain = [[self.plain]] if result.settings else []
        what = f"float64, as the run computes it{', and at its plainest' if plain else ''}"
        recordings = self.recorded(what, [cfg], *plain, counted=True)
        self.ran, self.base = recordings[0], recordings[-1]
        result.facts = {name: self.ran.facts[name] for name in ("parameters", "layout", "examples", "total_steps")}
        result.facts |= {"ring_size": cfg.parallel.ring_size, "dp_size": cfg.parallel.dp_size}
        self.right = self.alone("float64, by transformers alone", self.plain, self.base)
        if self.base is not self.ran and self.right.facts.get("given"):  # the plain run may be given other rewards
            forget(self.base)
            forget(self.right)
            self.base, self.plain = self.ran, cfg
            self.right = self.alone("its samples, by transformers alone", self.plain, self.base)
        judged = TwoRuns(self.plain, self.base, self.right)
        beside = TwoRuns(cfg, self.ran, self.base, every=True)
        first = next(judged.differences(), None)
        if first is not None:
            result.failure = self.located(judged, first)
        elif self.base is not self.ran and (deviation := next(beside.differences(), None)) is not None:
            if not (cfg.loss.draws and beside.drift(deviation.step) > 1.0 and self._is_right(cfg)):
                result.failure = self.swapped(cfg, deviation)
        elif self.ran.refused is not None:
            result.failure = Failure("float64", 1, "log-probabilities", "the probe of the model", self.ran.refused,
                                     "no difference", "rlexp/training/model/")  # fmt: skip
        result.largest = {name: max(pair.gauge.largest.get(name, 0.0) for pair in (judged, beside))
                          for name in {**judged.gauge.largest, **beside.gauge.largest}}  # fmt: skip
        self._note(self.right, "float64")
        known = {name for scene in self.right.scenes for name in scene.row}
        forget(self.ran)
        forget(self.base)
        result.not_held = not_held([scene.row for scene in self.ran.steps()], known)

    def _is_right(self, cfg: Config) -> bool:
        """Whether the run agrees with transformers alone, which goes on from the run's own weights at every step: where
        Adam has made of rounding what moves two runs apart, their later values are no longer each other's."""
        from rlexp.verify.compare import TwoRuns

        assert self.ran is not None
        right = self.alone("its samples, by transformers alone", cfg, self.ran)
        first = next(TwoRuns(cfg, self.ran, right).differences(), None)
        forget(right)
        return first is None

    def _note(self, alone: Recording, precision: str) -> None:
        """Note what is taken as given, and how much of the data was met."""
        result = self.result
        given = dict(alone.facts.get("given", {}))
        given |= {f"{reason[0]}": "" for reason in alone.scenes[0].values.get("taken as given", {})}
        result.given[precision] = given
        if precision == "float64":
            result.met = dataclasses.replace(met(self.base, alone, self.cfg), widths=widths_met(self.ran or self.base))
            result.scores = "sum of policy" in self.base.steps()[0].values and not self.cfg.loss.draws and (
                "policy" not in self.base.steps()[0].values)  # fmt: skip

    # ---- what is at fault ----

    def located(self, pair: TwoRuns, deviation: Deviation) -> Failure:
        """A difference of the plain run: no setting makes it. Its parts are tried, if it alone does not say the
        folder."""
        from rlexp.verify.trials import Case

        check, folder, evidence = deviation.check, deviation.folder or deviation.check.folder, ""
        scenes = [{scene.name: scene.values for scene in each.scenes} for each in (pair.got, pair.wanted)]
        got, wanted = (each.get(deviation.of[0], {}).get(deviation.of[1], {}) for each in scenes)
        if (judge := self._function(deviation)) is not None:
            return dataclasses.replace(judge, beside="transformers alone")
        if self.base is self.ran and self.result.settings:  # its rewards are given: there is no plain run
            return failure_of(deviation, "float64", folder, beside="transformers alone, given its rewards")
        if check.trial and not deviation.folder and pair.got.complete(self.cfg.loss.draws):
            assert self.right.folder is not None
            examples = {key[0]: self._example(pair.got, key[0], deviation.step) for key in wanted}
            case = Case(bounded(pair.cfg, self.plan), check.trial, deviation.step, self.plan.steps, self.right.folder,
                        examples, got, wanted, pair.got.samples if self.cfg.loss.draws else None)  # fmt: skip
            try:
                folder, evidence = self.start("trying its parts alone", "trials.trial_rank", 1, case)[0]
            except RankFailed as failed:
                folder = module_of_traceback(str(failed)) or folder
                evidence = f"its parts cannot be tried alone: {last_line(failed)}"
        return failure_of(deviation, self.precision, folder, evidence, beside="transformers alone")

    def _function(self, deviation: Deviation) -> Failure | None:
        """Name the user's function, if it judges answers by their company."""
        from rlexp.config.schema.reward_terms import reward_terms

        name = deviation.of[1].removeprefix("reward ")
        note = self.right.facts.get("notes", {}).get(name) if deviation.check.stage == "rewards" else None
        if note is None:
            return None
        term = next(term for term in reward_terms(self.cfg.reward) if term.name == name)
        module = f"{term.key}.function={getattr(term.cfg, 'function', '')}"
        return failure_of(dataclasses.replace(deviation, note=note), self.precision, module)

    def _example(self, recording: Recording, sample: int, step: int) -> Any:
        if not self.cfg.loss.draws:
            return recording.examples[sample]
        number = (step - 1) // (self.cfg.rollout.epochs * self.cfg.rollout.minibatches)
        return recording.rollouts[number][sample].example

    def swapped(self, cfg: Config, deviation: Deviation) -> Failure:
        """A difference that settings make: find the smallest set of them, and a way around it."""
        from rlexp.verify.compare import TwoRuns

        def differs(form: Config) -> bool:
            other = self._step_of(form, deviation.step)
            first = next(TwoRuns(form, other, self.base, every=True).differences(), None)
            forget(other)
            return first is not None

        if (judge := self._function(deviation)) is not None:
            return judge
        assert self.ran is not None
        forget(self.ran)
        failure = failure_of(deviation, "float64", deviation.folder or deviation.check.folder)
        self._search(failure, cfg, self.result.settings, differs)
        return failure

    def _step_of(self, form: Config, until: int) -> Recording:
        """Run another form of the configuration until a step."""
        whole = self.plan
        self.plan = dataclasses.replace(whole, steps=until, held_out=whole.held_out if until == whole.steps else 0)
        try:
            named = ", ".join(profiles.differing(form)) or "nothing"
            return self.recorded(f"the plain run with {named}", [form])[0]
        finally:
            self.plan = whole

    def _search(
        self, failure: Failure, cfg: Config, names: Sequence[str], differs: Callable[[Config], bool],
        always: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Put the settings at fault into a failure, with a way around them. Some settings are `always` there."""
        from rlexp.verify.swap import SettingsSearch

        if not self.search:
            return

        failure.starts = 0

        def fails(keep: Sequence[str]) -> bool:
            try:
                form = profiles.plain(cfg, [*keep, *always])
                failure.starts = (failure.starts or 0) + 1
                return differs(form)
            except ConfigError as error:
                failure.not_tried.append(f"{profiles.in_words(cfg, keep)} alone: {str(error).splitlines()[0]}")
                return False
            except RankFailed:
                return True

        search = SettingsSearch(fails, lambda keep: profiles.closed(cfg, keep))
        search.known[frozenset(profiles.closed(cfg, names))] = True
        if always and fails([]):
            search.known[frozenset(always)] = True
            names = always
        fault = search.at_fault(names)
        failure.settings = [profiles.described(cfg, name) for name in fault]
        if len(fault) == 1 and list(always) != fault:
            failure.module = profiles.NAMED[fault[0]].folder
        for words, other in profiles.ways_around(cfg, fault)[:AROUND]:
            with contextlib.suppress(ConfigError, RankFailed):
                if not differs(other):
                    failure.around.append(words)
                    break

    # ---- the run's own precision ----

    def _own_precision(self) -> None:
        from rlexp.verify.precision import beside_float64, given_parts, measure, of_drawn
        from rlexp.verify.recording import TensorFiles

        cfg, name, result = self.cfg, self.precision, self.result
        ran, floor = self.recorded(f"{name} with {cfg.engine.name.value}, and its noise floor",
                                   [cfg, another_micro_batch(cfg)])  # fmt: skip
        right = self.right
        if cfg.loss.draws:  # other samples than in float64, if rounding made it draw others
            forget(self.right)
            right = self.right = self.alone("its samples, by transformers alone", exact(cfg), ran, own=True)
            self._note(right, name)
        pair = beside_float64(cfg, ran, right)
        deviation = next(pair.differences(), None)
        if deviation is None:
            result.measured, deviation = measure(cfg, ran, floor, right, scores=result.scores)
            result.measured += of_drawn(pair)
        if deviation is not None:
            forget(ran)
            forget(floor)
            result.failure = self.swapped_own(deviation)
            return
        assert ran.folder is not None
        parts = Parts(cfg, self.plan.steps, ran.folder, self.folder / "parts", ran.samples if cfg.loss.draws else None)
        self.start("its gradient without the engine", "again.parts_rank", cfg.parallel.world_size, parts)
        measured, deviation = given_parts(cfg, ran, TensorFiles(parts.folder), self.plan.steps)
        result.measured.append(measured)
        if deviation is not None:
            words = "each micro-batch on each rank is right"
            result.failure = failure_of(
                deviation, name, deviation.check.folder, words, beside="its parts, added up in float64"
            )
            result.failure.settings = [profiles.described(cfg, "engine")]

    def swapped_own(self, deviation: Deviation) -> Failure:
        """A difference that is there in the run's own precision alone."""
        from rlexp.verify.precision import beside_float64, measure

        cfg, until = self.cfg, deviation.step

        def differs(form: Config) -> bool:
            if form.train.precision is Precision.fp64:
                return False  # it has agreed
            other, right = self._step_of(form, until), self.right
            if cfg.loss.draws:
                right = self.alone("its samples, by transformers alone", exact(form), other, own=True, until=until)
            first = next(beside_float64(form, other, right).differences(), None)
            if first is None:
                first = measure(form, other, other, right, scores=self.result.scores)[1]
            for each in (other, right):
                if each is not self.right:
                    forget(each)
            return first is not None

        failure = failure_of(deviation, self.precision, deviation.folder or deviation.check.folder,
                             beside="transformers alone, in float64")  # fmt: skip
        names = [name for name in profiles.differing(cfg) if name != "precision"]
        self._search(failure, cfg, names, differs, always=["precision"])
        return failure

    # ---- answers by vLLM, and the ring's use ----

    def _gap(self) -> None:
        """Let vLLM generate as in the run, and say why its log-probabilities are not those of training."""
        from rlexp.verify.report_gap import failure_of_gap

        cfg = with_vllm_memory(generating(self.cfg))
        ran = self.recorded("generated by vLLM", [cfg], held_out=0)[0]
        number = max(ran.rollouts)
        native = {} if self.ran is None else self.ran.rollouts
        prompts = {sample.index: sample for samples in native.values() for sample in samples}
        self.result.gap = self.start("its rollout under every assumption", "gap.gap_rank", 1, cfg,
                                     ran.rollouts[number], number, ran.folder, prompts)[0]  # fmt: skip
        step = next(scene.step for scene in ran.scenes if scene.name == f"rollout {number + 1}")
        self.result.failure = failure_of_gap(cfg, self.result.gap, step)

    def _sharding(self) -> None:
        assert self.ran is not None
        drawn = self.ran.samples if self.cfg.loss.draws else None
        self.result.sharding = self.start("the first micro-batch on a ring of one", "kept.sharding_rank", 1,
                                          exact(self.cfg), self.ran.kept, drawn)[0]  # fmt: skip

    def _crashed(self, failed: RankFailed) -> Failure:
        """The failure of a run that raised an error of its own. If float64 agreed, the engine is the first suspect."""
        text, what = str(failed), "the run"
        if failed.rank >= self.own_ranks > 0:
            text, what = text.replace(f"rank {failed.rank} failed", "the plain run failed", 1), "the plain run"
        module, evidence = module_of_traceback(text), ""
        if failed.killed and "no memory left" in text:
            evidence = "Use fewer ranks (launch.nproc), a smaller model, or a machine with more memory."
        elif module is None:
            module = "rlexp/training/engine/" if self.precision != "float64" else "rlexp/"
        note = text if "\n" in text else ""
        return Failure(self.precision, 1, "running", what, text.rpartition("\n")[2], "a step", module or "",
                       note=note, evidence=evidence, beside="expected")  # fmt: skip


def failure_of(
    deviation: Deviation, precision: str, module: str, evidence: str = "", *, beside: str = "plain run"
) -> Failure:
    return Failure(
        precision, deviation.step, deviation.check.stage, deviation.quantity, deviation.got, deviation.expected, module,
        note=deviation.note, evidence=evidence, beside=beside,
    )  # fmt: skip


def met(base: Recording, alone: Recording, cfg: Config) -> Met:
    """Count what was seen of the data."""
    of = base.facts["examples"]
    if not cfg.loss.draws:
        lengths = [len(each.sequence(side)) for each in base.examples.values() for side in each.sides] or [0]
        return Met(len(base.examples), of, min(lengths), max(lengths))
    samples = [sample for number in base.rollouts for sample in base.rollouts[number]]
    lengths = [len(sample.prompt) + len(sample.answer) for sample in samples] or [0]
    each, alike = cfg.rollout.n_samples, 0
    for rollout in base.rollouts.values():
        answers = [tuple(sample.answer.tolist()) for sample in rollout]
        alike += sum(each > 1 and len(set(answers[n : n + each])) == 1 for n in range(0, len(answers), each))
    facts = alone.facts
    return Met(
        examples=len({sample.index for sample in samples}), of=of, shortest=min(lengths), longest=max(lengths),
        rollouts=len(base.rollouts), samples=len(samples), counting=sum(sample.counts for sample in samples),
        advantages=facts.get("learned", 0), alike=alike, doubtful=facts.get("doubtful", 0),
        values=facts.get("values", False) or getattr(cfg.loss, "critic", None) is None,
    )  # fmt: skip


def widths_met(ran: Recording) -> dict[int, int]:
    """Count the run's sequences by how many ranks held them, as its rows say it; nothing on a ring of one."""
    counts = dict[int, int]()
    for scene in ran.steps():
        for name, value in scene.row.items():
            if name.startswith(WIDTH) and value:
                width = int(name.removeprefix(WIDTH))
                counts[width] = counts.get(width, 0) + int(value)
    return counts


def not_held(rows: Sequence[Mapping[str, Any]], known: set[str]) -> list[str]:
    """Logged values that nothing here recomputes, except those that describe the layout itself."""
    from rlexp.run_files.curve_distance import OWN

    return list(dict.fromkeys(name for row in rows for name in row if name not in known and not name.startswith(OWN)))


def module_of_traceback(text: str) -> str | None:
    """The innermost module in a rank's traceback. What all modules call, or lies around them, is passed over."""
    passed_over = r"verify/|launch/|preflight/|base/|training/(?:model/float64|metrics/live_tensors|types)\."
    files = re.findall(r'File "[^"]*/rlexp/([^"]*)"', text)  # after the last /rlexp/: a checkout has that name too
    modules = [
        f"rlexp/{module[0]}" for file in files
        if not re.match(passed_over, file) and (module := re.match(r"(?:training/)?\w+/", file))
    ]  # fmt: skip
    return modules[-1] if modules else None


def last_line(error: UserError) -> str:
    return str(error).strip().rpartition("\n")[2]


def forget(recording: Recording) -> None:
    """Free the disk of a recording's gradients and weights."""
    if recording.folder is not None:
        shutil.rmtree(recording.folder)
        recording.folder = None
