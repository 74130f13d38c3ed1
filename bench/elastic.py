"""Time a step on 8 ranks with a width for every sequence beside every fixed ring: on short pairs, on long ones, and on
both.

    python -m bench.elastic                             print the tables; an hour on two cores
    python -m bench.elastic --only alone                or wall, or estimate
    python -m bench.elastic --only alone --write docs/measured/elastic.md

`alone`     Each rank of a step runs alone on one core: its part of every pack, forward and backward, with the others'
            keys made up while the clock is stopped. A layout's time is that of its slowest rank. What it sends is
            counted apart, and takes no time.
`wall`      Eight real ranks on two cores take turns with their steps: so this is the work of all ranks and not their
            balance.
`estimate`  What the dealer reckons for 8 and 64 H100 and a model of 8 billion parameters.

The floor of a step is the mean of its ranks, if none waits and nothing is sent.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.beside_trl import HH
from bench.dealing import LLAMA, Lengths, examples_of
from bench.gpu_training import write_model
from bench.sharing import SQUALITY
from bench.tables import put, signature
from rlexp.config.checks.layout import choose, heads_in
from rlexp.config.load import compose_config
from rlexp.config.schema import Config, Device, with_values
from rlexp.config.schema.models import Precision
from rlexp.launch.joining import ON_CPU, RankSpec, prepare_environment
from rlexp.launch.local import run_ranks

RANKS, ROUNDS, PAIRS = 8, 3, 10
SHAPE = replace(LLAMA, name="a Llama with two layers of 320 channels", layers=2)
SHORT = tuple(HH[place % len(HH)] for place in range(64))


def tokens(pairs: Lengths) -> int:
    return sum(map(sum, pairs))


def half_each(long: tuple[int, ...]) -> Lengths:
    """One long pair, and short ones with about as many tokens."""
    count = next(number for number in range(len(SHORT)) if tokens(SHORT[: number + 1]) >= sum(long))
    return (long, *SHORT[:count])


SETS: dict[str, Lengths] = {
    "HH": SHORT,
    "SQuALITY": [SQUALITY[place % len(SQUALITY)] for place in range(RANKS)],
    "the mix": half_each(SQUALITY[0]),
}
FIXED = {
    f"rings of {size}": (f"parallel.ring_size={size}", "parallel.cut=all", "train.micro_batch_size=auto")
    for size in (1, 2, 4, 8)
}
WAYS = FIXED | {"elastic": ("parallel=elastic", "parallel.cut=auto")}
# Llama 3.1 8B, as its config.json describes it.
EIGHT_B = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096,
           "num_hidden_layers": 32, "vocab_size": 128256}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.elastic", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--only", choices=[*TABLES], nargs="+", default=[*TABLES])
    parser.add_argument("--sets", choices=[*SETS], nargs="+", default=[*SETS])
    parser.add_argument("--write", type=Path, help="put the tables into this page, between their markers")
    options = parser.parse_args()
    prepare_environment(ON_CPU)
    for title in set(SETS) - set(options.sets):
        del SETS[title]
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="rlexp-") as folder:
            write_model(Path(folder), SHAPE, "float32")
            text = f"{signature('bench.elastic')}\n\n{TABLES[name](folder)}"
        print(text, flush=True)
        if options.write:
            put(options.write, text, name)


def in_all_ways(folder: str, pairs: Lengths) -> dict[str, Config]:
    """Return the configurations to compare."""
    longest = max(prompt + max(answers) for prompt, *answers in pairs)
    said = ["launch.device=cpu", "logger=none", "engine=torch", "model=hf", f"model.path={folder}", "loss=dpo",
            "train.max_steps=99", "data.shuffle=false", f"train.batch_size={len(pairs)}", f"data.max_length={longest}",
            f"launch.nproc={RANKS}"]  # fmt: skip
    return {name: compose_config([*said, *words]) for name, words in WAYS.items()}


# ---- each rank alone ----


@dataclass
class Rank:
    """What a rank took for its parts of a step's packs, the best of several rounds, and what it sent."""

    seconds: float = 0.0
    sent: int = 0


def alone(folder: str) -> str:
    lines = ["| 8 ranks, each alone | slowest rank, s | mean rank, s | sent by a rank, MB | best fixed ring's time / "
             "its time |", "| --- | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for title, pairs in SETS.items():
        (found,) = run_ranks(alone_rank, 1, (in_all_ways(folder, pairs), [*pairs]), preload=("torch",), timeout=7200.0)
        slowest = {name: max(rank.seconds for rank in ranks) for name, ranks in found.items()}
        best = min(slowest[name] for name in FIXED)
        for name, ranks in found.items():
            mean = statistics.mean(rank.seconds for rank in ranks)
            sent = max(rank.sent for rank in ranks) / 1e6
            lines.append(f"| {title}, {name} | {slowest[name]:.2f} | {mean:.2f} | {sent:,.1f} | "
                         f"{best / slowest[name]:.2f} |")  # fmt: skip
    return (
        f"{SHAPE.name[0].upper()}{SHAPE.name[1:]}, float32; {ROUNDS} rounds, the best of each rank and pack.\n\n"
        + "\n".join(lines)
    )


def alone_rank(spec: RankSpec, ways: dict[str, Config], pairs: Lengths) -> dict[str, list[Rank]]:
    import torch

    from bench.given import GivenExamples
    from rlexp.launch.joining import join, launch_on, leave_world
    from rlexp.training.train.build import build

    torch.set_num_threads(1)
    join(spec, launch_on("cpu", 600.0))
    one = with_values(ways["rings of 1"], "parallel", world_size=1, dp_size=1)
    task = build(one, around=GivenExamples(examples_of(pairs)))
    parts = {name: [*shards_of(cfg, task)] for name, cfg in ways.items()}
    taken = {(name, place): (math.inf, 0) for name, shards in parts.items() for place in range(len(shards))}
    for _ in range(ROUNDS):  # all ways in each, so that a slow phase of the machine slows all of them
        for name, place in taken:
            taken[name, place] = min(taken[name, place], passed(task, parts[name][place][1]))
    found = {name: [Rank() for _ in range(RANKS)] for name in ways}
    for (name, place), (seconds, sent) in taken.items():
        rank = found[name][parts[name][place][0]]
        rank.seconds, rank.sent = rank.seconds + seconds, rank.sent + sent
    leave_world()
    return found


def shards_of(cfg: Config, task: Any) -> Iterator[tuple[int, Any]]:
    """Yield every rank's part of each pack of the first step, as a run of this configuration has them."""
    from rlexp.training.dealer.deal import unit_of
    from rlexp.training.dealer.of_run import dealer_of
    from rlexp.training.dealer.packing import pack_examples, shard_pack
    from rlexp.training.train.build import build_layout
    from rlexp.training.world.groups import Ring

    described, examples = task.run.engine.policy.model.config.to_dict(), task.examples.train
    size, heads = cfg.parallel.ring_size, heads_in(described)
    layout, dealer = build_layout(cfg, choose(cfg, heads), described), dealer_of(cfg, heads, cfg.parallel.dp_size)
    dealt = dealer.deal([unit_of(example) for example in examples])
    for replica, (packs, forests) in enumerate(zip(dealt.packs, dealt.forests, strict=True)):
        for places, forest in zip(packs, forests, strict=True):
            pack = pack_examples([examples[place] for place in places], layout.multiple(size), unit=layout.unit(size),
                                 spare=layout.spare(size), share=dealer.share, forest=forest)  # fmt: skip
            for place in range(size):
                ring = Ring(place, tuple(range(size)))
                yield replica * size + place, shard_pack(pack, ring, layout, task.run.kernel, cfg.data.max_length)


def passed(task: Any, shard: Any) -> tuple[float, int]:
    """Return the seconds of a forward and a backward pass, and the bytes that are sent."""
    import torch

    from bench.simulate import Clock, Others, collectives_of

    others = Others(Clock(torch.device("cpu")), torch.Generator().manual_seed(0))
    with collectives_of(others), torch.autograd.set_multithreading_enabled(False):
        others.begin()
        task.run.engine.forward(shard).logps_n.sum().backward()
        others.end()
    return sum(end - begin for begin, end, *_ in others.noted), sum(each[4] or 0 for each in others.noted)


# ---- all ranks together ----


def wall(folder: str) -> str:
    lines = ["| 8 ranks on two cores | tokens/s | elastic / it, median | the middle half of the pairs |",
             "| --- | ---: | ---: | --- |"]  # fmt: skip
    for title, pairs in SETS.items():
        found = run_ranks(wall_rank, RANKS, (in_all_ways(folder, pairs), [*pairs]), preload=("torch",), timeout=7200.0)[
            0
        ]
        for name, seconds in found.items():
            ratios = sorted(theirs / ours for ours, theirs in zip(found["elastic"], seconds, strict=True))
            low, _, high = statistics.quantiles(ratios, n=4)
            lines.append(f"| {title}, {name} | {tokens(pairs) / statistics.median(seconds):,.0f} | "
                         f"{statistics.median(ratios):.2f} | {low:.2f} to {high:.2f} |")  # fmt: skip
    return f"{PAIRS} steps of each, in turn.\n\n" + "\n".join(lines)


def wall_rank(spec: RankSpec, ways: dict[str, Config], pairs: Lengths) -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist

    from bench.given import GivenExamples
    from rlexp.launch.joining import join, launch_on, leave_world
    from rlexp.training.train.build import build
    from rlexp.training.train.step import train_step

    torch.set_num_threads(1)
    join(spec, launch_on("cpu", 1200.0))
    around = GivenExamples(examples_of(pairs))
    tasks = {name: build(cfg, around=around) for name, cfg in ways.items()}
    taken: dict[str, list[float]] = {name: [] for name in tasks}
    for number in range(PAIRS + 1):
        for name in [*tasks][:: 1 if number % 2 == 0 else -1]:
            dist.barrier()
            began = time.perf_counter()
            train_step(tasks[name], 1)
            dist.barrier()
            taken[name].append(time.perf_counter() - began)
    leave_world()
    return {name: seconds[1:] for name, seconds in taken.items()}


# ---- by the dealer's estimate ----


def estimate(folder: str) -> str:
    """One step of 8 HH pairs, or one SQuALITY pair, for each GPU; or one pair of 64,000 tokens for 8 GPUs, with short
    ones of as many tokens."""
    long = tuple(64000 * part // sum(SQUALITY[0]) for part in SQUALITY[0])
    lines = ["| H100 | step | elastic, slowest / mean | best fixed ring | its time / elastic |",
             "| ---: | --- | ---: | ---: | ---: |"]  # fmt: skip
    for ranks in (8, 64):
        steps: dict[str, Lengths] = {
            "HH": [HH[place % len(HH)] for place in range(8 * ranks)],
            "SQuALITY": [SQUALITY[place % len(SQUALITY)] for place in range(ranks)],
            "the mix": [*[long] * (ranks // 8), *(HH[place % len(HH)] for place in range(ranks * 64000 // 8 // 207))],
        }
        for title, pairs in steps.items():
            slowest, mean = estimated(folder, pairs, ranks, RANKS, widths=True)  # each node of 8 GPUs is a ring
            fixed = {size: estimated(folder, pairs, ranks, size, widths=False)[0] for size in (1, 2, 4, 8)}
            best = min(fixed, key=lambda size: fixed[size])
            lines.append(f"| {ranks} | {title}, {tokens(pairs):,} tokens | {slowest / mean:.3f} | {best} | "
                         f"{fixed[best] / slowest:.2f} |")  # fmt: skip
    return "\n".join(lines)


def estimated(folder: str, pairs: Lengths, ranks: int, size: int, *, widths: bool) -> tuple[float, float]:
    """Return the estimate of a step for the slowest rank and for the mean one, with `widths` or on rings that cut all
    alike: in pairs of a query and a key of a layer."""
    from rlexp.training.dealer.deal import unit_of
    from rlexp.training.dealer.of_run import costs_of, dealer_of
    from rlexp.training.dealer.packing import pack_examples
    from rlexp.training.ring.widths import deal, even

    cfg = in_all_ways(folder, pairs)["elastic"]
    cfg = with_values(with_values(cfg, "train", precision=Precision.bf16), "launch", device=Device.cuda)
    heads, costs = heads_in(EIGHT_B), costs_of(cfg, EIGHT_B)
    assert costs is not None
    cfg = with_values(cfg, "parallel", ring_size=size, world_size=ranks, dp_size=ranks // size)
    dealer, examples = dealer_of(cfg, heads, ranks // size), examples_of(pairs)(cfg)
    dealt = dealer.deal([unit_of(example) for example in examples])
    slowest, mean = [0.0] * (ranks // size), 0.0
    for replica, packs in enumerate(dealt.packs):
        for places, forest in zip(packs, dealt.forests[replica], strict=True):
            segments = pack_examples(
                [examples[place] for place in places], 1, share=dealer.share, forest=forest
            ).segments
            made = deal(segments, size, costs) if widths else even(segments, size, costs)
            slowest[replica] += made.slowest
            mean += made.mean * size / ranks
    return max(slowest), mean


TABLES = {"alone": alone, "wall": wall, "estimate": estimate}


if __name__ == "__main__":
    main()
