"""Run `verify` on configurations of the list, one after another, in a process under a plan.

    python -m tests.helpers.mutants.examine NAME ...

Each prints a line of JSON. Where a change is planted, the first that finds it is the last.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from rlexp.base.errors import UserError
from rlexp.launch.local import run_ranks
from tests.helpers.faults.verified import verify_by
from tests.helpers.mutants.configurations import CONFIGURATIONS
from tests.helpers.mutants.planting import VARIABLE, Plan
from tests.helpers.mutants.plugin import noted
from tests.helpers.mutants.runs import VERIFY


def found(name: str) -> str | None:
    """Return the finding of `verify` on a configuration, or None if it passes."""
    try:
        failure = verify_by(
            lambda target, ranks, args, options: run_ranks(target, ranks, args, **options),
            CONFIGURATIONS[name], search=False,
        ).failure  # fmt: skip
    except UserError as error:
        return f"raised {str(error).splitlines()[0][:80]}"
    return None if failure is None else f"step {failure.step}, {failure.stage}, {failure.module}"


def main(*names: str) -> int:
    plan = Plan.read(Path(os.environ[VARIABLE]))
    for name in names:
        log = Path(plan.log or os.devnull)
        before = log.stat().st_size if plan.log and log.exists() else 0
        began = time.monotonic()
        said = found(name)
        row = {"name": f"{VERIFY}{name}", "found": said, "seconds": time.monotonic() - began}
        print(json.dumps(row | (noted(log, before) if plan.log else {})), flush=True)
        if said is not None and plan.log is None:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
