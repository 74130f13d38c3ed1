"""What is written: no secret, a command that composes, and the folder that the file names."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from rlexp.base.secrets import is_secret, masked
from rlexp.config.elsewhere import composed_for
from rlexp.config.load import register
from rlexp.config.paths import conf_dir
from rlexp.convert.experiment import command, composed, overrides
from tests.convert.texts import AXOLOTL, COMMAND, FACTORY, OPENRLHF, SWIFT, TRL, conversion, values, written

KEY = "hf_abcdefABCDEF"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text('{"d1": {"hf_hub_url": "org/d"}}')
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "trainer"),
    [
        (f"HF_TOKEN={KEY} SWANLAB_API_KEY=SECRET {SWIFT}", None),
        (f"export HF_TOKEN={KEY}\n{COMMAND}", None),
        (f"{SWIFT} --hub_token {KEY} --swanlab_token SECRET", None),
        (f"{AXOLOTL}hf_hub_token: {KEY}\nwandb_api_key: SECRET\n", None),
        (f"{FACTORY}hf_hub_token: {KEY}\napi_key: SECRET\nms_hub_token: SECRET\n", None),
        (f"{OPENRLHF} --wandb_key SECRET --hf_token {KEY} --use_wandb SECRET --logger.wandb.key SECRET", None),
        (f'ray job submit --runtime-env-json=\'{{"env_vars": {{"A_KEY": "SECRET"}}}}\' -- {OPENRLHF}', None),
        (f'ray job submit --runtime-env-json=\'{{"env_vars": {{"A_KEY": SECRET}}}}\' -- {OPENRLHF}', None),
        (f"{TRL}model_init_kwargs: {{token: {KEY}, revision: main}}\n", "dpo"),
        (f"{TRL}model_init_kwargs: {{a: {{password: SECRET}}, b: [{KEY}]}}\nhub_token: {KEY}\n", "dpo"),
        (f"{TRL}env: {{WANDB_API_KEY: SECRET, OTHER: {KEY}}}\n", "dpo"),
        (f"{TRL}something: https://me:SECRET@host/x\nmore: {'0123456789' * 4}\n", "dpo"),
    ],
)
def test_no_secret_is_written(text: str, trainer: str | None) -> None:
    out = written(conversion(text, trainer, 8))
    assert not [word for word in ("SECRET", KEY, "0123456789" * 4) if word in out]


def test_a_name_with_key_or_token_may_hide_nothing() -> None:
    shown = ("prompt_key", "data.input_key", "stop_token", "pad_token_id", "max_new_tokens", "eval.best_metric_key",
             "num_tokens", "chosen_key", "tokens", "tokenizer_config")  # fmt: skip
    assert [name for name in shown if is_secret(name)] == []
    assert masked("revision", "0123456789" * 4) == "0123456789" * 4
    assert masked("hub_token", None) is None


@pytest.mark.parametrize(
    ("folder", "given"),
    [
        ("out/lr=5e-7,beta=0.1", None), ("~/my runs/x", "HOME/my runs/x"), ("out (1)", None), ("a{b}", None),
        ("out/ünï:x", None), ("$HOME/ckpt", "HOME/ckpt"), ("it's", None), ("a\\", None), ("a${b}", None), ("[1]", None),
        ("007", None), ("true", None), ("1e3", None), ("1_000", None), (".5", None), ("./out/x-1", None),
        ("a #b", None), ("a\"b", None), ("a  b", None),
    ],
)  # fmt: skip
def test_the_command_names_the_folder_of_the_file(folder: str, given: str | None) -> None:
    """The printed line is split as a shell does it, and then read by Hydra."""
    quoted = folder.replace("'", "''")
    conv = conversion(f"{TRL}output_dir: '{quoted}'\n", "dpo")
    (line,) = [each for each in written(conv).splitlines() if each.startswith("# Command:")]
    words = shlex.split(line.partition(":")[2])
    assert words == shlex.split(command(conv, "mine"))
    register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose("config", overrides=words[4:], return_hydra_config=True)
    assert cfg.hydra.run.dir == (given or folder).replace("HOME", str(Path.home()))


def test_a_command_composes_with_its_folder_and_texts_stay_texts(tmp_path: Path) -> None:
    conv = conversion(f"{TRL}output_dir: out/lr=5e-7,beta=0.1\nrun_name: 0906_1200\n", "dpo")
    assert composed(written(conv), "mine", overrides(conv)).logger.run_name == "0906_1200"
    assert values(conv)["hydra.run.dir"] == "out/lr=5e-7,beta=0.1"


@pytest.mark.parametrize("name", ["a b", "a,b", "a=b", "it's", "a:b"])
def test_options_are_found_in_a_folder_of_any_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name / "experiment"
    folder.mkdir(parents=True)
    (folder / "own.yaml").write_text("# @package _global_\nseed: 7\n")
    assert composed_for(["+experiment=own"], tmp_path / name).seed == 7
