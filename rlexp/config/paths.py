"""The folders of configuration: ours, beside the package in a checkout or inside it in a wheel; and the user's own, in
the folder where a command is typed."""

from __future__ import annotations

from pathlib import Path


def config_root() -> Path:
    """Return the folder that holds `conf/`, `launchers/` and `sweeps/`."""
    package = Path(__file__).resolve().parent.parent
    return package if (package / "conf").is_dir() else package.parent


def conf_dir() -> Path:
    return config_root() / "conf"


def own_conf_dir() -> Path:
    """Return the folder of the user's own experiments: `conf/` here if there is one, else ours."""
    here = Path.cwd() / "conf"
    return here if (here / "experiment").is_dir() else conf_dir()


def experiments() -> dict[str, list[Path]]:
    """Return the files of each experiment: ours, the user's own, or both where two have one name."""
    files: dict[str, list[Path]] = {}
    for folder in dict.fromkeys((conf_dir().resolve(), own_conf_dir().resolve())):
        for path in sorted((folder / "experiment").glob("*.yaml")):
            files.setdefault(path.stem, []).append(path)
    return files
