"""What public files of other trainers have: a conversion, or a refusal by the true cause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rlexp.convert.experiment import text_of
from rlexp.convert.rules import Fate
from tests.convert.texts import (
    AXOLOTL,
    COMMAND,
    FACTORY,
    SWIFT,
    TRL,
    conversion,
    named,
    values,
)

OTHER, ABSENT, NEEDLESS, INSTEAD = Fate.OTHER, Fate.ABSENT, Fate.NEEDLESS, Fate.INSTEAD
# A file's text, its trainer (of TRL), and what comes of it: our keys, and arguments that are told to be something else.
CASES: dict[str, tuple[str, str | None, Mapping[str, Any], Mapping[Fate, set[str]]]] = {
    "a wait of years": (FACTORY + "ddp_timeout: 180000000\n", None, {"launch.timeout_seconds": 604800.0}, {}),
    "a wait of an hour": (FACTORY + "ddp_timeout: 3600\n", None, {"launch.timeout_seconds": 3600.0}, {}),
    "a first step that is logged": (COMMAND + "--logging_first_step --log_level info --eval_strategy steps", None,
                                    {"train.eval_every": 10}, {NEEDLESS: {"logging_first_step", "log_level"}}),
    "steps that are logged": (COMMAND + "--logging_first_step --logging_steps 7 --eval_strategy steps", None,
                              {"train.eval_every": 7}, {}),
    "a cosine to a least rate": (TRL + "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-6}\n",
                                 "dpo", {"optim.decay": "cosine"}, {OTHER: {"lr_scheduler_type"}}),
    "another decay": (TRL + "lr_scheduler_type: inverse_sqrt\n", "dpo", {"optim.decay": None},
                      {INSTEAD: {"lr_scheduler_type"}}),
    "an optimizer of 8 bits": (TRL + "optim: paged_adamw_8bit\n", "dpo", {"optim": None}, {ABSENT: {"optim"}}),
    "another optimizer": (TRL + "optim: lion_32bit\n", "dpo", {"optim": None}, {INSTEAD: {"optim"}}),
    "an optimizer by a flag": (FACTORY + "use_badam: true\nbadam_mode: layer\n", None, {},
                               {INSTEAD: {"use_badam"}, NEEDLESS: {"badam_mode"}}),
    "a metric that nothing measures": (SWIFT + "--metric_for_best_model rouge --eval_steps 9", None,
                                       {"checkpoint.keep_best": None}, {ABSENT: {"metric_for_best_model"}}),
    "a best model without held-out rows": (TRL + "metric_for_best_model: loss\n", "dpo",
                                           {"checkpoint.keep_best": None, "checkpoint.best_metric": None},
                                           {NEEDLESS: {"metric_for_best_model"}}),
    "no warm-up": (AXOLOTL + "max_steps: 1000\nwarmup_steps: 0\n", None, {"optim.warmup_steps": 0}, {}),
    "a warm-up by default": (AXOLOTL + "max_steps: 1000\n", None, {"optim.warmup_steps": 30}, {}),
    "nothing asked for": (AXOLOTL + "wandb_name:\nload_in_8bit: false\nwarmup_steps: 0\nnew_thing:\n", None, {},
                          {NEEDLESS: {"wandb_name", "load_in_8bit", "new_thing"}, ABSENT: set()}),
    "an argument of another stage": (FACTORY + "kto_chosen_weight: 2.0\n", None, {"loss": "dpo"},
                                     {NEEDLESS: {"kto_chosen_weight"}}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text('{"d1": {"file_name": "d1.json"}}')
    (tmp_path / "data" / "d1.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_what_public_files_have_is_read(case: str) -> None:
    text, trainer, wanted, told = CASES[case]
    conv = conversion(text, trainer, 8)
    assert {key: values(conv).get(key) for key in wanted} == wanted
    for fate, names in told.items():
        assert names <= named(conv, fate), (fate, named(conv, fate))
        assert names or not conv.lines[fate]


def test_the_first_lines_say_what_is_trained_instead() -> None:
    text = text_of(conversion(SWIFT.replace("full", "adalora") + "--loss_type kto_pair"), "mine", "train.sh")
    head = text.partition("#\n")[0]
    assert "trains something else" in head.lower()
    assert "tuner_type: adalora" in head
    assert "loss_type: kto_pair" in head


def test_null_and_false_are_named_in_one_line() -> None:
    text = text_of(conversion(AXOLOTL + "wandb_name:\nload_in_8bit: false\nlora_r:\n", None, 8), "mine", "a.yaml")
    assert [line for line in text.splitlines() if "wandb_name" in line] == [
        "# Null, false, empty or 0, and nothing is asked for: lora_r, wandb_name, load_in_8bit."
    ]
