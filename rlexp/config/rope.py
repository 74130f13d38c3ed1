"""`model.rope`: more positions than a model was made for, by YaRN (arXiv 2309.00071).

What the key says, what a model's config.json says of its positions, and whether the two go together. transformers
computes the angles; `training/model/rope.py` puts them into its configuration.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlexp.base.errors import ConfigError
from rlexp.config.checks.layout import number_in, of_text

YARN = "yarn"
# What YaRN keeps of a model's rope_parameters. `attention_factor` follows from the factor.
KEPT = ("rope_theta", "partial_rotary_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
ORIGINAL = "original_max_position_embeddings"
OF_YARN = {*KEPT, "rope_type", "type", "factor", ORIGINAL, "attention_factor", "finetuned"}
# One of these is in each config.json with rotary positions, in the files of every version of transformers.
OF_ROTARY = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "rotary_pct", "partial_rotary_factor")
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")
SEVERAL = "several kinds"
TINY = 2048  # positions of model=tiny where model.rope extends them; else it has as many as data.max_length
STRETCHED = ("linear", "dynamic")  # kinds that are made for `factor` times the positions


@dataclass(frozen=True)
class Yarn:
    """What `model.rope` says: yarn, yarn:FACTOR or yarn:FACTOR:POSITIONS."""

    factor: float | None = None  # None: it follows from data.max_length
    native: int | None = None  # the positions that are extended; None: those of the model

    def __str__(self) -> str:
        """Return it as it is typed."""
        factor = self.factor if self.factor is None or self.factor % 1 else int(self.factor)
        return ":".join(str(each) for each in (YARN, factor, self.native) if each is not None)


@dataclass(frozen=True)
class Positions:
    """What a model says of its positions."""

    kind: str | None  # its rope_type; None: it has no rotary positions
    native: int | None  # positions that it had before any extension; None: it does not say
    reach: int | None  # positions that it is made for as it is
    rope: Mapping[str, Any]  # its rope_parameters


# ---- what is given ----


def parsed(rope: str | None) -> Yarn | None:
    """Read the key; refuse what it cannot be."""
    if rope is None:
        return None
    name, *rest = rope.split(":")
    if name != YARN or len(rest) > 2:
        raise ConfigError(
            f"model.rope={rope}: must be yarn, yarn:FACTOR or yarn:FACTOR:POSITIONS, or null. For example: "
            f"model.rope=yarn:4."
        )
    factor, native = _number(rest[0]) if rest else None, _number(rest[1]) if rest[1:] else None
    if rest and (factor is None or not 1 < factor < math.inf):
        raise ConfigError(
            f"model.rope={rope}: the factor must be a number greater than 1: so many times the model's positions. "
            f"For example: model.rope=yarn:4; with model.rope=yarn it follows from data.max_length."
        )
    if rest[1:] and (native is None or native < 1 or native % 1):
        raise ConfigError(
            f"model.rope={rope}: the positions must be a whole number, at least 1: those that the factor extends. For "
            f"example: model.rope={YARN}:{rest[0]}:32768; with model.rope={YARN}:{rest[0]} they are the model's."
        )
    return Yarn(factor, None if native is None else int(native))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def positions_in(described: Mapping[str, Any]) -> Positions:
    """Read a model's config.json, of any version of transformers, or its configuration as a mapping."""
    fields = of_text(described)
    most = number_in(fields, *LENGTHS) or None
    rope = next((each for each in map(fields.get, OF_ROTARY[:2]) if isinstance(each, dict) and each), {})
    if not any(name in fields for name in OF_ROTARY):
        return Positions(None, most, most, {})
    if "rope_local_base_freq" in fields or any(isinstance(each, dict) for each in rope.values()):
        return Positions(SEVERAL, most, most, rope)
    kind, factor = rope.get("rope_type") or rope.get("type") or "default", rope.get("factor")
    kind = str(kind) if set(rope) <= OF_YARN or kind not in ("default", YARN) else SEVERAL
    if kind == YARN:
        # Phi-3 says it outside of rope_parameters, which transformers takes first
        own = number_in(fields, ORIGINAL) or number_in(rope, ORIGINAL) or most
        scaled = int(own * factor) if own is not None and isinstance(factor, int | float) else 0
        return Positions(kind, own, max(scaled, most or 0) or None, rope)
    if kind in STRETCHED and most is not None and isinstance(factor, int | float):
        return Positions(kind, most, int(most * factor), rope)
    return Positions(kind, most, most, rope)


# ---- what the two come to ----


def settled(yarn: Yarn, positions: Positions | None, max_length: int, of: str) -> Yarn:
    """Return it with its factor; refuse a model that YaRN cannot extend. `of` names the model's key with its value.

    `positions` is None where config.json is not known before ranks load the model.
    """
    if positions is not None:
        refuse_unlike(yarn, positions, of)
    if yarn.factor is not None:
        return yarn
    native = None if positions is None else positions.native
    if native is None:
        raise ConfigError(
            f"model.rope=yarn: the factor follows from the model's number of positions, which {of} does not say before "
            f"ranks load it (a hub model says it once its config.json is on this machine). Give the factor: "
            f"model.rope=yarn:4."
        )
    if max_length <= native:
        raise ConfigError(
            f"model.rope=yarn: data.max_length={max_length} is within the {native} positions of {of}, so there is "
            f"nothing to extend. Leave model.rope out, or name a factor: model.rope=yarn:2."
        )
    return Yarn(float(enough(native, max_length)))


def refuse_unlike(yarn: Yarn, positions: Positions, of: str) -> None:
    """Refuse a model whose positions YaRN cannot extend."""
    kind, key = positions.kind, f"model.rope={yarn}"
    if kind is None:
        why = ("has no rotary positions, which YaRN stretches (its config.json has neither rope_parameters nor "
               "rope_theta). Leave model.rope out.")  # fmt: skip
    elif kind == SEVERAL:
        why = ("has rotary positions of several kinds, by layer or by axis, and one factor is not for all of them. "
               "Leave model.rope out; or write YaRN into the rope_parameters of its config.json.")  # fmt: skip
    elif kind not in ("default", YARN):
        why = (f"is extended already, by rope_type={kind}, and its weights were trained with those angles. YaRN would "
               "replace them. Leave model.rope out, or take a model before it was extended.")  # fmt: skip
    elif not _follows(positions.rope):
        why = (f"has an attention_factor of its own (attention_factor={positions.rope['attention_factor']}), which "
               "does not follow from its factor. Take it out of the rope_parameters of its config.json, or leave "
               "model.rope out.")  # fmt: skip
    elif yarn.native is not None and positions.reach is not None and yarn.native > positions.reach:
        why = (f"has {positions.reach} positions, and {yarn.native} are to be extended. Give "
               f"{Yarn(yarn.factor, positions.native)}, or at most {positions.reach} positions.")  # fmt: skip
    else:
        return
    raise ConfigError(f"{key}: {of} {why}")


def _follows(rope: Mapping[str, Any]) -> bool:
    """Say whether a model's attention_factor is the one that its factor has by the paper, so that another follows."""
    own, factor = rope.get("attention_factor"), rope.get("factor")
    return own is None or (
        isinstance(factor, int | float) and factor >= 1 and math.isclose(own, 0.1 * math.log(factor) + 1, rel_tol=1e-3)
    )


def extended(yarn: Yarn, positions: Positions) -> tuple[dict[str, Any], int]:
    """Return rope_parameters, and the number of positions that they make."""
    native = yarn.native or positions.native
    assert native is not None
    assert yarn.factor is not None
    kept = {name: value for name, value in positions.rope.items() if name in KEPT and value is not None}
    named = {"rope_type": YARN, "factor": yarn.factor, ORIGINAL: native}
    return kept | named, math.ceil(native * yarn.factor)


def enough(native: int, max_length: int) -> int:
    """Return the least whole factor that reaches data.max_length."""
    return -(-max_length // native)


def beyond(yarn: Yarn | None, positions: Positions, max_length: int, of: str) -> str | None:
    """Warn of a data.max_length beyond the model's positions, with what would help; None if it is within them."""
    if yarn is not None:
        positions = dataclasses.replace(positions, kind=YARN, native=yarn.native or positions.native)
    native, reach = positions.native, positions.reach
    if yarn is not None and native is not None:
        assert yarn.factor is not None
        reach = math.ceil(native * yarn.factor)
    if native is None or reach is None or max_length <= reach:
        return None
    made_for = f"model.rope={yarn} gives {of}" if yarn is not None else f"{of} is made for"
    problem = f"data.max_length={max_length}: is more than the {reach} positions that {made_for}."
    if positions.kind in ("default", YARN) and _follows(positions.rope):
        own = None if yarn is None else yarn.native
        more = Yarn(float(enough(native, max_length)), own)
        return f"{problem} Use model.rope={more}, which stretches them by YaRN, or data.max_length={reach}."
    why = {None: "They are not rotary", SEVERAL: "They are of several kinds"}
    reason = why.get(positions.kind, f"They are extended by {positions.kind} already")
    return f"{problem} {reason}, so YaRN (model.rope) cannot make more. Use data.max_length={reach}, or another model."
