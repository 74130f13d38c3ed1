"""No loss over pairs moves with the layout: each against one process, in float64, with masks and a short last batch."""

from __future__ import annotations

import pytest

from bench.curves import Curve, draw, excesses
from bench.layouts import Case
from rlexp.config.load import compose_config
from rlexp.config.schema import KINDS, Config
from rlexp.config.schema.losses import PreferenceConfig
from rlexp.launch.joining import RankSpec
from rlexp.training.types import Shard, TokenLogps
from tests.helpers.paths import FILES
from tests.helpers.ranks import on_ranks

# 19 pairs, most of several turns: batches of 8, 8 and 3.
BASE = ("launch.device=cpu", "logger=none", "train.precision=fp64", "data=hf",
        f"data.sources.messages.path={FILES}/rows/messages.jsonl",
        f"data.sources.dialogues.path={FILES}/rows/dialogues.jsonl", "data.eval_size=9", "data.drop_last=false",
        "train.eval_every=2", "train.epochs=1")  # fmt: skip
# The rows have no margins, and generated pairs have.
GENERATED = ("launch.device=cpu", "logger=none", "train.precision=fp64", "data.size=19", "data.eval_size=9",
             "data.drop_last=false", "train.eval_every=2", "train.epochs=1")  # fmt: skip
# Each loss, with what else may be asked of it.
LOSSES: dict[str, tuple[str, ...]] = {
    "dpo": ("loss.label_smoothing=0.1",),
    "dpo, margins": ("loss.margin_weight=0.5",),
    "dpo, supervised": ("loss.sft_weight=0.3",),
    "dpo, WPO": ("loss.wpo=true",),
    "dpo, LD-DPO": ("loss.ld_alpha=0.3",),
    "dpo_norm": (),
    "ipo": (),
    "ipo, of answers": ("loss.normalize=sequence",),
    "apo_zero": (),
    "apo_down": (),
    "simpo": (),
    "simpo, margins": ("loss.margin_weight=0.5",),
    "orpo": (),
    "cpo": (),
    "bco_pair": (),
    "bco_pair, no shift": ("loss.shift=none",),
    "mpo": (),
    "hinge": (),
    "robust": (),
    "aot": (),
    "aot_unpaired": (),
    "exo_pair": (),
    "nca_pair": (),
    "sppo_hard": (),
    "discopop": (),
}
ALONE = Case(1, 1, 1, True)
RING = Case(2, 2, 2, True)
GRID = [Case(1, 1, 8, True), Case(1, 2, 1, True), RING, Case(2, 1, 8, True), Case(4, 1, 4, True), Case(4, 1, 1, False)]


def chosen(name: str) -> tuple[str, ...]:
    """Return the loss, with what else is asked of it."""
    loss, *_ = name.split(",")
    return f"loss={loss}", *LOSSES[name]


def configured(name: str, case: Case) -> Config:
    base = GENERATED if "margin" in name else BASE
    return compose_config([*base, *chosen(name), *case.overrides()])


def agree(names: list[str], cases: list[Case]) -> None:
    grid = [ALONE, *cases]
    curves = draw([configured(name, case) for name in names for case in grid])
    for place, name in enumerate(names):
        baseline, *others = curves[place * len(grid) : (place + 1) * len(grid)]
        holds_something(name, baseline)
        for case, curve in zip(cases, others, strict=True):
            assert curve.samples == baseline.samples
            assert excesses(baseline, curve) == [], (name, case.label)


def holds_something(name: str, curve: Curve) -> None:
    assert [len(samples) for samples in curve.samples] == [8, 8, 3], name
    assert all("train/rewards/accuracies" in row for row in curve.rows), name
    assert sum("eval/loss" in row for row in curve.rows) == 2, name
    assert curve.rows[0]["train/grad_norm"] > 0, name


def test_every_loss_over_pairs_is_here() -> None:
    here = {chosen(name)[0].removeprefix("loss=") for name in LOSSES}
    assert here == {name for name, kind in KINDS["loss"].items() if issubclass(kind, PreferenceConfig)}


def test_a_sum_that_sees_the_whole_batch_is_that_of_one_process() -> None:
    """Two terms, a supervised one that counts tokens, a mean that is carried over, and a pass without gradient."""
    agree(["mpo"], [RING])


@pytest.mark.slow
def test_replicas_without_a_pair_take_part_in_every_pass() -> None:
    """5 held-out pairs and a last batch of 3 on four replicas: one has two empty micro-batches. FSDP2 gathers in each
    forward pass, so a rank that leaves one out would make the others wait for ever."""
    words = ("data.size=11", "data.eval_size=5", "train.eval_every=1", "train.micro_batch_size=1", "train.batch_size=8",
             "data.drop_last=false", "train.epochs=1", "loss=mpo", "launch.device=cpu", "logger=none",
             "train.precision=fp64")  # fmt: skip
    baseline, *others = draw([compose_config([*words, *case]) for case in (
        ("parallel=ring1", "engine=torch"), ("launch.nproc=4", "parallel=ring1", "engine=fsdp2"),
        ("launch.nproc=4", "parallel=ring2", "engine=fsdp2"))], timeout=240)  # fmt: skip
    for curve in others:
        assert excesses(baseline, curve) == []


@pytest.mark.slow
def test_the_reference_runs_once() -> None:
    """For each micro-batch, also where a pass without gradient goes before the one with it."""
    cfg = compose_config([*BASE, "loss=mpo", "train.micro_batch_size=4"])
    ((micro_batches, runs),) = on_ranks(1, runs_of_the_reference, cfg)
    assert (micro_batches, runs) == (2, 2)


def runs_of_the_reference(_spec: RankSpec, cfg: Config) -> tuple[int, int]:
    from rlexp.training.train.build import build, unprobed
    from rlexp.training.train.offline_task import OfflineTask
    from rlexp.training.train.step import train_step

    task = build(cfg, probing=unprobed)
    assert isinstance(task, OfflineTask)
    assert task.reference is not None
    runs, reference = [], task.reference

    def counted(shard: Shard) -> TokenLogps:
        runs.append(len(shard.tokens_t))
        return reference(shard)

    task.reference = counted
    train_step(task, 1)
    return len(task.sampler.batch(1).indices) // cfg.train.micro_batch_size, len(runs)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_that_of_one_process(name: str) -> None:
    agree([name], GRID)
