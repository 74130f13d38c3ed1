"""The whole program from the shell, as a user runs it, and as it dies."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlexp.config.load import from_file
from rlexp.launch.local import run_ranks
from rlexp.run_files.curve_distance import compared
from tests.conftest import Shell
from tests.helpers import warm
from tests.helpers.launched import whereabouts
from tests.helpers.paths import ROOT
from tests.helpers.programs import TORCHRUN, python
from tests.helpers.runs import descendants, gone, jobs_of, on_two_nodes, ranks_of, rows_of, run_json, wait_for_steps
from tests.helpers.slurm.machine import wait_until

TRAIN = {
    *("loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    *("logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected", "grad_norm", "learning_rate"),
    *("tokens", "total_tokens", "tokens_per_second", "step_seconds", "tflops", "epoch", "global_step"),
    *("ring_tokens", "ring_bytes", "ring_balance", "grad_acc", "micro_batches", "shared_tokens", "replica_skew"),
    "replica_wait_seconds",
}
MEMORY, TENSORS = (
    {
        f"memory/{phase}{of}peak_{what}"
        for phase in ("", "data_", "reference_", "forward_", "backward_", "optimizer_")
        for what in ("bytes", "rank")
    }
    for of in ("", "tensors_")
)
QUICK = ("launch.device=cpu", "logger=none", "hydra.run.dir=run")


def test_a_ring_of_four_trains_and_says_so(shell: Shell, tmp_path: Path) -> None:
    answer = shell(*QUICK, "parallel=ring4", "train.max_steps=2", "train.eval_every=2", "train.batch_size=4",
                   "data.size=40", "data.eval_size=2")  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert "ring of 4 (zigzag direct, cpu_flash) × 1 replica = 4 ranks on cpu" in answer.stderr
    assert "batch 4 over 1 replica, in micro-batches of up to " in answer.stderr
    assert f"done: {tmp_path}/run" in answer.stderr
    assert "Warning" not in answer.stderr
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert next(iter(rows[0])) == "step"
    assert rows[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    names = {f"train/{name}" for name in TRAIN}
    assert set(rows[0]) == names | {"step"} | MEMORY | TENSORS
    assert set(rows[1]) >= TENSORS
    assert 0 < rows[1]["memory/tensors_peak_bytes"] < rows[1]["memory/peak_bytes"] / 10  # most is the libraries'
    for row in rows:
        peaks = {row[name]: row[name.replace("bytes", "rank")] for name in MEMORY if name.endswith("_peak_bytes")}
        assert row["memory/peak_bytes"] == max(peaks)
        assert row["memory/peak_rank"] == peaks[max(peaks)]
    assert {"eval/loss", "eval/rewards/accuracies", "eval/logps/chosen"} <= set(rows[1])
    assert rows[1]["train/total_tokens"] == sum(row["train/tokens"] for row in rows)
    run = run_json(tmp_path / "run")
    assert (run["status"], run["reason"]) == ("finished", "all steps are done")
    assert run["data"] == {"pairs": 40, "eval_pairs": 2, "versions": {}, "not_as_read": {}, "eval_not_as_read": {}}
    assert run["steps"] == 2
    assert "Writing" not in answer.stderr
    assert type(rows[0]["train/tokens"]) is int
    sizes = {"world_size": 4, "ring_size": 4, "dp_size": 1, "batch_size": 4, "micro_batch_size": "auto",
             "max_tokens_per_micro_batch": 1024, "grad_acc": None}  # fmt: skip
    assert run["sizes"] == sizes
    assert run["versions"]["torch"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").decode([3, 4]) == '!"'
    assert model.config.num_attention_heads == 8


@pytest.mark.slow
def test_what_other_tests_start_is_what_a_shell_starts(rlexp: Shell, shell: Shell, tmp_path: Path) -> None:
    """Through helpers/warm.py: the same words and exit code, the same curve to the bit, in the same surroundings."""
    (tmp_path / "grades.py").write_text(
        "import os\ndef own(p, a, r):\n    return [float(os.environ['MINE'])] * len(a)\n"
    )
    run = ("launch.device=cpu", "logger=none", "hydra.run.dir=FOLDER", "logger.progress=false", "train.max_steps=2",
           "parallel=ring2", "engine=torch", "loss=ppo", "reward=python", "reward.function=grades:own", "data.size=16",
           "rollout.batch_size=8", "rollout.n_samples=2", "rollout.max_new_tokens=4", "data.eval_size=0",
           "data.max_length=160")  # fmt: skip
    for args in (run, (*run, "rollout.temperature=1e-30"), ("engine=torhc",), ("--cfg", "job")):
        answers = []
        for name, start in (("by-shell", shell), ("by-warm", rlexp)):
            answer = start(*(arg.replace("FOLDER", name) for arg in args), MINE="0.25")
            answers.append(
                (answer.returncode, *(text.replace(name, "FOLDER") for text in (answer.stdout, answer.stderr)))
            )
        assert answers[0] == answers[1]
    rows, others = (
        [{k: v for k, v in row.items() if compared(k)} for row in rows_of(tmp_path / name)]
        for name in ("by-shell", "by-warm")
    )
    assert len(rows) == 2
    assert rows == others
    assert rows[0]["train/objective/scores"] == 0.25
    ours = ("sizes", "versions", "identity", "status", "reason", "data", "parameters")
    one, other = (run_json(tmp_path / name) for name in ("by-shell", "by-warm"))
    assert {key: one[key] for key in ours} == {key: other[key] for key in ours}


def test_a_model_that_does_not_fit_says_where(rlexp: Shell, tmp_path: Path) -> None:
    """16 petabytes: the allocation fails on any machine, and no rank is left waiting."""
    answer = rlexp(*QUICK, "parallel=ring2", "model.hidden_size=67108864")
    assert answer.returncode == 1
    assert "ran out of memory in its build phase" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert run_json(tmp_path / "run")["status"] == "failed"


def test_it_learns_the_rule_of_the_synthetic_pairs(rlexp: Shell, tmp_path: Path) -> None:
    answer = rlexp(*QUICK, "engine=torch", "train.max_steps=24", "train.eval_every=24")
    assert answer.returncode == 0, answer.stderr
    last = rows_of(tmp_path / "run")[-1]
    assert last["eval/rewards/accuracies"] > 0.9
    assert last["eval/loss"] < 0.4


def test_a_trained_model_is_trained_on(rlexp: Shell, tmp_path: Path) -> None:
    """What a run exports is what `model=hf` loads, and rows come from a file."""
    assert rlexp(*QUICK, "train.max_steps=1").returncode == 0
    pairs = [{"prompt": f"say {n}: ", "chosen": f"yes {n}", "rejected": "no"} for n in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    answer = rlexp("launch.device=cpu", "logger=none", "hydra.run.dir=second", "parallel=ring2", "model=hf",
                   "model.path=run/model", "data=jsonl", "data.path=pairs.jsonl", "data.eval_path=pairs.jsonl",
                   "train.eval_every=1", "checkpoint.export=false", "memory.checkpointing=true")  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    row = rows_of(tmp_path / "second")[0]
    assert row["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert row["train/learning_rate"] == 5e-7
    assert not (tmp_path / "second" / "model").exists()


@pytest.mark.parametrize(("args", "rows", "said"), [
    ((), '{"prompt": "a", "chosen": "b"}\n', "pairs.jsonl:1: field `rejected` is missing"),
    (("data.max_length=8",), None, "pairs.jsonl:1: 12 tokens, and data.max_length=8"),
    (("train.batch_size=16",), None, "train.batch_size=16: the data set has 8 pairs"),
    (("data.eval_path=other.jsonl",), None, "data.eval_path=other.jsonl: no such file"),
], ids=["malformed", "too long", "less than a batch", "no held-out file"])  # fmt: skip
def test_bad_data_is_one_message(rlexp: Shell, tmp_path: Path, args: tuple, rows: str | None, said: str) -> None:
    good = '{"prompt": "prompt ", "chosen": "yes", "rejected": "no!!"}\n' * 8
    (tmp_path / "pairs.jsonl").write_text(rows or good, encoding="utf-8")
    answer = rlexp(*QUICK, "parallel=ring2", "data=jsonl", "data.path=pairs.jsonl", *args)
    assert answer.returncode == 1
    assert answer.stderr.startswith("rlexp: ")
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


def test_under_torchrun_it_joins_what_is_there(tmp_path: Path) -> None:
    words = ("launch.device=cpu", "logger=none", "train.max_steps=2", "engine=torch", "parallel.layout=auto")
    answer = python(*TORCHRUN, *words, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr  # also: what rank 0 chooses reaches the other
    (folder,) = (tmp_path / "runs").iterdir()  # one folder for all ranks: rank 0's
    assert len(rows_of(folder)) == 2
    assert run_json(folder)["sizes"]["dp_size"] == 2
    assert run_json(folder)["status"] == "finished"


@pytest.mark.slow
def test_torchruns_on_two_nodes_make_a_run_on_two_nodes(tmp_path: Path) -> None:
    quick = (*QUICK, "engine=torch", "train.max_steps=2", "parallel=ring4")
    (code, told), (other, _) = on_two_nodes(tmp_path, *quick)
    assert (code, other) == (0, 0), told
    assert "ring of 4 (zigzag neighbour, cpu_flash) × 1 replica = 4 ranks on cpu" in told
    launch = from_file(tmp_path / "run" / "config.yaml").launch
    assert (launch.nodes, launch.nproc) == (2, 2)
    said = "rlexp: launch.nodes=1: torchrun has started 4 ranks, 2 on each of 2 nodes. Use launch.nodes=2, or "
    for code, told in on_two_nodes(tmp_path, *quick, "launch.nodes=1", "hydra.run.dir=refused"):
        assert code == 1
        assert told.count(said) in (1, 2), "each of its ranks that torchrun did not end before"
        assert "Traceback" not in told.split(said)[0]
    assert not (tmp_path / "refused").exists()


@pytest.mark.slow
def test_under_torchrun_a_sweep_is_refused_and_sigterm_stops_in_good_order(tmp_path: Path) -> None:
    quick = ["launch.device=cpu", "logger=none", "engine=torch"]
    refused = python(*TORCHRUN, *quick, "+sweep=ring_sizes", cwd=tmp_path)
    assert refused.returncode != 0
    assert "rlexp: a sweep starts its own ranks." in refused.stderr
    assert "train/loss" not in refused.stderr
    process = subprocess.Popen(
        [sys.executable, *TORCHRUN, *quick, "parallel=ring2", "train.max_steps=100000", "hydra.run.dir=run"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for_steps(tmp_path, process)
    everyone = descendants(process.pid)
    process.terminate()
    process.communicate(timeout=240)
    assert gone(everyone, within=240)
    run = run_json(tmp_path / "run")
    assert (run["status"], run["reason"]) == ("stopped", "stopped by SIGTERM")


@pytest.mark.slow
def test_of_two_runs_that_want_one_folder_one_gets_it(tmp_path: Path) -> None:
    args = [*QUICK, "engine=torch", "train.max_steps=60", "train.batch_size=2", "checkpoint.export=false"]
    both = [warm.start("rlexp", args, tmp_path) for _ in range(2)]
    said = [process.communicate(timeout=240)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1]
    assert sum("another process is training there" in text for text in said) == 1
    assert [row["step"] for row in rows_of(tmp_path / "run")] == list(range(1, 61))


def test_a_held_out_loss_that_is_not_finite_is_said(rlexp: Shell) -> None:
    answer = rlexp(*QUICK, "engine=torch", "train.max_steps=3", "train.eval_every=1", "optim.lr=1e30")
    assert answer.returncode == 1
    assert "step 1: eval/loss" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_closed_terminal_does_not_end_a_run(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    args = [*QUICK, "engine=torch", "train.max_steps=2", "checkpoint.export=false"]
    process = warm.start("rlexp", args, tmp_path, stderr=write)
    os.close(write)
    assert process.wait(timeout=240) == 0
    assert len(rows_of(tmp_path / "run")) == 2


def test_the_ring_sweep_runs(rlexp: Shell, tmp_path: Path) -> None:
    """Its ledger and its report tell of both rings."""
    quick = ("launch.device=cpu", "launch.nproc=2", "logger=none", "train.max_steps=1", "engine=torch",
             "model.layers=1", "data.size=40", "data.eval_size=0", "checkpoint.export=false")  # fmt: skip
    answer = rlexp(
        "-m", "+sweep=ring_sizes", "hydra/launcher=local", "parallel=ring1,ring2", "hydra.sweep.dir=s", *quick
    )
    assert answer.returncode == 0, answer.stderr
    assert [run_json(tmp_path / "s" / str(job))["sizes"]["ring_size"] for job in (0, 1)] == [1, 2]
    assert [(job["label"], job["status"]) for job in jobs_of(tmp_path / "s")] == [
        ("ring1", "finished"), ("ring2", "finished"),
    ]  # fmt: skip
    assert json.loads((tmp_path / "s" / "summary.json").read_text(encoding="utf-8"))["verdict"]["status"] == "agree"
    assert {"report.html", "curves.png"} <= {path.name for path in (tmp_path / "s").iterdir()}
    assert "The 2 runs draw one curve" in answer.stdout
    assert answer.stderr.count("step 1/1  loss 0.6931") == 2


# ---- how it dies ----


ENDLESS = (*QUICK, "parallel=ring4", "train.max_steps=100000", "engine=torch", "train.micro_batch_size=8")


def test_a_killed_rank_ends_the_run_within_ten_seconds(tmp_path: Path) -> None:
    process = warm.start("rlexp", ENDLESS, tmp_path)
    wait_for_steps(tmp_path, process)
    everyone = descendants(process.pid)
    victim = ranks_of(process.pid)[2]
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    _, stderr = process.communicate(timeout=240)
    assert time.monotonic() - killed < 10
    assert process.returncode == 1
    assert "failed: the process was killed by SIGKILL; perhaps the machine had no memory left" in stderr
    assert gone(everyone, within=240)
    run = run_json(tmp_path / "run")
    assert run["status"] == "failed"
    assert "SIGKILL" in run["reason"]


def test_a_killed_launcher_takes_its_ranks_along(tmp_path: Path) -> None:
    process = warm.start("rlexp", ENDLESS, tmp_path)
    wait_for_steps(tmp_path, process)
    everyone = descendants(process.pid)
    process.kill()
    process.wait(timeout=240)
    assert gone(everyone, within=240)


def test_the_first_failing_ranks_own_error_is_shown(tmp_path: Path) -> None:
    """A defect in one rank: its traceback, not the others' lost connections."""
    code = (
        "from pathlib import Path\n"
        "from rlexp.launch.local import run_ranks\n"
        "from tests.helpers.launched import fail\n"
        f"run_ranks(fail, 4, log_dir=Path({str(tmp_path)!r}))\n"
    )
    answer = warm.run("-c", [code], ROOT)
    last = answer.stderr.strip().splitlines()
    assert answer.returncode == 1
    assert any("rank 2 failed: Traceback" in line for line in last)
    assert any("ZeroDivisionError: on purpose" in line for line in last)
    assert "Connection" not in last[-1]
    assert last[-1] == f"Its log: {tmp_path}/rank2.log"


def test_a_rank_that_fails_of_being_broken_off_was_stopped(tmp_path: Path) -> None:
    code = (
        "from rlexp.launch.local import Interrupted, run_ranks\n"
        "from tests.helpers.launched import fail_when_broken_off\n"
        "try:\n"
        f"    run_ranks(fail_when_broken_off, 2, ({str(tmp_path)!r},), grace=20)\n"
        "except Interrupted as stop:\n"
        "    print(stop.exit_code)\n"
    )
    process = warm.start("-c", [code], ROOT)
    assert wait_until(lambda: len(list(tmp_path.glob("rank*"))) == 2 or process.poll() is not None, 60)
    process.terminate()
    said, complaint = process.communicate(timeout=240)
    assert said == f"{128 + signal.SIGTERM}\n", complaint


def test_fresh_processes_for_gpus_are_ranks_too() -> None:
    """How ranks start on a GPU machine; what they run here needs none."""
    assert run_ranks(whereabouts, 2, device="cuda", timeout=200) == [(0, 2), (1, 2)]


def test_help_may_be_read_in_part(tmp_path: Path) -> None:
    """As by `python -m rlexp --help | head -1`: the pipe is closed before all is written."""
    command = [sys.executable, "-m", "rlexp", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert (process.wait(timeout=240), said) == (0, b"")
