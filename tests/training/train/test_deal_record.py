"""A run on a ring leaves one step's deal, as training had it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec
from rlexp.run_files import deal_json
from rlexp.run_files.deal_json import SequencePart
from rlexp.training.ring.widths import Costs
from rlexp.training.train import deal_record
from rlexp.training.train.deal_record import DRAWN, fewer
from tests.helpers.paths import FILES
from tests.helpers.ranks import on_ranks

UNEVEN = ("launch.device=cpu", "launch.nproc=2", "logger=none", "engine=torch", "data=jsonl", "parallel.cut=auto",
          f"data.path={FILES}/rows/uneven.jsonl", "data.max_length=900",
          "data.shuffle=false", "train.batch_size=4", "train.max_steps=3")  # fmt: skip


def trained(spec: RankSpec, cfg: Config, folder: Path) -> list[dict[str, float]]:
    from rlexp.training.train.build import build
    from rlexp.training.train.deal_record import DealRecord
    from rlexp.training.train.step import train_step
    from rlexp.training.train.surroundings import UNPROBED

    task = build(cfg, around=UNPROBED)
    record = DealRecord(task.run, folder, after=0, last=3)
    rows = [train_step(task, step, record) for step in (1, 2, 3)]
    assert task.run.world.ring.traffic.watcher is None
    return rows


def test_the_second_step_is_written_down_as_it_was_dealt(tmp_path: Path) -> None:
    rows = on_ranks(2, trained, compose_config([*UNEVEN, "parallel=elastic"]), tmp_path)[0]
    deal = deal_json.read(tmp_path / deal_json.DEAL)
    assert deal is not None
    assert deal.step == 2
    times = [rank.work + rank.sending for rank in deal.ranks]
    assert max(times) / (sum(times) / 2) == pytest.approx(rows[1]["train/ring_estimate"])
    parts = [part for rank in deal.ranks for part in rank.parts]
    assert sum(part.tokens for part in parts) == rows[1]["train/tokens"] - rows[1]["train/shared_tokens"]
    assert {part.width for part in parts} == {1, 2}
    assert all(sum(part.work for part in rank.parts) <= rank.work for rank in deal.ranks)
    assert all(rank.seconds is not None and rank.seconds > 0 for rank in deal.ranks)


def test_a_ring_that_cuts_all_alike_leaves_no_deal_and_none_of_another_layout(tmp_path: Path) -> None:
    (tmp_path / deal_json.DEAL).write_text("{}", encoding="utf-8")
    on_ranks(2, trained, compose_config([*UNEVEN, "parallel=ring2", "parallel.cut=all"]), tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_gpu_is_not_timed_where_all_ranks_wait_for_each_other(tmp_path: Path, sharded: bool) -> None:
    """In the last backward pass, and where weights come from all ranks. There is no GPU here: its clock is made up."""
    clock = SimpleNamespace(now=0.0)

    class Clock:
        def __init__(self, *_: object) -> None:
            self.began, self.took = clock.now, None

        def stop(self) -> None:
            self.took = clock.now - self.began if self.took is None else self.took

        def seconds(self) -> float | None:
            return self.took

    ring = SimpleNamespace(size=2, rank=0, traffic=None)
    run = SimpleNamespace(
        layout=SimpleNamespace(costs=Costs(1.0), deal=lambda *_: None), device=torch.device("cuda"),
        world=SimpleNamespace(rank=0, size=1, ring=ring), engine=SimpleNamespace(sharded=sharded),
    )  # fmt: skip
    step = SimpleNamespace(batch=SimpleNamespace(step=2))
    with mock.patch.object(deal_record, "Computing", Clock):
        record = deal_record.DealRecord(run, tmp_path, after=0, last=3)  # type: ignore[arg-type]
        record.prepared(step)  # type: ignore[arg-type]
        for last in (False, True):
            clock.now += 1.0
            record.handed(None, None, last)
        clock.now += 8.0
        record.differentiated(step)  # type: ignore[arg-type]
    deal = deal_json.read(tmp_path / deal_json.DEAL)
    assert deal is not None
    assert [rank.seconds for rank in deal.ranks] == [None if sharded else 2.0]


def test_light_parts_are_written_down_together() -> None:
    heavy = [SequencePart(2, 10, 1000.0 - number) for number in range(DRAWN)]
    light = [SequencePart(1, 3, 1.0), SequencePart(1, 4, 2.0), SequencePart(2, 5, 3.0)]
    assert fewer([*light, *heavy]) == [*heavy, SequencePart(1, 7, 3.0), SequencePart(2, 5, 3.0)]
