"""Who may come in, and under which name the call runs: API keys, their limits and request ids.

Plain ASGI because it stands in every request's way: no task, no queue, no copy of the stream. Owns
the accounts of all keys.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mooncake.api.config import ApiKey
from mooncake.api.http import error_response
from mooncake.api.limits import Account, Limited
from mooncake.base import Clock, IdSource, Unauthorized
from mooncake.telemetry.events import Recorder, Refused

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/metrics", "/version", "/docs", "/openapi.json"})
"""What needs no key: probes, scrapers and the documentation have none, and the page asks for it."""

PAGE_PATH = "/page/"
"""Where the page's own files are: the same for everybody."""

_PLAIN_ID = re.compile(r"[\x21-\x7e]{1,128}")


def unlimited_keys(keys: Sequence[str]) -> list[ApiKey]:
    """Return plain keys as `ApiKey`s without limits, numbered."""
    return [
        ApiKey(digest=hashlib.sha256(key.encode()).digest(), name=f"key {number}")
        for number, key in enumerate(keys, 1)
    ]


class Keyring:
    """The accounts of all keys. What a key has used and who runs under it stay with it when the
    keys change; calls of a key that is taken out may finish.
    """

    def __init__(self, fixed: Sequence[ApiKey], keys: Sequence[ApiKey]) -> None:
        """`fixed` are let in whatever the others change to."""
        self._fixed = fixed
        self._accounts: dict[bytes, Account] = {}
        self.replace(keys)

    def __len__(self) -> int:
        return len(self._accounts)

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Let in these keys from now on, and no others but the fixed ones."""
        before, self._accounts = self._accounts, {}
        for key in (*self._fixed, *keys):
            account = self._accounts[key.digest] = before.get(key.digest) or Account(key)
            account.change(key)

    def find(self, key: bytes) -> Account | None:
        """Return the account of a key as it came on the wire, None where it is not one of ours."""
        digest = hashlib.sha256(key).digest()
        # All keys are compared, each in constant time: the time tells nothing about any of them.
        found = None
        for account in self._accounts.values():
            if hmac.compare_digest(digest, account.key.digest):
                found = account
        return found


class Access:
    """Checks the key and its limits, names the request, echoes `X-Request-Id` on every reply.

    Every POST holds one of its account's permits until the reply has ended, however that was; the
    scope's state then has the `tenant` it runs for, and `charge`, to be told of tokens.
    """

    def __init__(
        self,
        app: ASGIApp,
        keyring: Keyring,
        ids: IdSource,
        clock: Clock,
        recorder: Recorder,
    ) -> None:
        self._app = app
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
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        account = None
        if len(self._keyring) and not _is_open(scope):
            account = self._account(headers)
            if account is None:
                error = Unauthorized("a valid API key is needed: send 'Authorization: Bearer KEY'")
                await error_response(error)(scope, receive, named_send)
                return
        if account is None or scope["method"] != "POST":
            await self._app(scope, receive, named_send)
            return
        try:
            account.enter(self._clock.now())
        except Limited as limited:
            self._refused(request_id, limited)
            await error_response(limited)(scope, receive, named_send)
            return
        state["tenant"] = account.key.tenant
        state["charge"] = lambda num_tokens: account.charge(num_tokens, self._clock.now())
        try:
            await self._app(scope, receive, named_send)
        finally:
            account.leave()

    def _refused(self, request_id: str, limited: Limited) -> None:
        self._recorder.record(
            Refused(
                request_id=request_id,
                at_s=self._clock.now(),
                status=limited.http_status,
                reason=limited.reason,
            )
        )

    def _account(self, headers: Headers) -> Account | None:
        """Return the account of the key in `headers`, None where it is not one of ours."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        return self._keyring.find(key.strip().encode("latin-1"))


def _is_open(scope: Scope) -> bool:
    path: str = scope["path"]
    return path in OPEN_PATHS or path.startswith(PAGE_PATH) or scope["method"] == "OPTIONS"
