"""Whether a run fits, which engine and layout `auto` takes, and what would help: asked by the launcher.

python -m rlexp.preflight.whether_it_fits < question

The question and the answer are JSON (`launch/preflight_check.py`). Rehearsals change torch and DeepSpeed, so the
launcher starts a process for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlexp.base.byte_counts import size
from rlexp.base.errors import ModelError, UserError, first_line
from rlexp.config.checks.layout import Choice, heads_in, heads_of
from rlexp.config.gpu_descriptions import TYPICAL, described
from rlexp.config.load import from_plain
from rlexp.config.schema import Config, HardwareConfig, HFModelConfig, LayoutName, Preflight
from rlexp.config.vllm_memory import samples_apart
from rlexp.launch.stops import end_with_parent
from rlexp.preflight import quietly
from rlexp.preflight.fastest_layout import fastest


class TimeUp(BaseException):
    """The time for a rehearsal is over."""


def main() -> int:
    end_with_parent()
    out = os.dup(1)
    os.dup2(2, 1)  # whatever torch or DeepSpeed print is no answer
    quietly()
    plain = json.load(sys.stdin)
    answer = judge(from_plain(plain.pop("cfg")), **plain)
    with os.fdopen(out, "w", encoding="utf-8") as file:
        json.dump(answer, file)
    return 0


def judge(cfg: Config, *, fitting: bool, seconds: float, helping: float) -> dict[str, Any]:
    """Answer within so many seconds; a rehearsal that fails is an answer too. Without `fitting` only the layout is
    asked for. `helping` are the seconds for finding changes that would help; 0: none are asked for."""
    answer: dict[str, Any] = {}
    try:
        with within(seconds):
            helped = predicted(cfg, answer, fitting=fitting)
    except TimeUp:
        return answer | {"why": f"it took longer than {seconds:g} seconds."}
    except UserError as error:
        return answer | {"why": first_line(error)}
    except Exception as error:
        return answer | {"why": f"the rehearsal failed ({type(error).__name__}: {first_line(error)})."}
    if helped is not None and helping:
        try:
            with within(helping):
                answer["remedy"] = helped()
        except TimeUp:
            known = answer.get("remedy", "")
            answer["remedy"] = f"No change that fits was found in {helping:g} seconds. {known}"
        except Exception as error:
            answer["remedy"] = f"No change that fits was found ({type(error).__name__}: {first_line(error)}). "
    return answer


def predicted(cfg: Config, answer: dict[str, Any], *, fitting: bool) -> Callable[[], str] | None:
    """Put the layout and the prediction into the answer. If the run does not fit, return what finds a remedy."""
    # The rates of a common GPU where those of its own are not known: they rank changes, and decide nothing.
    known = {key: value for key, value in vars(cfg.hardware).items()
             if value or key in ("memory_gib", "reserve_gib")}  # fmt: skip
    cfg = dataclasses.replace(cfg, hardware=HardwareConfig(**(described(TYPICAL) | known)))
    heads = heads_of(cfg.model)
    sampling = samples_apart(cfg) and cfg.launch.preflight is Preflight.auto
    if not fitting and heads is not None and not sampling:  # no need to load transformers
        answer |= of_layout(fastest(cfg, heads))
        return None
    from rlexp.preflight.vllm import too_little_to_sample
    from rlexp.training.model.loading import load_config

    try:
        model = load_config(cfg.model, cfg.data.max_length)
    except ModelError as error:
        if isinstance(cfg.model, HFModelConfig) and Path(cfg.model.path).expanduser().is_dir():
            answer["refused"] = str(error)
            return None
        raise
    if sampling and (why := too_little_to_sample(cfg, model)):
        answer["refused"] = why
        return None
    if cfg.parallel.layout is LayoutName.auto:
        answer |= of_layout(fastest(cfg, heads_in(model.to_dict())))
    return in_memory(cfg, model, answer) if fitting else None


def in_memory(cfg: Config, model: Any, answer: dict[str, Any]) -> Callable[[], str] | None:
    from rlexp.preflight import remedy, report
    from rlexp.preflight.changes import trains_otherwise
    from rlexp.preflight.children import at_once
    from rlexp.preflight.host import told_short
    from rlexp.preflight.rehearsal.layers import refuse_unlike_reference
    from rlexp.preflight.rehearsal.rehearse import preload
    from rlexp.preflight.vllm import room

    refuse_unlike_reference(cfg, model)
    preload()  # rehearsals are forked from this process
    (taken,) = at_once([remedy.first_that_fits(cfg, model)])
    asked = (taken.outcome or remedy.whole(remedy.tried([taken.cfg], model)[0])).prediction
    asked = asked.with_share()
    peak, limit = asked.peak, room(cfg)
    answer |= {
        "fits": asked.fits(limit),
        "limit": limit,
        "peak": peak.bytes,
        "phase": peak.phase,
        "host": {} if asked.host is None else dict(asked.host.by_kind),
        "host_limit": None if asked.host is None else asked.host.limit,
        "short": None if asked.short is None else told_short(asked.short, cfg),
        "vllm_memory": None if asked.vllm is None else asked.vllm.holds.share,
        "vllm": asked.refused,
        "peaks": {phase: each.by_kind for phase, each in asked.peaks.items() if phase},
        "engine": taken.cfg.engine.name.value,
        "engine_chosen": taken.chosen,
        "max_tokens": taken.cfg.train.max_tokens_per_micro_batch,
    }
    if answer["fits"]:
        return None
    answer["table"] = report.table(asked)

    def helped() -> str:
        (singles,) = at_once([remedy.changes_of(taken, asked, model)])
        answer["table"] += report.changed([*taken.others, *singles], asked)
        answer["remedy"] = remedy.otherwise(singles, limit)  # if the time is up
        change = remedy.cheapest(taken, asked, singles, model)
        if change is None or change.prediction is None:
            return "None of the changes below makes it fit, nor do two of them together. "
        if trains_otherwise(change.words):
            return f"No change of the same training makes it fit, nor do two. {remedy.in_another_training(change)}"
        return f"The cheapest change that fits: {change.words} ({size(change.prediction.peak.bytes)}). "

    return helped


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeUp in the block when so many seconds are over."""

    def up(*_: Any) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def of_layout(choice: Choice) -> dict[str, Any]:
    return {"layout": choice.layout.value, "ulysses_size": choice.ulysses_size, "layout_chosen": choice.reason}


if __name__ == "__main__":
    sys.exit(main())
