"""Run the product's task once more on what a run has recorded: without its engine, or in another world of ranks.

Of samples that a run drew, nothing is drawn, scored or rewarded again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.base.engine_facts import ENGINES
from rlexp.config.schema import Config, EngineName
from rlexp.config.schema.rollouts import RewardConfig
from rlexp.launch.joining import RankSpec, join, leave_world
from rlexp.preflight.rehearsal.kernel_cost import CountedKernel
from rlexp.preflight.rehearsal.log import Log
from rlexp.training.engine.base import trained
from rlexp.training.metrics.meter import Meter
from rlexp.training.model.adapter import Adapter, without_starting
from rlexp.training.model.placing import Placing
from rlexp.training.model.policy import DTYPES
from rlexp.training.reference.models import Reference
from rlexp.training.ring.kernels import BlockKernel
from rlexp.training.rollout.rewards.weighted import Rewards
from rlexp.training.train.build import build, build_policy
from rlexp.training.train.parts import Setting
from rlexp.training.train.rollout_supply import Made, Rollouts
from rlexp.training.train.rows_task import RowsTask
from rlexp.training.train.surroundings import Unprobed
from rlexp.training.train.task import Task
from rlexp.training.types import CreditedSample, Example
from rlexp.verify.jobs import Parts
from rlexp.verify.recording import DrawnSample, Samples, TensorFiles


class GivenRollouts(Rollouts):
    drawn: Samples

    def ensure(self, step: int) -> Made | None:
        """Take this rank's part of the rollout."""
        self.number = self.of_step(step)
        self.kl_coef = self.drawn.coefficients[self.number]
        samples = self.drawn.rollouts[self.number]
        self.own_samples = [credited(each) for each in samples if each.place % self.world.size == self.world.rank]
        return None


def credited(drawn: DrawnSample) -> CreditedSample:
    assert drawn.advantages is not None
    return CreditedSample(
        place=drawn.place, example=Example(drawn.index, drawn.prompt.astype(np.int32), origin=drawn.origin),
        number=0, answer=drawn.answer.astype(np.int32), stopped=drawn.stopped, text=drawn.text,
        behaviour=drawn.behaviour, score=drawn.score, terms=drawn.terms, old=drawn.old, reference=drawn.reference,
        values=drawn.values, advantages=drawn.advantages, returns=drawn.returns, counts=drawn.counts,
    )  # fmt: skip


@dataclass(frozen=True)
class Again(Unprobed):
    """A run for its first steps; one that draws is given its samples. A log is told where its kernel is called."""

    drawn: Samples | None
    steps: int
    log: Log | None = None

    def kernel(self, *args: Any) -> BlockKernel:
        kernel = super().kernel(*args)
        return kernel if self.log is None else CountedKernel(kernel, self.log)

    def stored_reference(self, setting: Setting, task: Task, *args: Any, **kwargs: Any) -> Reference:
        assert isinstance(task, RowsTask)
        task.most_steps = self.steps  # what is computed before training is of these steps' rows
        return super().stored_reference(setting, task, *args, **kwargs)

    def rewards(self, cfg: RewardConfig) -> Rewards:
        return super().rewards(cfg) if self.drawn is None else Rewards((), (), {})

    def rollouts(self, **parts: Any) -> Rollouts:
        if self.drawn is None:
            return super().rollouts(**parts)
        given = GivenRollouts(**parts)
        given.drawn = self.drawn
        return given


def task_on(cfg: Config, drawn: Samples | None, log: Log | None = None, *, steps: int) -> Task:
    """Build the task that a configuration trains."""
    return build(cfg, around=Again(drawn, steps, log))


# ---- the gradient without an engine ----


def parts_rank(spec: RankSpec, parts: Parts) -> None:
    join(spec, parts.cfg.launch)
    task = task_on(parts.cfg, parts.drawn, steps=parts.steps)
    weights, files = TensorFiles(parts.weights), TensorFiles(parts.folder)
    for step, gradients in enumerate(without_engine(task, parts.steps, weights), start=1):
        for name, gradient in gradients.items():
            if spec.rank == 0:
                files.write("gradient", step, name, gradient.cpu().numpy())
    leave_world()


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
        if run.world.size > 1:
            dist.all_reduce(total)
    return whole
