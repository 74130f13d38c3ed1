"""`rollout.vllm_memory`: what a share holds, what `auto` comes to, and what is refused before a process starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rlexp.base.byte_counts import GIB, MIB
from rlexp.base.errors import ConfigError
from rlexp.base.host_memory import HostMemory
from rlexp.config import vllm_memory
from rlexp.config.checks.layout import described
from rlexp.config.elsewhere import compose_elsewhere, composed_for
from rlexp.config.identity import curve_keys
from rlexp.config.load import compose_config
from rlexp.config.schema import AUTO, Config
from rlexp.config.vllm_memory import (
    check_vllm_memory,
    held_by_vllm,
    share_beside_training,
    share_of_sampling,
    share_on_cpu,
)
from rlexp.launch import preflight_check
from rlexp.launch.preflight_check import with_vllm_memory

GRPO = ("loss=grpo", "reward.rule=length")
VLLM = (*GRPO, "rollout.engine=vllm", "hardware=h100", "launch.nproc=8")
LLAMA_8B: dict[str, object] = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
PARAMETERS = 8_030_261_248
HOST = HostMemory(total=64 * GIB, available=32 * GIB)


def elsewhere(*words: str) -> Config:
    return compose_elsewhere([*VLLM, *words])


def pipelined(*words: str) -> Config:
    return composed_for([*VLLM, "launch.device=cuda", "rollout=pipelined", *words], Path())


def on_cpu(*words: str, ranks: int = 1) -> Config:
    """A run by vLLM on CPU, which need not be installed here: 4 layers with 2 key/value heads of 16 float32 numbers."""
    given = ("launch.device=cpu", f"launch.nproc={ranks}", "data.max_length=200", "rollout.max_new_tokens=16",
             "model.layers=4", "model.hidden_size=64", "model.heads=4", "model.kv_heads=2")  # fmt: skip
    cfg = compose_config([*GRPO, *given, *words])
    return dataclasses.replace(cfg, rollout=dataclasses.replace(cfg.rollout, engine=vllm_memory.RolloutEngine.vllm))


# ---- a value ----


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("1.5", r"rollout\.vllm_memory=1\.5: must be greater than 0 and less than 1\. For example: .*=auto\."),
        ("1", r"rollout\.vllm_memory=1: must be greater than 0 and less than 1\."),
        ("0", r"rollout\.vllm_memory=0: must be greater than 0"),
        ("much", r"rollout\.vllm_memory='much': must be a share of a GPU's memory, .* or auto, .*\. For example: "),
    ],
)
@pytest.mark.parametrize("words", [VLLM, ("hardware=h100",)])
def test_what_is_no_share_is_refused(value: str, said: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=said):
        compose_elsewhere([*words, f"rollout.vllm_memory={value}"])


def test_shares_of_one_device_are_less_than_the_device() -> None:
    two = ("launch.nproc=4", "launch.ranks_per_gpu=2", "rollout.sampling_ranks=2")
    assert pipelined(*two, "rollout.vllm_memory=0.4").rollout.vllm_memory == 0.4
    with pytest.raises(ConfigError, match=r"vllm_memory=0\.5: .* puts 2 of them on one\. Use less than 0\.5"):
        pipelined(*two, "rollout.vllm_memory=0.5")
    check_vllm_memory(on_cpu("rollout.vllm_memory=0.4", ranks=2))
    with pytest.raises(ConfigError, match=r"vllm_memory=0\.5: .* machine's memory .* 2 of them are on one"):
        check_vllm_memory(on_cpu("rollout.vllm_memory=0.5", ranks=2))


def test_no_curve_depends_on_it() -> None:
    for key in ("rollout.vllm_memory", "rollout.vllm_sleep"):
        assert key not in curve_keys(elsewhere())


# ---- what a share holds ----


def test_a_share_of_an_h100_by_hand() -> None:
    cfg = elsewhere("rollout.vllm_memory=0.5", "data.max_length=8192", "train.precision=bf16")
    holds = held_by_vllm(cfg, LLAMA_8B, PARAMETERS, 80 * GIB)
    assert holds.bytes == 40 * GIB
    assert holds.weights == 2 * PARAMETERS
    assert holds.token == 2 * 32 * 8 * 128 * 2 == 128 << 10
    # Activations of 16,384 tokens, two float32 logits of 1,024 answers, and 512 MiB.
    assert holds.working == 16384 * 2 * (6 * 4096 + 3 * 14336) + 8 * 1024 * 128256 + 512 * MIB
    assert holds.keys == 40 * GIB - holds.weights - holds.working
    assert holds.tokens == (holds.keys // (16 * holds.token) - 1) * 16
    assert holds.at_once == holds.tokens // 8192 == 21
    assert holds.counted == holds.weights + (8192 + 16) * holds.token
    assert holds.least == holds.counted + holds.working
    assert dataclasses.replace(holds, bytes=holds.least).at_once == 1
    assert dataclasses.replace(holds, bytes=holds.least - 1).at_once == 0


def test_the_working_memory_is_what_vllm_once_reported() -> None:
    """1.26 GiB for Llama-3-8B, with 8,192 tokens and 256 answers together; graphs are not in that."""
    cfg = elsewhere("rollout.vllm_memory=0.5", "train.precision=bf16")
    smaller = held_by_vllm(cfg, LLAMA_8B, PARAMETERS, 40 * GIB).working - vllm_memory.GRAPHS
    assert (smaller - 8 * (1024 - 256) * 128256) / GIB == pytest.approx(1.26, rel=0.03)


def test_auto_is_the_least_until_something_is_predicted() -> None:
    cfg = elsewhere("data.max_length=8192", "train.precision=bf16")
    holds = held_by_vllm(cfg, LLAMA_8B, PARAMETERS, 80 * GIB)
    assert (holds.share, holds.at_once) == (0.25, 1)
    assert 0 <= holds.bytes - holds.least < 80 * GIB / 100
    wide = held_by_vllm(elsewhere("train.precision=fp32"), LLAMA_8B, PARAMETERS, 80 * GIB)
    assert (wide.weights, wide.token) == (4 * PARAMETERS, 2 * holds.token)


def test_a_model_that_says_no_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine=vllm: the model's configuration does not say how many"):
        held_by_vllm(elsewhere(), {"num_hidden_layers": 3}, PARAMETERS, GIB)


# ---- auto, without a prediction ----


@pytest.mark.parametrize(
    ("words", "share"),
    [
        ((), 0.9),
        (("hardware.memory_gib=10",), 0.75),  # of which 2.5 GiB are kept free
        (("rollout.sampling_ranks=2", "launch.ranks_per_gpu=2"), 0.45),
        (("rollout.sampling_ranks=1", "launch.ranks_per_gpu=2", "launch.nproc=2"), 0.45),
    ],
)
def test_a_rank_that_only_samples_has_nearly_all(words: tuple[str, ...], share: float) -> None:
    assert share_of_sampling(pipelined(*words)) == share


def test_beside_training_of_which_nothing_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    cfg = elsewhere()
    assert share_beside_training(cfg) == 0.4
    preflight_check._told.clear()
    assert with_vllm_memory(cfg).rollout.vllm_memory == 0.4
    assert with_vllm_memory(cfg, 0.31).rollout.vllm_memory == 0.31
    assert capsys.readouterr().err == (
        "rlexp: rollout.vllm_memory=auto takes 0.4: what training leaves was not predicted\n"
        "rlexp: rollout.vllm_memory=auto takes 0.31: what training leaves\n"
    )
    stated = elsewhere("rollout.vllm_memory=0.2")
    assert with_vllm_memory(stated, 0.31) == stated
    native = compose_elsewhere(["hardware=h100", "launch.nproc=1", *GRPO])
    assert with_vllm_memory(native).rollout.vllm_memory == AUTO


def test_on_cpu_a_whole_rollout_fits() -> None:
    """8 prompts × 4 answers of 200 tokens, in blocks of 128, and the block that vLLM keeps."""
    token = 2 * 4 * 4 * 2 * 16
    wanted = token * (32 * 256 + 128)
    share = share_on_cpu(on_cpu(), HOST)
    assert wanted <= int(share * HOST.total) < wanted + 2 * HOST.total / 1e6
    assert held_by_vllm(on_cpu(), dict(described(on_cpu().model) or {}), 0, HOST.total).keys == wanted
    two = share_on_cpu(on_cpu(ranks=2), HOST)
    assert int(two * HOST.total) < wanted


def test_on_cpu_it_takes_no_more_than_a_quarter_of_what_is_free() -> None:
    little = HostMemory(total=GIB, available=16 * MIB)
    assert share_on_cpu(on_cpu(ranks=2), little) == pytest.approx(2 / 1024, rel=1e-3)
    with pytest.raises(
        ConfigError,
        match=r"vllm_memory=auto: keys and values of one answer of data\.max_length=200 take 0\.4 MiB, and a rank has "
        r"0\.2 MiB for them: a quarter of the 1\.0 MiB that are free\. Use rollout\.vllm_memory=\S+ or more, a smaller",
    ):
        share_on_cpu(on_cpu(), HostMemory(total=GIB, available=MIB))


def test_on_cpu_a_stated_share_holds_an_answer() -> None:
    assert share_on_cpu(on_cpu("rollout.vllm_memory=0.01"), HOST) == 0.01
    with pytest.raises(ConfigError, match=r"vllm_memory=1e-06: .* has 0\.1 MiB for them: this share of 64\.0 GiB"):
        share_on_cpu(on_cpu("rollout.vllm_memory=0.000001"), HOST)
