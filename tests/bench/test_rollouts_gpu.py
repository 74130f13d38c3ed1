"""What measures rollouts by vLLM: over the mock of vLLM, and where a real one is installed, by that."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import gpu, rollouts_gpu, vllm_alone, vllm_cases, vllm_curves, vllm_speed, vllm_tokens, vllm_weights
from bench.gpu_here import stand_in
from bench.gpu_training import Result, write_model
from bench.vllm_cases import NOT_RUN, TINY, Kept, Setup, Size
from bench.vllm_curves import SEEDS, WAYS
from rlexp.config.checks import vllm as checks
from rlexp.config.hardware import assumed_gpus
from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec
from rlexp.launch.local import run_ranks
from tests.helpers import mock_vllm
from tests.helpers.paths import ROOT
from tests.helpers.programs import bench

PAGE = ROOT / "docs" / "measured" / "rollouts_gpu.md"
SMALL = Size("tiny", TINY, 3, 2, 9, 5, 200)
ON_GPU = replace(stand_in(), device="cuda", name="a GPU", gpus=1)


def setup(tmp_path: Path, **more: Any) -> Setup:
    return Setup(stand_in(), Kept(None, ""), tmp_path, **more)


# ---- the command ----


def test_without_a_gpu_it_says_so_and_changes_nothing(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    before = PAGE.read_bytes()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", ["bench.rollouts_gpu", "--write", str(PAGE)])
    assert rollouts_gpu.main() == gpu.NO_GPU
    assert capsys.readouterr().err.startswith("bench.rollouts_gpu: no GPU is visible on this machine")
    assert PAGE.read_bytes() == before


def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.rollouts_gpu", "--rehearse"])
    monkeypatch.setattr(rollouts_gpu, "find_spec", lambda _: None)
    assert rollouts_gpu.main() == gpu.NO_GPU
    assert capsys.readouterr().err == "bench.rollouts_gpu: vllm is not installed. Nothing was changed.\n"


def test_the_page_has_every_section_and_says_where_it_was_measured() -> None:
    text = PAGE.read_text("utf-8")
    parts = dict(re.findall(r"<!-- (\w+): begin -->\n(.*?)<!-- \1: end -->", text, re.DOTALL))
    assert {*parts} == {
        "about",
        "learning",
        "pipeline",
        *rollouts_gpu.SECTIONS,
    }  # the latter two by programs of their own
    for name in filter(parts.get, rollouts_gpu.SECTIONS):  # one that was never run is empty
        assert ("NVIDIA" in parts[name]) != ("Rehearsed on a CPU, which says nothing of a GPU," in parts[name]), name
    assert ("**Measured.**" in parts["about"]) == ("NVIDIA" in parts["about"])


def test_what_is_written_names_the_command_and_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_setup: Setup) -> Any:
        raise ValueError("out of order")

    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- {name}: begin -->\n<!-- {name}: end -->\n" for name in ("about", "sleep", "rings")))
    monkeypatch.setitem(rollouts_gpu.SECTIONS, "rings", broken)
    monkeypatch.setattr(rollouts_gpu, "find_spec", lambda _: True)
    words = ["--rehearse", "--only", "rings", "sleep", "--write", str(page), "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", ["bench.rollouts_gpu", *words])
    assert rollouts_gpu.main() == 1
    text = page.read_text("utf-8")
    assert "The section of rings failed: ValueError: out of order" in text
    assert "vLLM has no sleep on a CPU: not measured." in text
    assert "at commit abc, by `python -m bench.rollouts_gpu --only sleep`" in text
    assert re.search(r"on \d+ cores of .*, torch [\d.]+.*transformers [\d.]+\.", text)
    assert "**Rehearsed on a CPU.**" in text
    capsys.readouterr()


# ---- cases ----


def test_a_case_is_kept_and_one_that_failed_is_tried_again(tmp_path: Path) -> None:
    file, calls = tmp_path / "state.json", list[str]()

    def work(name: str) -> Result:
        calls.append(name)
        if len(calls) == 2:
            raise RuntimeError("out of memory\nand more")
        return {"seconds": 1.0}

    first = Setup(stand_in(), Kept(file, "this card"), tmp_path)
    assert [first.tried(name, work, name) for name in "ab"] == [
        {"seconds": 1.0}, {"failed": "RuntimeError: out of memory"},
    ]  # fmt: skip
    again = Setup(stand_in(), Kept(file, "this card"), tmp_path)
    assert [again.tried(name, work, name) for name in "ab"] == [{"seconds": 1.0}] * 2
    assert calls == ["a", "b", "b"]
    assert Kept(file, "another card").results == {}
    late = replace(first, kept=Kept(None, ""), until=time.monotonic() - 1)
    assert late.tried("c", work, "c") == {"failed": NOT_RUN}


def test_the_model_of_a_billion_has_its_head_once(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shape = replace(vllm_cases.LLAMA, width=32, between=48, heads=2, kv_heads=1, vocabulary=300, layers=1)
    write_model(tmp_path, shape, "bfloat16")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    whole = vllm_cases.LLAMA
    assert 1.2e9 < whole.layers * whole.layer + whole.ends / 2 < 1.3e9


@dataclass(frozen=True)
class Measured:
    """What a rank of a test has measured."""

    speed: Result
    handed: Result
    slept: Result
    tokens: Result
    told: list[str]


def rank(spec: RankSpec, cfg: Config) -> Measured:
    """Measure all that a rank measures, over the mock, in one process."""
    sys.modules.update(mock_vllm.modules())
    task = vllm_cases.joined_task(spec, cfg)
    slept = vllm_weights.slept(task)
    drawer = vllm_cases.drawer_of(task)
    made = task.rollouts.ensure(vllm_weights.STEPS + 1)
    row = {name: made.values[own] for name, own in vllm_tokens.ROW.items()}
    tokens = {"row": row, "hand": vllm_tokens.by_hand(task, task.rollouts.own_samples)}
    tokens["orders"] = vllm_tokens.in_orders(task)
    return Measured(
        vllm_speed.measured(task, SMALL), vllm_weights.handed_over(task), slept, tokens, list(drawer._llm.told)
    )


@pytest.fixture(scope="module")
def measured() -> Measured:
    words = ["launch.device=cpu", *vllm_cases.COMMON, *TINY, *SMALL.sized(), "rollout.vllm_sleep=true",
             "rollout.vllm_memory=0.1", "train.max_steps=8", "data.size=40"]  # fmt: skip
    cfg = compose_config(words)
    sampled = replace(cfg, rollout=replace(cfg.rollout, engine=type(cfg.rollout.engine).vllm))  # none is installed
    (found,) = run_ranks(rank, 1, (sampled,), timeout=240)
    assert isinstance(found, Measured)
    return found


def test_the_speed_has_its_parts(measured: Measured) -> None:
    speed = measured.speed
    for name in ("through", "top_p", "likeliest"):
        each = speed[name]
        assert {*each} == {"adding", "steps", "samples", "whole"}
        assert 0 < each["adding"] + each["steps"] + each["samples"] <= each["whole"]
    assert speed["likeliest"]["samples"] < speed["through"]["samples"], "nothing is checked without our chooser"
    assert speed["native"] > 0


def test_the_hand_over_stands_beside_plain_copies(measured: Measured) -> None:
    handed = measured.handed
    assert handed["weights"] == 124_096
    assert all(handed[name] > 0 for name in ("first", "later", "yielding", "masters", "same"))


def test_each_rollout_wakes_and_sleeps(measured: Measured) -> None:
    slept = measured.slept
    assert {*slept} == {"used", "samples", "sleep", "wake"}
    assert measured.told[:5] == [
        "sleep 2", "wake_up ['weights']", "collective_rpc", "wake_up ['kv_cache']", "reset_prefix_cache",
    ]  # fmt: skip
    assert len(slept["samples"]) == SMALL.prompts * SMALL.samples


def test_the_gap_by_hand_is_that_of_the_row(measured: Measured) -> None:
    """The mock's model is another than the policy: the gap is large, and of every token."""
    row, hand = measured.tokens["row"], measured.tokens["hand"]
    assert row["mean"] > 0.1
    for name in vllm_tokens.ROW:
        assert row[name] == pytest.approx(hand[name], rel=1e-4), name


def test_no_order_of_the_requests_changes_a_sample(measured: Measured) -> None:
    orders = measured.tokens["orders"]
    assert {*orders} == {"at once", "again", "in two halves", "backwards"}
    assert all(each == orders["at once"] for each in orders.values())
    assert len({*orders["at once"]}) > 1


def test_a_plain_vllm_is_asked_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class LLM:
        def __init__(self, **options: Any) -> None:
            assert options["gpu_memory_utilization"] == 0.3
            assert options["model"] == "a folder"

        def reset_prefix_cache(self) -> None: ...

        def generate(self, prompts: list[Any], params: Any, **_: Any) -> list[Any]:
            asked.append((prompts, vars(params)))
            answer = SimpleNamespace(token_ids=[0] * params.max_tokens)
            return [SimpleNamespace(outputs=[answer]) for _ in prompts]

    package = ModuleType("vllm")
    package.__dict__.update(LLM=LLM, SamplingParams=lambda **options: SimpleNamespace(**options))
    monkeypatch.setitem(sys.modules, "vllm", package)
    seconds = vllm_alone.alone({
        "model": "a folder", "dtype": "bfloat16", "max_length": 20, "prompts": [[1], [2]], "samples": 2, "new": 3,
        "repeats": 1, "more": {"gpu_memory_utilization": 0.3},
    })  # fmt: skip
    assert {*seconds} == {"plain", "logps", "top_p"}
    assert len(asked) == 6
    prompts, params = asked[-1]
    assert [each["prompt_token_ids"] for each in prompts] == [[1], [1], [2], [2]]
    assert params == {"temperature": 1.0, "max_tokens": 3, "ignore_eos": True, "detokenize": False, "top_p": 0.9}


def test_what_a_gpu_would_run_composes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else its time would be lost over a refusal."""
    monkeypatch.setattr(checks, "_check_installed", lambda _: None)
    monkeypatch.setattr(vllm_cases, "LLAMA", replace(vllm_cases.LLAMA, width=64, between=64, vocabulary=300, layers=1))
    asked: list[Sequence[str]] = []

    def on_rank(_: Any, _target: Any, words: Sequence[str], *_more: Any) -> Result:
        asked.append(words)
        return {"failed": "not here"}

    monkeypatch.setattr(Setup, "on_rank", on_rank)
    monkeypatch.setattr(vllm_speed, "alone", lambda *_: {"failed": "not here"})
    monkeypatch.setattr(vllm_curves, "command", lambda words, *_: asked.append(words))
    monkeypatch.setattr(vllm_curves, "said", lambda _: {"failed": "not here"})
    on = Setup(ON_GPU, Kept(None, ""), tmp_path)
    for section in rollouts_gpu.SECTIONS.values():
        section(on)
    with assumed_gpus(1):
        for words in asked:
            cfg = compose_config([*(() if "launch.preflight=off" in words else on.words()), *words])
            assert cfg.launch.device.value == "cuda"
            assert cfg.launch.ranks_per_gpu == cfg.launch.nproc
            assert cfg.train.precision.value in vllm_tokens.PRECISIONS
            assert cfg.rollout.sampling_ranks == (cfg.rollout.mode.value == "pipelined")
    curves = len(WAYS) * len(SEEDS)
    assert len(asked) == 2 + len(vllm_weights.POLICIES) + curves + 4 + len(vllm_tokens.RINGS) + 2


# ---- what is said ----


def curves(shift: float) -> dict[tuple[str, int], Result]:
    """Three seeds of each way, and those of vLLM higher by so much."""
    found = {}
    for way in WAYS:
        for seed in SEEDS:
            rewards = [0.5 + 0.01 * seed + shift * way.vllm + 0.001 * step for step in range(12)]
            samples = [[seed, 1 + way.vllm * (step > 5)] for step in range(12)]
            found[way.name, seed] = {"rewards": rewards, "rollout": 0.5, "samples": samples, "seconds": 1.0}
    return found


@pytest.mark.parametrize(("shift", "wrong"), [(0.0, 0), (0.03, 0), (0.04, 4)])
def test_a_curve_that_lies_beyond_the_noise_is_found(shift: float, wrong: int) -> None:
    """The seeds' standard deviation is 0.01: the means may be 4.303 × 0.01 × √(2/3) = 0.0351 apart."""
    lines, found = vllm_curves.table(curves(shift))
    assert len(found) == wrong
    text = "\n".join(lines)
    assert f"vLLM is {shift:.4f} from native in the last rollouts, and may be 0.0351" in text
    row = next(line for line in lines if line.startswith("| vLLM | 0 |"))
    assert row.endswith("| 0.50 | 100.0% | 75.0% |")


def test_a_run_that_failed_leaves_the_others_their_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = curves(0.0)

    def run(_setup: Setup, way: Any, seed: int, _starting: Any) -> Result:
        if (way.name, seed) == ("vLLM", 1):
            raise RuntimeError("out of memory")
        return known[way.name, seed]

    monkeypatch.setattr(vllm_curves, "run", run)
    text, wrong = vllm_curves.curves_section(setup(tmp_path), tmp_path / "curves.png")
    assert wrong == ["curve of vLLM, seed 1: RuntimeError: out of memory"]
    assert "No numbers of curve of vLLM, seed 1: RuntimeError: out of memory." in text
    assert text.count("| vLLM |") == 2
    assert "vLLM, pipelined is 0.0000 from native, pipelined" in text
    assert "vLLM is 0.0000" not in text, "three seeds are compared, or none"
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_slow_rollout_misses_its_goal(tmp_path: Path) -> None:
    def parts(whole: float) -> Result:
        return {"whole": whole, "steps": 0.8 * whole, "adding": 0.1 * whole, "samples": 0.05 * whole}

    on = Setup(ON_GPU, Kept(None, ""), tmp_path)
    size = vllm_cases.sizes(on)[0]
    alone = {"plain": 1.0, "logps": 1.1, "top_p": 1.2}
    found = {f"{each.name}, {how}": {"failed": "x"} for each in vllm_cases.sizes(on) for how in ("alone", "through")}
    for whole, right in ((1.1, True), (1.25, False)):
        through = {"through": parts(whole), "top_p": parts(1.5), "likeliest": parts(0.9 * whole), "native": 5.5}
        lines, wrong = vllm_speed.table(on, found | {f"{size.name}, alone": alone, f"{size.name}, through": through})
        assert (wrong == []) == right
    row = next(line for line in lines if line.startswith(f"| {size.name} |"))
    rates = [f"{size.tokens / seconds:,.0f}" for seconds in (1.0, 1.1, 1.25)]
    assert row == f"| {size.name} | {' | '.join(rates)} | 0.80 | {size.tokens / 5.5:,.0f} | 4.4 |"
    assert f"| {size.name} | 1.25 | 10.0% | 80.0% | 10.0% | 5.0% | 1.5 |" in lines


def test_a_slow_hand_over_misses_its_goal(tmp_path: Path) -> None:
    on = Setup(ON_GPU, Kept(None, ""), tmp_path)
    found = {
        "`torch`": {"weights": 1.2e9, "first": 1.0, "later": 0.01, "yielding": 0.001, "masters": 0.004, "same": 0.003},
        "`zero1`": {"weights": 1.2e9, "first": 1.0, "later": 0.02, "yielding": 0.001, "masters": 0.004, "same": 0.003},
    }
    lines, wrong = vllm_weights.handover_table(on, vllm_cases.sizes(on)[-1], found)
    assert wrong == ["`zero1`: a later hand-over takes 5.0 times a plain copy, and may take 3"]
    assert "| `torch` | 1.200 | 1 | 0.01 | 0.001 | 0.004 | 0.003 | 2.5 |" in lines


def test_a_gap_that_another_model_does_not_have_is_found() -> None:
    values = {"mean": 0.01, "largest": 0.2, "beyond": 0.0, "tokens": 0.99, "answers": 0.9}
    orders = {name: [1, 2] for name in ("at once", "again", "in two halves")} | {"backwards": [1, 3]}
    right = {"row": values, "hand": values | {"mean": 0.015}, "orders": orders}
    other = right | {"hand": values | {"mean": 0.03}}
    found: dict[str, Result] = {"vLLM, bf16": right, "vLLM, fp32": other}
    lines, wrong = vllm_tokens.gap_table(found)
    assert wrong == ["vLLM, fp32: the mean gap is 1.0e-02 in the row, and by hand 3.0e-02"]
    assert "| vLLM | bf16 | row | 1.0e-02 | 2.0e-01 | 0.00% | 0.9900 | 0.9000 |" in lines
    assert "| vLLM | bf16 | 100.0% | 100.0% | 50.0% |" in vllm_tokens.orders_table(found)


def test_the_five_values_of_a_gap_are_those_of_their_formulas() -> None:
    found = vllm_tokens.gap_of([np.array([0.0, 0.3]), np.array([-0.1])])
    weights, answers = np.exp([0.0, 0.3, -0.1]), np.exp([0.3, -0.1])
    assert found["mean"] == pytest.approx(0.4 / 3)
    assert (found["largest"], found["beyond"]) == (0.3, pytest.approx(1 / 3))
    assert found["tokens"] == pytest.approx(weights.sum() ** 2 / 3 / (weights**2).sum())
    assert found["answers"] == pytest.approx(answers.sum() ** 2 / 2 / (answers**2).sum())


def test_runs_on_other_rings_stand_beside_the_first() -> None:
    base = [[1, 2], [3, 4], [5, 6], [7, 8]]
    others = [[1, 2], [3, 4], [5, 9], [9, 9]]
    found: dict[str, Result] = {
        f"{name}, bf16": {"samples": base if name == "vLLM, ring 1" else others} for name in vllm_tokens.RINGS
    }
    lines = vllm_tokens.rings_table(found, ["bf16"])
    assert "| vLLM, ring 2 | bf16 | 100.0% | 100.0% | 50.0% | 0.0% |" in lines
    assert len(lines) == 4 + len(vllm_tokens.RINGS) - 1


def test_what_sleep_gives_back_is_shown(tmp_path: Path) -> None:
    on = Setup(ON_GPU, Kept(None, ""), tmp_path)
    found: dict[str, Result] = {
        "awake": {"used": 60 * 2**30, "samples": [1, 2]},
        "asleep": {"used": 36 * 2**30, "samples": [1, 2], "sleep": 0.25, "wake": 0.5},
    }
    lines = vllm_weights.sleep_table(on, vllm_cases.sizes(on)[-1], found)
    assert lines[-2:] == ["| awake | 60.0 | – | – | 100.0% |", "| asleep | 36.0 | 0.25 | 0.50 | 100.0% |"]


# ---- whole ----


@pytest.mark.slow
def test_a_curve_is_that_of_its_command(tmp_path: Path) -> None:
    found = vllm_curves.run(setup(tmp_path, short=True), WAYS[0], 0)
    assert len(found["rewards"]) == len(found["samples"]) == 3
    assert all(len(each) == 64 for each in found["samples"])
    assert found["rollout"] > 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vllm is installed: make test-vllm")
def test_it_is_rehearsed_by_a_real_vllm(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    told = bench(
        "rollouts_gpu", "--rehearse", "--short", "--only", "handover", "tokens", "speed", "--state", str(state)
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert "No numbers of" not in told.stdout
    found = json.loads(state.read_text("utf-8"))["results"]
    assert len(found) == len(vllm_weights.POLICIES) + 4 + 2
    assert found["tokens of vLLM, fp32"]["hand"]["largest"] < 1e-5
