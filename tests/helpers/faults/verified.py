"""Run `verify` with a defect in every rank that it starts."""

from __future__ import annotations

import os
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
from rlexp.verify.verdict import Verification
from rlexp.verify.verification import Progress, verify
from tests.helpers.faults import faulty_rank
from tests.helpers.faults.base import ALGOS, Fault

# Imported once, in the process that ranks are forked from, by whichever defect comes first.
SERVER = (*PRELOAD, *verifying.OURS, "deepspeed", "tests.helpers.faults")
LONGEST = 240.0  # seconds for one start of ranks


def quiet(_line: str) -> None:
    """Progress is of no interest here."""


Ranks = Callable[[Callable[..., Any], int, Sequence[Any], dict[str, Any]], list[Any]]


def verify_planted(
    fault: Fault,
    *,
    overrides: Sequence[str] | None = None,
    steps: int | None = None,
    cache: Path | None = None,
    say: Progress = quiet,
    search: bool = True,
) -> tuple[Verification, bool]:
    """Verify with the defect in every rank; return what came of it, and whether the defect was at work.

    What is computed by transformers alone is computed without it, but for a defect of a loss: it has the product's
    formula.
    """
    with tempfile.TemporaryDirectory(prefix="rlexp-planted-") as folder:
        reached = Path(folder) / "reached"

        def planted(target: Callable[..., Any], ranks: int, args: Sequence[Any], options: dict[str, Any]) -> list[Any]:
            if args[2][0] == "alone.alone_rank" and fault.module != ALGOS:
                return run_ranks(target, ranks, args, **options)
            return run_ranks(faulty_rank, ranks, (fault.name, reached, target, args), **options)

        words = fault.overrides if overrides is None else overrides
        verdict = verify_by(planted, words, steps=steps, cache=cache, say=say, search=search)
        return verdict, reached.exists()


def verify_by(
    ranks: Ranks,
    overrides: Sequence[str],
    *,
    steps: int | None = None,
    cache: Path | None = None,
    say: Progress = quiet,
    search: bool = True,
) -> Verification:
    """Verify with ranks that are started otherwise.

    Without `steps` there are two of pairs, of which some defects are first seen at the second, and of samples that are
    drawn as many as the command takes. What a run keeps for others is in `cache`, or is not kept.
    """
    with tempfile.TemporaryDirectory(prefix="rlexp-verified-") as folder:

        def start(target: Callable[..., Any], count: int, args: Sequence[Any] = (), **options: Any) -> list[Any]:
            options |= {"preload": SERVER, "timeout": LONGEST}
            return ranks(with_cache, count, (str(cache or f"{folder}/cache"), target, args), options)

        cfg = compose_config(overrides)
        if isinstance(cfg.data, RowsDataConfig):  # tokens that are kept must be those of this run
            cfg = replace(cfg, data=replace(cfg.data, cache=f"{folder}/cache"))
        with patch.object(verifying, "run_ranks", start):
            return verify(cfg, steps or (None if cfg.loss.draws else 2), say, search=search)


def with_cache(spec: Any, cache: str, target: Callable[..., Any], args: Sequence[Any]) -> Any:
    os.environ["RLEXP_CACHE"] = cache
    return target(spec, *args)
