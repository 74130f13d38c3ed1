"""The reference's model: transformers' own, with its own SDPA, in float64, one sequence at a time, without padding.

`precise` is shared with the product, since transformers would otherwise round to float32 in the middle of a float64
pass, an error of 1e-8.

Shape letters: T tokens of one sequence, n of its answer, V vocabulary, E width, H heads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

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
    MistralConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlexp.base.errors import ModelError
from rlexp.config.chat_templates import end_of, template_text
from rlexp.config.schema import Config, HFModelConfig, LoraConfig, NoAdapterConfig, TinyModelConfig
from rlexp.training.model.float64 import precise
from rlexp.training.model.loading import byte_tokenizer
from rlexp.verify.adapter import adapted
from rlexp.verify.recording import TokenExample

LOGITS = 1 << 24  # elements of logits held at once
SCORES = 1 << 26  # elements of a score matrix held at once
BLOCKS = "verify_blocks"
ROUNDED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_tokenizer(cfg: Config) -> Any:
    """Load transformers' own tokenizer; `model=tiny` has one of bytes, which is made in the product."""
    if not isinstance(cfg.model, HFModelConfig):
        return byte_tokenizer()
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path, **_options(cfg.model))
    if cfg.model.chat_template is not None:
        tokenizer.chat_template = template_text(cfg.model.chat_template)
        if (end := end_of(cfg.model.chat_template)) is not None:
            tokenizer.add_special_tokens({"eos_token": end})
    tokenizer.model_max_length = 1 << 60  # silence its warning: data.max_length decides
    return tokenizer


def of_reference(cfg: Config) -> Config:
    """Return a configuration whose model is the one that the policy is compared with: the model that training starts
    from, which a new adapter does not change."""
    if isinstance(cfg.adapter, LoraConfig) and (cfg.adapter.path is None or cfg.reference.path is not None):
        cfg = dataclasses.replace(cfg, adapter=NoAdapterConfig())
    if cfg.reference.path is None:
        return cfg
    assert isinstance(cfg.model, HFModelConfig)
    other = dataclasses.replace(cfg.model, path=cfg.reference.path, revision=cfg.reference.revision, gguf=None)
    return dataclasses.replace(cfg, model=other)


def of_critic(cfg: Config, device: torch.device) -> Any:
    """Load the trunk of a critic that has its own."""
    model = load(dataclasses.replace(cfg, adapter=NoAdapterConfig()), device)
    trunk = model.base_model
    if isinstance(cfg.adapter, LoraConfig):
        adapted(trunk, cfg.adapter, cfg.seed, trunk_of=f"{model.base_model_prefix}.")
    return trunk


def load(cfg: Config, device: torch.device, attention: str | None = None, *, scores: bool = False) -> Any:
    """Load the starting model with float64 parameters, rounded as the configuration says, and with its adapter; rotary
    tables stay in float32."""
    make = _scoring if scores else _made
    try:
        model = make(cfg, attention or (own_blocks() if device.type == "cuda" else "sdpa"))
    except ValueError:  # the model does not offer this attention
        if attention:
            raise
        model = make(cfg, "eager")
    dtype = ROUNDED.get(cfg.model.dtype.value, torch.float64) if isinstance(cfg.model, HFModelConfig) else torch.float32
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).double()
    _pin_angles(model, cfg.data.max_length)
    if isinstance(cfg.adapter, LoraConfig):
        adapted(model, cfg.adapter, cfg.seed, scores=scores)
    model.to(device).eval()
    if not scores:
        _refuse_other_head(model, device)
    return model


def _scoring(cfg: Config, attention: str) -> Any:
    """Make the model with a head for scores: its own, or a row of normal numbers from the seed."""
    if isinstance(cfg.model, HFModelConfig):
        described = transformers.AutoConfig.from_pretrained(cfg.model.path, **_options(cfg.model))
        if any("SequenceClassification" in name for name in described.architectures or []):
            return _pretrained(AutoModelForSequenceClassification, cfg.model, attention)
    model = _made(cfg, attention)
    config = model.config
    config.num_labels = 1
    whole = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, attn_implementation=attention)
    setattr(whole, whole.base_model_prefix, model.base_model)
    generator = torch.Generator().manual_seed(cfg.model.seed)
    whole.score.weight.data.normal_(std=config.initializer_range, generator=generator)
    return whole


def _made(cfg: Config, attention: str) -> Any:
    if isinstance(cfg.model, HFModelConfig):
        return _pretrained(AutoModelForCausalLM, cfg.model, attention)
    tiny = cfg.model
    assert isinstance(tiny, TinyModelConfig)
    kind, windows = (MistralConfig, {"sliding_window": tiny.window}) if tiny.window else (LlamaConfig, {})
    config = kind(
        **windows,
        vocab_size=3 + 256,
        hidden_size=tiny.hidden_size,
        intermediate_size=tiny.intermediate_size,
        num_hidden_layers=tiny.layers,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.kv_heads,
        max_position_embeddings=2048 if tiny.rope else max(2048, cfg.data.max_length),
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    _stretch(config, tiny.rope)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tiny.seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)


def _pretrained(factory: Any, model: HFModelConfig, attention: str) -> Any:
    transformers.utils.logging.disable_progress_bar()
    options = _options(model)
    config = transformers.AutoConfig.from_pretrained(model.path, **options)
    _stretch(config, model.rope)
    if any("experts" in name and value for name, value in vars(config).items()):
        options["experts_implementation"] = "eager"  # the grouped matrix product has no float64 kernel
    return factory.from_pretrained(
        model.path, config=config, dtype=torch.float64, attn_implementation=attention, **options
    )


def _stretch(config: Any, rope: str | None) -> None:
    """Put `yarn:FACTOR` or `yarn:FACTOR:POSITIONS` into a configuration, over the positions before any extension."""
    if rope is None:
        return
    kind, factor, *positions = rope.split(":")
    config, original = config.get_text_config(), "original_max_position_embeddings"
    before = {name: value for name, value in config.rope_parameters.items() if name != "attention_factor"}
    native = int(positions[0]) if positions else before.get(original) or config.max_position_embeddings
    # `attention_factor` follows from the factor.
    config.rope_parameters = before | {"rope_type": kind, "factor": float(factor), original: native}
    if hasattr(config, original):
        setattr(config, original, native)


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
    """Log-probability of each trained token of the answer, the mean logit there, and log Σ p², entropy and hits, each
    (n,), from one sequence alone."""
    tokens_T = torch.from_numpy(example.sequence(side)).to(device)
    with precise(torch.float64):
        values = logps_of(model, hidden_states(model.base_model, tokens_T), tokens_T, len(example.prompt), 1.0)
    trained_n = torch.from_numpy(example.trained(side)).to(device)
    return tuple(each[trained_n] for each in values)


def hidden_states(trunk: nn.Module, tokens_T: Tensor, positions_T: Tensor | None = None) -> Tensor:
    """Return the last hidden states of a sequence, at its own positions or at others."""
    # Without a mask, transformers would take positions with a gap for several sequences, which do not see each other.
    mask = {} if positions_T is None else {"attention_mask": torch.ones_like(tokens_T).unsqueeze(0)}
    if positions_T is None:
        positions_T = torch.arange(len(tokens_T), device=tokens_T.device)
    hidden_TE: Tensor = trunk(
        input_ids=tokens_T.unsqueeze(0), position_ids=positions_T.unsqueeze(0), use_cache=False, **mask
    ).last_hidden_state.squeeze(0)
    return hidden_TE


def logps_of(model: Any, hidden_TE: Tensor, tokens_T: Tensor, first: int, temperature: float) -> list[Tensor]:
    """What the model says of each token from the place `first` on, from the hidden state before it."""
    head = model.get_output_embeddings()
    rows = max(1, LOGITS // head.weight.shape[0])
    pieces = zip(hidden_TE[first - 1 : -1].split(rows), tokens_T[first:].split(rows), strict=True)
    parts = [checkpoint(_logps, head, hidden_nE, tokens_n, temperature, use_reentrant=False)
             for hidden_nE, tokens_n in pieces]  # fmt: skip
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def answer_score(model: Any, example: TokenExample, side: str, device: torch.device) -> Tensor:
    """The score of one sequence alone, at its last token."""
    tokens_T = torch.from_numpy(example.sequence(side)).to(device)
    with precise(torch.float64):
        score: Tensor = model.score(hidden_states(model.base_model, tokens_T)[-1]).squeeze()
    return score


def _logps(head: nn.Module, hidden_nE: Tensor, tokens_n: Tensor, temperature: float) -> tuple[Tensor, ...]:
    logits_nV = head(hidden_nE) / temperature
    assert logits_nV.dtype is torch.float64
    logps_nV = logits_nV.log_softmax(-1)
    logps_n = logps_nV.gather(-1, tokens_n.unsqueeze(-1)).squeeze(-1)
    shares_nV = logits_nV.detach().softmax(-1)
    likelihoods_n = shares_nV.square().sum(-1).log()
    entropies_n = -(logps_nV.exp() * logps_nV).sum(-1)
    hits_n = (shares_nV.max(-1).indices == tokens_n).double()
    return logps_n, logits_nV.detach().mean(-1), likelihoods_n, entropies_n, hits_n


# ---- attention written out ----


def softmax_attention(q_HTD: Tensor, k_HTD: Tensor, v_HTD: Tensor, scale: float, window: int | None = None) -> Tensor:
    """Causal attention of one sequence, (H, T, D), by a masked softmax over blocks of queries."""
    rows = max(1, SCORES // (q_HTD.shape[0] * q_HTD.shape[1]))
    parts = [checkpoint(_softmax_rows, q_HqD, k_HTD, v_HTD, block * rows, scale, window, use_reentrant=False)
             for block, q_HqD in enumerate(q_HTD.split(rows, dim=1))]  # fmt: skip
    return torch.cat(parts, dim=1)


def _softmax_rows(q_HqD: Tensor, k_HTD: Tensor, v_HTD: Tensor, start: int, scale: float, window: int | None) -> Tensor:
    stop = start + q_HqD.shape[1]
    scores = q_HqD @ k_HTD[:, :stop].transpose(1, 2) * scale
    before = torch.arange(start, stop, device=q_HqD.device).unsqueeze(1) - torch.arange(stop, device=q_HqD.device)
    unseen = (before < 0) | (before >= (window or stop))
    return torch.softmax(scores.masked_fill(unseen, -torch.inf), dim=-1) @ v_HTD[:, :stop]


def own_blocks() -> str:
    """Register an attention in blocks for GPUs, where SDPA's float64 kernel would store the whole score matrix."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        if mask is not None or options.get("softcap"):
            raise ModelError(f"{type(module).__name__} is not plainly causal, so it cannot be verified on a GPU.")
        groups = query.shape[1] // key.shape[1]
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        k, v = (each[0].repeat_interleave(groups, dim=0) for each in (key, value))
        attended = softmax_attention(query[0], k, v, scale, options.get("sliding_window"))
        return attended.transpose(0, 1).unsqueeze(0), None

    AttentionInterface.register(BLOCKS, attend)
    AttentionMaskInterface.register(BLOCKS, lambda *_args, **_kwargs: None)
    return BLOCKS
