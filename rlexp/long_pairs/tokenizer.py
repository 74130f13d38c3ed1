"""Count a pair's tokens as training will, with the tokenizer and the chat template of a model."""

from __future__ import annotations

from rlexp.base.errors import DataError
from rlexp.config.schema import ModelConfig
from rlexp.long_pairs.lengths import Count
from rlexp.long_pairs.question import Pair
from rlexp.training.dataset.tokens import Example, RowTokenizer
from rlexp.training.model.loading import load_tokenizer
from rlexp.training.types import Row


def counting(model: ModelConfig) -> Count:
    rows = RowTokenizer(load_tokenizer(model))

    def count(pair: Pair) -> int:
        (made,) = rows.sequences([Row(pair.prompt, (pair.chosen, pair.rejected), "the pair")])
        if not isinstance(made, Example):
            raise DataError(made.message)
        return made.longest()

    return count
