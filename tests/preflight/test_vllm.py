"""Preflight of a run whose samples vLLM draws. vLLM itself is not rehearsed: its share is arithmetic."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from rlexp.base.byte_counts import GIB, MIB, size
from rlexp.config.elsewhere import composed_for
from rlexp.config.load import compose_config
from rlexp.config.schema import AUTO, Config
from rlexp.config.schema.rollouts import RolloutEngine
from rlexp.launch import preflight_check
from rlexp.preflight import report
from rlexp.preflight.answer import Answer
from rlexp.preflight.changes import singles
from rlexp.preflight.longest_that_fits import fit_from, with_length
from rlexp.preflight.predict import Found, Prediction, predict
from rlexp.preflight.rehearsal.log import CACHE, VLLM
from rlexp.preflight.vllm import count_parameters, room, share_of, too_little_to_sample
from rlexp.training.model.loading import load_config
from tests.helpers.ranks import on_ranks
from tests.helpers.rehearsals import alone, counted, elsewhere, judged, rehearsed
from tests.preflight.test_preflight import preflight

GRPO = ("loss=grpo", "data=arithmetic", "reward.rule=length", "rollout.engine=vllm")
MEMORY = 5 * GIB  # of a GPU, of which 2.5 are kept free
SMALL = (*GRPO, "launch.nproc=1", "engine=torch", "train.precision=bf16", "hardware.memory_gib=5",
         "data.max_length=200", "train.max_tokens_per_micro_batch=200")  # fmt: skip


def by_vllm(cfg: Config) -> Config:
    """vLLM need not be installed here."""
    return dataclasses.replace(cfg, rollout=dataclasses.replace(cfg.rollout, engine=RolloutEngine.vllm))


# ---- the rehearsal ----


def test_real_ranks_hold_what_is_rehearsed_without_vllm() -> None:
    """While weights are gathered for it, and while samples are scored and trained on. Nothing is drawn by `native`."""
    words = ("launch.device=cpu", "logger=none", "train.max_steps=1", "train.batch_size=4", "data.max_length=96",
             "rollout.max_new_tokens=72", "rollout.batch_size=4", "rollout.n_samples=3", "rollout.score_batch_size=4",
             "data.share_prefix=false", "loss=grpo", "data=arithmetic", "reward.rule=arithmetic", "engine=zero2",
             "launch.nproc=2", "parallel=ring2", "train.precision=bf16")  # fmt: skip
    cfg = by_vllm(compose_config([*words]))
    real, predicted = on_ranks(2, counted, cfg)[1], rehearsed(cfg, 1)
    assert predicted["peaks"] == real["peaks"]
    assert (predicted["flops"], predicted["sent"]) == (real["flops"], real["sent"])
    native = rehearsed(compose_config([*words]), 1)
    assert predicted["flops"] < native["flops"]


# ---- its share ----


def _predicted(cfg: Config) -> Found:
    from rlexp.preflight.children import at_once
    from rlexp.preflight.rehearsal.rehearse import preload

    preload()
    (found,) = at_once([predict(cfg, load_config(cfg.model, cfg.data.max_length))], 1)
    return found


@pytest.fixture(scope="module")
def found() -> Found:
    """One rehearsal, which depends on no share."""
    return alone(_predicted, elsewhere(*SMALL))


def shared(found: Found, *words: str) -> tuple[Prediction, Config]:
    """Return the prediction with other keys of vLLM's."""
    cfg = elsewhere(*SMALL, *words)
    vllm = share_of(cfg, load_config(cfg.model, cfg.data.max_length))
    assert vllm is not None
    kept = found.prediction.vllm.kept if found.prediction.vllm else 0
    return dataclasses.replace(found.prediction, vllm=dataclasses.replace(vllm, kept=kept)), cfg


def test_auto_takes_in_whole_percents_what_training_leaves(found: Found) -> None:
    least, cfg = shared(found)
    own = max(sum(count for kind, count in each.by_kind.items() if kind != VLLM) for each in least.peaks.values())
    share = math.floor(100 * (2.5 * GIB - own) / MEMORY) / 100
    assert 0.4 < share < 0.5
    whole = least.with_share()
    assert whole.vllm is not None
    assert whole.vllm.holds.share == share
    assert whole.peak.bytes == own + int(share * MEMORY) <= room(cfg)
    assert whole.peak.bytes > room(cfg) - MEMORY / 100
    assert all(each.by_kind[VLLM] == int(share * MEMORY) for each in whole.peaks.values())
    assert all(each.by_kind[CACHE] == 0 for each in whole.peaks.values()), "nothing is drawn by `native`"
    assert whole.fits(room(cfg))
    assert whole.refused is None
    assert whole.with_share() == whole


def test_auto_leaves_what_is_assumed_beside_tensors(found: Found) -> None:
    """Where that is more than the reserve: for the communicators of many ranks."""
    least, _ = shared(found)
    assert least.vllm is not None
    more = dataclasses.replace(least, vllm=dataclasses.replace(least.vllm, kept=120 * MIB)).with_share()
    whole = least.with_share()
    assert whole.vllm is not None
    assert more.vllm is not None
    assert round(100 * (whole.vllm.holds.share - more.vllm.holds.share)) in (2, 3)  # of 51.2 MiB each


def test_asleep_it_holds_memory_in_rollouts_only(found: Found) -> None:
    awake, cfg = shared(found, "rollout.vllm_memory=0.3")
    asleep, _ = shared(found, "rollout.vllm_memory=0.3", "rollout.vllm_sleep=true")
    share = int(0.3 * MEMORY)
    assert {phase: each.by_kind[VLLM] for phase, each in asleep.peaks.items() if each.by_kind[VLLM]} == {
        "rollout": share
    }
    own = {phase: each.bytes - share for phase, each in awake.peaks.items()}
    assert asleep.peak.bytes == max(own["rollout"] + share, max(own.values()))
    assert asleep.peak.bytes < awake.peak.bytes == max(own.values()) + share
    auto = shared(found, "rollout.vllm_sleep=true")[0].with_share()
    assert auto.vllm is not None
    assert auto.vllm.holds.share == math.floor(100 * (2.5 * GIB - own["rollout"]) / MEMORY) / 100
    assert auto.fits(room(cfg))


@pytest.mark.parametrize(("words", "said"), [
    (("rollout.vllm_memory=0.6",),
     r"rollout\.vllm_memory=0\.6: vLLM takes 3\.0 GiB, and the rank itself holds [\d.]+ MiB \(\w+\) of the "
     r"2\.5 GiB that it may take\. Use rollout\.vllm_memory=0\.4\d or less, or auto"),
    (("rollout.vllm_memory=0.001", "model.layers=200"),
     r"rollout\.vllm_memory=0\.001: vLLM has 5\.1 MiB, and needs 5\d\d\.\d MiB: \d+\.\d MiB weights, \d\.\d MiB "
     r"keys and values of one answer of 208 tokens, 5\d\d\.\d MiB working memory \(assumed\)\. Use "
     r"rollout\.vllm_memory=0\.11 to 0\.4\d, or auto"),
    (("model.hidden_size=65536",),
     r"rollout\.vllm_memory=auto: vLLM needs [\d.]+ GiB: .* one answer of 208 tokens, .*; the rank itself "
     r"holds [\d.]+ MiB \(\w+\) of the 2\.5 GiB that it may take\. Use a change that needs less memory beside "
     r"it, rollout=pipelined, .* or rollout\.engine=native"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_numbers(found: Found, words: tuple[str, ...], said: str) -> None:
    prediction, cfg = shared(found, *words)
    assert not prediction.with_share().fits(room(cfg))
    refused = prediction.with_share().refused
    assert refused is not None
    assert re.fullmatch(said, refused), refused
    whole = prediction.with_share()
    lines = list(report._verdict(Answer(cfg, 0, whole, {}, {}, [], None)))
    if whole.peak.bytes > room(cfg):
        assert lines == [f"does not fit: {size(whole.peak.bytes)} at the peak ({whole.peak.phase}), of 2.5 GiB.",
                         f"{refused}."]  # fmt: skip
    else:
        assert lines == [f"does not fit: {refused}."]


def test_the_message_of_a_refused_run_has_it(found: Found) -> None:
    prediction, cfg = shared(found, "rollout.vllm_memory=0.6")
    peak = prediction.peak
    decision = preflight_check.Decision(
        "x", fits=False, limit=room(cfg), peak=peak.bytes, phase=peak.phase, vllm=prediction.refused, remedy="Less. "
    )
    message = preflight_check.refusal(cfg, decision).reason
    assert message.startswith("the run does not fit: it needs 3.")
    assert f" on h100; and {prediction.refused}. Less. To start it all the same: launch.preflight=off." in message
    small, _ = shared(found, "rollout.vllm_memory=0.00001")
    assert small.peak.bytes < room(cfg), "vLLM cannot start, and all else fits"
    told = dataclasses.replace(decision, peak=small.peak.bytes, vllm=small.refused)
    assert preflight_check.refusal(cfg, told).reason.startswith("the run does not fit: rollout.vllm_memory=1e-05: ")


def test_the_seconds_are_those_of_what_it_reads(found: Found) -> None:
    """32 answers of 64 tokens: for each token the weights, and the keys of all answers that are computed at once."""
    prediction, _ = shared(found, "rollout.vllm_memory=0.3")
    vllm = prediction.vllm
    assert vllm is not None
    holds, rates = vllm.holds, vllm.rates
    assert holds.at_once >= 32
    step = (holds.weights + 32 * holds.token * (200 - 64 + 32)) / rates.memory
    reading = 2 * vllm.parameters * 8 * (200 - 64) / rates.products
    assert vllm.seconds == pytest.approx(64 * step + max(reading, holds.weights / rates.memory))
    slow = dataclasses.replace(vllm, rates=dataclasses.replace(rates, products=1e6))  # arithmetic counts
    assert slow.seconds == pytest.approx(2 * vllm.parameters * (8 * (200 - 64) + 64 * 32) / 1e6)
    one_by_one = dataclasses.replace(holds, bytes=holds.least)
    assert dataclasses.replace(vllm, holds=one_by_one).seconds > 20 * 64 * holds.weights / rates.memory
    without = dataclasses.replace(prediction, vllm=None)
    assert prediction.seconds == pytest.approx(without.seconds + vllm.seconds)


def test_the_longest_sequence_fits_into_a_stated_share(found: Found) -> None:
    """In place of rehearsals, peaks that do not depend on the length: what ends the search is vLLM's answer."""
    prediction, cfg = shared(found, "rollout.vllm_memory=0.3")
    model = load_config(cfg.model, cfg.data.max_length)

    def again(cfg: Config) -> Found:
        return Found(dataclasses.replace(prediction, vllm=share_of(cfg, model)), None, found.log)

    longest = _searched(cfg, model, again)
    assert longest.exact
    fits, more = (share_of(with_length(cfg, longest.tokens + each), model) for each in (0, 2048))
    assert fits is not None
    assert more is not None
    assert fits.holds.least <= fits.holds.bytes < more.holds.least


def _searched(cfg: Config, model: Any, again: Any) -> Any:
    """Run the search in this process, and answer each question of it."""
    import rlexp.preflight.longest_that_fits as module

    def predict_again(cfg: Config, *_: Any) -> Any:
        return again(cfg)
        yield

    before, module.predict_again = module.predict_again, predict_again
    try:
        task = fit_from(cfg, model, again(cfg), 0.0)
        while True:
            next(task)
    except StopIteration as end:
        return end.value
    finally:
        module.predict_again = before


# ---- changes ----


def test_other_shares_are_offered() -> None:
    offered = dict(singles(elsewhere(*SMALL, "rollout.vllm_memory=0.3")))
    assert offered["rollout.vllm_memory=auto"].rollout.vllm_memory == AUTO
    assert offered["rollout.vllm_sleep=true"].rollout.vllm_sleep
    assert not any(each.startswith("rollout.micro_batch_size") for each in offered), "it means nothing to vLLM"
    assert "rollout.vllm_memory=auto" not in dict(singles(elsewhere(*SMALL)))
    native = dict(singles(elsewhere(*SMALL, "rollout.engine=native")))
    assert "rollout.vllm_sleep=true" not in native
    assert "rollout.micro_batch_size=8" in native


# ---- ranks that only sample ----


def test_a_rank_that_only_samples_has_room_for_an_answer() -> None:
    words = (*GRPO, "rollout=pipelined", "launch.device=cuda", "hardware=h100", "launch.nproc=8", "model.layers=200")
    cfg = composed_for([*words], Path())
    model = load_config(cfg.model, cfg.data.max_length)
    assert too_little_to_sample(cfg, model) is None
    long = composed_for([*words, "data.max_length=40000000", "model.hidden_size=256"], Path())
    said = too_little_to_sample(long, load_config(long.model, 512)) or ""
    assert said.startswith(
        "rollout.vllm_memory=auto: on a rank that samples, vLLM has 71.2 GiB of 79.1 GiB, and needs "
    )
    assert said.endswith("Use GPUs with more memory, a smaller data.max_length, or rollout.engine=native.")
    little = composed_for([*words, "rollout.vllm_memory=0.0001"], Path())
    said = too_little_to_sample(little, model) or ""
    assert "rollout.vllm_memory=0.0001: on a rank that samples, vLLM has 8.1 MiB of 79.1 GiB" in said
    assert "Use rollout.vllm_memory=0.0" in said


# ---- before a run starts ----


@pytest.mark.parametrize(("words", "fits"), [((), True), (("rollout.vllm_memory=0.6",), False)])
def test_the_launcher_is_told_the_share(found: Found, words: tuple[str, ...], fits: bool) -> None:
    prediction, cfg = shared(found, *words)
    whole = prediction.with_share()
    answer = alone(judged, cfg)
    assert whole.vllm is not None
    assert (answer["fits"], answer["vllm_memory"], answer["vllm"]) == (fits, whole.vllm.holds.share, whole.refused)
    assert answer["peak"] == whole.peak.bytes
    assert answer["peaks"]["backward"]["vLLM"] == whole.vllm.holds.bytes


@pytest.mark.parametrize(("words", "told", "share"), [
    ((), preflight_check.Decision(fits=True, vllm_memory=0.33), 0.33),
    ((), preflight_check.Decision(why="it took too long."), 0.4), (("launch.preflight=off",), None, 0.4),
    (("rollout.vllm_memory=0.2",), preflight_check.Decision(fits=True, vllm_memory=0.2), 0.2),
])  # fmt: skip
def test_ranks_are_given_a_number(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told: preflight_check.Decision | None, share: float
) -> None:
    def rehearsed(_cfg: Config, _key: str, *, fitting: bool, **_: Any) -> preflight_check.Decision:
        assert fitting
        assert told is not None
        return told

    monkeypatch.setattr(preflight_check, "_known", {})
    monkeypatch.setattr(preflight_check, "rehearsed", rehearsed)
    cfg, _ = preflight_check.prepared(elsewhere(*SMALL, *words))
    assert cfg.rollout.vllm_memory == share


def test_ranks_that_only_sample_are_given_a_number_that_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def rehearsed(_cfg: Config, _key: str, *, fitting: bool, **_: Any) -> preflight_check.Decision:
        asked.append(fitting)
        return preflight_check.Decision()

    monkeypatch.setattr(preflight_check, "_known", {})
    monkeypatch.setattr(preflight_check, "rehearsed", rehearsed)
    cfg = composed_for([*GRPO, "rollout=pipelined", "launch.device=cuda", "hardware=h100", "launch.nproc=2"], Path())
    assert preflight_check.prepared(cfg)[0].rollout.vllm_memory == 0.9
    assert asked == [False], "whether vLLM can start there, and not what training needs"


# ---- as a user types it ----


def test_the_report_says_what_vllm_holds(tmp_path: Path) -> None:
    file = tmp_path / "answer.json"
    said = preflight(*SMALL, "hardware=h100", "model=tiny", "--verbose", "--json", str(file), fresh=False).stdout
    answer = json.loads(file.read_text(encoding="utf-8"))
    vllm, beside = answer["vllm"], sum(answer["beside_bytes"].values())
    assert beside < 2.5 * GIB, "the reserve suffices, so auto leaves no more"
    own = max(sum(each.values()) - each["vLLM"] for each in answer["peaks_bytes"].values())
    assert vllm["share"] == math.floor(100 * (answer["room_gib"] * GIB - own) / MEMORY) / 100
    assert vllm["bytes"] == vllm["weights_bytes"] + vllm["working_bytes_assumed"] + vllm["keys_bytes"]
    assert answer["peak_gib"] * GIB == pytest.approx(own + vllm["bytes"])
    assert vllm["answers_at_once"] == min(vllm["tokens"] // 208, 1024)
    assert vllm["weights_bytes"] == 2 * count_parameters(load_config(elsewhere(*SMALL).model, 200))
    assert f"rollout.vllm_memory={vllm['share']:g} (auto: what training leaves)" in said
    assert f"{vllm['tokens']:,} tokens: {vllm['answers_at_once']:,} answers of 208 at once" in said
    assert "an estimate from what it reads for each token" in said
