"""The floating-point operations that a step's models need, by formula: of `train/tflops` and `train/mfu`.

A weight of a matrix product takes two operations for a token: in the forward pass, for the gradient of its input, and
for its own gradient. A pair of a query and a key that it sees takes 4 × heads × head size in a layer's forward pass,
and twice that for the gradients. What is computed again is not counted: activations under checkpointing, scores in a
flash kernel's backward pass, logits in the head's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlexp.config.checks.layout import heads_in
from rlexp.config.gpu_descriptions import described, peak_flops
from rlexp.config.hardware import option_of
from rlexp.config.schema import Config
from rlexp.training.engine.base import shape_of
from rlexp.training.metrics.meter import SHARDED, Meter
from rlexp.training.model.adapter import plain_name, without_starting
from rlexp.training.model.policy import Policy
from rlexp.training.reference.models import OfAdapter, OfModel, Reference
from rlexp.training.types import Shard

FORWARD, INPUT, OWN = 2, 2, 2  # operations of a weight for a token, by pass
ATTENTION = 4  # operations of a pair, head and channel in the forward pass: two products
_LAYER = re.compile(r"\.(\d+)\.")
_UNUSED = ".original_module."  # of a module that an adapter trains whole


@dataclass(frozen=True)
class Operations:
    """Operations for each token, each token whose target the head is asked for, and each pair of a query and a key that
    a layer sees, on the mean over the layers."""

    token: float = 0.0
    target: float = 0.0
    pair: float = 0.0

    def __add__(self, other: Operations) -> Operations:
        return Operations(self.token + other.token, self.target + other.target, self.pair + other.pair)

    def on(self, shard: Shard) -> float:
        """Count a rank's part of a micro-batch, from what the host knows of it."""
        read = shard.trained_u if shard.ends_n is None else shard.ends_n
        return self.token * shard.real_tokens + self.target * len(read) + self.pair * shard.mean_work


def note_operations(meter: Meter, shard: Shard, operations: Operations) -> None:
    meter.add_total("operations", operations.on(shard), SHARDED)


def speed(values: dict[str, float], ranks: int, peak: float | None) -> dict[str, float]:
    """Return the rate per GPU, and its share of the peak if that is known, from a train batch's metered values.

    Where samples are drawn, the seconds are those of training on them.
    """
    rate = values.pop("operations") / ranks / values.get("time/train", values["step_seconds"])
    return {"tflops": rate / 1e12} | ({} if peak is None else {"mfu": rate / peak})


def peak_of(cfg: Config, device: torch.device) -> float | None:
    """Return the data sheet's operations per second for this GPU and the run's precision; None if it is not known."""
    if device.type != "cuda":
        return None
    sheet: Mapping[str, Any] = vars(cfg.hardware)
    if not peak_flops(sheet, cfg.train.precision):  # hardware=auto
        sheet = described(option_of(torch.cuda.get_device_name(device)) or "")
    return peak_flops(sheet, cfg.train.precision) / cfg.launch.ranks_per_gpu or None


# ---- of a model ----


def of_training(policy: Policy) -> Operations:
    """Count a forward and a backward pass of the policy, and of its critic."""
    operations = _of_trunk(policy, dict(without_starting(policy.model.named_parameters())))
    if policy.critic is not None:
        critic = dict(policy.critic.named_parameters())
        own = policy.critic.trunk
        operations += Operations(
            sum(size * cost for size, cost in _weights(policy.critic, critic, set())),
            pair=0.0 if own is None else _pairs(own, _first_trained(critic)),
        )
    return operations


def of_reference(reference: Reference | None) -> Operations:
    """Count the forward pass of the model that the policy is compared with; nothing where its values are stored."""
    match reference:
        case OfModel(frozen):
            return _of_trunk(frozen.policy, dict(frozen.policy.model.named_parameters()), backward=False)
        case OfAdapter(engine):
            named = dict(engine.policy.model.named_parameters())
            beside = {name for name, _ in without_starting(named.items()) if plain_name(name) is None}
            starting = {name: each for name, each in named.items() if name not in beside}
            return _of_trunk(engine.policy, starting, backward=False)
        case _:
            return Operations()


def _of_trunk(policy: Policy, named: dict[str, Any], *, backward: bool = True) -> Operations:
    apart = {id(each) for module in policy.heads for each in module.parameters(recurse=False)}
    head = policy.head.weight
    flows = backward and any(each.requires_grad for name, each in named.items() if id(each) not in apart)
    target = FORWARD + (INPUT if flows else 0) + (OWN if backward and head.requires_grad else 0)
    return Operations(
        token=sum(size * cost for size, cost in _weights(policy.model, named, apart, backward=backward)),
        target=target * _size(policy.head, head),
        pair=_pairs(policy.model, _first_trained(named) if backward else None),
    )


def _weights(
    model: nn.Module, named: dict[str, Any], apart: set[int], *, backward: bool = True
) -> Iterator[tuple[float, int]]:
    """Yield the size of each weight of a matrix product, as far as a token meets it, and its operations for a token.

    Below the first weight that is trained, no gradient is computed. `apart` are weights that are not met by each token.
    """
    owners, share = dict(model.named_modules()), _share_of_experts(model)
    flows = False
    for name, weight in named.items():
        owner = owners[name.rpartition(".")[0]]
        trains = backward and weight.requires_grad
        flows |= trains
        if isinstance(owner, nn.Embedding) or id(weight) in apart or _UNUSED in name or len(shape_of(weight)) < 2:
            continue
        size = _size(owner, weight) * (share if ".experts." in name else 1.0)
        yield size, FORWARD + (INPUT if flows else 0) + (OWN if trains else 0)


def _size(owner: nn.Module, weight: Any) -> int:
    """Count a weight's numbers, by what its layer says where it keeps them otherwise."""
    if isinstance(owner, nn.Linear):
        return owner.in_features * owner.out_features
    return shape_of(weight).numel()


def _share_of_experts(model: Any) -> float:
    """Return the part of the experts that a token meets."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None else None

    def first(*names: str) -> int:
        return next((number for name in names if isinstance(number := getattr(text, name, None), int)), 0)

    active = first("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
    experts = first("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return active / experts if active and experts else 1.0


def _pairs(model: Any, first: int | None) -> float:
    """Count the operations of a pair in all layers, with the backward pass from layer `first` on."""
    heads, layers = heads_in(model.config.to_dict()), int(model.config.get_text_config().num_hidden_layers)
    if heads is None:
        return 0.0
    backward = 0 if first is None else max(0, layers - first)
    return ATTENTION * heads.queries * heads.size * float(layers + 2 * backward)


def _first_trained(named: dict[str, Any]) -> int | None:
    """Return the number of the layer in which the first trained weight is, or before which it is; None: no layer's."""
    begun = False
    for name, weight in named.items():
        number = _LAYER.search(name)
        begun |= number is not None
        if weight.requires_grad:
            return int(number[1]) if number is not None else (None if begun else 0)
    return None
