"""Decides who may call a route of a worker's HTTP server: holders of a token, and holders of a
credential who sign the request.

Owns the verifier of signatures. The caller decides what a route does.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus

from mooncake.base.rights import CredentialRole
from mooncake.identity import Trust
from mooncake.launch.host.credentials import SCHEME, RequestVerifier
from mooncake.launch.host.http_server import Answer, Request, Route, error
from mooncake.telemetry.audit import OPERATOR_ROUTE, audit


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
        """Return the answer to a caller that may not ask this; None: it may."""
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
