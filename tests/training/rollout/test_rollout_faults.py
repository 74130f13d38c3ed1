"""Runs that draw their own samples, through the real command: faults, and the errors that they print."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
from pathlib import Path

import pytest

from rlexp.config.load import compose_config
from rlexp.launch import rank_progress
from rlexp.run_files.metrics_jsonl import read_rows
from tests.conftest import Shell
from tests.helpers import warm
from tests.helpers.refusals import refusal_of
from tests.helpers.runs import descendants, gone, ranks_of, rows_of, run_json, wait_for

RUN = (
    *("launch.device=cpu", "logger=none", "hydra.run.dir=run", "engine=torch", "loss=ppo", "checkpoint.export=false"),
    *("data.size=16", "data.eval_size=0", "data.max_length=160", "rollout.batch_size=8", "rollout.n_samples=2"),
    *("rollout.max_new_tokens=6", "train.max_steps=2", "reward.rule=regex", "reward.pattern='[0-9]'"),
)
REWARDS = """
import os, pathlib, time

def raises(prompts, answers, rows):
    raise ValueError("no such grade")

def fails_for_one(prompts, answers, rows):
    return [1 / 0 if "e" in prompt else 0.0 for prompt in prompts]

def hangs(prompts, answers, rows):
    time.sleep(1000)

def nan(prompts, answers, rows):
    return [float("nan")] * len(prompts)

def too_few(prompts, answers, rows):
    return [0.0] * (len(prompts) - 1)

def words(prompts, answers, rows):
    return ["good"] * len(prompts)

def alike(prompts, answers, rows):
    return [0.5] * len(prompts)

def quits(prompts, answers, rows):
    os._exit(3)

def slow(prompts, answers, rows):
    pathlib.Path("judging").touch()
    time.sleep(5)
    return [0.0] * len(prompts)

def of_length(prompts, answers, rows):
    return [len(answer) / 10 for answer in answers]
"""


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    (tmp_path / "grades.py").write_text(REWARDS, encoding="utf-8")
    return tmp_path


def left_in(folder: Path) -> list[int]:
    """Return the processes whose working folder this is: the ranks of its run and the workers of their rewards."""
    pids = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(place / "cwd")) == folder and "\nState:\tZ" not in (place / "status").read_text():
                pids.append(int(place.name))
        except OSError:
            continue
    return pids


def refused(answer: subprocess.CompletedProcess[str], folder: Path, *said: str) -> None:
    assert answer.returncode == 1, answer.stderr
    for each in said:
        assert each in answer.stderr, answer.stderr
    assert answer.stderr.count("rlexp: ") == 1, answer.stderr
    assert gone(left_in(folder), within=240)


# ---- rewards of the user's own ----


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("raises", ["it raised", "ValueError: no such grade", "(sample "]),
        pytest.param("fails_for_one", ["synthetic", "ZeroDivisionError", "(sample "], marks=pytest.mark.slow),
        ("hangs", ["reward.timeout_seconds=1: ", "has not returned in that time for", "(sample ", "Raise the limit"]),
        ("nan", ["returned nan for", "(sample ", "A finite number is needed"]),
        ("too_few", ["scores for", "samples", "It must return one for each"]),
        pytest.param("words", ["(sample "], marks=pytest.mark.slow),
        pytest.param("quits", ["exit", "3", "(sample "], marks=pytest.mark.slow),
    ],
)
def test_a_reward_that_fails_says_for_which_sample(rlexp: Shell, rewards: Path, function: str, said: list[str]) -> None:
    python = ("reward=python", f"reward.function=grades:{function}",
              f"reward.timeout_seconds={1 if function == 'hangs' else 200}")  # fmt: skip
    own = [part for part in RUN if not part.startswith(("reward.rule", "reward.pattern"))]
    answer = rlexp(*own, "parallel=ring2", *python)
    refused(answer, rewards, f"reward.function=grades:{function}", *said)
    assert "rlexp/training/" not in answer.stderr  # no traceback of rlexp
    assert run_json(rewards / "run")["status"] == "failed"


# ---- samples that teach nothing ----


def weights_of(folder: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def mute(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends every answer at once: all its tokens have one embedding, and only the end's head matches it."""
    import torch

    from rlexp.training.model.loading import load_config, load_model, load_tokenizer

    cfg = compose_config(["launch.device=cpu"]).model
    tokenizer, model = load_tokenizer(cfg), load_model(cfg, load_config(cfg, 160), 160)
    with torch.no_grad():
        weights = dict(model.named_parameters())
        weights["model.embed_tokens.weight"][:] = 1.0
        for name, weight in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        weights["lm_head.weight"].zero_()
        weights["lm_head.weight"][tokenizer.eos_token_id] = 10.0
    folder = tmp_path_factory.mktemp("models") / "mute"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "loss",
    [
        ("loss=ppo",),
        pytest.param(("loss=ppo", "loss.critic=shared"), marks=pytest.mark.slow),
        ("loss=grpo",),
        pytest.param(("loss=gspo",), marks=pytest.mark.slow),
    ],
)
def test_empty_answers_that_are_all_alike_move_no_policy(
    rlexp: Shell, tmp_path: Path, mute: Path, loss: tuple[str, ...]
) -> None:
    """All answers score 0, the critic predicts 0, and the reference equals the policy."""
    more = ("model=hf", f"model.path={mute}", "parallel=ring2", "checkpoint.export=true", "train.precision=fp64")
    answer = rlexp(*RUN, *loss, *more, "optim.lr=1e-3", "checkpoint.export_dtype=fp32")
    assert answer.returncode == 0, answer.stderr
    for row in rows_of(tmp_path / "run"):
        assert all(math.isfinite(value) for value in row.values())
        assert row["train/loss"] == pytest.approx(0, abs=1e-12)
    first = rows_of(tmp_path / "run")[0]
    assert (first["train/response/length"], first["train/response/stopped"]) == (1, 1)
    assert first["train/objective/scores"] == 0
    before, after = weights_of(mute), weights_of(tmp_path / "run" / "model")
    assert before.keys() == after.keys()
    assert all((before[name] - after[name]).abs().max() < 1e-9 for name in before)


def test_without_a_group_of_use_nothing_is_trained_on(rlexp: Shell, rewards: Path) -> None:
    """The answers of each group score the same and are left out, so no sample counts and every count is 0."""
    python = ("loss=grpo", "loss.filter=true", "reward=python", "reward.function=grades:alike")
    own = [part for part in RUN if not part.startswith(("reward.", "loss=", "checkpoint.export"))]
    answer = rlexp(*own, *python, "parallel=ring2", "optim.lr=1e-2", "optim.weight_decay=0")
    assert answer.returncode == 0, answer.stderr
    rows = read_rows(rewards / "run" / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert all(math.isfinite(value) for value in row.values()), row
        assert row["train/loss"] == row["train/grad_norm"] == 0
    assert rows[0]["train/rollout/without_signal"] == 1
    untrained = rlexp(*own, *python, "train.max_steps=1", "optim.lr=0", "hydra.run.dir=still")
    assert untrained.returncode == 0, untrained.stderr
    before, after = weights_of(rewards / "still" / "model"), weights_of(rewards / "run" / "model")
    assert all(bool((before[name] == after[name]).all()) for name in before)


def test_alike_scores_move_only_the_critic(rlexp: Shell, rewards: Path) -> None:
    """The loss is finite. Whitened advantages still differ by the critic's values, so PPO moves."""
    own = [part for part in RUN if not part.startswith("reward.")]
    answer = rlexp(*own, "reward=python", "reward.function=grades:alike", "train.max_steps=4")
    assert answer.returncode == 0, answer.stderr
    rows = read_rows(rewards / "run" / "metrics.jsonl")
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[0]["train/objective/scores"] == 0.5
    assert rows[0]["train/loss/value_avg"] > 0


# ---- prompts ----


def test_a_prompt_longer_than_the_limit(rlexp: Shell, tmp_path: Path) -> None:
    """A prompt may have 32 tokens: 40 less the 8 of the answer."""
    rows = [{"prompt": "p" * (50 if number == 3 else 20)} for number in range(17)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = ("data=jsonl", "data.path=rows.jsonl", "data.max_length=40", "rollout.max_new_tokens=8", "train.max_steps=1")
    own = [part for part in RUN if not part.startswith(("data", "rollout.max", "train.max", "hydra"))]
    error = rlexp(*own, *data, "hydra.run.dir=error", "parallel=ring2")
    refused(error, tmp_path, "rows.jsonl:4: the prompt has 5", "data.too_long=truncate", "rollout.max_new_tokens")
    assert len(error.stderr.splitlines()) == 1
    for how, kept, said in (("drop", 16, "longer than data.max_length"), ("truncate", 17, "kept, but truncated")):
        answer = rlexp(*own, *data, f"data.too_long={how}", f"hydra.run.dir={how}")
        assert answer.returncode == 0, answer.stderr
        assert said in answer.stderr
        assert run_json(tmp_path / how)["data"]["prompts"] == kept


# ---- deaths ----


@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_a_death_while_sampling_leaves_no_process(tmp_path: Path, victim: str) -> None:
    args = [*RUN, "parallel=ring2", "launch.nproc=4", "rollout.max_new_tokens=140", "train.max_steps=1000",
            "data.max_length=300"]  # fmt: skip
    process = warm.start("rlexp", args, tmp_path)
    wait_for(lambda: sampling(tmp_path), process)
    everyone = [process.pid, *descendants(process.pid)]
    os.kill(process.pid if victim == "launcher" else ranks_of(process.pid)[2], signal.SIGKILL)
    _, stderr = process.communicate(timeout=240)
    assert gone(everyone, within=240)
    assert gone(left_in(tmp_path), within=240)
    if victim == "rank":
        assert process.returncode == 1
        assert "SIGKILL" in stderr, stderr
        assert "in its rollout phase" in stderr, stderr
        assert "Traceback" not in stderr
        assert run_json(tmp_path / "run")["status"] == "failed"


def sampling(folder: Path) -> bool:
    """Say whether rank 2 generates: a busy machine builds some ranks later than others."""
    return any(line["phase"] == "rollout" for line in rank_progress.read(folder / "run") if line["rank"] == 2)


def test_a_rank_that_dies_while_rewards_are_judged_takes_their_workers_along(rewards: Path) -> None:
    own = [part for part in RUN if not part.startswith("reward.")]
    process = warm.start("rlexp", [*own, "parallel=ring2", "reward=python", "reward.function=grades:slow"], rewards)
    wait_for((rewards / "judging").exists, process)
    assert len(left_in(rewards)) > 3
    os.kill(ranks_of(process.pid)[0], signal.SIGKILL)
    process.communicate(timeout=240)
    assert process.returncode == 1
    assert gone(left_in(rewards), within=240)


# ---- configurations ----


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("rollout.batch_size=7",), ["train.batch_size=8", "rollout.batch_size=7", "Use train.batch_size=7 or 14"]),
        (("loss=grpo", "rollout.n_samples=1"), ["rollout.n_samples=1: ", "loss=grpo", "Use rollout.n_samples=2"]),
        (("rollout.temperature=0",), ["rollout.temperature=0", "must be greater than 0"]),
        (("reward.rule=colour",), ["reward.rule", "colour", "count"]),
        (("reward.pattern='['",), ["reward.pattern=[: ", "is no regular expression"]),
        (("reward.rule=count",), ["reward.text: has no value", "reward.rule=count", "Give reward.text=TEXT"]),
        (("data=arithmetic", "loss=dpo"), ["data=arithmetic: ", "loss=dpo", "Use data=synthetic"]),
        (("rollout.max_new_tokens=160",), ["rollout.max_new_tokens=160", "data.max_length=160", "Raise"]),
        (("rollout.sampling_ranks=1", "launch.nproc=2"), ["rollout.sampling_ranks=1", "colocated", "Use"]),
        (("reward=python",), ["reward.function"]),
        (("reward=python", "reward.function=nowhere:f"), ["reward.function=nowhere:f", "there is no module nowhere"]),
        (("data.drop_last=false",), ["data.drop_last=false: ", "Leave data.drop_last=true"]),
        (("rollout.top_p=0",), ["rollout.top_p=0", "must be greater than 0 and at most 1"]),
        (("rollout.stop=['']",), ["rollout.stop", "empty text"]),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)
def test_what_cannot_be_is_refused_by_its_composition(args: tuple[str, ...], said: list[str]) -> None:
    """In one message, which is what the command prints."""
    own = list(RUN)
    if "loss=dpo" in args:
        own = [part for part in RUN if not part.startswith(("loss", "rollout", "reward"))]
    if "reward=python" in args:
        own = [part for part in RUN if not part.startswith("reward")]
    message = refusal_of([*(part for part in own if not part.startswith("hydra.")), *args])
    assert "\n" not in message
    for each in said:
        assert each in message
