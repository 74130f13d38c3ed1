"""The typed schema behind every configuration. The yaml files in `conf/` only choose values.

A group with several kinds (`model`, `data`, `loss`, `reward`) has one class for each kind; the field `name` says which,
and `KINDS` finds it. Those of `data` and `loss` have files of their own; `models.py` has those of a run's models, and
`rollouts.py` those of rollouts and rewards.

What a key, or an option of an Enum, means is said once: in the comment behind its field, or in the comment lines
directly above it. docs/keys.md is made of these comments.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from rlexp.config.schema import data, losses, models, rollouts
from rlexp.config.schema.bounds import MANY, WEEK, number
from rlexp.config.schema.data import DataConfig
from rlexp.config.schema.losses import LossConfig
from rlexp.config.schema.models import AdapterConfig, ModelConfig, Precision, ReferenceConfig
from rlexp.config.schema.models import HFModelConfig as HFModelConfig
from rlexp.config.schema.models import LoraConfig as LoraConfig
from rlexp.config.schema.models import NoAdapterConfig as NoAdapterConfig
from rlexp.config.schema.models import TinyModelConfig as TinyModelConfig
from rlexp.config.schema.rollouts import RewardConfig, RolloutConfig

AUTO = "auto"


class Device(Enum):
    auto = "auto"  # `cuda` on a machine with GPUs, else `cpu`
    cpu = "cpu"  # all ranks on the CPU
    cuda = "cuda"  # each rank on a GPU, which is its own unless launch.ranks_per_gpu says otherwise


class Collectives(Enum):
    """What carries tensors between ranks."""

    auto = "auto"  # staged where ranks share a GPU; else nccl on GPUs, and gloo on CPUs
    nccl = "nccl"  # from GPU to GPU; each rank has its own
    gloo = "gloo"  # from CPU to CPU
    staged = "staged"  # from any device through the host's memory, by gloo


class Preflight(Enum):
    """Whether a run is rehearsed before it starts, so that one that cannot fit does not."""

    auto = "auto"  # predict the memory, where a device's memory is known, and do not start a run that cannot fit
    off = "off"  # start without a prediction


class LayoutName(Enum):
    auto = "auto"  # the layout whose attention is predicted to take the least time; the run prints which one, and why
    # each rank holds an early and a late part of each sequence, so work is even; it receives the keys and values that
    # its queries see, rank by rank
    zigzag = "zigzag"
    contiguous = "contiguous"  # each rank holds one part of each sequence; work is uneven: for comparison only
    allgather = "allgather"  # as zigzag, but each rank gathers the keys and values of all ranks, one head at a time
    ulysses = "ulysses"  # the ranks exchange tokens for heads; the ring size must divide the number of heads
    hybrid = "hybrid"  # ulysses among parallel.ulysses_size neighbours, zigzag among these groups


class Cut(Enum):
    """Which sequences of a pack are cut."""

    # those that it costs less to cut than to hold whole, each over as many ranks as it is worth; with zigzag and
    # allgather only
    auto = "auto"
    all = "all"  # all, over the whole ring


class TransportName(Enum):
    """How keys and values reach the ranks that need them, and their gradients come home."""

    # direct if each ring is on one node, or if no two of the ranks among which keys travel share one; else neighbour
    auto = "auto"
    direct = "direct"  # straight to each rank that needs them, and only what it needs: the fewest bytes
    # from rank to rank around the ring: the fewest bytes from one node to another; layers with a short window take
    # direct
    neighbour = "neighbour"


class KernelName(Enum):
    auto = "auto"  # the fastest installed one that fits device, precision and head size, by measured rates
    cpu_flash = "cpu_flash"  # torch's flash attention for CPU
    torch_flash = "torch_flash"  # torch's flash attention for GPU, bf16
    flash_attn = "flash_attn"  # the package flash-attn 2: GPU, bf16
    flash_attn_3 = "flash_attn_3"  # flash-attn 3: Hopper GPUs, bf16
    flash_attn_4 = "flash_attn_4"  # flash-attn 4: Hopper and Blackwell GPUs, bf16
    plain = "plain"  # matrix products in torch: exact and slow, on any device, in any precision


class BackendName(Enum):
    """The code that runs attention over the ring: ours, or the library ring-flash-attn."""

    native = "native"  # rlexp's own layouts and kernels
    ring_flash_attn = "ring_flash_attn"  # the library ring-flash-attn: GPU, bf16, layouts zigzag and allgather


class EngineName(Enum):
    zero0 = "zero0"
    zero1 = "zero1"
    zero2 = "zero2"
    zero3 = "zero3"
    fsdp2 = "fsdp2"
    torch = "torch"


class Offload(Enum):
    """The part of the training state that is kept in the host's memory."""

    none = "none"  # everything stays on the device
    optimizer = "optimizer"  # master weights and optimizer state in the host's memory; engines zero1, zero2, zero3
    all = "all"  # the weights too; engine zero3


class OptimName(Enum):
    adamw = "adamw"
    sgd = "sgd"


class LoggerName(Enum):
    wandb = "wandb"
    tensorboard = "tensorboard"
    trackio = "trackio"
    none = "none"


class Decay(Enum):
    constant = "constant"  # it does not fall
    linear = "linear"  # along a straight line
    cosine = "cosine"  # along half a period of a cosine
    # as 1 / √step, from the end of the warm-up on; without a warm-up as if it had taken 10,000 steps
    inverse_sqrt = "inverse_sqrt"


class WandbMode(Enum):
    auto = "auto"  # the value of WANDB_MODE; without one, online if WANDB_API_KEY or netrc has a key, else offline
    online = "online"  # rows are sent to W&B's server while the run trains
    offline = "offline"  # rows stay in the run's folder; `wandb sync` sends them later


@dataclass
class HardwareConfig:
    """A device and its links, on which a run is predicted.

    Rates are the data sheet's. `rlexp/preflight/rehearsal/rates.py` says what share of them a kernel reaches.
    """

    name: str = "auto"  # the description of a GPU, chosen by hardware=NAME
    # memory of a device in GiB, as torch reports it. A run that needs more does not start
    memory_gib: float = number(0.0, least=0, most=MANY)
    # GiB of that memory that a run keeps free: CUDA context, buffers of NCCL and cuBLAS, fragmentation
    reserve_gib: float = number(0.0, least=0, most=MANY)
    # memory of one machine in GiB, for all its ranks; 0: unknown, or this machine's where the run starts here
    host_memory_gib: float = number(0.0, least=0, most=MANY)
    gpus: int = number(8, least=1, most=MANY)  # GPUs of a node
    # major compute capability: 8 Ampere and Ada, 9 Hopper, 10 Blackwell
    generation: int = number(0, least=0, most=1000)
    bf16_tflops: float = number(0.0, least=0)  # rate of bf16 matrix products, TFLOP/s, dense
    fp32_tflops: float = number(0.0, least=0)  # rate of fp32, TFLOP/s
    fp64_tflops: float = number(0.0, least=0)  # rate of fp64, TFLOP/s
    memory_tb_s: float = number(0.0, least=0)  # rate of the device's memory, TB/s
    link_gb_s: float = number(0.0, least=0)  # rate to another GPU of the node, GB/s in one direction
    network_gb_s: float = number(0.0, least=0)  # rate to another node, per GPU, GB/s in one direction
    launch_us: float = number(0.0, least=0)  # time between the launches of two kernels, µs


@dataclass
class LaunchConfig:
    device: Device = Device.auto  # where the ranks compute
    nproc: int = number(MISSING, least=1, most=MANY)  # ranks (processes) on each node
    nodes: int = number(1, least=1, most=MANY)  # nodes (machines) that train together
    # ranks that share each GPU, its time and its memory. It is slow, and shows on one GPU that a ring computes the same
    ranks_per_gpu: int = number(1, least=1, most=64)
    collectives: Collectives = Collectives.auto  # what carries tensors between ranks
    # seconds in which no rank gets any further, before the run ends with an error that names who holds the others up
    timeout_seconds: float = number(600.0, above=0, most=WEEK)
    # CPU threads of each rank; a rank with a GPU uses its share of the cores, if that is more
    torch_threads: int = number(1, least=1, most=4096)
    # bit-identical results in every run on one layout, also on GPUs; it costs memory and time
    deterministic: bool = False
    preflight: Preflight = Preflight.auto  # whether the memory of a run is predicted before its ranks start
    # seconds that a run may take to finish its step and save, once it is asked to stop
    grace_seconds: float = number(120.0, above=0, most=WEEK)
    # on a cluster: time limit of a job (90m, 4h, 2d). The stopped job is queued again, and has the full time again
    time_limit: str = "4h"
    rank_cpus: int = number(2, least=1, most=4096)  # on a cluster: processors of each rank
    # on a cluster: memory of each rank, GB; null: the cluster's default
    rank_memory_gb: float | None = number(None, above=0, most=MANY)
    # network interface to the other nodes, for gloo and NCCL; null: `hydra.launcher.interface`, or the one that
    # reaches them
    interface: str | None = None

    @property
    def carrier(self) -> Collectives:
        """What carries tensors between ranks, where `auto` is decided."""
        if self.collectives is not Collectives.auto:
            return self.collectives
        if self.device is Device.cpu:
            return Collectives.gloo
        return Collectives.staged if self.ranks_per_gpu > 1 else Collectives.nccl


@dataclass
class TrainConfig:
    # samples in one optimizer step, on all devices together: pairs with a loss over pairs, else answers
    batch_size: int = number(8, least=1, most=MANY)
    # samples in one forward pass of one replica; auto: as many as train.max_tokens_per_micro_batch has room for
    micro_batch_size: int | str = number(AUTO, least=1, most=MANY)
    # tokens that a rank holds in one forward pass, a shared one counted once; null: enough for the longest sample, and
    # at least 4096 on CPU, 16384 on a GPU, if a replica's samples can be as many
    max_tokens_per_micro_batch: int | None = number(None, least=1)
    # forward passes of a replica in one optimizer step; derived, cannot be set; null: each step has its own number,
    # which its row says
    grad_acc: int | None = MISSING
    # the run ends after this many optimizer steps; with train.epochs too, at whichever comes first
    max_steps: int | None = number(None, least=1)
    epochs: int | None = number(None, least=1)  # the run ends after this many passes over the data
    precision: Precision = MISSING  # the numbers that the model computes with; fp64 needs engine=torch or engine=fsdp2
    # steps (50) or epochs (0.25 epoch) between evaluations on the held-out rows; also evaluated after the last step;
    # null: never
    eval_every: int | float | str | None = None
    # stop after this many steps of this launch, and save, even if the run is not complete; to continue, repeat the
    # command with the same `hydra.run.dir`
    stop_after: int | None = number(None, least=1)


@dataclass
class EvalConfig:
    """How the held-out rows are evaluated; `train.eval_every` says when."""

    before_training: bool = False  # evaluate before the first step too, in a row of step 0
    # lengths in tokens, ascending, by which the held-out rows are divided: loss and accuracy are logged for each part.
    # `[512,2048]` makes three, of whole sequences up to 512 tokens, up to 2048, and longer
    buckets: list[int] = field(default_factory=list)


@dataclass
class ParallelConfig:
    # ranks that share sequences; they are one ring, and one replica of the model. `parallel.ring_size=auto` is
    # `parallel=elastic`
    ring_size: int = number(1, least=1, most=MANY)
    cut: Cut = Cut.auto  # which sequences are cut over ranks of a ring; each of the others is held by one rank
    # which rank of a ring holds which tokens, and how they attend to each other's
    layout: LayoutName = LayoutName.zigzag
    # ranks that share out the heads, with parallel.layout=hybrid; it must divide the ring size
    ulysses_size: int | None = number(None, least=1)
    # how keys and values travel, with the layouts zigzag, contiguous and hybrid
    transport: TransportName = TransportName.auto
    kernel: KernelName = KernelName.auto  # the code that computes attention on one rank
    backend: BackendName = BackendName.native  # the code that runs attention over the ring
    world_size: int = MISSING  # ranks that train; derived, cannot be set
    elastic: bool = False  # set by rlexp: whether the ring size was left to rlexp
    dp_size: int = MISSING  # replicas that train on different samples; derived, cannot be set
    chosen: str | None = None  # set by rlexp: why parallel.layout=auto took this layout; null if the layout was named


@dataclass
class EngineConfig:
    name: EngineName = MISSING  # the engine, chosen by engine=NAME
    offload: Offload = Offload.none  # the part of the training state that is kept in the host's memory
    # keys of DeepSpeed's own configuration: `engine.overrides.KEY=VALUE`
    overrides: dict[str, Any] = field(default_factory=dict)
    chosen: str | None = None  # set by rlexp: why engine=auto took this engine; null if the engine was named


@dataclass
class OptimConfig:
    name: OptimName = OptimName.adamw  # the optimizer, chosen by optim=NAME
    # learning rate after the warm-up; the default follows from the loss and from what is trained
    lr: float = number(MISSING, least=0)
    # AdamW's two decay rates, of the mean of gradients and of their squares; each at least 0 and less than 1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = number(1e-8, least=0)  # added to AdamW's divisor, so that it is not 0
    weight_decay: float = number(0.0, least=0)  # decay of matrices; biases and the gains of norms do not decay
    # first steps, in which the learning rate rises in a straight line to optim.lr
    warmup_steps: int = number(0, least=0)
    # the same as a share of the planned steps, rounded up; a run that continues keeps the steps that it came to
    warmup_ratio: float | None = number(None, least=0, most=1)
    # share of optim.lr that the first step of a warm-up has; 0: it trains nothing, as in transformers' schedules; null:
    # as much as each further step adds
    warmup_start: float | None = number(None, least=0, most=1)
    decay: Decay = Decay.linear  # how the learning rate falls after the warm-up, until the end of the run
    min_lr_ratio: float = number(0.0, least=0, most=1)  # share of optim.lr that it falls to, linearly or by a cosine
    # the whole gradient is scaled down to this norm if it is larger; 0: never
    max_grad_norm: float = number(1.0, least=0)


class CountTensors(Enum):
    """Where a run counts the bytes of its live tensors."""

    auto = "auto"  # on CPU only, in micro-batches that may hold more than any before: 4 % of a default run's time
    always = "always"  # in every step, on any device: twice the time of a small model's step
    never = "never"  # nowhere


class Checkpointing(Enum):
    """What of a layer's activations is computed again in the backward pass."""

    none = "none"  # nothing: all are kept
    full = "full"  # all but the layer's input: least memory, most time
    attention = "attention"  # all but the layer's input and what attention gives, which takes longest on long sequences


@dataclass
class MemoryConfig:
    # what of each layer's activations is computed again in the backward pass: none, full (also written true), or
    # attention: all but what attention gives
    checkpointing: bool | str = "none"
    count_tensors: CountTensors = CountTensors.auto  # where a run counts the bytes of its live tensors

    @property
    def recomputed(self) -> Checkpointing:
        """The value by its name: true and false are as other trainers have it."""
        if isinstance(self.checkpointing, bool):
            return Checkpointing.full if self.checkpointing else Checkpointing.none
        return Checkpointing[self.checkpointing]


class Best(Enum):
    min = "min"  # the smallest
    max = "max"  # the largest


class ExportDtype(Enum):
    auto = "auto"  # bf16 after a run in bf16, else fp32
    fp32 = "fp32"  # float32
    bf16 = "bf16"  # bfloat16
    fp16 = "fp16"  # float16


@dataclass
class CheckpointConfig:
    # steps (50), epochs (0.25 epoch) or time (30s, 10m, 2h) between two checkpoints; null: at the end only
    save_every: str | None = "30m"
    # newest checkpoints to keep; older ones are removed once a newer one is complete
    keep_last: int = number(2, least=1)
    # further checkpoints to keep: the best ones by checkpoint.best_metric. A step that is among them is always saved
    keep_best: int = number(0, least=0)
    # the metric that says which checkpoint is best, as metrics.jsonl names it; reinforcement learning has no eval/loss:
    # take eval/objective/scores with checkpoint.best=max
    best_metric: str = "eval/loss"
    best: Best = Best.min  # which value of checkpoint.best_metric is best
    on_exit: bool = True  # save when the run ends, or is asked to stop
    # GiB of a machine's memory that the copies of the state take at most while they are written; null: as many as the
    # state has. With less, training waits for the disk
    host_memory_gib: float | None = number(None, above=0, most=MANY)
    # write the trained model to `<run>/model` when the run ends; of an adapter alone, or the model that it is merged
    # into: `merged`
    export: bool | str = True
    export_dtype: ExportDtype = ExportDtype.auto  # dtype of the weights in `<run>/model`


@dataclass
class ResumeConfig:
    # auto: continue from the checkpoints in the run's folder. never: refuse a folder that holds a run. The path of a
    # checkpoint or a run: begin from it, unless the run's folder has checkpoints
    mode: str = "auto"
    # keys, or groups of keys, that may differ from those that the run began with
    force: list[str] = field(default_factory=list)


@dataclass
class LoggerConfig:
    name: LoggerName = LoggerName.wandb  # where metrics go besides metrics.jsonl, chosen by logger=NAME
    mode: WandbMode = WandbMode.auto  # whether W&B's rows are sent at once
    project: str = "rlexp"  # the project in W&B or trackio
    entity: str | None = None  # the user or team in W&B; null: the account's own
    group: str | None = None  # runs that belong together; a sweep sets the name of its folder
    run_name: str | None = None  # the run's name; null: its folder's. A sweep sets it
    # the keys that a sweep varies, with this job's values; the sweep sets it
    axes: dict[str, str] = field(default_factory=dict)
    baseline: str | None = None  # folder of the run whose loss this run's is compared with; a sweep sets it
    tags: list[str] = field(default_factory=list)  # tags in W&B, besides those for loss, model, ring size and precision
    progress: bool = True  # show each step in the terminal, and a progress bar while rows are tokenized
    artifacts: bool = False  # list every checkpoint in W&B as an artifact; the files stay where they are


@dataclass
class Config:
    # fixes the order of samples, and the random numbers of generated answers; neither depends on the layout
    seed: int = number(0, least=0)
    launch: LaunchConfig = field(default_factory=LaunchConfig)  # processes, devices and nodes
    # batch size, number of steps or epochs, and precision of the run
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)  # how the held-out rows are evaluated
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # how ranks share sequences
    model: ModelConfig = field(default_factory=ModelConfig)  # the model that is trained
    data: DataConfig = field(default_factory=DataConfig)  # the rows that the model is trained on
    loss: LossConfig = field(default_factory=LossConfig)  # what is minimized
    engine: EngineConfig = field(default_factory=EngineConfig)  # how the training state is held and updated
    optim: OptimConfig = field(default_factory=OptimConfig)  # the optimizer and the learning rate
    # small matrices that are trained in the place of the model
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)  # the model that the policy is compared with
    # how answers are generated; only with a loss of reinforcement learning
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    # how answers are scored; only with a loss of reinforcement learning
    reward: RewardConfig = field(default_factory=RewardConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)  # how memory is saved and measured
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)  # what is saved, and when
    resume: ResumeConfig = field(default_factory=ResumeConfig)  # how a run continues
    logger: LoggerConfig = field(default_factory=LoggerConfig)  # where metrics are shown
    # the GPUs for which a run is predicted; 0: as this machine's GPU
    hardware: HardwareConfig = field(default_factory=HardwareConfig)


def with_values(cfg: Config, group: str, **values: Any) -> Config:
    """Return the same configuration with other values in one of its groups."""
    changed: dict[str, Any] = {group: replace(getattr(cfg, group), **values)}
    return replace(cfg, **changed)


def _kinds(module: ModuleType, base: type) -> dict[str, type]:
    """Return the classes of a group's options by the names that choose them, in the order of their file."""
    kinds: list[Any] = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, base)]
    return {kind.name: kind for kind in kinds if kind.name != MISSING}


KINDS: dict[str, dict[str, type]] = {
    "model": _kinds(models, ModelConfig),
    "data": _kinds(data, DataConfig),
    "loss": _kinds(losses, LossConfig),
    "adapter": _kinds(models, AdapterConfig),
    "reward": _kinds(rollouts, RewardConfig),
}


def register() -> None:
    """Store the schema where `conf/config.yaml` and the group files find it (`/schema/<group>/<kind>@_here_`)."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, kinds in KINDS.items():
        for name, node in kinds.items():
            store.store(group=f"schema/{group}", name=name, node=node)
