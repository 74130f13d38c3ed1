"""Hide what must not be written to a file or a terminal: keys and tokens of the hub, of W&B and of others."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rlexp.base import plain_json

HIDDEN = "…"
WORDS = {"api", "auth", "authorization", "bearer", "creds", "credential", "credentials", "pass", "pat", "private",
         "session", "webhook"}  # fmt: skip
ENDS = ("token", "key", "secret", "password", "passwd", "passphrase", "pwd", "cookie")  # of a word, as in HFTOKEN
# Names with such a word that hide nothing: columns of rows, and tokens of a vocabulary.
COLUMNS = r"prompt|input|label|chosen|rejected|image|output|metric|best_metric|system|message|query|answer"
TOKENS = r"stop|pad|eos|bos|unk|mask|sep|cls|label_pad|image|additional_special|decoder_start|adapter_extra"
HARMLESS = re.compile(rf"(?:\w+\.)*(?:(?:\w+_)?(?:{COLUMNS})_key|(?:{TOKENS})_tokens?(?:_id|_ids)?)", re.I)
ALWAYS = ("use_wandb",)  # its value is a key, or true
SHAPES = re.compile(
    # tokens of the hub, OpenAI, GitHub, GitLab, Slack, W&B, and of Amazon
    r"\b(?:hf|api_org|sk|gh[a-z]|github_pat|glpat|xox[a-z]|wandb_v1)[_-][A-Za-z0-9_-]{6,}|\bAKIA[0-9A-Z]{12,}"
    r"|\beyJ[\w-]{6,}\.[\w-]{6,}[\w.-]*"  # a signed token
    r"|-----BEGIN [\s\S]*"  # a private key
    r"|(?<=[?&])(?:\w*key|\w*token|sig|signature|secret|password)=[^&\s'\"]+"  # in an address
    r"|\b[0-9a-f]{40}\b"  # a key of W&B
    r"|(?<=://)[^/@\s]+(?=@)"  # a password or token in an address
)
HASHES = ("revision", "commit")  # names of values that look like a key of W&B


def is_secret(name: str) -> bool:
    """Whether the value of an argument, a variable or a key of a mapping is hidden whatever it is."""
    if HARMLESS.fullmatch(name):
        return False
    words = re.split(r"[_.\-\s]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return name.lower() in ALWAYS or any(word in WORDS or word.endswith(ENDS) for word in words)


def masked(name: str, value: Any) -> Any:
    """Return a value as it may be shown."""
    if value is None or isinstance(value, bool | int | float):
        return HIDDEN if is_secret(name) and not isinstance(value, bool) and value is not None else value
    if is_secret(name):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: masked(str(key), each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [masked(name, each) for each in value]
    return _masked_text(name, str(value)) if isinstance(value, str) else value


def _masked_text(name: str, text: str) -> str:
    if text.lstrip().startswith(("{", "[")):
        try:
            return json.dumps(masked(name, plain_json.loads(text)), ensure_ascii=False)
        except ValueError:
            if any(word in text.lower() for word in (*WORDS, *ENDS)):
                return HIDDEN
    if any(word in name.lower() for word in HASHES):
        return text
    return SHAPES.sub(HIDDEN, text)
