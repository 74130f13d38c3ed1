"""A model, its optimizer and its logged values in one process: what steps by transformers alone have in common."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlexp.base.errors import NonFiniteError
from rlexp.config.schema import Device, LoraConfig
from rlexp.training.algos.build import build_loss
from rlexp.verify import rules
from rlexp.verify.jobs import AloneJob
from rlexp.verify.model import load_tokenizer
from rlexp.verify.optimizer import norm, optimizer_of
from rlexp.verify.recording import (
    START,
    Array,
    Recording,
    Scene,
    TensorFiles,
    TokenExample,
    sides_of,
)


class Alone:
    """A model that is stepped in one process. Its gradients and weights of each step go to files."""

    batch = "train batch"

    def __init__(self, job: AloneJob) -> None:
        self.job, self.cfg, self.given = job, job.cfg, job.given
        self.files, self.sides = TensorFiles(job.folder), sides_of(job.cfg)
        self.device = torch.device("cuda" if job.cfg.launch.device is Device.cuda else "cpu")
        self.optimizer = optimizer_of(job.cfg)
        self.tokenizer = load_tokenizer(job.cfg)
        self.sizes: Sequence[int] = job.given.facts["sizes"]
        self.recording = Recording(folder=job.folder, facts={"steps": job.steps})
        self.tokens = 0  # of all steps

    def run(self) -> Recording:
        """Take the steps of the recorded run, as far as it has the data that it must have."""
        self.begin()
        for number in range(1, self.job.steps + 1):
            if not self.step(number):
                return self.recording
        self.evaluate()
        return self.recording

    def begin(self) -> None:
        """Say what must be there before the first step."""
        start = Scene(START, 1)
        start.put("total_steps", ("total_steps",), self.total)
        start.put("precision of the parameters", ("torch.float64",), True)
        self.recording.scenes.append(start)

    total: int  # optimizer steps of the whole run

    def step(self, number: int) -> bool:
        """Take one optimizer step; say whether the recorded run has what is needed for it."""
        raise NotImplementedError

    def evaluate(self) -> None:
        raise NotImplementedError

    def train(self, model: nn.Module, more: Mapping[str, nn.Parameter] | None = None) -> None:
        """Say what is trained: the model but for what is frozen, and more."""
        own = dict(model.named_parameters())
        for name, parameter in own.items() if not isinstance(self.cfg.adapter, LoraConfig) else ():
            parameter.requires_grad_(not any(fnmatch.fnmatchcase(name, frozen) for frozen in self.cfg.model.freeze))
        self.parameters: dict[str, Any] = own | dict(more or {})
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.write_weights(0)

    def finish(self, scene: Scene, loss: float, per_epoch: int, origins: Sequence[str]) -> None:
        """Take the optimizer step with the gradients that are there; write them, and the weights after it, to files."""
        number = scene.step
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.detach() for name, p in self.trained.items()
        }
        size = norm(gradients.values())
        if not math.isfinite(loss + size):
            raise NonFiniteError(
                f"step {number}: the loss or its gradient is not finite, in the plain reference too. Its samples begin "
                f"with {', '.join(origins[:8])}. A smaller optim.lr or a warm-up may help; or the samples are at fault."
            )
        lr = rules.learning_rate(self.cfg.optim, self.total, number)
        for name, gradient in gradients.items():
            self.files.write("gradient", number, name, gradient.cpu().numpy())
        with torch.no_grad():
            self.optimizer.step({n: p.data for n, p in self.trained.items()}, gradients, lr)
        for parameter in self.trained.values():
            parameter.grad = None
        self.write_weights(number, self.trained)
        self.tokens += int(scene.row["train/tokens"])
        scene.row |= {"train/grad_norm": size, "train/learning_rate": lr, "train/global_step": number,
                      "train/epoch": number / per_epoch, "train/total_tokens": self.tokens, "step": number}  # fmt: skip
        self.recording.scenes.append(scene)

    def write_weights(self, step: int, stepped: Collection[str] | None = None) -> None:
        """Write all weights, or those that are stepped: then the others are those of the step before."""
        for name, parameter in self.parameters.items():
            if stepped is None or name in stepped:
                self.files.write("weights", step, name, parameter.detach().cpu().numpy())
            else:
                self.files.repeat("weights", step, name)

    def put_batch(self, scene: Scene, order: Sequence[int], examples: Mapping[int, TokenExample]) -> None:
        """Say which examples a train batch has, and which of their tokens are trained on."""
        scene.put(self.batch, ("order",), np.array(order))
        scene.put("dealt", ("units",), np.arange(len(order)))
        for sample in order:
            scene.put("taken", (sample,), 1)
        self.put_trained(scene, examples)

    def put_trained(self, scene: Scene, examples: Mapping[int, TokenExample], more: str = "") -> None:
        scores = not self.cfg.loss.draws and build_loss(self.cfg.loss).wanted.scores
        for sample, example in examples.items():
            for side in example.sides if not scores else ():
                places = example.trained(side)
                scene.put(f"places of trained tokens{more}", (sample, side), places)
                scene.put(f"trained tokens{more}", (sample, side), example.answers[side][places])


def whole(values: Tensor) -> Array:
    array: Array = values.detach().cpu().numpy()
    return array
