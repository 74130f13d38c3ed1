"""A plain vLLM, as a user of vLLM starts it: python -m bench.vllm_alone ASKED ANSWER, in a process of its own.

Nothing of rlexp is imported. ASKED is a file of JSON with the model's folder and the prompts; ANSWER gets the seconds.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {  # vLLM's own sampling, without seeds
    "plain": {},
    "logps": {"logprobs": 0},  # and the log-probability of each token
    "top_p": {"top_p": 0.9},
}


def alone(asked: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of generating all answers, by variant: the least of the repetitions."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=asked["model"], load_format="dummy", dtype=asked["dtype"], max_model_len=asked["max_length"],
        skip_tokenizer_init=True, generation_config="vllm", seed=0, **asked["more"],
    )  # fmt: skip
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"] for _ in range(asked["samples"])]
    seconds = {}
    for name, own in VARIANTS.items():
        params = SamplingParams(temperature=1.0, max_tokens=asked["new"], ignore_eos=True, detokenize=False, **own)
        taken = []
        for _ in range(asked["repeats"] + 1):
            llm.reset_prefix_cache()
            began = time.perf_counter()
            answers = llm.generate(prompts, params, use_tqdm=False)
            taken.append(time.perf_counter() - began)
            assert {len(each.outputs[0].token_ids) for each in answers} == {asked["new"]}
        seconds[name] = min(taken[1:])
    return seconds


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(alone(json.loads(Path(sys.argv[1]).read_text()))))
