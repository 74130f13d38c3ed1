"""An evaluation of a run has each key of the run that a value depends on, and so the values of the run's own row."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ValidationError
from transformers import AutoModelForCausalLM

from bench.resume import Where, run
from rlexp.base.errors import ConfigError
from rlexp.config.load import DERIVED, OF_CURVE, OF_HERE, compose_config, composed_like, to_plain
from rlexp.config.schema import KINDS
from rlexp.config.schema.loss_terms import compares
from rlexp.eval.job import for_evaluation, job_of, on_ranks
from rlexp.eval.rank import evaluate_rank
from rlexp.run_files.metrics_jsonl import read_rows
from tests.helpers.adapters import adapter_of
from tests.helpers.models import saved

TERMS = [{"loss": "ipo", "weight": 0.5}]
VALUES = ("other", 3, 4, 0.5, True, False, ["other"], [0.5], {"other": "key"})  # of every kind
OPTIONS = [*(("reference", name) for name in ("model", "adapter", "precompute", "none")),
           *(("optim", name) for name in ("adamw", "sgd")), ("rollout", "default"),
           *((group, name) for group, kinds in KINDS.items() for name in kinds)]  # fmt: skip
DRAWN = ("reward.text=e", "rollout.max_new_tokens=8", "data.max_length=128", "eval.buckets=[]")
MORE = {"mpo": ("loss.terms=[{loss: dpo, weight: 0.8}, {loss: bco_pair, weight: 0.2}]",)}
RUN = ("data.size=16", "data.eval_size=5", "train.batch_size=4", "train.max_steps=2", "train.eval_every=2",
       "checkpoint.save_every=2", "optim.lr=1e-3", "model=hf", "eval.buckets=[110]")  # fmt: skip


def plain_of(*words: str) -> dict[str, Any]:
    return to_plain(compose_config(["launch.device=cpu", *words]))


# ---- keys ----


def changed(group: DictConfig) -> dict[str, Any]:
    """Give each key of a group another value of its kind, and return them as a file has them."""
    before = as_in_files(group)
    if "terms" in before and before["name"] == "mpo":
        group["terms"] = TERMS
    for leaf in {leaf for leaf, value in as_in_files(group).items() if value == before[leaf]} - {"name"}:
        typed = None if OmegaConf.is_missing(group, leaf) else group[leaf]
        for value in [*type(typed)] if isinstance(typed, Enum) else VALUES:
            try:
                group[leaf] = value
            except ValidationError:  # is of another kind
                continue
            if as_in_files(group)[leaf] != before[leaf]:
                break
        assert as_in_files(group)[leaf] != before[leaf], leaf
    return as_in_files(group)


def as_in_files(group: Any) -> dict[str, Any]:
    found = OmegaConf.to_container(group, enum_to_str=True)
    assert isinstance(found, dict)
    return {str(leaf): value for leaf, value in found.items()}


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=map("=".join, OPTIONS))
def test_each_key_is_that_of_the_run(group: str, option: str) -> None:
    """All keys of an option have other values than their defaults."""
    plain = plain_of()
    of_run = changed(composed_like(plain, [f"{group}={option}"])[group])
    if option == "lora":  # a folder decides the other keys
        of_run["path"] = None
    code = [f"{group}.{leaf}={of_run[leaf]}" for leaf in ("trust_remote_code", "function") if of_run.get(leaf)]
    again = as_in_files(composed_like({**plain, group: of_run}, code)[group])  # what runs code is typed again
    own = dict.fromkeys(key.removeprefix(f"{group}.") for key in (DERIVED, *OF_HERE))
    assert {**again, **own} == {**of_run, **own}


def test_no_group_is_left_out() -> None:
    assert {group for group, _ in OPTIONS} == {*OF_CURVE}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to train, another to compare it with, and an adapter of the first."""
    place = tmp_path_factory.mktemp("models")
    for name, seed in (("policy", 1), ("other", 2)):
        model = AutoModelForCausalLM.from_pretrained(saved(place / name))
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter) * 0.1
        model.save_pretrained(place / name)
    adapter_of(place / "policy", place / "adapter")
    return place


def test_the_reference_is_that_of_the_run_however_it_is_computed(models: Path) -> None:
    """Another loss that compares with none leaves it out, and one that is typed is checked as ever."""
    given = f"reference.path={models}/other"
    plain = plain_of("model=hf", f"model.path={models}/policy", given)

    def reference(*words: str) -> tuple[str, str | None]:
        found = for_evaluation(composed_like(plain, [*words, "launch.device=cpu"])).reference
        return found.name.value, found.path

    assert reference() == reference("loss=ipo") == ("model", f"{models}/other")
    assert reference("reference=precompute") == ("precompute", f"{models}/other")
    assert reference("loss=simpo") == ("model", None)
    assert reference("reference.path=null") == ("model", None)
    assert reference("loss=mpo", "loss.terms=[{loss: simpo, weight: 1.0}]") == ("model", None)
    assert reference("loss=mpo", "loss.terms=[{loss: dpo, weight: 1.0}]") == ("model", f"{models}/other")
    for wrong in (["reference=none"], ["reference=adapter", "adapter=lora"], ["loss=simpo", given]):
        with pytest.raises(ConfigError, match=r"^reference"):
            reference(*wrong)


# ---- values ----

CASES = {
    "reference": ("reference.path={models}/other",),
    "adapter": ("adapter=lora", "adapter.path={models}/adapter"),
    "both": ("adapter=lora", "adapter.path={models}/adapter", "reference.path={models}/other"),
    "neither": (),
}
COMPARING = {name for name, kind in KINDS["loss"].items() if name == "mpo" or compares(kind())}
RUNS = [(case, loss) for case, words in CASES.items() for loss in KINDS["loss"]
        if loss in COMPARING or not any("reference" in word for word in words)]  # fmt: skip


@pytest.mark.parametrize(("case", "loss"), RUNS, ids=map(" ".join, RUNS))
def test_the_values_are_those_of_the_run_s_row(case: str, loss: str, models: Path, tmp_path: Path) -> None:
    """To the bit, on one layout."""
    more = DRAWN if KINDS["loss"][loss].draws else MORE.get(loss, ())
    words = (f"loss={loss}", f"model.path={models}/policy", *(word.format(models=models) for word in CASES[case]))
    folder = run(Where("torch", 1, 1, "fp64"), tmp_path / "run", *RUN, *words, *more)
    found = on_ranks(
        evaluate_rank, job_of([str(folder), "launch.device=cpu", "parallel=ring1", "train.micro_batch_size=1"])
    )
    row = read_rows(folder / "metrics.jsonl")[-1]
    assert found.values == {name: value for name, value in row.items() if name.startswith("eval/")}
    assert found.values
