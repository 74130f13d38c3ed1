"""The typed schema behind every configuration. The yaml files in `conf/` only choose values.

Groups that come in kinds (`model`, `data`, `loss`) have one class per kind, registered in `KINDS`; the `name`
field says which. A new loss is one class here, one yaml, one file in `algos/` and one `case` in `build.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp64 = "fp64"


class LayoutName(Enum):
    zigzag = "zigzag"


class KernelName(Enum):
    auto = "auto"
    cpu_flash = "cpu_flash"
    plain = "plain"


class EngineName(Enum):
    zero0 = "zero0"
    zero1 = "zero1"
    zero2 = "zero2"
    zero3 = "zero3"
    fsdp2 = "fsdp2"
    torch = "torch"


class Offload(Enum):
    """What of the training state lives in the host's memory."""

    none = "none"
    optimizer = "optimizer"
    all = "all"


class OptimName(Enum):
    adamw = "adamw"
    sgd = "sgd"


class ReferenceName(Enum):
    model = "model"


class LoggerName(Enum):
    wandb = "wandb"
    tensorboard = "tensorboard"
    trackio = "trackio"
    none = "none"


class TooLong(Enum):
    """What becomes of a sequence longer than `data.max_length`."""

    error = "error"
    drop = "drop"
    truncate = "truncate"


class Decay(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class WandbMode(Enum):
    auto = "auto"
    online = "online"
    offline = "offline"


@dataclass
class LaunchConfig:
    device: Device = Device.auto
    nproc: int = MISSING  # ranks on this machine
    nodes: int = 1
    timeout_seconds: float = 600.0  # of a collective that some rank never joins
    torch_threads: int = 1  # per rank, on CPU
    grace_seconds: float = 120.0  # for a run that is asked to stop, to finish its step and save


@dataclass
class TrainConfig:
    batch_size: int = 8  # samples (preference pairs) per optimizer step, all devices together
    micro_batch_size: int = 1  # samples per forward pass of one replica
    grad_acc: int = MISSING  # derived
    max_steps: int | None = None
    epochs: int | None = None
    precision: Precision = MISSING
    eval_every: int | None = None
    stop_after: int | None = None  # end this process after so many steps, as a pre-emption would


@dataclass
class ParallelConfig:
    ring_size: int = 1
    layout: LayoutName = LayoutName.zigzag
    kernel: KernelName = KernelName.auto
    world_size: int = MISSING  # derived
    dp_size: int = MISSING  # derived


@dataclass
class ModelConfig:
    name: str = MISSING
    seed: int = 0  # of random weights, where there are any
    suggested_lr: float = MISSING  # what optim.lr takes unless it is given
    freeze: list[str] = field(default_factory=list)  # patterns of the names of parameters that stay as they are


@dataclass
class TinyModelConfig(ModelConfig):
    name: str = "tiny"
    hidden_size: int = 64
    intermediate_size: int = 172
    layers: int = 2
    heads: int = 8
    kv_heads: int = 2


@dataclass
class HFModelConfig(ModelConfig):
    name: str = "hf"
    path: str = MISSING
    trust_remote_code: bool = False


@dataclass
class DataConfig:
    name: str = MISSING
    max_length: int = 2048  # tokens of prompt and answer together
    too_long: TooLong = TooLong.error
    shuffle: bool = True
    drop_last: bool = True
    packing: bool = True


@dataclass
class SyntheticDataConfig(DataConfig):
    name: str = "synthetic"
    seed: int = 0  # of the generated pairs, not of their order
    size: int = 240
    eval_size: int = 32
    fill: bool = False  # texts of max_length words before each request: with too_long=truncate, all are of that length


@dataclass
class JsonlDataConfig(DataConfig):
    name: str = "jsonl"
    path: str = MISSING
    eval_path: str | None = None


@dataclass
class LossConfig:
    name: str = MISSING


@dataclass
class DPOConfig(LossConfig):
    name: str = "dpo"
    beta: float = 0.1
    label_smoothing: float = 0.0


@dataclass
class EngineConfig:
    name: EngineName = MISSING
    offload: Offload = Offload.none
    overrides: dict[str, Any] = field(default_factory=dict)  # DeepSpeed's own keys


@dataclass
class OptimConfig:
    name: OptimName = OptimName.adamw
    lr: float = MISSING
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    decay: Decay = Decay.linear
    max_grad_norm: float = 1.0  # 0 turns clipping off


@dataclass
class ReferenceConfig:
    name: ReferenceName = ReferenceName.model


@dataclass
class MemoryConfig:
    checkpointing: bool = False  # recompute each layer's activations in the backward pass


class Best(Enum):
    min = "min"
    max = "max"


class ExportDtype(Enum):
    auto = "auto"  # bf16 of a run in bf16, else fp32
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


@dataclass
class CheckpointConfig:
    save_every: str | None = "30m"  # steps (50) or time (10m); null: at the end only
    keep_last: int = 2
    keep_best: int = 0  # beside them, the best by `best_metric`
    best_metric: str = "eval/loss"
    best: Best = Best.min
    on_exit: bool = True  # save when the run ends, or is asked to
    export: bool = True  # write the trained model to <run>/model when the run ends
    export_dtype: ExportDtype = ExportDtype.auto


@dataclass
class ResumeConfig:
    mode: str = "auto"  # auto: what the run folder holds; never; or the path of a checkpoint or of a run
    force: list[str] = field(default_factory=list)  # keys that may differ from those the run was begun with


@dataclass
class LoggerConfig:
    name: LoggerName = LoggerName.wandb
    mode: WandbMode = WandbMode.auto
    project: str = "rlexp"
    entity: str | None = None
    group: str | None = None  # of a sweep's jobs, its folder's name
    run_name: str | None = None
    axes: dict[str, str] = field(default_factory=dict)  # what varies in the sweep, and this job's values
    baseline: str | None = None  # the folder of the run that this one is held against
    tags: list[str] = field(default_factory=list)
    progress: bool = True
    artifacts: bool = False  # tell W&B of every checkpoint, by reference


@dataclass
class Config:
    seed: int = 0
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)


KINDS: dict[str, dict[str, type]] = {
    "model": {"tiny": TinyModelConfig, "hf": HFModelConfig},
    "data": {"synthetic": SyntheticDataConfig, "jsonl": JsonlDataConfig},
    "loss": {"dpo": DPOConfig},
}


def register() -> None:
    """Put the schema where `conf/config.yaml` and the group files find it (`/schema/<group>/<kind>@_here_`)."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, kinds in KINDS.items():
        for name, node in kinds.items():
            store.store(group=f"schema/{group}", name=name, node=node)
