"""Random command lines, most of them wrong: each composes, or ends in one message of key, value, rule and remedy.

python -m tests.helpers.random_configs 10000 [SEED [FIRST]]
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from rlexp.config import load
from rlexp.config.checks.across_fields import check
from rlexp.config.explain import explain
from rlexp.config.identity import curve_keys
from rlexp.config.paths import conf_dir
from rlexp.config.schema.keys import all_keys
from tests.helpers.parsing import parse_once

SECONDS = 20  # for one command line; most take a tenth of one
GROUPS = sorted(folder.name for folder in conf_dir().iterdir() if folder.is_dir() and folder.name != "experiment")
KEYS = sorted(all_keys())
NUMBERS = [
    *("0", "-1", "1", "2", "3", "7", "0.5", "-0.0", "1e-320", "1e308", "1e400", "inf", "-inf", "nan", "100000"),
    *("9223372036854775807", "-9223372036854775809", "1" + "0" * 30, "9" * 5000, "0x10", "1_000", "00", "1e3"),
]
TEXTS = [
    *(
        "many",
        "true",
        "false",
        "null",
        "''",
        '""',
        "'a b'",
        "a b",
        "'",
        '"a',
        "a'b",
        "a=b",
        "a,b",
        "a:b",
        "$",
        "`",
        "\\",
    ),
    *(
        "!",
        "*",
        "~",
        "#",
        "?",
        "???",
        "/",
        "~/x",
        "~nobody/x",
        "./x",
        "/dev/null",
        "-",
        "--",
        "%",
        "é",
        "日本",
        "x" * 3000,
    ),
    *(
        "cpu",
        "fp64",
        "bf16",
        "auto",
        "none",
        "zero3",
        "rule",
        "exact",
        "regex",
        "vllm",
        "pipelined",
        "hybrid",
        "ulysses",
    ),
    *("10m", "0s", "10x", "choice(1,2)", "range(1,3)", "glob(*)", "[", "]", "{", "}", "(", "json:loads", "no.such:f"),
]
CONTAINERS = [
    *("[]", "[1,2]", "[a,b]", "[[1]]", "[null]", "[0.9]", "[0.9,nan]", "[0.1,0.2,0.3]", "['']", "[{a:1}]", "{}"),
    *("{a:1}", "{a:{b:1}}", "{name:x}", "{kind:rule}", "{x:{kind:rule,text:a}}", "{1:2}", "{a:null}"),
]
INTERPOLATIONS = [
    *("${}", "${", "${a}", "${.}", "${..}", "${nowhere.at.all}", "${oc.env:NO_SUCH_NAME}", "${oc.env:NO_SUCH_NAME,4}"),
    *("${now:%Y}", "${oc.decode:'[1'}", "${no_such_resolver:1}", "${dp_size:8}", "${dp_size:8,3}", "${dp_size:a,b}"),
    *("${dp_size:8,2}", "${grad_acc:8,1,0}", "${grad_acc:8,0,1}", "${world_size:0,1,0}", "${world_size:null,1,0}"),
    *("${minibatches:grpo,8,4,7}", "${minibatches:x,y,z,0}", "${rlexp_engine:fp8}", "${rlexp_precision:tpu}"),
    *("${rlexp_nproc:cpu,0,0}", "${sampling_ranks:x}", "${importance_cap:pipelined}", "${slurm_minutes:4x}"),
    *("${slurm_memory:a,b}", "${slurm_warning:x}", "${rlexp_root:}", "${rlexp_groups:}", "${hydra:runtime.cwd}"),
    *("a${seed}", "${seed}${seed}", "${oc.dict.keys:train}", "${oc.select:nowhere,3}", "${oc.create:{a:1}}"),
]
OVERRIDES = [  # below open mappings
    *("engine.overrides.steps_per_print", "engine.overrides.zero_optimization", "engine.overrides.bf16"),
    *("engine.overrides.zero_optimization.overlap_comm", "engine.overrides.communication_data_type"),
    *("engine.overrides.nothing", "logger.axes.seed", "reward.terms.one", "reward.terms.one.text", "reward.terms"),
]
PACKAGES = ["@x", "@_global_", "@data", "@a:b", "@"]
CHOICES = [  # what goes along, so that every kind's keys are reached
    *([], ["loss=ppo", "reward.text=a"], ["loss=grpo", "reward.text=a"], ["loss=dr_grpo", "reward.rule=exact"]),
    *(["loss=gspo", "reward=sum", "reward.terms.a={kind: rule, text: b}"], ["loss=rloo", "rollout=pipelined"]),
    *(["loss=ppo", "reward=python", "reward.function=json:loads"], ["loss=ppo", "reward=model", "reward.path=a/b"]),
    *(["loss=reinforce_pp", "reward.rule=arithmetic", "data=arithmetic"], ["model=hf", "model.path=a/b"]),
    *(["data=jsonl", "data.path=FILE"], ["data=long"], ["parallel=ring4"], ["engine=zero3"], ["engine=torch"]),
    *(["+experiment=bug_report"], ["+experiment=ppo_tiny"], ["optim=sgd"], ["logger=none"], ["train.precision=fp64"]),
]


def command(number: int, seed: int, file: str) -> list[str]:
    """The command line of this number; the same for the same seed."""
    random_ = random.Random(f"{seed}-{number}")
    parts = [part.replace("FILE", file) for part in random_.choice(CHOICES)]
    wrong = [_override(random_) for _ in range(random_.choice((1, 1, 1, 2, 3)))]
    return ["launch.device=cpu", *parts, *wrong]


def _override(random_: random.Random) -> str:
    kind = random_.random()
    key = random_.choice(KEYS)
    sign = random_.choice(("", "", "", "", "+", "++"))
    if kind < 0.50:
        return f"{sign}{key}={_value(random_)}"
    if kind < 0.62:
        return f"{sign}{random_.choice(GROUPS)}={_value(random_)}"
    if kind < 0.70:
        return f"{sign}{random_.choice(OVERRIDES)}={_value(random_)}"
    if kind < 0.78:
        return f"{sign}{_misspelt(random_, random_.choice([*KEYS, *GROUPS]))}={_value(random_)}"
    if kind < 0.86:
        return f"~{random_.choice([*KEYS, *GROUPS])}" + random_.choice(("", "", "=tiny", "=1", "=null"))
    if kind < 0.90:
        return f"{sign}{random_.choice(GROUPS)}{random_.choice(PACKAGES)}={_value(random_)}"
    if kind < 0.94:
        group = random_.choice(GROUPS)
        return f"{sign}{group}={random_.choice(_options(group))}"
    return random_.choice(
        (f"{key}", f"={key}", f"{key}==1", f"{key} = 1", f"--{key}=1", f"{key}:1", f" {key}=1", "", "=", "+", "~", "++")
    )


def _value(random_: random.Random) -> str:
    kind = random_.random()
    if kind < 0.30:
        return random_.choice(NUMBERS)
    if kind < 0.60:
        return random_.choice(TEXTS)
    if kind < 0.75:
        return random_.choice(CONTAINERS)
    if kind < 0.87:
        return random_.choice(INTERPOLATIONS)
    return f"${{{random_.choice(KEYS)}}}"


def _misspelt(random_: random.Random, key: str) -> str:
    place = random_.randrange(len(key))
    return random_.choice((key[:place] + key[place + 1 :], key[:place] + key[place:].swapcase(), f"{key}s", f"{key}.x"))


@functools.cache
def _options(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


REMEDIES = re.compile(
    r"\b(Use|Copy|Give|Leave|Say|Set|Choose|Quote|Unset|Raise|Add|Install|Start|Did you mean|Options|Kinds|Keys"
    r"|For example|lists (?:all|the) keys|says how values are set)\b"
)
VALUELESS = re.compile(
    r"no such key|has no value|belongs to|is there already|is appended|cannot be deleted|cannot be read as"
)


def outcome(overrides: Sequence[str]) -> str | None:
    """The message that a user would see, or None for a valid configuration; a defect raises."""
    try:
        cfg = composed(overrides)
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        return message
    again = load.from_plain(load.to_plain(cfg))
    assert again == cfg, "the configuration does not survive its file"
    curve_keys(cfg)
    with contextlib.suppress(load.ConfigError):
        check(cfg, here=False)
    return None


def composed(overrides: Sequence[str]) -> Any:
    return load.from_hydra(compose("config", overrides=load.open_ended(overrides)))


def flaws(message: str, overrides: Sequence[str]) -> list[str]:
    """What a message lacks: the key it is about, that key's value, a remedy."""
    given = {_key(each): each.partition("=")[2] for each in overrides}
    about = re.match(r"[^\s:=]*", message)
    key = about.group() if about else ""
    known = {*KEYS, *GROUPS, *given, *(each.partition("=")[0] or "''" for each in overrides)}
    lacking = []
    about_key = any(key == each or key.startswith(f"{each}.") or each.startswith(f"{key}.") for each in known if key)
    if not about_key and not any(
        message.startswith((each.lstrip("+~"), f"{_key(each)}=")) for each in overrides if each.lstrip("+~")
    ):
        lacking.append("key")
    if given.get(key) and not message.startswith(f"{key}=") and not VALUELESS.search(message):
        lacking.append("value")
    if not REMEDIES.search(message):
        lacking.append("remedy")
    if "\n" in message:
        lacking.append("one line")
    return lacking


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


@contextlib.contextmanager
def ready() -> Iterator[None]:
    """Hydra, initialized once."""
    load.register()
    parse_once()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield


@contextlib.contextmanager
def in_time(seconds: int) -> Iterator[None]:
    def too_late(*_: Any) -> None:
        raise TimeoutError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclasses.dataclass
class Tally:
    valid: int = 0
    refused: int = 0
    defects: list[tuple[list[str], str]] = dataclasses.field(default_factory=list)


def run(first: int, count: int, seed: int) -> Tally:
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder, ready():
        file = Path(folder) / "rows.jsonl"
        file.write_text("{}\n", encoding="utf-8")
        for number in range(first, first + count):
            overrides = command(number, seed, str(file))
            try:
                with in_time(SECONDS):
                    message = outcome(overrides)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                tally.defects.append((overrides, "".join(traceback.format_exception(error)[-4:])))
                continue
            if message is None:
                tally.valid += 1
                continue
            tally.refused += 1
            if lacking := flaws(message, overrides):
                tally.defects.append((overrides, f"lacks {', '.join(lacking)}: {message}"))
    return tally


def main(argv: Sequence[str]) -> int:
    count, seed = int(argv[0]), int(argv[1]) if len(argv) > 1 else 0
    tally = run(first=int(argv[2]) if len(argv) > 2 else 0, count=count, seed=seed)
    for overrides, why in tally.defects:
        print(" ".join(each if len(each) < 200 else f"{each[:100]}…" for each in overrides), "\n   ", why[:1500])
    print(f"{count} command lines: {tally.valid} valid, {tally.refused} refused, {len(tally.defects)} defects")
    return 1 if tally.defects else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
