"""Find the module that the first difference points to, by trying parts of the run alone.

This happens only after a failure. The ranks start once more, and each part gets inputs with a known answer: the ring's
sum, the meter, the attention of the same micro-batches, and the gradient without an engine.

Shape letters: T packed tokens, t tokens of this rank, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.base.engine_facts import ENGINES
from rlexp.base.errors import UserError
from rlexp.config.schema import Checkpointing, Config, EngineName
from rlexp.config.schema.losses import Normalize
from rlexp.config.schema.models import Precision
from rlexp.launch.joining import RankSpec, join, leave_world
from rlexp.training.algos.advantages import sequence_weight, token_weight, whiten
from rlexp.training.dealer.deal import unit_of
from rlexp.training.dealer.packing import pack_examples
from rlexp.training.engine.base import trained
from rlexp.training.metrics.meter import REPLICATED, SHARDED, Meter
from rlexp.training.model.adapter import Adapter, without_starting
from rlexp.training.model.placing import Placing
from rlexp.training.model.policy import DTYPES
from rlexp.training.ring.attention import KeptOutputs
from rlexp.training.ring.collectives import ring_sum
from rlexp.training.ring.kernels.base import Ask
from rlexp.training.train.build import build_policy
from rlexp.training.train.parts import TrainingRun
from rlexp.training.train.task import Task
from rlexp.training.types import Example, Pack, Segment, Shard
from rlexp.verify.apart import Differing, Scene, Tried, tried
from rlexp.verify.compared import Comparison
from rlexp.verify.compared_samples import SampleStep
from rlexp.verify.findings import Clue, Finding
from rlexp.verify.given_samples import Drawing, task_on
from rlexp.verify.records import Drawn, Key, TensorFiles
from rlexp.verify.reference import rollout_rules as rules
from rlexp.verify.reference.drawn import SIDE
from rlexp.verify.reference.model import softmax_attention

LONGEST = 512  # tokens of a sequence in the attention that is tried alone
# Allowed differences to the written-out ones, relative to the largest value; rounding is 100 times smaller.
ATTENTION = {Precision.fp64: 1e-10, Precision.fp32: 1e-4, Precision.bf16: 1e-1}
GRADIENT = {Precision.fp64: 1e-9, Precision.fp32: 1e-3, Precision.bf16: 3e-1}


@dataclass(frozen=True)
class Alone:
    """Errors of parts of the run, tried alone; the largest over the ranks. If a part raised, its error is infinite."""

    ring_sum: float
    ring_sum_backward: float
    meter: float
    attention: float
    attention_backward: float
    gradient: float
    weighing: float  # of the weights and the whitened advantages of drawn samples
    tried: Tried | None = None  # parts of the run that are built of each other, where the finding asks for them

    def ring_is_wrong(self, case: Case) -> bool:
        return self.attention > ATTENTION[case.cfg.train.precision] and case.clue in (Clue.POLICY, Clue.REFERENCE)


@dataclass(frozen=True)
class Case:
    """The step that went wrong, to be tried again with the weights before it."""

    cfg: Config
    step: int
    folder: Path  # the reference's weights and gradients
    steps: int  # of the verification
    clue: Clue
    drawing: Drawing | None = None  # the samples that the run drew, if it draws
    said: Differing = field(default_factory=Differing)


def alone_rank(spec: RankSpec, case: Case) -> Alone:
    join(spec, case.cfg.launch)
    task = task_on(case.cfg, case.drawing, steps=case.steps)
    run = task.run
    # In the same order on every rank: each has collectives.
    forward, backward = _try(lambda: _ring_sum(run))
    meter, _ = _try(lambda: (_meter(run), 0.0))
    attention, attention_backward = _try(lambda: _attention(task, case))
    gradient, _ = _try(lambda: (_gradient(task, case) if case.clue is Clue.GRADIENT else 0.0, 0.0))
    weighing, _ = _try(lambda: (_weighing(), 0.0))
    errors = [forward, backward, meter, attention, attention_backward, gradient, weighing]
    mine = torch.tensor(errors, dtype=torch.float64)
    dist.all_reduce(mine.nan_to_num_(nan=torch.inf), op=dist.ReduceOp.MAX)
    alone = Alone(*mine.tolist())
    if case.clue in APART and not alone.ring_is_wrong(case):
        alone = dataclasses.replace(alone, tried=tried(scene_of(task, case), case.clue))
    return alone


APART = (Clue.POLICY, Clue.REFERENCE, Clue.START, Clue.TRAINED)  # that `apart.py` finds the module of


def scene_of(task: Task, case: Case) -> Scene:
    """The step's sequences in packs, equally many on each replica."""
    packs: list[tuple[Pack, list[Key]]] = []
    if case.said.wanted:
        sides = list(dict.fromkeys(side for _, side in case.said.wanted))
        for examples in _whole_micro_batches(task, case):
            keys = [(example.index, side) for example in examples for side in sides]
            packs.append((pack_examples(examples, **task.run.padding), keys))
    return Scene(task, packs, case.step, case.steps, TensorFiles(case.folder), case.said)


def _whole_micro_batches(task: Task, case: Case) -> Sequence[Sequence[Example]]:
    if case.drawing is None:
        return _micro_batches(task, case)
    drawn = case.drawing.rollouts[rules.rollout_of(case.cfg, case.step)].samples
    samples = [_example_of(drawn[place]) for place in sorted({place for place, _ in case.said.wanted})]
    mine = _share_of(task, samples)
    return [each or samples[:1] for each in mine]


def differing(comparison: Comparison, finding: Finding) -> Differing:
    """Return the step's log-probabilities or scores, of the run and of the reference, for findings about them."""
    step = next(step for step in comparison.steps() if step.number == finding.step)
    if finding.clue is Clue.POLICY:
        got, wanted = step.by_sequence("policy_n"), step.expected.policy
    elif finding.clue is not Clue.REFERENCE:
        return Differing()
    elif isinstance(step, SampleStep):
        kept, meant = step.run.reference or [], step.expected.rollout.reference or []
        got, wanted = ({(place, SIDE): each for place, each in enumerate(of)} for of in (kept, meant))
    else:
        got, wanted = step.by_sequence("reference_n"), step.expected.reference
    alike = got.keys() == wanted.keys() and all(len(got[key]) == len(wanted[key]) for key in wanted)
    return Differing(got, wanted) if alike else Differing()


def _try(part: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Try a part. A part with a defect may raise anything, which counts as an infinite error."""
    try:
        return part()
    except (ArithmeticError, AssertionError, IndexError, LookupError, RuntimeError, TypeError, ValueError, UserError):
        return torch.inf, torch.inf


def _largest(*values: float) -> float:
    """The largest value, where NaN counts as infinite; `max` would skip it."""
    return max(value if value == value else torch.inf for value in values)


def _ring_sum(run: TrainingRun) -> tuple[float, float]:
    ring = run.world.ring
    values = ((ring.rank + 1) * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, device=run.device)).requires_grad_()
    weight = torch.tensor([5.0, 7.0, 11.0], dtype=torch.float64, device=run.device)
    total = ring_sum(values, ring)
    (total * weight).sum().backward()
    assert values.grad is not None
    expected = ring.size * (ring.size + 1) / 2 * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, device=run.device)
    return float((total.detach() - expected).abs().max()), float((values.grad - weight).abs().max())


def _meter(run: TrainingRun) -> float:
    """Meter two micro-batches of known values: tokens by rank, pairs by replica."""
    world, ring = run.world, run.world.ring
    meter = Meter(world, run.device)
    for micro in (1.0, 2.0):
        meter.add_mean("sharded", torch.tensor(micro * (world.rank + 1)), world.rank + 2, SHARDED)
        meter.add_mean("replicated", torch.tensor(micro * (world.replica + 1)), world.replica + 2, REPLICATED)
        meter.add_total("total", world.rank + micro, SHARDED)
        meter.add_max("largest", world.rank * micro)
    meter.add_difference("apart", "sharded", "replicated")
    values = meter.reduce()
    ranks, replicas = range(world.size), range(world.size // ring.size)
    expected = {
        "sharded": sum(3.0 * (r + 1) for r in ranks) / sum(2.0 * (r + 2) for r in ranks),
        "replicated": sum(3.0 * (r + 1) for r in replicas) / sum(2.0 * (r + 2) for r in replicas),
        "total": sum(2.0 * r + 3.0 for r in ranks),
        "largest": 2.0 * (world.size - 1),
        "largest@rank": world.size - 1,
    }
    expected["apart"] = expected["sharded"] - expected["replicated"]
    return _largest(*(abs(values.get(name, torch.inf) - value) for name, value in expected.items()))


def _weighing() -> float:
    """Whiten and weigh three answers, of which one does not count."""
    advantages = [torch.tensor(each, dtype=torch.float64) for each in ([1.0, 2.0], [5.0], [4.0, 0.0, -3.0])]
    counts = [True, False, True]
    wanted = rules.whitened([each.numpy() for each in advantages], counts)
    got = whiten(advantages, torch.tensor(counts))
    worst = _largest(*(float((a - torch.from_numpy(b)).abs().max()) for a, b in zip(got, wanted, strict=True)))
    lengths = torch.tensor([len(each) for each in advantages])
    for normalize, meant in ((Normalize.token, [1 / 5, 0, 1 / 5]), (Normalize.sequence, [1 / 4, 0, 1 / 6]),
                             (Normalize.fixed, [1 / 20, 0, 1 / 20])):  # fmt: skip
        weights = token_weight(normalize, lengths, torch.tensor(counts), 10)
        worst = _largest(worst, float((weights - torch.tensor(meant, dtype=torch.float64)).abs().max()))
    answers = sequence_weight(torch.tensor(counts)) - torch.tensor([1 / 2, 0, 1 / 2], dtype=torch.float64)
    return _largest(worst, float(answers.abs().max()))


# ---- attention alone ----


def _attention(task: Task, case: Case) -> tuple[float, float]:
    """Try the run's layout and kernel on the step's micro-batches, with random queries, keys and values."""
    worst = [0.0, 0.0]
    for number, examples in enumerate(_micro_batches(task, case)):
        pack, index_t, shard = _placed(task, [_short(each) for each in examples])
        apart = _attention_of(task.run, pack, index_t, shard, seed=number)
        worst = [_largest(a, b) for a, b in zip(worst, apart, strict=True)]
    return worst[0], worst[1]


def _micro_batches(task: Task, case: Case) -> list[list[Example]]:
    examples: Any = task.examples.train
    if case.drawing is not None:
        samples = case.drawing.rollouts[rules.rollout_of(case.cfg, case.step)].samples
        examples = [_example_of(each) for each in samples]
    return _share_of(task, [examples[index] for index in task.batch(case.step).indices])


def _share_of(task: Task, examples: Sequence[Example]) -> list[list[Example]]:
    """Deal the examples, and return this replica's packs of them."""
    dealt = task.run.dealer.deal_all(len(examples), lambda place: unit_of(examples[place]))
    return [[examples[place] for place in places] for places in dealt.packs[task.run.world.replica]]


def _example_of(drawn: Drawn) -> Example:
    return Example(drawn.place, drawn.prompt.astype(np.int32), (drawn.answer.astype(np.int32),), origin=drawn.origin)


def _short(example: Example) -> Example:
    """Return the beginning of an example."""
    prompt = example.prompt[: LONGEST // 2]
    rest = LONGEST - len(prompt)
    masks = tuple(None if mask is None else mask[:rest] for _, mask in example.masked)
    return dataclasses.replace(
        example, prompt=prompt, answers=tuple(each[:rest] for each in example.answers), masks=masks
    )


def _placed(task: Task, examples: Sequence[Example]) -> tuple[Pack, Tensor, Shard]:
    """The run's own shard of a pack, and the place in the pack of each token that this rank holds."""
    pack = pack_examples(examples, **task.run.padding)
    pack = dataclasses.replace(pack, tokens_T=torch.arange(len(pack.tokens_T)))
    shard = task.run.to_device(pack)
    return pack, shard.tokens_t, shard


def _attention_of(run: TrainingRun, pack: Pack, index_t: Tensor, shard: Shard, seed: int) -> tuple[float, float]:
    """Compare attention of each kind of layer, and its backward pass."""
    # Short enough for these sequences, and on every rank in the same order, which that of a set is not.
    windows = dict.fromkeys(window and min(window, LONGEST // 4) for window in run.windows)
    kinds = [_attention_with(window, run, pack, index_t, shard, seed) for window in windows]
    return _largest(*(forward for forward, _ in kinds)), _largest(*(backward for _, backward in kinds))


def _attention_with(
    window: int | None, run: TrainingRun, pack: Pack, index_t: Tensor, shard: Shard, seed: int
) -> tuple[float, float]:
    heads, kv_heads, size = _head_shape(run.engine.policy.model.config)
    generator = torch.Generator().manual_seed(seed)
    dtype, scale = DTYPES[run.cfg.train.precision], size**-0.5
    q, k, v, dout = (
        torch.randn(len(pack.tokens_T), count, size, generator=generator, dtype=torch.float64).to(dtype)
        for count in (heads, kv_heads, kv_heads, heads)
    )
    mine = [each[index_t.cpu()].to(run.device).requires_grad_() for each in (q, k, v)]
    out = _attends(run, shard, mine[0], mine[1], mine[2], Ask(scale, window))
    out.backward(dout[index_t.cpu()].to(run.device).to(out.dtype))
    got = [out.detach(), *(each.grad for each in mine)]
    wanted = _attended(pack, q.double(), k.double(), v.double(), dout.double(), Ask(scale, window))
    real = _real(pack)[index_t.cpu()]
    apart = [_apart(a, b[index_t.cpu()], real) for a, b in zip(got, wanted, strict=True)]
    return apart[0], _largest(*apart[1:])


def _attends(run: TrainingRun, shard: Shard, q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> Tensor:
    """Attend; where the run keeps what attention gives, as a layer does that is computed again, after another one."""
    if run.cfg.memory.recomputed is Checkpointing.attention:
        before, kept = KeptOutputs(), KeptOutputs()
        for each, queries in ((before, q.flip(-1)), (kept, q)):
            with each.keeping():
                shard.attention.attend(queries, k, v, ask)
        with kept.using(within=contextlib.nullcontext()):
            return shard.attention.attend(q, k, v, ask)
    return shard.attention.attend(q, k, v, ask)


def _apart(got: Tensor | None, wanted: Tensor, real: Tensor) -> float:
    assert got is not None
    difference = (got.cpu().double() - wanted)[real]
    return float(difference.abs().max() / wanted.abs().max()) if len(difference) else 0.0


def _real(pack: Pack) -> Tensor:
    real = torch.zeros(len(pack.tokens_T), dtype=torch.bool)
    for segment in pack.segments:
        real[segment.start : segment.start + segment.length] = True
    return real


def _attended(pack: Pack, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, ask: Ask) -> list[Tensor]:
    """Attention's output and gradients by a written-out softmax, segment by segment after its ancestors, in float64."""
    groups = q.shape[1] // k.shape[1]
    out, grads = torch.zeros_like(q), [torch.zeros_like(each) for each in (q, k, v)]
    for segment in pack.segments:
        if not segment.length:
            continue
        at, own = _after_ancestors(pack, segment), slice(-segment.length, None)
        parts = [each[at].clone().requires_grad_() for each in (q, k, v)]
        query, key, value = (part.transpose(0, 1) for part in parts)
        wide = (each.repeat_interleave(groups, dim=0) for each in (key, value))
        result = softmax_attention(query, next(wide), next(wide), ask.scale, ask.window).transpose(0, 1)
        result[own].backward(dout[at[own]])
        out[at[own]] = result[own].detach()
        for grad, part in zip(grads, parts, strict=True):
            assert part.grad is not None
            grad[at] += part.grad
    return [out, *grads]


def _after_ancestors(pack: Pack, segment: Segment) -> Tensor:
    """Return the places that a segment's tokens see, its own last."""
    ranges = [torch.arange(segment.start, segment.start + segment.length)]
    while segment.parent is not None:
        segment = pack.segments[segment.parent]
        ranges.insert(0, torch.arange(segment.start, segment.start + segment.length))
    return torch.cat(ranges)


def _head_shape(config: Any) -> tuple[int, int, int]:
    config = config.get_text_config()
    heads = int(getattr(config, "num_attention_heads", 2))
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return heads, kv_heads, size


# ---- the gradient without an engine ----


def _gradient(task: Task, case: Case) -> float:
    files = TensorFiles(case.folder)
    worst = 0.0
    *_, gradient = without_engine(task, case.step, files)
    for name, mine in gradient.items():
        wanted = torch.from_numpy(files.read("gradient", case.step, name).copy()).to(mine.device)
        worst = _largest(worst, float((mine - wanted).norm() / (wanted.norm() or 1.0)))
    return worst


def without_engine(task: Task, steps: int, weights: TensorFiles) -> Iterator[dict[str, Tensor]]:
    """Yield the gradient of each step by the run's model, packs and sums and torch's autograd, in the run's precision.

    The parts of micro-batches and ranks are added up here, in float64. Weights are read from files, as they were before
    each step.
    """
    run, cfg = task.run, task.run.cfg
    if ENGINES[cfg.engine.name.value].sharded:  # a policy of its own
        cfg = dataclasses.replace(cfg, engine=dataclasses.replace(cfg.engine, name=EngineName.torch))
    placing = Placing(run.device, DTYPES[cfg.train.precision])
    policy = build_policy(cfg, run.engine.policy.model.config, run.device, task.wanted, placing)
    policy.recompute_activations(cfg.memory.recomputed)
    if ENGINES[run.engine.name].stage == 3 and policy.adapter is not None:
        _add_up_by_layer(policy.adapter)
    alone: Any = Forward(policy)
    task.run = dataclasses.replace(run, engine=alone)
    for number in range(1, steps + 1):
        for name, parameter in without_starting(policy.named()):
            parameter.data.copy_(torch.from_numpy(weights.read("weights", number - 1, name).copy()))
        yield _of_step(task, number, trained(policy))
    task.run = run


def _add_up_by_layer(adapter: Adapter) -> None:
    """Add the gradients of an adapted layer's input, by the layer and by its adapter, before all others are added.

    ZeRO-3 does so, since it gathers both as one module; in bfloat16 the order of a sum is seen.
    """
    for layer in adapter.layers:
        if hasattr(layer, "lora_A"):
            layer.register_forward_pre_hook(lambda _layer, inputs: (inputs[0].view_as(inputs[0]), *inputs[1:]))


@dataclass(frozen=True)
class Forward:
    """As much of an engine as a forward pass needs."""

    forward: Any


def _of_step(task: Task, number: int, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    run = task.run
    whole = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    step = task.begin(number)
    step.prepared = step.prepare()
    for place in range(len(step.micro_batches)):
        loss = step.loss(step.load(place), Meter(run.world, run.device))
        parts = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for total, part in zip(whole.values(), parts, strict=True):
            if part is not None:
                total += part.double() / run.world.size
    step.finish({})
    for total in whole.values():
        dist.all_reduce(total)
    return whole


@dataclass(frozen=True)
class Parts:
    """The steps whose gradients to compute without an engine, the weights to read, and the folder to write to."""

    cfg: Config
    steps: int
    weights: Path
    folder: Path
    drawing: Drawing | None = None


def parts_rank(spec: RankSpec, parts: Parts) -> None:
    join(spec, parts.cfg.launch)
    task = task_on(parts.cfg, parts.drawing, steps=parts.steps)
    weights, files = TensorFiles(parts.weights), TensorFiles(parts.folder)
    for step, gradients in enumerate(without_engine(task, parts.steps, weights), start=1):
        for name, gradient in gradients.items():
            if spec.rank == 0:
                files.write("gradient", step, name, gradient.cpu().numpy())
    leave_world()
