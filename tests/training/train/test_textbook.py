"""The product against a plain one-process DPO that shares no code with it but the loading of weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.config.schema.row_kinds import Kind
from rlexp.training.model.loading import load_config, load_model
from rlexp.training.sinks.base import Sink, Sinks
from rlexp.training.train.build import build
from rlexp.training.train.loop import train_loop
from rlexp.training.train.surroundings import UNPROBED
from rlexp.verify.recording import TokenExample
from tests.helpers import textbook
from tests.helpers.ranks import Steps, largest_gap, on_ranks, train_steps
from tests.helpers.squality import write_long_pairs
from tests.helpers.textbook import batches_of
from tests.helpers.textbook_losses import rewards
from tests.oracles.examples import SIDES
from tests.oracles.pairs import load_tokenizer, set_of

# float64 with another order of additions. Gradients differed by 4.2e-15 with the tiny model; real ones have more terms.
GRADIENT, LOGPS, LOSS = 1e-12, 1e-13, 1e-13


def run_on(cfg: Config, steps: int) -> list[Steps]:
    return on_ranks(cfg.parallel.world_size, train_steps, cfg, steps)


def hold(cfg: Config, results: list[Steps]) -> None:
    """Compare the first step of every rank with the textbook: loss, per-pair log-probabilities, gradient."""
    (batch,) = batches_of(cfg, 1)
    config = load_config(cfg.model, cfg.data.max_length)
    weights = textbook.float64_weights(load_model(cfg.model, config, cfg.data.max_length))
    policy = textbook.pair_logps(weights, config, batch)
    reference = {side: sums_P.detach() for side, sums_P in policy.items()}  # the same weights
    loss = textbook.dpo_loss(policy, reference, cfg.loss.beta)
    gradient = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))

    share, ring = len(batch) // cfg.parallel.dp_size, cfg.parallel.ring_size
    for side in SIDES:  # which replica has which pair is the dealer's choice
        everywhere = sorted(each for result in results[::ring] for each in getattr(result, side)[:share])
        assert everywhere == pytest.approx(sorted(policy[side].tolist()), rel=LOGPS)
    for rank, result in enumerate(results):
        first = results[rank // ring * ring]
        assert (result.chosen, result.rejected) == (first.chosen, first.rejected)
        assert result.rows[0]["train/loss"] == pytest.approx(math.log(2), abs=LOSS)
        assert result.rows[0]["train/loss"] == pytest.approx(float(loss.detach()), rel=LOSS)
        assert largest_gap(gradient, result.gradients[0]) < GRADIENT
        norm = math.sqrt(sum(float((grad * grad).sum()) for grad in gradient.values()))
        assert result.rows[0]["train/grad_norm"] == pytest.approx(norm, rel=GRADIENT)


SMALL = ("launch.device=cpu", "logger=none", "train.precision=fp64", "train.batch_size=4", "data.size=12")


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel=ring1", "train.micro_batch_size=4"),
        ("parallel=ring4", "train.micro_batch_size=2"),
        ("parallel=ring2", "launch.nproc=4", "data.packing=false"),
        pytest.param(("parallel=ring1", "launch.nproc=4"), marks=pytest.mark.slow),
        ("parallel=ring8", "memory.checkpointing=true"),
    ],
    ids=lambda layout: " ".join(layout),
)
def test_first_step_equals_the_textbook(layout: tuple[str, ...]) -> None:
    cfg = compose_config([*SMALL, *layout])
    hold(cfg, run_on(cfg, 1))


def test_training_equals_the_textbook() -> None:
    """Six steps with AdamW, clipping, warm-up and decay, two epochs of shuffled data."""
    cfg = compose_config(
        [*SMALL, "parallel=ring2", "launch.nproc=4", "optim.warmup_steps=2", "optim.max_grad_norm=0.5",
         "optim.weight_decay=0.1", "optim.lr=1e-3", "train.max_steps=6", "train.batch_size=2", "data.size=6"]
    )  # fmt: skip
    result = run_on(cfg, 6)[0]

    config = load_config(cfg.model, cfg.data.max_length)
    weights = textbook.float64_weights(load_model(cfg.model, config, cfg.data.max_length))
    frozen = {name: weight.detach().clone() for name, weight in weights.items()}
    matrices = [weight for weight in weights.values() if weight.dim() > 1]
    gains = [weight for weight in weights.values() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.999), eps=1e-8)
    rates = [1e-3 / 3, 2e-3 / 3, 1e-3, 0.75e-3, 0.5e-3, 0.25e-3]  # two steps up, then down to 0 after step 6
    for row, rate, batch in zip(result.rows, rates, batches_of(cfg, 6), strict=True):
        with torch.no_grad():
            reference = textbook.pair_logps(frozen, config, batch)
        policy = textbook.pair_logps(weights, config, batch)
        loss = textbook.dpo_loss(policy, reference, cfg.loss.beta)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = rate
        optimizer.step()
        assert row["train/learning_rate"] == pytest.approx(rate, rel=1e-12)
        assert row["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-11)
        assert row["train/grad_norm"] == pytest.approx(float(norm), rel=1e-10)
        chosen, rejected = (policy[side].detach() - reference[side] for side in SIDES)
        margin = float(cfg.loss.beta * (chosen - rejected).mean())
        assert row["train/rewards/margins"] == pytest.approx(margin, rel=1e-9, abs=1e-11)
    # Adam divides by √v + 1e-8: where a gradient is itself near 1e-8, rounding weighs more. Measured 3.8e-13.
    assert largest_gap({name: w.detach() for name, w in weights.items()}, result.weights) < 1e-11


def test_every_logged_value_equals_the_textbook() -> None:
    """Compare training values of the third step, and the held-out values after it, whose last batch is a short one."""
    cfg = compose_config([*SMALL, "parallel=ring2", "launch.nproc=4", "train.micro_batch_size=2", "data.eval_size=7",
                          "train.eval_every=3", "train.max_steps=3", "optim.lr=2e-3"])  # fmt: skip
    row, weights_before, weights_after = on_ranks(4, third_row_rank, cfg)[0]
    held_out = set_of(cfg.data, Kind.pairs, load_tokenizer(cfg)).held_out
    config = load_config(cfg.model, cfg.data.max_length)
    start = textbook.float64_weights(load_model(cfg.model, config, cfg.data.max_length))
    batch = batches_of(cfg, 3)[-1]
    for family, some, weights in (("train", batch, weights_before), ("eval", held_out, weights_after)):
        expected = logged(cfg, weights, start, config, some)
        assert abs(expected["loss"] - math.log(2)) > 0.01  # policy and reference have parted
        for name, value in expected.items():
            assert row[f"{family}/{name}"] == pytest.approx(value, rel=1e-9, abs=1e-11), f"{family}/{name}"
    assert row["train/epoch"] == 1.0  # 12 pairs, three batches of 4


@torch.no_grad()
def logged(cfg: Config, weights: textbook.Weights, start: textbook.Weights, config, pairs: list[TokenExample]) -> dict:
    """Every value that TRL's users know, as a mean over the pairs (over the answers' tokens for logits)."""
    policy, reference = (textbook.pair_logps(each, config, pairs) for each in (weights, start))
    sums = {f"policy/{side}": policy[side].numpy() for side in SIDES}
    sums |= {f"reference/{side}": reference[side].numpy() for side in SIDES}
    means = {"loss": textbook.dpo_loss(policy, reference, cfg.loss.beta), **rewards(sums, cfg.loss.beta)}
    for side in SIDES:
        logits_n = [textbook.answer_logits(weights, config, pair, side).mean(-1) for pair in pairs]
        means |= {f"logps/{side}": policy[side], f"logits/{side}": torch.cat(logits_n)}
    return {name: float(each.mean()) for name, each in means.items()} | {"tokens": sum(pair.tokens for pair in pairs)}


def third_row_rank(place, cfg: Config) -> tuple:
    task = build(cfg, around=UNPROBED)
    rows: list[dict] = []
    seen: list[dict] = []

    class Keeping(Sink):
        def log(self, row: dict) -> None:
            rows.append(row)
            seen.append({name: w.detach().clone() for name, w in task.run.engine.weights()})

    train_loop(task, Sinks([Keeping()]))
    return rows[2], seen[1], seen[2]


@pytest.mark.slow
def test_real_model_on_real_pairs(shared: Path) -> None:
    """stories260K on HH pairs, on a ring of 4 and two replicas."""
    cfg = compose_config(
        ["launch.device=cpu", "logger=none", "train.precision=fp64", "parallel=ring4", "launch.nproc=8",
         "model=hf", f"model.path={shared}/models/stories260K", "data=jsonl",
         f"data.path={shared}/data/hh_helpful_base/test.jsonl", "data.max_length=512", "data.too_long=drop",
         "train.batch_size=8", "train.micro_batch_size=2"]
    )  # fmt: skip
    hold(cfg, run_on(cfg, 1))


@pytest.mark.slow
@pytest.mark.prove
def test_real_model_on_long_documents(shared: Path, tmp_path: Path) -> None:
    """Four thousand tokens of SQuALITY, eight times the model's own context."""
    write_long_pairs(shared, tmp_path / "long.jsonl")
    cfg = compose_config(
        ["launch.device=cpu", "logger=none", "train.precision=fp64", "parallel=ring4",
         "model=hf", f"model.path={shared}/models/stories260K", "data=jsonl", f"data.path={tmp_path}/long.jsonl",
         "data.max_length=4003", "data.too_long=truncate", "data.shuffle=false", "train.batch_size=1"]
    )  # fmt: skip
    hold(cfg, run_on(cfg, 1))
