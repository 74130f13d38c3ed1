"""`verify` tells a reference that is computed wrong from one that was stored under another model's key."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlexp.verify.report import failure_in_words
from rlexp.verify.verdict import Verification
from tests.helpers.faults.base import REFERENCE
from tests.helpers.faults.reference import SAME_KEY
from tests.helpers.faults.verified import verify_planted


@pytest.mark.slow
def test_values_of_another_model_point_to_their_key(tmp_path: Path) -> None:
    """The first run stores its values. The second, of another seed, finds them, and its own would be right."""

    def verified(seed: int) -> Verification:
        words = [*SAME_KEY.overrides, f"model.seed={seed}"]
        verdict, reached = verify_planted(SAME_KEY, overrides=words, cache=tmp_path / "cache")
        assert reached
        return verdict

    assert verified(0).passed
    failure = verified(1).failure
    assert failure is not None
    assert (failure.stage, failure.module) == ("log-probabilities", REFERENCE), failure_in_words(failure)
    assert [each["key"] for each in failure.settings] == ["reference.name"]
