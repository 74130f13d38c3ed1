"""Check in ten minutes that rlexp computes on this machine's GPUs what it computes in one process: `make selftest`.

python -m bench.selftest                       writes selftest.json, and ends with what it means
python -m bench.selftest --only rings verify   these sections
python -m bench.selftest --rehearse            the same on four CPU ranks, to see that it runs

Each case is compared with one process on the CPU in float64. The file has versions, GPUs, and for each case how far it
is off and how long it took. Names of this user and machine and known folders are taken out; read it before you send it.

The exit code is 0 if all cases agree and 1 if not. Without a GPU it is 3, and no file is written. Ctrl-C ends it with
130, and the file has the sections that have ended.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import getpass
import importlib.metadata
import io
import json
import math
import platform
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu import NO_GPU, ROOT
from bench.gpu_here import GIB, machine, missing, stand_in
from bench.tables import commit
from rlexp.base.command import refuse_unwritable
from rlexp.base.errors import UserError

if TYPE_CHECKING:
    from bench.gpu_here import Machine
    from bench.selftest_cases import Finding

SECTIONS = ("engines", "rings", "kernels", "options", "verify")  # of bench.selftest_cases, which imports much
FILE = Path("selftest.json")
VERSIONS = ("rlexp", "torch", "triton", "transformers", "deepspeed", "peft", "flash-attn", "flash-attn-4",
            "ring-flash-attn", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy")  # fmt: skip
LOG = 20_000  # characters that the file has of what failed
SHOWN = 3  # cases that the last line names
MADE = "rlexp computes here what it computes in one process"


def main() -> int:
    options = _arguments()
    if options.here or not options.rehearse:
        why = missing(ask_torch=not options.here)  # so that any Python can ask
        if why is not None:
            sys.stderr.write(f"make selftest: {why}. Nothing was changed.\n")
            return NO_GPU
    if options.here:
        return 0
    from rlexp.launch.local import Interrupted

    try:
        return run(options)
    except UserError as error:
        sys.stderr.write(f"selftest: {error}\n")
        return 1
    except Interrupted as stopped:  # before the first section
        return stopped.exit_code


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.selftest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--rehearse", action="store_true", help="on the CPU")
    kind.add_argument("--here", action="store_true", help="only say whether there is a GPU")
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=list(SECTIONS), help="these sections")
    parser.add_argument("--out", type=Path, default=FILE, metavar="FILE", help=f"the results (default: {FILE})")
    parser.add_argument("--commit", help="the commit to name, where git cannot tell")
    return parser.parse_args()


def run(options: argparse.Namespace) -> int:
    from bench import selftest_cases
    from rlexp.launch.local import Interrupted

    refuse_unwritable(options.out, "--out")
    began = time.monotonic()
    on = stand_in() if options.rehearse else machine()
    out = selftest_cases.left_out(on)
    print(f"rlexp selftest on {placed(on)}, {len(options.only)} sections, about two minutes each", flush=True)
    found: list[Finding] = []
    log, stopped = "", 0
    try:
        for name in options.only:
            more, said = tried(name, selftest_cases.SECTIONS[name], on)
            found += more
            log += said
    except KeyboardInterrupt:
        stopped = 130
    except Interrupted as error:
        stopped = error.exit_code
    for each in out:
        print(f"left out: {each}")
    verdict = judged(found, placed(on), options.out, rehearsed=options.rehearse, stopped_in=name if stopped else None)
    results = as_json(on, found, time.monotonic() - began) | {
        "commit": commit(options.commit), "left_out": out, "verdict": nameless(verdict), "log": nameless(log)[-LOG:]
    }  # fmt: skip
    options.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(verdict)
    return stopped or int(any(each.why is not None for each in found))


def placed(on: Machine) -> str:
    """Name the GPUs, and say how ranks use them."""
    from bench.selftest_cases import ranks_on

    ranks = ranks_on(on)
    if on.device == "cpu":
        return f"{ranks} CPU ranks"
    ranks_there = f"{ranks} ranks over NCCL" if on.gpus > 1 else f"{ranks} ranks that share it"
    return f"{on.gpus} × {on.name} ({ranks_there})"


def tried(name: str, section: Callable[[Machine, Path], list[Finding]], on: Machine) -> tuple[list[Finding], str]:
    """Return what a section has found, and what was said of it where a case does not agree."""
    from bench.selftest_cases import Finding
    from rlexp.launch.local import Interrupted

    print(f"{name}: …", flush=True)
    began, said = time.monotonic(), io.StringIO()
    with tempfile.TemporaryDirectory(prefix="rlexp-") as folder, contextlib.redirect_stderr(said):
        try:
            found = section(on, Path(folder))
        except Interrupted:
            raise
        except Exception as error:  # of a library, of the GPU: the other sections can still run
            found = [Finding(name, f"the section {name}", why=f"{type(error).__name__}: {error}")]
    wrong = [each for each in found if each.why is not None]
    seconds = time.monotonic() - began
    print(f"{name}: {len(found) - len(wrong)} of {len(found)} cases agree ({seconds:.0f} s)", flush=True)
    for each in wrong:
        print(f"  {each.case}: {first_line(str(each.why))}", flush=True)
    return found, f"{name}\n{said.getvalue()}\n" if wrong else ""


def first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")


def judged(
    found: Sequence[Finding], place: str, file: Path, *, rehearsed: bool = False, stopped_in: str | None = None
) -> str:
    """Say in one line what the results mean, and what to do."""
    wrong = [each.case for each in found if each.why is not None]
    before = "rehearsed, which shows nothing of a GPU: " if rehearsed else ""
    before += f"stopped in section {stopped_in}, of what was tried until then: " if stopped_in else ""
    if not found:
        return f"{before}nothing has ended. {file} has only what this machine is."
    if not wrong:
        so = "" if stopped_in else f": {MADE}"
        return f"{before}all {len(found)} cases agree with float64 on {place}{so}. The results are in {file}."
    named = "; ".join(wrong[:SHOWN]) + (f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
    return (
        f"{before}{len(wrong)} of {len(found)} cases do not agree with float64 on {place}: {named}. Send {file} to the "
        f"maintainers of rlexp: read it first, as a log may name folders."
    )


# ---- the file ----


def as_json(on: Machine, found: Sequence[Finding], seconds: float) -> dict[str, Any]:
    from bench.selftest_cases import ranks_on

    gpus = {"name": on.name, "number": on.gpus, "gib": round(on.memory / GIB, 1), "driver": on.driver}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "rehearsed": on.device == "cpu",
        "gpus": gpus if on.device == "cuda" else None,
        "ranks": ranks_on(on),
        "messages": "nccl" if on.device == "cuda" and on.gpus > 1 else "staged",
        "python": platform.python_version(),
        "built_for": on.torch,
        "versions": versions(),
        "seconds": round(seconds),
        "cases": [plain(dataclasses.asdict(each) | {"agrees": each.why is None}) for each in found],
    }


def versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def plain(value: Any) -> Any:
    """Return a value as JSON has it: three digits of a number, and a text for one that is none."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, str):
        return nameless(value)
    if isinstance(value, float):
        return float(f"{value:.3g}") if math.isfinite(value) else str(value)
    return value


PATH = re.compile(r"(?<![\w.…])(?:~[\w.-]*)?(?:/[^\s/'\"`,:;|()\[\]{}<>]+)+")
PACKAGES = re.compile(rf"(?:{re.escape(str(ROOT))}(?=/(?:rlexp|bench|tests)/)|.*(?=/site-packages/))")
ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b[0-9a-f]{1,4}(?::[0-9a-f]{0,4}){4,7}\b")


def shortened(path: str) -> str:
    """Return the last part of a path; the folders before it only within rlexp and installed packages."""
    if path in ("~", str(Path.home())):
        return "~"
    if (package := PACKAGES.match(path)) is not None:
        return f"…{path[package.end() :]}"
    return path if path.rfind("/") == 0 else f"…{path[path.rfind('/') :]}"


def nameless(text: str) -> str:
    """Leave out what names the machine or its user: folders, hosts, addresses."""
    text = PATH.sub(lambda found: shortened(found[0]), text)
    for name in sorted(names_here(), key=len, reverse=True):
        text = re.sub(rf"\b{re.escape(name)}\b", "NAME", text)
    return ADDRESS.sub("ADDRESS", text)


def names_here() -> set[str]:
    """Return the names of this machine and of its user."""
    found = {platform.node(), socket.getfqdn(), platform.node().partition(".")[0]}
    with contextlib.suppress(OSError, KeyError):  # a user without a name
        found.add(getpass.getuser())
    return found - {"", "root", "localhost"}


if __name__ == "__main__":
    sys.exit(main())
