"""Low-rank adapters (LoRA) of a policy: put in, switched off, merged, and written as peft writes them.

peft makes the layers, in place: the model keeps its class and its configuration. A weight that has an adapter is then
called `q_proj.base_layer.weight`, with `q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight` beside it. A
module that is trained whole beside the adapter stands twice: `original_module`, and `modules_to_save.default`, which is
trained. The plain name of a weight is the one that it has without an adapter.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlexp.base.errors import ModelError, first_line
from rlexp.config.adapter_folder import WEIGHTS, AdapterFolder, read_adapter
from rlexp.config.schema import LoraConfig
from rlexp.config.schema.keys import suggestion
from rlexp.training.model.fused.plain import wide
from rlexp.training.model.placing import placed_copy

TRAINED, STARTING = "default", "starting"  # peft's names of the adapter, and of a frozen copy of it
LINEAR = (nn.Linear, Conv1D)
IN_FILES = "base_model.model."  # how names begin in peft's files
_ADDED = re.compile(r"\.(lora_A|lora_B)\.|\.original_module\.")
_WRAPPED = re.compile(rf"\.(base_layer|modules_to_save\.{TRAINED})(?=\.)")
_STARTING = re.compile(rf"\.{STARTING}(\.|$)")


def plain_name(name: str) -> str | None:
    """Return a parameter's name without an adapter; None if it is only there for one."""
    if _ADDED.search(name) or _STARTING.search(name):
        return None
    return _WRAPPED.sub("", name)


def original_name(name: str) -> str:
    """Return the name that a weight of the original model has without an adapter."""
    return re.sub(r"\.(base_layer|original_module)(?=\.)", "", name)


def without_starting(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield parameters, without those of an adapter's frozen copy, which belongs to the reference model."""
    return ((name, parameter) for name, parameter in named if not _STARTING.search(name))


@dataclasses.dataclass(frozen=True)
class Adapter:
    """The adapter of a model; the critic's own trunk has one like it."""

    config: Any  # peft's LoraConfig, with the targets in words that find the same layers again
    model: nn.Module
    trunk: nn.Module | None = None  # the critic's

    @property
    def layers(self) -> list[Any]:
        """Every layer that behaves otherwise with the adapter than without."""
        return [layer for part in (self.model, self.trunk) if part is not None for layer in _layers(part)]

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Compute as before training: without the adapter, or with the frozen copy of the one that training began with.

        Shim: peft's own switches also change what requires a gradient, which engines that hold pieces of the weights
        must not see. Remove this when peft has one that does not.
        """
        layers = self.layers
        before = [(layer._disable_adapters, layer._active_adapter) for layer in layers]
        for layer in layers:
            if STARTING in (layer.modules_to_save if hasattr(layer, "modules_to_save") else layer.lora_A):
                layer._active_adapter = [STARTING]
            else:
                layer._disable_adapters = True
        try:
            yield
        finally:
            for layer, (disabled, active) in zip(layers, before, strict=True):
                layer._disable_adapters, layer._active_adapter = disabled, active

    def merged(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's weights under their plain names, in their order, with the adapter added to them."""
        layers = {name: module for name, module in self.model.named_modules() if hasattr(module, "lora_A")}
        held: dict[str, Tensor] = {}  # of one layer, until its last part is here
        for name, weight in weights:
            layer, _, part = name.rpartition(".base_layer.")
            if layer:
                held[part] = weight
                continue
            if f".lora_A.{TRAINED}." in name:
                held["A"] = weight
            elif f".lora_B.{TRAINED}." in name:
                layer = name.partition(".lora_B.")[0]
                merged = _merged(layers[layer], held.pop("weight"), held.pop("A"), weight)
                yield f"{layer}.weight", merged
                yield from ((f"{layer}.{part}", tensor) for part, tensor in held.items())
                held.clear()
            elif (plain := plain_name(name)) is not None:
                yield plain, weight

    def in_files(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapter's weights under their names in peft's files."""
        for name, weight in weights:
            if f".{TRAINED}." in name:
                short = name.replace(f".modules_to_save.{TRAINED}.", ".").replace(f".{TRAINED}.", ".")
                yield IN_FILES + short, weight


def in_use(module: nn.Module) -> nn.Module:
    """Return the module that computes: where one is trained whole, the trained one, or the original."""
    if not hasattr(module, "modules_to_save"):
        return module
    wrapper: Any = module
    held = [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]
    return wrapper.original_module if wrapper.disable_adapters or not held else wrapper.modules_to_save[held[0]]


def _layers(part: nn.Module) -> list[Any]:
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    return [module for module in part.modules() if isinstance(module, LoraLayer | ModulesToSaveWrapper)]


def _merged(layer: Any, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    to = wide(weight.dtype)
    added = (b.to(to) @ a.to(to)) * layer.scaling[TRAINED]
    return weight.to(to) + (added.T if layer.fan_in_fan_out else added)


# ---- put in ----


def layers_of(model: Any, description: Path) -> Adapter:
    """Put an adapter's layers into a model without memory, from the description that was saved of them."""
    from peft import LoraConfig as PeftConfig

    config = PeftConfig.from_pretrained(str(description))
    _inject(model, config, TRAINED)
    return Adapter(config, model)


def put_adapter(
    model: Any,
    trunk: Any | None,
    cfg: LoraConfig,
    *,
    base: tuple[str | None, str | None],
    seed: int,
    copy: bool,
    scores: bool,
) -> Adapter:
    """Put an adapter into a model, and into the critic's own trunk, and freeze all else of them.

    A new adapter's weights follow from the seed; its second matrix is zero, so the model computes what it did. `base`
    names the model, and its revision, for the adapter's file. With `copy`, a frozen copy of an adapter from a folder
    stands beside it.
    """
    folder = None if cfg.path is None else _Folder(read_adapter(cfg.path))
    refusing = contextlib.nullcontext if folder is None else folder.refusing
    with refusing():
        whole = _whole_modules(model, cfg.also) if folder is None else folder.whole(model)
        if scores and "score" not in whole:
            whole.append("score")
        config = _new_config(model, cfg, whole) if folder is None else folder.config()
    config.task_type = "SEQ_CLS" if scores else "CAUSAL_LM"
    config.modules_to_save = whole or None
    config.base_model_name_or_path, config.revision = base
    for part, place in ((model, ""), (trunk, model.base_model_prefix)):
        if part is not None:
            part.requires_grad_(False)
            for name in (TRAINED, STARTING) if copy and folder is not None else (TRAINED,):
                with refusing():
                    _inject(part, config if part is model else _as_in(config, model), name, place)
                _fill(part, name, seed, folder, place and f"{place}.")
    if folder is not None:
        folder.refuse_rest()
    return Adapter(config, model, trunk)


def _new_config(model: nn.Module, cfg: LoraConfig, whole: Sequence[str]) -> Any:
    from peft import LoraConfig as PeftConfig

    targets = _shortest(model, _targets(model, cfg.targets, whole))
    # peft writes its alpha as it is given
    alpha = int(cfg.alpha) if cfg.alpha == int(cfg.alpha) else cfg.alpha
    return PeftConfig(r=cfg.rank, lora_alpha=alpha, target_modules=targets, use_rslora=cfg.rslora)


def _as_in(config: Any, model: nn.Module) -> Any:
    """Return a configuration that names the layers which have an adapter in a model."""
    names = {name for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    return dataclasses.replace(config, target_modules=names)


def _inject(part: Any, config: Any, name: str, place: str = "") -> None:
    """Put in an adapter's layers, without values. Only the one of the name TRAINED is trained, and active. `place` is
    where a trunk stands in a whole model, as the configuration names its layers."""
    from peft import inject_adapter_in_model
    from peft.utils import ModulesToSaveWrapper

    config = copy.deepcopy(config)  # peft notes in it which layers it has found
    whole, config.modules_to_save = config.modules_to_save or [], None  # peft would find others that end alike
    holder = part
    if place:
        holder = nn.Module()
        holder.add_module(place, part)
    with warnings.catch_warnings():  # the frozen copy is a second adapter, as it is meant to be
        warnings.filterwarnings("ignore", "Already found a `peft_config`")
        inject_adapter_in_model(config, holder, name, low_cpu_mem_usage=True)
    inside = {each for each, _ in holder.named_modules()}
    for each in whole:
        if each not in inside:  # the head, of a trunk
            continue
        module = holder.get_submodule(each)
        if isinstance(module, ModulesToSaveWrapper):
            module.update(name)
        else:
            parent, _, leaf = each.rpartition(".")
            setattr(holder.get_submodule(parent), leaf, ModulesToSaveWrapper(module, name))
    for layer in _layers(part):
        layer._active_adapter = [TRAINED]
    for parameter_name, parameter in part.named_parameters():
        parameter.requires_grad_(f".{TRAINED}." in parameter_name)


def _fill(part: Any, name: str, seed: int, folder: _Folder | None, prefix: str) -> None:
    """Give an adapter its weights: those of the folder, or new ones, in float32, that follow from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for place, layer in part.named_modules():
            if name in getattr(layer, "lora_A", ()):
                for matrix in (layer.lora_A[name], layer.lora_B[name]):
                    empty = torch.empty(matrix.weight.shape, dtype=torch.float32, device="cpu")
                    matrix.weight = nn.Parameter(empty, requires_grad=name == TRAINED)
                layer.reset_lora_parameters(name, True)
                if folder is not None:
                    for which in ("lora_A", "lora_B"):
                        matrix = getattr(layer, which)[name]
                        given = folder.weight(f"{prefix}{place}.{which}.weight", matrix.weight)
                        dtype = wide(layer.get_base_layer().weight.dtype)
                        matrix.weight.data = given.to(matrix.weight.device, dtype, copy=True)
            elif name in getattr(layer, "modules_to_save", ()):
                _fill_whole(layer, name, folder, f"{prefix}{place}.")


def _fill_whole(wrapper: Any, name: str, folder: _Folder | None, prefix: str) -> None:
    """Give a module that is trained whole the values of the folder, or else those of its original."""
    for leaf, original in wrapper.original_module.named_parameters():
        parent, _, last = leaf.rpartition(".")
        holder = wrapper.modules_to_save[name].get_submodule(parent)
        if folder is not None and f"{prefix}{leaf}" in folder.tensors:
            given = folder.weight(f"{prefix}{leaf}", original)
            made = nn.Parameter(given.to(wide(original.dtype), copy=True))  # each copy has memory of its own
        elif hasattr(original, "ds_id"):  # in ZeRO-3's pieces, of which peft has made a whole copy
            made = getattr(holder, last)
        else:
            made = placed_copy(original)
        holder.register_parameter(last, made.requires_grad_(name == TRAINED))


class _Folder:
    """An adapter's folder whose weights are taken one by one."""

    def __init__(self, folder: AdapterFolder) -> None:
        self.folder = folder
        try:
            held = load_file(folder.path / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"adapter.path={folder.path}: its {WEIGHTS} cannot be read ({error}). Give a folder that peft wrote."
            ) from None
        # by their names without peft's beginning
        self.tensors = {key.removeprefix(IN_FILES): tensor for key, tensor in held.items()}
        self.rest = set(self.tensors)  # those that nothing has asked for

    def whole(self, model: Any) -> list[str]:
        """Return the modules that were trained whole: peft names them by the ends of names, and some fit none."""
        ends = tuple(self.folder.also)
        known = [name for name, _ in model.named_modules() if ends and name.endswith(ends)]
        whole = [name for name in known if any(key.startswith(f"{name}.") for key in self.tensors)]
        if (tied := _tied(model, whole)) is not None:
            raise ModelError(
                f"adapter.path={self.folder.path}: has {tied[0]}, which shares its weights with {tied[1]} in this "
                f"model, and a copy that is trained would not. Give an adapter without it, or another model."
            )
        return whole

    def config(self) -> Any:
        from peft import LoraConfig as PeftConfig

        config = PeftConfig.from_pretrained(str(self.folder.path))
        config.inference_mode, config.lora_dropout = False, 0.0
        return config

    def weight(self, name: str, like: nn.Parameter) -> Tensor:
        tensor, shape = self.tensors.get(name), torch.Size(getattr(like, "ds_shape", like.shape))
        if tensor is None or tensor.shape != shape:
            has = "nothing" if tensor is None else f"{list(tensor.shape)}"
            raise self._refusal(f"has {has} for {name}, which is {list(shape)} here")
        self.rest.discard(name)
        return tensor

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse what peft cannot put into this model."""
        try:
            yield
        except (ValueError, TypeError, AttributeError, KeyError, ImportError, re.error) as error:
            raise self._refusal(f"peft cannot put it in ({first_line(error)})") from None

    def refuse_rest(self) -> None:
        if self.rest:
            raise self._refusal(f"has {sorted(self.rest)[0]}, which nothing here is called")

    def _refusal(self, why: str) -> ModelError:
        return ModelError(
            f"adapter.path={self.folder.path}: does not fit the model: {why}. Give an adapter that was trained on this "
            f"model{f', or train on {self.folder.base}' if self.folder.base else ''}."
        )


# ---- which layers ----


def _named(model: nn.Module, wanted: str) -> list[str]:
    """Return the modules of a name, or whose names end with it."""
    return [name for name, _ in model.named_modules() if name == wanted or name.endswith(f".{wanted}")]


def _targets(model: Any, wanted: Sequence[str], whole: Sequence[str]) -> list[str]:
    """Return the layers that get an adapter: all linear ones but the head and what is trained whole, or those that are
    named."""
    modules = dict(model.named_modules())
    head = model.get_output_embeddings() or getattr(model, "score", None)
    linear = [name for name, module in modules.items() if isinstance(module, LINEAR) and module is not head]
    if not wanted:
        return [name for name in linear if not any(f"{name}.".startswith(f"{each}.") for each in whole)]
    known = sorted({name.rpartition(".")[2] for name in linear})
    for each in wanted:
        fitting = _named(model, each)
        if any(modules[name] is head for name in fitting):
            raise ModelError(
                f"adapter.targets: {each!r} is the head, whose logits are computed in pieces, so it takes no adapter. "
                f"Train it whole: adapter.also=[{each}]; or leave it out."
            )
        twice = [name for name in fitting if any(f"{name}.".startswith(f"{other}.") for other in whole)]
        if twice:
            raise ModelError(
                f"adapter.targets: {each!r} fits {twice[0]}, which adapter.also trains whole. Name it in one of them."
            )
        other = [name for name in fitting if name not in linear]
        if not fitting or other:
            what = f"fits {other[0]}, which is no linear layer" if other else "fits no layer"
            raise ModelError(
                f"adapter.targets: {each!r} {what}.{suggestion(each, known)} Linear layers: {', '.join(known)}."
            )
    return [name for name in linear if any(name == each or name.endswith(f".{each}") for each in wanted)]


def _shortest(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the last parts of the names if they find the same layers, else the names."""
    leaves = sorted({name.rpartition(".")[2] for name in names})
    layers = [name for leaf in leaves for name in _named(model, leaf)]
    return leaves if sorted(layers) == sorted(names) else sorted(names)


def _whole_modules(model: Any, also: Sequence[str]) -> list[str]:
    """Return the modules that are trained whole, by their names in the model."""
    modules = dict(model.named_modules())
    known = sorted({leaf for name in modules if not (leaf := name.rpartition(".")[2]).isdigit()})
    whole: list[str] = []
    for wanted in also:
        fitting = [name for name in _named(model, wanted) if any(True for _ in modules[name].parameters())]
        if not fitting:
            raise ModelError(f"adapter.also: {wanted!r} fits no module with weights.{suggestion(wanted, known)}")
        if isinstance(modules[fitting[0]], nn.ModuleList | nn.ModuleDict):
            raise ModelError(f"adapter.also: {wanted!r} fits {fitting[0]}, a list of modules. Name what is in it.")
        if (tied := _tied(model, fitting)) is not None:
            raise ModelError(
                f"adapter.also: {wanted!r} shares its weights with {tied[1]}, and a copy that is trained would not. "
                f"Leave it out; or train the whole model: adapter=none."
            )
        whole += [name for name in fitting if name not in whole]
    return whole


def _tied(model: Any, names: Sequence[str]) -> tuple[str, str] | None:
    """Return the first of some modules that shares a weight with a module outside, and that weight."""
    holders: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), set()).add(name)
    for name in names:
        for parameter in model.get_submodule(name).parameters():
            for other in sorted(holders[id(parameter)]):
                if not other.startswith(f"{name}."):
                    return name, other
    return None
