"""What `verify` is run on: together these reach most of what trains, with few words each."""

from __future__ import annotations

from collections.abc import Mapping

from tests.helpers.faults.adapter import LORA
from tests.helpers.faults.base import CUT_ANSWERS, EMPTY_REPLICA, FP64, MIXED, SHORT_BATCH
from tests.helpers.faults.samples import GRPO, GSPO, HELD, MASKED, PIPELINED, PPO

AROUND = ("parallel=ring4", "parallel.transport=neighbour")
IN_FLOAT32 = tuple(word for word in FP64 if word != "train.precision=fp64")
EVALUATED = ("data.eval_size=13", "train.eval_every=1", "eval.buckets=[60,80]")

CONFIGURATIONS: Mapping[str, tuple[str, ...]] = {
    "ring 2": FP64,
    "ring 4": (*FP64, "parallel=ring4"),
    "ring 4, around": (*FP64, *AROUND),
    "ring 4, a window": (*FP64, "parallel=ring4", "model.window=16"),
    "ring 4, around, a window": (*FP64, *AROUND, "model.window=16"),
    "contiguous": (*FP64, "parallel.layout=contiguous"),
    "allgather": (*FP64, "parallel.layout=allgather"),
    "ulysses": (*FP64, "parallel=ring4", "parallel.layout=ulysses"),
    "hybrid": (*FP64, "parallel=ring4", "parallel.layout=hybrid", "parallel.ulysses_size=2"),
    "plain kernel": (*FP64, "parallel.kernel=plain", "memory.checkpointing=true"),
    "a short batch": (*FP64, *SHORT_BATCH),
    "an empty replica": (*FP64, *EMPTY_REPLICA),
    "truncated": (*FP64, *CUT_ANSWERS),
    "a mixture": MIXED,
    "evaluated": (*FP64, *EVALUATED),
    "zero0": (*IN_FLOAT32, "engine=zero0"),
    "zero1": IN_FLOAT32,
    "zero2": (*IN_FLOAT32, "engine=zero2"),
    "zero2, offloaded": (*IN_FLOAT32, "engine=zero2", "engine.offload=optimizer"),
    "zero3": (*IN_FLOAT32, "engine=zero3"),
    "fsdp2": (*FP64, "engine=fsdp2"),
    "zero1 in bfloat16": (*IN_FLOAT32, "train.precision=bf16"),
    "zero3 in bfloat16": (*IN_FLOAT32, "train.precision=bf16", "engine=zero3"),
    "torch in bfloat16": (*IN_FLOAT32, "train.precision=bf16", "engine=torch"),
    "a stored reference": (*FP64, "reference=precompute"),
    "an adapter": LORA,
    "an adapter over zero3": (*IN_FLOAT32, "adapter=lora", "adapter.rank=4", "adapter.targets=[q_proj,down_proj]",
                              "optim.lr=1e-2", "engine=zero3"),
    "frozen layers": (*FP64, "model.freeze=[*layers.0.*]"),
    "a likelihood": (*FP64, "loss=dpo", "loss.label_smoothing=0.1", "loss.sft_weight=0.3"),
    "on-policy weights": (*FP64, "loss=dpo_norm", "loss.wpo=true"),
    "a whole batch": (*FP64, "loss=aot"),
    "a mixed whole batch": (*FP64, "loss=mpo", *EVALUATED),
    "kto": (*FP64, "loss=kto", "loss.desirable_weight=3", *EVALUATED),
    "sft": (*FP64, "loss=sft", *EVALUATED),
    "reward": (*FP64, "loss=reward", "loss.center=0.1", *EVALUATED),
    "ppo": PPO,
    "ppo, held-out prompts": (*PPO, *HELD),
    "ppo, a penalty": (*PPO, "rollout.overlong=penalty", "rollout.temperature=0.7", "loss.entropy=0.01"),
    "grpo, masked": (*GRPO, *MASKED),
    "gspo": (*GSPO, "rollout.top_p=0.9"),
    "pipelined": (*PPO, *PIPELINED),
}  # fmt: skip
