"""A causal model as a function from a shard to per-token log-probabilities, and from tokens to the next token's logits;
with a head for scores, from a shard to per-token scores.

Shape letters: t tokens of this rank, u of them whose targets are trained on, E hidden size; B rows that are decoded, q
new tokens of each, V vocabulary.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlexp.base.engine_facts import able
from rlexp.base.errors import ModelError
from rlexp.config.schema import Checkpointing, LoraConfig
from rlexp.config.schema.models import Precision
from rlexp.training.model.adapter import Adapter, in_use, put_adapter
from rlexp.training.model.decoding import Decoding
from rlexp.training.model.float64 import precise
from rlexp.training.model.fused.classes import Fused, fuse
from rlexp.training.model.head import HeadLogps, HeadScores
from rlexp.training.ring.attention import KeptOutputs
from rlexp.training.types import Shard, TokenLogps, TokenScores, Wanted

DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16, Precision.fp64: torch.float64}
LOGPS = Wanted()  # log-probabilities alone
CRITIC = "critic."  # the prefix of its parameters' names


class Policy(nn.Module):
    """The module that an engine wraps and steps: the model, and the critic if there is one."""

    def __init__(self, model: PreTrainedModel, critic: Critic | None = None, wanted: Wanted = LOGPS) -> None:
        super().__init__()
        self.model = model
        self.critic = critic
        self.critic_lr_scale = 1.0  # the critic's learning rate over the policy's
        self.logps = HeadLogps(wanted)
        self.scores = HeadScores() if wanted.scores else None  # in the place of log-probabilities
        self.adapter: Adapter | None = None
        self.fused: Fused | None = None  # what computes with fused pieces, if any may

    def named(self) -> Iterator[tuple[str, Any]]:
        """The model's parameters by its own names, then the critic's."""
        yield from self.model.named_parameters()
        if self.critic is not None:
            for name, parameter in self.critic.named_parameters():
                yield f"{CRITIC}{name}", parameter

    @property
    def head(self) -> nn.Linear:
        """The head that computes now. An adapter may have one of its own, which is trained whole."""
        return cast(nn.Linear, in_use(self._held_head))

    @property
    def trunks(self) -> list[PreTrainedModel]:
        """The model, and the critic's own trunk if it has one."""
        return [self.model, *([self.critic.trunk] if self.critic is not None and self.critic.trunk else [])]

    @property
    def heads(self) -> list[nn.Module]:
        """The head, and those that an adapter has beside it."""
        modules = self._held_head.modules()
        return [module for module in modules if next(module.parameters(recurse=False), None) is not None]

    @property
    def _held_head(self) -> nn.Module:
        return self.model.get_output_embeddings() if self.scores is None else self.model.score

    def adapt(self, cfg: LoraConfig, *, base: tuple[str | None, str | None], seed: int, copy: bool) -> None:
        """Put an adapter into the model, and into the critic's own trunk. The critic's head is trained too."""
        trunk = None if self.critic is None else self.critic.trunk
        scores = self.scores is not None
        self.adapter = put_adapter(self.model, trunk, cfg, base=base, seed=seed, copy=copy, scores=scores)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Compute log-probabilities alone, as the weights did that training began with."""
        assert self.adapter is not None
        wanted = self.logps.wanted
        self.logps.wanted = wanted.frozen
        try:
            with self.adapter.starting():
                yield
        finally:
            self.logps.wanted = wanted

    @property
    def outlet(self) -> nn.Module:
        """The module that is given the head's parameters."""
        return self.logps if self.scores is None else self.scores

    def forward(self, work: Shard | Decoding) -> TokenLogps | TokenScores | Tensor:
        """Return log-probabilities of the shard's targets, or scores; while decoding, (B, V) logits of each row's next
        token.

        Both enter here, since engines that gather parameters do so when the module that they wrap is called.
        """
        with precise(self.head.weight.dtype):
            return self._next(work) if isinstance(work, Decoding) else self._read(work)

    def _read(self, shard: Shard) -> TokenLogps | TokenScores:
        head = self.head
        hidden_tE = hidden_states(self.model.base_model, shard)
        if self.scores is not None:
            return self.scores(head.weight, head.bias, hidden_tE, shard)
        logps: TokenLogps = self.logps(head.weight, head.bias, hidden_tE, shard)
        if self.critic is None or self.logps.wanted.values is None:
            return logps
        return logps._replace(values_n=self.critic(hidden_tE, shard))

    def _next(self, batch: Decoding) -> Tensor:
        head = self.head
        hidden_BqE = self.model.base_model(
            input_ids=batch.tokens_Bq, position_ids=batch.positions_Bq, use_cache=False, decoding=batch
        ).last_hidden_state
        batch.finished()
        return self.logps(head.weight, head.bias, hidden_BqE[:, -1], None)

    def fuse(self) -> None:
        """Compute with fused pieces what they fit, and log-probabilities."""
        self.fused = fuse(*self.trunks)
        self.logps.fused = True

    def freeze(self, patterns: Sequence[str]) -> None:
        """Exclude the parameters whose names match a pattern from training."""
        parameters = dict(self.model.named_parameters())
        names = list(parameters)
        for pattern in patterns:
            frozen = fnmatch.filter(names, pattern)
            if not frozen:
                raise ModelError(
                    f"model.freeze: {pattern!r} matches no parameter. Their names are like {names[0]} and {names[-1]}; "
                    f"patterns are the shell's, as in 'model.layers.0.*'."
                )
            for name in frozen:
                parameters[name].requires_grad_(False)
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise ModelError(f"model.freeze={list(patterns)}: nothing is left to train. Freeze fewer parameters.")

    def refuse_listed_experts(self, engine: str) -> None:
        """Refuse models whose gradients differ in number between ranks, for engines that reduce them as they arrive."""
        if name := self.listed_experts():
            raise ModelError(
                f"engine={engine}: {type(self.model).__name__} keeps its experts in a list ({name}). A rank on "
                f"which no token chooses an expert has no gradient of it, and the others would wait. Use "
                f"{able(lambda traits: traits.replicated)}."
            )

    def listed_experts(self) -> str | None:
        """Return the name of a list of experts, if the model keeps them in one: a rank may have no gradient of some."""
        modules = self.model.named_modules()
        return next(
            (name for name, each in modules if isinstance(each, nn.ModuleList) and "expert" in name.lower()), None
        )

    def recompute_activations(self, what: Checkpointing) -> None:
        """Keep only the input of each layer, or what its attention gives too; compute the rest in the backward pass.

        The recomputation runs in the autograd engine, where the forward pass's float64 mode is not active. So it enters
        the mode itself, by the dtype that the weights have then.
        """
        if what is Checkpointing.none:
            return

        def contexts() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
            exact = precise(next(self.parameters()).dtype)
            if what is Checkpointing.full:
                return contextlib.nullcontext(), exact
            kept = KeptOutputs()
            return kept.keeping(), kept.using(within=exact)

        # Shim: transformers renamed the method after 5.17. Remove it when 5.17 is no longer admitted.
        for model in self.trunks:
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": False, "context_fn": contexts})
        self.train()  # transformers recomputes in training mode only; dropout is off


class Critic(nn.Module):
    """The value of each trained token: a row of weights over the hidden states of its own trunk, or of the policy's."""

    def __init__(self, hidden_size: int, trunk: PreTrainedModel | None) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ValueHead(hidden_size, 1)
        nn.init.zeros_(self.head.weight)  # so the first values are zero
        nn.init.zeros_(self.head.bias)

    def forward(self, hidden_tE: Tensor, shard: Shard) -> Tensor:
        if self.trunk is not None:
            hidden_tE = hidden_states(self.trunk, shard)
        values_u: Tensor = self.head(hidden_tE.index_select(0, shard.trained_u)).squeeze(-1)
        return shard.by_token(values_u)


class ValueHead(nn.Linear):
    """A linear head in float32 (float64 for float64): it is one row, and bfloat16 would leave a value two digits."""

    def forward(self, hidden_uE: Tensor) -> Tensor:
        wide = torch.promote_types(hidden_uE.dtype, torch.float32)
        return nn.functional.linear(hidden_uE.to(wide), self.weight.to(wide), self.bias.to(wide))


def hidden_states(trunk: nn.Module, shard: Shard) -> Tensor:
    return trunk(
        input_ids=shard.tokens_t.unsqueeze(0),
        position_ids=shard.positions_t.unsqueeze(0),
        use_cache=False,
        ring_batch=shard.attention,
    ).last_hidden_state.squeeze(0)


def cast_parameters(module: nn.Module, dtype: torch.dtype, *, frozen: torch.dtype | None = None) -> None:
    """Cast parameters only: rotary tables and other buffers stay in float32, as transformers intends. Those that are
    not trained may get a dtype of their own."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype if frozen is None or parameter.requires_grad else frozen)
