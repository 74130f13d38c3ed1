"""Compare what is submitted to Slurm with golden files. With RLEXP_GOLDEN=write these tests write them again; read the
difference before you commit it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from rlexp.base.errors import ConfigError
from rlexp.launch.slurm import preamble
from rlexp.launch.slurm.key_checks import check_container
from tests.conftest import Shell
from tests.helpers.paths import FILES, ROOT

DRY = ("-m", "hydra.launcher.dry_run=true", "hydra.sweep.dir=sw")
SITE = (
    "hydra/launcher=site", "hydra.launcher.partition=gpu", "hydra.launcher.account=lab", "hydra.launcher.qos=long",
    "hydra.launcher.modules=[cuda/12.8,nccl]", "hydra.launcher.container=apptainer exec --nv /images/rlexp.sif",
    "hydra.launcher.environment={NCCL_IB_HCA: mlx5, WANDB_MODE: offline}", "hydra.launcher.interface=ib0",
    "hydra.launcher.setup=[ulimit -c 0]", "hydra.launcher.additional_parameters={exclusive: true, mail-type: FAIL}",
    "hydra.launcher.retries=2", "hydra.launcher.constraint=h100", "hydra.launcher.srun_args=['--cpu-bind=none']",
    "launch.device=cuda", "launch.nproc=8", "launch.nodes=4", "launch.rank_memory_gb=100", "launch.rank_cpus=12",
    "launch.time_limit=2d", "launch.grace_seconds=600",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("ring_sizes", ("+sweep=ring_sizes", "hydra/launcher=slurm", "launch.device=cpu", "launch.nodes=2",
                        "launch.nproc=4")),
        pytest.param("two_sizes", ("hydra/launcher=lab", "launch.device=cpu", "launch.nproc=2,3,4",
                                   "parallel=ring2"), marks=pytest.mark.slow),
        ("site", (*SITE, "parallel=ring8")),
    ],
)  # fmt: skip
def test_a_dry_run_shows_what_would_be_sent(rlexp: Shell, tmp_path: Path, name: str, args: tuple[str, ...]) -> None:
    """A dry run leaves no file, and needs no Slurm on the path."""
    answer = rlexp(*DRY, *args, PATH="/usr/bin:/bin")
    assert answer.returncode == 0, answer.stderr
    assert list(tmp_path.iterdir()) == []
    shown = answer.stdout.replace(str(tmp_path), "/home/me").replace(sys.executable, "/venv/bin/python")
    golden = FILES / "golden" / f"{name}.sbatch"
    if os.environ.get("RLEXP_GOLDEN") == "write":
        golden.write_text(shown, encoding="utf-8")
    assert shown == golden.read_text(encoding="utf-8")
    if name == "two_sizes":  # one of the three does not divide
        assert "launch.nproc=3 is skipped" in answer.stderr.replace("nproc=3", "launch.nproc=3", 1)


@pytest.mark.parametrize("script", sorted((ROOT / "launchers").glob("*.sh")), ids=lambda path: path.name)
def test_a_script_is_one_that_bash_takes(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize(("answer", "requeued"), [("requeue", "requeue 12_3\n"), ("", "")])
def test_the_preamble_of_every_script_names_the_job_and_queues_it_again(
    tmp_path: Path, answer: str, requeued: str
) -> None:
    for name, text in (("scontrol", 'echo "$@" >> asked'), ("squeue", "echo 2030-01-02T03:04:05")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "asked").touch()
    lines = [*preamble.LINES, 'echo "$SLURM_JOB_END_TIME $SLURM_KILL_BAD_EXIT"', f'rlexp_leave 7 "{answer}"']
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TZ": "UTC", "SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12",
           "SLURM_ARRAY_TASK_ID": "3"}  # fmt: skip
    ended = subprocess.run(
        ["bash", "-c", "\n".join(lines)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=20
    )
    assert (ended.returncode, ended.stdout) == (7, "1893553445 1\n"), ended.stderr
    assert (tmp_path / "asked").read_text(encoding="utf-8") == requeued


@pytest.mark.parametrize(
    "name", ["plain", "a b", "it's", 'a"b', "a,b", "(a)", "a=b", "ü", "日本", "$(touch here)", "`id`", "${oc.env:HOME}",
             "\\", "#"],
)  # fmt: skip
def test_a_script_s_run_has_its_folder_whatever_its_name(name: str, tmp_path: Path) -> None:
    script = f'{preamble.run_dir(f"/x/{name}")}\nprintf %s "$rlexp_run_dir"'
    said = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=20, check=True)
    override = OverridesParser.create().parse_override(said.stdout)
    assert override.key_or_group == "hydra.run.dir"
    assert OmegaConf.create({"dir": override.value()}).dir == f"/x/{name}"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"RLEXP_RUN_DIR=/x/%j: Slurm expands a %"):
        preamble.run_dir("/x/%j")


def test_without_slurm_it_says_so(rlexp: Shell, tmp_path: Path) -> None:
    answer = rlexp("-m", "hydra/launcher=slurm", "launch.device=cpu", "hydra.sweep.dir=sw", PATH="/nowhere")
    assert answer.returncode == 1
    assert answer.stderr.startswith("rlexp: hydra/launcher=slurm: there is no sbatch on the path of this machine.")
    assert "hydra/launcher=slurm_local" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(("wrong", "said"), [
    ("launch.time_limit=179s", "launch.time_limit=179s: ends before the first step"),
    ("resume.mode=never", "resume.mode=never: a job that Slurm starts again must continue its run"),
    ("launch.time_limit=4", "launch.time_limit=4: must be a time greater than 0 with its unit"),
    ("launch.rank_cpus=0", "launch.rank_cpus=0: must be at least 1"),
    ("launch.rank_memory_gb=-1", "launch.rank_memory_gb=-1"),
    ("hydra.launcher.retry=1", "retry"),
])  # fmt: skip
def test_what_no_cluster_could_run_is_refused(rlexp: Shell, wrong: str, said: str) -> None:
    answer = rlexp(*DRY, "hydra/launcher=slurm", "launch.device=cpu", wrong)
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.stdout == ""
    assert answer.returncode == 1


@pytest.mark.parametrize(("launcher", "wrong", "said"), [
    ("slurm", "hydra.launcher.retries=-1", "hydra.launcher.retries=-1: must be at least 0"),
    ("slurm", "hydra.launcher.poll_seconds=0", "hydra.launcher.poll_seconds=0.0: must be greater than 0."),
    ("slurm", "hydra.launcher.modules=notalist",
     "hydra.launcher.modules=notalist: must be a list, as [ONE, TWO] or []."),
    ("slurm", "hydra.launcher.array_parallelism=0", "hydra.launcher.array_parallelism=0: must be at least 1."),
    ("slurm", "hydra.launcher.environment={A-B: 1}", "hydra.launcher.environment: A-B is no variable's name"),
    ("slurm", "hydra.launcher.environment=x",
     "hydra.launcher.environment=x: must be a mapping, as {NAME: VALUE} or {}"),
    ("slurm", "hydra.launcher.retry=1", "hydra.launcher.retry: no such key. Did you mean hydra.launcher.retries?"),
    ("slurm", "hydra.launcher.nodes=3", "hydra.launcher.nodes=3: follows from each job's configuration. Give"),
    ("slurm", "+hydra.launcher.retry=1", "hydra.launcher.retry: no such key. Did you mean hydra.launcher.retries?"),
    ("slurm", "hydra.launcher.comment=mine", "hydra.launcher.comment=mine: the comment of a job is rlexp's own"),
    ("slurm", "hydra.launcher.additional_parameters={comment: mine}",
     "hydra.launcher.additional_parameters.comment=mine: the comment of a job is rlexp's own"),
    ("slurm", "hydra.launcher.environment={WANDB_API_KEY: x}",
     "hydra.launcher.environment.WANDB_API_KEY: would stand in files of the sweep, which others may read."),
    ("slurm", "hydra.launcher.additional_parameters={wckey: 'a\ntouch here'}",
     "hydra.launcher.additional_parameters.wckey=a\\ntouch here: has a line break"),
    ("slurm", "hydra.sweep.dir='a\ntouch here'", "hydra.sweep.dir="),
    ("slurm", "hydra.launcher.max_num_timeout=3", "hydra.launcher.max_num_timeout=3: has no effect, since rlexp"),
    ("slurm_local", "hydra.launcher.jobs_at_once=0", "hydra.launcher.jobs_at_once=0: must be at least 1."),
    ("slurm_local", "hydra.launcher.poll_seconds=-1", "hydra.launcher.poll_seconds=-1.0: must be greater than 0."),
    ("slurm_local", "+hydra.launcher.retries=1", "hydra.launcher.retries: no such key."),
])  # fmt: skip
def test_a_wrong_launcher_key_is_told_before_anything_is_handed_over(
    rlexp: Shell, tmp_path: Path, launcher: str, wrong: str, said: str
) -> None:
    dry = DRY if launcher == "slurm" else ("-m", "hydra.sweep.dir=sw")
    answer = rlexp(*dry, f"hydra/launcher={launcher}", "launch.device=cpu", wrong)
    assert answer.stderr.startswith(f"rlexp: {said}"), answer.stderr
    assert len(answer.stderr.splitlines()) == 1
    assert answer.returncode == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("container", "python", "said"), [
    ("env PATH=/usr/bin:/bin", "nothing", "hydra.launcher.container=env PATH=/usr/bin:/bin: `nothing -c 'import"),
    ("env -u PYTHONPATH -C /", "python3 -S", "hydra.launcher.python=PATH."),
    ("env 'A=1", None, "hydra.launcher.container=env 'A=1: is no command of a shell (No closing quotation)."),
])  # fmt: skip
def test_a_container_without_its_python_is_refused(container: str, python: str | None, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_container({"container": container, "python": python})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "container", [None, "apptainer-of-the-nodes exec IMAGE", "false", f"env {sys.executable} -c '' &&"]
)
def test_a_container_that_this_machine_cannot_start_is_left_to_the_nodes(container: str | None) -> None:
    check_container({"container": container, "python": sys.executable})


SITE_YAML = (ROOT / "launchers" / "hydra" / "launcher" / "site.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(("line", "said"), [
    ("partition: gpu", None),
    ("retry: 3", "rlexp: hydra.launcher.retry: no such key. Did you mean hydra.launcher.retries?"),
    ("modules: cuda", "rlexp: hydra.launcher.modules: must be a list, as [ONE, TWO] or []."),
    ("modules: null", "rlexp: hydra.launcher.modules: must be given: it cannot be null. Give a value, or"),
    ("modules: [cuda", "mine.yaml, line "),
])  # fmt: skip
def test_a_profile_beside_the_package_is_read_and_its_mistakes_are_told(
    rlexp: Shell, tmp_path: Path, line: str, said: str | None
) -> None:
    key = line.partition(":")[0]
    kept = [each for each in SITE_YAML.splitlines() if not each.startswith(f"{key}:")]
    answer = with_profile(rlexp, tmp_path, "\n".join([*kept, line, ""]))
    assert "Traceback" not in answer.stderr
    if said is None:
        assert "#SBATCH --partition=gpu\n" in answer.stdout
    else:
        assert said in answer.stderr
        assert (answer.returncode, answer.stdout, len(answer.stderr.splitlines())) == (1, "", 1)


def test_the_profile_that_the_page_shows_is_one(rlexp: Shell, tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8"), re.DOTALL)
    answer = with_profile(rlexp, tmp_path, text)
    assert answer.returncode == 0, answer.stderr
    for line in ("#SBATCH --partition=gpu", "module load cuda/12.8", "export NCCL_SOCKET_IFNAME=ib0"):
        assert f"{line}\n" in answer.stdout


def with_profile(rlexp: Shell, folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Make a dry run with a profile outside the package."""
    profile = folder / "profiles" / "hydra" / "launcher" / "mine.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text(text, encoding="utf-8")
    return rlexp("--config-dir", "profiles", *DRY, "hydra/launcher=mine", "launch.device=cpu")


def test_a_single_run_is_not_trained_on_the_login_node(rlexp: Shell, tmp_path: Path) -> None:
    answer = rlexp("hydra/launcher=slurm", "launch.device=cpu")
    assert answer.stderr.startswith("rlexp: hydra/launcher=slurm: is for sweeps, and a single run trains on this")
    assert answer.returncode == 1
    assert list(tmp_path.iterdir()) == []
