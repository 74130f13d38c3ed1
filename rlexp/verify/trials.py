"""Which folder a difference of the plain run points to: its parts are tried, each built of those before it.

This happens only after a failure that no setting explains. The plain run has one rank and one sequence at a time, so a
part is given that sequence, and is wrong if it is nearer to what the run says than to what it should say.

Shape letters: T tokens of a sequence, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlexp.base.errors import UserError, first_line
from rlexp.config.schema import Config, LoraConfig
from rlexp.config.schema.losses import CriticName, Normalize
from rlexp.config.schema.models import ReferenceName
from rlexp.launch.joining import RankSpec, join, leave_world
from rlexp.training.algos.advantages import sequence_weight, token_weight, whiten
from rlexp.training.dealer.packing import pack_examples
from rlexp.training.engine.frozen import Frozen
from rlexp.training.model.adapter import without_starting
from rlexp.training.model.fused.classes import fuses
from rlexp.training.model.loading import load_config, load_model
from rlexp.training.model.placing import Placing, put_all
from rlexp.training.model.policy import DTYPES, Critic, Policy
from rlexp.training.model.prepared import named_base
from rlexp.training.reference.models import OfAdapter, OfModel
from rlexp.training.ring.collectives import ring_sum
from rlexp.training.ring.kernels.base import Ask
from rlexp.training.train.build import build_policy
from rlexp.training.train.sequence_sums import with_ends
from rlexp.training.train.task import Task
from rlexp.training.types import Example, Shard, Wanted
from rlexp.verify import rollout_rules as rules
from rlexp.verify.again import task_on, without_engine
from rlexp.verify.checks import ALGOS, ENGINE, MODEL, REFERENCE, RING, ROLLOUT, TRAIN
from rlexp.verify.model import of_reference, softmax_attention
from rlexp.verify.recording import Array, Key, Samples, TensorFiles, TokenExample

ERRORS = (ArithmeticError, AssertionError, AttributeError, IndexError, LookupError, RuntimeError, TypeError,
          ValueError, UserError)  # fmt: skip
LONGEST = 128  # tokens of the attention that is tried
ROUNDING = 1e-9  # relative; a defect that is looked for here is far larger


@dataclass(frozen=True)
class Case:
    """The step that went wrong. `got` and `wanted` are what the run says of each answer's tokens, and what is right."""

    cfg: Config  # of the plain run
    trial: str
    step: int
    steps: int  # of the verification
    files: Path  # what is right: weights and gradients
    examples: Mapping[int, TokenExample]
    got: Mapping[Key, Array]
    wanted: Mapping[Key, Array]
    drawn: Samples | None = None


Part = tuple[str, str, Callable[[], bool]]  # the folder, the part in words, and whether it is wrong


def trial_rank(spec: RankSpec, case: Case) -> tuple[str, str]:
    """Return the folder at fault, and what was tried to find it, in words."""
    join(spec, case.cfg.launch)
    trial = Trial(case, task_on(case.cfg, case.drawn, steps=case.steps))
    parts, rest = trial.parts()
    words = []
    for folder, part, wrong in parts:
        try:
            is_wrong, how = wrong(), ""
        except ERRORS as error:
            is_wrong, how = True, f"raises {type(error).__name__} ({first_line(error)})"
        words.append(f"{part} {how or ('is wrong' if is_wrong else 'is right')}")
        if is_wrong:
            rest = folder
            break
    leave_world()
    return rest, "; ".join(words)


class Trial:
    def __init__(self, case: Case, task: Task) -> None:
        self.case, self.task, self.cfg, self.run = case, task, case.cfg, task.run
        self.files = TensorFiles(case.files)
        self.held: list[Frozen] = []

    def parts(self) -> tuple[Iterator[Part], str]:
        """The parts to try, in order, and the folder that remains if all are right."""
        match self.case.trial:
            case "start":
                return self.of_start(), ENGINE
            case "policy":
                return self.of_policy(), TRAIN
            case "reference":
                return self.of_reference(), ROLLOUT if self.cfg.loss.draws and self.case.wanted else TRAIN
            case "gradient":
                return self.of_gradient(), ENGINE
            case "chain":
                return iter([(RING, "the backward of the ring's sum alone", self.sum_is_wrong)]), TRAIN
            case "weighed":
                return iter([(ALGOS, "the formula of whitening and weights alone", weighing_is_wrong)]), TRAIN
            case _:
                return iter(()), TRAIN

    # ---- models ----

    def alone(self, cfg: Config, wanted: Wanted, *, copied: bool = False) -> Policy:
        """Build a policy from `training/model/` alone. `copied`: beside its adapter, one that stays as it began."""
        config = load_config(cfg.model, cfg.data.max_length)
        temperature = cfg.rollout.temperature if cfg.loss.draws else 1.0  # and not the task's, which may be wrong
        placing = self.placing
        model = load_model(cfg.model, config, cfg.data.max_length, placing, scores=wanted.scores, float64=True)
        critic = None
        if wanted.values is not None:
            own = wanted.values is CriticName.own
            trunk = (
                load_model(cfg.model, config, cfg.data.max_length, placing, float64=True).base_model if own else None
            )
            critic = Critic(model.get_output_embeddings().in_features, trunk)
        policy = Policy(model, critic, dataclasses.replace(wanted, temperature=temperature))
        if isinstance(cfg.adapter, LoraConfig):
            policy.adapt(cfg.adapter, base=named_base(cfg.model), seed=cfg.seed, copy=copied)
        put_all(policy, placing)
        policy.freeze(cfg.model.freeze)
        if fuses(cfg.model.fused, self.run.device, DTYPES[cfg.train.precision]):
            policy.fuse()
        return policy

    @property
    def placing(self) -> Placing:
        return Placing(self.run.device, DTYPES[self.cfg.train.precision])

    def weighed(self, policy: Policy) -> Policy:
        """Give a policy the right weights from before the step."""
        for name, parameter in without_starting(policy.named()):
            before = torch.from_numpy(self.files.read("weights", self.case.step - 1, name).copy())
            parameter.data.copy_(before.to(parameter.dtype))
        return policy

    @torch.no_grad()
    def wrong(self, forward: Callable[[Shard], Any]) -> bool:
        """Whether a forward pass is nearer to what the run says of some answers than to what it should say."""
        worst, off = 0.0, 0.0
        for sample, example in self.case.examples.items():
            keys = [key for key in self.case.wanted if key[0] == sample]
            if not keys:
                continue
            masks = tuple(example.masks[side] for side in example.sides)
            whole = Example(sample, example.prompt.astype(np.int32),
                            tuple(each.astype(np.int32) for each in example.answers.values()), masks)  # fmt: skip
            pack = pack_examples([whole], **self.run.padding)
            shard = self.run.shard(pack)
            if self.task.wanted.scores:
                shard = with_ends(shard, pack)
            shard = shard.to(self.run.device)
            outputs = forward(shard)
            for number, side in enumerate(example.sides):
                key = (sample, side)
                values = outputs if isinstance(outputs, Tensor) else outputs[0]
                at = torch.tensor([number]) if self.task.wanted.scores else shard.sequence_n == number
                part, wanted, got = values[at].double().cpu().numpy(), self.case.wanted[key], self.case.got[key]
                if part.shape == wanted.shape == got.shape:
                    worst = max(worst, float(np.abs(np.nan_to_num(part, nan=1e6) - wanted).max(initial=0.0)))
                    off = max(off, float(np.abs(np.nan_to_num(got, nan=1e6) - wanted).max(initial=0.0)))
        return not worst <= off / 2

    def of_policy(self) -> Iterator[Part]:
        task, cfg, run = self.task, self.cfg, self.run
        config = run.engine.policy.model.config
        yield RING, "attention alone", lambda: self.attention_is_wrong(backward=False)
        yield MODEL, "the model alone", lambda: self.wrong(self.weighed(self.alone(cfg, task.wanted)))
        yield TRAIN, "the model as the run builds it", lambda: self.wrong(
            self.weighed(build_policy(cfg, config, run.device, task.wanted, self.placing)))  # fmt: skip

        def engine() -> bool:
            self.weighed(run.engine.policy)
            return self.wrong(run.engine.forward)

        yield ENGINE, "the engine's forward pass", engine

    def of_reference(self) -> Iterator[Part]:
        task, engine, cfg = self.task, self.run.engine, of_reference(self.cfg)
        yield RING, "attention alone", lambda: self.attention_is_wrong(backward=False)
        if self.cfg.reference.name is ReferenceName.adapter:
            wanted = dataclasses.replace(task.wanted.frozen, values=task.wanted.values)

            def as_it_began() -> bool:
                policy = self.weighed(self.alone(self.cfg, wanted, copied=True))
                with policy.starting():
                    return self.wrong(policy)

            def by_engine() -> bool:
                self.weighed(engine.policy)
                with engine.policy.starting():
                    return self.wrong(engine.forward)

            yield MODEL, "the model without its adapter", as_it_began
            yield ENGINE, "the engine's forward pass without the adapter", by_engine
            yield REFERENCE, "the reference alone", lambda: self.wrong(OfAdapter(engine).logps)
            return

        def frozen() -> bool:
            self.held.append(Frozen(cfg.engine.name.value, self.alone(cfg, task.wanted.frozen)))
            return self.wrong(self.held[0].forward)

        yield MODEL, "the reference model alone", lambda: self.wrong(self.alone(cfg, task.wanted.frozen))
        yield ENGINE, "the reference model as the engine holds it", frozen
        yield REFERENCE, "the reference alone", lambda: self.wrong(OfModel(self.held[0]).logps)
        self.weighed(engine.policy)  # a reference must not follow them
        built: Any = task.rollouts.scorer if self.cfg.loss.draws else task  # type: ignore[attr-defined]
        yield TRAIN, "the reference as the run builds it", lambda: self.wrong(built.reference.logps)

    def of_start(self) -> Iterator[Part]:
        task, cfg = self.task, self.cfg
        copied = task.wanted.reference and cfg.reference.name is ReferenceName.adapter

        def other(make: Callable[[], Policy]) -> Callable[[], bool]:
            def is_other() -> bool:
                held = dict(without_starting(make().named()))
                names = self.files.names("weights", 0)
                return sorted(held) != names or any(
                    not np.array_equal(held[name].detach().double().cpu().numpy(), self.files.read("weights", 0, name))
                    for name in names
                )

            return is_other

        config = load_config(cfg.model, cfg.data.max_length)
        yield MODEL, "the model as it is loaded", other(lambda: self.alone(cfg, task.wanted, copied=copied))
        yield TRAIN, "the model as the run builds it", other(
            lambda: build_policy(cfg, config, self.run.device, task.wanted, self.placing))  # fmt: skip

    # ---- the gradient ----

    def of_gradient(self) -> Iterator[Part]:
        yield RING, "the backward of attention", lambda: self.attention_is_wrong(backward=True)
        yield MODEL, "the gradient without the engine", self.gradient_is_wrong

    def gradient_is_wrong(self) -> bool:
        *_, gradient = without_engine(self.task, self.case.step, self.files)
        wrong = False
        for name, part in gradient.items():
            wanted = torch.from_numpy(self.files.read("gradient", self.case.step, name).copy()).to(part.device)
            wrong |= not float((part - wanted).norm()) <= ROUNDING * float(wanted.norm() or 1.0)
        return wrong

    def sum_is_wrong(self) -> bool:
        values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, device=self.run.device, requires_grad=True)
        slopes = torch.autograd.grad((ring_sum(values, self.run.world.ring) * values.detach()).sum(), values)
        return not torch.equal(slopes[0], values.detach())

    # ---- attention ----

    def attention_is_wrong(self, *, backward: bool) -> bool:
        """Try attention on two sequences, with random queries, keys and values, for each kind of layer."""
        tokens = np.arange(LONGEST, dtype=np.int32)
        lengths = (LONGEST // 2, LONGEST // 4)
        pack = self.run.pack([(tokens[:8], tokens[8:length]) for length in lengths])
        shard, places = self.run.to_device(pack), [segment.start for segment in pack.segments]
        if len(places) > len(lengths):  # they begin alike, and share that
            return False
        sequences = [slice(start, start + length) for start, length in zip(places, lengths, strict=True)]
        windows = dict.fromkeys(window and min(window, LONGEST // 8) for window in self.run.windows)
        return any(self._attention_with(window, shard, sequences, backward) for window in windows)

    def _attention_with(self, window: int | None, shard: Shard, sequences: Sequence[slice], backward: bool) -> bool:
        config = self.run.engine.policy.model.config.get_text_config()
        heads = int(getattr(config, "num_attention_heads", 2))
        groups = int(getattr(config, "num_key_value_heads", None) or heads)
        size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        generator = torch.Generator().manual_seed(0)
        q, k, v, dout = (torch.randn(len(shard.tokens_t), count, size, generator=generator, dtype=torch.float64)
                         .to(self.run.device, self.run.dtype) for count in (heads, groups, groups, heads))  # fmt: skip
        leaves, again = ([each.clone().requires_grad_() for each in (q, k, v)] for _ in range(2))
        out = shard.attention.attend(leaves[0], leaves[1], leaves[2], Ask(size**-0.5, window))
        wide = [each.repeat_interleave(heads // each.shape[1], dim=1).transpose(0, 1) for each in again]
        wrong = False
        for at in sequences:
            query, key, value = (each[:, at] for each in wide)
            meant = softmax_attention(query, key, value, size**-0.5, window).transpose(0, 1)
            if not backward:
                wrong |= apart(out[at].detach(), meant.detach())
                continue
            got, wanted = (torch.autograd.grad(each, of, dout[at], retain_graph=True)
                           for each, of in ((out[at], leaves), (meant, again)))  # fmt: skip
            wrong |= any(apart(one, other) for one, other in zip(got, wanted, strict=True))
        return wrong


def apart(got: Tensor, wanted: Tensor) -> bool:
    return not float((got - wanted).abs().max()) <= ROUNDING * float(wanted.abs().max())


def weighing_is_wrong() -> bool:
    """Whiten and weigh three answers, of which one does not count."""
    advantages = [torch.tensor(each, dtype=torch.float64) for each in ([1.0, 2.0], [5.0], [4.0, 0.0, -3.0])]
    counts = [True, False, True]
    wanted = rules.whitened([each.numpy() for each in advantages], counts)
    got = whiten(advantages, torch.tensor(counts))
    pairs: list[tuple[Tensor, Any]] = [(a, b) for a, b in zip(got, wanted, strict=True)]
    lengths = torch.tensor([len(each) for each in advantages])
    for normalize, meant in ((Normalize.token, [1 / 5, 0, 1 / 5]), (Normalize.sequence, [1 / 4, 0, 1 / 6]),
                             (Normalize.fixed, [1 / 20, 0, 1 / 20])):  # fmt: skip
        pairs.append((token_weight(normalize, lengths, torch.tensor(counts), 10), meant))
    pairs.append((sequence_weight(torch.tensor(counts)), [1 / 2, 0, 1 / 2]))
    return any(not np.allclose(a.numpy(), np.asarray(b), rtol=1e-12, atol=1e-12) for a, b in pairs)
