"""A run's files with anything in the place of any of their texts: `compare` and `status` end with an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlexp.status.__main__ import main
from tests.helpers import attacks
from tests.helpers.curves import a_run, compare
from tests.helpers.parsing import parse_once

RANK = {"rank": 0, "at": 1.0, "step": 3, "phase": "forward", "peaks": {"forward": 5}, "tensors": {"forward": 5},
        "pack": 1, "packs": 2, "tokens": 3, "of_tokens": 5, "pace": 0.1, "began": 1.0, "died": "here"}  # fmt: skip
JOB = {"number": 0, "folder": "one", "overrides": ["seed=1"]}
SWEEP = {"name": "a", "command": ["python", "-m", "rlexp"], "jobs": [JOB], "axes": {"seed": ["1", "2"]}}
ROLLOUT = {"step": 1, "rollout": 1, "samples": [{"text": "a", "reward": 1.0}]}
RUN = {"status": "failed", "reason": "rank 1 failed", "requeues": [{"job": "3", "at": 1.0}], "wandb_id": "x",
       "data": {"versions": {"a": "b"}}, "slurm": {"job": "1", "cluster": "c"}}  # fmt: skip


def contents(folder: Path) -> dict[str, Any]:
    """Return what stands in each file of a run: of lines, the last one."""
    known = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    row = json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    return {"run.json": known | RUN, "metrics.jsonl": row, "config.yaml": config, "memory.jsonl": RANK,
            "sweep.json": SWEEP, "rollouts.jsonl": ROLLOUT}  # fmt: skip


def cases(of: dict[str, Any], config: list[str], plant: str) -> Iterator[tuple[str, Any]]:
    """Yield a file of the run, and its content with a plant in one place: a text, or what JSON is made of."""
    for name, content in of.items():
        yield from ((name, each) for each in attacks.planted(content, plant))
        yield name, f'{{"step": {plant}}}\n'
    for place, line in enumerate(config):
        yield (
            "config.yaml",
            "\n".join([*config[:place], f"{line.partition(':')[0]}: {plant}", *config[place + 1 :], ""]),
        )


@attacks.few_or_many(25, 600)
def test_a_run_of_anything_is_looked_at(
    count: int, two: Path, unpainted: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del unpainted
    parse_once()
    monkeypatch.setenv(attacks.VARIABLE, attacks.SECRET)
    monkeypatch.chdir(two)
    folder = a_run(two / "spoilt", "parallel=ring2")
    whole = {each.name: each.read_bytes() for each in folder.iterdir()}
    of, config = contents(folder), (folder / "config.yaml").read_text(encoding="utf-8").splitlines()
    every = (case for plant in attacks.PLANTS for case in cases(of, config, plant))
    for name, content in attacks.drawn(every, count):
        text = content if isinstance(content, str) else json.dumps(content) + "\n"
        (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
        with attacks.shown((name, text)), attacks.bounded():
            codes = [main(["."]), main(["spoilt", "--json"]), compare(two, "--force", "--out", two / "out")]
            assert set(codes) <= {0, 1}
            captured = capsys.readouterr()
            attacks.assert_harmless(captured.out + captured.err, *(two / "out").rglob("*"))
        (folder / name).unlink()
        for each, before in whole.items():
            (folder / each).write_bytes(before)
