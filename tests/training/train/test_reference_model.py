"""A reference model that is not the model that training starts from."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig

from rlexp.base.errors import ConfigError, ModelError
from rlexp.config.checks.reference import model_of_reference
from rlexp.config.identity import identity
from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec
from rlexp.preflight.rehearsal.layers import refuse_unlike_reference
from rlexp.training.model.loading import load_config
from rlexp.training.train.build import build, models_of
from rlexp.training.train.step import train_step
from rlexp.training.train.surroundings import HERE, Surroundings
from rlexp.training.types import Wanted
from tests.helpers.models import SHAPE, saved
from tests.helpers.ranks import on_ranks

KINDS = {"other": "GPT2Config", "windows": "MistralConfig"}
ENGINES = ("torch", "zero2", "zero3", "fsdp2")
WINDOWS = MistralConfig(**{**SHAPE, "sliding_window": 32})
GPT2 = GPT2Config(vocab_size=259, n_embd=48, n_layer=3, n_head=6, n_positions=512, bos_token_id=0, eos_token_id=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy, the same with other weights, one of another architecture and size, and one with windows."""
    place = tmp_path_factory.mktemp("models")
    for name, config, seed in (("policy", None, 0), ("alike", None, 1), ("other", GPT2, 2), ("windows", WINDOWS, 3)):
        model = AutoModelForCausalLM.from_pretrained(saved(place / name, config))
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter) * 0.1
        model.save_pretrained(place / name)
    return place


def configured(folder: Path, reference: str | None, *overrides: str) -> Config:
    of = [] if reference is None else [f"reference.path={folder / reference}"]
    return compose_config(["launch.device=cpu", "logger=none", "data.size=8", "data.eval_size=0", "data.max_length=400",
                           "train.batch_size=4", "train.precision=fp64", "model=hf", f"model.path={folder}/policy", *of,
                           *overrides])  # fmt: skip


def first_steps(_spec: RankSpec, cfgs: Sequence[Config]) -> list[tuple[Any, ...]]:
    """Return for each run the pairs of its first step, the models that were probed, the loss, and its windows."""
    taken = []
    for cfg in cfgs:
        probed: list[str] = []

        class Watched(Surroundings):
            def probe(self, model: Any, config: Any, to: list[str] = probed, **kwargs: Any) -> float:
                to.append(type(config).__name__)
                return super().probe(model, config, **kwargs)

        task = build(cfg, around=Watched())
        pairs = [task.examples.train[index] for index in task.batch(1).indices]
        taken.append((pairs, probed, train_step(task, 1)["train/loss"], set(task.run.windows)))
        task.close()
    return taken


def sums(model: Any, pairs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Add up each answer's log-probabilities by transformers alone."""

    def of(prompt: Any, answer: Any) -> torch.Tensor:
        ids = torch.tensor([[*prompt.tolist(), *answer.tolist()]])
        logps = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        return logps[len(prompt) - 1 :].sum()

    return {side: torch.stack([of(pair.prompt, pair.answers[place]) for pair in pairs])
            for place, side in enumerate(("chosen", "rejected"))}  # fmt: skip


@torch.no_grad()
def loss_of(policy: Path, reference: Path, pairs: Sequence[Any], beta: float = 0.1) -> float:
    """DPO's loss as its paper writes it (arXiv 2305.18290)."""
    ours, theirs = (
        sums(AutoModelForCausalLM.from_pretrained(place, dtype=torch.float64), pairs) for place in (policy, reference)
    )
    ratios = {side: ours[side] - theirs[side] for side in ours}
    return float(-torch.nn.functional.logsigmoid(beta * (ratios["chosen"] - ratios["rejected"])).mean())


def test_the_policy_is_compared_with_it_on_a_ring(folder: Path) -> None:
    names = ("alike", "other", "policy", "windows")
    cfgs = [configured(folder, name, "parallel=ring2") for name in (*names, None)]
    for taken in on_ranks(2, first_steps, cfgs):
        for name, (pairs, probed, loss, _) in zip(names, taken, strict=False):
            assert loss == pytest.approx(loss_of(folder / "policy", folder / name, pairs), rel=1e-6), name
            assert probed == ["LlamaConfig", KINDS.get(name, "LlamaConfig")]
        alike, _, policy, windows, alone = taken
        assert abs(alike[2] - alone[2]) > 1e-3
        assert policy[2] == alone[2]
        assert alone[1] == ["LlamaConfig"]
        assert (windows[3], alone[3]) == ({None, 32}, {None})  # what its packs are planned for


def test_every_engine_holds_it(folder: Path) -> None:
    cfgs = [configured(folder, "other", "train.precision=fp32", f"engine={engine}", "launch.nproc=2")
            for engine in ENGINES]  # fmt: skip
    for taken in on_ranks(2, first_steps, cfgs):
        for engine, (pairs, _, loss, _) in zip(ENGINES, taken, strict=True):
            assert loss == pytest.approx(loss_of(folder / "policy", folder / "other", pairs), rel=1e-4), engine


def test_one_with_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    saved(tmp_path, LlamaConfig(**{**SHAPE, "vocab_size": 300}))
    cfg = configured(folder, str(tmp_path))
    with pytest.raises(ModelError) as error:
        models_of(cfg, load_config(cfg.model, 400), Wanted(reference=True), HERE)
    said = f"reference.path={tmp_path}: has a vocabulary of 300 tokens, and the policy of 259."
    assert str(error.value).startswith(said)


def test_one_whose_heads_do_not_fit_the_layout_is_refused_before_a_process_starts(folder: Path) -> None:
    with pytest.raises(ConfigError) as error:
        configured(folder, "other", "parallel=ring4", "parallel.layout=ulysses")
    said = f"reference.path={folder}/other: runs as the policy does. parallel.layout=ulysses: the model has 6 heads"
    assert str(error.value).startswith(said)


def test_a_folder_without_a_model_is_named(folder: Path, tmp_path: Path) -> None:
    cfg = configured(folder, str(tmp_path))
    with pytest.raises(ModelError, match=f"^reference.path={tmp_path}: no causal model can be loaded"):
        load_config(model_of_reference(cfg), 400)


def test_it_is_identified_by_its_contents(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "alike", tmp_path / "moved")
    moved, alike, policy = (identity(configured(folder, str(name)))["reference.path"]["contents"]
                            for name in (tmp_path / "moved", "alike", "policy"))  # fmt: skip
    assert moved == alike != policy
    assert identity(configured(folder, None))["reference.path"] is None


def test_only_one_like_the_policy_is_rehearsed(folder: Path) -> None:
    policy = load_config(configured(folder, None).model, 400)
    for name in (None, "alike"):
        refuse_unlike_reference(configured(folder, name), policy)
    with pytest.raises(ConfigError, match=f"^reference.path={folder}/other: its layers are not those of"):
        refuse_unlike_reference(configured(folder, "other"), policy)
