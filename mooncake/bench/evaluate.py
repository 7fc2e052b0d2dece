"""`mooncake eval`: sends generated tasks to an OpenAI endpoint and counts the right answers.

Decoding is greedy, with one answer to each sample. This module owns the run; each task decides
which answers are right.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mooncake.api.http.client import HttpClient, RequestFailed
from mooncake.bench.tool_calls import ToolCalls
from mooncake.tasks.sample import Message, Sample

ENDPOINT = "/v1/chat/completions"
MAX_WRONG_KEPT = 5


@dataclass(frozen=True)
class Endpoint:
    """The endpoint, and the fields that every request shares."""

    client: HttpClient
    headers: Mapping[str, str]
    model: str
    max_tokens: int


@dataclass
class Score:
    task: str
    num_samples: int
    num_right: int = 0
    failures: list[str] = field(default_factory=list)
    """Why requests got no answer. These samples count as wrong."""
    wrong: list[dict[str, Any]] = field(default_factory=list)
    """The first few wrong answers: the question, the right answer and the given one."""
    tool_calls: ToolCalls = field(default_factory=ToolCalls)
    """The calls in those requests with tools that were answered."""

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num_samples

    @property
    def standard_error(self) -> float:
        """The standard error of the accuracy for a sample of this size."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.num_samples)

    def document(self) -> dict[str, Any]:
        return {
            "samples": self.num_samples, "accuracy": self.accuracy,
            "standard_error": self.standard_error, "failed": len(self.failures),
            "failures": self.failures[:MAX_WRONG_KEPT], "wrong": self.wrong,
            **({"tool_calls": self.tool_calls.document()} if self.tool_calls.num_answers else {}),
        }  # fmt: skip


def body_of(sample: Sample, endpoint: Endpoint) -> bytes:
    """Return the JSON body that asks for a sample's answer."""
    body: dict[str, Any] = {
        "model": endpoint.model, "messages": [_sent(message) for message in sample.messages],
        "temperature": 0, "max_tokens": endpoint.max_tokens,
    }  # fmt: skip
    if sample.tools:
        body["tools"] = sample.tools
    return msgspec.json.encode(body)


def _sent(message: Message) -> Message:
    """Return a message as clients send it back: an answer without its reasoning."""
    return {key: value for key, value in message.items() if key != "reasoning"}


async def evaluate(
    endpoint: Endpoint,
    samples: Mapping[str, Sequence[Sample]],
    concurrency: int,
    advance: Callable[[], None] = lambda: None,
) -> list[Score]:
    """Ask for all samples, by task, and return the scores in the tasks' order.

    At most `concurrency` requests are open at once; `advance` is called after each.
    """
    scores = {task: Score(task, len(chosen)) for task, chosen in samples.items()}
    waiting = [(task, sample) for task, chosen in samples.items() for sample in chosen]
    waiting.reverse()

    async def work() -> None:
        while waiting:
            task, sample = waiting.pop()
            try:
                _judge(scores[task], sample, await _ask(endpoint, sample))
            except RequestFailed as error:
                scores[task].failures.append(str(error))
            except (LookupError, TypeError) as error:
                scores[task].failures.append(f"calls without a name or arguments: {error!r}")
            advance()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(waiting))):
            group.create_task(work())
    return list(scores.values())


def _judge(score: Score, sample: Sample, choice: Mapping[str, Any]) -> None:
    answer = choice["message"]
    if sample.tools:
        wanted, given = bool(sample.answer.get("tool_calls")), answer.get("tool_calls") or ()
        score.tool_calls.add(wanted, choice.get("finish_reason") or "", given, sample.tools)
    if sample.accepts(answer):
        score.num_right += 1
    elif len(score.wrong) < MAX_WRONG_KEPT:
        asked = str(sample.messages[-1]["content"])[-200:]
        score.wrong.append({"asked": asked, "wanted": sample.answer, "given": answer})


async def _ask(endpoint: Endpoint, sample: Sample) -> Mapping[str, Any]:
    """Return the choice in the endpoint's answer: a message, and why it finished.

    Raises:
        RequestFailed: the endpoint did not answer, or its answer holds no message.
    """
    body = bytearray()
    answer = await endpoint.client.request(
        "POST",
        ENDPOINT,
        {"Content-Type": "application/json", **endpoint.headers},
        body_of(sample, endpoint),
        lambda data, _: body.extend(data),
    )
    if answer.status != 200:
        raise RequestFailed(f"{answer.status} {answer.reason}: {bytes(body[:500]).decode()}")
    try:
        [choice, *_] = msgspec.json.decode(bytes(body))["choices"]
        return {**choice, "message": msgspec.convert(choice["message"], dict[str, Any])}
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
        raise RequestFailed(f"no message in the answer: {bytes(body[:200])!r}") from error
