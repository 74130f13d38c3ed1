"""Export of a trained model in transformers' format: weights in shards, configuration, tokenizer, template; or of an
adapter alone, in peft's.

Weights come in one by one and are written as soon as a file is whole, so the host holds one file's weights at a time.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
from transformers.utils.logging import disable_progress_bar

from rlexp.base.errors import ModelError
from rlexp.base.files import open_to_others, sync, write_text
from rlexp.config.adapter_folder import BASE, WEIGHTS
from rlexp.config.content_ids import of_weights
from rlexp.config.schema import ExportDtype, HFModelConfig, ModelConfig
from rlexp.training.model.adapter import Adapter, plain_name
from rlexp.training.model.placing import DTYPE_NAMED
from rlexp.training.model.policy import cast_parameters
from rlexp.training.model.score_head import has_score_head

SHARD = 5_000_000_000  # most bytes of a file, unless one tensor is larger


def dtype_of(chosen: ExportDtype, *, bf16: bool = False) -> torch.dtype:
    """Return the dtype to write; `auto` is the dtype of the run, or float32 for a float64 run and for an adapter, since
    it is small, and trained in it."""
    return DTYPE_NAMED.get(chosen.value, torch.bfloat16 if bf16 else torch.float32)


class Export:
    """A model on its way into a folder: weights come in one by one, and a file is written when it has all of its own.

    Call `describe`; then `add` for each parameter of `like` in its order, and `write` after those in `pauses`. The
    parameters of `like` itself may be on any device, or in pieces; of an adapter in it nothing is written, and weights
    have their plain names.
    """

    def __init__(self, like: PreTrainedModel, dtype: torch.dtype, place: Path) -> None:
        self._place, self._dtype = place, dtype
        self._model = _without_memory(like)
        cast_parameters(self._model, dtype)
        if like.can_generate():
            self._model.generation_config = like.generation_config
        kept = _without_copies(self._model)
        self._held = {name: each.to("cpu", kept[name].dtype) for name, each in _buffers(like).items() if name in kept}
        names = [plain for name, _ in like.named_parameters() if (plain := plain_name(name)) is not None]
        self._kept_as = {name: own for name, own in _tied_to(self._model, kept).items() if name in names}
        arriving = {name: kept[name] for name in (*self._held, *(self._kept_as.get(name) for name in names)) if name}
        lost = sorted(kept.keys() - arriving.keys())
        if lost:
            raise ModelError(f"{place}: cannot be exported, since there are no weights for {', '.join(lost[:4])}.")
        self._groups = _converted_together(self._model, arriving)
        self._plan([_as_in_files(self._model, {name: arriving[name] for name in group}) for group in self._groups])
        self._ready: dict[str, Tensor] = {}  # by their names in the files

    def _plan(self, converted: Sequence[Mapping[str, Tensor]]) -> None:
        """Decide which file holds what, and after which parameters files are whole."""
        files: list[list[str]] = [[]]
        ends: dict[int, str] = {}
        room = SHARD
        for group, parts in zip(self._groups, converted, strict=True):
            for key, tensor in parts.items():
                if files[-1] and tensor.nbytes > room:
                    files.append([])
                    room = SHARD
                files[-1].append(key)
                room -= tensor.nbytes
                ends[len(files)] = group[-1]
        pattern = "model.safetensors" if len(files) == 1 else "model-{:05d}-of-{:05d}.safetensors"
        self._files = {pattern.format(at, len(files)): keys for at, keys in enumerate(files, 1)}
        self._unwritten = dict(self._files)
        self._bytes = sum(tensor.nbytes for parts in converted for tensor in parts.values())
        whole_after = set(ends.values())
        self.pauses = frozenset(name for name, own in self._kept_as.items() if own in whole_after)

    def describe(self, tokenizer: Any) -> None:
        """Write all but the weights. transformers' own `save_pretrained` would leave most of it out on ranks but 0."""
        disable_progress_bar()
        config = self._model.config
        config.dtype, config.architectures = self._dtype, [type(self._model).__name__]
        if self._model.is_remote_code():
            custom_object_save(self._model, self._place, config=config)
        save_description(self._model, tokenizer, self._place)
        if len(self._files) > 1:
            index = {
                "metadata": {"total_parameters": self._model.num_parameters(), "total_size": self._bytes},
                "weight_map": {key: file for file, keys in self._files.items() for key in keys},
            }
            write_text(self._place / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index, indent=2, sort_keys=True) + "\n")
        for path in self._place.iterdir():
            sync(path)

    def add(self, name: str, weight: Tensor) -> None:
        if name in self._kept_as:
            self._held[self._kept_as[name]] = weight.detach().to("cpu", self._dtype, copy=True)

    def write(self) -> None:
        """Write the files whose weights are all here, and let go of those."""
        here = [group for group in self._groups if all(name in self._held for name in group)]
        self._groups = [group for group in self._groups if group not in here]
        for group in here:
            self._ready |= _as_in_files(self._model, {name: self._held.pop(name) for name in group})
        for file, keys in list(self._unwritten.items()):
            if all(key in self._ready for key in keys):
                content = {key: self._ready.pop(key).contiguous() for key in keys}
                save_tensors(content, self._place / file)
                del self._unwritten[file]

    def close(self) -> None:
        assert not self._unwritten, sorted(self._unwritten)
        sync(self._place)


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
        folder = Path(self._model.path).expanduser() if isinstance(self._model, HFModelConfig) else None
        contents = {BASE: of_weights(folder)} if folder is not None and folder.is_dir() else None
        save_tensors(self._held, self._place / WEIGHTS, contents)
        for path in self._place.iterdir():
            sync(path)
        sync(self._place)


def export(out: Export | AdapterExport, weights: Iterable[tuple[str, Tensor]], tokenizer: Any) -> None:
    """Write a model, or an adapter alone, in one process."""
    out.describe(tokenizer)
    for name, weight in weights:
        out.add(name, weight)
        if name in out.pauses:
            out.write()
    out.close()


def save_tensors(content: dict[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    try:
        save_file(content, path, metadata={"format": "pt", **(metadata or {})})
    except SafetensorError as error:  # so it reports a full disk
        raise OSError(f"{path.name}: {error}") from error
    open_to_others(path)
    sync(path)


def has_other_names(like: PreTrainedModel) -> bool:
    """Return whether files hold a model's weights under other names, or cut in another way."""
    state = dict(_without_memory(like).state_dict())
    return _shapes(_as_in_files(like, state)) != _shapes(state)


def _without_memory(like: PreTrainedModel) -> PreTrainedModel:
    config = copy.deepcopy(like.config)
    config._attn_implementation = "sdpa" if type(like)._supports_sdpa else "eager"  # transformers' own attention
    with torch.device("meta"):
        model = type(like)(config)
    model.tie_weights()
    return model


def _without_copies(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return what transformers would save of a model: of tied weights only one."""
    state = remove_tied_weights_from_state_dict(dict(model.state_dict()), model)
    return {name: tensor for name, tensor in state.items() if name not in (model._keys_to_ignore_on_save or ())}


def _tied_to(model: PreTrainedModel, kept: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the name under which each parameter is saved: its own, or that of the one that it is tied to."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = {id(parameter): name for name, parameter in parameters.items() if name in kept}
    return {name: names[id(parameter)] for name, parameter in parameters.items() if id(parameter) in names}


def _buffers(like: PreTrainedModel) -> dict[str, Tensor]:
    names = {name for name, _ in like.named_buffers()}
    return {name: tensor.detach() for name, tensor in like.state_dict().items() if name in names}


def _as_in_files(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo what transformers does while it loads: it renames, transposes and joins the tensors of some files."""
    return dict(revert_weight_conversion(model, dict(weights)))


def _converted_together(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the smallest groups of names that transformers can convert without the others, in the order in which they
    are complete: each weight alone, the weights of a layer, or all. What comes out says whether they are large enough.
    """
    asked = _shapes(_as_in_files(model, weights))
    for unit in (lambda name: name, _layer_of):
        groups: dict[str, list[str]] = {}
        for name in weights:
            groups.setdefault(unit(name), []).append(name)
        with contextlib.suppress(Exception):  # of a conversion that misses some of its parts
            parts = [_as_in_files(model, {name: weights[name] for name in group}) for group in groups.values()]
            if asked == _shapes({key: tensor for part in parts for key, tensor in part.items()}):
                places = {name: at for at, name in enumerate(weights)}
                return sorted(groups.values(), key=lambda group: places[group[-1]])
    return [list(weights)]


def _layer_of(name: str) -> str:
    """Return a name up to its layer's number; the whole name if it is outside of layers."""
    match = re.match(r".*?\.\d+\.", name)
    return match[0] if match else name


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def save_description(like: PreTrainedModel, tokenizer: Any, place: Path) -> None:
    """Write all of an exported model but its weights."""
    config = copy.deepcopy(like.config)
    config.architectures = config.architectures or [type(like).__name__]  # a model made here has none
    config.save_pretrained(place)
    if like.can_generate():
        like.generation_config.save_pretrained(place)
    tokenizer.save_pretrained(place)


def described(place: Path, cfg: ModelConfig) -> tuple[PreTrainedModel, Any]:
    """Read what `save_description` wrote: the model without weights, and its tokenizer."""
    trusted = isinstance(cfg, HFModelConfig) and cfg.trust_remote_code
    config = AutoConfig.from_pretrained(place, trust_remote_code=trusted)
    factory = AutoModelForSequenceClassification if has_score_head(config) else AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(config, trust_remote_code=trusted, attn_implementation="eager")
    if (place / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(place)
    return model, AutoTokenizer.from_pretrained(place, trust_remote_code=trusted)


def describe_adapter(adapter: Adapter, place: Path) -> None:
    """Write what peft says of an adapter beside its weights."""
    config = copy.copy(adapter.config)
    config.inference_mode = True  # as peft writes it
    if not isinstance(config.target_modules, str):
        config.target_modules = sorted(config.target_modules)  # peft makes a set of them
    config.save_pretrained(str(place))
