"""What a run leaves on disk: its state, from which it can resume bit for bit, and the checkpoint
that serves. Both use the safetensors format and appear whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from mooncake.base import CheckpointError
from mooncake.model.checkpoint.tensor_cuts import tensor_shapes
from mooncake.train.model import TrainedK2
from mooncake.train.muon_clip import MuonClip, NormClip

STATE_NAME = "training.state"
"""A file in the safetensors format, named so that nobody takes it for weights."""
WEIGHTS_NAME = "model.safetensors"


def save_state(
    path: Path,
    model: TrainedK2,
    optimizer: MuonClip,
    norms: NormClip | None,
    progress: dict[str, Any],
) -> None:
    """Write all that a run needs to resume. `progress`: further values to restore, as JSON."""
    state = optimizer.state()
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    for kind in ("first", "second"):
        tensors |= {f"{kind}/{name}": value for name, value in state[kind].items()}
    rest = {
        "progress": progress,
        "optimizer_steps": state["steps"],
        "norms": norms.state() if norms else [],
    }
    _save(path, tensors, {"run": json.dumps(rest)})


def load_state(
    path: Path, model: TrainedK2, optimizer: MuonClip, norms: NormClip | None
) -> dict[str, Any]:
    """Load a saved state and return its `progress`.

    Raises:
        CheckpointError: the file is broken, or belongs to another model or optimizer.
    """
    parts: dict[str, dict[str, torch.Tensor]] = {"model": {}, "first": {}, "second": {}}
    try:
        with safe_open(path, framework="pt") as file:
            rest = json.loads(file.metadata()["run"])
            for key in file.keys():  # noqa: SIM118  (a safetensors handle is no mapping)
                kind, _, name = key.partition("/")
                parts[kind][name] = file.get_tensor(key)
        model.load_state_dict(parts["model"])
        optimizer.restore({**parts, "steps": rest["optimizer_steps"]})
        if norms is not None:
            norms.restore(rest["norms"])
        progress: dict[str, Any] = rest["progress"]
    except (KeyError, RuntimeError, SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{path}: not the state of this model and optimizer ({error}); "
            "train into another directory, or remove it to begin anew"
        ) from error
    return progress


def write_weights(directory: Path, model: TrainedK2, dtype: torch.dtype) -> None:
    """Write the weights into a checkpoint's directory under their public names."""
    tensors = {
        name: value.to(torch.float32 if name.endswith("correction_bias") else dtype).contiguous()
        for name, value in named_tensors(model)
    }
    _save(directory / WEIGHTS_NAME, tensors, {"format": "pt"})


@torch.no_grad()
def load_weights(directory: Path, model: TrainedK2) -> None:
    """Load what `write_weights` wrote.

    Raises:
        CheckpointError: the file is broken, or belongs to a model of another shape.
    """
    path = directory / WEIGHTS_NAME
    own = dict(named_tensors(model))
    try:
        stored = load_file(path)
        shapes = ({name: each.shape for name, each in tensors.items()} for tensors in (own, stored))
        if next(shapes) != next(shapes):
            raise ValueError("its tensors have other names or shapes")
        for name, value in own.items():
            value.copy_(stored[name])
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{path}: no run of this preset can begin with these weights ({error}); give a "
            "directory in which `mooncake train` has trained the same preset"
        ) from error


def named_tensors(model: TrainedK2) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all weights under the names of a DeepSeek-V3 checkpoint, where each expert has its own.

    The MTP layer is layer `num_hidden_layers`, with copies of the embedding and the head.
    """
    own = model.state_dict()
    for name in tensor_shapes(model.spec):
        yield name, own_tensor(own, name.removeprefix("model."))
    if model.mtp is None:
        return
    prefix = f"model.layers.{model.spec.num_hidden_layers}."
    for name, value in own.items():
        if not name.startswith("mtp."):
            continue
        if ".mlp.experts." not in name:
            yield prefix + name.removeprefix("mtp."), value
            continue
        kind = name.split(".")[-2]
        for expert, matrix in enumerate(value):
            yield f"{prefix}mlp.experts.{expert}.{kind}.weight", matrix
    yield prefix + "embed_tokens.weight", own["embed_tokens.weight"]
    yield prefix + "shared_head.head.weight", own["lm_head.weight"]


def own_tensor(own: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return tensor `name` of a checkpoint from the trained model, which stacks experts."""
    before, experts, after = name.partition(".mlp.experts.")
    if not experts:
        return own[name]
    number, kind = after.split(".", 1)
    return own[f"{before}.mlp.experts.{kind}"][int(number)]


def _save(path: Path, tensors: Mapping[str, torch.Tensor], meta: dict[str, str]) -> None:
    staging = path.with_name(f".{path.name}.new")
    own = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    save_file(own, staging, metadata=meta)
    staging.chmod(0o644)
    with open(staging, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(staging, path)
