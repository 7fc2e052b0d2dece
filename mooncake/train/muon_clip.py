"""MuonClip (Kimi K2 report, arXiv 2507.20534 section 2.1): Muon for matrices, AdamW for the rest,
and QK-Clip, which bounds attention logits by shrinking the weights that make them.

Owns the optimizer's state; no schedule, no data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from mooncake.train.attention import Attention

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5
_NO_DIVISION_BY_ZERO = 1e-7
_RMS = 0.2
"""The usual root mean square of AdamW's updates. Muon's updates are scaled to it."""


_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


class Mapped(Protocol):
    """Applies a function to each of a list, as `map` does, or by threads."""

    def __call__(
        self, function: Callable[[_Item], _Made], items: list[_Item], /
    ) -> Iterator[_Made]:
        """Return the results in the order of the items."""


@dataclass(frozen=True)
class Rates:
    """The settings that stay the same over a run."""

    weight_decay: float = 0.1
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    dtype: torch.dtype = torch.float32
    """The dtype in which Newton-Schulz computes."""


def orthogonalize(matrices: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return roughly `U V^T` for matrices [..., rows, columns] = `U S V^T`, computed in `dtype`.

    This is Newton-Schulz with the coefficients that pull singular values near 1 fastest. They end
    between about 0.7 and 1.2, which is near enough for a direction.
    """
    a, b, c = _NEWTON_SCHULZ
    wide = matrices.float()
    x = (wide / (torch.linalg.matrix_norm(wide, keepdim=True) + _NO_DIVISION_BY_ZERO)).to(dtype)
    x = x.view(-1, *x.shape[-2:])
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    for _ in range(_NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    made: torch.Tensor = x.mT if tall else x
    return made.reshape(matrices.shape).to(matrices.dtype)


class MuonClip:
    """One optimizer for a model. `step` reads the weights' gradients and does not clear them."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        rates: Rates,
        muon: bool = True,
        mapped: Mapped = map,
    ) -> None:
        """`muon` False: use AdamW for all weights, as a comparison. mapped: applies Newton-Schulz
        to the matrices of each shape.
        """
        self._rates = rates
        self._map = mapped
        self._weights = dict(named)
        self._by_muon = {
            name for name, weight in self._weights.items() if muon and is_muons(name, weight)
        }
        self._steps = 0
        self._first = {name: torch.zeros_like(w) for name, w in self._weights.items()}
        self._second = {
            name: torch.zeros_like(w)
            for name, w in self._weights.items()
            if name not in self._by_muon
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Take one step at the learning rate `rate`."""
        self._steps += 1
        moved: dict[str, torch.Tensor] = {
            name: weight for name, weight in self._weights.items() if weight.grad is not None
        }
        matrices = [weight for weight in moved.values() if weight.ndim > 1]
        if matrices:
            torch._foreach_mul_(matrices, 1 - rate * self._rates.weight_decay)
        by_muon = [name for name in moved if name in self._by_muon]
        rest = [name for name in moved if name not in self._by_muon]
        for names, update in ((by_muon, self._muon), (rest, self._adam)):
            if names:
                torch._foreach_add_([moved[name] for name in names], update(names), alpha=-rate)

    def _muon(self, names: list[str]) -> list[torch.Tensor]:
        """Return the updates of the weights. Matrices of one shape are orthogonalized together."""
        gradients = self._gradients(names)
        momenta = [self._first[name] for name in names]
        torch._foreach_mul_(momenta, self._rates.momentum)
        torch._foreach_add_(momenta, gradients)
        # Nesterov's momentum
        ahead = torch._foreach_add(gradients, momenta, alpha=self._rates.momentum)  # noqa: SLF001
        of_shape: dict[torch.Size, list[int]] = {}
        for place, one in enumerate(ahead):
            of_shape.setdefault(one.shape[-2:], []).append(place)
        updates = list(ahead)
        stacks = [
            torch.cat([ahead[place].reshape(-1, *shape) for place in places])
            for shape, places in of_shape.items()
        ]
        found = self._map(partial(orthogonalize, dtype=self._rates.dtype), stacks)
        for (shape, places), directions in zip(of_shape.items(), found, strict=True):
            made = directions * (_RMS * math.sqrt(max(shape)))
            numbers = [ahead[place].shape[:-2].numel() for place in places]
            for place, part in zip(places, torch.split(made, numbers), strict=True):
                updates[place] = part.view(ahead[place].shape)
        return updates

    def _adam(self, names: list[str]) -> list[torch.Tensor]:
        gradients = self._gradients(names)
        first_beta, second_beta = self._rates.betas
        first, second = ([state[name] for name in names] for state in (self._first, self._second))
        torch._foreach_lerp_(first, gradients, 1 - first_beta)
        squares = torch._foreach_mul(gradients, gradients)  # noqa: SLF001
        torch._foreach_lerp_(second, squares, 1 - second_beta)
        means = torch._foreach_div(first, 1 - first_beta**self._steps)  # noqa: SLF001
        spreads = torch._foreach_div(second, 1 - second_beta**self._steps)  # noqa: SLF001
        torch._foreach_sqrt_(spreads)
        torch._foreach_add_(spreads, self._rates.eps)
        torch._foreach_div_(means, spreads)
        return list(means)

    def _gradients(self, names: list[str]) -> list[torch.Tensor]:
        found = [self._weights[name].grad for name in names]
        return [gradient for gradient in found if gradient is not None]

    def state(self) -> dict[str, Any]:
        """Return all that a resumed run needs, by name."""
        return {"steps": self._steps, "first": self._first, "second": self._second}

    def restore(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        self._steps = state["steps"]
        for own, saved in ((self._first, state["first"]), (self._second, state["second"])):
            for name, value in own.items():
                value.copy_(saved[name])


def is_muons(name: str, weight: torch.Tensor) -> bool:
    """Whether Muon updates this weight: a matrix that is neither embedding nor head."""
    return weight.ndim > 1 and "embed_tokens" not in name and "lm_head" not in name


@torch.no_grad()
def clip_qk(attention: Attention, limit: float) -> torch.Tensor:
    """Shrink the heads whose largest logit passed `limit`. Return gamma of each head, [heads].

    A head's content parts of query and key are scaled by sqrt(gamma) each, its rotary query by
    gamma. The rotary key stays, because all heads share it. So both products shrink by gamma.
    Resets the largest logits.
    """
    gamma = (limit / attention.max_logits).clamp(max=1)
    attention.max_logits = torch.zeros_like(attention.max_logits)
    root = gamma.sqrt()[:, None, None]
    query, key = (
        product.weight.detach().view(attention.heads, -1, product.weight.shape[1])
        for product in (attention.q_b_proj, attention.kv_b_proj)
    )
    query[:, : attention.nope] *= root
    query[:, attention.nope :] *= gamma[:, None, None]
    key[:, : attention.nope] *= root
    return gamma


class NormClip:
    """Scales down gradients whose norm is above the 95 % quantile of the last norms.

    The norms stay on the device that computes them, which need not wait for the host.
    """

    def __init__(self, quantile: float = 0.95, window: int = 128) -> None:
        self._quantile = quantile
        self._window = window
        self._norms = torch.empty(0)
        """The last norms, oldest first; float32."""

    @torch.no_grad()
    def clip(self, weights: Iterable[nn.Parameter]) -> torch.Tensor:
        """Scale the gradients down to the quantile when they exceed it. Return their norm
        before, [].
        """
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        norm: torch.Tensor = torch.stack(torch._foreach_norm(gradients)).norm()  # noqa: SLF001
        if self._full:
            torch._foreach_mul_(gradients, (self.limit().to(norm.device) / norm).clamp(max=1))
        self._norms = torch.cat((self._norms.to(norm.device), norm[None]))[-self._window :]
        return norm

    @property
    def _full(self) -> bool:
        return len(self._norms) == self._window

    def limit(self) -> torch.Tensor:
        """Return the quantile, []. It is infinite until the window has been filled once."""
        if not self._full:
            return torch.tensor(math.inf)
        place = min(self._window - 1, int(self._quantile * self._window))
        limit: torch.Tensor = self._norms.sort().values[place]
        return limit

    def state(self) -> list[float]:
        """Return the recorded norms, oldest first."""
        norms: list[float] = self._norms.tolist()
        return norms

    def restore(self, norms: list[float]) -> None:
        """Load what `state` returned."""
        self._norms = torch.tensor(norms)
