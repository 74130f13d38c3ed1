"""Whether there is a W&B account, and errors of W&B's server."""

from __future__ import annotations

import contextlib
import netrc
import os
from collections.abc import Iterator
from typing import Literal, cast
from urllib.parse import urlparse

from rlexp.base.errors import SinkError
from rlexp.config.schema import LoggerConfig, WandbMode

Mode = Literal["online", "offline", "disabled", "shared"]
# W&B's own server by both its names: `wandb login` has written one or the other into netrc.
HOSTS = ("api.forge.coreweave.com", "api.wandb.ai")
NO_ACCOUNT = (
    "there is no W&B account here: neither WANDB_API_KEY nor an entry in netrc. Log in with `wandb login` "
    "(and set WANDB_BASE_URL for a server of your own)."
)


def wandb_mode(asked: WandbMode) -> Mode:
    """Return the mode: the one asked for, or WANDB_MODE, or online if there is a key for the server, else offline."""
    if asked is not WandbMode.auto:
        return cast(Mode, asked.value)
    if os.environ.get("WANDB_MODE"):
        return cast(Mode, os.environ["WANDB_MODE"])
    return "online" if has_account() else "offline"


def upload_in_words(logger: LoggerConfig, mode: Mode) -> str:
    """Say that a run is uploaded, to whose account, and how to leave that out; nothing where it is not uploaded."""
    if mode in ("offline", "disabled"):
        return ""
    entity = logger.entity or os.environ.get("WANDB_ENTITY")
    account = "your W&B account" if entity is None else f"W&B, account {entity}"
    server = f" on {url}" if (url := os.environ.get("WANDB_BASE_URL")) else ""
    return (
        f"rlexp: the run is uploaded to {account}{server}, project {logger.project}. To leave this out: logger=none; "
        f"to upload later: logger.mode=offline.\n"
    )


def has_account() -> bool:
    return bool(os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")) or _netrc_has_key()


def _netrc_has_key() -> bool:
    server = urlparse(os.environ.get("WANDB_BASE_URL", ""))
    names = HOSTS if server.hostname in (None, *HOSTS) else (server.netloc, server.hostname or "")
    try:
        known = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return any(known.authenticators(name) is not None for name in names)


@contextlib.contextmanager
def refusals(about: str) -> Iterator[None]:
    """Turn what W&B's client raises while it asks the server into one message."""
    import wandb
    from wandb.sdk.lib.service.service_connection import WandbApiFailedError  # is not a wandb.Error

    try:
        yield
    except (wandb.Error, WandbApiFailedError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise SinkError(f"{about}: W&B's server could not be reached, or refused ({reason}).") from error
