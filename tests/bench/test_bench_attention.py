"""bench.gpu_attention (where only torch is installed) and bench.attention run on CPU, and simulate a ring correctly."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import attention, gpu_attention, simulate, together
from rlexp.training.ring.kernels import CpuFlash, Plain
from rlexp.training.ring.layouts import get_layout
from tests.helpers.paths import ROOT
from tests.helpers.programs import bench, python
from tests.helpers.ranks import seeded

LAYOUTS = ("zigzag", "contiguous", "allgather", "ulysses", "hybrid, ulysses 2 × zigzag")


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_it_runs_on_cpu_where_only_torch_is_installed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- gpu: begin -->\nold\n<!-- gpu: end -->\nafter\n", encoding="utf-8")
    code = (
        "import runpy, sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in {'hydra', 'omegaconf', 'deepspeed', 'wandb', 'transformers'}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"sys.argv = ['gpu', '--device', 'cpu', '--quick', '--write', {str(page)!r}]\n"
        "runpy.run_module('bench.gpu_attention', run_name='__main__')"
    )
    answer = python("-c", code, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- gpu: begin -->\nMeasured ")
    assert text.endswith("<!-- gpu: end -->\nafter\n")
    assert "old" not in text
    assert "by a model, not measured, with 450 GB/s" in text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    windows = {(row[0], row[2]): (row[3], float(row[5])) for row in rows if row[3].endswith("%")}
    assert {key: pairs for key, (pairs, _) in windows.items() if key[1] == "128"} == {
        ("256", "128"): "74.9%", ("512", "128"): "43.7%",
    }  # fmt: skip
    assert windows["256", "none"][0] == windows["512", "none"][0] == "100.0%"
    for pack in ("one sequence", "mix"):
        shown = [row for row in rows if row[0] == pack]
        assert [row[2] for row in shown if row[1] == "4"] == list(LAYOUTS)
        for row in shown:
            assert float(row[3]) > 0
            assert all(re.fullmatch(r"\d+%", cell) for cell in row[4:7]), row
    found = [row for row in rows if row[0].endswith(", ring of 4")]
    errors = {row[0].removesuffix(", ring of 4"): [float(cell) for cell in row[1:]] for row in found}
    assert list(errors) == list(LAYOUTS)
    for ratios in errors.values():  # measured: 0.88 to 1.17
        assert all(0.5 < ratio < 2 for ratio in ratios), errors


def test_a_table_that_fails_says_so_and_the_others_are_there(tmp_path: Path) -> None:
    """The table of errors fails because the ring does not divide its pack."""
    page = tmp_path / "page.md"
    page.write_text("<!-- gpu: begin -->\n<!-- gpu: end -->\n", encoding="utf-8")
    short = ("--quick", "--rings", "4", "--kernel-tokens", "16", "--tokens", "64", "--error-tokens", "250")
    answer = bench("gpu_attention", "--device", "cpu", *short, "--commit", "abc", "--write", str(page))
    assert answer.returncode == 1
    text = page.read_text(encoding="utf-8")
    assert "at commit abc on" in text
    assert "The table of errors failed: AssertionError: tokens must be a multiple of the ring" in text
    assert "### Kernels" in text
    assert "### Windows" in text
    assert "### Layouts" in text
    assert "Traceback" in answer.stderr


def test_a_window_is_timed_by_the_call_that_a_layer_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = simulate.Sizes(4, 2, 8, torch.float64, torch.device("cpu"))
    q, k, v, dout = inputs = sizes.drawn(40)
    got = gpu_attention.kernel_call(CpuFlash(), inputs, [40], sizes, window=7)
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    apart = torch.arange(40)[:, None] - torch.arange(40)
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in given), attn_mask=(apart >= 0) & (apart < 7), enable_gqa=True
    ).transpose(0, 1)
    for one, other in zip(got, (out, *torch.autograd.grad(out, given, dout)), strict=True):
        assert (one - other).abs().max() < 1e-13  # measured: 2e-15; a window off by one moves it by over 0.01
    asked: list[object] = []
    monkeypatch.setattr(gpu_attention, "kernel_call", lambda *_, window, **__: asked.append(window))
    options = gpu_attention.Options(sizes, (512,), 64, 64, (2,), 1, 1.0, 1.0)
    gpu_attention.window_table(options)
    assert set(asked) == {None, 128}


def test_it_says_that_there_is_no_gpu() -> None:
    answer = bench("gpu_attention")
    assert answer.returncode == 1
    assert answer.stderr.startswith("bench.gpu_attention: no GPU is visible. Use --device cpu --quick")


def test_a_rank_alone_does_and_sends_what_it_would_in_its_ring(one_thread: None) -> None:
    """Compare steps and bytes with counts by hand: 64 tokens, 4 ranks, 4 query and 2 key/value heads of 8 floats.

    The first rank of a zigzag is seen by later ones with half of what it holds, and the last one by all with all."""
    sizes = simulate.Sizes(4, 2, 8, torch.float32, torch.device("cpu"))
    tokens, ranks, head = 16, 4, 8 * 4
    keys = 2 * tokens * 2 * head  # keys and values of a rank
    expected = {
        # What later ranks see of this one's keys and values, twice, and the gradients of what it sees of earlier ones'.
        ("zigzag", 1): (4, 5, [keys // 2 * (2 * (3 + rank) + 6 - rank) for rank in range(4)]),
        ("contiguous", 1): (4, 5, [(2 * (3 - rank) + rank) * keys for rank in range(4)]),
        # To 3 others, twice; their gradients from 3 others once.
        ("allgather", 1): (1, 1, [(3 + 3 + 3) * keys] * 4),
        # 3 of 4 parts of 4 heads each of q, k, v, out, dout, dq, dk and dv, as k and v go to each of the ranks that
        # need them; of the gradients those of keys go back apart, since they are added up.
        ("ulysses", 4): (4, 5, [8 * tokens * 4 * head * 3 // 4] * 4),
    }
    for (name, inner), (forward, backward, by_rank) in expected.items():
        layout = get_layout(name, inner)
        segments = simulate.packed([64], layout.multiple(ranks))
        for rank in range(ranks):
            alone = simulate.Alone(layout, segments, ranks, rank, CpuFlash(), sizes)
            alone.play()
            alone.play()
            trace = alone.trace()
            assert (len(trace.forward), len(trace.backward), trace.sent()) == (forward, backward, by_rank[rank]), name
            assert trace.seconds() > 0
            assert math.isclose(simulate.in_ring([trace.steps]), trace.seconds())


def test_a_ring_is_as_fast_as_its_slowest_rank_step_by_step() -> None:
    def rank(*seconds: float) -> list[list[simulate.Piece]]:
        """A rank that sends 100 bytes at the begin of each step and waits for them at its end."""
        return [
            [simulate.Piece(0.0, "between", number, 100, False), simulate.Piece(time, "between", number, None, True)]
            for number, time in enumerate(seconds)
        ]

    ranks = [rank(3.0, 1.0), rank(1.0, 2.0)]
    assert simulate.in_ring(ranks) == 5.0
    assert simulate.in_ring(ranks, {"between": 100.0}) == 5.0  # a second each, hidden
    assert simulate.in_ring(ranks, {"between": 40.0}) == 3.0 + 2.5
    assert simulate.in_ring(ranks, {"between": 10.0}) == 20.0


def test_ranks_together_compute_attention(one_thread: None) -> None:
    """Compare whole packs by all layouts in one process with the plain kernel, in float64; measured 1e-15."""
    sizes = simulate.Sizes(8, 2, 8, torch.float64, torch.device("cpu"))
    lengths = [37, 3, 24]
    inputs = [seeded(64, heads, 8, seed=number) for number, heads in enumerate((8, 2, 2, 8))]
    how = (simulate.call_of(lengths, lengths, True), sizes.scale)
    out, lse = Plain().forward(*inputs[:3], *how)
    expected = [out, *Plain().backward(inputs[3], *inputs[:3], out, lse, *how)]
    for name, inner in (("zigzag", 1), ("contiguous", 1), ("allgather", 1), ("ulysses", 4), ("hybrid", 2)):
        layout = get_layout(name, inner)
        segments = simulate.packed(lengths, layout.multiple(4))
        found = together.whole_ring(layout, segments, 4, CpuFlash(), sizes, inputs)
        for got, wanted in zip(found, expected, strict=True):
            assert (got - wanted).abs().max() / wanted.abs().max() < 1e-13, name


@pytest.mark.slow
def test_every_layout_is_in_the_tables_of_cpu(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LONG": (600,), "MIX": (300, 40, 1), "SHORT": 200, "ROUNDS": 1, "RINGS": (2, 4)}.items():
        monkeypatch.setattr(attention, name, value)
    for text, rings, columns in ((attention.work(), 2, 2), (attention.mix(), 1, 1)):
        rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| \w.* \| \d", line)]
        assert [row[0] for row in rows] == [name for name in LAYOUTS[:-1] for _ in range(rings)] + [LAYOUTS[-1]]
        for row in rows:
            numbers = [
                (float(work), float(share.rstrip("%"))) for work, share in zip(row[2::2], row[3::2], strict=True)
            ]
            assert len(numbers) == columns
            # The slowest rank of every step is not faster than all of them in the mean; both are rounded.
            assert all(0 < share <= 100 / (work - 0.005) + 0.5 for work, share in numbers), row
