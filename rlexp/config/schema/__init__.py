"""The typed schema behind every configuration. The yaml files in `conf/` only choose values.

A group with several kinds (`model`, `data`, `loss`, `reward`) has one class for each kind, listed in `KINDS`; the field
`name` says which. Those of `data` and `loss` have files of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from rlexp.config.schema.bounds import MANY, number
from rlexp.config.schema.data import (
    PROMPT_AND_ANSWER,
    ArithmeticDataConfig,
    DataConfig,
    HFDataConfig,
    JsonlDataConfig,
    SyntheticDataConfig,
)
from rlexp.config.schema.losses import (
    DPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    LossConfig,
    PPOConfig,
    ReinforcePPConfig,
    RLOOConfig,
)

WEEK = 7 * 24 * 3600  # seconds
LIKELIEST = " (a policy that always gives its likeliest answer has nothing to learn from)"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Preflight(Enum):
    """Whether a run is rehearsed before it starts, so that one that cannot fit does not."""

    auto = "auto"
    off = "off"


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp64 = "fp64"


class LayoutName(Enum):
    auto = "auto"
    zigzag = "zigzag"
    contiguous = "contiguous"
    allgather = "allgather"
    ulysses = "ulysses"
    hybrid = "hybrid"


class KernelName(Enum):
    auto = "auto"
    cpu_flash = "cpu_flash"
    torch_flash = "torch_flash"
    flash_attn = "flash_attn"
    flash_attn_3 = "flash_attn_3"
    flash_attn_4 = "flash_attn_4"
    plain = "plain"


class BackendName(Enum):
    """The code that runs attention over the ring: ours, or the library ring-flash-attn."""

    native = "native"
    ring_flash_attn = "ring_flash_attn"


class EngineName(Enum):
    zero0 = "zero0"
    zero1 = "zero1"
    zero2 = "zero2"
    zero3 = "zero3"
    fsdp2 = "fsdp2"
    torch = "torch"


class Offload(Enum):
    """The part of the training state that is kept in the host's memory."""

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


class WeightsDtype(Enum):
    """The dtype to which weights are rounded as they are read. The masters are float32 in any case."""

    auto = "auto"  # as in the files
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class RolloutMode(Enum):
    colocated = "colocated"  # all ranks sample, then all train
    pipelined = "pipelined"  # some ranks sample the next rollout while the others train


class RolloutEngine(Enum):
    native = "native"
    vllm = "vllm"


class Overlong(Enum):
    """How an answer that reaches rollout.max_new_tokens without an end is handled."""

    keep = "keep"
    mask = "mask"  # the answer is not trained on
    penalty = "penalty"  # rollout.overlong_penalty is subtracted from its score


class RuleName(Enum):
    count = "count"  # occurrences of reward.text / reward.most, at most 1
    length = "length"  # 1 − |characters − reward.target| / reward.target, at least 0
    regex = "regex"  # share of the answer's characters that reward.pattern matches
    exact = "exact"  # 1 if the answer equals the row's answer
    arithmetic = "arithmetic"  # 1 if the answer's last number is right: the row's answer, or else the prompt's sum


class Decay(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class WandbMode(Enum):
    auto = "auto"
    online = "online"
    offline = "offline"


@dataclass
class HardwareConfig:
    """A device and its links, on which a run is predicted.

    Rates are the data sheet's. `rlexp/preflight/rehearsal/rates.py` says what share of them a kernel reaches.
    """

    name: str = "auto"
    memory_gib: float = number(0.0, least=0, most=1e6)  # of a device, as torch reports it
    reserve_gib: float = number(0.0, least=0, most=1e6)  # context, NCCL's and cuBLAS's buffers, fragmentation
    gpus: int = number(8, least=1, most=MANY)  # on a node
    generation: int = number(0, least=0, most=1000)  # major compute capability
    bf16_tflops: float = number(0.0, least=0)
    fp32_tflops: float = number(0.0, least=0)
    fp64_tflops: float = number(0.0, least=0)
    memory_tb_s: float = number(0.0, least=0)
    link_gb_s: float = number(0.0, least=0)  # to another GPU of the node, in one direction
    network_gb_s: float = number(0.0, least=0)  # to another node, per GPU, in one direction
    launch_us: float = number(0.0, least=0)  # between the launches of two kernels


@dataclass
class LaunchConfig:
    device: Device = Device.auto
    nproc: int = number(MISSING, least=1, most=MANY)  # ranks on this machine
    nodes: int = number(1, least=1, most=MANY)
    timeout_seconds: float = number(600.0, above=0, most=WEEK)  # how long ranks wait for a rank that does not come
    torch_threads: int = number(1, least=1, most=4096)  # per rank; beside a GPU at least its share of the cores
    deterministic: bool = False  # the same bits in every run on one layout
    preflight: Preflight = Preflight.auto  # predict the memory before the ranks start, where a device's is known
    grace_seconds: float = number(120.0, above=0, most=WEEK)  # for a run asked to stop: to finish its step and save
    # For a job on a cluster. Its nodes and ranks follow from the keys above.
    time_limit: str = "4h"  # the job is then started again, and the run goes on
    rank_cpus: int = number(2, least=1, most=4096)
    rank_memory_gb: float | None = number(None, above=0, most=1e6)  # null: the cluster's default
    interface: str | None = None  # network interface to the other nodes, for gloo and NCCL


@dataclass
class TrainConfig:
    batch_size: int = number(8, least=1, most=MANY)  # samples (pairs) per optimizer step, all devices together
    micro_batch_size: int = number(1, least=1, most=MANY)  # samples per forward pass of one replica
    grad_acc: int = MISSING  # derived
    max_steps: int | None = number(None, least=1)
    epochs: int | None = number(None, least=1)
    precision: Precision = MISSING
    eval_every: int | None = number(None, least=1)
    stop_after: int | None = number(None, least=1)  # end this process after so many steps, as a pre-emption does


@dataclass
class ParallelConfig:
    ring_size: int = number(1, least=1, most=MANY)
    layout: LayoutName = LayoutName.zigzag
    ulysses_size: int | None = number(None, least=1)  # ranks that share out the heads, with layout=hybrid
    kernel: KernelName = KernelName.auto
    backend: BackendName = BackendName.native
    world_size: int = MISSING  # derived
    dp_size: int = MISSING  # derived
    chosen: str | None = None  # derived: why layout=auto took this one; null if the layout was named


@dataclass
class ModelConfig:
    name: str = MISSING
    seed: int = 0  # for random weights
    suggested_lr: float = number(MISSING, least=0)  # the default of optim.lr
    freeze: list[str] = field(default_factory=list)  # name patterns of parameters that are not trained


@dataclass
class TinyModelConfig(ModelConfig):
    name: str = "tiny"
    hidden_size: int = number(64, least=1)
    intermediate_size: int = number(172, least=1)
    layers: int = number(2, least=1)
    heads: int = number(8, least=1, most=MANY)
    kv_heads: int = number(2, least=1, most=MANY)


@dataclass
class HFModelConfig(ModelConfig):
    name: str = "hf"
    path: str = MISSING  # a folder, or a hub name
    revision: str | None = None  # a hub model's branch, tag or commit
    gguf: str | None = None  # a GGUF file in `path`; weights, configuration and tokenizer come from it
    dtype: WeightsDtype = WeightsDtype.auto
    chat_template: str | None = None  # a jinja file that takes the place of the tokenizer's own template
    add_tokens: list[str] = field(default_factory=list)  # new tokens; the embeddings get rows for them
    trust_remote_code: bool = False


@dataclass
class RolloutConfig:
    mode: RolloutMode = RolloutMode.colocated
    engine: RolloutEngine = RolloutEngine.native
    batch_size: int = number(8, least=1, most=MANY)  # prompts
    n_samples: int = number(4, least=1, most=MANY)  # answers to each prompt
    epochs: int = number(1, least=1)  # passes over the samples of a rollout
    minibatches: int = MISSING  # derived: batch_size × n_samples / train.batch_size
    micro_batch_size: int = number(16, least=1)  # samples that a rank draws at once
    micro_batch_tokens: int | None = number(None, least=1)  # draw fewer at once, so that prompts and answers fit
    score_batch_size: int = number(8, least=1)  # samples that a ring scores at once
    max_new_tokens: int = number(64, least=1)
    temperature: float = number(1.0, above=0, why=LIKELIEST)
    top_k: int = number(0, least=0)  # 0: all tokens
    top_p: float = number(1.0, above=0, most=1)
    min_p: float = number(0.0, least=0, most=1)
    stop: list[str] = field(default_factory=list)  # an answer ends with the first of these texts
    overlong: Overlong = Overlong.keep
    overlong_penalty: float = number(1.0, least=0)
    importance_cap: float | None = number(None, above=0)  # largest importance weight of a token
    vllm_memory: float = number(0.4, above=0, below=1)  # share of a GPU's memory that vLLM may take
    sampling_ranks: int = MISSING  # ranks that only sample; 0 unless pipelined
    show_every: int = number(10, least=0)  # rollouts between two tables of samples; 0: none
    show: int = number(3, least=0)  # samples in the table


@dataclass
class RewardConfig:
    name: str = MISSING


@dataclass
class RuleRewardConfig(RewardConfig):
    name: str = "rule"
    rule: RuleName = RuleName.count
    text: str = ""
    most: int = number(1, least=1)
    target: int = number(100, least=1)
    pattern: str = ""
    ignore_case: bool = False


@dataclass
class PythonRewardConfig(RewardConfig):
    """A function of the user, named by its import path and run in processes of its own."""

    name: str = "python"
    function: str = MISSING  # package.module:function
    timeout_seconds: float = number(60.0, above=0, most=WEEK)  # for one call
    workers: int = number(1, least=1, most=4096)  # processes for each rank


@dataclass
class ModelRewardConfig(RewardConfig):
    name: str = "model"
    path: str = MISSING
    precision: Precision = Precision.fp32
    max_length: int | None = number(None, least=2, why=PROMPT_AND_ANSWER)  # null: data.max_length
    trust_remote_code: bool = False


@dataclass
class SumRewardConfig(RewardConfig):
    """A weighted sum. Each term has a name of its own and the keys of its kind: `{kind: rule, weight: 1.0, …}`."""

    name: str = "sum"
    terms: dict[str, Any] = field(default_factory=dict)


@dataclass
class EngineConfig:
    name: EngineName = MISSING
    offload: Offload = Offload.none
    overrides: dict[str, Any] = field(default_factory=dict)  # keys of DeepSpeed's configuration
    chosen: str | None = None  # derived: why engine=auto took this one; null if the engine was named


@dataclass
class OptimConfig:
    name: OptimName = OptimName.adamw
    lr: float = number(MISSING, least=0)
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = number(1e-8, least=0)
    weight_decay: float = number(0.0, least=0)
    warmup_steps: int = number(0, least=0)
    decay: Decay = Decay.linear
    max_grad_norm: float = number(1.0, least=0)  # 0 turns clipping off


@dataclass
class ReferenceConfig:
    name: ReferenceName = ReferenceName.model


class CountTensors(Enum):
    """Where a run counts the bytes of its live tensors."""

    auto = "auto"  # on CPU only, in micro-batches that may hold more than any before: 4 % of a default run's time
    always = "always"  # in every step, on any device: twice the time of a small model's step
    never = "never"


@dataclass
class MemoryConfig:
    checkpointing: bool = False  # recompute each layer's activations in the backward pass
    count_tensors: CountTensors = CountTensors.auto


class Best(Enum):
    min = "min"
    max = "max"


class ExportDtype(Enum):
    auto = "auto"  # bf16 after a run in bf16, else fp32
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


@dataclass
class CheckpointConfig:
    save_every: str | None = "30m"  # steps (50) or time (10m); null: at the end only
    keep_last: int = number(2, least=1)
    keep_best: int = number(0, least=0)  # in addition, the best by `best_metric`
    best_metric: str = "eval/loss"
    best: Best = Best.min
    on_exit: bool = True  # save when the run ends, or is asked to
    export: bool = True  # write the trained model to <run>/model when the run ends
    export_dtype: ExportDtype = ExportDtype.auto


@dataclass
class ResumeConfig:
    mode: str = "auto"  # auto (from the run folder), never, or the path of a checkpoint or a run
    force: list[str] = field(default_factory=list)  # keys that may differ from the run's start


@dataclass
class LoggerConfig:
    name: LoggerName = LoggerName.wandb
    mode: WandbMode = WandbMode.auto
    project: str = "rlexp"
    entity: str | None = None
    group: str | None = None  # a sweep sets its folder's name
    run_name: str | None = None
    axes: dict[str, str] = field(default_factory=dict)  # keys that the sweep varies, with this job's values
    baseline: str | None = None  # folder of the run that this run is compared with
    tags: list[str] = field(default_factory=list)
    progress: bool = True
    artifacts: bool = False  # register every checkpoint with W&B, by reference


@dataclass
class Config:
    seed: int = number(0, least=0)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)


KINDS: dict[str, dict[str, type]] = {
    "model": {"tiny": TinyModelConfig, "hf": HFModelConfig},
    "data": {
        "synthetic": SyntheticDataConfig,
        "arithmetic": ArithmeticDataConfig,
        "jsonl": JsonlDataConfig,
        "hf": HFDataConfig,
    },
    "loss": {
        "dpo": DPOConfig,
        "ppo": PPOConfig,
        "grpo": GRPOConfig,
        "dr_grpo": DrGRPOConfig,
        "rloo": RLOOConfig,
        "reinforce_pp": ReinforcePPConfig,
        "gspo": GSPOConfig,
    },
    "reward": {
        "rule": RuleRewardConfig,
        "python": PythonRewardConfig,
        "model": ModelRewardConfig,
        "sum": SumRewardConfig,
    },
}


def register() -> None:
    """Store the schema where `conf/config.yaml` and the group files find it (`/schema/<group>/<kind>@_here_`)."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, kinds in KINDS.items():
        for name, node in kinds.items():
            store.store(group=f"schema/{group}", name=name, node=node)
