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
    """Whose the whole attention over the ring is."""

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


class KLPlace(Enum):
    """Where the divergence from the reference enters."""

    reward = "reward"
    loss = "loss"


class KLEstimator(Enum):
    """Of a token's divergence, from its log-ratio d = policy − reference (Schulman, joschu.net/blog/kl-approx.html)."""

    k1 = "k1"  # d
    k2 = "k2"  # d²/2
    k3 = "k3"  # exp(−d) − 1 + d


class Normalize(Enum):
    """By what the loss of a train batch is divided; each count is the train batch's."""

    token = "token"  # all trained tokens
    sequence = "sequence"  # each answer's own tokens, and the number of answers
    fixed = "fixed"  # rollout.max_new_tokens, and the number of answers


class CriticName(Enum):
    own = "own"  # a second model, begun as the policy
    shared = "shared"  # the policy's own layers


class RolloutMode(Enum):
    colocated = "colocated"  # all ranks sample, then all train
    pipelined = "pipelined"  # some sample the next batch while the others train


class RolloutEngine(Enum):
    native = "native"
    vllm = "vllm"


class Overlong(Enum):
    """What becomes of an answer that reached rollout.max_new_tokens without an end."""

    keep = "keep"
    mask = "mask"  # it is not trained on
    penalty = "penalty"  # rollout.overlong_penalty is taken from its score


class RuleName(Enum):
    count = "count"  # how often reward.text occurs, over reward.most
    length = "length"  # 1 − |characters − reward.target| / reward.target, at least 0
    regex = "regex"  # what share of the answer's characters reward.pattern matches
    exact = "exact"  # 1 if the answer is the row's
    arithmetic = "arithmetic"  # 1 if the answer's last number is what the row's answer, or the prompt's sum, comes to


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
    # Of a job on a cluster; nodes and ranks follow from the above.
    time_limit: str = "4h"  # what is not done by then goes on in the same job, started again
    rank_cpus: int = 2
    rank_memory_gb: float | None = None  # what the cluster gives without being asked
    interface: str | None = None  # the network's, for gloo and NCCL: the one that leads to the other nodes


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
    ulysses_size: int | None = None  # of the groups of layout=hybrid
    kernel: KernelName = KernelName.auto
    backend: BackendName = BackendName.native
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
class ArithmeticDataConfig(DataConfig):
    name: str = "arithmetic"
    seed: int = 0
    size: int = 1024
    eval_size: int = 64
    digits: int = 1  # of each number


@dataclass
class LossConfig:
    name: str = MISSING


@dataclass
class DPOConfig(LossConfig):
    name: str = "dpo"
    beta: float = 0.1
    label_smoothing: float = 0.0


@dataclass
class PolicyLossConfig(LossConfig):
    """What the algorithms of reinforcement learning have in common; their yaml files choose."""

    beta: float = 0.05  # of the divergence from the reference; 0 does without a reference
    kl_in: KLPlace = KLPlace.reward
    kl: KLEstimator = KLEstimator.k1
    kl_target: float | None = None  # beta then follows the divergence measured, per answer
    kl_horizon: int = 10000  # samples over which it does
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None  # bounds the loss of a negative advantage (arXiv 1912.09729)
    entropy: float = 0.0  # of the bonus
    whiten: bool = False  # advantages, over the train batch
    normalize: Normalize = Normalize.token
    filter: bool = False  # leave out answers to prompts all of whose answers scored the same


@dataclass
class PPOConfig(PolicyLossConfig):
    name: str = "ppo"
    whiten: bool = True
    gamma: float = 1.0
    lam: float = 0.95
    critic: CriticName = CriticName.own
    value_lr: float | None = None  # of the critic; optim.lr where it is not given
    value_coef: float = 0.5
    value_clip: float | None = 0.2


@dataclass
class GRPOConfig(PolicyLossConfig):
    name: str = "grpo"
    kl_in: KLPlace = KLPlace.loss
    kl: KLEstimator = KLEstimator.k3
    normalize: Normalize = Normalize.sequence


@dataclass
class DrGRPOConfig(PolicyLossConfig):
    name: str = "dr_grpo"
    beta: float = 0.0
    kl_in: KLPlace = KLPlace.loss
    kl: KLEstimator = KLEstimator.k3
    normalize: Normalize = Normalize.fixed


@dataclass
class RLOOConfig(PolicyLossConfig):
    name: str = "rloo"
    normalize: Normalize = Normalize.fixed


@dataclass
class ReinforcePPConfig(PolicyLossConfig):
    name: str = "reinforce_pp"
    whiten: bool = True


@dataclass
class GSPOConfig(PolicyLossConfig):
    name: str = "gspo"
    kl_in: KLPlace = KLPlace.loss
    kl: KLEstimator = KLEstimator.k3
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    normalize: Normalize = Normalize.sequence


@dataclass
class RolloutConfig:
    mode: RolloutMode = RolloutMode.colocated
    engine: RolloutEngine = RolloutEngine.native
    batch_size: int = 8  # prompts
    n_samples: int = 4  # of each prompt
    epochs: int = 1  # over the samples of a rollout
    minibatches: int = MISSING  # derived: batch_size × n_samples / train.batch_size
    micro_batch_size: int = 16  # samples that a rank draws at once
    micro_batch_tokens: int | None = None  # or fewer, so that prompts and answers have at most so many tokens
    score_batch_size: int = 8  # samples that a ring scores at once
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    stop: list[str] = field(default_factory=list)  # an answer ends with the first of these texts
    overlong: Overlong = Overlong.keep
    overlong_penalty: float = 1.0
    importance_cap: float | None = None  # the most that a token counts for being likelier now than when it was drawn
    vllm_memory: float = 0.4  # share of a GPU's memory that vLLM may take
    sampling_ranks: int = MISSING  # that do nothing else; 0 unless pipelined
    show_every: int = 10  # rollouts between two tables of samples; 0: none
    show: int = 3  # samples in the table


@dataclass
class RewardConfig:
    name: str = MISSING


@dataclass
class RuleRewardConfig(RewardConfig):
    name: str = "rule"
    rule: RuleName = RuleName.count
    text: str = ""
    most: int = 1
    target: int = 100
    pattern: str = ""
    ignore_case: bool = False


@dataclass
class PythonRewardConfig(RewardConfig):
    """Runs code of the user's: a function by its import path, in processes of its own."""

    name: str = "python"
    function: str = MISSING  # package.module:function
    timeout_seconds: float = 60.0  # of a call
    workers: int = 1  # processes of each rank


@dataclass
class ModelRewardConfig(RewardConfig):
    name: str = "model"
    path: str = MISSING
    precision: Precision = Precision.fp32
    max_length: int | None = None  # data.max_length where it is not given
    trust_remote_code: bool = False


@dataclass
class SumRewardConfig(RewardConfig):
    """Rewards by any names, each `{kind: rule, weight: 1.0, …}` with the keys of its kind."""

    name: str = "sum"
    terms: dict[str, Any] = field(default_factory=dict)


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
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)


KINDS: dict[str, dict[str, type]] = {
    "model": {"tiny": TinyModelConfig, "hf": HFModelConfig},
    "data": {"synthetic": SyntheticDataConfig, "arithmetic": ArithmeticDataConfig, "jsonl": JsonlDataConfig},
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
    """Put the schema where `conf/config.yaml` and the group files find it (`/schema/<group>/<kind>@_here_`)."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, kinds in KINDS.items():
        for name, node in kinds.items():
            store.store(group=f"schema/{group}", name=name, node=node)
