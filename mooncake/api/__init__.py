"""The door: HTTP and the OpenAI API, tokenizer and templates, tokens in, text out."""

from mooncake.api.app import (
    create_app,
)
from mooncake.api.backend import (
    Backend,
    EventStream,
    Sink,
    generate,
)
from mooncake.api.config import (
    ApiConfig,
    ApiKey,
    TlsConfig,
)
from mooncake.api.gateway_backend import (
    GatewayBackend,
)
from mooncake.api.model import (
    GenerationDefaults,
    ServedModel,
    load_served_model,
)
from mooncake.api.server import (
    bind,
    serve,
)
from mooncake.api.tokenizer import (
    Tokenizer,
    load_tokenizer,
)

__all__ = [
    "ApiConfig",
    "ApiKey",
    "Backend",
    "EventStream",
    "GatewayBackend",
    "GenerationDefaults",
    "ServedModel",
    "Sink",
    "TlsConfig",
    "Tokenizer",
    "bind",
    "create_app",
    "generate",
    "load_served_model",
    "load_tokenizer",
    "serve",
]
