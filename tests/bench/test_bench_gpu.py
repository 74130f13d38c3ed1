"""`make gpu` and its page: without a GPU it says so, all of it can be rehearsed, and the page tells what is in it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import gpu, gpu_longest, gpu_rates, gpu_training, gpu_world
from bench.gpu_foretell import Foretold
from bench.gpu_here import GIB, Machine, stand_in
from bench.gpu_longest import RINGS, Option
from bench.gpu_rates import Rate, kept, write_kept
from bench.kept_rows import page_of
from rlexp.base import kernel_rates
from rlexp.base.engine_facts import ENGINES
from rlexp.base.kernel_needs import takes
from rlexp.config.load import compose_config
from rlexp.launch.joining import RankSpec
from rlexp.preflight.rehearsal.rates import MEASURED, OF_SHEET
from tests.helpers.faults.plant import plant
from tests.helpers.paths import ROOT, outside_make
from tests.helpers.programs import HIDDEN, bench, python

PAGE = ROOT / "docs" / "measured" / "gpu.md"
MARKERS = ("about", "longest", *gpu.SECTIONS)


# ---- without a GPU ----


@pytest.mark.parametrize("words", [(), ("--here",), ("--only", "rates", "--write", str(PAGE))], ids=" ".join)
def test_without_a_gpu_it_says_so_and_changes_nothing(words: tuple[str, ...]) -> None:
    before = PAGE.read_bytes()
    told = bench("gpu", *words)
    assert (told.returncode, told.stdout) == (gpu.NO_GPU, "")
    assert told.stderr.startswith("make gpu: no GPU is visible on this machine")
    assert told.stderr.count("\n") == 1
    assert PAGE.read_bytes() == before


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("program", ["gpu", "selftest"])
def test_make_asks_before_it_installs_anything(program: str, tmp_path: Path) -> None:
    """With a Python of its own it installs nothing at all."""
    for words in ((), (f"GPU_PYTHON={sys.executable}",)):
        told = subprocess.run(
            ["make", program, f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}", *words],
            cwd=ROOT, env=outside_make() | HIDDEN, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert told.stderr.startswith(f"make {program}: no GPU is visible on this machine"), told.stderr
        assert told.returncode != 0
        assert list(tmp_path.iterdir()) == []


def test_a_torch_without_cuda_beside_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from bench import gpu_here

    monkeypatch.setattr(gpu_here, "visible_gpus", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpu_here.missing(ask_torch=False) is None
    assert "is built without CUDA" in str(gpu_here.missing())


# ---- a rehearsal of what a GPU would run ----


def page(tmp_path: Path) -> Path:
    file = tmp_path / "page.md"
    file.write_text("\n".join(f"<!-- {name}: begin -->\nold\n<!-- {name}: end -->" for name in MARKERS), "utf-8")
    return file


def section(file: Path, name: str) -> str:
    (text,) = re.findall(rf"<!-- {name}: begin -->\n(.*?)\n<!-- {name}: end -->", file.read_text("utf-8"), re.DOTALL)
    return str(text)


def rows(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| [^-]", line)][1:]


def test_the_rates_are_rehearsed(tmp_path: Path) -> None:
    """One page is written, its rates and nothing else; the page of the docs says that nothing was measured."""
    file, tables = page(tmp_path), (kernel_rates.TABLE, MEASURED)
    before = [table.read_bytes() for table in tables]
    told = bench("gpu", "--rehearse", "--only", "rates", "--write", str(file), "--commit", "abc", "--keep-rates")
    assert told.returncode == 0, told.stderr
    assert [table.read_bytes() for table in tables] == before, "a CPU's rates are none of a GPU's"
    text = section(file, "rates")
    assert {row[3] for row in rows(text)} >= {"70%", "50%", "80%", "75%"}, "each share of rates.py is compared"
    assert "Rehearsed on a CPU, which says nothing of a GPU," in text
    assert "at commit abc" in text
    assert section(file, "about").startswith("**Rehearsed on a CPU.**")
    assert section(file, "training") == section(file, "longest") == "old"


def test_rates_of_a_gpu_go_to_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of both passes, with the card and its peak; where the peak is unknown, none do, and that is said."""
    measured = kernel_rates.KernelRate("torch_flash", 10, 128, 4096, 500.0, 400.0, 2250.0, "", "2026-12-01")
    rates = [gpu_rates.Rate("forward", "ATTENTION", 500.0, "TFLOP/s", 2250.0, assumed=0.25),
             gpu_rates.Rate("backward", "ATTENTION", 400.0, "TFLOP/s", 2250.0, row=measured)]  # fmt: skip
    monkeypatch.setattr(gpu_rates, "_alone", lambda *_: rates)
    b200 = Machine("cuda", "NVIDIA B200", 1, 178 * GIB, "2.15", "580", "b200", known=True)
    text, wrong = gpu_rates.rates_section(b200, kernels=tmp_path / "rates.csv")
    assert [row[2:] for row in rows(text)] == [["22%", "25%"], ["18%", "50%"]]
    assert wrong == []
    assert "torch_flash,10,128,4096,500,400,2250,b200,2026-12-01\n" in (tmp_path / "rates.csv").read_text("utf-8")
    other = dataclasses.replace(b200, name="NVIDIA B300", known=False)
    _, (wrong,) = gpu_rates.rates_section(other, kernels=tmp_path / "none.csv")
    assert wrong.startswith("no rates of NVIDIA B300 were kept")
    assert not (tmp_path / "none.csv").exists()


def test_measured_rates_are_kept_for_the_estimates_to_come(tmp_path: Path) -> None:
    """Medians of a layer's products and of what moves bytes; those of other hardware stay."""
    found = [
        Rate("product, queries: 1", "PRODUCTS", 700.0, "TFLOP/s", 989.0),
        Rate("product, MLP up: 1", "PRODUCTS", 820.04, "TFLOP/s", 989.0),
        Rate("product, MLP down: 1", "PRODUCTS", 830.0, "TFLOP/s", 989.0),
        Rate("product, head: 1", "PRODUCTS", 600.0, "TFLOP/s", 989.0),
        *(Rate(name, "MEMORY", rate, "TB/s", 4.8) for name, rate in (("copy", 4.24), ("AdamW", 3.45), ("merge", 3.54))),
        Rate("launch of a kernel, in a bare loop", "", 7.5, "µs", 4.0),
        Rate("launch of a kernel, in a model's passes", "hardware.launch_us", 10.5, "µs", 4.0),
    ]
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"h100": {"launch_us": 1}}), "utf-8")
    machine = Machine("cuda", "NVIDIA H200, sm_90", 1, 139 * GIB, "2.11.0, CUDA 13.0", "580", "h200", known=True)
    write_kept(file, machine, kept(found))
    now = json.loads(file.read_text("utf-8"))
    assert now["h100"] == {"launch_us": 1}
    assert set(now["h200"]) == set(json.loads(MEASURED.read_text("utf-8"))["h200"])
    assert [now["h200"][name] for name in OF_SHEET] == [820.0, 3.54, 10.5]


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("engines", [("torch", "zero1"), tuple(ENGINES)], ids=" ".join)
def test_the_training_is_rehearsed(tmp_path: Path, engines: tuple[str, ...]) -> None:
    """Every memory option of these engines on two ranks: what is counted is what was predicted, to 2 %."""
    file = page(tmp_path)
    told = bench("gpu", "--rehearse", "--only", "training", "--engines", *engines, "--write", str(file))
    assert told.returncode == 0, told.stdout + told.stderr
    text = section(file, "training")
    trained, longest = text.split("The longest pair")
    assert [row[0].strip("`") for row in rows(trained)] == [
        name for name in engines for _ in range(2 * len(ENGINES[name].offload))
    ]
    (worst,) = re.findall(r"is at most ([+-][\d.]+)% off its prediction", trained)
    assert abs(float(worst)) < 2
    for row in rows(longest):
        predicted, measured = map(float, row[2:])
        assert measured <= predicted * 1.05 + 0.01, row


@pytest.mark.slow
@pytest.mark.prove
def test_the_tests_of_a_gpu_pass_on_the_cpu(tmp_path: Path) -> None:
    file = page(tmp_path)
    told = bench("gpu", "--rehearse", "--only", "tests", "--write", str(file), timeout=1800)
    assert told.returncode == 0, told.stdout + told.stderr
    (passed, total) = re.findall(r"(\d+) of (\d+) tests passed, 0 failed", section(file, "tests"))[0]
    assert int(passed) > 40
    assert int(total) > int(passed)


def test_a_part_of_flash_attn_has_the_heads_of_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    on = dataclasses.replace(stand_in(), device="cuda")
    monkeypatch.setattr(gpu_world, "gpu_generations", lambda: {9})
    monkeypatch.setattr(gpu_world, "installed", lambda _: True)
    monkeypatch.setattr(gpu_world, "find_spec", lambda _: True)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.8.3.post2+bf16.d64.d128.sm90")
    cases = [case for case in gpu_world.ring_cases(on) if "flash_attn" in " ".join(case.words)]
    assert {"kernel flash_attn", "ring-flash-attn, zigzag"} < {case.name for case in cases}
    for case in cases:
        model = compose_config(["launch.device=cpu", "launch.nproc=4", *case.exact]).model
        kernel = case.words[-1].partition("=")[2]
        size = model.hidden_size // model.heads
        assert takes(kernel if kernel.startswith("flash_attn") else "flash_attn", size, 9), case


def test_every_installed_kernel_is_a_case_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plain` needs no package; it is the only kernel that is not in the table of needs."""
    on = dataclasses.replace(stand_in(), device="cuda")
    monkeypatch.setattr(gpu_world, "gpu_generations", lambda: {9})
    assert {"kernel torch_flash", "kernel plain"} <= {case.name for case in gpu_world.ring_cases(on)}


def test_every_engine_is_a_case() -> None:
    assert {f"`{engine}`" for engine in ENGINES} <= {case.name for case in gpu_world.engine_cases(stand_in())}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["engines", "rings", "options", "commands", "verify"])
def test_the_whole_section_is_rehearsed(tmp_path: Path, name: str) -> None:
    file = page(tmp_path)
    told = bench("gpu", "--rehearse", "--only", name, "--write", str(file), timeout=900)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "failed" not in section(file, name)


def test_a_case_that_is_wrong_says_so_and_the_others_go_on(tmp_path: Path) -> None:
    """One with another gradient, one whose ranks fail, one that is refused, and one after them."""
    on = stand_in()
    words = {"other": "loss.beta=0.2", "bad": "optim.lr=1e30", "refused": "launch.collectives=nccl", "good": "seed=0"}
    cases = [gpu_world.Case(name, ("engine=torch", word), 2, "fp64") for name, word in words.items()]
    other, bad, refused, good = cases
    found = gpu_world.run_all(on, cases, tmp_path)
    assert gpu_world.wrong(on, good, found[good]) is None
    assert re.match(r"the (loss|gradient) is .* off, and may be 1e-12", str(gpu_world.wrong(on, other, found[other])))
    assert str(gpu_world.wrong(on, bad, found[bad])).startswith("failed: step 2: the gradient is not finite")
    assert str(gpu_world.wrong(on, refused, found[refused])).startswith("failed: launch.collectives=nccl: NCCL")
    text = gpu_world.table(on, found)
    assert text.startswith("1 of 4 cases are right.")
    assert [row[0] for row in rows(text)] == list(words)
    assert "| bad | **failed** |" in text


def test_a_rank_that_is_wrong_alone_is_not_overlooked() -> None:
    right = {"loss": 1e-16, "gradient": 1e-15}
    assert gpu_world.worst([right, right | {"gradient": 0.5}]) == right | {"gradient": 0.5}
    case = gpu_world.Case("nan", (), 2, "fp64")
    assert gpu_world.wrong(stand_in(), case, gpu_world.worst([right, right | {"loss": float("nan")}])) is not None
    assert gpu_world.worst([{"bits": True}, {"bits": False}]) == {"bits": False}


def forgetful_rank(spec: RankSpec, *args: Any) -> None:
    """Rank 2 leaves out a collective of the engine: the sum of the gradient's norm."""
    if spec.rank == 2:
        plant("rlexp.training.engine.fsdp2:FSDP2Engine.grad_norm", lambda _original, _engine: 1.0, lambda: None)
    gpu_world.train_rank(spec, *args)


def test_a_rank_that_leaves_out_a_collective_is_found_and_named(tmp_path: Path) -> None:
    """The others wait in it, and this rank begins the next. gloo ends a process whose message is longer than it asked
    for; where it is not, all wait."""
    on = stand_in()
    case = gpu_world.Case("forgetful", ("engine=fsdp2", "launch.timeout_seconds=3"), 2, "fp64", short=True)
    found = gpu_world.run_all(on, [case], tmp_path, forgetful_rank)
    assert re.search("rank 2 failed: the process was killed|Behind the others: rank 2", found[case]["failed"])


# ---- what is said of what was found ----


def test_a_failed_engine_leaves_the_others_their_rows() -> None:
    one, other, third = (Option(name, "false", "none") for name in ("torch", "zero1", "fsdp2"))
    foretold = {each: Foretold({"build": GIB, "forward": 10 * GIB}, 1.0) for each in (one, other, third)}
    measured: dict[Option, dict[str, Any]] = {
        one: {"peaks": {"build": GIB, "forward": int(10.4 * GIB)}, "seconds": [9.0, 2.0, 3.0]},
        other: {"failed": "CUDA out of memory"},
        third: {"peaks": {"build": GIB, "forward": 11 * GIB}, "seconds": [9.0, 2.0, 3.0]},
    }
    lines, wrong = gpu_training.table([one, other, third], foretold, measured)
    assert "10 / 10.4" in lines[2]
    assert "1 / 2 |" in lines[2]
    assert wrong == [f"{other.key} failed: CUDA out of memory", f"{third.key}: the peak is +10.0% off its prediction"]
    assert "at most +10.0% off" in "\n".join(lines)


@pytest.mark.parametrize(("gib", "name"), [(139.8, "Llama 8B"), (79.1, "Llama 1B"), (23.5, "SmolLM2 135M")])
def test_the_model_is_as_large_as_the_memory_allows(gib: float, name: str) -> None:
    shape = gpu_training.shape_for(int(gib * GIB))
    assert shape.name == name
    assert shape.layers in gpu_training.LAYERS
    assert (shape.ends + shape.layers * shape.layer) * gpu_training.HELD <= gpu_training.SHARE * gib * GIB


def test_an_unknown_gpu_is_predicted_as_another_and_says_so() -> None:
    machine = Machine("cuda", "NVIDIA X1", 6, 40 * GIB, "2.11", "580", "h100", known=False)
    assert "conf/hardware does not describe it: predicted as h100" in machine.about()
    assert machine.words == ("hardware=h100", "hardware.memory_gib=40.0000")
    assert machine.ring == 4


# ---- the longest pair ----


def test_the_page_has_a_row_for_every_engine_and_memory_option() -> None:
    found = rows(section(PAGE, "longest"))
    assert [row[0].strip("`") for row in found] == [option.engine for option in gpu_longest.options()]
    assert {row[1] for row in found} >= {f"checkpointing, {name}" for name in gpu_longest.ALSO.values()}
    assert [row[1] for row in found] == [option.memory for option in gpu_longest.options()]
    for row in found:
        assert len(row) == 3 + len(RINGS)
        for cell in row[2:6]:
            assert re.fullmatch(r"[\d,]+|none \([\d.]+ GiB\)|refused|not predicted yet", cell), row
        engine, refused = row[0].strip("`"), row[2] == "refused"
        offload = {"offload optimizer": "optimizer", "offload optimizer and parameters": "all"}
        asked = next((value for name, value in offload.items() if row[1].endswith(name)), "none")
        assert refused == (asked not in ENGINES[engine].offload) or "not predicted yet" in row
        if refused:
            assert f"engine={engine} cannot" in row[-1]


@pytest.mark.parametrize("also", ["", *gpu_longest.ALSO])
def test_what_make_predict_asks_composes(also: str) -> None:
    """Else each of its cells would be a refusal, and the page would say so."""
    cfg = gpu_longest._composed((*gpu_longest.LLAMA, *gpu_longest.ON), Option("torch", "true", "none", also), RINGS[0])
    assert not isinstance(cfg, str), cfg


def test_longer_rings_fit_longer_pairs_on_the_page() -> None:
    for row in rows(section(PAGE, "longest")):
        lengths = [int(cell.replace(",", "")) for cell in row[2:6] if re.fullmatch(r"[\d,]+", cell)]
        assert lengths == sorted(lengths), row
        assert not lengths or row[-1] != "–"


def test_the_page_says_how_much_was_measured_on_a_gpu() -> None:
    measured = [name for name in gpu.SECTIONS if "NVIDIA" in section(PAGE, name)]
    said = "**Measured.**" if len(measured) == len(gpu.SECTIONS) else "**Measured in part.**"
    assert section(page_of(PAGE), "about").startswith(said if measured else "**No GPU has run this yet.**")


TINY = ("model=tiny", "model.layers=2", "hardware=h100", "launch.nproc=8", "logger=none", "hardware.memory_gib=0.2",
        "hardware.reserve_gib=0")  # fmt: skip


def test_a_prediction_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are kept one by one. Those of other code are not taken up again; a failure is told from a refusal."""
    asked: list[tuple[str, int]] = []

    def row(option: Option, left: list[int], _words: Any, _hints: Any, keep: Any) -> Any:
        yield [(int, ())]
        for ring in left:
            asked.append((option.engine, ring))
            if len(asked) == 3:
                raise KeyboardInterrupt
            keep(option, ring, {"tokens": 1024 * ring, "peak_gib": 1.0, "phase": "forward"})

    monkeypatch.setattr(gpu_longest, "_row", row)
    monkeypatch.setattr("rlexp.preflight.rehearsal.rehearse.preload", lambda: None)
    file = tmp_path / "folder" / "state.json"
    chosen = [Option("fsdp2", "true", "none"), Option("fsdp2", "true", "all")]
    with pytest.raises(KeyboardInterrupt):
        gpu_longest.predict_longest(chosen, file, words=TINY, processes=1)
    half = gpu_longest.report(gpu_longest.read(file), chosen)
    assert "2 of 8 cells are not predicted yet" in half
    assert "| `fsdp2` | checkpointing | not predicted yet | not predicted yet | 4,096 | 8,192 | forward |" in half
    known = gpu_longest.predict_longest(chosen, file, words=TINY, processes=1)
    assert asked == [("fsdp2", 8), ("fsdp2", 4), ("fsdp2", 2), ("fsdp2", 2), ("fsdp2", 1)]
    whole = gpu_longest.table(known, chosen)
    assert "| `fsdp2` | checkpointing | 1,024 | 2,048 | 4,096 | 8,192 | forward |" in whole
    assert "refused | refused | refused | refused | engine.offload=all: engine=fsdp2 cannot |" in whole
    said = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps(said | {"code": "other"}), "utf-8")
    assert gpu_longest.read(file) == {}


def test_what_bounds_a_row() -> None:
    def cell(phase: str, tokens: int = 1024) -> dict[str, Any]:
        return {"tokens": tokens, "peak_gib": 93.25, "phase": phase}

    chosen = [Option("zero0", "false", "none"), Option("torch", "false", "none")]
    known = {
        chosen[0].key: {"1": cell("backward", 0), "2": cell("backward"), "4": cell("forward"), "8": cell("forward")},
        chosen[1].key: {"1": {"failed": "TypeError: x | y"}},
    }
    one, other = rows(gpu_longest.table(known, chosen))
    assert one[2:] == ["none (93.2 GiB)", "1,024", "1,024", "1,024", "backward (ring 1, 2), forward (ring 4, 8)"]
    assert other[2:4] == ["failed", "not predicted yet"]
    assert other[-1].startswith("TypeError: x")


@pytest.mark.slow
def test_a_row_is_predicted(tmp_path: Path) -> None:
    """For a small model on GPUs of 0.2 GiB: longer on longer rings, and as bisection says."""
    chosen = [Option("torch", "true", "none")]
    code = (
        "from pathlib import Path; from bench import gpu_longest; "
        "from rlexp.preflight import quietly; quietly(); "
        f"gpu_longest.predict_longest([gpu_longest.Option('torch', 'true', 'none')], Path({str(tmp_path / 's')!r}), "
        f"words={TINY!r}, processes=1)"
    )
    done = python("-c", code, timeout=500)
    assert done.returncode == 0, done.stderr
    cells = gpu_longest.read(tmp_path / "s")[chosen[0].key]
    lengths = [cells[str(ring)]["tokens"] for ring in sorted(RINGS)]
    assert lengths == sorted(lengths)
    assert lengths[0] > 0
    assert {cell["phase"] for cell in cells.values()} <= {"forward", "backward", "reference", "optimizer", "build"}
    assert all(cell["peak_gib"] <= 0.2 for cell in cells.values())
