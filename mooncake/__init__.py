"""Mooncake: a disaggregated serving engine for Kimi-K2. See ARCHITECTURE.md for the floors."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake.api.adapters.python_call import CompletionOutput, RequestOutput, SamplingParams
    from mooncake.base import MooncakeError
    from mooncake.launch.llm import LLM, AsyncLLM
    from mooncake.launch.pool_client.session import PoolSession

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "MooncakeError",
    "PoolSession",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_HOMES = {
    "LLM": "launch.llm",
    "AsyncLLM": "launch.llm",
    "CompletionOutput": "api.adapters.python_call",
    "MooncakeError": "base",
    "PoolSession": "launch.pool_client.session",
    "RequestOutput": "api.adapters.python_call",
    "SamplingParams": "api.adapters.python_call",
}


def __getattr__(name: str) -> object:
    """Import the module of `name` when it is first used: importing `mooncake` stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"mooncake.{_HOMES[name]}"), name)
