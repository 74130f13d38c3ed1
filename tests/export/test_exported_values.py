"""Whatever the keys of a run, what it exports says of the held-out pairs what the run said, in plain transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec
from rlexp.training.model.loading import load_tokenizer
from rlexp.training.sinks.base import Sink, Sinks
from rlexp.training.train.build import build
from rlexp.training.train.examples import read_examples
from rlexp.training.train.export_at_end import export_run
from rlexp.training.train.loop import train_loop
from rlexp.training.train.surroundings import UNPROBED
from rlexp.training.world.groups import ALONE, World
from tests.helpers.adapters import loaded, logps_by
from tests.helpers.models import untied
from tests.helpers.ranks import on_ranks

BASE = ("launch.device=cpu", "logger=none", "model=hf", "parallel=ring2", "train.precision=fp32", "data=jsonl",
        "data.eval_size=3", "train.batch_size=4", "train.max_steps=2", "train.eval_every=2",
        "optim.lr=1e-2")  # fmt: skip
LORA = ("adapter=lora", "adapter.rank=4", "checkpoint.export=merged")
# Sums of float32 log-probabilities in another order, and those of weights that were rounded as they were written: of a
# whole model, and of an adapter. Measured: 5.7e-8, 1.0e-3, 9.0e-5 and 5.4e-5.
FLOAT32, BF16, FP16, BF16_ADAPTER = 5e-7, 3e-3, 3e-4, 2e-4
# By the key that changes what is written.
CASES: dict[str, tuple[Sequence[str], float]] = {
    "nothing": ((), FLOAT32),
    "checkpoint.export": (LORA, FLOAT32),
    "checkpoint.export, an adapter alone": (("adapter=lora", "adapter.rank=4"), FLOAT32),
    "checkpoint.export_dtype=bf16": (("checkpoint.export_dtype=bf16",), BF16),
    "checkpoint.export_dtype=fp16": (("checkpoint.export_dtype=fp16",), FP16),
    "checkpoint.export_dtype of an adapter": (("adapter=lora", "checkpoint.export_dtype=bf16"), BF16_ADAPTER),
    "model.add_tokens": (("model.add_tokens=['<tool>']",), FLOAT32),
    "model.dtype": (("model.dtype=bf16",), FLOAT32),
    "model.freeze": (("model.freeze=['model.layers.0.*','lm_head.*']",), FLOAT32),
    "adapter.rank": ((*LORA, "adapter.rank=3"), FLOAT32),
    "adapter.alpha": ((*LORA, "adapter.alpha=5"), FLOAT32),
    "adapter.rslora": ((*LORA, "adapter.rslora=true"), FLOAT32),
    "adapter.rslora, an adapter alone": (("adapter=lora", "adapter.rank=4", "adapter.rslora=true"), FLOAT32),
    "adapter.targets": ((*LORA, "adapter.targets=[q_proj,down_proj]"), FLOAT32),
    "adapter.also": ((*LORA, "adapter.also=[norm,lm_head]"), FLOAT32),
}


def exported_rank(spec: RankSpec, cfgs: Sequence[Config], places: Sequence[str]) -> list[dict[str, float]]:
    """Train and export each; return the row of its last step."""
    rows: list[dict[str, float]] = []

    class Keeping(Sink):
        def log(self, row: Any) -> None:
            rows.append(row)

    last = []
    for cfg, place in zip(cfgs, places, strict=True):
        task = build(cfg, around=UNPROBED)
        train_loop(task, Sinks([Keeping()]))
        export_run(task.run, Path(place), 2)
        last.append(rows[-1])
    return last


def said_of_held_out(cfg: Config, model: Any) -> dict[str, float]:
    """Return the mean log-probability of the chosen and of the rejected answers."""
    held_out = read_examples(cfg, load_tokenizer(cfg.model), World(0, 1, ALONE)).held_out
    means = {}
    for place, side in enumerate(("chosen", "rejected")):
        pairs = [(pair.prompt, pair.answers[place]) for pair in held_out]
        tokens = [(torch.from_numpy(np.concatenate(pair)).long(), len(pair[0])) for pair in pairs]
        means[side] = float(np.mean(logps_by(model, tokens)))
    return means


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero1", "fsdp2"])
def test_whatever_the_keys_an_export_says_what_the_run_said(engine: str, tmp_path: Path) -> None:
    base = untied(tmp_path / "base")
    rows = [{"prompt": f"How far is {n}? <tool>", "chosen": "Near." * (1 + n % 3), "rejected": f"Far {n}."}
            for n in range(11)]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = (f"engine={engine}", f"model.path={base}", f"data.path={tmp_path}/rows.jsonl")
    cfgs, places = [compose_config([*BASE, *data, *words]) for words, _ in CASES.values()], []
    for number in range(len(cfgs)):
        places.append(tmp_path / str(number))
        places[-1].mkdir()
        (places[-1] / "run.json").write_text("{}")
    last = on_ranks(2, exported_rank, cfgs, [str(place) for place in places])[0]
    for (name, (words, rounding)), cfg, place, row in zip(CASES.items(), cfgs, places, last, strict=True):
        alone = "adapter=lora" in words and "checkpoint.export=merged" not in words
        model = loaded(base, place / "model") if alone else loaded(place / "model")
        for side, said in said_of_held_out(cfg, model).items():
            assert said == pytest.approx(row[f"eval/logps/{side}"], rel=rounding), (name, side)
        if name == "model.add_tokens":
            assert len(AutoTokenizer.from_pretrained(place / "model")("<tool>").input_ids) == 1
