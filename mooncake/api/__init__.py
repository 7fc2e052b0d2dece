"""The API server: HTTP and the chat APIs, tokenizer and templates; tokens in, text out.

Names are imported when they are first used: reading the server's settings must import neither
pydantic nor uvicorn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake.base.lazy_names import lazily

if TYPE_CHECKING:
    from mooncake.api.app import create_app
    from mooncake.api.backend import Backend, EventStream, GatewayBackend
    from mooncake.api.config import ApiConfig, ApiKey
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

__getattr__ = lazily(
    __name__,
    {
        "app": "create_app",
        "backend": "Backend EventStream GatewayBackend",
        "config": "ApiConfig ApiKey",
        "http.server": "bind serve",
        "model": "GenerationDefaults ServedModel load_served_model",
        "text.tokenizer": "Tokenizer load_tokenizer",
    },
)
