"""Run each recipe to its end once with a small model, on the CPU: `python -m bench.recipes --run`.

SmolLM2-135M takes the place of the 8B model, and rows that come with rlexp, or that it makes, the place of the hub's.
`SMALL` has what each command gives beside the recipe. The page keeps the rows of those that have run: a recipe runs
again if its command has changed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.recipes import ROOT, named, recipes
from bench.tables import commit, put
from rlexp.run_files.metrics_jsonl import read_rows

Result = dict[str, Any]
PLACE = Path("runs", "small")  # of rows and runs, below the checkout
MODEL = ("model=smollm2_135m",)
ON_CPU = ("launch.device=cpu", "logger=none", "eval.before_training=true")
TOKENS = 40  # of an answer, at most
MARKER = "run"
PATIENCE = 3600.0  # seconds of a command
HELD = "data.eval_split=null"  # files have no splits
HH = ("data.path=conf/experiment/hh_helpful.jsonl.gz", HELD, "data.eval_size=48", "data.max_length=160",
      "train.batch_size=8", "train.max_steps=10")  # fmt: skip
HIGH = "optim.lr=2e-5"  # forty times DPO's default, since ten steps are few
SUMS, LONG = PLACE / "sums.jsonl", PLACE / "long_pairs.jsonl"
MAKE_LONG = ["python", "-m", "rlexp.long_pairs", *MODEL, "--tokens", "1000", "--pairs", "24", "--out", str(LONG)]


@dataclass(frozen=True)
class Small:
    """What takes the place of a recipe's own rows and sizes, and which values say what was learned."""

    words: tuple[str, ...]
    ranks: int = 2  # on each node
    nodes: int = 1
    rows: Callable[[], None] | None = None  # makes them
    trained: str = "train/loss"
    held_out: str = "eval/rewards/accuracies"
    answers: bool = True


def sums() -> None:
    """Write all sums of two numbers below 12, in a fixed order, as rows of GSM8K."""
    pairs = [(one, other) for one in range(12) for other in range(12)]
    random.Random(0).shuffle(pairs)
    rows = [
        {"question": f"What is {one} + {other}? Answer with the number alone.", "answer": str(one + other)}
        for one, other in pairs
    ]
    (ROOT / SUMS).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def long_pairs() -> None:
    """Write pairs as docs/recipes.md makes them, with 1,000 tokens in the place of 128,000."""
    (ROOT / LONG).unlink(missing_ok=True)
    typed(_here(MAKE_LONG), "long_pairs")


SMALL = {
    "dpo_8b": Small((*HH, HIGH)),
    "dpo_8b_128k": Small(
        (f"data.path={LONG}", "data.eval_size=8", "data.max_length=1024", "model.rope=yarn:4:8192",
         "train.batch_size=2", "train.max_steps=5", "parallel=ring2", HIGH),
        rows=long_pairs,
    ),
    "dpo_8b_2nodes": Small((*HH, HIGH), ranks=1, nodes=2),  # a ring of both nodes, which are this machine
    "grpo_8b": Small(
        (f"data.path={SUMS}", "data.subset=null", HELD, "data.eval_size=48", "~data.template_options.enable_thinking",
         "rollout.engine=native", "rollout.batch_size=8", "rollout.n_samples=4", "rollout.max_new_tokens=16",
         "rollout.temperature=0.7", "train.batch_size=32", "train.max_steps=12", "train.eval_every=12", HIGH),
        rows=sums, trained="train/objective/scores", held_out="eval/objective/scores",
    ),
    "lora_8b": Small((*HH, "optim.lr=3e-4")),
    "lora_8b_1gpu": Small((*HH, "optim.lr=3e-4"), ranks=1),
    "reward_8b": Small((*HH, HIGH), answers=False),
    "sft_8b": Small(HH, held_out="eval/loss"),
}  # fmt: skip


# ---- commands ----


def overrides(name: str) -> list[str]:
    small = SMALL[name]
    ranks = () if small.nodes > 1 else (f"launch.nproc={small.ranks}",)
    return [f"+experiment={name}", *MODEL, *ON_CPU, *ranks, *small.words, f"hydra.run.dir={PLACE / name}"]


def commands(name: str, port: str = "29500") -> list[list[str]]:
    """Return what is typed, on each node its own."""
    small = SMALL[name]
    if small.nodes == 1:
        return [["python", "-m", "rlexp", *overrides(name)]]
    meeting = (f"--nnodes={small.nodes}", f"--nproc-per-node={small.ranks}", "--master-addr=127.0.0.1",
               f"--master-port={port}")  # fmt: skip
    return [
        ["torchrun", *meeting, f"--node-rank={node}", "-m", "rlexp", *overrides(name)] for node in range(small.nodes)
    ]


def python(module: str) -> list[str]:
    return [sys.executable, "-m", module]


def typed(words: Sequence[str], log: str) -> None:
    """Run one command from the checkout's root; what it says goes into a file."""
    together([words], log)


def together(lines: Sequence[Sequence[str]], log: str) -> None:
    """Run commands at once, as on several nodes. If one fails, show the end of what it said."""
    around = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # rlexp shares the cores
    files = [ROOT / PLACE / f"{log}{f'-{number}' * bool(number)}.log" for number in range(len(lines))]
    running = []
    try:
        for words, file in zip(lines, files, strict=True):
            with file.open("w", encoding="utf-8") as out:
                running.append(subprocess.Popen(words, cwd=ROOT, env=around, stdout=out, stderr=subprocess.STDOUT))
        codes = [each.wait(PATIENCE) for each in running]
    finally:
        for each in running:
            if each.poll() is None:
                each.terminate()
                each.wait()
    for words, file, code in zip(lines, files, codes, strict=True):
        if code:
            said = file.read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"{shlex.join(words)}: exit status {code}\n{said[-3000:]}")


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


# ---- a recipe ----


def run_one(name: str) -> Result:
    """Train to the end, ask for an answer, and return what the curve says."""
    small, folder = SMALL[name], ROOT / PLACE / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    if small.rows is not None:
        small.rows()
    lines = [_here(words) for words in commands(name, free_port())]
    began = time.monotonic()
    together(lines, name)
    seconds = time.monotonic() - began
    found = values(folder, small) | {"seconds": seconds}
    found |= answers(folder, name) if small.answers else {}
    for heavy in ("checkpoints", "model"):
        shutil.rmtree(folder / heavy)
    return found


def _here(words: list[str]) -> list[str]:
    """Return a command by this environment's programs."""
    return [*python("torch.distributed.run"), *words[1:]] if words[0] == "torchrun" else [sys.executable, *words[1:]]


def values(folder: Path, small: Small) -> Result:
    """Return the first and the last value of training, and the held-out ones before and after it."""
    rows = read_rows(folder / "metrics.jsonl")
    trained = [row[small.trained] for row in rows if small.trained in row]
    held = {row["step"]: row[small.held_out] for row in rows if small.held_out in row}
    last = max(row["step"] for row in rows)
    return {"steps": last, "first": trained[0], "last": trained[-1], "before": held[0], "after": held[last]}


def answers(folder: Path, name: str) -> Result:
    """Return the first held-out prompt, and its answer before and after."""
    file = folder / "answers.jsonl"
    words = (str(folder), "--rows", "1", "--jsonl", str(file), f"rollout.max_new_tokens={TOKENS}", "launch.device=cpu",
             "launch.nproc=1", "logger=none")  # fmt: skip
    typed([*python("rlexp.generate"), *words], f"{name}-answers")
    said = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
    return {"prompt": said["prompt"], "start": _told(said["beside"][0]), "trained": _told(said["answers"][0])}


def _told(answer: Result) -> str:
    return str(answer["text"]) + ("" if answer["stopped"] else " …")


# ---- what they say ----

HEAD = (
    "| recipe | ranks | steps | s | in training | first | last | held out | before | after | run |",
    "| --- | ---: | ---: | ---: | --- | ---: | ---: | --- | ---: | ---: | --- |",
)
NAMES = {"train/loss": "loss", "train/objective/scores": "reward", "eval/loss": "loss",
         "eval/rewards/accuracies": "accuracy", "eval/objective/scores": "reward"}  # fmt: skip


@dataclass(frozen=True)
class Shown:
    """The rows of a recipe in the tables of the page."""

    row: str
    answer: str | None = None


def shown(name: str, found: Result) -> Shown:
    small = SMALL[name]
    ranks = f"{small.nodes} × {small.ranks}" if small.nodes > 1 else f"{small.ranks}"
    values = (
        ranks, f"{found['steps']:.0f}", f"{found['seconds']:.0f}", NAMES[small.trained], f"{found['first']:.3f}",
        f"{found['last']:.3f}", NAMES[small.held_out], f"{found['before']:.3f}", f"{found['after']:.3f}", found["run"],
    )  # fmt: skip
    answer = None
    if small.answers:
        answer = _line(name, (cell(each) for each in (asked(found["prompt"]), found["start"], found["trained"])))
    return Shown(_line(name, values), answer)


def _line(name: str, cells: Iterable[str]) -> str:
    return f"| `{name}` | {' | '.join(cells)} |"


def asked(prompt: str) -> str:
    """Return the last line of what the user asks. The line behind it begins the answer."""
    lines = [line for line in prompt.strip().splitlines() if line.strip()]
    return lines[-2] if lines[-1] == "assistant" else lines[-1]


def cell(said: str, most: int = 200) -> str:
    """Return a text on one line, as a cell of a table has it."""
    line = " ".join(said.replace("…", " …").split())
    line = line if len(line) <= most else f"{line[:most].rstrip()} …"
    return line.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")


def text(known: dict[str, Shown]) -> str:
    """Return the tables and the commands of the recipes that have run."""
    lines = [*HEAD, *(each.row for each in known.values())]
    lines += ["", f"The likeliest answer to the first held-out prompt, up to {TOKENS} tokens:", ""]
    lines += ["| recipe | end of the prompt | before | after |", "| --- | --- | --- | --- |"]
    lines += [each.answer for each in known.values() if each.answer is not None]
    return "\n".join([*lines, "", "```bash", *script(known), "```"])


def script(names: Iterable[str], width: int = 118) -> Iterator[str]:
    """Yield the commands, each over several lines."""
    made = {"dpo_8b_128k": [MAKE_LONG]}
    for words in (words for name in names for words in (*made.get(name, []), *commands(name))):
        line = ""
        for word in map(shlex.quote, words):
            if line and len(line) + len(word) >= width:
                yield f"{line} \\"
                line = "   "
            line = f"{line} {word}" if line else word
        yield line


# ---- the page, which keeps what has run ----


def known_on(page: Path | None) -> dict[str, Shown]:
    """Return the recipes that the page has, if they ran by the commands that they have now."""
    _, _, rest = (page.read_text(encoding="utf-8") if page else "").partition(f"<!-- {MARKER}: begin -->")
    tables, _, typed_there = rest.partition(f"<!-- {MARKER}: end -->")[0].partition("```bash\n")
    lines = typed_there.partition("```")[0].replace("\\\n", "").splitlines()
    there = [shlex.split(line) for line in lines]
    found: dict[str, Shown] = {}
    for line in tables.splitlines():
        if line.startswith("| `") and (name := named(line)) in SMALL and commands(name)[0] in there:
            found[name] = Shown(found[name].row, line) if name in found else Shown(line)
    return found


def run(options: argparse.Namespace) -> int:
    """Run what has not run, and write each as soon as it has ended. One that fails says why, and the next begins."""
    names = [each.name for each in recipes()]
    known = known_on(options.write)
    failed = []
    for name in options.only or names:
        if name in known and not options.again:
            print(f"{name}: has run already, by this command (--again runs it again)", flush=True)
            continue
        print(f"{name}: {shlex.join(commands(name)[0])}", flush=True)
        at = commit()  # before the page changes
        try:
            result = run_one(name)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            print(f"{name}: failed: {error}", file=sys.stderr, flush=True)
            failed.append(name)
            continue
        known[name] = shown(name, result | {"run": f"{time.strftime('%Y-%m-%d')}, {at}"})
        print(known[name].row, flush=True)
        if options.write:
            put(options.write, text({each: known[each] for each in names if each in known}), MARKER)
    missing = [name for name in names if name not in known]
    print(f"{len(known)} of {len(names)} recipes have run" + (f"; not yet: {', '.join(missing)}" if missing else ""))
    return int(bool(failed))
