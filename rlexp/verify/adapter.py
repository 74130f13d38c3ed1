"""LoRA (arXiv 2106.09685) a second time: small matrices beside linear layers, under the names that peft gives them."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlexp.config.schema import LoraConfig


@dataclass(frozen=True)
class Said:
    """What makes an adapter: keys of the configuration, or the folder that it goes on from."""

    cfg: LoraConfig
    described: dict[str, Any]  # adapter_config.json
    saved: dict[str, Tensor]

    @staticmethod
    def of(cfg: LoraConfig) -> Said:
        if cfg.path is None:
            return Said(cfg, {"r": cfg.rank, "lora_alpha": cfg.alpha, "use_rslora": cfg.rslora}, {})
        folder = Path(cfg.path).expanduser()
        saved = load_file(folder / "adapter_model.safetensors")
        return Said(
            cfg,
            json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")),
            {key.removeprefix("base_model.model."): tensor for key, tensor in saved.items()},
        )

    def adapts(self, name: str) -> bool:
        """Whether a linear layer has an adapter; a folder has the weights of those that have."""
        if self.saved:
            return f"{name}.lora_A.weight" in self.saved
        return not self.cfg.targets or any(_ends(name, each) for each in self.cfg.targets)

    def whole(self, name: str, module: nn.Module, *, scores: bool) -> bool:
        """Whether a module is trained whole."""
        if self.saved:
            own = [f"{name}.{leaf}" for leaf, _ in module.named_parameters(recurse=False)]
            return bool(own) and all(key in self.saved for key in own)
        return any(_ends(name, each) for each in [*self.cfg.also, *(["score"] if scores else [])])

    def rank(self, name: str) -> int:
        return int(self._of_pattern("rank_pattern", name, self.described["r"]))

    def scale(self, name: str) -> float:
        rank = self.rank(name)
        alpha = float(self._of_pattern("alpha_pattern", name, self.described["lora_alpha"]))
        return alpha / (math.sqrt(rank) if self.described.get("use_rslora") else rank)

    def _of_pattern(self, key: str, name: str, usual: Any) -> Any:
        found = [value for pattern, value in (self.described.get(key) or {}).items()
                 if re.match(rf"(.*\.)?({pattern})$", name)]  # fmt: skip
        return found[0] if found else usual


class Added(nn.Module):
    """A linear layer, and the product of two small matrices added to what it says."""

    def __init__(self, base: Any, name: str, said: Said) -> None:
        super().__init__()
        self.base_layer, self.scale, rank = base, said.scale(name), said.rank(name)
        inputs, outputs = (base.nx, base.nf) if isinstance(base, Conv1D) else (base.in_features, base.out_features)
        # without memory, so that the seed's first numbers are those of the first matrix
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, rank, bias=False, device="meta")})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, outputs, bias=False, device="meta")})
        if said.saved:
            first, second = (said.saved[f"{name}.{each}.weight"] for each in ("lora_A", "lora_B"))
        else:
            first, second = torch.empty(rank, inputs), torch.zeros(outputs, rank)
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
    model.requires_grad_(False)
    whole = [name for name, module in model.named_modules() if said.whole(trunk_of + name, module, scores=scores)]
    names = [name for name, module in model.named_modules()
             if isinstance(module, nn.Linear | Conv1D) and module is not head and name not in whole]  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in names:
            if said.adapts(trunk_of + name):
                _replace(model, name, Added(model.get_submodule(name), trunk_of + name, said))
    for name in whole:
        _replace(model, name, Whole(model.get_submodule(name), trunk_of + name, said))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".default." in name)
    return model


def _ends(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
