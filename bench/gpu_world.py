"""Every path of a training step, on one world of four ranks, beside one process on the CPU in float64.

The ranks start once, and train one configuration after the other. Where there are four GPUs each rank has one, and NCCL
carries what they exchange; where there are fewer they share them, and it goes through the host's memory. On CPU ranks,
where all of this is rehearsed, it goes the same way. If a rank fails, the other cases go on in new processes.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.gpu_here import Machine
from bench.gpu_training import Started, has_deepspeed, in_turn, started
from rlexp.base.engine_facts import ENGINES
from rlexp.base.kernel_needs import able, installed
from rlexp.config.explain import explain
from rlexp.config.hardware import gpu_generations
from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import ON_CPU, RankSpec

RANKS, STEPS = 4, 2
RINGS = (1, 2, 4)
COMMON = ("logger=none", "data=synthetic", "data.size=16", "data.eval_size=4", "train.batch_size=8", "optim.lr=1e-3",
          "train.max_steps=4", "launch.timeout_seconds=100")  # fmt: skip
SAMPLED = ("reward.rule=regex", "reward.pattern='[a-z]'", "rollout.batch_size=4",
           "rollout.n_samples=2", "rollout.max_new_tokens=6")  # fmt: skip
# How far the losses may lie from those of float64 on the CPU, and the gradient of the first step, as ‖a − b‖ / ‖b‖.
# Rotary tables are float32 in float64 too, and a GPU's cosine differs from a CPU's in the last bit: measured 3.5e-8 on
# an H100. On CPU ranks the cases come to 2e-15, 2e-7 and 5e-3 of the gradient.
WITHIN = {"fp64": (1e-7, 2e-7), "fp32": (2e-5, 1e-5), "bf16": (1e-2, 3e-2)}
ON_CPU_WITHIN = WITHIN | {"fp64": (1e-12, 1e-12)}
Found = dict[str, Any]  # {"loss", "gradient", "seconds"}, {"bits", "seconds"} or {"failed"}


@dataclass(frozen=True)
class Case:
    name: str  # of a table's row
    words: tuple[str, ...]  # of the run alone
    ring: int
    precision: str
    exact: tuple[str, ...] = ()  # of the run, and of what it is compared with
    short: bool = False  # so that every `make test` rehearses it
    twice: bool = False  # compared with itself, bit by bit
    ranks: int = RANKS  # of its world

    @property
    def column(self) -> str:
        return f"ring {self.ring} × {self.ranks // self.ring}, {self.precision}"

    @property
    def label(self) -> str:
        return f"{self.name}, {self.column}"

    def config(self, on: Machine) -> Config:
        sizes = (f"parallel.ring_size={self.ring}", f"train.precision={self.precision}")
        more = ("launch.deterministic=true",) if self.twice else ()
        return compose_config([*shared(on, self.ranks), *COMMON, *self.exact, *self.words, *sizes, *more])

    @property
    def alone(self) -> Config:
        """What it is compared with: torch's engine in float64, in one process on the CPU."""
        return compose_config(["launch.device=cpu", "launch.nproc=1", *COMMON, *self.exact, "engine=torch",
                               "train.precision=fp64"])  # fmt: skip


def shared(on: Machine, ranks: int = RANKS) -> list[str]:
    """Return the overrides by which these ranks start on this machine."""
    words = [f"launch.device={on.device}", f"launch.nproc={ranks}"]
    if on.device == "cpu":
        return [*words, "launch.collectives=staged"]
    return [*words, f"launch.ranks_per_gpu={-(-ranks // on.gpus)}"]


# ---- the cases ----


def there(engine: str) -> bool:
    return ENGINES[engine].stage is None or has_deepspeed()


def engine_cases(_on: Machine, rings: Sequence[int] = RINGS) -> Iterator[Case]:
    for engine in ENGINES:
        if not there(engine):
            continue
        for ring, precision in itertools.product(rings, ENGINES[engine].precisions):
            short = ring == 2 and precision == "fp32"
            yield Case(f"`{engine}`", (f"engine={engine}",), ring, precision, short=short)


LAYOUTS = {  # by name: the words, and the smallest ring
    "zigzag, direct": (("parallel.layout=zigzag", "parallel.transport=direct"), 2),
    "zigzag, neighbour": (("parallel.layout=zigzag", "parallel.transport=neighbour"), 2),
    "contiguous, direct": (("parallel.layout=contiguous", "parallel.transport=direct"), 2),
    "contiguous, neighbour": (("parallel.layout=contiguous", "parallel.transport=neighbour"), 2),
    "allgather": (("parallel.layout=allgather",), 2),
    "ulysses": (("parallel.layout=ulysses",), 2),
    "hybrid, direct": (("parallel.layout=hybrid", "parallel.ulysses_size=2", "parallel.transport=direct"), 4),
    "hybrid, neighbour": (("parallel.layout=hybrid", "parallel.ulysses_size=2", "parallel.transport=neighbour"), 4),
}
WINDOW = ("model.window=24",)
# Models have heads of 64 or 128, and a part of flash-attn 2 may be built for these alone. Those of model=tiny have 8.
HEADS_OF_64 = ("model.hidden_size=256", "model.heads=4")
SHORT = ("zigzag, direct", "hybrid, neighbour")


def ring_cases(on: Machine, rings: Sequence[int] = RINGS) -> Iterator[Case]:
    """Every layout and transport, over whole sequences and over windows; and every kernel that is installed."""
    for (name, (words, least)), ring in itertools.product(LAYOUTS.items(), rings):
        if ring >= least:
            yield Case(name, words, ring, "fp64", short=ring == RANKS and name in SHORT)
            yield Case(f"{name}, windows", words, ring, "fp64", exact=WINDOW)
    for kernel, ring in itertools.product(kernels(on), longer(rings)):
        for more, name in (((), kernel), (WINDOW, f"{kernel}, windows")):
            words = ("parallel.layout=zigzag", f"parallel.kernel={kernel}")
            yield Case(f"kernel {name}", words, ring, "bf16", exact=(*HEADS_OF_64, *more))
    if on.device == "cuda" and find_spec("ring_flash_attn") and installed("flash_attn"):
        for layout, ring in itertools.product(("zigzag", "allgather"), longer(rings)):
            words = ("parallel.backend=ring_flash_attn", f"parallel.layout={layout}")
            yield Case(f"ring-flash-attn, {layout}", words, ring, "bf16", exact=HEADS_OF_64)


def longer(rings: Sequence[int]) -> list[int]:
    """Return the rings that are more than one rank."""
    return [ring for ring in rings if ring > 1]


def kernels(on: Machine) -> list[str]:
    if on.device == "cpu":
        return ["cpu_flash", "plain"]
    there = able(max(gpu_generations()), 64, deterministic=False)
    return [*filter(installed, there), "plain"]


def option_cases(_on: Machine, rings: Sequence[int] = RINGS) -> Iterator[Case]:
    """What a run may have beside its engine and its ring, and the other kinds of tasks."""
    lora = ("adapter=lora", "adapter.rank=4", "optim.eps=1e-3")
    torch = ("engine=torch",)
    options = {
        "LoRA": (torch, lora),
        "LoRA, `zero3`": (("engine=zero3",), lora),
        "LoRA, `fsdp2`": (("engine=fsdp2",), lora),
        "reference precomputed": ((*torch, "reference=precompute"), ()),
        "reference on the host": ((*torch, "reference.offload=true"), ()),
        "checkpointing": ((*torch, "memory.checkpointing=full"), ()),
        "checkpointing but attention": ((*torch, "memory.checkpointing=attention"), ()),
        "nothing shared": ((*torch, "data.share_prefix=false"), ()),
        "KTO": (torch, ("loss=kto",)),
        "reward model": (torch, ("loss=reward",)),
        "SFT": (torch, ("loss=sft",)),
        "PPO, colocated": (torch, ("loss=ppo", *SAMPLED)),
        "GRPO, colocated": (torch, ("loss=grpo", *SAMPLED)),
    }
    for (name, (words, exact)), ring in itertools.product(options.items(), longer(rings)):
        if "engine=zero3" in words and not there("zero3"):
            continue
        precision = "fp32" if "engine=zero3" in words else "fp64"
        yield Case(name, words, ring, precision, exact=exact)
    for engine in ENGINES:
        if there(engine):
            yield Case(f"`{engine}`", (f"engine={engine}",), max(rings), "bf16", twice=True)


CASES = {"engines": engine_cases, "rings": ring_cases, "options": option_cases}


# ---- running them ----


def world_section(name: str, on: Machine, *, short: bool = False) -> tuple[str, list[str]]:
    """Return the text of this section, and what is wrong in it."""
    cases = [case for case in CASES[name](on) if case.short or not short]
    with tempfile.TemporaryDirectory(prefix="rlexp-") as folder:
        found = run_all(on, cases, Path(folder))
    return table(on, found), [f"{case.label}: {why}" for case, each in found.items() if (why := wrong(on, case, each))]


def run_all(
    on: Machine,
    cases: Sequence[Case],
    folder: Path,
    rank: Callable[..., None] | None = None,
    patience: int | None = None,
) -> dict[Case, Found]:
    """Train all of these. With a `patience`, so many failures one after the other end it."""
    found: dict[Case, Found] = {}
    configs: dict[Case, Config] = {}
    for case in cases:
        try:
            configs[case] = case.config(on)
        except Exception as error:  # a resolver's is wrapped
            found[case] = {"failed": explain(error) or str(error)}
    exact = exactly(configs, folder)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once; equal bits need it
    os.environ["DS_ACCELERATOR"] = on.device  # what has run on the CPU has left its own

    def start(todo: Sequence[Case]) -> Started:
        chosen = [(case, configs[case]) for case in todo]
        return started(rank or train_rank, todo[0].ranks, (chosen, exact), configs[todo[0]].launch, folder)

    found |= in_turn(list(configs), start, lambda case: case.label, patience)
    return {case: found[case] for case in cases}


def exactly(cases: Iterable[Case], folder: Path) -> dict[tuple[str, ...], Path]:
    """Train what the cases are compared with, all in one process; return the files by their words."""
    wanted = {case.exact: case.alone for case in cases if not case.twice}
    files = {words: folder / f"exact{number}.pt" for number, words in enumerate(wanted)}
    if wanted:
        work = [(wanted[words], str(files[words])) for words in wanted]
        ended = started(_exact_rank, 1, (work,), dataclasses.replace(ON_CPU, nproc=1), folder)
        if ended.error is not None:
            raise RuntimeError(f"what the cases are compared with failed: {ended.error}")
    return files


def _exact_rank(spec: RankSpec, work: Sequence[tuple[Config, str]], out: str) -> None:
    import torch

    from rlexp.launch.joining import join, leave_world

    join(spec, work[0][0].launch)
    for cfg, file in work:
        torch.save(stepped(cfg)[:2], file)
        Started.add(out, {})
    leave_world()


def train_rank(
    spec: RankSpec, cases: Sequence[tuple[Case, Config]], exact: dict[tuple[str, ...], Path], out: str
) -> None:
    import torch

    from rlexp.launch.joining import join, leave_world
    from rlexp.training.world.objects import gather_objects

    join(spec, cases[0][1].launch)
    for case, cfg in cases:
        began = time.monotonic()
        mine = bits(cfg) if case.twice else compared(cfg, exact[case.exact])
        result = worst(gather_objects(mine, spec.world_size))
        torch.use_deterministic_algorithms(False)
        if spec.rank == 0:
            Started.add(out, result | {"seconds": round(time.monotonic() - began, 1)})
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the ranks of a GPU share its memory
    leave_world()


def worst(of_ranks: Sequence[Found]) -> Found:
    """Return what the rank that is furthest off has found: an engine may be right on one rank alone."""
    if "bits" in of_ranks[0]:
        return {"bits": all(each["bits"] for each in of_ranks)}
    return {
        name: max((each[name] for each in of_ranks), key=lambda gap: (math.isnan(gap), gap)) for name in of_ranks[0]
    }


def compared(cfg: Config, file: Path) -> Found:
    """Return how far the losses and the first step's gradient lie from the exact ones."""
    import torch

    losses, gradient, _ = stepped(cfg)
    exact_losses, exact_gradient = torch.load(file)
    apart = sum(float((gradient[name] - each).square().sum()) for name, each in exact_gradient.items())
    size = sum(float(each.square().sum()) for each in exact_gradient.values())
    pairs = zip(losses, exact_losses, strict=True)
    return {"loss": max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs), "gradient": math.sqrt(apart / size)}


def bits(cfg: Config) -> Found:
    """Return whether two runs have the same losses and weights, to the last bit."""
    import torch

    one, other = stepped(cfg), stepped(cfg)
    return {"bits": one[0] == other[0] and all(torch.equal(one[2][name], other[2][name]) for name in one[2])}


def stepped(cfg: Config) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Train; return the losses, the first step's whole gradient, and the weights. A collective call."""
    from bench.engines import SpyEngine
    from rlexp.training.train.build import build
    from rlexp.training.train.step import train_step
    from rlexp.training.train.surroundings import UNPROBED

    task = build(cfg, around=UNPROBED)
    spy = SpyEngine(task.run.engine)
    task.run = dataclasses.replace(task.run, engine=spy)
    losses = [train_step(task, step)["train/loss"] for step in range(1, STEPS + 1)]
    weights = {name: weight.detach().cpu().clone() for name, weight in spy.weights(trained=True)}
    task.close()
    return losses, spy.kept[0], weights


# ---- what they say ----


def bounds(on: Machine) -> dict[str, tuple[float, float]]:
    return WITHIN if on.device == "cuda" else ON_CPU_WITHIN


def wrong(on: Machine, case: Case, found: Found) -> str | None:
    if "failed" in found:
        return f"failed: {found['failed']}"
    if case.twice:
        return None if found["bits"] else "two runs differ"
    loss, gradient = bounds(on)[case.precision]
    if not found["loss"] <= loss:
        return f"the loss is {found['loss']:.1e} off, and may be {loss:.0e}"
    if not found["gradient"] <= gradient:
        return f"the gradient is {found['gradient']:.1e} off, and may be {gradient:.0e}"
    return None


def table(on: Machine, found: dict[Case, Found]) -> str:
    compared_ones = {case: each for case, each in found.items() if not case.twice}
    columns = list(dict.fromkeys(case.column for case in sorted(compared_ones, key=_order)))
    lines = [*_about(on, found), "", f"| | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    for name in dict.fromkeys(case.name for case in compared_ones):
        cells = {case.column: _cell(on, case, each) for case, each in compared_ones.items() if case.name == name}
        lines.append(f"| {name} | {' | '.join(cells.get(column, '–') for column in columns)} |")
    again = {case: each for case, each in found.items() if case.twice}
    if again:
        same = [case.name for case, each in again.items() if wrong(on, case, each) is None]
        lines += ["", f"The same bits twice, with `launch.deterministic=true`: {', '.join(same) or 'none'}."]
    lines += [f"\nWrong: {case.label}: {why}." for case, each in again.items() if (why := wrong(on, case, each))]
    return "\n".join(lines)


def _order(case: Case) -> tuple[int, int]:
    return case.ring, list(WITHIN).index(case.precision)


def _cell(on: Machine, case: Case, found: Found) -> str:
    if "failed" in found:
        return "**failed**"
    said = f"{found['gradient']:.0e}"
    return f"**{said}**" if wrong(on, case, found) else said


def _about(on: Machine, found: dict[Case, Found]) -> Iterator[str]:
    carried = "each on a GPU of its own, over NCCL" if on.device == "cuda" and on.gpus >= RANKS else "by `staged`"
    limits = "; ".join(f"{name} {loss:.0e} and {gradient:.0e}" for name, (loss, gradient) in bounds(on).items())
    bad = sum(wrong(on, case, each) is not None for case, each in found.items())
    yield (
        f"{len(found) - bad} of {len(found)} cases are right. {RANKS} ranks {carried}, two AdamW steps of `model=tiny` "
        f"beside one process on the CPU in float64: how far the gradient of the first step lies from it, as ‖a − b‖ / "
        f"‖b‖. Losses and gradient must lie within: {limits}."
    )
