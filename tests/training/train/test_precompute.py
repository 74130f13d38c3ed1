"""A reference that is computed before training: the numbers of one in memory, computed once, never half or stale."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bench.layouts import layout_cases
from rlexp.base.cache import locked
from rlexp.base.errors import DataError
from rlexp.base.made_once import meta_of
from rlexp.config.load import compose_config
from rlexp.config.schema import Config, HFModelConfig, TinyModelConfig
from rlexp.launch.joining import RankSpec
from rlexp.run_files.curve_distance import compared
from rlexp.training.reference.stored import Stored
from rlexp.training.train import build as building
from rlexp.training.train import precompute
from rlexp.training.train.build import build
from rlexp.training.train.rows_task import RowsTask
from rlexp.training.train.step import train_step
from rlexp.training.train.surroundings import UNPROBED
from rlexp.training.world import objects
from tests.helpers import warm
from tests.helpers.ranks import on_ranks
from tests.helpers.slurm.machine import wait_until

BASE = ("launch.device=cpu", "logger=none", "train.precision=fp64", "engine=torch", "data.size=20", "data.eval_size=3",
        "train.batch_size=4", "train.micro_batch_size=2", "train.eval_every=2")  # fmt: skip
CLOSE = 1e-12  # how far float64 losses over two rings may differ; measured: 1e-14


@functools.cache
def configured(*overrides: str, reference: str = "precompute") -> Config:
    return compose_config([*BASE, f"reference={reference}", *overrides])


def rows_of(cfg: Config, steps: int = 2) -> list[dict[str, float]]:
    """Return the held-out values before training, and the first steps' rows."""
    task = build(cfg, around=UNPROBED)
    rows = [task.evaluate(0), *(train_step(task, step) for step in range(1, steps + 1)), task.evaluate(steps)]
    task.close()
    return [{name: value for name, value in row.items() if compared(name)} for row in rows]


def close(one: Sequence[dict[str, float]], other: Sequence[dict[str, float]]) -> bool:
    return all(
        a.keys() == b.keys() and all(abs(a[name] - b[name]) <= CLOSE * (1 + abs(b[name])) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def files(cache: Path) -> dict[str, bytes]:
    """Return what is kept, without locks."""
    kept = (cache / "reference").glob("[!.]*/*")
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in kept if path.parent.suffix != ".making"}


def folders(cache: Path) -> set[str]:
    return {name.partition("/")[0] for name in files(cache)}


def rows_made(cache: Path) -> list[int]:
    """Return the last row of each part in the making."""
    journals = (cache / "reference").glob("*.making/journal.jsonl")
    return [json.loads(line)["facts"] for each in journals for line in each.read_bytes().splitlines()]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of the test's own, in a process that is a world of one rank."""
    monkeypatch.setenv("RLEXP_CACHE", str(tmp_path / "cache"))
    deterministic = torch.are_deterministic_algorithms_enabled()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield tmp_path / "cache"
    dist.destroy_process_group()
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def parts_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 20 rows be three parts."""
    monkeypatch.setattr(precompute, "PART", 8)


def no_model(*_: Any) -> Any:
    raise AssertionError("a model was loaded")


# ---- the numbers ----


def in_a_cache(spec: RankSpec, cfgs: Sequence[Config], cache: str) -> list[list[dict[str, float]]]:
    """Compute each run's rows, each reference of its own."""
    del spec
    rows = []
    for number, cfg in enumerate(cfgs):
        os.environ["RLEXP_CACHE"] = f"{cache}/{number}"
        rows.append(rows_of(cfg))
    return rows


def test_it_is_the_reference_in_memory_over_a_ring_and_over_replicas(tmp_path: Path) -> None:
    layouts = [("parallel=ring2", "launch.nproc=2"), ("parallel=ring1", "launch.nproc=2")]
    cfgs = [configured(*each, reference=name) for each in layouts for name in ("model", "precompute")]
    for rows in on_ranks(2, in_a_cache, cfgs, str(tmp_path)):
        assert rows[1][1]["train/loss"] == pytest.approx(np.log(2), abs=1e-15)
        for one, other in ((0, 1), (2, 3), (0, 2)):
            assert close(rows[one], rows[other])
    kept = [folders(tmp_path / place) for place in ("1", "3")]
    assert len(kept[0]) == 2
    assert kept[0] == kept[1]  # the key has no layout in it


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "fsdp2"])
def test_every_layout_computes_one_reference(engine: str, tmp_path: Path) -> None:
    """Each in a cache of its own, and all as the model in memory has it, in one process."""
    grid = [case for case in layout_cases() if case.ring_size <= 4]
    cfgs = [(case.ring_size, configured(*case.overrides(), f"engine={engine}")) for case in grid]
    cfgs.insert(0, (1, configured(*grid[0].overrides(), reference="model")))
    found, kept = [], []
    for world in (1, 2, 4):
        these = [cfg for ring, cfg in cfgs if ring == world]
        found += on_ranks(world, in_a_cache, these, str(tmp_path / str(world)))[0]
        kept += [sorted(folders(tmp_path / str(world) / str(number))) for number in range(len(these))]
    assert len(found) == len(grid) + 1
    for rows, names in zip(found[1:], kept[1:], strict=True):
        assert close(rows, found[0])
        assert names == kept[1]


LOSSES = ("loss=dpo loss.wpo=true", "loss=dpo loss.ld_alpha=0.5", "loss=aot", "loss=ipo data.drop_last=false",
          "loss=bco data.unpair=true", "loss=apo_zero_unpaired data.unpair=true")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_loss_has_the_reference_in_memory_over_any_ring(world: int, tmp_path: Path) -> None:
    """13 pairs leave a short last batch, in which some of four replicas have nothing."""
    rings = [ring for ring in (1, 2, 4) if world % ring == 0]
    cfgs = [configured(f"parallel=ring{ring}", f"launch.nproc={world}", "data.size=13", "train.micro_batch_size=1",
                       "eval.before_training=true", *loss.split(), reference=name)
            for loss in LOSSES for ring in rings for name in ("model", "precompute")]  # fmt: skip
    found = on_ranks(world, in_a_cache, cfgs, str(tmp_path))[0]
    for place in range(0, len(cfgs), 2):
        assert close(found[place], found[place + 1]), (LOSSES[place // 2 // len(rings)], rings[place // 2 % len(rings)])


def holding(spec: RankSpec, cfgs: Sequence[Config], cache: str) -> list[tuple[int, list[dict[str, float]]]]:
    """Return for each run the bytes of the reference model that are left when training begins, and its rows."""
    found = []
    frozen_model = building.frozen_model
    for number, cfg in enumerate(cfgs):
        os.environ["RLEXP_CACHE"] = f"{cache}/{number}"
        tensors: list[Any] = []

        def watched(*args: Any, to: list[Any] = tensors) -> Any:
            import weakref

            frozen = frozen_model(*args)
            held = [getattr(each, "ds_tensor", each) for each in frozen.policy.parameters()]
            to += map(weakref.ref, [*held, *frozen.policy.parameters()])
            return frozen

        building.frozen_model = watched
        forget, left = precompute._Keeper.forget_model, []

        def forgotten(self: Any, forget: Any = forget, left: list[int] = left, tensors: list[Any] = tensors) -> None:
            forget(self)
            left.append(sum(each().untyped_storage().nbytes() for each in tensors if each() is not None))

        precompute._Keeper.forget_model = forgotten
        try:
            rows = rows_of(cfg)
        finally:
            building.frozen_model, precompute._Keeper.forget_model = frozen_model, forget
        assert tensors
        found.append((sum(left), rows))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "zero0", "zero1", "zero2", "zero3", "fsdp2"])
def test_every_engine_gives_the_model_s_memory_back_before_training(engine: str, tmp_path: Path) -> None:
    cfgs = [configured(f"engine={engine}", "parallel=ring2", f"train.precision={precision}", reference=name)
            for precision in ("fp32", "bf16") for name in ("model", "precompute")]  # fmt: skip
    (_, one), (left, other), (_, low), (low_left, low_other) = on_ranks(2, holding, cfgs, str(tmp_path))[0]
    assert (left, low_left) == (0, 0)
    assert one[1]["train/loss"] == pytest.approx(np.log(2), abs=1e-12)
    assert other[1]["train/loss"] == pytest.approx(np.log(2), abs=1e-6)  # of other micro-batches: rounded otherwise
    for a, b in ((one, other), (low, low_other)):
        losses = [[row.get("train/loss", row.get("eval/loss")) for row in rows] for rows in (a, b)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6 if a is one else 1e-2)


# ---- once, and whole ----


def test_it_is_computed_once_and_then_no_model_is_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, kept = rows_of(configured()), files(cache)
    monkeypatch.setattr(building, "frozen_model", no_model)
    assert rows_of(configured()) == first
    assert rows_of(configured("optim.lr=1e-5", "loss.beta=0.5", "train.micro_batch_size=1"))[1] != first[1]
    assert files(cache) == kept
    with pytest.raises(AssertionError, match="a model was loaded"):
        rows_of(configured("model.seed=1"))


Interrupting = Callable[[pytest.MonkeyPatch, int], None]


def in_a_pass(patch: pytest.MonkeyPatch, number: int) -> None:
    """Interrupt the computing of a part."""
    _nth(patch, precompute._Keeper, "values", number)


def before_a_name(patch: pytest.MonkeyPatch, number: int) -> None:
    """Interrupt the writing of a file that has no name yet."""
    from rlexp.base import files

    _nth(patch, files.os, "replace", number)


def after_a_part(patch: pytest.MonkeyPatch, number: int) -> None:
    """Interrupt behind the writing of a part."""
    _nth(patch, precompute, "appended", number, after=True)


def _nth(patch: pytest.MonkeyPatch, holder: Any, name: str, number: int, *, after: bool = False) -> None:
    original, calls = getattr(holder, name), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == number and not after:
            raise KeyboardInterrupt
        result = original(*args, **kwargs)
        if len(calls) == number:
            raise KeyboardInterrupt
        return result

    patch.setattr(holder, name, counted)


def noted(patch: pytest.MonkeyPatch, to: list[int]) -> None:
    """Note the first row of each part that is computed."""
    values = precompute._Keeper.values
    patch.setattr(precompute._Keeper, "values", lambda *args: to.append(args[2]) or values(*args))


@pytest.mark.usefixtures("parts_of_eight")
@pytest.mark.parametrize(
    ("interrupt", "numbers"),
    [
        (in_a_pass, (3,)),
        pytest.param(in_a_pass, (1, 2), marks=pytest.mark.slow),
        pytest.param(before_a_name, (1,), marks=pytest.mark.slow),
        pytest.param(after_a_part, (1, 2, 3), marks=pytest.mark.slow),
    ],
)
def test_stopped_anywhere_and_begun_again_it_is_the_same_file(
    interrupt: Interrupting, numbers: Sequence[int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = configured("train.eval_every=null")
    build(cfg, around=UNPROBED)
    expected = files(cache)
    for number in numbers:
        shutil.rmtree(cache)
        with monkeypatch.context() as patch:
            interrupt(patch, number)
            with pytest.raises(KeyboardInterrupt):
                build(cfg, around=UNPROBED)
        parts = rows_made(cache)
        computed: list[int] = []
        with monkeypatch.context() as patch:
            noted(patch, computed)
            build(cfg, around=UNPROBED)
        assert files(cache) == expected
        assert not list((cache / "reference").glob("*.making"))
        assert len(parts) + len(computed) >= 3, "a part was taken up that was not whole"
        if number > 1:
            assert 0 not in computed or not parts, "it began anew"


@pytest.mark.slow
@pytest.mark.usefixtures("parts_of_eight")
def test_a_torn_part_is_computed_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = configured("train.eval_every=null")
    build(cfg, around=UNPROBED)
    expected = files(cache)
    shutil.rmtree(cache)
    with monkeypatch.context() as patch:
        in_a_pass(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            build(cfg, around=UNPROBED)
    (values,) = (cache / "reference").glob("*.making/values")
    content = values.read_bytes()
    values.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    build(cfg, around=UNPROBED)
    assert files(cache) == expected


@pytest.mark.parametrize(
    "harm",
    [
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        pytest.param(lambda content: content[:-1], marks=pytest.mark.slow),
        pytest.param(lambda _: b"", marks=pytest.mark.slow),
    ],
    ids=["changed", "cut", "empty"],
)
def test_a_damaged_file_is_made_anew(harm: Any, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build(configured(), around=UNPROBED)
    expected = files(cache)
    for path in (cache / "reference").glob("[!.]*/values"):
        path.write_bytes(harm(path.read_bytes()))
    build(configured(), around=UNPROBED)
    assert files(cache) == expected
    assert capfd.readouterr().err.count("is damaged (") == 2


def test_another_run_that_computes_the_same_is_waited_for(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    build(configured("train.eval_every=null"), around=UNPROBED)
    (name,) = folders(cache)
    place = cache / "reference" / name
    place.rename(cache / "aside")
    begun = threading.Event()

    def compute() -> None:
        with locked(place):
            begun.set()
            inode = os.stat(place.with_name(f".{place.name}.lock")).st_ino
            wait_until(lambda: re.search(rf"-> FLOCK .*:{inode} ", Path("/proc/locks").read_text()), 240)  # it waits
            (cache / "aside").rename(place)

    other = threading.Thread(target=compute)
    other.start()
    begun.wait()
    monkeypatch.setattr(building, "frozen_model", no_model)
    build(configured("train.eval_every=null"), around=UNPROBED)
    other.join()
    assert "waits for another run that computes the reference of the same pairs." in capfd.readouterr().err


# ---- which rows ----


def kept_rows(*overrides: str) -> dict[bool, int]:
    """Return how many sequences of the examples to train on, and of those held out, are kept."""
    task = build(configured(*overrides), around=UNPROBED)
    assert isinstance(task, RowsTask)
    assert isinstance(task.reference, Stored)
    return {held_out: len(kept.values) for held_out, kept in task.reference.kept.items()}


def test_only_rows_that_the_run_asks_for_are_computed(cache: Path) -> None:
    assert kept_rows("train.max_steps=2") == {False: 2 * 8, True: 6}
    assert kept_rows("train.max_steps=2", "train.eval_every=null") == {False: 2 * 8}
    assert kept_rows("train.max_steps=2", "train.eval_every=null", "eval.before_training=true") == {False: 16, True: 6}
    whole = len(folders(cache))
    assert kept_rows("data.size=22") == {False: 44, True: 6}
    assert len(folders(cache)) == whole + 1
    assert kept_rows("data.size=22", "seed=5", "train.epochs=2") == {False: 44, True: 6}  # another tail is left out
    assert len(folders(cache)) == whole + 1
    task = build(configured("train.max_steps=2"), trains=False, around=UNPROBED)
    assert isinstance(task, RowsTask)
    assert isinstance(task.reference, Stored)
    assert task.reference.kept.keys() == {True}
    assert len(folders(cache)) == whole + 1


@pytest.mark.slow
def test_the_template_is_in_the_key_by_the_tokens_that_it_makes(cache: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"Question {number}?", "chosen": "Yes.", "rejected": "No."} for number in range(8)]
    path = tmp_path / "rows.jsonl"
    counts = []
    for overrides, content in (((), rows), (("data.system=Be brief.",), rows), ((), rows[::-1])):
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
        words = [word for word in BASE if not word.startswith("data.")]
        cfg = compose_config([*words, "data=jsonl", f"data.path={path}", f"data.cache={cache}", "data.eval_size=0",
                              "train.eval_every=null", "reference=precompute", *overrides])  # fmt: skip
        build(cfg, around=UNPROBED)
        counts.append(len(folders(cache)))
    assert counts == [1, 2, 3]


# ---- what goes wrong ----


def test_a_cache_that_is_full_or_cannot_be_written_is_one_message(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(number: int) -> Any:
        def write(*_: Any, **__: Any) -> None:
            raise OSError(number, os.strerror(number))

        return write

    said = {errno.ENOSPC: "has no room for the log-probabilities of reference=precompute (No space left on device).",
            errno.EROFS: "cannot be written (Read-only file system), and reference=precompute keeps"}  # fmt: skip
    for number, expected in said.items():
        with monkeypatch.context() as patch:
            patch.setattr(precompute, "appended", failing(number))
            with pytest.raises(DataError, match=f"^RLEXP_CACHE={cache}: {re.escape(expected)}"):
                build(configured(), around=UNPROBED)
    shutil.rmtree(cache)
    cache.write_text("a file in the folder's place")
    with pytest.raises(DataError, match=f"^RLEXP_CACHE={cache}: cannot be written .*RLEXP_CACHE=FOLDER before"):
        build(configured(), around=UNPROBED)


def test_a_hub_model_of_an_unknown_commit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its branch may move, and the values of one commit would stand for those of another."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"^reference=precompute: cannot tell which commit of org/name is in this"):
        precompute._facts(configured(), HFModelConfig(path="org/name"), "rows")
    for model in (HFModelConfig(path=str(tmp_path)), TinyModelConfig()):
        assert precompute._facts(configured(), model, "rows")


# ---- ranks, machines, jobs ----


def dying(spec: RankSpec, cfg: Config, cache: str, moment: int | None) -> None:
    """Build a run whose second rank is killed as it begins a part."""
    os.environ["RLEXP_CACHE"] = cache
    precompute.PART = 8
    values, calls = precompute._Keeper.values, []

    def counted(*args: Any) -> Any:
        calls.append(args)
        if spec.rank == 1 and len(calls) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return values(*args)

    precompute._Keeper.values = counted
    build(cfg, around=UNPROBED)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["parallel=ring2", "parallel=ring1"])
def test_a_killed_rank_leaves_what_the_next_run_goes_on_from(layout: str, tmp_path: Path) -> None:
    cfg = configured(layout, "launch.nproc=2")
    on_ranks(2, dying, cfg, str(tmp_path / "whole"), None)
    with pytest.raises(Exception, match=r"rank 1"):
        on_ranks(2, dying, cfg, str(tmp_path / "killed"), 3)
    assert rows_made(tmp_path / "killed") == [8, 16]
    on_ranks(2, dying, cfg, str(tmp_path / "killed"), None)
    assert files(tmp_path / "killed") == files(tmp_path / "whole") != {}


def as_machines(spec: RankSpec, cfg: Config, folder: Path) -> list[dict[str, float]]:
    """Take each rank for a machine with a cache of its own."""
    mine = folder / str(spec.rank)
    mine.mkdir(exist_ok=True)
    (mine / "boot").write_text(str(spec.rank))
    objects.BOOT = mine / "boot"
    precompute.BLOCK = 1000
    os.environ["RLEXP_CACHE"] = str(mine / "cache")
    return rows_of(cfg)


@pytest.mark.slow
def test_each_machine_has_the_file_and_one_that_lost_it_gets_it_again(tmp_path: Path) -> None:
    cfg = configured("parallel=ring2")
    rows = on_ranks(2, as_machines, cfg, tmp_path)
    kept = [files(tmp_path / str(rank) / "cache") for rank in range(2)]
    assert kept[0] == kept[1]
    assert len(folders(tmp_path / "0" / "cache")) == 2
    for lost in (1, 0):
        shutil.rmtree(tmp_path / str(lost) / "cache" / "reference")
        assert on_ranks(2, as_machines, cfg, tmp_path) == rows
        assert [files(tmp_path / str(rank) / "cache") for rank in range(2)] == kept


def with_left_copies(spec: RankSpec, cfg: Config, folder: Path, names: Sequence[str]) -> list[dict[str, float]]:
    """Run on machines of which one has copies that were begun by a process of the same name and number."""
    if spec.rank == 1:
        place = folder / "1" / "cache" / "reference"
        place.mkdir(parents=True)
        for name in names:
            left = place / f".{name}.{os.uname().nodename}.{os.getpid()}.tmp"
            left.mkdir()
            (left / "values").write_bytes(b"left")
    return as_machines(spec, cfg, folder)


@pytest.mark.slow
def test_a_copy_that_was_left_is_begun_anew(tmp_path: Path) -> None:
    cfg = configured("parallel=ring2")
    rows = on_ranks(2, as_machines, cfg, tmp_path)
    kept, names = files(tmp_path / "1" / "cache"), folders(tmp_path / "1" / "cache")
    shutil.rmtree(tmp_path / "1" / "cache" / "reference")
    assert on_ranks(2, with_left_copies, cfg, tmp_path, list(names)) == rows
    assert files(tmp_path / "1" / "cache") == kept


@pytest.mark.slow
def test_two_jobs_at_once_compute_it_once_and_an_evaluation_and_a_resumed_run_find_it(
    cache: Path, tmp_path: Path
) -> None:
    words = [*BASE, "reference=precompute", "parallel=ring2", "data.size=200", "train.max_steps=4", "data.eval_size=20"]
    jobs = [warm.start("rlexp", [*words, f"hydra.run.dir=run{number}"], tmp_path) for number in range(2)]
    said = [job.communicate(200)[1] for job in jobs]
    assert [job.wait() for job in jobs] == [0, 0], said
    computed = [len(re.findall("computes the log-probabilities of", each)) for each in said]
    assert sum(computed) == 2, said  # train and held out
    rows = [(tmp_path / f"run{number}" / "metrics.jsonl").read_text().splitlines() for number in range(2)]
    losses = [[json.loads(row)["train/loss"] for row in each] for each in rows]
    assert losses[0] == losses[1]
    kept = files(cache)

    evaluated = warm.run("rlexp.eval", ["run0", "--json", "found.json"], tmp_path)
    assert "computes the log-probabilities" not in evaluated.stderr
    assert evaluated.returncode == 0, evaluated.stderr
    found = (tmp_path / "found.json").read_text()
    assert repr(json.loads(rows[0][-1])["eval/loss"])[:12] in found

    parted = [*words, "hydra.run.dir=parted"]
    assert warm.run("rlexp", [*parted, "train.stop_after=2"], tmp_path).returncode == 0
    shutil.rmtree(cache)
    again = warm.run("rlexp", parted, tmp_path)
    assert "computes the log-probabilities" in again.stderr  # of the starting weights, not of the checkpoint's
    curve = [json.loads(row) for row in (tmp_path / "parted" / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/loss"] for row in curve] == pytest.approx(losses[0], rel=1e-12)
    assert files(cache) == kept


@pytest.mark.slow
def test_a_file_says_what_it_is_of(cache: Path) -> None:
    build(configured("train.eval_every=null"), around=UNPROBED)
    (name,) = folders(cache)
    meta = meta_of(cache / "reference" / name)
    assert meta["name"] == name
    assert meta["of"]["model"]["name"] == "tiny"
    assert meta["of"]["precision"] == "fp64"
