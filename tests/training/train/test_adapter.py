"""Low-rank adapters over the ring: the same curve on every layout and engine, on resuming, and in peft's own hands."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from bench.curves import draw, excesses
from bench.layouts import Case, layout_cases
from bench.resume import Where, curve_of, run
from rlexp.base.errors import ConfigError, UserError
from rlexp.config.adapter_folder import DESCRIPTION, WEIGHTS
from rlexp.config.checks import adapter as checked
from rlexp.config.load import compose_config
from rlexp.config.schema import Config, ExportDtype, LoraConfig
from rlexp.eval.job import job_of
from rlexp.export.checkpoint import export_checkpoint
from rlexp.run_files.metrics_jsonl import read_rows
from rlexp.training.model.adapter import put_adapter
from rlexp.training.model.loading import load_tokenizer
from rlexp.training.train.build import build
from rlexp.training.train.examples import read_examples
from rlexp.training.train.surroundings import UNPROBED
from rlexp.training.world.groups import ALONE, World
from tests.conftest import Shell
from tests.helpers.adapters import adapter_of, loaded, logps_by
from tests.helpers.models import saved
from tests.helpers.ranks import largest_gap, on_ranks, train_steps
from tests.helpers.refusals import refusal_of

BASE = ("launch.device=cpu", "logger=none", "data.size=40", "data.eval_size=4", "optim.lr=1e-2")
LORA = ("adapter=lora", "adapter.rank=4")
REAL = ("launch.device=cpu", "logger=none", "train.batch_size=8", "data.size=16", "data.eval_size=0", "optim.lr=1e-3")
# float32 against float64, relative to the largest element of each tensor. Measured 5.6e-6.
FLOAT32 = 2e-5
# An exported model against the run: sums of float32 log-probabilities in another order.
EXPORTED = 2e-7
# An adapter has gradients as small as AdamW's usual eps, 1e-8. There a gradient's rounding d moves a weight by up to
# lr · d / eps: relative to the largest weights, which are about the sum of the rates, by d / eps. One gradient of
# 1.5e-9 with d = 1e-19 made 1.2e-12 to 2.0e-12 of it by the instructions that torch and MKL have for AVX2 and for older
# processors, and 4.0e-12 on a Xeon. The largest d of any gradient was 4.5e-15: with this eps that is 4.5e-13, whichever
# gradient is small, and WEIGHTS_TOLERANCE is 3e-12. Measured: 1.0e-14; of drawn samples 2.8e-15.
EPS = "optim.eps=1e-2"
DRAWN = ("reward.rule=regex", "reward.pattern='[a-z]'", "rollout.batch_size=4", "rollout.n_samples=4",
         "rollout.max_new_tokens=8", "train.batch_size=16", "optim.lr=1e-3", EPS)  # fmt: skip
LOSSES = {"dpo": (), "grpo": ("loss=grpo", *DRAWN), "ppo, own critic": ("loss=ppo", "loss.critic=own", *DRAWN)}


def float64(case: Case, *more: str) -> Config:
    return compose_config([*BASE, *LORA, "train.precision=fp64", "train.max_steps=3", *case.overrides(), *more])


def test_three_steps_do_not_move_with_ring_engine_and_reference() -> None:
    """The model without its adapter is the model that training begins with."""
    hold([float64(Case(1, 1, 1, True), "reference=model", "train.eval_every=3"),
          float64(Case(2, 1, 4, True), "reference=adapter", "train.eval_every=3", "engine=fsdp2")])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "fsdp2"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_layout_draws_one_curve(engine: str, loss: str) -> None:
    grid = [case for case in layout_cases() if case.ring_size <= 4]
    hold([float64(case, *LOSSES[loss], f"engine={engine}") for case in grid])


def hold(configs: Sequence[Config]) -> None:
    curves = draw(list(configs))
    first = curves[0]
    assert len(first.rows) == 3
    assert all(row["train/grad_norm"] > 1e-4 for row in first.rows)  # else Adam would step by nothing but rounding
    for curve in curves[1:]:
        assert excesses(first, curve) == []


# ---- a real model ----


@pytest.fixture(scope="module")
def base(shared: Path) -> Path:
    return shared / "models" / "stories260K"


@pytest.fixture(scope="module")
def begun(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that has been trained before, and a module that was trained whole beside it."""
    return adapter_of(base, tmp_path_factory.mktemp("begun"), modules_to_save=["norm"])


def on_stories(base: Path, *more: str) -> list[str]:
    return [*REAL, "model=hf", f"model.path={base}", "adapter=lora", *more]


def steps_of(several: Sequence[Sequence[str]]) -> list[Any]:
    """Train configurations of one world size in one start of ranks; return what rank 0 returned for each."""
    cfgs = [compose_config(list(each)) for each in several]
    return list(on_ranks(cfgs[0].parallel.world_size, train_all, cfgs)[0])


def train_all(spec: Any, cfgs: Sequence[Config]) -> list[Any]:
    return [train_steps(spec, cfg, 2) for cfg in cfgs]


ENGINES = ("torch", "zero0", "zero1", "zero2", "zero3", "fsdp2")


@pytest.mark.slow
@pytest.mark.parametrize("loss", [(), ("loss=simpo",)], ids=["dpo", "without a reference"])
@pytest.mark.parametrize("engines", [ENGINES[:3], ENGINES[3:]], ids=["first", "others"])
def test_every_engine_has_one_gradient(base: Path, begun: Path, engines: Sequence[str], loss: Sequence[str]) -> None:
    """An adapter that goes on has the gradient of one process in float64. Nothing else has a gradient, or moves.

    Without a reference no other pass gathers what DeepSpeed lets go of.
    """
    path = f"adapter.path={begun}"
    [exact] = steps_of([on_stories(base, path, "train.precision=fp64", *loss)])
    assert all(".default." in name for name in exact.gradients[0])
    place = ("parallel=ring2", "launch.nproc=4", "train.micro_batch_size=2", *loss)
    for ours in steps_of([on_stories(base, path, *place, f"engine={engine}") for engine in engines]):
        assert largest_gap(exact.gradients[0], ours.gradients[0]) < FLOAT32
        if not loss:  # the reference is where it began
            assert ours.rows[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-7)
        assert ours.rows[1]["train/loss"] == pytest.approx(exact.rows[1]["train/loss"], rel=FLOAT32)
        assert ours.rows[0]["train/grad_norm"] == pytest.approx(exact.rows[0]["train/grad_norm"], rel=FLOAT32)
        still = {name for name, weight in ours.weights.items() if torch.equal(weight, exact.start[name])}
        assert still == set(ours.weights) - set(exact.gradients[0])


def dtypes_held(_spec: Any, cfgs: Sequence[Config]) -> list[dict[str, str]]:
    tasks = [build(cfg, around=UNPROBED) for cfg in cfgs]
    named = [dict(task.run.engine.policy.named()) for task in tasks]
    return [{name: str(parameter.dtype).removeprefix("torch.") for name, parameter in each.items()} for each in named]


def test_frozen_weights_are_held_in_the_precision_that_computes() -> None:
    """Also those that model.freeze names; fsdp2 holds what is trained in float32, as the others hold masters of it."""
    place = ("launch.device=cpu", "logger=none", "parallel=ring2", "train.precision=bf16", "data.size=16")
    frozen = ("adapter=lora", "model.freeze=['*layers.0.*']")
    cases = [(engine, words) for engine in ("torch", "zero1", "fsdp2") for words in frozen]
    cfgs = [compose_config([*place, f"engine={engine}", words]) for engine, words in cases]
    for (engine, _), held in zip(cases, on_ranks(2, dtypes_held, cfgs)[0], strict=True):
        adapted = any(".default." in name for name in held)
        mine = {name: ".default." in name if adapted else "layers.0." not in name for name in held}
        assert {held[name] for name in held if not mine[name]} == {"bfloat16"}, engine
        assert {held[name] for name in held if mine[name]} == {"float32" if engine == "fsdp2" else "bfloat16"}, engine


def norms_begun(_spec: Any, cfgs: Sequence[Config]) -> list[torch.Tensor]:
    tasks = [build(cfg, around=UNPROBED) for cfg in cfgs]
    return [dict(task.run.engine.weights())["model.norm.modules_to_save.default.weight"].clone() for task in tasks]


@pytest.mark.slow
def test_a_module_that_is_trained_whole_begins_exactly(base: Path) -> None:
    """In bfloat16 too, with every engine: its masters are the weights of the file, and not what bfloat16 holds."""
    meant = load_file(base / "model.safetensors")["model.norm.weight"]
    assert not torch.equal(meant, meant.bfloat16().float())
    place = ("parallel=ring2", "train.precision=bf16", "adapter.also=[model.norm]")
    cfgs = [compose_config(on_stories(base, *place, f"engine={engine}")) for engine in ENGINES]
    assert all(torch.equal(norm, meant) for norm in on_ranks(2, norms_begun, cfgs)[0])


@pytest.mark.slow
def test_a_run_goes_on_elsewhere_from_its_adapter(tmp_path: Path) -> None:
    """Half of it on two ranks with fsdp2, and half in one process; a checkpoint holds the adapter alone."""
    more = ("adapter=lora", "train.batch_size=4", "data.size=12", "train.max_steps=4", "data.eval_size=4", EPS)
    straight = curve_of(run(Where("torch", 1, 1, "fp64"), tmp_path / "straight", *more))
    begun = run(Where("fsdp2", 2, 1, "fp64"), tmp_path / "run", *more, "train.stop_after=2")
    curve = curve_of(run(Where("torch", 1, 1, "fp64"), begun, *more))
    assert excesses(straight, curve) == []
    assert all(".default." in name for name in curve.weights)


@pytest.mark.slow
def test_what_is_exported_is_what_was_trained(base: Path, begun: Path, tmp_path: Path) -> None:
    """The adapter in plain peft, and the merged model in plain transformers, at the end of a run and from a checkpoint,
    say of the held-out pairs what the run did, in float32."""
    more = (*("data.eval_size=4", "train.eval_every=3", "train.max_steps=3", "checkpoint.export=true", "model=hf"),
            *(f"model.path={base}", "adapter=lora", f"adapter.path={begun}", "data.size=12", "train.batch_size=4"),
    )  # fmt: skip
    place = run(Where("zero1", 2, 1, "fp32"), tmp_path / "run", *more)
    whole = run(Where("zero3", 2, 1, "fp32"), tmp_path / "whole", *more, "checkpoint.export=merged")
    merged = export_checkpoint(place, tmp_path / "merged", ExportDtype.auto, merged=True)
    again = export_checkpoint(place, tmp_path / "adapter", ExportDtype.auto)
    cfg = compose_config(["launch.device=cpu", "logger=none", *more])
    held_out = read_examples(cfg, load_tokenizer(cfg.model), World(0, 1, ALONE)).held_out
    row = read_rows(place / "metrics.jsonl")[-1]
    for model in (loaded(base, place / "model"), loaded(base, again), loaded(merged), loaded(whole / "model")):
        for number, side in enumerate(("chosen", "rejected")):
            pairs = [(pair.prompt, pair.answers[number]) for pair in held_out]
            sequences = [(torch.from_numpy(np.concatenate(pair)).long(), len(pair[0])) for pair in pairs]
            said = logps_by(model, sequences)
            assert np.mean(said) == pytest.approx(row[f"eval/logps/{side}"], rel=EXPORTED)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["reward", "ppo"])
def test_an_adapter_of_another_task_loads_in_peft(loss: str, base: Path, tmp_path: Path) -> None:
    """With the head that scores; and without the critic, which has an adapter of its own."""
    more = {"reward": ("loss=reward",), "ppo": ("loss=ppo", "loss.critic=own", *DRAWN)}[loss]
    place = run(Where("zero3", 2, 1, "fp32"), tmp_path / "run", *more, "checkpoint.export=true", "train.max_steps=1",
                "model=hf", f"model.path={base}", "adapter=lora", "train.micro_batch_size=1")  # fmt: skip
    saved_there = load_file(place / "model" / WEIGHTS)
    assert any("score" in name for name in saved_there) == (loss == "reward")
    config = PeftConfig.from_pretrained(str(place / "model"))
    factory = AutoModelForSequenceClassification if loss == "reward" else AutoModelForCausalLM
    model = get_peft_model(factory.from_pretrained(base, **({"num_labels": 1} if loss == "reward" else {})), config)
    taken = set_peft_model_state_dict(model, saved_there)
    assert taken.unexpected_keys == []
    assert not [name for name in taken.missing_keys if ".default." in name]


# ---- what does not fit ----


def refusals(_spec: Any, cfgs: Sequence[Config]) -> list[str]:
    """Return what a run says of what it cannot do, for each configuration."""
    said = []
    for cfg in cfgs:
        with pytest.raises(UserError) as refused:
            build(cfg, around=UNPROBED)
        said.append(str(refused.value))
    return said


def test_what_does_not_fit_the_model_is_one_message(base: Path, begun: Path, tmp_path: Path) -> None:
    """Layers that are not there, or cannot have an adapter, and an adapter of another model."""
    nameless = shutil.copytree(begun, tmp_path / "nameless")
    said = json.loads((nameless / DESCRIPTION).read_text())
    (nameless / DESCRIPTION).write_text(json.dumps(said | {"base_model_name_or_path": None}))
    expected = {
        "adapter.targets=[q_prj]": "adapter.targets: 'q_prj' fits no layer. Did you mean q_proj? Linear layers: down_p",
        "adapter.targets=[lm_head]": "adapter.targets: 'lm_head' is the head, whose logits are computed in pieces",
        "adapter.targets=[embed_tokens]": "adapter.targets: 'embed_tokens' fits model.embed_tokens, which is no linear",
        "adapter.also=[nrm]": "adapter.also: 'nrm' fits no module with weights. Did you mean norm?",
        "adapter.also=[embed_tokens]": "adapter.also: 'embed_tokens' shares its weights with lm_head.weight",
        f"adapter.path={nameless}": f"adapter.path={nameless}: does not fit the model: has [4, 64] for model.layers.0",
    }
    where = ["launch.nproc=1", "parallel=ring1"]
    cfgs = [compose_config(on_stories(base, *where, words)) for words in list(expected)[:-1]]
    cfgs.append(compose_config(on_stories(saved(tmp_path / "other"), *where, f"adapter.path={nameless}")))
    for got, start in zip(on_ranks(1, refusals, cfgs)[0], expected.values(), strict=True):
        assert got.startswith(start)


def test_an_adapter_of_another_base_is_refused_before_ranks_start(
    base: Path, begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies beside the weights makes no other model of a folder, and one that may not be read is left to shapes."""
    other, same = saved(tmp_path / "other"), shutil.copytree(base, tmp_path / "same")
    with pytest.raises(ConfigError, match=r"adapter\.path=.*: is an adapter of .*stories260K, and model\.path=.*other"):
        compose_config(on_stories(other, f"adapter.path={begun}"))
    same.chmod(0o755)
    (same / "LICENSE.txt").write_text("anything")
    for name in ("training_args.bin", "other.gguf"):
        (same / name).write_bytes(b"anything")
    shape = same / "config.json"
    shape.write_text(json.dumps(json.loads(shape.read_text()) | {"use_cache": False}))
    compose_config(on_stories(same, f"adapter.path={begun}"))

    def unreadable(_folder: Path) -> str:
        raise PermissionError

    monkeypatch.setattr(checked, "of_weights", unreadable)
    compose_config(on_stories(other, f"adapter.path={begun}"))


def described(folder: Path, place: Path, **said: Any) -> LoraConfig:
    """Copy an adapter's folder, and let it say something else of itself."""
    shutil.copytree(folder, place)
    before = json.loads((place / DESCRIPTION).read_text())
    (place / DESCRIPTION).write_text(json.dumps(before | said))
    return LoraConfig(path=str(place))


def put(base: Path, cfg: LoraConfig, *, critic: bool = False) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    trunk = AutoModelForCausalLM.from_pretrained(base).model if critic else None
    return put_adapter(model, trunk, cfg, base=("org/name", "v1"), seed=0, copy=False, scores=False)


def test_the_layers_that_are_named_get_an_adapter_and_no_others(tmp_path: Path) -> None:
    """By the end of their name, or by the whole of it."""
    model = put(saved(tmp_path), LoraConfig(targets=["q_proj", "model.layers.0.mlp.down_proj"])).model
    assert {name for name, layer in model.named_modules() if hasattr(layer, "lora_A")} == {
        *(f"model.layers.{number}.self_attn.q_proj" for number in range(2)), "model.layers.0.mlp.down_proj",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"r": "2"}, "adapter_config.json cannot be read"),
        ({"r": 0}, "adapter_config.json cannot be read"),
        ({"lora_alpha": math.nan}, "adapter_config.json cannot be read"),
        ({"modules_to_save": [1]}, "peft cannot put it in"),
        ({"target_modules": ".*q_proj", "layers_to_transform": [0]}, "peft cannot put it in"),
        ({"megatron_config": {"a": 1}, "megatron_core": "megatron.core"}, "peft cannot put it in"),
        ({"alpha_pattern": [1]}, "peft cannot put it in"),
        ({"target_modules": "q_proj("}, "peft cannot put it in"),
        ({"target_modules": ["c_attn"]}, "peft cannot put it in"),
    ],
)
def test_a_description_that_fits_nothing_is_one_message(
    said: dict[str, Any], why: str, base: Path, begun: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=rf"adapter\.path=.*{why}"):
        put(base, described(begun, tmp_path / "said", **said))


@pytest.mark.parametrize(
    "said",
    [
        {"alpha_pattern": {"model.layers.0.self_attn.q_proj": 64}},
        {"target_modules": r"model\.layers\.\d+\.(self_attn\.[qv]_proj|mlp\.down_proj)"},
    ],
    ids=["a pattern", "an expression"],
)
def test_a_critic_s_trunk_has_the_adapter_that_the_folder_describes(
    said: dict[str, Any], base: Path, begun: Path, tmp_path: Path
) -> None:
    cfg = described(begun, tmp_path / "said", **said)
    adapter = put(base, cfg, critic=True)
    scales = [
        {name: layer.scaling["default"] for name, layer in part.named_modules() if hasattr(layer, "lora_A")}
        for part in (adapter.model, adapter.trunk)
    ]
    assert scales[0] == {f"model.{name}": scale for name, scale in scales[1].items()}
    assert len(scales[0]) == 15
    assert (adapter.config.base_model_name_or_path, adapter.config.revision) == ("org/name", "v1")


def hub_of(base: Path, place: Path) -> dict[str, Path]:
    """Lay a hub's cache with two commits of a model, of which the second has twice the weights."""
    folders = {commit: place / "models--org--name" / "snapshots" / (commit * 40) for commit in "ab"}
    for commit, folder in folders.items():
        folder.mkdir(parents=True)
        for file in base.iterdir():
            shutil.copy(file, folder) if file.is_file() else None
        for file in folder.glob("*.safetensors"):
            tensors = {name: tensor * (2 if commit == "b" else 1) for name, tensor in load_file(file).items()}
            save_file(tensors, file, metadata={"format": "pt"})
    (place / "models--org--name" / "refs").mkdir()
    return folders


@pytest.mark.slow
def test_a_run_is_held_to_the_commit_that_it_was_started_with(base: Path, tmp_path: Path, shell: Shell) -> None:
    """The branch moves after the first step: going on is refused; what is exported and evaluated is of that commit."""
    folders, branch = hub_of(base, tmp_path / "hub"), tmp_path / "hub" / "models--org--name" / "refs" / "main"
    offline = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    words = ["launch.device=cpu", "logger=none", "model=hf", "model.path=org/name", "adapter=lora", "data.size=8",
             "data.eval_size=4", "train.batch_size=4", "train.max_steps=2", "hydra.run.dir=run"]  # fmt: skip

    def exported(name: str, *more: str) -> Path:
        command = [sys.executable, "-m", "rlexp.export", "run", "--out", name, *more]
        subprocess.run(command, cwd=tmp_path, env=os.environ | offline, check=True, timeout=200, capture_output=True)
        return tmp_path / name

    branch.write_text("a" * 40)
    begun = shell(*words, "train.stop_after=1", **offline)
    assert begun.returncode == 0, begun.stderr
    branch.write_text("b" * 40)
    refused = shell(*words, **offline)
    assert refused.returncode == 1
    assert f"model.path: the model on the hub was at commit {'a' * 12}" in refused.stderr
    there = load_file(exported("merged", "--merged") / "model.safetensors")
    first = load_file(folders["a"] / "model.safetensors")
    assert torch.equal(there["model.embed_tokens.weight"], first["model.embed_tokens.weight"])  # has no adapter
    assert json.loads((exported("adapter") / DESCRIPTION).read_text())["revision"] == "a" * 40
    assert job_of([str(tmp_path / "run")]).cfg.model.revision == "a" * 40
    assert job_of([str(tmp_path / "run"), "model.revision=other"]).cfg.model.revision == "other"


WRONG = {
    "adapter.rank=0": "adapter.rank=0: must be at least 1",
    "adapter.dropout=0.1": "adapter.dropout=0.1: must be 0. Which inputs are dropped would depend on the layout",
    "adapter.path=/nowhere": "adapter.path=/nowhere: no such folder",
    "model.freeze=[a]": "model.freeze=['a']: with adapter=lora all weights of the model are frozen already",
    "model=hf model.path=. model.add_tokens=[x]": "model.add_tokens=['x']: with adapter=lora the rows of new tokens",
    "checkpoint.export=yes": "checkpoint.export=yes: must be true, false or merged",
    "adapter=none checkpoint.export=merged": "checkpoint.export=merged: merges an adapter into its model",
    "adapter=none reference=adapter": "reference=adapter: is the trained model without its adapter, and adapter=none",
    "reference=none": "reference=none: loss=dpo compares the policy with a reference",
    "reference=adapter reference.offload=true": "reference.offload=true: moves the weights of reference=model",
    "loss=simpo reference=precompute": "reference=precompute: loss=simpo compares the policy with no reference",
    "loss=kto reference=precompute": "reference=precompute: loss=kto also asks for answers to other prompts",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_input_is_one_message(words: str) -> None:
    assert refusal_of(["launch.device=cpu", "adapter=lora", *words.split()]).startswith(WRONG[words])


def test_quantized_weights_are_refused_by_name(base: Path, tmp_path: Path) -> None:
    quantized = shutil.copytree(base, tmp_path / "quantized")
    quantized.chmod(0o755)
    said = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").unlink()
    (quantized / "config.json").write_text(json.dumps(said | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(ConfigError, match=r"model\.path=.*: its weights are quantized \(bitsandbytes\)"):
        compose_config(on_stories(quantized))
