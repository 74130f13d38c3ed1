"""Reward functions as users write them, correct and faulty."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def by_length(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[float]:
    return [len(answer) + 0.25 * len(prompt) for prompt, answer in zip(prompts, answers, strict=True)]


def by_row(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[float]:
    return [row["index"] + (row["answer"] == answer) for row, answer in zip(rows, answers, strict=True)]


def noisy(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[bool]:
    print("x" * 100_000, flush=True)
    print('{"scores": [7]}', file=sys.stderr, flush=True)
    subprocess.run(["echo", "said by another"], check=True)
    return [True] * len(answers)


def process(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[float]:
    time.sleep(0.2)
    return [float(os.getpid())] * len(answers)


def meets_another(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """Wait until two processes judge."""
    folder, own = Path(answers[0]), os.getpid()
    (folder / str(own)).touch()
    while len([*folder.iterdir()]) < 2:
        time.sleep(0.01)
    return [float(own)] * len(answers)


def imported(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[float]:
    return [float("torch" in sys.modules)] * len(answers)


def raises(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[float]:
    return [_judge(answer) for answer in answers]


def _judge(answer: str) -> float:
    if "bad" in answer:
        raise ValueError(f"cannot read {answer!r}")
    return 1.0


def raises_for_many(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[float]:
    if len(answers) > 1:
        raise RuntimeError("too many")
    return [1.0]


def hangs(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[float]:
    if any("slow" in answer for answer in answers):
        time.sleep(1000)
    return [1.0] * len(answers)


def hangs_and_holds_the_interpreter(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[float]:
    Path(answers[0]).write_text(str(os.getpid()), encoding="utf-8")
    re.match(r"(a+)+b", "a" * 60)
    return [1.0] * len(answers)


def exits(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[float]:
    if any("bad" in answer for answer in answers):
        os._exit(3)
    return [1.0] * len(answers)


def is_killed(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[float]:
    if any("bad" in answer for answer in answers):
        os.kill(os.getpid(), signal.SIGKILL)
    return [1.0] * len(answers)


def leaves(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[float]:
    sys.exit("enough")


def not_a_number(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[float]:
    return [float("nan") if "bad" in answer else 1.0 for answer in answers]


def infinite(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[float]:
    return [float("inf")] * len(answers)


def too_few(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[float]:
    return [1.0] * (len(answers) - 1)


def words(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> list[Any]:
    return ["1.0"] * len(answers)


def one_for_all(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> Any:
    return 1.0


def nothing(prompts: list[str], answers: list[str], rows: list[dict[str, Any]]) -> None:
    return None


a_constant = 3
