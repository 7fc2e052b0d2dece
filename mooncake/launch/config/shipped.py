"""Finds what comes with the package: figures and examples (`configs/` of the repository,
`mooncake/configs/` in a wheel) and the demonstration model in `mooncake/k2-demo/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

import mooncake
from mooncake.base import ConfigError
from mooncake.sim.world.cost_model import HardwareFigures, ModelFigures

Figures = TypeVar("Figures", ModelFigures, HardwareFigures)
FOLDERS = {ModelFigures: "models", HardwareFigures: "hardware"}
DEMO = "k2-demo"
"""The name of the checkpoint in the package."""


def configs() -> Path:
    """Return the folder of shipped configurations: inside the package where it was installed from
    a wheel, else at the top of the repository.
    """
    package = Path(mooncake.__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def checkpoint(model: str) -> Path:
    """Return the directory of a checkpoint: `model`, or the shipped one if that is its name and no
    such directory exists here.
    """
    given = Path(model)
    if model == DEMO and not given.exists():
        return Path(mooncake.__file__).resolve().parent / DEMO
    return given


def shape_of(model: str) -> Path | None:
    """Return the directory with the shipped `config.json` of a model of this name, without weights,
    if `model` itself does not exist. That is enough for a plan. Return None if there is none.
    """
    found = configs() / FOLDERS[ModelFigures] / Path(model).name
    return found if not Path(model).exists() and (found / "config.json").is_file() else None


def figures(name: str, kind: type[Figures]) -> Figures:
    """Return the figures of a model or of hardware, by name or as a JSON file.

    Raises:
        ConfigError: no figures have that name, or the file is malformed.
    """
    folder = configs() / FOLDERS[kind]
    path = Path(name) if name.endswith(".json") else folder / f"{name}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        known = ", ".join(sorted(path.stem for path in folder.glob("*.json")))
        raise ConfigError(f"there are no figures of {name!r}; known: {known}") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {error}") from None
