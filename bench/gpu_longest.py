"""Predict the longest pair of an 8B Llama that fits on 8 × 80 GB, by ring size, for every engine and memory option.

Beside the rows of a reference model in memory there are rows of other references, and of an adapter.

Every answer is kept in a file as soon as it is there: a command that was stopped goes on where it was.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.tables import commit
from rlexp.base.engine_facts import ENGINES
from rlexp.base.errors import ConfigError, UserError
from rlexp.base.files import write_text
from rlexp.config.elsewhere import compose_elsewhere
from rlexp.config.schema import Config, Offload

ROOT = Path(__file__).resolve().parent.parent
GPUS = 8
RINGS = (8, 4, 2, 1)  # the longest first: it is found from a short one, and the others from it
LLAMA = ("model=hf", f"model.path={ROOT / 'tests' / 'files' / 'models' / 'llama_8b'}")
# As large a batch that every ring accumulates gradients: with 8 pairs, a ring of 1 would not, and need less memory.
ON = ("hardware=h100", f"launch.nproc={GPUS}", "logger=none", "train.batch_size=64", "train.micro_batch_size=1")
# What is also asked with checkpointing, and how the table names it.
ALSO = {"reference=precompute": "reference precomputed", "reference.offload=true": "reference on the host",
        "adapter=lora": "LoRA"}  # fmt: skip
FIRST = {"true": 65536, "false": 16384}  # tokens of the first length on a ring of 8, with checkpointing or without

# What is known of one ring size: {"tokens", "peak_gib", "phase"}, {"refused"} or {"failed"}.
Cell = dict[str, Any]
Known = dict[str, dict[str, Cell]]  # by option and ring size
Keep = Callable[["Option", int, Cell], None]


@dataclass(frozen=True)
class Option:
    """An engine with its memory options. `words` are the overrides, and `key` names them in the file."""

    engine: str
    checkpointing: str
    offload: str
    also: str = ""  # one of ALSO

    @property
    def key(self) -> str:
        also = f" {self.also}" if self.also else ""
        return f"{self.engine} checkpointing={self.checkpointing} offload={self.offload}{also}"

    @property
    def words(self) -> tuple[str, ...]:
        return (
            f"engine={self.engine}",
            f"memory.checkpointing={self.checkpointing}",
            f"engine.offload={self.offload}",
            *filter(None, (self.also,)),
        )

    @property
    def memory(self) -> str:
        """The memory options as the table shows them."""
        offload = {"none": "", "optimizer": "offload optimizer", "all": "offload optimizer and parameters"}
        checkpointing = "checkpointing" if self.checkpointing == "true" else ""
        named = (checkpointing, offload[self.offload], ALSO.get(self.also, ""))
        return ", ".join(filter(None, named)) or "none"


def options(engines: Sequence[str] = tuple(ENGINES)) -> list[Option]:
    found = []
    for engine in engines:
        for checkpointing in ("false", "true"):
            found += [Option(engine, checkpointing, offload.value) for offload in Offload]
        found += [Option(engine, "true", "none", also) for also in ALSO]
    return found


def predict_longest(
    chosen: Sequence[Option],
    file: Path,
    *,
    words: Sequence[str] = (*LLAMA, *ON),
    processes: int,
    engines: Sequence[str] | None = None,
) -> Known:
    """Find what is not known yet, keep it in the file, and return all that is known of this code.

    With `engines`, predict only these now; what is refused is told of all.
    """
    from rlexp.preflight.children import at_once
    from rlexp.preflight.rehearsal.rehearse import preload

    known = read(file)

    def keep(option: Option, ring: int, cell: Cell) -> None:
        known.setdefault(option.key, {})[str(ring)] = cell
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps({"code": code(), "known": known}, indent=1) + "\n")
        print(f"{option.key} ring {ring}: {json.dumps(cell)}", file=sys.stderr, flush=True)

    todo = []
    for option in chosen:
        left = [ring for ring in RINGS if str(ring) not in known.get(option.key, {})]
        if left and isinstance(cfg := _composed(words, option, left[0]), str):
            for ring in left:
                keep(option, ring, {"refused": cfg})
        elif left and (engines is None or option.engine in engines):
            todo.append((option, left))
    if todo:
        preload()
        hints: dict[str, float] = {}
        at_once([_row(option, left, words, hints, keep) for option, left in todo], processes)
    return known


def _composed(words: Sequence[str], option: Option, ring: int) -> Config | str:
    """Return the configuration at the length to begin with, or why there is none."""
    from rlexp.preflight.longest_that_fits import STEP

    length = max(STEP * ring, FIRST[option.checkpointing] * ring // RINGS[0])
    try:
        return compose_elsewhere([*words, *option.words, f"parallel.ring_size={ring}", f"data.max_length={length}"])
    except (ConfigError, UserError) as error:
        return str(error)


def _row(option: Option, rings: Sequence[int], words: Sequence[str], hints: dict[str, float], keep: Keep) -> Any:
    """Find the longest pair on each ring. A task of `children.at_once`.

    `hints` has the bytes that a token of a rank adds: as many on every ring, and nearly as many in every engine.
    """
    from rlexp.preflight.longest_that_fits import STEP, fit_from, with_length
    from rlexp.preflight.predict import Found, predict, predict_fuller
    from rlexp.preflight.vllm import room
    from rlexp.training.model.loading import load_config

    found: Found | None = None
    tokens = 0  # of a rank
    for ring in rings:
        cfg = _composed(words, option, ring)
        if isinstance(cfg, str):
            keep(option, ring, {"refused": cfg})
            continue
        model = load_config(cfg.model, cfg.data.max_length)
        hint = hints.get(option.checkpointing, 0.0) / ring
        try:
            if found is None:
                asked = yield from predict(cfg, model)
                longest = yield from fit_from(cfg, model, asked, hint)
                found = asked
            else:
                near = with_length(cfg, max(STEP, tokens) * ring)
                first = yield from predict_fuller(near, model, found.prediction.rank, found.grows, room(near))
                longest = yield from fit_from(near, model, first, hint)
        except Exception as error:
            keep(option, ring, {"failed": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"})
            continue
        tokens = longest.tokens // ring
        if longest.slope > 0:
            hints[option.checkpointing] = longest.slope * ring
        keep(option, ring, {**longest.plain(), "phase": longest.phase})


def read(file: Path) -> Known:
    """Return what the file knows, if the code that predicted it is the same."""
    if not file.is_file():
        return {}
    said = json.loads(file.read_text(encoding="utf-8"))
    if said["code"] != code():
        print(f"{file}: was predicted by other code, and begins anew", file=sys.stderr)
        return {}
    known: Known = said["known"]
    return known


@functools.cache
def code() -> str:
    """Return a hash of the package and its configuration."""
    total = hashlib.sha256()
    for folder, pattern in (("rlexp", "*.py"), ("conf", "*.yaml")):
        for file in sorted((ROOT / folder).rglob(pattern)):
            total.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return total.hexdigest()


# ---- the table ----


def table(known: Known, chosen: Sequence[Option]) -> str:
    rings = sorted(RINGS)
    lines = [
        f"| engine | memory options | {' | '.join(f'ring {ring}' for ring in rings)} | bounded by |",
        f"| --- | --- |{' ---: |' * len(rings)} --- |",
    ]
    lines += [_line(option, known.get(option.key, {}), rings) for option in chosen]
    return "\n".join(lines)


def _line(option: Option, cells: dict[str, Cell], rings: Sequence[int]) -> str:
    shown = [_shown(cells.get(str(ring))) for ring in rings]
    return f"| `{option.engine}` | {option.memory} | {' | '.join(shown)} | {_bound(cells, rings)} |"


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return "not predicted yet"
    if "failed" in cell:
        return "failed"
    if "refused" in cell:
        return "refused"
    return f"{cell['tokens']:,}" if cell["tokens"] else f"none ({cell['peak_gib']:.1f} GiB)"


def _bound(cells: dict[str, Cell], rings: Sequence[int]) -> str:
    """Name the phase of the peak, with the rings where they differ; or say why there is none."""
    for kind in ("refused", "failed"):
        for said in (cell[kind] for cell in cells.values() if kind in cell):
            return str(said).partition(". ")[0].replace("|", "\\|")
    phases: dict[str, list[int]] = {}
    for ring in rings:
        if str(ring) in cells:
            phases.setdefault(cells[str(ring)]["phase"], []).append(ring)
    if len(phases) == 1:
        return next(iter(phases))
    return ", ".join(f"{phase} (ring {', '.join(map(str, of))})" for phase, of in phases.items()) or "–"


def report(known: Known, chosen: Sequence[Option], given: str | None = None) -> str:
    """Return the table with what it is about."""
    return "\n\n".join([
        f"Predicted {time.strftime('%Y-%m-%d')} at {commit(given)}, on a CPU, by `python -m bench.gpu --predict`. Not "
        "measured.",
        *_left(known, chosen),
        table(known, chosen),
    ])  # fmt: skip


def _left(known: Known, chosen: Sequence[Option]) -> Iterator[str]:
    left = sum(len(RINGS) - len(known.get(option.key, {})) for option in chosen)
    if left:
        yield f"{left} of {len(RINGS) * len(chosen)} cells are not predicted yet: the same command goes on with them."
