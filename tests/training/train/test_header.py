"""Every number that a run says of itself is the value that it tells: whole texts, beside counts and arithmetic of the
tests' own. A world of any size is one process here, in which each rank is told what this one says."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from rlexp.base.byte_counts import GIB, MIB
from rlexp.base.host_memory import HostMemory
from rlexp.config.load import compose_config
from rlexp.config.schema import Collectives, Config
from rlexp.config.schema.rollouts import RolloutEngine
from rlexp.launch.stops import Outcome
from rlexp.training.metrics.memory import Phases
from rlexp.training.train import header, rank
from rlexp.training.train.build import build
from rlexp.training.train.loop import Position
from rlexp.training.train.surroundings import UNPROBED
from rlexp.training.train.task import Task
from rlexp.training.world.groups import ALONE, World
from tests.helpers import models
from tests.helpers.paths import ROOT
from tests.helpers.rows import Rows, write_lines
from tests.helpers.rows import cache as cache
from tests.helpers.textbook import batches_of

RUN = Path("runs/a run")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
LAYERS = 3
SHAPE = models.SHAPE | {"num_hidden_layers": LAYERS, "max_position_embeddings": 4096}
# Prompts that differ in their first tokens, so that only the two answers of a pair share any.
PAIRS: Rows = [{"prompt": chr(65 + n) * (40 + n), "chosen": "y" * (10 + n), "rejected": "n" * (7 + 2 * n), "margin": n}
               for n in range(52)]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"model.path={models.saved(tmp_path_factory.mktemp('a') / 'llama', LlamaConfig(**SHAPE))}"


def configured(folder: Path, model: str, rows: Rows, *words: str) -> Config:
    return compose_config(["launch.device=cpu", "logger=none", "engine=torch", "model=hf", model, "data=jsonl",
                           f"data.path={write_lines(folder, rows)}", *words])  # fmt: skip


def built(cfg: Config) -> Task:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cfg.parallel.world_size)
    try:
        return build(cfg, around=UNPROBED)
    finally:
        dist.destroy_process_group()


def said(cfg: Config) -> list[str]:
    return header.header(built(cfg), RUN).splitlines()


def expected(loss: str, parameters: str, ranks: str, *more: str) -> list[str]:
    first = f"rlexp {VERSION}  {loss} on llama ({parameters}, fp32), engine torch"
    return [first, *(f"  {line}" for line in (ranks, *more, RUN))]


def causal() -> nn.Module:
    return AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))


def count(module: nn.Module, without: str = "none of them") -> int:
    return sum(each.numel() for name, each in module.named_parameters() if without not in name)


def sharing(cfg: Config) -> str:
    """Say what the first train batch shares: a token stands once for all that have the same tokens up to its target."""
    sequences = [pair.sequence(side).tolist() for pair in batches_of(cfg, 1)[0] for side in ("chosen", "rejected")]
    alone = [place for each in sequences for place in range(len(each))]
    shared = [place for place, _ in {(at, tuple(each[: at + 2])) for each in sequences for at in range(len(each))}]
    share = (sum(shared) + len(shared)) / (sum(alone) + len(alone))
    return (
        f"sharing, in the first batch: {len(shared):,} tokens are computed in place of {len(alone):,}, and {share:.0%} "
        f"of the query-key pairs"
    )


def test_each_number_of_the_header_of_pairs_is_what_it_tells(tmp_path: Path, model: str) -> None:
    """The longest pair is 2 × 900 tokens, of which a rank of two has 900, and a replica has up to three such pairs."""
    cfg = configured(tmp_path, model, PAIRS, "parallel=ring2", "launch.nproc=6", "data.max_length=900")
    assert said(cfg) == expected(
        "dpo", f"{count(causal()):,} parameters", "ring of 2 (zigzag direct, cpu_flash) × 3 replicas = 6 ranks on cpu",
        "batch 8 over 3 replicas, in micro-batches of up to 2,700 tokens a rank",
        "learning rate 5e-07 (default for dpo), linear to 0", sharing(cfg), "52 pairs, 6 steps (an epoch has 6)",
    )  # fmt: skip


def test_each_number_of_the_header_of_fixed_micro_batches_is_what_it_tells(tmp_path: Path, model: str) -> None:
    """The head that gives scores is counted, and a frozen layer is not trained."""
    cfg = configured(
        tmp_path, model, PAIRS, "loss=reward", "loss.margin_weight=0.75", "model.freeze=[model.layers.0.*]",
        "parallel=ring4", "launch.nproc=8", "train.batch_size=24", "train.micro_batch_size=4", "train.epochs=7",
        "data.drop_last=false", "optim.lr=3e-5", "optim.warmup_steps=5", "optim.decay=cosine", "optim.min_lr_ratio=0.2",
    )  # fmt: skip
    scoring = AutoModelForSequenceClassification.from_config(LlamaConfig(**SHAPE, num_labels=1))
    assert said(cfg) == expected(
        "reward", f"{count(scoring):,} parameters, {count(scoring, 'layers.0.'):,} trained",
        "ring of 4 (zigzag direct, cpu_flash) × 2 replicas = 8 ranks on cpu",
        "batch 24 = 2 replicas × micro-batch 4 × 3 accumulation steps",
        "learning rate 3e-05, warm-up 5 steps, then cosine to 6e-06", sharing(cfg),
        f"52 pairs, {7 * 3} steps (an epoch has 3)", "margins: all rows have one (`margin`, or `score_chosen` less "
        "`score_rejected`), and loss.margin_weight=0.75 asks for it; loss.margin_weight=0 leaves them out",
    )  # fmt: skip


def test_each_share_in_the_header_is_what_it_comes_to(tmp_path: Path, model: str) -> None:
    """A tenth of 57 answers is held out, 5.7; 17 epochs have 6 steps each, and a tenth of all is the warm-up, 10.2."""
    answers = [{"prompt": f"{n:03}", "completion": "y" * n} for n in range(1, 58)]
    linear = [each for name, each in causal().named_modules() if isinstance(each, nn.Linear) and name != "lm_head"]
    adapter = sum(5 * (each.in_features + each.out_features) for each in linear)
    assert said(configured(
        tmp_path, model, answers, "loss=sft", "adapter=lora", "adapter.rank=5", "data.eval_size=0.1", "train.epochs=17",
        "train.eval_every=2 epochs", "checkpoint.save_every=0.4 epoch", "optim.warmup_ratio=0.1",
    )) == expected(
        "sft", f"{count(causal()):,} parameters, {adapter:,} trained in an adapter",
        "ring of 1 (zigzag, cpu_flash) × 1 replica = 1 rank on cpu",
        "batch 8 over 1 replica, in micro-batches of up to 4,096 tokens",
        "learning rate 0.0002 (default for sft with an adapter), warm-up 11 steps, then linear to 0",
        f"52 answers, {17 * 6} steps (an epoch has 6)", "5 answers held out (data.eval_size=0.1), evaluated every 2 "
        "epochs (12 steps), saved every 0.4 epoch (2 or 3 steps)",
    )  # fmt: skip


def test_each_number_of_the_header_of_single_answers_is_what_it_tells(tmp_path: Path, model: str) -> None:
    """With the end of the answer, four of ten rows are longer than 70 tokens."""
    answers = [{"prompt": f"{n:04}" * 10, "completion": "y" * (24 + n % 10), "label": n % 13 != 0} for n in range(2000)]
    good = sum(each["label"] for each in answers if 40 + len(each["completion"]) + 1 <= 70)
    bad = 1200 - good
    assert said(configured(
        tmp_path, model, answers, "loss=kto", "train.max_steps=1700", "data.max_length=70", "data.too_long=drop",
        "loss.undesirable_weight=2", "launch.nproc=3", "train.batch_size=6",
    )) == expected(
        "kto", f"{count(causal()):,} parameters", "ring of 1 (zigzag, cpu_flash) × 3 replicas = 3 ranks on cpu",
        "batch 6 over 3 replicas, in micro-batches of up to 140 tokens",
        "learning rate 1e-06 (default for kto), linear to 0", "1,200 answers, 1,700 steps (an epoch has 200)",
        "800 answers: longer than data.max_length", f"warning: {good:,} good answers weigh {good / (2 * bad):.2g} "
        f"times as much as {bad:,} bad ones, and KTO's authors advise 1 to 1.33 times. Consider "
        f"loss.desirable_weight={2 * bad / good:.3g} to {4 / 3 * 2 * bad / good:.3g}",
    )  # fmt: skip


def test_each_number_of_the_header_of_rollouts_is_what_it_tells(tmp_path: Path, model: str) -> None:
    """The critic is a second model of three layers, of which each has two norms, and there is one at the end."""
    assert said(configured(
        tmp_path, model, PAIRS, "loss=ppo", "reward.text=a", "launch.nproc=3", "optim.lr=3e-6", "loss.value_lr=2e-6",
        "model.fused=always", "rollout.batch_size=10", "rollout.n_samples=6", "train.batch_size=12", "rollout.epochs=3",
        "rollout.mode=pipelined", "rollout.sampling_ranks=2",
    )) == expected(
        "ppo", f"{count(causal()):,} parameters", "ring of 1 (zigzag, cpu_flash) × 1 replica = 1 rank on cpu, and 2 "
        "that sample", f"fused: {2 * LAYERS} × residual stream, {2 * LAYERS} × rotary positions, {2 * LAYERS} × gate, "
        f"{2 * (2 * LAYERS + 1)} × norm", "batch 12 over 1 replica, in micro-batches of up to 4,096 tokens",
        "learning rate 3e-06, the critic's 2e-06, linear to 0", "52 prompts, a rollout is 10 × 6 samples for 3 epochs "
        f"× {60 // 12} train batches, {5 * 3 * 5} steps (an epoch has {5 * 3 * 5})",
    )  # fmt: skip


def test_each_number_of_what_this_machine_cannot_run_is_what_it_tells(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token's keys and values are 2 × 3 layers × 2 heads × 8 float32 numbers, which vLLM keeps in blocks of 128; it
    computes 4,096 tokens, and the logits of 32 answers, at once."""
    run = built(configured(tmp_path, model, PAIRS, "loss=grpo", "reward.text=a")).run
    by_vllm = replace(run.cfg.rollout, engine=RolloutEngine.vllm, vllm_memory=0.25)
    monkeypatch.setattr(header, "host_memory", lambda: HostMemory(total=GIB, available=GIB))
    weights, working = 4 * count(causal()), 4096 * 4 * (6 * 32 + 3 * 48) + 8 * 32 * 259
    tokens = (GIB // 4 // (128 * 384) - 1) * 128
    assert header.generating(replace(run, cfg=replace(run.cfg, rollout=by_vllm))) == (
        f"vLLM has 0.25 of the memory of this machine (rollout.vllm_memory): {weights / MIB:.1f} MiB weights, "
        f"{working / MIB:.1f} MiB working memory (assumed), 256.0 MiB keys and values of {tokens:,} tokens: "
        f"{tokens // 2048} answers of 2,048 at once"
    )
    launch = replace(run.cfg.launch, collectives=Collectives.staged, ranks_per_gpu=4)
    on_gpus = replace(run, device=torch.device("cuda"), cfg=replace(run.cfg, launch=launch))
    assert header.carried(on_gpus).startswith("slow: 4 ranks share each GPU, and what ranks tell each other ")


def test_each_number_of_the_footer_is_what_it_tells(tmp_path: Path, model: str) -> None:
    task = built(configured(tmp_path, model, PAIRS))
    shown = {"step": 12, "eval/loss": 0.61234, "eval/rewards/accuracies": 0.876, "eval/objective/scores": 0.4567}
    held_out = "held-out rows, after step 12: loss 0.6123  acc 0.88  score 0.457\n"
    assert header.footer(task, RUN, Outcome(), shown).startswith(
        f"done: {RUN}  (curve in metrics.jsonl, trained model in model/)\n{held_out}see its answers: "
    )
    for step in (7, 30, 110):
        (tmp_path / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
    stopped = header.footer(task, tmp_path, Outcome("stopped", "stopped by SIGTERM"), shown)
    assert stopped == f"stopped by SIGTERM; {tmp_path} continues from step-00000110\n{held_out}"


@pytest.mark.parametrize(("fails", "closed"), [("resume", ["task"]), ("header", ["sinks", "task"])])
def test_whatever_fails_what_was_opened_is_closed(
    fails: str, closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B and vLLM are open from the build on."""
    ended: list[str] = []
    run = SimpleNamespace(world=World(0, 1, ALONE), cfg=None, total_steps=4)
    task: Any = SimpleNamespace(run=run, close=lambda: ended.append("task"))
    sinks = SimpleNamespace(within_step=None, close=lambda _ending: ended.append("sinks"))
    parts = {"build": lambda *_: task, "resume": lambda *_: (Position(), ""), "build_sinks": lambda *_: sinks,
             "ending_of": lambda *_: None, "JsonlSink": lambda _: sinks, "ledger": lambda _: {}}  # fmt: skip
    for name, part in parts.items():
        monkeypatch.setattr(rank, name, part)
    monkeypatch.setattr(rank.run_folder, "note", lambda *_, **__: None)
    monkeypatch.setattr(rank, fails, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rank.train_watched(compose_config(["launch.device=cpu"]), RUN, Phases(torch.device("cpu")))
    assert ended == closed
