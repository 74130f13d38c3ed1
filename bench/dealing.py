"""Time what the dealer makes of short pairs on a ring of 8, and how evenly two replicas work.

    python -m bench.dealing                             print both tables; a quarter of an hour on two cores
    python -m bench.dealing --write docs/measured/sharing.md

On eight ranks, pairs with HH-RLHF's lengths are trained by a ring of 8 and by eight rings of 1. Nothing is chosen by
hand: each rank of the ring holds whole pairs. Beside it, the ring has one pair at a time.

Two replicas share train batches of 64 answers whose lengths differ. Their work by the dealer's formula is beside the
processor time that each of them takes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.beside_trl import HH
from bench.gpu_training import Shape, write_model
from bench.tables import put, signature
from rlexp.launch.joining import ON_CPU, RankSpec, prepare_environment
from rlexp.launch.local import run_ranks

LLAMA = Shape("a Llama of 12 million parameters", 320, 864, 8, 2, 8192, 6)
RANKS, PAIRS, ANSWERS, UNIT = 8, 64, 64, 4  # UNIT: tokens of an answer of length 1
STEPS, ROUNDS = 1, 3  # after a first step, which is not counted
AUTO, BY_ONE = ("train.micro_batch_size=auto",), ("train.micro_batch_size=1",)

Lengths = Sequence[tuple[int, ...]]  # of each example: its prompt's, and its answers'


@dataclass(frozen=True)
class Steps:
    """What a rank took for its steps, but for the first."""

    tokens: int  # of all ranks
    seconds: float
    processor: float  # seconds
    skew: float  # the busiest replica's work over the mean, by the formula


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.dealing", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--write", type=Path, help="put the tables into this page, between their markers")
    options = parser.parse_args()
    prepare_environment(ON_CPU)
    with tempfile.TemporaryDirectory(prefix="rlexp-") as folder:
        write_model(Path(folder), LLAMA, "float32")
        text = f"{rings(folder, options.rounds)}\n\n{replicas(folder, options.rounds)}"
    text = (
        f"{LLAMA.name[0].upper()}{LLAMA.name[1:]}, float32, one thread a rank.\n{signature('bench.dealing')}\n\n{text}"
    )
    print(text)
    if options.write:
        put(options.write, text, "dealing")


def rings(folder: str, rounds: int) -> str:
    """Compare the rates of a ring of 8 with those of eight rings of 1; they take turns."""
    variants = {"eight rings of 1": ("parallel=ring1", *AUTO), "a ring of 8": ("parallel=ring8", *AUTO),
                "a ring of 8, one pair at a time": ("parallel=ring8", *BY_ONE)}  # fmt: skip
    pairs = [HH[place % len(HH)] for place in range(PAIRS)]
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        for name in [*variants][:: 1 if number % 2 == 0 else -1]:
            (first, *_) = measured(folder, RANKS, pairs, ("loss=dpo", *variants[name]))
            rates[name].append(first.tokens / first.seconds)
    base = rates["eight rings of 1"]
    lines = [f"| {PAIRS} pairs of HH-RLHF's lengths a step, on {RANKS} ranks | tokens/s | of eight rings of 1 |",
             "| --- | ---: | ---: |"]  # fmt: skip
    for name, each in rates.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(each, base, strict=True))
        lines.append(f"| {name} | {statistics.median(each):,.0f} | {ratio:.2f} |")
    return "\n".join(lines)


def replicas(folder: str, rounds: int) -> str:
    """Compare the work of two replicas, by the formula and by the processor."""
    draw = np.random.default_rng(0)
    cases = {
        "1 to 100, uniform": draw.integers(1, 101, ANSWERS * (STEPS + 1)),
        "one in ten of 100, the others of 10": np.where(np.arange(ANSWERS * (STEPS + 1)) % 10 == 0, 100, 10),
    }
    lines = [f"| {ANSWERS} answers a step, lengths (× {UNIT} tokens) | busier / other replica, by the formula | "
             f"by processor time |", "| --- | ---: | ---: |"]  # fmt: skip
    for name, lengths in cases.items():
        answers = [(UNIT, UNIT * int(length)) for length in lengths]
        ratios = []
        for _ in range(rounds):
            found = measured(folder, 2, answers, ("loss=sft", "parallel=ring1", f"data.max_length={102 * UNIT}"))
            spent = sorted(each.processor for each in found)
            ratios.append(spent[1] / spent[0])
            skew = max(each.skew for each in found)
        lines.append(f"| {name} | {skew / (2 - skew):.3f} | {statistics.median(ratios):.3f} |")
    return "\n".join(lines)


def measured(folder: str, ranks: int, lengths: Lengths, words: Sequence[str]) -> list[Steps]:
    said = (f"model.path={folder}", f"launch.nproc={ranks}", *words)
    found: list[Steps] = run_ranks(steps_rank, ranks, (said, [*lengths]), preload=("torch",), timeout=1800.0)
    return found


def steps_rank(spec: RankSpec, words: Sequence[str], lengths: Lengths) -> Steps:
    import torch

    from bench.given import GivenExamples
    from rlexp.config.load import compose_config
    from rlexp.launch.joining import join, launch_on, leave_world
    from rlexp.training.train.build import build
    from rlexp.training.train.step import train_step

    torch.set_num_threads(1)
    cfg = compose_config([
        "launch.device=cpu", "logger=none", "engine=torch", "model=hf", "train.batch_size=64", "train.max_steps=99",
        "data.shuffle=false", "data.max_length=2048", *words,
    ])  # fmt: skip
    join(spec, launch_on("cpu", 600.0))
    task = build(cfg, around=GivenExamples(examples_of(lengths)))
    tokens, seconds, processor, skew = 0, 0.0, 0.0, 1.0
    for number in range(1, STEPS + 2):
        began, spent = time.perf_counter(), time.process_time()
        row = train_step(task, number)
        if number > 1:
            tokens += int(row["train/tokens"])
            seconds += time.perf_counter() - began
            processor += time.process_time() - spent
            skew = max(skew, row["train/replica_skew"])
    leave_world()
    return Steps(tokens, seconds, processor, skew)


def examples_of(lengths: Lengths) -> Callable[..., Any]:
    """Return what makes examples of these lengths, with random tokens."""

    def made(_cfg: Any) -> list[Any]:
        from rlexp.training.types import Example

        draw = np.random.default_rng(0)
        examples = []
        for place, each in enumerate(lengths):
            prompt, *answers = (draw.integers(0, LLAMA.vocabulary, length).astype(np.int32) for length in each)
            examples.append(Example(place, prompt, tuple(answers), origin=f"example {place}", label=True))
        return examples

    return made


if __name__ == "__main__":
    main()
