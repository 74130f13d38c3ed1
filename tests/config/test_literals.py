"""A stored value is what it says: `${…}` in it is text, in every file that rlexp writes and reads again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlexp.config import load
from rlexp.config.explain import explain
from rlexp.config.options import literal, literals, quoted
from rlexp.config.schema import Config
from rlexp.convert.experiment import scalar

TEXTS = ("a${b}", "a\\${b}", "\\${oc.env:HF_TOKEN}", "${oc.env:HF_TOKEN}", "${", "a\\\\${b}", "${a:${b}}", "x\\y", "\\",
         "$HOME", "a\n${b}", "\u2028${b}", "1e-4", "'\"${b}", "null", "2024-01-01")  # fmt: skip
PIECES = st.lists(st.sampled_from(["$", "{", "}", "\\", ":", "a", "'", " ", "oc.env", "\n"]), max_size=9).map("".join)


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")


def with_texts(text: str) -> Config:
    cfg = load.compose_config(
        ["launch.device=cpu", "data.size=20", "parallel=ring4", "optim.lr=3e-7", "train.max_steps=5"]
    )
    return dataclasses.replace(cfg, logger=dataclasses.replace(cfg.logger, run_name=text, axes={"axis": text}))


@given(PIECES)
def test_a_text_is_read_as_it_stands(text: str) -> None:
    assert OmegaConf.create({"x": literal(text)}).x == text
    assert OmegaConf.to_container(OmegaConf.create(literals({"x": [text, {"y": text}]})), resolve=True) == {
        "x": [text, {"y": text}]
    }


@pytest.mark.parametrize("text", TEXTS)
def test_a_configuration_comes_back_from_its_file(text: str, tmp_path: Path) -> None:
    cfg, file = with_texts(text), tmp_path / "config.yaml"
    load.to_file(cfg, file)
    assert load.from_file(file) == cfg
    assert yaml.safe_load(file.read_text(encoding="utf-8"))["logger"]["run_name"] == text  # as all files before
    plain = load.to_plain(cfg)
    assert plain["logger"]["run_name"] == text
    assert load.from_plain(plain) == cfg


@pytest.mark.parametrize("text", TEXTS)
def test_a_run_s_texts_are_those_of_its_evaluation(text: str) -> None:
    plain = load.to_plain(load.compose_config(["launch.device=cpu"]))
    plain["reward"]["text"] = text
    again = load.from_hydra(load.composed_like(plain, ["launch.device=cpu"]))
    assert load.to_plain(again)["reward"]["text"] == text


@pytest.mark.parametrize("key", ["seed", "train.batch_size", "train.precision"])
def test_no_number_of_a_stored_run_reads_the_environment(key: str) -> None:
    plain = load.to_plain(load.compose_config(["launch.device=cpu"]))
    group, _, leaf = key.rpartition(".")
    (plain[group] if group else plain)[leaf] = "${oc.env:HF_TOKEN}"
    with pytest.raises(OmegaConfBaseException, match=r"\$\{oc\.env:HF_TOKEN\}") as error:
        load.from_hydra(load.composed_like(plain, ["launch.device=cpu"]))
    assert "hf_secret" not in str(explain(error.value))


def test_a_typed_text_stays_itself_beside_a_stored_run() -> None:
    plain = load.to_plain(load.compose_config(["launch.device=cpu"]))
    again = load.composed_like(plain, ["launch.device=cpu", f"reward.text={quoted('${oc.env:HF_TOKEN}')}"])
    assert OmegaConf.select(again, "reward.text") == "${oc.env:HF_TOKEN}"


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_stays_itself_on_a_command_line_and_in_an_experiment(text: str, tmp_path: Path) -> None:
    words = [f"logger.run_name={quoted(text)}", "launch.device=cpu"]
    assert load.compose_config(words).logger.run_name == text
    written: Any = OmegaConf.create(yaml.safe_load(f"run_name: {scalar(text)}"))
    assert written.run_name == text
    nested = ["a", 1, {"b": text}]
    read = OmegaConf.create({"x": yaml.safe_load(scalar(nested))})
    assert OmegaConf.to_container(read, resolve=True) == {"x": nested}
