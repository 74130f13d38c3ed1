"""An adapter on its way out: in plain peft, and merged in plain transformers, a model computes what was trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlexp.config.load import compose_config
from rlexp.config.schema import HFModelConfig, LoraConfig
from rlexp.training.model.adapter import layers_of
from rlexp.training.model.export import AdapterExport, Export, export
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.model.policy import Policy
from tests.helpers.adapters import adapter_of, loaded, logps_by
from tests.helpers.models import untied
from tests.helpers.ranks import seeded

# Each key of an adapter, with a value that no other case has; `path` stands for folders that plain peft wrote.
KEYS = {
    "rank": ("adapter.rank=3",),
    "alpha": ("adapter.alpha=5",),
    "rslora": ("adapter.rslora=true", "adapter.rank=9"),
    "targets": ("adapter.targets=[q_proj,down_proj]",),
    "also": ("adapter.also=[norm,lm_head]",),
    "path": (),
}
FOLDERS: dict[str, dict[str, Any]] = {
    "stabilised": {"use_rslora": True, "r": 9},
    "a pattern": {"alpha_pattern": {"layers.0.self_attn.q_proj": 64}, "rank_pattern": {"layers.1.mlp.down_proj": 2}},
}
LEFT_OUT = {"name", "dropout"}  # one kind is an adapter, and no share of its inputs can be dropped
# Sums of float32 log-probabilities in another order. Measured: 1.5e-7; without its adapter a model is 1.4e-3 off.
ROUNDING = 1e-6


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untied(tmp_path_factory.mktemp("base"))


def trained(base: Path, cfg: LoraConfig) -> Policy:
    """A policy whose adapter has been moved, as if by training."""
    policy = Policy(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    policy.adapt(cfg, base=(str(base), None), seed=1, copy=False)
    for number, (_, parameter) in enumerate(policy.named()):
        if parameter.requires_grad:
            parameter.data += 0.2 * seeded(*parameter.shape, seed=number, dtype=torch.float32)
    return policy


def said_by(model: Any) -> Tensor:
    tokens = [torch.randint(259, (length,), generator=torch.Generator().manual_seed(length)) for length in (20, 33)]
    return torch.tensor(logps_by(model.eval(), [(each, 5) for each in tokens]), dtype=torch.float64)


def exports_of(base: Path, policy: Policy, place: Path) -> Sequence[Any]:
    """Load what is written of it: the adapter, the model with it, and the same from the adapter's description."""
    adapter, tokenizer = policy.adapter, byte_tokenizer()
    assert adapter is not None
    weights = [(name, parameter.detach()) for name, parameter in policy.named()]
    only = [(name, parameter.detach()) for name, parameter in policy.named() if parameter.requires_grad]
    alone = AdapterExport(adapter, HFModelConfig(path=str(base)), torch.float32, place / "adapter")
    export(alone, only, tokenizer)
    export(Export(policy.model, torch.float32, place / "merged"), adapter.merged(weights), tokenizer)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(policy.model.config)
    again = layers_of(empty, place / "adapter")
    export(Export(empty, torch.float32, place / "again"), again.merged(weights), tokenizer)
    return loaded(base, place / "adapter"), loaded(place / "merged"), loaded(place / "again")


def holds(base: Path, cfg: LoraConfig, place: Path) -> None:
    policy = trained(base, cfg)
    meant = said_by(policy.model)
    assert float((said_by(loaded(base)) / meant - 1).abs().min()) > 1000 * ROUNDING, "the adapter changes nothing"
    for model in exports_of(base, policy, place):
        torch.testing.assert_close(said_by(model), meant, rtol=ROUNDING, atol=0)


@pytest.mark.parametrize("key", [key for key in KEYS if key != "path"])
def test_an_export_computes_what_was_trained(key: str, base: Path, tmp_path: Path) -> None:
    cfg = compose_config(["launch.device=cpu", "model=hf", f"model.path={base}", "adapter=lora", *KEYS[key]]).adapter
    assert isinstance(cfg, LoraConfig)
    assert getattr(cfg, key) != getattr(LoraConfig(), key)
    holds(base, cfg, tmp_path)


@pytest.mark.parametrize("kind", FOLDERS)
def test_an_export_of_an_adapter_from_a_folder_computes_what_was_trained(kind: str, base: Path, tmp_path: Path) -> None:
    began = adapter_of(base, tmp_path / "began", modules_to_save=["norm"], **FOLDERS[kind])
    holds(base, LoraConfig(path=str(began)), tmp_path)


def test_every_key_of_an_adapter_has_a_case() -> None:
    assert KEYS.keys() | LEFT_OUT == {field.name for field in dataclasses.fields(LoraConfig)}
