"""What a rank keeps for the backward pass, counted on real tensors in the run's first micro-batch.

The same micro-batch runs on a ring of one. A rank must keep its part of that, in every module: a model that gathers the
sequence somewhere computes the right values, and its ring saves no memory there.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlexp.config.checks.micro_batches import at_once, tokens_of_ring
from rlexp.config.schema import Config, EngineName, LayoutName
from rlexp.launch.joining import RankSpec, join, leave_world
from rlexp.preflight.rehearsal.holdings import mark_modules
from rlexp.preflight.rehearsal.log import Log
from rlexp.preflight.rehearsal.mode import Counting
from rlexp.preflight.rehearsal.sharding import Sharding, compare, kept, of_attention
from rlexp.training.metrics.meter import Meter
from rlexp.training.model.loading import load_config
from rlexp.training.types import Shard, TokenLogps
from rlexp.verify.again import task_on
from rlexp.verify.jobs import KeptOnRank
from rlexp.verify.recording import Samples

# Seconds in which nothing is freed, after which nothing will be. Gloo's threads let go of a collective's tensors later
# than its end is known: one time in five, by up to 8 ms with 4 ranks on 2 cores. Beside other runs, at a load of 6,
# what was counted stayed within 0.002 of its share.
QUIET = 0.1


class CountedPass:
    """Counts one forward and backward pass of an engine."""

    def __init__(self, cfg: Config) -> None:
        self.log = Log(cfg.launch.device.value)
        self.alone = cfg.parallel.world_size == 1
        self.tokens = 0
        self.mode: Counting | None = None
        self.over = False

    def begin(self, engine: Any, shard: Shard) -> None:
        """Begin to count. What exists already is known for what it is, and not counted as made."""
        self.mode = Counting(self.log)
        self.mode.__enter__()
        self.mode.see([*engine.policy.parameters(), *engine.policy.buffers()])
        mark_modules(self.log, self.mode, engine.policy, self.settle)
        self.tokens = len(shard.tokens_t)
        self.log.enter("forward")

    def settle(self) -> None:
        """Wait until the transport has let go of what it sent and received."""
        before = -1
        while not self.alone and before < len(self.log.sizes):
            before = len(self.log.sizes)
            time.sleep(QUIET)

    def end(self) -> None:
        self.over = True
        if self.mode is not None:
            self.mode.__exit__(None, None, None)
            self.mode = None

    def result(self) -> KeptOnRank | None:
        """Return what was counted; None if the run never came to a backward pass."""
        self.end()
        phases = {section.phase for section in self.log.sections}
        return KeptOnRank(kept(self.log), self.tokens) if "backward" in phases else None


class CountedEngine:
    """An engine whose first forward pass, and the backward pass after it, are watched."""

    def __init__(self, engine: Any, counted: CountedPass) -> None:
        self._engine, self._watch = engine, counted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(self, shard: Shard) -> TokenLogps:
        watch = self._watch
        first = watch.mode is None and not watch.over and torch.is_grad_enabled()
        if first:
            watch.begin(self._engine, shard)
        tokens: TokenLogps = self._engine.forward(shard)
        if first:
            watch.settle()
            watch.log.enter("loss")
        return tokens

    def backward(self, loss: Tensor, *, last: bool) -> None:
        counting = self._watch.mode is not None
        if counting:
            self._watch.log.enter("backward")
        self._engine.backward(loss, last=last)
        if counting:
            self._watch.log.enter("after")
        self._watch.end()


def sharding_rank(
    spec: RankSpec, cfg: Config, ranks: Sequence[KeptOnRank | None], drawn: Samples | None
) -> Sharding | None:
    """Run the first micro-batch in one process, and compare what it keeps with what each rank of the ring kept."""
    join(spec, cfg.launch)
    one = alone(cfg)
    watch = CountedPass(one)
    task = task_on(one, drawn, watch.log, steps=1)
    engine: Any = CountedEngine(task.run.engine, watch)
    dealer = dataclasses.replace(task.run.dealer, replicas=cfg.parallel.dp_size)  # the first of so many replicas
    task.run = dataclasses.replace(task.run, engine=engine, dealer=dealer)
    step = task.begin(1)
    step.prepared = step.prepare()
    engine.backward(step.loss(step.load(0), Meter(task.run.world, task.run.device)), last=False)
    leave_world()
    attention = of_attention(cfg, load_config(cfg.model, cfg.data.max_length))
    return shared_out(ranks, watch.result(), attention)


def alone(cfg: Config) -> Config:
    """Return the configuration of one rank, whose first micro-batch is that of the first replica."""
    parallel = dataclasses.replace(cfg.parallel, ring_size=1, world_size=1, dp_size=1, layout=LayoutName.zigzag,
                                   ulysses_size=None)  # fmt: skip
    grad_acc = cfg.train.grad_acc and -(-cfg.train.batch_size // (at_once(cfg).samples or 1))
    train = dataclasses.replace(cfg.train, grad_acc=grad_acc, max_tokens_per_micro_batch=tokens_of_ring(cfg))
    engine = dataclasses.replace(cfg.engine, name=EngineName.torch, overrides={})
    return dataclasses.replace(cfg, parallel=parallel, train=train, engine=engine)


def shared_out(ranks: Sequence[KeptOnRank | None], one: KeptOnRank | None, attention: float) -> Sharding | None:
    """Compare the ranks of a ring with a ring of one, and return the comparison of the rank that keeps most.

    A rank that holds next to nothing of this micro-batch shows nothing.
    """
    if one is None or not one.tokens:
        return None
    compared = [compare(each.kept, one.kept, len(ranks), share=each.tokens / one.tokens, attention=attention)
                for each in ranks if each is not None and 2 * len(ranks) * each.tokens >= one.tokens]  # fmt: skip
    return max(compared, key=lambda sharding: (len(sharding.whole), sharding.kept), default=None)
