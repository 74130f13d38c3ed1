"""Gradients that are reduced while the backward pass goes on."""

from __future__ import annotations

import torch
from torch import nn

from rlexp.launch.joining import RankSpec
from rlexp.training.engine import reducing
from rlexp.training.world.groups import build_world
from tests.helpers.ranks import on_ranks


def test_a_gradient_that_one_rank_lacks_counts_as_zero() -> None:
    """Each parameter is a bucket of its own. The last, which would be sent first, has no gradient on rank 0."""
    first, second = on_ranks(2, reduced)
    assert first == second == [1.5, 3.0, 3.0]


def reduced(spec: RankSpec) -> list[float]:
    reducing.BUCKET = 1
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    mean = reducing.Reducing(parameters, build_world(1))
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(mean.arrived)
    used = parameters[: 2 + spec.rank]
    with mean.during(last=True):
        torch.stack([number * (spec.rank + 1) * p.sum() for number, p in enumerate(used, start=1)]).sum().backward()
    found = []
    for parameter in parameters:
        assert parameter.grad is not None
        assert parameter.grad[0] == parameter.grad[1]
        found.append(float(parameter.grad[0]))
    return found
