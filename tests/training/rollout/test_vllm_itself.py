"""Sampling by a real vLLM: its build for CPUs, in an environment of its own (`make vllm`). Nothing here is a mock."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlexp.config.load import compose_config
from rlexp.launch import run_folder
from rlexp.launch.joining import RankSpec
from rlexp.launch.local import run_ranks
from rlexp.run import job
from rlexp.training.model.loading import byte_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vllm is installed: make vllm"),
]
SMALL = """loss=grpo reward.rule=length launch.device=cpu engine=torch logger=none checkpoint.export=false
    model.hidden_size=256 data.max_length=160 data.size=32 data.eval_size=4 train.eval_every=3 train.max_steps=3
    train.batch_size=16 rollout.batch_size=4 rollout.n_samples=4 rollout.max_new_tokens=16"""


def rank(spec: RankSpec, run_dir: str) -> None:
    job.train_rank(spec, run_dir)


def ran(place: Path, *overrides: str, base: Sequence[str] = tuple(SMALL.split())) -> list[dict[str, Any]]:
    """Run, and return the lines of rollouts.jsonl: checksums of every sample's tokens."""
    cfg = compose_config([*base, *overrides])
    assert run_folder.enter(cfg, place)
    run_ranks(rank, cfg.launch.nproc, (str(place),), log_dir=place, timeout=300)
    return [json.loads(line) for line in (place / "rollouts.jsonl").read_text().splitlines()]


def rows(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]


CASES = {
    "one rank": (),
    "a ring of two": ("parallel=ring2",),
    "pipelined": ("rollout=pipelined", "launch.nproc=2"),
    "everything of sampling": (
        "rollout.temperature=0.7", "rollout.top_k=20", "rollout.top_p=0.9", "rollout.min_p=0.02", "rollout.stop=[e,qq]",
        "rollout.max_new_tokens=40",
    ),
    "an adapter": ("adapter=lora",),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_its_samples_are_those_of_native(tmp_path: Path, case: str) -> None:
    """In float32 no logit of these was so near a border that rounding would choose another token."""
    native = ran(tmp_path / "native", *CASES[case])
    theirs = ran(tmp_path / "vllm", *CASES[case], "rollout.engine=vllm")
    assert len(native) == 3
    assert [each["digests"] for each in theirs] == [each["digests"] for each in native]
    for one, other in zip(rows(tmp_path / "native"), rows(tmp_path / "vllm"), strict=True):
        for name in ("train/loss", "train/grad_norm", "train/objective/scores", "eval/objective/scores"):
            np.testing.assert_allclose(other.get(name, 0.0), one.get(name, 0.0), rtol=1e-4, atol=1e-6)


def test_a_head_that_is_the_embeddings_gets_new_weights_too(tmp_path: Path) -> None:
    """On a CPU vLLM packs its weights, and would reload the embeddings alone."""
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(**shape, vocab_size=259, bos_token_id=0, eos_token_id=1, pad_token_id=2,
                         initializer_range=0.2, tie_word_embeddings=True)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    words = [word for word in SMALL.split() if not word.startswith("model.")]
    tied = (*words, "model=hf", f"model.path={tmp_path}/model", "optim.lr=1e-2", "rollout.engine=vllm")
    ran(tmp_path / "vllm", *tied, base=())
    gaps = [row["train/sampling/sampling_logp_difference/max"] for row in rows(tmp_path / "vllm")]
    assert len(gaps) == 3
    assert max(gaps) < 1e-4
