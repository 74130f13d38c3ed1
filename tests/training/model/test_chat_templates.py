"""Templates by name: their texts beside those of the frameworks and models they come from, and what they need."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from rlexp.base.errors import ConfigError, ModelError
from rlexp.config.chat_templates import NAMED, names_like, template_text
from rlexp.config.identity import changes, identity
from rlexp.config.load import compose_config
from rlexp.training.dataset.tokens import RowTokenizer
from rlexp.training.model.loading import byte_tokenizer, end_with_template, load_tokenizer
from rlexp.training.train.build_rollouts import ends_of
from rlexp.training.types import Example, Row
from rlexp.verify import model as textbook
from tests.conftest import ROOT, Shell
from tests.helpers import warm
from tests.helpers.models import QUICK, SHAPE, cache, hf, saved

__all__ = ["cache"]  # a fixture of every test here too

# What other code made of the same conversations. `sources` there says which code, at which commit.
KNOWN = json.loads((ROOT / "tests" / "files" / "chat_templates.json").read_text(encoding="utf-8"))
CASES = [(name, case) for name, each in KNOWN["templates"].items() for case in each["cases"]]
EVERYWHERE = {"asked", "told", "asked by a system", "told by a system"}


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_template_writes_what_its_sources_write(name: str, case: str) -> None:
    source, talk = KNOWN["templates"][name], KNOWN["conversations"][case]
    tokenizer = byte_tokenizer()
    tokenizer.bos_token, tokenizer.eos_token = source["bos"], source["eos"]
    tokenizer.chat_template = template_text(name)
    said = tokenizer.apply_chat_template(
        talk["messages"], tools=talk.get("tools"), tokenize=False, add_generation_prompt=talk["asking"],
        **talk.get("options", {}),
    )  # fmt: skip
    assert said == source["cases"][case]["text"]


def render(text: str, name: str, messages: list[dict[str, str]]) -> str:
    """Write a prompt as a template does, with the special tokens of the sources."""
    tokenizer, source = byte_tokenizer(), KNOWN["templates"][name]
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template = source["bos"], source["eos"], text
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def padded(messages: list[dict[str, str]], *roles: str) -> list[dict[str, str]]:
    """Put white space around the messages of some roles."""
    return [{**each, "content": f" \n{each['content']}\t\n "} if each["role"] in roles else each for each in messages]


def trl_originals() -> list[tuple[str, str, str]]:
    """The models' own templates that TRL has, as name, case and original."""
    return [(name, case, by.removeprefix("TRL ")) for name, case in CASES if case in ("asked", "asked by a system")
            for by in KNOWN["templates"][name]["cases"][case]["by"] if by.startswith("TRL ")]  # fmt: skip


@pytest.mark.parametrize(("name", "case", "original"), trl_originals())
def test_white_space_around_messages_is_treated_as_by_the_models_own_template(
    name: str, case: str, original: str
) -> None:
    trl = pytest.importorskip("trl")
    theirs = (Path(trl.__file__).parent / "chat_templates" / f"{original}.jinja").read_text(encoding="utf-8")
    messages = padded(KNOWN["conversations"][case]["messages"], "system", "user", "assistant")
    assert render(template_text(name), name, messages) == render(theirs, name, messages)


# The messages around which a template leaves white space out, as its original does. All others keep it.
TRIMMED = {"llama3": ("system", "user", "assistant"), "gemma": ("user", "assistant"), "llama2": ("user", "assistant")}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(
    ("case", "roles"), [("asked", ("user", "assistant")), ("asked by a system", ("system",))], ids=["turns", "system"]
)
def test_white_space_around_messages_is_trimmed_or_kept(name: str, case: str, roles: tuple[str, ...]) -> None:
    messages, text = KNOWN["conversations"][case]["messages"], template_text(name)
    expected = render(text, name, messages)
    kept = {*roles} - {*TRIMMED.get(name, ())}
    for plain, wide in zip(messages, padded(messages, *kept), strict=True):
        assert expected.count(plain["content"]) == 1
        expected = expected.replace(plain["content"], wide["content"])
    assert render(text, name, padded(messages, *roles)) == expected


def test_every_name_has_a_text_and_sources_for_it() -> None:
    folder = ROOT / "rlexp" / "config" / "assets" / "chat_templates"
    assert {path.stem for path in folder.iterdir()} == NAMED.keys() == KNOWN["templates"].keys()
    for each in KNOWN["templates"].values():
        assert each["cases"].keys() >= EVERYWHERE
        assert all(case["by"] for case in each["cases"].values())
        assert all(
            by.split()[0].removesuffix("'") in KNOWN["sources"] for c in each["cases"].values() for by in c["by"]
        )


@pytest.mark.parametrize("name", NAMED)
def test_the_tokens_of_a_template_are_those_that_it_writes(name: str) -> None:
    known, source = NAMED[name], KNOWN["templates"][name]
    texts = "".join(each["text"] for case, each in source["cases"].items() if case in EVERYWHERE)
    written = {*re.findall(r"<[|｜][a-zA-Z_]+[|｜]>|<\w+_of_turn>|\[/?[A-Z_]+\]", texts)} - {
        source["bos"],
        source["eos"],
    }
    assert written - {known.end} == {*known.tokens} - {known.end} or not known.tokens
    assert known.end is None or known.end in known.tokens
    assert known.end in (None, source["eos"])


# ---- with a tokenizer ----


def tokenizer_for(name: str, folder: Path) -> Any:
    return load_tokenizer(hf(saved(folder), chat_template=name, add_tokens=[*NAMED[name].tokens]))


def as_here(text: str, name: str) -> str:
    """The text with the special tokens of the tests' tokenizer."""
    source = KNOWN["templates"][name]
    text = text.replace(source["bos"], "<bos>") if source["bos"] else text
    return text if NAMED[name].end else text.replace(source["eos"], "<eos>")


@pytest.mark.parametrize("name", NAMED)
def test_rows_are_written_by_it_and_answers_end_with_its_token(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_for(name, tmp_path / "model")
    end = NAMED[name].end or "<eos>"
    assert tokenizer.eos_token == end
    assert len(tokenizer(end, add_special_tokens=False)["input_ids"]) == 1
    rows, texts = RowTokenizer(tokenizer), KNOWN["templates"][name]["cases"]
    system, first, answer, second, last = KNOWN["conversations"]["told by a system"]["messages"]
    for start, suffix in (((), ""), ((system,), " by a system")):
        made, several, asked = rows.sequences([
            Row((*start, first, answer, second), ((last,),), "a row"),
            Row((*start, first), ((answer, second, last),), "turns"),
            Row((*start, first, answer, second), (), "a prompt"),
        ])  # fmt: skip
        assert isinstance(made, Example), made
        assert isinstance(several, Example), several
        assert isinstance(asked, Example), asked
        want = as_here(texts[f"told{suffix}"]["text"], name)
        whole = [*made.prompt, *made.answers[0]]
        assert tokenizer.decode(whole) == want
        thought = "<think>\n\n</think>\n\n" if name == "qwen3" else ""  # which its models say themselves
        assert tokenizer.decode(made.answers[0]).strip() in (f"{thought}6.{end}", f"6. {end}")
        assert tokenizer.decode(asked.prompt) == as_here(texts[f"asked{suffix}"]["text"], name)
        assert [*several.prompt, *several.answers[0]] == whole
        assert several.masks[0] is not None
        trained = [token for token, of in zip(several.answers[0], several.masks[0], strict=True) if of]
        assert trained.count(tokenizer.eos_token_id) == 2
        said = tokenizer.decode(trained)
        assert "4." in said
        assert "3+3" not in said


class Model:
    """What is asked of a model for the tokens that end an answer."""

    def __init__(self, eos: Any) -> None:
        self.generation_config = GenerationConfig(eos_token_id=eos)

    def can_generate(self) -> bool:
        return True


@pytest.mark.parametrize(("eos", "ends"), [(1, [260, 1]), ([2, 260, 1], [260, 2, 1]), (None, [260])])
def test_answers_that_are_drawn_end_with_its_token_too(eos: Any, ends: list[int], tmp_path: Path) -> None:
    cfg = hf(saved(tmp_path / "model"), chat_template="chatml", add_tokens=[*NAMED["chatml"].tokens])
    model: Any = Model(eos)
    tokenizer = load_tokenizer(cfg)
    assert ends_of(model, tokenizer) == sorted(ends)
    end_with_template(model, tokenizer, cfg)
    assert model.generation_config.eos_token_id == ends
    other: Any = Model(eos)
    end_with_template(other, tokenizer, hf(Path("."), chat_template="zephyr"))  # which leaves it to the tokenizer
    end_with_template(other, tokenizer, hf(Path(".")))
    assert other.generation_config.eos_token_id == eos
    assert tokenizer.decode(tokenizer("4.<|im_end|>")["input_ids"], skip_special_tokens=True) == "4."


@pytest.mark.parametrize("name", ["chatml", "zephyr"])
def test_the_reference_of_verify_reads_the_same_tokenizer(name: str, tmp_path: Path) -> None:
    ours = tokenizer_for(name, tmp_path / "model")
    cfg: Any = SimpleNamespace(model=hf(Path(ours.name_or_path), chat_template=name))
    theirs = textbook.load_tokenizer(cfg)
    assert (theirs.eos_token_id, theirs.chat_template) == (ours.eos_token_id, ours.chat_template)
    ids = ours("4.<|im_end|><eos>")["input_ids"]
    assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids, skip_special_tokens=True)


def test_tokens_that_a_tokenizer_lacks_are_named_with_the_remedy(tmp_path: Path) -> None:
    """Before any process starts where a folder says them, else when the tokenizer is read; and the remedy works."""
    source = saved(tmp_path / "model")
    words = ["model=hf", f"model.path={source}", "model.chat_template=chatml", "launch.device=cpu"]
    want = r"model\.chat_template=chatml: the tokenizer has no <\|im_start\|>, <\|im_end\|>, and would split them"
    with pytest.raises(ConfigError, match=want) as error:
        compose_config(words)
    with pytest.raises(ConfigError, match=want):
        load_tokenizer(hf(source, chat_template="chatml"))
    with pytest.raises(ConfigError, match=r"has no <\|im_end\|>, and would split it into"):
        load_tokenizer(hf(source, chat_template="chatml", add_tokens=["<|im_start|>"]))
    (remedy,) = re.findall(r'model\.add_tokens="\S*"', str(error.value))
    cfg = compose_config([*words, *shlex.split(remedy)])
    assert load_tokenizer(cfg.model).eos_token == "<|im_end|>"
    for name in str(error.value).rpartition("no tokens: ")[2].rstrip(".").split(", "):
        compose_config([*words, f"model.chat_template={name}"])


def test_a_tokenizer_that_ends_nothing_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "model")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": None}))
    with pytest.raises(ModelError, match=r"model\.chat_template=vicuna: .*end-of-sequence token, and it has none"):
        load_tokenizer(hf(source, chat_template="vicuna"))
    assert load_tokenizer(hf(source)).eos_token is None


# ---- which one is meant ----


LIKE = [("qwen2_5", "qwen"), ("chat_ml", "chatml"), ("phi_4", "phi4"), ("llama-3", "llama3"), ("Mistral", "mistral"),
        ("deepseek3", "deepseek_v3")]  # fmt: skip


@pytest.mark.parametrize(("word", "first"), LIKE)
def test_an_unknown_name_is_one_message_with_all_names(word: str, first: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        compose_config(["model=hf", f"model.path={saved(tmp_path / 'model')}", f"model.chat_template={word}",
                        "launch.device=cpu"])  # fmt: skip
    said = str(error.value)
    assert said.startswith(
        f"model.chat_template={word}: is neither a file nor the name of a template. Names, the nearest "
    )
    assert f"first: {first}, " in said
    assert len(said.splitlines()) == 1
    assert {*said.rpartition(": ")[2].rstrip(".").split(", ")} == {*names_like(word)} == {*NAMED}


def test_a_name_is_not_a_file_of_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file does not say which token ends an answer, so a run is not continued from the one to the other."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chatml").write_text(template_text("chatml"), encoding="utf-8")
    words = ["model=hf", f"model.path={saved(tmp_path / 'model')}", "launch.device=cpu",
             "model.add_tokens=['<|im_start|>','<|im_end|>']"]  # fmt: skip
    known = {word: identity(compose_config([*words, f"model.chat_template={word}"])) for word in ("chatml", "./chatml")}
    assert [key for key, *_ in changes(known["chatml"], known["./chatml"])] == ["model.chat_template"]
    assert not list(changes(known["chatml"], json.loads(json.dumps(known["chatml"]))))


# ---- the whole way ----


def test_a_run_learns_and_exports_it(tmp_path: Path, rlexp: Shell) -> None:
    saved(tmp_path / "base", LlamaConfig(**SHAPE, eos_token_id=1))
    words = ["model=hf", "model.path=base", "model.add_tokens=['<|im_start|>','<|im_end|>']",
             "model.chat_template=chatml", "hydra.run.dir=run"]  # fmt: skip
    answer = rlexp(*QUICK, *words)
    assert answer.returncode == 0, answer.stderr
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 260)
    assert tokenizer.chat_template == template_text("chatml")
    assert model.generation_config.eos_token_id == [260, 1]
    assert model.get_input_embeddings().weight.shape == (261, 32)


@pytest.mark.slow
def test_verify_finds_the_same_with_a_name(tmp_path: Path) -> None:
    source = saved(tmp_path / "base")
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(source)  # with weights of a usual size
    words = ["--steps", "1", *(word for word in QUICK if "max_steps" not in word), "model=hf", f"model.path={source}",
             "model.add_tokens=['<|im_start|>','<|im_end|>']", "model.chat_template=chatml",
             "engine=torch"]  # fmt: skip
    answer = warm.run("rlexp.verify", words, tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr
