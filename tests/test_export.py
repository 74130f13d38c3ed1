"""A run exports a model like any other: transformers alone loads it, without this package."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from rlexp.checkpoint.folder import check_sizes, latest_first
from rlexp.checkpoint.tensors import Reader
from rlexp.model.loading import byte_tokenizer
from tests import warm

Shell = Callable[..., subprocess.CompletedProcess[str]]
QUICK = ("launch.device=cpu", "logger=none", "hydra.run.dir=run", "train.max_steps=1", "parallel=ring2", "data.size=16",
         "data.eval_size=0", "train.batch_size=4")  # fmt: skip

# A process that cannot import this package, so that transformers alone loads the model.
PLAIN = """
import sys, json
sys.modules["rlexp"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for place in sys.argv[1:]:
    model, info = AutoModelForCausalLM.from_pretrained(place, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(place)
    ids = tokenizer("list the words", return_tensors="pt")
    text = tokenizer.decode(model.generate(**ids, max_new_tokens=4, do_sample=False)[0])
    tied = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    print(json.dumps([sorted(map(str, info["missing_keys"])), sorted(map(str, info["unexpected_keys"])),
                      str(model.dtype), text, tied]))
"""


def loaded_plainly(*places: Path) -> list[tuple[list, list, str, str, bool]]:
    answer = subprocess.run(
        [sys.executable, "-c", PLAIN, *map(str, places)],
        cwd=places[0], capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    return [tuple(json.loads(line)) for line in answer.stdout.splitlines()[-len(places) :]]


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """A model whose head is its embedding, with its own template and generation configuration."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path / "tied")
    tokenizer.save_pretrained(tmp_path / "tied")
    return tmp_path / "tied"


@pytest.mark.slow
def test_a_tied_head_stays_tied(rlexp: Shell, tmp_path: Path, tied: Path) -> None:
    places = [tmp_path / engine for engine in ("torch", "zero1", "zero3", "fsdp2")]
    for place in places:
        answer = rlexp(*QUICK, f"engine={place.name}", "model=hf", f"model.path={tied}", f"hydra.run.dir={place.name}")
        assert answer.returncode == 0, answer.stderr
    for place, loaded in zip(places, loaded_plainly(*(place / "model" for place in places)), strict=True):
        missing, unexpected, dtype, text, is_tied = loaded
        assert (missing, unexpected, dtype, is_tied) == ([], [], "torch.float32", True)
        assert len(text) > len("list the words")
        written = load_file(place / "model" / "model.safetensors")
        last = latest_first(place)[0]
        reader = Reader(last, check_sizes(last))
        assert set(written) == set(reader.shapes)
        assert all(torch.equal(tensor, reader.whole("weight", name)) for name, tensor in written.items())
        assert json.loads((place / "model" / "generation_config.json").read_text())["temperature"] == 0.7
        assert (place / "model" / "chat_template.jinja").read_text().startswith("{% for m in messages")


@pytest.mark.slow
def test_a_checkpoint_is_exported_by_hand(rlexp: Shell, tmp_path: Path, tied: Path) -> None:
    """It has another dtype, and frozen parameters, which come from the model that the run began with."""
    freeze = "model.freeze=['model.norm.*', 'model.layers.0.*']"
    answer = rlexp(*QUICK, "engine=zero3", "model=hf", f"model.path={tied}", "checkpoint.export=false", freeze)
    assert answer.returncode == 0, answer.stderr

    def export(*args: str) -> subprocess.CompletedProcess[str]:
        return warm.run("rlexp.export", args, tmp_path)

    done = export("run", "--dtype", "bf16")
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("/run/model-step-00000001\n")
    place = tmp_path / "run" / "model-step-00000001"
    ((missing, unexpected, dtype, _, is_tied),) = loaded_plainly(place)
    assert (missing, unexpected, dtype, is_tied) == ([], [], "torch.bfloat16", True)
    written, began = load_file(place / "model.safetensors"), load_file(tied / "model.safetensors")
    assert torch.equal(written["model.norm.weight"], began["model.norm.weight"].bfloat16())
    last = latest_first(tmp_path / "run")[0]
    trained = Reader(last, check_sizes(last)).whole("weight", "model.embed_tokens.weight")
    assert torch.equal(written["model.embed_tokens.weight"], trained.bfloat16())
    assert not torch.equal(trained, began["model.embed_tokens.weight"])
    for args, said in (
        (("run",), "run/model-step-00000001: exists already"),
        (("nowhere",), "nowhere: no such folder"),
        ((str(tied),), "is neither a checkpoint nor a run that has one"),
    ):
        refused = export(*args)
        assert refused.returncode == 1
        assert said in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    state = next(last.glob("state-*"))
    state.write_bytes(state.read_bytes()[:-1] + b"\xff")
    refused = export("run", "--out", "other")
    assert refused.returncode == 1
    assert "SHA-256 differs" in refused.stderr


@pytest.mark.slow
def test_an_untied_head_is_exported_too(rlexp: Shell, tmp_path: Path) -> None:
    answer = rlexp(*QUICK, "engine=zero3", "train.precision=bf16")
    assert answer.returncode == 0, answer.stderr
    ((missing, unexpected, dtype, _, is_tied),) = loaded_plainly(tmp_path / "run" / "model")
    assert (missing, unexpected, dtype, is_tied) == ([], [], "torch.bfloat16", False)


@pytest.mark.slow
def test_a_policy_with_a_critic_is_exported_without_it(rlexp: Shell, tmp_path: Path) -> None:
    """The run's own export and the export of its checkpoint hold the same policy."""
    sizes = ("loss=ppo", "reward.rule=length", "rollout.batch_size=4", "rollout.n_samples=2", "data.max_length=160")
    answer = rlexp(*QUICK, *sizes, "rollout.max_new_tokens=4", "data.eval_size=0", "engine=torch")
    assert answer.returncode == 0, answer.stderr
    exported = warm.run("rlexp.export", ["run", "--out", "late"], tmp_path)
    assert exported.returncode == 0, exported.stderr
    last = latest_first(tmp_path / "run")[0]
    assert any(name.startswith("critic.") for name in Reader(last, check_sizes(last)).shapes)
    one, other = (load_file(tmp_path / place / "model.safetensors") for place in ("run/model", "late"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    ((missing, unexpected, *_),) = loaded_plainly(tmp_path / "late")
    assert (missing, unexpected) == ([], [])
