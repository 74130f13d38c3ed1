"""Rows, tokens, the global sampler, packing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlexp.base.errors import ConfigError, DataError
from rlexp.config.schema import TinyModelConfig
from rlexp.config.schema.data import TooLong
from rlexp.config.schema.row_kinds import Kind
from rlexp.training.dataset import generated
from rlexp.training.dataset.sampler import Sampler, total_steps
from rlexp.training.dataset.tokens import Encoder, Refused, RowTokenizer, notes_of, truncated
from rlexp.training.dealer.deal import Dealer, Room
from rlexp.training.dealer.packing import pack_examples
from rlexp.training.model.loading import byte_tokenizer, load_tokenizer
from rlexp.training.types import Example, Row


def test_synthetic_pairs_are_seeded_and_the_splits_differ() -> None:
    train, again = generated.pairs(50, 3, "train"), generated.pairs(50, 3, "train")
    assert train == again
    assert train != generated.pairs(50, 4, "train")
    assert [row.margin for row in generated.pairs(9, 3, "train", words=5)] == [row.margin for row in train[:9]]
    assert len({row.margin for row in train}) > 4
    held_out = {row.prompt + row.answers[0] for row in generated.pairs(50, 3, "eval")}
    assert not held_out & {row.prompt + row.answers[0] for row in train}


def row(prompt, chosen: str, rejected: str) -> Row:
    return Row(prompt, (chosen, rejected), "here:1")


def encoded(
    kind: Kind, tokenizer: Any, rows: Sequence[Row], longest: int, too_long: TooLong = TooLong.error, room: int = 0
) -> tuple[list[Any], Counter[str]]:
    """Return the examples, numbered, and the counts of what was not taken as it was read."""
    outcomes = Encoder(RowTokenizer(tokenizer), longest, too_long, room).encode(rows)
    for each in outcomes:
        if isinstance(each, Refused):
            raise DataError(each.message)
    kept = [each for each in outcomes if isinstance(each, Example)]
    counts = Counter(note for each in outcomes for note in notes_of(each))
    return [replace(each, index=index) for index, each in enumerate(kept)], counts


def pairs_of(
    tokenizer: Any, rows: Sequence[Row], longest: int = 100, too_long: TooLong = TooLong.error
) -> list[Example]:
    return encoded(Kind.pairs, tokenizer, rows, longest, too_long)[0]


def test_byte_tokenizer_round_trips_every_byte() -> None:
    tokenizer = byte_tokenizer()
    text = "".join(chr(code) for code in range(1, 300)) + "日本 🙂\n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_too_long_and_identical_pairs_follow_the_policy() -> None:
    rows = [row("p" * 30, "same", "same"), row("p" * 30, "yes", "no"), row("p" * 300, "yes", "no"),
            row("p", "a" * 400, "a" * 400 + "b")]  # fmt: skip
    tokenizer = byte_tokenizer()
    with pytest.raises(DataError, match=r"here:1: 304 tokens, and data.max_length=100.*truncate"):
        pairs_of(tokenizer, rows)
    kept, dropped = encoded(Kind.pairs, tokenizer, rows, 100, TooLong.drop)
    assert (len(kept), dropped) == (1, {"longer than data.max_length": 2, "chosen and rejected are the same": 1})
    cut, counts = encoded(Kind.pairs, tokenizer, rows, 100, TooLong.truncate)
    lengths = [len(pair.prompt) + max(len(pair.answers[0]), len(pair.answers[1])) for pair in cut]
    assert lengths == [34, 100]  # the last became identical by its truncation
    assert tokenizer.decode(cut[1].prompt) == "p" * 96
    assert counts == {"kept, but truncated": 1, "chosen and rejected are the same": 2}
    assert tokenizer.decode(cut[1].answers[0]) == "yes<eos>"


def test_truncation_keeps_the_end_of_the_prompt_and_its_beginning_token() -> None:
    prompt = np.array([1, *range(10, 30)], dtype=np.int32)
    answers = np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int32)
    mask = np.array([True, False, False, True, True])
    whole = Example(0, prompt, answers, (mask, None))
    assert truncated(whole, 12).prompt.tolist() == list(range(23, 30))
    assert truncated(whole, 12, bos_id=1).prompt.tolist() == [1, *range(24, 30)]
    short = truncated(whole, 4, bos_id=1)
    assert short.prompt.tolist() == [1]
    assert [answer.tolist() for answer in short.answers] == [[0, 1, 2], [0, 1, 2]]
    assert short.masks[0].tolist() == [True, False, False]
    assert short.masks[1] is None


def test_a_template_that_refuses_a_row_is_named() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"here:1: field `prompt`: the tokenizer's chat template raises: roles must"):
        pairs_of(tokenizer, [row("a", "b", "c")])


@given(st.integers(8, 60), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_every_layout_consumes_the_same_samples_in_the_same_steps(size, dp_size, micro, drop_last) -> None:
    """Rule 1, with data sets whose size is no multiple of the batch, over three epochs."""
    dealer = Dealer(dp_size, Room(units=micro))
    sampler = Sampler(size, batch_size=8, seed=1, drop_last=drop_last)
    steps = total_steps(sampler.steps_per_epoch, None, 3)
    assert steps == 3 * (size // 8 if drop_last else -(-size // 8))
    for batch in sampler.batches(1, steps):
        shares = dealer.deal([[np.full(1 + index, index, dtype=np.int32)] for index in batch.indices]).packs
        assert len({len(share) for share in shares}) == 1, "a replica with fewer passes would hang the others"
        flat = [batch.indices[place] for share in shares for micro_batch in share for place in micro_batch]
        assert sorted(flat) == sorted(batch.indices)
        assert len(batch.indices) == 8 or (not drop_last and batch.step % sampler.steps_per_epoch == 0)


def test_less_data_than_a_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.batch_size=8: the data set has 5 pairs.*drop_last=false"):
        Sampler(5, 8)
    assert Sampler(5, 8, drop_last=False).batch(1).indices


def test_steps_and_epochs_both_bound_a_run() -> None:
    bounds = [(None, None), (None, 3), (7, None), (25, 2), (25, None)]
    assert [total_steps(10, *each) for each in bounds] == [10, 30, 7, 20, 25]


def test_a_pack_is_a_forest_of_roots_with_shifted_targets() -> None:
    pairs = pairs_of(byte_tokenizer(), [row("ab", "xyz", "w"), row("c", "d", "ef")])
    pack = pack_examples(pairs, 8)
    assert [(s.length, s.padded) for s in pack.segments] == [(6, 6), (4, 4), (3, 3), (4, 11)]  # padded as a whole
    assert {s.parent for s in pack.segments} == {None}
    assert pack.positions_T.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, *[0] * 7]
    assert pack.place_N.tolist() == [1, 2, 3, 4, 7, 8, 10, 11, 13, 14, 15]
    assert pack.sequence_N.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 3]
    assert pack.end_S.tolist() == [5, 9, 12, 16]
    assert pack.targets_T[1:5].tolist() == pairs[0].answers[0].tolist()
    assert [s.padded for s in pack_examples(pairs, 8, packing=False).segments] == [6, 6, 6, 6]
    assert [s.padded for s in pack_examples(pairs, 16, packing=False).segments] == [6, 6, 6, 14]
    assert [s.padded for s in pack_examples(pairs, 1, packing=False).segments] == [6, 6, 6, 6]
    assert pack.real_tokens == 17


def test_each_answer_of_a_pack_has_its_own_mask() -> None:
    prompt, chosen, rejected = (np.arange(3, 3 + n, dtype=np.int32) for n in (2, 4, 3))
    ours, theirs = np.array([False, True, True, False]), np.array([True, False, True])
    pairs = [Example(0, prompt, (chosen, rejected), (ours, theirs)), Example(1, prompt, (chosen, rejected))]
    pack = pack_examples(pairs, 1)
    predicting = [pack.place_N[pack.sequence_N == sequence].tolist() for sequence in range(4)]
    assert predicting == [[2, 3], [7, 9], [12, 13, 14, 15], [18, 19, 20]]  # each is before a trained token


def test_an_empty_micro_batch_is_padding_alone() -> None:
    pack = pack_examples([], 16)
    assert (pack.sequences, pack.real_tokens, len(pack.tokens_T)) == (0, 0, 16)
    assert len(pack.place_N) == len(pack.end_S) == 0


def test_a_prompt_longer_than_the_answer_leaves_room_for() -> None:
    tokenizer = byte_tokenizer()
    rows = [Row("p" * n, (), f"here:{n}") for n in (5, 12, 10)]
    with pytest.raises(
        DataError, match=r"here:12: the prompt has 12 tokens, and data.max_length − rollout.max_new_tok"
    ):
        encoded(Kind.prompts, tokenizer, rows, 14, room=4)
    kept, dropped = encoded(Kind.prompts, tokenizer, rows, 14, TooLong.drop, room=4)
    assert [len(prompt.prompt) for prompt in kept] == [5, 10]
    assert dropped == {"longer than data.max_length − rollout.max_new_tokens": 1}
    assert [prompt.index for prompt in kept] == [0, 1]
    long = [Row("<bos>" + "a" * 9 + "b" * 4, (), "here")]
    (cut,), counts = encoded(Kind.prompts, tokenizer, long, 14, TooLong.truncate, room=4)
    assert tokenizer.decode(cut.prompt) == "<bos>" + "a" * 5 + "b" * 4
    assert counts == {"kept, but truncated": 1}
    with pytest.raises(DataError, match="here: field `prompt` has no tokens"):
        encoded(Kind.prompts, tokenizer, [Row("", (), "here")], 14, room=4)


@pytest.mark.parametrize("digits", [1, 2])
def test_generated_sums_come_to_their_answers(digits: int) -> None:
    rows = generated.sums(50, 3, "train", digits)
    assert rows == generated.sums(50, 3, "train", digits)
    assert rows[:20] != generated.sums(20, 3, "eval", digits)
    for row in rows:
        one, plus, other, equals = str(row.prompt).split(" ")
        assert (plus, equals, int(row.expected or "")) == ("+", "=", int(one) + int(other))
        assert max(len(one), len(other)) <= digits


def test_tiny_has_the_tokenizer_it_says() -> None:
    assert len(load_tokenizer(TinyModelConfig())) == 259
    assert np.array_equal(byte_tokenizer()("é")["input_ids"], load_tokenizer(TinyModelConfig())("é")["input_ids"])
