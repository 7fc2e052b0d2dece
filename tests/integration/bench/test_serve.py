"""The client against live API servers and misbehaving servers: times, counts, errors,
connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from mooncake.api.http.client import HttpClient
from mooncake.base import ConfigError, Failure, Unavailable
from mooncake.bench.arrivals import Arrivals, Run
from mooncake.bench.endpoint import Output, Target, ask
from mooncake.bench.metrics import Metrics
from mooncake.bench.samples import Sample
from mooncake.bench.serve import benchmark, first_model
from tests.support.api.server import ScriptedBackend, live_api_server, refusal, says, tiny_tokenizer

QUIET = Run(arrivals=Arrivals(), progress=False)


def target(backend: Any = "openai", **more: Any) -> Target:
    endpoint = "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"
    fields: dict[str, Any] = {"model": "tiny", "headers": {}, "fields": {}, **more}
    return Target(backend=backend, endpoint=endpoint, **fields)


def sample(prompt: Any = "abc", num_output_tokens: int = 16) -> Sample:
    return Sample(prompt=prompt, num_prompt_tokens=3, num_output_tokens=num_output_tokens)


async def against_api_server(
    engine: ScriptedBackend, samples: list[Sample], run: Run = QUIET, **more: Any
) -> tuple[Metrics, list[Output]]:
    async with live_api_server(engine) as url:
        client = HttpClient(url)
        try:
            return await benchmark(client, target(**more), samples, run)
        finally:
            client.close()


@pytest.mark.parametrize("kind", ["openai", "openai-chat", "vllm"])
def test_answers_are_read_whole_and_timed(kind: str) -> None:
    engine = ScriptedBackend(says("hello there"))
    metrics, outputs = asyncio.run(against_api_server(engine, [sample()] * 5, backend=kind))
    num_tokens = len(tiny_tokenizer().encode("hello there<|im_end|>"))
    assert (metrics.num_completed, metrics.num_failed) == (5, 0)
    for output in outputs:
        assert output.text == "hello there"
        assert output.num_output_tokens == num_tokens
        assert 0 < output.ttft_s <= output.latency_s
        assert output.ttft_s + sum(output.itls_s) == pytest.approx(output.latency_s)


def test_prompts_may_be_token_ids() -> None:
    backend = ScriptedBackend(says("x"))
    asyncio.run(against_api_server(backend, [sample([97, 98, 99])]))
    assert backend.requests[0].prompt_tokens.tolist() == [97, 98, 99]


def test_fields_lengths_and_ids_reach_the_server() -> None:
    backend = ScriptedBackend(says("x"))
    more = {"fields": {"temperature": 0.5, "ignore_eos": True}, "request_id_prefix": "run1-"}
    asyncio.run(against_api_server(backend, [sample(num_output_tokens=7)] * 2, **more))
    for request in backend.requests:
        assert request.sampling.max_tokens == 7
        assert request.sampling.temperature == 0.5
        assert request.sampling.ignore_eos
    assert {request.request_id.split("-")[2] for request in backend.requests} == {"0", "1"}


def test_no_more_than_the_limit_run_at_once() -> None:
    hello = says("hello")
    backend = ScriptedBackend(lambda request: [None, *hello(request)])
    most = 0
    submit = backend.submit

    def go_on_by_threes() -> None:
        if backend.num_hanging >= 3:
            backend.resume()

    def counted(*args: Any) -> None:
        nonlocal most
        submit(*args)
        most = max(most, backend.num_running)
        asyncio.get_running_loop().call_soon(go_on_by_threes)

    backend.submit = counted  # type: ignore[method-assign]
    run = Run(arrivals=Arrivals(), progress=False, max_concurrency=3)
    metrics, outputs = asyncio.run(against_api_server(backend, [sample()] * 12, run))
    assert metrics.num_completed == 12
    assert most == 3
    assert max(output.queued_s for output in outputs) > 0


def test_warm_ups_are_sent_and_not_counted() -> None:
    backend = ScriptedBackend(says("x"))
    samples = [sample(f"prompt {number}") for number in range(5)]
    run = Run(arrivals=Arrivals(), progress=False, num_warmups=2, ready_timeout_s=5)
    metrics, outputs = asyncio.run(against_api_server(backend, samples, run))
    assert (metrics.num_completed, len(outputs)) == (3, 3)
    assert len(backend.requests) == 6  # with the one that asks whether the server is there


def test_samples_are_sent_at_their_own_times() -> None:
    samples = [
        Sample(prompt="abc", num_prompt_tokens=3, num_output_tokens=4, at_s=at_s)
        for at_s in (0.0, 0.05, 0.1)
    ]
    run = Run(arrivals=Arrivals(), progress=False, self_timed=True)
    _, outputs = asyncio.run(against_api_server(ScriptedBackend(says("x")), samples, run))
    starts = [output.start_s - outputs[0].start_s for output in outputs]
    assert starts[1] >= 0.045
    assert starts[2] >= 0.095


def test_refusals_are_errors_with_status_and_message() -> None:
    def refuses(request: Any) -> Any:
        return refusal(request, Failure(status=429, error_type="x", message="too busy"))

    metrics, outputs = asyncio.run(against_api_server(ScriptedBackend(refuses), [sample()] * 2))
    assert (metrics.num_completed, metrics.num_failed) == (0, 2)
    assert outputs[0].error.startswith("429")
    assert "too busy" in outputs[0].error


def test_unknown_models_and_missing_prompts_are_told() -> None:
    _, outputs = asyncio.run(
        against_api_server(ScriptedBackend(says("x")), [sample()], model="other")
    )
    assert outputs[0].error.startswith("404")
    with pytest.raises(ConfigError, match="no request is left to measure"):
        asyncio.run(against_api_server(ScriptedBackend(says("x")), []))
    with pytest.raises(ConfigError, match="tokenizer"):
        asyncio.run(
            against_api_server(ScriptedBackend(says("x")), [sample([1, 2])], backend="openai-chat")
        )


def test_first_model_is_the_servers() -> None:
    async def main() -> str:
        async with live_api_server(ScriptedBackend(says("x"))) as url:
            client = HttpClient(url)
            name = await first_model(client, {})
            client.close()
            return name

    assert asyncio.run(main()) == "tiny"


# ---------------------------------------------------------------- servers that misbehave

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


TOKEN = chunk(b'data: {"choices": [{"text": "a"}]}\n\n')
END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def raw_server(*replies: bytes, keep: bool = False) -> AsyncIterator[tuple[str, list[int]]]:
    """Answer the n-th request with the n-th reply, then close unless `keep`; count connections."""
    left = list(replies)
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while left:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                writer.write(left.pop(0))
                if not keep:
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", connections
    finally:
        server.close()


async def asked(count: int, *replies: bytes, keep: bool = False) -> tuple[list[Output], int]:
    async with raw_server(*replies, keep=keep) as (url, connections):
        client = HttpClient(url)
        # The server's close may come before the next request or after it: that must not matter.
        outputs = [await ask(client, target(), sample(), number) for number in range(count)]
        client.close()
        return outputs, len(connections)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"", "closed the connection"),
        (HEAD + TOKEN, "closed the connection"),
        (b"SSH-2.0\r\n\r\n", "not an HTTP answer"),
        (HEAD + TOKEN + b"0\r\n\r\n", "ended before"),
        (HEAD + END, "no token"),
        (HEAD + chunk(b"data: {broken\n\n") + END, "could not be read"),
        (HEAD + TOKEN + chunk(b'data: {"error": {"message": "worker lost"}}\n\n') + END, "lost"),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 4\r\n\r\nnope", "502 Bad Gateway: nope"),
    ],
)
def test_broken_answers_are_errors_that_say_what_came(reply: bytes, error: str) -> None:
    (output,), _ = asyncio.run(asked(1, reply))
    assert not output.success
    assert error in output.error


def test_connection_is_kept_between_requests() -> None:
    outputs, connections = asyncio.run(asked(3, *[HEAD + TOKEN + END] * 3, keep=True))
    assert all(output.success for output in outputs)
    assert connections == 1


def test_connection_that_the_server_closed_meanwhile_is_replaced() -> None:
    outputs, connections = asyncio.run(asked(3, *[HEAD + TOKEN + END] * 3))
    assert [output.error for output in outputs] == ["", "", ""]
    assert connections == 3


def test_tokens_are_counted_by_events_where_the_server_does_not_say() -> None:
    (output,), _ = asyncio.run(asked(1, HEAD + TOKEN * 3 + END))
    assert (output.num_output_tokens, output.text, len(output.itls_s)) == (3, "aaa", 2)


def test_absent_servers_are_told() -> None:
    async def main() -> Output:
        async with raw_server() as (url, _):
            pass
        return await ask(HttpClient(url), target(), sample(), 0)

    assert "Connect call failed" in asyncio.run(main()).error

    async def names() -> str:
        async with raw_server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as (url, _):
            return await first_model(HttpClient(url), {})

    with pytest.raises(Unavailable, match="`model`"):
        asyncio.run(names())


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:notaport"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="base-url"):
        HttpClient(url)
