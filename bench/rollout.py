"""Measure the cost of drawing and scoring answers: memory, balance, throughput, and overhead per token.

    python -m bench.rollout                         print the tables; 3 minutes on 2 idle cores, 15 on busy ones
    python -m bench.rollout --write docs/measured/benchmarks.md
    python -m bench.rollout --only memory           or ranks, or decoding

The floors, written down before any optimization (E hidden size, I intermediate size, G·D width of the keys, L layers, V
vocabulary, B rows of a micro-batch, K columns of the cache, P parameters, all in float32):

- For each sample the host stores its text, and 4 bytes per token for its ids and 4 for its log-probabilities (8 in
  float64). Nothing else may grow with n_samples. While a micro-batch is drawn, the device holds its cache of
  2·L·B·K·G·D·4 bytes. Prompts are read `PREFILL` tokens at a time, so for any length activations take at most
  PREFILL·(4·E + 3·I)·4 bytes and the mask PREFILL·K·5.
- Scoring holds one layer of score_batch_size·K/ring tokens at a time, (4·E + 3·I)·4 bytes each, and the keys and values
  of one more rank. It shrinks with the ring, except for the parts that do not depend on the ring.
- A decoding step reads the weights once, 4·P bytes, and the cache once, 2·L·B·K·G·D·4. It takes 2·P·B multiplications
  and additions. Reading the same tokens at once takes as many, and reads the weights once for all tokens. With a small
  model both are negligible beside the calls of a forward pass, about 60 per layer.
- Ranks that draw share only the cores: the throughput of a ring of 4 is that of four independent samplers, and all
  ranks take the same time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.checkpoint import configured, join_world, on_ranks
from bench.measured import print_tables
from rlexp.config.schema import Config
from rlexp.launch.joining import ON_CPU, RankSpec, prepare_environment
from rlexp.training.metrics.memory import peak_bytes, reset_peak
from rlexp.training.rollout.deal import Request, deal, micro_batches
from rlexp.training.rollout.sampling import PREFILL, Drawer
from rlexp.training.rollout.sources import Colocated
from rlexp.training.train.build import build
from rlexp.training.train.parts import TrainingRun
from rlexp.training.train.rollout_task import RolloutTask
from rlexp.training.train.surroundings import UNPROBED
from rlexp.training.types import Example, Sample
from rlexp.training.world.groups import Ring, World

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
BASE = ("engine=torch", "loss=reinforce_pp", "data.fill=true", "data.too_long=truncate", "data.eval_size=0",
        "reward=rule", "reward.text=a", "train.micro_batch_size=1", "checkpoint.on_exit=false")  # fmt: skip
MODEL = ("model.hidden_size=256", "model.intermediate_size=688", "model.layers=4")
NEW = 16  # tokens of an answer where memory is measured
SAMPLES = (4, 16, 64)
LENGTHS = (256, 1024, 4096)
RINGS = (1, 2, 4)
TURNS, RANKS, PROMPTS = 7, 4, 16
REPEATS = 5
MB = 1 << 20


def main() -> None:
    prepare_environment(ON_CPU)
    print_tables("bench.rollout", __doc__, TABLES, "rollout")


def sized(ranks: int, prompts: int, n_samples: int, length: int, *overrides: str) -> Config:
    return configured(
        ranks, *BASE, *overrides, f"parallel=ring{ranks}", f"data.max_length={length}", f"data.size={prompts}",
        f"rollout.batch_size={prompts}", f"rollout.n_samples={n_samples}", f"train.batch_size={prompts * n_samples}",
    )  # fmt: skip


def task_of(cfg: Config) -> RolloutTask:
    task = build(cfg, around=UNPROBED)
    assert isinstance(task, RolloutTask)
    return task


def prompts_of(task: RolloutTask) -> list[Example]:
    return [task.rollouts.examples.train[index] for index in task.sampler.batch(1).indices]


def drawer_of(task: RolloutTask) -> Drawer:
    source = task.rollouts.source
    assert isinstance(source, Colocated)
    assert isinstance(source._drawer, Drawer)
    return source._drawer


# ---- memory ----


@dataclass(frozen=True)
class Peaks:
    """Bytes on the rank with the most: held by the process before, and added by each phase."""

    before: int
    rollout: int
    score: int
    kept: int  # the samples' arrays, of all ranks


def memory() -> str:
    heads = ("tokens", "samples of a prompt", "ring", "before", "generating: peak", "beside", "scoring: peak", "beside")
    lines = [f"| {' | '.join(heads)} | samples |", "|" + " ---: |" * (len(heads) + 1)]
    cases = [(LENGTHS[0], n_samples, 1, 16, 8) for n_samples in SAMPLES]
    cases += [(length, 1, ring, 1, 4) for length in LENGTHS for ring in RINGS]
    for length, n_samples, ring, rows, scored in cases:
        prompts = 2 if n_samples > 1 else 4
        cfg = sized(ring, prompts, n_samples, length, *MODEL, f"rollout.max_new_tokens={NEW}",
                    f"rollout.micro_batch_size={rows}", f"rollout.score_batch_size={scored}")  # fmt: skip
        peaks: Peaks = on_ranks(memory_rank, ring, cfg)
        shown = [peaks.before, peaks.before + peaks.rollout, peaks.rollout, peaks.before + peaks.score, peaks.score]
        cells = " | ".join(f"{value / MB:.0f}" for value in shown)
        lines.append(f"| {length:,} | {n_samples} | {ring} | {cells} | {peaks.kept / MB:.3f} |")
    return (
        f"### Memory of a rollout\n\nMB on the rank with the most, with a fresh start for each line: the process "
        f"before, its peak, and the difference. Prompts fill all but\n{NEW} tokens. The first three lines draw 2 "
        f"prompts × 4 to 64 samples, 16 rows at once, and score 8; the others 4 prompts × 1,\na row at once, and score "
        f'4 over the ring. "Samples" are the arrays that all samples keep in the host\'s memory.\n\n' + "\n".join(lines)
    )


def memory_rank(spec: RankSpec, cfg: Config) -> Peaks:
    give_back_at_once()
    join_world(spec, cfg)
    task = task_of(cfg)
    run, rollouts, prompts = task.run, task.rollouts, prompts_of(task)
    short = [Example(prompt.index, prompt.prompt[:8]) for prompt in prompts[:1]]
    warm = [sample for part in drawer_of(task).draw([[Request(0, short[0], 0)]], 0) for sample in part]
    rollouts.scorer.score(warm)
    mine: list[Sample] = []

    def draw() -> None:
        mine.extend(rollouts.source.draw(0, prompts, cfg.rollout.n_samples, rollouts.rewards))

    before, drawn = peak_of(run, draw)
    columns: list[Any] = []
    scored = peak_of(run, lambda: columns.extend(rollouts.scorer.score(mine)[0]))[1] - before
    rollouts.rewards.close()
    kept = sum(array.nbytes for s, more in zip(mine, columns, strict=True)
               for array in (s.answer, s.behaviour, *more.values()))  # fmt: skip
    most = torch.tensor([before, drawn - before, scored])
    whole = torch.tensor(kept)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(whole)
    held, rollout, score = (int(value) for value in most)
    return Peaks(held, rollout, score, int(whole))


def give_back_at_once() -> None:
    """Return freed memory to the system at once, so that the peak counts only memory in use."""
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 1 << 16)
        mallopt(M_TRIM_THRESHOLD, 1 << 16)


def peak_of(run: TrainingRun, work: Callable[[], object]) -> tuple[int, int]:
    """Bytes held before, and at the peak."""
    reset_peak(run.device)
    before = peak_bytes(run.device)
    dist.barrier()
    work()
    return before, peak_bytes(run.device)


# ---- ranks ----


@dataclass(frozen=True)
class Turn:
    """Times of one way of drawing the samples, by rank."""

    seconds: list[float]
    core: list[float]  # seconds of a core


ALONE = "four samplers alone"
WAYS = {"torch": ("engine=torch",), "zero3": ("engine=zero3",), "fsdp2": ("engine=fsdp2",)}


def ranks() -> str:
    sizes = ("rollout.max_new_tokens=32", "rollout.micro_batch_size=8")
    cfgs = {name: sized(RANKS, PROMPTS, 4, 128, *way, *sizes) for name, way in WAYS.items()}
    turns: dict[str, list[Turn]] = on_ranks(ranks_rank, RANKS, cfgs)
    lines = ["| who generates | throughput over four alone | slowest over fastest rank | in core-seconds |",
             "| --- |" + " ---: |" * 3]  # fmt: skip
    alone = [sum(1 / seconds for seconds in turn.seconds) / RANKS for turn in turns[ALONE]]
    for name, mine in turns.items():
        rates = [1 / max(turn.seconds) for turn in mine]
        ratios = alone if name == ALONE else rates
        over = statistics.median(mine / base for mine, base in zip(ratios, alone, strict=True))
        apart, cores = (
            statistics.median(max(values) / min(values) for values in each)
            for each in ([turn.seconds for turn in mine], [turn.core for turn in mine])
        )
        who = ALONE if name == ALONE else f"ring of {RANKS}, {name}"
        lines.append(f"| {who} | {over:.2f} | {apart:.2f} | {cores:.2f} |")
    seconds = statistics.median(max(turn.seconds) for turn in turns[ALONE])
    return (
        f"### Ranks side by side\n\n{PROMPTS} prompts × 4 samples of 32 tokens with `model=tiny`, drawn by {RANKS} "
        f"processes on {os.cpu_count()} cores: as a ring of {RANKS},\nand by {RANKS} independent samplers of a quarter "
        f"each, in turn; medians of {TURNS} turns. A ring is as fast as\nits slowest rank; the rates of independent "
        f"samplers are added up ({seconds:.1f} s until the last is done). Under zero3 and\nfsdp2 every token's forward "
        f"pass gathers the weights from all ranks, which therefore run in step.\n\n" + "\n".join(lines)
    )


def ranks_rank(spec: RankSpec, cfgs: dict[str, Config]) -> dict[str, list[Turn]]:
    join_world(spec, next(iter(cfgs.values())))
    tasks = {name: task_of(cfg) for name, cfg in cfgs.items()}
    ways = {ALONE: alone_of(tasks["torch"], spec.rank)} | {name: ring_of(task) for name, task in tasks.items()}
    turns: dict[str, list[Turn]] = {name: [] for name in ways}
    for turn in range(TURNS + 1):
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            began, core = time.perf_counter(), time.process_time()
            ways[name]()
            taken = [time.perf_counter() - began, time.process_time() - core]
            parts: list[Any] = [None] * spec.world_size
            dist.all_gather_object(parts, taken)
            if turn:
                turns[name].append(Turn([part[0] for part in parts], [part[1] for part in parts]))
    for task in tasks.values():
        task.close()
    return turns


class Unjudged:
    """Draw without rewards, which have processes of their own."""

    def submit(self, samples: Sequence[Sample]) -> None: ...


def ring_of(task: RolloutTask) -> Callable[[], object]:
    prompts, drawer = prompts_of(task), drawer_of(task)
    source = Colocated(drawer, task.run.engine.weights, task.run.cfg.rollout, task.run.world)
    return lambda: source.draw(0, prompts, task.run.cfg.rollout.n_samples, Unjudged())  # type: ignore[arg-type]


def alone_of(task: RolloutTask, rank: int) -> Callable[[], object]:
    """Draw a quarter of the prompts in a world of one rank."""
    longest_first = sorted(prompts_of(task), key=lambda prompt: -len(prompt.prompt))
    source = Colocated(drawer_of(task), task.run.engine.weights, task.run.cfg.rollout, World(0, 1, Ring(0, (0,))))
    quarter = longest_first[rank::RANKS]
    return lambda: source.draw(0, quarter, task.run.cfg.rollout.n_samples, Unjudged())  # type: ignore[arg-type]


# ---- decoding ----


@dataclass(frozen=True)
class Decoded:
    """The shortest seconds of drawing a micro-batch, of the model's part in it, and of reading it at once."""

    whole: float
    model: float
    steps: int
    at_once: float
    weights: int  # bytes read in each step
    cache: int  # bytes read in a step, on average
    bandwidth: float  # bytes a second, of copying


def decoding() -> str:
    lines = ["| model | prompt | a step | of it the model | read at once | over | bytes a step: weights; cache "
             "| read at the speed of a copy | over |", "| --- |" + " ---: |" * 8]  # fmt: skip
    for name, model in (("tiny, 0.12 million", ()), ("3.2 million", MODEL)):
        for length in (96, 1024):
            cfg = sized(1, 4, 4, length, *model, "rollout.max_new_tokens=64", "rollout.micro_batch_size=16")
            decoded: Decoded = on_ranks(decoding_rank, 1, cfg)
            step, floor = decoded.whole / decoded.steps, (decoded.weights + decoded.cache) / decoded.bandwidth
            lines.append(
                f"| {name} | {length - 64} | {step * 1e3:.2f} ms | {decoded.model / decoded.whole:.0%} "
                f"| {decoded.at_once / decoded.steps * 1e3:.2f} ms | {decoded.whole / decoded.at_once:.1f} "
                f"| {decoded.weights / MB:.1f}; {decoded.cache / MB:.1f} MB "
                f"| {floor * 1e3:.2f} ms | {step / floor:.1f} |"
            )
    return (
        f"### Token by token\n\nA micro-batch of 16 rows, 4 prompts × 4 samples of 64 tokens, on one rank: a step "
        f"yields 16 tokens. The time of the steps\nincludes reading the prompts, {PREFILL:,} tokens at a time. "
        f'"Read at once" is one forward pass of the same prompts and\nanswers, without shared prompts: its time over '
        f"the number of steps. Best of {REPEATS}.\n\n" + "\n".join(lines)
    )


def decoding_rank(spec: RankSpec, cfg: Config) -> Decoded:
    join_world(spec, cfg)
    task = task_of(cfg)
    run, drawer, prompts = task.run, drawer_of(task), prompts_of(task)
    hand = deal(prompts, cfg.rollout.n_samples, 1)[0]
    parts = micro_batches(hand, 16, None, cfg.rollout.max_new_tokens)
    assert len(parts) == 1
    inner, spent = drawer._forward, [0.0]

    def timed(batch: Any) -> Any:
        began = time.perf_counter()
        logits = inner(batch)
        spent[0] += time.perf_counter() - began
        return logits

    drawer._forward = timed
    whole, at_once, samples = [], [], list[Sample]()
    for _ in range(REPEATS + 1):
        spent[0], began = 0.0, time.perf_counter()
        samples = [sample for part in drawer.draw(parts, 0) for sample in part]
        whole.append((time.perf_counter() - began, spent[0]))
        shard = run.to_device(run.pack([(sample.example.prompt, sample.answer) for sample in samples]))
        began = time.perf_counter()
        with torch.no_grad():
            run.engine.forward(shard)
        at_once.append(time.perf_counter() - began)
    best = min(whole[1:])
    steps = max(len(sample.answer) for sample in samples)
    model: Any = run.engine.policy.model.config
    columns = float(np.mean([len(s.example.prompt) for s in samples])) + steps / 2
    width = model.num_key_value_heads * model.hidden_size // model.num_attention_heads
    cache = int(2 * model.num_hidden_layers * len(samples) * columns * width * 4)
    return Decoded(best[0], best[1], steps, min(at_once[1:]), 4 * run.parameters, cache, copied())


def copied() -> float:
    """Bytes per second that a copy reads, of a buffer larger than every cache."""
    source = np.ones(1 << 26, dtype=np.float32)
    target = np.ones_like(source)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return source.nbytes / min(times)


TABLES: dict[str, Callable[[], str]] = {"memory": memory, "ranks": ranks, "decoding": decoding}


if __name__ == "__main__":
    main()
