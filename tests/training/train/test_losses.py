"""No loss on answers that the rows give moves with the layout: each against one process, in float64, with masks and a
short last batch."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from torch import Tensor

from bench.curves import Curve, draw, excesses
from bench.layouts import Case
from rlexp.config.load import compose_config
from rlexp.config.schema import KINDS, Config
from rlexp.config.schema.losses import UnpairedConfig
from rlexp.launch.joining import RankSpec
from rlexp.training.reference.models import Reference
from rlexp.training.train.build import build
from rlexp.training.train.rows_task import RowsTask
from rlexp.training.train.step import train_step
from rlexp.training.train.surroundings import UNPROBED
from rlexp.training.types import Shard
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
# Long texts without prompts.
TEXTS = ("data=jsonl", f"data.path={FILES}/rows/texts.jsonl", f"data.eval_path={FILES}/rows/texts.jsonl",
         *(word for word in GENERATED if not word.startswith(("data.size", "data.eval_size"))))  # fmt: skip
BY_LENGTH = ("eval.buckets=[120,160]", "eval.before_training=true")
# Each loss, with what else may be asked of it. Weights make KTO's divergence larger than 0, where its clamp ends.
LOSSES: dict[str, tuple[str, ...]] = dict.fromkeys((
    "dpo", "dpo, margins", "dpo, supervised", "dpo, WPO", "dpo, LD-DPO", "dpo_norm", "ipo", "ipo, of answers",
    "apo_zero", "apo_down", "simpo", "simpo, margins", "orpo", "cpo", "bco_pair", "bco_pair, no shift", "mpo",
    "hinge", "robust", "aot", "aot_unpaired", "exo_pair", "nca_pair", "sppo_hard", "discopop", "kto",
    "kto, generated", "bco", "bco, no shift, generated", "apo_zero_unpaired", "sft", "sft, generated", "sft, texts",
    "reward", "reward, margins"
), ()) | {
    "dpo": ("loss.label_smoothing=0.1",), "dpo, margins": ("loss.margin_weight=0.5",),
    "dpo, supervised": ("loss.sft_weight=0.3",), "dpo, WPO": ("loss.wpo=true",),
    "dpo, LD-DPO": ("loss.ld_alpha=0.3",), "ipo, of answers": ("loss.normalize=sequence",),
    "simpo, margins": ("loss.margin_weight=0.5",), "bco_pair, no shift": ("loss.shift=none",),
    "kto": ("data.unpair=true", "loss.desirable_weight=3"), "kto, generated": ("loss.desirable_weight=3",),
    "bco": ("data.unpair=true",), "bco, no shift, generated": ("loss.shift=none", "loss.undesirable_weight=0.5"),
    "apo_zero_unpaired": ("data.unpair=true",), "reward": ("loss.center=0.01",)
}  # fmt: skip
ALONE = Case(1, 1, 1, True)
RING = Case(2, 2, 2, True)
GRID = [
    Case(1, 1, 8, True),
    Case(1, 2, 1, True),
    RING,
    Case(2, 1, 8, True),
    Case(4, 1, "auto", True, tokens=150, widths=True),
    Case(4, 1, 1, False),
]


def chosen(name: str) -> tuple[str, ...]:
    """Return the loss, with what else is asked of it."""
    loss, *_ = name.split(",")
    return f"loss={loss}", *LOSSES[name]


def configured(name: str, case: Case, *, share: bool = True) -> Config:
    base = TEXTS if "texts" in name else GENERATED if "margin" in name or "generated" in name else BASE
    shares = f"data.share_prefix={str(share and case.packing).lower()}"
    return compose_config([*base, *chosen(name), *BY_LENGTH, *case.overrides(), shares])


def agree(names: list[str], cases: list[Case]) -> None:
    """Each loss on these layouts, where sequences share what they can, equals one process where none do."""
    grid = [ALONE, *cases]
    curves = draw([configured(name, case, share=case is not ALONE) for name in names for case in grid])
    for place, name in enumerate(names):
        baseline, *others = curves[place * len(grid) : (place + 1) * len(grid)]
        holds_something(name, baseline)
        for case, curve in zip(cases, others, strict=True):
            assert curve.samples == baseline.samples
            assert excesses(baseline, curve) == [], (name, case.label)
            if case.widths:
                met = {width for row in curve.rows for width in (1, 2, 4) if row.get(f"train/ring_width_{width}")}
                assert len(met) > 1, (name, met)


def holds_something(name: str, curve: Curve) -> None:
    unpaired = "data.unpair=true" in LOSSES[name]
    assert [len(samples) for samples in curve.samples] == ([8, 8, 8, 8, 6] if unpaired else [8, 8, 3]), name
    before, *rows = curve.rows
    assert before["step"] == 0, name
    accuracy = "train/mean_token_accuracy" if name.startswith("sft") else "train/rewards/accuracies"
    assert all(accuracy in row for row in rows), name
    assert sum("eval/loss" in row for row in rows) == (3 if unpaired else 2), name
    assert rows[0]["train/grad_norm"] > 0, name
    if name.startswith("kto"):
        assert max(row["train/kl"] for row in rows) > 1, name
    if issubclass(KINDS["loss"][chosen(name)[0].removeprefix("loss=")], UnpairedConfig):
        means = [[row.get(f"train/rewards/{of}") for of in ("chosen", "rejected", "margins")] for row in rows]
        assert [apart for *_, apart in means] == [
            None if None in (one, other) else one - other for one, other, _ in means
        ], name
    for row in (before, rows[-1]):
        adds_up(row)
        for said in (each for each in rows[0] if each.startswith(("train/logits/", "train/logps/", "train/rewards/"))):
            assert said.replace("train/", "eval/") in row, name


def adds_up(row: Mapping[str, float]) -> None:
    """The loss of all held-out examples is that of the parts, by their shares."""
    parts = [name.removesuffix("/share") for name in row if name.endswith("/share")]
    assert len(parts) == 3
    assert all(row[f"{part}/examples"] > 0 for part in parts)
    whole = sum(row[f"{part}/share"] * row[f"{part}/loss"] for part in parts)
    assert whole == pytest.approx(row["eval/loss"], rel=1e-14)  # measured: 4e-16


def test_every_loss_on_answers_of_the_rows_is_here() -> None:
    here = {chosen(name)[0].removeprefix("loss=") for name in LOSSES}
    assert here == {name for name, kind in KINDS["loss"].items() if not kind.draws}


def test_every_way_to_a_loss_is_that_of_one_process() -> None:
    """A sum with a mean that is carried over and a pass without gradient; tokens."""
    agree(["mpo", "sft, generated"], [RING])


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
    task = build(cfg, around=UNPROBED)
    assert isinstance(task, RowsTask)
    assert task.reference is not None
    runs, reference = [], task.reference

    class Counted(Reference):
        def logps(self, shard: Shard) -> Tensor:
            runs.append(len(shard.tokens_t))
            return reference.logps(shard)

    task.reference = Counted()
    train_step(task, 1)
    return len(task.sampler.batch(1).indices) // cfg.train.micro_batch_size, len(runs)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_that_of_one_process(name: str) -> None:
    agree([name], GRID)
