"""The same run on a part of the grid of docs/measured/invariance.md; `make prove` measures the whole grid."""

from __future__ import annotations

import pytest

from bench.curves import draw, excesses
from bench.layouts import Case, layout_cases
from rlexp.config.load import compose_config
from tests.helpers.paths import FILES

BASE = ("launch.device=cpu", "logger=none", "train.precision=fp64", "data.size=40", "data.eval_size=5")
GRID = [Case(1, 1, 1, True), Case(2, 2, 2, True), Case(4, 1, 4, True)]
MORE = [
    GRID[0],
    Case(1, 4, 2, False),  # a ring of 8 is in the bug report's layouts below
    Case(4, 1, 4, True, "allgather"),
    Case(2, 2, 1, False, "ulysses"),
    Case(4, 1, 1, True, "hybrid", 2),
]


@pytest.mark.parametrize("grid", [GRID, pytest.param(MORE, marks=pytest.mark.slow)], ids=["zigzag", "more layouts"])
def test_three_steps_do_not_move_with_the_layout(grid: list[Case]) -> None:
    """Use 5 held-out pairs, which do not divide evenly among several replicas or micro-batches."""
    length = ("train.max_steps=3", "train.eval_every=2")
    alone = compose_config([*BASE, *length, *GRID[0].overrides(), "data.share_prefix=false"])
    baseline, *curves = draw([alone, *(compose_config([*BASE, *length, *case.overrides()]) for case in grid)])
    assert len(baseline.rows) == 3
    assert sum("eval/loss" in row for row in baseline.rows) == 2  # at step 2, and at the last step
    for case, curve in zip(grid, curves, strict=True):
        assert curve.samples == baseline.samples
        assert excesses(baseline, curve) == [], case.label


@pytest.mark.parametrize("grid", [GRID[2:], pytest.param(MORE[1:], marks=pytest.mark.slow)], ids=["zigzag", "more"])
def test_windows_do_not_move_with_the_layout(grid: list[Case]) -> None:
    """Each query sees 17 positions, and answers have some hundreds."""
    curves = draw([compose_config([*BASE, "train.max_steps=2", "model.window=17", *case.overrides()])
                   for case in (GRID[0], *grid)])  # fmt: skip
    whole, *others = [*draw([compose_config([*BASE, "train.max_steps=2", *GRID[0].overrides()])]), *curves[1:]]
    assert excesses(whole, curves[0]), "the window changes what is trained"
    for case, curve in zip(grid, others, strict=True):
        assert excesses(curves[0], curve) == [], case.label


RECOMPUTED = ("model.fused=always", "memory.checkpointing=attention")


@pytest.mark.parametrize(
    "grid", [[MORE[2]], pytest.param([GRID[0], *MORE[1:]], marks=pytest.mark.slow)], ids=["allgather", "all layouts"]
)
def test_fused_pieces_and_kept_attention_move_nothing(grid: list[Case]) -> None:
    """In float64, beside a plain run on one device: fewer kernels, and layers that are computed again without attending
    again, on every layout. A ring then sends what it sends where all is kept."""
    words = (*BASE, "train.max_steps=2")
    cases = [(GRID[0], ()), *((case, RECOMPUTED) for case in grid), (grid[0], ())]
    plain, *curves, kept = draw([compose_config([*words, *more, *case.overrides()]) for case, more in cases])
    for case, curve in zip(grid, curves, strict=True):
        assert excesses(plain, curve) == [], case.label
    if grid[0].layout in ("zigzag", "allgather"):  # others exchange heads, once more
        assert [row["train/ring_bytes"] for row in curves[0].rows] == [row["train/ring_bytes"] for row in kept.rows]


@pytest.mark.slow
@pytest.mark.parametrize("rings", [(1, 8), pytest.param((1, 2, 4), marks=pytest.mark.prove)], ids=["8", "2 and 4"])
def test_three_steps_are_those_of_one_process_on_every_layout(rings: tuple[int, ...]) -> None:
    """tiny has 8 query heads and 2 key/value heads, so on most rings several ranks need the same keys."""
    grid = [case for case in layout_cases() if case.ring_size in rings]
    curves = draw([compose_config([*BASE, "train.max_steps=3", *case.overrides()]) for case in grid])
    for case, curve in zip(grid, curves, strict=True):
        assert excesses(curves[0], curve) == [], case.label
        balances = [row["train/ring_balance"] for row in curve.rows]
        assert min(balances) >= 1
        assert (max(balances) < 1.05) is (case.layout != "contiguous"), (case.label, balances)


# Awkward lengths: one token, prime numbers, and one longer than all others of its step together.
UNEVEN = ("launch.device=cpu", "logger=none", "train.precision=fp64", "data=jsonl",
          f"data.path={FILES}/rows/uneven.jsonl", "data.max_length=900", "train.batch_size=4", "data.eval_size=2",
          "parallel.cut=auto", "train.max_steps=2", "train.eval_every=1")  # fmt: skip
ELASTIC = {ranks: ("parallel=elastic", f"launch.nproc={ranks}") for ranks in (2, 4, 8)}


@pytest.mark.parametrize(
    "ways",
    [
        (ELASTIC[4], (*ELASTIC[4], "parallel.layout=allgather")),
        pytest.param(
            (
                ELASTIC[2],
                ELASTIC[8],
                ("parallel=ring2", "launch.nproc=4"),
                (*ELASTIC[4], "parallel.transport=neighbour"),
                (*ELASTIC[4], "train.micro_batch_size=1"),
                (*ELASTIC[4], "data.packing=false"),
                (*ELASTIC[4], "data.share_prefix=false", "model.window=17"),
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["elastic", "more"],
)
def test_a_width_for_every_sequence_moves_nothing(ways: tuple[tuple[str, ...], ...]) -> None:
    words = {way: compose_config([*UNEVEN, *way]) for way in ways}
    plain = {way: compose_config([*UNEVEN, *(word for word in way if word.startswith("model.")), "parallel=ring1"])
             for way in ways}  # fmt: skip
    curves = draw([*words.values(), *plain.values()])
    for way, curve, alone in zip(ways, curves[: len(ways)], curves[len(ways) :], strict=True):
        assert excesses(alone, curve) == [], way
        assert curve.samples == alone.samples
        met = [{name for name, count in row.items() if name.startswith("train/ring_width") and count}
               for row in curve.rows]  # fmt: skip
        assert "train/ring_width_1" in set.union(*met), "none is held whole"
        assert len(set.union(*met)) > 1, "none is cut"


def test_the_comparison_sees_what_a_real_defect_would_do() -> None:
    """A curve that is wrong by 1e-9, as one of another seed is by far more, does not pass."""
    one, other = draw([compose_config([*BASE, "train.max_steps=2", f"optim.lr={lr}"]) for lr in (1e-3, 1.000001e-3)])
    assert any("train/loss" in excess for excess in excesses(one, other))
    assert any("weights" in excess for excess in excesses(one, other))


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_tail_is_the_same_on_every_layout(drop_last: bool) -> None:
    """13 pairs, batch 8, two epochs: an update an epoch, or two with a last one of 5 pairs. Of four replicas, one then
    has an empty micro-batch behind a full one, and one has only empty ones."""
    overrides = (*BASE, "data.size=13", "train.epochs=2", f"data.drop_last={str(drop_last).lower()}")
    grid = [Case(1, 1, 1, True), Case(2, 2, 2, True), Case(1, 4, 1, True), Case(4, 1, 8, False)]
    curves = draw([compose_config([*overrides, *case.overrides()]) for case in grid])
    steps = 2 if drop_last else 4
    for case, curve in zip(grid, curves, strict=True):
        assert len(curve.rows) == steps
        assert curve.samples == curves[0].samples
        assert excesses(curves[0], curve) == [], case.label
    assert [len(samples) for samples in curves[0].samples] == ([8] * 2 if drop_last else [8, 5] * 2)


def test_the_bug_report_draws_one_curve() -> None:
    """8 ranks, batch 8: ring 1 with micro 1, ring 8 with micro 1, ring 8 with micro 8."""
    layouts = [("ring1", 1), ("ring8", 1), ("ring8", 8)]
    configs = [
        compose_config(["+experiment=bug_report", "logger=none", "train.max_steps=2", f"parallel={ring}",
                        f"train.micro_batch_size={micro}"])
        for ring, micro in layouts
    ]  # fmt: skip
    assert [config.train.grad_acc for config in configs] == [1, 8, 1]
    one, other, third = draw(configs)
    assert excesses(one, other) == []
    assert excesses(one, third) == []
