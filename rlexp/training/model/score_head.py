"""A head for scores: a row of weights at a sequence's last token, as in transformers' sequence classification."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from rlexp.base.errors import ModelError


def has_score_head(config: PreTrainedConfig) -> bool:
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


@dataclass(frozen=True)
class ScoreHead:
    """Makes of a model one that gives scores; where it has no head yet, with a random one of the seed."""

    seed: int
    key: str  # for messages, as the path
    path: str

    def config(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Return the configuration of the whole model."""
        if has_score_head(config):
            refuse_labels(config, self.key, self.path)
        config = copy.deepcopy(config)
        config.num_labels = 1
        return config

    def on(self, trunk: PreTrainedModel) -> PreTrainedModel:
        """Put the head on a model without any. The trunk's parameters may be in pieces, or have no memory yet."""
        unset_hf_deepspeed_config()  # the trunk's pieces are loaded, and this model has none
        try:
            with torch.device("meta"):
                model: Any = AutoModelForSequenceClassification.from_config(trunk.config)
        except ValueError:
            raise self._refusal(trunk) from None
        config, prefix = trunk.config, trunk.base_model_prefix
        if not isinstance(model.score, nn.Linear) or type(getattr(model, prefix, None)) is not type(trunk):
            raise self._refusal(trunk)
        setattr(model, prefix, trunk)
        head = nn.Linear(model.score.in_features, 1, bias=model.score.bias is not None, device="cpu")
        std = getattr(config, "initializer_range", 0.02)
        nn.init.normal_(head.weight, std=std, generator=torch.Generator().manual_seed(self.seed))
        if head.bias is not None:
            nn.init.zeros_(head.bias)
        model.score = head
        model.config.architectures = [type(model).__name__]
        return model.eval()

    def _refusal(self, trunk: PreTrainedModel) -> ModelError:
        return ModelError(
            f"{self.key}={self.path}: transformers has no sequence classification with a linear head `score` for "
            f"{type(trunk).__name__}. Give a model of a family that has one, such as Llama or Qwen."
        )


def padding_of(config: PreTrainedConfig, tokenizer: Any) -> int | None:
    """Return a padding token for a model that scores; None if there is none.

    transformers takes for the last token the last one that is not padding. So no token that may end an answer will do.
    """
    listed = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = {*listed, tokenizer.eos_token_id, *_ends_of_template(tokenizer)}
    known = (config.pad_token_id, *(getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "unk", "bos")))
    return next((token for token in known if token is not None and token not in ends), None)


def _ends_of_template(tokenizer: Any) -> list[int]:
    """Return the special tokens that a chat template writes, of which one ends an answer."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return [number for number, token in added.items() if token.special and token.content in template]


def refuse_labels(config: PreTrainedConfig, key: str, path: str) -> None:
    if config.num_labels != 1:
        labels = ", ".join(map(str, list(config.id2label.values())[:4]))
        raise ModelError(
            f"{key}={path}: has {config.num_labels} labels ({labels}), and a reward is one number. Give a "
            f"sequence-classification model with one label."
        )
