"""What vLLM makes of single tokens: how far its log-probabilities lie from the policy's, and when it chooses the same.

The gap is taken from the run's own row, and computed once more from the samples' tokens: by a plain transformers model
with the policy's weights, a sample at a time, in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.gpu_training import Result, Started
from bench.vllm_cases import (
    SMOLLM,
    TINY,
    Setup,
    checksums,
    drawer_of,
    failed_lines,
    failures,
    joined_task,
    lines_of,
    share_same,
)
from bench.vllm_curves import ran

PRECISIONS = ("bf16", "fp32")
ENGINES = ("vLLM", "`native`")
BEYOND = 0.2  # as the rows count it
ROW = {  # the row's names, in the order of `by_hand`
    "mean": "sampling/sampling_logp_difference/mean",
    "largest": "sampling/sampling_logp_difference/max",
    "beyond": "rollout/gap_beyond",
    "tokens": "rollout/effective_tokens",
    "answers": "rollout/effective_answers",
}
APART, LEAST = 2.0, 1e-4  # the two means may differ by this factor, or lie both below this
ROLLOUT = ("data=arithmetic", "reward.rule=arithmetic", "data.max_length=128")
ON_GPU = ("rollout.batch_size=16", "rollout.n_samples=8", "train.batch_size=128", "rollout.max_new_tokens=48")
ON_CPU = ("rollout.batch_size=4", "rollout.n_samples=4", "train.batch_size=16", "rollout.max_new_tokens=16")
LATER = 4  # rollouts that runs on several rings are compared over


def model_of(setup: Setup) -> tuple[str, ...]:
    words = TINY if setup.short else SMOLLM
    return (*words, *ROLLOUT, *(ON_GPU if setup.gpu else ON_CPU))


# ---- one rollout ----


def tokens_section(setup: Setup, rank: Callable[..., None] | None = None) -> tuple[str, list[str]]:
    found = {}
    for engine in ENGINES:
        for precision in PRECISIONS:
            words = setup.by_vllm if engine == "vLLM" else ()
            asked = [*model_of(setup), *words, f"train.precision={precision}"]
            label = f"{engine}, {precision}"
            found[label] = setup.tried(f"tokens of {label}", setup.on_rank, rank or tokens_rank, asked)
    text, wrong = gap_table(found)
    about = (
        f"`python -m rlexp {' '.join(model_of(setup))}`: the first rollout. The gap of a token is log π_old − log "
        f"π_behaviour, over all tokens. *Row* is what the run logs; *by hand* takes π_old from a plain transformers "
        f"model with the same weights, in the same precision, a sample at a time."
    )
    every = [about, "", *text, "", *orders_table(found), *failed_lines(found)]
    return "\n".join(every), [*failures(found), *wrong]


def tokens_rank(spec: Any, cfg: Any, file: str) -> None:
    from rlexp.launch.joining import leave_world

    task = joined_task(spec, cfg)
    made = task.rollouts.ensure(1)
    row = {name: made.values[own] for name, own in ROW.items()}
    Started.add(file, {"row": row, "hand": by_hand(task, task.rollouts.own_samples), "orders": in_orders(task)})
    leave_world()


def by_hand(task: Any, samples: Sequence[Any]) -> dict[str, float]:
    model = plain_model(task)
    gaps = [plain_logps(model, sample, task.run.cfg.rollout.temperature) - sample.behaviour for sample in samples]
    return gap_of(gaps)


def plain_model(task: Any) -> Any:
    """Return a model of transformers' own, with the policy's weights in the precision that computes."""
    import torch
    from transformers import AutoModelForCausalLM

    run = task.run
    model = AutoModelForCausalLM.from_config(run.engine.policy.model.config, attn_implementation="eager")
    missing, unknown = model.load_state_dict(dict(run.engine.merged()), strict=False)
    assert not unknown, unknown
    assert set(missing) <= {"lm_head.weight"}, missing  # which a tied model has once
    model.tie_weights()
    dtype = torch.bfloat16 if run.cfg.train.precision.value == "bf16" else torch.float32
    return model.to(run.device, dtype).eval()


def plain_logps(model: Any, sample: Any, temperature: float) -> np.ndarray:
    """Return the log-probability of each of the answer's tokens, in float64."""
    import torch

    prompt, answer = (
        torch.from_numpy(np.asarray(each, dtype=np.int64)) for each in (sample.example.prompt, sample.answer)
    )
    whole = torch.cat((prompt, answer)).to(model.device).unsqueeze(0)
    with torch.no_grad():
        logits = model(whole).logits[0, len(prompt) - 1 : -1]
    logps = (logits.double() / temperature).log_softmax(-1).cpu()
    return np.asarray(logps.gather(-1, answer.unsqueeze(-1)).squeeze(-1).numpy())


def gap_of(gaps: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the five values of `ROW` of the samples' gaps."""
    tokens = np.concatenate(gaps).astype(np.float64)
    answers = np.array([each.sum(dtype=np.float64) for each in gaps])
    return {
        "mean": float(np.abs(tokens).mean()),
        "largest": float(np.abs(tokens).max()),
        "beyond": float((np.abs(tokens) > BEYOND).mean()),
        "tokens": effective(tokens),
        "answers": effective(answers),
    }


def effective(logs: np.ndarray) -> float:
    """Return (Σw)² / (n Σw²) of the weights with these logarithms."""
    weights = np.exp(logs - logs.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def gap_table(found: dict[str, Result]) -> tuple[list[str], list[str]]:
    rows, wrong = [], []
    for label, each in found.items():
        if "failed" in each:
            continue
        engine, precision = label.split(", ")
        row, hand = each["row"], each["hand"]
        rows.append([engine, precision, "row", *_cells(row)])
        rows.append(["", "", "by hand", *_cells(hand)])
        if max(row["mean"], hand["mean"]) > LEAST:
            factor = math.exp(abs(math.log(row["mean"] / hand["mean"]))) if row["mean"] and hand["mean"] else math.inf
            if factor > APART:
                wrong.append(f"{label}: the mean gap is {row['mean']:.1e} in the row, and by hand {hand['mean']:.1e}")
    head = ("samples by", "precision", "", "mean", "largest", f"beyond {BEYOND:g}", "effective tokens",
            "effective answers")  # fmt: skip
    return lines_of(head, rows, 3), wrong


def _cells(values: dict[str, float]) -> list[str]:
    return [f"{values['mean']:.1e}", f"{values['largest']:.1e}", f"{values['beyond']:.2%}", f"{values['tokens']:.4f}",
            f"{values['answers']:.4f}"]  # fmt: skip


# ---- the same samples ----


def in_orders(task: Any) -> Result:
    """Generate the same rollout in several orders, with the same weights; return the samples' checksums."""
    from rlexp.training.rollout.deal import deal

    drawer, cfg = drawer_of(task), task.run.cfg.rollout
    prompts = [task.rollouts.examples.train[index] for index in task.sampler.batch(1).indices]
    requests = deal(prompts, cfg.n_samples, 1)[0]
    half = len(requests) // 2
    asked = {
        "at once": [requests],
        "again": [requests],
        "in two halves": [requests[:half], requests[half:]],
        "backwards": [requests[::-1]],
    }
    found = {}
    for name, parts in asked.items():
        samples: list[Any] = []
        for part in parts:
            drawer.renew(task.run.engine.merged)
            samples += [sample for several in drawer.draw([part], 0) for sample in several]
        found[name] = checksums(samples)
    return found


def orders_table(found: dict[str, Result]) -> list[str]:
    names = ("again", "in two halves", "backwards")
    rows = [
        [*label.split(", "), *(share_same(each["orders"][name], each["orders"]["at once"]) for name in names)]
        for label, each in found.items()
        if "failed" not in each
    ]
    about = "The share of samples that are the same, token for token, as when all of a rollout are asked for at once:"
    return [about, "", *lines_of(("samples by", "precision", *names), rows, 2)]


# ---- runs on several rings ----


RINGS = {  # the ring and the engine; one rank samples, and the others train
    "`native`, ring 1": (1, "native"),
    "vLLM, ring 1": (1, "vllm"),
    "vLLM, ring 1, again": (1, "vllm"),
    "vLLM, ring 2": (2, "vllm"),
}


def rings_section(setup: Setup) -> tuple[str, list[str]]:
    precisions = PRECISIONS[:1] if setup.gpu else PRECISIONS  # each run takes most of a minute to start there
    found = {
        f"{name}, {precision}": setup.tried(
            f"samples of {name}, {precision}", ring_run, setup, *words, f"train.precision={precision}"
        )
        for precision in precisions
        for name, words in RINGS.items()
    }
    return "\n".join([*rings_table(found, precisions), *failed_lines(found)]), failures(found)


def ring_run(setup: Setup, ring: int, engine: str, *words: str) -> Result:
    """Run the command, pipelined; return the checksums of each rollout's samples."""
    ranks = ring + 1
    more = [f"launch.nproc={ranks}", f"parallel.ring_size={ring}", "rollout=pipelined", "launch.preflight=off",
            "logger.progress=false", f"train.max_steps={LATER}", "optim.lr=1e-5", *words]  # fmt: skip
    more += [f"launch.ranks_per_gpu={ranks}"] * setup.gpu
    more += [*setup.by_vllm] if engine == "vllm" else []
    return ran(setup, [*setup.words(*model_of(setup)), *more])


def rings_table(found: dict[str, Result], precisions: Sequence[str]) -> list[str]:
    rows = []
    for precision in precisions:
        base = found[f"vLLM, ring 1, {precision}"]
        for name in RINGS:
            each = found[f"{name}, {precision}"]
            if name == "vLLM, ring 1" or "failed" in each or "failed" in base:
                continue
            shares = [share_same(one, other) for one, other in zip(each["samples"], base["samples"], strict=True)]
            rows.append([name, precision, *shares])
    head = ("run", "precision", *(f"rollout {number}" for number in range(1, LATER + 1)))
    about = (
        "Runs of the whole command, pipelined, beside vLLM on a ring of 1: the share of samples that are the same. The "
        "first two rollouts are of the untrained weights."
    )
    return [about, "", *lines_of(head, rows, 2)]
