"""The report of a verification: its scope, a table, the conclusion in words; and the same as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import textwrap
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from rlexp.base.pages import addressed
from rlexp.base.printable import fitted
from rlexp.config.checks.micro_batches import batch_in_words
from rlexp.config.load import to_plain
from rlexp.config.schema import Config, HFModelConfig
from rlexp.config.schema.models import Precision
from rlexp.config.schema.rollouts import RolloutEngine
from rlexp.config.schema.row_kinds import EXAMPLE
from rlexp.preflight.rehearsal.sharding import in_words
from rlexp.verify import report_gap
from rlexp.verify.checks import FLOAT64
from rlexp.verify.profiles import exact, first_step_on_new_weights
from rlexp.verify.verification import Failure, Met, Verification, refuse, verify

WIDTH = 110
# Rows of the table: their title, and their names in the gauge and among the measured quantities.
ROWS = (
    ("log-probability of a token", "log-probability of a token", "log-probability of a token"),
    ("log-probabilities per example", "sum of a sequence's log-probabilities", "log-probabilities per example"),
    ("value of a token", "value of a token", "value of a token"),  # of a critic
    ("what the loss is given", "what the loss is given", "what the loss is given"),  # of generated samples
    ("loss", "loss", "loss"),
    ("derivatives, given the tokens", "derivatives of the loss, given the tokens", "derivatives, given the tokens"),
    ("gradient, whole", "gradient, whole", "gradient"),
    ("gradient of the worst parameter", "gradient of a parameter", "gradient of a parameter"),
    ("gradient, given its parts", "", "gradient, given its parts"),
    ("weights, given the gradient", "weights, given the gradient", None),
    ("weights after the steps", "weights after the step", "weights after the step"),
)
SHOWN_ONLY = ("weights after the steps",)  # a large difference is no failure: docs/verify.md says when it occurs
OF_SAMPLES = ("value of a token", "what the loss is given", "derivatives, given the tokens")


def run(cfg: Config, steps: int | None, file: Path | None, *, search: bool = True) -> int:
    """Verify, print the report and return the exit code."""
    refuse(steps)
    sys.stdout.write(fitted(f"rlexp.verify  {subject(cfg)}\n"))
    sys.stdout.flush()
    result = verify(cfg, steps, print_line, search=search)
    sys.stdout.write(fitted(report(cfg, result)))
    if file is not None:
        file.write_text(json.dumps(as_json(cfg, result), indent=2) + "\n", encoding="utf-8")
    return 0 if result.passed else 1


def print_line(line: str) -> None:
    sys.stderr.write(f"  … {line}\n")
    sys.stderr.flush()


def subject(cfg: Config) -> str:
    ring, replicas = cfg.parallel.ring_size, cfg.parallel.dp_size
    model = cfg.model.path if isinstance(cfg.model, HFModelConfig) else cfg.model.name
    return (
        f"{cfg.loss.name} on {model}, data {cfg.data.name}\n"
        f"  ring of {ring} × {replicas} replica{'s' * (replicas > 1)}, {batch_in_words(cfg)}, "
        f"{'packed' if cfg.data.packing else 'padded'}; {cfg.train.precision.value}, engine {cfg.engine.name.value}\n"
    )


def report(cfg: Config, result: Verification) -> str:
    sections = f"{table(cfg, result)}{_sharding(result)}{_gap(cfg, result)}"
    return f"{scope(cfg, result)}\n{sections}\n{conclusion(cfg, result)}\n"


def _sharding(result: Verification) -> str:
    """Say what the ring saves, and which modules it does not shard."""
    lines = in_words(result.sharding) if result.sharding is not None else []
    return "".join(["\n", *(f"  {line}\n" for line in lines)]) if lines else ""


def _gap(cfg: Config, result: Verification) -> str:
    lines = [] if result.gap is None else list(report_gap.in_words(cfg, result.gap))
    return "".join(["\n", *(f"{_wrapped(line)}\n" for line in lines)]) if lines else ""


def scope(cfg: Config, result: Verification) -> str:
    plan, facts = result.plan, result.facts
    if plan is None:
        return ""
    steps = f"steps 1 to {plan.steps}{' of ' + str(facts['total_steps']) if facts else ''}"
    lines = [f"{steps}{_met(cfg, result)}; {plan.parameters:,} parameters"]
    if plan.said:
        lines.append(f"shrunk: {plan.said}")
    lines += _given(cfg, result)
    if plan.held_out:
        lines.append(f"held-out values: of the first {plan.held_out} {EXAMPLE[cfg.loss.rows]}s, after the last step")
    if result.not_held:
        lines.append(f"not verified: {', '.join(result.not_held)}")
    return "".join(f"{_wrapped(line)}\n" for line in lines)


def _met(cfg: Config, result: Verification) -> str:
    """Say how much of the data the steps have met, and which lengths."""
    met, plan = result.met, result.plan
    assert plan is not None
    if met is None:
        return f", sequences of up to {plan.longest} tokens"
    seen = f": {met.examples:,} of {met.of:,} {EXAMPLE[cfg.loss.rows]}s"
    if met.rollouts:
        seen += f" in {met.rollouts} rollout{'s' * (met.rollouts > 1)}, {met.samples} samples of which "
        seen += f"{met.counting} count"
    return f"{seen}, sequences of {met.shortest:,} to {met.longest:,} tokens"


def _given(cfg: Config, result: Verification) -> list[str]:
    """Say what is taken as given, and what the steps could not show."""
    lines = []
    if cfg.loss.draws:
        given = "the generated tokens"
        if cfg.rollout.engine is not RolloutEngine.native:
            given += ", by rollout.engine=native, except where the gap between the two models is compared"
        if result.largest:
            given += ". Each is the token that its random number chooses, which was checked"
        if result.met is not None and result.met.doubtful:
            given += f". {result.met.doubtful} lie so near a border of top_k, top_p or min_p that rounding may decide"
        lines.append(f"given: {given}")
    for precision, reasons in result.given.items():
        lines += [f"given in {precision}: reward {name}, since {why}" if why else f"taken as given: {name}"
                  for name, why in reasons.items() if why or precision == "float64"]  # fmt: skip
    return lines + (_not_met(cfg, result, result.met) if cfg.loss.draws and result.met is not None else [])


def _not_met(cfg: Config, result: Verification, met: Met) -> list[str]:
    """Say what the steps could not show."""
    lines, new = [], first_step_on_new_weights(cfg)
    assert result.plan is not None
    if result.plan.steps < new <= result.facts["total_steps"]:
        lines.append(f"not met: samples that trained weights have generated, which begin with step {new} "
                     f"(--steps {new})")  # fmt: skip
    if met.alike and met.alike == met.rollouts * cfg.rollout.batch_size:
        lines.append("not met: different answers to one prompt: those to each prompt are all the same")
    if not met.advantages:
        lines.append("not met: an advantage that is not 0, so the policy has learned nothing from its scores in these "
                     "steps")  # fmt: skip
    if not met.values:
        lines.append("not met: a value of the critic that is not 0, as all are at first; more steps show it (--steps)")
    return lines


def table(cfg: Config, result: Verification) -> str:
    """Largest relative differences to the reference; `-` if a failure came first or nothing is checked."""
    own = cfg.train.precision
    heads = ["largest difference", "float64", "allowed"]
    if own is not Precision.fp64:
        heads += [own.value, "noise floor", "allowed"]
    rows = [heads]
    gauge = result.largest
    measured = {each.quantity: each for each in result.measured}
    allowed = _allowed()
    scores = result.scores
    for words, name, own_name in ROWS[1:] if scores else ROWS:  # there are no single tokens to look at
        if words in OF_SAMPLES and name not in gauge:
            continue
        row = [
            words.replace("log-probabilities per example", "scores per example") if scores else words,
            _number(gauge.get(name)),
            _number(None if words in SHOWN_ONLY else allowed.get(words)),
        ]
        here = measured.get(own_name or "")
        row += [_number(here.own), _number(here.floor), _number(here.allowed)] if here else ["-"] * 3
        rows.append(row[: len(heads)])
    metrics = [value for name, value in gauge.items() if name.startswith(("train/", "eval/"))]
    last = ["logged metrics", _number(max(metrics, default=None)), _number(allowed["logged metrics"]), *["-"] * 3]
    rows.append(last[: len(heads)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    return "".join(f"  {_line(row, widths)}\n" for row in rows) + _notes(cfg, result)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(row, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])


def _notes(cfg: Config, result: Verification) -> str:
    lines = []
    if result.measured:
        lines.append(
            f"{cfg.train.precision.value}: log-probabilities, and rows with 'given', are compared at every step. Loss "
            f"and gradient are compared at step 1 only, because the weights differ after it"
            if cfg.loss.draws
            else f"{cfg.train.precision.value}: compared at step 1, because the weights differ after it; rows with "
            f"'given' are compared at every step, and weights after the last"
        )
    gauge = result.largest
    if result.passed and gauge.get("weights after the step", 0.0) > _allowed()["weights after the steps"]:
        lines.append(
            "each step is right given its gradient; where the weights differ by more than is allowed, Adam has divided "
            "by a gradient that is only rounding, and "
            + (
                "the reference has gone on from the run's weights"
                if cfg.loss.draws
                else "later values may differ by the same factor"
            )
            + addressed(" (docs/verify.md)")
        )
    return "".join(f"{_wrapped(line)}\n" for line in lines)


def _wrapped(text: str) -> str:
    """Wrap a paragraph; a traceback stays as it is."""
    return text if "\n" in text else textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _allowed() -> dict[str, float]:
    return {
        "log-probability of a token": FLOAT64.logp,
        "log-probabilities per example": FLOAT64.logp,
        "value of a token": FLOAT64.logp,
        "what the loss is given": FLOAT64.kept,
        "loss": FLOAT64.loss,
        "derivatives, given the tokens": FLOAT64.formula,
        "gradient, whole": FLOAT64.gradient,
        "gradient of the worst parameter": FLOAT64.gradient,
        "weights, given the gradient": FLOAT64.updated[1],
        "weights after the steps": FLOAT64.weights,
        "logged metrics": FLOAT64.metric[0],
    }


def _number(value: float | None) -> str:
    if value is None or math.isinf(value):
        return "-"
    return "0" if value == 0 else f"{value:.1e}"


def conclusion(cfg: Config, result: Verification) -> str:
    if result.failure is not None:
        return f"{failure_in_words(result.failure)}\n({result.seconds:.0f} s)"
    assert result.plan is not None
    own, steps = cfg.train.precision, result.plan.steps
    outputs = "scores" if result.scores else "log-probabilities"
    same = f"the same samples and tokens, and in float64 the same {outputs}"
    if cfg.loss.draws:
        same = f"the same prompts and rewards, and in float64 the same {outputs} of the generated tokens, advantages"
    words = (
        f"PASS: {steps} optimizer step{'s' * (steps > 1)} on this layout agree{'s' * (steps == 1)} with the "
        f"plain one-process reference: {same}, loss, gradient, weights and logged values up to rounding."
    )
    if cfg.loss.draws and result.met is not None and not result.met.advantages:
        words += " But nothing was learned from scores in these steps: see 'not met' above."
    if not result.passed:
        words = (
            "FAIL: all values agree with the plain one-process reference, but the ring does not shard the modules "
            "named above: a longer ring saves no memory there. Look for a gather over the ring in their code."
        )
    elif own is not Precision.fp64:
        words += f" In {own.value} with engine={cfg.engine.name.value} only the rounding of {own.value} remains."
    return "\n".join(textwrap.wrap(words, WIDTH)) + f"\n({result.seconds:.0f} s)"


def failure_in_words(failure: Failure) -> str:
    lines = [
        f"FAIL at step {failure.step}, in {failure.precision}: the first difference is in the {failure.stage}.",
        f"  {failure.quantity}",
        f"    this run:  {failure.got}",
        f"    {failure.beside}: {failure.expected}",
    ]
    lines += [_wrapped(words) for words in (failure.note, failure.evidence) if words]
    lines += [_wrapped(words) for words in settings_in_words(failure)]
    lines.append(f"  Look in {failure.module}")
    return "\n".join(lines)


def settings_in_words(failure: Failure) -> list[str]:
    """Say which settings make the difference, and how to train without it."""
    if not failure.settings:
        if failure.stage == "running" or failure.starts is not None:
            return []
        if failure.beside == "transformers alone":
            return ["No setting is at fault: the run differs at its plainest too, on one rank. The folder below, or "
                    "the model's own code, computes it otherwise than transformers alone."]  # fmt: skip
        return []
    named = " and ".join(f"{each['key']}={each['value']}" for each in failure.settings)
    starts = "" if failure.starts is None else f" ({failure.starts} starts; --no-search leaves them out)"
    lines = [f"The setting at fault is {named}{starts}." if len(failure.settings) == 1 else
             f"The settings at fault are {named}, together{starts}."]  # fmt: skip
    lines += [f"With {way} the step agrees." for way in failure.around]
    if failure.not_tried:
        lines.append(f"Not tried: {'; '.join(dict.fromkeys(failure.not_tried))}")
    return lines


def as_json(cfg: Config, result: Verification) -> dict[str, Any]:
    return {
        "passed": result.passed,
        "failure": dataclasses.asdict(result.failure) if result.failure else None,
        "plan": dataclasses.asdict(result.plan, dict_factory=_by_value) if result.plan else None,
        "shrunk": result.plan.said if result.plan else None,
        **result.facts,
        "settings": result.settings,
        "float64": {"engine": exact(cfg).engine.name.value, "largest": dict(result.largest)},
        cfg.train.precision.value: [dataclasses.asdict(each) for each in result.measured],
        "gap": report_gap.as_json(result.gap) if result.gap is not None else None,
        "sharding": result.sharding.plain() if result.sharding is not None else None,
        "not_verified": list(result.not_held),
        "met": dataclasses.asdict(result.met) if result.met is not None else None,
        "given": result.given,
        "seconds": result.seconds,
        "config": to_plain(cfg),
    }


def _by_value(items: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value.value if isinstance(value, Enum) else value for name, value in items}
