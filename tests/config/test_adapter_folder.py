"""An adapter's folder: its description takes the place of the keys that make a new adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlexp.base.errors import ConfigError
from rlexp.config.adapter_folder import DESCRIPTION, SAYS, WEIGHTS
from rlexp.config.identity import changes, identity
from rlexp.config.load import compose_config, composed_like, from_file, from_hydra, to_file, to_plain
from rlexp.config.schema import Config, LoraConfig

HAS = {"rank": 4, "alpha": 7.5, "rslora": True, "targets": ["q_proj", "v_proj"], "also": ["norm"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return described(tmp_path / "adapter")


def described(place: Path, **other: Any) -> Path:
    place.mkdir()
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 7.5, "use_rslora": True, "lora_dropout": 0.1,
            "target_modules": ["v_proj", "q_proj"], "modules_to_save": ["norm"]}  # fmt: skip
    (place / DESCRIPTION).write_text(json.dumps(said | other))
    (place / WEIGHTS).write_bytes(b"")
    return place


def configured(folder: Path, *words: str) -> Config:
    return compose_config(["launch.device=cpu", "adapter=lora", f"adapter.path={folder}", *words])


def has(cfg: Config) -> dict[str, Any]:
    assert isinstance(cfg.adapter, LoraConfig)
    assert cfg.adapter.dropout == 0  # whatever the folder was trained with
    return {key: getattr(cfg.adapter, key) for key in SAYS}


def test_the_configuration_says_what_the_adapter_has(folder: Path, tmp_path: Path) -> None:
    """Also the run's file, whose words may be typed again."""
    cfg = configured(folder)
    assert has(cfg) == HAS
    to_file(cfg, tmp_path / "config.yaml")
    assert from_file(tmp_path / "config.yaml") == cfg
    assert configured(folder, *(f"adapter.{key}={value}" for key, value in HAS.items())) == cfg
    every = configured(described(tmp_path / "every", target_modules="all-linear", modules_to_save=None))
    assert has(every) == HAS | {"targets": [], "also": []}
    pattern = configured(described(tmp_path / "pattern", target_modules=r".*\.q_proj"))
    assert has(pattern) == HAS | {"targets": [r".*\.q_proj"]}


def test_a_key_that_the_folder_contradicts_is_refused(folder: Path) -> None:
    said = rf"^adapter\.rank=8: the adapter in adapter\.path={folder} has 4\. Leave adapter\.rank out, or start a new"
    with pytest.raises(ConfigError, match=said):
        configured(folder, "adapter.rank=8")


def test_a_curve_depends_on_the_folder_alone(folder: Path, tmp_path: Path) -> None:
    """A run that wrote down other values beside the folder goes on, and one without a folder has keys of its own."""
    now = identity(configured(folder))
    older = now | {"adapter.rank": 16, "adapter.alpha": 32.0, "adapter.targets": []}
    assert list(changes(older, now)) == list(changes(now, now)) == []
    other = identity(configured(described(tmp_path / "other", r=8)))
    assert [key for key, *_ in changes(now, other)] == ["adapter.path"]
    new = identity(compose_config(["launch.device=cpu", "adapter=lora", "adapter.rank=4"]))
    assert [key for key, *_ in changes(new | {"adapter.rank": 8}, new)] == ["adapter.rank"]
    for was, then in ((now, new), (new, now)):
        assert [key for key, *_ in changes(was, then)] == ["adapter.path"]


def test_beside_a_run_its_folder_says_them_or_the_one_that_is_given(folder: Path, tmp_path: Path) -> None:
    other = described(tmp_path / "other", r=8, target_modules=["k_proj"])
    own, new = to_plain(configured(folder)), to_plain(compose_config(["launch.device=cpu", "adapter=lora"]))
    own["adapter"]["rank"] = 16  # as an older version wrote it down

    def beside(plain: dict[str, Any], *words: str) -> dict[str, Any]:
        return has(from_hydra(composed_like(plain, ["launch.device=cpu", *words])))

    assert beside(own) == HAS
    for plain in (own, new):
        assert beside(plain, f"adapter.path={other}") == HAS | {"rank": 8, "targets": ["k_proj"]}
    own["adapter"]["rank"] = 4
    assert beside(own, "adapter.path=null") == HAS  # a new one as the run's
