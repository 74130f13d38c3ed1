"""LoRA (arXiv 2106.09685) a second time: small matrices beside linear layers, under the names that peft gives them."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlexp.config.schema import LoraConfig


class Lora:
    """What makes an adapter: keys of the configuration, or the folder that it continues from."""

    def __init__(self, cfg: LoraConfig) -> None:
        self.cfg = cfg
        self.keys: dict[str, Any] = {"r": cfg.rank, "lora_alpha": cfg.alpha, "use_rslora": cfg.rslora}
        self.saved: dict[str, Tensor] = {}
        if cfg.path is not None:
            folder = Path(cfg.path).expanduser()
            self.keys = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
            for key, tensor in load_file(folder / "adapter_model.safetensors").items():
                self.saved[key.removeprefix("base_model.model.")] = tensor.double()

    def adapts(self, name: str) -> bool:
        """Whether a linear layer has an adapter; a folder has the weights of those that have."""
        if self.saved:
            return f"{name}.lora_A.weight" in self.saved
        return not self.cfg.targets or _named(name, self.cfg.targets)

    def whole(self, name: str, module: nn.Module, *, scores: bool) -> bool:
        """Whether a module is trained whole."""
        if self.saved:
            own = [f"{name}.{leaf}" for leaf, _ in module.named_parameters(recurse=False)]
            return bool(own) and all(key in self.saved for key in own)
        return _named(name, [*self.cfg.also, *(["score"] if scores else [])])

    def matrices(self, name: str, base: Any) -> tuple[Tensor, Tensor, float]:
        """Return the two matrices of a layer's adapter, and the factor of their product."""
        of_layer = dict(self.keys)
        for key, patterns in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
            for pattern, value in reversed((self.keys.get(patterns) or {}).items()):  # the first that matches counts
                if re.match(rf"(.*\.)?({pattern})$", name):
                    of_layer[key] = value
        rank = int(of_layer["r"])
        scale = float(of_layer["lora_alpha"]) / (math.sqrt(rank) if self.keys.get("use_rslora") else rank)
        if self.saved:
            return self.saved[f"{name}.lora_A.weight"], self.saved[f"{name}.lora_B.weight"], scale
        inputs, outputs = (base.nx, base.nf) if isinstance(base, Conv1D) else (base.in_features, base.out_features)
        first = torch.empty(rank, inputs)
        nn.init.kaiming_uniform_(first, a=math.sqrt(5))
        return first.double(), torch.zeros(outputs, rank, dtype=torch.float64), scale


class Added(nn.Module):
    """A linear layer, and the product of two small matrices added to its outputs."""

    def __init__(self, base: nn.Module, first: Tensor, second: Tensor, scale: float) -> None:
        super().__init__()
        self.base_layer, self.scale = base, scale
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        for held, weight in ((self.lora_A, first), (self.lora_B, second)):
            held["default"] = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")  # draws no numbers
            held["default"].weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.base_layer(x)
        return outputs + self.lora_B["default"](self.lora_A["default"](x)) * self.scale


class Whole(nn.Module):
    """A module beside which a copy is trained: the copy computes."""

    def __init__(self, module: nn.Module, saved: Mapping[str, Tensor], name: str) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module)})
        for leaf, parameter in self.modules_to_save["default"].named_parameters():
            if saved:
                parameter.data = saved[f"{name}.{leaf}"]

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
    lora = Lora(cfg)
    head = None if trunk_of else model.get_output_embeddings() or model.score
    model.requires_grad_(False)
    modules = dict(model.named_modules())
    whole = [name for name, module in modules.items() if lora.whole(trunk_of + name, module, scores=scores)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, module in modules.items():
            linear = isinstance(module, nn.Linear | Conv1D) and module is not head and name not in whole
            if linear and lora.adapts(trunk_of + name):
                model.set_submodule(name, Added(module, *lora.matrices(trunk_of + name, module)))
    for name in whole:
        model.set_submodule(name, Whole(modules[name], lora.saved, trunk_of + name))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".default." in name)
    return model


def _named(name: str, names: Sequence[str]) -> bool:
    return any(f".{name}".endswith(f".{each}") for each in names)
