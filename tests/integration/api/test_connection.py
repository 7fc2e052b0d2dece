"""Connections that are slow, greedy or silent, over real sockets: each ends, and ends nothing else.

Time-outs are short so that they pass while a test waits, and long where a client must be in time;
that they pass is all that is tested.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from mooncake.api.config import ApiConfig
from mooncake.api.http import connection, server
from mooncake.api.http.connection import UVICORN, check_uvicorn
from mooncake.api.http.event_loop import run_in_loop
from mooncake.api.http.server import bind
from mooncake.base import ConfigError
from mooncake.base.tls_files import TlsFiles
from tests.support.api.server import ScriptedBackend, live_api_server, says
from tests.support.certificates import Host, make_host
from tests.support.clock import leap, run_leaping
from tests.support.waiting import LONG_S

ASK = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)


RUNS = pytest.mark.parametrize("run", [asyncio.run, run_in_loop], ids=["asyncio", "uvloop"])
Run = Callable[[Coroutine[Any, Any, None]], None]


def config(**limits: Any) -> ApiConfig:
    return ApiConfig(port=0, drain_s=0.2, **limits)


@asynccontextmanager
async def connected(
    url: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(LONG_S):
            yield reader, writer
    finally:
        writer.close()


async def refusal(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    """Return status and error of an answer after which the server closes."""
    answer = await reader.read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    error: dict[str, Any] = json.loads(body)["error"]
    return int(head.split()[1]), error


def test_headers_that_do_not_come_to_an_end_get_408() -> None:
    async def main() -> None:
        async with (
            live_api_server(ScriptedBackend(says("x")), config=config(header_timeout_s=2)) as url,
            connected(url) as (reader, writer),
        ):
            writer.write(b"GET /health HTTP/1.1\r\nHo")
            status, error = await refusal(reader)
            assert (status, error["code"], error["type"]) == (408, 408, "RequestTimeoutError")
            assert "2 s" in error["message"]

    asyncio.run(main())


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
def test_a_connection_opened_for_nothing_is_closed(sent: bytes) -> None:
    async def main() -> None:
        async with (
            live_api_server(ScriptedBackend(says("x")), config=config(header_timeout_s=0.2)) as url,
            connected(url) as (reader, writer),
        ):
            writer.write(sent)
            assert await reader.read() == b""

    asyncio.run(main())


@pytest.mark.parametrize(
    ("head", "limits"),
    [
        (b"".join(b"X-%d: y\r\n" % number for number in range(20)), {"max_headers": 16}),
        (b"X: " + b"y" * 3000 + b"\r\n", {"max_header_bytes": 2048}),
        (b"X: " + b"y" * 3000, {"max_header_bytes": 2048}),
    ],
    ids=["many", "large", "without end"],
)
def test_headers_over_the_limits_get_431(head: bytes, limits: dict[str, int]) -> None:
    async def main() -> None:
        async with live_api_server(ScriptedBackend(says("x")), config=config(**limits)) as url:
            async with connected(url) as (reader, writer):
                writer.write(b"GET /health HTTP/1.1\r\n" + head)
                if head.endswith(b"\r\n"):
                    writer.write(b"\r\n")
                status, error = await refusal(reader)
                assert (status, error["type"]) == (431, "RequestHeaderFieldsTooLargeError")
            async with httpx.AsyncClient(timeout=LONG_S) as client:
                headers = {f"X-{number}": "y" for number in range(8)}
                assert (await client.get(f"{url}/health", headers=headers)).is_success

    asyncio.run(main())


CHUNKS = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{ \r\n"


@pytest.mark.parametrize("rest", [b"0\r\nX: " + b"y" * 3000, b"1;" + b"y" * 3000], ids=str)
def test_what_comes_with_a_body_and_is_none_gets_431(rest: bytes) -> None:
    async def main() -> None:
        limited = config(max_header_bytes=2048)
        backend = ScriptedBackend(says("x"))
        async with (
            live_api_server(backend, config=limited) as url,
            connected(url) as (reader, writer),
        ):
            writer.write(CHUNKS)
            await writer.drain()
            for at in range(0, len(rest), 500):
                writer.write(rest[at : at + 500])
                await asyncio.sleep(0.01)
            status, error = await refusal(reader)
            assert (status, error["type"]) == (431, "RequestHeaderFieldsTooLargeError")
            assert backend.requests == []

    asyncio.run(main())


def test_a_field_behind_a_body_is_no_mistake() -> None:
    async def main() -> None:
        async with (
            live_api_server(ScriptedBackend(says("x"))) as url,
            connected(url) as (reader, writer),
        ):
            body = json.dumps(ASK).encode()
            whole = b"%x\r\n%s\r\n0\r\nX: y\r\n\r\n" % (len(body), body)
            writer.write(HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + whole)
            assert (await reader.read()).startswith(b"HTTP/1.1 200")

    asyncio.run(main())


def test_requests_that_wait_for_answers_before_them_are_few() -> None:
    async def main() -> None:
        async with (
            live_api_server(ScriptedBackend(says("x"))) as url,
            connected(url) as (reader, writer),
        ):
            writer.write(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
            status, error = await refusal(reader)
            assert status == 400
            assert "at most 16 requests wait" in error["message"]
        async with (
            live_api_server(ScriptedBackend(says("x"))) as url,
            connected(url) as (reader, writer),
        ):
            ping = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n"
            writer.write((ping + b"\r\n") * 15 + ping + b"Connection: close\r\n\r\n")
            assert (await reader.read()).count(b"HTTP/1.1 200") == 16

    asyncio.run(main())


def test_what_is_no_http_gets_400_in_our_shape() -> None:
    async def main() -> None:
        async with (
            live_api_server(ScriptedBackend(says("x"))) as url,
            connected(url) as (reader, writer),
        ):
            writer.write(b"HELLO\x00 WORLD\r\n\r\n")
            status, error = await refusal(reader)
            assert (status, error["type"]) == (400, "BadRequestError")

    asyncio.run(main())


def test_a_body_that_stops_coming_gets_408_and_starts_nothing() -> None:
    async def main() -> None:
        backend = ScriptedBackend(says("x"))
        limits = config(body_timeout_s=0.2, min_body_bytes_per_s=1_000_000)
        async with (
            live_api_server(backend, config=limits) as url,
            connected(url) as (reader, writer),
        ):
            writer.write(HEAD + b'Content-Length: 100\r\n\r\n{"mess')
            status, error = await refusal(reader)
            assert (status, error["type"]) == (408, "RequestTimeoutError")
            assert "6 bytes" in error["message"]
        assert backend.requests == []

    asyncio.run(main())


def test_a_slow_body_that_keeps_the_least_rate_is_taken() -> None:
    async def main() -> None:
        backend = ScriptedBackend(says("hello"))
        limits = config(body_timeout_s=0.2, min_body_bytes_per_s=1)
        async with (
            live_api_server(backend, config=limits) as url,
            connected(url) as (reader, writer),
        ):
            body = json.dumps(ASK).encode()
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body[:-1])
            await writer.drain()
            loop = asyncio.get_running_loop()
            passed = asyncio.Event()
            loop.call_later(0.3, passed.set)  # longer than the time-out: bytes have bought time
            await passed.wait()
            writer.write(body[-1:])
            assert b"200 OK" in await reader.readline()

    asyncio.run(main())


def test_an_answer_may_take_longer_than_any_time_out_of_a_request() -> None:
    async def main() -> None:
        backend = ScriptedBackend(lambda request: [None, *says("hello")(request)])
        limits = config(body_timeout_s=60, write_timeout_s=60)
        async with (
            live_api_server(backend, config=limits) as url,
            httpx.AsyncClient(timeout=LONG_S) as client,
        ):
            asked = asyncio.create_task(client.post(url + CHAT, json=ASK, timeout=LONG_S))
            while not backend.requests:
                await asyncio.sleep(0)
            for _ in range(3):
                await leap(61)
            assert not asked.done()
            backend.resume()
            assert (await asked).status_code == 200

    run_leaping(main())


def test_a_connection_is_used_again_after_it_was_idle() -> None:
    async def main() -> None:
        assert ApiConfig().keep_alive_s > 60  # proxies' idle time
        async with (
            live_api_server(ScriptedBackend(says("x")), config=config(header_timeout_s=60)) as url,
            connected(url) as (reader, writer),
        ):
            ping = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
            writer.write(ping)
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            idle = asyncio.create_task(reader.read(1))
            for seconds in (61, 1):  # longer than headers may take
                await leap(seconds)
            assert not idle.done()
            idle.cancel()
            await asyncio.wait({idle})
            writer.write(ping)
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")

    run_leaping(main())


def test_a_client_that_reads_nothing_is_cut_off() -> None:
    class Failing(ScriptedBackend):
        num_asked = 0

        def status(self) -> dict[str, object]:
            self.num_asked += 1
            return {"ready": True, "noise": "x" * 1_000_000}

    async def main() -> None:
        backend = Failing(says("x"))
        limits = config(write_timeout_s=2, feed_s=0.0, max_listeners=1)
        async with live_api_server(backend, config=limits) as url:
            host, port = url.removeprefix("http://").split(":")
            with socket.socket() as deaf:
                deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                deaf.connect((host, int(port)))
                deaf.sendall(b"GET /v1/cluster/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
                async with httpx.AsyncClient(timeout=LONG_S) as client, asyncio.timeout(LONG_S):
                    while not backend.num_asked:
                        await asyncio.sleep(0)
                    while await is_full(client, url):  # the only place, until it is taken back
                        await asyncio.sleep(0.01)

    async def is_full(client: httpx.AsyncClient, url: str) -> bool:
        async with client.stream("GET", f"{url}/v1/cluster/events") as reply:
            return reply.status_code == 429

    asyncio.run(main())


@pytest.fixture
def certificate(tls_host: Host) -> TlsFiles:
    return TlsFiles(certfile=tls_host.cert, keyfile=tls_host.key)


@RUNS
def test_https_serves_and_streams(certificate: TlsFiles, tls_host: Host, run: Run) -> None:
    async def main() -> None:
        trust = tls_host.trusting()
        async with (
            live_api_server(ScriptedBackend(says("hello")), config=config(tls=certificate)) as url,
            httpx.AsyncClient(verify=trust, timeout=LONG_S) as client,
        ):
            secure = url.replace("http:", "https:")
            reply = await client.post(secure + CHAT, json=ASK | {"stream": True})
            assert reply.text.endswith("data: [DONE]\n\n")
            with pytest.raises(httpx.HTTPError):
                await client.get(f"{url}/health")

    run(main())


@RUNS
def test_connections_that_do_not_shake_hands_keep_no_client_out(
    certificate: TlsFiles, tls_host: Host, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(server, "MAX_SHAKING", 2)

    async def main() -> None:
        async with (
            live_api_server(ScriptedBackend(says("hello")), config=config(tls=certificate)) as url,
            contextlib.AsyncExitStack() as opened,
        ):
            silent = [await opened.enter_async_context(connected(url)) for _ in range(4)]
            for reader, _ in silent[:2]:
                async with asyncio.timeout(LONG_S / 2):
                    assert await reader.read() == b"", "the oldest give way"
            async with httpx.AsyncClient(verify=tls_host.trusting(), timeout=LONG_S) as client:
                secure = url.replace("http:", "https:")
                assert (await client.get(f"{secure}/ping")).status_code == 200

    run(main())


@RUNS
def test_a_handshake_has_as_long_as_the_headers_of_a_request(
    certificate: TlsFiles, run: Run
) -> None:
    async def main() -> None:
        limits = config(tls=certificate, header_timeout_s=0.2)
        async with (
            live_api_server(ScriptedBackend(says("x")), config=limits) as url,
            connected(url) as (reader, _),
        ):
            async with asyncio.timeout(LONG_S / 2):
                assert await reader.read() == b""

    run(main())


def test_a_certificate_put_in_the_place_of_the_old_one_is_shown_to_who_comes_next(
    tls_host: Host,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(server, "RENEWAL_S", 0.05)
    other = make_host(tmp_path)
    own = TlsFiles(certfile=str(tmp_path / "cert.pem"), keyfile=str(tmp_path / "key.pem"))

    def place(certificate: bytes, key: bytes) -> None:
        for path, content in ((own.certfile, certificate), (own.keyfile, key)):
            draft = tmp_path / "draft"
            draft.write_bytes(content)
            draft.replace(str(path))

    def files(host: Host) -> tuple[bytes, bytes]:
        return Path(host.cert).read_bytes(), Path(host.key).read_bytes()

    place(*files(tls_host))

    async def main() -> None:
        async with live_api_server(ScriptedBackend(says("x")), config=config(tls=own)) as plain:
            url = plain.replace("http:", "https:")
            old = httpx.AsyncClient(verify=tls_host.trusting(), timeout=LONG_S)
            async with old, asyncio.timeout(LONG_S):
                assert (await old.get(url + "/ping")).status_code == 200
                for wrong in (b"no certificate", files(other)[0]):  # the other's: not of this key
                    caplog.clear()
                    place(wrong, files(tls_host)[1])
                    while "the new certificate is not used" not in caplog.text:
                        await asyncio.sleep(0.01)
                    async with httpx.AsyncClient(
                        verify=tls_host.trusting(), timeout=LONG_S
                    ) as client:
                        assert (await client.get(url + "/ping")).status_code == 200
                place(*files(other))
                while True:
                    try:
                        async with httpx.AsyncClient(
                            verify=other.trusting(), timeout=LONG_S
                        ) as client:
                            assert (await client.get(url + "/ping")).status_code == 200
                            break
                    except httpx.ConnectError:
                        await asyncio.sleep(0.05)
                assert (await old.get(url + "/ping")).status_code == 200, "its connection goes on"

    asyncio.run(main())


def test_a_client_certificate_can_be_asked_for(tls_host: Host) -> None:
    async def main() -> None:
        tls = TlsFiles(
            certfile=tls_host.cert, keyfile=tls_host.key, ca_certs=tls_host.ca, cert_reqs=2
        )
        async with live_api_server(ScriptedBackend(says("hello")), config=config(tls=tls)) as url:
            secure = url.replace("http:", "https:")
            async with httpx.AsyncClient(verify=tls_host.trusting(), timeout=LONG_S) as client:
                with pytest.raises(httpx.HTTPError):
                    await client.get(f"{secure}/health")
            known = tls_host.trusting(proven=True)
            async with httpx.AsyncClient(verify=known, timeout=LONG_S) as client:
                assert (await client.get(f"{secure}/health")).status_code == 200

    asyncio.run(main())


def test_wrong_files_for_tls_are_an_error_at_the_start(
    certificate: TlsFiles, tmp_path: Path
) -> None:
    (tmp_path / "bad.pem").write_text("not a certificate")
    for tls in (
        TlsFiles(certfile=str(tmp_path / "none.pem")),
        TlsFiles(certfile=str(tmp_path / "bad.pem")),
        TlsFiles(certfile=certificate.certfile),
        TlsFiles(
            certfile=certificate.certfile,
            keyfile=certificate.keyfile,
            ca_certs=str(tmp_path / "bad.pem"),
        ),
    ):
        with pytest.raises(ConfigError, match="TLS cannot be set up"):
            bind(config(tls=tls))


def test_the_pinned_uvicorn_is_the_one_that_is_extended() -> None:
    pins = Path(__file__).resolve().parents[3] / "constraints.txt"
    assert f"uvicorn=={UVICORN}" in pins.read_text().splitlines()

    class Later(asyncio.Protocol):
        def __init__(self) -> None:
            self.transport = self.flow = self.cycle = self.headers = None

    with pytest.raises(ConfigError, match=f"has no loop, on_body, .*uvicorn=={UVICORN}"):
        check_uvicorn(Later)


def ask(key: bytes) -> bytes:
    return b"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer " + key + b"\r\n\r\n"


async def answered(reader: asyncio.StreamReader) -> bytes:
    """Read one whole answer and return its head."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split()[0])
    await reader.readexactly(length)
    return head


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /v1/models HTTP/1.1\r\nho",
        HEAD + b"content-length: 9999\r\nauthorization: Bearer guess\r\n\r\n{",
    ],
    ids=["a head", "a body that is refused"],
)
def test_requests_that_are_begun_and_never_sent_keep_no_client_out(begun: bytes) -> None:
    """Nothing is computed for them, so they take none of the places that a key has."""

    async def main() -> None:
        limits = config(max_connections=4, api_keys=("sesame",))
        async with (
            live_api_server(ScriptedBackend(says("hello")), config=limits) as url,
            contextlib.AsyncExitStack() as opened,
        ):
            flood = [await opened.enter_async_context(connected(url)) for _ in range(4)]
            for reader, writer in flood:
                writer.write(ask(b"sesame"))
                assert b"200 OK" in await answered(reader)
                writer.write(begun)
                if b"guess" in begun:
                    assert b"401" in await answered(reader)
            async with connected(url) as (late, to_late):
                to_late.write(ask(b"sesame"))
                assert b"200 OK" in await answered(late)

    asyncio.run(main())


def test_a_flood_of_strangers_is_not_looked_at_again_for_each_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[object] = []
    promote = connection._LimitedProtocol.promote
    monkeypatch.setattr(
        connection._LimitedProtocol, "promote", lambda self: looks.append(self) or promote(self)
    )

    async def main() -> None:
        limits = config(max_connections=20, api_keys=("sesame",))
        async with (
            live_api_server(ScriptedBackend(says("hello")), config=limits) as url,
            contextlib.AsyncExitStack() as opened,
        ):
            flood = [await opened.enter_async_context(connected(url)) for _ in range(40)]
            for reader, _ in flood[:20]:
                assert await reader.read() == b""

    asyncio.run(main())
    assert len(looks) <= 40


def test_there_are_no_more_connections_than_descriptors_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shells and units often give a process 1,024: silent connections would take them all."""
    raised: list[tuple[int, int]] = []
    limits, hard = config(api_keys=("sesame",)), 6
    monkeypatch.setattr(server.resource, "getrlimit", lambda _: (4, hard))
    monkeypatch.setattr(server.resource, "setrlimit", lambda _, both: raised.append(both))

    async def main() -> None:
        async with (
            live_api_server(ScriptedBackend(says("hello")), config=limits) as url,
            contextlib.AsyncExitStack() as opened,
        ):
            flood = [await opened.enter_async_context(connected(url)) for _ in range(4)]
            async with asyncio.timeout(LONG_S / 2):
                assert await flood[0][0].read() == b""
            async with connected(url) as (late, to_late):
                to_late.write(ask(b"sesame"))
                assert b"200 OK" in await answered(late)

    asyncio.run(main())
    assert raised == [(hard, hard)]


def test_the_limit_on_descriptors_is_raised_as_far_as_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits, raised = config(max_connections=100), list[tuple[int, int]]()
    wanted = 100 + server.OTHER_FILES
    monkeypatch.setattr(server.resource, "setrlimit", lambda _, both: raised.append(both))
    for has, may in ((1024, 1 << 20), (1024, -1), (wanted, wanted), (-1, -1)):
        monkeypatch.setattr(server.resource, "getrlimit", lambda _, both=(has, may): both)
        assert server.fitted(limits) is limits
    assert raised == [(wanted, 1 << 20), (wanted, -1)]


def test_of_too_many_connections_the_oldest_that_proved_nothing_is_closed() -> None:
    """A flood of strangers takes the place of no client that has shown a key."""

    async def main() -> None:
        limits = config(max_connections=4, api_keys=("sesame",))
        async with (
            live_api_server(ScriptedBackend(says("hello")), config=limits) as url,
            connected(url) as (client, to_server),
            connected(url) as (stranger, from_stranger),
        ):
            to_server.write(ask(b"sesame"))
            assert b"200 OK" in await client.readline()
            from_stranger.write(ask(b"guess"))
            assert b"401" in await stranger.readline()
            async with contextlib.AsyncExitStack() as opened:
                flood = [await opened.enter_async_context(connected(url)) for _ in range(4)]
                await stranger.read()
                assert await flood[0][0].read() == b""
                async with connected(url) as (late, to_late):
                    to_late.write(ask(b"sesame"))
                    assert b"200 OK" in await late.readline()
                to_server.write(ask(b"sesame"))
                await answered(client)
                assert b"200 OK" in await client.readline()

    asyncio.run(main())
