"""Which modules get fused pieces: those that compute what a piece computes, of whatever family."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from rlexp.training.model.float64 import precise
from rlexp.training.model.fused.classes import fuse, fused_class
from rlexp.training.model.policy import cast_parameters
from tests.helpers.models import SHAPE
from tests.helpers.ranks import seeded

ALL = {"residual stream": 2, "rotary positions": 2, "gate": 2, "norm": 5}
NARROW = {**SHAPE, "head_dim": 8, "pad_token_id": 0}
# What is fused of two layers, and what is left.
FAMILIES: dict[str, tuple[PreTrainedConfig, dict[str, int], set[str]]] = {
    "llama": (LlamaConfig(**SHAPE), ALL, set()),
    "its queries and keys have norms": (Qwen3Config(**NARROW), ALL | {"norm": 9}, set()),
    "gate and way up are one product": (Phi3Config(**NARROW), ALL | {"residual stream": 0}, {"Phi3DecoderLayer"}),
    "norms on both sides": (Gemma2Config(**NARROW), ALL | {"residual stream": 0, "norm": 9}, {"Gemma2DecoderLayer"}),
    "a residual stream that is scaled": (
        GraniteConfig(**SHAPE, residual_multiplier=0.22), ALL | {"residual stream": 0}, {"GraniteDecoderLayer"}),
    "experts": (
        Qwen3MoeConfig(**NARROW, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
        ALL | {"norm": 9, "gate": 0}, {"Qwen3MoeSparseMoeBlock", "Qwen3MoeExperts", "Qwen3MoeTopKRouter"}),
    "another kind of norm, MLP and positions": (
        GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=4), {}, {"GPT2Block", "GPT2Attention", "GPT2MLP"}),
}  # fmt: skip
each_family = pytest.mark.parametrize(("config", "pieces", "left"), FAMILIES.values(), ids=FAMILIES)


def model_of(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    options = {"experts_implementation": "eager"} if hasattr(config, "num_experts") else {}
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager", **options)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape)
    cast_parameters(model, torch.float64)
    return model.eval()


def both_passes(model: Any) -> list[Tensor]:
    tokens = torch.arange(24).view(1, -1) * 7 % 259
    with precise(torch.float64):
        logits = model(input_ids=tokens, use_cache=False).logits
        logits.backward(seeded(*logits.shape, seed=1))
    return [logits, *(parameter.grad for parameter in model.parameters())]


@each_family
def test_a_model_computes_the_same_with_fused_pieces(
    config: PreTrainedConfig, pieces: dict[str, int], left: set[str]
) -> None:
    """Logits and the gradients of all weights, in float64; and what was fused is what the family has."""
    model = model_of(config)
    fused = copy.deepcopy(model)
    found = fuse(fused)
    assert found.pieces == {piece: count for piece, count in pieces.items() if count}
    assert set(found.left) == left
    for ours, theirs in zip(both_passes(fused), both_passes(model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_what_is_fused_and_what_is_left_is_said() -> None:
    """As a run's header has it."""
    config, *_ = FAMILIES["a residual stream that is scaled"]
    said = "2 × rotary positions, 2 × gate, 5 × norm; left as they are: 2 × GraniteDecoderLayer"
    assert str(fuse(model_of(config))) == said
    config, *_ = FAMILIES["another kind of norm, MLP and positions"]
    left = "2 × GPT2Block, 2 × GPT2Attention, 2 × GPT2MLP"
    assert str(fuse(model_of(config))) == f"nothing of this model; left as they are: {left}"


def test_a_copy_of_a_fused_model_computes_with_its_own_weights() -> None:
    model = model_of(LlamaConfig(**SHAPE))
    fuse(model)
    other = copy.deepcopy(model)
    before = both_passes(model)[0]
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(both_passes(other)[0], before)


def test_other_models_keep_transformers_code() -> None:
    """A module's class changes, and nothing of transformers: an independent reference may run beside it."""
    rotation = modeling_llama.apply_rotary_pos_emb
    fused, plain = (model_of(LlamaConfig(**SHAPE)) for _ in range(2))
    fuse(fused)
    assert modeling_llama.apply_rotary_pos_emb is rotation
    assert type(plain.model.norm) is LlamaRMSNorm
    for module in fused.modules():
        assert type(module).__module__.startswith(("transformers.", "torch."))
    assert isinstance(fused.model.layers[0], LlamaDecoderLayer)
    assert type(fused.model.layers[0]).__name__ == "LlamaDecoderLayer"


class Centred(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class Clamped(LlamaMLP):
    """As some families have it, whose bounds common numbers do not reach."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(-16, 16))


class Gated(LlamaRMSNorm):
    """A second argument that is no residual stream."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states if gate is None else hidden_states * gate)


class Scaled(LlamaMLP):
    """A parameter of its own, which nothing may ask for its truth."""

    def __init__(self, like: LlamaMLP) -> None:
        super().__init__(like.config)
        self.scale = nn.Parameter(torch.ones(2))


class Parallel(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **handed: Any) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        return hidden_states + self.self_attn(hidden_states=normed, **handed)[0] + self.mlp(normed)


class Deaf(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, ring_batch: Any = None, **handed: Any) -> Tensor:  # noqa: ARG002
        return super().forward(hidden_states, **handed)


def at(model: Any, place: str) -> nn.Module:
    return model.get_submodule(place)


@pytest.mark.parametrize(
    ("place", "other"),
    [("model.norm", Centred), ("model.norm", Gated), ("model.layers.0.mlp", Clamped), ("model.layers.1", Parallel),
     ("model.layers.1", Deaf)],
)  # fmt: skip
def test_what_computes_otherwise_is_left_as_it_is(place: str, other: type[nn.Module]) -> None:
    """Under the same names, with the same weights: only its numbers tell."""
    model = model_of(LlamaConfig(**SHAPE))
    at(model, place).__class__ = other
    plain = copy.deepcopy(model)
    assert set(fuse(model).left) == {other.__name__}
    assert type(at(model, place)) is other
    for ours, theirs in zip(both_passes(model), both_passes(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_a_module_with_parameters_of_its_own_is_left() -> None:
    mlp = LlamaMLP(LlamaConfig(**SHAPE))
    assert fused_class(mlp) is not None
    assert fused_class(Scaled(mlp)) is None


def test_a_module_is_fused_once() -> None:
    """And not at all if its instance has a `forward` of its own, which is called in the place of its class's."""
    model = model_of(LlamaConfig(**SHAPE))
    fuse(model)
    before = type(model.model.norm)
    assert not fuse(model).pieces
    assert type(model.model.norm) is before
    norm = LlamaRMSNorm(8)
    norm.forward = lambda x: x  # type: ignore[method-assign]
    assert fused_class(norm) is None


def test_a_weight_in_another_dtype_is_left_to_the_models_own_code() -> None:
    """As under an engine that keeps some weights wider."""
    model = model_of(LlamaConfig(**SHAPE))
    fuse(model)
    norm = model.model.layers[0].post_attention_layernorm
    x, residual = (seeded(1, 5, 32, seed=n).bfloat16() for n in (1, 2))
    norm.float()
    wanted = LlamaRMSNorm.forward(norm, residual + x)
    normed, total = norm(x, residual)
    assert torch.equal(normed, wanted)
    assert torch.equal(total, residual + x)
