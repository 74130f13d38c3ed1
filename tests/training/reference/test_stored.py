"""What is kept of a reference: each sequence's values come to its own tokens, and a file is whole or is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlexp.base.made_once import Appending, damage
from rlexp.config.checks.reference import model_of_reference
from rlexp.config.load import compose_config
from rlexp.config.schema.models import Precision
from rlexp.training.dealer.packing import pack_examples, shard_pack
from rlexp.training.reference import stored
from rlexp.training.reference.stored import (
    Kept,
    ReferenceRows,
    SequenceValues,
    Stored,
    appended,
    digest_of,
    facts_of,
    kept_dtype,
    key_of,
    types_of,
)
from rlexp.training.ring.kernels.plain import Plain
from rlexp.training.ring.layouts import get_layout
from rlexp.training.types import Example, Floats, SequenceName
from rlexp.training.world.groups import Ring
from tests.helpers.models import saved
from tests.helpers.paths import files_of_at_most

FLOAT64 = np.dtype(np.float64)


def pairs(count: int, seed: int = 0) -> list[Example]:
    """Return pairs of other lengths each, of which some answers are trained on in part."""
    draw = np.random.default_rng(seed)

    def tokens() -> np.ndarray:
        return draw.integers(0, 99, size=draw.integers(2, 9)).astype(np.int32)

    made = [Example(index, tokens(), (tokens(), tokens()), (None, None)) for index in range(count)]
    return [replace(pair, masks=(np.arange(len(pair.answers[0])) % 2 == 0, None)) if pair.index % 2 else pair
            for pair in made]  # fmt: skip


def marked(examples: Sequence[Example], *, held_out: bool = False) -> list[Floats]:
    """Return values for all sequences, each of which says where it belongs."""
    counts = [len(answer) if mask is None else int(mask.sum()) for each in examples for answer, mask in each.masked]
    return [1000.0 * (number + 1) + np.arange(count) + 0.5 * held_out for number, count in enumerate(counts)]


def test_each_sequence_gets_its_own_values_on_every_rank_of_a_ring() -> None:
    train, held_out = pairs(6), pairs(3, seed=1)
    some = np.array([0, 2, 3, 5])  # those that the steps take
    values = [marked([train[place] for place in some.tolist()]), marked(held_out, held_out=True)]
    rows = [ReferenceRows(False, train, some), ReferenceRows(True, held_out)]
    kept = [Kept(each, SequenceValues.laid_out(part, FLOAT64)) for each, part in zip(rows, values, strict=True)]
    reference, layout = Stored(kept, Precision.fp64), get_layout("zigzag", None)
    for examples, places, part in ((train, [5, 2], values[0]), (held_out, [1], values[1])):
        names = tuple(SequenceName(examples is held_out, place, side) for place in places for side in (0, 1))
        packed = pack_examples([examples[place] for place in places], layout.multiple(2), unit=layout.unit(2))
        pack = replace(packed, names=names)
        known_N = torch.full((len(pack.place_N),), torch.nan, dtype=torch.float64)
        for rank in range(2):
            shard = reference.known(pack, shard_pack(pack, Ring(rank, (0, 1)), layout, Plain(), 100))
            known_N[shard.listed_n] = reference.logps(shard)
        order = some.tolist() if examples is train else list(range(3))
        for sequence, name in enumerate(names):
            expected = part[order.index(name.example) * 2 + name.answer]
            assert known_N[pack.sequence_N == sequence].tolist() == expected.tolist()


def test_a_row_that_is_not_kept_and_a_pack_without_names_are_never_guessed() -> None:
    train = pairs(4)
    some = np.array([0, 2])
    kept = Kept(ReferenceRows(False, train, some), SequenceValues.laid_out(marked([train[0], train[2]]), FLOAT64))
    for place in (1, 3):
        with pytest.raises(AssertionError, match=f"example {place} is not kept"):
            kept.of(place, 0)
    pack, layout = pack_examples(train[:1], 2), get_layout("zigzag", None)
    shard = shard_pack(pack, Ring(0, (0,)), layout, Plain(), 100)
    with pytest.raises(AssertionError, match="by their names"):
        Stored([kept], Precision.fp64).known(pack, shard)


def test_values_are_kept_as_they_are_computed() -> None:
    assert {each: kept_dtype(each) for each in Precision} == {
        Precision.fp64: np.float64, Precision.fp32: np.float32, Precision.bf16: np.float32,
    }  # fmt: skip


def test_a_folder_has_the_same_bytes_however_it_was_parted(tmp_path: Path) -> None:
    values = marked(pairs(5))
    for name, ends in (("whole", [10]), ("parted", [2, 4, 10]), ("stopped", [2, 4, 10])):
        making = Appending(tmp_path / name / "k.making", types_of(Precision.fp64))
        for first, last in zip([0, *ends], ends, strict=False):
            appended(making, values[first:last], last)
            if name == "stopped":
                making.close()
                making = Appending(tmp_path / name / "k.making", types_of(Precision.fp64))
        making.finish({"of": 1})
    read = {name: [each.read_bytes() for each in sorted((tmp_path / name / "k.making").iterdir())]
            for name in ("whole", "parted", "stopped")}  # fmt: skip
    assert read["whole"] == read["parted"] == read["stopped"]
    kept = SequenceValues.mapped(tmp_path / "whole" / "k.making", Precision.fp64)
    assert [kept.of(place).tolist() for place in range(len(kept))] == [each.tolist() for each in values]


def test_what_a_full_disk_has_no_room_for_is_said_once(tmp_path: Path) -> None:
    making = Appending(tmp_path, types_of(Precision.fp64))
    with files_of_at_most(100):
        with pytest.raises(OSError, match="File too large"):
            appended(making, marked(pairs(5)), 10)
        making.close()


def test_sequences_without_a_trained_token_are_kept_too(tmp_path: Path) -> None:
    for number, values in enumerate(([np.zeros(0)] * 2, [np.zeros(0), np.ones(1), np.zeros(0)], [])):
        making = Appending(tmp_path / str(number), types_of(Precision.fp64))
        appended(making, values, 1)
        making.finish({})
        read = SequenceValues.mapped(tmp_path / str(number), Precision.fp64)
        assert [read.of(place).tolist() for place in range(len(read))] == [each.tolist() for each in values]
        assert damage(tmp_path / str(number)) is None


def test_a_folder_of_another_name_is_noticed(tmp_path: Path) -> None:
    making = Appending(tmp_path / "k.making", types_of(Precision.fp64))
    appended(making, marked(pairs(5)), 5)
    making.finish({})
    assert damage((tmp_path / "k.making").rename(tmp_path / "k")) is None
    assert damage((tmp_path / "k").rename(tmp_path / "j")) == "it was made as k"


def test_another_token_or_mask_is_another_key() -> None:
    whole = pairs(4)
    first = whole[0]
    one, other = first.answers
    others = [
        whole[:3],
        [*whole[::-1]],
        [replace(first, answers=first.answers[::-1]), *whole[1:]],
        [replace(first, prompt=first.prompt + 1), *whole[1:]],
        [replace(first, masks=(np.arange(len(first.answers[0])) > 0, None)), *whole[1:]],
        [replace(first, prompt=np.append(first.prompt, one[0]), answers=(one[1:], other)), *whole[1:]],
    ]  # fmt: skip
    found = {digest_of(each) for each in (whole, *others)}
    assert len(found) == len(others) + 1
    assert digest_of(pairs(4)) == digest_of(whole)
    assert digest_of([replace(each, margin=2.0, origin="elsewhere") for each in whole]) == digest_of(whole)


def key(*overrides: str, commit: str | None = None, sequences: str = "of rows") -> str:
    cfg = compose_config(["launch.device=cpu", "logger=none", "reference=precompute", *overrides])
    model = cfg.model if cfg.reference.path is None else model_of_reference(cfg)
    return key_of(facts_of(cfg, model, commit, sequences))


@pytest.mark.slow
def test_all_that_the_values_depend_on_is_in_the_key_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seed in (("one", 0), ("other", 1)):
        model = AutoModelForCausalLM.from_pretrained(saved(tmp_path / name))
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter)
        model.save_pretrained(tmp_path / name)
    folder = ("model=hf", f"model.path={tmp_path}/one")
    others = [
        key(), key("model.seed=1"), key("model.layers=3"), key("train.precision=fp64"), key("data.max_length=300"),
        key(sequences="of other rows"), key(*folder), key("model=hf", f"model.path={tmp_path}/other"),
        key(*folder, "model.dtype=bf16"), key(*folder, "model.add_tokens=['<x>']"), key(*folder, commit="a branch's"),
        key(*folder, "model.trust_remote_code=true"),
    ]  # fmt: skip
    code = tmp_path / "one" / "modeling_own.py"
    for text in ("scale = 1", "scale = 2"):
        code.write_text(text)
        others.append(key(*folder))
    code.unlink()
    for module, name in ((stored, "FORMAT"), (stored, "__version__")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, "another")
            others.append(key())
    assert len(set(others)) == len(others)
    alike = ("parallel=ring2", "engine=torch", "train.micro_batch_size=2", "loss=ipo", "loss.beta=0.3",
             "optim.lr=1e-3", "seed=7", "model.freeze=['model.embed_tokens.*']")  # fmt: skip
    assert key(*alike) == others[0]
    (tmp_path / "one").rename(tmp_path / "moved")
    assert key("model=hf", f"model.path={tmp_path}/moved") == others[6]
    assert key("model=hf", f"model.path={tmp_path}/other", f"reference.path={tmp_path}/moved") == others[6]
