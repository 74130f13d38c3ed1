"""One job: from a composed configuration to ranks that train, here or in the world a launcher made."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from omegaconf import DictConfig

from rlexp.config import load, sizes
from rlexp.config.explain import explain
from rlexp.config.paths import conf_dir
from rlexp.config.schema import Config, EngineName
from rlexp.errors import ConfigError, UserError
from rlexp.launch import folder
from rlexp.launch.local import PRELOAD, Interrupted, run_ranks
from rlexp.launch.place import Place, prepare_environment


def run_job(composed: DictConfig) -> None:
    """Hydra's job function. A user's mistake in a single run is one message, without Hydra's own line before it."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    try:
        cfg = load.from_hydra(composed)
        run_dir = Path(hydra.runtime.output_dir)
        if sizes.joined_world() is None:
            run_here(cfg, run_dir)
        else:
            run_joined(cfg, run_dir)
    except Exception as error:
        message = explain(error)
        if message is None or hydra.mode is not RunMode.RUN:
            raise
        sys.stderr.write(f"rlexp: {message}\n")
        sys.exit(1)


def run_here(cfg: Config, run_dir: Path) -> None:
    """Start this machine's ranks and wait for them."""
    folder.create(cfg, run_dir)
    prepare_environment(cfg.launch.device.value, cfg.launch.torch_threads)
    preload = PRELOAD + (("deepspeed",) if cfg.engine.name is not EngineName.torch else ())
    try:
        run_ranks(
            train_rank,
            cfg.parallel.world_size,
            (str(run_dir),),
            device=cfg.launch.device.value,
            log_dir=run_dir / "logs",
            preload=preload,
        )
    except Interrupted as stop:
        folder.close(run_dir, "stopped", str(stop))
        sys.stderr.write(f"\nrlexp: {stop}; the run is in {run_dir}\n")
        sys.exit(stop.exit_code)
    except Exception as error:
        folder.close(run_dir, "failed", str(error))
        raise
    folder.close(run_dir, "finished")


def train_rank(place: Place, run_dir: str) -> None:
    """What one rank of this machine runs."""
    from rlexp.launch.place import join
    from rlexp.train.run import train

    cfg = load.from_file(Path(run_dir) / "config.yaml")
    join(place, cfg.launch.device.value, cfg.launch.timeout_seconds, cfg.launch.torch_threads)
    train(cfg, Path(run_dir))


def run_as_joined_rank(argv: list[str]) -> bool:
    """Under torchrun or srun, ranks other than 0 compose without a folder of their own: rank 0 says where it is."""
    if not sizes.joined_rank():
        return False
    if any(argument in ("-m", "--multirun") for argument in argv):
        raise ConfigError("-m: a multirun starts its own ranks. Start it without torchrun or srun.")
    if not any(argument.startswith("-") for argument in argv):  # --help and --cfg are rank 0's to answer
        from hydra import compose, initialize_config_dir

        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = compose("config", overrides=argv)
        run_joined(load.from_hydra(composed), None)
    return True


def run_joined(cfg: Config, run_dir: Path | None) -> None:
    """Be one rank of the world that a launcher made. Rank 0's folder is everybody's."""
    place = Place.joined()
    assert place is not None
    prepare_environment(cfg.launch.device.value, cfg.launch.torch_threads)
    from rlexp.launch.place import join
    from rlexp.train.run import agreed_folder, train

    try:
        if place.rank == 0:
            assert run_dir is not None
            folder.create(cfg, run_dir)
        join(place, cfg.launch.device.value, cfg.launch.timeout_seconds, cfg.launch.torch_threads)
        run_dir = agreed_folder(run_dir)
        train(cfg, run_dir)
    except BaseException as error:
        if place.rank == 0:
            if run_dir is not None:
                folder.close(run_dir, "failed", str(error) or type(error).__name__)
            raise
        # Hydra would catch this and let the rank exit with 0, and the others would wait for it.
        sys.stderr.write(f"rank {place.rank}: {error if isinstance(error, UserError) else traceback.format_exc()}\n")
        sys.stderr.flush()
        os._exit(1)
    if place.rank == 0:
        folder.close(run_dir, "finished")
