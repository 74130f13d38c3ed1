"""`parallel.layout=auto`: its choice and the reason it prints, and how a model's heads are known before it loads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from transformers import CONFIG_MAPPING

from bench.families import FAMILIES
from rlexp.config.checks.layout import (
    FIRST,
    Choice,
    Heads,
    candidates,
    check_layout,
    choose,
    copied,
    heads_of,
    windows_in,
    with_layout,
)
from rlexp.config.load import compose_config
from rlexp.config.schema import Config, Device, HFModelConfig, LayoutName, TinyModelConfig, TransportName
from rlexp.config.schema.models import Precision
from rlexp.config.sizes import divisors
from rlexp.preflight.fastest_layout import choosing, fastest, seconds_of
from rlexp.training.ring.transports import heads as heads_sent
from tests.conftest import Shell
from tests.helpers.rehearsals import alone

LLAMA = Heads(32, 8, 128)


def on_gpus(ring: int, length: int, nodes: int, layout: str = "auto", *words: str) -> Config:
    """Return the configuration of a run on a cluster; choosing needs none."""
    cfg = compose_config(["launch.device=cpu", f"parallel.ring_size={ring}", f"data.max_length={length}",
                          f"parallel.layout={layout}", "hardware=h100", *words])  # fmt: skip
    cfg.launch.device, cfg.train.precision, cfg.launch.nodes = Device.cuda, Precision.bf16, nodes
    return cfg


def fastest_of(*asked: tuple[Config, Heads]) -> list[Choice]:
    return [fastest(cfg, heads) for cfg, heads in asked]


def seconds_with(cfg: Config, several: list[Heads]) -> list[float]:
    return [seconds_of(cfg, heads, candidates(cfg, heads)[0]) for heads in several]


def test_auto_takes_the_layout_whose_rehearsal_is_fastest() -> None:
    """The layouts' own code is counted: bytes, launches, and what computing hides."""
    slow_links = on_gpus(8, 131072, 1, "auto", "hardware.link_gb_s=20")
    near, two_nodes, unshared, slow = alone(
        fastest_of,
        (on_gpus(8, 8192, 1), LLAMA),
        (on_gpus(16, 16384, 2), LLAMA),
        (on_gpus(8, 2048, 1), Heads(27, 3, 64)),
        (slow_links, LLAMA),
    )
    assert near.layout is LayoutName.ulysses, "links are fast, and there is nothing to merge"
    assert (two_nodes.layout, two_nodes.ulysses_size) == (LayoutName.hybrid, 8), "heads inside a node, zigzag between"
    assert unshared.layout is LayoutName.zigzag, "27 heads are not shared out among 8 ranks"
    assert slow.layout in (LayoutName.zigzag, LayoutName.allgather), "an exchange is hidden by no computing"
    for choice in (near, two_nodes, unshared, slow):
        times = [float(each) for each in re.findall(r" (\d+\.\d\d)(?:,|$)", choice.reason or "")]
        assert times == sorted(times)
        assert f"rehearsed: {choice.name} 1.00" in (choice.reason or "")


@pytest.mark.parametrize(("ring", "heads"), [(1, LLAMA), (8, None)])
def test_without_a_choice_there_is_nothing_to_rehearse(ring: int, heads: Heads | None) -> None:
    (only,) = candidates(on_gpus(ring, 8192, 1), heads)
    assert only.layout is LayoutName.zigzag
    assert only.reason


def test_auto_compares_layouts_that_have_the_transport_that_was_named() -> None:
    cfg = on_gpus(8, 8192, 1, "auto", "parallel.transport=neighbour")
    compared = candidates(cfg, LLAMA)
    assert [each.name for each in compared] == [
        "zigzag neighbour", "hybrid 2 × zigzag neighbour", "hybrid 4 × zigzag neighbour"]  # fmt: skip
    for each in compared:
        check_layout(with_layout(cfg, each), LLAMA)


def test_a_layout_that_was_named_has_no_reason() -> None:
    assert choose(on_gpus(8, 8192, 1, "ulysses"), Heads(32, 8, 128)) == Choice(LayoutName.ulysses, 8)
    contiguous = Choice(LayoutName.contiguous, 1, transport=TransportName.direct)
    assert choose(on_gpus(8, 8192, 1, "contiguous"), None) == contiguous


def test_a_layout_that_is_left_alone_has_its_reason() -> None:
    with pytest.raises(StopIteration) as chosen:
        next(choosing(on_gpus(2, 8192, 1, "auto", "parallel.transport=neighbour"), LLAMA))
    assert chosen.value.value == Choice(
        LayoutName.zigzag, 1, "no other layout fits the models, the ring and the transport", TransportName.neighbour
    )


@pytest.mark.parametrize(
    ("nodes", "words", "transport"),
    [
        (1, ("zigzag",), "direct"),
        (2, ("zigzag",), "neighbour"),
        (8, ("zigzag",), "direct"),  # no two ranks share a node, so nothing would cross twice
        (2, ("hybrid", "parallel.ulysses_size=4"), "direct"),
        (2, ("hybrid", "parallel.ulysses_size=2"), "neighbour"),
        (4, ("hybrid", "parallel.ulysses_size=4"), "direct"),  # a group on two nodes
        (2, ("zigzag", "parallel.transport=direct"), "direct"),
        (1, ("contiguous", "parallel.transport=neighbour"), "neighbour"),
        (2, ("allgather",), None),
        (2, ("ulysses",), None),
    ],
)
def test_keys_travel_straight_unless_they_would_cross_between_nodes_twice(
    nodes: int, words: tuple[str, ...], transport: str | None
) -> None:
    chosen = choose(on_gpus(8, 8192, nodes, *words), LLAMA).transport
    assert (chosen.value if chosen else None) == transport


@pytest.mark.parametrize(
    ("described", "heads"),
    [
        ({"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}, Heads(32, 8, 128)),
        ({"num_attention_heads": 16, "hidden_size": 1024}, Heads(16, 16, 64)),
        ({"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 2048, "head_dim": 256}, Heads(8, 4, 256)),
        ({"n_head": 12, "n_embd": 768}, Heads(12, 12, 64)),
        ({"num_heads": 16, "hidden_size": 2048}, Heads(16, 16, 128)),  # GPT-Neo
        ({"n_heads": 16, "d_model": 2048}, Heads(16, 16, 128)),  # MPT
        ({"num_attention_heads": 8, "head_dim": 256, "global_head_dim": 512}, Heads(8, 8, 512)),
        ({"num_attention_heads": 8, "head_dim": 64, "per_layer_config": {"5": {"head_dim": 128}}}, Heads(8, 8, 128)),
        ({"text_config": {"num_attention_heads": 4, "hidden_size": 64}, "hidden_size": 9}, Heads(4, 4, 16)),
        ({"num_attention_heads": 4, "head_dim": 8, "sliding_window": 16}, Heads(4, 4, 8, (16,))),
        ({"d_model": 5}, None),
        ([], None),
    ],
)
def test_heads_are_read_from_the_models_description(described, heads, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described), encoding="utf-8")
    assert heads_of(HFModelConfig(name="hf", path=str(tmp_path))) == heads
    assert heads_of(HFModelConfig(name="hf", path="some/model-of-the-hub")) is None
    assert heads_of(TinyModelConfig(name="tiny")) == Heads(8, 2, 8)


@pytest.mark.parametrize(
    ("described", "windows"),
    [
        ({"sliding_window": 64, "num_hidden_layers": 2}, (64, 64)),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, (None, 64)),
        ({"text_config": {"sliding_window": 64, "layer_types": ["sliding_attention"]}}, (64,)),
        ({"sliding_window": 64, "model_type": "qwen2", "num_hidden_layers": 2}, (None, None)),  # it must be told to
        ({"sliding_window": 64, "model_type": "mistral", "use_sliding_window": False}, (64,)),  # it knows no such key
        (
            {
                "sliding_window": 64,
                "model_type": "qwen2",
                "use_sliding_window": True,
                "max_window_layers": 1,
                "num_hidden_layers": 3,
            },
            (None, 64, 64),
        ),
        ({"sliding_window": 64, "sliding_window_pattern": 3, "num_hidden_layers": 4}, (64, 64, None, 64)),  # Gemma 3
        ({"sliding_window": 512, "num_hidden_layers": 2}, (None, None)),  # no sequence is longer
        ({"sliding_window": None}, (None,)),
    ],
)
def test_windows_are_read_from_the_models_description(described, windows) -> None:
    assert windows_in(described, 512) == windows


@pytest.mark.parametrize("kind", [each.name for each in FAMILIES if "windows" in each.special] + [*FIRST])
def test_windows_are_read_as_the_models_class_fills_a_description_in(kind: str) -> None:
    """The launcher has the file alone, and each rank a configuration with everything in it."""
    described = {"num_hidden_layers": 30, "sliding_window": 64} | (
        {"use_sliding_window": True} if kind in FIRST else {}
    )
    filled = CONFIG_MAPPING[kind](**described).to_dict()
    assert windows_in({**described, "model_type": kind}, 512) == windows_in(filled, 512)


def test_auto_knows_of_windows() -> None:
    """A layer that sees little takes little time; of mixed layers it is the mean."""
    near = on_gpus(8, 131072, 1)
    mixed = Heads(32, 8, 128, (1024, 1024, None))
    whole, windows, both = alone(seconds_with, near, [LLAMA, Heads(32, 8, 128, (1024,)), mixed])
    assert windows < 0.1 * whole
    assert both == pytest.approx((2 * windows + whole) / 3)


def test_heads_of_a_folder_are_refused_before_a_process_starts(rlexp: Shell, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"num_attention_heads": 6, "hidden_size": 48}', encoding="utf-8")
    answer = rlexp("launch.device=cpu", "parallel=ring4", "parallel.layout=ulysses", "model=hf", "model.path=model")
    assert answer.returncode == 1
    assert answer.stderr == (
        "rlexp: parallel.layout=ulysses: the model has 6 heads, which 4 ranks cannot share out evenly. Use "
        "parallel.layout=hybrid parallel.ulysses_size=2, or parallel.layout=auto.\n"
    )


def test_a_run_says_which_layout_it_takes_and_why(rlexp: Shell, tmp_path: Path) -> None:
    shown = rlexp("launch.device=cpu", "parallel=ring2", "parallel.layout=auto", "logger=none", "train.max_steps=1")
    assert shown.returncode == 0, shown.stderr
    why = r"layout \1: 8 query heads, 2 key/value heads, 512 tokens, one node; rehearsed: \1 1\.00, "
    said = rf"ring of 2 \(([^,]+), cpu_flash\).*\n  {why}"
    taken = re.search(said, shown.stderr)
    assert taken, shown.stderr
    (config,) = tmp_path.glob("runs/*/config.yaml")
    recorded = yaml.safe_load(config.read_text(encoding="utf-8"))["parallel"]
    assert recorded["layout"] == taken.group(1).split()[0], "every rank reads the choice from the run's configuration"
    assert f"rehearsed: {taken.group(1)} 1.00" in recorded["chosen"]


def test_the_heads_of_keys_that_ulysses_sends_are_counted_without_torch() -> None:
    """A key/value head that several ranks need is sent to each. The configuration has no torch, so it counts itself."""
    for heads in range(1, 49):
        for keys in divisors(heads):
            for ranks in divisors(heads):
                sent = keys * heads_sent.HeadShares(heads, keys, ranks).copies
                assert copied(Heads(heads, keys, 1), ranks) == sent, (heads, keys, ranks)
