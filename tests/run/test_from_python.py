"""`rlexp.train`, from a script or a notebook: what the command does, and what it refuses."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

import rlexp
from rlexp.base.errors import ConfigError, UserError
from rlexp.config.paths import conf_dir
from rlexp.run import from_python
from rlexp.run.from_python import Run
from rlexp.training.model import exported
from tests.helpers import warm
from tests.helpers.runs import descendants, gone, rows_of, run_json, wait_for_steps

QUICK = ("launch.device=cpu", "logger=none", "train.batch_size=2", "data.size=8", "data.eval_size=2")
ENDLESS = """import rlexp
try:
    rlexp.train([{words}, "hydra.run.dir=run", "train.max_steps=100000", "data.size=40"])
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("warmed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_it_trains_as_the_command_does(
    warmed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a new Python, or by a process that has imported torch already."""
    monkeypatch.chdir(tmp_path)
    if warmed:

        def run_command(command: list[str]) -> None:
            sys.stderr.write(warm.run(command[2], command[3:], tmp_path).stderr)

        monkeypatch.setattr(from_python, "run_command", run_command)
    run = rlexp.train([*QUICK, "parallel=ring2", "train.max_steps=1", "train.eval_every=1"])
    assert run.folder.parent == tmp_path / "runs"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_dpo_ring2", run.folder.name)
    assert run.rows == rows_of(run.folder)
    assert [row["step"] for row in run.rows] == [1]
    assert run.status == "finished"
    assert type(run.model(dtype=torch.float64)).__name__ == "LlamaForCausalLM"
    said = capsys.readouterr().err
    assert "ring of 2 (zigzag direct, cpu_flash)" in said
    assert "step 1/1  held-out rows: loss 0." in said
    assert f"done: {run.folder}" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch.device=cpu", "train.foo=1"], r"^train\.foo: no such key\."),
        (["data=jsonl", "data.path=none.jsonl"], r"^data\.path=none\.jsonl: no such file\."),
        ("seed=1", r"^rlexp\.train: takes a list of words\. Say rlexp\.train\(\['seed=1'\]\)\.$"),
        (["-m"], r"^-m: rlexp\.train takes KEY=VALUE alone\. For sweeps, type python -m rlexp -m …\.$"),
        (["--cfg", "job"], r"^--cfg: rlexp\.train takes KEY=VALUE alone\."),
        (["+sweep=seeds"], r"^rlexp\.train: trains one run, and this is a sweep\."),
        (["parallel=ring3"], r"For a ring of another size: parallel\.ring_size=3\.$"),
    ],
)
def test_what_the_command_refuses_is_raised(
    words: list[str] | str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        rlexp.train(words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (torch.distributed, r"^rlexp\.train: this process is a rank already .* or start the ranks by torchrun"),
        (torch.cuda, r"^rlexp\.train: this process holds a GPU already .* Restart it \(a notebook's kernel\)"),
    ],
)
def test_a_process_that_is_a_rank_or_holds_a_gpu_is_refused(
    module: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=said):
        rlexp.train(["launch.device=cpu"])


def test_a_run_without_a_model_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path}: has no model/, .*python -m rlexp\.export {tmp_path}\.$"):
        Run(tmp_path).model()


@pytest.mark.parametrize(
    ("adapter", "config", "loader", "more"),
    [
        (None, '{"architectures": ["LlamaForCausalLM"]}', "AutoModelForCausalLM", {}),
        (None, '{"architectures": ["LlamaForSequenceClassification"]}', "AutoModelForSequenceClassification", {}),
        (None, '["no mapping"]', "AutoModelForCausalLM", {}),
        ('{"task_type": "CAUSAL_LM"}', "{}", "AutoPeftModelForCausalLM", {}),
        ('{"task_type": "SEQ_CLS"}', "{}", "AutoPeftModelForSequenceClassification", {"num_labels": 1}),
    ],
)
def test_each_kind_of_model_has_its_class(
    adapter: str | None, config: str, loader: str, more: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    if adapter is not None:
        (tmp_path / "adapter_config.json").write_text(adapter, encoding="utf-8")
    asked = {}
    for module in (exported, sys.modules.get("peft") or pytest.importorskip("peft")):
        for name in ("AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoPeftModelForCausalLM",
                     "AutoPeftModelForSequenceClassification"):  # fmt: skip
            if hasattr(module, name):
                noted = SimpleNamespace(from_pretrained=lambda _, name=name, **more: asked.update({name: more}))
                monkeypatch.setattr(module, name, noted)
    exported.load_exported(tmp_path, dtype="float32")
    assert asked == {loader: {**more, "dtype": "float32"}}


def test_an_adapter_without_peft_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_config.json").write_text('{"task_type": "CAUSAL_LM"}', encoding="utf-8")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"is an adapter, which peft loads: pip install peft\.$"):
        exported.load_exported(tmp_path)


def test_a_program_that_uses_hydra_keeps_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        with pytest.raises(ConfigError, match="no such key"):
            rlexp.train(["train.foo=1"])
        assert GlobalHydra.instance().is_initialized()


@pytest.mark.slow
def test_a_run_that_fails_raises_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^step 2: the loss is not finite\. .*optim\.lr"):
        rlexp.train([*QUICK, "optim.lr=1e30", "hydra.run.dir=run"])
    assert run_json(tmp_path / "run")["status"] == "failed"


@pytest.mark.slow
def test_an_interrupt_finishes_the_step_and_saves(tmp_path: Path) -> None:
    """As of a notebook's kernel; it reaches the run once, and no process stays."""
    words = ", ".join(map(repr, QUICK[:3]))
    process = warm.start("-c", [ENDLESS.format(words=words)], tmp_path)
    wait_for_steps(tmp_path, process)
    everyone = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    said, told = process.communicate(timeout=240)
    assert said == "interrupted\n", told
    assert "rlexp: SIGINT: finishing step " in told
    assert "stopped by SIGINT; " in told
    assert run_json(tmp_path / "run")["status"] == "stopped"
    assert gone(everyone, within=240)
