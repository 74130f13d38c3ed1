"""What the launcher tells its ranks, and what some answer: plain data, so that it need not import torch itself."""

from __future__ import annotations

import dataclasses
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlexp.config.schema import Config, LayoutName, ModelConfig, ReferenceConfig
from rlexp.launch.joining import RankSpec
from rlexp.verify.recording import Recording, Samples

if TYPE_CHECKING:
    from rlexp.config.checks.layout import Choice
    from rlexp.preflight.rehearsal.sharding import KeptBytes

SHARE = 0.7  # of the free memory


def run_job(spec: RankSpec, target: str, *args: Any) -> Any:
    """Run a function of this package, `module.function`, on a rank."""
    module, name = target.split(".")
    return pkgutil.resolve_name(f"rlexp.verify.{module}:{name}")(spec, *args)


@dataclass(frozen=True)
class VerifyPlan:
    """The size of a verification. `model` is an ordinary model of transformers, with all its layers or the first."""

    steps: int
    held_out: int
    layers: int
    of_layers: int
    parameters: int
    longest: int  # tokens of a sequence
    need: int  # bytes
    free: int
    choice: Choice  # the run's own layout; the estimate depends on the precision, and float64 must not change it
    model: ModelConfig
    reference: ReferenceConfig  # its path is a folder that is loaded as it is

    @property
    def left_out(self) -> str | None:
        """Say which layers were left out, if any."""
        if self.layers == self.of_layers:
            return None
        return (
            f"the model's first {self.layers} of {self.of_layers} layers: that many fit into {SHARE:g} of the "
            f"{gigabytes(self.free)} of free memory (see docs/verify.md)"
        )


def shrunk(cfg: Config, plan: VerifyPlan) -> Config:
    """The configuration with the model that fits, and with the name of the run's layout instead of `auto`."""
    inner = plan.choice.ulysses_size if plan.choice.layout is LayoutName.hybrid else None
    parallel = dataclasses.replace(cfg.parallel, layout=plan.choice.layout, ulysses_size=inner)
    return dataclasses.replace(cfg, parallel=parallel, model=plan.model, reference=plan.reference)


def ranks_of(cfg: Config) -> int:
    return cfg.parallel.world_size + cfg.rollout.sampling_ranks


@dataclass(frozen=True)
class RecordJob:
    """A configuration to run and record. Rank 0 writes gradients and weights to `folder`."""

    cfg: Config
    held_out: int
    folder: Path
    counted: bool = False  # whether to count what a rank keeps for the backward pass


@dataclass(frozen=True)
class AloneJob:
    """What is computed alone: the steps of a recorded run in a configuration of float64."""

    cfg: Config
    given: Recording
    steps: int
    held_out: int
    folder: Path
    exact: bool = True  # whether the recorded run computed in float64, its reward models too
    rounding: float = 1e-11  # by which log-probabilities may differ that tokens were drawn from


@dataclass(frozen=True)
class Parts:
    """The steps whose gradients to compute without an engine, the weights to read, and the folder to write to."""

    cfg: Config
    steps: int
    weights: Path
    folder: Path
    drawn: Samples | None = None


@dataclass(frozen=True)
class KeptOnRank:
    kept: KeptBytes
    tokens: int  # of the rank in the micro-batch, padding included


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.3g} GB"
