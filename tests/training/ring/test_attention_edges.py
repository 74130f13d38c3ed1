"""Attention on packs smaller than the ring, and on tensors that models and autograd arrange differently in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from rlexp.launch.joining import RankSpec
from rlexp.training.ring.kernels import get_kernel
from rlexp.training.ring.kernels.base import Ask
from rlexp.training.ring.layouts import get_layout
from rlexp.training.types import Segment
from rlexp.training.world.groups import Ring, build_world
from tests.helpers.attention import HEADS, SIZE, Case, attend_part, cases, expected_of, forest, put_together
from tests.helpers.ranks import on_ranks, seeded

SMALL = ((1,), (3,), (2, 1), (5, 1, 1), (9,))


def rings_of(spec: RankSpec, several: Sequence[Case]) -> dict[int, Ring]:
    return {inner: build_world(spec.world_size, inner).ring for inner in dict.fromkeys(c.inner for c in several)}


def small_rank(spec: RankSpec, several: Sequence[Case]) -> list[list[Tensor]]:
    rings = rings_of(spec, several)
    return [
        attend_part(rings[case.inner], lengths, case, torch.float64, "cpu_flash")
        for case in several
        for lengths in SMALL
    ]


@pytest.mark.parametrize("world", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_packs_smaller_than_the_ring(world: int) -> None:
    """Some ranks hold padding alone."""
    several = cases(world, (2,))
    results = zip(*on_ranks(world, small_rank, several), strict=True)
    for case in several:
        for lengths in SMALL:
            expected = expected_of(lengths, case.kv_heads, torch.float64)
            got = put_together(world, lengths, next(results), torch.float64)
            for one, other in zip(got, expected, strict=True):
                for part in range(4):
                    assert torch.allclose(one[part], other[part], rtol=0, atol=2e-14), (case, lengths, part)


def attend(
    ring: Ring, segments: Sequence[Segment], case: Case, arrange: Callable[[Tensor], Tensor], dout: Tensor | None = None
) -> list[Tensor]:
    """Return out, dq, dk, dv of one rank, for tensors that `arrange` puts into memory."""
    layout = case.get()
    held = len(layout.place(segments, ring.size).places[ring.rank])
    q, k, v = (
        arrange(seeded(held, heads, SIZE, seed=10 * ring.rank + part)).requires_grad_()
        for part, heads in enumerate((HEADS, case.kv_heads, case.kv_heads))
    )
    plan = layout.plan(segments, ring, get_kernel("cpu_flash", "cpu"))
    out = plan.attend(q, k, v, Ask(SIZE**-0.5))
    if dout is None:
        dout = arrange(seeded(held, HEADS, SIZE, seed=10 * ring.rank + 7))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.expand(out.shape))]


def padding_rank(spec: RankSpec, several: Sequence[Case]) -> list[list[Tensor]]:
    rings = rings_of(spec, several)
    nothing = (Segment(0, 0, spec.world_size),)
    return [attend(rings[case.inner], nothing, case, lambda x: x) for case in several]


def test_a_pack_of_padding_alone_has_no_attention() -> None:
    """A replica without a sample gets such a pack, and its ranks take part in what the ring sends."""
    for results in on_ranks(4, padding_rank, cases(4, (HEADS, 2))):
        for tensors in results:
            assert all(len(tensor) == 1 and not tensor.any() for tensor in tensors)


ARRANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "as they come": lambda x: x.contiguous(),
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "tokens last": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "size first": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "of a wider tensor": lambda x: torch.cat((x, x), dim=2)[:, :, : x.shape[2]],
}


def arranged_rank(spec: RankSpec, several: Sequence[Case]) -> list[dict[str, list[Tensor]]]:
    rings, segments = rings_of(spec, several), forest((37, 1, 70), spec.world_size)
    found = []
    for case in several:
        ring = rings[case.inner]
        by_name = {name: attend(ring, segments, case, arrange) for name, arrange in ARRANGED.items()}
        for name, dout in (("of out.sum()", torch.ones(())), ("of out.sum(0)", seeded(HEADS, SIZE))):
            by_name[f"{name}, spread"] = attend(ring, segments, case, lambda x: x, dout)
            whole = dout.expand(len(by_name["as they come"][0]), HEADS, SIZE).contiguous()
            by_name[name] = attend(ring, segments, case, lambda x: x, whole)
        found.append(by_name)
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_any_arrangement_in_memory_is_the_same_attention(world: int) -> None:
    """Models permute, split and join heads; autograd passes gradients that are expanded without a copy."""
    several = cases(world, (HEADS, 2))
    for results in on_ranks(world, arranged_rank, several):
        for case, by_name in zip(several, results, strict=True):
            for name, tensors in by_name.items():
                same = by_name[name.removesuffix(", spread")] if "of out" in name else by_name["as they come"]
                for one, other in zip(tensors, same, strict=True):
                    assert torch.allclose(one, other, rtol=0, atol=1e-13), (case, name)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "allgather", "ulysses"])
def test_a_gradient_of_the_gradient_is_refused(layout: str) -> None:
    """Blocks take the global output and log-sum-exp for constants, so a second derivative would be wrong."""
    ring, segments = Ring(0, (0,)), forest((5,), 1)
    q, k, v = (seeded(5, 2, SIZE, seed=part).requires_grad_() for part in range(3))
    plan = get_layout(layout).plan(segments, ring, get_kernel("plain", "cpu"))
    out = plan.attend(q, k, v, Ask(0.25))
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "allgather", "ulysses"])
def test_no_more_is_kept_for_the_backward_pass_than_it_needs(layout: str) -> None:
    """Only q, k, v, the output and the log-sum-exp: none of them is a view of a larger buffer that has travelled."""
    ring, segments = Ring(0, (0,)), forest((50,), 1)
    q, k, v = (seeded(50, heads, SIZE, seed=heads).requires_grad_() for heads in (HEADS, 2, 2))
    plan = get_layout(layout).plan(segments, ring, get_kernel("cpu_flash", "cpu"))
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = plan.attend(q, k, v, Ask(0.25))
    assert sum(kept.values()) == sum(tensor.nbytes for tensor in (q, k, v, out)) + 50 * HEADS * out.element_size()
