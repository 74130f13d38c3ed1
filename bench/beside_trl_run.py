"""Train a few steps with rlexp or with TRL's DPOTrainer, each in a process of its own, on the same model and rows.

Both are timed from the end of one optimizer step to the end of the next, when the device has finished.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from rlexp.launch.joining import RankSpec

LR, BETA = 1e-6, 0.1
LOGPS = ("logps/chosen", "logps/rejected")
FIRST = ("loss", *LOGPS)  # what is compared of the first step
OUR_WEIGHTS = "bfloat16; float32 masters, AdamW in float32"
ON_CPU = "float32, AdamW in float32"
Lengths = tuple[int, int, int]  # tokens of a prompt, and of its two answers
Result = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """A trainer with its options. `needs` are modules that must be installed."""

    trainer: str
    name: str
    words: tuple[str, ...] = ()  # overrides of rlexp
    liger: bool = False
    attention: str = "sdpa"
    dtype: str = "float32"
    needs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.trainer}, {self.name}"

    @property
    def half_state(self) -> bool:
        """Whether the optimizer's state is in bfloat16, so that the numbers are not those of the others."""
        return self.dtype == "bfloat16"

    def weights(self, device: str) -> str:
        if self.half_state:
            return "bfloat16, AdamW in bfloat16"
        if device == "cpu":
            return ON_CPU
        return OUR_WEIGHTS if self.trainer == "rlexp" else "float32 under autocast, AdamW in float32"


@dataclass(frozen=True)
class Work:
    """What both trainers are given."""

    folder: str  # of the model
    device: str
    lengths: tuple[Lengths, ...]  # of the pairs, again and again
    pairs: int  # of a step
    micro: int
    warm_up: int
    steps: int  # that are timed
    vocabulary: int
    checkpointing: str = "false"  # as memory.checkpointing says it; TRL's is on or off

    @property
    def longest(self) -> int:
        return max(prompt + max(answers) for prompt, *answers in self.lengths)

    @property
    def drawn(self) -> list[Lengths]:
        count = (self.warm_up + self.steps) * self.pairs
        return [self.lengths[place % len(self.lengths)] for place in range(count)]

    @property
    def tokens(self) -> float:
        """Tokens of a timed step on the mean, without padding."""
        timed = self.drawn[self.warm_up * self.pairs :]
        return sum(2 * prompt + chosen + rejected for prompt, chosen, rejected in timed) / self.steps

    def rows(self) -> list[dict[str, list[int]]]:
        """Draw random tokens. Products of equal numbers would take a GPU less power, and so less time."""
        draw = np.random.default_rng(0)
        names = ("prompt_ids", "chosen_ids", "rejected_ids")
        return [{name: draw.integers(0, self.vocabulary, length).tolist()
                 for name, length in zip(names, lengths, strict=True)} for lengths in self.drawn]  # fmt: skip


def missing(variant: Variant) -> str | None:
    """Say what a variant lacks on this machine; None if nothing."""
    lacking = [name for name in variant.needs if not _there(name)]
    return f"not installed: {', '.join(lacking)}" if lacking else None


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def run_variant(spec: RankSpec, variant: Variant, work: Work, profiled: bool = False) -> Result:
    """Train with this variant. The result says the seconds of each timed step, the peak and the first step's values."""
    import torch

    torch.set_num_threads(1)
    if work.device == "cuda":
        torch.cuda.set_device(0)
    watch = Watch(work, profiled=profiled)
    more = (_ours if variant.trainer == "rlexp" else _theirs)(spec, variant, work, watch)
    if work.device == "cpu":
        more["peak"] = None
    return {"seconds": watch.seconds, "kinds": watch.kinds, **more}


class Watch:
    """Takes the time at the end of each step, and looks into the last one on request."""

    def __init__(self, work: Work, *, profiled: bool) -> None:
        self.work, self.profiled = work, profiled
        self.ends: list[float] = []
        self.kinds: dict[str, tuple[float, int]] = {}
        self._look = contextlib.ExitStack()

    @property
    def seconds(self) -> list[float]:
        timed = self.ends[self.work.warm_up - 1 :]
        return [later - earlier for earlier, later in itertools.pairwise(timed)]

    def ended(self) -> None:
        import torch

        if self.work.device == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        left = self.work.warm_up + self.work.steps - len(self.ends)
        if self.profiled and left == 1:
            self._begin()
        elif self.profiled and left == 0:
            self._look.close()

    def _begin(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        from bench.kernel_kinds import by_kind

        gpu = self.work.device == "cuda" and torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
        looking = profile(activities=activities)
        self._look.callback(lambda: self.kinds.update(by_kind(looking.key_averages(), gpu=gpu)))
        self._look.enter_context(looking)


# ---- rlexp ----


def _ours(spec: RankSpec, variant: Variant, work: Work, watch: Watch) -> Result:
    from bench.given import GivenExamples
    from rlexp.launch.joining import join, launch_on, leave_world
    from rlexp.training.train.build import build
    from rlexp.training.train.step import train_step

    cfg = composed(variant, work)
    join(spec, launch_on(work.device, 600.0))
    task = build(cfg, around=GivenExamples(functools.partial(_given, work)))
    first: dict[str, float] = {}
    peak = 0.0
    for step in range(1, work.warm_up + work.steps + 1):
        row = train_step(task, step)
        first = first or row
        peak = max(peak, row["memory/peak_bytes"])
        watch.ended()
    kernel = task.run.kernel.name
    task.close()
    leave_world()
    return {"first": {name: first[f"train/{name}"] for name in FIRST}, "attention": kernel,
            "tflops": row["train/tflops"], "peak": peak}  # fmt: skip


def composed(variant: Variant, work: Work) -> Any:
    from rlexp.config.load import compose_config

    return compose_config([
        f"launch.device={work.device}", "launch.nproc=1", "logger=none", "engine=torch", "parallel.ring_size=1",
        "model=hf", f"model.path={work.folder}", f"train.precision={'bf16' if work.device == 'cuda' else 'fp32'}",
        f"train.batch_size={work.pairs}", f"train.micro_batch_size={work.micro}", "data=synthetic",
        "data.shuffle=false", f"data.max_length={work.longest}", f"train.max_steps={work.warm_up + work.steps}",
        f"loss.beta={BETA}", f"optim.lr={LR}", "optim.decay=constant", "optim.warmup_steps=0", "optim.weight_decay=0",
        f"memory.checkpointing={work.checkpointing}", *variant.words,
    ])  # fmt: skip


def _given(work: Work, _cfg: Any) -> list[Any]:
    from rlexp.training.types import Example

    def ids(tokens: Sequence[int]) -> Any:
        return np.array(tokens, dtype=np.int32)

    answers = [(ids(row["chosen_ids"]), ids(row["rejected_ids"])) for row in work.rows()]
    return [Example(place, ids(row["prompt_ids"]), both, origin=f"row {place}")
            for place, (row, both) in enumerate(zip(work.rows(), answers, strict=True))]  # fmt: skip


# ---- TRL ----


def _theirs(_spec: RankSpec, variant: Variant, work: Work, watch: Watch) -> Result:
    import tempfile

    import torch
    from transformers import AutoModelForCausalLM, PrinterCallback

    from rlexp.training.model.loading import byte_tokenizer

    model = AutoModelForCausalLM.from_pretrained(
        work.folder, dtype=getattr(torch, variant.dtype), attn_implementation=variant.attention
    )
    with tempfile.TemporaryDirectory(prefix="rlexp-") as folder:
        trainer = _trainer(model, byte_tokenizer(), variant, work, folder)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_stamping(watch))
        trainer.train()
        logged = next(entry for entry in trainer.state.log_history if "logps/chosen" in entry)
    del model
    gc.collect()
    peak = torch.cuda.max_memory_allocated() if work.device == "cuda" else None
    return {"first": {name: float(logged[name]) for name in FIRST}, "attention": variant.attention, "peak": peak}


def _trainer(model: Any, tokenizer: Any, variant: Variant, work: Work, folder: str) -> Any:
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from trl import DPOConfig, DPOTrainer

    class Given(DPOTrainer):
        """A trainer whose rows are tokenized already, and stay in their order."""

        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    gpu = work.device == "cuda"
    arguments = DPOConfig(
        output_dir=folder, use_cpu=not gpu, bf16=gpu, report_to="none", save_strategy="no", disable_tqdm=True,
        logging_first_step=True, seed=0, max_steps=work.warm_up + work.steps, max_length=None,
        per_device_train_batch_size=work.micro, gradient_accumulation_steps=work.pairs // work.micro,
        gradient_checkpointing=work.checkpointing not in ("false", "none"), learning_rate=LR, beta=BETA,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, use_liger_kernel=variant.liger,
    )  # fmt: skip
    return Given(model=model, args=arguments, train_dataset=Dataset.from_list(work.rows()), processing_class=tokenizer)


def _stamping(watch: Watch) -> Any:
    from transformers import TrainerCallback

    class Stamping(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.ended()

    return Stamping()


def summary(result: Result, work: Work) -> tuple[float, float, float, float]:
    """Return the median seconds of a step, the shortest, the longest, and the tokens per second."""
    seconds = result["seconds"]
    median = statistics.median(seconds)
    return median, min(seconds), max(seconds), work.tokens / median
