"""`python -m rlexp.preflight`, as a user types it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers import warm
from tests.helpers.paths import FILES, ROOT
from tests.helpers.programs import python

MODELS = FILES / "models"
LLAMA = ("model=hf", f"model.path={MODELS / 'llama_8b'}", "hardware=h100", "launch.nproc=8")
GRPO = ("loss=grpo", "data=arithmetic", "reward.rule=arithmetic")
TIMEOUT = 500  # a rehearsal of an 8B model took 254 s beside two other tests


def preflight(*words: str, code: int = 0, fresh: bool = True) -> subprocess.CompletedProcess[str]:
    """What a new Python says, imports included, or one that has imported all already."""
    if fresh:
        done = python("-m", "rlexp.preflight", *words, timeout=TIMEOUT)
    else:
        done = warm.run("rlexp.preflight", words, ROOT, timeout=TIMEOUT)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_a_small_model_on_a_ring_of_2(tmp_path: Path) -> None:
    """It fits, a rank keeps its half of the sequence, and the host waits for nothing in a micro-batch. A ring of one,
    whose two replicas cannot share 3 pairs, is named with the reason."""
    file = tmp_path / "answer.json"
    words = ("model=tiny", "hardware=h100", "launch.nproc=2", "parallel=ring2", "engine=torch", "train.batch_size=3",
             "train.micro_batch_size=1")  # fmt: skip
    told = preflight(*words, "--json", str(file), "--longest", "--verbose", fresh=False)
    assert "\nfits: " in told.stdout
    assert "\nan epoch of 240 rows has 80 steps: at most " in told.stdout
    assert "and a pair that shares its prompt" in told.stdout
    heads = (
        "fits: ", "one change at a time", "longest sequence", "peak memory of rank", "a step of a rank", "sharding:",
    )  # fmt: skip
    places = [told.stdout.index(f"\n{head}") for head in heads]
    assert places == sorted(places)
    assert "train.batch_size=3: 2 replicas × train.micro_batch_size=1 need a multiple of 2." in told.stdout
    answer = json.loads(file.read_text(encoding="utf-8"))
    assert answer["fits"]
    assert answer["longest_sharing"]["2"]["tokens"] > 1.5 * answer["longest"]["2"]["tokens"]
    assert answer["longest"]["elastic"]["refused"].startswith("parallel.cut=all: ")
    here = answer["at_asked_length"]["2"]
    assert here == {"fits": True, "peak_gib": answer["peak_gib"],
                    "estimated_seconds": answer["step"]["estimated_seconds"]}  # fmt: skip
    assert 0 < answer["peak_gib"] < answer["room_gib"]
    assert answer["sharding"]["share"] == 1 / 2
    assert answer["sharding"]["whole"] == {}
    assert [place for place in answer["step"]["host_waits"] if "ring/" in place or "model/" in place] == []


def test_an_elastic_ring_is_shown_beside_fixed_ones() -> None:
    """On the same ranks, a ring of two does the same, and holds each of these short sequences on one rank."""
    words = ("model=tiny", "hardware=h100", "launch.nproc=2", "parallel=elastic", "parallel.cut=auto", "engine=torch",
             "hardware.memory_gib=0.015", "hardware.reserve_gib=0", "train.batch_size=8", "data.max_length=512",
             "train.max_tokens_per_micro_batch=2048")  # fmt: skip
    told = preflight(*words, "--longest", fresh=False).stdout
    assert "\n  elastic ring of 2 (zigzag) × 1 = 2 × h100, " in told
    assert "at 512 tokens: peak        a step     longest" in told
    two, elastic = (re.search(rf"^  {name} +(\d.*)$", told, re.MULTILINE) for name in ("ring of 2", "elastic"))
    assert two
    assert elastic
    assert elastic[1] == f"{two[1]}  (asked)"
    assert re.match(r"[\d.]+ MiB +[\d.]+ ms +[\d,]+ +", two[1])


def test_where_no_single_change_fits_it_says_what_would() -> None:
    words = ("model=tiny", "engine=torch", "adapter=lora", "data.max_length=8192", "train.batch_size=1",
             "hardware=rtx_4090", "hardware.memory_gib=1.52", "launch.nproc=1")  # fmt: skip
    told = preflight(*words, code=1, fresh=False)
    found = re.search(
        r"^no single change of the list below makes it fit\. These do: data\.max_length=(\d+), "
        r"hardware=rtx_4090, hardware=a100_40gb, hardware=l40s, .*\. "
        r"Else try more of these GPUs with a larger parallel\.ring_size, or a smaller model\.$",
        told.stdout,
        re.MULTILINE,
    )
    assert found, told.stdout
    assert 0 < int(found[1]) < 8192


@pytest.mark.slow
def test_an_8b_model_on_a_ring_of_8(tmp_path: Path) -> None:
    """With ZeRO-1 a rank holds the whole gradient, and it does not fit; the change that is named does."""
    file = tmp_path / "answer.json"
    asked = (*LLAMA, "parallel=ring8", "engine=zero1", "data.max_length=16384")
    told = preflight(*asked, "--json", str(file), code=1)
    answer = json.loads(file.read_text(encoding="utf-8"))
    assert not answer["fits"]
    assert answer["peak_gib"] > answer["room_gib"]
    assert f"cheapest change that fits: {answer['remedy']}" in told.stdout
    assert answer["sharding"]["share"] == pytest.approx(1 / 8, rel=0.01)
    assert answer["sharding"]["whole"] == {}
    micro_batches = [place for place in answer["step"]["host_waits"] if "ring/" in place or "model/" in place]
    assert micro_batches == []
    again = preflight(*asked, answer["remedy"])
    assert "\nfits: " in again.stdout


@pytest.mark.parametrize(("words", "said"), [
    (("hardware=h900",), "hardware=h900: no such option"), ((), "hardware=auto: no GPU is visible here"),
    (("hardware=h100", "launch.nproc=16", "parallel.ring_size=16"),
     "launch.nproc=16: a node of hardware=h100 has 8 GPUs"),
    (("hardware=h100", "launch.nproc=8", "parallel.ring_size=16"), "parallel.ring_size=16"),
    (("hardware=h100", *GRPO, "rollout.engine=vllm", "rollout.vllm_memory=much"),
     "rollout.vllm_memory='much': must be a share of a GPU's memory"),
    (("hardware=h100", "launch.nproc=2", *GRPO, "rollout=pipelined"), "rollout.mode=pipelined: cannot be rehearsed"),
    (("hardware=h100", "launch.device=cpu"), "launch.device=cpu: preflight predicts runs on GPUs"),
    (("hardware=h100", "hardware.memory_gib=0"), "hardware.memory_gib=0: a prediction needs it"),
    (("--jsn", "x"), "unrecognized arguments: --jsn"),
])  # fmt: skip
def test_wrong_input_gets_one_message(words: tuple[str, ...], said: str) -> None:
    told = preflight(*words, code=1)
    assert told.stdout == ""
    assert said in told.stderr
    assert told.stderr.startswith("rlexp: ")
    assert told.stderr.count("\n") == 1


def test_a_config_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"not": "a model"}', encoding="utf-8")
    told = preflight("model=hf", f"model.path={tmp_path}", "hardware=h100", "launch.nproc=8", code=1)
    begins, wrong = told.stderr.splitlines()
    assert begins == f"rlexp preflight: imports torch, and reads config.json of {tmp_path.name}"
    assert wrong.startswith(f"rlexp: model.path={tmp_path}: no causal model can be loaded")
