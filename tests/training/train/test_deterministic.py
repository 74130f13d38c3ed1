"""`launch.deterministic`: two runs on one layout have the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.config.schema.rollouts import RolloutConfig
from rlexp.launch.joining import RankSpec
from rlexp.training.rollout import choose
from tests.helpers.ranks import Steps, on_ranks, train_steps


def trained(spec: RankSpec, cfg: Config) -> tuple[Steps, bool]:
    return train_steps(spec, cfg, 2), torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("engine", "more"),
    [
        ("zero1", ["train.precision=bf16", "memory.checkpointing=true"]),
        *(
            pytest.param(engine, more, marks=pytest.mark.slow)
            for engine, more in (
                ("torch", ["parallel.layout=allgather"]),
                ("zero2", ["train.precision=bf16"]),
                ("zero3", ["engine.offload=all", "model.hidden_size=72", "model.heads=4", "model.kv_heads=2"]),
                ("fsdp2", ["parallel.layout=ulysses"]),
            )
        ),
    ],
)
def test_two_runs_on_a_ring_of_two_have_the_same_bits(engine: str, more: list[str]) -> None:
    small = ["launch.device=cpu", "parallel=ring2", "data.size=16", "data.eval_size=0", "train.batch_size=4"]
    cfg = compose_config([*small, f"engine={engine}", "launch.deterministic=true", *more])
    one, other = on_ranks(2, trained, cfg), on_ranks(2, trained, cfg)
    for (first, asked), (second, _) in zip(one, other, strict=True):
        assert asked
        assert first.weights.keys() == second.weights.keys()
        assert all(torch.equal(weight, second.weights[name]) for name, weight in first.weights.items())
        for mine, its in zip(first.gradients, second.gradients, strict=True):
            assert all(torch.equal(gradient, its[name]) for name, gradient in mine.items())
        assert first.chosen == second.chosen
        for row in first.rows:
            assert torch.isfinite(torch.tensor(row["train/loss"]))  # memory that nobody wrote is NaN in this mode


class Seen(TorchDispatchMode):
    """Where cumulative sums are taken: for CUDA torch has only a nondeterministic kernel of them, and refuses it."""

    def __init__(self) -> None:
        super().__init__()
        self.on: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.cumsum:
            self.on.append(args[0].device.type)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("asked", [True, False])
def test_tokens_are_chosen_without_the_kernel_that_torch_refuses(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    torch.use_deterministic_algorithms(asked)
    try:
        with FakeTensorMode(), Seen() as seen:
            sums_BV = choose.running_sums(torch.zeros(3, 11, device="cuda"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert (sums_BV.device.type, sums_BV.shape) == ("cuda", (3, 11))
    assert seen.on == ["cpu" if asked else "cuda"]

    monkeypatch.setattr(choose, "running_sums", lambda probs_BV: probs_BV)
    cfg = RolloutConfig(minibatches=1, sampling_ranks=0, top_p=0.9)
    with Seen() as seen:
        choose.choose(torch.zeros(3, 11), torch.zeros(3, dtype=torch.float64), cfg)
    assert not seen.on, "there is no other sum of this kind"
