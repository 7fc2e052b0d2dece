"""One request to an OpenAI endpoint: its body, and the times of the events in its stream.

Owns nothing that outlives a request.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Literal

import msgspec

from mooncake.api.http.client import HttpClient, RequestFailed
from mooncake.api.http.client_wire import EventSplitter
from mooncake.base import ConfigError
from mooncake.bench.samples import Sample

BackendName = Literal["openai", "openai-chat", "vllm"]
DEFAULT_ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
MAX_ERROR_BYTES = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The endpoint under test and the fields that all requests share."""

    backend: BackendName
    endpoint: str
    model: str
    headers: dict[str, str]
    fields: dict[str, Any]
    """More fields of every body (sampling, ignore_eos, …)."""
    request_id_prefix: str = ""


@dataclasses.dataclass(kw_only=True)
class Output:
    """The measured answer of one request; all times in seconds."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens of the prompt that came from a cache; 0 where the server does not tell."""
    start_s: float = 0.0
    """When the request was sent, by the clock of `time.perf_counter`."""
    queued_s: float = 0.0
    """How long the request waited in the client for a free place."""
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itls_s: list[float] = dataclasses.field(default_factory=list)
    """Gaps between events with new text; several tokens may come in one event."""
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    """The token ids; only where the target's fields ask for `return_token_ids`."""
    error: str = ""

    @property
    def success(self) -> bool:
        return not self.error

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; 0 where there is only one."""
        if self.num_output_tokens < 2:
            return 0.0
        return (self.latency_s - self.ttft_s) / (self.num_output_tokens - 1)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


_DECODER = msgspec.json.Decoder(_Event)


def body_of(target: Target, sample: Sample) -> bytes:
    """Return the JSON body that asks for `sample`.

    Raises:
        ConfigError: the prompt does not suit the backend.
    """
    common = {"model": target.model, "stream": True, "stream_options": {"include_usage": True}}
    if target.backend == "openai-chat":
        messages: Any = sample.prompt
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        elif not messages or not isinstance(messages[0], dict):
            raise ConfigError("backend: openai-chat sends text; add `tokenizer` DIR")
        body = {"messages": messages, "max_completion_tokens": sample.num_output_tokens}
    else:
        body = {"prompt": sample.prompt, "max_tokens": sample.num_output_tokens}
    return msgspec.json.encode({**common, **body, **target.fields})


class _Reader:
    """Records the time of each token from the events of one stream."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._events = EventSplitter()
        self._texts: list[str] = []
        self._last_s = 0.0
        self._done = False
        self.raw = b""
        """The beginning of the body. It holds the error when the answer is no stream."""

    def take(self, body: bytes, now: float) -> None:
        """Parse body bytes received at `now` (seconds)."""
        if len(self.raw) < MAX_ERROR_BYTES:
            self.raw += body[:MAX_ERROR_BYTES]
        for data in self._events.feed(body):
            if data == b"[DONE]":
                self._done = True
            else:
                self._take_event(data, now)

    def _take_event(self, data: bytes, now: float) -> None:
        output = self._output
        try:
            event = _DECODER.decode(data)
        except msgspec.MsgspecError as error:
            output.error = f"an event could not be read ({error}): {data[:200]!r}"
            return
        if event.error is not None:
            output.error = bytes(event.error).decode(errors="replace")
        if event.choices:
            if not self._last_s:
                output.ttft_s = now - output.start_s
            else:
                output.itls_s.append(now - self._last_s)
            self._last_s = now
            self._texts.append(_text(event.choices[0]))
            output.token_ids += event.choices[0].token_ids or ()
        if event.usage is not None and event.usage.completion_tokens is not None:
            output.num_output_tokens = event.usage.completion_tokens
        if event.usage is not None and event.usage.prompt_tokens_details is not None:
            output.num_cached_tokens = event.usage.prompt_tokens_details.cached_tokens or 0

    def end(self) -> None:
        """Fill in the fields that are known only when the answer is complete."""
        output = self._output
        output.text = "".join(self._texts)
        output.latency_s = (self._last_s or time.perf_counter()) - output.start_s
        if output.error:
            return
        if not self._last_s:
            output.error = f"no token came: {self.raw[:200]!r}"
        elif not self._done and output.num_output_tokens == 0:
            output.error = "the stream ended before the answer did"
        elif output.num_output_tokens == 0:
            output.num_output_tokens = len(self._texts)


def _text(choice: _Choice) -> str:
    if choice.delta is None:
        return choice.text or ""
    delta = choice.delta
    return (delta.reasoning or delta.reasoning_content or "") + (delta.content or "")


async def ask(client: HttpClient, target: Target, sample: Sample, number: int) -> Output:
    """Send `sample` as request `number` and return its measured answer; failures are in `error`."""
    output = Output(num_prompt_tokens=sample.num_prompt_tokens)
    reader = _Reader(output)
    headers = {"Content-Type": "application/json", **target.headers}
    if target.request_id_prefix:
        headers = {**headers, "X-Request-Id": f"{target.request_id_prefix}{number}"}
    body = body_of(target, sample)
    output.start_s = time.perf_counter()
    try:
        answer = await client.request("POST", target.endpoint, headers, body, reader.take)
    except RequestFailed as error:
        output.error = str(error)
        output.latency_s = time.perf_counter() - output.start_s
        return output
    if answer.status != 200:
        output.error = f"{answer.status} {answer.reason}: {reader.raw.decode(errors='replace')}"
        return output
    reader.end()
    return output
