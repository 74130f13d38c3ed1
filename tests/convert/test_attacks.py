"""A recipe with anything in the place of any of its texts: it is converted or refused, and nothing else happens."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from rlexp.convert.__main__ import main
from tests.convert.texts import AXOLOTL_LORA, FACTORY_LORA, GRPO, OPENRLHF, RAY, SWIFT_LORA, TRL
from tests.helpers import attacks
from tests.helpers.parsing import parse_once

MORE = (
    "output_dir: out\nrun_name: a\nlearning_rate: 1e-6\noptim: adamw_torch\nloss_type: sigmoid\nnot_known: 3\n"
    "chat_template_path: c\nreport_to: wandb\ndataset_config: {name: x, list: [a, 1]}\nseed: 3\nlogging_dir: l\n"
)
RECIPES = (TRL + MORE, GRPO + MORE, AXOLOTL_LORA + "output_dir: o\nwandb_name: a\nspecial_tokens: {pad_token: x}\n",
           FACTORY_LORA + "output_dir: o\ntemplate: llama3\nseed: 3\n")  # fmt: skip
VARIABLES = "A=x\nexport B=${A}y\n"
SCRIPTS = tuple(
    VARIABLES + command + '--output_dir out --learning_rate 1e-6 --run_name "$B" --not_known 3 --seed 3\n'
    for command in (OPENRLHF, RAY, SWIFT_LORA)
)
ALLOWED = {"defaults", "seed", "launch", "parallel", "engine", "model", "adapter", "data", "rollout", "reward", "loss",
           "reference", "train", "optim", "memory", "checkpoint", "logger", "eval", "hardware"}  # fmt: skip


def recipes(plant: str) -> list[str]:
    """Plant a text at each place of each recipe: as a value and as a name, quoted and as it is."""
    found = []
    for recipe in RECIPES:
        lines = recipe.splitlines()
        for place, line in enumerate(lines):
            name, _, value = line.partition(": ")
            for planted in (f"{name}: {json.dumps(plant)}", f"{name}: {plant}", f"{json.dumps(plant)}: {value}",
                            f"{name}: [{json.dumps(plant)}, {{a: {json.dumps(plant)}}}]"):  # fmt: skip
                found.append("\n".join([*lines[:place], planted, *lines[place + 1 :], ""]))
        found.append(f"{recipe}# {plant}\n{plant}")
    return found


def scripts(plant: str) -> list[str]:
    found = []
    for script in SCRIPTS:
        words = script.split(" ")
        for place, word in enumerate(words):
            for planted in (shlex.quote(plant), plant, f"{word}{plant}", f'"{plant}"'):
                found.append(" ".join([*words[:place], planted, *words[place + 1 :]]))
        found.append(script.replace("A=x", f"A={shlex.quote(plant)}"))
        found.append(script.replace("A=x", f"A={plant}\n" + "".join(f"A=$A$A{place}\n" for place in range(40))))
    return found


@attacks.few_or_many(45, 1500)
def test_a_recipe_of_anything_is_converted_or_refused(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parse_once()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(attacks.VARIABLE, attacks.SECRET)
    written = Path("conf/experiment/mine.yaml")
    for text in attacks.drawn((text for plant in attacks.PLANTS for text in (*recipes(plant), *scripts(plant))), count):
        written.unlink(missing_ok=True)
        Path("theirs").write_text(text, encoding="utf-8", errors="surrogatepass", newline="")
        monkeypatch.setattr(sys, "argv", ["convert", "theirs", "--trainer", "dpo", "--gpus", "8", "--name", "mine"])
        with attacks.bounded(), attacks.shown(text):
            assert main() in (0, 1)
        captured = capsys.readouterr()
        with attacks.shown(text):
            attacks.assert_harmless(captured.out + captured.err, *Path().rglob("*.yaml"))
            if written.exists():
                experiment = yaml.safe_load(written.read_text(encoding="utf-8"))
                assert set(experiment) <= ALLOWED
            assert {str(each) for each in Path().rglob("*") if each.is_file()} <= {"theirs", str(written)}
