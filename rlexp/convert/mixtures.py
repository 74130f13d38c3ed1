"""Several sets of rows in one file of TRL, and the mixtures of alignment-handbook and open-r1."""

from __future__ import annotations

from typing import Any

from rlexp.convert.conversion import Conversion
from rlexp.convert.rules import Fate

SPLITS = ["train", "test"]  # of alignment-handbook, where a file names none


def sets(conv: Conversion) -> list[dict[str, Any]]:
    """Return the sets as TRL's `datasets` has them: each a path, a name, a split."""
    mixture, mixer = conv.mapping("dataset_mixture"), conv.mapping("dataset_mixer")
    each = mixture.get("datasets")
    if mixture and not (isinstance(each, list) and all(isinstance(one, dict) for one in each)):
        conv.refuse("dataset_mixture", "must have datasets, a list of mappings", "Give each one an id.")
    splits = conv.texts("dataset_splits") or SPLITS
    each = each or [{"id": name, "weight": share, "split": splits[0]} for name, share in mixer.items()]
    return conv.entries("datasets") or [_as_trl(conv, one) for one in each]


def argument(conv: Conversion) -> str:
    """Return the argument that names the sets."""
    return next((each for each in ("datasets", "dataset_mixture", "dataset_mixer") if conv.get(each)), "datasets")


def held_out(conv: Conversion) -> tuple[float, str | None]:
    """Return how many rows a mixture holds out, or what share; and the split that it has for them."""
    size, splits = conv.mapping("dataset_mixture").get("test_split_size"), conv.texts("dataset_splits") or SPLITS
    whole = size if isinstance(size, int | float) and not isinstance(size, bool) else 0
    return whole, splits[1] if splits[1:] and conv.mapping("dataset_mixer") else None


def _as_trl(conv: Conversion, one: dict[str, Any]) -> dict[str, Any]:
    """Write the share of a set's rows as a slice of its split."""
    share, split = one.get("weight"), str(one.get("split") or "train")
    if isinstance(share, int | float) and 0 < share < 1:
        split = f"{split}[:{max(1, round(100 * share))}%]"
        drawn = "; theirs are drawn" * (argument(conv) == "dataset_mixture")
        conv.remark(Fate.OTHER, f"{argument(conv)}: weight", share, f"the first rows of a set{drawn}")
    return {"path": one.get("id"), "split": split} | ({"name": one["config"]} if one.get("config") else {})
