"""Defects that `verify` does not see, or sees in few configurations; each with the test that must fail with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.helpers.faults.base import ENGINE, MODEL, RING, TRAIN, by_test
from tests.helpers.faults.plant import Altered, Given, Seeing
from tests.helpers.reduced_apart import dropped_at_once


def as_it_comes(_wide: Any) -> Any:
    return lambda dtype: dtype


def by_rank_alone(original: Any, layer: Any, *weights: Any) -> Any:
    """Merge an adapter by alpha / rank, also where its scale was alpha / √rank."""
    plainly = {name: layer.lora_alpha[name] / rank for name, rank in layer.r.items()}
    return original(Altered(layer, scaling=lambda _: plainly), *weights)


def of_the_first_group(moments_of: Any, self: Any) -> Any:
    """Give every group of the optimizer the moments of the first."""
    return lambda optimizer, _partition: moments_of(optimizer, self._partitions()[0])


def sums_as_single_results(_original: Any, _self: Any, _rank: int, _source: int) -> bool:
    """Take every gradient that is sent for the result of one call."""
    return True


def sent_in_bfloat16(original: Any, *args: Any) -> Any:
    return original(*args) | {"communication_data_type": "bf16"}


def reduced_narrowly(policy: Any) -> Any:
    return lambda computing=None, _reduced=None, **how: policy(computing, computing, **how)


def on_the_device(_original: Any, self: Any, parameter: Any) -> Any:
    return self._utils.safe_get_local_grad(parameter)


def late_on_odd_ranks(original: Any, self: Any, parameter: Any) -> None:
    if self.world.rank % 2 == 0:
        original(self, parameter)


def written_at_once(original: Any, ring: Any, going: Any, coming: Any) -> Any:
    """Send from buffers, and use these again before the messages have gone."""
    buffers = [(to, x.clone()) for to, x in going]
    under_way = original(ring, buffers, coming)
    for _, buffer in buffers:
        buffer.zero_()
    return under_way


def not_awaited(original: Any, self: Any) -> None:
    """Read a reduced gradient without waiting for its reduction."""
    self._sent[0] = self._sent[0]._replace(work=SimpleNamespace(wait=lambda: None))
    original(self)


def spread_narrowly(original: Any, self: Any, *args: Any) -> None:
    """Sum what other ranks computed in the dtype of the keys."""
    wide, self.wide = self.wide, self.like[0].dtype
    try:
        original(self, *args)
    finally:
        self.wide = wide


TESTED = (
    by_test("a length on a bound counts in the next part", "train.by_length:Buckets.note",
            Seeing({"np.searchsorted": lambda search: lambda *args, **_: search(*args, side="right")}), TRAIN,
            "training/train/test_by_length.py::"
            "test_an_example_as_long_as_a_bound_counts_in_the_part_before_it"),
    by_test("digests in the order of the ranks", "train.rollout_supply:Rollouts.facts_of",
            Seeing({"sorted": lambda _: lambda samples, **_: list(samples)}), TRAIN,
            "training/rollout/test_rollout_facts.py::"
            "test_samples_are_told_by_their_places_whichever_rank_drew_them"),
    by_test("an export without rank-stabilised scaling", "model.adapter:_merged", by_rank_alone, MODEL,
            "training/model/test_adapter_exports.py::test_an_export_computes_what_was_trained"),
    by_test("moments of the first group", "engine.zero:Stage12.fragments",
            Seeing({"moments_of": Given(of_the_first_group)}), ENGINE,
            "training/checkpoint/test_moments.py::test_moments_go_on_from_one_engine_to_the_next"),
    by_test("scores in the dtype of the weights", "model.head:HeadScores.forward", Seeing({"wide": as_it_comes}), MODEL,
            "training/model/test_head.py::test_scores_are_sums_in_float32"),
    by_test("gathered gradients summed in bfloat16", "ring.transports.gather:ScatteredHome.add", spread_narrowly, RING,
            "training/ring/test_sums.py::test_every_layout_sums_in_float32"),
    by_test("sums of two calls sent in bfloat16", "ring.meetings:Planner.once", sums_as_single_results, RING,
            "training/ring/test_sums.py::test_every_layout_sums_in_float32"),
    by_test("gradients of copied heads summed in bfloat16", "ring.transports.heads:SharedHeads.backward",
            Seeing({"accumulation_dtype": as_it_comes}), RING,
            "training/ring/test_sums.py::test_every_layout_sums_in_float32"),
    by_test("the bias's gradient summed in bfloat16", "model.head:_Pieces.backward",
            Seeing({"wide": as_it_comes}), MODEL,
            "training/model/test_head.py::test_sums_over_tokens_and_pieces_are_in_float32"),
    by_test("a critic's value in the dtype of the weights", "model.policy:ValueHead.forward",
            Seeing({"torch.promote_types": lambda _: lambda dtype, _other: dtype}), MODEL,
            "training/model/test_head.py::test_scores_are_sums_in_float32"),
    by_test("DeepSpeed reduces in bfloat16", "engine.zero:ds_config", sent_in_bfloat16, ENGINE,
            "training/engine/test_sums.py::test_every_engine_sums_gradients_in_float32"),
    by_test("a gradient is dropped while it is reduced", "engine.zero:_KeptGradient._average_and_keep",
            dropped_at_once, ENGINE,
            "training/engine/test_streams.py::test_no_gradient_is_given_away_while_it_is_reduced"),
    by_test("ZeRO-3's norm copies what is offloaded", "engine.zero:Stage3._gradient_of", on_the_device, ENGINE,
            "training/engine/test_norm.py::test_zero3_leaves_an_offloaded_gradient_on_the_host"),
    by_test("some ranks reduce after the backward pass", "engine.reducing:Reducing.arrived", late_on_odd_ranks, ENGINE,
            "training/engine/test_call_order.py::test_ranks_begin_in_orders_that_fit_together"),
    by_test("a message's buffer is written again too early", "ring.collectives:between", written_at_once, RING,
            "training/ring/test_delayed.py::test_what_is_delayed_is_waited_for"),
    by_test("a gradient is read before it is reduced", "engine.reducing:Reducing._land", not_awaited, ENGINE,
            "training/ring/test_delayed.py::test_what_is_delayed_is_waited_for"),
    by_test("FSDP2 reduces in bfloat16", "engine.fsdp2:shard",
            Seeing({"MixedPrecisionPolicy": reduced_narrowly}), ENGINE,
            "training/engine/test_sums.py::test_every_engine_sums_gradients_in_float32"),
)  # fmt: skip
