"""The keys that a curve depends on. All other keys may change when a run is resumed.

Free to change: ring, replicas, micro-batch, packing, engine, precision, memory, and where and how often things are
written. Not free: samples and their order, the loss, the optimizer, the model. A file is identified by its contents, so
it may move.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlexp.base.errors import CheckpointError, ConfigError
from rlexp.base.file_hashes import contents_of, files_in, files_of
from rlexp.config.adapter_folder import SAYS
from rlexp.config.chat_templates import contents_of_template
from rlexp.config.content_ids import of_file, of_model
from rlexp.config.load import to_plain
from rlexp.config.schema import Config
from rlexp.config.schema.data import RowsDataConfig
from rlexp.config.schema.data_sources import sources_of
from rlexp.config.schema.keys import suggestion
from rlexp.config.schema.loss_terms import OF_THE_SUM, loss_terms
from rlexp.config.schema.losses import MPOConfig
from rlexp.config.schema.reward_terms import reward_terms

GROUPS = ("data", "loss", "optim", "model", "adapter", "reference")
# keys that runs of older versions have not written down, with what they meant
LATER = {"data.unpair": False, "adapter.name": "none", "optim.min_lr_ratio": 0.0}
ENDING = ("linear", "cosine")  # values of optim.decay that fall until a run's end
OF_SAMPLES = ("rollout", "reward")  # these too, if the run draws its own samples
FREE = (
    *("data.packing", "data.share_prefix", "data.cache", "data.workers", "model.trust_remote_code", "model.fused"),
    "model.suggested_lr",  # of older versions
    *("rollout.micro_batch_size", "rollout.micro_batch_tokens", "rollout.score_batch_size", "rollout.sampling_ranks"),
    *("reference.name", "reference.offload", "adapter.dropout"),
    *("rollout.show", "rollout.show_every", "rollout.vllm_memory", "rollout.vllm_sleep"),
    *("reward.timeout_seconds", "reward.workers"),
)
OF_FOLDER = tuple(f"adapter.{key}" for key in SAYS)  # free where adapter.path names a folder


def identity(cfg: Config) -> dict[str, Any]:
    """Return the keys with their values, flat (`data.max_length: 2048`). Reads all data and samples the weights."""
    keys = curve_keys(cfg)
    for key, value in keys.items():
        if re.fullmatch(r"data\.(sources\..*\.)?(eval_)?path", key) and value is not None:
            keys[key] = {"path": str(value), "contents": _rows(str(value))}
        elif key == "model.chat_template" and value is not None:
            keys[key] = {"path": str(value), "contents": contents_of_template(str(value))}
        elif re.fullmatch(r"(model|adapter|reference|reward|reward\.terms\..*)\.path", key) and value is not None:
            keys[key] = {"path": str(value), "contents": of_model(Path(value).expanduser())}
    return keys


def curve_keys(cfg: Config) -> dict[str, Any]:
    """Return the same, but with files by their names: nothing is read. Terms and sources have all their keys, given or
    not."""
    plain = to_plain(cfg)
    keys: dict[str, Any] = {"seed": cfg.seed, "train.batch_size": cfg.train.batch_size}
    for group in (*GROUPS, *(OF_SAMPLES if cfg.loss.draws else ())):
        keys |= {f"{group}.{key}": value for key, value in plain[group].items() if f"{group}.{key}" not in FREE}
    if keys.get("adapter.path") is not None:  # the folder decides them
        keys = {key: value for key, value in keys.items() if key not in OF_FOLDER}
    if isinstance(cfg.loss, MPOConfig):
        del keys["loss.terms"]  # the order of the terms counts for none but the metrics
        for term in loss_terms(cfg.loss):
            own = {"weight": term.weight} | to_plain(term.cfg)
            keys |= {f"loss.terms.{term.name}.{leaf}": own[leaf] for leaf in own if leaf not in ("name", *OF_THE_SUM)}
    if keys.pop("reward.terms", None):  # as if each term were a reward of its own
        for each in reward_terms(cfg.reward):
            own = to_plain(each.cfg)
            keys |= {f"{each.key}.kind": own.pop("name"), f"{each.key}.weight": each.weight}
            keys |= {f"{each.key}.{leaf}": value for leaf, value in own.items() if f"reward.{leaf}" not in FREE}
    if keys.pop("data.sources", None):
        assert isinstance(cfg.data, RowsDataConfig)
        for source in sources_of(cfg.data):
            keys |= {f"{source.key}.{leaf}": value for leaf, value in vars(source.cfg).items()}
    return keys


def depends_on_length(keys: Mapping[str, Any]) -> bool:
    """Return whether a curve depends on how many steps are planned, by its keys."""
    return keys.get("optim.decay") in ENDING or bool(keys.get("optim.warmup_ratio"))


def of_length(keys: Mapping[str, Any], steps: int | None, warm_up: int | None) -> dict[str, int]:
    """Return what of a run's length its curve depends on: where the learning rate ends, and a warm-up by its share."""
    ends = {"steps until which the learning rate falls": steps} if keys.get("optim.decay") in ENDING else {}
    warms = {"steps of the warm-up": warm_up} if keys.get("optim.warmup_ratio") else {}
    return {name: count for name, count in (ends | warms).items() if count is not None}


def _rows(path: str) -> str:
    """Hash files of rows; of a folder, all its files. A hub name stands for itself."""
    folder = Path(path).expanduser()
    files = files_in(folder) if folder.is_dir() else files_of(path)
    if len(files) <= 1:
        return of_file(files[0]) if files else path
    return contents_of(files)[:16]


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield each key that differs, with both values as text: first the names of options, with which keys differ."""
    folder = any(keys.get("adapter.path") is not None for keys in (was, now))
    free = {*FREE, *(OF_FOLDER if folder else ())}
    known = {*was, *now} - free  # an older version may have written one down that is free now
    for key in sorted(known, key=lambda key: (not key.endswith(".name"), key)):
        one, other = (keys.get(key, LATER.get(key)) for keys in (was, now))
        if isinstance(one, dict) and isinstance(other, dict) and "contents" in one and "contents" in other:
            if one["contents"] != other["contents"]:
                yield key, f"{one['path']} ({one['contents']})", f"{other['path']} ({other['contents']})"
        elif one != other:
            yield key, str(one), str(other)


def refuse_changes(where: Path, was: Mapping[str, Any], now: Mapping[str, Any], force: Sequence[str]) -> list[str]:
    """Raise for a change that is not forced. Return what the forced changes are."""
    forced = []
    for key, old, new in changes(was, now):
        if key in force or key.partition(".")[0] in force:
            forced.append(f"{key} was {old}, and is {new}")
            continue
        raise CheckpointError(
            f"{key}={new}: the run in {where} was started with {old}, and its curve would change. Give {key} its "
            f"old value, or start a new run in another hydra.run.dir, or say resume.force=[{key}]."
        )
    return forced


def check_force(force: Sequence[str], now: Mapping[str, Any]) -> None:
    for key in force:
        if key not in now and key not in (*GROUPS, *OF_SAMPLES):
            raise ConfigError(
                f"resume.force=[{key}]: no curve depends on this key, so it may change without force. Leave it out."
                f"{suggestion(key, [*now, *GROUPS, *OF_SAMPLES])}"
            )
