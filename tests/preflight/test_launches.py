"""What a layer launches and moves on a GPU, with fused pieces and without: counted by rehearsals."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlexp.config.elsewhere import compose_elsewhere
from rlexp.config.schema import Config
from rlexp.preflight.rehearsal.mode import Rehearsing
from rlexp.preflight.rehearsal.rehearse import RehearsalPlan, rehearse
from rlexp.training.model.loading import load_config
from tests.helpers.rehearsals import alone

LLAMA_1B = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048,
            "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 16,
            "rope_theta": 5e5, "tie_word_embeddings": True, "vocab_size": 128256}  # fmt: skip
PASSES = ("reference", "forward", "backward")
TRAINED = PASSES[1:]  # with a gradient
Counted = dict[str, Counter[str]]  # by phase: launches, and bytes of what is no product and no attention


def configured(folder: Path, *words: str) -> Config:
    (folder / "config.json").write_text(json.dumps(LLAMA_1B), encoding="utf-8")
    return compose_elsewhere([
        "logger=none", "hardware=h200", "model=hf", f"model.path={folder}", "train.precision=bf16", "engine=torch",
        "data=synthetic", "data.max_length=8192", "train.batch_size=1", "train.micro_batch_size=1", "launch.nproc=1",
        "parallel=ring1", "train.max_steps=1", *words,
    ])  # fmt: skip


def counted(cfg: Config, layers: int) -> tuple[Counted, int]:
    """Rehearse so many layers; return what each phase launches and moves, and how often the host waits in it."""
    found: Counted = {phase: Counter() for phase in PASSES}
    called: list[str] = []
    counted_by, pay_by = Rehearsing.counted, Rehearsing._pay

    def noting(self: Any, func: Any, args: Any, kwargs: Any) -> Any:
        called.append(str(func))
        try:
            return counted_by(self, func, args, kwargs)
        finally:
            called.pop()

    def paying(self: Any, cost: Any) -> None:
        if cost.computes and self.log.phase in found:
            found[self.log.phase]["launches"] += 1
            between = not cost.flops and "attention" not in called[-1]
            found[self.log.phase]["bytes"] += cost.bytes if between else 0
        pay_by(self, cost)

    Rehearsing.counted, Rehearsing._pay = noting, paying  # type: ignore[method-assign]
    log = rehearse(RehearsalPlan(cfg, load_config(cfg.model, cfg.data.max_length), layers=layers))
    return found, sum(sum(section.counts.syncs.values()) for section in log.sections if section.phase in PASSES)


def costs(cfg: Config) -> tuple[Counted, Counted, int]:
    """Return what a layer costs, what a micro-batch of all layers does, and the waits of the host in a micro-batch."""
    (few, _), (more, waits) = (alone(counted, cfg, layers) for layers in (2, 3))
    layer = {phase: Counter({each: more[phase][each] - few[phase][each] for each in more[phase]}) for phase in PASSES}
    whole = {phase: Counter({each: few[phase][each] + 14 * layer[phase][each] for each in few[phase]})
             for phase in PASSES}  # fmt: skip
    return layer, whole, waits


def total(counts: Counted, what: str, phases: tuple[str, ...] = PASSES) -> int:
    return sum(counts[phase][what] for phase in phases)


@pytest.mark.parametrize("words", [(), ("memory.checkpointing=attention",)], ids=["", "recomputed"])
def test_fused_pieces_halve_the_launches_and_move_less(words: tuple[str, ...], tmp_path: Path) -> None:
    """A layer in all passes is counted, and a micro-batch with its head. The host never waits in between."""
    fused, plain = (costs(configured(tmp_path, *words, f"model.fused={name}")) for name in ("auto", "off"))
    for ours, theirs in zip(fused[:2], plain[:2], strict=True):
        assert 2 * total(ours, "launches") <= total(theirs, "launches")
        assert total(ours, "bytes") <= 0.4 * total(theirs, "bytes")
    assert fused[2] == 0
    if not words:  # of a layer, forward and backward, as docs/attention.md says
        assert [total(each[0], "launches", TRAINED) for each in (fused, plain)] == [48, 124]
        assert round(total(fused[0], "bytes", TRAINED) / total(plain[0], "bytes", TRAINED), 2) == 0.23
