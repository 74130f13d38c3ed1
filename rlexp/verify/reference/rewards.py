"""Answers as texts, their ends, and their rewards, written again from docs/rewards.md and docs/reinforcement.md.

Rules are in `reward_rules.py`. The user's functions are asked again, in processes of their own.
Reward models are transformers' own in float64, one sequence at a time. No code comes from training/rollout/.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from rlexp.base.errors import DataError, RewardError
from rlexp.config.schema import Config, HFModelConfig
from rlexp.config.schema.models import Precision
from rlexp.config.schema.reward_terms import reward_terms
from rlexp.config.schema.rollouts import (
    ModelRewardConfig,
    Overlong,
    PythonRewardConfig,
    RewardConfig,
    RolloutConfig,
    RuleRewardConfig,
)
from rlexp.verify.records import Array, TokenAnswer, TokenPrompt
from rlexp.verify.reference.model import answer_score, load
from rlexp.verify.reference.pairs import Bytes, Writer, cut
from rlexp.verify.reference.reward_rules import rule_score
from rlexp.verify.reference.rows import Asked, Unusable

IMPORT_SECONDS = 300.0  # limit for the import of a function's module
SLACK_SECONDS = 30.0  # what a process may take besides; its own clock has ended it by then
ALONE = 32  # most answers about which a function is asked one by one
BYTE_OF = {number: byte for byte, number in Bytes()._ids.items()}
VISIBLE = 188  # bytes that stand for themselves in a vocabulary of bytes; the others have stand-ins from 256 on


@dataclass(frozen=True)
class Judged:
    """The terms of the answers' rewards, by name, as the reference finds them."""

    weights: dict[str, float]
    terms: dict[str, Array] = field(default_factory=dict)  # one score for each answer
    given: dict[str, str] = field(default_factory=dict)  # why a term is taken as the run says it
    notes: dict[str, str] = field(default_factory=dict)  # what else to say of a term that differs


@dataclass(frozen=True)
class Answers:
    """The answers of a rollout: each with its prompt, the prompt's place in the data set, its text and its tokens."""

    prompts: Sequence[TokenPrompt]
    indices: Sequence[int]
    texts: Sequence[str]
    tokens: Sequence[Array]

    def arguments(self, places: Sequence[int]) -> tuple[list[str], list[str], list[dict[str, Any]]]:
        """Return what a user's function is given of some answers."""
        asked = [self.prompts[place] for place in places]
        rows = [{"answer": prompt.right, "origin": prompt.origin, "index": int(self.indices[place])}
                for place, prompt in zip(places, asked, strict=True)]  # fmt: skip
        return [prompt.text for prompt in asked], [self.texts[place] for place in places], rows


def asked_again(
    cfg: RewardConfig,
    prompts: Sequence[TokenPrompt],
    indices: Sequence[int],
    texts: Sequence[str],
    answers: Sequence[Array],
    drawn: Mapping[str, Array],
    tokenizer: Any,
    device: torch.device,
    exact: bool,
    max_length: int,
) -> Judged:
    """Judge answers by each term. `drawn` has the run's own scores of them, by term, and `tokenizer` is the policy's.

    `exact`: reward models whose precision is fp64 are computed again; otherwise their scores are taken as given.
    """
    all_terms = reward_terms(cfg)
    judged = Judged({term.name: term.weight for term in all_terms})
    every = Answers(prompts, indices, texts, answers)
    for term in all_terms:
        match term.cfg:
            case RuleRewardConfig() as rule:
                scores = [rule_score(rule, term.key, text, asked) for text, asked in zip(texts, prompts, strict=True)]
                judged.terms[term.name] = np.array(scores, dtype=float)
            case PythonRewardConfig() as function:
                _ask_function(judged, term.name, function, every, drawn[term.name])
            case ModelRewardConfig() as model if exact and model.precision is Precision.fp64:
                judged.terms[term.name] = model_scores(model, term.key, every, tokenizer, device, max_length)
            case ModelRewardConfig() as model:
                judged.given[term.name] = "the run computes in less than float64"
            case _:
                raise AssertionError(term.cfg)
    return judged


def scored(
    terms: Mapping[str, Array], weights: Mapping[str, float], stopped: Sequence[bool] | Array, cfg: RolloutConfig
) -> Array:
    """Add the terms up, weighted, in the configuration's order; less the penalty for answers that have no end."""
    open_ended = ~np.asarray(stopped, dtype=bool)
    scores = np.zeros(len(open_ended))
    for name, weight in weights.items():
        scores = scores + weight * np.asarray(terms[name], dtype=float)
    return scores - cfg.overlong_penalty * open_ended if cfg.overlong is Overlong.penalty else scores


# ---- texts and ends ----


def text_of(tokenizer: Any, answer: Sequence[int] | Array, stop: Sequence[str]) -> str:
    """Return an answer's text without special tokens, up to the first of the texts that end it."""
    text = _decoded(tokenizer, answer)
    return text if not stop else re.split("|".join(map(re.escape, stop)), text, maxsplit=1)[0]


def ended(tokenizer: Any, answer: Sequence[int] | Array, ends: Sequence[int], stop: Sequence[str]) -> bool:
    """Say whether an answer has ended by itself: by its last token, or by a text that its last tokens hold.

    A token is at least one byte of a text, so more tokens than a text has bytes hold all of it.
    """
    if len(answer) and int(answer[-1]) in ends:
        return True
    if not stop:
        return False
    last = max(len(each.encode()) for each in stop) + 1
    text = _decoded(tokenizer, answer[max(0, len(answer) - last) :])
    return any(each in text for each in stop)


def ends_of(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer, by the model's description of how it generates and by the tokenizer."""
    found = {tokenizer.eos_token_id}
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        named = generation.eos_token_id
        found |= set(named) if isinstance(named, list) else {named}
    return sorted(int(end) for end in found - {None})


def _decoded(tokenizer: Any, answer: Sequence[int] | Array) -> str:
    numbers = [int(token) for token in answer]
    if isinstance(tokenizer, Bytes):
        return bytes(BYTE_OF[number] for number in numbers if number in BYTE_OF).decode(errors="replace")
    return str(tokenizer.decode(numbers, skip_special_tokens=True))


# ---- the user's functions ----

# The kernel ends the process when its parent is gone, and a thread of C when a time is over: both also in the middle of
# code that lets no other thread of Python run.
CHILD = """
import ctypes, faulthandler, importlib, json, os, sys
from pathlib import Path

folder, parent = Path(sys.argv[1]), int(sys.argv[2])
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != parent:
    os._exit(1)
asked = json.loads((folder / "asked").read_text())
late = (folder / "late").open("w")
faulthandler.dump_traceback_later(asked["import_seconds"], exit=True, file=late)
sys.argv = [asked["function"]]
try:
    module, _, names = asked["function"].partition(":")
    function = importlib.import_module(module)
    for name in names.split("."):
        function = getattr(function, name)
    (folder / "imported").touch()
    said = []
    for arguments in asked["calls"]:
        faulthandler.dump_traceback_later(asked["call_seconds"], exit=True, file=late)
        said.append([float(value) for value in function(*arguments)])
    faulthandler.cancel_dump_traceback_later()
except BaseException as error:
    said = f"raises {type(error).__name__}: {error}"
(folder / "partly").write_text(json.dumps(said))
(folder / "partly").rename(folder / "said")
os._exit(0)
"""


class Silent(Exception):
    """A function that gave no scores. The message goes on after its name."""


def _ask_function(judged: Judged, name: str, cfg: PythonRewardConfig, answers: Answers, drawn: Array) -> None:
    """Ask a function about all answers, twice in each of two processes: it may draw random numbers, or remember what it
    was asked. Where it is steady and the run says otherwise, ask about each answer alone."""
    everyone = range(len(answers.texts))
    try:
        one, *others = [said for _ in range(2) for said in _said(cfg, answers, [everyone, everyone])]
    except Silent as error:
        judged.given[name] = f"{cfg.function} {error}"
        return
    changed = int((np.stack(others) != one).any(0).sum())
    if changed:
        judged.given[name] = (
            f"{cfg.function} answers otherwise when it is asked again ({changed} of {len(one)} answers)"
        )
        return
    judged.terms[name] = one
    differ = np.flatnonzero(one != np.asarray(drawn, dtype=float)).tolist()
    if differ:
        places = [*differ, *(place for place in everyone if place not in set(differ))][:ALONE]
        note = _said_alone(cfg, answers, places, one)
        if note:
            judged.notes[name] = f"asked about each answer alone, {cfg.function} {note}"


def _said_alone(cfg: PythonRewardConfig, answers: Answers, places: Sequence[int], together: Array) -> str:
    """Say in words how a function's scores change if it is asked about each answer alone; "" if they do not."""
    try:
        alone = np.concatenate(_said(cfg, answers, [[place] for place in places]))
    except Silent as error:
        return str(error)
    same = np.array_equal(alone, together[list(places)])
    return "" if same else "says otherwise: what it says depends on what it is asked together with"


def _said(cfg: PythonRewardConfig, answers: Answers, calls: Sequence[Sequence[int]]) -> list[Array]:
    """Call a function in a new process, for some answers in each call; return the scores of each call."""
    asked = {
        "function": cfg.function,
        "import_seconds": IMPORT_SECONDS,
        "call_seconds": cfg.timeout_seconds,
        "calls": [answers.arguments(places) for places in calls],
    }
    said = _of_process(asked, IMPORT_SECONDS + len(calls) * cfg.timeout_seconds + SLACK_SECONDS)
    for places, scores in zip(calls, said, strict=True):
        if len(scores) != len(places):
            raise Silent(f"returns {len(scores)} scores for {len(places)} answers")
        odd = [place for place, score in zip(places, scores, strict=True) if not math.isfinite(score)]
        if odd:
            raise Silent(f"returns no finite number for {answers.prompts[odd[0]].origin}")
    return [np.array(scores, dtype=float) for scores in said]


def _of_process(asked: Mapping[str, Any], limit: float) -> list[list[float]]:
    """Run the process, and wait for what it says. It finds modules as a run does: first in the current folder."""
    path = [os.getcwd(), *(entry for entry in sys.path if entry)]
    with tempfile.TemporaryDirectory(prefix="rlexp-verify-") as made:
        folder = Path(made)
        (folder / "asked").write_text(json.dumps(asked), encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, "-c", CHILD, made, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
                timeout=limit,
                check=False,
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = None
        if not (folder / "said").exists():
            late, imported = folder / "late", (folder / "imported").exists()
            if code is not None and not (late.exists() and late.stat().st_size):
                raise Silent(f"ends its process ({code})")
            if not imported:
                raise Silent(f"has not been imported within {asked['import_seconds']:g} s")
            raise Silent(f"has not returned within {asked['call_seconds']:g} s")
        said: list[list[float]] | str = json.loads((folder / "said").read_text(encoding="utf-8"))
    if isinstance(said, str):
        raise Silent(textwrap.shorten(said, 300, placeholder=" …"))
    return said


# ---- reward models ----


@torch.no_grad()
def model_scores(
    cfg: ModelRewardConfig, key: str, answers: Answers, tokenizer: Any, device: torch.device, max_length: int
) -> Array:
    """Score each answer by a reward model in float64, one sequence at a time, at its last token."""
    most = cfg.max_length or max_length
    path = str(Path(cfg.path).expanduser()) if cfg.path.startswith("~") else cfg.path
    whole = Config(model=HFModelConfig(path=path, trust_remote_code=cfg.trust_remote_code))
    whole = replace(whole, data=replace(whole.data, max_length=most))
    own = AutoTokenizer.from_pretrained(path, trust_remote_code=cfg.trust_remote_code)
    own.model_max_length = 1 << 60  # silence its warning: the configuration's limit decides
    model = load(whole, device, scores=True)
    writer = None if own.get_vocab() == _vocabulary(tokenizer) else Writer(own)
    scores = []
    for prompt, text, tokens in zip(answers.prompts, answers.texts, answers.tokens, strict=True):
        example = TokenAnswer(prompt.prompt, tokens, prompt.origin)
        if writer is not None:
            example = _written_again(writer, key, prompt, text, most)
        scores.append(float(answer_score(model, example, "answer", device)))
    return np.array(scores, dtype=float)


def _written_again(writer: Writer, key: str, prompt: TokenPrompt, text: str, most: int) -> TokenAnswer:
    """Write prompt and answer in the reward model's own tokens; what is too long loses the start of its prompt."""
    try:
        example = writer.example(Asked(prompt.text, (text,), prompt.origin), TokenAnswer.sides)
    except Unusable as error:
        raise DataError(str(error)) from None
    assert isinstance(example, TokenAnswer)
    if len(example.answer) >= most:
        raise RewardError(
            f"{prompt.origin}: an answer of {len(example.answer)} tokens of the reward model leaves no room for its "
            f"prompt with {key}.max_length={most}. Raise it."
        )
    short = cut(example, most, writer.tokenizer.bos_token_id)
    assert isinstance(short, TokenAnswer)
    return short


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    if not isinstance(tokenizer, Bytes):
        return dict(tokenizer.get_vocab())
    return dict(_byte_names())


def _byte_names() -> Iterator[tuple[str, int]]:
    """Yield the tokens of the vocabulary of bytes as they are written: visible bytes as themselves."""
    yield from ((name, number) for number, name in enumerate(Bytes.SPECIAL))
    for number, byte in BYTE_OF.items():
        place = number - len(Bytes.SPECIAL)
        yield (chr(byte) if place < VISIBLE else chr(256 + place - VISIBLE)), number
