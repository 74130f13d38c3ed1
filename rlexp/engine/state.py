"""What `save` writes and `load` reads, the same for every engine: weights and moments by parameter name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class EngineState:
    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]  # by moment, then by parameter; empty before the first step
    steps: int

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"weight/{name}": _whole(tensor) for name, tensor in self.weights.items()}
        for moment, by_name in self.moments.items():
            tensors |= {f"{moment}/{name}": _whole(tensor) for name, tensor in by_name.items()}
        save_file(tensors, folder / "engine.safetensors", metadata={"steps": str(self.steps)})

    @staticmethod
    def read(folder: Path) -> EngineState:
        found: dict[str, dict[str, Tensor]] = {}
        with safe_open(folder / "engine.safetensors", framework="pt") as file:
            steps = int(file.metadata()["steps"])
            for key in file.keys():  # noqa: SIM118 - a safetensors file, not a dict
                kind, _, name = key.partition("/")
                found.setdefault(kind, {})[name] = file.get_tensor(key)
        return EngineState(found.pop("weight"), found, steps)


def _whole(tensor: Tensor) -> Tensor:
    """safetensors takes neither views nor shared storage."""
    return tensor.detach().cpu().contiguous().clone()
