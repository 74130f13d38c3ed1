"""Time a step in which sequences share their prompts beside one in which each has a copy, on one CPU thread.

    python -m bench.sharing                              print it; a quarter of an hour on a quiet core
    python -m bench.sharing --only group                 one line
    python -m bench.sharing --write docs/measured/sharing.md

Pairs have the lengths of real ones: HH-RLHF's, and SQuALITY's stories with two summaries. TRL's DPOTrainer is timed
beside them where it is installed. `group` is eight answers of 200 tokens to a prompt of 2,000, which are scored and
trained on. Every variant is a process of its own; they take turns, and a ratio is the median over the rounds.

The floor is what the tokens need: a token takes the same operations wherever it stands, but for attention.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.beside_trl import HH
from bench.beside_trl_run import Lengths, Variant, Work, missing, run_variant
from bench.gpu_training import Shape, write_model
from bench.tables import put, signature
from rlexp.launch.joining import ON_CPU, RankSpec, prepare_environment
from rlexp.launch.local import run_ranks

LLAMA = Shape("a Llama of 12 million parameters", 320, 864, 8, 2, 8192, 6)
# Tokens of a story with a question, and of two summaries, as SmolLM2's tokenizer has them: every 50th pair by length.
SQUALITY: tuple[Lengths, ...] = (
    (4847, 606, 524), (6344, 285, 274), (7079, 87, 322), (7341, 165, 328), (7320, 661, 362), (8494, 237, 161),
)  # fmt: skip
PROMPT, ANSWER, SAMPLES = 2000, 200, 8
ROUNDS = 3
SHARED, COPIED = (Variant("rlexp", share, (f"data.share_prefix={share}",)) for share in ("true", "false"))
TRL = Variant("TRL", "sdpa", needs=("trl", "datasets", "accelerate"))


@dataclass(frozen=True)
class Line:
    """What is timed, with the tokens of sequences that have copies over those that share."""

    title: str
    seconds: Callable[[str, str], float]  # of a variant (shared, copied or trl), of a model's folder
    fewer: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sharing", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--only", choices=LINES, nargs="+", default=[*LINES])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--write", type=Path, help="put the table into this page, between its markers")
    options = parser.parse_args()
    prepare_environment(ON_CPU)
    with tempfile.TemporaryDirectory(prefix="rlexp-") as folder:
        write_model(Path(folder), LLAMA, "float32")
        rows = [row for name in options.only for row in rows_of(LINES[name], folder, options.rounds)]
    text = (
        f"{LLAMA.name[0].upper()}{LLAMA.name[1:]}, float32, one CPU thread; medians of {options.rounds} rounds.\n"
        f"{signature('bench.sharing')}\n\n"
        "| | shared, s | copied, s | copied / shared | tokens, copied / shared | TRL / shared |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: |\n" + "\n".join(rows)
    )
    print(text)
    if options.write:
        put(options.write, text, "sharing")


def rows_of(line: Line, folder: str, rounds: int) -> Iterator[str]:
    trl = missing(TRL) is None and "pairs" in line.title
    found: dict[str, list[float]] = {name: [] for name in ("shared", "copied", *(["trl"] if trl else []))}
    for number in range(rounds):
        for name in [*found][:: 1 if number % 2 == 0 else -1]:
            found[name].append(line.seconds(name, folder))
    shared, copied = (statistics.median(found[name]) for name in ("shared", "copied"))
    ratios = [statistics.median(b / a for a, b in zip(found["shared"], found[name], strict=True)) for name in found]
    beside = f"{ratios[2]:.2f}" if trl else "–"
    yield f"| {line.title} | {shared:.2f} | {copied:.2f} | {ratios[1]:.2f} | {line.fewer:.2f} | {beside} |"


# ---- pairs ----


def pairs(title: str, lengths: tuple[Lengths, ...], count: int, micro: int, steps: int) -> Line:
    def seconds(name: str, folder: str) -> float:
        work = Work(folder, "cpu", lengths, count, micro, 1, steps, LLAMA.vocabulary)
        variant = {"shared": SHARED, "copied": COPIED, "trl": TRL}[name]
        (result,) = run_ranks(run_variant, 1, (variant, work), preload=("torch",), timeout=1800.0)
        return statistics.median(result["seconds"])

    together = sum(prompt + 1 + chosen + rejected for prompt, chosen, rejected in lengths)  # a copy of its last token
    apart = sum(2 * prompt + chosen + rejected for prompt, chosen, rejected in lengths)
    return Line(f"pairs of {title}, {count} a step in micro-batches of {micro}", seconds, apart / together)


# ---- a group of samples ----


def group(*, trains: bool) -> Line:
    def seconds(name: str, folder: str) -> float:
        (found,) = run_ranks(group_rank, 1, (name, folder), preload=("torch",), timeout=1800.0)
        return float(found[trains])

    together, apart = PROMPT + SAMPLES * (ANSWER + 1), SAMPLES * (PROMPT + ANSWER)
    what = "training on" if trains else "scoring"
    return Line(f"{what} {SAMPLES} samples of {ANSWER} tokens, a prompt of {PROMPT:,}", seconds, apart / together)


def group_rank(spec: RankSpec, name: str, folder: str) -> tuple[float, float]:
    """Return the seconds of scoring a group, and of training on it."""
    import torch

    from bench.given import GivenExamples
    from rlexp.config.load import compose_config
    from rlexp.launch.joining import join, launch_on, leave_world
    from rlexp.training.train.build import build
    from rlexp.training.train.step import train_step

    torch.set_num_threads(1)
    cfg = compose_config([
        "launch.device=cpu", "logger=none", "engine=torch", "parallel.ring_size=1", "model=hf", f"model.path={folder}",
        "loss=sft", f"train.batch_size={SAMPLES}", f"train.micro_batch_size={SAMPLES}", "train.max_steps=4",
        "data.shuffle=false", f"data.max_length={PROMPT + ANSWER}",
        f"data.share_prefix={str(name == 'shared').lower()}",
    ])  # fmt: skip
    join(spec, launch_on("cpu", 600.0))
    task = build(cfg, around=GivenExamples(_group))
    trained, scored = [], []
    for number in range(1, 4):
        began = time.perf_counter()
        train_step(task, number)
        trained.append(time.perf_counter() - began)
        step = task.begin(number)
        began = time.perf_counter()
        with torch.no_grad():
            task.run.engine.forward(step.load(0).shard)
        scored.append(time.perf_counter() - began)
    leave_world()
    return min(scored), min(trained)


def _group(_cfg: Any) -> list[Any]:
    from rlexp.training.types import Example

    draw = np.random.default_rng(0)
    prompt = draw.integers(0, LLAMA.vocabulary, PROMPT).astype(np.int32)
    answers = [draw.integers(0, LLAMA.vocabulary, ANSWER).astype(np.int32) for _ in range(SAMPLES * 4)]
    return [Example(place, prompt, (each,), origin=f"sample {place}") for place, each in enumerate(answers)]


LINES = {
    "hh": pairs("HH-RLHF", HH, 16, 8, 3),
    "squality": pairs("SQuALITY", SQUALITY, 2, 1, 2),
    "scoring": group(trains=False),
    "group": group(trains=True),
}


if __name__ == "__main__":
    main()
