"""A stranger's recipe writes nothing but the experiment: no line of its own, no secret, no code that is trusted. The
command composes, with the folder that the file names, and the first lines say what matters."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir

from rlexp.base.plain_yaml import MOST_VALUES
from rlexp.base.secrets import is_secret, masked
from rlexp.config.load import register
from rlexp.config.paths import conf_dir
from rlexp.convert.__main__ import main
from rlexp.convert.conversion import Conversion, ConvertError
from rlexp.convert.experiment import command, text_of
from rlexp.convert.frameworks import converted
from tests.convert import tables
from tests.convert.texts import AXOLOTL, AXOLOTL_LORA, COMMAND, FACTORY_LORA, OPENRLHF, RAY, SWIFT, TRL, written
from tests.helpers import attacks
from tests.helpers.parsing import parse_once

pytestmark = pytest.mark.usefixtures("folder")
BREAKS = ("\n", "\r", "\r\n", "\x0b", "\x0c", "\x85", "\u2028", "\u2029")
ATTACK = "hydra: {callbacks: {x: {_target_: os.system, command: id}}}"
FIELDS = ("output_dir", "loss_type", "run_name", "dataset_name", "model_name_or_path", "learning_rate", "report_to",
          "chat_template_path", "optim", "not_known")  # fmt: skip


def of_bytes(text: str, name: str = "file") -> Conversion:
    """Convert a file with these very line breaks, of TRL for dpo."""
    Path(name).write_text(text, encoding="utf-8", newline="")
    return converted(Path(name), "dpo" if "num_processes" in text else None, 8)


def checked(conv: Conversion, file: str = "file") -> dict[str, Any]:
    """Return the experiment, if each of its lines is one and its keys are those of the conversion."""
    text = text_of(conv, "mine", file)
    assert all(line.isprintable() for line in text.split("\n"))
    experiment = yaml.safe_load(text)
    assert experiment.keys() == {"defaults"} | {key.partition(".")[0] for key in conv.values}
    assert "hydra" not in experiment
    return dict(experiment)


@pytest.mark.parametrize(("field", "at_a_line"), list(itertools.product(FIELDS, BREAKS)), ids=repr)
def test_a_value_ends_no_line(field: str, at_a_line: str) -> None:
    lines = [line for line in TRL.splitlines() if not line.startswith(f"{field}:")]
    message = field
    try:
        checked(of_bytes("\n".join([*lines, f"{field}: {json.dumps(f'out{at_a_line}{ATTACK}{at_a_line}# ')}\n"])))
    except ConvertError as error:
        message = str(error)
    assert field in message


@pytest.mark.parametrize("at_a_line", BREAKS, ids=repr)
def test_nor_does_a_name(at_a_line: str) -> None:
    file = f"x{at_a_line}{ATTACK}"
    checked(of_bytes(TRL, file), file)
    if at_a_line not in ("\n", "\r", "\r\n", "\x0b", "\x0c"):  # these end a word of a shell
        for words in (SWIFT, OPENRLHF):
            checked(of_bytes(f"{words} '--x{at_a_line}{ATTACK}' 3"))


def test_a_value_that_does_not_print_keeps_its_characters() -> None:
    name = "über\u202e\x1b[2J\u2028"
    assert checked(of_bytes(f"{TRL}run_name: {json.dumps(name)}\n"))["logger"]["run_name"] == name


SECRET, KEY, LONG = "Zx81secret", "hf_abcdefABCDEF", "0123456789" * 4
SECRETS = {
    **dict.fromkeys(("PGPASSWORD", "DB_PASS", "HFTOKEN", "WANDBKEY", "PASSPHRASE", "AWS_SESSION", "COOKIE", "CREDS",
                     "PRIVATEKEY", "SECRETKEY", "APITOKEN", "wandbApiKey", "ANY"), SECRET),
    "AUTH": f"Bearer {SECRET}", "GITHUB_PAT": f"github_pat_{SECRET}", "GH": f"ghs_{SECRET}",
    "AZURE_STORAGE_CONNECTION_STRING": f"AccountKey={SECRET}", "SSH_PRIVATE": f"-----BEGIN KEY {SECRET}",
    "SLACK_WEBHOOK": f"https://hooks.example/{SECRET}", "HTTPS_PROXY": f"http://{SECRET}@host:1",
    "MLFLOW_TRACKING_URI": f"https://host/?access_token={SECRET}",
}  # fmt: skip
WITH_SECRETS = (
    *(f"{TRL}env: {json.dumps({name: value})}\n" for name, value in SECRETS.items()),
    *(f"export {name}='{value}'\n{SWIFT}" for name, value in SECRETS.items()),
    *(f"{SWIFT} --{words}" for words in (
        f"hubtoken {SECRET}", f"auth {SECRET}", f"server 'https://host/?key={SECRET}'", f"server https://{SECRET}@host/",
        f"x github_pat_{SECRET}", f"x eyJhbGciOi.eyJzdWIi.{SECRET}", f"x '-----BEGIN PRIVATE KEY----- {SECRET}'",
        f"x xoxb-{SECRET}", f"hub_token {KEY} --swanlab_token {SECRET}")),
    f"HF_TOKEN={KEY} SWANLAB_API_KEY={SECRET} {SWIFT}",
    f"export HF_TOKEN={KEY}\n{COMMAND}",
    f"{AXOLOTL}hf_hub_token: {KEY}\nwandb_api_key: {SECRET}\n",
    f"{FACTORY_LORA}hf_hub_token: {KEY}\napi_key: {SECRET}\nms_hub_token: {SECRET}\n",
    f"{OPENRLHF} --wandb_key {SECRET} --hf_token {KEY} --use_wandb {SECRET} --logger.wandb.key {SECRET}",
    f'ray job submit --runtime-env-json=\'{{"env_vars": {{"A_KEY": "{SECRET}"}}}}\' -- {OPENRLHF}',
    f'ray job submit --runtime-env-json=\'{{"env_vars": {{"A_KEY": {SECRET}}}}}\' -- {OPENRLHF}',
    f"{TRL}model_init_kwargs: {{token: {KEY}, revision: main}}\n",
    f"{TRL}model_init_kwargs: {{a: {{password: {SECRET}}}, b: [{KEY}]}}\nhub_token: {KEY}\n",
    f"{TRL}env: {{WANDB_API_KEY: {SECRET}, OTHER: {KEY}}}\n",
    f"{TRL}something: https://me:{SECRET}@host/x\nmore: {LONG}\n",
)  # fmt: skip


@pytest.mark.parametrize("text", WITH_SECRETS)
def test_no_secret_is_written(text: str) -> None:
    assert not [word for word in (SECRET, KEY, LONG) if word in written(of_bytes(text))]


def test_a_name_with_key_or_token_may_hide_nothing() -> None:
    shown = ("prompt_key", "data.input_key", "stop_token", "pad_token_id", "max_new_tokens", "eval.best_metric_key",
             "num_tokens", "chosen_key", "tokens", "tokenizer_config")  # fmt: skip
    assert [name for name in shown if is_secret(name)] == []
    assert masked("revision", LONG) == LONG
    assert masked("hub_token", None) is None


DOUBLED = "A0=xy\n" + "".join(f"A{n}=$A{n - 1}$A{n - 1}\n" for n in range(1, 40))
TOO_MUCH = {
    "aliases": ("a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 10}]\n" for n in range(1, 9)),
                f"more than {MOST_VALUES:,} values"),
    "an alias of itself": ("a: &a [*a]\n", f"more than {MOST_VALUES:,} values"),
    "lists": ("a: " + "[" * 3000 + "]" * 3000, "levels deep"),
    "mappings": ("".join(f"{' ' * n}k{n}:\n" for n in range(500)), "levels deep"),
    "digits in yaml": (f"seed: {'9' * 4000}", "a number has more than 4096 bits"),
    "a tag": ("run_name: !!timestamp x", "is none of the files that can be converted"),
    "words": (f"{DOUBLED}{OPENRLHF} --run_name $A39", "its variables make more than"),
    "arrays": ("A=(x y)\n" + "A=(${A[@]} ${A[@]})\n" * 40 + OPENRLHF, "its variables make more than"),
    "depth": (f"{OPENRLHF} --run_name {'$(' * 3000}", "too deep in each other"),
    "digits": (f"{OPENRLHF} --seed {'9' * 4000}", "seed=9"),
}  # fmt: skip


@pytest.mark.parametrize("case", TOO_MUCH)
def test_a_small_file_does_not_become_large(case: str) -> None:
    text, why = TOO_MUCH[case]
    with pytest.raises(ConvertError, match=why):
        of_bytes(text if "openrlhf" in text else TRL + text)


# Folders, and what each is for the run where that is another text.
FOLDERS = {"~/my runs/x": "HOME/my runs/x", "$HOME/ckpt": "HOME/ckpt", **dict.fromkeys((
    "out/lr=5e-7,beta=0.1", "out (1)", "a{b}", "out/ünï:x", "it's", "a\\", "a${b}", "[1]", "007", "true", "1e3", ".5",
    "1_000", "./out/x-1", "a #b", 'a"b', "a  b"))}  # fmt: skip


@pytest.mark.parametrize("named", FOLDERS)
def test_the_command_names_the_folder_of_the_file(named: str) -> None:
    """The printed line is split as a shell does it, and then read by Hydra."""
    quoted = named.replace("'", "''")
    conv = of_bytes(f"{TRL}output_dir: '{quoted}'\n")
    (line,) = [each for each in written(conv).splitlines() if each.startswith("# Command:")]
    words = shlex.split(line.partition(":")[2])
    assert words == shlex.split(command(conv, "mine"))
    register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose("config", overrides=words[4:], return_hydra_config=True)
    assert cfg.hydra.run.dir == (FOLDERS[named] or named).replace("HOME", str(Path.home()))


def test_a_command_composes_with_its_folder_and_texts_stay_texts() -> None:
    conv = of_bytes(f"{TRL}output_dir: out/lr=5e-7,beta=0.1\nrun_name: 0906_1200\n")
    assert tables.experiment_of(conv).logger.run_name == "0906_1200"
    assert conv.command["hydra.run.dir"].value == "out/lr=5e-7,beta=0.1"


def test_the_first_lines_say_what_is_trained_instead() -> None:
    head = written(tables.of_eight(SWIFT.replace("full", "adalora") + "--loss_type kto_pair")).partition("#\n")[0]
    for text in ("# Trains something else ", "#   tuner_type: adalora", "#   loss_type: kto_pair"):
        assert text in head


def test_null_and_false_are_named_in_one_line() -> None:
    text = written(tables.of_eight(AXOLOTL + "wandb_name:\nload_in_8bit: false\nlora_r:\n"))
    assert [line for line in text.splitlines() if "wandb_name" in line] == [
        "# Null, false, empty or 0, and nothing is asked for: lora_r, wandb_name, load_in_8bit."
    ]


def test_the_head_has_what_matters_and_counts_the_rest() -> None:
    long = "x" * 300
    text = f"{AXOLOTL}bf16: no\nlora_r: 16\neot_tokens: {long}\nweird: 1\nstrange: {long}\nstrict: no\nspecial: x\n"
    conv = tables.of_eight(text)
    assert text_of(conv, "mine", "theirs", verbose=False).partition("\ndefaults:")[0].splitlines()[3:] == [
        "# Trains something else than the file asks for:",
        "#   lora_r: 16   without adapter theirs has no adapter: all weights are trained, as there, at the given rate",
        "# Missing:", f"#   eot_tokens: {'x' * 60} …   the template ends a turn", "# Not known here: weird, strange.",
        "# 4 other arguments change nothing: see --verbose.",
    ]  # fmt: skip
    for number in range(12):
        conv.remark(tables.INSTEAD, f"a{number}", 1, "why")
    assert "#   and 3 more: --verbose names them" in text_of(conv, "mine", "theirs", verbose=False).splitlines()
    assert written(conv).count("   why\n") == 12


MORE = (
    "output_dir: out\nrun_name: a\nlearning_rate: 1e-6\noptim: adamw_torch\nloss_type: sigmoid\nnot_known: 3\n"
    "chat_template_path: c\nreport_to: wandb\ndataset_config: {name: x, list: [a, 1]}\nseed: 3\nlogging_dir: l\n"
)
RECIPES = (TRL + MORE, TRL + MORE + "reward_funcs: [a.b]\n",
           AXOLOTL_LORA + "output_dir: o\nwandb_name: a\nspecial_tokens: {pad_token: x}\n",
           FACTORY_LORA + "output_dir: o\ntemplate: llama3\nseed: 3\n")  # fmt: skip
WORDS = '--output_dir out --learning_rate 1e-6 --run_name "$B" --not_known 3 --seed 3\n'
SCRIPTS = tuple(f"A=x\nexport B=${{A}}y\n{words}{WORDS}" for words in (OPENRLHF, RAY, SWIFT.replace("full", "lora")))
ALLOWED = {"defaults", "seed", "launch", "parallel", "engine", "model", "adapter", "data", "rollout", "reward", "loss",
           "reference", "train", "optim", "memory", "checkpoint", "logger", "eval", "hardware"}  # fmt: skip


def recipes(plant: str) -> Iterator[str]:
    """Plant a text at each place of each recipe: as a value and as a name, quoted and as it is."""
    for recipe in RECIPES:
        lines = recipe.splitlines()
        for place, line in enumerate(lines):
            name, _, value = line.partition(": ")
            for planted in (f"{name}: {json.dumps(plant)}", f"{name}: {plant}", f"{json.dumps(plant)}: {value}",
                            f"{name}: [{json.dumps(plant)}, {{a: {json.dumps(plant)}}}]"):  # fmt: skip
                yield "\n".join([*lines[:place], planted, *lines[place + 1 :], ""])
        yield f"{recipe}# {plant}\n{plant}"


def scripts(plant: str) -> Iterator[str]:
    for script in SCRIPTS:
        words = script.split(" ")
        for place, word in enumerate(words):
            for planted in (shlex.quote(plant), plant, f"{word}{plant}", f'"{plant}"'):
                yield " ".join([*words[:place], planted, *words[place + 1 :]])
        yield script.replace("A=x", f"A={shlex.quote(plant)}")
        yield script.replace("A=x", f"A={plant}\n" + "".join(f"A=$A$A{place}\n" for place in range(40)))


@attacks.few_or_many(45, 1500)
def test_a_recipe_of_anything_is_converted_or_refused(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parse_once()
    (tmp_path / "alone").mkdir()
    monkeypatch.chdir(tmp_path / "alone")
    monkeypatch.setenv(attacks.VARIABLE, attacks.SECRET)
    file = Path("conf/experiment/mine.yaml")
    for text in attacks.drawn((text for plant in attacks.PLANTS for text in (*recipes(plant), *scripts(plant))), count):
        file.unlink(missing_ok=True)
        Path("theirs").write_text(text, encoding="utf-8", errors="surrogatepass", newline="")
        monkeypatch.setattr(sys, "argv", ["convert", "theirs", "--trainer", "dpo", "--gpus", "8", "--name", "mine"])
        with attacks.bounded(), attacks.shown(text):
            assert main() in (0, 1)
        captured = capsys.readouterr()
        with attacks.shown(text):
            attacks.assert_harmless(captured.out + captured.err, *Path().rglob("*.yaml"))
            if file.exists():
                assert set(yaml.safe_load(file.read_text(encoding="utf-8"))) <= ALLOWED
            assert {str(each) for each in Path().rglob("*") if each.is_file()} <= {"theirs", str(file)}
