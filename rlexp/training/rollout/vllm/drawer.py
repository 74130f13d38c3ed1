"""Draw answers with vLLM. Requests and samples are those of `sampling.Drawer`, and so are the chosen tokens, as far as
vLLM's logits are those of the policy.

Each rank that samples has a whole vLLM engine; in the pipelined mode, only the ranks that do nothing else. All requests
of a rollout are given to it at once, so it batches them as it likes, and a sample is handed on as soon as it ends.
Samples of one prompt share what vLLM keeps of the prompt.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlexp.base.errors import DrawError
from rlexp.config.schema.rollouts import RolloutConfig
from rlexp.launch import watch
from rlexp.training.rollout.choose import stream
from rlexp.training.rollout.deal import Request, Weights
from rlexp.training.rollout.sampling import refuse_not_finite, text_of
from rlexp.training.rollout.vllm.chooser import OWN, Notes, chooser
from rlexp.training.rollout.vllm.engine import prepare, started
from rlexp.training.rollout.vllm.weights import HandOver
from rlexp.training.types import Sample


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
        device: torch.device,
        precision: torch.dtype,
        dtype: np.dtype[Any],
    ) -> None:
        self._tokenizer, self._ends, self._cfg = tokenizer, list(ends), cfg
        self._seed, self._dtype = seed, dtype
        self._notes = Notes(cfg.max_new_tokens, device)
        prepare(cfg)  # before vLLM is imported, for the chooser
        with tempfile.TemporaryDirectory(prefix="rlexp-vllm-") as place:
            write_model(Path(place))
            self._llm = started(
                place,
                cfg,
                precision=precision,
                device=device,
                max_length=max_length,
                choosing=chooser(self._notes, cfg),
            )
        self._hand_over = HandOver()
        self._sleep()

    def renew(self, weights: Weights) -> None:
        """Give vLLM the policy's weights. A collective call where they are gathered."""
        if self._cfg.vllm_sleep:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # vLLM takes its memory from the driver, and torch keeps what training freed
            self._llm.wake_up(tags=["weights"])
        self._llm.collective_rpc(self._hand_over, args=(weights,))
        if self._cfg.vllm_sleep:
            self._llm.wake_up(tags=["kv_cache"])
        if not self._llm.reset_prefix_cache():
            raise DrawError(
                "rollout.engine=vllm: vLLM would not forget what it computed with older weights. Go on from the newest "
                "checkpoint, or use rollout.engine=native."
            )

    def _sleep(self) -> None:
        """Give vLLM's memory back until the next weights come. They are new ones, so nothing is kept of the old."""
        if self._cfg.vllm_sleep:
            self._llm.sleep(level=2)

    def draw(self, micro_batches: Sequence[Sequence[Request]], rollout: int) -> Iterator[list[Sample]]:
        """Yield samples as they end. Micro-batches mean nothing to vLLM."""
        requests = {str(request.place): request for part in micro_batches for request in part}
        try:
            self._ask(requests.values(), rollout)
            engine = self._llm.llm_engine
            while engine.has_unfinished_requests():
                ended = [answer for answer in engine.step() if answer.finished]
                watch.note()
                if ended:
                    yield [self._sample(requests[each.request_id], each.outputs[0]) for each in ended]
        except DrawError:
            raise
        except Exception as error:
            raise DrawError(
                f"rollout.engine=vllm: vLLM failed with {type(error).__name__}: {error}. Go on from the newest "
                f"checkpoint; if memory was short, with a smaller rollout.vllm_memory or with rollout.engine=native."
            ) from error
        finally:
            self._notes.clear()
        self._sleep()

    def _ask(self, requests: Collection[Request], rollout: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        cfg = self._cfg
        keys = stream(self._seed, rollout, [r.example.index for r in requests], [r.number for r in requests])
        for request, key in zip(requests, keys.tolist(), strict=True):
            asked = SamplingParams(
                temperature=0.0,  # the token that the chooser leaves
                max_tokens=cfg.max_new_tokens,
                stop=list(cfg.stop) or None,
                stop_token_ids=self._ends,
                ignore_eos=True,  # what ends an answer is told above
                detokenize=bool(cfg.stop),
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={OWN: {"request": request.place, "key": key}},
            )
            self._llm.llm_engine.add_request(
                str(request.place), {"prompt_token_ids": request.example.prompt.tolist()}, asked
            )

    def _sample(self, request: Request, output: Any) -> Sample:
        answer, logps = self._notes.taken(request.place, len(output.token_ids))
        if answer.tolist() != list(output.token_ids):
            raise DrawError(
                f"{request.example.origin}: vLLM returned other tokens than were chosen for it. This version of vLLM "
                f"does not fit; docs/reinforcement.md says which do. Use rollout.engine=native."
            )
        if not np.isfinite(logps).all():
            refuse_not_finite(request, int(np.isfinite(logps).argmin()))
        return Sample(
            **vars(request),
            answer=answer.astype(np.int32),
            behaviour=logps.astype(self._dtype),
            stopped=output.finish_reason == "stop",
            text=text_of(self._tokenizer, output.token_ids, self._cfg.stop),
        )
