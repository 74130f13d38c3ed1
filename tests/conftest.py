"""Fixtures: the real data and models beside the checkout, and the command line as a user types it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from bench.gpu import ON_CPU
from rlexp.config.hardware import TORCH_BUILT_FOR, visible_gpus
from rlexp.config.schema import Device, LaunchConfig
from rlexp.launch.joining import prepare_environment
from tests import tiers
from tests.helpers import warm
from tests.helpers.parsing import parse_once
from tests.helpers.paths import ROOT
from tests.helpers.planted import plant_if_asked
from tests.helpers.programs import python

Shell = Callable[..., subprocess.CompletedProcess[str]]
# Files with a fixture of the module that takes seconds to make.
DEAR = {"test_divergence", "test_damage", "test_engines", "test_page", "test_pipelined", "test_policy_losses_of_others",
        "test_resume", "test_ring_flash_attn", "test_rollout_invariance", "test_rollout_resume", "test_rooms",
        "test_task", "test_textbook_rl", "test_trl_trainers", "test_verify", "test_wandb", "test_wheel"}  # fmt: skip
os.environ.setdefault(TORCH_BUILT_FOR, "cuda")  # tests play GPUs, by an nvidia-smi of their own
os.environ.setdefault("RLEXP_CUT", "all")  # the sequences of most tests are so short that none would be cut
os.environ.setdefault("RLEXP_CACHE", str(ROOT / ".pytest_cache" / "rlexp"))
os.environ.setdefault("HF_DATASETS_CACHE", str(ROOT / ".pytest_cache" / "datasets"))
prepare_environment(LaunchConfig(device=Device.cpu))
THREADS = int(os.environ["OMP_NUM_THREADS"])  # of torch, in this process
warm.meet()  # before pytest-xdist starts its workers, which find the same server
util.spawnv_passfds = warm.fork_server  # type: ignore[assignment]
parse_once()
plant_if_asked()
# No deadline: a time would be the machine's, not the example's. The same examples in every run.
settings.register_profile("busy", deadline=None, derandomize=True)
settings.load_profile("busy")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Fork the workers from the server, which has imported what the tests import. Not beside a GPU: CUDA does not
    survive a fork, and what the server imports may touch the driver."""
    if visible_gpus() and not os.environ.get(ON_CPU):
        return
    from execnet import gateway_io

    class Forked(gateway_io.Popen2IOMaster):
        def __init__(self, args: list[str], execmodel: Any) -> None:
            if (args[0], args[-1]) != (sys.executable, gateway_io.popen_bootstrapline):  # on another machine, say
                super().__init__(args, execmodel)
                return
            self.popen = warm.Worker(args[-1])
            gateway_io.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel)

    gateway_io.Popen2IOMaster = Forked


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run tests one by one on any worker, except those of a file whose fixture is dear: one worker makes it, once.
    The marks of `--dist loadgroup` say the same, but pytest-xdist 3.8 does not find them under pytest 9.2."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler.loadscope import LoadScopeScheduling

    if gone := DEAR - {path.stem for path in (ROOT / "tests").rglob("test_*.py")}:
        raise pytest.UsageError(f"DEAR in tests/conftest.py names files that are not there: {sorted(gone)}")

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if Path(file).stem in DEAR else nodeid

    return Scheduler(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the dear tests to `make check`, and leave out what needs a GPU where there is none, unless it is rehearsed
    on the CPU."""
    tiers.mark(items, whole=not any("::" in each for each in config.args))
    if visible_gpus() or os.environ.get(ON_CPU):
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Look for no cycles in what has been imported and collected: again and again, it takes a twentieth of the time."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or Triton's library says at the end that its objects leak


def pytest_runtest_teardown() -> None:
    """A test that joins as the rank of a GPU gives torch several threads. Beside other processes they would make each
    later operation of this process a hundred times as slow."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != THREADS:
        torch.set_num_threads(THREADS)


def pytest_report_header() -> str:
    shared = shared_folder()
    return f"real data and models: {shared or 'absent, tests that need them are skipped'}"


def shared_folder() -> Path | None:
    """Real preference pairs and a pretrained model, beside the checkout or where RLEXP_SHARED says."""
    folder = Path(os.environ.get("RLEXP_SHARED", ROOT.parent / "shared"))
    return folder if (folder / "models").is_dir() else None


@pytest.fixture(scope="session")
def shared() -> Path:
    folder = shared_folder()
    if folder is None:
        pytest.skip("needs the real data and models: ../shared, or RLEXP_SHARED=FOLDER")
    return folder


@pytest.fixture
def rlexp(tmp_path: Path) -> Shell:
    """Run `python -m rlexp ...` in an empty folder, by a process that has imported torch already."""

    def run(*args: str, timeout: float = 280, **env: str) -> subprocess.CompletedProcess[str]:
        return warm.run("rlexp", args, tmp_path, timeout=timeout, env=os.environ | env)

    return run


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Run `python -m rlexp ...` in an empty folder, by a new Python."""

    def run(*args: str, timeout: float = 280, **env: str) -> subprocess.CompletedProcess[str]:
        return python("-m", "rlexp", *args, cwd=tmp_path, timeout=timeout, **env)

    return run


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the painting of curves.png, which takes most of a comparison's time; its curves are drawn as always."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda _figure, place, **_how: place.touch())
