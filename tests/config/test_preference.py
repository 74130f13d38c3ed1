"""The rules of losses over pairs: what fits which loss, and the terms of a sum."""

from __future__ import annotations

import dataclasses
import re
from typing import cast

import pytest

from rlexp.base.errors import ConfigError
from rlexp.config import load
from rlexp.config.checks.reference import check_reference
from rlexp.config.identity import curve_keys
from rlexp.config.load import compose_config
from rlexp.config.schema import KINDS, HFModelConfig, ReferenceConfig
from rlexp.config.schema.loss_terms import TERMS, compares, loss_terms
from rlexp.config.schema.losses import ALL_MODIFIERS, BCOPairConfig, PreferenceConfig, Shift
from rlexp.config.schema.row_kinds import Kind
from tests.helpers.refusals import refusal_of

OVER_PAIRS = [name for name, kind in KINDS["loss"].items() if issubclass(kind, PreferenceConfig)]
WITHOUT_REFERENCE = ["simpo", "orpo", "cpo"]
MODIFIERS = {"wpo": "true", "ld_alpha": "0.5", "margin_weight": "1.0"}


def terms(*each: str) -> list[str]:
    return ["loss=mpo", f"loss.terms=[{','.join(each)}]"]


REFUSED: dict[str, tuple[list[str], str]] = {
    "no scale": (["loss=ipo", "loss.beta=0"], "loss.beta=0.0: must be greater than 0. For example: loss.beta=0.1."),
    "negative scale": (["loss=simpo", "loss.beta=-1"], "loss.beta=-1.0: must be greater than 0."),
    "negative weight": (["loss.sft_weight=-1"], "loss.sft_weight=-1.0: must be at least 0."),
    "half of the labels": (["loss=robust", "loss.label_smoothing=0.5"], "must be at least 0 and less than 0.5."),
    "no smoothing for exo": (["loss=exo_pair", "loss.label_smoothing=0"], "must be greater than 0 and less than 0.5."),
    "lengths that grow": (["loss.ld_alpha=1.5"], "loss.ld_alpha=1.5: must be at least 0 and at most 1."),
    "another loss's key": (["loss=ipo", "loss.gamma=1"], "loss.gamma: belongs to loss=simpo and loss=ppo."),
    "another loss's option": (["loss=bco_pair", "loss.shift=min"], "loss.shift=min: must be one of none, mean."),
    "ipo's own choice": (["loss=ipo", "loss.normalize=fixed"], "fixed: must be one of token, sequence. For"),
    "a choice of the same name": (["loss=grpo", "loss.normalize=x"], "must be one of token, sequence, fixed. For"),
    "a name set by hand": (["loss.name=ipo"], "loss.name=ipo: is set by choosing loss=OPTION. Options: dpo, dpo_norm,"),
    "wpo of a pack": (["loss=aot", "loss.wpo=true"], "loss.wpo=true: has no meaning for loss=aot. Leave it out, "),
    "lengths of means": (["loss=dpo_norm", "loss.ld_alpha=0.5"], "has no meaning for loss=dpo_norm."),
    "margin of ipo": (["loss=ipo", "loss.margin_weight=1"], "it fits: loss=dpo, loss=dpo_norm, loss=simpo, loss=cpo, "),
    "wpo of a sum": (["loss=mpo", "loss.wpo=true"], "loss.wpo=true: has no meaning for loss=mpo."),
    "lengths and likelihood": (
        ["loss.ld_alpha=0.5", "loss.sft_weight=1"],
        "loss.ld_alpha=0.5: the supervised term of loss.sft_weight=1.0 learns chosen answers as a whole. Use "
        "loss.sft_weight=0, or loss.ld_alpha=1.",
    ),
    "lengths and wpo": (
        ["loss.ld_alpha=0.5", "loss.wpo=true"],
        "loss.ld_alpha=0.5: the weights of loss.wpo=true are those of whole answers. Use loss.wpo=false, or",
    ),
    "no terms": (["loss=mpo", "loss.terms=[]"], "loss.terms=[]: has no term, and loss=mpo adds its terms up."),
    "nothing to learn": (
        terms("{loss:dpo,weight:0}", "{loss:ipo,weight:0}"),  # with the sum's own sft_weight, which is not 0
        "all weights are 0, so no answers would be compared.",
    ),
    "a term twice": (terms("{loss:dpo}", "{loss:ipo}", "{loss:dpo}"), "terms.2.loss=dpo: stands in the list twice."),
    "unknown term": (
        terms("{loss:hing}"), "loss.terms.0.loss=hing: no such loss over pairs. Did you mean hinge? Losses: dpo,"
    ),
    "a policy loss": (terms("{loss:ppo}"), "loss.terms.0.loss=ppo: no such loss over pairs."),
    "a sum in a sum": (terms("{loss:mpo}"), "loss.terms.0.loss=mpo: no such loss over pairs."),
    "sft as a term": (terms("{loss:sft}"), "loss=sft: the likelihood of the chosen answers is not a term."),
    "a term without a loss": (terms("{weight:1}"), "loss.terms.0.loss: is missing. Losses: dpo,"),
    "a name alone": (terms("dpo"), "loss.terms.0=dpo: must be a group of keys. For example: 'loss.terms=["),
    "negative term": (terms("{loss:dpo,weight:-1}"), "loss.terms.0.weight=-1: must be a number, at least 0."),
    "a text for a weight": (terms("{loss:dpo,weight:x}"), "loss.terms.0.weight=x: must be a number, at least 0."),
    "a key of the sum": (
        terms("{loss:dpo,sft_weight:2}"), "loss.terms.0.sft_weight=2: belongs to the whole loss, and not to a term."
    ),
    "a modifier in a sum": (terms("{loss:dpo,wpo:true}"), "loss.terms.0.wpo=true: has no meaning in a sum of losses."),
    "a term's typo": (terms("{loss:dpo,bta:1}"), "loss.terms.0.bta: no such key of loss=dpo. Did you mean beta?"),
    "a term's scale": (terms("{loss:dpo,beta:0}"), "loss.terms.0.beta=0.0: must be greater than 0."),
    "a term's option": (
        terms("{loss:bco_pair,shift:most}"), "loss.terms.0.shift=most: must be one of none, mean. For example: "
        "loss.terms.0.shift=mean."),
    "a term's null": (
        terms("{loss:dpo,beta:null}"), "loss.terms.0.beta=null: must be a number. For example: loss.terms.0.beta=0.1."),
    "a huge scale": (terms(f"{{loss:dpo,beta:{'9' * 400}}}"), "999: must be a number. For example: loss.terms.0.beta="),
    "a huge weight": (terms(f"{{loss:dpo,weight:{'9' * 400}}}"), "999: must be a number, at least 0. For example: "),
    "terms of another loss": (["loss.terms=[{loss:dpo}]"], "loss.terms: belongs to loss=mpo. Say loss=mpo loss.terms="),
    "prompts for pairs": (["loss=orpo", "data=arithmetic"], "data=arithmetic: has prompts and no answers, and loss"),
    "a rollout of pairs": (["loss=cpo", "rollout=pipelined"], "rollout.mode=pipelined: loss=cpo generates no samples."),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_message(case: str) -> None:
    overrides, said = REFUSED[case]
    message = refusal_of(["launch.device=cpu", *overrides])
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize("loss", OVER_PAIRS)
@pytest.mark.parametrize("leaf", MODIFIERS)
def test_a_modifier_passes_where_it_fits_and_nowhere_else(loss: str, leaf: str) -> None:
    given = ["launch.device=cpu", f"loss={loss}", "loss.sft_weight=0", f"loss.{leaf}={MODIFIERS[leaf]}"]
    if leaf in KINDS["loss"][loss].fits:  # type: ignore[attr-defined]
        assert compose_config(given)
        return
    message = refusal_of(given)
    assert message.startswith(f"loss.{leaf}={MODIFIERS[leaf]}: has no meaning for loss={loss}.")
    assert re.findall(r"loss=(\w+)", message)[1:] == [
        name for name in OVER_PAIRS if leaf in KINDS["loss"][name].fits]  # type: ignore[attr-defined]  # fmt: skip


def test_every_modifier_is_tried() -> None:
    assert {*MODIFIERS} == ALL_MODIFIERS


@pytest.mark.parametrize("loss", OVER_PAIRS)
def test_a_reference_is_refused_where_the_loss_has_none(loss: str) -> None:
    cfg = compose_config(["launch.device=cpu", f"loss={loss}"])
    assert isinstance(cfg.loss, PreferenceConfig)
    assert (cfg.loss.rows, cfg.loss.draws) == (Kind.pairs, False)
    assert compares(cfg.loss) == (loss not in WITHOUT_REFERENCE)
    if compares(cfg.loss):
        return
    asked = dataclasses.replace(
        cfg, model=HFModelConfig(path="org/policy"), reference=ReferenceConfig(path="org/reference")
    )
    with pytest.raises(ConfigError, match=f"^reference.path=org/reference: loss={loss} compares the policy with no"):
        check_reference(asked)


def test_a_sum_compares_if_one_of_its_terms_does() -> None:
    alone, both = terms("{loss:simpo}", "{loss:cpo}"), terms("{loss:simpo}", "{loss:dpo}")
    found = [compose_config(["launch.device=cpu", *each]).loss for each in (alone, both)]
    assert [compares(cast(PreferenceConfig, loss)) for loss in found] == [False, True]


def test_the_terms_of_a_sum_are_losses_of_their_own() -> None:
    smoothed, unshifted = "{loss:dpo,weight:0.8,label_smoothing:0.1}", "{loss:bco_pair,shift:none,beta:1}"
    given = terms(smoothed, unshifted, "{loss:ipo,weight:0}")
    cfg = compose_config(["launch.device=cpu", "loss.beta=0.3", *given])
    assert isinstance(cfg.loss, PreferenceConfig)
    one, two = loss_terms(cfg.loss)
    assert (one.name, one.weight, one.cfg.beta, vars(one.cfg)["label_smoothing"]) == ("dpo", 0.8, 0.3, 0.1)
    assert isinstance(two.cfg, BCOPairConfig)
    assert (two.weight, two.cfg.beta, two.cfg.shift) == (1.0, 1.0, Shift.none)
    assert load.from_plain(load.to_plain(cfg)) == cfg
    (single,) = loss_terms(cast(PreferenceConfig, compose_config(["launch.device=cpu", "loss=orpo"]).loss))
    assert (single.name, single.weight, single.cfg.sft_weight) == ("orpo", 1.0, 1.0)


def test_every_loss_can_be_a_term() -> None:
    """loss.beta is the scale of those whose beta means what that of dpo means; the others keep their own default."""
    cfg = compose_config(["launch.device=cpu", "loss.beta=0.7", *terms(*(f"{{loss:{name}}}" for name in TERMS))])
    found = loss_terms(cast(PreferenceConfig, cfg.loss))
    assert {term.cfg.sft_weight for term in found} == {0.0}
    own = {"dpo_norm": 5.0, "ipo": 0.1, "simpo": 2.0, "orpo": 0.1, "cpo": 0.1}
    assert {term.name: term.cfg.beta for term in found} == {name: own.get(name, 0.7) for name in TERMS}


def test_an_option_that_an_interpolation_puts_into_a_term_is_its_name() -> None:
    overrides = ["loss=mpo", "loss.terms=[{loss:ipo,normalize:${logger.name}}]", "logger=none"]
    assert refusal_of(overrides).startswith("loss.terms.0.normalize=none: ")


def test_a_curve_depends_on_each_key_of_each_term() -> None:
    """However it is said: a default that is given is no other run."""
    said = [terms("{loss:dpo,weight:0.8}", "{loss:bco_pair}"),
            terms("{loss:bco_pair,weight:1.0,shift:mean}", "{loss:dpo,weight:0.8,beta:0.1}", "{loss:ipo,weight:0}"),
            terms("{loss:dpo,weight:0.8}", "{loss:bco_pair,shift:none}")]  # fmt: skip
    one, same, other = (curve_keys(compose_config(["launch.device=cpu", *each])) for each in said)
    assert one == same
    assert {key for key in one if one[key] != other[key]} == {"loss.terms.bco_pair.shift"}
    assert "loss.terms" not in one
    assert "loss.sft_weight" in one
