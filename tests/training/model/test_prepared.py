"""Models whose files are made once on a machine: new tokens, GGUF files; whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PhiConfig, PreTrainedConfig

from rlexp.base.errors import ModelError
from rlexp.base.made_once import META
from rlexp.config.checks.layout import heads_of
from rlexp.config.schema import HFModelConfig, TinyModelConfig
from rlexp.config.schema.models import WeightsDtype
from rlexp.launch.joining import RankSpec
from rlexp.training.model import loading, prepared
from rlexp.training.model.export import Export, export
from rlexp.training.model.loading import load_config, load_model, load_tokenizer
from rlexp.training.model.prepared import commit_of
from tests.conftest import ROOT, shared_folder
from tests.helpers import warm
from tests.helpers.models import NEW, SHAPE, cache, hf, made, saved, smollm2, weights_in
from tests.helpers.ranks import on_ranks

__all__ = ["cache"]  # a fixture of every test here too

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


# ---- new tokens ----

FORMS: dict[str, tuple[PreTrainedConfig, str, set[str]]] = {
    "untied, one file": (LlamaConfig(**SHAPE), "1GB", {"model.embed_tokens.weight", "lm_head.weight"}),
    "untied, in shards": (LlamaConfig(**SHAPE), "40KB", {"model.embed_tokens.weight", "lm_head.weight"}),
    "tied, one file": (LlamaConfig(**SHAPE, tie_word_embeddings=True), "1GB", {"model.embed_tokens.weight"}),
    "tied, in shards": (LlamaConfig(**SHAPE, tie_word_embeddings=True), "40KB", {"model.embed_tokens.weight"}),
    "a head with a bias": (PhiConfig(**SHAPE), "40KB", {"model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_new_tokens_get_the_mean_row_and_nothing_else_changes(form: str, tmp_path: Path) -> None:
    config, shard, tables = FORMS[form]
    source = saved(tmp_path / "model", config, shard=shard)
    place = made(hf(source, add_tokens=NEW))
    before, after = weights_in(source), weights_in(place)
    assert before.keys() == after.keys()
    for name, old in before.items():
        assert torch.equal(after[name][: len(old)], old), name
        if name in tables:
            assert len(after[name]) == 262
            mean = old.double().mean(0).float()
            assert all(torch.allclose(row, mean, rtol=1e-6, atol=0) for row in after[name][259:])
            assert torch.equal(after[name][259], after[name][261])
        else:
            assert old.shape == after[name].shape
    if shard == "40KB":
        kept = [file for file in source.glob("*.safetensors") if not set(load_file(file)) & tables]
        assert kept, "all files hold an embedding"
        assert all((place / file.name).samefile(file) for file in kept)
        index = json.loads((place / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    model, info = AutoModelForCausalLM.from_pretrained(place, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(place)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert tokenizer("a<tool>b été")["input_ids"][1:4:2] == [259, 261]
    assert tokenizer.decode([259, 261, 260]) == "<tool> été</tool>"
    ids = torch.tensor([[5, 80, 90]])
    logits = model(ids).logits
    torch.testing.assert_close(logits[..., :259], AutoModelForCausalLM.from_pretrained(source)(ids).logits)
    assert bool(model(torch.tensor([[259, 260]])).logits.isfinite().all())


def test_rows_to_spare_are_used_and_no_weights_are_written(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", LlamaConfig(**SHAPE | {"vocab_size": 262}))
    place = made(hf(source, add_tokens=NEW))
    assert (place / "model.safetensors").samefile(source / "model.safetensors")
    assert load_config(hf(place), 512).vocab_size == 262
    assert not (place / "tokenizer.json").samefile(source / "tokenizer.json")
    assert len(AutoTokenizer.from_pretrained(source)) == 259
    assert AutoTokenizer.from_pretrained(place).convert_tokens_to_ids(NEW) == [259, 260, 261]


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_in_an_old_format_grows_by_way_of_transformers(tied: bool, tmp_path: Path) -> None:
    source = saved(tmp_path / "model", LlamaConfig(**SHAPE, tie_word_embeddings=tied))
    before = weights_in(source)
    torch.save(before, source / "pytorch_model.bin")
    new = weights_in(made(hf(source, add_tokens=NEW)))
    (source / "model.safetensors").unlink()
    place = made(hf(source, add_tokens=NEW))
    old = weights_in(place)
    assert old.keys() == new.keys() == before.keys()
    assert all(torch.equal(old[name], new[name]) for name in new)
    assert len(AutoTokenizer.from_pretrained(place)) == 262


def test_a_pickle_of_more_than_tensors_is_refused_and_not_run(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", LlamaConfig(**SHAPE))
    (source / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Runs(str(tmp_path / "ran"))}, source / "pytorch_model.bin")
    with pytest.raises(ModelError) as error:
        loading._from_hub(AutoModelForCausalLM, str(source), False, key="model.path")
    assert "model.path=" in str(error.value)
    assert "Give a model whose weights are safetensors." in str(error.value)
    assert not (tmp_path / "ran").exists()


class Runs:
    """What makes a file when it is unpickled."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.file),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mean_row_is_added_up_in_the_order_of_rows(dtype: torch.dtype) -> None:
    table = torch.randn(2500, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    total = np.zeros(3)
    for row in table.double().numpy():
        total = total + row
    assert torch.equal(prepared.mean_row(table), torch.from_numpy(total / 2500).to(dtype))
    assert torch.equal(prepared.mean_row(table[:, 0]), prepared.mean_row(table)[0])


# ---- made once, whole or not at all ----


def test_a_model_of_which_nothing_is_asked_is_loaded_where_it_is(tmp_path: Path, cache: Path) -> None:
    cfg = hf(tmp_path / "nowhere", revision="v1", dtype=WeightsDtype.bf16)
    assert prepared.prepared(cfg) == cfg
    assert prepared.prepared(TinyModelConfig()) == TinyModelConfig()
    assert not cache.exists()


def test_the_same_folder_is_found_and_other_contents_get_another(tmp_path: Path) -> None:
    source = saved(tmp_path / "model")
    cfg = hf(source, add_tokens=NEW)
    place = made(cfg)
    stamp = place.stat().st_mtime_ns
    assert made(cfg) == place
    assert place.stat().st_mtime_ns == stamp
    assert made(hf(source, add_tokens=NEW[:1])) != place
    (source / "config.json").write_text((source / "config.json").read_text().replace("1024", "2048"))
    assert made(cfg) != place
    unseen = made(cfg)
    stat = (source / "model.safetensors").stat()
    os.utime(source / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))  # perhaps beside the samples
    assert made(cfg) not in (place, unseen)


@pytest.mark.parametrize("harm", ["truncated", "deleted", "manifest"])
def test_a_torn_folder_is_made_again(harm: str, tmp_path: Path) -> None:
    cfg = hf(saved(tmp_path / "model"), add_tokens=NEW)
    place = made(cfg)
    whole = {file.name: file.read_bytes() for file in place.iterdir()}
    match harm:
        case "truncated":
            os.truncate(place / "model.safetensors", 100)
        case "deleted":
            (place / "tokenizer.json").unlink()
        case "manifest":
            (place / META).write_text("{")
    assert made(cfg) == place
    assert {file.name: file.read_bytes() for file in place.iterdir()} == whole


KILLED = """
import os, sys
from rlexp.config.schema import HFModelConfig
import rlexp.{module} as module
from rlexp.training.model import prepared
module.{function} = lambda *_, **__: os.kill(os.getpid(), 9)
prepared.prepared(HFModelConfig(path=sys.argv[-1], add_tokens=["<tool>"]))
"""


@pytest.mark.parametrize(
    ("module", "function"),
    [("training.model.prepared", "save_file"), ("base.made_once", "write_text"), ("base.made_once", "sync")],
)
def test_a_preparation_that_is_killed_is_done_again(module: str, function: str, tmp_path: Path, cache: Path) -> None:
    source = saved(tmp_path / "model")
    said = warm.run("-c", [KILLED.format(module=module, function=function), str(source)], ROOT)
    assert said.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), said.stderr
    (left,) = [path for path in cache.iterdir() if path.is_dir()]
    assert left.name.endswith(".making")
    place = made(hf(source, add_tokens=["<tool>"]))
    assert len(load_config(hf(place), 512).to_dict()) > 1
    assert [path for path in cache.iterdir() if path.is_dir()] == [place]


def prepare_at_once(_spec: RankSpec, path: str) -> tuple[str, int]:
    count = 0
    seal = prepared.seal

    def counted(*args: Any) -> None:
        nonlocal count
        count += 1
        seal(*args)

    prepared.seal = counted
    torch.distributed.barrier()
    return str(made(HFModelConfig(path=path, add_tokens=NEW))), count


def test_processes_that_ask_at_once_make_it_once(tmp_path: Path) -> None:
    source = saved(tmp_path / "model")
    answers = on_ranks(3, prepare_at_once, str(source))
    assert len({place for place, _ in answers}) == 1
    assert sum(count for _, count in answers) == 1


def test_a_cache_that_cannot_be_written_to_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = hf(saved(tmp_path / "model"), add_tokens=NEW)
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLEXP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"could not be written to .*/file/cache/.*\. Make room there, or set RLEXP_"):
        made(cfg)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left")])
def test_a_full_cache_is_one_message_and_leaves_nothing(
    error: Exception, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = hf(saved(tmp_path / "model"), add_tokens=NEW)

    def full(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(prepared, "save_file", full)
        with pytest.raises(ModelError, match="No space left"):
            made(cfg)
    assert not [path for path in cache.iterdir() if path.is_dir()]
    assert made(cfg).is_dir()


def test_a_folder_without_a_model_is_one_message(tmp_path: Path) -> None:
    source = saved(tmp_path / "model")
    (source / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelError, match=r"add_tokens=.*no tokenizer and causal model can be loaded from .*model "):
        made(hf(source, add_tokens=NEW))


# ---- hub names ----


def test_revision_goes_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, asked = saved(tmp_path / "model"), []
    cfg = HFModelConfig(path="org/name", revision="v2")

    def load(name: str, **options: Any) -> LlamaConfig:
        asked.append((name, options["revision"]))
        return LlamaConfig(**SHAPE)

    def fetch(name: str, **options: Any) -> str:
        asked.append((name, options["revision"], "*.bin" in options["allow_patterns"]))
        return str(source)

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", load)
    monkeypatch.setattr(prepared, "snapshot_download", fetch)
    load_config(cfg, 512)
    monkeypatch.undo()
    monkeypatch.setenv("RLEXP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prepared, "snapshot_download", fetch)
    assert load_config(dataclasses.replace(cfg, add_tokens=NEW), 512).vocab_size == 262
    with pytest.raises(ModelError, match=r"model\.gguf=a\.gguf: no such file in model\.path=org/name on the hub"):
        made(dataclasses.replace(cfg, gguf="a.gguf"))
    assert asked == [("org/name", "v2"), ("org/name", "v2", False), ("org/name", "v2", False)]


@pytest.mark.parametrize("error", [FileNotFoundError("Revision v9 is not there"), ValueError("no name of the hub")])
def test_what_the_hub_lacks_is_one_message(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(prepared, "snapshot_download", fetch)
    with pytest.raises(ModelError, match=rf"model\.path=org/name: is no folder, and cannot be fetched .*{error}"):
        made(HFModelConfig(path="org/name", add_tokens=NEW))


# ---- GGUF ----


@pytest.mark.slow
def test_the_real_model_of_a_gguf_file(cache: Path) -> None:
    """It speaks English after it was written as safetensors, and plain transformers load it."""
    cfg = smollm2()
    assert (cfg.called, heads_of(cfg)) == ("SmolLM2-135M-Instruct.Q4_1", None)
    config, tokenizer = load_config(cfg, 512), load_tokenizer(cfg)
    (place,) = [path for path in cache.iterdir() if path.is_dir()]
    assert (config.num_hidden_layers, config.vocab_size, config.tie_word_embeddings) == (30, 49152, True)
    assert not hasattr(config, "quantization_config")
    assert set(weights_in(place)) >= {"model.embed_tokens.weight", "model.layers.29.mlp.up_proj.weight"}
    assert "lm_head.weight" not in weights_in(place)
    model = AutoModelForCausalLM.from_pretrained(place)
    text = "The sun rises in the east and sets in the west. Water freezes at zero degrees."
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        assert bool(model(ids[:, :10]).logits.isfinite().all())
        assert float(model(ids, labels=ids).loss.exp()) < 15  # with random weights it is about 49,152
    question = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**asked, max_new_tokens=12, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer, skip_special_tokens=True)
    if (folder := shared_folder()) is not None:
        is_the_original(tokenizer, folder)


def is_the_original(ours: Any, shared: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(shared / "models" / "smollm2-tokenizer")
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.chat_template == theirs.chat_template
    assert ours.special_tokens_map == theirs.special_tokens_map
    with (shared / "data" / "hh_helpful_base" / "test.jsonl").open(encoding="utf-8") as rows:
        texts = [str(value) for _, row in zip(range(300), rows, strict=False) for value in json.loads(row).values()]
    assert ours(texts)["input_ids"] == theirs(texts)["input_ids"]
    assert len(texts) > 800


def test_new_tokens_of_a_gguf_file_are_added_to_the_folder_that_it_became(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.gguf").write_bytes(b"weights")
    monkeypatch.setattr(prepared, "_from_gguf", lambda _folder, _name, place: saved(place))
    cfg = hf(tmp_path, gguf="a.gguf", add_tokens=NEW)
    first = made(dataclasses.replace(cfg, add_tokens=[]))
    grown = made(cfg)
    assert {path for path in cache.iterdir() if path.is_dir()} == {first, grown}
    assert (len(AutoTokenizer.from_pretrained(first)), len(AutoTokenizer.from_pretrained(grown))) == (259, 262)
    assert load_model(cfg, load_config(cfg, 512), 512).lm_head.weight.shape == (262, 32)


def exported_beside_others(spec: RankSpec, folder: Path) -> None:
    """The last rank writes a model: the first to hold the lock may be any."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    if spec.rank == 1:
        (folder / "again").mkdir()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        export(Export(model, torch.float32, folder / "again"), model.named_parameters(), tokenizer)


def test_any_rank_can_write_a_whole_model(tmp_path: Path) -> None:
    source = saved(tmp_path / "model")
    on_ranks(2, exported_beside_others, source)
    names = {path.name for path in source.iterdir() if path.is_file()}
    assert {path.name for path in (source / "again").iterdir()} == names
    assert weights_in(source / "again").keys() == weights_in(source).keys()


@pytest.mark.parametrize("content", [b"", b"no such format", b"GGUF\x03\x00\x00\x00"])
def test_a_broken_gguf_file_is_one_message(content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.gguf=a\.gguf: cannot be loaded from .*Give a whole GGUF file"):
        load_config(hf(tmp_path, gguf="a.gguf"), 512)


def test_the_commit_of_a_hub_model_is_that_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It moves with the branch, and a revision pins it; a folder and a drawn model have none."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model, commits = tmp_path / "models--org--name", ("a" * 40, "b" * 40)
    for commit in commits:
        folder = model / "snapshots" / commit
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / "main").write_text(commit)
        assert commit_of(HFModelConfig(path="org/name")) == commit
    assert commit_of(HFModelConfig(path="org/name", revision=commits[0])) == commits[0]
    assert commit_of(HFModelConfig(path="org/other")) is None
    assert commit_of(HFModelConfig(path=str(folder))) is None
    assert commit_of(TinyModelConfig()) is None
