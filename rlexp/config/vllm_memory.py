"""`rollout.vllm_memory`: what vLLM holds with its share of a device's memory, and what `auto` comes to.

On a GPU, the share is of the GPU's memory, and holds all that vLLM has there: a copy of the weights, activations, CUDA
graphs, and keys and values in what is left. On CPU, the share is of the machine's memory, and is for keys and values
alone: weights and activations are beside it.

`auto` becomes a number before any rank starts (`launch/preflight_check.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlexp.base.byte_counts import GIB, MIB, size
from rlexp.base.errors import ConfigError
from rlexp.base.host_memory import HostMemory
from rlexp.config.checks.layout import described, heads_in, number_in, of_text
from rlexp.config.schema import AUTO, Config, Device, Precision
from rlexp.config.schema.rollouts import RolloutEngine
from rlexp.config.sizes import ranks_of_machine

KEY = "rollout.vllm_memory"
# Shares of a GPU: where nothing trains, and beside training of which nobody knows how much it leaves.
ALONE, UNPREDICTED = 0.9, 0.4
OF_FREE = 0.25  # of a machine's free memory, on CPU: keys and values of all its ranks take no more
PRECISE = 1_000_000  # on CPU, a share is a whole number of so many parts
BLOCK = {Device.cpu: 128, Device.cuda: 16}  # tokens whose keys and values vLLM keeps together
AT_ONCE = 1024  # answers that vLLM computes together, at most
# Tokens that vLLM computes together: with large GPUs that are no A100, with other GPUs, on CPU (`get_batch_defaults`).
TOGETHER_LARGE, TOGETHER, TOGETHER_CPU, LARGE = 16384, 8192, 4096, 70 * GIB
GRAPHS = 512 * MIB  # of CUDA graphs and workspaces


@dataclass(frozen=True)
class Holding:
    """Bytes that vLLM holds for one rank that samples with it, and tokens."""

    bytes: int  # in all
    share: float  # of the device's memory
    weights: int
    working: int  # activations and CUDA graphs: assumed, not measured
    token: int  # keys and values of a token
    longest: int  # tokens of the longest answer with its prompt, in whole blocks
    block: int  # tokens of a block, of which vLLM never uses the first

    def with_share(self, share: float, memory: int) -> Holding:
        """Return what vLLM holds with this share of a GPU of so many bytes."""
        return dataclasses.replace(self, bytes=int(share * memory), share=share)

    @property
    def counted(self) -> int:
        """The bytes without which vLLM cannot start: its weights, and room for the longest answer."""
        return self.weights + self.token * (self.longest + self.block)

    @property
    def least(self) -> int:
        """The bytes with which vLLM starts, by what is assumed for the rest."""
        return self.counted + self.working

    def needs(self) -> str:
        return (
            f"{size(self.least)}: {size(self.weights)} weights, {size(self.counted - self.weights)} keys and values of "
            f"one answer of {self.longest:,} tokens, {size(self.working)} working memory (assumed)"
        )

    @property
    def tokens(self) -> int:
        """The tokens whose keys and values fit."""
        blocks = self.keys // (self.token * self.block) - 1
        return max(blocks, 0) * self.block

    @property
    def at_once(self) -> int:
        """The longest answers that fit at once."""
        return min(self.tokens // self.longest, AT_ONCE)

    @property
    def keys(self) -> int:
        """The bytes that are left for keys and values."""
        return max(self.bytes - self.weights - self.working, 0)

    def room_in_words(self) -> str:
        """`12,288 tokens: 12 answers of 1,024 at once`."""
        answers = f"{self.at_once:,} answer{'s' * (self.at_once != 1)} of {self.longest:,} at once"
        return f"{self.tokens:,} tokens: {answers}"

    def in_words(self) -> str:
        return (
            f"{size(self.weights)} weights, {size(self.working)} working memory (assumed), "
            f"{size(self.keys)} keys and values of {self.room_in_words()}"
        )


def uses_vllm(cfg: Config) -> bool:
    return cfg.loss.draws and cfg.rollout.engine is RolloutEngine.vllm


def samples_apart(cfg: Config) -> bool:
    """Return whether vLLM has GPUs on which nothing trains, as far as ranks do not share them."""
    return uses_vllm(cfg) and cfg.rollout.sampling_ranks > 0 and cfg.launch.device is not Device.cpu


def requests(cfg: Config) -> int:
    """Return the answers of a rollout that a rank draws, on the rank that draws most."""
    return -(-cfg.rollout.batch_size * cfg.rollout.n_samples // (cfg.rollout.sampling_ranks or cfg.parallel.world_size))


def held_by_vllm(cfg: Config, model: Mapping[str, object], parameters: int, memory: int) -> Holding:
    """Return what vLLM holds with the share that is stated; with `auto`, with the smallest by which it can start.

    `model` is what a config.json says, and `memory` the bytes of the GPU, or of the machine on CPU.
    """
    number, token = bytes_of_number(cfg), bytes_of_token(cfg, model)
    if token is None:
        raise ConfigError(
            "rollout.engine=vllm: the model's configuration does not say how many layers, heads and numbers its keys "
            "and values have, so nobody knows how much memory vLLM needs for them. Use rollout.engine=native."
        )
    longest = _in_blocks(cfg, cfg.data.max_length)
    needs = Holding(0, 0.0, number * parameters, _working(cfg, model, memory), token, longest, BLOCK[_device(cfg)])
    share = cfg.rollout.vllm_memory
    if _device(cfg) is Device.cpu:
        cache = token * _tokens_of_rollout(cfg) if isinstance(share, str) else int(share * memory)
        share = cache / memory if isinstance(share, str) else share
        return dataclasses.replace(needs, bytes=needs.weights + needs.working + cache, share=share)
    if isinstance(share, str):
        share = math.ceil(100 * needs.least / memory) / 100
    return needs.with_share(share, memory)


def bytes_of_number(cfg: Config) -> int:
    """Return the bytes of a number of vLLM's weights, keys and values: it knows no fp64."""
    return 2 if cfg.train.precision is Precision.bf16 else 4


def bytes_of_token(cfg: Config, model: Mapping[str, object]) -> int | None:
    """Return the bytes of the keys and values of a token; None where the model does not say them."""
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    heads, layers = heads_in(model), number_in(of_text(model), *names)
    return 2 * bytes_of_number(cfg) * layers * heads.keys * heads.size if heads is not None and layers else None


def _device(cfg: Config) -> Device:
    return Device.cpu if cfg.launch.device is Device.cpu else Device.cuda


def _in_blocks(cfg: Config, tokens: int) -> int:
    block = BLOCK[_device(cfg)]
    return -(-tokens // block) * block


def _tokens_of_rollout(cfg: Config) -> int:
    """Return the tokens of all answers of a rank's rollout with their prompts, as if none shared a prompt."""
    each = _in_blocks(cfg, cfg.data.max_length)
    return min(requests(cfg), AT_ONCE) * each + BLOCK[_device(cfg)]


def _working(cfg: Config, model: Mapping[str, object], memory: int) -> int:
    """Return the bytes that vLLM's activations and CUDA graphs take: an assumption.

    vLLM tries its largest batch when it starts, and keeps what that took free of keys and values. A layer then holds
    six times its width and three times that of its MLP for each token, and the logits are there twice, in float32. For
    Llama-3-8B with 8,192 tokens and 256 answers that is 1.28 GiB, where vLLM reported 1.26
    (https://github.com/vllm-project/vllm/pull/10511).
    """
    large = memory >= LARGE and cfg.hardware.name != "a100"
    tokens, answers, graphs = TOGETHER_LARGE if large else TOGETHER, AT_ONCE, GRAPHS
    if _device(cfg) is Device.cpu:  # nothing is tried before
        answers, graphs = min(requests(cfg), AT_ONCE), 0
        tokens = min(answers * cfg.data.max_length, TOGETHER_CPU)
    fields = of_text(model)
    width = number_in(fields, "hidden_size", "n_embd", "d_model")
    inner = number_in(fields, "intermediate_size", "ffn_dim", "n_inner") or 4 * width
    logits = 2 * 4 * answers * number_in(fields, "vocab_size")
    return tokens * bytes_of_number(cfg) * (6 * width + 3 * inner) + logits + graphs


# ---- auto, where nothing is predicted ----


def share_of_sampling(cfg: Config) -> float:
    """Return the share of a GPU for a rank that only samples. Nothing else is there, unless ranks share GPUs."""
    each, hardware = cfg.launch.ranks_per_gpu, cfg.hardware
    trains_there = cfg.parallel.world_size % each != 0
    ranks = each if trains_there else min(each, cfg.rollout.sampling_ranks)
    share = ALONE / ranks
    if hardware.memory_gib:
        share = min(share, 1 / ranks - hardware.reserve_gib / hardware.memory_gib)
    return max(math.floor(100 * share), 1) / 100


def share_beside_training(cfg: Config) -> float:
    """Return the share of a GPU where nobody knows what training leaves."""
    return math.floor(100 * UNPREDICTED / cfg.launch.ranks_per_gpu) / 100


def share_on_cpu(cfg: Config, memory: HostMemory | None) -> float:
    """Return the share of the machine's memory that is stated, or with `auto` the one by which a rank's whole rollout
    fits, or as much of it as is modest. Refuse one into which no answer fits."""
    model, stated = described(cfg.model), cfg.rollout.vllm_memory
    token = None if model is None else bytes_of_token(cfg, model)
    ranks = _sampling_on_machine(cfg)
    if memory is None:
        return UNPREDICTED / ranks if isinstance(stated, str) else stated
    most = int(OF_FREE * memory.available / ranks) if isinstance(stated, str) else int(stated * memory.total)
    least = 0 if token is None else token * (_in_blocks(cfg, cfg.data.max_length) + BLOCK[Device.cpu])
    if least > most:
        quarter = f"a quarter of the {size(memory.available)} that are free{f', for {ranks} ranks' * (ranks > 1)}"
        has = quarter if isinstance(stated, str) else f"this share of {size(memory.total)}"
        raise ConfigError(
            f"{KEY}={stated}: keys and values of one answer of data.max_length={cfg.data.max_length} take "
            f"{size(least)}, and a rank has {size(most)} for them: {has}. Use {KEY}={_part(least, memory):g} or more, "
            f"a smaller data.max_length, fewer ranks, or rollout.engine=native."
        )
    if not isinstance(stated, str):
        return stated
    return _part(most if token is None else min(token * _tokens_of_rollout(cfg), most), memory)


def _sampling_on_machine(cfg: Config) -> int:
    return min(cfg.rollout.sampling_ranks, ranks_of_machine(cfg)) or ranks_of_machine(cfg)


def _part(count: int, memory: HostMemory) -> float:
    return (PRECISE * count // memory.total + 1) / PRECISE


# ---- rules ----


def check_vllm_memory(cfg: Config) -> None:
    """Refuse a share that is none, or shares of one device that are more than the device."""
    share = cfg.rollout.vllm_memory
    if isinstance(share, str):
        if share != AUTO:
            raise ConfigError(
                f"{KEY}={share!r}: must be a share of a GPU's memory, greater than 0 and less than 1, or auto, which "
                f"takes what training leaves. For example: {KEY}=0.4."
            )
        return
    on_cpu, each = _device(cfg) is Device.cpu, cfg.launch.ranks_per_gpu
    ranks = _sampling_on_machine(cfg) if on_cpu else min(each, cfg.rollout.sampling_ranks or each)
    if not uses_vllm(cfg) or ranks * share < 1:
        return
    if on_cpu:
        raise ConfigError(
            f"{KEY}={share:g}: each rank that samples takes this share of its machine's memory for keys and values, "
            f"and {ranks} of them are on one. Use less than {1 / ranks:.2g}, or {KEY}=auto."
        )
    raise ConfigError(
        f"{KEY}={share:g}: each rank that samples takes this share of its GPU, and launch.ranks_per_gpu={each} "
        f"puts {ranks} of them on one. Use less than {1 / ranks:.2g}, or launch.ranks_per_gpu=1."
    )
