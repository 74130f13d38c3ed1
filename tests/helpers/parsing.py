"""Do once in a process what composing does anew for every configuration: a test may compose many, all of the same
files. It takes a third of the time."""

from __future__ import annotations

import functools
from typing import Any

import yaml
from hydra import version
from hydra._internal import defaults_list
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf, _utils, base, grammar_parser
from omegaconf.resolvers import oc


@functools.cache
def parse_once() -> None:
    """Parse each interpolation, file and version once from now on, and do not copy the store of schemas. What the
    interpolations of a list of defaults stand for is worked out where there is one."""
    parsed = functools.lru_cache(maxsize=4096)(grammar_parser.parse)
    for module in (grammar_parser, _utils, base, oc):  # all that have its name
        module.parse = parsed
    load = OmegaConf.load

    def load_once(file: Any) -> Any:
        """Read a file that is parsed already; a path, and what is no mapping, as always."""
        if not hasattr(file, "seek"):
            return load(file)
        start = file.tell()
        try:
            plain = _plain(file.read())
        except yaml.YAMLError:
            plain = None
        if isinstance(plain, dict):
            return OmegaConf.create(plain)
        file.seek(start)
        return load(file)

    OmegaConf.load = staticmethod(load_once)  # type: ignore[method-assign]
    mapped, version._get_version = defaults_list._create_interpolation_map, functools.cache(version._get_version)
    defaults_list._create_interpolation_map = lambda overrides, defaults, added: (
        mapped(overrides, defaults, added) if any(each.is_interpolation() for each in defaults) else OmegaConf.create()
    )
    ConfigStore.__deepcopy__ = lambda store, _memo: store  # type: ignore[attr-defined]  # there is one, filled at the start


@functools.lru_cache(maxsize=1024)
def _plain(text: str) -> Any:
    return yaml.load(text, Loader=_utils.get_yaml_loader())
