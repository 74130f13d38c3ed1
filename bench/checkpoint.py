"""Measure the cost of checkpoints, engines and the start, each relative to a yardstick of the same run.

    python -m bench.checkpoint                      print the tables; 7 minutes on 2 idle cores, 15 on busy ones
    python -m bench.checkpoint --write docs/measured/benchmarks.md
    python -m bench.checkpoint --only saving        or steps, or start

Saving: seconds that training stands still, and seconds until the checkpoint is on disk and has its name, beside
`torch.save` of the same state and torch's own asynchronous checkpoint. The floors: one memcpy of the same bytes, and
one plain write of them with fsync. Steps: every engine over DistributedDataParallel with the same model, optimizer
and micro-batches. Start: from the command to the first row. Where there is a GPU for every rank, saving and steps
run there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bench.measured import print_tables
from rlexp.base.files import sync
from rlexp.config.hardware import visible_gpus
from rlexp.config.load import compose_config
from rlexp.config.schema import Config, OptimConfig
from rlexp.launch.joining import ON_CPU, RankSpec, join, prepare_environment
from rlexp.launch.local import PRELOAD, run_ranks
from rlexp.run_files import checkpoint_folder
from rlexp.training.checkpoint.restore import Reader
from rlexp.training.checkpoint.saver import Saver, share
from rlexp.training.engine.base import MOMENTS, set_lr
from rlexp.training.engine.plain import PlainEngine
from rlexp.training.model.policy import Policy
from rlexp.training.train.build import build
from rlexp.training.train.parts import TrainingRun
from rlexp.training.train.step import train_step
from rlexp.training.train.surroundings import UNPROBED
from rlexp.training.train.task import Task
from rlexp.training.types import Shard, TokenLogps
from rlexp.training.world.groups import World

TIMEOUT = 400.0  # seconds that any one start of ranks, or any one process, may take
BASE = ("logger=none", "train.precision=fp32", "parallel=ring1")

LARGE = ("model.hidden_size=768", "model.intermediate_size=2048", "model.layers=17")  # 106 million parameters
SAVES = 4  # the first, and those after it
BUFFER = 1 << 26  # elements of what is copied and written for the floors; beyond every cache
SAVING = [(engine, ranks) for engine in ("torch", "zero1") for ranks in (1, 2)]

SMALL: tuple[str, ...] = ()  # model=tiny as it is
MIDDLE = ("model.hidden_size=384", "model.intermediate_size=1024", "model.layers=6")
SIZES = ((SMALL, 8, 25), (MIDDLE, 4, 9))  # the model, samples per step, steps measured
RANKS, MICRO, WARM_UP = 2, 1, 2
DDP = "DistributedDataParallel"
ENGINES: dict[str, tuple[str, ...]] = {
    "torch": ("engine=torch",),
    "zero0": ("engine=zero0",),
    "zero1": ("engine=zero1",),
    "zero2": ("engine=zero2",),
    "zero3": ("engine=zero3",),
    "zero1, optimizer offloaded": ("engine=zero1", "engine.offload=optimizer"),
    "zero3, all offloaded": ("engine=zero3", "engine.offload=all"),
    "fsdp2": ("engine=fsdp2",),
}
AGREE = 1e-3  # relative: by how much the losses of two engines may differ before the comparison means nothing

COMMAND = ("parallel=ring8", "launch.device=cpu", "logger=none", "train.max_steps=1", "checkpoint.export=false")
STARTS = 3
STARTED: dict[str, tuple[str, ...]] = {
    "torch": ("engine=torch",),
    "zero1 (`engine=auto` on a CPU)": (),
    "zero3": ("engine=zero3",),
}


def main() -> None:
    prepare_environment(ON_CPU)
    print_tables("bench.checkpoint", __doc__, TABLES)


def configured(ranks: int, *overrides: str) -> Config:
    device = "cuda" if visible_gpus() >= ranks else "cpu"
    return compose_config([*BASE, f"launch.device={device}", f"launch.nproc={ranks}", *overrides])


def on_ranks(target: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """Run a function on all ranks and return rank 0's result."""
    device = "cuda" if visible_gpus() >= ranks else "cpu"
    return run_ranks(target, ranks, args, device=device, preload=(*PRELOAD, "deepspeed"), timeout=TIMEOUT)[0]


def join_world(spec: RankSpec, cfg: Config) -> None:
    join(spec, dataclasses.replace(cfg.launch, timeout_seconds=TIMEOUT))


def slowest(values: Iterable[float]) -> list[float]:
    """The largest of each value over the ranks. A collective call."""
    largest = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    by_value: list[float] = largest.tolist()
    return by_value


# ---- saving ----


@dataclass(frozen=True)
class Save:
    """Seconds of one save, on the slowest rank."""

    still: float  # training stands still
    done: float  # until all is on disk
    held: float  # the longest that the main thread was held up meanwhile
    cpu: float  # of a core, taken meanwhile


@dataclass(frozen=True)
class Saved:
    """All saves of one engine on one number of ranks."""

    parameters: int
    memcpy: float
    plain_write: list[Save]
    by: dict[str, list[Save]]


OURS, LITTLE = "rlexp", "rlexp, a quarter of the memory"
WHOLE, ASYNC = "`torch.save`, fsync", "torch's async checkpoint"


def saving() -> str:
    lines = [
        "| engine, ranks | what | paused: first | later | on disk after | GB/s | held up | core-seconds |",
        "| --- | --- |" + " ---: |" * 6,
    ]
    parameters = 0
    for engine, ranks in SAVING:
        with tempfile.TemporaryDirectory(prefix="rlexp-bench-") as place:
            size = f"train.batch_size={ranks}"
            saved: Saved = on_ranks(save_rank, ranks, configured(ranks, *LARGE, f"engine={engine}", size), place)
        lines += rows_of(f"{engine}, {ranks}", saved)
        parameters = saved.parameters
    held = 4 * (1 + len(MOMENTS)) * parameters
    return (
        f"### Saving\n\nWeights and two moments of {parameters / 1e6:.0f} million parameters: {held / 1e9:.2f} GB, "
        f"shared out evenly among the ranks.\nSeconds of the slowest rank: one first save, and the best of "
        f"{SAVES - 1} later ones; in brackets, over `torch.save` in the same run.\n`torch.save` writes the whole state "
        f'from rank 0, and training pauses until it is on disk. "Held up" is the longest time that\nthe main '
        f'thread did not run while files were written in the background; "core-seconds" is the CPU time of that '
        f"writing, on\nthe busiest rank.\n\n" + "\n".join(lines)
    )


def rows_of(case: str, saved: Saved) -> list[str]:
    size = 4e-9 * (1 + len(MOMENTS)) * saved.parameters
    yardstick = best(save.done for save in saved.by[WHOLE][1:])

    def beside(seconds: float) -> str:
        return f"{seconds:.2f} ({seconds / yardstick:.2f})"

    write = best(save.done for save in saved.plain_write)
    lines = [
        f"| {case} | floor: memcpy; plain write, fsync | | {beside(saved.memcpy)} | {beside(write)} "
        f"| {size / write:.2f} | | |"
    ]
    for name, saves in saved.by.items():
        later = saves[1:]
        done = best(save.done for save in later)
        held, cpu = best(save.held for save in later), best(save.cpu for save in later)
        lines.append(
            f"| | {name} | {saves[0].still:.2f} | {beside(best(save.still for save in later))} | {beside(done)} "
            f"| {size / done:.2f} | " + ("| |" if name == WHOLE else f"{held:.2f} | {cpu:.1f} |")
        )
    return lines


def best(values: Iterable[float]) -> float:
    """The shortest time: other work on the machine can only add to it."""
    return min(values)


def save_rank(spec: RankSpec, cfg: Config, work: str) -> Saved | None:
    """Save in each way in turn, so that all use the same disk under the same load."""
    join_world(spec, cfg)
    task = build(cfg, around=UNPROBED)
    run = task.run
    train_step(task, 1)  # moments that are no pages of zeros
    bench = SaveBench(run, Path(work))
    bench.wait_until_prepared()
    memcpy = slowest([bench.memcpy()])[0]
    ways = {OURS: bench.ours, LITTLE: bench.with_little, WHOLE: bench.whole, ASYNC: bench.asynchronous}
    saves: dict[str, list[Save]] = {name: [] for name in ways}
    plain = []
    for _ in range(SAVES):
        for name, way in ways.items():
            saves[name].append(way())
        plain.append(bench.plain())
    bench.stager.close()
    dist.barrier()
    return Saved(run.parameters, memcpy, plain[1:], saves) if spec.rank == 0 else None


class SaveBench:
    """One engine's state, saved in several ways. All methods are collective calls."""

    def __init__(self, run: TrainingRun, work: Path) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.run, self.work, self.first = run, work, run.world.rank == 0
        shapes = {name: list(shape) for name, shape in run.engine.shapes().items()}
        self.saver = Saver(run.engine, run.world, work, {"parameters": shapes})
        self.saver.prepare()  # as a run does after its first step
        self.step = 0
        self.state: dict[str, Tensor] = {}  # whole, on rank 0, read from the first checkpoint of ours
        fragments = share(run.engine, run.world.rank, run.world.size)
        self.mine = {f"{run.world.rank}/{kind}/{f.name}": t for f in fragments for kind, t in f.tensors()}
        self.elements = sum(tensor.numel() for tensor in self.mine.values())
        quarter = sum(tensor.nbytes for tensor in self.mine.values()) // 4
        self.little = Saver(run.engine, run.world, work, {"parameters": shapes}, quarter)
        self.little.prepare()
        self.buffer = np.random.default_rng(run.world.rank).random(BUFFER, dtype=np.float32)
        gpu = run.device.type == "cuda"
        self.stager = DefaultStager(StagingOptions(gpu, False, False, gpu))  # the memory is kept, as ours is
        self.group: Any = dist.new_group(backend="gloo")  # its thread has collectives of its own

    def wait_until_prepared(self) -> None:
        """Wait; a real run would take steps meanwhile."""
        for saver in (self.saver, self.little):
            assert saver._preparing is not None
            saver._preparing.join(TIMEOUT)

    def memcpy(self) -> float:
        """The floor of the pause: copy this rank's bytes to memory that is already allocated."""
        target = np.ones_like(self.buffer)
        times = []
        for _ in range(5):
            dist.barrier()
            began = time.perf_counter()
            np.copyto(target, self.buffer)
            times.append(time.perf_counter() - began)
        return best(times) * self.elements / BUFFER

    def observed(
        self, begin: Callable[[], None], writing: Callable[[], bool], finish: Callable[[], None], left: Path | None
    ) -> Save:
        """Time a save and remove `left`, its files."""
        if self.first:
            os.sync()  # what was written before is no matter of this save
        dist.barrier()
        began = time.perf_counter()
        begin()
        still = time.perf_counter() - began
        taken, last, held = time.process_time(), time.perf_counter(), 0.0
        while writing():
            time.sleep(0.002)
            last, before = time.perf_counter(), last
            held = max(held, last - before)
        finish()
        done, cpu = time.perf_counter() - began, time.process_time() - taken
        save = Save(*slowest([still, done, held, cpu]))
        if self.first and left:
            if left.parent.name == checkpoint_folder.FOLDER and not self.state:
                self.state = whole_state(left)
            shutil.rmtree(left, ignore_errors=True)
        dist.barrier()
        return save

    def ours(self) -> Save:
        return self.by(self.saver)

    def with_little(self) -> Save:
        """With memory for a quarter of the state: `checkpoint.host_memory_gib`."""
        return self.by(self.little)

    def by(self, saver: Saver) -> Save:
        self.step += 1

        def finish() -> None:
            failed = saver.settle()
            if failed:
                raise RuntimeError(failed)

        return self.observed(
            lambda: saver.begin(self.step, describe),
            lambda: saver.writing,
            finish,
            checkpoint_folder.folder_of(self.work, self.step),
        )

    def whole(self) -> Save:
        """The usual way: rank 0 writes, and all ranks wait."""
        left = self.work / "whole"

        def begin() -> None:
            if self.first:
                left.mkdir()
                torch.save(self.state, left / "state.pt")
                sync(left / "state.pt")
            dist.barrier()

        return self.observed(begin, lambda: False, lambda: None, left)

    def plain(self) -> Save:
        """The floor of writing: each rank's bytes from a buffer, over a file that stays. A new file needs new pages,
        which alone may take longer than the writing if the host has reclaimed them."""
        place = self.work / "plain"

        def begin() -> None:
            place.mkdir(exist_ok=True)
            path = place / str(self.run.world.rank)
            path.touch()
            bytes_ = self.buffer.data.cast("B")
            with path.open("r+b", buffering=0) as file:
                missing = self.elements * self.buffer.itemsize
                while missing:
                    missing -= file.write(bytes_[:missing]) or 0
            sync(path)

        return self.observed(begin, lambda: False, lambda: None, None)

    def asynchronous(self) -> Save:
        """torch.distributed.checkpoint, where each rank writes its own part: nothing is deduplicated or resharded."""
        from torch.distributed.checkpoint import async_save

        left, futures = self.work / "async", list[Future[Any]]()

        def begin() -> None:
            begun = async_save(self.mine, checkpoint_id=left, process_group=self.group, async_stager=self.stager)
            assert isinstance(begun, Future)
            futures.append(begun)

        return self.observed(begin, lambda: not futures[0].done(), lambda: futures[0].result(), left)


def describe(place: Path) -> list[Path]:
    """Write empty stand-ins for the files beside the state, which take only a few kilobytes."""
    (place / checkpoint_folder.MODEL).mkdir(exist_ok=True)
    (place / checkpoint_folder.POSITION).write_text("{}", encoding="utf-8")
    (place / checkpoint_folder.METRICS).write_text("", encoding="utf-8")
    return [place / checkpoint_folder.POSITION, place / checkpoint_folder.METRICS]


def whole_state(checkpoint: Path) -> dict[str, Tensor]:
    reader = Reader(checkpoint, checkpoint_folder.check_sizes(checkpoint))
    return {
        f"{kind}/{name}": reader.whole(kind, name).clone() for kind in ("weight", *MOMENTS) for name in reader.shapes
    }


# ---- steps ----


class DDPEngine(PlainEngine):
    """The yardstick without rlexp's engines: DDP, torch's own clipping, the same optimizer."""

    name = DDP

    def __init__(
        self, policy: Policy, optim: OptimConfig, world: World, dtype: torch.dtype, micro_batches: int
    ) -> None:
        super().__init__(policy, optim, world, dtype)
        self.module = DistributedDataParallel(policy)
        self.micro_batches, self.passed = micro_batches, 0

    def forward(self, shard: Shard) -> TokenLogps:
        """Reduce gradients with the last micro-batch only, which DDP must be told in the forward pass."""
        self.passed += 1
        with self.module.no_sync() if self.passed % self.micro_batches else contextlib.nullcontext():
            logps: TokenLogps = self.module(shard)
        return logps

    def backward(self, loss: Tensor, *, last: bool) -> None:
        assert last == (self.passed % self.micro_batches == 0)
        loss.backward()

    def grad_norm(self) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.max_grad_norm))

    def step(self, lr: float) -> None:
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1


@dataclass(frozen=True)
class Steps:
    parameters: int
    seconds: dict[str, list[float]]  # of the slowest rank, by engine


def steps() -> str:
    models: list[Steps] = []
    for model, batch, repeats in SIZES:
        sizes = (f"train.batch_size={batch}", f"train.micro_batch_size={MICRO}")
        configs = {name: configured(RANKS, *model, *sizes, *overrides) for name, overrides in ENGINES.items()}
        models.append(on_ranks(step_rank, RANKS, configs, repeats))
    heads = " | ".join(f"{size.parameters / 1e6:.2g} million" for size in models)
    base = " | ".join(f"1 ({best(size.seconds[DDP]) * 1e3:.0f} ms)" for size in models)
    lines = [f"| engine | {heads} |", "| --- |" + " ---: |" * len(models), f"| {DDP} | {base} |"]
    lines += [f"| {name} | {' | '.join(ratio(size, name) for size in models)} |" for name in ENGINES]
    counts = " and ".join(str(repeats) for _, _, repeats in SIZES)
    batches = " and ".join(str(batch) for _, batch, _ in SIZES)
    return (
        f"### Step time\n\n{RANKS} replicas, ring 1; {batches} pairs per step in micro-batches of {MICRO}; the engines "
        f"take their steps in turn,\non the same samples. Each cell is the best of {counts} steps relative to the best "
        f"of {DDP},\nand in brackets the median of the ratios turn by turn; if the two differ much, other work "
        f"disturbed them.\nA step includes the reference model's forward pass, as in training.\n\n" + "\n".join(lines)
    )


def ratio(size: Steps, name: str) -> str:
    mine, base = size.seconds[name], size.seconds[DDP]
    middle = statistics.median(one / other for one, other in zip(mine, base, strict=True))
    return f"{best(mine) / best(base):.2f} ({middle:.2f})"


def step_rank(spec: RankSpec, configs: dict[str, Config], repeats: int) -> Steps | None:
    join_world(spec, next(iter(configs.values())))
    tasks = {DDP: with_ddp(configs["torch"])} | {name: build(cfg) for name, cfg in configs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(1, WARM_UP + repeats + 1):
        losses = {}
        for name in rotated(list(tasks), turn):
            dist.barrier()
            began = time.perf_counter()
            losses[name] = train_step(tasks[name], turn)["train/loss"]
            taken = slowest([time.perf_counter() - began])[0]
            if turn > WARM_UP:
                seconds[name].append(taken)
        apart = max(losses.values()) / min(losses.values()) - 1
        if not apart < AGREE:
            raise RuntimeError(f"step {turn}: the engines' losses differ by {apart:.1e}: {losses}")
    dist.barrier()
    return Steps(tasks[DDP].run.parameters, seconds) if spec.rank == 0 else None


def with_ddp(cfg: Config) -> Task:
    task = build(cfg, around=UNPROBED)
    engine = DDPEngine(task.run.engine.policy, cfg.optim, task.run.world, torch.float32, cfg.train.grad_acc or 1)
    task.run = dataclasses.replace(task.run, engine=engine)
    return task


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Rotate the order of the engines, so that none always follows the same one."""
    at = turn % len(names)
    return [*names[at:], *names[:at]]


# ---- start ----


def start() -> str:
    totals: dict[str, list[float]] = {name: [] for name in STARTED}
    imports: dict[str, list[float]] = {name: [] for name in STARTED}
    for _ in range(STARTS):
        for name, overrides in STARTED.items():
            modules = ["rlexp.__main__", "rlexp.run.job", *PRELOAD, *(["deepspeed"] if name != "torch" else [])]
            totals[name].append(seconds_to_first_row(overrides))
            imports[name].append(seconds_to_import(modules))
    lines = ["| engine | first row: best | median | all runs | imports alone |", "| --- |" + " ---: |" * 4]
    for name, times in totals.items():
        runs = ", ".join(f"{each:.1f}" for each in sorted(times))
        middle, alone = statistics.median(times), best(imports[name])
        lines.append(f"| {name} | {best(times):.1f} s | {middle:.1f} s | {runs} | {alone:.1f} s |")
    command = " ".join(("python -m rlexp", *COMMAND))
    return (
        f"### Start\n\nFrom `{command}` to the\nfirst row in `metrics.jsonl`: 8 ranks, {STARTS} runs. "
        f'"Imports alone" is the best of\nas many processes that only import the modules of launcher and ranks. '
        f"The aim is 15 s on 2 cores.\n\n" + "\n".join(lines)
    )


def seconds_to_first_row(overrides: Sequence[str]) -> float:
    with tempfile.TemporaryDirectory(prefix="rlexp-bench-") as work:
        rows, log = Path(work) / "run" / "metrics.jsonl", Path(work) / "log"
        with log.open("wb") as output:
            command = [sys.executable, "-m", "rlexp", *COMMAND, *overrides, f"hydra.run.dir={rows.parent}"]
            began = time.perf_counter()
            process = subprocess.Popen(command, cwd=work, stdout=output, stderr=subprocess.STDOUT)
            try:
                while not (rows.exists() and rows.stat().st_size):
                    if process.poll() is not None or time.perf_counter() - began > TIMEOUT:
                        raise RuntimeError(f"no row after {time.perf_counter() - began:.0f} s: {log.read_text()}")
                    time.sleep(0.01)
                taken = time.perf_counter() - began
                process.wait(TIMEOUT)
            finally:
                if process.poll() is None:
                    process.terminate()  # the launcher ends its ranks, or they end without it
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(30)
                    process.kill()
                process.wait(TIMEOUT)
    return taken


def seconds_to_import(modules: Sequence[str]) -> float:
    began = time.perf_counter()
    command = [sys.executable, "-c", f"import {', '.join(modules)}"]
    subprocess.run(command, check=True, timeout=TIMEOUT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


TABLES: dict[str, Callable[[], str]] = {"saving": saving, "steps": steps, "start": start}


if __name__ == "__main__":
    main()
