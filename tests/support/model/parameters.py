"""How many weights a model has, by the shapes of all its tensors: to compare with its bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mooncake.base import ModelSpec
from mooncake.model.checkpoint.tensor_cuts import ROUTED, tensor_shapes


@dataclass(frozen=True)
class ParameterCount:
    """Number of weights; `router`, with its bias, is part of `total`."""

    total: int
    router: int
    active: int
    """Read for one token: of the routed experts only those a token is sent to."""


def count_parameters(spec: ModelSpec) -> ParameterCount:
    """Return the number of parameters of a model of this shape."""
    sizes = {name: math.prod(shape) for name, shape in tensor_shapes(spec).items()}
    routed = sum(size for name, size in sizes.items() if ROUTED in name)
    idle = routed * (spec.n_routed_experts - spec.num_experts_per_tok) // spec.n_routed_experts
    total = sum(sizes.values())
    return ParameterCount(
        total=total,
        router=sum(size for name, size in sizes.items() if ".mlp.gate." in name),
        active=total - idle,
    )
