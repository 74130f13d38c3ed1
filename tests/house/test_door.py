"""A reader's first hour: the commands of README and quickstart, typed in order into a new shell in a fresh clone.

It takes half an hour, most of it `make test` and an environment of its own, so it belongs to `make prove`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.pages import files, scripts
from tests.helpers.paths import ROOT

HOUR = 3600
# What a new user's shell has. Where packages come from is a setting of the machine, as its proxy is.
KEPT = re.compile(r"HOME|PATH|LANG|TERM|TMPDIR|(PIP|UV)_\w+|\w*(_PROXY|_proxy|_CERT_FILE|_CA_BUNDLE)")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is committed, with the real data beside it where this checkout has it."""
    folder = tmp_path_factory.mktemp("new")
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "rlexp")], check=True)
    if (shared := ROOT.parent / "shared").is_dir():
        (folder / "shared").symlink_to(shared)
    return folder / "rlexp"


def typed(script: str, clone: Path) -> str:
    """Type a script into a new shell, which ends at the first command that fails, and return what was printed."""
    bash = shutil.which("bash")
    assert bash is not None
    fresh = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
    own = str(ROOT / ".venv" / "bin")
    fresh["PATH"] = os.pathsep.join(each for each in fresh["PATH"].split(os.pathsep) if each != own)
    done = subprocess.run([bash, "--noprofile", "--norc", "-ex"], input=script, cwd=clone, env=fresh, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=HOUR, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.mark.prove
@pytest.mark.timeout(2 * HOUR)
def test_the_commands_of_the_readme_work_as_typed(clone: Path) -> None:
    said = typed("".join(scripts(clone / "README.md")), clone)
    assert len(re.findall(r"^done: .*/runs/", said, re.MULTILINE)) >= 3
    assert "PASS: 3 optimizer steps on this layout agree" in said


@pytest.mark.prove
@pytest.mark.timeout(2 * HOUR)
def test_the_commands_of_the_quickstart_work_as_typed(clone: Path) -> None:
    page = clone / "docs" / "quickstart.md"
    for name, text in files(page).items():
        (clone / name).write_text(text, encoding="utf-8")
    (loading,) = re.findall(r"^```python\n(from transformers.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    said = typed("".join([*scripts(page), f"python - <<'LOAD'\n{loading}LOAD\n"]), clone)
    assert "fits: " in said
    _, trained, after = said.rpartition("/runs/first  (")
    assert trained
    assert "What is 3 plus 3?" in after
