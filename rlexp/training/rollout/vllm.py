"""Draw answers with vLLM, on GPU machines where it is installed. Requests and samples are those of `sampling.Drawer`.

Each rank that samples has a whole vLLM engine on its GPU; in the pipelined mode, only the ranks that do nothing else.
It holds `rollout.vllm_memory` of the GPU's memory to the end of the run, beside what trains there: vLLM's sleep mode,
which would give it back, does not go with torch's `expandable_segments`. Before each rollout it receives the policy's
weights, one by one: a second copy of them, in bfloat16. Each request has its own seed, so a sample does not depend on
the samples drawn beside it, as far as vLLM's kernels allow. `train/val/behaviour_ratio` shows how far vLLM's
log-probabilities are from those of the scoring pass, and `rollout.importance_cap` corrects for the difference.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlexp.base.errors import ModelError
from rlexp.config.schema.rollouts import RolloutConfig
from rlexp.launch import watch
from rlexp.training.rollout.deal import Request
from rlexp.training.rollout.draws import Weights
from rlexp.training.rollout.noise import stream
from rlexp.training.rollout.sampling import sample_of, text_of
from rlexp.training.types import Sample

SEEDS = 1 << 31  # vLLM takes seeds below this


def _in_this_process() -> None:
    """Prepare what vLLM's executor for ranks of other launchers reads.

    It runs in the rank's own process, where weights can be replaced, and in the world that it finds. A rank that only
    samples is in none, and gets one of its own: vLLM would otherwise look for the training ranks.
    """
    if os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        raise ModelError(
            "rollout.engine=vllm: the environment has VLLM_ENABLE_V1_MULTIPROCESSING. vLLM would keep its model in "
            "another process, where the weights cannot be replaced. Unset it, or use rollout.engine=native."
        )
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        own = torch.cuda.current_device() if torch.cuda.is_available() else 0
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK=str(own))


class VLLMDrawer:
    """`write_model` writes a folder from which vLLM reads architecture and tokenizer; weights come later."""

    def __init__(
        self,
        *,
        write_model: Callable[[Path], None],
        tokenizer: Any,
        ends: Sequence[int],
        cfg: RolloutConfig,
        seed: int,
        max_length: int,
        dtype: np.dtype[Any],
    ) -> None:
        _in_this_process()
        from vllm import LLM

        self._tokenizer, self._ends, self._cfg = tokenizer, list(ends), cfg
        self._seed, self._dtype = seed, dtype
        with tempfile.TemporaryDirectory(prefix="rlexp-vllm-") as place:
            write_model(Path(place))
            try:
                with watch.elsewhere():  # it compiles, and measures the GPU
                    self._llm = LLM(
                        model=place,
                        load_format="dummy",
                        dtype="bfloat16",
                        max_model_len=max_length,
                        gpu_memory_utilization=cfg.vllm_memory,
                        distributed_executor_backend="external_launcher",
                        logprobs_mode="processed_logprobs",
                        seed=0,
                    )
            except ValueError as error:  # too little memory is free, or too little for one sequence
                raise ModelError(
                    f"rollout.vllm_memory={cfg.vllm_memory}: vLLM cannot start beside what this GPU already holds "
                    f"({error}). Set another share, let other ranks sample (rollout=pipelined), or use "
                    f"rollout.engine=native."
                ) from error

    def renew(self, weights: Weights) -> None:
        """Give vLLM the policy's weights, one parameter at a time. A collective call where they are gathered."""
        executor = getattr(self._llm.llm_engine, "model_executor", None)
        if executor is None:
            raise ModelError(
                "rollout.engine=vllm: this version of vLLM keeps its model in another process, where the weights "
                "cannot be replaced. Install another version, or use rollout.engine=native."
            )
        model = executor.driver_worker.model_runner.model
        for name, weight in weights():
            watch.note()
            model.load_weights([(name, weight.to("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16))])
        self._llm.reset_prefix_cache()

    def draw(self, micro_batches: Sequence[Sequence[Request]], rollout: int) -> Iterator[list[Sample]]:
        """Yield the samples of each micro-batch. vLLM batches as it likes; the rewards receive micro-batches."""
        for requests in micro_batches:
            streams = stream(self._seed, rollout, [r.prompt.index for r in requests], [r.number for r in requests])
            with watch.elsewhere():
                answers = self._llm.generate(
                    [{"prompt_token_ids": request.prompt.tokens.tolist()} for request in requests],
                    [self._parameters(int(key % np.uint64(SEEDS))) for key in streams],
                    use_tqdm=False,
                )
            yield [self._sample(*each) for each in zip(requests, (a.outputs[0] for a in answers), strict=True)]

    def _parameters(self, seed: int) -> Any:
        from vllm import SamplingParams

        cfg = self._cfg
        return SamplingParams(
            temperature=cfg.temperature,
            top_k=cfg.top_k or -1,
            top_p=cfg.top_p,
            min_p=cfg.min_p,
            max_tokens=cfg.max_new_tokens,
            stop=list(cfg.stop) or None,
            stop_token_ids=self._ends,
            include_stop_str_in_output=True,
            logprobs=0,
            seed=seed,
        )

    def _sample(self, request: Request, output: Any) -> Sample:
        logps = [each[token].logprob for each, token in zip(output.logprobs, output.token_ids, strict=True)]
        return sample_of(
            request,
            np.asarray(output.token_ids, dtype=np.int32),
            np.asarray(logps, dtype=self._dtype),
            stopped=output.finish_reason == "stop",
            text=text_of(self._tokenizer, output.token_ids, self._cfg.stop),
        )
