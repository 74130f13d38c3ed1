"""Words that are none of rlexp's, and what is meant by them: other trainers' names, flags, commands, near options."""

from __future__ import annotations

import pytest
from hydra.errors import HydraException

from rlexp.config import load
from rlexp.config.identity import changes, curve_keys
from rlexp.config.schema.keys import MEANT, THEIRS, all_keys, suggestion
from rlexp.convert.frameworks import FRAMEWORKS
from tests.conftest import Shell
from tests.helpers.refusals import refusal_of

SAID = {
    "parallel=ring3": "parallel=ring3: no such option. For a ring of another size: parallel.ring_size=3.",
    "loss=dpoo": "loss=dpoo: no such option. Did you mean dpo?",
    "learning_rate=1e-5": "learning_rate: no such key. rlexp calls it optim.lr.",
    "train.learning_rate=1e-5": "train.learning_rate: no such key. rlexp calls it optim.lr.",
    "per_device_train_batch_size=1": "no such key. Say train.batch_size=N, the samples of a step over all GPUs.",
    "--gradient_accumulation_steps=8": "without dashes. train.batch_size counts the samples of a step: micro-batch",
    "--bf16=true": "without dashes. Say train.precision=bf16.",
    "--zero-stage=3": "without dashes. Say engine=zero1, zero2, zero3 or fsdp2.",
    "--name=x": "without dashes. Did you mean model.name?",
    "--dataset": "--dataset: no such flag. Values are given as KEY=VALUE, without dashes. Say data.path=VALUE.",
    "--learning-rate=1e-5": "without dashes. Say optim.lr=1e-5.",
    "--batch-size": "without dashes. Did you mean train.batch_size?",
    "--no-such-thing": "--no-such-thing: no such flag. Values are given as KEY=VALUE, without dashes. docs/keys.md",
    "status": "status: is a command of its own. Type python -m rlexp.status …",
    "runs": "runs: cannot be read as key=value",
    "hydra/launcher=submitit_slurm": "is submitit's own, which starts no ranks. Say hydra/launcher=slurm.",
    "hydra/launcher=submitit_local": "Say hydra/launcher=slurm_local.",
}


@pytest.mark.parametrize("word", SAID)
def test_what_was_meant_is_said(word: str) -> None:
    assert SAID[word] in refusal_of([word])


def test_no_name_of_others_hides_a_key_of_ours() -> None:
    assert {ours for ours in THEIRS.values() if ours not in all_keys()} == {"hydra.run.dir"}
    assert all("." not in theirs and theirs not in all_keys() for theirs in (*THEIRS, *MEANT))
    assert not THEIRS.keys() & MEANT.keys()


@pytest.mark.parametrize("name", THEIRS)
def test_spelling_alone_would_not_find_it(name: str) -> None:
    assert suggestion(name, list(all_keys())) != f" Did you mean {THEIRS[name]}?"


def test_names_of_others_lead_where_their_files_lead() -> None:
    """`rlexp.convert` has a rule for each of these names; where it writes keys, ours is among them."""
    rules = [rule for framework in FRAMEWORKS.values() for rule in framework.rules]
    looked_at = 0
    for theirs, ours in THEIRS.items():
        keys = {rule.key for rule in rules if theirs in rule.names and rule.key}
        looked_at += bool(keys)
        assert not keys or any(ours in key for key in keys), (theirs, ours, keys)
    assert looked_at > 12


def test_the_version_is_rlexp_s(rlexp: Shell) -> None:
    answer = rlexp("--version")
    assert (answer.returncode, answer.stdout) == (0, "rlexp 0.1.0\n")


def test_a_value_of_a_flag_may_have_a_command_s_name() -> None:
    """`--cfg job -p data` shows the group data."""
    assert load.open_ended(["--cfg", "job", "-p", "data"]) == ["--cfg", "job", "-p", "data"]


def test_a_flag_of_hydra_s_is_left_to_hydra() -> None:
    for flag in ("--multi", "--cfg", "--info", "--help"):
        with pytest.raises(HydraException):
            load.composed([flag])


def test_another_option_is_named_before_the_keys_that_differ_with_it() -> None:
    was, now = (curve_keys(load.compose_config(["launch.device=cpu", f"loss={loss}"])) for loss in ("dpo", "ipo"))
    assert next(key for key, *_ in changes(was, now)) == "loss.name"
