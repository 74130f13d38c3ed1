"""How much is computed at once, a number of samples or of tokens; and whether what sequences share is computed once."""

from __future__ import annotations

from dataclasses import dataclass

from rlexp.base.errors import ConfigError
from rlexp.config.checks.rules import Check, refuse_broken
from rlexp.config.schema import AUTO, BackendName, Config, Device
from rlexp.config.schema.row_kinds import SIDES

# Tokens of a rank that keep its device busy, where nobody says how many: with fewer, what a forward pass costs apart
# from its tokens shows in the time; with more, only memory grows.
ON_CPU, ON_GPU = 4096, 16384
UNPACKED = 8  # samples that are scored at once, each padded to the longest
BUDGET = "train.max_tokens_per_micro_batch"


@dataclass(frozen=True)
class AtOnce:
    """The most that a micro-batch holds. One of the two is None."""

    samples: int | None = None
    tokens: int | None = None  # of each rank


def at_once(cfg: Config) -> AtOnce:
    """Return how much a replica trains on at once.

    A number of tokens that is not said is enough for the longest sample, which needs that memory anyway; and no more
    than a replica's share of the longest samples.
    """
    size, given, longest = cfg.train.micro_batch_size, cfg.train.max_tokens_per_micro_batch, longest_sample(cfg)
    if isinstance(size, int) or not cfg.data.packing:  # without it every sequence is as long as the longest
        return AtOnce(samples=size if isinstance(size, int) else 1)
    most = min(max(usual_tokens(cfg), longest), _of_replica(cfg) * longest)
    return AtOnce(tokens=most if given is None else given)


def scoring_at_once(cfg: Config) -> AtOnce:
    """Return how much of what it drew a ring scores at once."""
    size = cfg.rollout.score_batch_size
    if size is not None or not cfg.data.packing:
        return AtOnce(samples=size or UNPACKED)
    given = cfg.train.max_tokens_per_micro_batch
    return AtOnce(tokens=max(usual_tokens(cfg), longest_sample(cfg)) if given is None else given)


def usual_tokens(cfg: Config) -> int:
    return ON_CPU if cfg.launch.device is Device.cpu else ON_GPU


def longest_sample(cfg: Config) -> int:
    """Return the tokens that a rank holds of the longest sample: of all its sequences, where they share nothing."""
    return -(-_sequences(cfg) * cfg.data.max_length // cfg.parallel.ring_size)


def _sequences(cfg: Config) -> int:
    return 1 if cfg.loss.draws else len(SIDES[cfg.loss.rows])


# ---- the longest samples ----


def micro_batches(cfg: Config) -> int:
    """Return the micro-batches of a replica in a step of the longest samples."""
    if cfg.train.grad_acc is not None:
        return cfg.train.grad_acc
    return -(-_of_replica(cfg) // len(fullest_micro_batch(cfg)))


def fullest_micro_batch(cfg: Config) -> list[int]:
    """Return the samples of a micro-batch than which none holds more, each by the length of its sequences."""
    return longest_lengths(cfg, at_once(cfg))


def tokens_of_ring(cfg: Config) -> int | None:
    """Return the tokens that a ring holds of a micro-batch; None where samples are counted."""
    tokens = at_once(cfg).tokens
    return None if tokens is None else tokens * cfg.parallel.ring_size


def longest_lengths(cfg: Config, most: AtOnce) -> list[int]:
    """Return the samples of a micro-batch of the longest: the last one fills it, if it can be long enough."""
    longest, sequences = cfg.data.max_length, _sequences(cfg)
    least = cfg.rollout.max_new_tokens if cfg.loss.draws else 1
    if most.samples is not None:
        return [longest] * most.samples
    assert most.tokens is not None
    whole, rest = divmod(most.tokens * cfg.parallel.ring_size, sequences * longest)
    return [longest] * whole + [rest // sequences] * (not whole or rest // sequences > least)


def _of_replica(cfg: Config) -> int:
    """Return the samples of a replica in a train batch, on one that has most if all are alike."""
    return -(-cfg.train.batch_size // cfg.parallel.dp_size)


# ---- words ----


def batch_in_words(cfg: Config) -> str:
    """Say how a train batch is shared out."""
    replicas = f"{cfg.parallel.dp_size} replica{'s' * (cfg.parallel.dp_size > 1)}"
    if (steps := cfg.train.grad_acc) is None:
        return f"batch {cfg.train.batch_size} over {replicas}, in {size_in_words(cfg)}"
    return (
        f"batch {cfg.train.batch_size} = {replicas} × micro-batch {cfg.train.micro_batch_size} × {steps} accumulation "
        f"step{'s' * (steps > 1)}"
    )


def size_in_words(cfg: Config) -> str:
    """Say how much a micro-batch holds."""
    most = at_once(cfg)
    if most.tokens is None:
        return f"micro-batches of {most.samples}"
    return f"micro-batches of up to {most.tokens:,} tokens{' a rank' * (cfg.parallel.ring_size > 1)}"


RULES = (
    Check(BUDGET, lambda cfg: isinstance(cfg.train.micro_batch_size, int),
          "fills micro-batches by tokens, and train.micro_batch_size={train.micro_batch_size} by samples. Leave one of "
          "them out."),
    Check(BUDGET, lambda cfg: not cfg.data.packing,
          "data.packing=false pads every sequence to the longest, so samples are counted. Use data.packing=true, or "
          "train.micro_batch_size=NUMBER."),
    Check(BUDGET, lambda cfg: cfg.loss.draws and cfg.train.max_tokens_per_micro_batch < longest_sample(cfg),
          "must hold one sample at least, and data.max_length={data.max_length} on {ring} may make it {longest} tokens "
          f"a rank. Use {BUDGET}={{longest}} or more, or leave it out."),
)  # fmt: skip


def check_micro_batches(cfg: Config) -> None:
    """Refuse a size that is none, and a number of tokens that cannot be."""
    size, ring = cfg.train.micro_batch_size, cfg.parallel.ring_size
    if isinstance(size, str) and size != AUTO:
        raise ConfigError(
            f"train.micro_batch_size={size!r}: must be a whole number of samples, or auto, which fills "
            f"micro-batches by tokens. For example: train.micro_batch_size=1."
        )
    if cfg.train.max_tokens_per_micro_batch is not None:
        where = f"a ring of {ring}" if ring > 1 else "one rank"
        refuse_broken(RULES, cfg, ring=where, longest=longest_sample(cfg))


OF_SHARING = (
    Check("data.share_prefix", lambda cfg: not cfg.data.packing,
          "data.packing=false pads every sequence to the longest, as a batch whose sequences are all apart. Use "
          "data.packing=true, or data.share_prefix=false."),
    Check("data.share_prefix", lambda cfg: cfg.parallel.backend is not BackendName.native,
          "parallel.backend={parallel.backend.value} attends inside a library that knows single sequences only. Use "
          "parallel.backend=native, or data.share_prefix=false."),
)  # fmt: skip


def shares(cfg: Config) -> bool:
    """Say whether a run's sequences share what they can."""
    return cfg.data.share_prefix is not False and not any(rule.broken(cfg) for rule in OF_SHARING)
