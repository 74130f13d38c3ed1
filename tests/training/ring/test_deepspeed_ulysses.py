"""A whole model's DPO against DeepSpeed's own sequence parallelism (Ulysses) on the same ranks.

DeepSpeed shards, and exchanges heads and their gradients. The model is transformers' with its own attention, and takes
sequences one at a time. Log-probabilities, the paper's loss and the sum over ranks are a few lines here. Only the first
weights come from rlexp: no packs, layouts, losses or reductions.

Shape letters: t tokens of this rank, P pairs, V vocabulary.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec
from rlexp.training.model.loading import load_config, load_model
from rlexp.verify.recording import TokenExample
from tests.helpers.ranks import Steps, largest_gap, on_ranks, train_steps
from tests.helpers.textbook import batches_of
from tests.oracles.examples import SIDES

# Plain gradient descent, so that the second step, where policy and reference differ, depends on these gradients only.
COMMON = ("launch.device=cpu", "logger=none", "train.precision=fp64", "train.batch_size=4", "data.size=8", "optim=sgd",
          "optim.lr=0.5", "optim.decay=constant", "optim.max_grad_norm=0", "train.max_steps=2")  # fmt: skip
# float64, sums in another order. Measured: loss 1.4e-14, any parameter's gradient 1.4e-14 of its largest element.
LOSS, GRADIENT = 1e-13, 1e-13
Sequence = tuple[list[int], int]  # tokens, and how many of them belong to the prompt
Weights = dict[str, Tensor]


class Ulysses:
    """DeepSpeed's model on the ranks of this world, each of which is given a part of every sequence."""

    def __init__(self, cfg: Config, spec: RankSpec) -> None:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, for a minute or two
        deepspeed.init_distributed(dist_init_required=False, verbose=False)
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        self.rank, self.ranks = spec.rank, spec.world_size
        config = load_config(cfg.model, cfg.data.max_length)
        first = load_model(cfg.model, config, cfg.data.max_length).state_dict()
        self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        self.model.load_state_dict(first)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.double()
        for module in self.model.modules():
            if type(module).__name__.endswith("RMSNorm"):  # transformers' drops to float32
                module.forward = types.MethodType(norm, module)
        UlyssesSPAttentionHF.register_with_transformers(self.model, "sdpa", self.ranks, 1)

    def logp(self, sequence: Sequence) -> Tensor:
        """Return Σ log p(answer token | tokens before it) over the tokens of this rank."""
        tokens, prompt = sequence
        share = -(-len(tokens) // self.ranks)
        mine = torch.arange(self.rank * share, (self.rank + 1) * share)
        padded = torch.tensor([*tokens, *[0] * (self.ranks * share + 1 - len(tokens))])  # after all real tokens
        logits_tV = self.model(
            input_ids=padded[mine].unsqueeze(0), position_ids=mine.unsqueeze(0), use_cache=False
        ).logits.squeeze(0)
        logps_n = logits_tV.log_softmax(-1).gather(-1, padded[mine + 1].unsqueeze(-1)).squeeze(-1)
        return logps_n[(mine + 1 >= prompt) & (mine + 1 < len(tokens))].sum()

    def logps(self, pairs: list[TokenExample]) -> tuple[Tensor, Tensor]:
        """Return this rank's part of each sequence, (2, P), and their sum over all ranks, which has no gradient."""
        part_2P = torch.stack([
            torch.stack([self.logp((pair.sequence(side).tolist(), len(pair.prompt))) for pair in pairs])
            for side in SIDES
        ])  # fmt: skip
        whole_2P = part_2P.detach().clone()
        dist.all_reduce(whole_2P)
        return part_2P, whole_2P

    def gradient(self, pairs: list[TokenExample], reference_2P: Tensor, beta: float) -> tuple[float, Weights]:
        """Compute equation 7 of arXiv 2305.18290 and its gradient, by the chain rule through the sum over the ranks."""
        part_2P, whole_2P = self.logps(pairs)
        ratios_2P = whole_2P.requires_grad_() - reference_2P
        loss = -F.logsigmoid(beta * (ratios_2P[0] - ratios_2P[1])).mean()
        (by_sum_2P,) = torch.autograd.grad(loss, whole_2P)
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        grads = torch.autograd.grad((part_2P * by_sum_2P).sum(), parameters)
        for grad in grads:
            dist.all_reduce(grad)
        return float(loss.detach()), dict(zip(names, grads, strict=True))


def norm(self: Any, hidden: Tensor) -> Tensor:
    """Compute a Llama's norm in the dtype of its input."""
    scaled: Tensor = self.weight * hidden * (hidden.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
    return scaled


def both_rank(spec: RankSpec, cfgs: list[Config], steps: int) -> tuple[list[Steps], list[tuple[float, Weights]]]:
    """Return rlexp's steps for each configuration, and DeepSpeed's loss and gradient for each step."""
    ours = [train_steps(spec, cfg, steps) for cfg in cfgs]
    cfg = cfgs[0]
    batches = batches_of(cfg, steps)
    ulysses = Ulysses(cfg, spec)
    with torch.no_grad():
        references = [ulysses.logps(batch)[1] for batch in batches]  # by the first weights
    theirs = []
    for batch, reference_2P in zip(batches, references, strict=True):
        theirs.append(ulysses.gradient(batch, reference_2P, cfg.loss.beta))
        with torch.no_grad():
            for name, parameter in ulysses.model.named_parameters():
                parameter -= cfg.optim.lr * theirs[-1][1][name]
    return ours, theirs


@pytest.mark.parametrize("ring", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_deepspeed_s_ulysses_has_the_same_dpo_loss_and_gradient(ring: int) -> None:
    """With 8 query and 2 key/value heads: at ring 4 both send each key/value head to two ranks."""
    layouts = [["parallel.layout=ulysses", "train.micro_batch_size=1"],
               ["parallel.layout=zigzag", "train.micro_batch_size=4"]]  # fmt: skip
    cfgs = [compose_config([*COMMON, f"parallel=ring{ring}", *layout]) for layout in layouts]
    for ours, theirs in on_ranks(ring, both_rank, cfgs, 2):
        assert abs(theirs[1][0] - theirs[0][0]) > 0.01  # policy and reference differ
        for steps in ours:
            for number, (loss, gradient) in enumerate(theirs):
                assert steps.rows[number]["train/loss"] == pytest.approx(loss, rel=LOSS)
                assert largest_gap(gradient, steps.gradients[number]) < GRADIENT
