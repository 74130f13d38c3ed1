"""From the exceptions of Hydra and OmegaConf to one clear message: key, value, rule, remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlexp.config.paths import conf_dir
from rlexp.errors import UserError


def explain(error: BaseException) -> str | None:
    """The message a user should see, or None for an exception that is a defect and deserves its traceback."""
    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, UserError):
            return str(link)
    for link in chain:
        # OmegaConf keeps a resolver's error as text only.
        found = re.search(r"(?:Config|Data)Error raised while resolving interpolation: (.*)", str(link))
        if found is not None:
            return found.group(1)
    for link in chain:
        if isinstance(link, OSError) and link.filename:
            return (
                f"hydra.run.dir: {link.filename} cannot be made ({link.strerror}). "
                f"Give a folder that can be written: hydra.run.dir=FOLDER."
            )
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return None
    if isinstance(error, OverrideParseException):
        reason = str(error).splitlines()[0]
        return f"{error.override}: cannot be read as key=value ({reason}). Quote values with special characters."
    text = "\n".join(dict.fromkeys(str(link).strip() for link in chain if str(link).strip()))
    return _unknown_key(text) or _unknown_option(text) or _bad_value(text, chain) or text


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _unknown_key(text: str) -> str | None:
    """`Could not override 'train.batchsize'`, with the nearest key that exists."""
    found = re.search(r"Could not (?:override|append|delete)[^']*'([^']+)'", text)
    if found is None:
        return None
    key = found.group(1).split("@")[0]
    if key.startswith("+"):
        return None
    return f"{key}: no such key.{_suggest(key, _known_keys())} `python -m rlexp --cfg job` shows all keys."


def _unknown_option(text: str) -> str | None:
    """`Could not find 'loss/dop'`, with the options of that group."""
    found = re.search(r"(?:Could not find|In [^:]*: Could not load|Could not load) '([^']+)'", text)
    if found is None or "/" not in found.group(1):
        return None
    group, _, option = found.group(1).rpartition("/")
    options = re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)
    listed = f" Options: {', '.join(options)}." if options else ""
    return f"{group}={option}: no such option.{_suggest(option, options)}{listed}"


def _bad_value(text: str, chain: list[BaseException]) -> str | None:
    for link in chain:
        key = getattr(link, "full_key", None)
        if isinstance(link, OmegaConfBaseException) and key:
            reason = str(getattr(link, "msg", None) or link).splitlines()[0]
            return f"{key}: {reason}"
    found = re.search(r"Error merging override (\S+)\n(.*)", text)
    return f"{found.group(1)}: {found.group(2)}" if found else None


def _suggest(word: str, candidates: list[str]) -> str:
    """Nearest by spelling: the whole key, or its last part where the group is right or left out."""
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    if not close:
        leaves = {candidate.rpartition(".")[2]: candidate for candidate in candidates}
        leaf = difflib.get_close_matches(word.rpartition(".")[2], list(leaves), n=1, cutoff=0.7)
        close = [leaves[leaf[0]]] if leaf else []
    return f" Did you mean {close[0]}?" if close else ""


def _known_keys() -> list[str]:
    """Every key of the default configuration, and every group."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose("config")
    keys: list[str] = []

    def walk(node: object, prefix: str) -> None:
        if OmegaConf.is_dict(node):
            for name in node:  # type: ignore[attr-defined]
                keys.append(f"{prefix}{name}")
                walk(node._get_node(name), f"{prefix}{name}.")  # type: ignore[attr-defined]

    walk(cfg, "")
    return keys + [folder.name for folder in conf_dir().iterdir() if folder.is_dir()]
