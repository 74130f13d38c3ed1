"""A run exports a model like any other: transformers alone loads it, without this package."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from bench.resume import Where, run
from rlexp.base.errors import ModelError
from rlexp.config.load import compose_config
from rlexp.config.schema import Config, ExportDtype, HFModelConfig
from rlexp.export.__main__ import main
from rlexp.export.checkpoint import _at_its_commit, export_checkpoint
from rlexp.launch.joining import RankSpec, join, launch_on, leave_world
from rlexp.launch.local import RankFailed, run_ranks
from rlexp.run_files.checkpoint_folder import check_sizes, latest_first
from rlexp.training.checkpoint.restore import Reader
from rlexp.training.model import export
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.train import export_at_end as exported
from rlexp.training.train.build import build
from rlexp.training.train.surroundings import UNPROBED
from tests.conftest import Shell
from tests.helpers import warm
from tests.helpers.adapters import adapter_of
from tests.helpers.models import in_float64, saved
from tests.helpers.programs import python

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
    answer = python("-c", PLAIN, *map(str, places), cwd=places[0])
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


@pytest.mark.slow
def test_colleagues_may_read_the_weights_as_they_may_read_all_else(tmp_path: Path) -> None:
    (tmp_path / "else").touch()
    export.save_tensors({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert {each.name: each.stat().st_mode for each in tmp_path.iterdir()} == dict.fromkeys(
        ("else", "model.safetensors"), (tmp_path / "else").stat().st_mode
    )


def test_float64_is_rounded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter is merged into frozen weights in float64, at the end of a run and from its checkpoint alike. Without
    them it is written as it is, of the checkpoint and in the dtype that are named."""
    model = saved(tmp_path / "model")
    frozen = in_float64(model, 1)
    adapter = adapter_of(model, tmp_path / "adapter")
    in_float64(adapter, 2)
    place = run(Where("torch", 1, 1, "fp64"), tmp_path / "run", "model=hf", f"model.path={model}", "adapter=lora",
                f"adapter.path={adapter}", "checkpoint.export=merged", "data.eval_size=0", "train.eval_every=null",
                "train.max_steps=2", "checkpoint.save_every=1")  # fmt: skip
    unfinished = tmp_path / ".later-unfinished"
    unfinished.mkdir()
    (unfinished / "model-00009.safetensors").touch()  # of an export that was killed
    at_end, later = content(place / "model"), content(export_checkpoint(place, tmp_path / "later", ExportDtype.auto,
                                                                        merged=True))  # fmt: skip
    assert not (tmp_path / "later" / "model-00009.safetensors").exists()

    def broken(out: Any, *_: Any) -> None:
        out._place.mkdir()
        raise OSError("broken")

    with monkeypatch.context() as patch:
        patch.setattr("rlexp.export.checkpoint.export", broken)
        with pytest.raises(OSError, match="broken"):
            export_checkpoint(place, tmp_path / "last", ExportDtype.auto, merged=True)
    assert not [*tmp_path.glob(".*")]
    assert at_end.keys() == later.keys() == frozen.keys()
    assert all(torch.equal(at_end[name], later[name]) for name in at_end)
    assert torch.equal(at_end["model.norm.weight"], frozen["model.norm.weight"].float())
    for at in latest_first(place):
        written = content(export_checkpoint(at, tmp_path / at.name, ExportDtype.fp16))
        trained = Reader(at, check_sizes(at))
        meant = {f"base_model.model.{name.replace('.default', '')}": trained.whole("weight", name).half()
                 for name in trained.shapes}  # fmt: skip
        assert written.keys() == meant.keys()
        assert all(torch.equal(written[name], weight) for name, weight in meant.items())
    assert len(latest_first(place)) == 2


def test_each_option_replaces_its_default_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr("rlexp.export.checkpoint.export_checkpoint", lambda source, out, dtype, **more: asked.update(
        source=source, out=out, dtype=dtype, **more))  # fmt: skip
    default = {"source": Path("run"), "out": None, "dtype": ExportDtype.auto, "merged": False, "trusted": False}
    cases: dict[str, dict[str, Any]] = {
        "": {}, "--out there": {"out": Path("there")}, "--dtype fp32": {"dtype": ExportDtype.fp32},
        "--merged": {"merged": True}, "--trust-remote-code": {"trusted": True},
    }  # fmt: skip
    for words, typed in cases.items():
        monkeypatch.setattr(sys, "argv", ["rlexp.export", "run", *words.split()])
        assert main() == 0
        assert asked == {**default, **typed}
    assert capsys.readouterr().err == "done: None\n" * len(cases)  # what the stub has returned


def test_a_model_is_exported_as_of_the_commit_of_its_run_or_as_it_is_asked_for(tmp_path: Path) -> None:
    hub = HFModelConfig(path="org/name", revision="branch")
    cfg = dataclasses.replace(compose_config(["launch.device=cpu"]), model=hub)
    checkpoint = tmp_path / "checkpoints" / "step-00000001"
    assert _at_its_commit(cfg, checkpoint) == cfg
    (tmp_path / "run.json").write_text(json.dumps({"data": {"versions": {"model.path": "c0ffee"}}}))
    assert _at_its_commit(cfg, checkpoint).model == dataclasses.replace(hub, revision="c0ffee")
    tiny = compose_config(["launch.device=cpu"])
    assert _at_its_commit(tiny, checkpoint) == tiny


# ---- in shards ----

PIECE = 30_000  # bytes of a file in these tests


def mixture() -> Qwen3MoeForCausalLM:
    """A model whose experts transformers joins when it loads them, and takes apart when it saves them."""
    config = Qwen3MoeConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=3, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, decoder_sparse_step=1,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=3, n_head=4))


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_a_buffer_is_written_as_it_was_loaded(tmp_path: Path) -> None:
    """A run in float64 computes with all of the model in float64."""
    config = Glm4MoeConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2,
        first_k_dense_replace=1,
    )  # fmt: skip
    model = Glm4MoeForCausalLM(config).double()
    export.export(export.Export(model, torch.float32, tmp_path), model.named_parameters(), byte_tokenizer())
    written = content(tmp_path)
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in written


def content(place: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for file in place.glob("*.safetensors") for key, tensor in load_file(file).items()}


@pytest.mark.parametrize("make", [llama, gpt2, mixture])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_hold_what_transformers_would_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], dtype: torch.dtype
) -> None:
    """The host holds one file and one parameter at a time. A small model stays one file, equal to the byte."""
    torch.manual_seed(0)
    model = make()
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    tokenizer = byte_tokenizer()
    export.export(export.Export(model, dtype, tmp_path / "whole"), weights.items(), tokenizer)
    monkeypatch.setattr(export, "SHARD", PIECE)
    most, write = 0, export.Export.write

    def watched(self: export.Export) -> None:
        nonlocal most
        most = max(most, sum(tensor.nbytes for tensor in (*self._held.values(), *self._ready.values())))
        write(self)

    monkeypatch.setattr(export.Export, "write", watched)
    export.export(export.Export(model, dtype, tmp_path / "parts"), weights.items(), tokenizer)
    model.to(dtype).save_pretrained(tmp_path / "expected")
    expected = content(tmp_path / "expected")

    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 2
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= PIECE
    assert most <= PIECE + max(weight.to(dtype).nbytes for weight in weights.values())
    written = content(tmp_path / "parts")
    assert written.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in written.items())
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {key: file.name for file in files for key in load_file(file)}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in written.values())
    monkeypatch.setattr(export, "SHARD", index["metadata"]["total_size"] - 1)
    export.export(export.Export(model, dtype, tmp_path / "two"), weights.items(), tokenizer)
    two = json.loads((tmp_path / "two" / "model.safetensors.index.json").read_text())
    assert {*two["weight_map"].values()} == {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    one = "model.safetensors"
    assert (tmp_path / "whole" / one).read_bytes() == (tmp_path / "expected" / one).read_bytes()
    for place in ("whole", "parts"):
        again, info = type(model).from_pretrained(tmp_path / place, output_loading_info=True)
        assert (info["missing_keys"], info["unexpected_keys"], again.dtype) == (set(), set(), dtype)
        for name, weight in again.named_parameters():
            assert torch.equal(weight, weights[name].to(dtype))


def test_a_conversion_that_needs_a_whole_layer_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models' files hold queries, keys and values as one tensor; no shard may cut through it."""

    def joined(_model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parts: dict[str, list[torch.Tensor]] = {}
        for name, tensor in sorted(weights.items()):
            parts.setdefault(re.sub("[kqv]_proj", "qkv_proj", name), []).append(tensor)
        return {name: torch.cat(tensors) for name, tensors in parts.items()}

    monkeypatch.setattr(export, "revert_weight_conversion", joined)
    meta = {name: tensor.to("meta") for name, tensor in llama().state_dict().items()}
    groups = export._converted_together(llama(), meta)
    assert [len(group) for group in groups] == [1, 9, 9, 9, 1, 1]
    assert [name for group in groups for name in group] == list(meta)
    monkeypatch.setattr(
        export,
        "revert_weight_conversion",
        lambda _, weights: {"all": torch.cat([*map(torch.flatten, weights.values())])},
    )
    assert export._converted_together(llama(), meta) == [list(meta)]


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    model = llama()
    del model.model.norm.weight
    with pytest.raises(ModelError, match=r"there are no weights for model\.norm\.weight"):
        export.Export(model, torch.float32, tmp_path / "model")


TIMEOUT = 8.0  # seconds that a collective may take
SLOW = 1.8 * TIMEOUT  # seconds that the disk takes


def exporting(
    spec: RankSpec, cfg: Config, run_dir: Path, fault: str, every: float
) -> tuple[str, dict[str, torch.Tensor]]:
    """Export without having trained, to a disk that has a fault. Return what this rank was told, and its weights."""
    join(spec, launch_on("cpu", TIMEOUT if fault == "slow" else 60.0))
    export.SHARD = PIECE
    exported.EVERY = every
    save, late = export.save_file, []

    def faulty(*args: Any, **kwargs: Any) -> None:
        if fault == "slow" and not late:
            late.append(time.sleep(SLOW))
        if fault == "full" and "00003" in str(args[1]):
            raise OSError(errno.ENOSPC, "No space left on device")
        if fault == "bug":
            raise KeyError("a bug")
        save(*args, **kwargs)

    export.save_file = faulty
    run = build(cfg, around=UNPROBED).run
    weights = {name: weight.clone() for name, weight in run.engine.weights()}
    dist.barrier()
    try:
        exported.export_run(run, run_dir, 3)
    except Exception as error:
        return f"{type(error).__name__}: {error}", weights
    leave_world()
    return "", weights


def exports(tmp_path: Path, fault: str, *, engine: str = "fsdp2", every: float = 1.0) -> list[Any]:
    small = ["logger=none", "train.batch_size=4", "data.size=16", "data.eval_size=0"]
    cfg = compose_config(["launch.device=cpu", "parallel=ring2", f"engine={engine}", *small])
    (tmp_path / "run.json").write_text('{"status": "running"}', encoding="utf-8")
    return run_ranks(exporting, 2, (cfg, tmp_path, fault, every), timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "fsdp2", "zero3"])
def test_ranks_export_in_shards(tmp_path: Path, engine: str) -> None:
    for said, weights in exports(tmp_path, "", engine=engine):
        assert said == ""
        written = content(tmp_path / "model")
        assert written.keys() == weights.keys()
        assert all(torch.equal(tensor, weights[name].float()) for name, tensor in written.items())
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    assert json.loads((tmp_path / "run.json").read_text())["exported_step"] == 3
    assert not (tmp_path / ".model-unfinished").exists()


@pytest.mark.slow
def test_a_disk_slower_than_the_time_out_ends_no_run(tmp_path: Path) -> None:
    """Without word from rank 0 the same disk does end it."""
    assert [said for said, _ in exports(tmp_path, "slow")] == ["", ""]
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    with pytest.raises(RankFailed, match=r"Timed out waiting: no rank has got any further in launch"):
        exports(tmp_path, "slow", every=4 * SLOW)


@pytest.mark.slow
def test_all_ranks_hear_why_nothing_was_written(tmp_path: Path) -> None:
    """The model that was there before stays, and half a model does not."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "older").touch()
    for said, _ in exports(tmp_path, "full"):
        assert said.startswith("CheckpointError: ")
        assert "the trained model could not be written (OSError: [Errno 28] No space left on device)" in said
        assert f"python -m rlexp.export {tmp_path} --out FOLDER" in said
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["older"]
    assert not (tmp_path / ".model-unfinished").exists()
    own, other = (said for said, _ in exports(tmp_path, "bug"))
    assert own == "KeyError: 'a bug'"
    assert other.startswith("RuntimeError: rank 0 failed:\nTraceback")
