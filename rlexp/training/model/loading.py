"""Load a transformers model and its tokenizer from a run's configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config
from transformers.utils.logging import disable_progress_bar

from rlexp.base.errors import ModelError, UserError
from rlexp.base.printable import printable_lines
from rlexp.config.chat_templates import NAMED, end_of, template_text
from rlexp.config.checks.adapter import refuse_quantized
from rlexp.config.checks.model import refuse_missing
from rlexp.config.checks.rope import named
from rlexp.config.rope import TINY, parsed
from rlexp.config.schema import HFModelConfig, ModelConfig, TinyModelConfig
from rlexp.config.schema.models import Precision
from rlexp.config.schema.rollouts import ModelRewardConfig
from rlexp.config.trust import TRUST
from rlexp.launch import watch
from rlexp.training.model import hook, rope
from rlexp.training.model.placing import DTYPE_NAMED, Placing, arriving, put_all, round_all
from rlexp.training.model.prepared import prepared
from rlexp.training.model.score_head import ScoreHead, has_score_head, refuse_labels

UNBOUNDED = 1 << 60  # data.max_length decides what is too long, not the tokenizer


def load_config(cfg: ModelConfig, max_length: int) -> PreTrainedConfig:
    match cfg:
        case TinyModelConfig():
            tokenizer = byte_tokenizer()
            # Mistral is a Llama whose tokens see a window.
            kind, windows = (MistralConfig, {"sliding_window": cfg.window}) if cfg.window else (LlamaConfig, {})
            config: PreTrainedConfig = kind(
                **windows,
                vocab_size=len(tokenizer),
                hidden_size=cfg.hidden_size,
                intermediate_size=cfg.intermediate_size,
                num_hidden_layers=cfg.layers,
                num_attention_heads=cfg.heads,
                num_key_value_heads=cfg.kv_heads,
                max_position_embeddings=TINY if cfg.rope else max(TINY, max_length),
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                tie_word_embeddings=False,
            )
        case HFModelConfig():
            config = _pretrained(AutoConfig, cfg)
            if getattr(config, "quantization_config", None) is not None:
                refuse_quantized(f"{cfg.group}.path", cfg.path, config.quantization_config)
        case _:
            raise AssertionError(cfg)
    _without_dropout(config)
    if (yarn := parsed(cfg.rope)) is not None:
        rope.extend(config, yarn, named(cfg))
    return config


def load_model(
    cfg: ModelConfig,
    config: PreTrainedConfig,
    max_length: int,
    placing: Placing | None = None,
    *,
    float64: bool = False,
    scores: bool = False,
) -> PreTrainedModel:
    """Load the model, the same on every rank, with the ring's attention and without dropout. Its weights are read in
    float32, or with `float64` in float64, and go where `placing` says, one by one; without it they stay on the host.
    `scores`: with a head for scores, which is random if the files have none."""
    if not isinstance(cfg, HFModelConfig):
        unset_hf_deepspeed_config()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(cfg.seed)
            model = random_model(config, max_length, scores=scores, seed=cfg.seed)
        if placing is not None:
            put_all(model, placing)
        return model
    key, dtype = f"{cfg.group}.path", DTYPE_NAMED.get(cfg.dtype.value)  # None for `auto`
    if placing is not None:
        placing = dataclasses.replace(placing, rounded=dtype)
    head, factory = ScoreHead(cfg.seed, key, cfg.path), AutoModelForCausalLM
    if has_score_head(config) and not scores:
        raise ModelError(
            f"{key}={cfg.path}: is a {config.architectures[0]}, whose head gives scores and not the next token. Give a "
            f"causal language model; a reward model goes to reward.path."
        )
    if scores:
        factory = AutoModelForSequenceClassification if has_score_head(config) else AutoModel
        config = head.config(config)
    # A trunk alone leaves the head of the files out, as it is meant to.
    with arriving(placing), quiet() if factory is AutoModel else contextlib.nullcontext():
        model, info = _pretrained(factory, cfg, **_reading(config, float64=float64))
    _refuse_random(key, cfg.path, info)
    if (yarn := parsed(cfg.rope)) is not None:
        rope.refuse_unless_extended(model, yarn, named(cfg))
    if factory is AutoModel:
        model = head.on(model)
    model = _without_surprises(model, max_length)
    if dtype is not None and placing is not None:
        put_all(model, placing)  # also what no module was given by its name
    elif dtype is not None:
        round_all(model, dtype)
    return model


def random_model(
    config: PreTrainedConfig, max_length: int, *, float64: bool = False, scores: bool = False, seed: int = 0
) -> PreTrainedModel:
    """Make a model from its configuration alone, in float32, on torch's default device. `seed` is that of a head for
    scores."""
    options = _experts(config) if float64 else {}
    head = ScoreHead(seed, "model", config.model_type)
    config = head.config(config) if scores else config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=hook.NAME, **options)
    if scores:
        model = head.on(model.base_model)
    return _without_surprises(model, max_length)


def load_reward_model(cfg: ModelRewardConfig, key: str, max_length: int, placing: Placing) -> PreTrainedModel:
    """Load a model that gives a sequence one number, with the ring's attention and without dropout."""
    config, name = _reward_config(cfg, key), f"{key}.path"
    unset_hf_deepspeed_config()  # it is whole on every rank, even where the engine shards the policy
    factory, reading = AutoModelForSequenceClassification, _reading(config, float64=cfg.precision is Precision.fp64)
    with arriving(placing):
        model, info = _from_hub(factory, cfg.path, cfg.trust_remote_code, what="reward model", key=name, **reading)
    _refuse_random(name, cfg.path, info)
    return _without_surprises(model, max_length)


def random_reward_model(cfg: ModelRewardConfig, key: str, max_length: int) -> PreTrainedModel:
    """Make a reward model from its configuration alone, in float32, on torch's default device."""
    config = _reward_config(cfg, key)
    options = _experts(config) if cfg.precision is Precision.fp64 else {}
    model = AutoModelForSequenceClassification.from_config(
        config, dtype=torch.float32, attn_implementation=hook.NAME, **options
    )
    return _without_surprises(model, max_length)


def _reward_config(cfg: ModelRewardConfig, key: str) -> PreTrainedConfig:
    name = f"{key}.path"
    config: PreTrainedConfig = _from_hub(AutoConfig, cfg.path, cfg.trust_remote_code, what="reward model", key=name)
    _without_dropout(config)
    if config.architectures and not has_score_head(config):
        kind = config.architectures[0]
        raise ModelError(
            f"{name}={cfg.path}: is a {kind}, which has no head that gives a score. Give a sequence-classification "
            f"model with one label; loss=reward trains one, and leaves it in its run's folder, in model/."
        )
    refuse_labels(config, name, cfg.path)
    return config


def load_reward_tokenizer(cfg: ModelRewardConfig, key: str) -> Any:
    tokenizer = _from_hub(AutoTokenizer, cfg.path, cfg.trust_remote_code, what="tokenizer", key=f"{key}.path")
    tokenizer.model_max_length = UNBOUNDED
    return tokenizer


def _refuse_random(key: str, path: str, info: dict[str, Any]) -> None:
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{key}={path}: has no weights for {', '.join(missing[:4])}{' …' if len(missing) > 4 else ''} "
            f"({len(missing)} in all). They would be random. Give a folder with all weights."
        )


def _without_surprises(model: PreTrainedModel, max_length: int) -> PreTrainedModel:
    rope.pin(model, max_length)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' warnings."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


@contextlib.contextmanager
def in_pieces(deepspeed_config: dict[str, Any]) -> Iterator[None]:
    """Load pretrained models parameter by parameter, each rank keeping its piece, as transformers does for ZeRO-3.

    Random models are made whole, the same on every rank, and sharded later.
    """

    class ShardedLoading:
        config = deepspeed_config

        def is_zero3(self) -> bool:
            return True

    sharding = ShardedLoading()  # transformers keeps a weak reference
    set_hf_deepspeed_config(sharding)
    try:
        yield
    finally:
        unset_hf_deepspeed_config()


def from_config_options(cfg: ModelConfig, config: PreTrainedConfig) -> dict[str, Any]:
    """Return the options that make a float64 copy of a model from its configuration alone."""
    trusted = {"trust_remote_code": True} if isinstance(cfg, HFModelConfig) and cfg.trust_remote_code else {}
    return trusted | _experts(config)


def _reading(config: PreTrainedConfig, *, float64: bool) -> dict[str, Any]:
    """Return the options that read a model's files: a weight in float64 stays exact where float64 computes."""
    exact = {"dtype": torch.float64, **_experts(config)} if float64 else {"dtype": torch.float32}
    return {"config": config, "attn_implementation": hook.NAME, "output_loading_info": True, **exact}


def _experts(config: PreTrainedConfig) -> dict[str, str]:
    """Choose the experts' implementation for float64, in which the grouped matrix product has no kernel."""
    return {"experts_implementation": "eager"} if is_mixture(config) else {}


def is_mixture(config: PreTrainedConfig) -> bool:
    """A built model's configuration also names how its experts are computed, whether it has any or not."""
    return any("experts" in name and isinstance(value, int) and value > 0 for name, value in vars(config).items())


def load_tokenizer(cfg: ModelConfig) -> Any:
    if not isinstance(cfg, HFModelConfig):
        return byte_tokenizer()
    tokenizer = _pretrained(AutoTokenizer, cfg, what="tokenizer")
    tokenizer.model_max_length = UNBOUNDED
    if cfg.chat_template is not None:
        _give_template(tokenizer, cfg.chat_template)
    return tokenizer


def _give_template(tokenizer: Any, template: str) -> None:
    """Let a template write conversations; one with a name also says which token ends an answer."""
    refuse_missing(template, tokenizer.get_vocab())
    tokenizer.chat_template = template_text(template)
    end = end_of(template)
    if end is not None and end != tokenizer.eos_token:
        tokenizer.add_special_tokens({"eos_token": end})
    if template in NAMED and tokenizer.eos_token is None:
        raise ModelError(
            f"model.chat_template={template}: an answer ends with the tokenizer's end-of-sequence token, and it has "
            f"none. Give the tokenizer one, or take another template."
        )


def end_with_template(model: PreTrainedModel, tokenizer: Any, cfg: ModelConfig) -> None:
    """Let a model stop where a template with a name ends an answer, also when others generate with what is exported."""
    named = isinstance(cfg, HFModelConfig) and end_of(cfg.chat_template) is not None
    if not named or tokenizer.eos_token_id is None or not model.can_generate() or model.generation_config is None:
        return
    eos = model.generation_config.eos_token_id
    others = eos if isinstance(eos, list) else [eos]
    ends = [tokenizer.eos_token_id, *(each for each in others if each not in (tokenizer.eos_token_id, None))]
    model.generation_config.eos_token_id = ends


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per byte, and three for beginning, end and padding. It can be exported."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<bos>", "<eos>", "<pad>"]
    vocabulary = {token: number for number, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", model_max_length=UNBOUNDED
    )


def _pretrained(factory: Any, cfg: HFModelConfig, **kwargs: Any) -> Any:
    """Load from what is prepared of the model, in its revision."""
    with watch.elsewhere():
        asked = prepared(cfg)
    assert isinstance(asked, HFModelConfig)
    revision = {} if asked.revision is None else {"revision": asked.revision}
    return _from_hub(factory, asked.path, asked.trust_remote_code, key=f"{cfg.group}.path", **revision, **kwargs)


def _from_hub(
    factory: Any, path: str, trust_remote_code: bool, *, what: str = "causal model", key: str, **kwargs: Any
) -> Any:
    name = str(Path(path).expanduser()) if path.startswith("~") else path
    disable_progress_bar()
    _log_printably()
    try:
        with watch.elsewhere():  # it may be fetched from the hub, or read from a slow disk
            return factory.from_pretrained(name, trust_remote_code=trust_remote_code, **kwargs)
    except UnpicklingError as error:  # torch's own message says how to run what is in it
        raise ModelError(
            f"{key}={path}: its weights are a pickle that holds more than tensors, and reading it could run code. Give "
            f"a model whose weights are safetensors."
        ) from error
    except (UserError, ImportError, MemoryError):
        raise
    except Exception as error:  # of a model that anybody may have made
        if not trust_remote_code and TRUST in str(error):
            group = key.rpartition(".")[0].replace("reference", "model")  # which has one key for both
            raise ModelError(
                f"{key}={path}: its {what} is Python code that comes with it. If you trust it, give "
                f"{group}.{TRUST}=true."
            ) from error
        reason = textwrap.shorten(str(error), 300, placeholder=" …")
        raise ModelError(
            f"{key}={path}: no {what} can be loaded ({type(error).__name__}: {reason}). Give a hub name, or a folder "
            f"to which transformers' save_pretrained wrote the model and its tokenizer."
        ) from error


@functools.cache
def _log_printably() -> None:
    """Let what transformers logs of a stranger's model move no cursor; its own colours stay."""

    def printing(record: logging.LogRecord) -> bool:
        parts = re.split(r"(\x1b\[[0-9;]*m)", record.getMessage())
        parts[::2] = map(printable_lines, parts[::2])
        record.msg, record.args = "".join(parts), ()
        return True

    transformers.logging.get_logger("transformers")  # has its handler from then on
    for handler in logging.getLogger("transformers").handlers:
        handler.addFilter(printing)


def _without_dropout(config: PreTrainedConfig) -> None:
    """Turn off random masks (dropout, a router's jitter, dropped layers): they would depend on the layout."""
    for name, value in vars(config).items():
        noisy = any(part in name for part in ("dropout", "pdrop", "jitter", "layerdrop", "drop_path"))
        if noisy and isinstance(value, float):
            setattr(config, name, 0.0)
