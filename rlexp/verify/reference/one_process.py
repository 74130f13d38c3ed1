"""The reference: the same steps in one process, in float64, written out plainly.

It shares no code with dataset, ring, sampler, step, engine or meter. Rows and tokens come from `rows.py` and
`pairs.py`, samples and rates from `rules.py`; log-probabilities and counts are its own. Only the loss's formula is the
product's, applied to the whole batch at once (`formula.py`). The model is transformers' own with its own SDPA, one
sequence at a time, without padding; torch differentiates it. Clipping, AdamW and SGD are written out here. `precise` is
shared, since transformers would otherwise round to float32 in the middle of a float64 pass, an error of 1e-8.

Shape letters: T tokens of one sequence, n of its answer, V vocabulary, E width, H heads.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlexp.base.errors import ModelError, NonFiniteError
from rlexp.config.schema import Config, Device, HFModelConfig, OptimConfig, OptimName, TinyModelConfig
from rlexp.training.algos.base import Loss
from rlexp.training.model.float64 import precise
from rlexp.verify.records import (
    MISMATCHED,
    Array,
    Asked,
    Expected,
    Key,
    StepExpected,
    TensorFiles,
    TokenExample,
    Update,
    joined,
)
from rlexp.verify.reference import rules
from rlexp.verify.reference.formula import losses_of
from rlexp.verify.reference.pairs import Bytes, examples_of, mismatched

LOGITS = 1 << 24  # elements of logits held at once
SCORES = 1 << 26  # elements of a score matrix held at once
BLOCKS = "verify_blocks"
ROUNDED = {"bf16": torch.bfloat16, "fp16": torch.float16}
OF_TOKENS = ("likelihoods", "entropies", "hits")  # log Σ p², the entropy, and whether the token is the likeliest
FLOOR = 1e-6  # added to the norm when clipping, as by torch's clip_grad_norm_


class Reference:
    """The trained model, stepped in one process, and the one that it is compared with: as it started, or another."""

    def __init__(self, cfg: Config, loss: Loss, tokenizer: Any) -> None:
        self.cfg = cfg
        self.device = torch.device("cuda" if cfg.launch.device is Device.cuda else "cpu")
        self.loss, self.carried = loss, dict[str, float]()
        self.policy = load(cfg, self.device, scores=self.loss.asks.scores)
        self.start = load(_of_reference(cfg), self.device) if self.loss.asks.reference else None
        self.parameters = dict(self.policy.named_parameters())
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(not any(fnmatch.fnmatchcase(name, pattern) for pattern in cfg.model.freeze))
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.data = examples_of(cfg, tokenizer)
        self.examples = self.data.train
        self.begin = tokenizer.bos_token_id
        self.optimizer = Optimizer(cfg.optim)
        self.total = rules.total_steps(cfg, self.data.sizes)

    def step(self, number: int, files: TensorFiles) -> StepExpected:
        """Take one optimizer step; write its gradient and the weights after it to files."""
        samples = rules.samples_of(self.cfg, self.data.sizes, number)
        batch = {sample: self.examples[sample] for sample in samples}
        expected = self._values(number, batch)
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.detach() for name, p in self.trained.items()
        }
        expected.grad_norm = norm(gradients.values())
        if not math.isfinite(expected.loss + expected.grad_norm):
            names = ", ".join(example.origin for example in list(batch.values())[:8])
            raise NonFiniteError(
                f"step {number}: the loss or its gradient is not finite, in the plain reference too. Its samples begin "
                f"with {names}. A smaller optim.lr or a warm-up may help; or the samples are at fault."
            )
        expected.lr = rules.learning_rate(self.cfg.optim, self.total, number)
        for name, gradient in gradients.items():
            files.write("gradient", number, name, gradient.cpu().numpy())
        with torch.no_grad():
            self.optimizer.step({n: p.data for n, p in self.trained.items()}, gradients, expected.lr)
        for parameter in self.trained.values():
            parameter.grad = None
        self.write_weights(files, number)
        expected.row |= {
            "grad_norm": expected.grad_norm,
            "learning_rate": expected.lr,
            "epoch": number / rules.steps_per_epoch(self.cfg, self.data.sizes),
            "global_step": number,
        }
        return expected

    def write_weights(self, files: TensorFiles, step: int) -> None:
        for name, parameter in self.parameters.items():
            files.write("weights", step, name, parameter.detach().cpu().numpy())

    def _values(self, number: int, batch: Mapping[int, TokenExample]) -> StepExpected:
        """Log-probabilities, losses and logged values of a batch; with gradients enabled, also add up its gradient.

        The formula sees the whole batch at once. So a pass without gradient comes first, and the pass with gradient
        sends each sum's derivative backward, one sequence at a time.
        """
        trained, asks = torch.is_grad_enabled(), self.loss.asks
        values = self._said(batch, ("policy", "reference", "logits", "likelihoods", "entropies", "hits"))
        sums, counts = self._sums(batch, values), rules.counts_of(list(batch.values()))
        others = self._others(batch) if asks.mismatched else {}
        of_others = self._said(others, ("policy", "reference"))
        if others:
            sums[MISMATCHED] = rules.log_ratios(of_others["policy"], of_others["reference"])
        losses, carried = losses_of(self.loss, sums, counts, self.carried, held_out=not trained)
        if trained:
            self.carried = dict(carried)
            for place, example in enumerate(batch.values()):
                for side in example.sides:
                    slope = torch.tensor(losses.slopes[side][place] / len(batch), device=self.device)
                    self._judged(example, side).backward(slope)
        sides = next(iter(batch.values())).sides if values["logits"] else ()
        logits = {side: joined([values["logits"][sample, side] for sample in batch]) for side in sides}
        row = rules.logged(losses, sums, logits, sum(example.tokens for example in batch.values()))
        return StepExpected(
            number=number,
            samples=tuple(batch),
            policy=values["policy"],
            reference=values["reference"],
            logits=values["logits"],
            likelihoods=values["likelihoods"],
            entropies=values["entropies"],
            hits=values["hits"],
            others=others,
            of_others=of_others,
            counts=counts,
            losses=dict(zip(batch, losses.losses_E.tolist(), strict=True)),
            loss=row["loss"],
            grad_norm=0.0,
            lr=0.0,
            row=row,
        )

    def _judged(self, example: TokenExample, side: str) -> Tensor:
        """What the loss is a function of: the answer's score, or the weighted sum of its tokens."""
        if self.loss.asks.scores:
            return answer_score(self.policy, example, side, self.device)
        logps_n, *_ = answer_logps(self.policy, example, side, self.device)
        weights = rules.token_weights(example, side, self.loss.asks.tail_weight)
        return (logps_n * torch.from_numpy(weights).to(self.device)).sum()

    def _others(self, batch: Mapping[int, TokenExample]) -> dict[int, TokenExample]:
        """Give each example of a batch another's answer."""
        examples, most = list(batch.values()), self.cfg.data.max_length
        return {sample: mismatched(examples, place, most, self.begin) for place, sample in enumerate(batch)}

    @torch.no_grad()
    def _said(self, batch: Mapping[int, TokenExample], asked: Sequence[str]) -> dict[str, dict[Key, Array]]:
        """What both models say of each trained token, as far as the loss asks for it."""
        unasked = {name for name in ("likelihoods", "entropies", "hits") if not getattr(self.loss.asks, name)}
        values: dict[str, dict[Key, Array]] = {who: {} for who in asked}
        for sample, example in batch.items():
            for side in example.sides:
                if self.loss.asks.scores:
                    values["policy"][sample, side] = self._judged(example, side).reshape(1).cpu().numpy()
                    continue
                logps_n, means_n, *more = answer_logps(self.policy, example, side, self.device)
                said = {"policy": logps_n, "logits": means_n, **dict(zip(OF_TOKENS, more, strict=True))}
                if self.start is not None:
                    said["reference"], *_ = answer_logps(self.start, example, side, self.device)
                for who, each in said.items():
                    if who in asked and who not in unasked:
                        values[who][sample, side] = each.cpu().numpy()
        return values

    def _sums(self, batch: Mapping[int, TokenExample], values: Mapping[str, Mapping[Key, Array]]) -> dict[str, Array]:
        """Add up the tokens of each answer, as the loss weighs them."""
        beyond, sums = self.loss.asks.tail_weight, {}
        for who in ("policy", "reference", *OF_TOKENS):
            for side in next(iter(batch.values())).sides if values[who] else ():
                weights = [np.ones(1) if self.loss.asks.scores else
                           rules.token_weights(example, side, 1.0 if who in OF_TOKENS else beyond)
                           for example in batch.values()]  # fmt: skip
                tokens = [values[who][sample, side] for sample in batch]
                sums[f"{who}/{side}"] = np.array([(a * b).sum() for a, b in zip(tokens, weights, strict=True)])
        return sums

    @torch.no_grad()
    def held_out(self, examples: Sequence[TokenExample]) -> dict[str, float]:
        batch = dict(enumerate(examples))
        return self._values(0, batch).row


def expected_steps(cfg: Config, loss: Loss, steps: int, held_out: int, folder: Path) -> Expected:
    """Take the first `steps` optimizer steps, then evaluate the first `held_out` held-out examples."""
    reference, files = Reference(cfg, loss, load_tokenizer(cfg)), TensorFiles(folder)
    reference.write_weights(files, 0)
    expected = Expected(examples=len(reference.examples), total_steps=reference.total, tokens={}, steps=[],
                        asks=Asked(loss.asks.tail_weight, loss.asks.mean_tokens, loss.asks.margins,
                                   loss.asks.scores))  # fmt: skip
    total = 0
    for number in range(1, steps + 1):
        step = reference.step(number, files)
        total += int(step.row["tokens"])
        step.row["total_tokens"] = total
        step.row = {f"train/{name}": value for name, value in step.row.items()} | {"step": number}
        expected.tokens |= {sample: reference.examples[sample] for sample in step.samples}
        expected.steps.append(step)
    if held_out:
        examples = reference.data.held_out[:held_out]
        expected.held_tokens = dict(enumerate(examples))
        expected.steps[-1].row |= {f"eval/{name}": value for name, value in reference.held_out(examples).items()}
    return expected


# ---- the model ----


def load_tokenizer(cfg: Config) -> Any:
    if not isinstance(cfg.model, HFModelConfig):
        return Bytes()
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path, **_options(cfg.model))
    if cfg.model.chat_template is not None:
        tokenizer.chat_template = Path(cfg.model.chat_template).expanduser().read_text(encoding="utf-8")
    tokenizer.model_max_length = 1 << 60  # silence its warning: data.max_length decides
    return tokenizer


def _of_reference(cfg: Config) -> Config:
    """Return a configuration whose model is the one that the policy is compared with."""
    if cfg.reference.path is None:
        return cfg
    assert isinstance(cfg.model, HFModelConfig)
    other = dataclasses.replace(cfg.model, path=cfg.reference.path, revision=cfg.reference.revision)
    return dataclasses.replace(cfg, model=other)


def load(cfg: Config, device: torch.device, attention: str | None = None, *, scores: bool = False) -> Any:
    """Load the starting model with float64 parameters, rounded as the configuration says; rotary tables and other
    buffers stay in float32."""
    names = [attention] if attention else [own_blocks() if device.type == "cuda" else "sdpa", "eager"]
    for name in names:
        try:
            model = _scoring(cfg, name) if scores else _made(cfg, name)
            break
        except ValueError:  # the model does not offer this attention
            if name == names[-1]:
                raise
    dtype = ROUNDED.get(cfg.model.dtype.value, torch.float32) if isinstance(cfg.model, HFModelConfig) else torch.float32
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).double()
    _pin_angles(model, cfg.data.max_length)
    model.to(device).eval()
    if not scores:
        _refuse_other_head(model, device)
    return model


def _scoring(cfg: Config, attention: str) -> Any:
    """Make the model with a head for scores: its own, or a row of normal numbers from the seed."""
    hf = cfg.model if isinstance(cfg.model, HFModelConfig) else None
    if hf is not None:
        config = transformers.AutoConfig.from_pretrained(hf.path, **_options(hf))
        if any("SequenceClassification" in name for name in config.architectures or []):
            return AutoModelForSequenceClassification.from_pretrained(
                hf.path, **_options(hf), dtype=torch.float32, attn_implementation=attention
            )
    model = _made(cfg, attention)
    config = model.config
    config.num_labels = 1
    whole = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, attn_implementation=attention)
    setattr(whole, whole.base_model_prefix, model.base_model)
    weight = torch.empty_like(whole.score.weight)
    weight.normal_(std=config.initializer_range, generator=torch.Generator().manual_seed(cfg.model.seed))
    whole.score.weight.data = weight
    return whole


def _made(cfg: Config, attention: str) -> Any:
    match cfg.model:
        case TinyModelConfig() as tiny:
            special = {f"{name}_token_id": place for place, name in enumerate(("bos", "eos", "pad"))}
            config = LlamaConfig(
                vocab_size=3 + 256,
                hidden_size=tiny.hidden_size,
                intermediate_size=tiny.intermediate_size,
                num_hidden_layers=tiny.layers,
                num_attention_heads=tiny.heads,
                num_key_value_heads=tiny.kv_heads,
                max_position_embeddings=max(2048, cfg.data.max_length),
                tie_word_embeddings=False,
                **special,
            )
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(tiny.seed)
                return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
        case HFModelConfig() as hf:
            transformers.utils.logging.disable_progress_bar()
            config = transformers.AutoConfig.from_pretrained(hf.path, **_options(hf))
            # Mixtures of experts: the grouped matrix product has no float64 kernel.
            experts = any("experts" in name and value for name, value in vars(config).items())
            return AutoModelForCausalLM.from_pretrained(
                hf.path,
                **_options(hf),
                dtype=torch.float32,
                attn_implementation=attention,
                **({"experts_implementation": "eager"} if experts else {}),
            )
        case _:
            raise AssertionError(cfg.model)


def _options(model: HFModelConfig) -> dict[str, Any]:
    """Return options of transformers. What files must be changed for was prepared before (`fit_memory.plan`)."""
    assert (model.gguf, model.add_tokens) == (None, []), "the model was not prepared"
    return {"trust_remote_code": model.trust_remote_code, "revision": model.revision or "main"}


def _pin_angles(model: nn.Module, max_length: int) -> None:
    """Fix rotary angles that depend on the longest position seen, to those of a sequence of data.max_length."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind in ("dynamic", "longrope"):
            table, factor = ROPE_INIT_FUNCTIONS[kind](module.config, None, seq_len=max_length)
            for name, value in (("inv_freq", table), ("attention_scaling", factor), ("rope_type", "default")):
                setattr(module, name, value)


@torch.no_grad()
def _refuse_other_head(model: Any, device: torch.device) -> None:
    """Refuse a model that does more to its logits than its head, since `answer_logps` applies the head itself."""
    tokens = torch.arange(8, device=device).unsqueeze(0) % model.config.get_text_config().vocab_size
    with precise(torch.float64):
        whole = model(input_ids=tokens, use_cache=False).logits
        parts = model.get_output_embeddings()(model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)
    if not torch.allclose(whole, parts, rtol=1e-12, atol=1e-12):
        raise ModelError(f"{type(model).__name__}: does more to its logits than its head, so it cannot be verified.")


def answer_logps(model: Any, example: TokenExample, side: str, device: torch.device) -> tuple[Tensor, ...]:
    """Log-probability of each trained token of the answer, the mean logit there, and `OF_TOKENS`, each (n,), from one
    sequence alone."""
    sequence = example.sequence(side)
    tokens_T = torch.from_numpy(sequence).to(device)
    first = len(example.prompt)
    with precise(torch.float64):
        hidden_TE = model.base_model(
            input_ids=tokens_T.unsqueeze(0),
            position_ids=torch.arange(len(sequence), device=device).unsqueeze(0),
            use_cache=False,
        ).last_hidden_state.squeeze(0)
        head = model.get_output_embeddings()
        rows = max(1, LOGITS // head.weight.shape[0])
        parts = []
        for start in range(first, len(sequence), rows):
            stop = min(start + rows, len(sequence))
            # A token is predicted from the hidden state before it.
            parts.append(checkpoint(_logps, head, hidden_TE[start - 1 : stop - 1], tokens_T[start:stop],
                                    use_reentrant=False))  # fmt: skip
    trained_n = torch.from_numpy(example.trained(side)).to(device)
    return tuple(torch.cat(each)[trained_n] for each in zip(*parts, strict=True))


def answer_score(model: Any, example: TokenExample, side: str, device: torch.device) -> Tensor:
    """The score of one sequence alone, at its last token."""
    tokens_T = torch.from_numpy(example.sequence(side)).to(device)
    with precise(torch.float64):
        hidden_TE = model.base_model(input_ids=tokens_T.unsqueeze(0), use_cache=False).last_hidden_state.squeeze(0)
        score: Tensor = model.score(hidden_TE[-1]).squeeze()
    return score


def _logps(head: nn.Module, hidden_nE: Tensor, tokens_n: Tensor) -> tuple[Tensor, ...]:
    logits_nV = head(hidden_nE)
    assert logits_nV.dtype is torch.float64
    logps_n = logits_nV.log_softmax(-1).gather(-1, tokens_n.unsqueeze(-1)).squeeze(-1)
    shares_nV = logits_nV.detach().softmax(-1)
    likelihoods_n = shares_nV.square().sum(-1).log()
    entropies_n = torch.special.entr(shares_nV).sum(-1)
    hits_n = (shares_nV.max(-1).indices == tokens_n).double()
    return logps_n, logits_nV.detach().mean(-1), likelihoods_n, entropies_n, hits_n


# ---- attention written out ----


def softmax_attention(q_HTD: Tensor, k_HTD: Tensor, v_HTD: Tensor, scale: float) -> Tensor:
    """Causal attention of one sequence, (H, T, D), by a masked softmax over blocks of queries."""
    heads, length, _ = q_HTD.shape
    rows = max(1, SCORES // (heads * length))
    parts = [
        checkpoint(_softmax_rows, q_HTD[:, start : start + rows], k_HTD, v_HTD, start, scale, use_reentrant=False)
        for start in range(0, length, rows)
    ]
    return torch.cat(parts, dim=1)


def _softmax_rows(q_HqD: Tensor, k_HTD: Tensor, v_HTD: Tensor, start: int, scale: float) -> Tensor:
    stop = start + q_HqD.shape[1]
    scores = q_HqD @ k_HTD[:, :stop].transpose(1, 2) * scale
    later = torch.arange(stop, device=q_HqD.device) > torch.arange(start, stop, device=q_HqD.device).unsqueeze(1)
    return torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1) @ v_HTD[:, :stop]


def own_blocks() -> str:
    """Register an attention in blocks for GPUs, where SDPA's float64 kernel would store the whole score matrix."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        window = options.get("sliding_window")
        if mask is not None or options.get("softcap") or (window and window < query.shape[2]):
            raise ModelError(f"{type(module).__name__} is not plainly causal, so it cannot be verified on a GPU.")
        groups = query.shape[1] // key.shape[1]
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        k, v = (each[0].repeat_interleave(groups, dim=0) for each in (key, value))
        return softmax_attention(query[0], k, v, scale).transpose(0, 1).unsqueeze(0), None

    AttentionInterface.register(BLOCKS, attend)
    AttentionMaskInterface.register(BLOCKS, lambda *_args, **_kwargs: None)
    return BLOCKS


# ---- the optimizer ----


def norm(gradients: Any) -> float:
    return math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in gradients))


class Optimizer:
    """Clipping by the whole norm, then AdamW (arXiv 1711.05101) or SGD, written out. Only matrices decay."""

    def __init__(self, optim: OptimConfig) -> None:
        self.optim, self.taken = optim, 0
        self.means: dict[str, Tensor] = {}
        self.squares: dict[str, Tensor] = {}

    def step(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: float) -> None:
        """Change the weights in place; the gradients stay as they are."""
        self.taken += 1
        most = self.optim.max_grad_norm
        shrink = min(1.0, most / (norm(gradients.values()) + FLOOR)) if most else 1.0
        change = self._adamw if self.optim.name is OptimName.adamw else self._plain
        for name, weight in weights.items():
            decay = self.optim.weight_decay if weight.dim() > 1 else 0.0
            change(name, weight, gradients[name] * shrink, lr, decay)

    def _adamw(self, name: str, weight: Tensor, gradient: Tensor, lr: float, decay: float) -> None:
        first, second = self.optim.betas
        mean = self.means.get(name, torch.zeros_like(gradient)) * first + gradient * (1 - first)
        square = self.squares.get(name, torch.zeros_like(gradient)) * second + gradient**2 * (1 - second)
        self.means[name], self.squares[name] = mean, square
        unbiased, spread = mean / (1 - first**self.taken), (square / (1 - second**self.taken)).sqrt()
        weight *= 1 - lr * decay
        weight -= lr * unbiased / (spread + self.optim.eps)

    def _plain(self, name: str, weight: Tensor, gradient: Tensor, lr: float, decay: float) -> None:  # noqa: ARG002
        weight *= 1 - lr * decay
        weight -= lr * gradient


def given_steps(cfg: Config, steps: int, lrs: Sequence[float], folder: Path) -> Iterator[dict[str, Update]]:
    """Apply a run's own gradients to its own weights, step by step in float64, and compare with the run's results."""
    files = TensorFiles(folder)
    optimizer = Optimizer(cfg.optim)

    def read(kind: str, number: int, name: str) -> Tensor:
        return torch.from_numpy(files.read(kind, number, name).copy()).double()

    for number in range(1, steps + 1):
        gradients = {name: read("gradient", number, name) for name in files.names("gradient", number)}
        weights = {name: read("weights", number - 1, name) for name in files.names("weights", number)}
        before = {name: weight.clone() for name, weight in weights.items()}
        optimizer.step({name: weights[name] for name in gradients if name in weights}, gradients, lrs[number - 1])
        yield {
            name: Update(
                apart=float((read("weights", number, name) - weight).norm()),
                step=float((weight - before[name]).norm()),
                weight=float(weight.norm()),
            )
            for name, weight in weights.items()
        }
