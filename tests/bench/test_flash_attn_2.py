"""`bench.flash_attn_2`: what is missing is told in one message, and the patch applies to the source that it is for."""

from __future__ import annotations

import ast
import os
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from bench import flash_attn_2
from rlexp.base.errors import ConfigError, UserError
from tests.helpers.mock_flash import OPERATORS

SDIST = "RLEXP_FLASH_ATTN_SDIST"  # names flash_attn-VERSION.tar.gz, where it is at hand
at_hand = pytest.mark.skipif(SDIST not in os.environ, reason=f"{SDIST} does not name flash-attn's source")


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Play a machine that lacks nothing, and return its folder of CUDA's toolkit."""
    home = toolkit(tmp_path / "cuda", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(flash_attn_2.sys, "platform", "linux")
    monkeypatch.setattr(flash_attn_2, "TOOLS", ("setuptools",))
    return home


def toolkit(home: Path, release: str) -> Path:
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n", encoding="utf-8")
    nvcc.chmod(0o755)
    return home


def test_nothing_is_missing_where_all_is_there(complete: Path) -> None:
    assert list(flash_attn_2.lacking()) == []
    assert flash_attn_2.cuda_home() == complete


def test_a_torch_for_cpus_is_told(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    (told,) = flash_attn_2.lacking()
    assert told.startswith("torch: is not installed for CUDA. Install ")


def test_a_missing_nvcc_is_told_with_the_packages_that_have_one(complete: Path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(complete / "lib"))
    (told,) = flash_attn_2.lacking()
    assert told.startswith("nvcc: is neither on the PATH nor in CUDA_HOME.")
    assert "pip install nvidia-cuda-nvcc nvidia-cuda-crt " in told


def test_an_nvcc_of_another_cuda_is_told(complete: Path, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "older", "12.8")))
    (told,) = flash_attn_2.lacking()
    assert f"{tmp_path}/older/bin/nvcc is of CUDA 12.8, and torch of CUDA 13.0. Use one of CUDA 13" in told


def test_what_else_is_missing_is_told_together(complete: Path, monkeypatch) -> None:
    monkeypatch.setattr(flash_attn_2, "TOOLS", ("no_such_module", "setuptools", "nor_this"))
    monkeypatch.setenv("PATH", str(complete / "bin"))
    assert list(flash_attn_2.lacking()) == [
        "g++: is not on the PATH. Install it.",
        "patch: is not on the PATH. Install it.",
        "no_such_module, nor_this: not installed. Run `pip install no_such_module nor_this`.",
    ]


def test_nvcc_is_found_in_packages_of_this_environment_and_on_the_path(monkeypatch, tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    monkeypatch.setattr(flash_attn_2.sysconfig, "get_path", lambda _: str(packages))
    on_path = toolkit(tmp_path / "toolkit", "13.0")
    assert flash_attn_2.cuda_home({"PATH": str(on_path / "bin")}) == on_path
    packaged = toolkit(packages / "nvidia" / "cu13", "13.0")
    assert flash_attn_2.cuda_home({"PATH": str(on_path / "bin")}) == packaged
    assert flash_attn_2.cuda_home({"CUDA_HOME": str(on_path)}) == on_path


def test_the_linker_finds_the_runtime_of_nvidias_package(tmp_path: Path) -> None:
    """The package has the library by its version only, and the linker looks for libcudart.so."""
    (tmp_path / "cu13" / "lib").mkdir(parents=True)
    library = tmp_path / "cu13" / "lib" / "libcudart.so.13"
    library.touch()
    for _ in range(2):
        folder = flash_attn_2.libraries(tmp_path / "cu13", tmp_path / "source")
    assert (folder / "libcudart.so").resolve() == library


def test_another_source_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    other = tmp_path / "flash_attn-2.8.2.tar.gz"
    with tarfile.open(other, "w:gz"):
        pass
    with pytest.raises(ConfigError, match=r"--sdist=.*2\.8\.2\.tar\.gz: is not flash_attn-2\.8\.3\.post2\.tar\.gz"):
        flash_attn_2.patched(other, tmp_path)


def test_a_command_that_fails_is_named() -> None:
    with pytest.raises(UserError, match=r"-c raise .* …: ended with status 4; what it printed is above"):
        flash_attn_2._run([sys.executable, "-c", "raise SystemExit(4)"])


def test_times_are_those_that_ninja_wrote_down(tmp_path: Path) -> None:
    log = tmp_path / "build" / "temp.linux" / flash_attn_2.LOG
    log.parent.mkdir(parents=True)
    log.write_text(
        "# ninja log v7\n1\t75524\t9\t/a/flash_api.o\tf\n75549\t246054\t9\t/a/src/bwd.o\tf\n", encoding="utf-8"
    )
    assert flash_attn_2.times(tmp_path) == [("flash_api", 75.523), ("bwd", 170.505)]


def test_a_machine_on_which_nothing_can_be_built_gets_one_message(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setattr(sys, "argv", ["bench.flash_attn_2", "--wheels", str(tmp_path / "made")])
    with pytest.raises(ConfigError, match=r"^flash-attn cannot be built here\. .*nvcc: is neither on the PATH nor in"):
        flash_attn_2.main()
    assert list(tmp_path.iterdir()) == []


@at_hand
def test_the_patch_applies_and_leaves_both_passes(tmp_path: Path) -> None:
    source = flash_attn_2.patched(Path(os.environ[SDIST]), tmp_path)
    setup = (source / "setup.py").read_text(encoding="utf-8")
    pattern = setup.partition('if re.search(r"')[2].partition('"')[0]
    names = [path.relative_to(source).as_posix() for path in source.glob("csrc/flash_attn/**/*.c*")]
    kept = sorted(Path(name).name for name in names if flash_attn_2.re.search(pattern, name) and f'"{name}"' in setup)
    assert kept == sorted(
        ["flash_api.cpp"]
        + [f"flash_{way}_hdim{size}_bf16{causal}_sm80.cu"
           for way in ("fwd", "bwd") for size in (64, 128) for causal in ("", "_causal")]
    )  # fmt: skip
    before = (source / "setup.py").stat().st_mtime_ns
    assert flash_attn_2.patched(Path(os.environ[SDIST]), tmp_path) == source
    assert (source / "setup.py").stat().st_mtime_ns == before, "what is compiled stays valid"


@at_hand
def test_the_mock_has_the_parameters_of_the_source() -> None:
    with tarfile.open(os.environ[SDIST]) as tar:
        file = tar.extractfile(f"flash_attn-{flash_attn_2.VERSION}/flash_attn/flash_attn_interface.py")
        assert file is not None
        functions = {each.name: each for each in ast.parse(file.read()).body if isinstance(each, ast.FunctionDef)}
    for name, schema in OPERATORS.items():
        parameters = schema.partition("(")[2].rpartition(") -> ")[0].split(", ")
        named = [each.partition("=")[0].split()[-1] for each in parameters]
        defaults = [each.partition("=")[2] for each in parameters if "=" in each]
        assert named == [each.arg for each in functions[name].args.args], name
        theirs = [ast.unparse(each) for each in functions[name].args.defaults]
        assert [ast.literal_eval(each) for each in defaults] == [ast.literal_eval(each) for each in theirs], name
