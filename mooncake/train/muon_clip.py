"""MuonClip (Kimi K2 report, arXiv 2507.20534 section 2.1): Muon for matrices, AdamW for the rest,
and QK-Clip, which bounds attention logits by shrinking the weights that make them.

Owns the optimizer's state; no schedule, no data.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mooncake.train.attention import Attention

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5
_NO_DIVISION_BY_ZERO = 1e-7
_RMS = 0.2
"""The usual root mean square of AdamW's updates. Muon's updates are scaled to it."""


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
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    for _ in range(_NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    made: torch.Tensor = x.mT if tall else x
    return made.to(matrices.dtype)


class MuonClip:
    """One optimizer for a model. `step` reads the gradients of the weights and leaves them."""

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], rates: Rates, muon: bool = True
    ) -> None:
        """`muon` False: use AdamW for all weights, as a comparison."""
        self._rates = rates
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
        for name, weight in self._weights.items():
            if weight.grad is None:
                continue
            if weight.ndim > 1:
                weight.mul_(1 - rate * self._rates.weight_decay)
            update = self._muon(name) if name in self._by_muon else self._adam(name)
            weight.add_(update, alpha=-rate)

    def _muon(self, name: str) -> torch.Tensor:
        gradient = self._gradient(name)
        momentum = self._first[name]
        momentum.mul_(self._rates.momentum).add_(gradient)
        ahead = gradient.add(momentum, alpha=self._rates.momentum)  # Nesterov's momentum
        return orthogonalize(ahead, self._rates.dtype) * (
            _RMS * math.sqrt(max(gradient.shape[-2:]))
        )

    def _adam(self, name: str) -> torch.Tensor:
        gradient = self._gradient(name)
        first_beta, second_beta = self._rates.betas
        first, second = self._first[name], self._second[name]
        first.lerp_(gradient, 1 - first_beta)
        second.lerp_(gradient.square(), 1 - second_beta)
        mean = first / (1 - first_beta**self._steps)
        spread = (second / (1 - second_beta**self._steps)).sqrt_()
        return mean / spread.add_(self._rates.eps)

    def _gradient(self, name: str) -> torch.Tensor:
        gradient = self._weights[name].grad
        assert gradient is not None
        return gradient

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
    gamma = (limit / attention.max_logits.clamp(min=limit)).to(attention.max_logits.dtype)
    attention.max_logits = torch.zeros_like(attention.max_logits)
    if bool((gamma < 1).any()):
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
    """Scales down gradients whose norm is above the 95 % quantile of the last norms."""

    def __init__(self, quantile: float = 0.95, window: int = 128) -> None:
        self._quantile = quantile
        self._norms: deque[float] = deque(maxlen=window)

    @torch.no_grad()
    def clip(self, weights: Iterable[nn.Parameter]) -> float:
        """Scale the gradients down to the quantile when they exceed it. Return their norm
        before.
        """
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
        limit = self.limit()
        if norm > limit:
            for gradient in gradients:
                gradient.mul_(limit / norm)
        self._norms.append(norm)
        return norm

    def limit(self) -> float:
        """Return the quantile. It is infinite until the window has been filled once."""
        if len(self._norms) < (self._norms.maxlen or 0):
            return math.inf
        ordered = sorted(self._norms)
        return ordered[min(len(ordered) - 1, int(self._quantile * len(ordered)))]

    def state(self) -> list[float]:
        """Return the recorded norms, oldest first."""
        return list(self._norms)

    def restore(self, norms: list[float]) -> None:
        """Load what `state` returned."""
        self._norms.clear()
        self._norms.extend(norms)
