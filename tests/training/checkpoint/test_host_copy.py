"""The copy of a state on its way to a file: whole with any memory, and no more memory than it may take."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from rlexp.launch import watch
from rlexp.training.checkpoint import host_copy
from rlexp.training.checkpoint.host_copy import LEAST, HostCopy, Laid, sizes
from rlexp.training.checkpoint.saver import share
from rlexp.training.engine.base import Fragment

KINDS = (torch.float64, torch.float32, torch.bfloat16)


def state(seed: int, lengths: list[int]) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {f"weight/{n}": torch.randn(each).to(KINDS[n % len(KINDS)]) for n, each in enumerate(lengths)}


def saved(host: HostCopy, tensors: dict[str, Tensor], path: Path, *, delay: float = 0.0) -> int:
    """Copy and write a state as a run does, and overwrite it once it is copied. Return the most bytes at one time that
    were copied and not yet written."""
    laid = Laid.of(tensors, dict.fromkeys(tensors, 0))
    held = most = 0
    lock = threading.Lock()
    real = host_copy._filled

    def filled(memory: Tensor, parts: host_copy.Parts, kind: object) -> host_copy._Piece:
        nonlocal held, most
        with lock:
            held += memory.numel()
            most = max(most, held)
        return real(memory, parts, kind)

    def write(piece: memoryview) -> None:
        nonlocal held
        time.sleep(delay)
        file.write(piece)
        with lock:
            held -= host._size

    host_copy._filled = filled
    try:
        with path.open("wb") as file:
            host.begin()
            file.write(laid.header())
            thread = threading.Thread(target=host.drain, args=(write,))
            thread.start()
            host.copy(laid)
            for tensor in tensors.values():
                tensor.fill_(-1)
            thread.join()
    finally:
        host_copy._filled = real
    return most


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 99),
    st.lists(st.integers(0, 3000), max_size=7),
    st.sampled_from([None, 1, LEAST, 2 * LEAST + 3, 5 * LEAST, 1 << 30]),
)
def test_a_state_is_whole_with_any_memory(
    tmp_path_factory: pytest.TempPathFactory, seed: int, lengths: list[int], most: int | None
) -> None:
    path, host = tmp_path_factory.mktemp("state") / "state.safetensors", HostCopy(most)
    for save in range(2):  # the second takes the memory of the first
        tensors = state(seed + save, lengths)
        wanted = {name: tensor.clone() for name, tensor in tensors.items()}
        held = saved(host, tensors, path)
        assert most is None or held <= max(most, 2 * LEAST)
        with safe_open(path, framework="pt") as file:
            assert set(file.keys()) == set(wanted)
            assert json.loads(file.metadata()["starts"]) == dict.fromkeys(wanted, 0)
            assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in wanted.items())
            assert all(file.get_tensor(name).dtype == tensor.dtype for name, tensor in wanted.items())


def test_training_waits_for_the_disk_only_where_the_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "PIECE", LEAST)
    lengths = [64 * LEAST // 4]

    def waited_for(most: int | None) -> int:
        """Count the pieces that the disk had to write before all was copied. It writes one whenever training waits."""
        host, tensors = HostCopy(most), state(0, [0, *lengths])
        laid = Laid.of(tensors, dict.fromkeys(tensors, 0))
        copied, written = threading.Event(), 0

        def write(_: memoryview) -> None:
            nonlocal written
            while not (copied.is_set() or watch._progress.waits_elsewhere):
                time.sleep(0.0001)
            written += not copied.is_set()

        host.begin()
        thread = threading.Thread(target=host.drain, args=(write,))
        thread.start()
        host.copy(laid)
        pieces = written
        copied.set()
        thread.join()
        return pieces

    assert waited_for(None) == 0
    assert waited_for(2 * LEAST) >= 62, "62 of 64 pieces wait until one is written"
    assert waited_for(32 * LEAST) >= 32, "half of the state waits"


def test_a_rank_that_waits_for_the_disk_is_not_taken_for_one_that_hangs() -> None:
    host, tensors = HostCopy(2 * LEAST), state(0, [4 * LEAST])
    laid = Laid.of(tensors, dict.fromkeys(tensors, 0))
    waits: list[int] = []

    def slow(_: memoryview) -> None:
        time.sleep(0.05)
        waits.append(watch._progress.waits_elsewhere)

    host.begin()
    thread = threading.Thread(target=host.drain, args=(slow,))
    thread.start()
    host.copy(laid)
    thread.join()
    assert waits[0] == 1, "training waits for the first piece's memory"
    assert waits[-1] == 0, "all is copied, and training goes on"


def test_a_failed_write_ends_the_copy_and_the_next_save_has_its_memory(tmp_path: Path) -> None:
    host, tensors = HostCopy(2 * LEAST), state(1, [9 * LEAST])
    laid = Laid.of(tensors, dict.fromkeys(tensors, 0))
    failed: list[str] = []

    def full(_: memoryview) -> None:
        raise OSError("no space left on device")

    def draining() -> None:
        try:
            host.drain(full)
        except OSError as error:
            failed.append(str(error))
        host.let_go()

    host.begin()
    thread = threading.Thread(target=draining)
    thread.start()
    host.copy(laid)
    thread.join(20)
    assert not thread.is_alive()
    assert failed == ["no space left on device"]
    wanted = {name: tensor.clone() for name, tensor in tensors.items()}
    saved(host, tensors, tmp_path / "state")
    with safe_open(tmp_path / "state", framework="pt") as file:
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("held", "most", "expected"),
    [
        (96 << 30, None, (1 << 26, 1536)),
        (96 << 30, 8 << 30, (1 << 26, 128)),
        (96 << 30, 1 << 20, (1 << 19, 2)),
        (96 << 30, 100 << 20, (1 << 25, 3)),  # torch would take 64 MiB for a pinned piece of 50
        (1000, None, (1000, 1)),
        (1001, 1 << 30, (1008, 1)),
        (0, None, (8, 0)),
    ],
)
def test_pieces(held: int, most: int | None, expected: tuple[int, int]) -> None:
    assert sizes(held, most) == expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_ranks_write_equal_shares_of_what_all_hold(ranks: int) -> None:
    held = [Fragment(str(size), 0, 100 * size + torch.arange(float(size)), {}) for size in (5, 1, 9, 4)]
    engine: Any = SimpleNamespace(replicated=True, fragments=lambda: held)
    shares = [[each.weight for each in share(engine, rank, ranks)] for rank in range(ranks)]
    assert torch.equal(torch.cat([each for mine in shares for each in mine]), torch.cat([each.weight for each in held]))
    assert {sum(map(len, mine)) for mine in shares} <= {19 // ranks, 19 // ranks + 1}
