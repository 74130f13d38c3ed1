"""The wheel, installed without the checkout, finds its configuration from any folder."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.programs import python


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, alone, as site-packages would have it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=240)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, cwd: Path, *args: str, module: str = "rlexp") -> subprocess.CompletedProcess[str]:
    # -P: the current folder is not on the path, so that nothing but the wheel can be found.
    return python("-P", "-m", module, *args, cwd=cwd, PYTHONPATH=str(installed))


def test_it_is_the_wheel_that_answers(installed: Path, tmp_path: Path) -> None:
    answer = python("-P", "-c", "import rlexp; print(rlexp.__file__)", cwd=tmp_path, PYTHONPATH=str(installed))
    assert answer.stdout.strip() == str(installed / "rlexp" / "__init__.py")


@pytest.mark.parametrize(
    "args",
    [
        ("parallel=ring4", "launch.device=cpu", "--resolve"),
        ("+sweep=ring_sizes", "launch.device=cpu"),
        ("+experiment=bug_report",),
        ("hydra/launcher=slurm", "launch.device=cpu"),
        ("hydra/launcher=local",),
    ],
    ids=" ".join,
)
def test_its_configuration_composes(installed: Path, tmp_path: Path, args: tuple[str, ...]) -> None:
    answer = run(installed, tmp_path, "--cfg", "job", *args)
    assert answer.returncode == 0, answer.stderr
    assert "batch_size: 8" in answer.stdout


def test_it_holds_what_a_user_runs_and_nothing_else(installed: Path) -> None:
    assert {path.name for path in installed.iterdir() if path.suffix != ".dist-info"} == {"rlexp"}
    assert (installed / "rlexp" / "base" / "kernel_rates.csv").is_file()
    assert (installed / "rlexp" / "config" / "assets" / "chat_templates" / "chatml.jinja").is_file()


def test_it_has_the_recipes_and_the_pages_that_messages_name(installed: Path, tmp_path: Path) -> None:
    copied = run(installed, tmp_path, "grpo_8b", "--copy", "conf/experiment/mine.yaml", module="rlexp.recipe")
    assert copied.returncode == 0, copied.stderr
    recipe = (installed / "rlexp" / "conf" / "experiment" / "grpo_8b.yaml").read_bytes()
    assert (tmp_path / "conf" / "experiment" / "mine.yaml").read_bytes() == recipe
    refused = run(installed, tmp_path, "train.foo=1").stderr
    page = re.search(r"no such key\. (\S+) lists all keys of train", refused)
    assert page is not None, refused
    assert Path(page[1]) == installed / "rlexp" / "docs" / "keys.md"
    assert Path(page[1]).is_file()


def test_it_trains(installed: Path, tmp_path: Path) -> None:
    answer = run(
        installed, tmp_path, "parallel=ring2", "launch.device=cpu", "train.max_steps=1", "engine=torch", "logger=none"
    )
    assert answer.returncode == 0, answer.stderr
    assert list(tmp_path.glob("runs/*/metrics.jsonl"))


@pytest.mark.slow
def test_it_sweeps_and_reports(installed: Path, tmp_path: Path) -> None:
    """Launchers, sweeps and the page's assets travel with it."""
    answer = run(
        installed, tmp_path, "-m", "parallel=ring1,ring2", "launch.device=cpu", "train.max_steps=1", "engine=torch",
        "logger=none", "checkpoint.export=false", "hydra.sweep.dir=sw",
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert "The 2 runs draw one curve" in answer.stdout
    assert "uPlot" in (tmp_path / "sw" / "report.html").read_text(encoding="utf-8")


def test_it_shows_what_slurm_would_be_sent_and_has_the_scripts(installed: Path, tmp_path: Path) -> None:
    """By a profile beside it, copied from its own."""
    launchers = installed / "rlexp" / "launchers"
    profile = tmp_path / "profiles" / "hydra" / "launcher" / "mine.yaml"
    profile.parent.mkdir(parents=True)
    shutil.copy(launchers / "hydra" / "launcher" / "site.yaml", profile)
    answer = run(
        installed, tmp_path, "--config-dir", "profiles", "-m", "hydra/launcher=mine", "launch.device=cpu",
        "hydra.launcher.dry_run=true", "+sweep=ring_sizes", "hydra.launcher.partition=gpu",
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert "#SBATCH --partition=gpu\n" in answer.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["profiles"]
    assert sorted(path.name for path in launchers.glob("*.sh")) == ["srun.sh", "torchrun.sh"]
