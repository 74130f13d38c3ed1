"""Learn from GPUs what rlexp does on them, by one command, and write it into docs/measured/gpu.md: `make gpu`.

python -m bench.gpu                                            on this machine's GPUs; prints every section
python -m bench.gpu --write docs/measured/gpu.md               and writes each into the page as soon as it is complete
python -m bench.gpu --only engines                             one section; each takes at most six minutes
python -m bench.gpu --only rates --keep-rates                  and writes what preflight and parallel.kernel=auto know
python -m bench.gpu --rehearse                                 the same on four CPU ranks, small, to see that it runs
python -m bench.gpu --predict --write docs/measured/gpu.md     no GPU: the longest pair that fits, by ring size

With no GPU it says so and exits with 3. With a GPU it exits with 1 if a section failed, or found something wrong.
--predict keeps its answers in a file (--state), and goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from bench.gpu_here import machine, missing, stand_in
from bench.kept_rows import page_of
from bench.tables import commit, put
from rlexp.base.kernel_rates import TABLE

if TYPE_CHECKING:
    from bench.gpu_here import Machine

ROOT = Path(__file__).resolve().parent.parent
NO_GPU = 3  # the exit code
TESTS = "tests/bench/test_gpu.py"
ON_CPU = "RLEXP_GPU_TESTS_ON_CPU"  # lets the tests of a GPU run on the CPU
Section = Callable[["Machine", argparse.Namespace], tuple[str, list[str]]]  # its text, and what is wrong
MEASURED = ROOT / "rlexp" / "preflight" / "rehearsal" / "measured.json"


def main() -> int:
    options = _arguments()
    if options.here:
        return _say(missing(ask_torch=False))  # so that any Python can ask
    if options.predict:
        return predict(options)
    if not options.rehearse and (why := missing()):
        return _say(why)
    on = stand_in() if options.rehearse else machine()
    page = page_of(options.write) if options.write else None
    return measure(options, SECTIONS, "bench.gpu", on, on.about(), page)


def _say(why: str | None) -> int:
    if why is None:
        return 0
    sys.stderr.write(f"make gpu: {why}. Nothing was changed.\n")
    return NO_GPU


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--rehearse", action="store_true", help="on the CPU, small")
    kind.add_argument("--predict", action="store_true", help="the longest pair by ring size, without a GPU")
    kind.add_argument("--here", action="store_true", help="only say whether there is a GPU")
    parser.add_argument("--short", action="store_true", help="of engines, rings and options, only what takes seconds")
    parser.add_argument("--only", choices=tuple(SECTIONS), nargs="+", help="these sections")
    parser.add_argument("--write", type=Path, help="put the sections into this page, between their markers")
    parser.add_argument("--keep-rates", action="store_true", help="estimate and choose kernels by what is measured")
    parser.add_argument("--commit", help="the commit to name, where git cannot tell")
    parser.add_argument("--engines", nargs="+", help="train, or predict now, only these")
    parser.add_argument("--state", type=Path, default=ROOT / "runs" / "gpu-longest.json", help="of --predict")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="of --predict: at a time")
    return parser.parse_args()


def measure(
    options: argparse.Namespace, sections: dict[str, Section], module: str, on: Machine, about: str, page: Path | None
) -> int:
    """Run every section, one after the other. One that fails says so, and the next begins. `page` has the headline."""
    from rlexp.launch.local import Interrupted

    failed = False
    for name in options.only or sections:
        began = time.monotonic()
        try:
            text, wrong = sections[name](on, options)
        except Interrupted as stopped:
            return stopped.exit_code
        except Exception as error:  # of a library, of the GPU: what was measured until then counts
            traceback.print_exc()
            said = next(iter(str(error).splitlines()), "")
            text, wrong = f"The section of {name} failed: {type(error).__name__}: {said}", [name]
        failed |= bool(wrong)
        kind = "Rehearsed on a CPU, which says nothing of a GPU," if options.rehearse else "Measured"
        signed = (
            f"{text}\n\n{kind} {time.strftime('%Y-%m-%d')} at {commit(options.commit)}, by `python -m {module} --only "
            f"{name}` in {time.monotonic() - began:.0f} s, on {about}."
        )
        print(signed, end="\n\n", flush=True)
        for each in wrong:
            print(f"WRONG: {each}", file=sys.stderr, flush=True)
        if options.write:
            put(options.write, signed, name)
            put(page or options.write, _headline(options, about), "about")
    return int(failed)


def _headline(options: argparse.Namespace, about: str) -> str:
    kind = "**Rehearsed on a CPU.**" if options.rehearse else "**Measured.**"
    return f"{kind} The latest on {about}, {time.strftime('%Y-%m-%d')}, at {commit(options.commit)}."


# ---- the sections ----


def tests_section(on: Machine, _options: argparse.Namespace) -> tuple[str, list[str]]:
    """Run the tests that are marked for a GPU, in a Python of their own."""
    environment = dict(os.environ) | ({ON_CPU: "1", "TRITON_INTERPRET": "1"} if on.device == "cpu" else {})
    with tempfile.TemporaryDirectory(prefix="rlexp-") as folder:
        file = Path(folder, "tests.xml")
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={file}", TESTS]
        command += ["-n", "4"] if on.device == "cuda" and find_spec("xdist") is not None else []  # most wait for ranks
        subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False)
        cases = list(ElementTree.parse(file).getroot().iter("testcase"))
    wrong, left_out = [], Counter[str]()
    for case in cases:
        bad, skipped = case.find("failure"), case.find("skipped")
        bad = case.find("error") if bad is None else bad
        if bad is not None:
            wrong.append(f"{case.get('name')}: {next(iter(str(bad.get('message')).splitlines()), '')[:300]}")
        elif skipped is not None:
            left_out[str(skipped.get("message"))] += 1
    passed = len(cases) - len(wrong) - left_out.total()
    lines = [f"{passed} of {len(cases)} tests passed, {len(wrong)} failed, {left_out.total()} were left out.", ""]
    lines += [f"- failed: {each}" for each in wrong]
    lines += [f"- {count} left out: {why}" for why, count in left_out.items()]
    return "\n".join(lines), wrong if cases else ["no test was found"]


def training(on: Machine, options: argparse.Namespace) -> tuple[str, list[str]]:
    from bench.gpu_training import training_section

    return training_section(on, options.engines)


def rates(on: Machine, options: argparse.Namespace) -> tuple[str, list[str]]:
    from bench.gpu_rates import rates_section

    keep = options.keep_rates and not options.rehearse
    return rates_section(on, kernels=TABLE if keep else None, others=MEASURED if keep else None)


def world(name: str) -> Section:
    """Train every case of a kind on one world of four ranks."""

    def section(on: Machine, options: argparse.Namespace) -> tuple[str, list[str]]:
        from bench.gpu_world import world_section

        return world_section(name, on, short=options.short)

    return section


def commands(name: str) -> Section:
    """Type whole commands."""

    def section(on: Machine, _options: argparse.Namespace) -> tuple[str, list[str]]:
        from bench.gpu_commands import command_section

        return command_section(name, on)

    return section


SECTIONS: dict[str, Section] = {
    "tests": tests_section,
    **{name: world(name) for name in ("engines", "rings", "options")},
    **{name: commands(name) for name in ("commands", "verify")},
    "training": training,
    "rates": rates,
}


# ---- without a GPU ----


def predict(options: argparse.Namespace) -> int:
    from bench import gpu_longest
    from rlexp.preflight import quietly

    quietly()
    chosen = gpu_longest.options()
    known = gpu_longest.predict_longest(
        chosen, options.state, processes=options.processes, engines=options.engines or None
    )
    text = gpu_longest.report(known, chosen, options.commit)
    print(text)
    if options.write:
        put(options.write, text, "longest")
    return int(any("failed" in cell for cells in known.values() for cell in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
