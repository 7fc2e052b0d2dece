"""The figures and examples that come with the package: `configs/` of the repository, which a wheel
holds as `mooncake/configs/`.
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


def configs() -> Path:
    """Return the folder of shipped configurations: inside the package where it was installed from
    a wheel, else at the top of the repository.
    """
    package = Path(mooncake.__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def figures(name: str, kind: type[Figures]) -> Figures:
    """Return the figures of a model or of hardware, by name or as a JSON file.

    Raises:
        ConfigError: there are none of that name, or the file is malformed.
    """
    folder = configs() / FOLDERS[kind]
    path = Path(name) if name.endswith(".json") else folder / f"{name}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        known = ", ".join(sorted(path.stem for path in folder.glob("*.json")))
        raise ConfigError(f"no figures of {name!r}; known: {known}") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {error}") from None
