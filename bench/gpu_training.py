"""Train every engine for a few steps, and compare memory and time with what was predicted.

The model is a Llama of random weights, read from a folder like any other; its width and layers are chosen by the GPU's
memory. Every sequence is as long as `data.max_length`, as in a prediction. On the CPU the bytes of real tensors are
counted in place of the allocator's.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from bench.gpu_foretell import Asked, Foretold, foretell
from bench.gpu_here import GIB, Machine
from bench.gpu_longest import Option, options
from rlexp.base.engine_facts import ENGINES
from rlexp.config.checks.micro_batches import micro_batches
from rlexp.config.elsewhere import compose_elsewhere
from rlexp.config.load import compose_config
from rlexp.config.schema import Config, LaunchConfig
from rlexp.launch.joining import RankSpec

PHASES = ("build", "reference", "forward", "backward", "optimizer")
STEPS = 3  # the first is not timed: kernels are compiled, and collectives connect
HELD = 20  # bytes a parameter of an engine that holds everything, with the reference
SHARE = 0.35  # of the memory, for what is held
LAYERS = range(5, 33)
CLOSE, SMALL = 0.05, 0.25 * GIB  # how far a peak may lie from its prediction: of the peak, or in bytes
PATIENCE = 120.0  # predicted seconds of a step: the longest pair is not tried if it takes longer
T = TypeVar("T")
Result = dict[str, Any]  # {"peaks", "seconds"} or {"failed"}


@dataclass(frozen=True)
class Shape:
    name: str
    width: int
    between: int
    heads: int
    kv_heads: int
    vocabulary: int
    layers: int = 0
    tied: bool = False  # the head is the embedding
    positions: int = 1 << 24

    @property
    def layer(self) -> int:
        """The parameters of a layer, without those of its norms."""
        attention = 2 * self.width**2 * (1 + self.kv_heads / self.heads)
        return int(attention + 3 * self.width * self.between)

    @property
    def ends(self) -> int:
        return 2 * self.vocabulary * self.width

    def config(self, dtype: str) -> dict[str, Any]:
        """Return the content of config.json."""
        return {
            "dtype": dtype,
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.width,
            "intermediate_size": self.between, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.positions, "rope_theta": 500000.0, "tie_word_embeddings": self.tied,
            "vocab_size": self.vocabulary,
        }  # fmt: skip


SHAPES = (
    Shape("Llama 8B", 4096, 14336, 32, 8, 128256),
    Shape("Llama 1B", 2048, 8192, 32, 8, 128256),
    Shape("SmolLM2 135M", 576, 1536, 9, 3, 49152),
)
TINY = Shape("tiny", 64, 176, 8, 2, 512, 3)


def shape_for(memory: int) -> Shape:
    """Return the widest shape of which five layers fit, with as many layers as do."""
    parameters = SHARE * memory / HELD
    for shape in SHAPES:
        layers = int((parameters - shape.ends) / shape.layer)
        if layers >= LAYERS.start:
            return dataclasses.replace(shape, layers=min(layers, LAYERS.stop - 1))
    return dataclasses.replace(SHAPES[-1], layers=LAYERS.start)


@dataclass(frozen=True)
class Trial:
    """Configurations to train on this machine. `small` keeps a rehearsal short."""

    machine: Machine
    shape: Shape
    length: int
    folder: Path  # of config.json

    @staticmethod
    def of(machine: Machine, folder: Path) -> Trial:
        small = machine.device == "cpu"
        shape = TINY if small else shape_for(machine.memory)
        return Trial(machine, shape, 256 if small else 8192, folder).written()

    def written(self) -> Trial:
        """Write the model in bfloat16, as models are published. A count on the CPU draws float32 weights instead."""
        write_model(self.folder, self.shape, "float32" if self.machine.device == "cpu" else "bfloat16")
        return self

    def words(self, option: Option) -> list[str]:
        ring = self.machine.ring
        return [
            "model=hf", f"model.path={self.folder}", "logger=none", "train.precision=bf16", "train.batch_size=2",
            "train.micro_batch_size=1",
            "train.max_steps=10", "data=synthetic", f"data.max_length={self.length}", f"parallel.ring_size={ring}",
            f"launch.nproc={ring}", *option.words,
        ]  # fmt: skip

    def here(self, option: Option, *more: str) -> Config:
        return compose_config([f"launch.device={self.machine.device}", *self.words(option), *more])

    def asked(self, option: Option, *, longest: bool = False) -> Asked:
        gpu = longest or self.machine.device == "cuda"
        cfg = compose_elsewhere([*self.words(option), *self.machine.words]) if gpu else self.here(option)
        return Asked(cfg, gpu=gpu, longest=longest)

    def options(self, engines: Sequence[str]) -> list[Option]:
        """Return the memory options that these engines have, without those whose package is missing."""
        able = [each for each in options(engines) if each.offload in ENGINES[each.engine].offload]
        return [each for each in able if ENGINES[each.engine].stage is None or has_deepspeed()]


def write_model(folder: Path, shape: Shape, dtype: str) -> None:
    """Write a model whose weights repeat a million random numbers: drawing billions would take minutes."""
    import torch
    from safetensors.torch import save_file

    from rlexp.config.schema import HFModelConfig
    from rlexp.training.model.loading import load_config, random_model

    (folder / "config.json").write_text(json.dumps(shape.config(dtype)), encoding="utf-8")
    with torch.device("meta"):
        model = random_model(load_config(HFModelConfig(path=str(folder)), 2), 2)
    drawn = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul(0.02).to(getattr(torch, dtype))
    weights = {}
    for name, weight in model.state_dict().items():
        if shape.tied and name == "lm_head.weight":
            continue
        if weight.dim() == 1:  # of a norm
            weights[name] = torch.ones(weight.shape, dtype=drawn.dtype)
        else:
            times = -(-weight.numel() // len(drawn))
            weights[name] = drawn.repeat(times)[: weight.numel()].view(weight.shape)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def has_deepspeed() -> bool:
    return find_spec("deepspeed") is not None


def training_section(machine: Machine, engines: Sequence[str] | None = None) -> tuple[str, list[str]]:
    """Return the section for these engines, or all, and what is wrong in it."""
    with tempfile.TemporaryDirectory(prefix="rlexp-") as folder:
        trial = Trial.of(machine, Path(folder))
        chosen = trial.options(engines or tuple(ENGINES))
        foretold = dict(zip(chosen, foretell([trial.asked(option) for option in chosen]), strict=True))
        measured = measure_all(trial, {option: trial.here(option) for option in chosen})
        longest, bad = longest_table(trial, engines or tuple(ENGINES))
    lines, wrong = table(chosen, foretold, measured)
    if not has_deepspeed():
        lines += ["", "DeepSpeed is not installed: zero0, zero1, zero2 and zero3 were left out."]
    return "\n".join([*_about(trial), "", *lines, "", *longest]), wrong + bad


def _about(trial: Trial) -> Iterator[str]:
    shape, ring = trial.shape, trial.machine.ring
    total = (shape.ends + shape.layers * shape.layer) / 1e9
    yield (
        f"DPO on {shape.layers} layers of the shape of {shape.name} ({total:.2f} billion parameters, random), bf16, a "
        f"ring of {ring}, two micro-batches of one pair, every sequence {trial.length:,} tokens."
    )
    yield (
        "Predicted, then measured: the peak of each phase in GiB, on rank 0, and the seconds of a step (the shorter of "
        f"the second and the third). A peak counts as right within {CLOSE:.0%} or {SMALL / GIB:g} GiB."
    )


# ---- measuring ----


def measure_all(trial: Trial, configs: dict[Option, Config], steps: int = STEPS) -> dict[Option, Result]:
    """Train all of them, an engine at a time; what fails says why, and the others go on in new processes."""
    results: dict[Option, Result] = {}
    for _, group in itertools.groupby(configs, key=lambda option: option.engine):

        def start(todo: Sequence[Option]) -> Started:
            chosen = [configs[option] for option in todo]
            return started(measure_rank, trial.machine.ring, (chosen, steps), chosen[0].launch, trial.folder)

        results |= in_turn(list(group), start, lambda option: option.key)
    return results


def in_turn(
    todo: Sequence[T],
    start: Callable[[Sequence[T]], Started],
    named: Callable[[T], str],
    patience: int | None = None,
) -> dict[T, Result]:
    """Run all of these in one world of ranks; what fails says why, and those after it run in new processes. With a
    `patience`, so many failures one after the other end it: then the machine is wrong, and not the case."""
    results: dict[T, Result] = {}
    failures = 0
    while todo:
        if failures == patience:
            results |= {each: {"failed": f"not tried, since {patience} cases before it failed"} for each in todo}
            break
        ended = start(todo)
        found = list(ended.results)
        failures = 0 if found else failures
        if ended.error is not None and len(found) < len(todo):
            failures += 1
            found.append({"failed": ended.error})
        for each, result in zip(todo, found, strict=False):
            results[each] = result
            print(f"{named(each)}: {json.dumps(result)}", file=sys.stderr, flush=True)
        todo = todo[len(found) :]
    return results


@dataclass(frozen=True)
class Started:
    """What ranks that were started have said: the results of those cases that ended well, and what stopped them."""

    results: list[Result]
    error: str | None

    @staticmethod
    def add(file: str, result: Result) -> None:
        """On a rank: say a result, so that it counts even if the next case fails."""
        with open(file, "a", encoding="utf-8") as out:
            out.write(json.dumps(result) + "\n")


def started(
    target: Callable[..., None],
    ranks: int,
    args: Sequence[Any],
    launch: LaunchConfig,
    folder: Path,
    timeout: float = 1200.0,
) -> Started:
    """Run `target(place, *args, file)` on ranks, of which each adds its results to the file."""
    from rlexp.launch.joining import prepare_environment
    from rlexp.launch.local import PRELOAD, Interrupted, run_ranks

    prepare_environment(launch)
    file = folder / "results.jsonl"
    file.write_text("", encoding="utf-8")
    error = None
    try:
        run_ranks(
            target, ranks, (*args, str(file)), device=launch.device.value,
            preload=(*PRELOAD, "deepspeed") if has_deepspeed() else PRELOAD, timeout=timeout,
        )  # fmt: skip
    except Interrupted:  # by Ctrl-C: nothing goes on
        raise
    except Exception as failure:
        print(failure, file=sys.stderr, flush=True)
        error = what_failed(str(failure))
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return Started(found, error or (None if found else "the ranks ended without a result"))


def what_failed(text: str) -> str:
    """Return the line of a rank's report that names the error."""
    named = re.search(r"^[\w.]*(?:Error|Exception|Interrupt)\b.*", text, re.MULTILINE)
    return (named[0] if named else next(iter(text.strip().splitlines()), "no reason was given"))[:300]


def measure_rank(spec: RankSpec, configs: Sequence[Config], steps: int, file: str) -> None:
    """Train one configuration after the other; stop early when one leaves memory behind."""
    import torch

    from rlexp.launch.joining import join, leave_world

    launch = configs[0].launch
    join(spec, launch)
    for cfg in configs:
        result = measured(cfg)(cfg, spec.rank, steps)
        if spec.rank == 0:
            Started.add(file, result)
        gc.collect()
        if launch.device.value == "cuda":
            torch.cuda.empty_cache()
        if _leaks(spec.world_size):
            break
    leave_world()


def _leaks(ranks: int) -> bool:
    """Ask whether any rank still holds memory of a GPU. A collective call."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_initialized():
        return False
    held = torch.tensor([torch.cuda.memory_allocated() > SMALL], dtype=torch.float32, device="cuda")
    if ranks > 1:
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return bool(held.item())


def measured(cfg: Config) -> Any:
    return _allocated if cfg.launch.device.value == "cuda" else _counted


def _allocated(cfg: Config, _rank: int, steps: int) -> Result:
    """Build and train; return the allocator's peak of each phase, and the seconds of each step."""
    from bench.given import GivenExamples
    from rlexp.training.metrics.memory import Phases
    from rlexp.training.train.build import build
    from rlexp.training.train.step import train_step
    from rlexp.training.train.surroundings import HERE

    device = HERE.device(cfg)
    told: dict[str, Any] = {}
    phases = Phases(device, lambda **facts: told.update(facts))
    with phases("build"):
        task = build(cfg, phases, around=GivenExamples(_random))
    rows = [train_step(task, step) for step in range(1, steps + 1)]
    task.close()
    return {"peaks": dict(told["peaks"]), "seconds": [row["train/step_seconds"] for row in rows],
            "loss": [row["train/loss"] for row in rows]}  # fmt: skip


def _counted(cfg: Config, rank: int, steps: int) -> Result:
    """Do the same on the CPU, whose resident memory says little, and count the bytes of its tensors in a second run."""
    from rlexp.preflight.predict import Prediction, plan_of
    from rlexp.preflight.rehearsal.log import passes
    from rlexp.preflight.rehearsal.rates import UNTIMED
    from rlexp.preflight.rehearsal.rehearse import count
    from rlexp.training.model.loading import load_config

    result = _allocated(cfg, rank, steps)
    model = load_config(cfg.model, cfg.data.max_length)
    log = count(dataclasses.replace(plan_of(cfg, model, rank, None), gpu=False, rates=UNTIMED))
    peaks = Prediction(passes(log), log.layers, micro_batches(cfg)).peaks
    return {**result, "peaks": {phase: peak.bytes for phase, peak in peaks.items() if phase}}


def _random(cfg: Config) -> list[Any]:
    """Make the longest examples, with random tokens.

    Products of equal numbers take a GPU less power, and so less time.
    """
    import numpy as np

    from bench.given import LONGEST

    drawn = np.random.default_rng(0)

    def like(ids: Any) -> Any:
        return drawn.integers(0, 500, len(ids), dtype=ids.dtype)

    return [dataclasses.replace(each, prompt=like(each.prompt), answers=tuple(map(like, each.answers)))
            for each in LONGEST.examples(cfg).train]  # fmt: skip


# ---- tables ----


def table(
    chosen: Sequence[Option], foretold: dict[Option, Foretold], measured: dict[Option, Result]
) -> tuple[list[str], list[str]]:
    lines = [
        f"| engine | memory options | {' | '.join(PHASES)} | step, s |",
        f"| --- | --- |{' ---: |' * (len(PHASES) + 1)}",
    ]
    wrong: list[str] = []
    gaps: dict[str, float] = {}
    for option in chosen:
        said, got = foretold[option], measured[option]
        peaks = got.get("peaks", {})
        cells = [f"{_gib(said.peaks.get(phase))} / {_gib(peaks.get(phase))}" for phase in PHASES]
        best = f"{min(got['seconds'][1:] or got['seconds']):.3g}" if "seconds" in got else "–"
        lines.append(f"| `{option.engine}` | {option.memory} | {' | '.join(cells)} | {said.seconds:.3g} / {best} |")
        wrong += [f"{option.key} failed: {why}" for why in (said.failed, got.get("failed")) if why]
        if said.peaks and peaks:
            gaps[option.key] = gap(said.peaks, peaks)
            if not right(max(said.peaks.values()), max(peaks.values())):
                wrong.append(f"{option.key}: the peak is {gaps[option.key]:+.1%} off its prediction")
    if gaps:
        key = max(gaps, key=lambda each: abs(gaps[each]))
        lines += ["", f"The measured peak of all phases is at most {gaps[key]:+.1%} off its prediction ({key})."]
    return lines + [f"\nWrong: {each}." for each in wrong], wrong


def gap(predicted: dict[str, int], got: dict[str, int]) -> float:
    """Return by how much the highest peak that was measured exceeds the predicted one."""
    return max(got.values()) / max(predicted.values()) - 1


def right(predicted: int, got: int) -> bool:
    return abs(got - predicted) <= max(CLOSE * predicted, SMALL)


def _gib(size: int | None) -> str:
    return "–" if size is None else f"{size / GIB:.4g}"


def longest_table(trial: Trial, engines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Train a step at the length that is predicted to be the longest, for one engine of each kind."""
    kinds = [name for name in ("torch", "zero1", "zero3", "fsdp2") if name in engines]
    able = [each for each in trial.options(kinds) if not each.also]
    chosen = [each for each in able if (each.checkpointing, each.offload) == ("true", "none")]
    foretold = dict(zip(chosen, foretell([trial.asked(each, longest=True) for each in chosen]), strict=True))
    tried = {
        option: trial.here(option, f"data.max_length={said.tokens}")
        for option, said in foretold.items()
        if said.tokens and said.seconds <= PATIENCE
    }
    got = measure_all(trial, tried, steps=1)
    lines = [
        "The longest pair that is predicted to fit, with checkpointing, and a step of it:\n",
        "| engine | tokens | predicted, GiB | measured, GiB |",
        "| --- | ---: | ---: | ---: |",
    ]
    wrong = []
    for option, said in foretold.items():
        result = got.get(option, {})
        shown = "not tried: a step would take too long" if said.tokens else "not tried: none fits"
        if "peaks" in result:
            shown = _gib(max(result["peaks"].values()))
        for failed in filter(None, (said.failed, result.get("failed"))):
            shown = f"failed: {failed}"
            wrong.append(f"{option.engine} at {said.tokens:,} tokens failed: {failed}")
        predicted = _gib(max(said.peaks.values(), default=None))
        lines.append(f"| `{option.engine}` | {said.tokens:,} | {predicted} | {shown} |")
    return lines, wrong
