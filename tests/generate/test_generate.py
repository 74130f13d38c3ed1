"""`python -m rlexp.generate`: answers equal transformers' own, on any ring; wrong words are one message."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlexp.base.errors import UserError
from rlexp.config.load import compose_config, to_plain
from rlexp.generate import report
from rlexp.generate.__main__ import main
from rlexp.generate.job import Answered, Beside, GenerateJob, Reply, job_of
from rlexp.generate.rank import examples_of, prompts_of, with_room
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.train.examples import read_examples
from rlexp.training.world.groups import ALONE, World
from tests.helpers import warm
from tests.helpers.adapters import adapter_of, loaded
from tests.helpers.models import cache, made, smollm2, untied
from tests.helpers.rows import write_lines
from tests.helpers.runs import a_run_of, value_of

__all__ = ["cache"]  # a fixture of every test here too
QUESTIONS = ("Name a prime number.", "Who are you?", "Say hello in German, then in French, and then in Italian.")
NEW = 16
REWARDED = ("loss=ppo", "reward.rule=length", "rollout.batch_size=4", "rollout.n_samples=2")


def generated(folder: Path, *words: str) -> list[dict[str, Any]]:
    done = warm.run("rlexp.generate", [*words, f"rollout.max_new_tokens={NEW}", "launch.device=cpu",
                                       "--jsonl", "found.jsonl"], cwd=folder)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "found.jsonl").read_text(encoding="utf-8").splitlines()]


def tokens(found: Sequence[dict[str, Any]], side: str) -> list[list[int]]:
    return [answer["tokens"] for each in found for answer in each[side]]


def likeliest(model: Any, tokenizer: Any, prompts: Sequence[str], new: int = NEW) -> list[list[int]]:
    """The greedy answers of transformers' own `generate`, one prompt at a time."""
    found = []
    for prompt in prompts:
        if tokenizer.chat_template:
            asked = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True,
                                                  return_tensors="pt", return_dict=True)  # fmt: skip
        else:
            asked = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            whole = model.generate(**asked, max_new_tokens=new, do_sample=False, pad_token_id=0)
        found.append(whole[0, asked["input_ids"].shape[1] :].tolist())
    return found


def merged(base: Path, adapter: Path, place: Path) -> Any:
    whole = loaded(base, adapter).merge_and_unload()
    whole.save_pretrained(place)
    AutoTokenizer.from_pretrained(base).save_pretrained(place)
    return whole


def compared(base: Path, folder: Path, rings: Sequence[int]) -> None:
    """A model alone, with an adapter and with that adapter merged: each on each ring beside transformers."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    plain = likeliest(loaded(base), tokenizer, QUESTIONS)
    adapter = adapter_of(base, folder / "adapter", lora_alpha=32)
    changed = likeliest(loaded(base, adapter), tokenizer, QUESTIONS)
    whole = likeliest(merged(base, adapter, folder / "merged"), tokenizer, QUESTIONS)
    assert plain != changed
    (folder / "questions.txt").write_text("\n\n".join(QUESTIONS), encoding="utf-8")
    asked = ("--prompts", "questions.txt", "train.precision=fp32", "model=hf")
    for ring in rings:
        with_adapter = generated(folder, *asked, f"model.path={base}", "adapter=lora", "adapter.path=adapter",
                                 f"parallel=ring{ring}")  # fmt: skip
        assert tokens(with_adapter, "answers") == changed
        assert tokens(with_adapter, "beside") == plain
        assert [each["origin"] for each in with_adapter] == [f"questions.txt:{line}" for line in (1, 3, 5)]
        alone = generated(folder, *asked, "model.path=merged", f"parallel=ring{ring}")
        assert tokens(alone, "answers") == whole
        assert tokens(alone, "beside") == []


def test_answers_are_those_of_transformers(tmp_path: Path) -> None:
    compared(untied(tmp_path / "base"), tmp_path, (2,))


@pytest.mark.slow
def test_answers_of_a_real_model_are_those_of_transformers(tmp_path: Path) -> None:
    """SmolLM2-135M, which writes prompts by its chat template."""
    compared(made(smollm2()), tmp_path, (1, 2))


def test_a_run_is_shown_beside_its_start(rlexp: Callable[..., Any], tmp_path: Path) -> None:
    """To its held-out rows: what its newest checkpoint answers is what its exported model does."""
    base = untied(tmp_path / "base")
    done = rlexp("model=hf", f"model.path={base}", "launch.device=cpu", "logger=none", "hydra.run.dir=run",
                 "data.size=16", "data.eval_size=5", "train.max_steps=2", "optim.lr=1e-2")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = generated(tmp_path, "run", "--rows", "3", "parallel=ring2")
    prompts = [each["prompt"] for each in found]
    assert [each["origin"] for each in found] == [f"synthetic eval pair {place}" for place in range(3)]
    for side, folder in (("beside", base), ("answers", tmp_path / "run" / "model")):
        assert tokens(found, side) == likeliest(loaded(folder), AutoTokenizer.from_pretrained(folder), prompts)
    assert tokens(found, "beside") != tokens(found, "answers")


def test_a_run_on_rewards_answers_the_rows_that_it_held_out(rlexp: Callable[..., Any], tmp_path: Path) -> None:
    """Whatever limit of an answer is typed, though prompts that leave no room for the run's own limit were dropped; and
    beside a reference that is asked for."""
    base = untied(tmp_path / "base")
    rows = (json.dumps({"prompt": (place + 1) * "a", "answer": "1"}) for place in range(40))
    (tmp_path / "rows.jsonl").write_text("".join(f"{row}\n" for row in rows))
    done = rlexp("model=hf", f"model.path={base}", "launch.device=cpu", "logger=none", "hydra.run.dir=run", "loss=grpo",
                 "loss.beta=0.1", "reward=rule", "reward.rule=arithmetic", "data=jsonl", "data.path=rows.jsonl",
                 "data.eval_size=4", "data.max_length=64", "data.too_long=drop", "rollout.max_new_tokens=40",
                 "rollout.batch_size=4", "rollout.n_samples=2", "train.batch_size=8", "train.max_steps=1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    done = warm.run("rlexp.generate", ["run", "--jsonl", "own.jsonl", "--beside", "none"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    own = [json.loads(line)["origin"] for line in (tmp_path / "own.jsonl").read_text(encoding="utf-8").splitlines()]
    found = generated(tmp_path, "run", "--beside", "reference", f"reference.path={base}")
    assert [each["origin"] for each in found] == own
    assert max(len(each["prompt"]) for each in found) <= 64 - 40
    prompts = [each["prompt"] for each in found]
    assert tokens(found, "beside") == likeliest(loaded(base), AutoTokenizer.from_pretrained(base), prompts)


@pytest.mark.slow
def test_samples_and_a_reference(rlexp: Callable[..., Any], tmp_path: Path) -> None:
    """Two samples of a prompt differ, and are the same on any ring; the reference answers as by itself."""
    for name in ("one", "two"):
        untied(tmp_path / name)
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    weights.model.embed_tokens.weight.data.mul_(-1)
    weights.save_pretrained(tmp_path / "two")
    asked = ("model=hf", "model.path=one", "--prompt", QUESTIONS[0], "--samples", "2", "rollout.temperature=1.5")
    found = generated(tmp_path, *asked, "reference.path=two")
    first, second = tokens(found, "answers")
    assert first != second
    assert tokens(generated(tmp_path, *asked, "parallel=ring2"), "answers") == [first, second]
    other = json.loads((tmp_path / "two" / "config.json").read_text()) | {"vocab_size": 300}
    alone = generated(tmp_path, *asked, "model.path=two")
    assert tokens(found, "beside") == tokens(alone, "answers") != [first, second]
    (tmp_path / "two" / "config.json").write_text(json.dumps(other))
    done = warm.run("rlexp.generate", [*asked, "reference.path=two", "launch.device=cpu"], cwd=tmp_path)
    assert "reference.path=two: has a vocabulary of 300 tokens, and the policy of 259." in done.stderr


@pytest.mark.parametrize(
    "words", [["loss=dpo"], ["loss=kto", "data.unpair=true"], ["loss=kto"], ["loss=sft"], REWARDED]
)
def test_so_many_prompts_are_answered_as_are_asked_for(words: Sequence[str]) -> None:
    """Each once, whatever a held-out row is read as: both answers of a pair that is unpaired have one prompt."""
    cfg = compose_config(["launch.device=cpu", "data.size=8", "data.eval_size=5", *words])
    tokenizer = byte_tokenizer()
    examples = read_examples(cfg, tokenizer, World(0, 1, ALONE), trains=False)
    for rows in (1, 2, 4, 5, 9, None):
        job = GenerateJob(cfg, folder=None, beside=Beside.none, given=False, rows=rows, room=0)
        found = prompts_of(job, cfg, examples, tokenizer)
        wanted = range(min(5, rows or 5))
        origins = [each.origin.removesuffix(" (chosen)") for each in found]
        assert origins == [f"synthetic eval pair {place}" for place in wanted]
        assert [each.index for each in found] == [*wanted]


@pytest.mark.parametrize("given", [False, True])
def test_only_the_rows_that_are_answered_are_read(given: bool, tmp_path: Path) -> None:
    path = write_lines(tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    cfg = compose_config(["launch.device=cpu", "data=jsonl", f"data.path={path}", f"data.eval_path={path}"])
    job = GenerateJob(cfg, folder=None, beside=Beside.none, given=given, rows=None, room=0)
    examples = examples_of(job, cfg, byte_tokenizer(), World(0, 1, ALONE))
    assert (len(examples.train), len(examples.held_out)) == (0, 1)


def test_an_answer_s_room_is_made_where_it_is_lacking() -> None:
    cfg = compose_config(["launch.device=cpu", "rollout.max_new_tokens=9"])
    assert [with_room(cfg, room).data.max_length - cfg.data.max_length for room in (7, 9, 10)] == [2, 0, 0]


# ---- what is typed beside a run ----

HAD: dict[str, Any] = {
    "seed": 4, "train.precision": "fp64", "model.chat_template": "zephyr", "adapter.alpha": 24.0, "data.eval_size": 5,
    "data.max_length": 96, "rollout.max_new_tokens": 9, "rollout.temperature": 0.9, "rollout.top_k": 7,
    "rollout.top_p": 0.8, "rollout.min_p": 0.1,
}  # fmt: skip
OWN = {"launch.nproc": 1, "parallel.ring_size": 1, "engine.name": "torch"}  # of the command, not of the run


@pytest.fixture(scope="module")
def run_of_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that draws, beside models and files of rows."""
    place = tmp_path_factory.mktemp("keys")
    for name in ("base", "other"):
        untied(place / name)
    for name in ("held.jsonl", "asked.jsonl"):
        (place / name).write_text("".join(json.dumps({"prompt": f"{name} {row}"}) + "\n" for row in range(3)))
    own = ("launch.nproc=2", "parallel=ring2", "engine=fsdp2", *(f"{key}={value}" for key, value in HAD.items()))
    a_run_of(place, "loss=grpo", "reward.rule=length", "model=hf", f"model.path={place}/base", "adapter=lora", *own)
    return place


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, run_of_keys: Path) -> Callable[..., tuple[GenerateJob, list[str]]]:
    """Take a command line in that folder, and return what it asks for: the job, and the rows of prompts given."""
    kept: list[tuple[GenerateJob, list[str]]] = []

    def keep(_: object, job: GenerateJob) -> list[Answered]:
        place = held(job, "data.path")["data.path"] if job.given else os.devnull
        kept.append((job, Path(place).read_text().splitlines()))
        return []

    def ask(*words: str) -> tuple[GenerateJob, list[str]]:
        monkeypatch.setattr(sys, "argv", ["rlexp.generate", *words, "launch.device=cpu"])
        assert main() == 0
        return kept[-1]

    monkeypatch.chdir(run_of_keys)
    monkeypatch.setattr("rlexp.eval.job.on_ranks", keep)
    return ask


def held(job: GenerateJob, *keys: str) -> dict[str, Any]:
    plain = to_plain(job.cfg)
    return {key: value_of(plain, key) for key in keys}


@pytest.mark.parametrize(
    ("typed", "layout"),
    [
        ({"seed": 1, "rollout.temperature": 0.7, "rollout.min_p": 0.0, "adapter.alpha": 8.0, "data.eval_size": 3}, {}),
        ({"rollout.top_k": 3, "rollout.top_p": 0.6, "rollout.max_new_tokens": 60, "model.chat_template": "vicuna",
          "train.precision": "fp32", "data.max_length": 80},
         {"launch.nproc": 4, "parallel.ring_size": 2, "engine.name": "zero3"}),
    ],
)  # fmt: skip
def test_keys_typed_beside_a_run_replace_those_of_the_run_alone(
    asked: Callable[..., Any], typed: dict[str, Any], layout: dict[str, Any]
) -> None:
    """And the layout is the command's own. Which rows are held out depends on the run's own limit of an answer."""
    words = (f"{key.removesuffix('.name')}={value}" for key, value in {**typed, **layout}.items())
    job, _ = asked("run", "--samples", "3", *words)
    assert held(job, *HAD) == {**HAD, **typed}
    assert held(job, *OWN) == {**OWN, **layout}
    assert job.room == HAD["rollout.max_new_tokens"]


def test_options_typed_beside_a_run_say_whose_answers_and_to_what(asked: Callable[..., Any]) -> None:
    greedy = {"rollout.n_samples": 1, "rollout.temperature": 1.0, "rollout.top_k": 1, "rollout.top_p": 1.0}
    job, _ = asked("run")
    assert (job.beside, job.given, job.rows, held(job, *greedy)) == (Beside.start, False, 4, greedy)
    job, _ = asked("run", "--rows", "10", "--samples", "2", "--beside", "none", "data=jsonl",
                   "data.eval_path=held.jsonl")  # fmt: skip
    assert (job.beside, job.given, job.rows) == (Beside.none, False, 10)
    wanted = {"data.path": "held.jsonl", "rollout.n_samples": 2, "model.path": f"{Path.cwd()}/base"}
    assert held(job, *wanted) == wanted
    job, rows = asked("--prompt", "One?", "run", "--prompt", "Two?", "data.system=Be brief.", "model.path=other")
    assert (job.given, job.rows, rows) == (True, None, ['{"prompt": "One?"}', '{"prompt": "Two?"}'])
    assert held(job, "data.system", "model.path") == {"data.system": "Be brief.", "model.path": "other"}
    job, rows = asked("run/checkpoints/step-00000001", "--prompts", "asked.jsonl", "--rows", "2", "--beside",
                      "reference", "reference=model", "reference.path=other")  # fmt: skip
    assert (job.given, job.rows, rows) == (True, 2, Path("asked.jsonl").read_text().splitlines())
    assert (job.beside, held(job, "reference.path")) == (Beside.reference, {"reference.path": "other"})


# ---- words ----


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapter" / "model").mkdir(parents=True)
    (tmp_path / "adapter" / "model" / "adapter_config.json").write_text("{}")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("\n \n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "given", "said"),
    [
        ([], {}, "rlexp.generate: there is no prompt. Type one (--prompt TEXT), or name a file"),
        ([], {"prompts": ["hi", " "]}, "--prompt: one is empty. Type a text."),
        ([], {"file": Path("none.txt")}, "--prompts=none.txt: cannot be read (No such file or directory)."),
        ([], {"file": Path("blank.txt")}, "--prompts=blank.txt: has no prompt. Write one on each line."),
        ([], {"file": Path("none.jsonl")}, "data.eval_path=none.jsonl: no such file."),
        (["nowhere"], {"prompts": ["hi"]}, "nowhere: no such folder. Give a run's folder, or a checkpoint's."),
        (["~data"], {}, "~data: no such folder. Give a run's folder, or a checkpoint's."),
        (["empty"], {}, "is neither a checkpoint nor a run that has one (checkpoints/step-…). Give the folder that"),
        (["whole"], {}, "whole holds a model: model=hf model.path=whole."),
        (["adapter"], {}, "adapter/model holds an adapter: model=hf model.path=NAME adapter=lora "
         "adapter.path=adapter/model."),
        (["one", "two"], {"prompts": ["hi"]}, "one two: is more than one folder."),
        (["loss=reward"], {"prompts": ["hi"]}, "loss=reward: its model gives a score to an answer"),
        (["data.eval_size=0"], {}, "rlexp.generate: there is no held-out data."),
        (["model=tiny"], {"prompts": ["hi"], "beside": Beside.start}, "--beside=start: a model alone has no other"),
        (["model=tiny"], {"prompts": ["hi"], "beside": Beside.reference}, "--beside=reference: reference.path has no"),
        (["rollout.max_new_tokens=0"], {"prompts": ["hi"]}, "rollout.max_new_tokens=0: must be at least 1."),
    ],
)  # fmt: skip
def test_wrong_words_are_one_message(words: list[str], given: dict[str, Any], said: str, folder: Path) -> None:
    with pytest.raises(UserError) as refusal:
        job_of(words if any("=" not in each for each in words) else ["launch.device=cpu", *words], folder, **given)
    assert said in str(refusal.value)


@pytest.mark.parametrize(("length", "most", "said"), [
    (255, 255, "the prompt has 255 tokens, and the model has 256 positions for it and an answer of "
     "rollout.max_new_tokens=256. Use rollout.max_new_tokens=1, or a shorter prompt."),
    (256, 256, "rollout.max_new_tokens=256. Give a shorter prompt."),
    (120, 100, "the prompt has 120 tokens, and data.max_length − rollout.max_new_tokens leaves it 100."),
])  # fmt: skip
def test_a_prompt_that_leaves_no_room_is_refused(length: int, most: int, said: str, tmp_path: Path) -> None:
    """A model of 256 positions. A prompt may be as long as data.max_length says, if an answer still fits."""
    base = untied(tmp_path / "base")
    config = json.loads((base / "config.json").read_text()) | {"max_position_embeddings": 256}
    (base / "config.json").write_text(json.dumps(config))
    done = warm.run("rlexp.generate", ["model=hf", "model.path=base", "--prompt", length * "a", "launch.device=cpu",
                                       f"data.max_length={most}"], cwd=tmp_path)  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith(f"rlexp: prompt:1: the prompt has {length} tokens")
    assert said in done.stderr


def test_a_folder_is_no_file_to_write(tmp_path: Path) -> None:
    done = warm.run("rlexp.generate", ["model=tiny", "--prompt", "hi", "--jsonl", "."], cwd=tmp_path)
    assert (
        done.stderr
        == "rlexp: --jsonl=.: cannot be written (Is a directory). Give a file in a folder where you may write.\n"
    )


# ---- the terminal ----


def test_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((44, 24)))
    cfg = compose_config(["launch.device=cpu"])
    shown = GenerateJob(cfg, folder=Path("run"), beside=Beside.start, given=False, rows=4, room=0)
    found = [Answered("a.jsonl:3", "Say\x1b it\ntwice.", [Reply("One. " * 9, [5] * 9, True)], [Reply("", [2], True)]),
             Answered("a.jsonl:4", "Go on.", [Reply("On", [1, 2], False)], [Reply("No", [3], True)])]  # fmt: skip
    assert report.text(shown, found) == (
        "\n"
        "a.jsonl:3\n"
        "  prompt   Say\\x1b it\n"
        "           twice.\n"
        "  start    (nothing)\n"
        "  trained  One. One. One. One. One. One.\n"
        "           One. One. One.\n"
        "\n"
        "a.jsonl:4\n"
        "  prompt   Go on.\n"
        "  start    No\n"
        "  trained  On … (cut off after 2 tokens)\n"
    )
