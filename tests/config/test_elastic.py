"""A ring size that is left to rlexp: what it comes to, and what needs a size."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlexp.base.errors import ConfigError
from rlexp.config import load, resolvers
from rlexp.config.checks.layout import Heads, candidates
from rlexp.config.explain import explain
from rlexp.config.load import compose_config
from rlexp.config.schema import Config, LayoutName

ON_CPU = ("launch.device=cpu", "logger=none", "parallel.cut=auto")


def composed(*words: str) -> Config:
    return compose_config([*ON_CPU, *words])


def ring_of(*words: str) -> int:
    """Return the ring size before the configuration is checked: several nodes need a launcher."""
    return int(load.composed(words).parallel.ring_size)


@pytest.mark.parametrize("words", [("parallel=elastic",), ("parallel.ring_size=auto",)], ids=["group", "key"])
def test_all_ranks_are_one_ring(words: tuple[str, ...]) -> None:
    cfg = composed(*words, "launch.nproc=6")
    assert (cfg.parallel.ring_size, cfg.parallel.dp_size, cfg.parallel.elastic) == (6, 1, True)
    assert composed("parallel=ring2", "launch.nproc=6").parallel.elastic is False
    assert ring_of(*ON_CPU, *words, "launch.nproc=2", "launch.nodes=2") == 4  # on a CPU no node is apart


def test_ranks_that_only_sample_are_not_in_the_ring() -> None:
    cfg = composed("parallel=elastic", "launch.nproc=5", "loss=grpo", "reward.text=a", "rollout=pipelined")
    assert (cfg.parallel.ring_size, cfg.rollout.sampling_ranks) == (4, 1)


def test_each_node_with_gpus_has_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolvers, "visible_gpus", lambda: 4)
    on_gpus = ("launch.device=cuda", "parallel=elastic", "launch.nodes=2")
    assert ring_of(*on_gpus) == 4
    sampled = ("loss=grpo", "reward.text=a", "rollout=pipelined")
    assert ring_of(*on_gpus, *sampled, "rollout.sampling_ranks=4") == 4  # the second node samples
    assert ring_of(*on_gpus, *sampled, "rollout.sampling_ranks=2") == 2  # 0 to 3 on one node, 4 and 5 on the other


@pytest.mark.parametrize(("gpus", "ring"), [(0, 4), (2, 2)])
def test_the_device_is_found_out(monkeypatch: pytest.MonkeyPatch, gpus: int, ring: int) -> None:
    monkeypatch.setattr(resolvers, "visible_gpus", lambda: gpus)
    assert ring_of("parallel=elastic", "launch.nproc=2", "launch.nodes=2") == ring


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "parallel.ring_size=auto: takes all ranks for one ring, and on a CPU their number must be given."),
        (("launch.nproc=4", "parallel.layout=ulysses"), "parallel.layout=ulysses: parallel.ring_size=auto gives each "
         "sequence a width, and parallel.layout=ulysses cuts all alike. Use parallel.layout=zigzag or "
         "parallel.layout=allgather, or give a size: parallel.ring_size=4."),
        (("launch.nproc=4", "parallel.cut=all"), "parallel.cut=all: parallel.ring_size=auto gives each sequence a "
         "width, and parallel.cut=all cuts all alike."),
    ],
    ids=["no ranks", "ulysses", "cut all"],
)  # fmt: skip
def test_what_needs_a_size_is_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises((ConfigError, OmegaConfBaseException)) as caught:
        composed("parallel=elastic", *words)
    assert (explain(caught.value) or str(caught.value)).startswith(said)


def test_only_layouts_with_widths_are_candidates() -> None:
    cfg = composed("parallel=elastic", "launch.nproc=4", "parallel.layout=auto")
    assert {each.layout for each in candidates(cfg, Heads(8, 2, 8))} == {LayoutName.zigzag, LayoutName.allgather}


def test_a_run_is_filed_under_its_ring() -> None:
    for words, name in ((("parallel=elastic", "launch.nproc=2"), "elastic"), (("parallel=ring2",), "ring2")):
        cfg = load.composed([*ON_CPU, *words])
        assert OmegaConf.create({"parallel": cfg.parallel, "name": "${rlexp_ring_name:}"}).name == name
