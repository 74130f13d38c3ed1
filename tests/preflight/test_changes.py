"""Changes that need less memory: which are offered, in which words, and that none changes the training in silence."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from rlexp.config.schema import Config, Device
from rlexp.config.schema.loss_terms import compares
from rlexp.preflight import remedy
from rlexp.preflight.changes import OTHERWISE, Change, cost, pairs, pass_before, singles
from rlexp.preflight.predict import Found, Prediction
from rlexp.preflight.rehearsal.log import STORAGE_KINDS, WEIGHTS, Counts, Log, Pass, passes
from rlexp.preflight.rehearsal.rehearse import rehearse
from rlexp.preflight.remedy import Taken
from rlexp.preflight.report import changed
from tests.helpers.rehearsals import alone, elsewhere, plan

ON = ("launch.nproc=2", "parallel=ring2", "train.batch_size=4", "engine=zero1")
GRPO = ("loss=grpo", "loss.beta=0.1", "data=arithmetic", "reward.rule=arithmetic")
LORA, WITHOUT_MODEL = "adapter=lora", "adapter=lora reference=adapter"
PRECOMPUTE, KEPT, ADAPTER = "reference=precompute", "reference.offload=true", "reference=adapter"
OURS = {LORA, WITHOUT_MODEL, PRECOMPUTE, KEPT, ADAPTER}


@pytest.mark.parametrize(("words", "ours"), [
    ((), [PRECOMPUTE, KEPT, WITHOUT_MODEL]), (("loss=simpo",), [LORA]), (("loss=kto",), [KEPT, WITHOUT_MODEL]),
    (GRPO, [KEPT, WITHOUT_MODEL]), ((*GRPO, "loss.beta=0"), [LORA]),
    (("model.freeze=['model.embed_tokens.*']",), [PRECOMPUTE, KEPT]),
    (("engine=zero3", "engine.offload=all"), [PRECOMPUTE, WITHOUT_MODEL]), ((PRECOMPUTE,), [LORA]),
    ((LORA,), [PRECOMPUTE]),
    ((LORA, "reference=model"), [ADAPTER, PRECOMPUTE, KEPT]),
    ((KEPT,), [f"{PRECOMPUTE} reference.offload=false", f"{WITHOUT_MODEL} reference.offload=false"]),
])  # fmt: skip
def test_what_a_run_is_offered(words: tuple[str, ...], ours: list[str]) -> None:
    """Each is what a user gets who types the words, and the adapter, which is another training, stands last."""
    found = dict(singles(elsewhere(*ON, *words)))
    names = list(found)
    assert [each for each in names if each in ours or OURS & set(each.split())] == ours
    assert all(LORA not in each for each in names[:-1])
    for each in ours:
        typed, cfg = elsewhere(*ON, *_without(words, each), *each.split()), found[each]
        assert typed.adapter == cfg.adapter
        assert typed.reference == cfg.reference or not compares(cfg.loss)


def _without(words: Sequence[str], other: str) -> list[str]:
    """Leave out the words whose keys others give again."""
    keys = {each.partition("=")[0] for each in other.split()}
    return [each for each in words if each.partition("=")[0] not in keys]


def test_the_host_keeps_no_weights_for_a_cpu() -> None:
    cfg = elsewhere(*ON)
    assert KEPT not in [
        words
        for words, _ in singles(dataclasses.replace(cfg, launch=dataclasses.replace(cfg.launch, device=Device.cpu)))
    ]


def test_two_changes_are_never_one_or_none() -> None:
    cfg = elsewhere(*ON)
    found = list(pairs(cfg).values())
    known = [cfg, *(each for _, each in singles(cfg))]
    assert not any(one == other for one, other in itertools.combinations([*known, *found], 2))
    assert (PRECOMPUTE, LORA) in pairs(cfg)
    assert not any({PRECOMPUTE, KEPT} <= set(words) for words in pairs(cfg))


# ---- which one is named ----

LIMIT = 100


def predicted(size: int, seconds: float, reference: float = 0.0) -> Prediction:
    held = dict.fromkeys(STORAGE_KINDS, 0) | {WEIGHTS: size}
    nothing = dict.fromkeys(STORAGE_KINDS, 0)
    step = [Pass("forward", held, nothing, Counts(seconds=seconds - reference)),
            Pass("reference", nothing, nothing, Counts(seconds=reference))]  # fmt: skip
    return Prediction(step, 2, 1)


def named(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, tuple[int, float]], *words: str, reference: float = 0.25
) -> tuple[str | None, list[str]]:
    """Return the change that is named and the changes that were tried for it; what is not `found` does not fit."""
    cfg, tried = elsewhere(*ON, *words), []
    known = pairs(cfg)
    together = {id(each): " ".join(parts) for parts, each in known.items()}

    def predict(options: Sequence[Config], _model: Any, _limit: float) -> list[Found]:
        some = [together[id(each)] for each in options]
        tried.extend(some)
        return [Found(predicted(*found.get(each, (200, 1.0))), None, Log("")) for each in some]

    monkeypatch.setattr(remedy, "room", lambda _: LIMIT)
    monkeypatch.setattr(remedy, "pairs", lambda *_, **__: known)
    monkeypatch.setattr(remedy, "tried", predict)
    single = [Change(each, predicted(*found.get(each, (200, 1.0)))) for each, _ in singles(cfg)]
    change = remedy.cheapest(Taken(cfg), predicted(300, 1.0, reference), single, None)
    return (None if change is None else change.words), tried


def test_an_adapter_is_named_where_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is faster and smaller than all others, and comes after two changes at once that train the same weights."""
    lora = {WITHOUT_MODEL: (10, 0.5)}
    checkpointing = "memory.checkpointing=full"
    assert named(monkeypatch, {**lora, checkpointing: (90, 1.3)}) == (checkpointing, [])
    both = f"{checkpointing} {PRECOMPUTE}"
    assert named(monkeypatch, {**lora, both: (90, 1.3)})[0] == both
    change, tried = named(monkeypatch, lora)
    assert change == WITHOUT_MODEL
    assert tried
    assert not any(LORA in each for each in tried)
    with_it = f"{checkpointing} {WITHOUT_MODEL}"
    change, tried = named(monkeypatch, {with_it: (90, 1.0)})
    assert change == with_it
    places = [LORA in each for each in tried]
    assert places == sorted(places)


def test_a_pass_before_training_counts_and_copies_from_the_host_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without its reference takes 0.75 seconds here. Over one epoch the pass before takes the other 0.25."""
    ring = "memory.checkpointing=full"
    found = {PRECOMPUTE: (90, 0.75), KEPT: (90, 0.7)}
    assert named(monkeypatch, found)[0] == PRECOMPUTE
    assert named(monkeypatch, {**found, ring: (90, 0.9)})[0] == ring
    several = ("train.max_steps=null", "train.epochs=5")
    assert named(monkeypatch, {**found, ring: (90, 0.9)}, *several)[0] == PRECOMPUTE
    assert named(monkeypatch, {KEPT: (90, 0.7), ring: (90, 1.4)})[0] == ring
    assert pass_before(elsewhere(*ON, *several), predicted(1, 1.0, 0.25)) == 0.05


def test_the_report_says_what_a_change_is() -> None:
    asked = predicted(300, 1.0)
    lines = changed(
        [Change(each, predicted(10, 0.5)) for each in (PRECOMPUTE, KEPT, WITHOUT_MODEL, "engine=zero3")], asked
    )
    said = dict(zip((PRECOMPUTE, KEPT, WITHOUT_MODEL, "engine=zero3"), lines.splitlines()[3:], strict=True))
    assert lines.splitlines()[2].split() == ["(as", "it", "is)", "0.0", "MiB", "1.0", "s"]
    assert said[PRECOMPUTE].endswith("500 ms  and a pass before training")
    assert said[KEPT].endswith("and copies from the host, not counted")
    assert said[WITHOUT_MODEL].endswith("trains other weights")
    assert said["engine=zero3"].endswith("500 ms")
    assert OTHERWISE in remedy.otherwise([Change(WITHOUT_MODEL, predicted(10, 0.5))], LIMIT)
    assert remedy.otherwise([Change(WITHOUT_MODEL, predicted(200, 0.5))], LIMIT) == ""
    assert min((Change(each, predicted(10, 0.5)) for each in (WITHOUT_MODEL, KEPT)), key=cost).words == KEPT


# ---- what a GPU would hold ----


def on_a_gpu(cfg: Config) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Rehearse a step; return each phase's bytes by kind, and how often the host waits in each."""
    found = Prediction(passes(rehearse(plan(cfg, 0, gpu=True))), 0, 1)
    waits = {phase: sum(found.counts(phase).syncs.values()) for phase in ("data", "forward", "reference", "backward")}
    return {phase: peak.by_kind for phase, peak in found.peaks.items()}, waits


SIZES = ("engine=torch", "launch.nproc=1", "train.batch_size=1", "model.layers=6", "model.hidden_size=512",
         "model.intermediate_size=1024")  # fmt: skip
LAYER = 2 * (512 * 512 * 2 + 2 * 512 * 128 + 3 * 512 * 1024 + 2 * 512)  # bytes in bfloat16: heads 8, of keys 2


def test_a_reference_of_the_host_has_two_layers_on_the_device() -> None:
    """A weight that stayed on the host would raise there: no operator takes tensors of two devices."""
    held, waits = alone(on_a_gpu, elsewhere(*SIZES, KEPT))
    assert held["build"]["reference"] < 0.01 * LAYER
    assert held["reference"]["reference"] == pytest.approx(2 * LAYER, rel=0.01)
    assert held["backward"]["reference"] < 0.01 * LAYER
    assert not any(waits.values())


def test_an_adapter_is_all_that_is_trained() -> None:
    held, _ = alone(on_a_gpu, elsewhere(*SIZES, LORA, "adapter.targets=[q_proj,o_proj]"))
    trained = 6 * 2 * 16 * (512 + 512)  # numbers
    frozen = 6 * LAYER + 2 * (2 * 259 * 512 + 512)
    assert held["build"]["optimizer state"] == pytest.approx(12 * trained, rel=0.01)
    assert held["build"]["weights"] == pytest.approx(frozen + 2 * trained, rel=0.01)
    assert held["optimizer"]["gradients"] == pytest.approx(4 * trained, rel=0.01)
    assert all(each["reference"] == 0 for each in held.values())
