"""The door: from Hydra's DictConfig, or a run's config.yaml, to one typed object. No other module sees yaml."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from rlexp.base import plain_yaml
from rlexp.base.command import say
from rlexp.base.errors import ConfigError
from rlexp.base.files import write_text
from rlexp.config import precedence, resolvers, schema, sizes
from rlexp.config.adapter_folder import SAYS, with_folder_described
from rlexp.config.checks.across_fields import check
from rlexp.config.checks.rope import notes_on_rope, with_rope_settled
from rlexp.config.hardware import gpus_without_torch
from rlexp.config.options import COMMANDS, literals, refuse_wrong_option
from rlexp.config.paths import conf_dir
from rlexp.config.resolvers import ELASTIC, resolve_device
from rlexp.config.schema import KINDS, Config, Device, LossConfig, launcher_keys, with_values
from rlexp.config.schema.keys import GONE, about_unknown, all_keys
from rlexp.config.schema.loss_terms import compares
from rlexp.config.schema.value_kinds import check_kinds, with_names
from rlexp.config.trust import refuse_code, without_code

_AT_HOME = re.compile(r"""^(hydra\.(?:run|sweep)\.dir=['"]?)~(?=/|['"]?$)""")
_RING, _AUTO = re.compile(r"^(\+*parallel\.ring_size=)(.*)$"), re.compile(r"\bauto\b")
_OPEN = re.compile(
    r"(engine\.overrides|logger\.axes|reward\.terms|data\.(columns|sources|template_options)|hydra\.launcher\.(environment|additional_parameters))[.=]"
)

OF_CURVE = ("model", "data", "loss", "adapter", "reference", "optim", "rollout", "reward")
DERIVED = "rollout.minibatches"  # the one derived size among them: another run has its own
# keys that name rows or a model
OF_SOURCE = ("path", "eval_path", "subset", "split", "eval_split", "revision", "sources", "max_samples")
OF_OPTION = (*OF_SOURCE, "eval_size")  # another option of a group has its own
STORED = "the stored configuration"
OF_RLEXP = "Give a file that rlexp has written."
OF_HERE = ("data.cache", "data.workers")  # of the machine that the run was on
BY_DEFAULT = "the default"  # engine.chosen in conf/engine/auto.yaml


@functools.cache
def register() -> None:
    """Register schema and resolvers, once, before Hydra composes."""
    schema.register()
    launcher_keys.register()
    resolvers.register()


def compose_config(overrides: Sequence[str]) -> Config:
    """Return the configuration that `python -m rlexp OVERRIDES` runs, for programs and tests."""
    return from_hydra(composed(overrides))


def composed(overrides: Sequence[str]) -> DictConfig:
    """Compose as Hydra does; `from_hydra` makes the configuration of it."""
    register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=open_ended(overrides))


def composed_like(plain: Mapping[str, Any], overrides: Sequence[str]) -> DictConfig:
    """Compose from overrides, on the ground of another run's configuration (`to_plain`): of that come the groups of
    keys on which a curve depends, but for the keys that are given.

    Where another option of a group is given, the keys that both options have are kept, but those that name the source
    or hold out a part of it. Those that name the source are not kept either where other rows are given, and the whole
    reference where the loss compares with none. Code that the other run trusts must be named again.
    """
    register()
    for each in overrides:
        if each[:1] in ("~", "+") or each.startswith("hydra."):
            raise ConfigError(f"{each}: beside a run or checkpoint, give keys alone: key=value.")
    given = [each.partition("=")[0] for each in overrides]
    refuse_other_groups(plain)
    texts = literals(without_code(plain, given))  # what is stored is resolved already
    stored = OmegaConf.create(texts)
    known = {group: {leaf: value for leaf, value in texts[group].items() if f"{group}.{leaf}" not in (*GONE, *OF_HERE)}
             for group in OF_CURVE if texts.get(group)}  # fmt: skip
    data = known.get("data", {})
    options = [f"{group}={keys['name']}" for group, keys in known.items() if keys.get("name") and group not in given]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        asked = compose("config", overrides=[*options, *open_ended(overrides)])
        cfg = compose("config", overrides=[*options, *(each for each in overrides if not _is_leaf(each))])
    with_value = {key for key in given if OmegaConf.select(asked, key) is not None}
    if any(re.fullmatch(r"data\.(sources|(sources\..+\.)?eval_(path|split))", key) for key in with_value):
        for key in ("eval_size", "max_samples"):  # rows are held out by what is given
            data.pop(key, None)
    if with_value & {"data.path", "data.eval_path", "data.sources"}:
        known["data"] = {key: value for key, value in data.items() if key not in OF_SOURCE}
    adapter = known.get("adapter", {})
    if "adapter.path" in with_value or (adapter.get("path") and "adapter.path" not in given):
        known["adapter"] = {key: value for key, value in adapter.items() if key not in SAYS}  # its folder says them
    with open_dict(cfg):
        for key in ("seed", "train.batch_size", "train.precision"):
            if key not in given:
                OmegaConf.update(cfg, key, _settled(stored, key))
        for group, keys in known.items():
            option = cfg[group].get("name")
            same = getattr(option, "name", option) == keys.pop("name", None)  # a file has an Enum's name
            # a reference model is the same in memory and precomputed
            own = ("offload",) if group == "reference" else OF_OPTION
            for leaf, value in keys.items():
                if f"{group}.{leaf}" != DERIVED and (same or (leaf in cfg[group] and leaf not in own)):
                    OmegaConf.update(cfg, f"{group}.{leaf}", value, merge=False)
        for key in filter(_is_leaf, given):
            OmegaConf.update(cfg, key, _settled(asked, key), merge=False)
    refuse_code(cfg, given)
    if "reference" in known and not compares(cast(LossConfig, OmegaConf.to_object(cfg.loss))):
        return composed_like({**plain, "reference": None}, overrides)
    return cfg


def _settled(cfg: DictConfig, key: str) -> Any:
    """Return a key's value, to be put into another configuration as it is."""
    value = OmegaConf.select(cfg, key)
    return literals(OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value)


def _is_leaf(override: str) -> bool:
    """Return whether an override, or its key, names a key of a group, and not a group's option or a key at the top."""
    return "." in override.partition("=")[0]


def open_ended(overrides: Sequence[str]) -> list[str]:
    """Put ++ before keys of open mappings (`engine.overrides.KEY=VALUE`), as Hydra wants it, and the home folder in
    place of a ~ at the beginning of a run's folder: no shell expands it there, and Hydra would make a folder named ~.
    Each value of a typed option that an experiment would displace is put behind the last override.
    `parallel.ring_size=auto` becomes what `parallel=elastic` has: a number that follows from the ranks.

    Options for which Hydra would raise a traceback are refused here.
    """
    if overrides and overrides[0] in COMMANDS:
        raise ConfigError(f"{overrides[0]}: is a command of its own. Type python -m rlexp.{overrides[0]} …")
    for each in overrides:
        refuse_wrong_option(each)
    overrides = [_AT_HOME.sub(lambda match: f"{match[1]}{Path.home()}", each) for each in overrides]
    last = max(
        (place for place, each in enumerate(overrides, 1) if not each.startswith("-") and "=" in each), default=0
    )
    overrides[last:last] = displaced(overrides)  # Hydra takes overrides in one piece: flags may follow
    overrides = [
        _RING.sub(lambda match: match[1] + _AUTO.sub(f"${{{ELASTIC}:}}", match[2]), each) for each in overrides
    ]
    return [f"++{each}" if _OPEN.match(each) else each for each in overrides]


def displaced(overrides: Sequence[str]) -> list[str]:
    """Return as overrides what a typed option states, and an appended file says otherwise: what is typed wins."""
    conflicts = precedence.conflicts(overrides)
    for note, _ in conflicts:
        _tell_once(note)
    return [override for _, override in conflicts]


def from_hydra(cfg: DictConfig, *, here: bool = True, reads_rows: bool = True) -> Config:
    """Resolve, convert and check a composed configuration. With `here`, this machine runs it. A prediction reads no
    rows, so their files need not be there."""
    _refuse_unknown(cfg)
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ConfigError(f"{missing[0]}: has no value. Give it on the command line: {missing[0]}=VALUE.")
    typed = cast(Config, with_names(OmegaConf.to_object(cfg)))
    check_kinds(typed)
    # The reasons of choices that were not made: the run would report them.
    for key, chosen, auto in (
        ("engine.chosen", typed.engine.chosen, "engine=auto"),
        ("parallel.chosen", typed.parallel.chosen, "parallel.layout=auto"),
    ):
        if chosen not in (None, BY_DEFAULT):
            raise ConfigError(f"{key}={chosen}: rlexp sets it, with {auto}. Leave it out.")
    if here:
        typed = with_device_resolved(typed)
    check(typed, here=here, reads_rows=reads_rows)
    typed = with_rope_settled(with_folder_described(typed))
    for note in notes_on_rope(typed):
        _tell_once(note)
    return typed


def with_device_resolved(cfg: Config) -> Config:
    """Return a copy in which `launch.device=auto` is replaced by the device of this machine."""
    device = Device[resolve_device(cfg.launch.device.value)]
    if cfg.launch.device is Device.auto and gpus_without_torch():
        _tell_once(
            "launch.device=auto: runs on CPU. This machine has GPUs, and the installed torch was built without CUDA; "
            "for them install another, as on https://pytorch.org/get-started."
        )
    return with_values(cfg, "launch", device=device)


@functools.cache
def _tell_once(note: str) -> None:
    if not sizes.joined_rank():  # under torchrun every rank composes, and one tells
        say(note)


def _refuse_unknown(cfg: DictConfig) -> None:
    """Refuse keys that the schema does not have. Hydra lets `+key=value` add them, and they would do nothing."""
    keys = all_keys()
    for top in map(str, cfg):
        if top not in keys:
            raise ConfigError(about_unknown(top))
        node = cfg._get_node(top)
        if not isinstance(node, DictConfig):
            continue
        named = top in KINDS and not OmegaConf.is_missing(node, "name")
        if named and OmegaConf.get_type(node) is not KINDS[top].get(node.name):
            options = ", ".join(KINDS[top])
            raise ConfigError(f"{top}.name={node.name}: is set by choosing {top}=OPTION. Options: {options}.")
        for leaf in map(str, node):
            name = f"{top}.{leaf}"
            if name not in keys or (keys[name] and f"{top}={node.name}" not in keys[name]):
                raise ConfigError(about_unknown(name))


def from_file(path: Path) -> Config:
    """Read a file of `to_file`, by the same schema."""
    return from_plain(plain_yaml.load(path.read_text(encoding="utf-8")))


def from_plain(plain: Any) -> Config:
    """Return the typed object again, from the result of `to_plain`."""
    refuse_other_groups(plain, whole=True)
    plain = OmegaConf.create(literals(plain))
    for key in GONE:
        group, _, leaf = key.partition(".")
        plain[group].pop(leaf, None)
    base = OmegaConf.structured(Config)
    for group, kinds in KINDS.items():
        base[group] = OmegaConf.structured(kinds[plain[group].name])
    try:
        return cast(Config, OmegaConf.to_object(OmegaConf.merge(base, plain)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{STORED}: {' '.join(str(error).split())}. {OF_RLEXP}") from None


def refuse_other_groups(plain: Any, *, whole: bool = False) -> None:
    """Refuse a stored configuration whose groups are none: the names of their options are given to Hydra. An older one
    may lack some, of which a `whole` one has those with kinds."""
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{STORED}: is no mapping. {OF_RLEXP}")
    for group in dict.fromkeys((*KINDS, *OF_CURVE)):
        keys = plain.get(group)
        if keys is None and not (whole and group in KINDS):
            continue
        if not isinstance(keys, Mapping):
            raise ConfigError(f"{STORED}: has no keys of {group}. {OF_RLEXP}")
        name = keys.get("name")
        known = name is None if group not in KINDS else isinstance(name, str) and name in KINDS[group]
        if odd := [leaf for leaf in keys if not str(leaf).isidentifier()]:  # OmegaConf would read it as a path
            raise ConfigError(f"{STORED}: {group}.{odd[0]} is no key. {OF_RLEXP}")
        if not known and (group in KINDS or not re.fullmatch(r"[a-z]\w*", str(name))):
            raise ConfigError(f"{STORED}: {group}.name={name} is no option of {group}. {OF_RLEXP}")


def to_file(cfg: Config, path: Path) -> None:
    write_text(path, OmegaConf.to_yaml(OmegaConf.structured(literals(cfg)), resolve=True))


def to_plain(cfg: Any) -> dict[str, Any]:
    """Return nested dicts of plain values (enums by name), for sinks and files."""
    container = OmegaConf.to_container(OmegaConf.structured(literals(cfg)), resolve=True, enum_to_str=True)
    return cast(dict[str, Any], container)
