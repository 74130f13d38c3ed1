"""Programs of bench/, started as a user does, where no GPU is visible."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.helpers.paths import ROOT

HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}


def bench(name: str, *words: str, timeout: float = 580, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"bench.{name}", *words],
        cwd=ROOT, env=os.environ | HIDDEN | env, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
