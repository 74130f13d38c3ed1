"""Fit the verification into memory, by leaving out the model's last layers if need be: as few as possible.

docs/verify_inside.md says what is counted. Width and vocabulary never change.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlexp.base.errors import ModelError
from rlexp.base.host_memory import host_memory
from rlexp.config.checks.layout import choose, heads_in, heads_of
from rlexp.config.checks.micro_batches import at_once
from rlexp.config.checks.reference import model_of_reference
from rlexp.config.schema import Config, Device, HFModelConfig, LoraConfig, ModelConfig, TinyModelConfig
from rlexp.config.schema.losses import CriticName, PPOConfig
from rlexp.config.schema.reward_terms import reward_terms
from rlexp.config.schema.rollouts import ModelRewardConfig
from rlexp.launch.joining import RankSpec
from rlexp.training.dataset.sampler import total_steps
from rlexp.training.dealer.deal import unit_of
from rlexp.training.dealer.of_run import dealer_of
from rlexp.training.model.loading import load_config, load_tokenizer, quiet, random_reward_model
from rlexp.training.model.prepared import prepared
from rlexp.training.model.small import first_layers
from rlexp.training.train.examples import read_examples, sampler_of
from rlexp.training.types import Example
from rlexp.training.world.groups import ALONE, World
from rlexp.verify.jobs import SHARE, VerifyPlan, gigabytes

PLAIN = 1  # rank beside those of the run, in the plain run or in what is computed alone
# float64 numbers of a rank per parameter: weight, reference model, gradient, two moments and two temporary copies
NUMBERS = 7
OF_CRITIC = 6  # and of a critic that has its own trunk: no reference stands beside it
# Recordings whose gradients and weights are on disk at once: the run's, its plain run's, and what is computed alone; of
# drawn samples, perhaps alone from both.
FILES, FILES_OF_DRAWN = 3, 4
LEAST = 2  # layers
# float64 numbers per token and layer: 4,300 were measured with a width of 64 and an inner width of 172.
PER_WIDTH, PER_INNER = 40, 10
OF_CACHE = 2  # of these numbers by width: a key and a value, while answers are drawn


def plan_rank(spec: RankSpec, cfg: Config, steps: int, folder: Path) -> VerifyPlan:  # noqa: ARG001
    free = int(torch.cuda.mem_get_info()[0]) if cfg.launch.device is Device.cuda else free_on_host()
    return plan(cfg, steps, folder, free=free)


def free_on_host() -> int:
    """The memory that is available here, in whichever groups of processes this one is."""
    memory = host_memory()
    assert memory is not None  # Linux says it
    return memory.available


def _prepared(cfg: Config) -> Config:
    """Let the model, and the one in reference.path, be ordinary folders or hub names, with the policy's new tokens."""
    model, reference = prepared(cfg.model), cfg.reference
    if reference.path is not None:
        other = prepared(model_of_reference(cfg))
        assert isinstance(other, HFModelConfig)
        reference = dataclasses.replace(reference, path=other.path, revision=other.revision)
    return dataclasses.replace(cfg, model=model, reference=reference)


def plan(cfg: Config, steps: int, folder: Path, *, free: int) -> VerifyPlan:
    """Read the data as the run will, so that its errors come first; then choose the number of layers."""
    cfg = _prepared(cfg)
    examples = read_examples(cfg, load_tokenizer(cfg.model), World(0, 1, ALONE))
    train = examples.train
    sampler = sampler_of(cfg, cfg.loss.rows, len(train), examples.mixture)
    each = cfg.rollout.epochs * cfg.rollout.minibatches if cfg.loss.draws else 1  # steps on a batch of the sampler
    steps = min(steps, total_steps(sampler.steps_per_epoch * each, cfg.train.max_steps, cfg.train.epochs))
    batches = [[train[index] for index in batch.indices] for batch in sampler.batches(1, -(-steps // each))]
    # One whole batch and a short one show how held-out values are added up.
    most = 0 if cfg.train.eval_every is None else cfg.train.batch_size + -(-cfg.train.batch_size // 2)
    held_out = examples.held_out[:most]
    longest = max(_length_of(cfg, example) for example in chain(*batches, held_out))
    config = load_config(cfg.model, cfg.data.max_length)
    full = getattr(config, "num_hidden_layers", None)
    if not isinstance(full, int):
        raise ModelError(f"{type(config).__name__}: does not say how many layers it has, so it cannot be verified.")
    of_parameter, of_layer, of_others = _bytes_needed(cfg, config, _tokens_at_once(cfg, batches))
    for layers in range(full, min(full, LEAST) - 1, -1):
        parameters = _parameters(cfg, first_layers(config, layers))
        need = of_parameter * parameters + of_layer * layers + of_others
        if need <= SHARE * free:
            break
    else:
        ranks = cfg.parallel.world_size
        other = "verify the layout with model=tiny" if isinstance(cfg.model, HFModelConfig) else "a smaller model"
        raise ModelError(
            f"model={cfg.model.name}: {layers} of its layers with its vocabulary ({parameters:,} parameters) need "
            f"{gigabytes(need)} to be verified in float64 on {ranks} rank{'s' * (ranks > 1)} and the reference, but "
            f"only {SHARE:g} of the {gigabytes(free)} that are free may be used. Use fewer ranks (launch.nproc), a "
            f"smaller data.max_length or train.micro_batch_size, a machine with more memory, or {other}."
        )
    trained = parameters
    if isinstance(cfg.adapter, LoraConfig):
        trained = min(parameters, _of_adapter(cfg.adapter, _on_meta(cfg, first_layers(config, layers))))
    _refuse_small_disk(cfg, parameters, trained, steps, folder)
    choice = choose(cfg, heads_in(config.to_dict()))
    model = _cut(cfg.model, layers, folder) if layers < full else cfg.model
    return VerifyPlan(steps, len(held_out), layers, full, parameters, longest, need, free, choice, model, cfg.reference)


def _length_of(cfg: Config, example: Example) -> int:
    """The tokens of an example's longest sequence; of a prompt with the longest answer that may be drawn to it."""
    return example.longest() + (0 if example.answers else cfg.rollout.max_new_tokens)


def _tokens_at_once(cfg: Config, batches: Sequence[Sequence[Example]]) -> int:
    """Tokens at once: the largest micro-batch of every replica, and the reference's example."""
    if cfg.loss.draws:
        longest = max(_length_of(cfg, example) for example in chain(*batches))
        most = at_once(cfg)
        trained = (most.samples or cfg.train.batch_size) * (cfg.parallel.dp_size + 1)
        if most.tokens is not None:
            trained = min(trained, -(-most.tokens * cfg.parallel.world_size // longest) + 1)
        cached = cfg.rollout.micro_batch_size * (cfg.parallel.world_size + PLAIN + 2 * cfg.rollout.sampling_ranks)
        return longest * max(trained, -(-cached * OF_CACHE // PER_WIDTH))
    dealer = dealer_of(cfg, heads_of(cfg.model), cfg.parallel.dp_size)
    replicas = [sizes for batch in batches for sizes in dealer.deal([*map(unit_of, batch)]).sizes]
    return max(size.tokens for size in chain(*replicas)) * (cfg.parallel.dp_size + 1)


def _bytes_needed(cfg: Config, config: Any, tokens: int) -> tuple[int, int, int]:
    """Return the bytes for each parameter, for each layer, and for models that keep all layers. On GPUs each rank has a
    device of its own, or shares it with those that launch.ranks_per_gpu says."""
    ranks = cfg.parallel.world_size + cfg.rollout.sampling_ranks  # a rank that only samples holds less
    beside = PLAIN + cfg.rollout.sampling_ranks
    holders = cfg.launch.ranks_per_gpu + PLAIN if cfg.launch.device is Device.cuda else ranks + beside
    whole = 0
    for term in reward_terms(cfg.reward) if cfg.loss.draws else ():
        if isinstance(term.cfg, ModelRewardConfig):
            with torch.device("meta"):
                whole += random_reward_model(term.cfg, term.key, cfg.data.max_length).num_parameters()
    if cfg.reference.path is not None and cfg.loss.compares:
        whole += _parameters(cfg, load_config(model_of_reference(cfg), cfg.data.max_length))
    text = config.get_text_config()
    inner = int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    numbers = NUMBERS + (OF_CRITIC if _own_critic(cfg) else 0)
    return (
        8 * holders * numbers,
        8 * tokens * (PER_WIDTH * int(text.hidden_size) + PER_INNER * inner),
        8 * holders * whole,
    )


def _on_meta(cfg: Config, config: Any) -> Any:
    trusted = isinstance(cfg.model, HFModelConfig) and cfg.model.trust_remote_code
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trusted)


def _parameters(cfg: Config, config: Any) -> int:
    return int(_on_meta(cfg, config).num_parameters())


def _of_adapter(adapter: LoraConfig, model: Any) -> int:
    """The trained parameters of an adapter, at most: of all linear layers, and those that are trained whole."""
    pairs = sum(adapter.rank * (each.in_features + each.out_features)
                for each in model.modules() if isinstance(each, torch.nn.Linear))  # fmt: skip
    return pairs + sum(p.numel() for name, p in model.named_parameters() if any(also in name for also in adapter.also))


def _own_critic(cfg: Config) -> bool:
    return isinstance(cfg.loss, PPOConfig) and cfg.loss.critic is CriticName.own


def _refuse_small_disk(cfg: Config, parameters: int, trained: int, steps: int, folder: Path) -> None:
    files = (FILES_OF_DRAWN if cfg.loss.draws else FILES) * (2 if _own_critic(cfg) else 1)
    need, free = 8 * files * (parameters + 2 * steps * trained), shutil.disk_usage(folder).free
    if need > SHARE * free:
        raise ModelError(
            f"TMPDIR={tempfile.gettempdir()}: gradients and weights of {steps} steps take {gigabytes(need)} there, but "
            f"only {SHARE:g} of the {gigabytes(free)} that are free may be used. Set TMPDIR to a "
            "larger disk, or use fewer steps (--steps 1)."
        )


def _cut(model: ModelConfig, layers: int, folder: Path) -> ModelConfig:
    """Leave out the last layers. Of a pretrained model, write the first ones with their real weights, and its
    tokenizer."""
    if isinstance(model, TinyModelConfig):
        return dataclasses.replace(model, layers=layers)
    assert isinstance(model, HFModelConfig)
    place = folder / "model"
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code, "revision": model.revision or "main"}
    with quiet():  # no warning about the unused weights of the other layers
        config = first_layers(AutoConfig.from_pretrained(model.path, **options), layers)
        cut = AutoModelForCausalLM.from_pretrained(model.path, config=config, dtype=torch.float32, **options)
        cut.save_pretrained(place)
        AutoTokenizer.from_pretrained(model.path, **options).save_pretrained(place)
    return dataclasses.replace(model, path=str(place), revision=None)
