"""Build a part of flash-attn 2, for one kind of GPU: bf16, heads of 64 and 128, both passes.

python -m bench.flash_attn_2 --wheels FOLDER                 download flash-attn's source, patch it, compile it
python -m bench.flash_attn_2 --wheels FOLDER --sdist FILE    with a source that is here
python -m bench.flash_attn_2 --check                         only say what is missing

flash-attn compiles 73 files for four kinds of GPU, and has no switch for fewer. This part has 9 files, for Hopper
(--generation 90) or another. `bench/flash_attn_2.patch` leaves the rest out: other head sizes, float16, dropout, ALiBi,
capped logits, and keys that are split for decoding. Who calls these gets a message. The wheel is for the Python and the
torch that run this. bench/README.md says how long it takes, and what was run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlexp.base.command import Parser, exit_code
from rlexp.base.errors import ConfigError, UserError

VERSION = "2.8.3.post2"
SHA256 = "d0f9f0b08a986cdeadbffcf5ec8b3a8f514366c68ad1853d3ab061bc83cc340b"
PATCH = Path(__file__).with_suffix(".patch")
PART = "bf16.d64.d128"  # in the version of the wheel: rlexp/base/kernel_needs.py reads it
GENERATIONS = ("80", "90", "100", "120")
TOOLS = ("setuptools", "wheel", "packaging", "psutil", "ninja")
NVCC = "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-cccl nvidia-cuda-runtime"
USUAL = "/usr/local/cuda/bin"
LOG = ".ninja_log"


def main() -> int:
    options = _arguments()
    missing = list(lacking())
    if missing:
        raise ConfigError("flash-attn cannot be built here. " + " ".join(missing))
    if options.check:
        print("Nothing is missing.")
        return 0
    if options.wheels is None:
        raise ConfigError("--wheels: says in which folder the wheel is to be. For example: --wheels .whl.")
    options.wheels.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="flash-attn-") as made:
        work = options.work or Path(made)
        source = patched(options.sdist or downloaded(work), work)
        begun = time.time()
        wheel = built(source, options)
        for line in report(source, wheel, time.time() - begun):
            print(line)
    return 0


def _arguments() -> Namespace:
    parser = Parser("bench.flash_attn_2", __doc__)
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="where the wheel is to be")
    parser.add_argument(
        "--sdist", type=Path, metavar="FILE", help=f"flash_attn-{VERSION}.tar.gz, instead of a download"
    )
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="where to compile; what is compiled is kept")
    parser.add_argument("--jobs", type=int, default=1, help="files that are compiled at a time, of up to 5 GB each (1)")
    parser.add_argument("--generation", choices=GENERATIONS, default="90", help="compute capability × 10 (90: Hopper)")
    parser.add_argument("--check", action="store_true", help="only say what is missing")
    return parser.parse_args()


# ---- what it needs ----


def lacking() -> Iterator[str]:
    """Say what is missing here, in a sentence each."""
    if not sys.platform.startswith("linux"):
        yield f"{sys.platform}: flash-attn is built on Linux."
    cuda = cuda_of_torch()
    if cuda is None:
        yield "torch: is not installed for CUDA. Install the one that the wheel is for, from https://pytorch.org."
    home = cuda_home()
    if home is None:
        yield f"nvcc: is neither on the PATH nor in CUDA_HOME. Install CUDA's toolkit, or `pip install {NVCC}`."
    elif cuda is not None and (release := release_of(home)).partition(".")[0] != cuda.partition(".")[0]:
        yield (
            f"nvcc: {home}/bin/nvcc is of CUDA {release}, and torch of CUDA {cuda}. Use one of CUDA "
            f"{cuda.partition('.')[0]}: set CUDA_HOME, or `pip install {NVCC}` in its version."
        )
    yield from (f"{name}: is not on the PATH. Install it." for name in ("g++", "patch") if shutil.which(name) is None)
    if tools := [name for name in TOOLS if importlib.util.find_spec(name) is None]:
        yield f"{', '.join(tools)}: not installed. Run `pip install {' '.join(tools)}`."


def cuda_of_torch() -> str | None:
    """Return the CUDA that torch was built with; None without such a torch."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch.version.cuda


def cuda_home(env: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder of CUDA's toolkit: CUDA_HOME, or of NVIDIA's packages in this environment, or on the PATH."""
    env = os.environ if env is None else env
    if "CUDA_HOME" in env:
        named = Path(env["CUDA_HOME"])
        return named if (named / "bin" / "nvcc").is_file() else None
    packaged = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvcc"))
    on_path = shutil.which("nvcc", path=f"{env.get('PATH', '')}:{USUAL}")
    found = packaged[-1] if packaged else Path(on_path).resolve() if on_path else None
    return found.parent.parent if found else None


def release_of(home: Path) -> str:
    said = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return said.partition("release ")[2].partition(",")[0]


# ---- the source ----


def downloaded(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
          "--no-build-isolation", "--no-binary=:all:", f"--dest={folder}", f"flash-attn=={VERSION}"])  # fmt: skip
    return folder / f"flash_attn-{VERSION}.tar.gz"


def patched(sdist: Path, folder: Path) -> Path:
    """Unpack the source and patch it, unless it lies there patched already, and return its folder."""
    found = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if found != SHA256:
        raise ConfigError(
            f"--sdist={sdist}: is not flash_attn-{VERSION}.tar.gz, for which {PATCH.name} is written (its SHA-256 is "
            f"{found[:12]}…, not {SHA256[:12]}…). Leave --sdist out to download it, or give that file."
        )
    source = folder / f"flash_attn-{VERSION}"
    done, patch = source / PATCH.name, PATCH.read_bytes()
    if not (done.is_file() and done.read_bytes() == patch):
        shutil.rmtree(source, ignore_errors=True)
        with tarfile.open(sdist) as tar:
            tar.extractall(folder, filter="data")
        _run(["patch", "--fuzz=0", "--silent", "--strip=1", f"--input={PATCH}"], cwd=source)
        done.write_bytes(patch)
    return source


# ---- the build ----


def built(source: Path, options: Namespace) -> Path:
    """Compile the source, and return the wheel."""
    home = cuda_home()
    assert home is not None
    env = os.environ | {
        "CUDA_HOME": str(home), "FLASH_ATTENTION_FORCE_BUILD": "TRUE", "FLASH_ATTN_CUDA_ARCHS": options.generation,
        "FLASH_ATTN_LOCAL_VERSION": f"{PART}.sm{options.generation}", "MAX_JOBS": str(options.jobs),
        "NVCC_THREADS": "1", "LIBRARY_PATH": f"{libraries(home, source)}:{os.environ.get('LIBRARY_PATH', '')}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",  # ninja may lie beside Python
    }  # fmt: skip
    _run([sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--verbose", "--no-deps",
          "--no-build-isolation", f"--wheel-dir={options.wheels}", str(source)], env=env)  # fmt: skip
    return max(options.wheels.glob(f"flash_attn-{VERSION}+{PART}.*.whl"), key=lambda each: each.stat().st_mtime)


def libraries(home: Path, source: Path) -> Path:
    """Return a folder in which the linker finds CUDA's runtime: NVIDIA's package has it with its version alone."""
    folder = source / "build" / "links"
    folder.mkdir(parents=True, exist_ok=True)
    for library in [*home.glob("lib/libcudart.so.*")][:1]:
        link = folder / "libcudart.so"
        link.unlink(missing_ok=True)
        link.symlink_to(library)
    return folder


def report(source: Path, wheel: Path, seconds: float) -> Iterator[str]:
    """Say how long each file took, and where the wheel is."""
    for name, took in times(source):
        yield f"{took:6.0f} s  {name}"
    yield f"{seconds:6.0f} s  in all: {wheel} ({wheel.stat().st_size / 2**20:.1f} MiB)"


def times(source: Path) -> list[tuple[str, float]]:
    """Return how long each file was compiled, in seconds, by what ninja wrote down."""
    (log,) = source.glob(f"build/temp.*/{LOG}")
    rows = [line.split("\t") for line in log.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [(Path(row[3]).stem, (int(row[1]) - int(row[0])) / 1000) for row in rows]


def _run(command: list[str], **how: object) -> None:
    ended = subprocess.run(command, check=False, **how)  # type: ignore[call-overload]
    if ended.returncode:
        words = re.sub(r"\s+", " ", " ".join(command[:4]))
        raise UserError(f"{words} …: ended with status {ended.returncode}; what it printed is above.")


if __name__ == "__main__":
    sys.exit(exit_code(main))
