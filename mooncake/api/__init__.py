"""The API server: HTTP and the chat APIs, tokenizer and templates; tokens in, text out.

Names are imported when they are first used: reading the server's settings must import neither
pydantic nor uvicorn.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake.api.app import create_app
    from mooncake.api.backend import Backend, EventStream
    from mooncake.api.config import ApiConfig, ApiKey
    from mooncake.api.gateway_backend import GatewayBackend
    from mooncake.api.http.server import bind, serve
    from mooncake.api.model import GenerationDefaults, ServedModel, load_served_model
    from mooncake.api.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "ApiConfig",
    "ApiKey",
    "Backend",
    "EventStream",
    "GatewayBackend",
    "GenerationDefaults",
    "ServedModel",
    "Tokenizer",
    "bind",
    "create_app",
    "load_served_model",
    "load_tokenizer",
    "serve",
]

_MODULES = {
    "app": "create_app",
    "backend": "Backend EventStream",
    "config": "ApiConfig ApiKey",
    "gateway_backend": "GatewayBackend",
    "http.server": "bind serve",
    "model": "GenerationDefaults ServedModel load_served_model",
    "text.tokenizer": "Tokenizer load_tokenizer",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """Import the module of `name` when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
