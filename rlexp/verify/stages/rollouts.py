"""A rollout of a run beside the reference: its prompts and answers, their rewards, what models say of them, and what
they are worth."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rlexp.config.schema import Config
from rlexp.config.schema.reward_terms import reward_terms
from rlexp.config.schema.rollouts import ModelRewardConfig, RolloutConfig
from rlexp.verify.compared_samples import RunRollout, SampleStep, held_rollout_of, rollouts_of
from rlexp.verify.findings import ADVANTAGES, DATA, LOGPS, REWARDS, Clue, Finding, shown
from rlexp.verify.precision import rounding_of_token
from rlexp.verify.records import Array, Drawn, RolloutExpected, Trace
from rlexp.verify.reference import rollout_rules as rules
from rlexp.verify.reference.drawn import Rollout, divergences_of

OF_MODELS = 1e-11  # of a reward model's score in float64, as of a log-probability


def incomplete(cfg: Config, traces: Sequence[Trace], held_out: int) -> Iterator[Finding]:
    """Check that each step has the rollout that it must have, each rollout its samples, and each held-out prompt its
    answer: without them the reference has nothing to begin with."""
    for trace in traces:
        for number, seen in enumerate(trace.steps, start=1):
            if seen.micros and seen.rollout != rules.rollout_of(cfg, number):
                what = f"the rollout that rank {trace.rank} trains on"
                got = "none" if seen.rollout is None else f"rollout {seen.rollout + 1}"
                yield Finding(number, DATA, Clue.EXECUTED, what, got, f"rollout {rules.rollout_of(cfg, number) + 1}")
    for run in rollouts_of(traces):
        places = [sample.place for sample in run.drawn.samples]
        yield from _held_once(places, rules.size_of(cfg), run.seen[0].step, f"sample {{}} of rollout {run.number + 1}")
    answers = held_rollout_of(traces)
    if held_out and traces[0].stopped is None:
        places = [] if answers is None else [sample.place for sample in answers.samples]
        named, last = "the answer to held-out prompt {}", len(traces[0].steps)
        yield from _held_once(places, held_out, last, named, Clue.EXECUTED)


def _held_once(places: Sequence[int], count: int, step: int, named: str, clue: Clue = Clue.DRAWN) -> Iterator[Finding]:
    for place in range(count):
        if places.count(place) != 1:
            what = f"ranks that hold {named.format(place)}"
            yield Finding(step, DATA, clue, what, str(places.count(place)), "1")


def of_sample(step: SampleStep, place: int) -> str:
    drawn = step.run.drawn.samples[place]
    return f"sample {place} of rollout {step.run.number + 1} ({drawn.origin})"


def drawn(step: SampleStep) -> Iterator[Finding]:
    """Check the prompts of a new rollout, and what its answers are as texts."""
    expected, samples = step.expected.rollout, step.run.drawn.samples
    each = len(samples) // len(expected.prompts)
    for sample in samples:
        index = expected.indices[sample.place // each]
        if sample.index != index:
            what = f"prompt of {of_sample(step, sample.place)}"
            clue = Clue.EXECUTED if list(step.run.seen[0].planned) == expected.indices else Clue.SAMPLES
            yield step.finding(DATA, clue, what, f"prompt {sample.index}", f"prompt {index}")
        yield from _answer(step, expected, sample, of_sample(step, sample.place), Clue.TOKENS)


def _answer(step: SampleStep, expected: RolloutExpected, sample: Drawn, named: str, clue: Clue) -> Iterator[Finding]:
    """Check a prompt's tokens, and the text and the end of the answer to it."""
    place, longest = sample.place, step.whole.cfg.rollout.max_new_tokens
    prompt = expected.prompts[place * len(expected.prompts) // len(expected.answers)].prompt
    text, stopped, goes_on = expected.texts[place], expected.stopped[place], expected.beyond[place]
    if not np.array_equal(sample.prompt, prompt):
        yield step.finding(DATA, clue, f"tokens of the prompt of {named}", sample.prompt.tolist(), prompt.tolist())
    if not 0 < len(sample.answer) <= longest:
        yield step.finding(DATA, Clue.DRAWN, f"tokens of {named}", len(sample.answer), f"1 to {longest}")
    elif goes_on is not None:
        yield step.finding(DATA, Clue.DRAWN, f"tokens of {named}", len(sample.answer), f"{goes_on}: it ends there")
    elif not stopped and len(sample.answer) < longest:
        yield step.finding(DATA, Clue.DRAWN, f"tokens of {named}, which has no end", len(sample.answer), longest)
    if sample.text != text:
        yield step.finding(DATA, Clue.DRAWN, f"text of {named}", repr(sample.text), repr(text))
    if sample.stopped != stopped:
        yield step.finding(DATA, Clue.DRAWN, f"whether {named} has ended by itself", sample.stopped, stopped)


def held_answers(step: SampleStep) -> Rollout | None:
    """The answers to held-out prompts, which follow the last step."""
    return held_rollout_of(step.whole.traces) if step.number == step.whole.expected.steps[-1].number else None


def held_out(step: SampleStep) -> Iterator[Finding]:
    """Check these answers, their rewards, and the log-probabilities with which they were drawn."""
    expected, answers = step.whole.expected.held_rollout, held_answers(step)
    if expected is None or answers is None:
        return

    def named(place: int) -> str:
        return f"the answer to held-out prompt {place} ({answers.samples[place].origin})"

    for sample in answers.samples:
        yield from _answer(step, expected, sample, named(sample.place), Clue.EXECUTED)
    yield from _judged(step, expected, answers.samples, named)
    for sample, wanted in zip(answers.samples, expected.behaviour, strict=True):
        apart = np.abs(sample.behaviour - wanted) / np.maximum(1.0, np.abs(wanted))
        if step.whole.gauge.exceeds("log-probability of a token", float(apart.max()), step.whole.allowed.logp):
            at = int(np.argmax(apart))
            what = f"policy as it generated {named(sample.place)}, token {at}"
            yield step.finding(LOGPS, Clue.BEHAVIOUR, what, sample.behaviour[at], wanted[at])
    yield from _chosen(step, expected, named)


def of_answers(samples: Sequence[Drawn]) -> dict[str, float]:
    """The values of drawn answers alone, from what the run knows of them."""
    terms = {name: np.array([sample.terms[name] for sample in samples]) for name in samples[0].terms}
    return rules.of_answers(
        terms,
        np.array([sample.score for sample in samples]),
        [len(sample.answer) for sample in samples],
        [sample.stopped for sample in samples],
    )


def rewards(step: SampleStep) -> Iterator[Finding]:
    """Check the rewards of a new rollout."""
    if step.begins:
        samples = step.run.drawn.samples
        yield from _judged(step, step.expected.rollout, samples, lambda place: of_sample(step, place))


def _judged(
    step: SampleStep, expected: RolloutExpected, samples: Sequence[Drawn], named: Callable[[int], str]
) -> Iterator[Finding]:
    """Check the rewards that can be computed again, and the score that is made of them all."""
    models = {term.name for term in reward_terms(step.whole.cfg.reward) if isinstance(term.cfg, ModelRewardConfig)}
    exact, rounded = step.whole.allowed.given, max(step.whole.allowed.given, OF_MODELS)
    for name, wanted in expected.terms.items():
        got = np.array([sample.terms[name] for sample in samples])
        wrong = step.first_wrong("rewards", got, wanted, allowed=rounded if name in models else exact)
        if wrong is not None:
            asked = expected.notes.get(name, "")  # of a function that does not judge each answer by itself
            what, note = f"reward {name} of {named(wrong)}", asked or _another(got, wanted)
            found = step.finding(REWARDS, Clue.REWARD, what, got[wrong], wanted[wrong], note)
            yield dataclasses.replace(found, module=_function_of(step.whole.cfg, name)) if asked else found
    scores = np.array([sample.score for sample in samples])
    wrong = step.first_wrong("rewards", scores, expected.scores, allowed=rounded if models else exact)
    if wrong is not None:
        clue = Clue.REWARD if expected.stopped[wrong] else Clue.EXECUTED  # the step subtracts the penalty
        note = _another(scores, expected.scores)
        yield step.finding(REWARDS, clue, f"score of {named(wrong)}", scores[wrong], expected.scores[wrong], note)


def _function_of(cfg: Config, name: str) -> str:
    """Name the user's function behind a reward."""
    term = next(term for term in reward_terms(cfg.reward) if term.name == name)
    return f"{term.key}.function={getattr(term.cfg, 'function', '')}"


def _another(got: Array, wanted: Array) -> str:
    """Say so if samples have each other's values."""
    if np.array_equal(np.sort(got), np.sort(wanted)):
        return f"all {len(got)} values are there, but {int((got != wanted).sum())} belong to other samples"
    return ""


def scored(step: SampleStep) -> Iterator[Finding]:
    """Check what the models say of a new rollout's answers, token by token."""
    if not step.begins:
        return
    expected, run = step.expected.rollout, step.run
    yield from _said(step, expected, run)
    yield from _chosen(step, expected, lambda place: of_sample(step, place))


def _said(step: SampleStep, expected: RolloutExpected, run: RunRollout) -> Iterator[Finding]:
    gauge, allowed = step.whole.gauge, step.whole.allowed.logp
    for who, field, clue in (
        ("policy before the first step on it", "old", Clue.SCORED),
        ("policy that generated it", "behaviour", Clue.BEHAVIOUR),
        ("reference", "reference", Clue.REFERENCE),
        ("critic", "values", Clue.SCORED),
    ):
        wanted = getattr(expected, field)
        got = getattr(run, field)
        if wanted is None:
            continue
        if got is None:
            yield step.finding(LOGPS, clue, f"{who}, of rollout {run.number + 1}", "is not computed", "is needed")
            continue
        what = "value" if field == "values" else "log-probability"
        for place, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
            if len(ours) != len(theirs):
                yield step.finding(LOGPS, clue, f"{who}, tokens of {of_sample(step, place)}", len(ours), len(theirs))
                continue
            apart = np.abs(ours - theirs) / np.maximum(1.0, np.abs(theirs))
            quantity = "value of a token" if field == "values" else "log-probability of a token"
            if gauge.exceeds(quantity, float(apart.max()), allowed):
                at = int(np.flatnonzero(~(apart <= allowed))[0])
                note = f"{int((~(apart <= allowed)).sum())} of its {len(apart)} tokens differ" + _moved(ours, theirs)
                yield step.finding(LOGPS, clue, f"{who}, {what} of token {at} of {of_sample(step, place)}", ours[at],
                                   theirs[at], note)  # fmt: skip


def _chosen(step: SampleStep, expected: RolloutExpected, named: Callable[[int], str]) -> Iterator[Finding]:
    """Check that each drawn token is the one that its random number chooses, from those that may be drawn."""
    allowed = math.expm1(2 * rounding_of_token(step.whole.cfg.train.precision))
    for place, apart in enumerate(expected.strayed):
        quantity = "random number of a generated token, outside its part"
        if step.whole.gauge.exceeds(quantity, float(apart.max()), allowed):
            at = int(np.flatnonzero(~(apart <= allowed))[0])
            what = f"token {at} of {named(place)}"
            got = "may not be generated" if apart[at] == 1 else f"its random number is {apart[at]:.2g} outside its part"
            wanted = f"the token that its random number chooses{_cuts(step.whole.cfg.rollout)}"
            yield step.finding(LOGPS, Clue.DRAWN, what, got, wanted)


def _cuts(cfg: RolloutConfig) -> str:
    keys = {"top_k": (cfg.top_k, 0), "top_p": (cfg.top_p, 1), "min_p": (cfg.min_p, 0)}
    set_here = [f"{name}={value:g}" for name, (value, unset) in keys.items() if value != unset]
    return f" with {', '.join(set_here)}" if set_here else ""


def _moved(ours: Array, theirs: Array) -> str:
    """Say so if the values are those of neighbours."""
    for by, words in ((1, "before"), (-1, "after")):
        a, b = (ours[1:], theirs[:-1]) if by == 1 else (ours[:-1], theirs[1:])
        if len(a) > 1 and np.allclose(a, b, rtol=1e-6, atol=1e-12):
            return f"; they are those of the token {words}"
    return ""


def credit(step: SampleStep) -> Iterator[Finding]:
    """Check which samples count and what each token is worth, given the run's scores and log-probabilities."""
    if step.begins:
        yield from _counts(step)
        yield from _outcomes(step)
        yield from _spread(step)


def _counts(step: SampleStep) -> Iterator[Finding]:
    samples, words = step.run.drawn.samples, ("does not count", "counts")
    scores = np.array([sample.score for sample in samples])
    counts = rules.counts_of(step.whole.cfg, scores, [sample.stopped for sample in samples])
    for place, sample in enumerate(samples):
        if sample.counts != counts[place]:
            what = f"whether {of_sample(step, place)} counts"
            yield step.finding(ADVANTAGES, Clue.OUTCOMES, what, words[sample.counts], words[int(counts[place])])


def _outcomes(step: SampleStep) -> Iterator[Finding]:
    """Check what each rank computes the credit of all samples from, and what it computes."""
    cfg, run, samples = step.whole.cfg, step.run, step.run.drawn.samples
    coefficient = np.array([_coefficient(step)])
    divergences = divergences_of(cfg, run.old or [], run.reference)
    outcomes = {
        "scores": np.array([sample.score for sample in samples]),
        "divergences": np.array([each.sum() for each in divergences]),
        "prompts": np.arange(len(samples), dtype=float) // cfg.rollout.n_samples,
    }
    again = step.whole.again.rollouts[run.number]
    for seen, trace in zip(run.seen, step.whole.traces, strict=True):
        if step.first_wrong("coefficient", np.array([seen.kl_coef]), coefficient, 1e-300) is not None:
            what = f"coefficient of the divergence on rank {trace.rank}"
            yield step.finding(ADVANTAGES, Clue.OUTCOMES, what, seen.kl_coef, coefficient[0])
        for name, wanted in outcomes.items():
            got = seen.outcomes.get(name, np.zeros(0)).astype(np.float64)
            if (wrong := step.first_wrong("outcomes", got, wanted)) is not None:
                what = f"{name} that the credit is computed from on rank {trace.rank}, at {of_sample(step, wrong)}"
                yield step.finding(ADVANTAGES, Clue.OUTCOMES, what, *_both(got, wanted, wrong))
        got = np.zeros(0) if seen.credit is None else seen.credit
        if (wrong := step.first_wrong("credit, given the outcomes", got, again.credit)) is not None:
            what = f"credit of {of_sample(step, wrong)} on rank {trace.rank}, given all scores of the rollout"
            yield step.finding(ADVANTAGES, Clue.CREDIT, what, *_both(got, again.credit, wrong))


def _coefficient(step: SampleStep) -> float:
    """The coefficient that a rollout must have, given the run's values of the one before."""
    number = step.run.number
    if not number:
        return float(step.expected.rollout.kl_coef)
    cfg, before = step.whole.cfg, step.whole.rollouts[number - 1]
    scores, lengths = np.zeros(len(before.drawn.samples)), [len(each.answer) for each in before.drawn.samples]
    row = rules.of_rollout(cfg, number - 1, 0.0, scores, lengths, before.old or [], before.reference)
    return rules.next_coefficient(cfg, before.seen[0].kl_coef, row["objective/kl"])


def _spread(step: SampleStep) -> Iterator[Finding]:
    """Check each token's advantage, and the critic's target."""
    again = step.whole.again.rollouts[step.run.number]
    for name in ("advantages", "returns"):
        wanted_of, got_of = getattr(again, name), getattr(step.run, name)
        for place, wanted in enumerate(wanted_of or []):
            got = got_of[place] if got_of is not None else np.zeros(0)
            at = int(np.argmax(np.abs(got - wanted))) if len(got) == len(wanted) else 0
            apart = abs(got[at] - wanted[at]) / max(0.1, np.abs(wanted).max()) if len(got) == len(wanted) else np.inf
            if step.whole.gauge.exceeds(f"{name}, given their parts", float(apart), step.whole.allowed.kept):
                what = f"{name} of token {at} of {of_sample(step, place)}, given the run's own scores and models"
                yield step.finding(ADVANTAGES, Clue.SPREAD, what, *_both(got, wanted, at))


def _both(got: Array, wanted: Array, at: int) -> tuple[str, str]:
    return (shown(got[at]) if at < len(got) else "is not there"), shown(wanted[at])
