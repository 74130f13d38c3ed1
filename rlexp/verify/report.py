"""The report of a verification: its scope, a table, the conclusion in words; and the same as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from rlexp.base.pages import addressed
from rlexp.base.printable import fitted
from rlexp.config.checks.layout import gives_widths
from rlexp.config.checks.micro_batches import batch_in_words
from rlexp.config.load import to_plain
from rlexp.config.schema import Config, HFModelConfig
from rlexp.config.schema.cadence import plural
from rlexp.config.schema.models import Precision
from rlexp.config.schema.rollouts import RolloutEngine
from rlexp.config.schema.row_kinds import EXAMPLE
from rlexp.preflight.rehearsal.sharding import in_words
from rlexp.verify import report_gap
from rlexp.verify.checks import FLOAT64
from rlexp.verify.profiles import exact, first_step_on_new_weights
from rlexp.verify.verdict import Failure, Met, Verification
from rlexp.verify.verification import verify

WIDTH = 110
# Rows of the table: title, name in float64, name in the run's own precision, and what is allowed in float64. A large
# difference of the weights after the steps is no failure: docs/verify.md says when it occurs.
ROWS = (
    ("log-probability of a token", "log-probability of a token", "log-probability of a token", FLOAT64.logp),
    ("log-probabilities per example", "sum of a sequence's log-probabilities", "log-probabilities per example",
     FLOAT64.logp),
    ("value of a token", "value of a token", "value of a token", FLOAT64.logp),
    ("what the loss is given", "what the loss is given", "what the loss is given", FLOAT64.kept),
    ("loss", "loss", "loss", FLOAT64.loss),
    ("derivatives, given the tokens", "derivatives of the loss, given the tokens", "derivatives, given the tokens",
     FLOAT64.formula),
    ("gradient, whole", "gradient, whole", "gradient", FLOAT64.gradient),
    ("gradient of the worst parameter", "gradient of a parameter", "gradient of a parameter", FLOAT64.gradient),
    ("gradient, given its parts", None, "gradient, given its parts", None),
    ("weights, given the gradient", "weights, given the gradient", None, FLOAT64.updated[1]),
    ("weights after the steps", "weights after the step", "weights after the step", None),
    ("logged metrics", "logged metrics", None, FLOAT64.metric[0]),
)  # fmt: skip
OF_SAMPLES = ("value of a token", "what the loss is given", "derivatives, given the tokens")


def run(cfg: Config, steps: int | None, file: Path | None, *, search: bool = True) -> int:
    """Verify, print the report and return the exit code."""
    if file is not None:
        file.write_text("", encoding="utf-8")  # no result of another time
    sys.stdout.write(fitted(f"rlexp.verify  {subject(cfg)}\n"))
    sys.stdout.flush()
    result = verify(cfg, steps, print_line, search=search)
    sys.stdout.write(fitted(report(cfg, result)))
    if file is not None:
        text = json.dumps(as_json(cfg, result), indent=2, default=attrgetter("value"))  # an enum's value
        file.write_text(f"{text}\n", encoding="utf-8")
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
    sections = [scope(cfg, result), table(cfg, result)]
    if result.sharding is not None:
        sections.append("".join(f"  {line}\n" for line in in_words(result.sharding)))
    if result.gap is not None:
        sections.append(_paragraphs(report_gap.in_words(cfg, result.gap)))
    return "\n".join([*sections, f"{conclusion(cfg, result)}\n"])


def _paragraphs(texts: Iterable[str]) -> str:
    return "".join(f"{_wrapped(text)}\n" for text in texts)


def _wrapped(text: str) -> str:
    """Wrap a paragraph; a traceback stays as it is."""
    return text if "\n" in text else textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def scope(cfg: Config, result: Verification) -> str:
    return _paragraphs(_scope(cfg, result))


def _scope(cfg: Config, result: Verification) -> Iterator[str]:
    """Say how much of the data the steps have met, what is taken as given, and what the steps could not show."""
    plan, met, rows = result.plan, result.met, EXAMPLE[cfg.loss.rows]
    if plan is None:
        return
    of = f" of {result.facts['total_steps']}" if result.facts else ""
    seen = f", sequences of up to {plan.longest} tokens"
    if met is not None:
        drawn = (
            f" in {met.rollouts} rollout{'s' * (met.rollouts > 1)}, {met.samples} samples of which {met.counting} count"
        )
        seen = f": {met.examples:,} of {met.of:,} {rows}s{drawn if met.rollouts else ''}"
        seen += f", sequences of {met.shortest:,} to {met.longest:,} tokens"
    yield f"steps 1 to {plan.steps}{of}{seen}; {plan.parameters:,} parameters"
    if met is not None and met.widths:
        yield f"widths: {widths_in_words(cfg, met.widths)}"
    if plan.left_out:
        yield f"shrunk: {plan.left_out}"
    if cfg.loss.draws:
        given = "given: the generated tokens"
        if cfg.rollout.engine is not RolloutEngine.native:
            given += ", by rollout.engine=native, except where the gap between the two models is compared"
        if result.largest:
            given += ". Each is the token that its random number chooses, which was checked"
        if met is not None and met.doubtful:
            given += f". {met.doubtful} lie so near a border of top_k, top_p or min_p that rounding may decide"
        yield given
    for precision, reasons in result.given.items():
        for name, why in reasons.items():
            if why:
                yield f"given in {precision}: reward {name}, since {why}"
            elif precision == "float64":
                yield f"taken as given: {name}"
    if cfg.loss.draws and met is not None:
        yield from (f"not met: {what}" for what in _not_met(cfg, met, plan.steps, result.facts["total_steps"]))
    if plan.held_out:
        yield f"held-out values: of the first {plan.held_out} {rows}s, after the last step"
    if result.not_held:
        yield f"not verified: {', '.join(result.not_held)}"


def widths_in_words(cfg: Config, counts: Mapping[int, int]) -> str:
    """Say how many sequences were held by how many ranks, and which widths no step has met."""
    ring = cfg.parallel.ring_size
    parts = []
    for width, count in sorted(counts.items()):
        upto = min(2 * width - 1, ring)
        ranks = (
            f"cut over {width}{f' to {upto}' if upto > width else ''} ranks" if width > 1 else "held whole by one rank"
        )
        parts.append(f"{plural(count, 'sequence')} {ranks}")
    missing = [width for width in (1 << power for power in range(ring.bit_length())) if width not in counts]
    listed = (
        f". Not met: widths of {', '.join(map(str, missing))} (parallel.cut=all cuts all)"
        if missing and gives_widths(cfg)
        else ""
    )
    return f"{', '.join(parts)}{listed}"


def _not_met(cfg: Config, met: Met, steps: int, total: int) -> Iterator[str]:
    """Say what the steps could not show."""
    new = first_step_on_new_weights(cfg)
    if steps < new <= total:
        yield f"samples that trained weights have generated, which begin with step {new} (--steps {new})"
    if met.alike and met.alike == met.rollouts * cfg.rollout.batch_size:
        yield "different answers to one prompt: those to each prompt are all the same"
    if not met.advantages:
        yield "an advantage that is not 0, so the policy has learned nothing from its scores in these steps"
    if not met.values:
        yield "a value of the critic that is not 0, as all are at first; more steps show it (--steps)"


def table(cfg: Config, result: Verification) -> str:
    """Largest relative differences to the reference; `-` if a failure came first or nothing is checked."""
    metrics = [value for name, value in result.largest.items() if name.startswith(("train/", "eval/"))]
    largest = result.largest | {"logged metrics": max(metrics, default=math.inf)}
    measured = {each.quantity: (each.own, each.floor, each.allowed) for each in result.measured}
    rows = [["largest difference", "float64", "allowed", cfg.train.precision.value, "noise floor", "allowed"]]
    for title, exact_name, own_name, allowed in ROWS[1:] if result.scores else ROWS:  # there are no single tokens
        if title in OF_SAMPLES and exact_name not in largest:
            continue
        if result.scores:
            title = title.replace("log-probabilities per example", "scores per example")
        own = measured.get(own_name or "", (None, None, None))
        rows.append([title, *map(_number, (largest.get(exact_name or ""), allowed, *own))])
    if cfg.train.precision is Precision.fp64:
        rows = [row[:3] for row in rows]
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = ["  ".join([title.ljust(first), *map(str.rjust, cells, others)]) for title, *cells in rows]
    return "".join(f"  {line}\n" for line in lines) + _paragraphs(_notes(cfg, result))


def _number(value: float | None) -> str:
    if value is None or math.isinf(value):
        return "-"
    return "0" if value == 0 else f"{value:.1e}"


def _notes(cfg: Config, result: Verification) -> Iterator[str]:
    own = cfg.train.precision.value
    if result.measured and cfg.loss.draws:
        yield (
            f"{own}: log-probabilities, and rows with 'given', are compared at every step. Loss and gradient are "
            f"compared at step 1 only, because the weights differ after it"
        )
    elif result.measured:
        yield (
            f"{own}: compared at step 1, because the weights differ after it; rows with 'given' are compared at every "
            f"step, and weights after the last"
        )
    if result.passed and result.largest.get("weights after the step", 0.0) > FLOAT64.weights:
        after = (
            "the reference has gone on from the run's weights"
            if cfg.loss.draws
            else "later values may differ by the same factor"
        )
        yield (
            f"each step is right given its gradient; where the weights differ by more than is allowed, Adam has "
            f"divided by a gradient that is only rounding, and {after}{addressed(' (docs/verify.md)')}"
        )


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
        f"    {failure.beside + ':':<10} {failure.expected}",
    ]
    notes = (failure.note, failure.evidence, *settings_in_words(failure))
    lines += [_wrapped(words) for words in notes if words]
    lines += [f"  Look in {failure.module}"] if failure.module else []
    return "\n".join(lines)


def settings_in_words(failure: Failure) -> list[str]:
    """Say which settings make the difference, and how to train without it."""
    if not failure.settings:
        if failure.beside != "transformers alone" or failure.stage == "running" or failure.starts is not None:
            return []
        return ["No setting is at fault: the run differs at its plainest too, on one rank. The folder below, or the "
                "model's own code, computes it otherwise than transformers alone."]  # fmt: skip
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
        "plan": dataclasses.asdict(result.plan) if result.plan else None,
        "shrunk": result.plan.left_out if result.plan else None,
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
