"""Sampling by a real vLLM: its build for CPUs, in an environment of its own (`make vllm`). Nothing here is a mock."""

from __future__ import annotations

import copy
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from rlexp.base.errors import DrawError
from rlexp.config.load import compose_config
from rlexp.config.schema.rollouts import RolloutConfig
from rlexp.launch import run_folder
from rlexp.launch.joining import RankSpec
from rlexp.launch.local import run_ranks
from rlexp.launch.preflight_check import prepared
from rlexp.run import job
from rlexp.run_files import checkpoint_folder
from rlexp.training.rollout.vllm.engine import prepare, started
from rlexp.training.rollout.vllm.weights import HandOver

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vllm is installed: make vllm"),
]
SMALL = """reward.rule=length launch.device=cpu engine=torch logger=none checkpoint.export=false
    model.hidden_size=256 data.max_length=160 data.size=32 data.eval_size=4 train.eval_every=3 train.max_steps=3
    train.batch_size=16 rollout.batch_size=4 rollout.n_samples=4 rollout.max_new_tokens=16"""


def rank(spec: RankSpec, run_dir: str) -> None:
    job.train_rank(spec, run_dir)


def ran(place: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run, and return the lines of rollouts.jsonl: checksums of every sample's tokens."""
    cfg, _ = prepared(compose_config([*SMALL.split(), *overrides]))
    assert run_folder.enter(cfg, place)
    run_ranks(rank, cfg.launch.nproc, (str(place),), log_dir=place, timeout=300)
    return [json.loads(line) for line in (place / "rollouts.jsonl").read_text().splitlines()]


def rows(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]


CASES = {
    "one rank": ("loss=grpo",),
    "a ring of two": ("loss=rloo", "parallel=ring2"),
    "pipelined": ("loss=ppo", "rollout=pipelined", "launch.nproc=2"),
    "everything of sampling": (
        "loss=grpo",
        "rollout.temperature=0.7", "rollout.top_k=20", "rollout.top_p=0.9", "rollout.min_p=0.02", "rollout.stop=[e,qq]",
        "rollout.max_new_tokens=40",
    ),
    "an adapter": ("loss=grpo", "adapter=lora"),
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


SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 259, "max_position_embeddings": 256}  # fmt: skip
FAMILIES = {
    "llama, with one matrix for both ends": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
}
TOKENS = [3, 5, 7, 11, 2]


def differences(_: RankSpec, family: str) -> tuple[int, list[float]]:
    """Hand over three times, and return how many weights are copied without vLLM's loader, and how far its logits are
    from transformers' each time."""
    cfg = RolloutConfig(minibatches=1, sampling_ranks=0, vllm_memory=0.01)
    prepare(cfg)
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import LogitsProcessor

    seen: list[Tensor] = []

    class Look(LogitsProcessor):
        def __init__(self, *_: Any) -> None: ...
        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None: ...
        def apply(self, logits: Tensor) -> Tensor:
            seen.append(logits.clone())
            return logits

    config = copy.deepcopy(FAMILIES[family])
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as place:
        config.save_pretrained(place)
        llm = started(place, cfg, precision=torch.float32, device=torch.device("cpu"), max_length=64, choosing=Look)
    hand_over, far = HandOver(), []
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.1)
        llm.collective_rpc(hand_over, args=(lambda: ((n, p.detach()) for n, p in model.named_parameters()),))
        llm.reset_prefix_cache()
        asked = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        llm.generate([{"prompt_token_ids": TOKENS}], asked, use_tqdm=False)
        with torch.no_grad():
            far.append(float((seen[-1][0, :259] - model(torch.tensor([TOKENS])).logits[0, -1]).abs().max()))
    return len(hand_over.copies or ()) - len([*model.named_parameters()]), far


@pytest.mark.parametrize("family", FAMILIES)
def test_its_logits_are_those_of_the_weights_it_was_handed(tmp_path: Path, family: str) -> None:
    """Measured: at most 9e-8, of logits up to 0.5."""
    ((left, far),) = run_ranks(differences, 1, (family,), log_dir=tmp_path, timeout=300)
    assert left == 0
    assert max(far) < 1e-6


def rank_that_fails(spec: RankSpec, run_dir: str) -> None:
    """Let vLLM fail while it generates the second rollout."""
    from vllm.v1.engine.llm_engine import LLMEngine

    steps, step = 0, LLMEngine.step

    def failing(engine: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 20:  # a rollout has 16, and the one that finds nothing to do
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return step(engine)

    LLMEngine.step = failing
    job.train_rank(spec, run_dir)


def test_a_run_in_which_it_fails_goes_on_with_the_samples_it_would_have_had(tmp_path: Path) -> None:
    """It goes on in the middle of its first rollout, whose samples the checkpoint holds."""
    two = ("loss=grpo", "train.batch_size=8", "train.max_steps=6", "checkpoint.save_every=1", "train.eval_every=6")
    native = ran(tmp_path / "native", *two)
    cfg, _ = prepared(compose_config([*SMALL.split(), *two, "rollout.engine=vllm"]))
    assert run_folder.enter(cfg, tmp_path / "run")
    with pytest.raises(DrawError, match=r"vLLM failed with RuntimeError: CUDA error.* Go on from the"):
        run_ranks(rank_that_fails, 1, (str(tmp_path / "run"),), log_dir=tmp_path, timeout=300)
    (newest,) = checkpoint_folder.latest_first(tmp_path / "run")[:1]
    assert newest.name.endswith("2")
    again = ran(tmp_path / "run", *two, "rollout.engine=vllm")
    assert [each["digests"] for each in again] == [each["digests"] for each in native]
