"""A defect to plant: a function of the product, and what takes its place; and the configurations it is planted in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.helpers.faults.plant import Change, Seeing, plant
from tests.helpers.paths import FILES

# Two replicas of a ring of 2, four micro-batches of two pairs a step; clipping, decay and warm-up at work.
BASE = ("launch.device=cpu", "logger=none", "seed=3", "parallel=ring2", "launch.nproc=4", "train.batch_size=8",
        "train.micro_batch_size=2", "data.size=20", "data.eval_size=0", "optim.lr=1e-3", "optim.weight_decay=0.1",
        "optim.max_grad_norm=0.5", "optim.warmup_steps=1")  # fmt: skip
FP64 = (*BASE, "train.precision=fp64")
# A mixture of messages and of dialogues as texts; most have several turns. An epoch is one step.
ROWS = FILES / "rows"
MIXED = (*(word for word in FP64 if not word.startswith(("data.", "train.batch_size="))), "data=hf",
         f"data.sources.messages={{path: {ROWS}/messages.jsonl, weight: 2}}",
         f"data.sources.dialogues={{path: {ROWS}/dialogues.jsonl, weight: 1.5, system: Speak.}}", "data.eval_size=5",
         "train.batch_size=16", "train.epochs=2")  # fmt: skip

DATA, RING, MODEL, ALGOS = (f"rlexp/training/{name}/" for name in ("dataset", "ring", "model", "algos"))
REFERENCE, DEALER = "rlexp/training/reference/", "rlexp/training/dealer/"
TRAIN, ENGINE, METRICS, ROLLOUT = (f"rlexp/training/{name}/" for name in ("train", "engine", "metrics", "rollout"))

# The packages that are not below rlexp.training, and what their names begin with.
ELSEWHERE = {"transformers": "",
             **dict.fromkeys(("config", "eval", "generate", "launch", "preflight", "verify"), "rlexp.")}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    name: str
    target: str  # below rlexp.training, or in a package of ELSEWHERE
    change: Change | Seeing
    stage: str
    module: str
    overrides: tuple[str, ...] = FP64
    step: int | None = None  # at which it must first be seen
    test: str = ""  # the test that finds it in place of `verify`, by pytest's name; it then has no stage

    def plant(self, mark: Callable[[], None]) -> Callable[[], None]:
        """Plant it into this process and return what undoes it; `mark` is called when it is at work."""
        return plant(_above(self.target) + self.target, self.change, mark)


def one(name: str, target: str, change: Change | Seeing, stage: str, module: str, *more: str,
        base: tuple[str, ...] = FP64, step: int | None = None) -> Fault:  # fmt: skip
    return Fault(name, target, change, stage, module, (*base, *more), step)


def by_test(name: str, target: str, change: Change | Seeing, test: str) -> Fault:
    """Return a defect for a test to find: one below tests/, by its file, `::` and its name."""
    module = f"{_above(target)}{target.partition('.')[0]}/".replace(".", "/")
    return Fault(name, target, change, "", module, test=f"tests/{test}")


def _above(target: str) -> str:
    return ELSEWHERE.get(target.partition(".")[0], "rlexp.training.")


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """Stand in for a call that is left out."""


def left_out(_function: Any) -> Callable[..., None]:
    return nothing


SHORT_BATCH = ("data.size=13", "data.drop_last=false")  # 8 and 5 pairs
EMPTY_REPLICA = ("data.size=9", "data.drop_last=false")  # 8 and 1
CUT = ("data.max_length=100", "data.too_long=truncate")
CUT_ANSWERS = ("data.max_length=40", "data.too_long=truncate")
