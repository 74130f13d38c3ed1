"""Put together what a preview says, and write its samples as text, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlexp.base.errors import ConfigError
from rlexp.config.schema import Config
from rlexp.config.schema.data import RowsDataConfig
from rlexp.config.schema.row_kinds import EXAMPLE, ROWS_OF, SIDES, Kind
from rlexp.data.facts import Lengths, Piece, Preview, RowPart, ShownSample, Steps
from rlexp.data.lengths import lengths_of
from rlexp.data.read_rows import Rows, read_rows
from rlexp.data.rings import rings_of
from rlexp.data.sharing import sharing_of
from rlexp.training.dataset.sampler import Sampler, total_steps
from rlexp.training.dealer.of_run import without_room
from rlexp.training.model.loading import load_tokenizer
from rlexp.training.train.examples import kind_read, sampler_of
from rlexp.training.train.fitting import unfit
from rlexp.training.types import Example, Ids, Mask


def preview(cfg: Config, samples: int) -> Preview:
    """Read the rows, and look at them as training will."""
    needs = cfg.loss.rows
    tokenizer = load_tokenizer(cfg.model)
    rows = read_rows(cfg, tokenizer)
    facts = Preview(
        cfg.loss.name, needs.value, rows.kind.value, f"data={cfg.data.name}", cfg.model.called, cfg.data.max_length,
        cfg.data.packing, rows.sources, rows.reasons, problems=_problems(cfg, rows),
    )  # fmt: skip
    if not len(rows.lengths):
        return replace(facts, problems=(*facts.problems, f"No {EXAMPLE[rows.kind]} is left to train on."))
    copies = cfg.rollout.n_samples if rows.kind is Kind.prompts else rows.lengths.shape[1] - 1
    lengths = _lengths(rows, cfg.data.max_length - cfg.rollout.max_new_tokens * (rows.kind is Kind.prompts))
    facts = replace(facts, lengths=lengths, sharing=sharing_of(rows.hashes, rows.lengths, copies))
    try:
        sampler = sampler_of(cfg, rows.kind, len(rows.examples.train), rows.examples.mixture)
    except ConfigError as error:  # fewer than a batch
        first = range(min(samples, len(rows.lengths)))
        shown = _samples(rows, tuple(first), tokenizer)
        return replace(facts, samples=shown, problems=facts.problems or (str(error),))
    rings, sampled = rings_of(cfg, rows, sampler)
    shown = _samples(rows, sampler.batch(1).indices[:samples], tokenizer)
    return replace(facts, steps=_steps(cfg, rows, sampler), rings=rings, sampled=sampled, samples=shown)


def _problems(cfg: Config, rows: Rows) -> tuple[str, ...]:
    needs = kind_read(cfg) if isinstance(cfg.data, RowsDataConfig) else cfg.loss.rows
    other = [source for source in rows.sources if source.kind != needs.value]
    if not other:
        whole = (rows.examples.train, rows.examples.held_out) if rows.kind is not Kind.prompts else ()
        return tuple(each for each in (unfit(cfg, rows.examples), without_room(cfg, *whole)) if each is not None)
    named = ", ".join(dict.fromkeys(f"{source.key} ({source.path})" for source in other))
    kinds = " and ".join(dict.fromkeys(source.kind for source in other))
    halves = needs is Kind.unpaired and kinds == Kind.pairs.value
    remedy = "Read each pair as two answers (data.unpair=true), give" if halves else "Give"
    return (
        f"loss={cfg.loss.name} cannot train on the rows of {named}: they are {kinds}, and it needs {ROWS_OF[needs]}. "
        f"{remedy} other rows or another loss, or name the columns: data.columns.",
    )


def _lengths(rows: Rows, most: int) -> tuple[Lengths, ...]:
    """Describe each part, and whole sequences: a pair has two."""
    lengths, answers = rows.lengths, SIDES[rows.kind]
    if not answers:
        return (lengths_of("prompt", lengths[:, 0], most),)
    parts = [lengths_of(name, lengths[:, place]) for place, name in enumerate(("prompt", *answers))]
    return (*parts, lengths_of("whole sequence", (lengths[:, :1] + lengths[:, 1:]).ravel(), most))


def _steps(cfg: Config, rows: Rows, sampler: Sampler) -> Steps:
    """Count the tokens of each step of the first epoch: of each rollout, where the policy draws the answers."""
    drawn = rows.kind is Kind.prompts
    copies = rows.lengths.shape[1] - 1
    of_examples = rows.lengths[:, 0] * (cfg.rollout.n_samples if drawn else copies) + rows.lengths[:, 1:].sum(axis=1)
    batches = sampler.batches(1, sampler.steps_per_epoch)
    tokens = np.array([of_examples[np.array(batch.indices)].sum() for batch in batches], dtype=np.int64)
    each = cfg.rollout.epochs * cfg.rollout.minibatches if drawn else 1
    per_epoch = sampler.steps_per_epoch * each
    run = total_steps(per_epoch, cfg.train.max_steps, cfg.train.epochs)
    left_out = max(0, sampler.taken - sampler.steps_per_epoch * sampler.batch_size)
    what = (f"prompts of a rollout of {sampler.batch_size} × {cfg.rollout.n_samples} samples, without the answers"
            if drawn else "sequences, without padding")  # fmt: skip
    return Steps(
        per_epoch, cfg.train.batch_size, run, run / per_epoch, left_out, float(tokens.mean()), int(tokens.max()),
        int(tokens.sum()), what,
    )  # fmt: skip


def _samples(rows: Rows, places: tuple[int, ...], tokenizer: Any) -> tuple[ShownSample, ...]:
    sides, special = SIDES[rows.kind], special_ids(tokenizer)
    return tuple(sample_of(rows.examples.train[place], sides, tokenizer, special) for place in places)


HEAD, TAIL = 1600, 800  # tokens of a part that are shown at least, if it is longer
CONTEXT = 4  # tokens before a part that decide how its first one is written
UNFINISHED = "\ufffd"  # what a tokenizer makes of half a character


def sample_of(example: Example, sides: Sequence[str], tokenizer: Any, special: frozenset[int]) -> ShownSample:
    parts = _Decoder(tokenizer, special).parts(example.prompt, dict(zip(sides, example.masked, strict=True)))
    return ShownSample(example.origin, parts, example.label, example.expected, example.margin)


def special_ids(tokenizer: Any) -> frozenset[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset({*tokenizer.all_special_ids, *(each for each, token in added.items() if token.special)})


class _Decoder:
    def __init__(self, tokenizer: Any, special: frozenset[int]) -> None:
        self._tokenizer, self._special = tokenizer, special

    def parts(self, prompt: Ids, answers: dict[str, tuple[Ids, Mask | None]]) -> tuple[RowPart, ...]:
        untrained = np.zeros(len(prompt), bool)
        parts = [RowPart("prompt", len(prompt), 0, self._pieces(prompt, untrained, prompt[:0]))]
        for name, (answer, mask) in answers.items():
            trained = np.ones(len(answer), bool) if mask is None else mask
            pieces = self._pieces(answer, trained, prompt[-CONTEXT:])
            parts.append(RowPart(name, len(answer), int(trained.sum()), pieces))
        return tuple(parts)

    def _pieces(self, ids: Ids, trained: Mask, before: Ids) -> tuple[Piece, ...]:
        if len(ids) <= HEAD + TAIL:
            return tuple(self._decoded(ids.tolist(), trained, before.tolist()))
        head = self._decoded(ids[:HEAD].tolist(), trained[:HEAD], before.tolist())
        tail = self._decoded(ids[-TAIL:].tolist(), trained[-TAIL:], ids[-TAIL - CONTEXT : -TAIL].tolist())
        return (*head, Piece("", (), hidden=len(ids) - HEAD - TAIL), *tail)

    def _decoded(self, ids: list[int], trained: Mask, before: list[int]) -> Iterator[Piece]:
        """Yield the text that each token adds. Tokens that share a character come together."""
        whole = [*before, *ids]
        start, read, offset = 0, len(before), len(before)

        def piece(stop: int, text: str) -> Piece:
            special = stop == read + 1 and whole[read] in self._special
            return Piece(text, tuple(whole[read:stop]), bool(trained[read - offset]), special)

        for place in range(offset, len(whole)):
            last = place + 1 == len(whole)
            known, text = self._text(whole[start:read]), self._text(whole[start : place + 1])
            here = trained[place - offset : place - offset + 2]  # whether this token is trained on, and the next
            ends = last or self._special.intersection(whole[place : place + 2]) or here[0] != here[1]
            if ends or (len(text) > len(known) and not text.endswith(UNFINISHED)) or text == known:
                yield piece(place + 1, text[len(known) :])
                start, read = read, place + 1

    def _text(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)
