"""Measure rollouts by vLLM on one GPU, by one command, and write them into docs/measured/rollouts_gpu.md.

python -m bench.rollouts_gpu --write docs/measured/rollouts_gpu.md --picture docs/rollouts_gpu.png
python -m bench.rollouts_gpu --only speed handover        these sections; each says what took how long
python -m bench.rollouts_gpu --state FILE --seconds 500   keeps each case; no case begins later than this; and goes on
                                                          from the file the next time, on the same card and commit
python -m bench.rollouts_gpu --rehearse --short           on a CPU with vLLM's build for CPUs, only what takes seconds

With no GPU or no vLLM it says so and exits with 3. It exits with 1 if a case failed, or misses its goal.

How vLLM comes to a machine without internet, and how large its wheels are: bench/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from bench import gpu
from bench.gpu_here import Machine, machine, missing, stand_in
from bench.measured import processor, with_load
from bench.tables import commit
from bench.vllm_cases import Kept, Setup, versions
from bench.vllm_curves import curves_section
from bench.vllm_speed import speed_section
from bench.vllm_tokens import rings_section, tokens_section
from bench.vllm_weights import handover_section, sleep_section

MODULE = "bench.rollouts_gpu"
SECTIONS: dict[str, Callable[..., tuple[str, list[str]]]] = {
    "speed": speed_section,
    "handover": handover_section,
    "curves": curves_section,
    "tokens": tokens_section,
    "rings": rings_section,
    "sleep": sleep_section,
}


def main() -> int:
    options = _arguments()
    why = None if options.rehearse else missing()
    if why is None and find_spec("vllm") is None:
        why = "vllm is not installed"
    if why is not None:
        sys.stderr.write(f"{MODULE}: {why}. Nothing was changed.\n")
        return gpu.NO_GPU
    on = stand_in() if options.rehearse else machine()
    about = _about(on)
    kept = Kept(options.state, f"{about}, {commit(options.commit)}, {'short' if options.short else 'whole'}")
    until = time.monotonic() + options.seconds if options.seconds else None
    with tempfile.TemporaryDirectory(prefix="rlexp-") as folder:
        setup = Setup(on, kept, Path(folder), short=options.short, until=until)
        sections = {name: _section(name, setup, options) for name in SECTIONS}
        return gpu.measure(options, sections, MODULE, on, about, None)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, small")
    parser.add_argument("--short", action="store_true", help="only a tiny model, and few steps")
    parser.add_argument("--only", choices=tuple(SECTIONS), nargs="+", help="these sections")
    parser.add_argument("--write", type=Path, help="put the sections into this page, between their markers")
    parser.add_argument("--picture", type=Path, help="draw the curves, as a PNG")
    parser.add_argument("--state", type=Path, help="keep the results of cases in this file, and go on from them")
    parser.add_argument("--seconds", type=float, help="begin no case later than this")
    parser.add_argument("--commit", help="the commit to name, where git cannot tell")
    return parser.parse_args()


def _section(name: str, setup: Setup, options: argparse.Namespace) -> gpu.Section:
    own = (options.picture,) if name == "curves" else ()

    def section(_on: Machine, _options: argparse.Namespace) -> tuple[str, list[str]]:
        wrong: list[str] = []

        def text() -> str:
            said, found = SECTIONS[name](setup, *own)
            wrong.extend(found)
            return said

        return text() if setup.gpu else with_load(text), wrong  # on a CPU, other work shows in every number

    return section


def _about(on: Machine) -> str:
    if on.device == "cpu":
        return f"{len(os.sched_getaffinity(0))} cores of {processor()}, torch {on.torch}, {versions()}"
    return f"{dataclasses.replace(on, gpus=1).about()}, {versions()}"


if __name__ == "__main__":
    sys.exit(main())
