"""Export of an adapter alone, in peft's format: its weights, its description, and the tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlexp.base.files import sync
from rlexp.config.adapter_folder import BASE, WEIGHTS
from rlexp.config.content_ids import of_weights
from rlexp.config.schema import ExportDtype, HFModelConfig, ModelConfig
from rlexp.training.model.adapter import Adapter
from rlexp.training.model.export import dtype_of, save_tensors
from rlexp.training.model.prepared import commit_of, prepared


def adapter_dtype(chosen: ExportDtype) -> torch.dtype:
    """Return the dtype to write: float32 unless another is asked for, since an adapter is small, and trained in it."""
    return dtype_of(chosen, bf16=False)


def describe_adapter(adapter: Adapter, place: Path) -> None:
    """Write what peft says of an adapter beside its weights."""
    config = copy.copy(adapter.config)
    config.inference_mode = True  # as peft writes it
    if not isinstance(config.target_modules, str):
        config.target_modules = sorted(config.target_modules)  # peft makes a set of them
    config.save_pretrained(str(place))


class AdapterExport:
    """An adapter on its way into a folder. Weights come in one by one, under the names that the policy has for them."""

    pauses: frozenset[str] = frozenset()  # all is written at the end

    def __init__(self, adapter: Adapter, model: ModelConfig, dtype: torch.dtype, place: Path) -> None:
        self._adapter, self._model, self._dtype, self._place = adapter, model, dtype, place
        self._held: dict[str, Tensor] = {}

    def describe(self, tokenizer: Any) -> None:
        describe_adapter(self._adapter, self._place)
        tokenizer.save_pretrained(self._place)

    def add(self, name: str, weight: Tensor) -> None:
        for key, tensor in self._adapter.in_files([(name, weight)]):
            self._held[key] = tensor.detach().to("cpu", self._dtype, copy=True).contiguous()

    def write(self) -> None:
        return

    def close(self) -> None:
        contents = contents_of_base(self._model)
        save_tensors(self._held, self._place / WEIGHTS, {} if contents is None else {BASE: contents})
        for path in self._place.iterdir():
            sync(path)
        sync(self._place)


def contents_of_base(model: ModelConfig) -> str | None:
    """Return a short text of a model's contents; None where the model is no folder here."""
    folder = Path(model.path).expanduser() if isinstance(model, HFModelConfig) else None
    return of_weights(folder) if folder is not None and folder.is_dir() else None


def named_base(model: ModelConfig) -> tuple[str | None, str | None]:
    """Return the model that an adapter belongs to, as its description names it: a folder, or a name on the hub and a
    commit."""
    base = prepared(model)
    if not isinstance(base, HFModelConfig):
        return None, None
    folder = Path(base.path)
    return (str(folder.absolute()), None) if folder.is_dir() else (base.path, commit_of(base) or base.revision)


def export_adapter(
    adapter: Adapter, model: ModelConfig, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, tokenizer: Any,
    place: Path,
) -> None:  # fmt: skip
    """Write an adapter in one process."""
    place.mkdir(parents=True)
    out = AdapterExport(adapter, model, dtype, place)
    out.describe(tokenizer)
    for name, weight in weights:
        out.add(name, weight)
    out.close()
