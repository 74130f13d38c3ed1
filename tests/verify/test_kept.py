"""What a rank keeps for the backward pass is counted and compared as it is."""

from __future__ import annotations

from collections import Counter
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlexp.config.load import compose_config
from rlexp.preflight.rehearsal.sharding import KeptBytes, compare
from rlexp.verify import kept

SENT, SAVED = 4096, 64  # bytes


class Layer(nn.Module):
    """Holds a buffer for a while after it was sent, as gloo's threads do; or for good."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__()
        self.seconds = seconds
        self.sent: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.sent.append(torch.ones(SENT // 8, dtype=torch.float64))
        if self.seconds is not None:
            Timer(self.seconds, self.sent.clear).start()
        return hidden.exp()  # which keeps its result


class Engine:
    def __init__(self, seconds: float | None) -> None:
        self.policy = Layer(seconds)
        self.weight = torch.ones(SAVED // 8, dtype=torch.float64, requires_grad=True)

    def forward(self, _shard: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(self.policy, self.weight, use_reentrant=False)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        assert last
        loss.backward()


@pytest.mark.parametrize(("seconds", "held"), [(0.02, 0), (None, SENT)])
def test_what_the_transport_still_holds_is_not_kept(
    seconds: float | None, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "QUIET", 0.5)  # a busy machine may wake the thread late
    watch = kept.CountedPass(compose_config(["launch.device=cpu", "parallel=ring2", "launch.nproc=2"]))
    engine = kept.CountedEngine(Engine(seconds), watch)
    result = engine.forward(SimpleNamespace(tokens_t=[0]))
    engine.backward(result.sum(), last=True)
    counted = watch.result()
    assert counted is not None
    assert counted.kept.forward == Counter({"Layer": SAVED + held})
    assert counted.kept.again == Counter({"Layer": SAVED + held})


def test_a_module_that_keeps_too_much_is_named_whatever_its_recomputation_keeps() -> None:
    """Attention may keep more than its share where a layout says so, but only so much."""
    attending = frozenset({"attention"})
    ring = KeptBytes(Counter(attention=400), Counter(attention=130), attending)
    alone = KeptBytes(Counter(attention=400), Counter(attention=400), attending)
    assert compare(ring, alone, 4, attention=1.4).whole == {"attention": 4.0}
    assert compare(ring, alone, 4, attention=1.4).meant == {}
    within = KeptBytes(Counter(attention=100), Counter(attention=130), attending)
    assert compare(within, alone, 4, attention=1.4).meant == {"attention": 1.3}
