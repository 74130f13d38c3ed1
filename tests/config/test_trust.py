"""Code that comes with a model, or that a stored run names, runs only where this command line says so."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from rlexp.base.errors import ConfigError
from rlexp.config import load
from rlexp.config.trust import refuse_code, without_code
from tests.helpers.paths import ROOT

LLAMA = ROOT / "tests" / "files" / "models" / "llama_8b"
HF = ("model=hf", f"model.path={LLAMA}", "launch.device=cpu")


def stored(*words: str) -> dict[str, Any]:
    return load.to_plain(load.compose_config([*HF, *words]))


def test_a_stored_run_does_not_trust_the_code_of_its_model() -> None:
    plain = stored("model.trust_remote_code=true")
    assert plain["model"]["trust_remote_code"] is True
    again = load.from_hydra(load.composed_like(plain, ["launch.device=cpu"]))
    assert load.to_plain(again)["model"]["trust_remote_code"] is False
    given = load.from_hydra(load.composed_like(plain, ["launch.device=cpu", "model.trust_remote_code=true"]))
    assert load.to_plain(given)["model"]["trust_remote_code"] is True


@pytest.mark.parametrize(
    "name", ["{path: x, trust_remote_code: true}", "hf,tiny", "hf@data", "../hf", "", None, 3, ["hf"]]
)
def test_the_name_of_a_stored_option_is_no_override(name: Any) -> None:
    """It is given to Hydra, for which a mapping would set keys."""
    plain = stored()
    with pytest.raises(ConfigError, match=r"^the stored configuration: model\.name=.* is no option of model\."):
        load.composed_like({**plain, "model": {**plain["model"], "name": name}}, ["launch.device=cpu"])
    with pytest.raises(ConfigError, match=r"^the stored configuration: optim\.name="):
        load.composed_like({**plain, "optim": {**plain["optim"], "name": "{lr: 1}"}}, ["launch.device=cpu"])


@pytest.mark.parametrize("leaf", ["trust_remote_code[", "trust_remote_code]", "[trust_remote_code", "a.b", "", 3])
def test_the_name_of_a_stored_key_is_no_path(leaf: Any) -> None:
    """OmegaConf leaves out a bracket that nothing closes, and would set the key without it."""
    plain = stored()
    with pytest.raises(ConfigError, match=r"^the stored configuration: model\..* is no key\."):
        load.composed_like({**plain, "model": {**plain["model"], leaf: True}}, ["launch.device=cpu"])


@pytest.mark.parametrize("group", ["adapter", "reference", "rollout", "optim"])
def test_an_older_run_may_lack_groups(group: str) -> None:
    plain = stored()
    del plain[group]
    again = load.from_hydra(load.composed_like(plain, ["launch.device=cpu"]))
    assert load.to_plain(again)[group].keys() == stored()[group].keys()


def test_what_came_of_a_stored_run_is_looked_at_again() -> None:
    trusting = OmegaConf.create({"model": {"trust_remote_code": True}, "reward": {"function": "???"}})
    refuse_code(trusting, {"model.trust_remote_code"})
    with pytest.raises(ConfigError, match=r"^model\.trust_remote_code: the stored run alone says so\."):
        refuse_code(trusting, set())
    with pytest.raises(ConfigError, match=r"^reward\.function=evil:judge: names Python code"):
        refuse_code(OmegaConf.create({"model": {}, "reward": {"function": "evil:judge"}}), set())
    refuse_code(OmegaConf.create({"model": {"path": "${no_resolver:of this name}"}, "reward": {}}), set())


MODEL = {"name": "model", "path": "somewhere", "trust_remote_code": True}
PYTHON = {"name": "python", "function": "evil:judge"}


@pytest.mark.parametrize(
    ("given", "trusted"),
    [(set(), False), ({"reward.trust_remote_code"}, True), ({"reward"}, True), ({"reward.path"}, False)],
)
def test_nor_of_its_reward_model(given: set[str], trusted: bool) -> None:
    assert without_code({"reward": MODEL}, given)["reward"]["trust_remote_code"] is trusted


def test_nor_of_a_term_of_its_reward() -> None:
    plain = {"reward": {"name": "sum", "terms": {"one": MODEL, "two": PYTHON}}, "model": {"name": "tiny"}}
    with pytest.raises(ConfigError, match=r"^reward\.terms\.two\.function=evil:judge: .* give it again: reward\.terms"):
        without_code(plain, set())
    terms = without_code(plain, {"reward.terms.two.function"})["reward"]["terms"]
    assert (terms["one"]["trust_remote_code"], terms["two"]) == (False, PYTHON)
    assert without_code(plain, {"reward.terms"}) == plain


def test_a_function_that_a_stored_run_names_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^reward\.function=evil:judge: names Python code"):
        without_code({"reward": PYTHON}, {"reward.timeout_seconds"})
    assert without_code({"reward": PYTHON}, {"reward.function"})["reward"] == PYTHON
