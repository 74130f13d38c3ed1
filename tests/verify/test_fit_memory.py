"""A model that does not fit into memory loses layers, and a disk that is too small is told before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from rlexp.base.errors import ModelError
from rlexp.base.host_memory import HostMemory
from rlexp.config.checks.layout import choose, heads_of
from rlexp.config.load import compose_config
from rlexp.launch.preflight_check import laid_out
from rlexp.verify import fit_memory
from rlexp.verify.jobs import shrunk
from rlexp.verify.profiles import exact
from rlexp.verify.report import failure_in_words, report
from tests.helpers.faults import LITTLE_MEMORY
from tests.helpers.faults.verified import verify_planted

SMALL = ("launch.device=cpu", "logger=none", "data.size=24", "data.eval_size=0")


def test_what_is_free_is_free_in_the_group_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_memory, "host_memory", lambda: HostMemory(total=64 << 30, available=7 << 30))
    assert fit_memory.free_on_host() == 7 << 30


def test_layers_are_left_out_until_it_fits(tmp_path: Path) -> None:
    cfg = compose_config([*SMALL, "model.layers=8", "parallel=ring2"])
    whole = fit_memory.plan(cfg, 2, tmp_path, free=1 << 40)
    assert (whole.layers, whole.left_out) == (8, None)
    less = fit_memory.plan(cfg, 2, tmp_path, free=whole.need)  # 0.7 of it may be used
    assert 2 <= less.layers < 8
    assert less.need <= 0.7 * whole.need
    assert f"first {less.layers} of 8 layers" in (less.left_out or "")
    assert shrunk(cfg, less).model.layers == less.layers
    with pytest.raises(
        ModelError, match=r"2 of its layers .* parameters\) need .* GB .* 0.7 of the .* GB that are free"
    ):
        fit_memory.plan(cfg, 2, tmp_path, free=1 << 20)


def test_the_disk_holds_frozen_weights_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cfg = compose_config([*SMALL, "parallel=ring2", "adapter=lora"])
    need = 8 * 3 * fit_memory.plan(cfg, 3, tmp_path, free=1 << 40).parameters  # the weights of three recordings
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: shutil._ntuple_diskusage(0, 0, int(6 * need / 0.7)))
    fit_memory.plan(cfg, 3, tmp_path, free=1 << 40)
    with pytest.raises(ModelError, match=r"TMPDIR=.*: gradients and weights of 3 steps take .* GB there"):
        fit_memory.plan(compose_config([*SMALL, "parallel=ring2"]), 3, tmp_path, free=1 << 40)


def test_float64_is_run_over_the_layout_that_the_run_takes(tmp_path: Path) -> None:
    """The choice of `auto` may depend on the precision, so it is made once."""
    cfg = compose_config(
        ["launch.device=cpu", "parallel=ring2", "parallel.layout=auto", "train.precision=bf16", "data.max_length=2048",
         "model.heads=8", "model.kv_heads=8", "model.hidden_size=128"]
    )  # fmt: skip
    cfg = laid_out(cfg)
    taken = choose(cfg, heads_of(cfg.model))
    assert taken.reason
    pinned = exact(shrunk(cfg, fit_memory.plan(cfg, 1, tmp_path, free=1 << 40)))
    assert choose(pinned, heads_of(cfg.model)).name == taken.name


def test_a_pretrained_model_keeps_its_first_layers(shared: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    hh = f"{shared}/data/hh_helpful_base/test.jsonl"
    cfg = compose_config(["launch.device=cpu", "logger=none", "model=hf", f"model.path={shared}/models/stories260K",
                          "data=jsonl", f"data.path={hh}", "data.max_length=256", "data.too_long=drop",
                          "train.batch_size=2"])  # fmt: skip
    whole = fit_memory.plan(cfg, 1, tmp_path, free=1 << 40)
    less = fit_memory.plan(cfg, 1, tmp_path, free=whole.need)
    assert 2 <= less.layers < whole.layers == 5
    small = AutoModelForCausalLM.from_pretrained(shrunk(cfg, less).model.path).state_dict()
    large = AutoModelForCausalLM.from_pretrained(f"{shared}/models/stories260K").state_dict()
    assert small.keys() < large.keys()
    assert all(torch.equal(weight, large[name]) for name, weight in small.items())


def test_a_shrunk_model_is_verified_and_said_to_be_shrunk() -> None:
    overrides = [*SMALL, "model.layers=6", "train.precision=fp64", "parallel=ring2", "data.max_length=300"]
    cfg = compose_config(overrides)
    verdict, reached = verify_planted(LITTLE_MEMORY, overrides=overrides, steps=1)
    assert reached
    assert verdict.passed, failure_in_words(verdict.failure)
    assert 2 <= verdict.plan.layers < 6
    assert f"shrunk: the model's first {verdict.plan.layers} of 6 layers" in report(cfg, verdict)
