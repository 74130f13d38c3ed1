"""The memory of one machine that a run needs: counted as real ranks hold it, and no run starts that exceeds it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlexp.base.host_memory import HostMemory
from rlexp.config.load import compose_config
from rlexp.config.schema import Config, Device
from rlexp.config.sizes import ranks_of_machine
from rlexp.launch import preflight_check
from rlexp.launch.joining import RankSpec
from rlexp.preflight.changes import Change, singles
from rlexp.preflight.host import (
    COPIES,
    EXPORT,
    FREE,
    GIB,
    OFFLOADED,
    PROCESSES,
    REFERENCE,
    TENSORS,
    Held,
    HostBytes,
    host_of,
    power_of_two,
)
from rlexp.preflight.predict import Prediction
from rlexp.preflight.rehearsal import rehearse
from rlexp.training.checkpoint.saver import Saver
from rlexp.training.train.build import build
from rlexp.training.train.step import train_step
from rlexp.training.train.surroundings import UNPROBED
from tests.helpers.ranks import on_ranks
from tests.helpers.rehearsals import alone, elsewhere, judged, plan

MIB = 1 << 20
SIZES = ("model.layers=3", "model.hidden_size=64", "model.intermediate_size=256")
BASE = ("logger=none", "data.max_length=256", "data.eval_size=0", "train.batch_size=4", "train.max_steps=1", *SIZES)
TWO = ("launch.nproc=2", "parallel=ring2")
LIKE_8B = Held(shared=16 * 10**9, state=12 * 10**9, elements=8 * 10**9)  # of one of eight ranks


def test_an_8b_on_eight_ranks() -> None:
    """The issue's numbers: 96 GB of copies, and one reference of 16 GB in the place of eight."""
    cfg = elsewhere("launch.nproc=8", "parallel=ring8", "train.batch_size=8", "hardware.host_memory_gib=200")
    host = host_of(cfg, LIKE_8B, 0)
    assert host.ranks == 8
    assert host.by_kind[COPIES] == pytest.approx(96e9, rel=0.01)
    assert host.by_kind[REFERENCE] == 16 * 10**9
    assert host.by_kind[PROCESSES] == 8 * 3 * GIB
    assert host.by_kind[TENSORS] == 0
    assert host.limit == int(200 * GIB * (1 - FREE))
    assert host.fits
    assert host.counted == host.bytes - 8 * 3 * GIB
    assert dataclasses.replace(host, limit=host.counted).fits, "what a process takes on a GPU is assumed"
    assert not dataclasses.replace(host, limit=host.counted - 1).fits
    assert dataclasses.replace(host, limit=None).fits, "nobody knows how much there is"


@pytest.mark.parametrize(("words", "copies"), [
    (("checkpoint.host_memory_gib=8",), 8 * GIB),
    (("checkpoint.save_every=null", "checkpoint.on_exit=false"), 0),
    (("checkpoint.save_every=null",), 8 * 179 * (1 << 26)),
])  # fmt: skip
def test_copies_are_bounded_and_are_none_where_nothing_is_saved(words: tuple[str, ...], copies: int) -> None:
    cfg = elsewhere("launch.nproc=8", "parallel=ring8", "train.batch_size=8", *words)
    assert host_of(cfg, LIKE_8B, 0).by_kind[COPIES] == copies


def test_pinned_memory_is_rounded_up() -> None:
    assert [power_of_two(each) for each in (0, 1, 3, 4, 5, GIB, GIB + 1)] == [0, 1, 4, 4, 8, GIB, 2 * GIB]


PARTS: dict[str, dict[str, int]] = {
    "shared": {REFERENCE: 1}, "offloaded": {OFFLOADED: 8}, "pinned": {}, "rounded": {OFFLOADED: 8},
    "beside": {OFFLOADED: 8}, "state": {COPIES: 8}, "elements": {EXPORT: 2},
}  # fmt: skip


def test_each_part_of_what_is_held_is_counted_once_where_it_belongs() -> None:
    """So many times on a machine of eight ranks. What is pinned counts as torch takes it, and not by its own size."""
    cfg = elsewhere("launch.nproc=8", "parallel=ring8", "train.batch_size=8", "train.precision=bf16")
    without = host_of(cfg, Held(), 0).by_kind
    size = 2 * GIB
    for part in (field.name for field in dataclasses.fields(Held)):
        found = host_of(cfg, Held(**{part: size}), 0).by_kind
        more = {kind: (count - without[kind]) / size for kind, count in found.items() if count != without[kind]}
        near = 0.03 if part == "state" else 0.0  # copies are made of pieces of one size
        assert more == pytest.approx(PARTS[part], rel=near), part


def test_more_layers_are_rounded_up_by_the_larger_share() -> None:
    few, more = Held(1, 2, 100, 128, 5, 6, 7), Held(2, 4, 160, 256, 8, 10, 12)
    for one, other in ((few, more), (dataclasses.replace(few, rounded=160), dataclasses.replace(more, rounded=160))):
        told = one.grown(other, 3)
        assert dataclasses.replace(told, rounded=0) == Held(5, 10, 340, 0, 17, 22, 27)
        assert told.rounded == 544  # 340 × 1.6
    assert few.grown(few, 9) == few
    assert Held(state=3).grown(Held(state=4), 2) == Held(state=6)


def test_each_pinned_tensor_is_rounded_up_by_itself_and_moments_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of three tensors on the host is a moment. The counting of a rehearsal is a stub here."""
    weight, moment = torch.zeros(5), torch.zeros(9)
    part = SimpleNamespace(tensors=lambda: [("weight", weight), ("moment", moment)], moments={"moment": moment})
    monkeypatch.setattr(rehearse, "share", lambda *_: [part])
    run = SimpleNamespace(engine=None, world=SimpleNamespace(rank=0, size=1), parameters=5)
    mode: Any = SimpleNamespace(
        log=SimpleNamespace(device="cuda"),
        sizes_on=lambda _: {0: 20, 1: 33, 2: 36},
        number_of=lambda tensor: {id(weight): 0, id(moment): 2}[id(tensor)],
    )
    task: Any = SimpleNamespace(run=run)
    found = rehearse.of_host(mode, task)
    assert found == Held(offloaded=36, pinned=53, rounded=32 + 64, state=56, elements=5)
    mode.log.device = "cpu"
    assert rehearse.of_host(mode, task) == Held(state=56, elements=5)


def test_ranks_of_a_machine() -> None:
    two = elsewhere("launch.nproc=8", "launch.nodes=2", "parallel=ring8", "train.batch_size=8")
    assert ranks_of_machine(two) == 8


# ---- counted ----


def held_of(cfg: Config, rank: int, layers: int | None = None) -> Held:
    return alone(_held, cfg, rank, layers)


def _held(cfg: Config, rank: int, layers: int | None) -> Held:
    from rlexp.preflight.rehearsal.rehearse import preload, rehearse

    preload()
    return rehearse(plan(cfg, rank, gpu=True, layers=layers)).held


def really_held(spec: RankSpec, cfg: Config, folder: str) -> tuple[int, int, int]:
    """Return the bytes of this rank's state, of the memory for its copy, and of the reference that is shared."""
    task = build(cfg, around=UNPROBED)
    train_step(task, 1)
    saver = Saver(task.run.engine, task.run.world, Path(folder), {})
    saver.prepare()
    assert saver._preparing is not None
    saver._preparing.join()
    weights: Any = list(task.reference.frozen.policy.parameters())
    host = saver._host
    return saver._laid().size, host._made * host._size, sum(each.nbytes for each in weights)


@pytest.mark.parametrize("engine", ["zero1", pytest.param("torch", marks=pytest.mark.slow)])
def test_the_prediction_is_what_real_ranks_hold(engine: str, tmp_path: Any) -> None:
    words = (*BASE, *TWO, f"engine={engine}", "reference.offload=true", "train.precision=fp32")
    real = on_ranks(2, really_held, compose_config([*words, "launch.device=cpu"]), str(tmp_path))
    cfg = elsewhere(*words)
    predicted = [held_of(cfg, rank) for rank in range(2)]
    assert [each.state for each in predicted] == [state for state, _, _ in real]
    # On a GPU, a norm outside the layers stays on the device too.
    assert [each.shared for each in predicted] == pytest.approx([shared for *_, shared in real], rel=1e-3)
    assert host_of(cfg, predicted[0], 0).by_kind[COPIES] == pytest.approx(sum(copy for _, copy, _ in real), rel=0.01)
    assert sum(each.state for each in predicted) == 12 * predicted[0].elements


@pytest.mark.parametrize(
    ("engine", "bytes_each"),
    [
        pytest.param(("engine=zero1",), (0, 0), marks=pytest.mark.slow),
        (("engine=zero1", "engine.offload=optimizer"), (16, 26)),  # masters, two moments, gradients: pinned or not
        pytest.param(("engine=zero3", "engine.offload=all"), (16, 34), marks=pytest.mark.slow),
        # Each rank has its own rows, and nothing is shared.
        pytest.param(("engine=fsdp2", "reference.offload=true"), (2, 4), marks=pytest.mark.slow),
    ],
)
def test_what_is_offloaded_is_found(engine: tuple[str, ...], bytes_each: tuple[int, int]) -> None:
    held = held_of(elsewhere(*BASE, *TWO, *engine), 1)
    least, most = bytes_each
    mine = held.elements / 2
    assert held.shared == 0
    assert least * mine <= held.offloaded + held.pinned <= most * mine
    assert held.pinned <= held.rounded <= 2 * held.pinned


@pytest.mark.slow
@pytest.mark.parametrize("engine", [("engine=zero3", "engine.offload=all"), ("engine=fsdp2", "reference.offload=true")])
def test_more_layers_are_told_from_few(engine: tuple[str, ...]) -> None:
    cfg = elsewhere(*BASE, *TWO, *engine)
    few, more, whole = (held_of(cfg, 0, layers) for layers in (1, 2, 3))
    told = few.grown(more, 1)
    assert told.state == whole.state
    assert told.elements == whole.elements
    assert (told.offloaded, told.pinned) == pytest.approx((whole.offloaded, whole.pinned), rel=0.01)
    assert told.pinned <= told.rounded <= 2 * told.pinned  # of flat tensors, torch's rounding differs


# ---- refused ----


LARGE = ("model.hidden_size=768", "model.intermediate_size=3072", "model.layers=5", "data.max_length=64",
         "train.max_tokens_per_micro_batch=256")  # fmt: skip


def asked(helping: float, *words: str) -> dict[str, Any]:
    return alone(judged, elsewhere(*BASE, *TWO, "engine=zero1", *words), helping)


def test_a_run_that_exceeds_the_machine_is_refused() -> None:
    """Copies of 12 bytes × 48 million parameters take 0.6 GiB, and 0.48 may be taken."""
    answer = asked(0, *LARGE, "hardware.host_memory_gib=0.5")
    assert answer["fits"] is False
    assert answer["peak"] < answer["limit"], "it fits its GPUs"
    assert answer["short"].startswith("its 2 ranks on a machine need ")
    assert re.search(r"of the host's memory \(\d+\.\d MiB copies for a checkpoint, ", answer["short"])
    assert "processes" not in answer["short"], "what a process takes is assumed"
    assert answer["short"].endswith("may take 486.4 MiB: 95% of hardware.host_memory_gib=0.5")
    message = str(preflight_check.refusal(elsewhere(*TWO), preflight_check.Decision("x", **answer)))
    assert message.startswith("the run does not fit: its 2 ranks on a machine need")
    assert "launch.preflight=off" in message


@pytest.mark.slow
def test_a_machine_with_more_takes_it() -> None:
    answer = asked(0, *LARGE, "hardware.host_memory_gib=64")
    assert answer["fits"] is True
    assert answer["short"] is None


@pytest.mark.slow
def test_a_refused_run_is_told_what_would_fit() -> None:
    answer = asked(200, *LARGE, "hardware.host_memory_gib=0.485")
    assert "copies for a checkpoint" in answer["table"]
    assert answer["remedy"].startswith("The cheapest change that fits: checkpoint.host_memory_gib=0.3")


def short(copies: int, **more: int) -> HostBytes:
    kinds = {COPIES: copies, PROCESSES: 3 * GIB, REFERENCE: 0, OFFLOADED: 0} | more
    return HostBytes(2, kinds, 4 * GIB)


def test_what_would_help_a_machine() -> None:
    cfg = elsewhere(*BASE, *TWO, "engine=zero1", "reference.offload=true", "engine.offload=optimizer")
    known = dict(singles(cfg))
    helped = {words: changed for words, changed in singles(cfg, short=short(2 * GIB)) if words not in known}
    assert set(helped) == {"checkpoint.host_memory_gib=1", "reference.offload=false", "engine.offload=none"}
    assert helped["checkpoint.host_memory_gib=1"].checkpoint.host_memory_gib == 1
    assert not helped["reference.offload=false"].reference.offload
    crowded = {words for words, _ in singles(cfg, short=short(2 * GIB, **{REFERENCE: 9 * GIB}))}
    assert "checkpoint.host_memory_gib=0.25" in crowded, "two pieces of 64 MiB for each rank, with another change"
    assert not any("host_memory_gib" in words for words, _ in singles(cfg, short=short(GIB // 8)))


def test_no_remedy_moves_what_the_machine_has_no_memory_for() -> None:
    """Whatever fits its GPUs only with weights of the host is not proposed where the host has no memory for them."""
    there = Prediction([], 1, 1, host=short(GIB // 2))
    assert there.short is None
    exceeded = dataclasses.replace(there, host=short(GIB // 2, **{REFERENCE: GIB}))

    class Small(Prediction):
        peak: Any = type("Peak", (), {"bytes": 1})()

    fitting, crowded = (Small([], 1, 1, host=each.host) for each in (there, exceeded))
    assert Change("reference.offload=true", fitting).fits(2)
    assert not Change("reference.offload=true", crowded).fits(2)
    assert not Change("reference.offload=true", fitting).fits(0)


# ---- whose memory ----


@pytest.mark.parametrize(("words", "here", "expected"), [
    (("hardware.host_memory_gib=7",), True, 7.0), ((), True, 5.0), ((), False, 0.0),
    (("launch.rank_memory_gb=16",), False, 32.0),
    (("launch.rank_memory_gb=16", "hardware.host_memory_gib=7"), False, 7.0),
])  # fmt: skip
def test_a_machine_is_this_one_or_the_job_s(
    words: tuple[str, ...], here: bool, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight_check, "host_memory", lambda: HostMemory(5 * GIB, GIB))
    cfg = elsewhere(*BASE, *TWO, *words)
    assert preflight_check.with_machine(cfg, cfg.hardware, here=here).host_memory_gib == expected


def test_a_kept_decision_is_of_the_same_checkpoints() -> None:
    one, same, other = (
        preflight_check.fingerprint(elsewhere(*BASE, *TWO, *words), fitting=True)
        for words in ((), ("checkpoint.keep_last=9",), ("checkpoint.host_memory_gib=1",))
    )
    assert one == same
    assert one != other


def test_on_a_cpu_the_tensors_are_the_host_s() -> None:
    cfg = elsewhere(*BASE, *TWO)
    cfg = dataclasses.replace(cfg, launch=dataclasses.replace(cfg.launch, device=Device.cpu))
    host = host_of(cfg, Held(state=MIB), 7 * MIB)
    assert host.by_kind[TENSORS] == 14 * MIB
    assert host.by_kind[PROCESSES] < GIB
