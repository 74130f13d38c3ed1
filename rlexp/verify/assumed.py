"""What a plain model says of generated tokens: as the run is configured, and under each wrong assumption.

The model is transformers' own, in float32, one sequence at a time. A generator that applied no temperature, that had
old weights, other positions or another prompt would have given its tokens the log-probabilities that are computed here.

Shape letters: T tokens of a sequence, n of its answer, V vocabulary, E width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlexp.config.schema import Config, Device
from rlexp.config.schema.rollouts import RolloutConfig
from rlexp.training.model.float64 import precise
from rlexp.verify import rollout_rules as rules
from rlexp.verify.drawing import cut, number_of, strayed
from rlexp.verify.model import LOGITS, hidden_states, load, load_tokenizer
from rlexp.verify.recording import Array, DrawnSample, TensorFiles

BORDER = 1e-6  # rounding of float32 at a border of top-k, top-p or min-p
By = Callable[[Tensor, Tensor], Tensor]  # the log-probabilities (n,) of tokens (n,), from logits (n, V) in float64


@dataclass(frozen=True)
class Said:
    """An assumption, and the log-probability of each token under it, by sample; NaN where it says nothing."""

    name: str
    words: str  # that finish "these log-probabilities are …"
    logps: list[Array]


@dataclass(frozen=True)
class Read:
    """How a sequence is read: which weights, which tokens before the answer, which positions."""

    step: int  # the weights after this optimizer step
    prompts: Sequence[Array]
    moved: Sequence[int]  # by how much the positions of each answer's tokens are moved
    all_moved: bool = False  # the prompt's, too


class Assumed:
    """The plain model of a run, and the samples of one rollout."""

    def __init__(self, cfg: Config, samples: Sequence[DrawnSample], number: int, ran: Path | None) -> None:
        self.cfg, self.samples, self.number = cfg, samples, number
        self.device = torch.device("cuda" if cfg.launch.device is Device.cuda else "cpu")
        self.tokenizer = load_tokenizer(cfg)
        self.model = load(cfg, self.device)
        self.files = None if ran is None else TensorFiles(ran)
        self.step, self.hidden = 0, list[Tensor]()
        self.start = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self.drew = rules.drawn_after(cfg, number)  # the steps whose weights drew the rollout, and score it
        self.scored = number * rules.steps_each(cfg)
        self.as_it_is = [np.asarray(each.prompt) for each in samples]

    # ---- reading ----

    def weigh(self, step: int, *, again: bool = False) -> None:
        """Take the weights after a step; `again`, also if they should be there already."""
        if step == self.step and not again:
            return
        names = [] if self.files is None or not step else self.files.names("weights", step)
        for name, parameter in self.model.named_parameters():
            weight = self.start[name]
            if self.files is not None and name in names:
                weight = torch.from_numpy(self.files.read("weights", step, name).astype(np.float64))
            parameter.data = weight.to(self.device, parameter.dtype)
        self.step = step

    def cast(self, dtype: torch.dtype) -> None:
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)

    def read(self, how: Read, by: By) -> list[Array]:
        return self._spoken(self._hidden(how), by)

    @torch.no_grad()
    def _hidden(self, how: Read) -> list[Tensor]:
        """Return the hidden states before each token of the answers, (n, E)."""
        self.weigh(how.step)
        found = []
        for sample, prompt, moved in zip(self.samples, how.prompts, how.moved, strict=True):
            tokens_T = torch.from_numpy(np.concatenate((prompt, sample.answer)).astype(np.int64)).to(self.device)
            positions_T = torch.arange(len(tokens_T), device=self.device)
            positions_T[0 if how.all_moved else len(prompt) :] += moved
            with precise(next(self.model.parameters()).dtype):
                found.append(hidden_states(self.model.base_model, tokens_T, positions_T)[len(prompt) - 1 : -1])
        return found

    @torch.no_grad()
    def _spoken(self, hidden: Sequence[Tensor], by: By) -> list[Array]:
        head = self.model.get_output_embeddings()
        rows = max(1, LOGITS // head.weight.shape[0])
        found = []
        for sample, hidden_nE in zip(self.samples, hidden, strict=True):
            tokens_n = torch.from_numpy(sample.answer.astype(np.int64)).to(self.device)
            pieces = zip(hidden_nE.split(rows), tokens_n.split(rows), strict=True)
            found.append(torch.cat([by(head(part).double(), tokens) for part, tokens in pieces]).cpu().numpy())
        return found

    def as_configured(self, step: int) -> Read:
        return Read(step, self.as_it_is, [0] * len(self.samples))

    def at(self, temperature: float) -> By:
        return lambda logits_nV, tokens_n: _logp(logits_nV / temperature, tokens_n)

    # ---- rounding ----

    def configured(self) -> dict[str, list[Array]]:
        """Return what the weights that drew the rollout say of it in float64 and bf16, and in float32 last, which the
        model then stays in."""
        by, how, said = self.at(self.cfg.rollout.temperature), self.as_configured(self.drew), {}
        for name, dtype in {"fp64": torch.float64, "bf16": torch.bfloat16, "fp32": torch.float32}.items():
            self.cast(dtype)
            self.weigh(self.drew, again=True)
            self.hidden = self._hidden(how)
            said[name] = self._spoken(self.hidden, by)
        return said

    def now(self) -> list[Array]:
        """Return what the weights say that score the rollout."""
        return self.read(self.as_configured(self.scored), self.at(self.cfg.rollout.temperature))

    # ---- assumptions ----

    def all(self, step: int) -> Iterator[Said]:
        """Yield every assumption about log-probabilities by the weights after a step; `configured` comes first."""
        hidden = self.hidden if step == self.drew else self._hidden(self.as_configured(step))
        self.weigh(step)  # the head's, too
        for name, words, by in self._distributions():
            yield Said(name, words, self._spoken(hidden, by))
        configured = self._spoken(hidden, self.at(self.cfg.rollout.temperature))
        yield from self._neighbours(configured)
        for name, words, how in (*self._positions(step), *self._prompts(step), *self._older(step)):
            yield Said(name, words, self.read(how, self.at(self.cfg.rollout.temperature)))
        yield self._rounded(step)

    def _distributions(self) -> Iterator[tuple[str, str, By]]:
        rollout = self.cfg.rollout
        set_to = f"rollout.temperature={rollout.temperature:g}"
        yield "configured", f"those of the whole distribution at {set_to}", self.at(rollout.temperature)
        if rollout.temperature != 1:
            yield "temperature 1", f"those of temperature 1, and {set_to}", self.at(1.0)
            twice = rollout.temperature**2
            yield "temperature twice", f"those of temperature {twice:g}, so {set_to} is applied twice", self.at(twice)
        cuts = [f"{name}={value:g}" for name, value, unset in _cuts(rollout) if value != unset]
        if cuts:
            named = " and ".join(f"rollout.{each}" for each in cuts)
            yield "renormalised", f"those of the tokens that {named} leave, which add up to 1 again", self._among_kept

    def _among_kept(self, logits_nV: Tensor, tokens_n: Tensor) -> Tensor:
        logps_nV = (logits_nV / self.cfg.rollout.temperature).log_softmax(-1)
        kept_nV, _ = cut(logps_nV, self.cfg.rollout, BORDER)
        left_n = logps_nV.masked_fill(~kept_nV, -torch.inf).logsumexp(-1)
        return logps_nV.gather(-1, tokens_n.unsqueeze(-1)).squeeze(-1) - left_n

    def _neighbours(self, configured: Sequence[Array]) -> Iterator[Said]:
        none = np.array([np.nan])
        before = [np.concatenate((none, each[:-1])) for each in configured]
        after = [np.concatenate((each[1:], none)) for each in configured]
        yield Said("token before", "those of the token before each", before)
        yield Said("token after", "those of the token after each", after)

    def _positions(self, step: int) -> Iterator[tuple[str, str, Read]]:
        longest = max(map(len, self.as_it_is))
        pads = [longest - len(prompt) for prompt in self.as_it_is]
        one = [1] * len(pads)
        ways: list[tuple[str, str, Sequence[int], bool]] = [
            ("positions + 1", "those of positions that are 1 too large from the answer on", one, False),
            ("positions − 1", "those of positions that are 1 too small from the answer on", [-1] * len(one), False),
            ("all positions + 1", "those of positions that begin with 1", one, True),
        ]
        if any(pads):
            ways += [
                ("padding in the answer", "those of answers whose positions count the padding before the prompt", pads,
                 False),
                ("padding counted", "those of sequences whose positions count the padding before them", pads, True),
            ]  # fmt: skip
        room = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 60
        for name, words, moved, all_moved in ways:
            lengths = [len(prompt) + len(each.answer) for prompt, each in zip(self.as_it_is, self.samples, strict=True)]
            if max(length + by for length, by in zip(lengths, moved, strict=True)) <= room:
                yield name, words, Read(step, self.as_it_is, moved, all_moved)

    def _prompts(self, step: int) -> Iterator[tuple[str, str, Read]]:
        begin = self.tokenizer.bos_token_id
        ways: list[tuple[str, str, Sequence[Array]]] = []
        if begin is not None:
            has = [prompt[0] == begin for prompt in self.as_it_is]
            more = [np.concatenate((np.array([begin]), prompt)) for prompt in self.as_it_is]
            if all(has) and min(map(len, self.as_it_is)) > 1:
                less = [prompt[1:] for prompt in self.as_it_is]
                ways.append(("no BOS", f"those of prompts without their first token, {begin} (BOS)", less))
                ways.append(("BOS twice", f"those of prompts that begin with {begin} (BOS) twice", more))
            elif not any(has):
                ways.append(
                    ("a BOS", f"those of prompts with a {begin} (BOS) before them, which they do not have", more)
                )
        plain = self._untemplated()
        if plain is not None:
            ways.append(("no template", "those of the prompts' texts without the chat template", plain))
        for name, words, prompts in ways:
            yield name, words, Read(step, prompts, [0] * len(prompts))

    def _untemplated(self) -> list[Array] | None:
        """Return the prompts as plain texts, as the tokenizer alone writes them; None if that is what they are."""
        if not self.tokenizer.chat_template:
            return None
        texts = [sample.asked for sample in self.samples]
        plain = [np.asarray(self.tokenizer(text)["input_ids"], dtype=np.int64) for text in texts]
        return plain if all(map(len, plain)) else None

    def _older(self, step: int) -> Iterator[tuple[str, str, Read]]:
        """Yield the weights of other rollouts, the nearest first."""
        each = rules.steps_each(self.cfg)
        for other in sorted({number * each for number in range(self.number + 1)} - {step}, key=lambda s: abs(s - step)):
            if other and (self.files is None or not self.files.names("weights", other)):
                continue
            age = (step - other) // each
            which = f"after optimizer step {other}" if other else "that training started from"
            by = f"{abs(age)} rollout{'s' * (abs(age) > 1)} {'older' if age > 0 else 'newer'} than they must be"
            words = f"those of the weights {which}, which are {by}"
            yield f"weights after step {other}", words, self.as_configured(other)

    def _rounded(self, step: int) -> Said:
        """Say what weights in bf16 make of the tokens, in float32."""
        self.weigh(step)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.bfloat16().to(parameter.dtype)
        rounded = self.read(self.as_configured(step), self.at(self.cfg.rollout.temperature))
        self.weigh(step, again=True)
        return Said("weights in bf16", "those of weights that are rounded to bf16", rounded)

    # ---- tokens ----

    def strayed(self, rounding: float) -> tuple[list[Array], int]:
        """Say by how much each random number lies outside the part that chooses its token, and how many tokens are in
        doubt. The log-probabilities may be off by `rounding`."""
        self.weigh(self.drew)
        head, apart, doubtful = _Double(self.model.get_output_embeddings()), [], 0
        for sample, hidden_nE in zip(self.samples, self.hidden, strict=True):
            place = sample.place % self.cfg.rollout.n_samples
            numbers = [number_of(self.cfg.seed, self.number, sample.index, place, at)
                       for at in range(len(sample.answer))]  # fmt: skip
            tokens_n = torch.from_numpy(sample.answer.astype(np.int64)).to(self.device)
            numbers_n = torch.tensor(numbers, dtype=torch.float64, device=self.device)
            found = strayed(head, hidden_nE, tokens_n, numbers_n, self.cfg.rollout, rounding)
            apart.append(found.apart_n)
            doubtful += found.doubtful
        return apart, doubtful


class _Double:
    """A head whose logits are float64 numbers."""

    def __init__(self, head: Any) -> None:
        self.head, self.weight = head, head.weight

    def __call__(self, hidden_nE: Tensor) -> Tensor:
        logits_nV: Tensor = self.head(hidden_nE).double()
        return logits_nV


def _logp(logits_nV: Tensor, tokens_n: Tensor) -> Tensor:
    return logits_nV.log_softmax(-1).gather(-1, tokens_n.unsqueeze(-1)).squeeze(-1)


def _cuts(cfg: RolloutConfig) -> tuple[tuple[str, float, float], ...]:
    return ("top_k", cfg.top_k, 0), ("top_p", cfg.top_p, 1), ("min_p", cfg.min_p, 0)


def other_prompts(
    samples: Sequence[DrawnSample], prompts: Mapping[int, DrawnSample]
) -> Mapping[int, tuple[Array, Array]]:
    """Return, by place, the prompts that are not those that native code has taken, each with what it should be."""
    pairs = {sample.place: (sample.prompt, prompts[sample.index].prompt) for sample in samples
             if sample.index in prompts}  # fmt: skip
    return {place: pair for place, pair in pairs.items() if not np.array_equal(*pair)}
