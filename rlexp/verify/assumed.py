"""Log-probabilities of generated tokens by a plain model: as the run is configured, and under each wrong assumption.

The model is transformers' own, in float32, one sequence at a time. A generator that applied no temperature, that had
old weights, other positions or another prompt would have given its tokens the log-probabilities that are computed here.

Shape letters: T tokens of a sequence, n of its answer, V vocabulary, E width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlexp.config.schema import Config, Device
from rlexp.training.model.float64 import precise
from rlexp.verify import rollout_rules as rules
from rlexp.verify.drawing import cut, number_of, strayed
from rlexp.verify.model import LOGITS, hidden_states, load, load_tokenizer
from rlexp.verify.recording import Array, DrawnSample, TensorFiles

BORDER = 1e-6  # rounding of float32 at a border of top-k, top-p or min-p


@dataclass(frozen=True)
class Assumption:
    """How log-probabilities may have come about: by which weights, prompts, positions and distribution."""

    name: str
    words: str  # that finish "its log-probabilities are …"
    step: int  # the weights after this optimizer step
    prompts: Sequence[Sequence[int]]
    moved: Sequence[int]  # by how much the positions of each answer's tokens are moved
    temperature: float
    all_moved: bool = False  # the prompt's positions, too
    dtype: torch.dtype = torch.float32
    rounded: bool = False  # the weights, to bf16
    kept: bool = False  # over the tokens that top_k, top_p and min_p leave
    neighbour: int = 0  # of the token before each (-1), or after it (1)


Way = tuple[str, str, dict[str, Any]]  # an assumption's name and words, and what differs from what is configured


class Assumed:
    """The plain model of a run, and the samples of one rollout. Log-probabilities are those of all tokens in a row."""

    def __init__(self, cfg: Config, samples: Sequence[DrawnSample], number: int, ran: Path) -> None:
        self.cfg, self.samples, self.number = cfg, samples, number
        self.device = torch.device("cuda" if cfg.launch.device is Device.cuda else "cpu")
        self.tokenizer = load_tokenizer(cfg)
        self.model = load(cfg, self.device)
        self.files = TensorFiles(ran)
        self.start = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self.drew = rules.drawn_after(cfg, number)  # the steps whose weights drew the rollout, and score it
        self.scored = number * rules.steps_each(cfg)
        self.prompts = [each.prompt.tolist() for each in samples]
        self.tokens = [torch.from_numpy(each.answer.astype(np.int64)).to(self.device) for each in samples]
        self.weights: tuple[Any, ...] = ()  # that the model has
        self.read: tuple[Any, ...] = ()  # how the samples were read last
        self.states: list[Tensor] = []  # the hidden states of that

    # ---- reading ----

    def _weigh(self, of: Assumption) -> None:
        weights = (of.step, of.dtype, of.rounded)
        if self.weights == weights:
            return
        names = self.files.names("weights", of.step) if of.step else []
        for name, parameter in self.model.named_parameters():
            weight = self.start[name]
            if name in names:
                weight = torch.from_numpy(self.files.read("weights", of.step, name).astype(np.float64))
            weight = weight.to(self.device, of.dtype)
            parameter.data = weight.bfloat16().to(of.dtype) if of.rounded else weight
        self.weights = weights

    @torch.no_grad()
    def hidden(self, of: Assumption) -> list[Tensor]:
        """Return the hidden states before each token of the answers, (n, E)."""
        self._weigh(of)
        read = (self.weights, of.prompts, of.moved, of.all_moved)
        if self.read != read:
            self.read, self.states = read, []
            for prompt, tokens_n, moved in zip(of.prompts, self.tokens, of.moved, strict=True):
                tokens_T = torch.cat((torch.tensor(prompt, device=self.device), tokens_n))
                positions_T = torch.arange(len(tokens_T), device=self.device)
                positions_T[0 if of.all_moved else len(prompt) :] += moved
                with precise(of.dtype):
                    hidden_TE = hidden_states(self.model.base_model, tokens_T, positions_T)
                self.states.append(hidden_TE[len(prompt) - 1 : -1])
        return self.states

    @torch.no_grad()
    def logps(self, of: Assumption) -> Array:
        """Return the log-probability of each token; NaN where there is no token beside it."""
        hidden, head = self.hidden(of), self.model.get_output_embeddings()
        rows = max(1, LOGITS // head.weight.shape[0])
        logps = []
        for hidden_nE, tokens_n in zip(hidden, self.tokens, strict=True):
            pieces = zip(hidden_nE.split(rows), tokens_n.split(rows), strict=True)
            logps_n = torch.cat([self._logps(head(part).double(), tokens, of) for part, tokens in pieces])
            if of.neighbour:
                logps_n = logps_n.roll(-of.neighbour)
                logps_n[0 if of.neighbour < 0 else -1] = torch.nan
            logps.append(logps_n)
        return torch.cat(logps).cpu().numpy()

    def _logps(self, logits_nV: Tensor, tokens_n: Tensor, of: Assumption) -> Tensor:
        logps_nV = (logits_nV / of.temperature).log_softmax(-1)
        logps_n = logps_nV.gather(-1, tokens_n.unsqueeze(-1)).squeeze(-1)
        if of.kept:
            kept_nV, _ = cut(logps_nV, self.cfg.rollout, BORDER)
            logps_n = logps_n - logps_nV.masked_fill(~kept_nV, -torch.inf).logsumexp(-1)
        return logps_n

    # ---- assumptions ----

    def configured(self, step: int, dtype: torch.dtype = torch.float32) -> Assumption:
        temperature = self.cfg.rollout.temperature
        words = f"those of the whole distribution at rollout.temperature={temperature:g}"
        return Assumption("configured", words, step, self.prompts, [0] * len(self.prompts), temperature, dtype=dtype)

    def all(self, step: int) -> Iterator[Assumption]:
        """Yield every assumption about log-probabilities by the weights after a step; `configured` comes first."""
        right = self.configured(step)
        yield right
        for name, words, changes in (
            *self._distributions(),
            ("token before", "those of the token before each", {"neighbour": -1}),
            ("token after", "those of the token after each", {"neighbour": 1}),
            *self._positions(),
            *self._prompts(),
            *self._older(step),
            ("weights in bf16", "those of weights that are rounded to bf16", {"rounded": True}),
        ):
            yield replace(right, name=name, words=words, **changes)

    def _distributions(self) -> Iterator[Way]:
        rollout = self.cfg.rollout
        twice, set_to = rollout.temperature**2, f"rollout.temperature={rollout.temperature:g}"
        if rollout.temperature != 1:
            yield "temperature 1", f"those of temperature 1, and {set_to}", {"temperature": 1.0}
            words = f"those of temperature {twice:g}, so {set_to} is applied twice"
            yield "temperature twice", words, {"temperature": twice}
        cuts = (("top_k", rollout.top_k, 0), ("top_p", rollout.top_p, 1), ("min_p", rollout.min_p, 0))
        cuts_set = [f"rollout.{name}={value:g}" for name, value, unset in cuts if value != unset]
        if cuts_set:
            words = f"those of the tokens that {' and '.join(cuts_set)} leave, which add up to 1 again"
            yield "renormalised", words, {"kept": True}

    def _positions(self) -> Iterator[Way]:
        lengths = np.array([len(prompt) for prompt in self.prompts])
        whole = lengths + [len(tokens_n) for tokens_n in self.tokens]
        pads, ones = lengths.max() - lengths, np.ones_like(lengths)
        room = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 60
        for name, words, moved, all_moved in (
            ("positions + 1", "those of positions that are 1 too large from the answer on", ones, False),
            ("positions − 1", "those of positions that are 1 too small from the answer on", -ones, False),
            ("all positions + 1", "those of positions that begin with 1", ones, True),
            ("padding in the answer", "those of answers whose positions count the padding before the prompt", pads,
             False),
            ("padding counted", "those of sequences whose positions count the padding before them", pads, True),
        ):  # fmt: skip
            if moved.any() and (whole + moved).max() <= room:
                yield name, words, {"moved": moved.tolist(), "all_moved": all_moved}

    def _prompts(self) -> Iterator[Way]:
        begin, prompts = self.tokenizer.bos_token_id, self.prompts
        has = [prompt[0] == begin for prompt in prompts]
        more = {"prompts": [[begin, *prompt] for prompt in prompts]}
        if all(has) and min(map(len, prompts)) > 1:
            less = {"prompts": [prompt[1:] for prompt in prompts]}
            yield "no BOS", f"those of prompts without their first token, {begin} (BOS)", less
            yield "BOS twice", f"those of prompts that begin with {begin} (BOS) twice", more
        elif begin is not None and not any(has):
            yield "a BOS", f"those of prompts with a {begin} (BOS) before them, which they do not have", more
        if self.tokenizer.chat_template:
            plain = [list(self.tokenizer(sample.asked)["input_ids"]) for sample in self.samples]
            if all(plain):
                yield "no template", "those of the prompts' texts without the chat template", {"prompts": plain}

    def _older(self, step: int) -> Iterator[Way]:
        """Yield the weights of other rollouts, the nearest first."""
        each = rules.steps_each(self.cfg)
        for other in sorted({number * each for number in range(self.number + 1)} - {step}, key=lambda s: abs(s - step)):
            if other and not self.files.names("weights", other):
                continue
            age = (step - other) // each
            which = f"after optimizer step {other}" if other else "that training started from"
            by = f"{abs(age)} rollout{'s' * (abs(age) > 1)} {'older' if age > 0 else 'newer'} than they must be"
            yield f"weights after step {other}", f"those of the weights {which}, which are {by}", {"step": other}

    # ---- tokens ----

    def strayed(self, rounding: float) -> tuple[int, int]:
        """Count the tokens that their random numbers do not choose, and those in doubt, if the log-probabilities may be
        off by `rounding`."""
        hidden, cfg, head = self.hidden(self.configured(self.drew)), self.cfg, self.model.get_output_embeddings()
        count, doubtful = 0, 0
        for sample, hidden_nE, tokens_n in zip(self.samples, hidden, self.tokens, strict=True):
            place = sample.place % cfg.rollout.n_samples
            numbers = [number_of(cfg.seed, self.number, sample.index, place, at) for at in range(len(tokens_n))]
            numbers_n = torch.tensor(numbers, dtype=torch.float64, device=self.device)
            one = strayed(head, hidden_nE, tokens_n, numbers_n, cfg.rollout, rounding)
            count += int((one.apart_n > math.expm1(2 * rounding)).sum())
            doubtful += one.doubtful
        return count, doubtful
