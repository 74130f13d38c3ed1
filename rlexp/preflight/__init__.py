"""Rehearsal: a run's own step on tensors that have a shape, a dtype and a device but no memory."""

from __future__ import annotations

import os
import warnings


def quietly() -> None:
    """Silence what torch and DeepSpeed say of a world in which nothing is sent, before either is imported."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.filterwarnings("ignore", message=r"Accessing the data pointer of FakeTensor")
