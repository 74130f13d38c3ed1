"""Tokens per second: a plain vLLM, vLLM through rlexp, and `native`; and the parts of what rlexp adds.

All generate the same number of tokens for the same prompts, whatever is chosen: no token ends an answer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.gpu_training import Result, Started
from bench.vllm_cases import (
    PATIENCE,
    Setup,
    Size,
    drawer_of,
    failed_lines,
    failures,
    joined_task,
    lines_of,
    requests_of,
    sizes,
    timed,
    wait,
)
from rlexp.base.host_memory import host_memory
from rlexp.config.schema import Config

ROOT = Path(__file__).resolve().parent.parent
GOAL = 0.85  # of a plain vLLM's tokens per second
REPEATS = 3
TOP_P = 0.9


def speed_section(setup: Setup, rank: Callable[..., None] | None = None) -> tuple[str, list[str]]:
    found: dict[str, Result] = {}
    for size in sizes(setup):
        words = [*size.words_on(setup), *setup.by_vllm]
        names = [f"{size.name}, {how}" for how in ("alone", "through")]
        found[names[0]] = setup.tried(f"speed of {names[0]}", alone, setup, size, words)
        found[names[1]] = setup.tried(f"speed of {names[1]}", setup.on_rank, rank or speed_rank, words, size)
    text, wrong = table(setup, found)
    return "\n".join([*text, *failed_lines(found)]), [*failures(found), *wrong]


def alone(setup: Setup, size: Size, words: Sequence[str]) -> Result:
    """Run a plain vLLM, in a process that has nothing of this one's settings but its threads."""
    from rlexp.launch.joining import threads_of
    from rlexp.training.model.loading import load_config

    cfg = setup.config(*words)
    place = setup.folder / f"alone-{size.vocabulary}"
    place.mkdir(exist_ok=True)
    config = load_config(cfg.model, cfg.data.max_length)
    config.architectures = config.architectures or ["LlamaForCausalLM"]
    config.save_pretrained(place)
    memory = host_memory()
    assert memory is not None
    on_cpu = {"kv_cache_memory_bytes": int(setup.share * memory.total), "enforce_eager": True}
    asked = {
        "model": str(place), "dtype": "bfloat16" if setup.gpu else "float32", "max_length": cfg.data.max_length,
        "prompts": size.token_ids(), "samples": size.samples, "new": size.new, "repeats": REPEATS,
        "more": {"gpu_memory_utilization": setup.share} if setup.gpu else on_cpu,
    }  # fmt: skip
    (place / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
    around = {name: value for name, value in os.environ.items() if not name.startswith(("PYTORCH_", "DS_", "VLLM_"))}
    around |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads_of(cfg.launch))}
    around |= {} if setup.gpu else threads
    command = [sys.executable, "-m", "bench.vllm_alone", str(place / "asked.json"), str(place / "answer.json")]
    done = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr, flush=True)
        raise RuntimeError(next(reversed(done.stderr.strip().splitlines()), "it said nothing"))
    seconds: Result = json.loads((place / "answer.json").read_text(encoding="utf-8"))
    return seconds


# ---- on a rank ----


def speed_rank(spec: Any, cfg: Config, size: Size, file: str) -> None:
    from rlexp.launch.joining import leave_world

    task = joined_task(spec, cfg)
    Started.add(file, measured(task, size))
    leave_world()


def measured(task: Any, size: Size) -> Result:
    """Return the seconds of vLLM through rlexp, with their parts, and of `native`."""
    from rlexp.training.rollout.vllm import chooser

    drawer, requests = drawer_of(task), requests_of(task, size)
    drawer._ends = []  # no token ends an answer
    device = task.run.device
    drawer.renew(task.run.engine.merged)
    own = chooser.chosen_only
    cut = dataclasses.replace(task.run.cfg.rollout, top_p=TOP_P)
    choosers = {
        "through": own,
        "top_p": lambda logits, rows, notes, _: own(logits, rows, notes, cut),
        "likeliest": lambda logits, *_: logits,  # vLLM takes the likeliest token by itself
    }
    found: Result = {}
    for name, choosing in choosers.items():
        vars(chooser)["chosen_only"] = choosing  # its caller finds it there
        found[name] = parts_of(drawer, requests, device, checked=name != "likeliest")
    vars(chooser)["chosen_only"] = own
    found["native"] = native(task, requests)
    return found


def parts_of(drawer: Any, requests: Sequence[Any], device: Any, *, checked: bool) -> Result:
    """Return the seconds of a rollout, with those of adding requests, of vLLM's steps, and of making samples."""
    spent: dict[str, float] = {}
    engine = drawer._llm.llm_engine
    inner = {"adding": (drawer, "_ask"), "steps": (engine, "step"), "samples": (drawer, "_sample")}
    originals = {name: getattr(owner, attribute) for name, (owner, attribute) in inner.items()}

    def timing(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            got = originals[name](*args) if checked or name != "samples" else None
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - began
            return got

        return call

    for name, (owner, attribute) in inner.items():
        setattr(owner, attribute, timing(name))
    turns = []
    for _ in range(REPEATS + 1):
        spent.clear()
        drawer._llm.reset_prefix_cache()
        whole = timed(device, lambda: [*drawer.draw([requests], 0)])
        turns.append(spent | {"whole": whole})
    for name, (owner, attribute) in inner.items():
        setattr(owner, attribute, originals[name])
    return {name: min(turn[name] for turn in turns[1:]) for name in turns[0]}


def native(task: Any, requests: Sequence[Any]) -> float:
    from rlexp.config.schema.rollouts import RolloutEngine
    from rlexp.training.train.build_rollouts import build_drawer

    run = task.run
    cfg = dataclasses.replace(run.cfg, rollout=dataclasses.replace(run.cfg.rollout, engine=RolloutEngine.native))
    drawer: Any = build_drawer(cfg, run.engine.decode, run.engine.policy.model, run.tokenizer, run.device)
    drawer._ends = frozenset()
    taken = []
    for _ in range(REPEATS + 1):
        began = wait(run.device)
        tokens = sum(len(sample.answer) for part in drawer.draw([requests], 0) for sample in part)
        taken.append(wait(run.device) - began)
        assert tokens == len(requests) * run.cfg.rollout.max_new_tokens
    return min(taken[1:])


# ---- what they say ----


def table(setup: Setup, found: dict[str, Result]) -> tuple[list[str], list[str]]:
    rows, shares, wrong = [], [], []
    for size in sizes(setup):
        alone, through = found[f"{size.name}, alone"], found[f"{size.name}, through"]
        rows += list(_speeds(size, alone, through))
        if "failed" not in through:
            shares.append([size.name, *_shares(through)])
        if "failed" not in alone and "failed" not in through:
            ratio = alone["plain"] / through["through"]["whole"]
            if setup.gpu and ratio < GOAL:
                wrong.append(f"{size.name}: {ratio:.2f} of a plain vLLM's tokens per second, and the goal is {GOAL}")
    head = ("model", "a plain vLLM", "with log-probabilities", "through rlexp", "of the plain", "`native`",
            "times `native`")  # fmt: skip
    parts = ("model", "whole, s", "adding requests", "vLLM's steps", "our chooser's part of the steps",
             "making samples", "whole with top_p, s")  # fmt: skip
    asked = "; ".join(f"{size.name}: {size.said()}" for size in sizes(setup))
    return [
        f"Tokens per second, the best of {REPEATS} rollouts. {asked}. A plain vLLM runs in a process of its own, with "
        f"its own sampling, the same dtype and {_memory(setup)}. The goal is {GOAL} of its tokens per second. The "
        f"second row of a model has top_p = {TOP_P}.",
        "",
        *lines_of(head, rows),
        "",
        "What the rollouts through rlexp spend their seconds on. The chooser's part is what vLLM's steps take less "
        "with a chooser that leaves the likeliest token to vLLM.",
        "",
        *lines_of(parts, shares),
    ], wrong


def _memory(setup: Setup) -> str:
    return f"{setup.share:.0%} of the GPU's memory" if setup.gpu else "the same memory; both run eagerly on a CPU"


def _speeds(size: Size, alone: Result, through: Result) -> Iterator[list[str]]:
    for name, own, mine in (("", "plain", "through"), (", top_p", "top_p", "top_p")):
        plain = alone.get(own)
        whole = through[mine]["whole"] if "failed" not in through else None
        native = through.get("native") if not name else None
        logps = alone.get("logps") if not name else None
        ratio = f"{plain / whole:.2f}" if plain and whole else "–"
        yield [
            f"{size.name}{name}", *(_rate(size, each) for each in (plain, logps, whole)), ratio, _rate(size, native),
            f"{native / whole:.1f}" if native and whole else "–",
        ]  # fmt: skip


def _rate(size: Size, seconds: float | None) -> str:
    return f"{size.tokens / seconds:,.0f}" if seconds else "–"


def _shares(through: Result) -> list[str]:
    own, likeliest = through["through"], through["likeliest"]
    choosing = 1 - likeliest["steps"] / own["steps"]
    return [
        f"{own['whole']:.3g}", f"{own['adding'] / own['whole']:.1%}", f"{own['steps'] / own['whole']:.1%}",
        f"{choosing:.1%}", f"{own['samples'] / own['whole']:.1%}", f"{through['top_p']['whole']:.3g}",
    ]  # fmt: skip
