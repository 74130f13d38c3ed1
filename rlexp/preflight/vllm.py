"""What vLLM adds to a prediction: its share of the device's memory, and the seconds of a rollout.

vLLM itself is not rehearsed. What it holds is arithmetic (`config/vllm_memory.py`), and so are its seconds: for each
token of an answer, it reads the weights, and the keys and values of all answers that it computes at once.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from rlexp.base.byte_counts import GIB, size
from rlexp.base.host_memory import host_memory
from rlexp.config.schema import Config, Device, with_values
from rlexp.config.vllm_memory import KEY, Holding, held_by_vllm, requests, share_of_sampling, uses_vllm
from rlexp.preflight.rehearsal.rates import Rates
from rlexp.training.model.loading import random_model

NATIVE = "or rollout.engine=native"
_counted: dict[str, int] = {}


@dataclass(frozen=True)
class VllmShare:
    """vLLM's share of a device, beside a rank's own tensors, and what the rank draws with it."""

    holds: Holding
    answers: int
    prompts: int
    new: int  # tokens of an answer
    read: int  # tokens of a prompt
    parameters: int
    rates: Rates
    room: int  # bytes of the device that a rank may take
    memory: int  # bytes of the device
    auto: bool  # the share is what training leaves
    sleeps: bool  # it holds memory in rollouts only
    on_cpu: bool
    kept: int = 0  # bytes that `auto` leaves free too: more is assumed to lie beside tensors than the reserve has

    @property
    def seconds(self) -> float:
        """The estimated seconds of a rollout whose answers are all as long as they may be."""
        at_once = min(self.answers, max(self.holds.at_once, 1))
        keys = at_once * self.holds.token * (self.read + self.new / 2)
        step = self.rates.operator(2 * self.parameters * at_once, int(self.holds.weights + keys))
        reading = self.rates.operator(2 * self.parameters * self.prompts * self.read, self.holds.weights)
        return reading + math.ceil(self.answers / at_once) * self.new * step

    def left(self, most: int) -> float:
        """Return the share of the GPU that is left, in whole percents, beside so many bytes of the rank's own."""
        return max(100 * (self.room - most) // self.memory, 0) / 100

    def given(self, most: int) -> VllmShare:
        """Return vLLM with what is left beside so many bytes of the rank's own, where its share is `auto`."""
        share = self.left(most + self.kept)
        if not self.auto or self.on_cpu or share <= self.holds.share:
            return self
        return dataclasses.replace(self, holds=self.holds.with_share(share, self.memory))

    def plain(self) -> dict[str, Any]:
        holds = self.holds
        return {
            "share": holds.share, "auto": self.auto, "sleeps": self.sleeps, "bytes": holds.bytes,
            "weights_bytes": holds.weights, "working_bytes_assumed": holds.working, "keys_bytes": holds.keys,
            "bytes_of_a_token": holds.token, "tokens": holds.tokens, "answers_at_once": holds.at_once,
            "least_bytes": holds.least, "estimated_seconds": self.seconds,
        }  # fmt: skip

    @property
    def suffices(self) -> bool:
        """Whether vLLM can start, by what is counted. On CPU, that was decided before."""
        return self.on_cpu or self.holds.bytes >= self.holds.counted

    def refused(self, most: int, phase: str) -> str | None:
        """Say why vLLM and the rank's own tensors, so many bytes in the phase that has most, do not both fit."""
        holds, share = self.holds, self.left(most)
        asked = f"{KEY}={'auto' if self.auto else f'{holds.share:g}'}"
        apart = "" if self.on_cpu else "rollout=pipelined, where vLLM has GPUs of its own, "
        less = f"Use a change that needs less memory beside it, {apart}{NATIVE}"
        fits = not self.on_cpu and share * self.memory >= holds.least
        if not self.suffices:
            least = math.ceil(100 * holds.least / self.memory) / 100
            use = f"Use {KEY}={least:g} to {share:g}, or auto" if fits else less
            return f"{asked}: vLLM has {size(holds.bytes)}, and needs {holds.needs()}. {use}"
        if most + holds.bytes <= self.room:
            return None
        own = f"the rank itself holds {size(most)} ({phase}) of the {size(self.room)} that it may take"
        if fits:
            return f"{asked}: vLLM takes {size(holds.bytes)}, and {own}. Use {KEY}={share:g} or less, or auto"
        return f"{asked}: vLLM needs {holds.needs()}; {own}. {less}"


def share_of(cfg: Config, model: Any) -> VllmShare | None:
    """Return vLLM's share beside a rank of this run, and of an `auto` the least; None if vLLM draws nothing there."""
    if not uses_vllm(cfg):
        return None
    on_cpu = cfg.launch.device is Device.cpu
    machine = host_memory() if on_cpu else None
    gib = cfg.hardware.host_memory_gib if on_cpu else cfg.hardware.memory_gib
    memory = machine.total if machine is not None else int(gib * GIB)
    parameters, answers = count_parameters(model), requests(cfg)
    new = cfg.rollout.max_new_tokens
    return VllmShare(
        held_by_vllm(cfg, model.to_dict(), parameters, memory),
        answers=answers, prompts=-(-answers // cfg.rollout.n_samples), new=new, read=cfg.data.max_length - new,
        parameters=parameters, rates=Rates.of(cfg, cfg.parallel.ring_size), room=room(cfg), memory=memory,
        auto=isinstance(cfg.rollout.vllm_memory, str), sleeps=cfg.rollout.vllm_sleep, on_cpu=on_cpu,
    )  # fmt: skip


def too_little_to_sample(cfg: Config, model: Any) -> str | None:
    """Say why vLLM cannot start on a rank that only samples; None if it can."""
    rollout, best = cfg.rollout, share_of_sampling(cfg)
    auto, memory = isinstance(rollout.vllm_memory, str), int(cfg.hardware.memory_gib * GIB)
    with_number = with_values(cfg, "rollout", vllm_memory=best) if auto else cfg
    holds = held_by_vllm(with_number, model.to_dict(), count_parameters(model), memory)
    if holds.bytes >= (holds.least if auto else holds.counted):
        return None
    least = math.ceil(100 * holds.least / memory) / 100
    larger = f"{KEY}={least:g} or more" if least <= best else "GPUs with more memory, a smaller data.max_length"
    return (
        f"{KEY}={'auto' if auto else f'{holds.share:g}'}: on a rank that samples, vLLM has {size(holds.bytes)} of "
        f"{size(memory)}, and needs {holds.needs()}. Use {larger}, {NATIVE}."
    )


def room(cfg: Config) -> int:
    """Return the bytes of a device that a rank's tensors may take. Each rank keeps its own reserve."""
    return int((cfg.hardware.memory_gib / cfg.launch.ranks_per_gpu - cfg.hardware.reserve_gib) * GIB)


def count_parameters(model: Any) -> int:
    """Count the parameters of a model of this configuration."""
    key = model.to_json_string()
    if key not in _counted:
        with torch.device("meta"):
            _counted[key] = sum(parameter.numel() for parameter in random_model(model, 2).parameters())
    return _counted[key]
