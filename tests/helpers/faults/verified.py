"""Run `verify` with a defect in every rank that it starts."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rlexp.config.load import compose_config
from rlexp.config.schema.data import RowsDataConfig
from rlexp.launch.local import PRELOAD, run_ranks
from rlexp.verify import verification as verifying
from rlexp.verify.verification import Progress, Verification, verify
from tests.helpers.faults import faulty_rank
from tests.helpers.faults.base import ALGOS, Fault

# Imported once, in the process that ranks are forked from, by whichever defect comes first.
SERVER = (*PRELOAD, *verifying.OURS, "deepspeed", "tests.helpers.faults")
LONGEST = 240.0  # seconds for one start of ranks
REFERENCE = verifying._expected_rank


def quiet(_line: str) -> None:
    """Progress is of no interest here."""


Ranks = Callable[[Callable[..., Any], int, Sequence[Any], dict[str, Any]], list[Any]]


def verify_planted(
    fault: Fault,
    references: Path,
    *,
    overrides: Sequence[str] | None = None,
    steps: int | None = None,
    cache: Path | None = None,
    say: Progress = quiet,
) -> tuple[Verification, bool]:
    """Verify with the defect in every rank; return what came of it, and whether the defect was at work.

    A defect of a loss is planted into the reference too, since it has the product's formula.
    """
    with tempfile.TemporaryDirectory(prefix="rlexp-planted-") as folder:
        reached = Path(folder) / "reached"

        def planted(target: Callable[..., Any], ranks: int, args: Sequence[Any], options: dict[str, Any]) -> list[Any]:
            return run_ranks(faulty_rank, ranks, (fault.name, reached, target, args), **options)

        words, keep = fault.overrides if overrides is None else overrides, fault.module != ALGOS
        verdict = verify_by(planted, words, references, keep=keep, steps=steps, cache=cache, say=say)
        return verdict, reached.exists()


def verify_by(
    ranks: Ranks,
    overrides: Sequence[str],
    references: Path,
    *,
    keep: bool = True,
    steps: int | None = None,
    cache: Path | None = None,
    say: Progress = quiet,
) -> Verification:
    """Verify with ranks that are started otherwise.

    Without `steps` there are two of pairs, of which some defects are first seen at the second, and of samples that are
    drawn as many as the command takes. `references` is a folder that keeps float64 references: with `keep`, the
    reference of a configuration is computed once. What a run keeps for others is in `cache`, or is not kept.
    """
    with tempfile.TemporaryDirectory(prefix="rlexp-verified-") as folder:

        def start(target: Callable[..., Any], count: int, args: Sequence[Any] = (), **options: Any) -> list[Any]:
            options |= {"preload": SERVER, "timeout": LONGEST}
            if target is REFERENCE and keep:
                return _kept(references, args, options)
            return ranks(with_cache, count, (str(cache or f"{folder}/cache"), target, args), options)

        cfg = compose_config(overrides)
        if isinstance(cfg.data, RowsDataConfig):  # tokens that are kept must be those of this run
            cfg = replace(cfg, data=replace(cfg.data, cache=f"{folder}/cache"))
        with patch.object(verifying, "run_ranks", start):
            return verify(cfg, steps or (None if cfg.loss.draws else 2), say)


def with_cache(spec: Any, cache: str, target: Callable[..., Any], args: Sequence[Any]) -> Any:
    os.environ["RLEXP_CACHE"] = cache
    return target(spec, *args)


def _kept(references: Path, args: Sequence[Any], options: dict[str, Any]) -> list[Any]:
    """Return the reference of a configuration, and put its files where they are asked for.

    It is computed without a defect: only those of losses reach what the reference imports, as
    tests/verify/test_verify.py shows.
    """
    cfg, plan, folder, drawing = args
    if drawing is not None and not drawing.exact:  # it goes on from the run's own weights
        answer: list[Any] = run_ranks(REFERENCE, 1, args, **options)
        return answer
    if isinstance(cfg.data, RowsDataConfig):  # the reference keeps no tokens
        cfg = replace(cfg, data=replace(cfg.data, cache=None))
    # The memory that is free says nothing about the result; and of samples, only what the reference is given.
    drawn = [] if drawing is None else [
        (sample.place, sample.answer.tolist(), sample.terms)
        for rollout in drawing.rollouts for sample in rollout.samples
    ]  # fmt: skip
    if drawing is not None:  # a kept reference cannot go on from the weights of a run with a defect
        drawing = replace(drawing, ran=None)
        held = [] if drawing.held_out is None else drawing.held_out.samples
        drawn += [(sample.place, sample.answer.tolist(), sample.terms) for sample in held]
    key = repr((cfg, replace(plan, need=0, free=0), drawn, drawing and (drawing.steps, drawing.exact)))
    kept = references / hashlib.sha256(key.encode()).hexdigest()
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=references) as place:  # complete before another process can see it
            made = Path(place) / "made"
            expected = run_ranks(REFERENCE, 1, (cfg, plan, made, drawing), **options)
            (made / "answer.pickle").write_bytes(pickle.dumps(expected))
            with contextlib.suppress(OSError):  # another process was faster
                made.rename(kept)
    shutil.copytree(kept, folder)
    found: list[Any] = pickle.loads((kept / "answer.pickle").read_bytes())
    return found
