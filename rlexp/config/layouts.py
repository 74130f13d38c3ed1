"""The choice of a run's layout: the one that was named, if the heads fit, or the one estimated to be fastest.

The estimate is for one layer and one sequence of data.max_length, forward and backward. It adds the time of computing
and the time of communication that computing does not hide. The rates are round numbers of common machines: they rank
layouts, and do not predict times. docs/layouts.md has the formulas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlexp.config.schema import Config, Device, HFModelConfig, LayoutName, ModelConfig, Precision, TinyModelConfig
from rlexp.config.sizes import divisors, listed, nearest
from rlexp.errors import ConfigError

ELEMENT = {Precision.bf16: 2, Precision.fp32: 4, Precision.fp64: 8}
# By device: operations per second in attention; bytes per second between ranks of a node, and between nodes.
RATES = {Device.cuda: (4e14, 2e11, 2.5e10), Device.cpu: (5e10, 2e9, 1e9)}
MERGED = 0.05  # share of computing spent on smaller calls and merges: 4 % in docs/attention.md
GATHERED = 0.02  # up to 0.1 on CPU, with many heads on a large ring; not measured on GPUs


@dataclass(frozen=True)
class Heads:
    queries: int
    keys: int
    size: int


@dataclass(frozen=True)
class Choice:
    layout: LayoutName
    ulysses_size: int  # ranks that share out the heads
    reason: str | None = None  # None if the layout was named

    @property
    def name(self) -> str:
        groups = f" {self.ulysses_size} × zigzag" if self.layout is LayoutName.hybrid else ""
        return f"{self.layout.value}{groups}"


def choose(cfg: Config, heads: Heads | None) -> Choice:
    """Choose the layout; refuse one that does not fit. `heads` is None while unknown."""
    ring, inner = cfg.parallel.ring_size, cfg.parallel.ulysses_size
    if inner is not None and cfg.parallel.layout is not LayoutName.hybrid:
        raise ConfigError(
            f"parallel.ulysses_size={inner}: belongs to parallel.layout=hybrid, and the layout is "
            f"{cfg.parallel.layout.value}. Use parallel.layout=hybrid, or leave parallel.ulysses_size out."
        )
    match cfg.parallel.layout:
        case LayoutName.auto:
            return _estimated(cfg, heads)
        case LayoutName.ulysses:
            _refuse_unless_shared("parallel.layout=ulysses", heads, ring, ring)
            return Choice(LayoutName.ulysses, ring)
        case LayoutName.hybrid:
            if inner is None:
                raise ConfigError(
                    f"parallel.layout=hybrid: needs parallel.ulysses_size, the ranks that share out the heads. "
                    f"Use parallel.ulysses_size={_fitting(heads, ring, ring)}, or parallel.layout=auto."
                )
            if inner < 1 or ring % inner:
                raise ConfigError(
                    f"parallel.ulysses_size={inner}: parallel.ring_size={ring} is no multiple of it. Use "
                    f"parallel.ulysses_size={listed(nearest(inner, divisors(ring)))}."
                )
            _refuse_unless_shared(f"parallel.ulysses_size={inner}", heads, inner, ring)
            return Choice(LayoutName.hybrid, inner)
        case named:
            return Choice(named, 1)


def _refuse_unless_shared(what: str, heads: Heads | None, ranks: int, ring: int) -> None:
    if heads is not None and heads.queries % ranks:
        largest = _fitting(heads, ring, ranks)
        instead = f"parallel.layout=hybrid parallel.ulysses_size={largest}" if largest > 1 else "parallel.layout=zigzag"
        raise ConfigError(
            f"{what}: the model has {heads.queries} heads, which {ranks} ranks cannot share out evenly. Use {instead}, "
            f"or parallel.layout=auto."
        )


def _fitting(heads: Heads | None, ring: int, most: int) -> int:
    """Return the largest number of ranks, up to `most`, that can share out the heads."""
    return max(each for each in divisors(ring) if each <= most and (heads is None or heads.queries % each == 0))


def heads_of(model: ModelConfig) -> Heads | None:
    """Return the model's heads, or None for a hub model, whose ranks learn them when they load it."""
    if isinstance(model, TinyModelConfig):
        return Heads(model.heads, model.kv_heads, model.hidden_size // model.heads)
    described = _described(model)
    return None if described is None else heads_in(described)


def experts_in(model: ModelConfig) -> str | None:
    """Return the number of experts as the model's config.json says it; None without experts, or for a hub model."""
    described = _described(model) or {}
    text = described.get("text_config")
    for fields in (described, text if isinstance(text, dict) else {}):
        for name, value in fields.items():
            if "experts" in name and isinstance(value, int) and value:
                return f"{name}={value}"
    return None


def _described(model: ModelConfig) -> dict[str, object] | None:
    """Read the config.json of a model in a folder."""
    if not isinstance(model, HFModelConfig):
        return None
    try:
        described = json.loads((Path(model.path).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return described if isinstance(described, dict) else None


def heads_in(described: dict[str, object]) -> Heads | None:
    """Read the heads from a model's config.json, with the size of the largest. A multimodal model describes its text
    model apart."""
    text = described.get("text_config")
    fields = text if isinstance(text, dict) else described
    named = {name: value for name, value in fields.items() if isinstance(value, int)}

    def first(*names: str) -> int:
        return next((named[name] for name in names if named.get(name)), 0)

    heads = first("num_attention_heads", "n_head", "num_heads", "n_heads")
    if heads < 1:
        return None
    size = first("head_dim") or first("hidden_size", "n_embd", "d_model") // heads
    layers = fields.get("per_layer_config")  # in Gemma 4, some layers have larger heads
    others = [layer.get("head_dim") for layer in layers.values()] if isinstance(layers, dict) else []
    size = max(size, first("global_head_dim"), *(each for each in others if isinstance(each, int)))
    return Heads(heads, first("num_key_value_heads") or heads, size) if size > 0 else None


# ---- parallel.layout=auto ----


def _estimated(cfg: Config, heads: Heads | None) -> Choice:
    ring = cfg.parallel.ring_size
    if ring == 1:
        return Choice(LayoutName.zigzag, 1, "a ring of one has nothing to share out")
    if heads is None:
        return Choice(LayoutName.zigzag, 1, "the model's heads are not known yet, and it takes any")
    seconds = dict(_candidates(cfg, heads))
    best = min(seconds, key=lambda choice: seconds[choice])
    ranked = sorted(seconds.items(), key=lambda item: item[1])
    told = ", ".join(f"{choice.name} {time / ranked[0][1]:.2f}" for choice, time in ranked)
    where = "one node" if _near(cfg, ring) else "several nodes"
    reason = f"{heads.queries} heads, {heads.keys} of keys, {cfg.data.max_length:,} tokens, {where}; estimated: {told}"
    return Choice(best.layout, best.ulysses_size, reason)


def _near(cfg: Config, ranks: int) -> bool:
    """Return whether groups of so many neighbours in the ring are each on one node."""
    return (cfg.parallel.world_size + cfg.rollout.sampling_ranks) // cfg.launch.nodes % ranks == 0


def _candidates(cfg: Config, heads: Heads) -> Iterator[tuple[Choice, float]]:
    ring = cfg.parallel.ring_size
    rate, near, far = RATES[Device.cuda if cfg.launch.device is Device.cuda else Device.cpu]
    element, summed = ELEMENT[cfg.train.precision], max(4, ELEMENT[cfg.train.precision])
    tokens = cfg.data.max_length / ring
    computing = 7 * cfg.data.max_length**2 * heads.queries * heads.size / ring / rate
    link = near if _near(cfg, ring) else far

    def around(size: int, keys: float, over: float) -> float:
        """Return the seconds for sending keys and values twice, and their gradients once."""
        return 2 * keys * heads.size * tokens * ring / size * ((size - 1) * 2 * element + size * summed) / over

    hidden = (ring - 1) / ring
    yield (
        Choice(LayoutName.zigzag, 1),
        computing * (1 + MERGED) + max(0.0, around(ring, heads.keys, link) - computing * hidden),
    )
    gathering = 2 * heads.keys * heads.size * tokens * (ring - 1) * (2 * element + summed) / link
    hidden = (heads.keys - 1) / heads.keys
    yield (
        Choice(LayoutName.allgather, 1),
        computing * (1 + GATHERED) + max(gathering / heads.keys, gathering - computing * hidden),
    )
    for inner in divisors(ring)[1:]:
        if heads.queries % inner:
            continue
        copies = copied(heads, inner)
        back = summed if copies > heads.keys else element
        sent = (4 * heads.queries + 2 * copies) * element + 2 * copies * back
        swap = sent * heads.size * tokens * (inner - 1) / inner / (near if _near(cfg, inner) else far)
        outer = ring // inner
        if outer == 1:
            yield Choice(LayoutName.ulysses, ring), computing + swap
            continue
        travel = around(outer, copies / inner, link)
        spent = computing * (1 + MERGED) + swap + max(0.0, travel - computing * (outer - 1) / outer)
        yield Choice(LayoutName.hybrid, inner), spent


def copied(heads: Heads, ranks: int) -> int:
    """Return the key/value heads that are sent, so that each rank has those that its query heads need.

    Each head goes to one rank or to several. If ranks and groups of heads do not nest, each query head gets a copy.
    """
    each, serves = heads.queries // ranks, heads.queries // heads.keys
    return heads.queries if each % serves and serves % each else max(heads.keys, ranks)
