"""A reward model as a function from a shard to this rank's part of its scores.

It is whole on every rank, and frozen. Shape letters: t tokens of this rank, S sequences, E hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlexp.config.schema import HFModelConfig, ModelRewardConfig
from rlexp.data.tokens import TextTokenizer, cut_from_start
from rlexp.errors import ModelError, RewardError
from rlexp.model.float64 import precise
from rlexp.model.loading import load_reward_model, load_reward_tokenizer
from rlexp.model.policy import DTYPES, cast_parameters
from rlexp.types import Ids, Pack, Sample, Shard


class RewardModel(nn.Module):
    """`max_length` is of a sequence in its own tokens; `pack_sequences` and the shard are to be given the same."""

    def __init__(self, cfg: ModelRewardConfig, key: str, policy_tokenizer: Any, max_length: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.key = key
        self.max_length = cfg.max_length or max_length
        self.model: PreTrainedModel = load_reward_model(cfg, key, self.max_length).eval().requires_grad_(False)
        cast_parameters(self.model, DTYPES[cfg.precision])
        head = getattr(self.model, "score", None)
        if not isinstance(head, nn.Linear):
            raise ModelError(
                f"{key}.path={cfg.path}: {type(self.model).__name__} has no linear head `score` on the last token. "
                f"Give a causal sequence-classification model, such as LlamaForSequenceClassification."
            )
        self.head = head
        tokenizer = load_reward_tokenizer(cfg, key)
        self.texts = None if same_tokens(tokenizer, policy_tokenizer) else TextTokenizer(tokenizer)
        if self.texts is None:
            self._refuse_longer(max_length)

    @property
    def probed(self) -> HFModelConfig:
        """With `self.model.config`, what `rlexp.model.probe.probe` makes a small copy of the trunk from."""
        return HFModelConfig(path=self.cfg.path, trust_remote_code=self.cfg.trust_remote_code)

    def encode(self, sample: Sample) -> tuple[Ids, Ids]:
        """Prompt and answer: the policy's tokens if they mean the same here, otherwise their texts anew, where what is
        too long loses the beginning of its prompt."""
        if self.texts is None:
            return sample.prompt.tokens, sample.answer
        prompt, (answer,) = self.texts.with_answers(sample.prompt.text, [sample.text], sample.prompt.origin)
        room = self.max_length - len(answer)
        if room < 1:
            raise RewardError(
                f"{self.key}.path={self.cfg.path}: sample {sample.number} of {sample.prompt.origin} is an answer of "
                f"{len(answer)} of its tokens, and {self.key}.max_length={self.max_length} counts the prompt too. "
                f"Raise it."
            )
        return cut_from_start(prompt, room, self.texts.tokenizer.bos_token_id), answer

    @torch.no_grad()
    def forward(self, shard: Shard, last_S: Tensor) -> Tensor:
        """(S,) in float64: the score of each sequence whose last token this rank holds, otherwise 0; to be summed over
        the ring. `last_S` is `last_places` of the shard's pack."""
        with precise(self.head.weight.dtype):
            hidden_tE = self.model.base_model(
                input_ids=shard.tokens_t.unsqueeze(0),
                position_ids=shard.positions_t.unsqueeze(0),
                use_cache=False,
                ring_batch=shard.attention,
            ).last_hidden_state.squeeze(0)
            is_last_St = shard.index_t.unsqueeze(0) == last_S.to(shard.index_t.device).unsqueeze(1)
            here_S, place_S = is_last_St.any(-1), is_last_St.int().argmax(-1)
            scores_S = self._scores(hidden_tE[place_S])
        return torch.where(here_S, scores_S, 0.0)

    def _scores(self, hidden_SE: Tensor) -> Tensor:
        """In float64: it is one row of each sequence, and bfloat16 would leave a score two digits."""
        bias = None if self.head.bias is None else self.head.bias.double()
        return nn.functional.linear(hidden_SE.double(), self.head.weight.double(), bias).squeeze(-1)

    def _refuse_longer(self, max_length: int) -> None:
        if self.max_length < max_length:
            raise ModelError(
                f"{self.key}.max_length={self.max_length}: the policy's tokens are the reward model's too, and "
                f"data.max_length={max_length} of them may come. Leave {self.key}.max_length out, or lower "
                f"data.max_length."
            )


def last_places(pack: Pack) -> Tensor:
    """(S,): where in the pack each sequence ends."""
    ends = [segment.start + segment.length - 1 for segment in pack.segments[: pack.sequences]]
    return torch.tensor(ends, dtype=torch.int64)


def same_tokens(one: Any, other: Any) -> bool:
    """Whether ids of one tokenizer mean the same to the other."""
    return bool(one.get_vocab() == other.get_vocab())
