"""The keys of a run's models: what is trained (`model`), its adapter, and what it is compared with (`reference`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import ClassVar

from omegaconf import MISSING

from rlexp.config.schema.bounds import MANY, number


class Precision(Enum):
    fp32 = "fp32"  # float32 throughout
    bf16 = "bf16"  # the model computes in bfloat16; trained weights stay float32
    fp64 = "fp64"  # float64 throughout, to compare layouts exactly


class WeightsDtype(Enum):
    """The dtype to which weights are rounded as they are read. The masters are float32 in any case."""

    auto = "auto"  # as in the files
    fp32 = "fp32"  # float32
    bf16 = "bf16"  # bfloat16
    fp16 = "fp16"  # float16


class FusedName(Enum):
    """Where a model computes norms, rotary positions, gates and sums with fused pieces: each read and written once."""

    auto = "auto"  # on a GPU in bf16
    always = "always"  # everywhere: for tests, and for `verify`
    off = "off"  # nowhere: transformers' own code


@dataclass
class ModelConfig:
    name: str = MISSING  # the kind of the model, chosen by model=NAME
    seed: int = 0  # fixes the random weights of model=tiny; other models are read from files
    # parameters that are not trained, by name: `['model.embed_tokens.*', 'model.layers.0.*']`
    freeze: list[str] = field(default_factory=list)
    fused: FusedName = FusedName.auto  # whether what lies between matrix products is computed by fused kernels
    # more positions than the model was made for, by YaRN: `yarn:4` makes four times as many. `yarn`: as many times as
    # data.max_length needs. `yarn:4:32768`: four times 32768, where the model says another number. null: its own
    rope: str | None = None

    @property
    def called(self) -> str:
        """The name that a person would give the model."""
        return self.name


@dataclass
class TinyModelConfig(ModelConfig):
    name: str = "tiny"
    hidden_size: int = number(64, least=1)  # width of the model; an even multiple of model.heads
    intermediate_size: int = number(172, least=1)  # width inside each feed-forward layer
    layers: int = number(2, least=1)  # decoder layers
    heads: int = number(8, least=1, most=MANY)  # heads of queries in each layer
    kv_heads: int = number(2, least=1, most=MANY)  # heads of keys and values in each layer; it must divide model.heads
    window: int | None = number(None, least=1)  # tokens that a token sees, itself included; null: all before it


@dataclass
class HFModelConfig(ModelConfig):
    group: ClassVar[str] = "model"  # whose `path` names it, for messages

    name: str = "hf"
    path: str = MISSING  # a folder, or a hub name
    revision: str | None = None  # a hub model's branch, tag or commit; null: its main branch
    # name of a GGUF file in model.path, which holds weights, configuration and tokenizer; null: none
    gguf: str | None = None
    # dtype to which weights are rounded as they are read; the weights that are trained are float32 (fp64: float64)
    dtype: WeightsDtype = WeightsDtype.auto
    # what writes conversations as text, in place of the tokenizer's own template: a name (`chatml`), or a jinja file
    chat_template: str | None = None
    add_tokens: list[str] = field(default_factory=list)  # new tokens; the embeddings get rows for them
    trust_remote_code: bool = False  # run Python code that comes with the model

    @property
    def called(self) -> str:
        """The name of its GGUF file, or the last part of its path; a trained model's folder has its run's before it."""
        if self.gguf is not None:
            return Path(self.gguf).stem
        path = Path(self.path)
        generic = path.name in ("model", "") and path.parent.name
        return f"{path.parent.name}/{path.name}" if generic else path.name or self.name


class ReferenceName(Enum):
    """What gives the log-probabilities that the policy's are compared with."""

    model = "model"  # a frozen model in memory
    # the trained model itself with its adapter off; with adapter.path, with that adapter as it was given
    adapter = "adapter"
    # computed once before training, and kept in the machine's cache; not with a loss of reinforcement learning, or kto
    precompute = "precompute"
    none = "none"  # nothing; with a loss that compares with no reference


@dataclass
class ReferenceConfig:
    name: ReferenceName = MISSING  # what the policy is compared with, chosen by reference=NAME
    # folder or hub name of the reference model, with model=hf; null: the weights that training starts from
    path: str | None = None
    revision: str | None = None  # a hub model's branch, tag or commit; null: its main branch
    offload: bool = False  # keep its weights in the host's memory between uses; with reference=model


@dataclass
class AdapterConfig:
    name: str = MISSING  # the kind of the adapter, chosen by adapter=NAME


@dataclass
class NoAdapterConfig(AdapterConfig):
    name: str = "none"


@dataclass
class LoraConfig(AdapterConfig):
    """Low-rank matrices beside the linear layers (LoRA, arXiv 2106.09685); peft makes them. All else is frozen."""

    name: str = "lora"
    # layers that get an adapter, by name or its last parts: `[q_proj,v_proj]`; []: all linear layers but the head
    targets: list[str] = field(default_factory=list)
    rank: int = number(16, least=1, most=65536)  # rows of the first matrix of each pair
    alpha: float = number(32.0, above=0)  # what the two matrices give is multiplied by alpha / rank
    rslora: bool = False  # multiply by alpha / √rank (rsLoRA, arXiv 2312.03732)
    # share of the adapter's inputs that are set to zero; only 0: which ones would depend on the layout
    dropout: float = number(0.0, least=0, below=1)
    # folder of an adapter in peft's format, which is trained further; rank, alpha, rslora, targets and also are then
    # the folder's, and are left out. null: a new one
    path: str | None = None
    also: list[str] = field(default_factory=list)  # modules that are trained whole beside it: `[lm_head]`
