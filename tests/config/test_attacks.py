"""A configuration with anything in the place of any of its values: it composes as it stands, or is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlexp.config import load
from rlexp.config.explain import explained
from rlexp.config.options import quoted
from rlexp.config.schema import Config
from rlexp.config.schema.keys import all_keys
from tests.helpers import attacks
from tests.helpers.parsing import parse_once

CPU = ("launch.device=cpu", "model=tiny", "data=synthetic")


def typed(plant: str) -> Iterator[list[str]]:
    """Yield a command line that sets a key to a plant, in quotes."""
    for key, options in all_keys().items():
        chosen = [*options[:1], *(word for word in CPU if word.partition("=")[0] != key.partition(".")[0])]
        yield [*chosen, f"{key}={quoted(plant)}"]


def read(case: Any, file: Path) -> Config:
    if isinstance(case, list):
        return load.compose_config(case)
    file.write_text(case if isinstance(case, str) else yaml.safe_dump(case), encoding="utf-8", errors="surrogatepass")
    return load.from_file(file)


def stored() -> dict[str, Any]:
    return load.to_plain(load.compose_config([*CPU, "loss=grpo", "reward=rule", "reward.text=a"]))


@attacks.few_or_many(20, 600)
def test_a_configuration_of_anything_is_composed_or_refused(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of them are typed, half stand in a file of a run. No value is read out of the environment."""
    parse_once()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(attacks.VARIABLE, attacks.SECRET)
    plain, file = stored(), tmp_path / "config.yaml"
    command_lines = attacks.drawn((each for plant in attacks.PLANTS for each in typed(plant)), count // 2)
    files = attacks.drawn((each for plant in attacks.PLANTS for each in attacks.planted(plain, plant)), count // 2)
    for case in (*command_lines, *files):
        found: list[Config] = []

        def composed(case: Any = case, found: list[Config] = found) -> int:
            found.append(read(case, file))
            return 0

        with attacks.shown(case), attacks.bounded():
            assert explained(composed) in (0, 1)
            for cfg in found:
                load.to_file(cfg, file)
                assert repr(load.from_file(file)) == repr(cfg)  # nan is not itself
                attacks.assert_harmless("", file)
            captured = capsys.readouterr()
            attacks.assert_harmless(captured.out + captured.err)
