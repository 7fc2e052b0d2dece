"""Settings of the door. Frozen; `launch` fills them from flags and files."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """A key, whose it is and what it may use. A limit of None is no limit."""

    digest: bytes = field(repr=False)
    """SHA-256 of the key: the key itself is not kept."""
    name: str
    """For messages."""
    tenant: str = ""
    """Shares fairly with other tenants, and never their cached blocks."""
    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    """Of prompts and answers together."""
    max_concurrent: int | None = None
    """Requests at a time."""


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """Files for HTTPS, in PEM."""

    certfile: str
    keyfile: str | None = None
    """None: the key is in `certfile`."""
    ca_certs: str | None = None
    """Authorities of client certificates."""
    cert_reqs: int = 0
    """Client certificates: 0 = not asked for, 1 = checked where one is given, 2 = needed."""


@dataclass(frozen=True, kw_only=True)
class ApiConfig:
    """How and to whom the door is open. Every limit's answer is an error that names the limit."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 = any free port, told to the `ready` callback."""
    gateway_id: str = ""
    """This gateway's name in its cluster."""
    served_model_names: tuple[str, ...] = ()
    """Names that `model` may have, the first is reported back; empty = those of the model."""
    api_keys: tuple[str, ...] = ()
    """Any of them opens all routes; empty = no key is asked for."""
    keys: tuple[ApiKey, ...] = ()
    """Further keys, each with a tenant and limits."""
    tls: TlsConfig | None = None
    """None: plain HTTP."""
    cors_origins: tuple[str, ...] = ()
    """Web origins whose pages may call us; "*" = all."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Larger bodies get 413. A prompt of 256k tokens is about 1.5 MB."""
    max_body_cost: int = 1 << 19
    """Bodies of more values get 413 too: taking them in would hold up all streams. `json_cost` says
    what counts how much."""
    max_choices: int = 128
    """Largest `n`."""
    max_sequences: int = 1024
    """Largest number of prompts times `n` in one call."""
    max_stops: int = 32
    max_stop_chars: int = 1024
    max_logprobs: int = 20
    max_header_bytes: int = 64 * 1024
    """Of request line and headers together; more get 431."""
    max_headers: int = 128
    header_timeout_s: float = 15.0
    """A connection has this long to send a request's headers; slower ones get 408."""
    body_timeout_s: float = 30.0
    """A body may take this long, and longer only as it comes with `min_body_bytes_per_s`."""
    min_body_bytes_per_s: int = 4096
    write_timeout_s: float = 60.0
    """A client that takes nothing of its answer for this long is cut off, its request aborted."""
    keep_alive_s: int = 120
    """Idle connections stay open longer than usual proxies' 60 to 90 s, so that the proxy is the
    one to close and never sends a request into a closing connection."""
    drain_s: float = 30.0
    """On shutdown, running requests get this long before they are ended with an error."""
    allow_special_tokens_in_chat: bool = False
    """Whether a message that spells a control token gets that token. No: it could end its turn and
    speak as the system or the model. /v1/completions always takes a prompt as it is written."""
    max_listeners: int = 64
    """Open pages that follow the cluster; more get 429."""
    feed_s: float = 1.0
    """Between two events of the cluster's feed."""
    access_log: bool = False
    docs: bool = True
