"""Start a vLLM engine in this process, beside what trains in it."""

from __future__ import annotations

import contextlib
import os
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from rlexp.base.errors import ModelError
from rlexp.base.host_memory import host_memory
from rlexp.config.schema.rollouts import RolloutConfig
from rlexp.config.vllm_memory import AT_ONCE
from rlexp.launch import watch

SETTINGS = {  # of vLLM, unless the user has set them
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, where weights and logits can be reached
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its logits processors are others
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the rank's threads stay where they are
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",  # it would send what it runs on to its makers
}
UNKNOWN_HOST = 1 << 30  # bytes of keys and values, on a host that does not say how much memory it has


def started(
    place: str, cfg: RolloutConfig, *, precision: torch.dtype, device: torch.device, max_length: int, choosing: type
) -> Any:
    """Return an engine for the model that is described in a folder, without its weights."""
    gpu = device.type == "cuda"
    try:
        with watch.elsewhere(), _kept(), _plain_on_cpu(gpu=gpu):  # it compiles, and measures the GPU
            from vllm import LLM

            return LLM(
                model=place,
                load_format="dummy",
                dtype=str(precision).removeprefix("torch."),
                max_model_len=max_length,
                max_num_seqs=AT_ONCE,
                distributed_executor_backend="external_launcher",
                enable_prefix_caching=True,
                enable_sleep_mode=cfg.vllm_sleep,
                enforce_eager=not gpu,
                generation_config="vllm",
                logits_processors=[choosing],
                seed=0,
                skip_tokenizer_init=not cfg.stop,
                **_memory(cfg, gpu=gpu),
            )
    except ValueError as error:
        text = in_words(error)
        if "memory" not in text.lower():
            raise ModelError(
                f"rollout.engine=vllm: it cannot run this model ({text}). Use rollout.engine=native."
            ) from error
        raise ModelError(
            f"rollout.vllm_memory={cfg.vllm_memory}: vLLM cannot start beside what this device already holds ({text}). "
            f"Set another share, let other ranks sample (rollout=pipelined), or use rollout.engine=native."
        ) from error


def in_words(error: ValueError) -> str:
    """Return what vLLM says, without what pydantic says around it."""
    errors = getattr(error, "errors", None)
    return " ".join(each["msg"].removeprefix("Value error, ") for each in errors()) if errors else str(error)


def _memory(cfg: RolloutConfig, *, gpu: bool) -> dict[str, float]:
    share, memory = cfg.vllm_memory, host_memory()
    assert not isinstance(share, str), "auto becomes a number before any rank starts"
    if gpu:
        return {"gpu_memory_utilization": share}
    return {"kv_cache_memory_bytes": int(share * memory.total) if memory else UNKNOWN_HOST}


@contextlib.contextmanager
def _plain_on_cpu(*, gpu: bool) -> Iterator[None]:
    """Let vLLM compute with its matrices as they are. On a CPU it would pack them once, when they are loaded, and keep
    the packed ones of a matrix that is both embedding and head, whatever is loaded later."""
    if gpu:
        yield
        return
    from vllm.model_executor.layers import utils

    packing = utils.dispatch_cpu_unquantized_gemm

    def plain(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = functional.linear
        else:
            packing(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = plain
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = packing


def prepare(cfg: RolloutConfig) -> None:
    """Set what vLLM reads when it is imported, and what its executor for ranks of other launchers reads.

    It runs in the rank's own process, and in the world that it finds. A rank that only samples is in none, and gets one
    of its own: vLLM would otherwise look for the training ranks.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER"):
        if os.environ[name] != "0":
            raise ModelError(
                f"rollout.engine=vllm: the environment has {name}={os.environ[name]}. vLLM would keep its model where "
                f"its weights and logits cannot be reached. Unset it, or use rollout.engine=native."
            )
    if cfg.vllm_sleep and "PYTORCH_ALLOC_CONF" in os.environ:  # vLLM looks for the allocator's settings by this name
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", os.environ["PYTORCH_ALLOC_CONF"])
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        own = torch.cuda.current_device() if torch.cuda.is_available() else 0
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK=str(own))


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Keep this process's random numbers and torch's settings, which vLLM sets as it likes when it starts."""
    states, numpys, precision = random.getstate(), np.random.get_state(), torch.get_float32_matmul_precision()
    threads = torch.set_num_threads
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of what it calls itself
        try:
            yield
        finally:
            random.setstate(states)
            np.random.set_state(numpys)
            torch.set_float32_matmul_precision(precision)
            torch.set_num_threads = threads
