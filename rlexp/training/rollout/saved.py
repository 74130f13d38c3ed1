"""Samples in a checkpoint that is written within a rollout: one file for each rank, readable by any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlexp.training.types import CreditedSample, Example, Floats, Sample

PATTERN = "rollout-*.npz"
TOKENS = ("behaviour", "old", "reference", "values", "advantages", "returns")  # arrays with a value for each token


def write(folder: Path, name: str, rank: int, ranks: int, samples: Sequence[Sample]) -> Path:
    """Write a rank's samples and return the path. `name`: `now` (being trained on) or `next` (drawn ahead)."""
    path = folder / f"rollout-{name}-{rank:05d}-of-{ranks:05d}.npz"
    ragged: dict[str, list[Any]] = {field: [getattr(s, field, None) for s in samples] for field in TOKENS}
    arrays: dict[str, Any] = {
        field: np.concatenate(parts) for field, parts in ragged.items() if parts and parts[0] is not None
    }
    texts = [s.text.encode("utf-8", "surrogatepass") for s in samples]
    with path.open("wb") as file:
        np.savez(
            file,
            place=np.array([s.place for s in samples], dtype=np.int64),
            prompt=np.array([s.example.index for s in samples], dtype=np.int64),
            number=np.array([s.number for s in samples], dtype=np.int64),
            stopped=np.array([s.stopped for s in samples], dtype=bool),
            counts=np.array([getattr(s, "counts", True) for s in samples], dtype=bool),
            score=np.array([getattr(s, "score", np.nan) for s in samples], dtype=np.float64),
            text=np.frombuffer(b"".join(texts), dtype=np.uint8),
            text_length=np.array([len(text) for text in texts], dtype=np.int64),
            length=np.array([len(s.answer) for s in samples], dtype=np.int64),
            answer=np.concatenate([s.answer for s in samples]) if samples else np.zeros(0, dtype=np.int32),
            **arrays,
        )
    return path


def drawn(folder: Path, name: str, prompts: Sequence[Example], rank: int, ranks: int) -> list[Sample]:
    """Read this rank's part of the samples: every `ranks`-th one by its place."""
    return [sample for sample, _ in _read(folder, name, prompts, rank, ranks)]


def credited(folder: Path, name: str, prompts: Sequence[Example], rank: int, ranks: int) -> list[CreditedSample]:
    """Read this rank's part of samples that are trained on. Their terms were shown already."""
    return [CreditedSample(**vars(sample), terms={}, **known)
            for sample, known in _read(folder, name, prompts, rank, ranks)]  # fmt: skip


def _read(
    folder: Path, name: str, prompts: Sequence[Example], rank: int, ranks: int
) -> list[tuple[Sample, dict[str, Any]]]:
    """Return each sample with what else is in the file."""
    samples: list[tuple[Sample, dict[str, Any]]] = []
    for path in sorted(folder.glob(f"rollout-{name}-*.npz")):
        with np.load(path, allow_pickle=False) as file:
            samples += _samples({key: file[key] for key in file.files}, prompts, rank, ranks)
    return sorted(samples, key=lambda each: each[0].place)


def _samples(
    file: dict[str, Floats], prompts: Sequence[Example], rank: int, ranks: int
) -> Iterator[tuple[Sample, dict[str, Any]]]:
    starts, text_starts = (np.concatenate(([0], np.cumsum(file[name]))) for name in ("length", "text_length"))
    for row, place in enumerate(file["place"].tolist()):
        if place % ranks != rank:
            continue
        part = slice(int(starts[row]), int(starts[row + 1]))
        text = file["text"][int(text_starts[row]) : int(text_starts[row + 1])].tobytes()
        behaviour, *known = ((field, file[field][part].copy()) for field in TOKENS if field in file)
        sample = Sample(
            place=place,
            example=prompts[int(file["prompt"][row])],
            number=int(file["number"][row]),
            answer=file["answer"][part].astype(np.int32),
            stopped=bool(file["stopped"][row]),
            text=text.decode("utf-8", "surrogatepass"),
            behaviour=behaviour[1],
        )
        yield sample, {"score": float(file["score"][row]), "counts": bool(file["counts"][row]), **dict(known)}
