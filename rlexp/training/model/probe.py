"""Probe whether a model computes the same over the ring as alone, before it is trained.

A small copy of the model with random float64 weights runs twice: packed over the real ring, and one sequence
at a time by transformers alone. If the two differ, the model is refused by name.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlexp.base.errors import ModelError, is_out_of_memory
from rlexp.config.schema import ModelConfig
from rlexp.training.dealer.forest import Share
from rlexp.training.dealer.packing import listed, pack_sequences, shard_pack
from rlexp.training.model import hook, rope
from rlexp.training.model.decoding import Decoding, KeyValues
from rlexp.training.model.float64 import precise
from rlexp.training.model.loading import from_config_options, quiet
from rlexp.training.model.policy import Policy, cast_parameters
from rlexp.training.model.small import small_config
from rlexp.training.ring.kernels import BlockKernel, computing_in
from rlexp.training.ring.layouts import Layout
from rlexp.training.types import Floats, Shard
from rlexp.training.world.groups import Ring
from rlexp.training.world.objects import gather_objects

LENGTHS = ((5, 32), (1, 1), (9, 10), (2, 19))  # of prompt and answer; awkward for every ring
WINDOW = 8  # the copy's window if the model's is shorter than data.max_length, so that the probe's sequences exceed it
TOLERANCE = 1e-8  # rounding is about 1e-13; a window, a soft-cap or a mixer of tokens changes values by over 1e-4


def probe(
    cfg: ModelConfig,
    config: PreTrainedConfig,
    *,
    ring: Ring,
    layout: Layout,
    kernel: BlockKernel,
    max_length: int,
    device: torch.device,
    share: bool = False,
) -> float:
    """Raise ModelError unless the model computes the same over the ring as alone; return the largest difference.

    With `share`, some sequences of the pack share what they have in common.
    """
    try:
        small = SmallCopy(cfg, _copied(cfg, config, max_length), max_length, device)
        difference, asked = _largest_difference(small, ring, layout, kernel, share=share)
        at_fault = share and not difference < TOLERANCE
        alone = _largest_difference(small, ring, layout, kernel)[0] if at_fault else difference
    except ModelError as error:
        raise ModelError(_refusal(config, max_length, str(error), asked=True)) from error
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"{_name(config)}: does not run through transformers' attention interface over a packed batch "
            f"({type(error).__name__}: {error})."
        ) from error
    if alone < TOLERANCE and not difference < TOLERANCE:
        raise ModelError(
            f"{_name(config)}: its results differ where sequences share a prompt (log-probabilities by "
            f"{difference:.1e} in float64), and do not where each has its own. Use data.share_prefix=false."
        )
    if not difference < TOLERANCE:  # also when it is not a number
        why = f"log-probabilities differ by {difference:.1e} in float64"
        raise ModelError(_refusal(config, max_length, why, asked=asked))
    return difference


def probe_decoding(cfg: ModelConfig, config: PreTrainedConfig, max_length: int, device: torch.device) -> float:
    """Raise ModelError unless decoding gives the logits of the plain model; return the largest difference."""
    try:
        difference = _decoded_difference(SmallCopy(cfg, _copied(cfg, config, max_length), max_length, device))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"{_name(config)}: cannot generate answers token by token ({type(error).__name__}: {error})."
        ) from error
    if not difference < TOLERANCE:
        raise ModelError(
            f"{_name(config)}: its logits for the next token differ between decoding with a cache and reading the text "
            f"at once (by {difference:.1e} in float64). It cannot generate answers."
        )
    return difference


@dataclass(frozen=True)
class SmallCopy:
    """A small copy of the run's model with random float64 weights."""

    cfg: ModelConfig
    config: PreTrainedConfig
    max_length: int
    device: torch.device

    def model(self, attention: str) -> PreTrainedModel:
        """Return the copy with this attention, and the same weights in every call."""
        with torch.random.fork_rng(devices=[]), quiet():  # the copy's special tokens and context are not the user's
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(self.config),
                dtype=torch.float32,
                attn_implementation=attention,
                **from_config_options(self.cfg, self.config),
            )
            for parameter in model.parameters():  # some initial values are zero
                parameter.data += 0.05 * torch.randn(parameter.shape)
        cast_parameters(model, torch.float64)
        rope.pin(model, self.max_length)
        return model.to(self.device).eval()

    def sequences(self) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)

        def drawn(length: int) -> Tensor:
            return torch.randint(self.config.vocab_size, (length,), generator=generator, dtype=torch.int32)

        return [(drawn(prompt), drawn(answer)) for prompt, answer in LENGTHS]


@torch.no_grad()
def _decoded_difference(small: SmallCopy) -> float:
    """Read two rows of uneven length in two pieces and then token by token, and compare with the plain model."""
    device = small.device
    sequences = [torch.cat(parts).to(device, torch.int64) for parts in small.sequences()[::2]]
    prompts = [5, 9]
    policy, plain = small.model(hook.NAME), small.model("sdpa")
    reader = Policy(policy)
    cache = KeyValues(torch.tensor([prompts[1] - prompts[0], 0], device=device), 4)
    worst = 0.0
    for first, last in [(0, 4), (4, 9), *((9 + step, 10 + step) for step in range(8))]:
        places = [torch.arange(first, last) - (prompts[1] - prompt) for prompt in prompts]
        tokens = torch.stack([s[at.clamp(min=0).to(device)] for s, at in zip(sequences, places, strict=True)])
        positions = torch.stack(places).clamp(min=0).to(device)
        logits_BV = reader(Decoding(tokens, positions, cache))
        for row, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
            read = last - (prompts[1] - prompt)
            if read < 1:
                continue
            with precise(torch.float64):
                expected = plain(input_ids=sequence[:read].unsqueeze(0), use_cache=False).logits[0, -1]
            worst = max(worst, float((logits_BV[row] - expected).abs().max()))
    return worst


def _largest_difference(
    small: SmallCopy, ring: Ring, layout: Layout, kernel: BlockKernel, *, share: bool = False
) -> tuple[float, bool]:
    """Return the largest difference of a log-probability, and whether a layer asked for a window."""
    sequences = small.sequences()
    if share:  # a tree of three: another answer to a prompt, and one more that begins as the first does
        prompt, answer = sequences[0]
        sequences += [(prompt, answer.flip(0)), (prompt, torch.cat((answer[:9], answer.flip(0))))]
    pack = pack_sequences(
        [(p.numpy(), a.numpy()) for p, a in sequences], layout.multiple(ring.size), unit=layout.unit(ring.size),
        share=Share(1, 0) if share else None,
    )  # fmt: skip
    # Windows apply whatever their length, so that the copy is held to the very windows that it has.
    shard = shard_pack(pack, ring, layout, computing_in(torch.float64, kernel), sys.maxsize).to(small.device)
    with torch.no_grad():
        logps_n = Policy(small.model(hook.NAME))(shard).logps_n.cpu()
    expected_N = listed(_alone(small, sequences), torch.float64)
    try:
        worst, error = _worst(logps_n, expected_N, shard), ""
    except (IndexError, RuntimeError) as wrong:  # a pack that was parted wrongly, on this rank perhaps alone
        worst, error = torch.inf, f"{type(wrong).__name__}: {wrong}"
    every = gather_objects((worst, error), dist.get_world_size() if dist.is_initialized() else 1)
    if errors := [each for _, each in every if each]:  # so that all refuse together
        raise RuntimeError(errors[0])
    return max(each for each, _ in every), any(shard.attention.plans)


def _worst(logps_n: Tensor, expected_N: Tensor, shard: Shard) -> float:
    difference = (logps_n - expected_N[shard.listed_n.cpu()]).abs()
    return float(difference.max().nan_to_num(nan=torch.inf)) if len(difference) else 0.0


def _alone(small: SmallCopy, sequences: list[tuple[Tensor, Tensor]]) -> list[Floats]:
    """Return the log-probabilities of each answer's tokens by transformers' own model."""
    try:
        plain = small.model("sdpa")
    except ValueError:  # the model has no SDPA
        plain = small.model("eager")
    expected = []
    with torch.no_grad(), precise(torch.float64):
        for prompt, answer in sequences:
            tokens = torch.cat((prompt, answer)).to(small.device, torch.int64)
            logps = plain(input_ids=tokens.unsqueeze(0), use_cache=False).logits.squeeze(0).double().log_softmax(-1)
            taken = logps[len(prompt) - 1 : -1].gather(-1, tokens[len(prompt) :].unsqueeze(-1)).squeeze(-1)
            expected.append(taken.cpu().numpy())
    return expected


def _copied(cfg: ModelConfig, config: PreTrainedConfig, max_length: int) -> PreTrainedConfig:
    return small_config(cfg, config, dict.fromkeys(_windows(config, max_length), WINDOW))


def _windows(config: PreTrainedConfig, max_length: int) -> list[str]:
    """Name the windows that are shorter than the longest sequence."""
    windows = {name: getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")}
    return [name for name, window in windows.items() if isinstance(window, int) and window < max_length]


def _name(config: PreTrainedConfig) -> str:
    return (config.architectures or [config.model_type])[0]


def _refusal(config: PreTrainedConfig, max_length: int, why: str, *, asked: bool) -> str:
    """Say how the model differs, and which of its settings are known to make models differ.

    A window that a layer has asked for is computed. Of one that is in the model's mask alone, a layer says nothing.
    """
    suspects = [
        f"{name}={getattr(config, name)} is shorter than data.max_length={max_length}"
        for name in _windows(config, max_length)
        if name != "sliding_window" or not asked
    ]
    suspects += [
        f"{name}={value}"
        for name, value in vars(config).items()
        if ("softcap" in name or name in ("logit_scale", "logits_scaling")) and value not in (None, 1, 1.0)
    ]
    kinds = sorted(set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"})
    suspects += [f"layers of the kind {kind}" for kind in kinds]
    because = f" Possible reasons: {'; '.join(suspects)}." if suspects else ""
    return (
        f"{_name(config)}: its results over the ring differ from those on one device ({why}).{because} "
        f"Such a model cannot be trained here."
    )
