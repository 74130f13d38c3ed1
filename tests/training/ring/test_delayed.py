"""Training over the delayed group: no buffer is written before its message has gone, no result read before it came."""

from __future__ import annotations

import pytest

from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec
from rlexp.launch.local import PRELOAD, run_ranks
from tests.helpers.delayed import delayed_rank
from tests.helpers.ranks import TIMEOUT, Steps, largest_gap, on_ranks, train_steps

BASE = ("launch.device=cpu", "logger=none", "train.batch_size=8", "data.size=16", "data.eval_size=0", "optim.lr=1e-3")
OVER = (*BASE, "parallel=ring2", "launch.nproc=4", "train.micro_batch_size=2")
EXACT = (*OVER, "train.precision=fp64", "engine=torch")
USUAL = [(*EXACT,), (*EXACT, "parallel.layout=allgather"), (*EXACT, "parallel.layout=ulysses")]
OTHERS = [(*EXACT, "parallel.transport=neighbour"), (*EXACT, "memory.checkpointing=full"),
          (*(word for word in EXACT if word != "parallel=ring2"), "parallel=ring4", "parallel.layout=hybrid",
           "parallel.ulysses_size=2"), (*OVER, "train.precision=fp64", "engine=fsdp2"),
          *((*OVER, "train.precision=fp32", f"engine=zero{stage}") for stage in range(4))]  # fmt: skip
WITHIN = {"fp64": 1e-12, "fp32": 1e-4}  # after a step of Adam; a share that is missing would be 0.1 and more


def stepping(spec: RankSpec, cfgs: list[Config]) -> list[Steps]:
    return [train_steps(spec, cfg, 2) for cfg in cfgs]


@pytest.mark.parametrize("cases", [USUAL, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["usual", "others"])
def test_what_is_delayed_is_waited_for(cases: list[tuple[str, ...]]) -> None:
    ((alone,),) = on_ranks(1, stepping, [compose_config([*BASE, "train.precision=fp64", "engine=torch"])])
    cfgs = [compose_config(words) for words in cases]
    by_rank = run_ranks(delayed_rank, 4, (stepping, cfgs), preload=(*PRELOAD, "deepspeed"), timeout=TIMEOUT)
    for of_rank in by_rank:
        for words, steps in zip(cases, of_rank, strict=True):
            within = WITHIN["fp64" if "train.precision=fp64" in words else "fp32"]
            for expected, found in zip(alone.gradients, steps.gradients, strict=True):
                assert largest_gap(expected, found) < within, words
