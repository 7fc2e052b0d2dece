"""The HTTP API of a pool node for operators: probes, figures, metrics, drain, and its
address for clients. Figures and drain are for holders of a token, and for holders of a credential
who sign the request.

It owns a server and the verifier of signatures, and reads the node only between two events of its
driver.
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
from mooncake.base.tls_files import TlsFiles
from mooncake.identity.credential import Trust
from mooncake.launch.host.driver import Driver
from mooncake.launch.host.health import Health, metrics_route, probe_routes
from mooncake.launch.host.http_server import (
    Answer,
    HttpServer,
    Request,
    Route,
    document,
    error,
)
from mooncake.launch.host.secrets.credentials import SCHEME, RequestVerifier
from mooncake.launch.pool_node import metrics as pool_metrics
from mooncake.telemetry.audit import OPERATOR_ROUTE, audit

ANSWER_S = 5.0
"""A node whose driver does not answer within this time counts as unhealthy."""
ADDRESS = ("segment", "block_bytes")
"""What everybody may know about a node: where its memory is, and the size of its blocks."""


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The address of the API, and the tokens that it accepts besides requests signed with a
    credential. It travels to the node's process, so it holds no secret.
    """

    host: str = "127.0.0.1"
    port: int = 0
    """The port; 0: any free one."""
    token_digests: list[bytes] = []
    """SHA-256 of each token accepted as `Authorization: Bearer TOKEN`."""
    tls: TlsFiles | None = None
    """Files on the machine of the node."""


class Guard:
    """Lets callers in that have proven themselves. Threads may share it."""

    def __init__(self, trust: Trust, token_digests: Sequence[bytes] = ()) -> None:
        """`token_digests`: SHA-256 of each token that is accepted as `Authorization: Bearer
        TOKEN`.
        """
        self.verifier = RequestVerifier(trust, time.monotonic)
        self._token_digests = token_digests

    def route(self, method: str, act: Callable[[Request], Answer], *roles: CredentialRole) -> Route:
        """Return a route that is open to holders of a token, and to signed requests by credentials
        of `roles`.
        """

        def answer(request: Request) -> Answer:
            return self._refusal(request, roles) or act(request)

        return Route(method, answer)

    def _refusal(self, request: Request, roles: Sequence[CredentialRole]) -> Answer | None:
        """Return the answer to a caller that may not ask this, or None for a caller that may."""
        signer = self.verifier.signer(request.authorization, request.method, request.path)
        if signer is None and not self._has_token(request.authorization):
            if request.authorization:  # the first request of a signer has no header
                audit(
                    "proof_failed",
                    proof="signature or token",
                    whence=request.client,
                    path=request.path,
                )
            token = "send 'Authorization: Bearer TOKEN' with an --admin-token of the node, or "
            return error(
                HTTPStatus.UNAUTHORIZED,
                f"{token * bool(self._token_digests)}sign with the cluster secret or a "
                "credential, as `mooncake pool` does",
                WWW_Authenticate=f"{SCHEME} {self.verifier.challenge()}",
            )
        who = signer.name if signer is not None else "an admin token"
        may = signer is None or bool(set(roles).intersection(signer.roles))
        audit(
            OPERATOR_ROUTE if may else "operator_route_refused", kind=f"{who} {request.path}",
            who=who, whence=request.client, path=request.path,
        )  # fmt: skip
        if signer is not None and not may:
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


class PoolAdmin:
    """Serves the HTTP API of one node. Close it before the driver's memory is freed."""

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
        self._guard = guard = Guard(trust, settings.token_digests)
        self._driver = driver
        self._about = about
        routes = {
            **probe_routes(lambda: [health.vitals()]),
            **metrics_route(metrics),
            "/v1/pool/address": Route("GET", lambda _: self._address()),
            "/v1/pool/stats": guard.route("GET", _answering(self._stats), *CredentialRole),
            "/v1/pool/drain": guard.route(
                "POST", _answering(self._begin_drain), CredentialRole.OPERATOR
            ),
        }
        self._server = HttpServer(settings.host, settings.port, routes, "admin-port", settings.tls)
        self.url = self._server.url

    def close(self) -> None:
        self._server.close()

    def challenge(self) -> str:
        """Return the challenge that a signed request must answer."""
        return self._guard.verifier.challenge()

    def _state(self) -> PoolState:
        """Return the node's figures. Raises TimeoutError or CancelledError when its driver is stuck
        or has ended.
        """
        asked = self._driver.call(lambda node, _: node.state())
        state: PoolState = asked.result(ANSWER_S)
        return state

    def _address(self) -> Answer:
        """Tell where clients reach the node's memory. They prove their credentials there."""
        told = {name: self._about[name] for name in ADDRESS if name in self._about}
        return document(HTTPStatus.OK, told)

    def _stats(self) -> Answer:
        return document(HTTPStatus.OK, {**pool_metrics.document(self._state()), **self._about})

    def _begin_drain(self) -> Answer:
        begin_drain(self._driver)
        return document(HTTPStatus.ACCEPTED, pool_metrics.document(self._state()))


def _answering(act: Callable[[], Answer]) -> Callable[[Request], Answer]:
    """Return a route that answers with `act`, or with an error if the node does not answer."""

    def answer(_: Request) -> Answer:
        try:
            return act()
        except (CancelledError, TimeoutError):
            return error(HTTPStatus.SERVICE_UNAVAILABLE, "the node does not answer")

    return answer


def begin_drain(driver: Driver) -> None:
    """Have the node that `driver` drives accept nothing more. Returns once it does so."""
    driver.call(lambda node, now: node.handle(Drain(), now)).result(ANSWER_S)
