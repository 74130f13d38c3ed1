"""`make` takes a Python that fits from those the machine has, or says what to install."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT, outside_make

MAKE = shutil.which("make")
SHIM = "#!/bin/sh\necho 'pyenv: this version is not installed' >&2\nexit 127\n"
# A Python of another version: it answers what the Makefile asks as that version would.
FAKE = """#!/bin/sh
[ "$1" = -c ] || exit 1
exec {python} -c "
import sys, types
sys.version_info = ({major}, {minor}, 0)
{missing}
$2"
"""


def python(version: str, *, venv: bool = True) -> str:
    major, minor = version.split(".")
    missing = "" if venv else "sys.modules['ensurepip'] = None"
    return FAKE.format(python=sys.executable, major=major, minor=minor, missing=missing)


CASES = {
    "python3 fits": ({"python3": python("3.13"), "python3.12": python("3.12")}, "python3"),
    "python3 is too old": ({"python3": python("3.10"), "python3.12": python("3.12")}, "python3.12"),
    "python3 is too new": ({"python3": python("3.15"), "python3.14": python("3.14")}, "python3.14"),
    "the newest that runs": ({"python3.14": SHIM, "python3.13": python("3.13"), "python3.11": python("3.11")},
                             "python3.13"),
    "no environment can be made": ({"python3": python("3.12", venv=False), "python3.11": python("3.11")}, "python3.11"),
    "shims alone": ({"python3": SHIM, "python3.13": SHIM}, None),
    "too old alone": ({"python3": python("3.10"), "python3.9": python("3.9")}, None),
    "no Python": ({}, None),
}  # fmt: skip


@pytest.mark.skipif(MAKE is None, reason="there is no make")
@pytest.mark.parametrize("case", CASES)
def test_make_takes_a_python_that_fits(tmp_path: Path, case: str) -> None:
    scripts, chosen = CASES[case]
    for name, text in scripts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    assert MAKE is not None
    answer = subprocess.run(
        [MAKE, "-n", "run", f"VENV={tmp_path}/venv"], cwd=ROOT, env=outside_make() | {"PATH": str(tmp_path)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    if chosen is None:
        (said,) = answer.stderr.splitlines()
        assert answer.returncode != 0
        assert "no Python 3.11 to 3.14 runs here: install one" in said
    else:
        assert answer.stdout.splitlines()[0] == f"{chosen} -m venv {tmp_path}/venv", answer.stderr
