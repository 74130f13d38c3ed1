"""The real W&B client: offline, and online with a server of the tests' own."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlexp.base.errors import SinkError
from rlexp.config.load import compose_config
from rlexp.config.schema import Best, Device, LaunchConfig, LoggerConfig, WandbMode
from rlexp.config.schema.models import Precision
from rlexp.launch import run_folder
from rlexp.launch.joining import RankSpec, join, launch_on, prepare_environment
from rlexp.launch.local import PRELOAD, RankFailed, run_ranks
from rlexp.run_files.curve_distance import compared
from rlexp.training.sinks.base import Ending
from rlexp.training.sinks.wandb_access import WandbRun, read_offline, read_project, upload_in_words, wandb_mode
from rlexp.training.sinks.wandb_run import Extremes, WandbSink, new_id
from tests.helpers.runs import wait_for_steps
from tests.helpers.slurm.machine import below, processes
from tests.helpers.wandb_runs import ARGS, CLEAN, begin, curve_of, kill_after, records, train, values_of, wandb
from tests.helpers.wandb_server import WandbServer

STEPS, SAVED, KILLED = 24, 10, 17  # of a run that is killed
FEW = 6  # steps of a run that is not
CONSTANT = "optim.decay=constant"
SAVING = (f"checkpoint.save_every={SAVED}", CONSTANT)
OFTEN = {"WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "1"}  # seconds; after 15 nothing would have arrived before the kill
SWEEP = (
    "logger.group=sweep", "logger.tags=[mine]", "logger.axes={parallel:ring2,data.max_length:'512'}",
    "logger.baseline=base", "logger.artifacts=true", "train.eval_every=4",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Ran:
    """A run that has ended: its folder, its steps, when it saved, and the steps that were sent and computed again."""

    folder: Path
    steps: int = FEW
    saved: tuple[int, ...] = (FEW // 2, FEW)
    again: range = range(0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a curve, invented, that others are compared with."""
    place = tmp_path_factory.mktemp("wandb")
    (place / "base").mkdir()
    lines = [json.dumps({"step": step, "train/loss": 1 / step}) for step in range(1, FEW + 1)]
    (place / "base" / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return place


def with_baseline(place: Path, steps: int) -> Path:
    answer = train(place, "logger=none", f"train.max_steps={steps}", CONSTANT, run="base")
    assert answer.returncode == 0, answer.stderr
    return place


@pytest.fixture(scope="module")
def undisturbed(base: Path) -> Ran:
    answer = train(base, f"train.max_steps={FEW}", f"checkpoint.save_every={FEW // 2}", CONSTANT, *SWEEP)
    assert answer.returncode == 0, answer.stderr
    assert "uploaded" not in answer.stderr
    return Ran(base / "run")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run that was killed and resumed."""
    place = with_baseline(tmp_path_factory.mktemp("killed"), STEPS)
    kill_after(KILLED, place, "parallel=ring2", *SAVING, *SWEEP)
    answer = train(place, "parallel=ring1", f"train.max_steps={STEPS}", *SAVING, *SWEEP)
    assert answer.returncode == 0, answer.stderr
    assert "continues from" in answer.stderr
    return resumed(place)


def resumed(place: Path) -> Ran:
    return Ran(place / "run", STEPS, (2 * SAVED, STEPS), range(SAVED + 1, STEPS))


BOTH = pytest.mark.parametrize("name", ["undisturbed", pytest.param("killed", marks=pytest.mark.slow)])


@pytest.fixture
def ran(name: str, request: pytest.FixtureRequest) -> Ran:
    """The run of this name, made once."""
    return request.getfixturevalue(name)


@pytest.fixture(scope="module")
def online(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WandbServer, Ran]]:
    """A run that was killed and resumed, with an account."""
    place = with_baseline(tmp_path_factory.mktemp("online"), STEPS)
    with WandbServer() as server:
        kill_after(KILLED, place, "parallel=ring2", *SAVING, *SWEEP, env=CLEAN | server.environment | OFTEN)
        arrived = len(server.rows)
        there = CLEAN | server.environment
        answer = train(place, "parallel=ring1", f"train.max_steps={STEPS}", *SAVING, *SWEEP, env=there)
        assert answer.returncode == 0, answer.stderr
        assert "Tried to log" not in answer.stderr  # rows that W&B has are not sent again
        assert 0 < arrived < STEPS
        yield server, resumed(place)


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Remove the account; a test sets what it needs."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/dev/null")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))  # where W&B's public API makes folders
    return monkeypatch


def expect_rows(sent: list[dict], ran: Ran) -> None:
    """Expect each step once, in order, with every value.

    A step that was sent, lost by the kill and computed again has the values of the first time: its curve is the same
    up to rounding, and its speed and memory are those of the first time. Live tensors are counted anew.
    """
    rows = curve_of(ran.folder)
    assert [row["train/global_step"] for row in sent] == [row["step"] for row in rows] == list(range(1, ran.steps + 1))
    for one, other in zip(map(values_of, sent), map(values_of, rows), strict=True):
        again = other["train/global_step"] in ran.again
        differing = {name for name in one.keys() ^ other.keys() if not (again and "tensors_peak" in name)}
        assert not differing
        assert again or one == other
        for name in filter(compared, one.keys() & other.keys()):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)  # in float32; 4e-6 measured


def expect_summary(summary: dict, ran: Ran) -> None:
    """Expect best, last and highest values of the run's whole life, not of its last process."""
    rows = curve_of(ran.folder)
    told = {name: value for row in rows for name, value in values_of(row).items()}
    last = {name: value for name, value in told.items() if "tensors_peak" not in name}  # counted anew where it goes on
    assert {name: summary[name] for name in last} == last
    assert summary["max/memory/tensors_peak_bytes"] >= told["memory/tensors_peak_bytes"]
    assert summary["best/train/loss"] == min(row["train/loss"] for row in rows)
    assert summary["best/eval/loss"] == min(row["eval/loss"] for row in rows if "eval/loss" in row)
    peaks = [name for name in last if name.startswith("memory/") and name.endswith("_bytes")]
    assert {"memory/peak_bytes", "memory/forward_peak_bytes"} <= set(peaks)
    for name in peaks:
        assert summary[f"max/{name}"] == max(row[name] for row in rows if name in row)


def expect_config(config: dict, ring_size: int) -> None:
    assert (config["ring_size"], config["dp_size"]) == (ring_size, 1)
    assert config["grad_acc"] is None  # since micro-batches are filled by tokens
    assert (config["axis/parallel"], config["axis/data_max_length"]) == ("ring2", "512")
    assert config["identity"]["loss.name"] == "dpo"
    assert config["optim"]["decay"] == "constant"


@BOTH
def test_an_offline_run_read_back_is_its_curve(ran: Ran) -> None:
    (run,) = read_offline(ran.folder)
    expect_rows(run.rows, ran)
    assert all(next(iter(row)) == "step" for row in run.rows)
    assert (run.group, run.state, run.name) == ("sweep", "finished", "run")
    expect_config(run.config, ring_size=1)
    expect_summary(run.summary, ran)
    assert read_offline(ran.folder / "wandb") == [run]


@pytest.mark.slow
def test_its_fragments_are_one_run_and_hold_each_step_once(killed: Ran) -> None:
    fragments = sorted((killed.folder / "wandb").glob("offline-run-*"))
    run_id = json.loads((killed.folder / "run.json").read_text(encoding="utf-8"))["wandb_id"]
    assert len(fragments) == 2
    assert all(fragment.name.endswith(f"-{run_id}") for fragment in fragments)
    assert run_id.startswith("run-")
    steps = [item["item"]["train/global_step"] for fragment in fragments for item in records(fragment, "history")]
    assert steps == list(range(1, STEPS + 1))
    unfinished, went_on = (read_offline(fragment)[0] for fragment in fragments)
    assert unfinished.state == "unfinished"
    assert unfinished.rows  # the client writes every second; at 15 s nothing would be there
    assert went_on.rows[-1]["step"] == STEPS


@pytest.mark.slow
def test_a_client_that_is_ended_does_not_end_the_run(tmp_path: Path) -> None:
    """When Slurm asks a job to stop, SIGTERM reaches every process of the job."""
    process = begin(tmp_path, "train.max_steps=120", "train.batch_size=2", "model.layers=1")
    wait_for_steps(tmp_path, process)
    table = processes()
    clients = [pid for pid in below(table, [process.pid]) if table[pid].name == "wandb-core"]
    assert len(clients) == 1
    os.kill(clients[0], signal.SIGTERM)
    said = process.communicate(timeout=240)[1]
    assert process.returncode == 0, said
    assert said.count("W&B's process has ended before the run") == 1
    assert [row["step"] for row in curve_of(tmp_path / "run")] == list(range(1, 121))
    assert train(tmp_path, "train.max_steps=122", "train.batch_size=2", "model.layers=1").returncode == 0
    (run,) = read_offline(tmp_path / "run")
    assert [row["step"] for row in run.rows] == list(range(1, 123))


@BOTH
def test_every_row_that_has_one_lies_beside_its_baseline(ran: Ran) -> None:
    losses = [row["train/loss"] for row in curve_of(ran.folder.parent / "base")]
    for row, loss in zip(curve_of(ran.folder), losses, strict=True):
        assert row["parity/loss_abs_diff"] == abs(row["train/loss"] - loss)


@pytest.mark.slow
def test_one_curve_lies_on_its_baseline(killed: Ran) -> None:
    for row in curve_of(killed.folder):
        assert row["parity/loss_abs_diff"] < 1e-5  # rounding in float32: 1e-7 measured


@BOTH
def test_checkpoints_are_told_of_by_reference(ran: Ran) -> None:
    told = [a for fragment in sorted((ran.folder / "wandb").glob("off*")) for a in records(fragment, "artifact")]
    steps = [json.loads(artifact["metadata"])["step"] for artifact in told]
    assert steps[-2:] == [*ran.saved]
    assert {artifact["type"] for artifact in told} == {"checkpoint"}
    files = {entry["path"]: entry["ref"] for entry in told[-1]["manifest"]["contents"]}
    assert files["manifest.json"] == (ran.folder / "checkpoints" / f"step-{ran.steps:08d}" / "manifest.json").as_uri()


@pytest.mark.parametrize(("name", "cut"), [
    ("undisturbed", False), pytest.param("killed", False, marks=pytest.mark.slow),
    pytest.param("killed", True, marks=pytest.mark.slow),
], ids=["one fragment", "two", "two, of which the first was cut"])  # fmt: skip
def test_offline_becomes_online_by_sync(ran: Ran, tmp_path: Path, account: pytest.MonkeyPatch, cut: bool) -> None:
    """One command for each: given both, W&B 0.31 leaves the second out if a kill came while the first was written."""
    shutil.copytree(ran.folder / "wandb", tmp_path / "wandb", symlinks=True)  # fragments that were sent are marked
    fragments = [str(path) for path in sorted((tmp_path / "wandb").glob("offline-run-*"))]
    if cut:
        (log,) = Path(fragments[0]).glob("*.wandb")
        written = log.read_bytes()
        log.write_bytes(written + written[7:27])  # behind the file's own 7 bytes: the beginning of a record
    with WandbServer() as server:
        for fragment in fragments:
            wandb("sync", fragment, env=CLEAN | server.environment)
        run = server.only
        expect_rows(run.rows, ran)
        assert (run.group, run.shown, run.state) == ("sweep", "run", "finished")
        expect_config({key: each["value"] for key, each in run.config.items()}, ring_size=1)
        expect_summary(run.summary, ran)
        for name, value in server.environment.items():
            account.setenv(name, value)
        (read,) = read_project("someone/rlexp")
        expect_rows(read.rows, ran)
        assert (read.id, read.group, read.state) == (run.name, "sweep", "finished")
        expect_config(read.config, ring_size=1)


@pytest.mark.slow
def test_what_arrives_online(online: tuple[WandbServer, Ran]) -> None:
    """A killed and resumed run is one run: each step once, every value, group, name, tags, configuration, summary."""
    server, ran = online
    run = server.only
    expect_rows(run.rows, ran)
    assert (run.shown, run.group, run.state) == ("run", "sweep", "finished")
    assert {"dpo", "tiny", "ring1", "mine"} <= set(run.tags)
    assert run.name == json.loads((ran.folder / "run.json").read_text(encoding="utf-8"))["wandb_id"]
    assert {sent["jobType"] for sent in server.runs if sent["jobType"]} == {"train"}
    expect_config({key: each["value"] for key, each in run.config.items()}, ring_size=1)
    expect_summary(run.summary, ran)
    assert server.exit_codes == [0]
    assert server.alerts == []
    assert json.loads(server.artifacts[-1]["metadata"]) == {"step": STEPS}


@pytest.mark.slow
def test_a_project_online_read_back(online: tuple[WandbServer, Ran], account: pytest.MonkeyPatch) -> None:
    server, ran = online
    for name, value in server.environment.items():
        account.setenv(name, value)
    (run,) = read_project("someone/rlexp")
    assert isinstance(run, WandbRun)
    expect_rows(run.rows, ran)
    assert all(next(iter(row)) == "step" for row in run.rows)
    expect_config(run.config, ring_size=1)
    expect_summary(run.summary, ran)
    with pytest.raises(SinkError, match=r"someone/nothing: .*Could not find project nothing"):
        read_project("someone/nothing")
    server.refused = "go away"
    with pytest.raises(SinkError, match=r"someone/rlexp: .*go away"):
        read_project("someone/rlexp")
    server.refused = None


def test_alerts_where_the_loss_leaves_its_baseline_and_where_the_run_fails(base: Path, tmp_path: Path) -> None:
    (tmp_path / "base").symlink_to(base / "base")
    with WandbServer() as server:
        answer = train(
            tmp_path, "optim.lr=1e30", "logger.baseline=base", "optim.max_grad_norm=0", "train.max_steps=9",
            env=CLEAN | server.environment,
        )  # fmt: skip
    assert answer.returncode == 1
    assert "is not finite" in answer.stderr
    apart, failed = server.alerts
    assert (apart["title"], apart["severity"]) == ("The loss has left its baseline", "WARN")
    assert "At step 1 " in apart["text"]
    assert (failed["title"], failed["severity"]) == ("The run has failed", "ERROR")
    assert "is not finite" in failed["text"]
    assert server.exit_codes == [1]
    rows = curve_of(tmp_path / "run")
    assert [values_of(row) for row in server.only.rows] == [values_of(row) for row in rows]
    assert server.only.state == "failed"


def test_what_wandb_refuses_is_one_message(tmp_path: Path) -> None:
    with WandbServer() as server:
        server.refused = "this key is not known"
        answer = train(tmp_path, "train.max_steps=2", env=CLEAN | server.environment)
    assert answer.returncode == 1
    said = answer.stderr.index("rlexp: the run is uploaded to your W&B account on http://127.0.0.1:")
    assert said < answer.stderr.index("rlexp: logger.mode=auto: W&B could not be reached, or refused")
    assert "Traceback" not in answer.stderr


def dying_rank(spec: RankSpec, run_dir: str) -> None:
    """Rank 1 runs out of memory in the third step."""
    from rlexp.config import load
    from rlexp.training.train import loop
    from rlexp.training.train.rank import train as train_run

    real = loop.train_step

    def step(task, number, *others):
        run = task.run
        if number == 3 and run.world.rank == 1:
            run.phases.begin(number)
            with run.phases("backward"):
                raise MemoryError("as a test wants it")
        return real(task, number, *others)

    loop.train_step = step
    cfg = load.from_file(Path(run_dir) / "config.yaml")
    join(spec, launch_on("cpu", 60.0))
    train_run(cfg, Path(run_dir))


def test_a_run_that_dies_of_memory_leaves_where(tmp_path: Path, account: pytest.MonkeyPatch) -> None:
    cfg = compose_config([*ARGS, "parallel=ring2", "logger.mode=offline"])
    prepare_environment(LaunchConfig(device=Device.cpu))
    run_folder.enter(cfg, tmp_path / "run")
    with pytest.raises(Exception, match="rank 1 ran out of memory in step 3, in its backward phase") as raised:
        run_ranks(dying_rank, 2, (str(tmp_path / "run"),), preload=PRELOAD, timeout=240)
    assert not isinstance(raised.value, RankFailed)
    run_folder.leave(tmp_path / "run")
    (run,) = read_offline(tmp_path / "run")
    assert (run.state, len(run.rows)) == ("failed", 2)
    assert run.summary["memory/died_in"] == "backward"
    assert (run.summary["memory/died_step"], run.summary["memory/died_rank"]) == (3, 1)
    assert run.summary["max/memory/backward_peak_bytes"] > 1e6
    (fragment,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (alert,) = records(fragment, "alert")
    assert "rank 1 ran out of memory" in alert["text"]


def test_the_loss_that_leaves_its_baseline_is_said_once(tmp_path: Path, account: pytest.MonkeyPatch) -> None:
    account.setenv("WANDB_MODE", "offline")
    facts = {"best": {"eval/loss": Best.min}, "precision": Precision.fp64}
    row = {"train/loss": 0.5, "train/global_step": 1, "memory/peak_bytes": 7}
    sink = WandbSink(LoggerConfig(), tmp_path, {}, [], **facts, run_id="a-000000")
    for step, apart in enumerate((4e-13, 6e-13, 7e-13), 1):  # the limit, 1e-12 of the loss, is 5e-13
        sink.log({"step": step, **row, "train/global_step": step, "parity/loss_abs_diff": apart})
    sink.close(Ending())
    (fragment,) = (tmp_path / "wandb").glob("offline-run-*-a-000000")
    (alert,) = records(fragment, "alert")
    assert "At step 2" in alert["text"]
    assert "fp64 allows 5e-13" in alert["text"]


def test_the_best_is_the_best_of_all() -> None:
    extremes = Extremes({"train/loss": Best.min, "eval/score": Best.max})
    assert extremes.better({"train/loss": 2.0, "eval/score": 1.0, "memory/peak_rank": 3, "memory/peak_bytes": 5}) == {
        "best/train/loss": 2.0, "best/eval/score": 1.0, "max/memory/peak_bytes": 5,
    }  # fmt: skip
    assert extremes.better({"train/loss": 3.0, "eval/score": 1.0, "memory/peak_bytes": 4}) == {}
    assert extremes.better({"train/loss": 1.0, "memory/peak_bytes": 6}) == {
        "best/train/loss": 1.0, "max/memory/peak_bytes": 6,
    }  # fmt: skip


@pytest.mark.parametrize(("given", "where", "expected"), [
    (None, "runs/2026-11-21_06-00-00_dpo_ring8", "2026-11-21_06-00-00_dpo_ring8-"),
    (None, "runs/sweep/3", "sweep-3-"),
    ("my sweep: ring4, max_length=512", "runs/x", "my-sweep-ring4-max_length-512-"),
    ("///", "runs/x", "run-"), ("x" * 100, "runs/x", "x" * 48 + "-"),
])  # fmt: skip
def test_ids_are_legible(given: str | None, where: str, expected: str) -> None:
    run_id = new_id(LoggerConfig(run_name=given), Path(where))
    assert run_id.startswith(expected)
    assert len(run_id) == len(expected) + 6
    assert run_id != new_id(LoggerConfig(run_name=given), Path(where))


@pytest.mark.parametrize(("make", "said"), [
    (lambda _path: None, "no such folder"), (lambda path: path.mkdir(), "is not a W&B folder"),
    (lambda path: _fragment(path, b""), "hold no record"),
    (lambda path: _fragment(path, b"x" * 4000), "`wandb leet inspect` cannot read it"),
], ids=["absent", "another's", "empty", "garbage"])  # fmt: skip
def test_what_is_not_wandbs_is_said(tmp_path: Path, make, said: str) -> None:
    make(tmp_path / "runs")
    with pytest.raises(SinkError, match=said):
        read_offline(tmp_path / "runs")


def _fragment(path: Path, contents: bytes) -> None:
    place = path / "offline-run-20261121_000000-a-000000"
    place.mkdir(parents=True)
    (place / "run-a-000000.wandb").write_bytes(contents)


@pytest.mark.parametrize(
    ("path", "said"), [("someone/rlexp", "there is no W&B account here"), ("a/b/c", "is not the name of a W&B project")]
)
def test_online_needs_an_account_and_a_project(account: pytest.MonkeyPatch, path: str, said: str) -> None:
    with pytest.raises(SinkError, match=said):
        read_project(path)


@pytest.mark.parametrize(("asked", "env", "expected"), [
    (WandbMode.offline, {"WANDB_API_KEY": "x" * 40}, "offline"),
    (WandbMode.auto, {"WANDB_API_KEY": "x" * 40}, "online"),
    (WandbMode.auto, {"WANDB_MODE": "offline", "WANDB_API_KEY": "x" * 40}, "offline"),
    (WandbMode.auto, {}, "offline"),
])  # fmt: skip
def test_online_with_an_account_and_offline_without(account, asked, env, expected) -> None:
    for name, value in env.items():
        account.setenv(name, value)
    assert wandb_mode(asked) == expected


@pytest.mark.parametrize(("keys", "env", "mode", "whose"), [
    ({}, {}, "online", "your W&B account, project rlexp."),
    ({"entity": "us", "project": "p"}, {"WANDB_ENTITY": "them"}, "online", "W&B, account us, project p."),
    ({}, {"WANDB_ENTITY": "them"}, "online", "W&B, account them, project rlexp."),
    ({}, {"WANDB_BASE_URL": "http://here"}, "shared", "your W&B account on http://here, project rlexp."),
    ({}, {}, "offline", None), ({}, {}, "disabled", None),
])  # fmt: skip
def test_an_upload_is_announced(account, keys, env, mode, whose) -> None:
    account.delenv("WANDB_ENTITY", raising=False)
    for name, value in env.items():
        account.setenv(name, value)
    said = upload_in_words(LoggerConfig(**keys), mode)
    assert said == "" if whose is None else said.startswith(f"rlexp: the run is uploaded to {whose} To leave this out: "
                                                            "logger=none;")  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "server", "expected"),
    [
        ("api.wandb.ai", None, "online"),
        ("api.forge.coreweave.com", None, "online"),  # where wandb 0.31 logs in
        ("api.wandb.ai", "https://api.forge.coreweave.com", "online"),
        ("wandb.example:8080", "http://wandb.example:8080", "online"),
        ("wandb.example", "http://wandb.example:8080", "online"),
        ("api.wandb.ai", "http://wandb.example:8080", "offline"),
    ],
)
def test_a_key_in_netrc_is_an_account(account, tmp_path: Path, machine: str, server: str | None, expected: str) -> None:
    (tmp_path / "netrc").write_text(f"machine {machine} login user password secret\n", encoding="utf-8")
    (tmp_path / "netrc").chmod(0o600)
    account.setenv("NETRC", str(tmp_path / "netrc"))
    if server is not None:
        account.setenv("WANDB_BASE_URL", server)
    assert wandb_mode(WandbMode.auto) == expected
