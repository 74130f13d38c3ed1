"""Read the examples of a run, tokenize them on all ranks together, and cut them into batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlexp.config.schema import (
    ArithmeticDataConfig,
    Config,
    DataConfig,
    JsonlDataConfig,
    SyntheticDataConfig,
)
from rlexp.data import arithmetic, rows, synthetic
from rlexp.data.sampler import Sampler
from rlexp.data.tokens import PairTokenizer, PromptTokenizer, numbered, numbered_prompts
from rlexp.errors import DataError, UserError
from rlexp.ring.groups import World
from rlexp.ring.objects import gather_objects
from rlexp.types import Pair, Prompt, PromptRow, Row


@dataclass(frozen=True)
class Examples:
    """Tokenized pairs or prompts: those to train on, and those held out."""

    train: Sequence[Any]
    held_out: Sequence[Any]
    dropped: Counter[str]
    held_out_dropped: Counter[str]


def read_pairs(cfg: Config, tokenizer: Any, world: World) -> Examples:
    encoder = PairTokenizer(tokenizer, cfg.data.max_length, cfg.data.too_long)
    train_rows, eval_rows = read_rows(cfg.data)
    parts, dropped = encode_shared(encoder, train_rows, world)
    eval_parts, eval_dropped = encode_shared(encoder, eval_rows, world)
    pairs, eval_pairs = (numbered([p for part in each for p in part.pairs]) for each in (parts, eval_parts))
    _refuse_empty(pairs, dropped, "data", "pair")
    if eval_rows:
        _refuse_empty(eval_pairs, eval_dropped, "the held-out data", "pair")
    return Examples(pairs, eval_pairs, dropped, eval_dropped)


def read_prompts(cfg: Config, tokenizer: Any, world: World) -> Examples:
    encoder = PromptTokenizer(tokenizer, cfg.data.max_length - cfg.rollout.max_new_tokens, cfg.data.too_long)
    train_rows, eval_rows = prompt_rows(cfg.data)
    parts, dropped = encode_shared(encoder, train_rows, world)
    eval_parts, eval_dropped = encode_shared(encoder, eval_rows, world)
    prompts, eval_prompts = (
        numbered_prompts([p for part in each for p in part.prompts]) for each in (parts, eval_parts)
    )
    _refuse_empty(prompts, dropped, "data", "prompt")
    if eval_rows:
        _refuse_empty(eval_prompts, eval_dropped, "the held-out data", "prompt")
    return Examples(prompts, eval_prompts, dropped, eval_dropped)


def pair_sampler(cfg: Config, size: int) -> Sampler:
    """Cut the pairs into train batches."""
    return Sampler(size, cfg.train.batch_size, cfg.seed, cfg.data.shuffle, cfg.data.drop_last)


def prompt_sampler(cfg: Config, size: int) -> Sampler:
    """Cut the prompts into rollouts."""
    return Sampler(size, cfg.rollout.batch_size, cfg.seed, cfg.data.shuffle, key="rollout.batch_size", kind="prompt")


def _refuse_empty(examples: Sequence[Any], dropped: Counter[str], what: str, kind: str) -> None:
    if not examples:
        reasons = "; ".join(f"{count} {kind}s: {reason}" for reason, count in sorted(dropped.items()))
        raise DataError(f"{what}: no {kind} is left ({reasons}).")


def refuse_foreign_tokens(examples: Sequence[Pair | Prompt], vocabulary: int) -> None:
    for example in examples:
        parts = (example.tokens,) if isinstance(example, Prompt) else (example.prompt, example.chosen, example.rejected)
        highest = max(int(part.max(initial=0)) for part in parts)
        if highest >= vocabulary:
            raise DataError(
                f"{example.origin}: token {highest} is not in the model's vocabulary of {vocabulary}. The tokenizer is "
                f"not this model's, or the model's embedding was not resized to it."
            )


def read_rows(cfg: DataConfig) -> tuple[list[Row], list[Row]]:
    """Return the rows to train on, and those held out."""
    match cfg:
        case SyntheticDataConfig(size=size, eval_size=eval_size, seed=seed):
            words = cfg.max_length if cfg.fill else 0
            return synthetic.generate(size, seed, "train", words), synthetic.generate(eval_size, seed, "eval", words)
        case JsonlDataConfig(path=path, eval_path=eval_path):
            held_out = rows.read_jsonl(Path(eval_path).expanduser()) if eval_path else []
            return rows.read_jsonl(Path(path).expanduser()), held_out
        case _:
            raise AssertionError(cfg)


def prompt_rows(cfg: DataConfig) -> tuple[list[PromptRow], list[PromptRow]]:
    """Return the prompts to train on, and those held out; a preference set has prompts too."""
    match cfg:
        case ArithmeticDataConfig(size=size, eval_size=eval_size, seed=seed, digits=digits):
            return arithmetic.generate(size, seed, "train", digits), arithmetic.generate(
                eval_size, seed, "eval", digits
            )
        case SyntheticDataConfig(size=size, eval_size=eval_size, seed=seed):
            words = cfg.max_length if cfg.fill else 0
            train = synthetic.generate_prompts(size, seed, "train", words)
            return train, synthetic.generate_prompts(eval_size, seed, "eval", words)
        case JsonlDataConfig(path=path, eval_path=eval_path):
            held = rows.read_prompts(Path(eval_path).expanduser()) if eval_path else []
            return rows.read_prompts(Path(path).expanduser()), held
        case _:
            raise AssertionError(cfg)


def encode_shared(
    encoder: PairTokenizer | PromptTokenizer, rows: Sequence[Any], world: World
) -> tuple[list[Any], Counter[str]]:
    """Tokenize this rank's part of the rows and share it with all ranks; the first bad row is every rank's error."""
    mine = rows[world.rank * len(rows) // world.size : (world.rank + 1) * len(rows) // world.size]
    try:
        part: Any = encoder.encode(mine)
    except UserError as error:
        part = str(error)
    parts = gather_objects(part, world.size)
    for part in parts:
        if isinstance(part, str):
            raise DataError(part)
    return parts, sum((part.dropped for part in parts), start=Counter())
