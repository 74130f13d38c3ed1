"""What preflight prints, now and then while it works and at its end, and what it writes as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rlexp.base.byte_counts import GIB, size
from rlexp.base.durations import duration
from rlexp.base.printable import fitted
from rlexp.config.checks.micro_batches import batch_in_words, micro_batches
from rlexp.config.gpu_descriptions import described
from rlexp.config.hardware import NAMES
from rlexp.config.schema import Checkpointing, Config
from rlexp.config.schema.cadence import plural
from rlexp.config.vllm_memory import KEY, uses_vllm
from rlexp.preflight.answer import Answer, steps_of_epoch
from rlexp.preflight.changes import OTHERWISE, PRECOMPUTE, SLEEP, Change, needed, offloads, seconds, trains_otherwise
from rlexp.preflight.children import Call
from rlexp.preflight.communicators import beside
from rlexp.preflight.host import KINDS, HostBytes, told_short
from rlexp.preflight.longest_that_fits import ANSWERS, Longest
from rlexp.preflight.predict import Prediction
from rlexp.preflight.rehearsal.log import STORAGE_KINDS
from rlexp.preflight.rehearsal.longest_samples import drawn_at_once
from rlexp.preflight.rehearsal.rehearse import RehearsalPlan
from rlexp.preflight.rehearsal.sharding import in_words
from rlexp.preflight.rings import OnRing
from rlexp.preflight.vllm import VllmShare
from rlexp.training.train.examples import longest_in_words

EVERY = 5.0  # seconds between two lines of progress
CHECKPOINTING = {
    Checkpointing.none: "",
    Checkpointing.full: ", activation checkpointing",
    Checkpointing.attention: ", activation checkpointing that keeps attention",
}
PHASES = ("build", "rollout", "score", "collect", "forward", "reference", "backward", "optimizer", "export")
HEADS = ("weights", "grads", "optim.", "ref.", "saved", "cache", "temp.", "comm.", "vLLM")


def text(answer: Answer, *, verbose: bool = False) -> str:
    """Return the verdict, then what could be changed, then the memory; with `verbose` what the sums are made of."""
    vllm = answer.prediction.vllm
    steps = None if answer.rows is None else steps_of_epoch(answer.cfg, answer.rows)
    changes = _changes(answer.changes, answer.prediction, steps)
    lists = [[*_verdict(answer), *_time(answer, steps)], [*changes], [*_fitting(answer)],
             [*_memory(answer.prediction)], [] if vllm is None else [*_vllm(vllm)], [*_tight(answer)]]  # fmt: skip
    if verbose:
        host = answer.prediction.host
        alone = ["sharding: a ring of one has nothing to share out."]
        lists += [[] if host is None else [*_host(host)], [*_beside_tensors(answer)], [*_work(answer)]]
        lists += [alone if answer.sharding is None else in_words(answer.sharding)]
    more = ["--verbose"] * (not verbose) + ["--longest"] * (not answer.rings)
    lists += [[f"{' and '.join(more)} show{'s' * (len(more) == 1)} more."]] if more else []
    return "\n".join([*_head(answer), "", *(line for part in lists if part for line in (*part, ""))])


def _head(answer: Answer) -> Iterator[str]:
    cfg, hardware = answer.cfg, answer.cfg.hardware
    parallel, train = cfg.parallel, cfg.train
    ring = f"{'elastic ' * parallel.elastic}ring of {parallel.ring_size} ({parallel.layout.value})"
    offload = "" if cfg.engine.offload.value == "none" else f", offload {cfg.engine.offload.value}"
    checkpointing = CHECKPOINTING[cfg.memory.recomputed]
    parameters = f"{answer.parameters / 1e9:.3g}B" if answer.parameters >= 5e7 else f"{answer.parameters:,}"
    yield (
        f"rlexp preflight  {cfg.loss.name} on {parameters} parameters ({train.precision.value}), "
        f"engine {cfg.engine.name.value}{offload}{checkpointing}"
    )
    yield (
        f"  {ring} × {parallel.dp_size} = {parallel.world_size} × {hardware.name}, {hardware.memory_gib:g} GiB each"
        f"{_shared(cfg)}, of which {hardware.reserve_gib:g} are kept free for CUDA, NCCL and fragmentation"
    )
    yield (
        f"  {batch_in_words(cfg)}{f', {micro_batches(cfg)} a step' if train.grad_acc is None else ''}; "
        f"every sequence {cfg.data.max_length:,} tokens, {longest_in_words(cfg)}"
    )
    if cfg.loss.draws:
        rollout, steps = cfg.rollout, plural(cfg.rollout.epochs * cfg.rollout.minibatches, "step")
        drawn = "by vLLM" if uses_vllm(cfg) else f"by native decoding {drawn_at_once(cfg)} at once on a rank"
        yield f"  rollout of {rollout.batch_size} prompts × {rollout.n_samples} answers for {steps}, drawn {drawn}"


def _shared(cfg: Config) -> str:
    each = cfg.launch.ranks_per_gpu
    return f" for {each} ranks: {cfg.hardware.memory_gib / each:.4g} for each" if each > 1 else ""


def table(prediction: Prediction) -> str:
    """Return the memory by phase and kind."""
    host = [] if prediction.host is None else ["", *_host(prediction.host)]
    return "".join(f"{line}\n" for line in (*_memory(prediction), *host))


def changed(changes: Sequence[Change], asked: Prediction) -> str:
    """Return what each change needs, beside what was asked."""
    return "".join(f"{line}\n" for line in ("", *_changes(changes, asked)))


def _memory(prediction: Prediction) -> Iterator[str]:
    unit, name = (GIB, "GiB") if prediction.peak.bytes >= GIB else (1 << 20, "MiB")
    yield f"peak memory of rank {prediction.rank} by phase, {name}"
    kinds = [kind for kind in STORAGE_KINDS if any(peak.by_kind[kind] for peak in prediction.peaks.values())]
    heads = [*(HEADS[STORAGE_KINDS.index(kind)] for kind in kinds), "total"]
    yield f"  {'':9}" + "".join(f"{head:>8}" for head in heads)
    for phase in PHASES:
        if (peak := prediction.peaks.get(phase)) is not None:
            held = [*(peak.by_kind[kind] for kind in kinds), peak.bytes]
            yield f"  {phase:9}" + "".join(f"{each / unit:8.2f}" if each else f"{'':>8}" for each in held)


def _vllm(vllm: VllmShare) -> Iterator[str]:
    """Say what vLLM holds with its share, as part of the sums above."""
    holds = vllm.holds
    when = "while samples are generated" if vllm.sleeps else "to the end of the run"
    yield f"vLLM's share of the GPU, which it holds {when}, GiB (arithmetic, not rehearsed)"
    yield f"  {'weights':52}{holds.weights / GIB:9.2f}"
    yield f"  {'working memory: activations and CUDA graphs':52}{holds.working / GIB:9.2f}, assumed"
    short = "" if holds.bytes >= holds.least else ", so vLLM may not start"
    yield f"  {'keys and values':52}{holds.keys / GIB:9.2f}, {holds.room_in_words()}{short}"
    auto = " (auto: what training leaves)" if vllm.auto else ""
    yield f"  {'total':52}{holds.bytes / GIB:9.2f}, {KEY}={holds.share:g}{auto}"


def _beside_tensors(answer: Answer) -> Iterator[str]:
    """Say what the reserve is for."""
    held = beside(answer.cfg, answer.prediction.groups)
    yield "a GPU's memory beside tensors, GiB (assumed, not measured)"
    for name, count in held.assumed.items():
        yield f"  {name:52}{count / GIB:9.2f}"
    yield f"  {'total':52}{held.bytes / GIB:9.2f}, and hardware.reserve_gib keeps {held.reserve / GIB:g} free"


def _tight(answer: Answer) -> Iterator[str]:
    """Warn of a reserve that is smaller than what a GPU probably holds beside tensors."""
    held = beside(answer.cfg, answer.prediction.groups)
    if held.exceeds and answer.prediction.peak.bytes + held.bytes > answer.limit + held.reserve:
        gib = held.bytes / GIB
        yield (
            f"This may not fit: beside tensors, a GPU probably holds {gib:.1f} GiB (CUDA, cuBLAS and NCCL), and "
            f"hardware.reserve_gib keeps {held.reserve / GIB:g} free. With hardware.reserve_gib={gib:.1f} preflight "
            f"keeps as much free. Less is taken by parallel.transport=neighbour, a smaller ring, or a smaller "
            f"NCCL_BUFFSIZE in the environment."
        )


def _host(host: HostBytes) -> Iterator[str]:
    """Say what one machine holds in the host's memory."""
    known = "" if host.limit is None else f", of {host.limit / GIB:,.1f} that a run may take"
    yield f"the host's memory on one machine, with {plural(host.ranks, 'rank')}, GiB"
    for kind in KINDS:
        if count := host.by_kind[kind]:
            yield f"  {kind:35}{count / GIB:9,.2f}{', assumed: it refuses no run' if kind in host.assumed else ''}"
    yield f"  {'total':35}{host.bytes / GIB:9,.2f}{known}"


def _verdict(answer: Answer) -> Iterator[str]:
    peak, limit = answer.prediction.peak, answer.limit
    room = f"{size(peak.bytes)} at the peak ({peak.phase}), of {size(limit)}"
    if answer.fits:
        yield f"fits: {room}."
    elif peak.bytes > limit:
        yield f"does not fit: {room}."
    if (refused := answer.prediction.refused) is not None:
        yield f"{'does not fit: ' * (peak.bytes <= limit)}{refused}."
    if (short := answer.prediction.short) is not None:
        yield f"does not fit: {told_short(short, answer.cfg)}."
    if answer.engine_chosen is not None:
        yield f"engine=auto takes {answer.cfg.engine.name.value}: {answer.engine_chosen}."
    if answer.remedy is not None and answer.remedy.prediction is not None:
        words, gib = answer.remedy.words, f"{answer.remedy.prediction.peak.bytes / GIB:.1f} GiB"
        if trains_otherwise(words):
            yield f"no single change of the same training makes it fit. {words} would ({gib}), but {OTHERWISE}."
        else:
            yield f"cheapest change that fits: {words} ({gib})."
    elif peak.bytes > limit and not uses_vllm(answer.cfg):
        yield f"no single change of the list below makes it fit. {_otherwise(answer)}"


def _otherwise(answer: Answer) -> str:
    """Say what would fit where no single change does: a shorter sequence, GPUs with more memory, a smaller model."""
    cfg, asked = answer.cfg, answer.prediction
    longest = next((each.longest for each in answer.rings if each.own), None)
    would = [f"data.max_length={longest.tokens}"] if longest is not None and longest.tokens else []
    sheets = {name: described(name) for name in dict.fromkeys(NAMES.values())}
    free = {name: float(each["memory_gib"]) - float(each["reserve_gib"]) for name, each in sheets.items()}
    needs = asked.peak.bytes / GIB * cfg.launch.ranks_per_gpu
    if not asked.build_alone:
        would += [f"hardware={name}" for name in sorted(free, key=lambda name: free[name]) if free[name] >= needs]
    more = "more of these GPUs with a larger parallel.ring_size, or a smaller model"
    return f"These do: {', '.join(would)}. Else try {more}." if would else f"Try {more}."


def _time(answer: Answer, steps: int | None) -> Iterator[str]:
    """Say how long a step takes, and an epoch of so many steps, of the rows that are at hand."""
    took = seconds(answer.prediction)
    if took is None:
        return
    length, rows = answer.cfg.data.max_length, plural(answer.rows or 0, "row")
    yield f"a step takes about {duration(took, fine=True)}, if every sequence has {length:,} tokens."
    if steps:
        yield f"an epoch of {rows} has {plural(steps, 'step')}: at most {duration(took * steps, fine=True)}."
    elif steps is not None:
        yield f"the data has {rows} to train on, less than one batch."


def _fitting(answer: Answer) -> Iterator[str]:
    """Show for each ring what the asked length needs, and the longest sequence that fits."""
    if not answer.rings:
        return
    yield "longest sequence that fits, tokens (to 1 % of the memory, or to 1,024 a rank)"
    shared = any(each.sharing is not None for each in answer.rings)
    asked = f"at {answer.cfg.data.max_length:,} tokens: peak"
    yield f"{asked:>36}{'a step':>14}{'longest':>12}{'  and a pair that shares its prompt' * shared}"
    for ring in answer.rings:
        yield f"  {ring.title:12}{_on_ring(ring, answer.limit)}{'  (asked)' * ring.own}"


def _on_ring(ring: OnRing, limit: int) -> str:
    if ring.asked is None or ring.longest is None:
        return f"not possible: {ring.refused}"
    took = seconds(ring.asked)
    step = duration(took, fine=True) if took is not None and ring.asked.fits(limit) else "does not fit"
    return f"{needed(ring.asked):>22}{step:>14}{_length(ring.longest)}{_of_pair(ring.sharing)}"


def _changes(changes: Sequence[Change], asked: Prediction, steps: int | None = None) -> Iterator[str]:
    """Show each change with its memory, the time of a step, and that of an epoch of so many steps."""
    if not changes:
        return
    auto = asked.vllm is not None and asked.vllm.auto
    epoch = f"{'an epoch':>14}" * bool(steps)
    least = "   (with the least that vLLM needs)" * auto
    width = max(len(change.words) for change in changes)
    yield f"{'one change at a time':{width + 2}}{'peak':>12}{'a step':>14}{epoch}{least}"
    for change in (Change("(as it is)", asked), *changes):
        yield f"  {change.words:{width}}" + _changed(change, steps) + _beside(change)


def _length(longest: Longest) -> str:
    if not longest.tokens:
        return f"{'none':>12}"
    return f"{longest.tokens:>12,}{'' if longest.exact else '  or more'}"


def _of_pair(longest: Longest | None) -> str:
    """Say how long the prompt and the answers of a pair are."""
    if longest is None or longest.tokens <= ANSWERS:
        return "" if longest is None else f"{'none':>16}"
    return f"{longest.tokens - ANSWERS:>16,} + 2 × {ANSWERS:,}{'' if longest.exact else '  or more'}"


def _changed(change: Change, steps: int | None) -> str:
    if change.prediction is None:
        return f"  not possible: {change.refused}"
    took = seconds(change.prediction)
    if took is None:
        return f"  {needed(change.prediction)}, for its build alone"
    epoch = f"{duration(took * steps, fine=True):>14}" if steps else ""
    return f"{needed(change.prediction):>12}{duration(took, fine=True):>14}{epoch}"


def _beside(change: Change) -> str:
    """Say what a change costs or means that its memory and the time of a step do not show."""
    if change.prediction is None:
        return ""
    notes = ["and a pass before training"] * (PRECOMPUTE in change.words)
    notes += ["and copies from the host, not counted"] * offloads(change.words)
    notes += ["and vLLM wakes for each rollout"] * (SLEEP in change.words)
    if (short := change.prediction.short) is not None:
        notes += [f"needs {size(short.counted)} of a machine's memory, of {size(short.limit or 0)}"]
    notes += ["trains other weights"] * trains_otherwise(change.words)
    if (vllm := change.prediction.with_share().vllm) is not None and vllm.auto and change.prediction.refused is None:
        notes += [f"vLLM gets {vllm.holds.share:g}"]
    return f"  {', '.join(notes)}" if notes else ""


def _work(answer: Answer) -> Iterator[str]:
    counts = answer.prediction.counts()
    total = seconds(answer.prediction) or 0.0
    sent = sum(counts.sent.values())
    each = ", ".join(f"{name} {count / 1e9:.3g}" for name, count in sorted(counts.sent.items()) if count > 1e6)
    yield "a step of a rank, with the rollout that it generates" if answer.cfg.loss.draws else "a step of a rank"
    yield f"  operations      {counts.flops:.3g} floating-point, in matrix products and attention"
    yield f"  memory traffic  {counts.bytes / 1e9:,.0f} GB"
    yield f"  sent            {sent / 1e9:,.3g} GB{f' ({each})' if each else ''}"
    yield f"  launches        {counts.launches:,}, {counts.launching:.2g} s of the host while the device computes"
    yield (
        f"  estimated time  {duration(total, fine=True)}, of which {counts.waited:.2g} s wait for bytes that computing "
        f"does not hide (a roofline, not a measurement)"
    )
    if answer.cfg.loss.draws:
        drawn, scored = (answer.prediction.counts(phase) for phase in ("rollout", "score"))
        vllm = answer.prediction.vllm
        took = drawn.took + (0.0 if vllm is None else vllm.seconds)
        yield f"    of these       {took:.3g} s generate a rollout and {scored.took:.3g} s score it"
        if vllm is not None:
            yield f"    vLLM            {vllm.seconds:.3g} s to generate, an estimate from what it reads for each token"
    inside = answer.prediction.counts("data", "forward", "reference", "backward").syncs.total()
    yield f"  host waits      {counts.syncs.total()} times a step, {inside} of them in micro-batches"
    for place, count in sorted(counts.syncs.items(), key=lambda item: (-item[1], item[0])):
        yield f"    {count:>4} × {place}"


def plain(answer: Answer) -> dict[str, Any]:
    """Return the answer for --json. The remedy has a key of its own where it trains other weights."""
    asked, remedy, counts = answer.prediction, answer.remedy, answer.prediction.counts()
    words, others = (None if remedy is None else remedy.words), remedy is not None and trains_otherwise(remedy.words)
    return {
        "fits": answer.fits,
        "room_gib": answer.limit / GIB,
        "rank": asked.rank,
        "peak_gib": asked.peak.bytes / GIB,
        "peak_phase": asked.peak.phase,
        "peaks_bytes": {phase: peak.by_kind for phase, peak in asked.peaks.items() if phase},
        "beside_bytes": dict(beside(answer.cfg, asked.groups).assumed),
        "vllm": None if asked.vllm is None else asked.vllm.plain(),
        "host_bytes": {} if asked.host is None else dict(asked.host.by_kind),
        "host_room_bytes": None if asked.host is None else asked.host.limit,
        "longest": {ring.name: {"refused": ring.refused} if ring.longest is None else ring.longest.plain()
                    for ring in answer.rings},
        "longest_sharing": {ring.name: ring.sharing.plain() for ring in answer.rings if ring.sharing is not None},
        "at_asked_length": {ring.name: {"fits": ring.asked.fits(answer.limit), **_needs(ring.asked)}
                            for ring in answer.rings if ring.asked is not None},
        "changes": {each.words: {"refused": each.refused} if each.prediction is None else
                    _needs(each.prediction)
                    for each in answer.changes},
        "engine": answer.cfg.engine.name.value,
        "remedy": None if others else words,
        "remedy_of_other_weights": words if others else None,
        "step": {
            "flops": counts.flops,
            "bytes": counts.bytes,
            "sent_bytes": dict(counts.sent),
            "launches": counts.launches,
            "host_waits": dict(counts.syncs),
            "estimated_seconds": seconds(asked),
            "estimated_exposed_seconds": counts.waited,
            "estimated_launching_seconds": counts.launching,
        },
        "sharding": None if answer.sharding is None else answer.sharding.plain(),
    }  # fmt: skip


def _needs(prediction: Prediction) -> dict[str, float | None]:
    return {"peak_gib": prediction.peak.bytes / GIB, "estimated_seconds": seconds(prediction)}


class Progress:
    """Says what is rehearsed. It is asked at least once a second, and seldom has something to say."""

    def __init__(self, since: float) -> None:
        self.since = self.last = since

    def __call__(self, running: Sequence[Call], done: int) -> None:
        now = time.monotonic()
        if now - self.last < EVERY:
            return
        self.last = now
        line = f"rehearses {doing(running)}; {done} done, {duration(now - self.since)} so far"
        sys.stderr.write(fitted(f"rlexp preflight: {line}\n", sys.stderr))
        sys.stderr.flush()


def doing(running: Sequence[Call]) -> str:
    """Name the calls that run, the first of each kind."""
    return ", and ".join(dict.fromkeys(map(named_call, running)))


def named_call(call: Call) -> str:
    _, args = call
    plan = next((each for each in args if isinstance(each, RehearsalPlan)), None)
    if plan is None:
        return "other rings"
    cfg = plan.cfg
    layers = "all layers" if plan.layers is None else f"{plan.layers} layers"
    return f"{cfg.engine.name.value}, a ring of {cfg.parallel.ring_size}, {cfg.data.max_length:,} tokens ({layers})"
