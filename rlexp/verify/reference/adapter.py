"""LoRA (arXiv 2106.09685) a second time: small matrices beside linear layers, under the names that peft gives them."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rlexp.config.schema import LoraConfig


@dataclass(frozen=True)
class Said:
    """What makes an adapter: keys of the configuration, or of the folder that it goes on from."""

    targets: list[str]
    rank: int
    scale: float
    also: list[str]
    saved: dict[str, Tensor]

    @staticmethod
    def of(cfg: LoraConfig) -> Said:
        if cfg.path is None:
            root = math.sqrt(cfg.rank) if cfg.rslora else cfg.rank
            return Said(cfg.targets, cfg.rank, cfg.alpha / root, cfg.also, {})
        folder = Path(cfg.path).expanduser()
        said = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        root = math.sqrt(said["r"]) if said.get("use_rslora") else said["r"]
        saved = load_file(folder / "adapter_model.safetensors")
        saved = {key.removeprefix("base_model.model."): tensor for key, tensor in saved.items()}
        targets, also = said["target_modules"], said.get("modules_to_save")
        return Said(list(targets), said["r"], said["lora_alpha"] / root, list(also or []), saved)


class Added(nn.Module):
    """A linear layer, and the product of two small matrices added to what it says."""

    def __init__(self, base: Any, name: str, said: Said) -> None:
        super().__init__()
        self.base_layer, self.scale = base, said.scale
        inputs, outputs = base.in_features, base.out_features
        # without memory, so that the seed's first numbers are those of the first matrix
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, said.rank, bias=False, device="meta")})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(said.rank, outputs, bias=False, device="meta")})
        if said.saved:
            first, second = (said.saved[f"{name}.{each}.weight"].float() for each in ("lora_A", "lora_B"))
        else:
            first, second = torch.empty(said.rank, inputs), torch.zeros(outputs, said.rank)
            nn.init.kaiming_uniform_(first, a=math.sqrt(5))
        for held, weight in ((self.lora_A, first), (self.lora_B, second)):
            held["default"].weight = nn.Parameter(weight.double())

    def forward(self, x: Tensor) -> Tensor:
        said: Tensor = self.base_layer(x)
        return said + self.lora_B["default"](self.lora_A["default"](x)) * self.scale


class Whole(nn.Module):
    """A module beside which a copy is trained: the copy computes."""

    def __init__(self, module: nn.Module, name: str, said: Said) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module)})
        for leaf, parameter in self.modules_to_save["default"].named_parameters():
            if said.saved:
                parameter.data = said.saved[f"{name}.{leaf}"].double()

    @property
    def weight(self) -> Any:
        return self.modules_to_save["default"].weight

    @property
    def in_features(self) -> Any:
        return self.modules_to_save["default"].in_features

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.modules_to_save["default"](*args, **kwargs)


def adapted(model: Any, cfg: LoraConfig, seed: int, *, trunk_of: str = "", scores: bool = False) -> Any:
    """Put an adapter into a model of float64, and leave nothing else of it trained. `trunk_of` is how the names of a
    trunk's layers begin in the whole model."""
    said = Said.of(cfg)
    head = None if trunk_of else model.get_output_embeddings() or model.score
    also = [*said.also, *(["score"] if scores and "score" not in said.also else [])]
    model.requires_grad_(False)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in names:
            if not said.targets or any(_ends(name, each) for each in said.targets):
                _replace(model, name, Added(model.get_submodule(name), trunk_of + name, said))
    for name in [name for name, _ in model.named_modules() if any(_ends(name, each) for each in also)]:
        _replace(model, name, Whole(model.get_submodule(name), trunk_of + name, said))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".default." in name)
    return model


def _ends(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
