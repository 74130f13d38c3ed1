"""Which modules of a model compute what the fused pieces compute, and the classes that compute it with them.

A module is tried in float64: its own `forward` on random numbers of several sizes, beside the piece's formula. So no
family is listed, and what a family computes otherwise is left as it is, be it only where numbers are large. What is
tried is a bare copy: the module's attributes, with small random parameters, and with stand-ins in the places of its
children. So the model's weights are not needed, which an engine may hold in pieces.

A module that fits gets a subclass of its class, under the same name: what looks for a class by name or inheritance (an
engine, checkpointing, an export) finds it. Where a call is not what was tried, the subclass calls its base.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlexp.config.schema.models import FusedName
from rlexp.training.model.float64 import precise
from rlexp.training.model.fused import plain
from rlexp.training.model.fused.operators import added_and_normed, gated, normed, rotated
from rlexp.training.model.fused.plain import KINDS, activated

ROTATES = "apply_rotary_pos_emb"  # the name of the function in transformers' modules
LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")  # of a layer that norms before it computes
APART, TOGETHER = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")  # of an MLP with a gate
CLOSE = 1e-12  # relative to the largest number, in float64: rounding is 1e-15
SCALES = (1.0, 1e-2, 30.0, 1e4)  # of what is given: some modules bound their numbers
AGAIN = object()  # in the place of a residual: there is nothing to add yet
Made = Mapping[str, Any]  # what a subclass has beside its base


@dataclass(frozen=True)
class Fused:
    """How many modules compute with fused pieces, by piece, and the classes of those that are left as they are."""

    pieces: Counter[str]
    left: Counter[str]

    def __str__(self) -> str:
        left = f"; left as they are: {_counted(self.left)}" if self.left else ""
        return f"{_counted(self.pieces) or 'nothing of this model'}{left}"


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{count} × {name}" for name, count in names.items())


def fuses(name: FusedName, device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether a model computes with fused pieces: on a GPU in 16 bits, unless the run says otherwise."""
    if name is FusedName.auto:
        return device.type != "cpu" and dtype in (torch.bfloat16, torch.float16)
    return name is FusedName.always


def fuse(*models: nn.Module) -> Fused:
    """Let the models' modules compute with fused pieces wherever these fit, whatever the family."""
    fused = Fused(Counter(), Counter())
    modules = [module for model in models for module in model.modules() if _has_own_code(module)]
    chosen = [(module, fused_class(module)) for module in modules]
    for module, choice in chosen:  # a layer is tried before its norms change
        if choice is None:
            fused.left[type(module).__name__] += 1
        else:
            piece, module.__class__ = choice
            fused.pieces[piece] += 1
    return fused


def _has_own_code(module: nn.Module) -> bool:
    """Say whether a module may compute something between products: it has weights, is none of torch's, and no list,
    model or table of others."""
    known = isinstance(module, PreTrainedModel | nn.Embedding | Conv1D)
    foreign = known or type(module).__module__.startswith(("torch.", "peft."))
    return not foreign and any(True for _ in module.parameters())


def fused_class(module: nn.Module) -> tuple[str, type[nn.Module]] | None:
    """Return what of a module can be fused, and the class that does it; None if nothing."""
    if "forward" in vars(module) or getattr(module, "_is_fused", False):
        return None
    for name, tried in _TRIED.items():
        with _disable_current_modes(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            methods = tried(module)
        if methods is not None:
            base: Any = type(module)
            return name, _subclass(base, tuple(methods.items()))
    return None


@functools.cache
def _subclass(base: Any, members: tuple[tuple[str, Any], ...]) -> type[nn.Module]:
    named = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")} | {"_is_fused": True}
    return types.new_class(base.__name__, (base,), exec_body=lambda space: space.update(named | dict(members)))


def _bare(module: nn.Module, children: Mapping[str, nn.Module], **parameters: Tensor) -> Any:
    """Return the module with other children and parameters, and without hooks."""
    bare = object.__new__(type(module))
    nn.Module.__init__(bare)
    vars(bare).update({name: value for name, value in vars(module).items() if name not in vars(bare)})
    for name, child in children.items():
        bare.add_module(name, child)
    for name, parameter in parameters.items():
        bare.register_parameter(name, nn.Parameter(parameter))
    return bare.eval()


def _agree(compute: Callable[[Tensor], Any], formula: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Say whether a module's own code gives the numbers of a formula. One that takes other arguments does not."""
    for scale in SCALES:
        expected = formula(x * scale)
        try:
            with precise(torch.float64), torch.no_grad():
                output = compute(x * scale)
        except Exception:  # whatever a model's own code raises
            return False
        if not isinstance(output, Tensor) or output.shape != expected.shape or output.dtype is not expected.dtype:
            return False
        if not bool((output - expected).abs().max() <= CLOSE * expected.abs().max()):
            return False
    return True


def _takes_one(module: nn.Module) -> bool:
    """Say whether its class's code is called, with one argument: what another one would mean is not known."""
    return "forward" not in vars(module) and len(inspect.signature(type(module).forward).parameters) == 2  # with itself


def _drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# ---- the norm ----


def _as_norm(module: nn.Module) -> Made | None:
    """Fit a root-mean-square norm with a gain of `weight`, or of `weight + 1`."""
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or list(module.children()) or not _takes_one(module):
        return None
    eps = next((vars(module)[name] for name in ("variance_epsilon", "eps") if name in vars(module)), None)
    if not isinstance(eps, float) or isinstance(module, nn.RMSNorm | nn.LayerNorm):
        return None
    weight, x = _drawn(8), _drawn(1, 3, 8) * eps**0.5  # so small that eps counts
    bare = _bare(module, {}, weight=weight)
    for offset in (0.0, 1.0):
        formula = functools.partial(_normed, weight=weight, eps=eps, offset=offset)
        if _agree(functools.partial(type(module).forward, bare), formula, x):
            return {"forward": _norm_forward, "_eps": eps, "_offset": offset, "_base": type(module)}
    return None


def _normed(x: Tensor, *, weight: Tensor, eps: float, offset: float) -> Tensor:
    return plain.norm(x.flatten(0, 1), weight, eps, offset)[0].view(x.shape)


def _norm_forward(self: Any, hidden_states: Tensor, residual: Any = None) -> Any:
    """Return the norm; with a residual stream, the norm of the sum, and the sum."""
    streams = [residual] if isinstance(residual, Tensor) else []
    if any(each.dtype is not self.weight.dtype for each in (hidden_states, *streams)):
        # As the model does, where the weight has another dtype.
        total = residual + hidden_states if isinstance(residual, Tensor) else hidden_states
        out = self._base.forward(self, total)
        return out if residual is None else (out, total)
    if isinstance(residual, Tensor):
        return added_and_normed(hidden_states, residual, self.weight, self._eps, self._offset)
    out, again = normed(hidden_states, self.weight, self._eps, self._offset)
    return (out, again) if residual is AGAIN else out


# ---- rotary positions ----


def _as_rotary(module: nn.Module) -> Made | None:
    """Fit attention that rotates the halves of its queries and keys: only its `forward` gets another function."""
    forward = type(module).forward
    if ROTATES not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return None
    own = forward.__globals__.get(ROTATES)
    if own is None or not _rotates(own):
        return None
    return {"forward": _with_rotation(forward, own)}


@functools.cache
def _with_rotation(forward: Any, own: Callable[..., Any]) -> Any:
    """Return `forward` with another function for its rotation; its module keeps its own."""

    def rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        whole = q.dim() == 4 and cos.dim() == 3 and cos.shape[-1] == q.shape[-1] == k.shape[-1]
        if more or named or not whole or not q.dtype is k.dtype is cos.dtype:
            return cast(tuple[Tensor, Tensor], own(q, k, cos, sin, *more, **named))
        return rotated(q, k, cos, sin)

    known = forward.__globals__ | {ROTATES: rotation}
    made = types.FunctionType(forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


@functools.cache
def _rotates(own: Callable[..., Any]) -> bool:
    k, cos, sin = _drawn(1, 2, 5, 8), _drawn(1, 5, 8), _drawn(1, 5, 8)

    def both(rotation: Callable[..., tuple[Tensor, Tensor]], *more: Any) -> Callable[[Tensor], Tensor]:
        """Return a rotation of queries and keys, side by side, as a function of the queries."""
        return lambda q: torch.cat(rotation(q, q[:, :2] + k, cos, sin, *more), dim=1)

    return _agree(both(own), both(plain.rotate, False), _drawn(1, 3, 5, 8))


# ---- the gate of an MLP ----


def _as_gate(module: nn.Module) -> Made | None:
    """Fit an MLP whose gate and way up are two linear layers, or one."""
    children = dict(module.named_children())
    names = next((names for names in (APART, TOGETHER) if set(names) <= set(children)), None)
    rest = set(children) - set(names or ())
    own = any(True for _ in module.parameters(recurse=False))
    if names is None or len(rest) > 1 or own or not _takes_one(module):
        return None
    activation = next((name for name in ("act_fn", "activation_fn") if hasattr(module, name)), None)
    if activation is None or rest - {activation}:
        return None
    kind = _kind(getattr(module, activation))
    if kind is None:
        return None
    sizes = {"gate_proj": (4, 6), "up_proj": (4, 6), "down_proj": (6, 4), "gate_up_proj": (4, 12)}
    linear = {name: nn.Linear(*sizes[name], bias=False, dtype=torch.float64) for name in names}
    bare = _bare(module, linear | {name: children[name] for name in rest})

    def formula(x: Tensor) -> Tensor:
        up = [linear[name](x) for name in names[:-1]]
        gate, above = up if names is APART else up[0].chunk(2, dim=-1)
        return linear["down_proj"](activated(gate, kind)[0] * above)

    if not _agree(functools.partial(type(module).forward, bare), formula, _drawn(1, 3, 4)):
        return None
    return {"forward": _apart_forward if names is APART else _together_forward, "_kind": kind}


def _kind(activation: Any) -> str | None:
    def fits(kind: str) -> bool:
        return _agree(activation, lambda x: activated(x, kind)[0], torch.linspace(-6, 6, 49, dtype=torch.float64))

    return next(filter(fits, KINDS), None)


def _apart_forward(self: Any, x: Tensor) -> Any:
    return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self._kind))


def _together_forward(self: Any, hidden_states: Tensor) -> Any:
    gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
    return self.down_proj(gated(gate, up, self._kind))


# ---- a layer: its residual stream ----


def _as_layer(module: nn.Module) -> Made | None:
    """Fit a layer that adds attention of the norm, then the MLP of the norm, to its residual stream."""
    children = dict(module.named_children())
    if set(children) != set(LAYER) or any(_as_norm(children[name]) is None for name in (LAYER[0], LAYER[2])):
        return None
    before, attention, after, mlp = (_StandIn(factor) for factor in (0.9, 1.1, 1.3, 0.7))
    attention.gives_tuple = True
    bare = _bare(module, dict(zip(LAYER, (before, attention, after, mlp), strict=True)))
    handed = {name: object() for name in ("position_embeddings", "position_ids", "ring_batch", "decoding")}
    quiet = {"attention_mask": None, "past_key_values": None, "use_cache": False}

    def formula(x: Tensor) -> Tensor:
        middle = x + attention.of(before.of(x))
        return middle + mlp.of(after.of(middle))

    if not _agree(lambda x: type(module).forward(bare, x, **quiet, **handed), formula, _drawn(1, 3, 4)):
        return None
    # All that is handed to the layer goes on to its attention, and nothing else does.
    if attention.given != {"hidden_states", *quiet, *handed} or before.given or after.given or mlp.given:
        return None
    return {"forward": _layer_forward}


class _StandIn(nn.Module):
    """Some function of its input alone, which notes the names of its other arguments."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.gives_tuple = factor, False
        self.given: set[str] = set()

    def of(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + self.factor * x

    def forward(self, *args: Tensor, **named: Any) -> Any:
        self.given = set(named)
        x = args[0] if args else named["hidden_states"]
        return (self.of(x), None) if self.gives_tuple else self.of(x)


def _layer_forward(self: Any, hidden_states: Tensor, **handed: Any) -> Any:
    normal, residual = self.input_layernorm(hidden_states, AGAIN)
    attended = self.self_attn(hidden_states=normal, **handed)[0]
    normal, residual = self.post_attention_layernorm(attended, residual)
    return residual + self.mlp(normal)


_TRIED: dict[str, Callable[[nn.Module], Made | None]] = {
    "norm": _as_norm,
    "rotary positions": _as_rotary,
    "gate": _as_gate,
    "residual stream": _as_layer,
}
