"""`python -m rlexp.eval`: the values are those of the run's own row, on any layout; wrong words are one message."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from rlexp.base.errors import UserError
from rlexp.base.wilson import wilson
from rlexp.config.load import compose_config, composed, composed_like, from_hydra, to_plain
from rlexp.eval.job import EvalJob, config_in, for_evaluation, hold_out_alone, job_of
from rlexp.eval.rank import evaluate_rank
from rlexp.launch.joining import RankSpec
from rlexp.launch.local import run_ranks
from rlexp.run_files.metrics_jsonl import read_rows
from rlexp.training.train.by_length import Buckets
from tests.conftest import Shell
from tests.helpers import warm
from tests.helpers.runs import a_run_of, value_of

RUN = ("launch.device=cpu", "logger=none", "hydra.run.dir=run", "train.precision=fp64", "data.size=24",
       "data.eval_size=7", "train.max_steps=3", "train.eval_every=1", "checkpoint.save_every=1",
       "eval.buckets=[100,150]")  # fmt: skip

DRAWN = ("reward.text=e", "rollout.max_new_tokens=8", "data.max_length=128", "eval.buckets=[]")


def like(plain: dict[str, Any], overrides: list[str]) -> Any:
    return from_hydra(composed_like(plain, overrides))


def evaluated(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return warm.run("rlexp.eval", [*words, "--json", "found.json"], cwd=folder)


@pytest.mark.parametrize(
    "loss",
    [("loss=bco",), *(pytest.param(each, marks=pytest.mark.slow) for each in (
        ("loss=dpo",), ("loss=kto", "loss.desirable_weight=3"), ("loss=sft",), ("loss=reward",),
        ("loss=grpo", *DRAWN), ("loss=ppo", "loss.critic=own", *DRAWN)))],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_checkpoint_has_the_values_of_its_row(loss: tuple[str, ...], rlexp: Shell, tmp_path: Path) -> None:
    """Trained on a ring of 2, evaluated on a ring of 4 with other micro-batches."""
    words = [word for word in RUN if not (word.startswith("eval.buckets") and loss[-1].startswith("eval.buckets"))]
    trained = rlexp(*words, *loss, "parallel=ring2")
    assert trained.returncode == 0, trained.stderr
    steps = (2,) if loss == ("loss=bco",) else (2, 3)
    for step in steps:
        done = evaluated(tmp_path, f"run/checkpoints/step-{step:08d}", "parallel=ring4", "train.micro_batch_size=4",
                         "launch.device=cpu")  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads((tmp_path / "found.json").read_text())
        row = next(row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["step"] == step)
        meant = {name: value for name, value in row.items() if name.startswith("eval/")}
        assert found["step"] == step
        assert found["values"].keys() == meant.keys()
        for name, value in meant.items():
            assert found["values"][name] == pytest.approx(value, rel=1e-11, abs=1e-11), name
        assert ("95 % interval" in done.stdout) == ("eval.buckets=[]" not in loss)


@pytest.mark.slow
def test_a_model_is_evaluated_by_its_keys(rlexp: Shell, tmp_path: Path) -> None:
    """The exported model of a run has the loss of the run's last row, in float32; before it was trained, another."""
    assert rlexp(*RUN, "loss=sft", "train.precision=fp32", "checkpoint.save_every=null").returncode == 0
    last = read_rows(tmp_path / "run" / "metrics.jsonl")[-1]
    data = ("loss=sft", "data.size=24", "data.eval_size=7", "launch.device=cpu")
    for model, same in (("model=hf model.path=run/model", True), ("model=tiny", False)):
        done = evaluated(tmp_path, *model.split(), *data)
        assert done.returncode == 0, done.stderr
        loss = json.loads((tmp_path / "found.json").read_text())["values"]["eval/loss"]
        assert (loss == pytest.approx(last["eval/loss"], rel=1e-6)) == same


def test_the_train_batch_fits_any_layout() -> None:
    """It is not used, so that of the run need not divide."""
    words = ["launch.device=cpu", "launch.nproc=3", "parallel=ring1", "train.micro_batch_size=2", "data.size=13"]
    assert job_of([*words, "train.batch_size=7"]).cfg.train.batch_size == 12
    assert job_of([*words, "loss=kto"]).cfg.train.grad_acc == 2
    drawn = ["loss=grpo", "reward.text=e", "launch.device=cpu", "train.batch_size=4"]
    assert job_of(drawn).cfg.train.batch_size == 4


def test_keys_of_a_mapping_are_replaced_one_by_one(tmp_path: Path) -> None:
    """And another option of a group keeps what both have, but for what names the rows."""
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "held.jsonl").write_text("{}")
    rows = f"data.path={tmp_path}/rows.jsonl"
    plain = to_plain(job_of(["data=jsonl", rows, "data.columns={prompt: a, chosen: b, rejected: c}", "data.eval_size=3",
                             "data.max_length=64", "data.template=never", "loss=mpo", "loss.sft_weight=0.7",
                             "loss.terms=[{loss: dpo, weight: 2}]"]).cfg)  # fmt: skip
    ours = like(plain, ["data.columns.prompt=question"])
    assert ours.data.columns == {"prompt": "question", "chosen": "b", "rejected": "c"}
    assert ours.loss.terms == [{"loss": "dpo", "weight": 2}]
    assert ours.loss.sft_weight == 0.7
    assert like(plain, ["loss=sft"]).loss.name == "sft"  # it has no terms
    held = for_evaluation(composed_like(plain, [f"data.eval_path={tmp_path}/held.jsonl"])).data
    assert (held.eval_size, held.max_length, held.path) == (0, 64, f"{tmp_path}/held.jsonl")
    other = like(plain, ["data=hf", rows, "data.eval_size=2", "parallel=ring2", "launch.device=cpu", "seed=5"])
    assert (other.data.name, other.data.max_length, other.data.template.value) == ("hf", 64, "never")
    assert (other.parallel.ring_size, other.seed) == (2, 5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere: no such folder. Give a run's folder, or a checkpoint's."),
        (["one", "two"], "one two: is more than one folder. Give one run or checkpoint, and key=value."),
        (["data.eval_size=0"], "rlexp.eval: there is no held-out data. Give data.eval_path=FILE, data.eval_split=NAME"),
        (["nowhere", "~data"], "nowhere ~data: is more than one folder."),
        (["eval.buckets=[5,4]"], "eval.buckets=[5,4]: must be numbers of tokens that ascend, each at least 1. Use "
         "eval.buckets=[4,5]."),
        (["eval.buckets=[4,4]"], "Use eval.buckets=[4]."),
        (["eval.buckets=[0,4]"], "eval.buckets=[0,4]: must be numbers of tokens that ascend, each at least 1."),
        (["eval.buckets=[4]", "loss=grpo", "reward.text=e"], "and loss=grpo generates its own. Leave it out."),
        (["eval.before_training=true", "data.eval_size=0"], "eval.before_training=true: there is no held-out data."),
        (["data=hf", "data.columns={prompt: " + 300 * "q" + "}"], "data.path: has no value."),
        (["data=jsonl"], "data.eval_path: has no value. Give the rows to evaluate: data.eval_path=FILE."),
        (["data=jsonl", "data.path=/nowhere", "data.eval_size=-3"], "data.eval_size=-3"),
        (["data=jsonl", "data.eval_path=/nowhere"], "data.eval_path=/nowhere: no such file."),
        (["data=jsonl", "data.path=/nowhere", "data.eval_size=3"], "data.path=/nowhere: no such file."),
        (["loss=ppo", "rollout.mode=pipelined", "rollout.sampling_ranks=1", "launch.nproc=2", "reward.text=e"],
         "rollout.sampling_ranks=1: an evaluation generates its answers on the ranks that would train."),
    ],
)  # fmt: skip
def test_wrong_words_are_one_message(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as refusal:
        job_of(["launch.device=cpu", *words] if "=" in words[0] else words)
    assert said in str(refusal.value)


def test_an_interval_is_wilsons() -> None:
    """Against the numbers of Newcombe 1998 (Statistics in Medicine 17), table I: 81 of 263, 15 of 148, 0 of 20, 29 of
    29."""
    for hits, of, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
                                (29, 29, 0.8830, 1.0)):  # fmt: skip
        assert wilson(hits / of, of) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_a_bound_belongs_to_the_part_before_it() -> None:
    assert Buckets([512, 2048]).names == ["0-512", "512-2048", "2048+"]
    assert Buckets([]).names == []


def test_rows_to_train_on_are_not_read(tmp_path: Path) -> None:
    """Those held out are enough: rows that cannot be read do not stand in the way."""
    pair = {"prompt": "How far?", "chosen": "Near.", "rejected": "Far away."}
    (tmp_path / "held.jsonl").write_text(2 * (json.dumps(pair) + "\n"))
    (tmp_path / "broken.jsonl").write_text("no row\n")
    words = ["loss=reward", "data=jsonl", "data.eval_path=held.jsonl", "launch.device=cpu"]
    done = evaluated(tmp_path, *words, "data.path=broken.jsonl", "train.batch_size=8", "model.layers=1")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "found.json").read_text())["held_out"] == 2


def test_rows_held_out_from_among_others_are_those_of_the_run(rlexp: Shell, tmp_path: Path) -> None:
    """None of the rows has a margin, those to train on, which are read for it, nor those held out."""
    pairs = [
        {"prompt": f"How far is {place}?", "chosen": "Near." + " Near." * place, "rejected": "Far away."}
        for place in range(9)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    words = ("loss=reward", "data=jsonl", f"data.path={tmp_path}/rows.jsonl", "data.eval_size=3", "train.batch_size=4",
             "train.eval_every=1", "train.max_steps=1", "checkpoint.save_every=1", "model.layers=1", "logger=none",
             "hydra.run.dir='a=b/run'", "launch.device=cpu", "parallel=ring1")  # fmt: skip
    done = rlexp(*words)
    assert done.returncode == 0, done.stderr
    done = evaluated(tmp_path, "a=b/run", "launch.device=cpu")  # a folder, though it looks like a key
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    row = read_rows(tmp_path / "a=b" / "run" / "metrics.jsonl")[-1]
    assert (found["held_out"], found["values"]["eval/loss"]) == (3, row["eval/loss"])


def rows_of(plain: dict[str, Any], *overrides: str) -> Any:
    return for_evaluation(composed_like(plain, list(overrides))).data


def test_only_the_place_of_held_out_rows_must_be_there(tmp_path: Path) -> None:
    """A run's own rows may be gone, and others may be given: whatever named the rows of the run is then forgotten."""
    held, gone = tmp_path / "held.jsonl", f"{tmp_path}/gone.jsonl"
    held.write_text("{}")
    (tmp_path / "set").mkdir()
    plain = to_plain(compose_config(["data=hf", f"data.path={tmp_path}/set", "data.split='train[:6]'",
                                     "data.eval_split=test", "data.subset=easy", "data.columns.prompt=question",
                                     "launch.device=cpu"]))  # fmt: skip
    own = rows_of(plain)
    assert (own.path, own.eval_split, own.subset) == (f"{tmp_path}/set", "test", "easy")
    other = rows_of(plain, f"data.eval_path={held}")
    assert (other.path, other.eval_path, other.eval_split, other.subset) == (str(held), str(held), None, None)
    assert other.columns == {"prompt": "question"}
    cut = {**plain, "data": {**plain["data"], "max_samples": 5}}
    assert rows_of(cut).max_samples == 5
    assert {rows_of(cut, f"data.{key}={held}").max_samples for key in ("path", "eval_path")} == {None}
    plain["data"] |= {"eval_path": str(held), "eval_split": None}  # beside a set, of which the subset is
    plain["data"]["path"] = f"{tmp_path}/no_set_any_more"
    assert (rows_of(plain).path, rows_of(plain).subset) == (str(held), None)
    plain["data"] |= {"path": None, "eval_path": None, "subset": None, "split": "train", "columns": {},
                      "sources": {"a": {"path": gone, "eval_path": str(held)}, "b": {"path": gone}}}  # fmt: skip
    assert rows_of(plain).sources == {"a": {"path": str(held), "eval_path": str(held)}}
    assert (rows_of(plain, f"data.eval_path={held}").path, rows_of(plain, f"data.eval_path={held}").sources) == (
        str(held),
        {},
    )
    mine = to_plain(compose_config(["data=jsonl", f"data.path={held}", "data.eval_size=1", "launch.device=cpu"]))
    both = {**plain["data"], "sources": {name: {"path": str(held)} for name in "ab"}, "eval_size": 3}
    assert rows_of({**plain, "data": both}, "data.sources.a.columns.prompt=q").eval_size == 3
    one = rows_of({**plain, "data": both}, f"data.sources={{c: {{path: {held}, eval_path: {held}}}}}")
    assert list(one.sources) == ["c"]
    for wrong, said in ((f"data.sources.b={held}", "data.sources.b="), ("data.sources.a.eval_path=3", "a.path="),
                        (f"data.sources.b={{path: {held}, eval_pth: x}}", "eval_pth: no such key")):  # fmt: skip
        with pytest.raises(UserError, match=re.escape(said)):
            rows_of(plain, wrong)
    plain["data"] |= {"sources": {}, "path": gone, "eval_path": gone, "eval_size": 0}
    others = rows_of(plain, f"data.path={held}", "data.eval_size=2")
    assert (others.path, others.eval_path, others.eval_size) == (str(held), None, 2)
    assert rows_of(mine, "data=synthetic").eval_size == 32  # its own, and not the file's
    nothing = rows_of(mine, "data.eval_path=null", "data.eval_size=4")
    assert (nothing.path, nothing.eval_path, nothing.eval_size) == (str(held), None, 4)


def test_a_value_of_the_run_is_said_to_be_the_runs(tmp_path: Path) -> None:
    """It was not typed; what was typed, or is missing, is not the run's."""
    (tmp_path / "held.jsonl").write_text("{}")
    words = ["data=jsonl", f"data.path={tmp_path}/held.jsonl", f"data.eval_path={tmp_path}/held.jsonl"]
    run = a_run_of(tmp_path, *words)
    (tmp_path / "held.jsonl").unlink()
    for given, its_own in (([], True), (["data.eval_path=gone.jsonl"], False), (["data=hf"], False),
                           ([f"data.eval_path={tmp_path}/held.jsonl"], False)):  # fmt: skip
        with pytest.raises(UserError, match=r"^data\.") as refusal:
            job_of([run, *given, "launch.device=cpu"])
        assert ("had this value; data.eval_path=VALUE replaces it." in str(refusal.value)) == its_own
        assert ("had this value" in str(refusal.value)) == its_own


PAIRS = {"seed": 4, "train.precision": "fp64", "eval.buckets": [7, 9], "loss.beta": 0.3, "data.eval_size": 5,
         "model.window": 48, "data.max_length": 96, "adapter.alpha": 24.0}  # fmt: skip
DRAWS = {"rollout.max_new_tokens": 9, "rollout.temperature": 0.9, "reward.text": "e", "reward.most": 3}
HAD = {"adapter=lora": PAIRS, "loss=grpo": DRAWS}


def words_of(keys: dict[str, Any]) -> list[str]:
    return [f"{key}={value}".replace(" ", "") for key, value in keys.items()]


@pytest.fixture(scope="module")
def runs_of_keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {word: a_run_of(tmp_path_factory.mktemp("keys"), word, *words_of(keys)) for word, keys in HAD.items()}


@pytest.mark.parametrize(
    ("word", "typed"),
    [
        ("adapter=lora", {"eval.buckets": [5, 11, 30], "loss.beta": 0.7, "model.window": 32}),
        ("adapter=lora", {"eval.buckets": [], "seed": 1, "train.precision": "fp32", "adapter.alpha": 8.0}),
        ("adapter=lora", {"data.eval_size": 3, "data.max_length": 80}),
        ("loss=grpo", {"rollout.max_new_tokens": 60, "reward.text": "a"}),
    ],
    ids=lambda typed: " ".join(typed) if isinstance(typed, dict) else typed,
)
def test_what_is_typed_beside_a_run_replaces_that_of_the_run_alone(
    runs_of_keys: dict[str, str], word: str, typed: dict[str, Any]
) -> None:
    plain = to_plain(job_of([runs_of_keys[word], "launch.device=cpu", *words_of(typed)]).cfg)
    assert {key: value_of(plain, key) for key in HAD[word]} == {**HAD[word], **typed}


def test_no_model_to_compare_with_is_there_for_a_loss_that_draws() -> None:
    words = ["launch.device=cpu", "loss=ppo", "reward.rule=length", "model=hf", "model.path=a/b", "reference.path=c/d"]
    assert [for_evaluation(composed(words), reference=kept).reference.path for kept in (True, False)] == ["c/d", None]


def test_a_reference_that_is_computed_otherwise_has_no_key_of_the_run_s() -> None:
    plain = to_plain(compose_config(["launch.device=cpu", "reference.offload=true"]))
    kept, again = (like(plain, ["launch.device=cpu", *more]).reference for more in ([], ["reference=precompute"]))
    assert (kept.name.value, kept.offload, again.name.value, again.offload) == ("model", True, "precompute", False)


def test_rows_to_train_on_may_be_of_another_split() -> None:
    composed = OmegaConf.create({"data": {"name": "jsonl", "path": "a.jsonl", "eval_path": "b.jsonl", "split": "some"}})
    hold_out_alone(composed)
    assert (composed.data.path, composed.data.split) == ("b.jsonl", "train")


@pytest.mark.parametrize(("texts", "seed"), [(("0", "1", "2"), 0), (("", "1", "2"), 1), (("", "2"), 2), (("2",), 2)])
def test_a_run_is_configured_as_in_its_newest_checkpoint_that_can_be_read(
    texts: tuple[str, ...], seed: int, tmp_path: Path
) -> None:
    places = [tmp_path / str(number) for number in range(len(texts))]
    for place, text in zip(places, texts, strict=True):
        place.mkdir()
        config = f'{{"config": {{"model": {{}}, "rollout": {{}}, "seed": {text}}}}}'
        (place / "position.json").write_text(config, encoding="utf-8")
    assert config_in(places)["seed"] == seed


def test_another_loss_may_evaluate_a_checkpoint(tmp_path: Path) -> None:
    """Also one that draws where the run's does not, and the other way round: its sizes are derived anew."""
    asked = ["reward.text=e", "rollout.max_new_tokens=8"]
    there = {loss: to_plain(compose_config([f"loss={loss}", *(asked if loss == "grpo" else []), "launch.device=cpu",
                                            "train.batch_size=8", "launch.nproc=1", "parallel=ring1"]))
             for loss in ("dpo", "sft", "grpo")}  # fmt: skip
    for plain in there.values():
        for loss, ranks in (("grpo", 3), ("sft", 1), ("reward", 3), ("dpo", 1)):
            words = [f"loss={loss}", *(asked if loss == "grpo" else []), f"launch.nproc={ranks}", "parallel=ring1"]
            cfg = for_evaluation(composed_like(plain, words))
            assert cfg.train.batch_size == (9 if ranks == 3 else 8)
    there["grpo"]["reference"] |= {"path": f"{tmp_path}/gone", "revision": None}
    assert for_evaluation(composed_like(there["grpo"], [])).reference.path is None


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def test_a_damaged_checkpoint_is_passed_over(rlexp: Shell, tmp_path: Path) -> None:
    trained = rlexp(*RUN, "loss=sft", "parallel=ring1")
    assert trained.returncode == 0, trained.stderr
    checkpoints = tmp_path / "run" / "checkpoints"
    cut(checkpoints / "step-00000003" / "position.json")
    done = evaluated(tmp_path, "run", "launch.device=cpu")
    assert done.returncode == 0, done.stderr
    assert "skipped a checkpoint" in done.stderr
    assert json.loads((tmp_path / "found.json").read_text())["step"] == 2
    cut(next((checkpoints / "step-00000002").glob("*.safetensors")))
    done = evaluated(tmp_path, "run", "launch.device=cpu")
    assert done.returncode != 0
    assert (
        f"step-00000003, step-00000002 cannot be used. Give another run or checkpoint than {tmp_path}/run."
        in done.stderr
    )


# ---- ranks ----


def test_a_rank_that_fails_is_named_though_others_wait_for_it() -> None:
    """Its error must not wait for them to leave together."""
    cfg = compose_config(["launch.device=cpu", "logger=none", "launch.nproc=2", "launch.timeout_seconds=20"])
    with pytest.raises(UserError, match=r"out of memory"):
        run_ranks(failing_rank, 2, (EvalJob(cfg),), timeout=240)


def test_a_model_that_no_run_has_trained_is_evaluated_at_step_0() -> None:
    examples, run = SimpleNamespace(held_out=[]), SimpleNamespace(attention="zigzag")
    task = SimpleNamespace(
        evaluate=lambda step: {"eval/loss": float(step)}, close=lambda: None, examples=examples, kind="pair", run=run
    )
    with patch("rlexp.eval.rank.build", lambda *_, **__: task), patch("rlexp.eval.rank.join"):
        found = evaluate_rank(RankSpec(0, 1, 0, ""), EvalJob(compose_config(["launch.device=cpu"])), "")
    assert (found.step, found.values) == (0, {"eval/loss": 0.0})


def failing_rank(spec: RankSpec, job: EvalJob) -> None:
    def evaluate(_step: int) -> dict[str, float]:
        if spec.rank == 1:
            raise MemoryError("out of memory")
        dist.all_reduce(torch.zeros(1))
        return {}

    examples = SimpleNamespace(held_out=[])
    task = SimpleNamespace(evaluate=evaluate, close=lambda: None, examples=examples, kind="pair")
    with patch("rlexp.eval.rank.build", lambda *_, **__: task):
        evaluate_rank(spec, job, "")
