"""API keys, their limits, and the ids of requests.

It is plain ASGI because every request passes through it: no task, no queue, no copy of the stream.
Owns the accounts of all keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mooncake.api.config import ApiConfig, ApiKey
from mooncake.api.errors import ANTHROPIC_PATH, forbidden
from mooncake.api.http.limits import Account, InFlight, Limited, Shares
from mooncake.api.http.repeats import HEADER, Repeats
from mooncake.api.http.request_body import says_json
from mooncake.api.http.response import ErrorResponse
from mooncake.base import Clock, IdSource, MooncakeError, Priority, Unauthorized
from mooncake.telemetry.audit import OPERATOR_ROUTE, audit
from mooncake.telemetry.events import Recorder, Refused

OPEN_PATHS = frozenset(
    {
        "/", "/health", "/health/startup", "/health/ready", "/health/live", "/ping", "/metrics",
        "/version", "/docs", "/openapi.json",
    }
)  # fmt: skip
"""Paths that need no key: probes and scrapers have none, and the web page asks its user for one."""

PAGE_PATH = "/page/"
"""The path of the web page's own files; they need no key either."""

OPERATOR_PATH = "/v1/cluster/"
"""Paths that begin with this show hosts, processes and all requests: they need an operator's
key.
"""

OPERATOR_PATHS = frozenset(
    {
        "/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping", "/update_weights",
    }
)  # fmt: skip
"""Paths that are about the cluster as a whole: they need an operator's key, too."""

RECEIPT = "X-Mooncake-Receipt"
"""The header that names the receipt of a call."""

OWN_CALL = "own_call"
"""The entry of a scope's state by which this server asks itself; no connection can set it."""


class OwnCall(NamedTuple):
    """The key and the tenant for which this server calls itself, to ask a line of a batch."""

    key_name: str | None
    """The name of the API key; None: it was made without one."""
    tenant: str


LEAST_BODY_BYTES = 16 << 10
"""Bytes of bodies that each key may hold, however many others hold theirs."""

LEAST_LOGPROB_BYTES = 16 << 20
"""The same for log-probabilities: those of 131,072 tokens."""

_PLAIN_ID = re.compile(r"[\x21-\x7e]{1,128}")


def unlimited_keys(keys: Sequence[str]) -> list[ApiKey]:
    """Return plain keys as operators' `ApiKey`s with all classes and no limits, numbered."""
    return [
        ApiKey(
            digest=hashlib.sha256(key.encode()).digest(), name=f"key {number}",
            priorities=tuple(Priority), operator=True,
        )
        for number, key in enumerate(keys, 1)
    ]  # fmt: skip


class Keyring:
    """The accounts of all keys.

    A key's account, with what it has used and its running calls, survives a change of the keys.
    Running calls of a removed key may finish.
    """

    def __init__(self, fixed: Sequence[ApiKey], keys: Sequence[ApiKey]) -> None:
        """`fixed` keys stay valid whatever `replace` is called with."""
        self._fixed = fixed
        self._accounts: dict[bytes, Account] = {}
        self.replace(keys)

    def __len__(self) -> int:
        return len(self._accounts)

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Accept these keys and the fixed ones from now on, and no others."""
        before, self._accounts = self._accounts, {}
        for key in (*self._fixed, *keys):
            account = self._accounts[key.digest] = before.get(key.digest) or Account(key)
            account.change(key)

    def find(self, key: bytes) -> Account | None:
        """Return the account of a key as it came on the wire; None for an unknown key."""
        digest = hashlib.sha256(key).digest()
        # All keys are compared, each in constant time: the time tells nothing about any of them.
        found = None
        for account in self._accounts.values():
            if hmac.compare_digest(digest, account.key.digest):
                found = account
        return found

    def named(self, own: OwnCall) -> Account | None:
        """Return the account of the key by which a call of this server is made, if that key is
        still there and belongs to the same tenant.
        """
        for account in self._accounts.values():
            if (account.key.name, account.key.owner) == own:
                return account
        return None


class Access:
    """ASGI middleware that checks the key and its limits and puts `X-Request-Id` on every reply,
    and on Anthropic's routes the `Request-Id` that its clients read. A call that sets `receipt` in
    the scope's state gets that name on its reply, too.

    Every POST holds one of its account's permits until the reply has ended, however it ends. The
    scope's state gets: `request_id`, `key_name`, `tenant`, `priorities` (the classes that it may
    ask for), `key`, its `ApiKey`, `charge`, a function that counts tokens against the key's limit,
    `in_flight`, what this request holds of the memory that all share, and `is_proven`: whether the
    connection may outlive others. `is_operator` says whether it has an operator's key, or no key is
    needed.

    If no key is needed and only this machine is served, `Host` must name this machine: another site
    may make its own name resolve to 127.0.0.1. If no key is needed, a page of another site may send
    only what its browser asks for first.
    """

    def __init__(
        self,
        app: ASGIApp,
        keyring: Keyring,
        ids: IdSource,
        clock: Clock,
        recorder: Recorder,
        *,
        config: ApiConfig,
    ) -> None:
        self._app = app
        self._repeats = Repeats(app, config)
        self._is_local = _is_loopback(config.host)
        self._origins = frozenset(config.cors_origins)
        self._requests = Shares(config.max_concurrent, least=1)
        self._bodies = Shares(config.max_inflight_body_bytes, LEAST_BODY_BYTES)
        self._logprobs = Shares(config.max_inflight_logprob_bytes, LEAST_LOGPROB_BYTES)
        self._keyring = keyring
        self._ids = ids
        self._clock = clock
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _PLAIN_ID.fullmatch(given) else self._ids.hex(16)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id

        async def named_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                answered["X-Request-Id"] = request_id
                if scope["path"].startswith(ANTHROPIC_PATH):
                    answered["Request-Id"] = request_id
                if "receipt" in state:
                    answered[RECEIPT] = state["receipt"]
            await send(message)

        if self._is_local and not len(self._keyring) and not _is_loopback(_host_name(headers)):
            error: MooncakeError = forbidden(
                "without API keys this server answers to the names of its own machine only: send "
                "'Host: localhost', or set `api-key`",
            )
            await ErrorResponse(error)(scope, receive, named_send)
            return
        if not len(self._keyring) and self._is_of_another_site(scope, headers):
            error = forbidden(
                "without API keys no page of another site may send this: name its origin in "
                "`allowed-origins`, or set `api-key`",
            )
            await ErrorResponse(error)(scope, receive, named_send)
            return
        is_open = _is_open(scope) and not (scope["path"] == "/metrics" and _key_of(headers))
        needs_key = bool(len(self._keyring)) and not is_open
        own: OwnCall | None = state.get(OWN_CALL)
        account = None
        if needs_key:
            account = self._account(headers) if own is None else self._keyring.named(own)
        is_operator = account.key.operator if account is not None else not len(self._keyring)
        state["is_operator"] = is_operator
        if needs_key and account is None:
            error = Unauthorized("a valid API key is needed: send 'Authorization: Bearer KEY'")
            self._refused(request_id, error.http_status, "no_valid_key")
            if own is None:
                audit("proof_failed", proof="API key", whence=_client(scope), path=scope["path"])
            await ErrorResponse(error)(scope, receive, named_send)
            return
        if account is not None:
            state["key_name"] = account.key.name
            state["tenant"] = account.key.owner
            is_operators = _is_operators(scope["path"])
            if is_operators:
                self._audit(account.key, scope)
            if is_operators and not account.key.operator:
                error = forbidden(
                    f"{scope['path']} is about the whole cluster and the requests of all tenants: "
                    "use an operator's key (`operator: true` in `api-keys-file`, or `api-key`)"
                )
                await ErrorResponse(error)(scope, receive, named_send)
                return
        state["is_proven"] = account is not None or not len(self._keyring)
        if scope["method"] != "POST":
            await self._app(scope, receive, named_send)
            return
        try:
            with self._entered(account, state, headers):
                app = self._repeats if HEADER in headers else self._app
                await app(scope, receive, named_send)
        except Limited as limited:
            await ErrorResponse(limited)(scope, receive, named_send)

    def _is_of_another_site(self, scope: Scope, headers: Headers) -> bool:
        """Return whether a page of another site may have sent a POST. Browsers name its `Origin`,
        and ask first only for a body of JSON.
        """
        origin = headers.get("origin")
        if scope["method"] != "POST" or origin is None or says_json(headers):
            return False
        is_own = origin.partition("://")[2] == headers.get("host")
        return not is_own and not {origin, "*"} & self._origins

    @contextlib.contextmanager
    def _entered(
        self, account: Account | None, state: dict[str, Any], headers: Headers
    ) -> Iterator[None]:
        """Count a request as running in this block. Raises Limited when it may not run."""

        def refused(limited: Limited) -> None:
            self._refused(state["request_id"], limited.http_status, limited.reason)

        key = None if account is None else account.key.name
        in_flight = InFlight(self._requests, self._bodies, self._logprobs, key, refused)
        state["in_flight"] = in_flight
        try:
            if account is None:
                yield
                return
            try:
                repeats = self._repeats.knows(account.key.name, headers)
                account.enter(self._clock.now(), repeats=repeats)
                state["is_repeat"] = repeats
            except Limited as limited:
                refused(limited)
                raise
            state["priorities"] = account.key.priorities
            state["key"] = account.key
            state["charge"] = lambda num_tokens: account.charge(num_tokens, self._clock.now())
            try:
                yield
            finally:
                account.leave(repeats=repeats)
        finally:
            in_flight.end()

    def _audit(self, key: ApiKey, scope: Scope) -> None:
        """Record who uses an operator's route, or may not use it. A caller that may not chooses the
        path, so all its refusals are recorded as one kind.
        """
        event, kind = "operator_route_refused", key.name
        if key.operator:
            event, kind = OPERATOR_ROUTE, f"{key.name} {scope['path']}"
        audit(event, kind=kind, who=key.name, whence=_client(scope), path=scope["path"])

    def _refused(self, request_id: str, status: int, reason: str) -> None:
        at_s = self._clock.now()
        self._recorder.record(
            Refused(request_id=request_id, at_s=at_s, status=status, reason=reason)
        )

    def _account(self, headers: Headers) -> Account | None:
        """Return the account of the key in `headers`; None for an unknown key."""
        return self._keyring.find(_key_of(headers).encode("latin-1"))


def _key_of(headers: Headers) -> str:
    """Return the key that a request has; an empty one if it has none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = headers.get("x-api-key", "")
    return key.strip()


def _host_name(headers: Headers) -> str:
    """Return the name in `Host` without its port. Browsers always send the header; without it,
    return "localhost".
    """
    given = headers.get("host", "localhost")
    name = given.rpartition(":")[0] if re.search(r":[0-9]*$", given) else given
    return name.removeprefix("[").removesuffix("]").lower()


def _client(scope: Scope) -> str | None:
    return scope["client"][0] if scope.get("client") else None


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_operators(path: str) -> bool:
    return path.startswith(OPERATOR_PATH) or path in OPERATOR_PATHS


def _is_open(scope: Scope) -> bool:
    path: str = scope["path"]
    return path in OPEN_PATHS or path.startswith(PAGE_PATH) or scope["method"] == "OPTIONS"
