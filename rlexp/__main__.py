"""`python -m rlexp [overrides]`: Hydra composes the configuration, and `run/job.py` runs it. Imports no torch."""

from __future__ import annotations

import os
import sys

import hydra
from omegaconf import DictConfig

from rlexp.base.version import __version__
from rlexp.config import load
from rlexp.config.explain import explained
from rlexp.config.paths import conf_dir
from rlexp.launch import hydra_launchers

os.environ.setdefault("RLEXP_VERSION", __version__)
load.register()
hydra_launchers.register()


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
def main(cfg: DictConfig) -> None:
    # One call of an importable function: submitit pickles `main` by value.
    from rlexp.run.job import run_job

    run_job(cfg)


def cli() -> int:
    if "--version" in sys.argv[1:]:  # Hydra would give its own
        sys.stdout.write(f"rlexp {__version__}\n")
        return 0
    from rlexp.run.sweep_end import end_sweeps

    return end_sweeps(explained(run))


def run() -> int:
    """Compose the configuration and train, and return the exit code."""
    from rlexp.launch.local import Interrupted
    from rlexp.launch.stops import ENDS_WITH_PARENT, end_with_parent
    from rlexp.run.job import run_as_joined_rank

    if os.environ.pop(ENDS_WITH_PARENT, None):
        end_with_parent()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors are raised here instead of in Hydra's own report
    try:
        sys.argv[1:] = load.open_ended(sys.argv[1:])
        if not run_as_joined_rank(sys.argv[1:]):
            main()
    except Interrupted as stop:
        return stop.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(cli())
