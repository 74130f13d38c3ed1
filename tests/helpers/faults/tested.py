"""Defects that `verify` does not see, or sees in few configurations; each with the test that must fail with it."""

from __future__ import annotations

import inspect
import linecache
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.helpers.faults.base import by_test
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


def sums_as_single_results(_original: Any, _calls: Any) -> bool:
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
    self._sent[0] = (*self._sent[0][:2], SimpleNamespace(wait=lambda: None))
    original(self)


def spread_narrowly(original: Any, self: Any, *args: Any) -> None:
    """Sum what other ranks computed in the dtype of the keys."""
    wide, self.wide = self.wide, self.like[0].dtype
    try:
        original(self, *args)
    finally:
        self.wide = wide


def evened_by_tokens(original: Any, self: Any, *args: Any) -> Any:
    """Give a run to whoever has the fewest tokens so far, and tell the work as it is."""
    dealt = original(Altered(self, work=lambda _: lambda size: size.tokens), *args)
    return dealt and replace(dealt, work=tuple(sum(map(self.work, sizes)) for sizes in dealt.sizes))


def shrunk_once(kernel: Any) -> Any:
    """Compile the kernel anew: its sum of squares shrinks like one of values."""
    source = inspect.getsource(kernel.fn).replace("squared * shrink * shrink", "squared * shrink")
    name = f"<{kernel.fn.__name__} with a defect>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # Triton reads it there
    known = dict(kernel.fn.__globals__)
    exec(compile(source, name, "exec"), known)
    return known[kernel.fn.__name__]


def by_collectives_first(original: Any, known: Any, ranks: int) -> Any:
    return original({rank: each._replace(noted=each.begun, begun=each.noted) for rank, each in known.items()}, ranks)


def steps_of_another_share(original: Any, task: Any, saved: Any) -> None:
    """Keep the steps of a warm-up whatever share of a run it was."""
    ratio = {"warmup_ratio": task.run.cfg.optim.warmup_ratio}
    original(task, {**saved, "config": {**saved["config"], "optim": ratio}})


def numbers_for_bytes(noted: Any, self: Any, *_: Any) -> Any:
    """Tell the numbers of a weight for its bytes, where it goes into a bucket."""

    def told(weights: Any) -> Any:
        for name, weight in noted(weights):
            held = self.copies is not None and name in self.copies
            yield name, Altered(weight, nbytes=lambda _, of=weight: of.numel()) if held else weight

    return told


def rows_before_halves(original: Any, job: Any, cfg: Any, examples: Any, tokenizer: Any) -> Any:
    return original(job, cfg, replace(examples, held_out=examples.held_out[: job.rows]), tokenizer)


def without_bounds(original: Any, folder: Any, overrides: Any, **how: Any) -> Any:
    return original(folder, [each for each in overrides if not each.startswith("eval.buckets=")], **how)


def left_out_of_greedy_steps(original: Any, *args: Any) -> Any:
    chooser = original(*args)
    chooser.is_argmax_invariant = lambda _self: True
    return chooser


def to_the_first_answer(_original: Any, one: Any, _other: Any) -> int:
    return next(place for place, message in enumerate(one) if message["role"] == "assistant")


# Defects of rows, which the second reader finds (`tests/oracles/`).
OF_ROWS: tuple[tuple[str, str, Any], ...] = (
    ("the user's turns are trained on", "messages:turns",
     lambda original, answer: ((text, True) for text, _ in original(answer))),
    ("another shared beginning", "messages:shared_beginning", to_the_first_answer),
    ("no system prompt", "messages:with_system", lambda _, prompt, _system: prompt),
    ("other rows are held out", "views:drawn", lambda _, _total, size: np.arange(size)),
    ("no template", "chat:Chat.templated", lambda _original, _self: False),
    ("no call for the answer", "chat:_Rendering.text",
     lambda original, self, messages, **_asking: original(self, messages)),
    ("turns begin at their roles", "chat:_Rendering.beginning",
     lambda _, self, talk, place, _whole, _called=None: len(self.text(talk[:place]))),
    ("a turn ends before its end", "chat:_Rendering.turn",
     lambda original, *args: ((turn := original(*args))[0], turn[1] - len("<|im_end|>\n"))),
    ("two ends", "tokens:RowTokenizer._ends", lambda _original, _self, _last: False),
    ("a prompt's last token goes on", "seam:Seam._joined",
     Seeing({"np.array_equal": Given(lambda _equal, *_args: lambda *_arrays: True)})),
    ("no template is asked for", "chat:as_text", lambda original, prompt: f"{original(prompt)} "),
)  # fmt: skip
TESTED = (
    *(by_test(name, f"dataset.{target}", change, "training/dataset/test_textbook_rows.py::"
              "test_a_mixture_is_read_and_ordered_as_it_is_meant") for name, target, change in OF_ROWS),
    by_test("the options are not handed on", "dataset.chat:_Rendering.__init__",
            lambda original, self, *parts: (original(self, *parts), [*map(self.extra.pop, self.row.options)])[0],
            "training/dataset/test_textbook_singles.py::test_options_and_tools_reach_the_template"),
    by_test("a length on a bound counts in the next part", "train.by_length:Buckets.note",
            Seeing({"np.searchsorted": lambda search: lambda *args, **_: search(*args, side="right")}),
            "training/train/test_by_length.py::"
            "test_an_example_as_long_as_a_bound_counts_in_the_part_before_it"),
    by_test("digests in the order of the ranks", "train.rollout_supply:Rollouts.facts_of",
            Seeing({"sorted": lambda _: lambda samples, **_: list(samples)}),
            "training/rollout/test_rollout_facts.py::"
            "test_samples_are_told_by_their_places_whichever_rank_drew_them"),
    by_test("an export without rank-stabilised scaling", "model.adapter:_merged", by_rank_alone,
            "training/model/test_adapter_exports.py::test_an_export_computes_what_was_trained"),
    by_test("moments of the first group", "engine.zero:Stage12.fragments",
            Seeing({"moments_of": Given(of_the_first_group)}),
            "training/checkpoint/test_moments.py::test_moments_go_on_from_one_engine_to_the_next"),
    by_test("scores in the dtype of the weights", "model.head:HeadScores.forward", Seeing({"wide": as_it_comes}),
            "training/model/test_head.py::test_scores_are_sums_in_float32"),
    by_test("gathered gradients summed in bfloat16", "ring.transports.gather:ScatteredHome.add", spread_narrowly,
            "training/ring/test_sums.py::test_every_layout_sums_in_float32"),
    by_test("sums of two calls sent in bfloat16", "ring.calls:once", sums_as_single_results,
            "training/ring/test_sums.py::test_every_layout_sums_in_float32"),
    by_test("gradients of copied heads summed in bfloat16", "ring.transports.heads:SharedHeads.backward",
            Seeing({"accumulation_dtype": as_it_comes}),
            "training/ring/test_sums.py::test_every_layout_sums_in_float32"),
    by_test("the bias's gradient summed in bfloat16", "model.head:_Pieces.backward",
            Seeing({"wide": as_it_comes}),
            "training/model/test_head.py::test_sums_over_tokens_and_pieces_are_in_float32"),
    by_test("a critic's value in the dtype of the weights", "model.policy:ValueHead.forward",
            Seeing({"torch.promote_types": lambda _: lambda dtype, _other: dtype}),
            "training/model/test_head.py::test_scores_are_sums_in_float32"),
    by_test("DeepSpeed reduces in bfloat16", "engine.zero:ds_config", sent_in_bfloat16,
            "training/engine/test_sums.py::test_every_engine_sums_gradients_in_float32"),
    by_test("a gradient is dropped while it is reduced", "engine.zero:_KeptGradient._average_and_keep",
            dropped_at_once,
            "training/engine/test_streams.py::test_no_gradient_is_given_away_while_it_is_reduced"),
    by_test("ZeRO-3's norm copies what is offloaded", "engine.zero:Stage3._gradient_of", on_the_device,
            "training/engine/test_norm.py::test_zero3_leaves_an_offloaded_gradient_on_the_host"),
    by_test("some ranks reduce after the backward pass", "engine.reducing:Reducing.arrived", late_on_odd_ranks,
            "training/engine/test_call_order.py::test_ranks_begin_in_orders_that_fit_together"),
    by_test("a message's buffer is written again too early", "ring.collectives:between", written_at_once,
            "training/ring/test_delayed.py::test_what_is_delayed_is_waited_for"),
    by_test("a gradient is read before it is reduced", "engine.reducing:Reducing._land", not_awaited,
            "training/ring/test_delayed.py::test_what_is_delayed_is_waited_for"),
    by_test("FSDP2 reduces in bfloat16", "engine.fsdp2:shard",
            Seeing({"MixedPrecisionPolicy": reduced_narrowly}),
            "training/engine/test_sums.py::test_every_engine_sums_gradients_in_float32"),
    by_test("replicas are evened by tokens", "dealer.deal:Dealer._filled", evened_by_tokens,
            "training/dealer/test_deal.py::test_it_is_the_work_that_is_even_and_not_the_tokens"),
    by_test("places begin anew with each part", "dealer.deal:Dealt.and_also",
            lambda original, self, other, _first: original(self, other, 0),
            "training/dealer/test_deal.py::test_parts_of_many_units_make_one_deal"),
    by_test("skew over the sum of the work", "dealer.deal:Dealt.skew",
            lambda original, self: original(self) / len(self.work),
            "training/dealer/test_deal.py::test_skew_is_the_work_of_the_busiest_replica_over_the_mean"),
    by_test("a replica's share is rounded down", "config.checks.micro_batches:_of_replica",
            lambda _original, cfg: cfg.train.batch_size // cfg.parallel.dp_size,
            "config/test_micro_batches.py::test_the_busiest_replica_s_share_of_a_batch_is_what_counts"),
    by_test("a kernel's sum of squares shrinks once", "model.fused.triton_kernels:_read_logits", shrunk_once,
            "training/model/fused/test_pieces.py::test_tritons_kernels_are_plain_torch"),
    by_test("the header has a share for a rate", "train.schedule:Schedule.in_words",
            lambda original, self: original(replace(self, lr=1.0)),
            "training/train/test_schedule.py::test_the_numbers_of_the_header_are_those_of_its_rates"),
    by_test("a template without trim", "config.chat_templates:template_text",
            lambda original, value: original(value).replace(" | trim", ""),
            "training/model/test_chat_templates.py::test_white_space_around_messages_is_trimmed_or_kept"),
    by_test("behind is who has begun fewer collectives", "launch.watch:behind_of", by_collectives_first,
            "launch/test_watch.py::test_ranks_that_are_behind"),
    by_test("pinned memory at its own size", "preflight.host:host_of",
            lambda original, cfg, held, peak: original(cfg, replace(held, rounded=held.pinned), peak),
            "preflight/test_host.py::test_each_part_of_what_is_held_is_counted_once_where_it_belongs"),
    by_test("a forced warm-up keeps the old steps", "train.resume:keep_warm_up", steps_of_another_share,
            "training/checkpoint/test_shares.py::test_a_warm_up_is_kept_only_by_the_share_that_it_had"),
    by_test("our processor says that greedy answers need it not",
            "rollout.vllm.chooser:chooser", left_out_of_greedy_steps,
            "training/rollout/test_vllm.py::test_it_draws_what_native_draws"),
    by_test("a bucket counts numbers", "rollout.vllm.weights:HandOver.__call__",
            Seeing({"_noted": Given(numbers_for_bytes)}),
            "training/rollout/test_vllm.py::test_weights_are_held_until_a_bucket_is_full"),
    by_test("halves of pairs count as prompts", "generate.rank:prompts_of", rows_before_halves,
            "generate/test_generate.py::test_so_many_prompts_are_answered_as_are_asked_for"),
    by_test("bounds typed beside a run are ignored", "eval.job:job_of_folder", without_bounds,
            "eval/test_eval.py::test_what_is_typed_beside_a_run_replaces_that_of_the_run_alone"),
    by_test("each rank's pairs are the busiest's", "train.operations:Operations.on",
            lambda original, self, shard: original(self, Altered(shard, mean_work=lambda _: shard.most_work)),
            "training/train/test_operations.py::test_an_uneven_ring_counts_each_pair_and_token_once"),
)  # fmt: skip
