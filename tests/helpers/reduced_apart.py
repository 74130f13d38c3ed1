"""An engine of DeepSpeed in one process, as a rank of a played world: does it keep what another stream reduces?

The model is a chain of matrices of one size, so that memory which is let go of is soon that of another gradient. The
bucket is smaller than a matrix, and larger than the vector at the start of the chain.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tests.helpers.delayed import Played, begin_played
from tests.helpers.faults.plant import plant
from tests.helpers.played_streams import for_deepspeed

LAYERS, MICRO_BATCHES = 6, 2
NUMBER, WITNESSES = 7.0, 4


Words = dict[str, str]  # name of the engine, precision, offload
USUAL: list[Words] = [{"name": name, "precision": "bf16"} for name in ("zero2", "zero3")]
# Relative to the largest element, or to the sum of all. Measured 4e-3 and 3e-5; another layer's gradient is 1 and more.
ROUNDING = {"bf16": (1e-2, 1e-3), "fp32": (1e-6, 1e-6)}


class Witness(torch.autograd.Function):
    """The identity. In its backward pass it takes memory, as much at a time as a matrix has, and writes a number there.

    The number stays, unless another stream still writes to that memory."""

    taken: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        Witness.taken += [torch.full_like(grads[0], NUMBER) for _ in range(WITNESSES)]
        return grads[0]


class Chain(nn.Module):
    """A policy as engines see one."""

    adapter, heads, trunks, critic_lr_scale = None, (), (), 1.0

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.randn(width))
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
        self.model = SimpleNamespace(_no_split_modules=None)
        for parameter in self.parameters():  # a rank that gathers weights gets its own piece from the other rank too
            mine, others = parameter.data.view(2, -1)
            others.copy_(mine)

    def named(self) -> Any:
        return self.named_parameters()

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = x * self.gain
        for layer in self.layers:
            x = layer(Witness.apply(x)).tanh()
        return (x,)


@dataclass
class Found:
    lost: list[str]  # memory that was given away while another stream could use it; only on CPU, with played streams
    written: int  # tensors of the backward pass that another stream has written to; only on a GPU
    sent: float  # largest error of a gradient as the group read it, relative to the largest element
    kept: float  # the same of what this rank holds of the reduced gradient
    held: set[str]  # parameters that this rank holds a part of


def hold(words: Words, found: Found) -> None:
    kept, sent = ROUNDING[words["precision"]]
    assert found.lost == [], words
    assert found.written == 0, words
    assert found.kept < kept, words
    assert found.sent < sent, words
    assert 0 < len(found.held) <= LAYERS + 1, words


def dropped_at_once(_original: Any, self: Any, gradient: Any, *args: Any) -> None:
    """Reduce as DeepSpeed does by itself."""
    self._average(gradient, *args)


def as_rank(device: str, width: int, cases: Sequence[Words], rank: int, *, keeping: bool = True) -> list[Found]:
    """Take each case's engine as this rank of two. DeepSpeed keeps a process's first world, so a rank is a process."""
    from rlexp.training.engine.zero import import_deepspeed

    if not keeping:
        plant("rlexp.training.engine.zero:_KeptGradient._average_and_keep", dropped_at_once, lambda: None)
    import_deepspeed()
    played = begin_played(rank, 2)
    return [engine_alone(device, width, words, played) for words in cases]


def engine_alone(device: str, width: int, words: Words, played: Played) -> Found:
    """Take two micro-batches through an engine. The played rank has the same gradient."""
    from rlexp.config.schema import EngineConfig, EngineName, Offload, OptimConfig
    from rlexp.training.engine.rehearsed import agreeing
    from rlexp.training.engine.zero import build_zero
    from rlexp.training.world.groups import ALONE, World

    dtype = torch.bfloat16 if words["precision"] == "bf16" else torch.float32
    bucket = {"zero_optimization": {"reduce_bucket_size": width * width // 2}}
    cfg = EngineConfig(EngineName[words["name"]], Offload[words.get("offload", "none")], bucket)
    with agreeing(), for_deepspeed() if device == "cpu" else contextlib.nullcontext() as streams:
        policy: Any = Chain(width).to(device)
        exact = Chain(width).to(device, dtype)
        inputs = [torch.randn(width, width, device=device).to(dtype) for _ in range(MICRO_BATCHES)]
        engine: Any = build_zero(cfg, policy, OptimConfig(lr=0.0), World(played.place, 2, ALONE), dtype)
        played.summed.clear()
        Witness.taken.clear()
        for number, x in enumerate(inputs):
            engine.backward(engine.forward(x)[0].float().square().mean(), last=number == MICRO_BATCHES - 1)
        sums, mine = list(played.summed), dict(parts_of(engine))
        written = sum(bool((each != NUMBER).any()) for each in Witness.taken)
    for x in inputs:
        exact(x)[0].float().square().mean().backward()
    whole = {name: p.grad.float().view(-1) for name, p in exact.named_parameters() if p.grad is not None}
    kept = max(far(part, whole[name][start : start + len(part)]) for name, (start, part) in mine.items())
    lost = streams.lost if streams is not None else []
    return Found(lost, written, of_sums(sums, whole), kept, set(mine))


def parts_of(engine: Any) -> Any:
    """Yield what this rank holds of the reduced gradient: by parameter, where it starts and its elements."""
    if hasattr(engine, "_mapped"):
        for name, mapping in engine._mapped():
            parameter = dict(engine.policy.named())[name]
            part = mapping.get_lp_grad_fragment(parameter._index_in_param_group).flatten()
            place = mapping.lp_fragment_address
            if len(part) > place.numel:  # a whole gradient, of which this rank steps a part
                part = part[place.start : place.start + place.numel]
            yield name, (place.start, part.float())
    else:
        for name, parameter in engine.policy.named():
            part = engine._utils.safe_get_local_grad(parameter)
            start = engine.world.rank * len(part)
            yield name, (start, part[: parameter.ds_numel - start].float())


def of_sums(sums: Sequence[Tensor], whole: dict[str, Tensor]) -> float:
    """Compare the sum of all that the group read with that of the whole gradient, whatever the order and the pieces.

    An engine divides by the number of ranks, which is 2, before the group reads, or after it."""
    read = sum(float(each.double().sum()) for each in sums)
    size = sum(float(each.double().abs().sum()) for each in whole.values())
    exact = sum(float(each.double().sum()) for each in whole.values())
    return min(abs(share * read - exact) for share in (1, 2)) / size


def far(one: Tensor, other: Tensor) -> float:
    return float((one.cpu() - other.cpu()).abs().max() / other.abs().max())
