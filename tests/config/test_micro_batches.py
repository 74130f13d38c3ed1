"""How much is computed at once: what is chosen where nobody says, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from rlexp.config.checks.micro_batches import (
    ON_CPU,
    ON_GPU,
    AtOnce,
    at_once,
    fullest_micro_batch,
    micro_batches,
    scoring_at_once,
    tokens_of_ring,
)
from rlexp.config.elsewhere import compose_elsewhere
from rlexp.config.load import compose_config
from tests.helpers.refusals import refusal_of

GRPO = ("loss=grpo", "reward.rule=length", "launch.device=cpu")


def test_nobody_has_to_choose() -> None:
    """There is room for the longest pair, which is two sequences, and for what keeps a device busy."""
    assert at_once(compose_config(["launch.device=cpu"])) == AtOnce(tokens=ON_CPU)
    many = ("hardware=h100", "launch.nproc=1", "train.batch_size=64")
    assert at_once(compose_elsewhere([*many])) == AtOnce(tokens=ON_GPU)
    assert at_once(compose_elsewhere([*many, "launch.nproc=8", "train.batch_size=32"])) == AtOnce(
        tokens=4096
    )  # four pairs
    long = ("launch.device=cpu", "data.max_length=32000")
    assert at_once(compose_config([*long])) == AtOnce(tokens=64000)
    assert at_once(compose_config([*long, "loss=sft"])) == AtOnce(tokens=32000)
    on_ring = compose_config([*long, "parallel=ring4"])
    assert (at_once(on_ring), tokens_of_ring(on_ring)) == (AtOnce(tokens=16000), 64000)
    assert at_once(compose_config([*long, "train.micro_batch_size=2"])) == AtOnce(samples=2)
    assert at_once(compose_config([*long, "data.packing=false"])) == AtOnce(samples=1)


def test_scoring_has_a_size_of_its_own() -> None:
    assert scoring_at_once(compose_config([*GRPO, "train.micro_batch_size=2"])) == AtOnce(tokens=ON_CPU)
    assert scoring_at_once(compose_config([*GRPO, "rollout.score_batch_size=6"])) == AtOnce(samples=6)


@pytest.mark.parametrize(
    ("words", "lengths", "count"),
    [
        (("train.micro_batch_size=2",), [300, 300], 8),
        (("train.max_tokens_per_micro_batch=600",), [300], 16),
        (("train.max_tokens_per_micro_batch=1500",), [300, 300, 150], 6),  # 2.5 pairs at once
        (("train.max_tokens_per_micro_batch=1500", "train.batch_size=2"), [300, 300, 150], 1),
        (("train.max_tokens_per_micro_batch=400",), [200], 16),  # a pair that shares its prompt
        (("train.batch_size=3",), [300, 300, 300], 1),
        (
            ("loss=grpo", "reward.rule=length", "train.max_tokens_per_micro_batch=1000", "rollout.max_new_tokens=64"),
            [300, 300, 300, 100],
            4,
        ),
        (("train.max_tokens_per_micro_batch=750", "parallel=ring2", "launch.nproc=4"), [300, 300, 150], 3),
        (("data.packing=false",), [300], 16),
        (("loss=sft", "train.max_tokens_per_micro_batch=1000"), [300, 300, 300, 100], 4),
    ],
)
def test_the_fullest_micro_batch(words: tuple[str, ...], lengths: list[int], count: int) -> None:
    cfg = compose_config(["launch.device=cpu", "data.max_length=300", "train.batch_size=16", *words])
    assert (fullest_micro_batch(cfg), micro_batches(cfg)) == (lengths, count)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train.max_tokens_per_micro_batch=600", "train.micro_batch_size=2"), "and train.micro_batch_size=2 by"),
        (("train.max_tokens_per_micro_batch=600", "data.packing=false"), "data.packing=true, or train.micro_batch"),
        (("train.micro_batch_size=many",), "must be a whole number of samples, or auto"),
        (("train.micro_batch_size=0",), "train.micro_batch_size=0: must be at least 1"),
        (("train.grad_acc=2",), "is derived, and with train.micro_batch_size=auto each step has its own"),
        (("launch.nproc=16",), "train.batch_size=8: 16 replicas need a sample each at least. Use train.batch_size=16"),
        ((*GRPO, "train.max_tokens_per_micro_batch=100", "parallel=ring2"), "max_tokens_per_micro_batch=256 or more"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(words: tuple[str, ...], said: str) -> None:
    assert said in refusal_of(["launch.device=cpu", *words])


def test_a_train_batch_need_not_divide_where_tokens_are_counted() -> None:
    cfg = compose_config(["launch.device=cpu", "launch.nproc=8", "train.batch_size=12"])
    assert (cfg.train.grad_acc, cfg.parallel.dp_size) == (None, 8)


def test_the_busiest_replica_s_share_of_a_batch_is_what_counts() -> None:
    """Every batch of up to 20 pairs over up to 8 replicas, dealt by one to each in turn."""
    cfg = compose_config(["launch.device=cpu", "data.max_length=300"])
    for replicas in range(1, 9):
        for batch in range(replicas, 21):
            share = len(range(0, batch, replicas))
            of_batch = dataclasses.replace(
                cfg,
                parallel=dataclasses.replace(cfg.parallel, dp_size=replicas),
                train=dataclasses.replace(cfg.train, batch_size=batch),
            )
            one_each = dataclasses.replace(
                of_batch, train=dataclasses.replace(of_batch.train, max_tokens_per_micro_batch=600)
            )
            assert at_once(of_batch) == AtOnce(tokens=min(ON_CPU, share * 600)), (batch, replicas)
            assert micro_batches(one_each) == share, (batch, replicas)
