"""A run's layout: the one that was named, if the heads fit, and the ones that `parallel.layout=auto` may choose from.

`auto` is replaced by a layout's name before any rank starts (`launch/preflight_check.py`), which
`preflight/fastest_layout.py` chooses.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlexp.base import plain_json
from rlexp.base.errors import ConfigError
from rlexp.config.checks.rules import Check, refuse_broken
from rlexp.config.schema import BackendName, Config, Cut, LayoutName, TransportName, with_values
from rlexp.config.schema.models import HFModelConfig, ModelConfig, TinyModelConfig
from rlexp.config.sizes import divisors, listed, nearest, ranks_of_machine

TRAVELLING = (LayoutName.zigzag, LayoutName.contiguous, LayoutName.hybrid)  # those that have a transport
# What the models' classes take where config.json leaves it out: in EVERY, one layer in so many is whole.
EVERY = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "exaone4": 4, "gpt_oss": 2, "olmo3": 4}
FIRST = {"qwen2": 28, "qwen3": 28}  # so many layers, from the first, see all


@dataclass(frozen=True)
class Heads:
    queries: int
    keys: int
    size: int
    windows: tuple[int | None, ...] = (None,)  # positions that the layers see; None: every sequence whole

    def windows_within(self, max_length: int) -> tuple[int | None, ...]:
        """Return the windows of the layers where no sequence is longer."""
        return tuple(each if each and each < max_length else None for each in self.windows)


@dataclass(frozen=True)
class Choice:
    layout: LayoutName
    ulysses_size: int  # ranks that share out the heads
    reason: str | None = None  # None if the layout was named
    transport: TransportName | None = None  # None where there is nothing to choose

    @property
    def name(self) -> str:
        groups = f" {self.ulysses_size} × zigzag" if self.layout is LayoutName.hybrid else ""
        return f"{self.layout.value}{groups}{f' {self.transport.value}' if self.transport else ''}"

    @property
    def how(self) -> tuple[str, int, str]:
        """Return what `get_layout` takes."""
        return self.layout.value, self.ulysses_size, (self.transport or TransportName.direct).value


WITH_WIDTHS = (LayoutName.zigzag, LayoutName.allgather)  # those in which a sequence may have a width of its own
MOVABLE = (LayoutName.auto, *TRAVELLING)
RULES = (
    Check("parallel.ulysses_size",
          lambda cfg: cfg.parallel.ulysses_size is not None and cfg.parallel.layout is not LayoutName.hybrid,
          "belongs to parallel.layout=hybrid, and the layout is {parallel.layout.value}. Use parallel.layout=hybrid, "
          "or leave parallel.ulysses_size out."),
    Check("parallel.transport",
          lambda cfg: cfg.parallel.transport is not TransportName.auto and cfg.parallel.layout not in MOVABLE,
          "parallel.layout={parallel.layout.value} sends in its own way. Leave parallel.transport out, or use one of "
          f"the layouts {', '.join(each.value for each in TRAVELLING)}."),
    Check("parallel.layout",
          lambda cfg: cfg.parallel.elastic and cfg.parallel.layout not in (LayoutName.auto, *WITH_WIDTHS),
          "parallel.ring_size=auto gives each sequence a width, and parallel.layout={parallel.layout.value} cuts all "
          "alike. Use parallel.layout=zigzag or parallel.layout=allgather, or give a size: "
          "parallel.ring_size={parallel.ring_size}."),
    Check("parallel.backend",
          lambda cfg: cfg.parallel.elastic and cfg.parallel.backend is not BackendName.native,
          "parallel.ring_size=auto gives each sequence a width, and parallel.backend={parallel.backend.value} cuts all "
          "alike. Use parallel.backend=native, or give a size: parallel.ring_size={parallel.ring_size}."),
    Check("parallel.cut",
          lambda cfg: cfg.parallel.elastic and cfg.parallel.cut is Cut.all,
          "parallel.ring_size=auto gives each sequence a width, and parallel.cut=all cuts all alike. Leave "
          "parallel.cut out, or give a size: parallel.ring_size={parallel.ring_size}."),
)  # fmt: skip


def check_layout(cfg: Config, heads: Heads | None) -> None:
    """Refuse a layout that does not fit. `heads` is None while unknown."""
    refuse_broken(RULES, cfg)
    if cfg.parallel.layout is not LayoutName.auto:
        choose(cfg, heads)


def with_transport(cfg: Config, choice: Choice) -> Choice:
    """Choose how keys and values travel: straight, unless ranks that share a node would send the same to another."""
    ring, named = cfg.parallel.ring_size, cfg.parallel.transport
    if choice.layout not in TRAVELLING or ring == choice.ulysses_size or cfg.parallel.backend is not BackendName.native:
        return choice
    if named is TransportName.auto:
        apart = near(cfg, ring) or choice.ulysses_size % ranks_of_machine(cfg) == 0
        named = TransportName.direct if apart else TransportName.neighbour
    return dataclasses.replace(choice, transport=named)


def gives_widths(cfg: Config) -> bool:
    """Say whether a sequence may be cut over fewer ranks than the ring has."""
    parallel = cfg.parallel
    able = parallel.layout in WITH_WIDTHS and parallel.backend is BackendName.native
    return able and parallel.cut is Cut.auto and parallel.ring_size > 1


def choose(cfg: Config, heads: Heads | None) -> Choice:
    """Return the layout that was named, or chosen before the ranks started; refuse one that does not fit."""
    return with_transport(cfg, _choose(cfg, heads))


def _choose(cfg: Config, heads: Heads | None) -> Choice:
    ring, inner, why = cfg.parallel.ring_size, cfg.parallel.ulysses_size, cfg.parallel.chosen
    match cfg.parallel.layout:
        case LayoutName.auto:
            raise AssertionError("parallel.layout=auto: the launcher has not replaced it")
        case LayoutName.ulysses:
            _refuse_unless_shared("parallel.layout=ulysses", heads, ring, ring)
            return Choice(LayoutName.ulysses, ring, why)
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
            return Choice(LayoutName.hybrid, inner, why)
        case named:
            return Choice(named, 1, why)


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
    """Return the model's heads, or None for a hub model or a GGUF file: ranks learn them when they load it."""
    if isinstance(model, TinyModelConfig):  # whose layers are alike
        return Heads(model.heads, model.kv_heads, model.hidden_size // model.heads, (model.window,))
    config = described(model)
    return None if config is None else heads_in(config)


def experts_in(model: ModelConfig) -> str | None:
    """Return the number of experts as the model's config.json says it; None without experts, or for a hub model."""
    config = described(model) or {}
    for fields in (config, of_text(config)):
        for name, value in fields.items():
            if "experts" in name and isinstance(value, int) and value:
                return f"{name}={value}"
    return None


def described(model: ModelConfig) -> dict[str, Any] | None:
    """Read the config.json of a model in a folder, and write that of model=tiny. A GGUF file has its own, which only
    ranks read."""
    if isinstance(model, TinyModelConfig):
        return {"num_hidden_layers": model.layers, "num_attention_heads": model.heads, "sliding_window": model.window,
                "num_key_value_heads": model.kv_heads, "hidden_size": model.hidden_size}  # fmt: skip
    if not isinstance(model, HFModelConfig) or model.gguf is not None:
        return None
    return plain_json.mapping_in(Path(model.path).expanduser() / "config.json")


def of_text(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a config.json says of its text model, which a multimodal model describes apart."""
    text = described.get("text_config")
    return text if isinstance(text, Mapping) else described


def number_in(fields: Mapping[str, object], *names: str) -> int:
    """Return the first of these fields that is a whole number greater than 0; 0 without one."""
    values = (value for value in map(fields.get, names) if isinstance(value, int) and not isinstance(value, bool))
    return next((value for value in values if value > 0), 0)


def heads_in(described: Mapping[str, Any]) -> Heads | None:
    """Read the heads from a model's config.json, with the size of the largest."""
    fields = of_text(described)
    first = partial(number_in, fields)
    heads = first("num_attention_heads", "n_head", "num_heads", "n_heads")
    if heads < 1:
        return None
    size = first("head_dim") or first("hidden_size", "n_embd", "d_model") // heads
    layers = fields.get("per_layer_config")  # in Gemma 4, some layers have larger heads
    others = [layer.get("head_dim") for layer in layers.values()] if isinstance(layers, dict) else []
    size = max(size, first("global_head_dim"), *(each for each in others if isinstance(each, int)))
    windows = windows_in(described, sys.maxsize)
    return Heads(heads, first("num_key_value_heads") or heads, size, windows) if size > 0 else None


def windows_in(described: Mapping[str, Any], max_length: int) -> tuple[int | None, ...]:
    """Read from a model's config.json how many positions each layer sees; None where that is every sequence whole."""
    fields = of_text(described)
    window, kinds, layers = (fields.get(name) for name in ("sliding_window", "layer_types", "num_hidden_layers"))
    numbers = range(layers if isinstance(layers, int) else 1)
    unused = str(fields.get("model_type")).startswith("qwen") and not fields.get("use_sliding_window")
    if not isinstance(window, int) or window >= max_length or unused:
        return (None,) * len(numbers)
    if isinstance(kinds, list) and kinds:
        return tuple(window if "sliding" in str(kind) else None for kind in kinds)
    # Files that are older than layer_types.
    kind = str(fields.get("model_type"))
    every, first = fields.get("sliding_window_pattern"), fields.get("max_window_layers")
    every = every if isinstance(every, int) else EVERY.get(kind, 0)
    first = first if isinstance(first, int) else FIRST.get(kind, 0)
    if every > 0:
        return tuple(None if (number + 1) % every == 0 else window for number in numbers)
    if kind in FIRST:
        return tuple(window if number >= first else None for number in numbers)
    return (window,) * len(numbers)


# ---- parallel.layout=auto ----


def candidates(cfg: Config, heads: Heads | None) -> list[Choice]:
    """Return the layouts that `auto` may take. If nothing is known to choose from, there is one, with the reason."""
    ring = cfg.parallel.ring_size
    if ring == 1:
        return [Choice(LayoutName.zigzag, 1, "a ring of one has nothing to share out")]
    if heads is None:
        return [Choice(LayoutName.zigzag, 1, "the model's heads are not known, and it takes any")]
    sharing = [inner for inner in divisors(ring)[1:] if heads.queries % inner == 0 and not cfg.parallel.elastic]
    shared = [Choice(LayoutName.ulysses if inner == ring else LayoutName.hybrid, inner) for inner in sharing]
    choices = [Choice(LayoutName.zigzag, 1), Choice(LayoutName.allgather, 1), *shared]
    named = cfg.parallel.transport is not TransportName.auto  # only some layouts have it
    return [with_transport(cfg, choice) for choice in choices if not named or choice.layout in TRAVELLING]


def with_layout(cfg: Config, choice: Choice) -> Config:
    """Return the configuration with the layout that was chosen, and why."""
    inner = choice.ulysses_size if choice.layout is LayoutName.hybrid else None
    return with_values(cfg, "parallel", layout=choice.layout, ulysses_size=inner, chosen=choice.reason)


def near(cfg: Config, ranks: int) -> bool:
    """Say whether groups of so many neighbours in the ring are each on one node."""
    return ranks_of_machine(cfg) % ranks == 0


def copied(heads: Heads, ranks: int) -> int:
    """Return the key/value heads that are sent, so that each rank has those that its query heads need.

    Each head goes to one rank or to several. If ranks and groups of heads do not nest, each query head gets a copy.
    """
    each, serves = heads.queries // ranks, heads.queries // heads.keys
    return heads.queries if each % serves and serves % each else max(heads.keys, ranks)
