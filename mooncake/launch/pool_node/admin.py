"""The HTTP API of a pool node for operators: probes, figures, metrics, drain.

It owns a server and reads the node only between two events of its driver.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from http import HTTPStatus
from typing import Any

import msgspec

from mooncake.base import Drain
from mooncake.base.pool_messages import PoolState
from mooncake.base.rights import CredentialRole
from mooncake.identity import Trust
from mooncake.launch.host.credentials import SCHEME, RequestVerifier
from mooncake.launch.host.driver import Driver
from mooncake.launch.host.health import Health, metrics_route, probe_routes
from mooncake.launch.host.http_server import (
    Answer,
    HttpServer,
    Request,
    Route,
    TlsFiles,
    document,
    error,
)
from mooncake.launch.pool_node import metrics as pool_metrics

ANSWER_S = 5.0
"""A node whose driver does not answer within this time is not well."""


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the API listens, and the tokens it accepts besides requests signed with a
    credential. It travels to the node's process, so it holds no secret.
    """

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one."""
    token_digests: list[bytes] = []
    """SHA-256 of each token accepted as `Authorization: Bearer TOKEN`."""
    tls: TlsFiles | None = None
    """On the machine of the node."""


class PoolAdmin:
    """The API server of one node. It must be closed before the driver's memory is freed."""

    def __init__(
        self,
        settings: AdminSettings,
        trust: Trust,
        driver: Driver,
        about: dict[str, Any],
        health: Health,
        metrics: Callable[[], bytes],
    ) -> None:
        """Start to listen. `cluster` checks credentials; `about` is part of every answer to
        `stats`; `metrics` returns Prometheus' text.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._token_digests = settings.token_digests
        self._verifier = RequestVerifier(trust, time.monotonic)
        self._driver = driver
        self._about = about
        routes = {
            **probe_routes(lambda: [health.vitals()]),
            **metrics_route(metrics),
            "/v1/pool/stats": Route("GET", self._guarded(self._stats, *CredentialRole)),
            "/v1/pool/drain": Route(
                "POST", self._guarded(self._begin_drain, CredentialRole.OPERATOR)
            ),
        }
        self._server = HttpServer(settings.host, settings.port, routes, "admin-port", settings.tls)
        self.url = self._server.url

    def close(self) -> None:
        """Stop listening and answering."""
        self._server.close()

    def challenge(self) -> str:
        """Return the challenge that a signed request must answer."""
        return self._verifier.challenge()

    def _guarded(
        self, act: Callable[[], Answer], *roles: CredentialRole
    ) -> Callable[[Request], Answer]:
        """Return what answers those who have an admin token, or sign with a credential of one of
        `roles`.
        """

        def answer(request: Request) -> Answer:
            refused = self._refusal(request, roles)
            if refused is not None:
                return refused
            try:
                return act()
            except (CancelledError, TimeoutError):
                return error(HTTPStatus.SERVICE_UNAVAILABLE, "the node does not answer")

        return answer

    def _state(self) -> PoolState:
        """Return the node's figures. Raises TimeoutError or CancelledError when its driver is stuck
        or has ended.
        """
        asked = self._driver.call(lambda node, _: node.state())
        state: PoolState = asked.result(ANSWER_S)
        return state

    def _stats(self) -> Answer:
        return document(HTTPStatus.OK, {**pool_metrics.document(self._state()), **self._about})

    def _begin_drain(self) -> Answer:
        begin_drain(self._driver)
        return document(HTTPStatus.ACCEPTED, pool_metrics.document(self._state()))

    def _refusal(self, request: Request, roles: Sequence[CredentialRole]) -> Answer | None:
        """Return the answer to one who may not ask this; None: he may."""
        signer = self._verifier.signer(request.authorization, request.method, request.path)
        if signer is None and not self._has_token(request.authorization):
            return error(
                HTTPStatus.UNAUTHORIZED,
                "send 'Authorization: Bearer TOKEN' with an --admin-token of the node, or sign "
                "with the cluster secret or a credential, as `mooncake pool` does",
                WWW_Authenticate=f"{SCHEME} {self.challenge()}",
            )
        if signer is not None and not set(roles).intersection(signer.roles):
            wanted = " or ".join(sorted(role.value for role in roles))
            return error(
                HTTPStatus.FORBIDDEN,
                f"the credential {signer.name!r} may not do this: it takes one of "
                f"`mooncake credential --role {wanted}`",
            )
        return None

    def _has_token(self, authorization: str) -> bool:
        scheme, _, bearer = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return False
        given = hashlib.sha256(bearer.strip().encode("latin-1")).digest()  # as it came on the wire
        # All tokens are compared, each in constant time, so that the time reveals nothing of any.
        matches = [hmac.compare_digest(given, digest) for digest in self._token_digests]
        return any(matches)


def begin_drain(driver: Driver) -> None:
    """Have the node that `driver` drives take nothing more; return once it does."""
    driver.call(lambda node, now: node.handle(Drain(), now)).result(ANSWER_S)
