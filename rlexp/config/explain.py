"""Turn exceptions of Hydra and OmegaConf into one message of key, value, rule and remedy."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator

from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from rlexp.base.command import reader_left, say
from rlexp.base.errors import ConfigError, UserError
from rlexp.config.paths import experiments
from rlexp.config.schema.keys import about_unknown, suggestion
from rlexp.config.schema.value_kinds import rule

HEADER = "# @package _global_"
# OmegaConf's words for a value of the wrong kind, used for keys outside our schema.
_KINDS = {
    "is not a ListConfig": "a list, as [ONE, TWO] or []",
    "to Dict[": "a mapping, as {NAME: VALUE} or {}",
    "is not Optional": "given: it cannot be null. Give a value, or leave the key out",
}


# What Hydra says, and what to say for it.
PLAIN = (
    (r"(?:Ambiguous value for argument|Sweep parameters) '\+*([^=]*)=(.*)'",
     "{0}={1}: gives several values, as a sweep has them. Add -m to run them all, or give a list ({0}=[ONE,TWO]) or a "
     "quoted text (\"{0}='ONE,TWO'\")."),
    (r"An item is already at '([^']+)'", "{0}: is there already. Leave out the +: {0}=VALUE."),
    (r"does not support deletion[\s\S]*full_key: (\S+)",
     "{0}: keys cannot be deleted. Give it another value, or leave it out."),
    (r"Could not delete[^']*'[+~]*([^'@]+)", "{0}: keys cannot be deleted. Give it another value, or leave it out."),
)  # fmt: skip


def explained(command: Callable[[], int]) -> int:
    """Run a command that composes a configuration, and return its exit code. What Hydra says of a mistake becomes one
    message; bugs keep their traceback."""
    try:
        return command()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return reader_left()
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        say(message)
        return 1


def explain(error: BaseException) -> str | None:
    """Return the message for the user, or None for an exception that is a bug and keeps its traceback."""
    links = list(chain(error))
    for link in links:
        if isinstance(link, ConfigError):
            return " ".join(map(str.strip, str(link).splitlines()))  # a value may have several lines
        if isinstance(link, UserError):
            return str(link)
    for link in links:
        # OmegaConf keeps only the text of a resolver's error.
        refusal = re.search(r"(?:Config|Data)Error raised while resolving interpolation: (.*)", str(link))
        if refusal is not None:
            return refusal.group(1)
    for link in links:
        # Hydra makes the run's folder before our job starts. Errors of the job itself are not meant here.
        through = "\n".join(frame.filename for frame in traceback.extract_tb(link.__traceback__))
        if isinstance(link, OSError) and link.filename and "/hydra/" in through and "run/job.py" not in through:
            return (
                f"hydra.run.dir: {link.filename} cannot be made ({link.strerror}). "
                f"Give a writable folder: hydra.run.dir=FOLDER (hydra.sweep.dir=FOLDER for a sweep)."
            )
    for link in links:
        if (mark := getattr(link, "problem_mark", None)) is not None:  # errors of the yaml parser have one
            return f"{mark.name}, line {mark.line + 1}: is not valid yaml ({getattr(link, 'problem', '')})."
    if any('Could not detect "srun"' in str(link) for link in links):
        return "hydra/launcher=slurm: there is no srun here. Run it where Slurm is, or use hydra/launcher=local."
    if any("Unexpected type for root" in str(link) for link in links):  # OmegaConf's own assertion
        return "a key is given below another one whose value is no mapping. Give the whole mapping: KEY={NAME: VALUE}."
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return None
    if isinstance(error, OverrideParseException):
        reason = str(error).splitlines()[0]
        override = (error.override or "").lstrip("+")
        return f"{override}: cannot be read as key=value ({reason}). Quote values with special characters."
    text = "\n".join(dict.fromkeys(str(link).strip() for link in links if str(link).strip()))
    for pattern, plain in PLAIN:
        if (match := re.search(pattern, text)) is not None:
            return plain.format(*match.groups())
    message = _headless(text) or _unknown_key(text) or _unknown_option(text) or _bad_value(text, links)
    return message or f"{' '.join(text.split())} `python -m rlexp --help` says how values are set."


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _headless(text: str) -> str | None:
    """Explain an experiment whose keys end up below `experiment`, since its first line does not say otherwise."""
    match = re.search(r"In '(experiment|sweep)/([^']+)': (?:ConfigKeyError|Could not override '\w+@\1\.)", text)
    if match is None or not ("Could not override" in text or f"Key '{match.group(1)}' not in" in text):
        return None
    group, name = match.groups()
    files = experiments().get(name, []) if group == "experiment" else []
    file = next((path for path in files if not path.read_text(encoding="utf-8").startswith(HEADER)), None)
    empty = "is empty. " if file is not None and not file.read_text(encoding="utf-8").strip() else ""
    return f'{file or f"{group}/{name}.yaml"}: {empty}{"Its" if empty else "its"} first line must be "{HEADER}".'


def _unknown_key(text: str) -> str | None:
    """Explain `Could not override 'train.batchsize'` by where the key belongs, or the nearest key."""
    refused = re.search(r"Could not (?:override|append)[^']*'[+~]*([^'@]+)", text)
    if refused is None:
        return None
    key = refused.group(1)
    # For a whole group at once (`train={…}`) Hydra names the group, then the key inside it that it does not know.
    inner = re.search(r"Key '([^']+)' (?:is )?not in", text)
    if inner is not None and inner.group(1) not in key.split("."):
        key = f"{key}.{inner.group(1)}"
    return about_unknown(key)


def _unknown_option(text: str) -> str | None:
    """Explain `Could not find 'loss/dop'` by the options of that group."""
    missing = re.search(r"(?:Could not find|In [^:]*: Could not load|Could not load) '([^']+)'", text)
    if missing is None or "/" not in missing.group(1):
        return None
    group, _, option = missing.group(1).rpartition("/")
    options = re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)
    listed = f" Options: {', '.join(options)}." if options else f" Choose one that exists: {group}=OPTION."
    own = " Your own are found in conf/experiment/ of the folder where you type." if group == "experiment" else ""
    if group == "parallel" and (size := re.fullmatch(r"ring[_-]?(\d+)", option)) is not None:
        return f"{group}={option}: no such option. For a ring of another size: parallel.ring_size={size[1]}."
    return f"{group}={option}: no such option.{suggestion(option, options)}{listed}{own}"


def _bad_value(text: str, links: list[BaseException]) -> str | None:
    """Explain a value of the wrong kind, or an interpolation that cannot be resolved."""
    override = re.search(r"Error merging override [+~]*([^\s=]+)=(.*)", text)
    for link in links:
        key = getattr(link, "full_key", None)
        if not isinstance(link, OmegaConfBaseException) or not key:
            continue
        if override and override.group(1).endswith(f".{key}"):
            key = override.group(1)  # OmegaConf names a list by its last part alone
        reason = str(getattr(link, "msg", None) or link).splitlines()[0]
        if re.match(r"Key '.*' not in", reason):
            return about_unknown(key)
        value = override.group(2) if override and override.group(1) == key else _value_in(link, reason)
        what = key if value is None else f"{key}={value}"
        if "resolving interpolation" in reason or "Interpolation" in type(link).__name__:
            cause = reason.rpartition("resolving interpolation: ")[2]
            return f"{what}: cannot be resolved ({cause.rstrip('.')}). {_remedy(key)}"
        kind = next((kind for phrase, kind in _KINDS.items() if phrase in reason), None)
        return f"{what}: {rule(key, link.object_type) or (f'must be {kind}.' if kind else f'{reason}. {_remedy(key)}')}"
    return f"{override.group(1)}={override.group(2)}: cannot be set ({' '.join(text.split())})." if override else None


def _value_in(link: OmegaConfBaseException, reason: str) -> str | None:
    """Return the value that an error is about: as it was written, or else as the message shows it."""
    node = link.child_node
    if node is not None and isinstance(node._value(), str):
        return str(node._value())
    shown = re.search(r"[Vv]alue '?(.*?)'?(?: of type| \(\w+\) is not| is not a valid|, expected)", reason)
    return shown.group(1) if shown else None


def _remedy(key: str) -> str:
    return f"It {rule(key)}" if rule(key) else "Give it another value, or leave it out."
