"""What sequences have in common is computed once, and nothing moves: each run beside one process in which every
sequence has its own tokens, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.curves import Curve, draw, excesses
from bench.layouts import Case
from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.train.examples import read_examples
from rlexp.training.world.groups import ALONE as ALONE_RANK
from rlexp.training.world.groups import World
from tests.helpers.paths import FILES

BASE = ("launch.device=cpu", "logger=none", "train.precision=fp64", "data=jsonl", "data.drop_last=false",
        "data.max_length=400", "train.eval_every=2", "train.epochs=1")  # fmt: skip
# Prompts of one token and of many; answers of one token, equal ones, and such that begin alike: trained tokens are
# shared then, by the answers of one pair and by those of several. Some pairs have one document, and one question of it.
ROWS = (f"data.path={FILES}/rows/alike.jsonl", f"data.eval_path={FILES}/rows/alike.jsonl")
ALONE = Case(1, 1, 1, True)
RING = Case(2, 2, 4, True)
BY_TOKENS = Case(2, 2, "auto", True, tokens=140)  # room for the largest pair, or for five small ones
LAYOUTS = [
    Case(1, 1, 8, True),
    Case(1, 2, 2, True),
    RING,
    BY_TOKENS,
    Case(1, 1, "auto", True, tokens=400),
    Case(4, 1, "auto", True, "hybrid", 2, tokens=70),
    Case(2, 1, 8, True, "contiguous"),
    Case(4, 1, 4, True, "allgather"),
    Case(2, 2, 2, True, "ulysses"),
    Case(4, 1, 8, True, "hybrid", 2),
    Case(4, 1, 8, True),
]


def curves_of(cases: list[Case], *more: str) -> tuple[Curve, list[Curve]]:
    """Draw a run in one process in which nothing is shared, and one on each layout."""

    def config(case: Case, share: str) -> Config:
        return compose_config([*BASE, *ROWS, *case.overrides(), *more, f"data.share_prefix={share}"])

    alone, *others = draw([config(ALONE, "false"), *(config(case, "true") for case in cases)])
    return alone, others


def agree(cases: list[Case], *more: str) -> None:
    alone, others = curves_of(cases, *more)
    assert {row["train/shared_tokens"] for row in alone.rows if row["step"]} == {0}
    for case, curve in zip(cases, others, strict=True):
        assert excesses(alone, curve) == [], (case.label, more)
        assert sum(row["train/shared_tokens"] for row in curve.rows if row["step"]) > 0, (case.label, more)


def test_shared_tokens_move_nothing() -> None:
    """There are batches of 8 and of 2 pairs. LD-DPO weighs a shared token otherwise in the longer answer."""
    agree([Case(1, 1, 8, True), RING, BY_TOKENS], "loss.ld_alpha=0.3")


def test_what_is_shared_is_counted() -> None:
    """In one pack of all pairs: a token stands where it follows from the same tokens, and is followed by the same."""
    more = ("train.batch_size=10", "train.max_steps=1")
    _, (curve,) = curves_of([Case(1, 1, 10, True)], *more)
    (row,) = (row for row in curve.rows if row["step"] == 1)
    cfg = compose_config([*BASE, *ROWS, "train.eval_every=null"])
    pairs = read_examples(cfg, byte_tokenizer(), World(0, 1, ALONE_RANK)).train
    sequences = [(*pair.prompt.tolist(), *answer.tolist()) for pair in pairs for answer in pair.answers]
    beginnings = {each[:end] for each in sequences for end in range(2, len(each) + 1)}
    assert row["train/tokens"] == sum(map(len, sequences))
    most = row["train/tokens"] - len(beginnings) - len(set(sequences))
    assert 0.95 * most < row["train/shared_tokens"] <= most  # beginnings of fewer than 16 tokens are copied


@pytest.mark.slow
@pytest.mark.parametrize("more", [
    ("loss=dpo",), ("loss=dpo", "loss.wpo=true", "loss.sft_weight=0.3"), ("loss=ipo",), ("loss=dpo_norm",),
    ("loss=sft",), ("loss=reward",), ("loss=aot",), ("loss=bco_pair",), ("loss=mpo",), ("loss=orpo",),
    ("loss=kto", "data.unpair=true", "loss.desirable_weight=3"), ("loss=bco", "data.unpair=true"),
    ("model.window=17",), ("model.window=90", "parallel.transport=neighbour"),
    ("adapter=lora",), ("memory.checkpointing=attention",), ("memory.checkpointing=full", "model.fused=always"),
    ("reference=precompute",), ("adapter=lora", "reference=adapter"),
], ids=" ".join)  # fmt: skip
def test_nothing_moves_on_any_layout(more: tuple[str, ...], tmp_path: Path) -> None:
    travels = any("transport" in word for word in more)
    cases = [case for case in LAYOUTS if not travels or case.layout in ("zigzag", "contiguous")]
    agree(cases, *more, f"data.cache={tmp_path}")
