"""The comparison with TRL: a line of it runs on the CPU, and what is said follows from what was measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import beside_trl
from bench.beside_trl import FA4, LINES, SMALL, VARIANTS, Compared, compare, section, with_row
from bench.beside_trl_run import FIRST, Result, Variant, Work, composed, missing, run_variant
from bench.gpu_here import GIB, stand_in
from bench.gpu_training import write_model
from bench.kernel_kinds import LAUNCHING, by_kind, kind_of
from bench.kernel_kinds import table as table_of_kinds
from tests.helpers.paths import ROOT
from tests.helpers.programs import bench

PAGE = ROOT / "docs" / "measured" / "beside_trl.md"
OURS, THEIRS = VARIANTS[:2]
HALF = next(variant for variant in VARIANTS if variant.half_state)
WITH_FA4 = next(variant for variant in VARIANTS if variant.needs == FA4)


def work(line: str = "long") -> Work:
    return LINES[line].work(stand_in(), "model")


def result(*seconds: float, peak: float | None = 10.0, apart: float = 0.0) -> Result:
    first = dict(zip(FIRST, (0.693, -100.0 * (1 + apart), -120.0), strict=True))
    return {"seconds": list(seconds), "peak": peak and peak * GIB, "first": first, "attention": "cpu_flash"}


# ---- on the CPU ----


def test_both_compute_the_same_and_what_is_missing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    write_model(tmp_path, SMALL, "float32")
    absent = dataclasses.replace(THEIRS, name="of a package", needs=("no_such_package.at_all",))
    compared = compare(LINES["long"], stand_in(), str(tmp_path), (OURS, THEIRS, absent))
    assert compared.wrong() == [], capsys.readouterr().err
    assert [len(each["seconds"]) for each in compared.done.values()] == [2, 2]
    assert max(compared.apart()[THEIRS]) < 1e-7  # measured: 5e-9
    assert {each["peak"] for each in compared.done.values()} == {None}
    table = [*compared.table()]
    assert table[4].endswith("| not installed: no_such_package.at_all | | | |")
    assert "TRL takes" in " ".join(compared.words())


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("--only", "hh", "longest"), ("--only", "long_checkpointed", "--profile")], ids=" ".join
)
def test_a_section_is_rehearsed_and_the_page_of_the_docs_stays(tmp_path: Path, words: tuple[str, ...]) -> None:
    pytest.importorskip("trl")
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text("utf-8"), "utf-8")
    told = bench("beside_trl", "--rehearse", *words, "--write", str(page), "--commit", "abc")
    assert told.returncode == 0, told.stderr
    written = page.read_text("utf-8")
    if "--profile" in words:
        assert written == PAGE.read_text("utf-8")
        assert "| products |" in told.stdout
        return
    assert written.count("Rehearsed on a CPU, which says nothing of a GPU,") == 2
    assert written.count("at commit abc") == 2
    assert with_row(page, "") == with_row(PAGE, ""), "a rehearsal is no result"


def test_without_a_gpu_it_says_so() -> None:
    told = bench("beside_trl", "--write", str(PAGE))
    assert (told.returncode, told.stdout) == (beside_trl.NO_GPU, "")
    assert told.stderr.startswith("bench.beside_trl: no GPU is visible on this machine")


# ---- what is given to both ----


def test_the_lengths_are_as_the_page_says() -> None:
    on = dataclasses.replace(stand_in(), device="cuda")
    hh, long, _, longest = (line.work(on, "model") for line in LINES.values())
    assert hh.tokens / (2 * hh.pairs) == pytest.approx(191, abs=0.5)
    assert (long.longest, longest.longest) == (8000, 32000)
    rows = work("hh").rows()
    assert [tuple(map(len, row.values())) for row in rows] == work("hh").drawn
    assert rows == work("hh").rows()


@pytest.mark.parametrize("line", LINES)
def test_every_line_and_variant_of_ours_composes(line: str) -> None:
    for variant in (each for each in VARIANTS if each.trainer == "rlexp"):
        named = dataclasses.replace(variant, words=()) if variant.needs else variant  # no CPU has its kernel
        cfg = composed(named, work(line))
        assert cfg.train.batch_size == cfg.train.micro_batch_size * cfg.train.grad_acc


def test_a_variant_names_what_it_lacks() -> None:
    assert missing(dataclasses.replace(THEIRS, needs=("json", "nothing_like_it"))) == "not installed: nothing_like_it"
    assert missing(dataclasses.replace(THEIRS, needs=("json",))) is None


# ---- what is said ----


def test_the_fastest_of_each_side_is_named_and_half_precision_apart() -> None:
    other = dataclasses.replace(THEIRS, name="flash-attn 4")
    found = Compared("8,000 tokens", work(), {
        OURS: result(1.0, 3.0, 2.0), WITH_FA4: {"failed": "not installed: flash_attn.cute"}, THEIRS: result(5.0),
        other: result(4.0), HALF: result(1.0, apart=0.3),
    })  # fmt: skip
    said = " ".join(found.words())
    assert "Fastest: rlexp (as installed) 2 s, TRL (flash-attn 4) 4 s: TRL takes 2.00 times as long." in said
    assert "With its optimizer in bfloat16, which rounds small updates away, TRL takes 0.50 times." in said
    assert str(found.row()).startswith("| 8,000 tokens | 4 | flash-attn 4 | 2 | as installed | 2.00 | ")
    assert "| 2 | 1 to 3 | 10.0 |" in [*found.table()][2]
    assert found.wrong() == []


def test_another_loss_is_an_error() -> None:
    found = Compared("long", work(), {OURS: result(1.0), THEIRS: result(1.0, apart=1e-3)})
    (wrong,) = found.wrong()
    assert wrong == "long: the log-probability in the first step of TRL, sdpa is 1.0e-03 off rlexp's"
    another = result(1.0) | {"first": result(1.0)["first"] | {"loss": 0.7}}
    (wrong,) = Compared("long", work(), {OURS: result(1.0), THEIRS: another}).wrong()
    assert wrong == "long: the loss in the first step of TRL, sdpa is 1.0e-02 off rlexp's"
    failed: Result = {"failed": "failed: CUDA out of memory"}
    alone = Compared("long", work(), {OURS: failed, THEIRS: result(1.0)})
    assert alone.wrong() == ["long: rlexp has no result"]
    assert alone.row() is None
    assert "One of the two has no result" in " ".join(alone.words())
    assert Compared("long", work(), {OURS: result(1.0), THEIRS: failed}).wrong() == []


def test_what_fails_or_comes_too_late_leaves_the_others_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_target: Any, _ranks: int, given: tuple[Variant, Work, bool], **_: Any) -> list[Result]:
        if given[0] is THEIRS:
            raise RuntimeError("rank 0 failed:\ntorch.OutOfMemoryError: CUDA out of | memory")
        return [result(1.0)]

    monkeypatch.setattr("rlexp.launch.local.run_ranks", failing)
    monkeypatch.setattr(beside_trl, "missing", lambda _: None)
    found = compare(LINES["long"], stand_in(), "model", (OURS, THEIRS))
    assert found.results[THEIRS] == {"failed": "failed: torch.OutOfMemoryError: CUDA out of / memory"}
    assert list(found.done) == [OURS]
    monkeypatch.setattr(beside_trl, "BUDGET", -1.0)
    late = compare(LINES["long"], stand_in(), "model", (OURS,))
    assert late.results[OURS]["failed"] == "not tried: the section's time was over"


def test_a_measured_row_replaces_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text("utf-8"), "utf-8")
    found = Compared(LINES["hh"].title, work(), {OURS: result(1.0), THEIRS: result(2.0)})
    monkeypatch.setattr(beside_trl, "compare", lambda *_: found)
    options = SimpleNamespace(rehearse=False, write=page, commit="abc", without=[])
    assert section("hh", stand_in(), "model", options) == []  # type: ignore[arg-type]
    before, after = (with_row(each, "").splitlines() for each in (PAGE, page))
    assert [line for line in after if line not in before] == [found.row()]
    assert len(after) == len(before) == 2 + len(LINES)
    assert [line.split(" | ")[0].strip("| ") for line in before[2:]] == [line.title for line in LINES.values()]


# ---- where a step's time goes ----


@pytest.mark.parametrize(("name", "kind"), [
    ("sm90_xmma_gemm_bf16bf16", "products"), ("nvjet_tst_128x256", "products"), ("aten::addmm", "products"),
    ("flash_bwd_dq_dk_dv_loop_seqk", "attention"), ("kernel_cutlass_kernel_flash_attncuteflash_fwd", "attention"),
    ("void at::native::vectorized_elementwise_kernel<4, MulFunctor>", "elementwise"),
    ("void at::native::reduce_kernel<512, 1>", "reductions"), ("Memcpy DtoD (Device -> Device)", "copies"),
    ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"), ("ncclDevKernel", "other"),
])  # fmt: skip
def test_kernels_are_known_by_their_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_gpus_kernels_are_told_from_the_hosts_launches() -> None:
    def event(key: str, device: str, micro: float, count: int = 1) -> Any:
        host = 0.0 if device == "CUDA" else micro
        return SimpleNamespace(key=key, device_type=f"DeviceType.{device}", count=count,
                               self_device_time_total=micro - host, self_cpu_time_total=host)  # fmt: skip

    events = [event("gemm", "CUDA", 2e6, 3), event("flash_fwd", "CUDA", 1e6), event("aten::mm", "CPU", 5e6),
              event("cudaLaunchKernel", "CPU", 5e5, 4)]  # fmt: skip
    found = by_kind(events, gpu=True)
    assert found == {"products": (2.0, 3), "attention": (1.0, 1), LAUNCHING: (0.5, 4)}
    lines = [*table_of_kinds(found, 2.5)]
    assert lines[0] == "A step takes 2.5 s. In one that is profiled, kernels take 3 s:"
    assert lines[-3:] == ["| products | 2,000.0 | 67% | 3 |", "| attention | 1,000.0 | 33% | 1 |",
                          f"| {LAUNCHING} | 500.0 |  | 4 |"]  # fmt: skip


def test_a_step_is_profiled(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL, "float32")
    small = dataclasses.replace(work(), folder=str(tmp_path))
    from rlexp.launch.local import run_ranks

    (found,) = run_ranks(run_variant, 1, (OURS, small, True), preload=("torch",), timeout=300.0)
    assert {"products", "attention", "elementwise", "optimizer"} <= set(found["kinds"])
    assert len(found["seconds"]) == small.steps
