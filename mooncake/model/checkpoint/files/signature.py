"""Says whether one checkpoint can take the place of another while a model is served. Stateless."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mooncake.base import CheckpointError, ModelSpec


@dataclass(frozen=True)
class Signature:
    """The model of a checkpoint, and how each of its tensors is stored: (dtype, shape) by name."""

    spec: ModelSpec
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]

    def check_replaces(self, present: Signature, path: Path) -> None:
        """Raise CheckpointError unless a model of the signature `present` can go on with the
        weights at `path`, which have this signature.
        """
        for name in ModelSpec.__struct_fields__:
            new, old = getattr(self.spec, name), getattr(present.spec, name)
            if new != old:
                raise CheckpointError(
                    f"{path / 'config.json'}: {name} is {new!r}, and the model that is served has "
                    f"{old!r}: start a cluster of its own for it"
                )
        for name in sorted(self.tensors.keys() | present.tensors.keys()):
            stored, served = self.tensors.get(name), present.tensors.get(name)
            if stored != served:
                raise CheckpointError(
                    f"{path}: tensor {name} is {_shown(stored)}, and in the weights that are "
                    f"served {_shown(served)}: save the new weights in the format of the old ones"
                )


def _shown(stored: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if stored is None else f"{stored[0]} {list(stored[1])}"
