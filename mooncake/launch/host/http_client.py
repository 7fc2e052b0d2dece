"""A small HTTP client for `mooncake status`, `chat` and `pool`: JSON and server-sent events.

Standard library only, so that the commands work where the server's packages are not installed.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Iterator
from typing import Any

from mooncake.base import (
    Forbidden,
    MooncakeError,
    Unauthorized,
    Unavailable,
    Unreachable,
)
from mooncake.base.urls import server_url
from mooncake.launch.host.secrets.credentials import SCHEME

TIMEOUT_S = 600.0
REFUSALS: dict[int, type[MooncakeError]] = {401: Unauthorized, 403: Forbidden, 503: Unavailable}
"""HTTP statuses to which callers react differently; others are plain errors."""


class Client:
    """Calls one server; each call uses a new connection."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        sign: Callable[[str, str, str], str] | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Create a client.

        `sign` returns the `Authorization` header for a method, a path and the server's challenge;
        it replaces a key. `tls` checks the server's certificate; None: as this machine does. A
        server that sends nothing for `timeout_s` counts as unreachable.
        """
        self._timeout_s = timeout_s
        server = server_url("url", url if "//" in url else f"http://{url}")
        self._url = f"{'https' if server.is_tls else 'http'}://{server.netloc}"
        self._tls = (tls or ssl.create_default_context()) if server.is_tls else None
        self._host, self._port, self._prefix = server.host, server.port, server.prefix
        self._sign = sign
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> Any:
        """Return the JSON document at `path`.

        Raises:
            Unreachable: no server answers.
            Unauthorized, Forbidden: the server refuses the key or the credential.
            Unavailable: the server answered that it cannot do this now.
            MooncakeError: the server answered with another error, or not with JSON.
        """
        connection, response = self._ask("GET", path, None)
        try:
            return json.loads(response.read())
        except ValueError as error:
            raise MooncakeError(f"{self._url}{path} did not answer with JSON") from error
        finally:
            connection.close()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Post `body` and yield the server-sent events of the answer as they come.

        Raises:
            MooncakeError: the server answered with an error, or sent one in the stream.
        """
        connection, response = self._ask("POST", path, json.dumps(body))
        try:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise MooncakeError(_message(event))
                yield event
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unreachable(f"{self._url}: the answer broke off ({error})") from error
        finally:
            connection.close()

    def _ask(
        self, method: str, path: str, body: str | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        if self._tls is not None:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout_s, context=self._tls
            )
        try:
            connection.request(method, self._prefix + path, body, self._headers)
            response = connection.getresponse()
            scheme, _, challenge = (response.getheader("WWW-Authenticate") or "").partition(" ")
            if self._sign is not None and response.status == 401 and scheme == SCHEME:
                response.read(65536)
                signed = {"Authorization": self._sign(method, path, challenge)}
                connection.request(method, self._prefix + path, body, self._headers | signed)
                response = connection.getresponse()
            if response.status >= 400:
                raise _refusal(response)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Unreachable(
                f"no server answers at {self._url} ({error}); is `mooncake serve` running?"
            ) from error
        except MooncakeError:
            connection.close()
            raise
        return connection, response


def _refusal(response: http.client.HTTPResponse) -> MooncakeError:
    raw = response.read(65536)
    try:
        text = _message(json.loads(raw))
    except ValueError:
        text = raw.decode(errors="replace").strip() or response.reason
    kind = REFUSALS.get(response.status, MooncakeError)
    return kind(f"the server answered {response.status}: {text}")


def _message(document: Any) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(error or document)
