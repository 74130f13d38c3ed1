"""Programs that a new Python runs, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.paths import ROOT

HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "rlexp")


def python(*words: str, cwd: Path = ROOT, timeout: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
    """What `python WORDS` says and how it ends, with these variables in its environment."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def bench(name: str, *words: str, timeout: float = 580, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program of bench/ where no GPU is visible."""
    return python("-m", f"bench.{name}", *words, timeout=timeout, **(HIDDEN | env))
