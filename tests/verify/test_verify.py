"""`python -m rlexp.verify` passes what is right and finds what is not. The defects stand in tests/helpers/faults/."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlexp.base.errors import NonFiniteError, UserError
from rlexp.config.load import compose_config
from rlexp.launch.local import RankFailed
from rlexp.verify.checks import STAGES
from rlexp.verify.model import answer_logps, load, own_blocks, softmax_attention
from rlexp.verify.optimizer import Optimizer
from rlexp.verify.recording import TokenExample
from rlexp.verify.report import failure_in_words, report, run
from rlexp.verify.verdict import Verification
from rlexp.verify.verification import Verifier, module_of_traceback, verify
from tests.helpers import warm
from tests.helpers.conversations import hh, of_several_turns
from tests.helpers.faults import ALL_FAULTS, CHECK, FAST, FAULTS, WHOLE_SEQUENCE, WITH_OWN_TESTS
from tests.helpers.faults.base import FP64, MIXED, Fault
from tests.helpers.faults.examining import is_named
from tests.helpers.faults.verified import quiet, verify_planted
from tests.helpers.paths import ROOT
from tests.helpers.programs import python
from tests.helpers.rows import FILES, FOLDERS
from tests.helpers.squality import write_long_pairs

SMALL = ("launch.device=cpu", "logger=none", "data.size=24", "data.eval_size=0")


def verified(*overrides: str, steps: int = 2, base: tuple[str, ...] = SMALL) -> Verification:
    return verify(compose_config([*base, *overrides]), steps, quiet)


# ---- it finds defects ----


def tier(fault: Fault) -> list[pytest.MarkDecorator]:
    if fault.name in FAST:
        return []
    return [pytest.mark.slow] if fault.name in CHECK else [pytest.mark.slow, pytest.mark.prove]


def test_every_stage_and_module_has_a_defect_in_the_fast_tiers() -> None:
    """Each stage in `make test`, each pair of stage and module in `make check`."""

    def kinds(faults: Iterable[Fault]) -> set[tuple[str, str]]:
        return {(fault.stage, fault.module) for fault in faults if fault.stage}

    fast = kinds(ALL_FAULTS[name] for name in FAST)
    assert {stage for stage, _ in fast} == set(STAGES)
    assert fast | kinds(ALL_FAULTS[name] for name in CHECK) == kinds(FAULTS)


def test_every_defect_can_be_planted() -> None:
    """Its target is there, and uses what is changed in it, also where the defect is tried in a longer tier only."""
    assert len(ALL_FAULTS) == len(FAULTS) + len(WITH_OWN_TESTS), "two defects have the same name"
    for fault in ALL_FAULTS.values():
        undo = fault.plant(lambda: None)
        undo()


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name, marks=tier(fault)) for fault in FAULTS])
def test_a_defect_is_found_and_its_module_named(fault: Fault) -> None:
    """Where a layout moves it the settings are named, after a search that `make check` makes; else the folder."""
    searched = fault.name not in FAST
    verdict, reached = verify_planted(fault, steps=None if searched else 1, search=searched)
    assert reached, "not reached: nothing calls what the defect replaces"
    failure = verdict.failure
    assert failure is not None, "not found"
    assert is_named(fault, failure, searched=searched), failure_in_words(failure)
    if fault.step is not None:
        assert failure.step == fault.step
    assert failure.module in report(compose_config(fault.overrides), verdict)


@pytest.mark.parametrize(
    ("files", "module"),
    [
        (("training/train/step.py", "training/model/loading.py", "base/cache.py"), "rlexp/training/model/"),
        (("training/train/rank.py", "training/train/step.py", "training/types.py"), "rlexp/training/train/"),
        (("launch/local.py", "training/ring/layouts/zigzag.py", "training/metrics/live_tensors.py"),
         "rlexp/training/ring/"),
        (("launch/local.py", "config/load.py"), "rlexp/config/"),
        (("launch/local.py", "verify/record.py"), None),
    ],
)  # fmt: skip
def test_a_traceback_points_to_the_innermost_module(files: tuple[str, ...], module: str | None) -> None:
    text = "Traceback (most recent call last):\n"
    text += "".join(f'  File "/home/me/rlexp/rlexp/{file}", line 7, in call\n    call()\n' for file in files)
    assert module_of_traceback(text + "ZeroDivisionError: division by zero") == module


def test_a_rank_that_is_killed_is_named_as_the_user_knows_it(tmp_path: Path) -> None:
    """Those of the plain run come behind the run's own."""
    verifier = Verifier(compose_config(SMALL), tmp_path, quiet)
    verifier.precision, verifier.own_ranks = "float64", 2
    killed = "failed: the process was killed by SIGKILL; perhaps the machine had no memory left"
    for rank, words in ((1, "rank 1"), (2, "the plain run")):
        told = failure_in_words(verifier._crashed(RankFailed(f"rank {rank} {killed}", rank, killed=True)))
        assert f"this run:  {words} {killed}\n" in told
        assert "launch.nproc" in told
        assert "Look in" not in told


# ---- it says whether the ring shards the sequence ----

RING = (*SMALL, "train.precision=fp64", "train.batch_size=2")


def on_ring(size: int, *more: str) -> tuple[str, ...]:
    return (*RING, f"parallel=ring{size}", f"launch.nproc={size}", *more)


@pytest.mark.parametrize(
    ("size", "more"),
    [
        pytest.param(2, (), id="ring2"),
        pytest.param(4, (), id="ring4", marks=pytest.mark.slow),
        pytest.param(4, ("memory.checkpointing=true",), id="ring4, checkpointing", marks=pytest.mark.slow),
        pytest.param(2, ("parallel.layout=ulysses",), id="ring2, ulysses", marks=pytest.mark.slow),
        pytest.param(2, ("engine=fsdp2",), id="ring2, fsdp2", marks=pytest.mark.slow),
    ],
)
def test_a_module_that_keeps_the_whole_sequence_is_named(size: int, more: tuple[str, ...]) -> None:
    """All values are right; only the sharding is not."""
    words = on_ring(size, *more)
    verdict, reached = verify_planted(WHOLE_SEQUENCE, overrides=words, steps=1)
    assert reached
    assert verdict.failure is None, failure_in_words(verdict.failure)
    assert not verdict.passed
    assert verdict.sharding is not None
    assert list(verdict.sharding.whole) == ["model.layers.*.mlp"]
    told = report(compose_config(words), verdict)
    assert "model.layers.*.mlp keeps " in told
    assert "FAIL: all values agree with the plain one-process reference, but the ring does not shard" in told


LAYOUTS = ("zigzag", "contiguous", "allgather", "ulysses", "hybrid")


@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("layout", [LAYOUTS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS[1:])])
def test_no_layout_keeps_the_whole_sequence(layout: str, checkpointing: str) -> None:
    """A rank keeps its part to within a few percent; with Ulysses attention keeps more, and the report says why."""
    inner = ("parallel.ulysses_size=2",) if layout == "hybrid" else ()
    words = on_ring(4, f"parallel.layout={layout}", *inner, f"memory.checkpointing={checkpointing}")
    verdict = verify(compose_config(words), 1, quiet)
    assert verdict.passed, failure_in_words(verdict.failure)
    assert verdict.sharding is not None
    assert verdict.sharding.whole == {}
    shared = layout in ("ulysses", "hybrid")
    assert list(verdict.sharding.meant) == (["model.layers.*.self_attn"] if shared else [])
    assert verdict.sharding.share == pytest.approx(1 / 4, rel=0.15 if shared else 0.05)


@pytest.mark.slow
def test_the_command_fails_on_a_broken_copy_of_the_package(tmp_path: Path) -> None:
    """The whole program as it is installed, with one function changed on disk."""
    for folder in ("rlexp", "conf", "launchers", "sweeps"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "rlexp" / "training" / "engine" / "reducing.py").open("a", encoding="utf-8") as engine:
        engine.write(SUMMED)
    words = (*FP64, "--steps", "1", "--json", "out.json")
    done = python("-m", "rlexp.verify", *words, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert "FAIL at step 1, in float64: the first difference is in the gradient." in done.stdout
    assert "all are 4.000 times too large" in done.stdout
    assert "The setting at fault is parallel.ring_size=2" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert not found["passed"]
    assert [each["key"] for each in found["failure"]["settings"]] == ["parallel.ring_size"]


SUMMED = """

def _summed(self, right=Reducing._land):
    bucket, *_ = self._sent[0]
    right(self)
    for parameter in bucket:
        parameter.grad *= self.world.size


Reducing._land = _summed
"""


# ---- it passes correct runs ----


def command(cwd: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return warm.run("rlexp.verify", args, cwd, timeout=240, env=os.environ | env)


def test_the_default_passes(tmp_path: Path) -> None:
    done = command(tmp_path, "launch.device=cpu", "--json", "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS: 3 optimizer steps" in done.stdout
    assert "float64, by transformers alone" in done.stderr
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert found["passed"]
    assert found["not_verified"] == []
    assert found["plan"]["choice"]["layout"] == "zigzag"
    assert {each["quantity"] for each in found["fp32"]} >= {"loss", "gradient"}
    assert found["float64"]["largest"]["loss"] < 1e-12
    assert list(tmp_path.iterdir()) == [tmp_path / "out.json"]  # no run folder, no checkpoint


VALID = [
    pytest.param(("parallel=ring2", "launch.nproc=4", "train.micro_batch_size=2", "train.precision=bf16"), id="bf16"),
    pytest.param(("parallel=ring2", "engine=zero3"), id="zero3"),
    pytest.param(("parallel=ring2", "launch.nproc=4", "engine=fsdp2"), id="fsdp2"),
    pytest.param(("data.size=6", "data.drop_last=false", "launch.nproc=4", "parallel=ring2", "train.epochs=2",
                  "train.micro_batch_size=2"), id="a short last batch"),
    pytest.param(("data.size=5", "data.drop_last=false", "launch.nproc=4", "parallel=ring2"), id="an empty replica"),
    pytest.param(("data.max_length=140", "data.too_long=drop", "parallel=ring4"), id="long pairs dropped"),
    pytest.param(("data.max_length=60", "data.too_long=truncate", "parallel=ring4"), id="long pairs truncated"),
    pytest.param(("model.freeze=[*layers.0.*]", "parallel=ring2"), id="frozen layers"),
    pytest.param(("optim=sgd", "optim.lr=0.1", "optim.max_grad_norm=0", "optim.weight_decay=0.01"), id="sgd"),
    pytest.param(("loss.label_smoothing=0.2", "loss.beta=0.5", "parallel=ring4"), id="label smoothing"),
    pytest.param(("optim.weight_decay=0.3", "optim.warmup_steps=5", "optim.decay=cosine", "optim.eps=1e-12",
                  "launch.nproc=2"), id="decay, warm-up, a tiny eps"),
    pytest.param(("optim.lr=1e-2", "parallel=ring2"), id="a large rate"),
    pytest.param(("data.packing=false", "parallel=ring8", "train.micro_batch_size=4"), id="padded"),
    pytest.param(("memory.checkpointing=true", "parallel=ring2", "launch.nproc=4"), id="recomputation"),
    pytest.param(("train.eval_every=2", "data.eval_size=10", "parallel=ring2"), id="held-out values"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("overrides", VALID)
def test_a_valid_configuration_passes(overrides: tuple[str, ...]) -> None:
    verdict = verified("train.batch_size=4", *overrides)
    assert verdict.passed, failure_in_words(verdict.failure)
    assert not verdict.not_held


def test_chat_messages_and_odd_texts_pass(tmp_path: Path) -> None:
    rows = []
    for n in range(24):
        turns = [{"role": "user", "content": f"Tell {n} é <eos> 漢"}, {"role": "assistant", "content": "no"}]
        rows.append({"prompt": turns if n % 2 else f"Q{n} <pad>\t{'x' * n}", "chosen": "yes " * (n % 5 + 1),
                     "rejected": "yes " if n % 5 == 0 else "no." * (n % 3 + 1)})  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    verdict = verified("data=jsonl", f"data.path={tmp_path}/rows.jsonl", "data.max_length=40", "data.too_long=truncate",
                       "train.batch_size=4", "train.precision=fp64", "parallel=ring2", base=SMALL[:2])  # fmt: skip
    assert verdict.passed, failure_in_words(verdict.failure)
    assert verdict.facts["examples"] < 24  # those with two equal answers are gone


def test_a_mixture_of_conversations_passes(tmp_path: Path) -> None:
    """Answers of several turns, of which the assistant's are trained on; two epochs, and values of held-out rows."""
    verdict = verified("train.eval_every=1", f"data.cache={tmp_path}", base=MIXED)
    assert verdict.passed, failure_in_words(verdict.failure)
    assert verdict.facts["examples"] == 16 + 12 - 5
    assert not verdict.not_held


@pytest.mark.slow
@pytest.mark.parametrize("write", [*FILES, *FOLDERS])
def test_real_conversations_pass_in_every_format(write: Callable[..., str], shared: Path, tmp_path: Path) -> None:
    """The formats in turns with a chat template and without one."""
    path = write(tmp_path, [of_several_turns(row) for row in hh(shared, 24)])
    template = f"{shared}/models/smollm2-tokenizer/chat_template.jinja"
    chat = [f"model.chat_template={template}"] if (*FILES, *FOLDERS).index(write) % 2 else []
    verdict = verified("data=hf", f"data.path='{path}'", "data.eval_size=4", f"data.cache={tmp_path}/cache",
                       "model=hf", f"model.path={shared}/models/stories260K", *chat, "data.max_length=400",
                       "data.too_long=truncate", "train.batch_size=4", "train.precision=fp64", "parallel=ring2",
                       "train.eval_every=2", base=SMALL[:2])  # fmt: skip
    assert verdict.passed, failure_in_words(verdict.failure)


def real(shared: Path, data: str, *more: str) -> list[str]:
    return ["launch.device=cpu", "logger=none", "model=hf", f"model.path={shared}/models/stories260K", "data=jsonl",
            f"data.path={data}", *more]  # fmt: skip


@pytest.mark.slow
def test_another_reference_model_passes(shared: Path, tmp_path: Path) -> None:
    """One of another size, whose vocabulary is the policy's. With the starting weights in its place it would fail."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(f"{shared}/models/stories260K")
    other = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    AutoModelForCausalLM.from_config(type(model.config)(**{**model.config.to_dict(), **other})).save_pretrained(
        tmp_path
    )
    overrides = real(shared, f"{shared}/data/hh_helpful_base/test.jsonl", "parallel=ring2", "data.max_length=512",
                     "data.too_long=drop", "train.batch_size=4", f"reference.path={tmp_path}")  # fmt: skip
    verdict = verify(compose_config(overrides), 2, quiet)
    assert verdict.passed, failure_in_words(verdict.failure)


@pytest.mark.slow
def test_a_real_model_on_real_pairs_passes(shared: Path) -> None:
    overrides = real(shared, f"{shared}/data/hh_helpful_base/test.jsonl", "parallel=ring4", "data.max_length=512",
                     "data.too_long=drop", "train.batch_size=4", "optim.lr=1e-4")  # fmt: skip
    verdict = verify(compose_config(overrides), 2, quiet)
    assert verdict.passed, failure_in_words(verdict.failure)


@pytest.mark.slow
def test_a_long_pair_passes_on_a_ring_of_four(shared: Path, tmp_path: Path) -> None:
    """Four thousand tokens of SQuALITY; docs/verify.md has the time for a whole story."""
    write_long_pairs(shared, tmp_path / "long.jsonl")
    overrides = real(shared, f"{tmp_path}/long.jsonl", "parallel=ring4", "data.max_length=4003",
                     "data.too_long=truncate", "train.batch_size=1", "train.precision=fp64")  # fmt: skip
    verdict = verify(compose_config(overrides), 1, quiet)
    assert verdict.passed, failure_in_words(verdict.failure)
    assert verdict.plan.longest == 4003


# ---- transformers alone stand on their own ----

# What is computed alone imports of rlexp besides its own modules: the schema, the text of generated rows and of
# templates with a name, the float64 mode, the tokenizer of bytes, the losses' formulas, and what asks for rewards.
KEYS = ("data", "data_sources", "losses", "models", "reward_terms", "rollouts", "row_kinds")
OF_ALONE = {"base.errors", "config.chat_templates", "config.schema", *(f"config.schema.{name}" for name in KEYS),
            "launch.joining", "training.algos.base", "training.algos.build", "training.algos.policy_loss",
            "training.dataset", "training.model.float64", "training.model.loading", "training.model.reward_model",
            "training.rollout.rewards.python", "training.rollout.rewards.rule", "training.types"}  # fmt: skip
ALONE = ("adapter", "alone", "alone_samples", "by_length", "drawing", "formula", "model", "one_process", "optimizer",
         "rewards", "rollout_rules", "rows", "rules")  # fmt: skip


def test_what_is_computed_alone_shares_nothing_with_what_it_judges() -> None:
    for name in ALONE:
        tree = ast.parse((ROOT / "rlexp" / "verify" / f"{name}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlexp"):
                beside = (*ALONE, "jobs", "recording")
                if node.module == "rlexp.verify" or node.module.removeprefix("rlexp.verify.") in beside:
                    continue
                assert node.module.removeprefix("rlexp.") in OF_ALONE, f"{name}: {node.module}"
                if node.module == "rlexp.training.dataset":
                    assert {alias.name for alias in node.names} <= {"generated"}


@pytest.mark.parametrize("overrides", [("optim.betas=[0.8,0.95]", "optim.eps=1e-6"), ("optim=sgd",)])
def test_the_optimizer_written_out_is_torchs(overrides: tuple[str, ...]) -> None:
    optim = compose_config([*SMALL, *overrides, "optim.weight_decay=0.1", "optim.max_grad_norm=1"]).optim
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (5, 3), "gain": (4,)}
    ours = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    theirs = {name: weight.clone().requires_grad_() for name, weight in ours.items()}
    groups = [{"params": [theirs["matrix"]]}, {"params": [theirs["gain"]], "weight_decay": 0.0}]
    kind: Any = torch.optim.SGD if "optim=sgd" in overrides else torch.optim.AdamW
    options = {} if kind is torch.optim.SGD else {"betas": (0.8, 0.95), "eps": 1e-6}
    torchs, written = kind(groups, lr=0.1, weight_decay=0.1, **options), Optimizer(optim)
    for lr in (0.1, 0.05, 0.2):
        gradients = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
        for name, gradient in gradients.items():
            theirs[name].grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        for group in torchs.param_groups:
            group["lr"] = lr
        torchs.step()
        written.step(ours, gradients, lr)
    for name in shapes:
        torch.testing.assert_close(ours[name], theirs[name].detach(), rtol=1e-13, atol=1e-15)


def test_attention_in_blocks_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlexp.verify.model.SCORES", 200)  # several blocks of queries
    q, k, v = (torch.randn(2, 37, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(s)).requires_grad_()
               for s in range(3))  # fmt: skip
    mine = softmax_attention(q, k, v, 0.3)
    torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    torch.testing.assert_close(mine, torchs, rtol=1e-12, atol=1e-14)
    for a, b in zip(*(torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in (mine, torchs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_the_models_attention_for_gpus_is_sdpa() -> None:
    """On a GPU transformers uses our attention in blocks; on the CPU both run and are compared."""
    cfg, cpu = compose_config([*SMALL, "train.precision=fp64"]), torch.device("cpu")
    prompt, answer = (torch.arange(3, 3 + n).numpy() for n in (20, 15))
    pair = TokenExample(prompt, {"chosen": answer}, {"chosen": answer > 0}, "a pair")
    one_way, other = (answer_logps(load(cfg, cpu, name), pair, "chosen", cpu) for name in ("sdpa", own_blocks()))
    for a, b in zip(one_way, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


# ---- mistakes of the user ----


@pytest.mark.parametrize(
    ("args", "env", "said"),
    [
        (("parallel=ring3",), {}, "rlexp: parallel=ring3: no such option."),
        (("train.batchsize=3",), {}, "rlexp: train.batchsize: no such key"),
        (("--steps", "0"), {}, "rlexp: --steps=0: must be at least 1."),
        (("--steps", "many"), {}, "rlexp: argument --steps: invalid int value: 'many'."),
        (("loss=grpo", "rollout.engine=vllm"), {}, "rlexp: rollout.engine=vllm: the model has heads of 8 numbers"),
        (("--no-search=yes",), {}, "rlexp: argument --no-search: ignored explicit argument 'yes'."),
        (("--stepz", "2"), {}, "rlexp: unrecognized arguments: --stepz 2."),
        (("launch.nodes=2",), {}, "rlexp: launch.nodes=2: this command starts ranks on this machine only."),
        (("--steps", "1"), {"TMPDIR": "/no/such/folder"}, "rlexp: TMPDIR=/no/such/folder: is no folder"),
        (("--json", "/no/such/folder/out.json"), {}, "rlexp: --json=/no/such/folder/out.json: "),
        ((), {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x"}, "rlexp: rlexp.verify: starts its own ranks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_mistake_is_one_message(args: tuple[str, ...], env: dict[str, str], said: str, tmp_path: Path) -> None:
    done = command(tmp_path, "launch.device=cpu", *args, **env)
    assert done.returncode == 1
    assert done.stderr.startswith(said), done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout


def test_data_that_cannot_be_read_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "chosen": "b"}\n', encoding="utf-8")
    cfg = compose_config(["launch.device=cpu", "logger=none", "data=jsonl", f"data.path={tmp_path}/rows.jsonl"])
    (tmp_path / "out.json").write_text('{"passed": true}', encoding="utf-8")
    with pytest.raises(UserError, match=r"rows\.jsonl:1: field `rejected` is missing"):
        run(cfg, 1, tmp_path / "out.json")
    assert not (tmp_path / "out.json").read_text(encoding="utf-8")


def test_what_diverges_in_the_reference_too_is_the_users() -> None:
    with pytest.raises(NonFiniteError, match="not finite, in the plain reference too"):
        verified("optim.lr=1e200", "optim.decay=constant", "train.precision=fp64")
