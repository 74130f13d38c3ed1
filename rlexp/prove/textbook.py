"""The rules of a run, written out a second time from the documentation, on plain numbers.

`verify` compares the product with them. No code comes from the data, ring, algos, train, engine or metrics rooms.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlexp.config.schema import (
    Config,
    DataConfig,
    Decay,
    DPOConfig,
    JsonlDataConfig,
    OptimConfig,
    SyntheticDataConfig,
    TooLong,
)
from rlexp.data import synthetic  # only it has the text of generated rows
from rlexp.errors import DataError
from rlexp.prove.records import SIDES, Array, TokenPair

TIE = 2.0**-23  # relative to the log-probabilities: a smaller margin is a tie, and counts half
Text = tuple[Any, ...]  # prompt, chosen, rejected, origin


# ---- from files to token ids ----


def rows_of(cfg: DataConfig, *, held_out: bool) -> list[Text]:
    match cfg:
        case SyntheticDataConfig():
            size, split = (cfg.eval_size, "eval") if held_out else (cfg.size, "train")
            return [(r.prompt, *map(str, r.answers), r.origin) for r in synthetic.generate(size, cfg.seed, split)]
        case JsonlDataConfig():
            path = cfg.eval_path if held_out else cfg.path
            return _lines(Path(path).expanduser()) if path else []
        case _:
            raise AssertionError(cfg)


def _lines(path: Path) -> list[Text]:
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if line.strip():
            row = json.loads(line.decode("utf-8-sig"))
            rows.append((row["prompt"], row["chosen"], row["rejected"], f"{path}:{number}"))
    return rows


class Bytes:
    """The tokenizer of `model=tiny`: three special tokens, then the bytes in the order of their visible stand-ins."""

    chat_template = None
    bos_token_id, eos_token_id = 0, 1
    SPECIAL = ("<bos>", "<eos>", "<pad>")

    def __init__(self) -> None:
        visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
        order = visible + [byte for byte in range(256) if byte not in visible]
        self._ids = {byte: 3 + place for place, byte in enumerate(order)}

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:  # noqa: ARG002
        ids: list[int] = []
        for part in re.split("(<bos>|<eos>|<pad>)", text):
            ids += [self.SPECIAL.index(part)] if part in self.SPECIAL else [self._ids[b] for b in part.encode()]
        return {"input_ids": ids}


def pairs_of(cfg: DataConfig, tokenizer: Any, *, held_out: bool = False) -> list[TokenPair]:
    """The data set in its order, without dropped pairs and pairs of two equal answers."""
    pairs = []
    for row in rows_of(cfg, held_out=held_out):
        pair = _assembled(row, tokenizer)
        longest = len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))
        if longest > cfg.max_length:
            if cfg.too_long is TooLong.error:
                raise DataError(f"{pair.origin}: {longest} tokens are more than data.max_length={cfg.max_length}.")
            if cfg.too_long is TooLong.drop:
                continue
            pair = _cut(pair, cfg.max_length, tokenizer.bos_token_id)
        if pair.chosen.tolist() != pair.rejected.tolist():
            pairs.append(pair)
    return pairs


def _assembled(row: Text, tokenizer: Any) -> TokenPair:
    prompt, chosen, rejected, origin = row

    def ids(text: str, *, first: bool = False) -> list[int]:
        return list(tokenizer(text, add_special_tokens=first)["input_ids"])

    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        render: Callable[..., str] = tokenizer.apply_chat_template
        asked = render(messages, tokenize=False, add_generation_prompt=True)
        answered = [
            render([*messages, {"role": "assistant", "content": t}], tokenize=False) for t in (chosen, rejected)
        ]
        question, answers = ids(asked), [ids(whole[len(asked) :]) for whole in answered]
    else:
        if not isinstance(prompt, str):
            turns = [f"{message['role'].capitalize()}: {message['content']}\n\n" for message in prompt]
            prompt = "".join(turns) + "Assistant: "
        question, answers = ids(prompt, first=True), [ids(chosen), ids(rejected)]
    end = tokenizer.eos_token_id
    if end is not None:
        answers = [answer if end in answer[-2:] else [*answer, end] for answer in answers]
    asked_ids, chosen_ids, rejected_ids = (np.asarray(part, dtype=np.int64) for part in (question, *answers))
    return TokenPair(asked_ids, chosen_ids, rejected_ids, origin)


def _cut(pair: TokenPair, most: int, begin: int | None) -> TokenPair:
    """Cut a pair that is too long: keep the beginning of its answers, and the end of its prompt after its BOS token."""
    room = max(1, most - max(len(pair.chosen), len(pair.rejected)))
    prompt = pair.prompt.tolist()
    if begin is not None and prompt[0] == begin:
        tail = prompt[1:]
        prompt = [begin, *tail[len(tail) - (room - 1) :]]
    else:
        prompt = prompt[len(prompt) - room :]
    rest = most - len(prompt)
    kept = np.asarray(prompt, dtype=np.int64)
    return replace(pair, prompt=kept, chosen=pair.chosen[:rest], rejected=pair.rejected[:rest])


# ---- which samples, and how fast ----


def steps_per_epoch(cfg: Config, pairs: int) -> int:
    whole, rest = divmod(pairs, cfg.train.batch_size)
    return whole + (1 if rest and not cfg.data.drop_last else 0)


def total_steps(cfg: Config, pairs: int) -> int:
    """The steps that both `train.max_steps` and `train.epochs` allow; one epoch if neither is given."""
    by_epochs = steps_per_epoch(cfg, pairs) * (cfg.train.epochs or 1)
    if cfg.train.max_steps is None:
        return by_epochs
    return cfg.train.max_steps if cfg.train.epochs is None else min(cfg.train.max_steps, by_epochs)


def samples_of(cfg: Config, pairs: int, step: int) -> tuple[int, ...]:
    """The samples of an optimizer step; steps count from 1."""
    an_epoch = steps_per_epoch(cfg, pairs)
    epoch, place = (step - 1) // an_epoch, (step - 1) % an_epoch
    order = list(range(pairs))
    if cfg.data.shuffle:
        order = np.random.default_rng([cfg.seed, epoch]).permutation(pairs).tolist()
    return tuple(order[place * cfg.train.batch_size :][: cfg.train.batch_size])


def learning_rate(optim: OptimConfig, steps: int, step: int) -> float:
    """Rise in equal steps, of which the first is above 0; then fall to 0 at the step after the last."""
    warm = optim.warmup_steps
    if step <= warm:
        return optim.lr * step / (warm + 1)
    left = 1.0 - (step - warm - 1) / max(1, steps - warm)
    left = max(0.0, left)
    shapes = {Decay.constant: 1.0, Decay.linear: left, Decay.cosine: (1 + math.cos(math.pi * (1 - left))) / 2}
    return optim.lr * shapes[optim.decay]


# ---- losses and logged values; `sums` are sums of the answers' log-probabilities ----


def log_sigmoid(x: Array) -> Array:
    values: Array = -np.logaddexp(0.0, -x)
    return values


def preference_losses(cfg: DPOConfig, sums: Mapping[str, Array]) -> Array:
    """Equation 7 of arXiv 2305.18290, for labels that are wrong with probability `label_smoothing`."""
    ratios = {side: sums[f"policy/{side}"] - sums[f"reference/{side}"] for side in SIDES}
    z = cfg.beta * (ratios["chosen"] - ratios["rejected"])
    wrong = cfg.label_smoothing
    return -(1 - wrong) * log_sigmoid(z) - wrong * log_sigmoid(-z)


def preference_slopes(cfg: DPOConfig, sums: Mapping[str, Array]) -> dict[str, Array]:
    """Derivatives of the losses by the policy's sums. While policy and reference agree every loss is ln 2, even of a
    wrong formula; only the derivative shows the mistake."""
    ratios = {side: sums[f"policy/{side}"] - sums[f"reference/{side}"] for side in SIDES}
    z = cfg.beta * (ratios["chosen"] - ratios["rejected"])
    slope = cfg.beta * (
        cfg.label_smoothing * np.exp(log_sigmoid(z)) - (1 - cfg.label_smoothing) * np.exp(log_sigmoid(-z))
    )
    return {"chosen": slope, "rejected": -slope}


def rewards(cfg: DPOConfig, sums: Mapping[str, Array]) -> dict[str, Array]:
    """Rewards of each pair. A margin within rounding of zero counts half."""
    chosen, rejected = (cfg.beta * (sums[f"policy/{side}"] - sums[f"reference/{side}"]) for side in SIDES)
    band = TIE * cfg.beta * sum(np.abs(part) for part in sums.values())
    margin = chosen - rejected
    won = np.where(np.abs(margin) <= band, 0.5, np.where(margin > 0, 1.0, 0.0))
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": margin,
        "rewards/accuracies": won,
    }


def logged(
    losses: Array, sums: Mapping[str, Array], values: Mapping[str, Array], logits: Mapping[str, Array], tokens: int
) -> dict[str, float]:
    """The logged values of a batch: means over its pairs, for logits over its answers' tokens."""
    row = {name: float(np.mean(each)) for name, each in values.items()}
    row["loss"] = float(np.mean(losses))
    for side in SIDES:
        row[f"logps/{side}"] = float(np.mean(sums[f"policy/{side}"]))
        row[f"logits/{side}"] = float(np.mean(logits[side]))
    row["tokens"] = tokens
    return row
