"""In bfloat16 every sum of attention is in float32, on every layout and transport, whatever the kernel returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from rlexp.launch.joining import RankSpec
from rlexp.training.world.groups import build_world
from tests.helpers import mock_flash
from tests.helpers.attention import HEADS, Case, attend_part
from tests.helpers.ranks import on_ranks
from tests.helpers.sums import Sums

LENGTHS = (37, 1, 90)  # cut over all ranks, and over one
RING = 4
OUTPUTS, COPIES = {"lerp_", "logaddexp"}, {"alltoall_base_"}
# What each case adds up, and what it sends of sums. Where there are fewer key/value heads than ranks that share out the
# heads, gradients of copies are summed; in windows that are no shorter than a share, `direct` sends sums of two calls.
CASES: Mapping[Case, set[str]] = {
    Case("zigzag", 1, 2): OUTPUTS,
    Case("zigzag", 1, 2, "neighbour"): OUTPUTS | {"send"},
    Case("zigzag", 1, 2, window=30): OUTPUTS | {"send"},
    Case("contiguous", 1, 2): OUTPUTS,
    Case("contiguous", 1, 2, "neighbour"): OUTPUTS | {"send"},
    Case("allgather", 1, 2): OUTPUTS | {"_reduce_scatter_base_"},
    Case("ulysses", RING, HEADS): set(),
    Case("ulysses", RING, 2): COPIES,
    Case("hybrid", 2, 2): OUTPUTS,
    Case("hybrid", 2, 1): OUTPUTS | COPIES,
    Case("hybrid", 2, 1, "neighbour"): OUTPUTS | COPIES | {"send"},
}
SHOWN = OUTPUTS | COPIES | {"send", "_reduce_scatter_base_"}
Made = Counter[tuple[str, torch.dtype]]


def summed_rank(spec: RankSpec, several: Sequence[tuple[str, Case]]) -> list[tuple[Made, Made]]:
    """Attend in bfloat16, forward and backward, by one kernel and case after the other. Return what was summed and
    sent, and what of it was summed in bfloat16."""
    mock_flash.install()
    inner = dict.fromkeys(case.inner for _, case in several)
    rings = {size: build_world(spec.world_size, size).ring for size in inner}
    found = []
    for kernel, case in several:
        with Sums() as sums:
            attend_part(rings[case.inner], LENGTHS, case, torch.bfloat16, kernel)
        found.append((sums.made, sums.narrow()))
    return found


def test_every_layout_sums_in_float32() -> None:
    """`cpu_flash` returns gradients in float32. `flash_attn`, played by a mock, returns them in bfloat16, as all
    kernels for GPUs do: `direct` then sends the results of one call as they are, and everything else in float32."""
    several = [(kernel, case) for kernel in ("cpu_flash", "flash_attn") for case in CASES]
    for (kernel, case), of_ranks in zip(several, zip(*on_ranks(RING, summed_rank, several), strict=True), strict=True):
        assert [narrow for _, narrow in of_ranks] == [Made()] * RING, (kernel, case)
        wide = {name for made, _ in of_ranks for name, dtype in made if dtype is torch.float32}
        sent = {"send"} if kernel == "cpu_flash" and case.layout in ("zigzag", "contiguous", "hybrid") else set()
        assert wide & SHOWN == CASES[case] | sent, (kernel, case)
        assert bool(wide & {"add_", "index_add_"}) == (case.layout != "ulysses"), (kernel, case)  # dq, dk and dv
