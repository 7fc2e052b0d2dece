"""Settings of the API server. Frozen; `launch` fills them from flags and files."""

from __future__ import annotations

from dataclasses import dataclass, field

from mooncake.base import Priority
from mooncake.base.tls_files import TlsFiles

MAX_SLO_MS = 3_600_000
"""The longest limit on latency that a call may ask for."""


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """An API key, its owner and its limits. A limit of None means no limit."""

    digest: bytes = field(repr=False)
    """SHA-256 of the key: the key itself is not kept."""
    name: str
    """The name that messages show."""
    tenant: str = ""
    """Tenants share the cluster fairly, and never share cached blocks; "" = the key's name."""
    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    """Tokens of prompts and answers together in a minute."""
    max_concurrent: int | None = None
    """Requests that may run at a time."""
    priorities: tuple[Priority, ...] = (Priority.INTERACTIVE,)
    """The classes of service that its requests may ask for."""
    slo_ttft_ms: int | None = None
    """The limit on the time to the first token of requests that ask for none; None = the server's.
    """
    slo_tbt_ms: int | None = None
    """The same for the gaps between tokens."""
    min_slo_ttft_ms: int | None = None
    """The strictest limit on the first token that its requests may ask for; None = any."""
    min_slo_tbt_ms: int | None = None
    """The same for the gaps between tokens."""
    operator: bool = False
    """True if it may see the cluster: hosts, processes and the requests of all tenants."""

    @property
    def owner(self) -> str:
        """The tenant that the key belongs to."""
        return self.tenant or self.name


@dataclass(frozen=True, kw_only=True)
class ApiConfig:
    """The address of the API server, the clients that it serves, and its limits. A request over a
    limit gets an error that names the limit.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    """The port; 0 = any free port, which the `ready` callback is told."""
    gateway_id: str = ""
    """This gateway's name in its cluster."""
    served_model_names: tuple[str, ...] = ()
    """Names that `model` may have; replies have the first one. Empty = the model's own names."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys of operators, with all classes. If this and `keys` are empty, no key is needed."""
    keys: tuple[ApiKey, ...] = ()
    """Further keys, each with a tenant, classes and limits."""
    tls: TlsFiles | None = None
    """Files for HTTPS; None: plain HTTP."""
    cors_origins: tuple[str, ...] = ()
    """Web origins whose pages may call this server; "*" = all."""
    max_body_bytes: int = 16 * 1024 * 1024
    """Larger bodies get 413. A prompt of 256k tokens is about 1.5 MB."""
    max_body_cost: int = 3 << 17
    """Bodies with more values get 413 too: parsing them would stop all streams. `http.request_body`
    says how values count.
    """
    max_inflight_body_bytes: int = 512 * 1024 * 1024
    """Bytes of bodies that running requests may have in memory together; more get 429."""
    max_inflight_logprob_bytes: int = 1 << 30
    """Bytes that the log-probabilities of running requests may take in memory together, if all
    answers get as long as they may; more get 429.
    """
    max_kept_answer_bytes: int = 64 * 1024 * 1024
    """Bytes of recorded answers to requests with an `Idempotency-Key`, for clients that repeat
    them.
    """
    max_receipts: int = 1024
    """Receipts of the last calls that are kept; 0: none. The tenant that has most loses its oldest.
    """
    batch_dir: str | None = None
    """The directory of files and batches; gateways may share it. None: there are none."""
    max_batch_lines: int = 50_000
    """Lines of one batch."""
    max_batch_file_bytes: int = 200 * 1024 * 1024
    """Bytes of one uploaded file; larger ones get 413."""
    max_tenant_batch_bytes: int = 4 * 1024**3
    """Bytes that all files of a tenant may take together, and the results of one batch. A file that
    does not fit gets 403; a line that does not fit ends in the error file.
    """
    max_tenant_batches: int = 32
    """Batches of a tenant that have not ended; more get 429."""
    kept_answer_s: float = 600.0
    """How long such an answer is kept after its end."""
    linger_s: float = 10.0
    """How long such a request continues without a client."""
    max_concurrent: int = 2048
    """Requests with a body that may run at a time, whether they have a permit or not."""
    max_connections: int = 4096
    """Connections that may be open. When there are more, the oldest on which no request has proven
    a key is closed.
    """
    max_choices: int = 128
    """Largest `n`."""
    max_sequences: int = 768
    """Largest number of prompts times `n` in one call. A tenant that is alone gets permits for
    these, and for others of its calls beside them.
    """
    max_stops: int = 32
    max_stop_chars: int = 1024
    max_logprobs: int = 20
    max_header_bytes: int = 64 * 1024
    """Bytes of request line and headers together; more get 431."""
    max_headers: int = 128
    header_timeout_s: float = 15.0
    """A connection has this long to send a request's headers; slower ones get 408."""
    body_timeout_s: float = 30.0
    """A body may take this long. It may take longer only if it comes at `min_body_bytes_per_s`."""
    min_body_bytes_per_s: int = 4096
    write_timeout_s: float = 60.0
    """A client that reads nothing of its answer for this long is cut off, and its request is
    aborted.
    """
    keep_alive_s: int = 120
    """Idle connections stay open longer than the 60 to 90 s of common proxies. So the proxy closes
    first and never sends a request into a closing connection.
    """
    drain_s: float = 30.0
    """On shutdown, running requests get this long before they are ended with an error."""
    allow_special_tokens_in_chat: bool = False
    """True if text in a message that spells a control token becomes that token. It could then end
    its turn and speak as the system or the model. Prompts of /v1/completions always may.
    """
    max_listeners: int = 64
    """The most clients that may follow the feed of cluster events; more get 429."""
    feed_s: float = 1.0
    """Seconds between two events of that feed."""
    enable_sleep_mode: bool = False
    """True if operators may pause the cluster, let it sleep and replace its weights."""
    access_log: bool = False
    """Log one line for every HTTP request."""
    docs: bool = True
