"""The example `ppo_tiny` learns, and does not learn with a learning rate of 0."""

from __future__ import annotations

import pytest

from bench.curves import draw
from bench.learning import ENTROPY, FLOOR, UNTRAINED, learned
from rlexp.config.load import compose_config
from rlexp.config.schema import Config

STEPS, STILL = 56, 16  # the example has 96
# Measured: 0.967 over the last 128 samples, and an entropy of 2.46.
LEARNED = 0.7


def tiny(*overrides: str) -> Config:
    return compose_config(["+experiment=ppo_tiny", "logger=none", "rollout.show_every=0", *overrides])


@pytest.mark.slow
def test_ppo_tiny_learns_digits_and_without_a_learning_rate_nothing() -> None:
    trained, still = draw([tiny(f"train.max_steps={STEPS}"), tiny(f"train.max_steps={STILL}", "optim.lr=0")])
    begun, ended = learned(trained.rows).ends()
    assert begun < UNTRAINED
    assert ended > LEARNED
    assert trained.rows[-1][ENTROPY] > FLOOR
    assert max(learned(still.rows).reward) < UNTRAINED
    # Other samples of the same policy; measured: 3e-5 apart.
    assert still.rows[-1][ENTROPY] == pytest.approx(still.rows[0][ENTROPY], rel=1e-3)
