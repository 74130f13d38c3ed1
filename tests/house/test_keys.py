"""docs/keys.md and the yaml files of losses and rings have every key, with its default and meaning of today."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from bench import where
from rlexp.config.load import register
from rlexp.config.schema import KINDS, TrainConfig
from rlexp.config.schema.bounds import number
from rlexp.config.schema.keys import all_keys, launcher_keys
from rlexp.config.schema.losses import ALL_MODIFIERS, DPOConfig, PreferenceConfig
from tests.helpers.keys.abilities import INDEX, abilities, page_text
from tests.helpers.keys.defaults import shown
from tests.helpers.keys.headers import headers
from tests.helpers.keys.meanings import comments_of, meaning
from tests.helpers.keys.page import PAGE, page
from tests.helpers.keys.rows import Schema, groups, missing
from tests.helpers.paths import ROOT

WRITE = "run `python -m tests.helpers.keys`"
NOW, SAID = Schema(), PAGE.read_text(encoding="utf-8")


# ---- as it is ----


def test_every_key_and_option_has_a_meaning() -> None:
    assert missing(NOW) == []


def test_the_page_is_made_of_the_schema_as_it_is() -> None:
    assert page(NOW) == SAID, WRITE


def test_losses_and_rings_list_their_keys() -> None:
    texts = headers(NOW)
    assert {path.parent.name for path in texts} == {"loss", "parallel"}
    assert [path for path, text in texts.items() if path.read_text(encoding="utf-8") != text] == [], WRITE


def test_the_page_has_every_key_that_the_command_line_takes() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|", SAID, flags=re.MULTILINE)
    keys = {key for key in all_keys() if key not in KINDS and "." in key} | {"seed"}
    assert keys | {key for key in launcher_keys() if "._" not in key} <= set(rows)


@pytest.mark.parametrize("options", [[], ["loss=ppo", "data=jsonl", "parallel=ring4", "hardware=h100", "reward=sum"]])
def test_defaults_are_those_that_a_run_gets(options: list[str]) -> None:
    register()
    with initialize_config_dir(str(NOW.conf), version_base="1.3"):
        composed: Any = OmegaConf.to_container(compose("config", overrides=options), enum_to_str=True)
    chosen = dict(each.split("=") for each in options)
    for each in groups(NOW):
        for row in each.rows if each.name in composed else ():
            if (said := row.defaults.get(chosen.get(each.name, each.chosen or ""))) is not None:
                told = shown(composed[each.name][row.leaf]) or said  # a derived one is told in words
                assert said.partition(": ")[0] == told.partition(": ")[0], f"{each.name}.{row.leaf}"


def test_the_page_says_what_there_is() -> None:
    assert page_text() == INDEX.read_text(encoding="utf-8"), WRITE


def test_what_the_page_calls_missing_is_missing() -> None:
    """It fails where a loss, a task or an option has come that the page still lists as not there."""
    there = {*all_keys(), *(f"{group}={option}" for group, options in KINDS.items() for option in options)}
    there |= {f"{folder.name}={path.stem}" for folder in NOW.conf.iterdir() for path in folder.glob("*.yaml")}
    probes = [(missed, probe) for row in abilities() for missed, probe in row.not_yet.items() if probe]
    assert [(missed, name) for missed, probe in probes for name in there if probe in name] == []
    refused = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").partition("| refused |")[2].partition("\n\n")[0]
    for word in ("Gemma 2", "gpt-oss", "Mamba"):
        assert word in refused
    several = any(each.endswith(f"| {where.NEVER} |") for each in where.table().splitlines()[2:])
    assert ("but not tested on them" in INDEX.read_text(encoding="utf-8")) == several


def test_a_modifier_is_listed_where_it_fits() -> None:
    texts = {path.stem: text for path, text in headers(NOW).items()}
    for name, kind in KINDS["loss"].items():
        for leaf in ALL_MODIFIERS:
            fits = leaf in kind.fits if issubclass(kind, PreferenceConfig) else leaf in vars(kind())
            assert (f"\n#   {leaf}: " in texts[name]) == fits


# ---- what is planted is found ----


@pytest.mark.parametrize(
    "group", [group for group in KINDS if group != "model"]
)  # of models, those in conf/ are counted
def test_a_new_option_is_in_the_index(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS[group], "planted", type("Planted", (DPOConfig,), {}))
    assert "`planted`" in page_text()


class Colour(Enum):
    red = "red"  # as a rose
    blue = "blue"


@dataclass
class NewKey(TrainConfig):
    planted: int = 1


@dataclass
class Explained(TrainConfig):
    planted: int = number(1, least=0)  # a number to plant


@dataclass
class NewOption(TrainConfig):
    planted: Colour = Colour.red  # a colour


@dataclass
class OtherDefault(DPOConfig):
    label_smoothing: float = number(0.2, least=0, below=0.5)


@dataclass
class OtherBound(DPOConfig):
    label_smoothing: float = number(0.0, least=0, below=0.6)


def with_train(kind: type) -> Schema:
    return replace(NOW, kinds={**KINDS, "train": {"": kind}})


def with_dpo(kind: type) -> Schema:
    return replace(NOW, kinds={**KINDS, "loss": {**KINDS["loss"], "dpo": kind}})


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (NewKey, ["train.planted: has no comment beside its field in the schema"]),
        (NewOption, ["train.planted=blue: has no comment in its Enum"]),
        (Explained, []),
    ],
)
def test_a_key_without_a_meaning_is_named(planted: type, said: list[str]) -> None:
    assert missing(with_train(planted)) == said


def test_a_new_key_makes_the_page_stale() -> None:
    row = "\n| `train.planted` | `1` | a whole number, at least 0 | a number to plant |\n"
    assert row in page(with_train(Explained))
    assert row not in SAID


@pytest.mark.parametrize(
    ("planted", "row"),
    [
        (OtherDefault, "| `0`<br>with `dpo`: `0.2` | a number, at least 0 and less than 0.5 | assumed share"),
        (OtherBound, "| `dpo` | `0` | a number, at least 0 and less than 0.6 | assumed share"),
    ],
)
def test_another_default_or_bound_makes_page_and_yaml_stale(planted: type, row: str) -> None:
    assert row in page(with_dpo(planted))
    assert row not in SAID
    now, then = headers(NOW), headers(with_dpo(planted))
    assert [path.name for path in now if now[path] != then[path]] == ["dpo.yaml"]


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("config.yaml", "batch_size: 8", "batch_size: 16", None),
        ("data/long.yaml", "size: 64", "size: 65", None),
        ("loss/gspo.yaml", "  - _self_\n", "  - _self_\n\nwhiten: true\n", None),
        ("config.yaml", "  # bf16 on GPUs, fp32 on CPU\n", "", "train.precision: is derived, and no comment"),
        ("engine/zero2.yaml", "# DeepSpeed", "\n# DeepSpeed", "engine=zero2: its yaml file opens with no comment"),
    ],
)
def test_what_is_changed_in_conf_is_seen(tmp_path: Path, file: str, old: str, new: str, said: str | None) -> None:
    shutil.copytree(NOW.conf, tmp_path / "conf")
    path = tmp_path / "conf" / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    changed = replace(NOW, conf=tmp_path / "conf")
    assert page(changed) != SAID
    assert [each.startswith(said or "") for each in missing(changed)] == [True] * (said is not None)


def test_a_new_option_makes_the_page_stale_and_gets_its_keys(tmp_path: Path) -> None:
    shutil.copytree(NOW.conf, tmp_path / "conf")
    new = tmp_path / "conf" / "loss" / "new.yaml"
    new.write_text("# A new loss.\ndefaults:\n  - /schema/loss/dpo@_here_\n  - _self_\n", encoding="utf-8")
    changed = replace(NOW, conf=tmp_path / "conf")
    assert "\n| `new` | A new loss. |\n" in page(changed)
    assert headers(changed)[new].startswith("# A new loss.\n# Keys, with their defaults")


SOURCE = """
class One:
    behind: int = 1  # behind it
    # above it,
    # in two lines
    above: int = 2

    # of nothing

    bare: int = 3
    red = "red"  # a member
"""


def test_comments_are_read_behind_a_field_or_above_it() -> None:
    assert comments_of(SOURCE) == {"One": {"behind": "behind it", "above": "above it, in two lines", "red": "a member"}}


def test_a_field_that_is_declared_again_keeps_its_meaning() -> None:
    said = meaning(DPOConfig, "label_smoothing")
    assert meaning(OtherDefault, "label_smoothing") == said != meaning(KINDS["loss"]["robust"], "label_smoothing")
