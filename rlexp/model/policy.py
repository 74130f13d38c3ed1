"""A causal model as a function from a shard to per-token log-probabilities. The logits are never whole.

Shape letters: t tokens of this rank, n of them trained on, V vocabulary.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlexp.errors import ModelError
from rlexp.model.float64 import precise
from rlexp.types import Shard, TokenLogps

LOGITS = 1 << 24  # elements of logits held at once


class Policy(nn.Module):
    """Its parameters are the model's own; what an engine wraps, exports and steps."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.logps = HeadLogps()

    @property
    def head(self) -> nn.Linear:
        return cast(nn.Linear, self.model.get_output_embeddings())

    def forward(self, shard: Shard) -> TokenLogps:
        head = self.head
        with precise(head.weight.dtype):
            hidden_tE = self.model.base_model(
                input_ids=shard.tokens_t.unsqueeze(0),
                position_ids=shard.positions_t.unsqueeze(0),
                use_cache=False,
                ring_batch=shard.attention,
            ).last_hidden_state.squeeze(0)
            logps: TokenLogps = self.logps(head.weight, head.bias, hidden_tE, shard)
            return logps

    def freeze(self, patterns: Sequence[str]) -> None:
        """Leave the parameters whose names fit a pattern as they are."""
        names = [name for name, _ in self.model.named_parameters()]
        for pattern in patterns:
            found = set(fnmatch.filter(names, pattern))
            if not found:
                raise ModelError(
                    f"model.freeze: {pattern!r} fits no parameter. Their names are like {names[0]} and {names[-1]}; "
                    f"patterns are those of the shell, as in 'model.layers.0.*'."
                )
            for name, parameter in self.model.named_parameters():
                if name in found:
                    parameter.requires_grad_(False)
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise ModelError(f"model.freeze={list(patterns)}: nothing is left to train.")

    def refuse_listed_experts(self, engine: str) -> None:
        """Engines that reduce gradients as they come need one of every parameter on every rank, in the same order."""
        for name, module in self.model.named_modules():
            if isinstance(module, nn.ModuleList) and "expert" in name.lower():
                raise ModelError(
                    f"engine={engine}: {type(self.model).__name__} keeps its experts in a list ({name}). A rank none "
                    f"of whose tokens chooses an expert has no gradient of it, and the others would wait. Use "
                    f"engine=torch or engine=zero0."
                )

    def recompute_activations(self) -> None:
        """Keep each layer's input alone, and compute the layer anew in the backward pass.

        The recomputation runs in the autograd engine, where the float64 mode of the forward pass does not reach;
        so it enters the mode itself, by the dtype that the weights have by then.
        """
        # Shim: transformers renamed the method after 5.17. To be removed when 5.17 is no longer admitted.
        enable = getattr(self.model, "activation_checkpointing_enable", self.model.gradient_checkpointing_enable)
        enable(
            {
                "use_reentrant": False,
                "context_fn": lambda: (contextlib.nullcontext(), precise(next(self.parameters()).dtype)),
            }
        )
        self.train()  # what transformers asks for; dropout is off


class HeadLogps(nn.Module):
    """From hidden states to log-probabilities, some rows of logits at a time.

    A module of its own that is given the head's parameters, and calls no module: an engine that gathers parameters
    module by module gathers them once, however many pieces this rank's tokens make.
    """

    def forward(self, weight: Tensor, bias: Tensor | None, hidden_tE: Tensor, shard: Shard) -> TokenLogps:
        trained = shard.sequence_t >= 0
        index_n = trained.nonzero().squeeze(-1)
        if len(index_n) == 0:
            # Every rank runs every parameter, so that no collective of the engine waits for one without a gradient.
            index_n = torch.zeros(1, dtype=torch.int64, device=hidden_tE.device)
        rows = max(1, LOGITS // weight.shape[0])
        several = index_n.shape[0] > rows
        pieces = []
        for piece in index_n.split(rows):
            arguments = (weight, bias, hidden_tE[piece], shard.targets_t[piece])
            pieces.append(
                checkpoint(_piece_logps, *arguments, use_reentrant=False)
                if torch.is_grad_enabled() and several
                else _piece_logps(*arguments)
            )
        logps_n, means_n = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        zeros_t = logps_n.new_zeros(len(trained))
        weight_n = trained[index_n].to(logps_n.dtype)
        return TokenLogps(
            zeros_t.index_put((index_n,), logps_n * weight_n),
            zeros_t.index_put((index_n,), means_n * weight_n),
        )


def _piece_logps(weight: Tensor, bias: Tensor | None, hidden_nE: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets and mean logits, in float32 (float64 for float64)."""
    logits_nV = nn.functional.linear(hidden_nE, weight, bias)
    if logits_nV.dtype is not torch.float64:
        logits_nV = logits_nV.float()
    chosen_n = logits_nV.gather(-1, targets_n.unsqueeze(-1)).squeeze(-1)
    return chosen_n - logits_nV.logsumexp(-1), logits_nV.detach().mean(-1)


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters only: rotary tables and other buffers keep their float32, as transformers means them to."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
