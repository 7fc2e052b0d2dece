"""Mooncake: a disaggregated serving engine for Kimi-K2. See ARCHITECTURE.md for the floors."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake.launch.llm import LLM

__version__ = "0.1.0"

__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> object:
    """Bring `LLM` and all it needs only when somebody asks for it."""
    if name == "LLM":
        return importlib.import_module("mooncake.launch.llm").LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
