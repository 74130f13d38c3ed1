"""The formula of `train/tflops` counts what the operators of a real step count, without what they compute again."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlexp.config.hardware import assumed_gpus
from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec
from rlexp.preflight.rehearsal.rehearse import count
from rlexp.training.dealer.packing import pack_sequences, shard_pack
from rlexp.training.metrics.meter import Meter
from rlexp.training.ring.kernels import Plain
from rlexp.training.ring.layouts import get_layout
from rlexp.training.train import operations, step
from rlexp.training.train.operations import Operations, note_operations, peak_of, speed
from rlexp.training.world.groups import ALONE, Ring, World
from tests.helpers.ranks import on_ranks
from tests.helpers.rehearsals import SHORT, plan

SMALL = {
    "vocab_size": 259, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = SMALL | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}  # fmt: skip
WINDOWED = SMALL | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
FROZEN = "model.freeze=[model.embed_tokens.weight,model.layers.0.*]"
# With LoRA, products that read the embedding's output need no gradient of it; the formula does not look so closely.
# Measured: 0.98 % for two layers, and less the more there are.
CASES = {
    "dpo": (1, (), None, 1e-9),
    "dpo on a ring of two": (2, ("parallel.ring_size=2",), None, 1e-9),
    "dpo in pieces, by ZeRO-3": (2, ("engine=zero3", "parallel.ring_size=2"), None, 1e-9),
    "dpo in pieces, by FSDP2": (2, ("engine=fsdp2",), None, 1e-9),
    "the reference is stored": (1, ("reference=precompute",), None, 1e-9),
    "lora": (1, ("adapter=lora",), None, 0.012),
    "a frozen layer": (1, (FROZEN,), None, 1e-9),
    "experts": (1, (), MIXTURE, 1e-9),
    "windows": (1, (), WINDOWED, 1e-9),
}


def both(spec: RankSpec, cfg: Config) -> dict[str, float]:
    """Take a step on real tensors; return its operations by the formula, on the ranks' mean, and as counted here."""
    found = {"targets": 0.0, "pairs": 0.0}
    note = step.note_operations

    def noting(meter: Any, shard: Any, by: Any) -> None:
        found["targets"] += len(shard.trained_u)
        found["pairs"] += shard.mean_work
        note(meter, shard, by)

    def speed_of(values: dict[str, float], ranks: int, peak: float | None) -> dict[str, float]:
        found["formula"] = values["operations"] / ranks
        return speed(values, ranks, peak)

    step.note_operations, step.speed = noting, speed_of
    log = count(plan(cfg, spec.rank))
    return found | {"counted": float(sum(section.counts.flops for section in log.sections))}


@pytest.mark.parametrize(("ranks", "words", "model", "near"), CASES.values(), ids=CASES.keys())
def test_the_formula_is_what_operators_count(
    tmp_path: Path, ranks: int, words: tuple[str, ...], model: dict[str, Any] | None, near: float
) -> None:
    """Per rank, on the mean. A flash kernel computes the scores again, and the head its logits."""
    if model is not None:
        (tmp_path / "config.json").write_text(json.dumps(model), encoding="utf-8")
        words = (*words, "model=hf", f"model.path={tmp_path}")
    named = any(word.startswith("engine=") for word in words)
    cfg = compose_config([*SHORT, f"launch.nproc={ranks}", *(() if named else ("engine=torch",)), *words])
    found = on_ranks(ranks, both, cfg)
    size = plan(cfg, 0).model
    of_pair = 2 * size.num_attention_heads * (getattr(size, "head_dim", None) or size.hidden_size // 8)
    layers = 1 if FROZEN in words else 2
    again = sum(each["pairs"] * of_pair * layers + 2 * each["targets"] * size.hidden_size * size.vocab_size
                for each in found)  # fmt: skip
    counted = sum(each["counted"] for each in found)
    assert counted - again == pytest.approx(sum(each["formula"] for each in found), rel=near)
    assert again > 0.03 * counted


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_uneven_ring_counts_each_pair_and_token_once(ranks: int, window: int | None) -> None:
    """By the table of docs/dashboards.md, of two trained layers with 8 heads of 16: a ring of contiguous parts, whose
    last rank sees most pairs. The second layer has the window."""
    weights, head, of_pair = 1000, 64 * 259, 12 * 8 * 16
    by = Operations(token=6 * weights, target=6 * head, pair=2 * of_pair)
    asked = ((13, 8), (5, 20), (2, 1))
    tokens, targets = sum(map(sum, asked)), sum(answer for _, answer in asked)
    pairs = sum(min(place + 1, limit or place + 1) for limit in (None, window)
                for each in asked for place in range(sum(each)))  # fmt: skip
    layout = get_layout("contiguous")
    sequences: Any = [tuple(np.zeros(length, np.int64) for length in each) for each in asked]
    pack = pack_sequences(sequences, layout.multiple(ranks))
    meter = Meter(World(0, 1, ALONE), torch.device("cpu"))
    for rank in range(ranks):
        ring = Ring(rank, tuple(range(ranks)))
        shard = shard_pack(pack, ring, layout, Plain(), 64, (None, window))
        assert (shard.most_work > 1.2 * shard.mean_work) == (ranks > 1)
        note_operations(meter, shard, by)
    found = speed({**meter.reduce(), "step_seconds": 1e-12}, ranks, 1e15)
    assert found["tflops"] * ranks == pytest.approx(6 * weights * tokens + 6 * head * targets + of_pair * pairs)
    assert found["mfu"] == pytest.approx(found["tflops"] * 1e-3)


def test_the_rate_is_per_gpu_and_of_training_where_samples_are_drawn() -> None:
    values = {"operations": 8e12, "step_seconds": 4.0, "loss": 1.0}
    assert speed(values, 2, None) == {"tflops": 1.0}
    assert values == {"step_seconds": 4.0, "loss": 1.0}
    assert speed({"operations": 8e12, "step_seconds": 4.0, "time/train": 1.0}, 2, 16e12) == {"tflops": 4.0, "mfu": 0.25}


def test_the_peak_is_that_of_the_named_hardware_or_of_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(type="cuda")
    known = {"NVIDIA H200": 989e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA X1": None}
    for name, peak in known.items():
        monkeypatch.setattr(operations.torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_of(compose_config(["launch.device=cpu", "train.precision=bf16"]), gpu) == peak  # type: ignore[arg-type]
    named = compose_config(["launch.device=cpu", "train.precision=fp32", "hardware=b200"])
    assert peak_of(named, gpu) == 75e12  # type: ignore[arg-type]
    assert peak_of(named, torch.device("cpu")) is None
    with assumed_gpus(1):
        shared = compose_config(["launch.ranks_per_gpu=4", "train.precision=fp32", "hardware=b200"])
    assert peak_of(shared, gpu) == 75e12 / 4  # type: ignore[arg-type]
