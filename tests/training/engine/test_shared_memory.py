"""Memory that the ranks of a machine share: one copy in all, and nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.base.errors import UserError
from rlexp.base.host_memory import HostMemory
from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec
from rlexp.training.train.build import build
from rlexp.training.train.surroundings import UNPROBED
from rlexp.training.world import shared_memory
from rlexp.training.world.shared_memory import Neighbours
from tests.helpers.ranks import on_ranks

RANKS = 3
LARGE = 1 << 20  # elements: many pages


def mapping_of(tensor: Tensor) -> tuple[str, int, int]:
    """Return the inode and name of the memory in which a tensor lies, its resident and its proportional bytes."""
    address, found = tensor.data_ptr(), None
    sizes: dict[str, int] = {}
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+) *(.*)", line):
            inside = int(head[1], 16) <= address < int(head[2], 16)
            found = f"{head[3]} {head[4]}" if inside else found
        elif inside and (size := re.match(r"(Rss|Pss): +(\d+) kB", line)):
            sizes[size[1]] = int(size[2]) * 1024
    assert found is not None
    return found, sizes["Rss"], sizes["Pss"]


def open_memory() -> list[str]:
    """Return the anonymous files of ours that this process has open."""
    links = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            links.append(os.readlink(f"/proc/self/fd/{each}"))
    return [link for link in links if link.startswith("/memfd:rlexp")]


def shared_by_three(spec: RankSpec, groups: list[str] | None) -> Any:
    if groups is not None:
        shared_memory._kernel = lambda: groups[spec.rank]
    among = shared_memory.meet(spec.rank, RANKS)
    own = torch.arange(LARGE, dtype=torch.float32)
    given = {
        "large": own if among.leads else torch.empty(LARGE, device="meta"),
        "odd": torch.tensor([spec.rank], dtype=torch.bfloat16),
        "tail": torch.full((3,), 7.0, dtype=torch.float64),
    }
    made = shared_memory.share(given, among, what="a test", pinned=False)
    right = torch.equal(made["large"], torch.arange(LARGE, dtype=torch.float32)) and made["tail"].tolist() == [7.0] * 3
    freed = not among.leads or own.data_ptr() == made["large"].data_ptr()  # the leader's own is gone
    touched = float(made["large"].sum())
    dist.barrier()
    where, odd = mapping_of(made["large"]), made["odd"].item()
    held = len(open_memory())
    dist.barrier()
    del made, given, own
    return among.ranks, right and freed and touched > 0, odd, where, (held, len(open_memory()))


def test_the_ranks_of_a_machine_hold_one_copy() -> None:
    found = on_ranks(RANKS, shared_by_three, None)
    assert [ranks for ranks, *_ in found] == [(0, 1, 2)] * RANKS
    assert all(right for _, right, *_ in found)
    assert [odd for _, _, odd, *_ in found] == [0.0] * RANKS, "the leader's values"
    names, resident, proportional = zip(*(where for *_, where, _ in found), strict=True)
    assert len(set(names)) == 1, "one inode"
    assert names[0].endswith("(deleted)"), "no file system has a name for it"
    assert min(resident) >= 4 * LARGE
    assert sum(proportional) == pytest.approx(resident[0], rel=0.02), "once on the machine"
    assert [left for *_, left in found] == [(1, 0)] * RANKS, "open while it is mapped, and no longer"


@pytest.mark.parametrize(
    ("kernels", "ranks"),
    [
        (["a", "b", "c"], [(0,), (1,), (2,)]),
        (["a", "b", "b"], [(0,), (1, 2), (1, 2)]),
        (["", "", ""], [(0,), (1,), (2,)]),
    ],
    ids=["three machines", "two machines", "it cannot be told"],
)
def test_ranks_of_other_machines_have_their_own(kernels: list[str], ranks: list[tuple[int, ...]]) -> None:
    found = on_ranks(RANKS, shared_by_three, kernels)
    assert [there for there, *_ in found] == ranks
    assert all(right for _, right, *_ in found)
    assert [odd for _, _, odd, *_ in found] == [float(there[0]) for there in ranks]
    assert len({name for *_, (name, _, _), _ in found}) == len(set(ranks))


def refused(spec: RankSpec) -> str:
    shared_memory.host_memory = lambda: HostMemory(1 << 30, 1 << 20)
    among = shared_memory.meet(spec.rank, RANKS)
    with pytest.raises(UserError) as caught:
        shared_memory.share({"one": torch.zeros(1 << 20)}, among, what="reference.offload=true", pinned=False)
    return str(caught.value)


def test_too_little_memory_is_one_message_of_all_ranks() -> None:
    """The kernel would kill a process instead: it promises memory that it does not have."""
    (message,) = set(on_ranks(RANKS, refused))
    assert message.startswith("reference.offload=true: shares 0.0 GiB of this machine's memory")


def moved(spec: RankSpec) -> bool:
    """Share four times as much as is free. The leader's tensors are there already, and leave their memory in turn."""
    own = {str(each): torch.full((1 << 20,), float(each)) for each in range(8)}
    shared_memory.host_memory = lambda: HostMemory(1 << 30, 2 * own["0"].nbytes)
    among = shared_memory.meet(spec.rank, RANKS)
    made = shared_memory.share(own, among, what="a test", pinned=False)
    left = all(own[name].data_ptr() == tensor.data_ptr() for name, tensor in made.items())
    return (left or not among.leads) and all(bool((made[name] == float(name)).all()) for name in own)


def test_memory_that_the_tensors_leave_is_free_for_the_next() -> None:
    assert on_ranks(RANKS, moved) == [True] * RANKS


def test_cuda_lets_go_of_memory_that_is_still_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's runtime is a stub here: it notes whether there is memory at the address that it is given."""
    calls: list[tuple[str, bool]] = []

    def is_mapped(address: int) -> bool:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        ours = (line.split()[0].split("-") for line in maps if "memfd:rlexp" in line)
        return any(int(begin, 16) <= address < int(end, 16) for begin, end in ours)

    class Runtime:
        def cudaHostRegister(self, address: int, _size: int, _flags: int) -> int:  # noqa: N802
            calls.append(("register", is_mapped(address)))
            return 0

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
            calls.append(("unregister", is_mapped(address)))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(shared_memory, "gather_objects", lambda own, _size: [own])
    made = shared_memory.share({"one": torch.ones(LARGE)}, Neighbours(0, (0,), 1), what="a test", pinned=True)
    part = made["one"][5:]
    del made
    assert calls == [("register", True)], "a part of it is still used"
    del part
    assert calls == [("register", True), ("unregister", True)]


def of_a_reference(_spec: RankSpec, cfg: Config) -> tuple[str, int, int, int]:
    task = build(cfg, around=UNPROBED)
    task.reference.logps(task.begin(1).load(0).shard)
    weights = {weight.untyped_storage().data_ptr(): weight for _, weight in task.reference.frozen.weights()}
    dist.barrier()
    (only,) = weights.values()  # all lie in one storage
    result = (*mapping_of(only), only.untyped_storage().nbytes())
    dist.barrier()
    return result


@pytest.mark.parametrize("engine", ["zero1", "torch"])
def test_a_reference_of_the_host_is_there_once(engine: str) -> None:
    sizes = ("model.layers=2", "model.hidden_size=128", "model.intermediate_size=512")
    cfg = compose_config([
        "launch.device=cpu", "logger=none", "data.size=8", "data.eval_size=0", "parallel=ring2", "train.batch_size=2",
        "reference.offload=true", f"engine={engine}", *sizes,
    ])  # fmt: skip
    (first, _, one, size), (second, _, other, _) = on_ranks(2, of_a_reference, cfg)
    assert first == second
    assert one + other == pytest.approx(size, rel=0.05, abs=2 * os.sysconf("SC_PAGE_SIZE"))
