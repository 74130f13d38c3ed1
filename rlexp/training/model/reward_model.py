"""A reward model as a function from a shard to the scores of the sequences that end on this rank.

Every rank holds the whole model, frozen. Shape letters: t tokens of this rank, S sequences, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlexp.base.errors import ModelError, RewardError
from rlexp.config.schema import HFModelConfig
from rlexp.config.schema.rollouts import ModelRewardConfig
from rlexp.training.dataset.tokens import RowTokenizer, cut_from_start
from rlexp.training.model.float64 import precise
from rlexp.training.model.loading import load_reward_model, load_reward_tokenizer
from rlexp.training.model.placing import Placing
from rlexp.training.model.policy import DTYPES, hidden_states
from rlexp.training.types import Ids, Sample, Shard


class RewardModel(nn.Module):
    """A frozen sequence-classification model with one label.

    `max_length` is the longest sequence in its own tokens; `shard_pack` must be given the same.
    """

    def __init__(
        self, cfg: ModelRewardConfig, key: str, policy_tokenizer: Any, max_length: int, device: torch.device,
        load: Callable[[ModelRewardConfig, str, int, Placing], PreTrainedModel] = load_reward_model,
        load_tokenizer: Callable[[ModelRewardConfig, str], Any] = load_reward_tokenizer,
    ) -> None:  # fmt: skip
        super().__init__()
        self.cfg, self.key = cfg, key
        self.max_length = cfg.max_length or max_length
        placing = Placing(device, DTYPES[cfg.precision])
        self.model = load(cfg, key, self.max_length, placing).eval().requires_grad_(False)
        head = getattr(self.model, "score", None)
        if not isinstance(head, nn.Linear):
            raise ModelError(
                f"{key}.path={cfg.path}: {type(self.model).__name__} has no linear head `score` on the last token. "
                f"Give a causal sequence-classification model, such as LlamaForSequenceClassification."
            )
        self.head = head
        tokenizer = load_tokenizer(cfg, key)
        same_tokens = tokenizer.get_vocab() == policy_tokenizer.get_vocab()
        self.texts = None if same_tokens else RowTokenizer(tokenizer)
        if same_tokens and self.max_length < max_length:
            raise ModelError(
                f"{key}.max_length={self.max_length}: the reward model has the policy's tokens, and sequences have up "
                f"to data.max_length={max_length} of them. Leave {key}.max_length out, or lower data.max_length."
            )

    @property
    def probed(self) -> HFModelConfig:
        """The configuration from which, with `self.model.config`, `probe` copies the trunk."""
        return HFModelConfig(path=self.cfg.path, trust_remote_code=self.cfg.trust_remote_code)

    def encode(self, sample: Sample) -> tuple[Ids, Ids]:
        """Return prompt and answer in the reward model's tokens.

        They are the policy's tokens if both have the same vocabulary; otherwise their texts are tokenized anew, and
        one that is too long loses the beginning of its prompt.
        """
        if self.texts is None:
            return sample.example.prompt, sample.answer
        prompt, answer = self.texts.with_answer(sample.example.text, sample.text, sample.example.origin)
        room = self.max_length - len(answer)
        if room < 1:
            raise RewardError(
                f"{self.key}.path={self.cfg.path}: sample {sample.number} of {sample.example.origin} is an answer of "
                f"{len(answer)} of its tokens, and {self.key}.max_length={self.max_length} counts the prompt too. "
                f"Raise {self.key}.max_length."
            )
        return cut_from_start(prompt, room, self.texts.tokenizer.bos_token_id), answer

    @torch.no_grad()
    def forward(self, shard: Shard, end_S: Tensor) -> Tensor:
        """Return (S,) in float64, to be summed over the ring: the scores of sequences that end on this rank, else 0.
        They end at `end_S` of the pack."""
        with precise(self.head.weight.dtype):
            hidden_tE = hidden_states(self.model.base_model, shard)
            here_S, place_S = here(shard, end_S)
            # In float64: it is one row per sequence, and bfloat16 would leave a score two digits.
            bias = None if self.head.bias is None else self.head.bias.double()
            scores_S1 = nn.functional.linear(hidden_tE[place_S].double(), self.head.weight.double(), bias)
        return torch.where(here_S, scores_S1.squeeze(-1), 0.0)


def here(shard: Shard, end_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return which places of the pack this rank holds, (S,), and where among its tokens."""
    is_last_St = shard.index_t.unsqueeze(0) == end_S.to(shard.index_t.device).unsqueeze(1)
    return is_last_St.any(-1), is_last_St.int().argmax(-1)
