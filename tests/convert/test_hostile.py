"""A stranger's recipe writes nothing but the experiment: no line of its own, no secret, no code that is trusted."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlexp.base.plain_yaml import MOST_VALUES
from rlexp.convert.conversion import Conversion, ConvertError
from rlexp.convert.experiment import text_of
from rlexp.convert.frameworks import converted
from rlexp.convert.read import LARGEST
from tests.convert.texts import OPENRLHF, SWIFT, TRL

BREAKS = ("\n", "\r", "\r\n", "\x0b", "\x0c", "\x85", "\u2028", "\u2029")
ATTACK = "hydra: {callbacks: {x: {_target_: os.system, command: id}}}"
FIELDS = ("output_dir", "loss_type", "run_name", "dataset_name", "model_name_or_path", "learning_rate", "report_to",
          "chat_template_path", "optim", "not_known")  # fmt: skip


def conversion(text: str, folder: Path, name: str = "file", trainer: str | None = None) -> Conversion:
    (folder / name).write_text(text, encoding="utf-8", newline="")
    return converted(folder / name, trainer, 8)


def checked(conv: Conversion, file: str = "file") -> dict[str, Any]:
    """Return the experiment, if each of its lines is one and its keys are those of the conversion."""
    text = text_of(conv, "mine", file)
    assert all(line.isprintable() for line in text.split("\n"))
    written = yaml.safe_load(text)
    assert written.keys() == {"defaults"} | {key.partition(".")[0] for key in conv.values}
    assert "hydra" not in written
    return dict(written)


@pytest.mark.parametrize(("field", "at_a_line"), list(itertools.product(FIELDS, BREAKS)), ids=repr)
def test_a_value_ends_no_line(field: str, at_a_line: str, tmp_path: Path) -> None:
    lines = [line for line in TRL.splitlines() if not line.startswith(f"{field}:")]
    text = "\n".join([*lines, f"{field}: {json.dumps(f'out{at_a_line}{ATTACK}{at_a_line}# ')}\n"])
    try:
        conv = conversion(text, tmp_path, trainer="dpo")
    except ConvertError as error:
        said = str(error)
    else:
        said = f"{field} is written"
        checked(conv)
    assert field in said


@pytest.mark.parametrize("at_a_line", BREAKS, ids=repr)
def test_nor_does_a_name(at_a_line: str, tmp_path: Path) -> None:
    file = f"x{at_a_line}{ATTACK}"
    checked(conversion(TRL, tmp_path, file, "dpo"), file)
    if at_a_line not in ("\n", "\r", "\r\n", "\x0b", "\x0c"):  # these end a word of a shell
        for command in (SWIFT, OPENRLHF):
            checked(conversion(f"{command} '--x{at_a_line}{ATTACK}' 3", tmp_path))


def test_a_value_that_does_not_print_keeps_its_characters(tmp_path: Path) -> None:
    name = "über\u202e\x1b[2J\u2028"
    conv = conversion(f"{TRL}run_name: {json.dumps(name)}\n", tmp_path, trainer="dpo")
    assert checked(conv)["logger"]["run_name"] == name


SECRETS = {
    "PGPASSWORD": "Zx81secret", "DB_PASS": "Zx81secret", "HFTOKEN": "Zx81secret", "WANDBKEY": "Zx81secret",
    "PASSPHRASE": "Zx81secret", "AUTH": "Bearer Zx81secret", "GITHUB_PAT": "github_pat_Zx81secret",
    "AWS_SESSION": "Zx81secret", "AZURE_STORAGE_CONNECTION_STRING": "AccountKey=Zx81secret",
    "SLACK_WEBHOOK": "https://hooks.example/Zx81secret", "COOKIE": "Zx81secret", "CREDS": "Zx81secret",
    "HTTPS_PROXY": "http://Zx81secret@host:1", "GH": "ghs_Zx81secret", "SSH_PRIVATE": "-----BEGIN KEY Zx81secret",
    "MLFLOW_TRACKING_URI": "https://host/?access_token=Zx81secret", "PRIVATEKEY": "Zx81secret",
    "SECRETKEY": "Zx81secret", "APITOKEN": "Zx81secret", "wandbApiKey": "Zx81secret", "ANY": "Zx81secret",
}  # fmt: skip
ARGUMENTS = ("--hubtoken Zx81secret", "--auth Zx81secret", "--server 'https://host/?key=Zx81secret'",
             "--server https://Zx81secret@host/", "--x github_pat_Zx81secret", "--x eyJhbGciOi.eyJzdWIi.Zx81secret",
             "--x '-----BEGIN PRIVATE KEY----- Zx81secret'", "--x xoxb-Zx81secret")  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_no_variable_s_secret_is_written(name: str, tmp_path: Path) -> None:
    for text, trainer in (
        (f"{TRL}env: {json.dumps({name: SECRETS[name]})}\n", "dpo"),
        (f"export {name}='{SECRETS[name]}'\n{SWIFT}", None),
    ):
        text = text_of(conversion(text, tmp_path, trainer=trainer), "mine", "file")
        assert "Zx81secret" not in text


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_nor_an_argument_s(argument: str, tmp_path: Path) -> None:
    assert "Zx81secret" not in text_of(conversion(f"{SWIFT} {argument}", tmp_path), "mine", "file")


def test_a_recipe_does_not_trust_a_model_s_code(tmp_path: Path) -> None:
    conv = conversion(f"{TRL}trust_remote_code: true\n", tmp_path, trainer="dpo")
    assert "model.trust_remote_code" not in conv.values
    assert "trust_remote_code: true" in text_of(conv, "mine", "file")  # in a comment, which says what to do
    assert "trust_remote_code" not in checked(conv).get("model", {})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 10}]\n" for n in range(1, 9)),
         f"more than {MOST_VALUES:,} values"),
        ("a: &a [*a]\n", f"more than {MOST_VALUES:,} values"),
        ("a: " + "[" * 3000 + "]" * 3000, "levels deep"),
        ("".join(f"{' ' * n}k{n}:\n" for n in range(500)), "levels deep"),
    ],
    ids=["aliases", "itself", "lists", "mappings"],
)  # fmt: skip
def test_a_small_file_does_not_become_large(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=why):
        conversion(f"{TRL}{text}", tmp_path, trainer="dpo")


DOUBLED = "A0=xy\n" + "".join(f"A{n}=$A{n - 1}$A{n - 1}\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"{DOUBLED}{OPENRLHF} --run_name $A39", "its variables make more than"),
        ("A=(x y)\n" + "A=(${A[@]} ${A[@]})\n" * 40 + OPENRLHF, "its variables make more than"),
        (f"{OPENRLHF} --run_name {'$(' * 3000}", "too deep in each other"),
        (f"{OPENRLHF} --run_name {'x' * LARGEST}", "is larger than 256 KiB"),
        (f"{OPENRLHF} --seed {'9' * 4000}", "seed=9"),
        (f"{TRL}seed: {'9' * 4000}", "a number has more than 4096 bits"),
        (f"{TRL}run_name: !!timestamp x", "is none of the files that can be converted"),
    ],
    ids=["words", "arrays", "depth", "bytes", "digits", "digits in yaml", "a tag"],
)
def test_nor_does_a_small_script(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=why):
        conversion(text, tmp_path, trainer=None if "openrlhf" in text else "dpo")
