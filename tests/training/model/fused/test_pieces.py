"""The fused pieces: plain torch against transformers' modules, and Triton's kernels against plain torch.

The kernels run in Triton's interpreter, in a process that imports Triton anew, which then reads TRITON_INTERPRET.
They are also compiled for three generations of GPUs, which needs none: the interpreter takes what a compiler refuses.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from rlexp.training.model.float64 import precise
from rlexp.training.model.fused import plain
from rlexp.training.model.fused.operators import added_and_normed, gated, normed, rotated
from tests.helpers import warm
from tests.helpers.fused_pieces import BLOCK, EPS, TOLERANCES, calls, compare, results
from tests.helpers.paths import ROOT
from tests.helpers.planted import plant_if_asked
from tests.helpers.ranks import seeded

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
ACTIVATIONS = {
    "silu": plain.SILU,
    "gelu_pytorch_tanh": plain.GELU_TANH,
    "gelu": plain.GELU,
    "relu2": plain.RELU_SQUARED,
}
NORMS = {"gain": (LlamaRMSNorm, 0.0), "gain about 1": (GemmaRMSNorm, 1.0)}
Values = tuple[Tensor, ...]


def short(*shape: int, seed: int) -> Tensor:
    """Draw numbers that bfloat16 can hold, in float64."""
    return seeded(*shape, seed=seed).bfloat16().double()


def both_passes(outs: Values, inputs: list[Tensor]) -> list[Tensor]:
    """Return the outputs, and the gradients of their sum with random factors."""
    factors = [short(*out.shape, seed=20 + n).to(out.dtype) for n, out in enumerate(outs)]
    return [*outs, *torch.autograd.grad(outs, inputs, factors)]


# ---- plain torch, against the modules that the pieces replace ----


class Piece:
    """A piece and what it replaces: the same inputs, the same outputs."""

    def __init__(self, shapes: list[tuple[int, ...]], ours: Any, theirs: Any) -> None:
        self.shapes, self.ours, self.theirs = shapes, ours, theirs

    def values(self, dtype: torch.dtype, *, fused: bool) -> list[Tensor]:
        inputs = [short(*shape, seed=n).to(dtype).requires_grad_() for n, shape in enumerate(self.shapes)]
        with precise(dtype):
            return both_passes((self.ours if fused else self.theirs)(*inputs), inputs)


def of_norm(kind: str) -> Piece:
    module, offset = NORMS[kind]

    def theirs(x: Tensor, weight: Tensor) -> Values:
        norm = module(weight.shape[0], eps=EPS)
        out: Tensor = torch.func.functional_call(norm, {"weight": weight}, (x,))
        return out, x * 1

    return Piece([(1, 5, 48), (48,)], lambda x, weight: normed(x, weight, EPS, offset), theirs)


def of_sum(kind: str) -> Piece:
    module, offset = NORMS[kind]

    def theirs(x: Tensor, residual: Tensor, weight: Tensor) -> Values:
        norm = module(weight.shape[0], eps=EPS)
        total = residual + x
        out: Tensor = torch.func.functional_call(norm, {"weight": weight}, (total,))
        return out, total

    return Piece([(1, 5, 48), (1, 5, 48), (48,)],
                 lambda x, residual, weight: added_and_normed(x, residual, weight, EPS, offset), theirs)  # fmt: skip


def of_rotation() -> Piece:
    cos, sin = short(1, 7, 16, seed=8), short(1, 7, 16, seed=9)

    def heads(x: Tensor) -> Tensor:
        return x.transpose(1, 2)  # as a projection writes them

    return Piece([(1, 7, 4, 16), (1, 7, 2, 16)],
                 lambda q, k: rotated(heads(q), heads(k), cos.to(q.dtype), sin.to(q.dtype)),
                 lambda q, k: apply_rotary_pos_emb(heads(q), heads(k), cos.to(q.dtype), sin.to(q.dtype)))  # fmt: skip


def of_gate(name: str, *, together: bool = False) -> Piece:
    act = ACT2FN[name]
    if together:
        return Piece([(1, 5, 96)], lambda both: (gated(*both.chunk(2, dim=-1), ACTIVATIONS[name]),),
                     lambda both: (act(both.chunk(2, dim=-1)[0]) * both.chunk(2, dim=-1)[1],))  # fmt: skip
    return Piece([(1, 5, 48), (1, 5, 48)], lambda gate, up: (gated(gate, up, ACTIVATIONS[name]),),
                 lambda gate, up: (act(gate) * up,))  # fmt: skip


PIECES = {
    **{f"norm, {kind}": of_norm(kind) for kind in NORMS},
    **{f"sum and norm, {kind}": of_sum(kind) for kind in NORMS},
    "rotary positions": of_rotation(),
    **{f"gate, {name}": of_gate(name) for name in ACTIVATIONS},
    "gate, of one product": of_gate("silu", together=True),
}
each_piece = pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES)


@each_piece
def test_both_passes_are_those_of_what_a_piece_replaces(piece: Piece) -> None:
    for ours, theirs in zip(*(piece.values(torch.float64, fused=fused) for fused in (True, False)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@each_piece
def test_in_bfloat16_a_piece_is_as_exact_as_what_it_replaces(piece: Piece) -> None:
    """A piece rounds once where what it replaces rounds after each operation. Distances are those of whole tensors:
    single elements may fall to either side."""
    exact = piece.values(torch.float64, fused=False)
    ours, theirs = (piece.values(torch.bfloat16, fused=fused) for fused in (True, False))
    for one, other, wanted in zip(ours, theirs, exact, strict=True):
        assert (one.double() - wanted).norm() <= (other.double() - wanted).norm()


def test_shapes_without_numbers_are_those_of_the_kernels() -> None:
    """Strides and dtypes are compared too."""
    for piece in PIECES.values():
        real = piece.values(torch.bfloat16, fused=True)
        with FakeTensorMode(allow_non_fake_inputs=True):
            inputs = [torch.empty(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in piece.shapes]
            outs = piece.ours(*inputs)
            made = [*outs, *torch.autograd.grad(outs, inputs, [torch.empty_like(out) for out in outs])]
        facts = [[(x.shape, x.dtype, x.stride()) for x in found] for found in (real, made)]
        assert facts[0] == facts[1]


def test_every_operator_tells_the_shapes_of_its_results() -> None:
    """A rehearsal makes them without numbers, and counts their bytes."""
    for name, args in calls(torch.float32):
        real = results(plain, name, args)
        with FakeTensorMode() as mode:
            without = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in args]
            made = getattr(torch.ops.rlexp, name)(*without)
        if made is None:  # it writes into its argument
            continue
        found = made if isinstance(made, tuple) else (made,)
        for one, other in zip(found, real, strict=True):
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride()), name


# ---- Triton's kernels ----


def main() -> None:
    for name in [name for name in sys.modules if re.match(r"triton\.(?!_C)|triton$|rlexp.*\.triton_kernels", name)]:
        del sys.modules[name]  # what has been imported before would compile
    triton_kernels = importlib.import_module("rlexp.training.model.fused.triton_kernels")
    plant_if_asked()
    assert type(triton_kernels._norm).__name__ == "InterpretedFunction"
    assert triton_kernels.LOGITS == BLOCK, "rows of logits are not those of several blocks"
    for dtype in TOLERANCES:
        compare(triton_kernels, dtype, torch.device("cpu"))
    print("all agree")


@needs_triton
def test_tritons_kernels_are_plain_torch() -> None:
    """In float64 to rounding, so that nothing is hidden by it."""
    done = warm.run("tests.training.model.fused.test_pieces", (), ROOT, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.stdout == "all agree\n", done.stderr


COMPILED = {
    "_norm": {"ADDS": True, "ROWS": 2, "SIZE": 2048, "EPS": 1e-5, "OFFSET": 1.0},
    "_norm_backward": {"JOINS": True, "OF_WEIGHT": True, "ROWS": 2, "SIZE": 2048, "OFFSET": 0.0},
    "_rotate": {"INVERSE": True, "Q_HEADS": 32, "K_HEADS": 8, "HALF": 32},
    "_gate": {"KIND": 1, "COLUMNS": 1024},
    "_gate_backward": {"KIND": 2, "COLUMNS": 1024},
    "_read_logits": {"ENTROPY": True, "LIKELIHOOD": True, "HIT": True, "LOGITS": 8192, "WARMTH": 1 / 0.7},
    "_logits_backward": {"ENTROPY": True, "LOGITS": 8192, "WARMTH": 1 / 0.7},
}
KINDS = {  # of arguments, by name; others are pointers to what a model's tensors hold
    **dict.fromkeys(("rows", "size", "each", "half", "q_heads", "k_heads"), "i32"),
    **dict.fromkeys(("scale", "dweight", "chosen", "norm", "mean", "entropy", "likelihood", "hit"), "wide"),
    **dict.fromkeys(("dlogps", "dentropy"), "wide"),
    "targets": "*i64",
}
STRIDES = ("_b", "_h", "_t", "_r")
generations = [90, *(pytest.param(each, marks=pytest.mark.slow) for each in (80, 100))]


@needs_triton
@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["bfloat16", "float64"])
@pytest.mark.parametrize("generation", generations)
def test_kernels_compile_for_gpus(generation: int, exact: bool) -> None:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rlexp.training.model.fused import triton_kernels

    for name, constants in COMPILED.items():
        kernel, fixed = getattr(triton_kernels, name), constants | {"ACC": tl.float64 if exact else tl.float32}
        kinds = {each: "i32" if each.endswith(STRIDES) else KINDS.get(each, "given") for each in kernel.arg_names}
        dtypes = {"given": "*fp64" if exact else "*bf16", "wide": "*fp64" if exact else "*fp32"}
        signature = {each: dtypes.get(kind, kind) for each, kind in kinds.items()} | dict.fromkeys(fixed, "constexpr")
        places = {(kernel.arg_names.index(each),): value for each, value in fixed.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=places)
        assert triton.compile(source, target=GPUTarget("cuda", generation, 32)).asm["cubin"], name


if __name__ == "__main__":
    main()
