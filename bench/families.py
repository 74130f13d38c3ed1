"""Say which model families train over a ring, and how far each is from its model alone: docs/measured/models.md.

    python -m bench.families                         print it
    python -m bench.families --write docs/measured/models.md

Each family is made by transformers, small and with random float64 weights, and its windows are shorter than most
sequences. It runs packed over real ranks, on every ring and layout, and one sequence after the other by transformers
alone. Log-probabilities of all trained tokens are compared, and the gradients of all parameters. What rlexp refuses is
listed with its reason.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig

from bench.tables import put, signature
from rlexp.base.errors import ModelError
from rlexp.config.schema import TinyModelConfig
from rlexp.launch.joining import ON_CPU, RankSpec, prepare_environment
from rlexp.launch.local import PRELOAD, run_ranks
from rlexp.training.dealer.packing import pack_sequences, shard_pack
from rlexp.training.model import hook
from rlexp.training.model.float64 import precise
from rlexp.training.model.policy import Policy
from rlexp.training.model.probe import SmallCopy, probe
from rlexp.training.ring.kernels import CpuFlash
from rlexp.training.ring.layouts import Layout, get_layout
from rlexp.training.world.groups import Ring, build_world

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 300, "head_dim": 8}  # fmt: skip
TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 32}  # fmt: skip
LATENT = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "kv_lora_rank": 16, "q_lora_rank": 16,
          "head_dim": 8}  # fmt: skip
MIXED = {"layer_types": ["full_attention", "sliding_attention"] * 2}
LONGEST = 512  # tokens of a sequence that the run might have: windows are shorter
WINDOW = {"sliding_window": 16}  # short on a ring of 2, and not on one of 4
RINGS = (1, 2, 4)
ENOUGH = 28  # families that train, at the least, with the altered ones


@dataclass(frozen=True)
class Family:
    name: str  # transformers' model_type
    special: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    altered: str = ""  # what differs here from the family's models, which are refused as they are

    def config(self) -> PreTrainedConfig:
        """Make a small configuration: of the shape, what the family's own has."""
        kind = CONFIG_MAPPING[self.name]
        known = vars(kind())
        renamed = {new: SHAPE[old] for old, new in kind.attribute_map.items() if old in SHAPE}
        own = {name: value for name, value in (SHAPE | TOKENS | renamed).items() if name in known}
        return kind(**own | self.options)


FAMILIES = (
    Family("llama"),
    Family("qwen2"),
    Family("qwen3", "norms of queries and keys"),
    Family("qwen3_moe", "experts", EXPERTS),
    Family("mistral", "windows", WINDOW),
    Family("ministral", "windows in some layers", WINDOW | MIXED),
    Family("mixtral", "windows, experts", WINDOW | {"num_local_experts": 4}),
    Family("phi"),
    Family("phi3", "windows", WINDOW),
    Family("starcoder2", "windows", WINDOW),
    Family("olmo2", "norms after each part"),
    Family("olmo3", "windows in some layers", WINDOW),
    Family("exaone4", "windows in some layers", WINDOW | {"sliding_window_pattern": 2}),
    Family("gemma"),
    Family("gemma2", "windows, soft caps", WINDOW),
    Family("gemma3_text", "windows in some layers, two rotary tables", WINDOW | MIXED),
    Family("cohere", "scaled logits"),
    Family("cohere2", "windows in some layers, scaled logits", WINDOW),
    Family("smollm3", "layers without positions"),
    Family("granite", "scaled parts", {"logits_scaling": 1.0}, "`logits_scaling=1`"),
    Family("glm4"),
    Family("glm4_moe", "experts", EXPERTS),
    Family("ernie4_5"),
    Family("hunyuan_v1_dense"),
    Family("gpt2", "learned positions", {"n_embd": 64, "n_layer": 2, "n_head": 8, "vocab_size": 300}),
    Family("gpt_neox"),
    Family("seed_oss"),
    Family("apertus"),
    Family("arcee"),
    Family("helium"),
    Family("bitnet"),
    Family("lfm2", "", {"layer_types": ["full_attention"] * 4}, "attention in every layer"),
    Family("gpt_oss", "windows in some layers, sinks, experts", WINDOW | EXPERTS),
    Family("deepseek_v3", "values of another head size, experts", LATENT | EXPERTS),
    Family("longcat_flash", "values of another head size, experts", LATENT | EXPERTS),
    Family("nemotron", "no keyword arguments for attention"),
    Family("stablelm", "no keyword arguments for attention"),
    Family("qwen3_next", "layers that mix tokens without attention"),
    Family("granitemoehybrid", "layers that mix tokens without attention"),
    Family("nemotron_h", "layers that mix tokens without attention"),
    Family("minimax", "layers that mix tokens without attention"),
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What came of a family: the largest differences over all rings and layouts, or why it is refused."""

    logps: float = 0.0
    gradients: float = 0.0
    refused: str | None = None

    @property
    def reason(self) -> str:
        """Return what the message says beside the model's name and what follows from it."""
        why = (self.refused or "").partition(": ")[2].partition(" Such a model")[0].strip(".")
        said = re.fullmatch(r"its results over the ring differ from those on one device \((.*?)\)(.*)", why)
        return why if said is None else said[1] + said[2]

    def and_also(self, other: Found) -> Found:
        return Found(max(self.logps, other.logps), max(self.gradients, other.gradients), self.refused or other.refused)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.families", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--write", type=Path, help="put the table into this page, between its markers")
    options = parser.parse_args()
    prepare_environment(ON_CPU)
    found = measure([family.name for family in FAMILIES], RINGS)
    text = table(found)
    print(text)
    if options.write:
        put(options.write, text, "families")
    trains = sum(each.refused is None for each in found.values())
    wide = [name for name, each in found.items() if max(each.logps, each.gradients) > 1e-11]
    print("\n".join(f"{name}: differs" for name in wide), file=sys.stderr)
    return 1 if wide or trains < ENOUGH else 0


def measure(names: Sequence[str], rings: Sequence[int]) -> dict[str, Found]:
    found = dict.fromkeys(names, Found())
    for ring_size in rings:
        by_rank = run_ranks(families_rank, ring_size, (tuple(names),), preload=PRELOAD, timeout=1800.0)
        for of_rank in by_rank:
            found = {name: found[name].and_also(of_rank[name]) for name in names}
    return found


def table(found: dict[str, Found]) -> str:
    special = {family.name: family.special for family in FAMILIES}
    altered = {family.name: family.altered for family in FAMILIES if family.altered and family.name in found}
    special |= {name: "; ".join(filter(None, (special[name], f"altered: {what}"))) for name, what in altered.items()}
    lines = ["| family | special | log-probabilities | gradients |", "| --- | --- | ---: | ---: |"]
    for name, each in found.items():
        told = f"{each.logps:.0e} | {each.gradients:.0e}" if each.refused is None else f"refused: {each.reason} |"
        lines.append(f"| `{name}` | {special[name]} | {told} |")
    trains = [name for name, each in found.items() if each.refused is None]
    changed = [f"`{name}`" for name in trains if name in altered]
    more = f" {len(changed)} more train only if their configuration is altered: {', '.join(changed)}." * bool(changed)
    layouts = ", ".join(f"`{name}`" for name, _ in layouts_of(4))
    return (
        f"{len(trains) - len(changed)} of {len(found)} families train.{more} Rings of {', '.join(map(str, RINGS))};\n"
        f"{layouts},\non every ring that has them. {signature('bench.families')}\n\n" + "\n".join(lines)
    )


# ---- on the ranks ----


def layouts_of(ring_size: int) -> Iterator[tuple[str, Layout]]:
    yield "zigzag", get_layout("zigzag")
    if ring_size > 1:
        yield "zigzag neighbour", get_layout("zigzag", 1, "neighbour")
        yield "contiguous", get_layout("contiguous")
        yield "allgather", get_layout("allgather")
        yield "ulysses", get_layout("ulysses")
    if ring_size == 4:
        yield "hybrid", get_layout("hybrid", 2)


def families_rank(spec: RankSpec, names: Sequence[str]) -> dict[str, Found]:
    from rlexp.launch.joining import join, launch_on

    join(spec, launch_on("cpu", 1800.0))
    world = build_world(spec.world_size)
    rings = {name: build_world(spec.world_size, 2).ring if name == "hybrid" else world.ring
             for name, _ in layouts_of(spec.world_size)}  # fmt: skip
    return {family.name: of_family(family, rings) for family in FAMILIES if family.name in names}


def of_family(family: Family, rings: dict[str, Ring]) -> Found:
    """Compare a family on every layout of this ring. All ranks refuse together."""
    config, cfg = family.config(), TinyModelConfig()
    ring = rings["zigzag"]
    how: dict[str, Any] = {"kernel": CpuFlash(), "max_length": LONGEST, "device": torch.device("cpu")}
    try:
        probe(cfg, config, ring=ring, layout=get_layout("zigzag"), **how)
    except ModelError as error:
        return Found(refused=str(error))
    small = SmallCopy(cfg, config, LONGEST, torch.device("cpu"))
    found = Found()
    for name, layout in layouts_of(ring.size):
        found = found.and_also(compared(small, rings[name], layout))
    return found


def compared(small: SmallCopy, ring: Ring, layout: Layout) -> Found:
    """Compare log-probabilities, and the gradient of their weighted sum, over the ring and alone."""
    sequences = small.sequences()
    pack = pack_sequences([(p.numpy(), a.numpy()) for p, a in sequences], layout.multiple(ring.size))
    weights_N = torch.randn(len(pack.place_N), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = small.model(hook.NAME)
    shard = shard_pack(pack, ring, layout, CpuFlash(), LONGEST)
    logps_n = Policy(model)(shard).logps_n
    (logps_n * weights_N[shard.listed_n]).sum().backward()
    expected_N, expected = alone(small, sequences, weights_N)
    gap = (logps_n.detach() - expected_N[shard.listed_n]).abs()
    gradients = 0.0
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if ring.size > 1:
            dist.all_reduce(grad)
        largest = expected[name].abs().max()
        gradients = max(gradients, float((grad - expected[name]).abs().max() / (largest if largest > 0 else 1.0)))
    return Found(float(gap.max()) if len(gap) else 0.0, gradients)


def alone(
    small: SmallCopy, sequences: Sequence[tuple[Tensor, Tensor]], weights_N: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probabilities of the answers' tokens, and the gradients, by transformers' own model."""
    plain, expected = small.model("sdpa"), []
    weights = weights_N.split([len(answer) for _, answer in sequences])
    with precise(torch.float64):
        for (prompt, answer), weights_L in zip(sequences, weights, strict=True):
            tokens = torch.cat((prompt, answer)).long()
            logps = plain(input_ids=tokens.unsqueeze(0), use_cache=False).logits.squeeze(0).double().log_softmax(-1)
            taken = logps[len(prompt) - 1 : -1].gather(-1, tokens[len(prompt) :].unsqueeze(-1)).squeeze(-1)
            (taken * weights_L).sum().backward()
            expected.append(taken.detach())
    return torch.cat(expected), {
        name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in plain.named_parameters()
    }


if __name__ == "__main__":
    sys.exit(main())
