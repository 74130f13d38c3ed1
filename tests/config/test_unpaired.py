"""The rules of losses on single answers, and of rows that are pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlexp.base.errors import DataError
from rlexp.config.load import compose_config
from rlexp.data.answer import preview
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.train.examples import read_examples
from rlexp.training.train.fitting import unbalanced
from rlexp.training.train.rows_task import RowsTask
from rlexp.training.world.groups import ALONE, World
from tests.helpers.refusals import refusal_of

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
ANSWERS = [{"prompt": f"{place}", "completion": "b", "label": place % 2 == 0} for place in range(9)]


def written(folder: Path, rows: list[Any]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return f"data.path={folder}/rows.jsonl"


def refused(folder: Path, rows: list[Any], *words: str) -> str:
    """Read rows as training does, and return why it does not begin."""
    base = ("launch.device=cpu", "logger=none", "data=jsonl", written(folder, rows), "train.batch_size=4")
    cfg = compose_config([*base, f"data.cache={folder}/cache", *words])
    with pytest.raises(DataError) as refusal:
        RowsTask(cfg, read_examples(cfg, byte_tokenizer(), World(0, 1, ALONE)))
    return str(refusal.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["loss=kto", "train.batch_size=1"], "train.batch_size=1: loss=kto estimates the divergence by giving each "
         "prompt another's answer, and one answer has no other. Use train.batch_size=2 or more."),
        (["data.unpair=true"], "data.unpair=true: makes two single answers of each pair, and loss=dpo is trained on "
         "pairs. Leave it out, or use a loss on single answers: loss=kto, loss=bco, loss=apo_zero_unpaired."),
        (["loss=sft", "data.unpair=true"], "and loss=sft is trained on supervised rows."),
        (["loss=kto", "loss.desirable_weight=0"], "loss.desirable_weight=0.0: must be greater than 0."),
        (["loss=reward", "loss.center=-1"], "loss.center=-1.0: must be at least 0."),
        (["loss=sft", "data=arithmetic"], "data=arithmetic: has prompts and no answers, and loss=sft is trained on"),
        (["loss=sft", "loss.beta=1"], "loss.beta: belongs to"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_message(words: list[str], said: str) -> None:
    assert said in refusal_of(["launch.device=cpu", *words])


@pytest.mark.parametrize(
    ("rows", "words", "said"),
    [
        ([PAIR] * 4, ["loss=kto"], "the run needs unpaired answers, with `prompt` and `completion` and `label`, and "
         "the row has chosen, prompt, rejected, as pairs have. Read each pair as two answers "
         "(data.unpair=true), give other rows or another loss"),
        (ANSWERS, ["loss=dpo"], "the run needs pairs, with `chosen` and `rejected`, and the row has completion, label, "
         "prompt, as unpaired answers have. Give other rows or another loss"),
        (ANSWERS[::2], ["loss=kto"], "all 5 rows have `label` true, and loss=kto compares good answers with bad ones. "
         "Give some rows whose `label` is false; or, to learn answers as they are, loss=sft."),
        (ANSWERS[1::2], ["loss=bco"], "all 4 rows have `label` false"),
        (ANSWERS, ["loss=kto", "data.drop_last=false"], "data.drop_last=false: 9 answers in batches of 4 leave a last "
         "batch of 1, and loss=kto"),
        (ANSWERS, ["loss=kto", "data.eval_size=1"], "the held-out data: has 1 answer, and loss=kto"),
        ([{**ANSWERS[0], "label": "yes"}], ["loss=kto"], "must be true or false"),
        ([PAIR, {**PAIR, "margin": 1.5}] * 3, ["loss=reward"], "has no margin, the first of 3 such rows in 6, and the "
         "others have one. Give every row `margin`, or none; or leave them out: loss.margin_weight=0."),
        ([{**ANSWERS[0], "label": False}], ["loss=sft"], "is false, and supervised training learns every answer. Leave "
         "such rows out (data.bad_rows=drop), or train with loss=kto."),
        ([{"text": "abc"}], ["loss=kto"], "as supervised rows have"),
        ([{"text": ""}], ["loss=sft"], "field `text` must be a text that is not empty."),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_are_one_message(rows: list[Any], words: list[str], said: str, tmp_path: Path) -> None:
    assert said in refused(tmp_path, rows, *words)


def test_weights_far_from_the_papers_are_said() -> None:
    kto = compose_config(["loss=kto", "launch.device=cpu"]).loss
    assert unbalanced(kto, (100, 100)) == unbalanced(kto, (120, 100)) == unbalanced(kto, (0, 5)) == []
    (said,) = unbalanced(kto, (1000, 100))
    assert said == (
        "warning: 1,000 good answers weigh 10 times as much as 100 bad ones, and KTO's authors advise 1 to 1.33 times. "
        "Consider loss.desirable_weight=0.1 to 0.133"
    )
    balanced = compose_config(["loss=kto", "launch.device=cpu", "loss.desirable_weight=0.12"]).loss
    assert unbalanced(balanced, (1000, 100)) == []


def test_a_pair_is_two_answers(tmp_path: Path) -> None:
    """In the order of the rows; the preview counts them as training does."""
    rows = [{"prompt": f"{place}?", "chosen": "yes", "rejected": "no!!"} for place in range(5)]
    words = ["launch.device=cpu", "data=jsonl", written(tmp_path, rows), f"data.cache={tmp_path}/cache", "loss=kto",
             "data.unpair=true", "data.eval_size=2", "train.batch_size=2", "data.shuffle=false"]  # fmt: skip
    cfg = compose_config(words)
    examples = read_examples(cfg, byte_tokenizer(), World(0, 1, ALONE))
    assert [each.label for each in examples.train] == [True, False] * 3
    assert [len(each.answers[0]) for each in examples.train] == [4, 5] * 3  # with the end of sequence
    assert [each.index for each in examples.train] == list(range(6))
    assert len(examples.held_out) == 4
    assert examples.train[1].origin.endswith("(rejected)")
    shown = preview(cfg, samples=2)
    assert not shown.problems
    assert (shown.needs, shown.kind) == ("unpaired", "unpaired")
    assert shown.steps is not None
    assert shown.steps.per_epoch == 3
    assert shown.verdict.startswith("loss=kto trains on 6 unpaired answers an epoch: 3 steps of 2, ")
    assert [sample.label for sample in shown.samples] == [True, False]
