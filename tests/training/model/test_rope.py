"""More positions by YaRN (`model.rope`): values, export, what is refused, what is warned of, what it is identified by.

Native lengths here are short, so that sequences beyond them are quick.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
    SmolLM3Config,
)

from rlexp.base.errors import ModelError
from rlexp.config import load
from rlexp.config.checks.rope import note_on_loaded
from rlexp.config.identity import changes, curve_keys
from rlexp.config.load import compose_config
from rlexp.config.rope import Positions, Yarn, parsed, positions_in
from rlexp.config.schema import Config
from rlexp.config.schema.models import FusedName
from rlexp.launch.joining import RankSpec
from rlexp.training.model.float64 import precise
from rlexp.training.model.loading import load_config, load_model
from rlexp.training.model.rope import extend, refuse_unless_extended
from rlexp.training.reference.stored import facts_of
from rlexp.training.train.build import build
from rlexp.training.train.export_at_end import export_run
from rlexp.training.train.step import train_step
from rlexp.verify import model as verified
from tests.helpers.models import SHAPE, cache, hf, saved
from tests.helpers.ranks import SpyLoss, on_ranks
from tests.helpers.refusals import refusal_of

__all__ = ["cache"]  # a fixture of every test here too

NATIVE = 64  # positions of the models here
SMALL = SHAPE | {"max_position_embeddings": NATIVE}
ON_CPU = ("launch.device=cpu", "logger=none", "model=hf")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0,
        "original_max_position_embeddings": 16}  # fmt: skip


def yarn(factor: float, native: int = NATIVE, **more: Any) -> dict[str, Any]:
    """What transformers is to be told, written by hand."""
    return {"rope_type": "yarn", "rope_theta": 10000.0, "factor": factor,
            "original_max_position_embeddings": native} | more  # fmt: skip


def described(place: Path, config: PreTrainedConfig | dict[str, Any]) -> Path:
    """A folder that holds a config.json alone: nothing else is read before a process starts."""
    place.mkdir(parents=True)
    said = config if isinstance(config, dict) else config.to_dict()
    (place / "config.json").write_text(json.dumps(said), encoding="utf-8")
    return place


# ---- values ----


def first_step(_spec: RankSpec, cfgs: Sequence[Config], out: str) -> list[tuple[list[float], float, Any]]:
    """Return of each run what its first step read: the log-probabilities of the chosen answers, sorted, then of the
    rejected ones; and the loss. The first run is exported."""
    found = []
    for cfg in cfgs:
        task: Any = build(cfg)  # with its probe
        fused = task.run.engine.policy.fused
        assert bool(fused and fused.pieces["rotary positions"]) == (cfg.model.fused is FusedName.always)
        spy = SpyLoss(task.loss)
        task.loss = spy
        examples = [task.examples.train[index] for index in task.batch(1).indices]
        loss = train_step(task, 1)["train/loss"]
        if not found:
            export_run(task.run, Path(out), 1)
        found.append(([*sorted(spy.chosen), *sorted(spy.rejected)], loss, examples))
        task.close()
    return found


def rows(place: Path, characters: int) -> Path:
    words = [
        "one", "day", "a", "little", "cat", "went", "to", "the", "park", "and", "saw", "a", "big", "red", "ball",
        "that", "ran", "up", "the", "hill",
    ]  # fmt: skip
    drawn = np.random.default_rng(0)

    def text(length: int) -> str:
        return " ".join(drawn.choice(words, length // 4))[:length]

    lines = [{"prompt": text(characters), "chosen": text(20 + 9 * at), "rejected": text(50)} for at in range(4)]
    place.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return place


@torch.no_grad()
def alone(config: Any, folder: Path, pairs: Sequence[Any]) -> list[float]:
    """Return the same by transformers alone, in float64, one sequence after the other."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float64)

    def read(pair: Any, side: int) -> float:
        ids = torch.from_numpy(np.concatenate([pair.prompt, pair.answers[side]])).long()
        with precise(torch.float64):
            logps = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        return float(logps.gather(-1, ids[1:, None])[len(pair.prompt) - 1 :].sum())

    return [each for side in range(2) for each in sorted(read(pair, side) for pair in pairs)]


def largest(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("ring", [1, 2, 4])
@pytest.mark.parametrize("model", ["random", pytest.param("stories260K", marks=pytest.mark.slow)])
def test_a_ring_computes_what_transformers_computes_beyond_the_native_length(
    model: str, ring: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Also with fused pieces, and after export, which plain transformers loads. The reference is the same function: the
    loss is ln 2. Without the key, and without YaRN's scale of attention, the values are clearly others."""
    if model == "random":
        folder, native, factor = saved(tmp_path / "model", LlamaConfig(**SMALL, initializer_range=0.1)), NATIVE, 5
    else:
        folder, native, factor = request.getfixturevalue("shared") / "models" / model, 512, 3
    length = native * (factor - 1) - 20
    data = rows(tmp_path / "rows.jsonl", length if model == "random" else 3 * length)
    words = [*ON_CPU, f"model.path={folder}", "data=jsonl", f"data.path={data}", f"data.max_length={native * factor}",
             "data.eval_size=0", "data.shuffle=false", "train.batch_size=4", "train.precision=fp64", "optim.lr=0",
             f"parallel.ring_size={ring}", f"launch.nproc={ring}", "reference=model"]  # fmt: skip
    each = [["model.rope=yarn"], [f"model.rope=yarn:{factor}:{native}", "model.fused=always"], ["model.rope=null"]]
    cfgs = [compose_config([*words, *more]) for more in each]
    assert cfgs[0].model.rope == f"yarn:{factor}"
    (extended, loss, pairs), (fused, *_), (native_only, *_) = on_ranks(ring, first_step, cfgs, str(tmp_path / "run"))[0]
    assert all(len(pair.prompt) > native + native // 2 for pair in pairs)

    def by_hand(**more: Any) -> list[float]:
        config = AutoConfig.from_pretrained(folder)
        config.rope_parameters, config.max_position_embeddings = yarn(float(factor), native, **more), native * factor
        return alone(config, folder, pairs)

    expected = by_hand()
    assert largest(extended, expected) < 1e-12
    assert largest(fused, expected) < 1e-12
    assert loss == pytest.approx(math.log(2), rel=1e-12)
    exported = tmp_path / "run" / "model"
    said = json.loads((exported / "config.json").read_text(encoding="utf-8"))
    assert said["rope_parameters"] == yarn(float(factor), native)
    assert said["max_position_embeddings"] == native * factor
    assert largest(alone(None, exported, pairs), expected) < 1e-12
    assert largest(native_only, alone(None, folder, pairs)) < 1e-12
    assert largest(native_only, expected) > 1e-3
    assert largest(by_hand(attention_factor=1.0), expected) > 1e-4


NARROW = {**SMALL, "head_dim": 8, "pad_token_id": 0}
FAMILIES: dict[str, tuple[PreTrainedConfig, dict[str, Any]]] = {
    "llama": (LlamaConfig(**SMALL), {}),
    "qwen3": (Qwen3Config(**NARROW), {}),
    "part of each head": (GPTNeoXConfig(**SMALL), {"partial_rotary_factor": 0.25}),
    "a native length of its own beside": (
        Phi3Config(**NARROW, original_max_position_embeddings=NATIVE), {"partial_rotary_factor": 1.0}),
    "layers without positions": (SmolLM3Config(**NARROW), {"rope_theta": 2e6}),
    "extended already": (LlamaConfig(**SMALL, rope_parameters=yarn(2.0, 48, beta_fast=16.0)),
                         {"original_max_position_embeddings": 48, "beta_fast": 16.0}),
    "extended already, with its scale": (
        LlamaConfig(**SMALL, rope_parameters=yarn(2.0, 48, attention_factor=0.1 * math.log(2) + 1)),
        {"original_max_position_embeddings": 48}),
}  # fmt: skip


@pytest.mark.parametrize(("config", "more"), FAMILIES.values(), ids=FAMILIES)
def test_each_family_gets_the_angles_of_transformers(
    config: PreTrainedConfig, more: dict[str, Any], tmp_path: Path
) -> None:
    """As if its config.json had said so; what the family says of its angles is kept. verify's reference comes to the
    same by itself."""
    folder = saved(tmp_path / "model", copy.deepcopy(config))
    cfg = compose_config([*ON_CPU, f"model.path={folder}", "model.rope=yarn:4", "data.max_length=100"])
    made = load_model(cfg.model, load_config(cfg.model, 100), 100)
    wanted = yarn(4.0) | more
    native = wanted["original_max_position_embeddings"]
    assert {name: made.config.rope_parameters[name] for name in wanted} == wanted
    assert made.config.max_position_embeddings == 4 * native
    by_hand = copy.deepcopy(config)
    by_hand.rope_parameters = wanted
    other: Any = type(made)(by_hand)
    referred = verified.load(cfg, torch.device("cpu"))
    found: dict[str, Any] = dict(made.named_modules())
    tables = [name for name, module in found.items() if getattr(module, "rope_type", None) == "yarn"]
    assert tables
    for name in tables:
        theirs: Any
        for theirs in (other.get_submodule(name), referred.get_submodule(name)):
            assert torch.equal(found[name].inv_freq, theirs.inv_freq)
            assert found[name].attention_scaling == theirs.attention_scaling == 0.1 * math.log(4) + 1


def test_the_tiny_model_has_2048_positions_that_are_extended() -> None:
    cfg = compose_config(["launch.device=cpu", "logger=none", "data.max_length=5000", "model.rope=yarn"])
    assert cfg.model.rope == "yarn:3"
    config = load_config(cfg.model, 5000)
    assert config.rope_parameters == yarn(3.0, 2048)
    assert config.max_position_embeddings == 3 * 2048
    referred = verified.load(cfg, torch.device("cpu"))
    assert referred.config.rope_parameters == config.rope_parameters


# ---- the key ----


@pytest.mark.parametrize(("rope", "said"), [
    ("yarn:1", "the factor must be a number greater than 1"),
    ("yarn:0.5", "the factor must be a number greater than 1"),
    ("yarn:-2", "the factor must be a number greater than 1"),
    ("yarn:inf", "the factor must be a number greater than 1"),
    ("yarn:nan", "the factor must be a number greater than 1"),
    ("yarn:", "the factor must be a number greater than 1"),
    ("yarn:two", "the factor must be a number greater than 1"),
    ("yarn:4:0", "the positions must be a whole number, at least 1"),
    ("yarn:4:1.5", "the positions must be a whole number, at least 1"),
    ("yarn:4:", "the positions must be a whole number, at least 1"),
    ("yarn:4:5:6", "must be yarn, yarn:FACTOR or yarn:FACTOR:POSITIONS, or null"),
    ("llama3", "must be yarn, yarn:FACTOR or yarn:FACTOR:POSITIONS, or null"),
    ("dynamic:2", "must be yarn, yarn:FACTOR or yarn:FACTOR:POSITIONS, or null"),
    ("4", "must be yarn, yarn:FACTOR or yarn:FACTOR:POSITIONS, or null"),
    ("{type: yarn, factor: 4}", "must be a text, or null"),
])  # fmt: skip
def test_what_the_key_cannot_be_is_one_message(rope: str, said: str) -> None:
    message = refusal_of(["launch.device=cpu", "logger=none", f"model.rope={rope}"])
    assert message.startswith(f"model.rope={rope}: {said}")
    assert "\n" not in message


@pytest.mark.parametrize("rope", ["yarn", "yarn:4", "yarn:2.5", "yarn:4:32768", "yarn:4:1"])
def test_the_key_is_stored_as_it_is_typed(rope: str) -> None:
    assert str(parsed(rope)) == rope
    assert str(Yarn(4.0)) == "yarn:4"


@pytest.mark.parametrize(("length", "rope"), [(65, "yarn:2"), (128, "yarn:2"), (129, "yarn:3"), (1000, "yarn:16")])
def test_the_factor_follows_from_the_longest_sequence(length: int, rope: str, tmp_path: Path) -> None:
    folder = described(tmp_path / "model", LlamaConfig(**SMALL))
    cfg = compose_config([*ON_CPU, f"model.path={folder}", "model.rope=yarn", f"data.max_length={length}"])
    assert cfg.model.rope == rope
    load.to_file(cfg, tmp_path / "config.yaml")
    assert load.from_file(tmp_path / "config.yaml").model.rope == rope


def test_a_factor_that_nothing_says_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the sequences are short enough; and of a hub model, until this machine's cache holds its config.json."""
    folder = described(tmp_path / "model", LlamaConfig(**SMALL))
    said = refusal_of([*ON_CPU, f"model.path={folder}", "model.rope=yarn", "data.max_length=64"])
    assert said.startswith(f"model.rope=yarn: data.max_length=64 is within the 64 positions of model.path={folder}, ")
    hub = [*ON_CPU, "model.path=org/name", "model.rope=yarn", "data.max_length=100"]
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    assert "which model.path=org/name does not say before ranks load it" in refusal_of(hub)
    assert compose_config([*hub[:-2], "model.rope=yarn:3"]).model.rope == "yarn:3"
    there = str(folder / "config.json")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: there)
    assert compose_config(hub).model.rope == "yarn:2"


# ---- models that it is not for ----

REFUSED: dict[str, tuple[PreTrainedConfig | dict[str, Any], str]] = {
    "learned positions": (GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=4, n_positions=64),
                          "has no rotary positions, which YaRN stretches"),
    "llama3": (LlamaConfig(**SMALL, rope_parameters=LLAMA3), "is extended already, by rope_type=llama3,"),
    "longrope": (Phi3Config(**NARROW, rope_parameters=LONG), "is extended already, by rope_type=longrope,"),
    "an older file": ({"model_type": "llama", "max_position_embeddings": 64, "rope_theta": 1e4,
                       "rope_scaling": {"type": "linear", "factor": 2.0}}, "is extended already, by rope_type=linear,"),
    "dynamic": (LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
                "is extended already, by rope_type=dynamic,"),
    "two tables": (Gemma3TextConfig(**NARROW), "has rotary positions of several kinds"),
    "axes": ({"model_type": "qwen2", "max_position_embeddings": 64,
              "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
             "has rotary positions of several kinds"),
    "a scale of its own": (LlamaConfig(**SMALL, rope_parameters=yarn(2.0, 32, attention_factor=1.0)),
                           "has an attention_factor of its own (attention_factor=1.0)"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "said"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_yarn_cannot_extend_is_refused(config: Any, said: str, tmp_path: Path) -> None:
    """Before a process starts; a model of the hub when ranks have its configuration, in the same words."""
    folder = described(tmp_path / "model", config)
    message = refusal_of([*ON_CPU, f"model.path={folder}", "model.rope=yarn:4", "parallel=ring1"])
    assert message.startswith(f"model.rope=yarn:4: model.path={folder} {said}")
    assert "\n" not in message
    if isinstance(config, PreTrainedConfig):
        with pytest.raises(ModelError, match=re.escape(f"model.rope=yarn:4: model.path=org/name {said}")):
            extend(copy.deepcopy(config), Yarn(4.0), "model.path=org/name")


def test_more_positions_than_the_model_has_cannot_be_extended(tmp_path: Path) -> None:
    folder = described(tmp_path / "model", LlamaConfig(**SMALL))
    said = refusal_of([*ON_CPU, f"model.path={folder}", "model.rope=yarn:4:65"])
    assert f"model.path={folder} has 64 positions, and 65 are to be extended. Give yarn:4:64, or" in said


def test_the_model_in_reference_path_is_held_to_the_same(tmp_path: Path) -> None:
    """It is loaded as `model` says, so it is extended too, and refused in its own name."""
    folder, other = described(tmp_path / "model", LlamaConfig(**SMALL)), described(
        tmp_path / "other", LlamaConfig(**SMALL, rope_parameters=LLAMA3))  # fmt: skip
    said = refusal_of([*ON_CPU, f"model.path={folder}", f"reference.path={other}", "model.rope=yarn:4"])
    assert said.startswith(f"model.rope=yarn:4: reference.path={other} is extended already, by rope_type=llama3,")


def test_code_that_computes_its_own_angles_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="computes its rotary positions by itself"):
        refuse_unless_extended(nn.Linear(2, 2), Yarn(4.0), "model.path=org/name")
    cfg = hf(saved(tmp_path / "model", LlamaConfig(**SMALL)), rope="yarn:4")
    refuse_unless_extended(load_model(cfg, load_config(cfg, 64), 64), Yarn(4.0), "model.path=org/name")


# ---- the warning ----


def warned(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    load._tell_once.cache_clear()
    for _ in range(2):  # it is told once
        compose_config([*ON_CPU, *words])
    return capsys.readouterr().err


OLD_YARN = {"model_type": "qwen2", "max_position_embeddings": 32, "rope_theta": 1e4,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}  # fmt: skip
WARNED: dict[str, tuple[PreTrainedConfig | dict[str, Any], int, str, str]] = {
    "within": (LlamaConfig(**SMALL), 64, "null", ""),
    "beyond": (LlamaConfig(**SMALL), 65, "null", "64 positions that {} is made for. Use model.rope=yarn:2, which"),
    "within what yarn gives": (LlamaConfig(**SMALL), 250, "yarn:4", ""),
    "beyond what yarn gives": (LlamaConfig(**SMALL), 250, "yarn:2.5",
                               "160 positions that model.rope=yarn:2.5 gives {}. Use model.rope=yarn:4, which"),
    "of fewer positions": (LlamaConfig(**SMALL), 250, "yarn:2:50",
                           "100 positions that model.rope=yarn:2:50 gives {}. Use model.rope=yarn:5:50, which"),
    "yarn reaches it": (OLD_YARN, 128, "null", ""),  # whatever max_position_embeddings says
    "beyond its own yarn": (OLD_YARN, 129, "null", "128 positions that {} is made for. Use model.rope=yarn:5, which"),
    "llama3 reaches it": (LlamaConfig(**SMALL, rope_parameters=LLAMA3), 64, "null", ""),
    "beyond llama3": (LlamaConfig(**SMALL, rope_parameters=LLAMA3), 65, "null",
                      "64 positions that {} is made for. They are extended by llama3 already, so YaRN (model.rope)"),
    "learned positions": (REFUSED["learned positions"][0], 65, "null",
                          "64 positions that {} is made for. They are not rotary, so YaRN"),
    "several kinds": (Gemma3TextConfig(**NARROW), 65, "null", "They are of several kinds, so YaRN"),
    "dynamic": (REFUSED["dynamic"][0], 129, "null", "128 positions that {} is made for. They are extended by dynamic"),
    "it does not say": ({"model_type": "llama", "rope_theta": 1e4}, 1 << 20, "null", ""),
}  # fmt: skip


@pytest.mark.parametrize(("config", "length", "rope", "said"), WARNED.values(), ids=WARNED)
def test_sequences_beyond_the_models_positions_are_warned_of_once(
    config: Any, length: int, rope: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = described(tmp_path / "model", config)
    words = [f"model.path={folder}", f"data.max_length={length}", f"model.rope={rope}"]
    told = warned(words, capsys)
    if said:
        assert told.count("\n") == 1
        assert told.startswith(f"rlexp: data.max_length={length}: is more than the ")
        assert said.format(f"model.path={folder}") in told
    else:
        assert told == ""


def test_what_only_ranks_know_stands_in_the_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hub model's positions are told from its loaded configuration, and a folder's are not told again."""
    loaded = LlamaConfig(**SMALL)
    hub, folder = ("model.path=org/name", "data.max_length=100"), described(tmp_path / "model", loaded)
    assert warned(hub, capsys) == ""
    cfg = compose_config([*ON_CPU, *hub])
    assert "is more than the 64 positions that model.path=org/name" in str(note_on_loaded(cfg, loaded.to_dict()))
    extended = compose_config([*ON_CPU, *hub, "model.rope=yarn:2"])
    extend(loaded, Yarn(2.0), "model.path=org/name")
    assert note_on_loaded(extended, loaded.to_dict()) is None
    known = compose_config([*ON_CPU, f"model.path={folder}", "data.max_length=100"])
    assert note_on_loaded(known, LlamaConfig(**SMALL).to_dict()) is None


def test_an_adapter_that_is_written_alone_says_nothing_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"model.path={described(tmp_path / 'model', LlamaConfig(**SMALL))}", "data.max_length=100", "adapter=lora"]
    assert "the adapter in <run>/model says nothing of it" in warned([*words, "model.rope=yarn"], capsys)
    assert warned([*words, "model.rope=yarn", "checkpoint.export=merged"], capsys) == ""


# ---- what depends on it ----


def test_a_run_continues_only_with_the_same_positions(tmp_path: Path) -> None:
    """Runs of versions without the key have none; and stored log-probabilities are of one value of it."""
    folder = described(tmp_path / "model", LlamaConfig(**SMALL))
    words = [*ON_CPU, f"model.path={folder}", "data.max_length=100"]
    plain, by_length, named, other = (
        compose_config([*words, f"model.rope={rope}"]) for rope in ("null", "yarn", "yarn:2", "yarn:3")
    )
    keys = [curve_keys(cfg) for cfg in (plain, by_length, named, other)]
    older = {key: value for key, value in keys[0].items() if key != "model.rope"}
    assert list(changes(older, keys[0])) == []
    assert list(changes(keys[1], keys[2])) == []
    assert list(changes(older, keys[1])) == [("model.rope", "None", "yarn:2")]
    assert list(changes(keys[2], keys[3])) == [("model.rope", "yarn:2", "yarn:3")]
    facts = [facts_of(cfg, cfg.model, None, "") for cfg in (plain, by_length, named, other)]
    assert facts[1] == facts[2]
    assert len({each["model"]["rope"] for each in facts}) == 3


def test_extending_what_was_exported_extends_the_model_that_it_came_from() -> None:
    """The positions before any extension stay the same, however often a run starts from another's model."""
    config = LlamaConfig(**SMALL)
    extend(config, Yarn(4.0), "model.path=org/name")
    extend(config, Yarn(8.0), "model.path=org/name")
    once = LlamaConfig(**SMALL)
    extend(once, Yarn(8.0), "model.path=org/name")
    assert config.rope_parameters == once.rope_parameters == yarn(8.0)
    assert dataclasses.asdict(positions_in(config.to_dict()))["native"] == NATIVE


def test_a_model_without_rotary_positions_has_those_that_it_says() -> None:
    assert positions_in({"n_positions": 77, "attn_scale": 2}) == Positions(None, 77, 77, {})


def test_a_configuration_that_does_not_say_its_length_asks_for_it() -> None:
    config = PreTrainedConfig()
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    with pytest.raises(ModelError, match="does not say how many positions it has"):
        extend(config, Yarn(4.0), "model.path=org/name")
