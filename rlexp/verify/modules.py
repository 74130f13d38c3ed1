"""The names of the modules that a failure may point to."""

from __future__ import annotations

DATA, RING, MODEL, ALGOS = (f"rlexp/training/{name}/" for name in ("dataset", "ring", "model", "algos"))
DEALER = "rlexp/training/dealer/"
TRAIN, ENGINE, METRICS, ROLLOUT = (f"rlexp/training/{name}/" for name in ("train", "engine", "metrics", "rollout"))
REFERENCE = "rlexp/training/reference/"
