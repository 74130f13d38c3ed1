"""The defects that tests plant into the product, with the stage and module that `verify` must name.

A defect names a function of the product (`target`) and what takes its place (`change`): a function that is called with
the original and with the arguments of each call, or `Seeing`, under which the original finds other things behind names
that it uses. It follows the product through new local names, new lines and new comments. If the target goes, or is no
longer called, the defect's test fails and says so.

`python -m tests.helpers.faults` plants every defect, each into ranks of its own, and prints what `verify` found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rlexp.launch.joining import RankSpec
from rlexp.training.ring.collectives import _all_gather as all_gather
from tests.helpers.faults.adapter import ADAPTER_FAULTS
from tests.helpers.faults.algos import ALGOS_FAULTS
from tests.helpers.faults.base import one
from tests.helpers.faults.data import DATA_FAULTS
from tests.helpers.faults.drawing import DRAWING_FAULTS
from tests.helpers.faults.engine import ENGINE_FAULTS
from tests.helpers.faults.fused import FUSED_FAULTS
from tests.helpers.faults.gathered import GATHERED_FAULTS
from tests.helpers.faults.halves import HALVES
from tests.helpers.faults.losses import LOSS_FAULTS
from tests.helpers.faults.metrics import METRICS_FAULTS
from tests.helpers.faults.model import MODEL_FAULTS
from tests.helpers.faults.own_precision import OWN_FAULTS
from tests.helpers.faults.reference import REFERENCE_FAULTS, SAME_KEY
from tests.helpers.faults.ring import RING_FAULTS
from tests.helpers.faults.samples import SAMPLE_FAULTS
from tests.helpers.faults.sharing import SHARING_FAULTS
from tests.helpers.faults.starting import STARTING_FAULTS
from tests.helpers.faults.train import TRAIN_FAULTS
from tests.helpers.faults.widths import WIDTHS_FAULTS

FAULTS = (*DATA_FAULTS, *RING_FAULTS, *MODEL_FAULTS, *ALGOS_FAULTS, *TRAIN_FAULTS, *ENGINE_FAULTS, *METRICS_FAULTS,
          *LOSS_FAULTS, *OWN_FAULTS, *REFERENCE_FAULTS, *ADAPTER_FAULTS, *SAMPLE_FAULTS, *GATHERED_FAULTS,
          *STARTING_FAULTS, *DRAWING_FAULTS, *FUSED_FAULTS, *SHARING_FAULTS, *WIDTHS_FAULTS,
          *HALVES)  # fmt: skip

# Not a defect: `verify` is to believe that a model of six layers is too large for this machine.
LITTLE_MEMORY = one("little memory", "verify.fit_memory:free_on_host", lambda _original: 300_000_000, "", "")


class Whole(torch.autograd.Function):
    """Gather the whole sequence on every rank and keep it. Values and gradients are those of the rank's own tokens."""

    @staticmethod
    def forward(ctx: Any, hidden: Any) -> Any:
        size = dist.get_world_size()
        if size == 1:
            return hidden.clone()
        whole = hidden.new_empty(size, *hidden.shape)
        all_gather(whole.view(-1), hidden.contiguous().view(-1))
        ctx.save_for_backward(whole)
        return whole[dist.get_rank()].clone()

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0]


# Not a difference: the values are right, and each layer's MLP keeps the whole sequence on every rank of the ring.
WHOLE_SEQUENCE = one("an MLP gathers the sequence", "transformers.models.llama.modeling_llama:LlamaMLP.forward",
                     lambda original, self, hidden: original(self, Whole.apply(hidden)), "", "")  # fmt: skip


def in_any_order(original: Callable[..., Any], values_n: Any, shard: Any) -> Any:
    """Add up tokens in another order at each call. Sums of equal tokens differ by their rounding then."""
    order = torch.randperm(len(values_n), generator=ORDER)
    return original(values_n[order], SimpleNamespace(sequence_n=shard.sequence_n[order], sequences=shard.sequences))


# Not a difference: a GPU adds up in the order in which its threads come.
ORDER = torch.Generator().manual_seed(0)
ANY_ORDER = one("sums in any order", "train.sequence_sums:sum_by_sequence", in_any_order, "", "")

# `make test` plants one of each stage, and one more of the ring; those of one loss share a float64 reference. `make
# check` adds one of each other pair of stage and module, and of the other layouts and engines, windows and messages.
# `make prove` plants all.
FAST = (
    "a unit is dealt twice", "targets shifted after sharding", "not causal", "divided by the accumulation again",
    "reduced over the ring only", "not clipped", "replicated sums counted on every rank",
    "a shared trained token counts for one sequence", "a child sees its sibling",
    "a reward given to the neighbour", "a group that lost a member",
)  # fmt: skip
CHECK = (
    "ZeRO-1 doubles the gradient", "log-probability of the token itself", "a statistic of the micro-batch",
    "a replica takes the other's pairs", "sums in float32", "bfloat16 copies are not renewed",
    "other keys in the backward", "the head does not hand its gradient down", "the next step's rate",
    "mean logits", "rewards less their micro-batch's mean", "a value of some micro-batches only",
    "total tokens start anew", "FSDP2 does not accumulate", "heads in another order", "gradients of gathered keys",
    "a pack ignores masks", "bco_pair: the whole batch is the replica's", "bco_pair: the shift starts anew",
    "dpo: tokens of the replica", "apo_zero: the tail counts masked tokens",
    "a sum hands half of its derivative down", "a reference model's answers one token off",
    "top_p without the last token",
    "whitened over a replica", "weights by a micro-batch's tokens", "a stale old log-probability",
    "a reference that is trained", "a critic's value one token off", "credit on a masked answer",
    "an optimizer step too many", "a text that ends an answer is passed over", "drawn by the first weights",
    "an answer's ratio of one rank's tokens", "half of the penalty", "not a number in the merge",
    "a window off by one", "a row that another rank should get", "a row that nobody sent",
    "dk added at the wrong place", "a branch's first target is lost", "a prompt's gradient of one child",
    "a shared trained token has one sequence's weight", "a unit is not dealt", "padding is real", "not shuffled",
    "a sequence held twice", "a sequence that nobody holds", "a chunk with the neighbour's width",
    "summed over the wrong ranks", "a width that differs between ranks",
)  # fmt: skip

# Each is planted by a test that knows what is to come of it.
WITH_OWN_TESTS = (LITTLE_MEMORY, WHOLE_SEQUENCE, ANY_ORDER, SAME_KEY)
ALL_FAULTS = {fault.name: fault for fault in (*FAULTS, *WITH_OWN_TESTS)}


def faulty_rank(spec: RankSpec, name: str, reached: Path, target: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Run a rank of the product with a defect. The file `reached` appears when the defect is at work."""
    ALL_FAULTS[name].plant(reached.touch)
    return target(spec, *args)
