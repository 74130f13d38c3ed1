"""Generators that are wrong in one way each, on a small model that has a chat template and has been trained for a few
steps. `draw` plants each in the product's own drawer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.rollout import sampling
from rlexp.training.rollout.choose import choose, kept
from rlexp.training.rollout.deal import Request, deal
from rlexp.training.types import ScoredSample
from rlexp.verify.record_samples import drawn_of
from rlexp.verify.recording import DrawnSample, TensorFiles

TEMPLATE = "<bos>{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
STEPS = 2  # each on a rollout of its own; the samples are of the next one
Plant = Callable[[Any, Any], contextlib.AbstractContextManager[Any]]  # from the task and its drawer


def model_in(place: Path) -> Path:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(**shape, vocab_size=259, initializer_range=0.3, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    LlamaForCausalLM(config).save_pretrained(place)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(place)
    return place


def config_of(model: Path, *more: str) -> Config:
    return compose_config([
        "loss=grpo", "reward.rule=length", "model=hf", f"model.path={model}", "launch.device=cpu", "engine=torch",
        "logger=none", "data=synthetic", "data.size=24", "data.eval_size=0", "data.max_length=160", "optim.lr=1e-2",
        "rollout.batch_size=4", "rollout.n_samples=2", "rollout.max_new_tokens=12", "train.batch_size=8",
        "rollout.temperature=0.7", "rollout.top_p=0.9", *more,
    ])  # fmt: skip


# ---- what may be wrong ----


@contextlib.contextmanager
def right(_task: Any, _drawer: Any) -> Iterator[None]:
    yield


def logits(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """Change what the model says, whose logits are divided by the temperature."""

    @contextlib.contextmanager
    def planted(_task: Any, drawer: Any) -> Iterator[None]:
        forward = drawer._forward
        with mock.patch.object(drawer, "_forward", lambda batch: change(forward(batch))):
            yield

    return planted


@contextlib.contextmanager
def renormalised(_task: Any, _drawer: Any) -> Iterator[None]:
    def other(logits_BV: torch.Tensor, uniform_B: torch.Tensor, cfg: Any) -> tuple[torch.Tensor, torch.Tensor]:
        token_B, logp_B = choose(logits_BV, uniform_B, cfg)
        return token_B, logp_B - kept(logits_BV.double().log_softmax(-1), cfg).sum(-1).log()

    with mock.patch.object(sampling, "choose", other):
        yield


@contextlib.contextmanager
def old_weights(task: Any, _drawer: Any) -> Iterator[None]:
    """Draw with the weights from before the last optimizer step."""
    with _other_weights(task, lambda name, _: torch.from_numpy(task.files.read("weights", STEPS - 1, name).copy())):
        yield


@contextlib.contextmanager
def bf16(task: Any, _drawer: Any) -> Iterator[None]:
    with _other_weights(task, lambda _, weight: weight.bfloat16()):
        yield


@contextlib.contextmanager
def bf16_weights(task: Any, _drawer: Any) -> Iterator[None]:
    with _other_weights(task, lambda _, weight: weight.bfloat16().float()):
        yield


@contextlib.contextmanager
def _other_weights(task: Any, of: Callable[[str, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    parameters = dict(task.run.engine.policy.model.named_parameters())
    before = {name: parameter.data for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.data = of(name, parameter.data)
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = before[name]


def positions(by: Callable[[Any], Any]) -> Plant:
    """Move the positions of the answer's tokens."""

    @contextlib.contextmanager
    def planted(_task: Any, drawer: Any) -> Iterator[None]:
        forward, reading = drawer._forward, drawer._read

        def read(requests: Sequence[Request]) -> Any:
            with mock.patch.object(drawer, "_forward", forward):
                return reading(requests)

        def moved(batch: Any) -> torch.Tensor:
            said: torch.Tensor = forward(replace(batch, positions_Bq=batch.positions_Bq + by(batch.cache)))
            return said

        with mock.patch.object(drawer, "_read", read), mock.patch.object(drawer, "_forward", moved):
            yield

    return planted


def prompts(change: Callable[[Any, np.ndarray], np.ndarray]) -> Plant:
    """Give the drawer other prompts than the samples name."""

    @contextlib.contextmanager
    def planted(task: Any, drawer: Any) -> Iterator[None]:
        drawing = drawer.draw

        def draw(parts: Sequence[Sequence[Request]], rollout: int) -> Iterator[Any]:
            other = [[replace(r, example=replace(r.example, prompt=change(task, r.example))) for r in part]
                     for part in parts]  # fmt: skip
            for asked, samples in zip(parts, drawing(other, rollout), strict=True):
                yield [replace(sample, example=request.example)
                       for request, sample in zip(asked, samples, strict=True)]  # fmt: skip

        with mock.patch.object(drawer, "draw", draw):
            yield

    return planted


def _untemplated(task: Any, prompt: Any) -> np.ndarray:
    return np.array(task.run.tokenizer(prompt.text)["input_ids"], dtype=np.int32)


PLANTS: dict[str, Plant] = {
    "right": right,
    "temperature 1": logits(lambda said: said * 0.7),
    "temperature twice": logits(lambda said: said / 0.7),
    "renormalised": renormalised,
    "weights after step 1": old_weights,
    "weights in bf16": bf16_weights,
    "rounding of bf16": bf16,
    "positions + 1": positions(lambda _: 1),
    "positions − 1": positions(lambda _: -1),
    "padding in the answer": positions(lambda cache: cache.pads_B.unsqueeze(-1)),
    "no BOS": prompts(lambda _, prompt: prompt.prompt[1:]),
    "BOS twice": prompts(lambda _, prompt: np.concatenate((prompt.prompt[:1], prompt.prompt))),
    "no template": prompts(_untemplated),
}


def planted_rank(_spec: RankSpec, cfg: Config, folder: Path, names: Sequence[str]) -> dict[str, list[DrawnSample]]:
    """Train, keep the weights after each step in files, and draw the next rollout once with each plant."""
    from rlexp.training.train.build import build
    from rlexp.training.train.step import train_step
    from rlexp.training.train.surroundings import UNPROBED

    task: Any = build(cfg, around=UNPROBED)
    task.files = TensorFiles(folder)
    try:
        for step in range(STEPS + 1):
            if step:
                train_step(task, step)
            for name, weight in task.run.engine.weights():
                task.files.write("weights", step, name, weight.detach().numpy())
        return {name: _drawn(task, PLANTS[name]) for name in names}
    finally:
        task.close()


def _drawn(task: Any, plant: Plant) -> list[DrawnSample]:
    rollouts = task.rollouts
    drawer = rollouts.source._drawer
    asked = [rollouts.examples.train[index] for index in rollouts.sampler.batch(STEPS + 1).indices]
    with plant(task, drawer), torch.no_grad():
        parts = drawer.draw([deal(asked, rollouts.cfg.n_samples, 1)[0]], STEPS)
        samples = sorted((sample for part in parts for sample in part), key=lambda sample: sample.place)
    columns: Any = rollouts.scorer.score(samples)[0]
    nothing: dict[str, Any] = {"score": 0.0, "terms": {}, "counts": True}
    return [drawn_of(ScoredSample(**vars(sample), **nothing, **of_tokens))
            for sample, of_tokens in zip(samples, columns, strict=True)]  # fmt: skip
